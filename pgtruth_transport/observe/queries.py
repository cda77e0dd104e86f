"""What the tables say about jobs: counts, ages, recent ends, one job and its attempts.

Promises: inside :func:`looking` everything is read only and takes no locks, and every statement is bounded twice, by a
limit and by a time. Counts stop at a limit (:data:`COUNT_LIMIT`), because counting a backlog of millions would cost
more than it tells; a :class:`Count` that stopped says so. A larger limit gives the true count at its true price.
Nothing here can leave anything behind in a crash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pgtruth_transport.db import Connection, Database
from pgtruth_transport.states import Status

#: Where counting stops unless the caller wants more.
COUNT_LIMIT: Final = 10_000
#: How many jobs of each status a filtered list looks at.
SCAN_LIMIT: Final = 100_000
#: The external objective: 95 % of jobs are terminal within so many seconds (reliability contract, section 6).
OBJECTIVE_SECONDS: Final = 25.0
#: The longest that one statement may take, in seconds.
STATEMENT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Count:
    """A number of rows; ``capped`` if counting stopped there and there are more."""

    value: int
    capped: bool = False

    def __str__(self) -> str:
        return f"{self.value:,}{'+' if self.capped else ''}"


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The open jobs of one queue."""

    queue: str
    due: Count  # claimable now
    scheduled: Count  # their time has not come
    open: Count  # their message is still to be published
    processing: Count
    enqueue_failed: Count
    oldest_due: float | None  # seconds that the longest waiting one has been due


@dataclass(frozen=True, slots=True)
class Holder:
    """What one worker process holds."""

    owned_by: str
    jobs: int
    longest: float  # seconds since its oldest claim
    least_lease: float  # seconds until its first lease runs out
    expired: int  # leases that have run out and were not reaped yet


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of the last ``window`` seconds. Times in seconds, from due (or created) to the terminal state."""

    done: int
    failed: int
    retried: int  # ended after at least one retry
    span: float  # seconds that the figures cover: the window, or less where the newest ends filled the limit
    p50: float | None
    p95: float | None
    longest: float | None
    within: float | None  # share that met the objective

    @property
    def per_minute(self) -> float:
        return (self.done + self.failed) / self.span * 60 if self.span else 0.0


@dataclass(frozen=True, slots=True)
class End:
    """One job that has ended."""

    status: str
    ended_at: str  # as the database writes it, to the microsecond
    retry_count: int
    took: float


@dataclass(frozen=True, slots=True)
class JobLine:
    """A job, as lists show it."""

    id: str
    status: str
    task: str
    queue: str
    priority: int
    retry_count: int
    lease_version: int
    owned_by: str | None
    created_at: datetime
    updated_at: datetime
    run_at: str  # 'infinity' = its message is still to be published
    celery_state: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class JobDetail(JobLine):
    """A job with everything but its result; the payload is there for ``retry`` and never printed."""

    claimed_at: datetime | None
    lease_expires_at: datetime | None
    expires_at: datetime | None
    max_retries: int | None
    root_id: str | None
    parent_id: str | None
    group_id: str | None
    body_bytes: int | None
    result_bytes: int | None
    headers: bytes | None
    properties: bytes | None
    body: bytes | None


@dataclass(frozen=True, slots=True)
class AttemptLine:
    """One attempt that is over: who ran it, when, how it ended."""

    lease_version: int
    owned_by: str
    claimed_at: datetime
    ended_at: datetime
    outcome: str
    error: str | None


@contextmanager
def looking(db: Database, statement_seconds: float = STATEMENT_SECONDS) -> Iterator[Connection]:
    """A connection in a read-only transaction whose plans and times are bounded; what every function here needs.

    The transaction is short (a statement or a few), so it holds back no vacuum to speak of.
    """
    with db.connection(patience=statement_seconds + 1) as conn, conn.transaction():
        conn.execute(db.sql("observe_bounds"), {"timeout_ms": int(statement_seconds * 1000)})
        yield conn


def _count(value: int, limit: int) -> Count:
    return Count(value, value >= limit)


def queues(conn: Connection, db: Database, limit: int = COUNT_LIMIT) -> list[QueueDepth]:
    """Every queue that holds an open job."""
    found = []
    for name, due, scheduled, still_open, held, parked, oldest in conn.execute(
        db.sql("observe_queues"), {"limit": limit}
    ).fetchall():
        found.append(
            QueueDepth(
                name,
                due=_count(due, limit),
                scheduled=_count(scheduled, limit),
                open=_count(still_open, limit),
                processing=Count(held),
                enqueue_failed=_count(parked, limit),
                oldest_due=oldest,
            )
        )
    return found


def holders(conn: Connection, db: Database) -> list[Holder]:
    """Every worker process that holds a job."""
    return [Holder(*row) for row in conn.execute(db.sql("observe_holders")).fetchall()]


def totals(conn: Connection, db: Database, limit: int = COUNT_LIMIT) -> dict[Status, Count]:
    """How many ended jobs are kept, by status."""
    params = {"limit": limit}
    rows = conn.execute(db.sql("observe_totals"), params).fetchall()
    return {Status(status): _count(n, limit) for status, n in rows}


def ends(
    conn: Connection,
    db: Database,
    window: float = 300,
    limit: int = COUNT_LIMIT,
    objective: float = OBJECTIVE_SECONDS,
) -> Ends:
    """What ended in the last ``window`` seconds, and how long it took."""
    params = {"window": window, "limit": limit, "objective": objective}
    row = conn.execute(db.sql("observe_ended"), params).fetchone()
    assert row is not None
    done, failed, retried, oldest, p50, p95, longest, within = row
    span = oldest if max(done, failed) >= limit else window
    return Ends(done, failed, retried, span, p50, p95, longest, within)


def clock(conn: Connection, db: Database, ago: float = 0) -> str:
    """The database's time ``ago`` seconds ago, in the form that :func:`ended_since` takes."""
    row = conn.execute(db.sql("observe_clock"), {"ago": ago}).fetchone()
    assert row is not None
    return str(row[0])


