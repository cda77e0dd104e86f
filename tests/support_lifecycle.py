"""Jobs moved by the lifecycle's functions alone, and what the database says of them afterwards."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.rows import dict_row

from pgtruth_transport import db as connections
from pgtruth_transport import lifecycle
from pgtruth_transport.db import Database
from pgtruth_transport.jobs import Ending, Job, JobRow, Lease, Requeue
from pgtruth_transport.lifecycle import Search
from pgtruth_transport.schema import build
from pgtruth_transport.states import Outcome, Status
from pgtruth_transport.testing.servers import PostgresServer
from pgtruth_transport.urls import parse_url
from tests.support import eventually

Row = dict[str, Any]

#: Every column; Python has no infinite time, so that an open job's ``run_at`` reads as null.
COLUMNS = ", ".join(
    f"NULLIF({column.name}, 'infinity') AS {column.name}" if column.name == "run_at" else column.name
    for column in build().tables["pgtruth.jobs"].columns
)

DONE = Ending(Status.DONE, Outcome.DONE, "SUCCESS", b"42", None, None)
FAILED = Ending(Status.FAILED, Outcome.FAILED, "FAILURE", None, b"{}", "ValueError: no")
CANCELLED = Ending(Status.FAILED, Outcome.CANCELLED, "REVOKED", None, None, "revoked")
RELEASE = Requeue(Outcome.RELEASED)


@contextmanager
def fresh_database(server: PostgresServer, template: str) -> Iterator[str]:
    """The URL of a copy of ``template``, for as long as it is needed."""
    name = f"pgtruth_test_{secrets.token_hex(6)}"
    server.create_database(name, template)
    try:
        yield server.url_for(name)
    finally:
        connections.close_all()
        server.drop_database(name)


def forget_everything(url: str) -> None:
    """Make a database that several tests share as good as new."""
    with psycopg.connect(parse_url(url), autocommit=True) as conn:
        conn.execute("DELETE FROM pgtruth.jobs; DELETE FROM pgtruth.attempts")
        conn.execute("DELETE FROM pgtruth.waiters; DELETE FROM pgtruth.counters; DELETE FROM pgtruth.duties")


def retry(count: int, **changes: Any) -> Requeue:
    """A failure within the budget: the ``count``-th retry."""
    return Requeue(Outcome.RETRIED, count, celery_state="RETRY", error=f"failure {count}")._replace(**changes)


def job_row(job_id: str, **changes: Any) -> JobRow:
    """A published task, due at once."""
    values: dict[str, Any] = {
        "id": job_id,
        "task": "tests.noop",
        "queue": "celery",
        "priority": 0,
        "eta": None,
        "delay": None,
        "expires": None,
        "expires_in": None,
        "retries": 0,
        "root_id": job_id,
        "parent_id": None,
        "group_id": None,
        "headers": b"{}",
        "properties": b"{}",
        "body": b"[[], {}, {}]",
    }
    return JobRow(**{**values, **changes})


def search(*queues: str, priorities: Sequence[int] = range(9, -1, -1), **known: Any) -> Search:
    """What a worker of these queues looks for: priorities outermost, as workers do."""
    pairs = [(queue, priority) for priority in priorities for queue in queues or ("celery",)]
    return Search(tuple(q for q, _ in pairs), tuple(p for _, p in pairs), (), (), (), ())._replace(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    )


def claim(conn: psycopg.Connection[Any], db: Database, owner: str = "w1", count: int = 1, *queues: str) -> list[Job]:
    """Claim as ``owner``."""
    return lifecycle.claimed(lifecycle.claim(conn, db, search(*queues), count, owner))


def lease_of(job: Job, owner: str) -> Lease:
    """The authority that a claim gave."""
    return Lease(job.id, job.lease_version, owner, job.claimed_at)


def held(conn: psycopg.Connection[Any], db: Database, job_id: str = "a", owner: str = "w1", **changes: Any) -> Lease:
    """A job that ``owner`` has just claimed."""
    lifecycle.enqueue(conn, db, [job_row(job_id, **changes)])
    (job,) = lifecycle.claimed(lifecycle.claim(conn, db, search(changes.get("queue", "celery")), 1, owner))
    assert job.id == job_id
    return lease_of(job, owner)


def finish(conn: psycopg.Connection[Any], db: Database, lease: Lease, ending: Ending = DONE) -> bool:
    """Whether the holder's finish was accepted."""
    return bool(lifecycle.ended(lifecycle.finish(conn, db, [(lease, ending)])).leases)


def requeue(conn: psycopg.Connection[Any], db: Database, lease: Lease, item: Requeue = RELEASE) -> bool:
    """Whether the holder's retry or release was accepted."""
    return bool(lifecycle.requeued(lifecycle.requeue(conn, db, [(lease, item)])))


def purge(conn: psycopg.Connection[Any], db: Database, queue: str, batch: int = 1000) -> int:
    """Purge a queue, in batches; how many jobs."""
    total = 0
    while True:
        with conn.transaction():
            found = lifecycle.purge(conn, db, queue, batch)
            rest = [(job_id, CANCELLED._replace(error="purged")) for job_id in found.left]
            if rest:
                assert len(lifecycle.end_queued(conn, db, rest).leases) == len(rest)
        total += found.ended + len(rest)
        if found.ended + len(rest) < batch:
            return total


def read(conn: psycopg.Connection[Any], job_id: str = "a") -> Row:
    """The job's row."""
    with conn.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute(f"SELECT {COLUMNS} FROM pgtruth.jobs WHERE id = %s", (job_id,)).fetchone()
    assert found is not None, f"there is no job {job_id}"
    return found


def read_all(conn: psycopg.Connection[Any]) -> dict[str, Row]:
    """Every job's row, by id."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return {row["id"]: row for row in cursor.execute(f"SELECT {COLUMNS} FROM pgtruth.jobs").fetchall()}


def attempts_of(conn: psycopg.Connection[Any], job_id: str = "a") -> list[Row]:
    """The job's ended attempts, in order."""
    with conn.cursor(row_factory=dict_row) as cursor:
        query = "SELECT * FROM pgtruth.attempts WHERE job_id = %s ORDER BY lease_version"
        return cursor.execute(query, (job_id,)).fetchall()


def let_lease_run_out(conn: psycopg.Connection[Any], *job_ids: str) -> None:
    """As if the holder had stopped renewing a lease ago, on a server whose start is longer ago than the grace."""
    settled = "SELECT clock_timestamp() > pg_postmaster_start_time() + interval '1 second'"
    eventually(lambda: conn.execute(settled).fetchone() == (True,), 5)
    conn.execute(
        "UPDATE pgtruth.jobs SET lease_expires_at = clock_timestamp() - interval '1 ms' WHERE id = ANY(%s)",
        (list(job_ids),),
    )


def clock(conn: psycopg.Connection[Any]) -> Any:
    """The database's clock."""
    row = conn.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    return row[0]
