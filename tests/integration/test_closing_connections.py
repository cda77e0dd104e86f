"""A connection that closes takes its listener along, whatever consumed on it."""

from __future__ import annotations

from typing import Any

from kombu import Connection, Consumer, Queue


def test_closing_leaves_no_listener_behind(database_url: str) -> None:
    connection: Any = Connection(database_url)
    for name in ("one", "two", "three"):
        Consumer(connection.channel(), [Queue(name), Queue(f"{name}-more")], callbacks=[print]).consume()
    transport = connection.transport
    assert transport.listener is not None
    connection.close()
    assert transport.listener is None
