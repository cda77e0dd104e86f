"""The only module that moves a job's status, each time by one guarded statement.

Promises: every statement names the old status; every write of a holder also names its ``lease_version`` and
``owned_by``; the attempt row is written by the statement that ends the attempt; only the database clock counts. Zero
rows changed means that the authority is gone, which callers treat as a quiet, counted outcome. A crash before COMMIT
leaves the row as it was: held rows come back by their lease, queued rows are still queued.

Every function takes a psycopg connection first, in autocommit mode or inside the caller's transaction, and the
:class:`~pgtruth_transport.db.Database` that it belongs to for the schema's statements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import psycopg

from . import roundtrip
from .db import Connection as OwnConnection
from .db import Database
from .jobs import Ending, Job, JobRow, Lease, Requeue, Stored
from .states import Outcome, Status

Connection = psycopg.Connection[Any]


class Ended(NamedTuple):
    """What a fenced statement really changed."""

    leases: frozenset[tuple[str, int]]  # (job id, lease version) that still had the authority
    waited: tuple[str, ...]  # job ids whose result somebody waits for


def enqueue_parameters(rows: Sequence[JobRow]) -> dict[str, list[Any]]:
    """The parameters of ``job_enqueue``; of rows with the same id the first counts."""
    unique = list({row.id: row for row in reversed(rows)}.values())[::-1] if len(rows) > 1 else list(rows)
    return {
        "ids": [r.id for r in unique],
        "tasks": [r.task for r in unique],
        "queues": [r.queue for r in unique],
        "priorities": [r.priority for r in unique],
        "etas": [r.eta for r in unique],
        "delays": [r.delay for r in unique],
        "expires": [r.expires for r in unique],
        "expires_ins": [r.expires_in for r in unique],
        "retry_counts": [r.retries for r in unique],
        "headers": [r.headers for r in unique],
        "properties": [r.properties for r in unique],
        "bodies": [r.body for r in unique],
        "root_ids": [r.root_id for r in unique],
        "parent_ids": [r.parent_id for r in unique],
        "group_ids": [r.group_id for r in unique],
    }


def enqueue(conn: Connection, db: Database, rows: Sequence[JobRow]) -> set[str]:
    """Insert ``rows`` as ``queued``; return the ids that are new (or were open). A known id changes nothing."""
    new = {row[0] for row in conn.execute(db.sql("job_enqueue"), enqueue_parameters(rows)).fetchall()}
    stand_in(conn, db, [row for row in rows if row.id not in new])
    return new


def stand_in(conn: Connection, db: Database, known: Sequence[JobRow]) -> None:
    """Have the sweep tell chord and chain of those ``known`` ids that were revoked before their publish."""
    rows = [row for row in known if leads_on(row)]
    if rows:
        conn.execute(db.sql("job_stand_in"), enqueue_parameters(rows))


def leads_on(row: JobRow) -> bool:
    """Whether a chain goes on from the end of this job, or a chord waits for it."""
    return not row.body.endswith(SIMPLE)


def enqueue_now(
    conn: OwnConnection,
    db: Database,
    row: JobRow,
    channel: str | None = None,
    committed: Callable[[], None] | None = None,
) -> bool:
    """Insert one row, commit and flush it, in one round trip; return whether the id is new (or was open).

    Workers may have the row as soon as it is committed, while its flush is still awaited: their claim is flushed after
    it, or not at all. So the commit sends a NOTIFY to ``channel``, and is followed by a call of ``committed``, which
    must not raise. Raises the error of either; after one of the flush the row may be there, and may yet be lost.
    """
    schema = db.settings.schema
    insert = roundtrip.statement("job_enqueue_one", schema, (roundtrip.text,))
    flush = roundtrip.statement("job_flush", schema, (roundtrip.boolean,))
    calls = (
        roundtrip.Call.of(insert, {**row._asdict(), "channel": channel}),
        roundtrip.Call.of(flush, {"id": row.id}),
    )
    inserted, flushed = roundtrip.run(conn, calls, committed)
    for outcome in (inserted, flushed):
        if isinstance(outcome, psycopg.Error):
            raise outcome
    if not flushed:
        raise psycopg.OperationalError(f"the server that has answered does not have job {row.id}: publish it again")
    if not inserted:
        stand_in(conn, db, [row])
    return bool(inserted)


def signal_failed(conn: Connection, db: Database, ids: Iterable[str]) -> None:
    """``queued`` -> ``enqueue_failed`` for jobs whose signal could not be sent (ADR-002)."""
    conn.execute(db.sql("job_signal_failed"), {"ids": list(ids)})


class Search(NamedTuple):
    """What a worker looks for, and what it knows of the tasks that it may find."""

    queues: tuple[str, ...]
    priorities: tuple[int, ...]
    early: tuple[str, ...]  # tasks acknowledged early
    started: tuple[str, ...]  # tasks whose start is shown as STARTED
    limit_tasks: tuple[str, ...]  # tasks with their own max_retries ...
    limits: tuple[int, ...]  # ... and how many
    strangers: tuple[str, ...] = ()  # tasks that it has just met and does not know
    room: int = 2**31 - 1  # how many could start at once; what is claimed beyond that may not be acknowledged early

    def parameters(self, count: int = 0, owner: str = "", lease: float = 0.0) -> dict[str, Any]:
        """Those of ``job_claim``, of which ``job_next_due`` takes the first."""
        known = {name: list(value) if isinstance(value, tuple) else value for name, value in self._asdict().items()}
        return {**known, "count": count, "owner": owner, "lease": lease}


def claim(conn: Connection, db: Database, search: Search, count: int, owner: str) -> psycopg.Cursor[Any]:
    """``queued`` -> ``processing`` for at most ``count`` jobs. Returns the cursor; read it with :func:`claimed`."""
    parameters = search.parameters(count, owner, db.settings.lease_seconds)
    return conn.execute(db.sql("job_claim"), parameters)


def claim_now(conn: OwnConnection, db: Database, search: Search, count: int, owner: str) -> list[Job]:
    """:func:`claim`, committed by itself: the jobs, in the order to start them."""
    statement = roundtrip.statement("job_claim", db.settings.schema, _JOB)
    call = _claim_call(statement, search, count, owner, db.settings.lease_seconds)
    return [Job._make(row) for row in roundtrip.one(conn, call)]


_JOB = (
    roundtrip.text,  # id
    roundtrip.text,  # task
    roundtrip.text,  # queue
    roundtrip.integer,  # priority
    roundtrip.integer,  # lease_version
    roundtrip.integer,  # retry_count
    roundtrip.integer,  # max_retries
    roundtrip.boolean,  # at_most_once
    roundtrip.text,  # claimed_at
    roundtrip.binary,  # headers
    roundtrip.binary,  # properties
    roundtrip.binary,  # body
)


@lru_cache(maxsize=64)
def _claim_call(statement: roundtrip.Statement, search: Search, count: int, owner: str, lease: float) -> roundtrip.Call:
    """Remembered: an idle worker looks for the same again and again."""
    return roundtrip.Call.of(statement, search.parameters(count, owner, lease))


def claimed(cursor: psycopg.Cursor[Any]) -> list[Job]:
    """The jobs that :func:`claim` took, in the order to start them."""
    return [Job._make(row) for row in cursor.fetchall()]


def next_due(conn: Connection, db: Database, search: Search) -> float | None:
    """Seconds until the next job of these queues falls due, ``None`` if there is none."""
    row = conn.execute(db.sql("job_next_due"), search.parameters()).fetchone()
    return row[0] if row else None


def renew(conn: Connection, db: Database, leases: Sequence[Lease], owner: str) -> set[tuple[str, int]]:
    """Extend the leases; return those that still have the authority."""
    params = {
        "ids": [lease.job_id for lease in leases],
        "versions": [lease.lease_version for lease in leases],
        "owner": owner,
        "lease": db.settings.lease_seconds,
    }
    return {(row[0], row[1]) for row in conn.execute(db.sql("job_renew"), params).fetchall()}


def finish(conn: Connection, db: Database, endings: Sequence[tuple[Lease, Ending]]) -> psycopg.Cursor[Any]:
    """``processing`` -> ``done`` or ``failed``, fenced. Returns the cursor; read it with :func:`ended`."""
    params = {
        "ids": [lease.job_id for lease, _ in endings],
        "versions": [lease.lease_version for lease, _ in endings],
        "owners": [lease.owned_by for lease, _ in endings],
        "claimed_ats": [lease.claimed_at for lease, _ in endings],
        "statuses": [ending.status.value for _, ending in endings],
        "outcomes": [ending.outcome.value for _, ending in endings],
        "states": [ending.celery_state for _, ending in endings],
        "results": [ending.result for _, ending in endings],
        "metas": [ending.meta for _, ending in endings],
        "errors": [ending.error for _, ending in endings],
    }
    return conn.execute(db.sql("job_finish"), params)


def ended(cursor: psycopg.Cursor[Any]) -> Ended:
    """What :func:`finish` changed."""
    rows = cursor.fetchall()
    return Ended(frozenset((row[0], row[1]) for row in rows), tuple(row[0] for row in rows if row[2]))


def requeue(conn: Connection, db: Database, requeues: Sequence[tuple[Lease, Requeue]]) -> psycopg.Cursor[Any]:
    """``processing`` -> ``queued``, fenced: retries and releases. Read the cursor with :func:`requeued`."""
    rows = [(lease, item, item.row) for lease, item in requeues]
    params = {
        "ids": [lease.job_id for lease, _, _ in rows],
        "versions": [lease.lease_version for lease, _, _ in rows],
        "owners": [lease.owned_by for lease, _, _ in rows],
        "claimed_ats": [lease.claimed_at for lease, _, _ in rows],
        "outcomes": [item.outcome.value for _, item, _ in rows],
        "retry_counts": [item.retry_count for _, item, _ in rows],
        "etas": ["infinity" if item.open else row.eta if row else None for _, item, row in rows],
        "delays": [row.delay if row and row.delay is not None else item.delay for _, item, row in rows],
        "states": [item.celery_state for _, item, _ in rows],
        "metas": [item.meta for _, item, _ in rows],
        "errors": [item.error for _, item, _ in rows],
        "unknowns": [item.unknown for _, item, _ in rows],
        "tasks": [row.task if row else None for _, _, row in rows],
        "queues": [row.queue if row else None for _, _, row in rows],
        "priorities": [row.priority if row else None for _, _, row in rows],
        "headers": [row.headers if row else None for _, _, row in rows],
        "properties": [row.properties if row else None for _, _, row in rows],
        "bodies": [row.body if row else None for _, _, row in rows],
    }
    return conn.execute(db.sql("job_requeue"), params)


def requeued(cursor: psycopg.Cursor[Any]) -> dict[tuple[str, int], str]:
    """What :func:`requeue` changed: (job id, lease version) -> queue."""
    return {(row[0], row[1]): row[2] for row in cursor.fetchall()}


def disown(conn: Connection, db: Database, owner: str, held: Iterable[tuple[str, int]]) -> list[tuple[str, str]]:
    """``processing`` -> ``queued`` for what ``owner`` claimed without knowing; returns (job id, queue) of each."""
    known = list(held)
    params = {"owner": owner, "ids": [job_id for job_id, _ in known], "versions": [version for _, version in known]}
    return conn.execute(db.sql("job_disown"), params).fetchall()


def progress(conn: Connection, db: Database, lease: Lease, state: str, meta: bytes | None) -> bool:
    """Show a state of the task's own; ``False`` if the attempt has lost its authority."""
    params = {
        "id": lease.job_id,
        "version": lease.lease_version,
        "owner": lease.owned_by,
        "state": state,
        "meta": meta,
    }
    return conn.execute(db.sql("job_progress"), params).fetchone() is not None


