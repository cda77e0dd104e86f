"""What a subscribed Redis connection sends, however it is cut into packets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import InvalidResponse, ResponseError

from pgtruth_transport.signals.listening import Event
from pgtruth_transport.signals.redis import RedisLink

STREAM = (
    b"+PONG\r\n"
    b"*3\r\n$9\r\nsubscribe\r\n$2\r\nch\r\n:1\r\n"
    b"*3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$6\r\na\r\n*$b\r\n"
    b"*3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$0\r\n\r\n"
    b"*3\r\n$11\r\nunsubscribe\r\n$-1\r\n:0\r\n"
    b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"
)
EVENTS = [Event("", None), Event("ch", None), Event("ch", b"a\r\n*$b"), Event("ch", b""), Event("", None)]


@pytest.fixture
def ends() -> Iterator[tuple[RedisLink, socket.socket]]:
    """A link, and the server's end of its socket."""
    mine, theirs = socket.socketpair()
    connection: Any = SimpleNamespace(_sock=mine, connect=lambda: None, disconnect=mine.close)
    link = RedisLink(connection)
    yield link, theirs
    link.close()
    theirs.close()


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_packets_of_any_size(ends: tuple[RedisLink, socket.socket], size: int) -> None:
    link, server = ends
    heard = []
    for start in range(0, len(STREAM), size):
        server.sendall(STREAM[start : start + size])
        heard += link.read()
    assert heard == EVENTS
    assert list(link.read()) == []


def test_more_than_one_read_takes(ends: tuple[RedisLink, socket.socket]) -> None:
    link, server = ends
    one = b"*3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$50000\r\n%b\r\n" % (b"x" * 50_000)
    server.sendall(one * 3)
    assert [len(event.payload or b"") for event in link.read()] == [50_000] * 3


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"-ERR max number of clients reached\r\n", ResponseError),
        (b"*HTTP/1.1 400 Bad Request\r\n", InvalidResponse),
        (b"*2\r\n$x\r\n", InvalidResponse),
    ],
)
def test_what_ends_the_link(ends: tuple[RedisLink, socket.socket], sent: bytes, error: type[Exception]) -> None:
    link, server = ends
    server.sendall(sent)
    with pytest.raises(error):
        list(link.read())


def test_a_closed_server_is_told_after_what_it_has_sent(ends: tuple[RedisLink, socket.socket]) -> None:
    link, server = ends
    server.sendall(STREAM)
    server.shutdown(socket.SHUT_WR)
    assert list(link.read()) == EVENTS
    with pytest.raises(ConnectionError):
        list(link.read())
