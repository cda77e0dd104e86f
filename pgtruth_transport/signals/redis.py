"""Signals by Redis (or Valkey) PUBLISH and SUBSCRIBE.

Promises: only job ids travel, on a channel per queue, and nothing is ever stored there, so a full, flushed or shared
server does no harm. ``wake`` takes at most ``signal_timeout``, whatever the server does or does not do; so do the two
halves of ``send``, each. Nothing is tried twice. After a failure calls fail at once for a second; then the way back is
tried in the background, and a call waits for it 50 ms at most. If the process dies between the commit and PUBLISH,
polling finds the rows.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final

from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.retry import Retry

from pgtruth_transport.errors import SettingsError
from pgtruth_transport.settings import Settings, mask_url

from . import SignalError, nothing_to_await, result_payloads, results_channel, wake_channel
from .batching import Batcher
from .listening import Event, LinkListener
from .opening import Opening

logger = logging.getLogger(__name__)

REST: Final = 1.0  # seconds after a failure in which nothing is tried
SECOND_LOOK: Final = 0.05  # how long a call waits for the way back after a failure
GREETING: Final = 2.0  # seconds for each answer while a listener logs in
SENDING: Final = 0.2  # seconds for a listener's own command to leave
READ_FOR: Final = 0.1  # seconds of reading in one drain, when somebody floods the channels
_AT_ONCE: Final = 65536  # bytes
_POOL_OPTIONS: Final = ("max_connections", "timeout")
_ERRORS: Final = (RedisError, OSError)


class RedisSignal:
    """PUBLISH, on one connection per process."""

    name = "redis"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._url = settings.signal_url or ""
        self._where = mask_url(self._url)
        self._timeout = settings.signal_timeout
        _connection(self._url, self._timeout, self._timeout)  # a bad URL is an error now, not at the first job
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held by whoever uses the line
        self._batcher = Batcher(self._wake, self._lock)
        self._line: _Line | None = None
        self._opening: Opening[_Line] | None = None
        self._failed: str | None = None  # why the last call failed, if it did
        self._try_at = 0.0

    def wake(self, queues: Mapping[str, Sequence[str]]) -> None:
        """One message per queue, with one of its new ids; threads that call meanwhile share the next pipeline."""
        self._leave_parent()
        if queues:
            self._batcher({queue: next(iter(ids), "") for queue, ids in queues.items()}, self._timeout)

    def notify_channel(self, queue: str) -> None:
        return None

    def send(self, queue: str, job_id: str) -> Callable[[], None]:
        """Whoever uses the line next reads the answers that are still to come; while it is in use, share its next."""
        self._leave_parent()
        if not self._lock.acquire(blocking=False):
            self.wake({queue: [job_id]})
            return nothing_to_await
        try:
            channel = wake_channel(self._settings.schema, queue)
            line, number = self._say([(channel, job_id)], monotonic() + self._timeout)
        finally:
            self._lock.release()
        return partial(self._await_answer, line, number)

    def _await_answer(self, line: _Line, number: int) -> None:
        if line.answered >= number:
            return
        self._leave_parent()
        deadline = monotonic() + self._timeout
        if not self._lock.acquire(timeout=self._timeout):
            raise SignalError(f"no answer within {self._timeout:g} s: another thread is still sending")
        try:
            if line is not self._line:
                raise SignalError(f"no signal through {self._where}: the connection was lost")
            self._hear(line, number, deadline)
        finally:
            self._lock.release()

    def announce(self, job_ids: Sequence[str]) -> None:
        """Ids that fit together travel in one message."""
        self._leave_parent()
        deadline = monotonic() + self._timeout
        if not job_ids or not self._lock.acquire(timeout=self._timeout):
            return
        try:
            channel = results_channel(self._settings.schema)
            self._publish([(channel, text) for text in result_payloads(job_ids)], deadline)
        except Exception as exc:
            logger.debug("could not announce %d result(s), their waiters poll: %s", len(job_ids), exc)
        finally:
            self._lock.release()

    def listener(self) -> LinkListener:
        timeout = self._settings.connect_timeout

        def open_link() -> RedisLink:
            return RedisLink(_connection(self._url, timeout, SENDING, greet=_greet))

        return LinkListener(self._settings.schema, open_link, _ERRORS, self._where)

    def _wake(self, queues: Mapping[str, str], deadline: float) -> None:
        schema = self._settings.schema
        self._publish([(wake_channel(schema, queue), job_id) for queue, job_id in queues.items()], deadline)

    def _publish(self, messages: Sequence[tuple[str, str]], deadline: float) -> None:
        """Under the lock."""
        self._hear(*self._say(messages, deadline), deadline)

    def _say(self, messages: Sequence[tuple[str, str]], deadline: float) -> tuple[_Line, int]:
        """Returns the line, and the number of the last answer that is to come on it."""
        try:
            line = self._line
            if line is None or line.is_stale(deadline):
                self._drop()
                line = self._line = self._connect(deadline)
            line.send(messages, deadline)
            return line, line.sent
        except _ERRORS as exc:
            raise self._failure(exc) from exc

    def _hear(self, line: _Line, number: int, deadline: float) -> None:
        try:
            line.receive(number, deadline)
        except _ERRORS as exc:
            raise self._failure(exc) from exc
        self._failed = None

    def _failure(self, exc: BaseException) -> SignalError:
        self._drop()
        self._failed, self._try_at = str(exc), monotonic() + REST
        return SignalError(f"no signal through {self._where}: {exc}")

    def _connect(self, deadline: float) -> _Line:
        now = monotonic()
        patience = 0.0
        if self._opening is None:
            if now < self._try_at:
                raise SignalError(f"no signal through {self._where}, which has just failed: {self._failed}")
            self._opening = Opening(self._open_line, _Line.close, "pgtruth-signal")
            patience = deadline - now if self._failed is None else min(deadline - now, SECOND_LOOK)
        if not self._opening.wait(patience):
            self._failed = self._failed or "it did not answer in time"
            raise SignalError(f"no signal through {self._where}: no connection yet")
        opening, self._opening = self._opening, None
        return opening.take()

    def _open_line(self) -> _Line:
        return _Line(_connection(self._url, self._timeout, self._timeout))

    def _drop(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def _leave_parent(self) -> None:
        """In a forked child: the line is the parent's. redis-py closes its copy without a word on the wire."""
        if self._pid != os.getpid():
            self._reset()