def store(conn: Connection, db: Database, items: Sequence[Stored]) -> tuple[str, ...]:
    """Write results for ids that nobody holds; returns the ids among them that somebody waits for."""
    unique = list({item.id: item for item in reversed(items)}.values())
    params = {
        "ids": [i.id for i in unique],
        "statuses": [i.status.value for i in unique],
        "tasks": [i.task for i in unique],
        "states": [i.celery_state for i in unique],
        "results": [i.result for i in unique],
        "metas": [i.meta for i in unique],
        "errors": [i.error for i in unique],
    }
    return tuple(row[0] for row in conn.execute(db.sql("job_store"), params).fetchall() if row[1])


def annotate(conn: Connection, db: Database, job_id: str, state: str, meta: bytes | None) -> bool:
    """Set the custom state of a job that the caller does not hold; ``False`` if there is no such open job."""
    params = {"id": job_id, "state": state, "meta": meta}
    return conn.execute(db.sql("job_annotate"), params).fetchone() is not None


def end_queued(conn: Connection, db: Database, endings: Sequence[tuple[str, Ending]]) -> Ended:
    """``queued`` or ``enqueue_failed`` -> ``failed``, for jobs that nobody holds: cancelled, expired, unknown."""
    params = {
        "ids": [job_id for job_id, _ in endings],
        "states": [ending.celery_state for _, ending in endings],
        "metas": [ending.meta for _, ending in endings],
        "errors": [ending.error for _, ending in endings],
    }
    rows = conn.execute(db.sql("job_end_queued"), params).fetchall()
    return Ended(frozenset((row[0], 0) for row in rows), tuple(row[0] for row in rows if row[1]))


