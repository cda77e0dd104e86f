"""Settling a batch: one bad end holds up no other, and what a COMMIT has claimed is not lost on its way to the pool."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from celery import Celery

from pgtruth_transport import lifecycle
from pgtruth_transport.attempts import Attempt
from pgtruth_transport.db import Database
from pgtruth_transport.jobs import Ending, Lease
from pgtruth_transport.signals.silent import SilentSignal
from pgtruth_transport.worker.core import Worker
from pgtruth_transport.worker.held import Held
from tests.support_lifecycle import DONE, attempts_of, job_row, read

Conn = psycopg.Connection[Any]


class BrokenSignal(SilentSignal):
    """A signal with a mistake in it."""

    def announce(self, job_ids: Any) -> None:
        raise RuntimeError("a mistake")


@pytest.fixture
def settling(db: Database, database_url: str) -> Worker:
    """A worker's main process without Celery around it."""
    consumer = SimpleNamespace(
        hostname="w@localhost",
        prefetch_multiplier=1,
        controller=SimpleNamespace(max_concurrency=4),
        pool=SimpleNamespace(num_processes=4),
        strategies={},
    )
    app = Celery("settling", broker=database_url, backend="pgtruth://", set_as_current=False)
    worker = Worker(app, consumer, db.settings, db, SilentSignal())
    worker.consume(["celery"])
    return worker


def take(worker: Worker, db: Database, *ids: str) -> list[Held]:
    """Publish and claim these jobs."""
    with db.connection() as conn:
        lifecycle.enqueue(conn, db, [job_row(job_id) for job_id in ids])
    jobs = worker.settler.run((), len(ids))
    leases = [Lease(job.id, job.lease_version, worker.owner, job.claimed_at) for job in jobs]
    pairs = zip(jobs, leases, strict=True)
    return [Held(job, Attempt(lease, db.settings), time.monotonic() + 10) for job, lease in pairs]


@pytest.mark.parametrize("bad", ["a NUL: \x00", "half a pair: \ud800"])
def test_an_end_that_cannot_be_stored_fails_alone(settling: Worker, db: Database, conn: Conn, bad: str) -> None:
    batch = take(settling, db, "a", "b", "c")
    for held in batch:
        wrong: Ending = DONE._replace(error=bad)
        held.attempt.end(wrong if held.job.id == "b" else DONE)
    assert settling.settler.run(batch, 0) == []
    settling.settler.close()
    assert [read(conn, job_id)["status"] for job_id in "abc"] == ["done", "failed", "done"]
    assert "could not be stored" in read(conn, "b")["error"]
    assert [attempt["outcome"] for attempt in attempts_of(conn, "b")] == ["failed"]


def test_trouble_after_the_commit_loses_no_claim(settling: Worker, db: Database, conn: Conn) -> None:
    (first,) = take(settling, db, "a")
    with db.connection() as mine:
        lifecycle.enqueue(mine, db, [job_row("b")])
    conn.execute("INSERT INTO pgtruth.waiters VALUES ('a', 'somebody', clock_timestamp() + interval '1 hour')")
    settling.signal = BrokenSignal()
    first.attempt.end(DONE)
    claimed = settling.settler.run([first], 1)
    settling.settler.close()
    assert [job.id for job in claimed] == ["b"]
    assert read(conn, "a")["status"] == "done"
    assert read(conn, "b")["owned_by"] == settling.owner


def test_what_follows_an_end_is_claimed_with_it(
    settling: Worker, db: Database, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain's next step, on a worker that has room: one transaction, and nobody else is woken for it."""
    woken, delivered = list[Any](), list[Any]()
    monkeypatch.setattr(settling.signal, "wake", woken.append)
    settling.deliver, settling.consumer.strategies = delivered.append, {job_row("b").task: None}
    (first,) = take(settling, db, "a")
    first.attempt.end(DONE)
    first.attempt.rows.append(job_row("b"))
    settling.held[first.key] = first
    settling.conclude(first)
    settling._hungry = False
    assert settling.turn() == 1
    assert ([job.id for job in delivered], woken) == (["b"], [])
    query = "SELECT j.xmin = a.xmin FROM pgtruth.jobs j, pgtruth.attempts a WHERE j.id = 'b' AND a.job_id = 'a'"
    assert conn.execute(query).fetchone() == (True,)
    settling.settler.close()


def test_a_bodys_publish_inside_a_transaction_block_belongs_to_that_transaction(settling: Worker, db: Database) -> None:
    lease = Lease("a", 1, settling.owner, "2026-01-01")
    attempt = Attempt(lease, replace(db.settings, buffer_publishes=True))
    row = job_row("b")
    assert attempt.take([row], joined=True) == [row]
    assert attempt.take([row]) == []