class _Line:
    """A connection for publishing. Not thread-safe; after an error it must be closed.

    Answers come in the order of the commands, so numbers tell whose they are: the first answer is number 1.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.sent = self.answered = 0  # commands; good answers to them
        self._rest = b""  # of an answer that has begun to arrive
        try:
            connection.connect()
            connection.send_command("PING")  # a server that is paused or still loading must not pass for a good one
            connection.read_response()
            self._readable = select.poll()
            self._readable.register(connection._sock, select.POLLIN)
        except BaseException:
            connection.disconnect()
            raise
        weakref.finalize(self, connection.disconnect)  # whoever drops the signal drops its socket, and no later

    def is_stale(self, deadline: float) -> bool:
        """Whether the server has closed it, or did not take what others have sent: else there is nothing to read."""
        try:
            self.receive(self.sent, deadline)
        except _ERRORS:
            return True
        sock = self._connection._sock
        return sock is None or bool(self._readable.poll(0))

    def send(self, messages: Sequence[tuple[str, str]], deadline: float) -> None:
        """One PUBLISH each, in one packet. redis-py's way of it takes twice as long as the server."""
        commands = [_command(channel, payload.encode("utf-8", "surrogatepass")) for channel, payload in messages]
        line = self._patient(deadline)
        self.sent += len(commands)
        line.sendall(b"".join(commands))

    def receive(self, number: int, deadline: float) -> None:
        """The answers up to this number, and what else has arrived."""
        while self.answered < number:
            received = self._patient(deadline).recv(65536)
            if not received:
                raise ConnectionError("the server closed the connection")
            *answers, self._rest = (self._rest + received).split(b"\r\n")
            for answer in answers:
                if not answer.startswith(b":"):  # the number of those who hear it
                    raise ResponseError(answer.decode("utf-8", "replace").removeprefix("-"))
                self.answered += 1

    def close(self) -> None:
        self._connection.disconnect()

    def _patient(self, deadline: float) -> socket.socket:
        left = deadline - monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        sock: socket.socket | None = self._connection._sock
        if sock is None:
            raise ConnectionError("the connection is closed")
        sock.settimeout(left)
        return sock