def cancel(conn: Connection, db: Database, ids: Sequence[str], reason: str = "revoked") -> set[str]:
    """Cancel jobs that nobody holds; an unknown id is remembered as cancelled, so that its publish is ignored.

    Returns the ids that are cancelled now. A job that is ``processing`` is left to its holder (revoke with
    ``terminate`` ends it), but never begins again: if the holder dies or retries it, the sweep ends it. An ended one
    keeps its end.
    """
    ending = Ending(Status.FAILED, Outcome.CANCELLED, "REVOKED", None, None, reason)
    gone = {job_id for job_id, _ in end_queued(conn, db, [(job_id, ending) for job_id in ids]).leases}
    rest = [job_id for job_id in ids if job_id not in gone]
    if rest:
        store(conn, db, [Stored(i, Status.FAILED, "", "REVOKED", None, None, reason) for i in rest])
        conn.execute(db.sql("job_forbid"), {"ids": rest})
    return gone


def lock_queued(conn: Connection, db: Database, ids: Sequence[str]) -> list[Job]:
    """Lock the named jobs that nobody holds, until the caller's transaction ends."""
    return [Job._make(row) for row in conn.execute(db.sql("job_lock_queued"), {"ids": list(ids)}).fetchall()]


def lock_expired(conn: Connection, db: Database, count: int) -> list[Job]:
    """Lock a batch of queued jobs that are past their expiry."""
    return [Job._make(row) for row in conn.execute(db.sql("job_lock_expired"), {"count": count}).fetchall()]


