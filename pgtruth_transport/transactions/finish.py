"""``finish_with``: the end of a job in the transaction of its own work (ADR-007).

Promises: the application's rows, the job's end with its result, and everything that follows from it (links, the next
step of a chain, the count of a chord) commit together or not at all. The finish is fenced as ever: an attempt that has
lost its lease is told so before COMMIT, and its work is rolled back with it. If the process dies before COMMIT nothing
has happened and the job runs again; after COMMIT it is done, whatever becomes of the process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from celery import Task, current_task, group, signature

from pgtruth_transport import afterwards, attempts, chords, lifecycle
from pgtruth_transport.attempts import Attempt
from pgtruth_transport.backend import PgTruthBackend
from pgtruth_transport.db import Database
from pgtruth_transport.errors import TransactionError
from pgtruth_transport.publish import wake
from pgtruth_transport.runtime import runtime
from pgtruth_transport.signals import Signal
from pgtruth_transport.transactions.scope import Scope

logger = logging.getLogger(__name__)


class _Rows(list[Any]):
    """The rows of a statement, read as from a cursor."""

    def fetchall(self) -> list[Any]:
        return self

    def fetchone(self) -> Any:
        return self[0] if self else None


class _Connection:
    """The application's connection, as the lifecycle uses one."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def execute(self, statement: bytes, parameters: Mapping[str, Any]) -> _Rows:
        return _Rows(self._scope.run(statement, parameters))


class End(NamedTuple):
    """What ends the current attempt."""

    attempt: Attempt
    left: Attempt  # holds the ending and what follows from it
    app: Any


def conclude(result: Any) -> End:
    """The end of the current attempt as done with ``result``; nothing is written."""
    attempt, task = attempts.current(), current_task._get_current_object()
    if attempt is None or attempt.settings is None or task is None or attempt.buffering:
        raise TransactionError("finish_with() was called outside the body of a task that a pgtruth worker runs")
    if not isinstance(task.backend, PgTruthBackend) and type(task.backend).__name__ != "DisabledBackend":
        raise TransactionError("finish_with() needs the result backend pgtruth://, or none: no other commits with it")
    return End(attempt, _left_by(task, attempt, result), task.app)


def write(scope: Scope, end: End) -> None:
    """Write an end, and what follows from it, on the connection of ``scope``."""
    attempt, left, app = end
    assert attempt.settings is not None
    assert left.ending is not None
    _, database, signal = runtime(attempt.settings)
    scope.check(database)
    connection: Any = _Connection(scope)
    ended = lifecycle.ended(lifecycle.finish(connection, database, [(attempt.lease, left.ending)]))
    if not ended.leases:
        raise TransactionError(
            f"job {attempt.job_id}: attempt {attempt.lease_version} has lost its lease, or has ended already;"
            " roll the transaction back"
        )
    follow = chords.FollowUps()
    follow.add(left)
    chords.write(connection, database, app, follow)
    follow.waited.extend(ended.waited)
    scope.afterwards(partial(_after, attempt, database, signal, follow))


def _left_by(task: Task, attempt: Attempt, result: Any) -> Attempt:
    """What Celery's tracer would leave behind after a body that has returned ``result``."""
    request = task.request
    end = Attempt(attempt.lease, attempt.settings, attempt.retry_count, attempt.limit)
    end.buffering = True
    follow = {"parent_id": request.id, "root_id": request.root_id or request.id}
    if task.app.conf.task_inherit_parent_priority:
        follow["priority"] = (request.delivery_info or {}).get("priority")
    with attempts.running(end):
        callbacks = [signature(item, app=task.app) for item in request.callbacks or ()]
        groups = [item for item in callbacks if isinstance(item, group)]
        singles = [item for item in callbacks if not isinstance(item, group)]
        for callback in (*groups, *([group(singles, app=task.app)] if len(singles) > 1 else singles)):
            callback.apply_async((result,), **follow)
        if request.chain:
            signature(request.chain[-1], app=task.app).apply_async((result,), chain=request.chain[:-1], **follow)
        ignored = task.ignore_result if request.ignore_result is None else request.ignore_result
        task.backend.mark_as_done(request.id, result, request, not ignored)
        if not end.has_outcome:
            end.end(attempts.ignored())
    return end


def _after(attempt: Attempt, database: Database, signal: Signal, follow: chords.FollowUps) -> None:
    """The transaction is over: if it was committed, the attempt is settled, and whoever waits is told."""
    committed = False
    try:
        key = {"id": attempt.job_id, "version": attempt.lease_version}
        with database.connection() as connection:
            committed = connection.execute(database.sql("attempt_present"), key).fetchone() is not None
        if committed:
            attempt.settled = True
            wake(database, signal, follow.rows)
            signal.announce(follow.waited)
    except Exception:  # the commit stands: the worker will find the job ended, and the poll what follows
        logger.exception("job %s has been finished, but nobody could be told", attempt.job_id)
    if committed:
        afterwards.call_now(follow.after)