def ended_since(conn: Connection, db: Database, after: str, until: str, limit: int = COUNT_LIMIT) -> list[End]:
    """Jobs that ended after ``after`` and not after ``until``, oldest first, at most ``limit``."""
    params = {"after": after, "until": until, "limit": limit}
    return [End(*row) for row in conn.execute(db.sql("observe_ended_since"), params).fetchall()]


def attempts(conn: Connection, db: Database, limit: int = SCAN_LIMIT) -> dict[str, Count]:
    """How attempts ended, by outcome; a sample of ``limit`` rows where more are kept."""
    rows = conn.execute(db.sql("observe_attempts"), {"limit": limit}).fetchall()
    full = sum(n for _, n in rows) >= limit
    return {outcome: Count(n, full) for outcome, n in rows}


def jobs(
    conn: Connection,
    db: Database,
    *,
    statuses: Sequence[str] = (),
    queue: str | None = None,
    task: str | None = None,
    since: float | None = None,
    limit: int = 50,
    scan: int = SCAN_LIMIT,
) -> list[JobLine]:
    """The ``limit`` jobs that changed last among those that match; ``since`` is seconds ago.

    Of each status at most ``scan`` jobs are looked at: a rare task among millions of finished ones may be missed.
    """
    params = {
        "statuses": list(statuses) or [status.value for status in Status],
        "queue": queue,
        "task": task,
        "since": since,
        "limit": limit,
        "scan": scan,
    }
    return [JobLine(*row) for row in conn.execute(db.sql("observe_jobs"), params).fetchall()]


def job(conn: Connection, db: Database, job_id: str) -> JobDetail | None:
    """One job by its id."""
    row = conn.execute(db.sql("observe_job"), {"id": job_id}).fetchone()
    return JobDetail(*row) if row else None


def attempts_of(conn: Connection, db: Database, job_id: str) -> list[AttemptLine]:
    """The attempts of one job that are over, oldest first."""
    return [AttemptLine(*row) for row in conn.execute(db.sql("observe_job_attempts"), {"id": job_id}).fetchall()]