def lock_forbidden(conn: Connection, db: Database, count: int) -> list[Job]:
    """Lock a batch of jobs that were revoked while a worker held them and have come back to the queue."""
    return [Job._make(row) for row in conn.execute(db.sql("job_lock_forbidden"), {"count": count}).fetchall()]


def lock_unknown(conn: Connection, db: Database, count: int) -> list[Job]:
    """Lock a batch of queued jobs whose task no worker has known for longer than ``unknown_task_wait``."""
    params = {"count": count, "wait": db.settings.unknown_task_wait}
    return [Job._make(row) for row in conn.execute(db.sql("job_lock_unknown"), params).fetchall()]


def overdue(conn: Connection, db: Database, keep: float, count: int) -> list[str]:
    """Open jobs that nobody has touched for ``keep`` seconds."""
    return [row[0] for row in conn.execute(db.sql("job_open"), {"keep": keep, "count": count}).fetchall()]


def keep_open(conn: Connection, db: Database, ids: Iterable[str]) -> None:
    """Note that the message of these open jobs may still come."""
    conn.execute(db.sql("job_keep_open"), {"ids": list(ids)})


def lock_open(conn: Connection, db: Database, ids: Sequence[str], keep: float) -> list[Job]:
    """Lock those of the named jobs that are still open, and were not touched for ``keep`` seconds."""
    params = {"ids": list(ids), "keep": keep}
    return [Job._make(row) for row in conn.execute(db.sql("job_lock_open"), params).fetchall()]