def _command(channel: str, payload: bytes) -> bytes:
    name = channel.encode()
    return b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(name), name, len(payload), payload)


class RedisLink:
    """A connection that is subscribed. It reads without redis-py, whose way of it is 0.1 ms of each pickup longer."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        connection.connect()
        weakref.finalize(self, connection.disconnect)
        self._sock: socket.socket = connection._sock
        self._sock.settimeout(0)
        self._pending: Callable[[], int] = getattr(self._sock, "pending", lambda: 0)  # read and decrypted already
        self._fileno: int = self._sock.fileno()
        self._unread = bytearray()

    def fileno(self) -> int:
        return self._fileno

    def subscribe(self, add: Sequence[str], remove: Sequence[str]) -> None:
        if add:
            self._send("SUBSCRIBE", *add)
        if remove:
            self._send("UNSUBSCRIBE", *remove)

    def ping(self) -> None:
        self._send("PING")

    def read(self) -> Iterator[Event]:
        """All that has arrived, but for what has not arrived whole."""
        until = monotonic() + READ_FOR
        more = True
        while more and monotonic() < until:
            try:
                received = self._sock.recv(_AT_ONCE)
            except (BlockingIOError, ssl.SSLWantReadError):
                return
            if not received:
                raise ConnectionError("the server closed the connection")
            more = len(received) == _AT_ONCE or self._pending() > 0
            self._unread += received
            yield from self._events()

    def close(self) -> None:
        self._connection.disconnect()

    def _events(self) -> Iterator[Event]:
        start = 0
        while (found := _reply(self._unread, start)) is not None:
            reply, start = found
            event = _event(reply)
            if event is not None:
                yield event
        del self._unread[:start]

    def _send(self, *command: str) -> None:
        self._sock.settimeout(SENDING)
        self._connection.send_command(*command)
        self._sock.settimeout(0)


def _reply(received: bytearray, start: int) -> tuple[list[bytes], int] | None:
    """The reply that begins at ``start``, and where the next begins; ``None`` while it is not there whole."""
    end = received.find(b"\r\n", start)
    if end < 0:
        return None
    kind, line = received[start : start + 1], bytes(received[start + 1 : end])
    if kind == b"-":
        raise ResponseError(line.decode("utf-8", "replace"))
    if kind != b"*":
        return [line], end + 2
    items: list[bytes] = []
    position = end + 2
    for _ in range(_size(line)):
        end = received.find(b"\r\n", position)
        if end < 0:
            return None
        kind, line, position = received[position : position + 1], bytes(received[position + 1 : end]), end + 2
        if kind == b"$" and line != b"-1":
            end = position + _size(line)
            if len(received) < end + 2:
                return None
            line, position = bytes(received[position:end]), end + 2
        items.append(line)
    return items, position


def _size(line: bytes) -> int:
    try:
        return int(line)
    except ValueError:
        raise InvalidResponse(f"what answers is no Redis: {line[:40]!r}") from None


def _event(reply: list[bytes]) -> Event | None:
    match reply:
        case [b"message", channel, payload]:
            return Event(channel.decode("utf-8", "replace"), payload)
        case [b"subscribe", channel, _]:
            return Event(channel.decode("utf-8", "replace"), None)
        case [b"unsubscribe", *_]:
            return None
        case _:
            return Event("", None)


def _connection(url: str, connect_timeout: float, timeout: float, greet: Any = None) -> Any:
    """A redis-py connection, not opened yet: bytes in and out, no retries, no health checks, the old protocol."""
    parse: Any = parse_url
    try:
        options: dict[str, Any] = dict(parse(url))
        for name in _POOL_OPTIONS:
            options.pop(name, None)
        make = options.pop("connection_class", Connection)
        options |= {
            "socket_connect_timeout": connect_timeout,
            "socket_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
            "protocol": 2,
            "decode_responses": False,
            "redis_connect_func": greet,
        }
        return make(**options)
    except (ValueError, TypeError, RedisError) as exc:
        raise SettingsError(
            f"signal_url {mask_url(url)!r} cannot be used: {exc}; it looks like redis://[user:password@]host:6379/0"
        ) from exc


def _greet(connection: Any) -> None:
    """Log in with more patience than a reader has later."""
    connection._sock.settimeout(GREETING)
    connection.on_connect()
