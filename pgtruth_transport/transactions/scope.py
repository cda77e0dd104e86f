"""What all kinds of connections share: publishes on their way into one transaction, and the wake-up after its commit.

Promises: jobs are written on the application's connection and nowhere else, in the order of the publishes. Workers are
woken for rows that are committed and for no others, because those are looked up first by a connection of our own. After
a commit nothing raises any more: a wake-up that fails is logged, and polling finds the rows.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import Token
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from pgtruth_transport import lifecycle
from pgtruth_transport.db import CONNECTION_ERRORS, Database
from pgtruth_transport.errors import TransactionError
from pgtruth_transport.jobs import JobRow
from pgtruth_transport.publish import TransactionScope, publish, transaction_scope, wake, warn_known
from pgtruth_transport.runtime import runtime

logger = logging.getLogger(__name__)

#: Rows that one statement writes at most.
BATCH: Final = 1000


class Statement(NamedTuple):
    """One statement of ours for the application's connection."""

    database: Database
    name: str
    parameters: Mapping[str, Any]
    rows: Sequence[JobRow] = ()  # the jobs that it enqueues; it returns the ids that are new


def flush_in_order(scopes: Sequence[Scope]) -> None:
    """Write what the blocks on one connection have collected, outer ones first."""
    for scope in list(scopes):
        if scope.busy:  # it is its own statement that comes by
            return
        scope.flush()


class Scope:
    """One ``with in_transaction(…)`` block. Subclasses know how to reach their connection."""

    #: Whether the connection can only be used where it can be awaited.
    asynchronous = False

    def __init__(self) -> None:
        self.open = False
        self.busy = False  # being written
        self._outer: Token[TransactionScope | None] | None = None
        self._around: TransactionScope | None = None
        self._thread = 0
        self._lock = threading.Lock()
        self._collected: list[Statement | tuple[Database, JobRow]] = []
        self._written: list[tuple[Database, JobRow]] = []
        self._afterwards: list[Callable[[], None]] = []
        self.published: set[str] = set()  # the ids of everything that the open block has published
        self.last: tuple[Database, JobRow] | None = None  # what was published last ...
        self.patterns: dict[str, Any] = {}  # ... and what bulk has made of such, by task

    # What a kind of connection must say.

    def check(self, database: Database) -> None:
        """Raise :class:`TransactionError` if a publish cannot join the transaction now.

        Where the connection is asynchronous it must not wait.
        """
        raise NotImplementedError

    def run(self, statement: bytes, parameters: Mapping[str, Any]) -> list[Any]:
        """The rows of one statement on the connection, where it need not be awaited."""
        raise NotImplementedError

    def write(self) -> None:
        """Write what is collected. Callers use :meth:`flush`."""
        for statement in self.take():
            rows = self.run(statement.database.sql(statement.name), statement.parameters)
            self.note(statement, {row[0] for row in rows} if statement.rows else set())

    async def write_async(self) -> None:
        """The same where the connection is asynchronous. Callers use :meth:`flush_async`."""
        raise NotImplementedError

    async def prepare_async(self) -> None:
        """Learn at the start of ``async with`` what :meth:`check` must know later."""

    def watch(self) -> None:
        """Hook into the connection, before anything is collected, so that it is written in time."""

    def left(self) -> None:
        """The block is over; hooks go when nothing is left to be done for this transaction."""

    # What publish.publish calls.

    def insert(self, database: Database, rows: Sequence[JobRow]) -> None:
        """Collect rows for the transaction; raises :class:`TransactionError` where that is impossible."""
        if not self.open:  # inherited by a task or thread that outlived the block
            self._publish_around(database, rows)
            return
        self._add(database, [(database, row) for row in rows])
        self.published.update(row.id for row in rows)
        self.last = (database, rows[-1])

    def execute(self, database: Database, name: str, parameters: Mapping[str, Any]) -> None:
        """Collect another statement of ``sql/`` that must commit with the rows."""
        self._add(database, [Statement(database, name, parameters)])

    def _add(self, database: Database, items: Sequence[Statement | tuple[Database, JobRow]]) -> None:
        self.check(database)
        self.watch()
        with self._lock:
            self._collected.extend(items)
            full = len(self._collected) >= BATCH
        if full and not self.asynchronous and self._thread == threading.get_ident():
            try:
                self.flush()
            except Exception as exc:  # kombu would take a lost connection for its own, and publish again
                raise TransactionError(f"jobs could not be written in the application's transaction: {exc}") from exc

    def _publish_around(self, database: Database, rows: Sequence[JobRow]) -> None:
        token = transaction_scope.set(self._around)
        try:
            publish(database, runtime(database.settings).signal, rows)
        finally:
            transaction_scope.reset(token)

    # What the kinds of connections use.

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be written, and nobody to be woken."""
        return not self._collected and not self.has_written

    @property
    def has_written(self) -> bool:
        """Whether the end of the transaction matters to anybody."""
        return bool(self._written or self._afterwards)

    def afterwards(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when the transaction is over, unless it is known to have been rolled back."""
        self.watch()
        self._afterwards.append(call)

    def flush(self) -> None:
        """Write what is collected, if there is anything. Our own statements come by here as well: they pass."""
        if self._collected and not self.busy:
            self.busy = True
            try:
                self.write()
            finally:
                self.busy = False

    async def flush_async(self) -> None:
        """The same where the connection is asynchronous."""
        if self._collected and not self.busy:
            self.busy = True
            try:
                await self.write_async()
            finally:
                self.busy = False

    def databases(self) -> set[Database]:
        """The brokers that what is collected belongs to: one, unless two apps publish in the same block."""
        return {item[0] for item in self._collected}

    def take(self) -> Iterator[Statement]:
        """The statements that write what is collected, which is thereby handed over."""
        with self._lock:
            items, self._collected = self._collected, []
        for database, run in groupby(items, key=lambda item: None if isinstance(item, Statement) else item[0]):
            if database is None:
                yield from (item for item in run if isinstance(item, Statement))
                continue
            rows = [item[1] for item in run if not isinstance(item, Statement)]
            for start in range(0, len(rows), BATCH):
                part = rows[start : start + BATCH]
                yield Statement(database, "job_enqueue", lifecycle.enqueue_parameters(part), part)
                if leading := [row for row in part if lifecycle.leads_on(row)]:
                    yield Statement(database, "job_stand_in", lifecycle.enqueue_parameters(leading))

    def note(self, statement: Statement, new: set[str]) -> None:
        """Remember whom to wake for what ``statement`` has written."""
        if statement.rows:
            warn_known(statement.rows, new)
            first = {row.id: row for row in reversed(statement.rows)}
            self._written.extend((statement.database, row) for row in first.values() if row.id in new)

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Forget what is collected if the body raises: it can never be written."""
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Forget what is collected: it belongs to what is being rolled back."""
        with self._lock:
            self._collected.clear()

    def forget(self) -> None:
        """The whole transaction has been rolled back."""
        self.drop()
        self._written.clear()
        self._afterwards.clear()

    def ended(self) -> None:
        """The transaction is over: wake workers for what it has committed."""
        written, self._written = self._written, []
        by_database: dict[Database, list[JobRow]] = {}
        for database, row in written:
            by_database.setdefault(database, []).append(row)
        for database, rows in by_database.items():
            _aside(self.asynchronous, partial(wake_committed, database, rows))
        calls, self._afterwards = self._afterwards, []
        for call in calls:
            call()

    # The block itself.

    def __enter__(self) -> Self:
        if self._outer is not None:
            raise TransactionError("this block has been entered already; call in_transaction() for each block")
        self._thread = threading.get_ident()
        self._around = transaction_scope.get()
        self._outer = transaction_scope.set(self)
        self.open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        try:
            if error is None and not self.asynchronous:
                self.flush()
        finally:
            self.left()

    async def __aenter__(self) -> Self:
        await self.prepare_async()
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.asynchronous:
            self.__exit__(kind, error, trace)
            return
        self._close()
        try:
            if error is None:
                await self.flush_async()
        finally:
            self.left()

    def _close(self) -> None:
        self.open = False
        self.published.clear()
        if self._outer is not None:
            with suppress(ValueError):  # left in another context than it was entered in: there it has no effect
                transaction_scope.reset(self._outer)


