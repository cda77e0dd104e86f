"""Connections to PostgreSQL: where they come from, when they are dropped, and which errors mean what.

A connection is opened by the process that uses it and never crosses a fork: in a child the parent's sockets are
replaced by ``/dev/null``, so that the child can neither speak on them nor keep the server's side alive after the
parent's death. All are in autocommit and keep no session state (no SET, no session locks, no temporary tables), so a
transaction pooler may stand in between. If the process dies, the server rolls back what it had not committed; nothing
here needs to be cleaned up.
"""

from __future__ import annotations

import atexit
import os
import random
import select
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import ConnStatus, PipelineStatus, TransactionStatus
from psycopg.rows import TupleRow

from pgtruth_transport import sql
from pgtruth_transport.settings import Settings, parse_url

T = TypeVar("T")

#: What a lost, refused or read-only database raises: drop the connection, and ask again later.
CONNECTION_ERRORS: Final[tuple[type[Exception], ...]] = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,  # a primary that became a standby
)
#: serialization_failure, deadlock_detected: the same statement succeeds when it is run again.
TRANSIENT: Final = frozenset({"40001", "40P01"})
#: Classes of SQLSTATE: connection, transaction state (read-only), resources, an operator's intervention.
_OUT_OF_REACH: Final = frozenset({"08", "25", "53", "57"})
MAX_IDLE: Final = 4
#: Seconds for which a process that is stopping does not ask a silent server again.
GIVEN_UP: Final = 10.0
#: Seconds for which a silence from before the stop counts as one of the stop.
JUST_SILENT: Final = 3.0
_ATTEMPTS: Final = 5
#: Seconds for which a server that did not answer in time is not asked again: longer than Celery retries a publish.
_SILENCE: Final = 2.0


class Silent(psycopg.OperationalError):
    """The server has not answered in time; asking it again at once would only take as long again."""


class Connection(psycopg.Connection[TupleRow]):
    """A psycopg connection that does not wait for ever: ``patience`` bounds each wait for the server, in seconds.

    A server that is paused or a link that swallows packets would otherwise hold the caller until TCP gives up.
    """

    patience: float | None = None
    prepared: set[bytes]  # what :mod:`~pgtruth_transport.roundtrip` has prepared on it
    readable: select.poll  # asked for something to read
    on_silence: Callable[[], None] | None = None

    def execute(self, query: Any, params: Any = None, **kwargs: Any) -> psycopg.Cursor[TupleRow]:
        """As psycopg's; a statement that is a transaction of its own is run again on 40001 and 40P01.

        So a database whose default isolation is stricter than READ COMMITTED shows nobody an error.
        """
        if not (self.autocommit and _is_clean(self)):
            return super().execute(query, params, **kwargs)
        return retrying(lambda: super(Connection, self).execute(query, params, **kwargs))

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        if self.patience is not None:
            gen = _bounded(self, gen, self.patience)
        return super().wait(gen, *args, **kwargs)

    def wait_ready(self, deadline: float | None, *, writing: bool) -> None:
        """Until the server has said something, or ``writing`` may go on; raises :class:`Silent` at ``deadline``."""
        if writing:
            self.readable.modify(self.pgconn.socket, select.POLLIN | select.POLLOUT)
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            if not self.readable.poll(left):
                raise self.gives_up()
        finally:
            if writing:
                self.readable.modify(self.pgconn.socket, select.POLLIN)

    def gives_up(self) -> Silent:
        """Close; what to raise after ``patience``. Leaving a transaction or pipeline would only wait once more each."""
        self.pgconn.finish()
        if self.on_silence is not None:
            self.on_silence()
        return Silent(f"PostgreSQL did not answer within {self.patience:g} s")


def _bounded(conn: Connection, gen: Generator[Any, Any, T], seconds: float) -> Generator[Any, Any, T]:
    """``gen``, given up after ``seconds``: psycopg resumes it every tenth of a second, ready or not."""
    deadline = time.monotonic() + seconds
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > deadline:
                gen.close()
                raise conn.gives_up()
            wanted = gen.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


