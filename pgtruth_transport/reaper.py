"""The sweep: authority repair. Beat calls it, and every worker: whoever comes first after ``reap_interval`` does it.

Promises (contract section 5, ADR-003): a job whose lease has run out is claimable again, or failed with its errbacks,
chain and chord told, within one interval; what a producer could not signal is queued again; what is due and unclaimed
is signalled again; what is expired ends; old rows go, in small batches. Every step is bounded and guarded by itself, so
two sweeps at once, or a sweep that dies half way, do no harm. After a restart or promotion of the database, owners get
one lease of grace to renew before anything is reaped; where nobody has swept for a whole lease (the database was
read-only, or out of reach for all), one interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from celery.utils.log import get_logger

from . import chords, counters, endings, lifecycle, publish
from .db import Database
from .effects import book
from .endings import BATCH
from .jobs import Job
from .runtime import runtime
from .settings import Settings
from .signals import Signal
from .states import Status
from .transport.entities import collect_garbage

logger = get_logger(__name__)

DELETE_BATCH = 2000
#: Seconds between two looks at what should have come by now and has not: they read every open job.
OVERDUE_INTERVAL = 3600.0


class Swept(NamedTuple):
    """What one sweep did."""

    requeued: int = 0  # leases that had run out
    spent: int = 0  # ended as failed: no retry was left
    recovered: int = 0  # enqueue_failed -> queued
    expired: int = 0
    unknown: int = 0  # known to no worker for too long
    deleted: int = 0


def sweep(app: Any) -> Swept:
    """Sweep now, whoever has done it last."""
    found = runtime(Settings.from_app(app))
    with found.database.connection() as conn:
        taken = _take(conn, found.database, "by hand", 0)
    return _sweep(app, found.database, found.signal, reap=not taken or taken[0] >= found.settings.lease_seconds)


def sweep_if_due(app: Any, database: Database, signal: Signal, owner: str) -> Swept | None:
    """Sweep if nobody has within ``reap_interval``; ``None`` if somebody has."""
    settings = database.settings
    with database.connection() as conn:
        taken = _take(conn, database, owner, settings.reap_interval * 0.9)
    if taken is None:
        return None
    settled_for, last_ran = taken
    return _sweep(app, database, signal, reap=may_reap(settled_for, last_ran, settings.lease_seconds))


def may_reap(settled_for: float, last_ran: float | None, lease: float) -> bool:
    """Whether an expired lease means a dead owner: not right after a time in which no owner could have renewed it.

    ``settled_for``: seconds since the server started or was promoted; ``last_ran``: since the sweep before, by anybody.
    """
    return settled_for >= lease and (last_ran is None or last_ran <= lease)


def _take(
    conn: Any, database: Database, owner: str, interval: float, duty: str = "sweep"
) -> tuple[float, float | None] | None:
    """Take the duty; what :func:`may_reap` asks, ``None`` if it is not due."""
    params = {"name": duty, "owner": owner, "interval": interval}
    found: tuple[float, float | None] | None = conn.execute(database.sql("duty_take"), params).fetchone()
    return found


def _sweep(app: Any, database: Database, signal: Signal, *, reap: bool) -> Swept:
    queues: dict[str, list[str]] = {}

    def batches(step: Callable[[Any, Database, int], list[tuple[str, str]]]) -> int:
        total = 0
        while True:
            with database.connection() as conn:
                found = step(conn, database, BATCH)
            for job_id, queue in found:
                queues.setdefault(queue, []).append(job_id)
            total += len(found)
            if len(found) < BATCH:
                return total

    recovered = batches(lifecycle.recover)
    requeued = batches(lifecycle.reap) if reap else 0
    spent = endings.end_spent(app, database, signal) if reap else 0
    expired = _end_all(app, database, signal, lifecycle.lock_expired, "expired")
    expired += _end_all(app, database, signal, lifecycle.lock_forbidden, "revoked")
    reason = f"no worker knew this task for {database.settings.unknown_task_wait:g} s"
    unknown = _end_all(app, database, signal, lifecycle.lock_unknown, reason, state="FAILURE")
    book.lapse_due(database, "sweep", BATCH)  # effects that a dead attempt had begun are unknown now
    with database.connection() as conn:
        for queue in lifecycle.due_queues(conn, database):
            queues.setdefault(queue, [])
        counts = {counters.LEASES_EXPIRED: requeued + spent, counters.JOBS_REQUEUED: requeued + recovered}
        counters.add(conn, database, counts)
    if queues:
        publish.wake_quietly(signal, queues)
    swept = Swept(requeued, spent, recovered, expired, unknown, _tidy(app, database, signal))
    if any(swept[:5]):
        logger.warning("swept: %s", ", ".join(f"{name} {value}" for name, value in swept._asdict().items() if value))
    return swept


def _end_all(
    app: Any,
    database: Database,
    signal: Signal,
    lock: Callable[[Any, Database, int], list[Job]],
    reason: str,
    state: str = "REVOKED",
) -> int:
    ends = endings.unheld(app, database, lambda conn: lock(conn, database, BATCH), reason, state)
    return endings.end_all(app, database, signal, ends)


def cancel(app: Any, ids: Sequence[str], reason: str = "revoked") -> int:
    """Cancel jobs that nobody holds, with their chords told; unknown ids are remembered. Returns how many were queued.

    A job that runs is left to its holder (``revoke(terminate=True)`` ends it), but does not run again.
    """
    found = runtime(Settings.from_app(app))
    database = found.database
    ends = endings.unheld(app, database, lambda conn: lifecycle.lock_queued(conn, database, ids), reason, "REVOKED")
    count = endings.end(app, database, found.signal, ends).ended
    with database.connection() as conn:
        lifecycle.cancel(conn, database, ids, reason)
    return count


def _end_overdue(app: Any, database: Database, signal: Signal, keep: float) -> None:
    """Fail open jobs older than ``keep`` seconds whose message no open job can publish any more."""
    reason = f"its message was not published within {keep:g} s, and no job is left that could do it"
    while True:
        with database.connection() as conn:
            ids = lifecycle.overdue(conn, database, keep, chords.BATCH)
            if not ids:
                return
            awaited = lifecycle.mentioned(conn, database, ids)
            lifecycle.keep_open(conn, database, awaited)
        lost = [job_id for job_id in ids if job_id not in awaited]
        ends = endings.unheld(app, database, partial(_lock_open, database, lost, keep), reason, "FAILURE")
        ended = endings.end(app, database, signal, ends).ended
        if ended:
            logger.warning("%d open job(s) ended as failed: %s", ended, reason)
        if len(ids) < chords.BATCH or ended < len(lost):  # the rest is for the next look
            return


def _lock_open(database: Database, ids: Sequence[str], keep: float, conn: Any) -> list[Job]:
    return lifecycle.lock_open(conn, database, ids, keep)


def _tidy(app: Any, database: Database, signal: Signal) -> int:
    """Delete what is past its keeping time; one batch of each kind per sweep, so that no sweep takes long."""
    keep = app.conf.result_expires
    done = keep.total_seconds() if hasattr(keep, "total_seconds") else keep
    with database.connection() as conn:
        collect_garbage(conn, database)
        if not done:
            return 0
        conn.execute(database.sql("waiter_delete_expired"), {"keep": float(done), "count": DELETE_BATCH})
        if _take(conn, database, "by a sweep", min(OVERDUE_INTERVAL, float(done)), duty="overdue"):
            chords.delete_forgotten(conn, database, float(done))
            _end_overdue(app, database, signal, float(done))
        failed = database.settings.failed_expires or float(done) * 7
        deleted = lifecycle.delete_old(conn, database, Status.DONE, float(done), DELETE_BATCH)
        return deleted + lifecycle.delete_old(conn, database, Status.FAILED, failed, DELETE_BATCH)