def join(database: Database, name: str, parameters: Mapping[str, Any]) -> bool:
    """Have a statement of ``sql/`` commit with the publishes of the open block; ``False`` where there is none.

    For what belongs to a canvas and is not a job: the size of a chord, a group's shape.
    """
    scope = transaction_scope.get()
    if not isinstance(scope, Scope) or not scope.open:
        return False
    scope.execute(database, name, parameters)
    return True


def published_inside(ids: Iterable[str]) -> set[str]:
    """Those of ``ids`` that the blocks which this context is in have published."""
    scope, found, asked = transaction_scope.get(), set[str](), set(ids)
    while isinstance(scope, Scope):
        found |= asked & scope.published
        scope = scope._around
    return found


def wake_committed(database: Database, rows: Sequence[JobRow]) -> None:
    """Wake workers for those of ``rows`` that are in the database. Never raises: the commit stands."""
    try:
        with database.connection(patience=database.settings.signal_timeout) as connection:
            found = connection.execute(database.sql("job_present"), {"ids": [row.id for row in rows]}).fetchall()
        present = {row[0] for row in found}
        wake(database, runtime(database.settings).signal, [row for row in rows if row.id in present])
    except CONNECTION_ERRORS as exc:
        logger.warning("%d committed job(s) wait for the next poll, nobody could be woken: %s", len(rows), exc)
    except Exception:
        logger.exception("%d committed job(s) wait for the next poll, nobody could be woken", len(rows))


def _aside(asynchronous: bool, call: Callable[[], None]) -> None:
    """Run ``call`` in a thread where waiting would hold up an event loop."""
    if asynchronous:
        try:
            asyncio.get_running_loop().run_in_executor(None, call)
        except RuntimeError:  # no loop, or one that is shutting down
            call()
    else:
        call()
