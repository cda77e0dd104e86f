"""Where published tasks go: the current attempt's finish, the application's transaction, or the database at once.

Promises: the rows are committed before anything is signalled; a signal that cannot be sent parks them as
``enqueue_failed`` and never fails the publish (ADR-002). If the answer to COMMIT is lost, publishing the same ids
again changes nothing. A crash between the commit and the signal loses nothing: polling finds the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Protocol

import psycopg

from . import attempts, lifecycle
from .db import Database, is_lost, retrying
from .jobs import JobRow
from .signals import Signal, SignalError, nothing_to_await

logger = logging.getLogger(__name__)

__all__ = ["JobRow", "TransactionScope", "publish", "transaction_scope", "wake"]


class TransactionScope(Protocol):
    """An application's transaction that publishes join (``in_transaction``)."""

    def insert(self, database: Database, rows: Sequence[JobRow]) -> None:
        """Write the rows on the application's connection; wake workers after its commit."""


transaction_scope: ContextVar[TransactionScope | None] = ContextVar("pgtruth_transaction", default=None)


def publish(database: Database, signal: Signal, rows: Sequence[JobRow]) -> None:
    """Publish ``rows``, wherever they belong now."""
    attempt, scope = attempts.current(), transaction_scope.get()
    if attempt is not None:
        rows = attempt.take(rows, joined=scope is not None)
    if not rows:
        return
    if scope is not None:
        scope.insert(database, rows)
        return

    if len(rows) == 1:
        _publish_one(database, signal, rows[0])
        return

    def insert() -> set[str]:
        with database.asking() as conn:
            return lifecycle.enqueue(conn, database, rows)

    new = retrying(insert)
    warn_known(rows, new)
    wake(database, signal, [row for row in rows if row.id in new])


def _publish_one(database: Database, signal: Signal, row: JobRow) -> None:
    """One row: its commit wakes the workers, or else they are woken while it is being flushed.

    A worker of this very process (as in tests) is told last: it would take the job, and the interpreter, before the
    publish has returned.
    """
    early = row.due_soon and not database.consumers
    channel = signal.notify_channel(row.queue) if early else None
    waking = _Waking(signal, row)

    def insert(channel: str | None) -> bool:
        with database.asking() as conn:
            return lifecycle.enqueue_now(conn, database, row, channel, waking.send if early and not channel else None)

    try:
        try:
            new = retrying(partial(insert, channel))
        except psycopg.Error as exc:
            if channel is None or is_lost(exc):
                raise
            new = retrying(partial(insert, None))  # the NOTIFY may be what the server refused
    finally:
        failure = waking.confirm()
    if not new:
        warn_known([row], set())
    elif failure is not None:
        _park(database, [row.id], failure)
    elif not early:
        wake(database, signal, [row])


class _Waking:
    """The signal of one row, on its way while the row is being flushed."""

    def __init__(self, signal: Signal, row: JobRow) -> None:
        self._signal = signal
        self._row = row
        self._answer: Callable[[], None] = nothing_to_await
        self._failure: SignalError | None = None

    def send(self) -> None:
        self.confirm()  # of a try before
        try:
            self._answer, self._failure = self._signal.send(self._row.queue, self._row.id), None
        except SignalError as exc:
            self._failure = exc

    def confirm(self) -> SignalError | None:
        """Why the signal, if one was sent, did not go through."""
        answer, self._answer = self._answer, nothing_to_await
        try:
            answer()
        except SignalError as exc:
            self._failure = exc
        return self._failure


def warn_known(rows: Sequence[JobRow], new: set[str]) -> None:
    """Say which publishes changed nothing because their id exists (first write wins)."""
    known = [row.id for row in rows if row.id not in new]
    if known:
        logger.warning("ignored the publish of %d job id(s) that exist already, first %s", len(known), known[0])


def wake(database: Database, signal: Signal, rows: Sequence[JobRow]) -> None:
    """Tell idle workers of committed rows; park the rows where that fails."""
    queues: dict[str, list[str]] = {}
    for row in rows:
        if row.due_soon:
            queues.setdefault(row.queue, []).append(row.id)
    if not queues:
        return
    try:
        signal.wake(queues)
    except SignalError as exc:
        _park(database, [job_id for found in queues.values() for job_id in found], exc)


def _park(database: Database, ids: Sequence[str], why: Exception) -> None:
    logger.warning("%d job(s) are safe but not signalled, the next sweep will do it: %s", len(ids), why)
    with database.connection(patience=database.settings.connect_timeout) as conn:
        lifecycle.signal_failed(conn, database, ids)


def wake_quietly(signal: Signal, queues: dict[str, list[str]]) -> None:
    """Tell idle workers of jobs that are queued again; where that fails, their polling finds them."""
    try:
        signal.wake(queues)
    except SignalError as exc:
        logger.info("requeued jobs are not signalled, polling will find them: %s", exc)