class Database:
    """The connections of one process to the database that ``settings`` names. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._silent_until, self._silence = 0.0, ""  # monotonic time; what was said
        self.consumers = 0  # of this process, which wait to be woken
        self._leaving = False
        self._silent_at = float("-inf")
        self._ask_again_at = 0.0

    @classmethod
    def of(cls, settings: Settings) -> Database:
        """This process's database for ``settings``: every caller shares its pool."""
        with _registry_lock:
            found = _registry.get(settings)
            if found is None:
                found = _registry[settings] = cls(settings)
            return found

    def connection(self, patience: float | None = None) -> AbstractContextManager[Connection]:
        """A connection from the pool, in autocommit; a new one where no idle one is left.

        ``patience`` bounds the wait for each answer. What a body leaves broken, or inside a transaction, is closed.
        """
        return _Lent(self, patience)

    def asking(self) -> AbstractContextManager[Connection]:
        """:meth:`connection`, for callers whose framework retries: a silent server is waited for once, not per retry.

        Each answer may take ``connect_timeout``; for a moment after that was not enough, asking again fails at once.
        """
        return _LentOnce(self, float(self.settings.connect_timeout))

    def open(self, purpose: str) -> Connection:
        """A connection of the caller's own (it closes it), named ``<application_name>:<purpose>`` in the server.

        The one for ``listen`` goes to ``listen_url`` where that is set.
        """
        return self._connect(f"{self.settings.application_name}:{purpose}"[:63], listen=purpose == "listen")

    def sql(self, name: str) -> bytes:
        """The statement of ``sql/<name>.sql`` for this schema."""
        return sql.load(name, self.settings.schema)

    def leave(self) -> None:
        """This process is stopping: a server that has kept silent once is not waited for by everybody who leaves."""
        if not self._leaving:
            self._leaving = True
            self._ask_again_at = self._silent_at + JUST_SILENT

    @property
    def given_up(self) -> bool:
        """Whether this process is stopping and the server has just kept silent."""
        return time.monotonic() < self._ask_again_at

    def _silent(self) -> None:
        self._silent_at = time.monotonic()
        if self._leaving:
            self._ask_again_at = self._silent_at + GIVEN_UP

    def refuse_in_vain(self) -> None:
        """Raise a connection error instead of asking a server that has been given up."""
        if self.given_up:
            raise psycopg.OperationalError("PostgreSQL did not answer, and this process is stopping")

    def close(self) -> None:
        """Close what is idle. The database stays usable: the next statement opens a new connection."""
        self._forget_parent()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            _close(connection)

    def _lend(self) -> Connection:
        self.refuse_in_vain()
        return self._take() or self._connect(self.settings.application_name)

    def _take(self) -> Connection | None:
        self._forget_parent()
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if _is_quiet(connection):
                return connection
            _close(connection)

    def _give_back(self, connection: Connection, reusable: bool) -> None:
        if self._forget_parent() or connection in _abandoned:
            return
        connection.patience = None
        if reusable and _is_clean(connection):
            with self._lock:
                if len(self._idle) < MAX_IDLE:
                    self._idle.append(connection)
                    return
        _close(connection)

    def _forget_parent(self) -> bool:
        """In a child that forked without Python's knowledge (some servers do): let go of what the parent opened."""
        if self._pid == os.getpid():
            return False
        _after_fork_in_child()
        self._reset()
        return True

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle = []
        self.consumers = 0

    def _connect(self, application_name: str, *, listen: bool = False) -> Connection:
        self.refuse_in_vain()
        settings = self.settings
        conninfo = parse_url(settings.listen_url) if listen and settings.listen_url else settings.conninfo
        timeout = settings.connect_timeout
        wanted: dict[str, Any] = {
            "client_encoding": "UTF8",
            "connect_timeout": timeout,
            "keepalives": 1,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": max(timeout, 5) * 1000,
            **conninfo_to_dict(conninfo),
            "application_name": application_name,
        }
        try:
            connection = Connection.connect(
                autocommit=True, prepare_threshold=5 if settings.prepare else None, **wanted
            )
        except psycopg.OperationalError as exc:
            if isinstance(exc, psycopg.errors.ConnectionTimeout):
                self._silent()
            raise psycopg.OperationalError(f"cannot connect to PostgreSQL at {_place(wanted)}: {exc}") from exc
        connection.prepared = set()
        connection.readable = select.poll()
        connection.readable.register(connection.pgconn.socket, select.POLLIN)
        connection.on_silence = self._silent
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # said by each BEGIN: no session state
        _live.add(connection)
        return connection