def lock_spent(conn: Connection, db: Database, count: int) -> list[tuple[Job, Lease]]:
    """Lock a batch of expired leases of jobs that may not run again, with the authority to end them."""
    params = {"count": count, "limit": db.settings.retry_limit}
    rows = conn.execute(db.sql("job_lock_spent"), params).fetchall()
    jobs = [(Job._make(row[:-1]), row[-1]) for row in rows]
    return [(job, Lease(job.id, job.lease_version, owner, job.claimed_at)) for job, owner in jobs]


def reap(conn: Connection, db: Database, count: int) -> list[tuple[str, str]]:
    """``processing`` -> ``queued`` for a batch of expired leases; returns (job id, queue) of each."""
    params = {"count": count, "limit": db.settings.retry_limit}
    return conn.execute(db.sql("job_reap"), params).fetchall()


def recover(conn: Connection, db: Database, count: int) -> list[tuple[str, str]]:
    """``enqueue_failed`` -> ``queued`` for a batch; returns (job id, queue) of each."""
    return conn.execute(db.sql("job_recover"), {"count": count}).fetchall()


def due_queues(conn: Connection, db: Database) -> list[str]:
    """The queues in which something is due and unclaimed."""
    return [row[0] for row in conn.execute(db.sql("job_due_queues")).fetchall()]


def mentioned(conn: Connection, db: Database, ids: Sequence[str]) -> set[str]:
    """The ids among these that an open job still names: what will be published, or counted, when that job ends."""
    return {row[0] for row in conn.execute(db.sql("job_mention"), {"ids": list(ids)}).fetchall()}


def delete_old(conn: Connection, db: Database, status: Status, keep: float, count: int) -> int:
    """Delete a batch of ended jobs older than ``keep`` seconds; returns how many."""
    params = {"status": status.value, "keep": keep, "count": count}
    row = conn.execute(db.sql("job_delete_old"), params).fetchone()
    return row[0] if row else 0


class Purged(NamedTuple):
    """A batch of purged jobs."""

    ended: int
    waited: tuple[str, ...]  # those of them whose result somebody waits for
    left: list[str]  # locked only: something follows from their end


#: How the JSON message of a job that no chain and no chord goes on from ends (callbacks and errbacks are not told).
SIMPLE = b'"chain": null, "chord": null}]'


def purge(conn: Connection, db: Database, queue: str, count: int) -> Purged:
    """``queued`` -> ``failed`` (purged) for a batch that nobody holds; the caller's transaction ends what is left."""
    rows = conn.execute(db.sql("job_purge"), {"queue": queue, "count": count, "simple": SIMPLE}).fetchall()
    ended = [row for row in rows if row[1]]
    return Purged(len(ended), tuple(row[0] for row in ended if row[2]), [row[0] for row in rows if not row[1]])


def size(conn: Connection, db: Database, queue: str) -> int:
    """How many jobs of a queue could be claimed now."""
    row = conn.execute(db.sql("job_size"), {"queue": queue}).fetchone()
    return row[0] if row else 0
