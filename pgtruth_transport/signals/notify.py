"""Signals by PostgreSQL's own NOTIFY and LISTEN: nothing else to run.

Promises: a NOTIFY goes out after the commit, and no transaction that it is part of is flushed before it ends. For the
server takes one lock over all databases for it at commit: where that is held during a flush, as in the application's
transaction, commits queue up. A single publish commits with its NOTIFY and awaits the flush afterwards
(:meth:`~NotifySignal.notify_channel`); all others are sent alone, on another connection; if the process dies in
between, nothing was sent, and polling finds the rows. The payload is empty (job ids for results), the channel's name
short whatever the queue is called. One bound is looser than elsewhere: ``wake`` may take ``connect_timeout`` where no
pooled connection is left.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Final
from uuid import uuid4

import psycopg
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.sql import SQL, Composable, Identifier

from pgtruth_transport.db import Connection, Database
from pgtruth_transport.settings import Settings

from . import SignalError, nothing_to_await, result_payloads, results_channel, wake_channel
from .batching import Batcher
from .listening import Event, LinkListener, LinkUseless

logger = logging.getLogger(__name__)

ECHO: Final = 1.0  # seconds that a NOTIFY to oneself may take
_FAILED: Final = (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE)


class NotifySignal:
    """LISTEN/NOTIFY in the database that holds the jobs."""

    name = "notify"

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._heard_echo = False
        self._warned = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._batcher = Batcher(self._send, threading.Lock())

    def wake(self, queues: Mapping[str, Sequence[str]]) -> None:
        """One statement for all queues; threads that call meanwhile share the next one."""
        if self._pid != os.getpid():
            self._reset()
        if queues:
            self._batcher(dict.fromkeys(queues, ""), self._settings.signal_timeout)

    def notify_channel(self, queue: str) -> str:
        return wake_channel(self._settings.schema, queue)

    def send(self, queue: str, job_id: str) -> Callable[[], None]:
        self.wake({queue: [job_id]})
        return nothing_to_await

    def announce(self, job_ids: Sequence[str]) -> None:
        """One statement; ids that fit together travel in one payload."""
        try:
            self._notify(results_channel(self._settings.schema), list(result_payloads(job_ids)))
        except Exception as exc:
            logger.debug("could not announce %d result(s), their waiters poll: %s", len(job_ids), exc)

    def listener(self) -> LinkListener:
        where = self._settings.masked()
        return LinkListener(self._settings.schema, self._open_link, (psycopg.Error,), where)

    def _send(self, queues: Mapping[str, str], deadline: float) -> None:
        try:
            with self._database.connection(patience=max(deadline - monotonic(), 0.01)) as conn:
                conn.execute(self._database.sql("signal_wake"), {"channels": self._channels(queues)})
        except (psycopg.Error, OSError) as exc:
            raise SignalError(f"NOTIFY failed: {exc}") from exc

    def _channels(self, queues: Iterable[str]) -> list[str]:
        return sorted(wake_channel(self._settings.schema, queue) for queue in queues)

    def _notify(self, channel: str, texts: list[str]) -> None:
        if texts:
            with self._database.connection(patience=self._settings.signal_timeout) as conn:
                conn.execute(self._database.sql("signal_announce"), {"channel": channel, "payloads": texts})

    def _open_link(self) -> NotifyLink:
        conn = self._database.open("listen")
        try:
            if not self._heard_echo:
                conn.patience = self._settings.connect_timeout
                self._hear_echo(conn)
            return NotifyLink(conn)
        except BaseException:
            conn.close()
            raise

    def _hear_echo(self, conn: Connection) -> None:
        """Make sure that LISTEN works here at all: through a transaction pooler it is accepted and means nothing."""
        channel, token = f"{self._settings.schema}_echo", uuid4().hex
        conn.execute(SQL("LISTEN {}").format(Identifier(channel)))
        self._notify(channel, [token])
        self._heard_echo = any(notify.payload == token for notify in _echoes(conn, token))
        conn.execute(SQL("UNLISTEN {}").format(Identifier(channel)))
        if self._heard_echo:
            return
        if not self._warned:
            self._warned = True
            logger.warning(
                "LISTEN has no effect on %s: a NOTIFY to itself did not come back within %g s (a transaction pooler, or"
                " another database?). Work is found by polling every %g s. Set listen_url to a URL that reaches the"
                " server directly, or signal_url to a Redis.",
                self._settings.masked(),
                ECHO,
                self._settings.poll_interval,
            )
        raise LinkUseless("LISTEN has no effect here")


class NotifyLink:
    """A connection that listens. Speaks to libpq directly, because every psycopg call would wait for its answer."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        weakref.finalize(self, conn.close)  # a listener that nobody has closed leaves no session behind
        self._pgconn = conn.pgconn
        self._unsent: deque[tuple[bytes, Sequence[str]]] = deque()
        self._asked: Sequence[str] | None = None  # channels of the statement whose answer is awaited

    def fileno(self) -> int:
        return self._pgconn.socket

    def subscribe(self, add: Sequence[str], remove: Sequence[str]) -> None:
        parts: list[Composable] = [SQL("LISTEN {}").format(Identifier(channel)) for channel in add]
        parts += [SQL("UNLISTEN {}").format(Identifier(channel)) for channel in remove]
        self._unsent.append((SQL("; ").join(parts).as_bytes(self._conn), add))
        self._send_next()

    def ping(self) -> None:
        if self._asked is None and not self._unsent:
            self._unsent.append((b"", ("",)))
            self._send_next()

    def read(self) -> Iterator[Event]:
        self._pgconn.consume_input()
        if self._pgconn.status != ConnStatus.OK:
            raise psycopg.OperationalError("the connection is closed")
        yield from self._answers()
        while heard := self._pgconn.notifies():
            yield Event(heard.relname.decode("utf-8", "replace"), heard.extra)
        self._send_next()

    def close(self) -> None:
        self._conn.close()

    def _answers(self) -> Iterator[Event]:
        while self._asked is not None and not self._pgconn.is_busy():
            result = self._pgconn.get_result()
            if result is None:
                asked, self._asked = self._asked, None
                yield from (Event(channel, None) for channel in asked)
            elif result.status in _FAILED:
                raise psycopg.OperationalError(result.get_error_message())

    def _send_next(self) -> None:
        if self._asked is None and self._unsent:
            statement, self._asked = self._unsent.popleft()
            self._pgconn.send_query(statement)
        self._pgconn.flush()


def _echoes(conn: Connection, token: str) -> Iterator[psycopg.Notify]:
    """Notifications until ``token`` comes or :data:`ECHO` seconds are over."""
    deadline = monotonic() + ECHO
    while (left := deadline - monotonic()) > 0:
        for notify in conn.notifies(timeout=left, stop_after=1):
            yield notify
            if notify.payload == token:
                return