class _Lent:
    """A connection of the pool, for as long as a ``with`` block. No generator: every publish passes here."""

    __slots__ = ("_connection", "_database", "_patience")

    def __init__(self, database: Database, patience: float | None) -> None:
        self._database = database
        self._patience = patience

    def __enter__(self) -> Connection:
        self._connection = self._database._lend()
        self._connection.patience = self._patience
        return self._connection

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: Any) -> None:
        self._database._give_back(self._connection, not isinstance(exc, psycopg.errors.ReadOnlySqlTransaction))


class _LentOnce(_Lent):
    """The same, unless the server has just kept silent; notes whether it does."""

    __slots__ = ("_began",)

    def __enter__(self) -> Connection:
        self._began = time.monotonic()
        if self._began < self._database._silent_until:
            raise psycopg.OperationalError(self._database._silence)
        try:
            return super().__enter__()
        except psycopg.OperationalError as exc:
            self._note(exc)
            raise

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, exc, trace)
        if isinstance(exc, psycopg.OperationalError):
            self._note(exc)

    def _note(self, exc: psycopg.OperationalError) -> None:
        assert self._patience is not None
        now = time.monotonic()
        if now - self._began >= 0.9 * self._patience:
            self._database._silent_until, self._database._silence = now + _SILENCE, str(exc)


def is_transient(exc: BaseException) -> bool:
    """Whether running the same statement again is all that ``exc`` asks for."""
    return isinstance(exc, psycopg.Error) and exc.sqlstate in TRANSIENT


def is_lost(exc: BaseException) -> bool:
    """Whether ``exc`` says that the database is out of reach, rather than that it refuses this statement."""
    if not isinstance(exc, CONNECTION_ERRORS):
        return False
    state = exc.sqlstate if isinstance(exc, psycopg.Error) else None
    return state is None or state[:2] in _OUT_OF_REACH


def retrying(call: Callable[[], T]) -> T:
    """What ``call`` returns, called again on a serialization failure or deadlock: five times in all, with jitter."""
    for attempt in range(1, _ATTEMPTS):
        try:
            return call()
        except psycopg.Error as exc:
            if not is_transient(exc):
                raise
        time.sleep(random.uniform(0.001, 0.01 * 2**attempt))
    return call()


def _place(wanted: dict[str, Any]) -> str:
    hosts = str(wanted.get("host") or "the default host").split(",")
    ports = str(wanted.get("port") or "").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    shown = ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=False))
    return f"{shown}, database {wanted.get('dbname') or wanted.get('service')!r}"


def _is_clean(connection: Connection) -> bool:
    """Whether the next user finds it as new: open, outside any transaction and pipeline."""
    pgconn = connection.pgconn
    return (
        pgconn.status == ConnStatus.OK
        and pgconn.transaction_status == TransactionStatus.IDLE
        and pgconn.pipeline_status == PipelineStatus.OFF
        and connection.autocommit
    )


def _is_quiet(connection: Connection) -> bool:
    """Whether an idle connection is still usable: a server that closed it has left something to read (EOF)."""
    if connection.pgconn.status != ConnStatus.OK:
        return False
    return not connection.readable.poll(0)


def _close(connection: Connection) -> None:
    with suppress(psycopg.Error, OSError):
        connection.close()


_registry: dict[Settings, Database] = {}
_registry_lock = threading.Lock()
#: Every connection of this process that may be open.
_live: weakref.WeakSet[Connection] = weakref.WeakSet()
#: A parent's connections, in the child: kept, so that their destructors never run.
_abandoned: list[Connection] = []


def _after_fork_in_child() -> None:
    """Take the parent's sockets away from this child without a word on the wire; its objects then only raise."""
    global _live, _registry_lock
    null = os.open(os.devnull, os.O_RDWR)
    for connection in list(_live):
        _abandoned.append(connection)
        with suppress(psycopg.Error, OSError):
            os.dup2(null, connection.pgconn.socket, inheritable=False)
    os.close(null)
    _live = weakref.WeakSet()
    _registry_lock = threading.Lock()
    for database in _registry.values():
        database._reset()


@atexit.register
def close_all() -> None:
    """Close what is idle in every pool of this process."""
    for database in list(_registry.values()):
        database.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
