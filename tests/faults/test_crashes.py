"""The failure matrix with real worker processes that are really killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.support import WorkerProcess, eventually, runs
from tests.support_jobs import attempts, client, counter, ended, job, outcomes, send, wait_status

Conn = psycopg.Connection[Any]
Start = Callable[..., WorkerProcess]

FAST = {"lease_seconds": 3, "reap_interval": 1, "poll_interval": 0.3}
#: Seconds: a lease, a sweep, and a loaded machine.
REAPED = 12


def test_worker_crashes_during_processing(worker: Start, database_url: str, conn: Conn) -> None:
    first = worker(name="w1", options=FAST)
    job_id = send(client(database_url), "sleepy", 2)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    first.kill9()
    assert job(conn, job_id)["status"] == "processing"
    worker(name="w2", options=FAST)
    row = wait_status(conn, job_id, "done", REAPED + 5)
    assert (row["retry_count"], row["lease_version"], row["owned_by"]) == (1, 3, None)
    assert outcomes(conn, job_id) == ["lease_expired", "done"]
    assert runs(conn, "start", job_id) == 2


def test_a_restarted_worker_of_the_same_name_does_not_inherit_leases(
    worker: Start, database_url: str, conn: Conn
) -> None:
    first = worker(name="same", options=FAST)
    job_id = send(client(database_url), "sleepy", 1)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    owner = job(conn, job_id)["owned_by"]
    first.kill9()
    worker(name="same", options=FAST)
    wait_status(conn, job_id, "done", REAPED + 5)
    owners = [attempt["owned_by"] for attempt in attempts(conn, job_id)]
    assert owners[0] == owner
    assert owners[1] != owner
    assert all(found.startswith("same@localhost:") for found in owners)


def test_lease_expires_beyond_retry_limit(worker: Start, database_url: str, conn: Conn) -> None:
    options = {**FAST, "retry_limit": 1}
    app = client(database_url)
    job_id = send(app, "sleepy", 60, link_error=app.signature("tests.apps.basic.note"))
    for number in (1, 2):
        victim = worker(name=f"w{number}", options=options)
        eventually(lambda n=number: runs(conn, "start", job_id) == n, REAPED)  # type: ignore[misc]
        victim.kill9()
    worker(name="w3", options=options)
    row = wait_status(conn, job_id, "failed", REAPED + 5)
    assert row["retry_count"] == 1
    assert "retries were spent" in row["error"]
    assert row["result"] is None
    assert outcomes(conn, job_id) == ["lease_expired", "failed"]
    assert app.AsyncResult(job_id).state == "FAILURE"
    eventually(lambda: runs(conn, "note 3") == 1)  # its errback ran, once


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_stale_worker_cannot_overwrite_newer_truth(worker: Start, database_url: str, conn: Conn, pool: str) -> None:
    first = worker(name="w1", options=FAST, pool=pool, concurrency=1)
    job_id = send(client(database_url), "sleepy", 1, "value")
    eventually(lambda: runs(conn, "start", job_id) == 1)
    first.sigstop()
    worker(name="w2", options=FAST, concurrency=1)
    row = wait_status(conn, job_id, "done", REAPED + 5)
    first.sigcont()
    eventually(lambda: counter(conn, "stale_writes") >= 1 or "lost the lease" in first.output, 10)
    settled = job(conn, job_id)
    assert settled == row
    assert outcomes(conn, job_id) == ["lease_expired", "done"]
    again = send(client(database_url), "run", 1)
    wait_status(conn, again, "done")  # both workers live on
    assert first.is_running()


def test_a_worker_that_was_frozen_reclaims_its_own_job_once(worker: Start, database_url: str, conn: Conn) -> None:
    only = worker(name="w1", options=FAST, concurrency=1)
    job_id = send(client(database_url), "sleepy", 1)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    only.sigstop()
    conn.execute("UPDATE pgtruth.jobs SET lease_expires_at = clock_timestamp() WHERE id = %s", (job_id,))
    time.sleep(0.2)
    only.sigcont()
    wait_status(conn, job_id, "done", REAPED + 5)
    ends = [o for o in outcomes(conn, job_id) if o == "done"]
    assert ends == ["done"]


def test_a_lost_child_is_a_counted_failure(worker: Start, database_url: str, conn: Conn) -> None:
    worker(options=FAST)
    job_id = send(client(database_url), "die", 1)
    row = wait_status(conn, job_id, "done", 20)
    assert (row["retry_count"], runs(conn, "start", job_id)) == (1, 2)
    assert outcomes(conn, job_id) == ["retried", "done"]


@pytest.mark.parametrize("task", ["die", "leaves"])
def test_a_poison_job_ends_failed_and_never_loops(worker: Start, database_url: str, conn: Conn, task: str) -> None:
    running = worker(options=FAST)
    app = client(database_url)
    job_id = send(app, task, link_error=app.signature("tests.apps.basic.note"))
    row = wait_status(conn, job_id, "failed", 40)
    assert row["retry_count"] == 3
    assert runs(conn, "start", job_id) == 4
    assert "WorkerLostError" in row["error"]
    assert app.AsyncResult(job_id).state == "FAILURE"
    eventually(lambda: runs(conn, "note 3") == 1)
    good = send(app, "run", 7)
    wait_status(conn, good, "done", 20)
    assert running.is_running()


def test_early_ack_never_runs_twice(worker: Start, database_url: str, conn: Conn) -> None:
    first = worker(name="w1", options=FAST)
    job_id = send(client(database_url), "sleepy_early", 60)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    assert job(conn, job_id)["status"] == "processing"
    first.kill9()
    worker(name="w2", options=FAST)
    row = wait_status(conn, job_id, "failed", REAPED + 5)
    assert "may not run twice" in row["error"]
    assert runs(conn, "start", job_id) == 1


def test_early_ack_is_done_only_when_its_outcome_arrives(worker: Start, database_url: str, conn: Conn) -> None:
    worker(options=FAST)
    job_id = send(client(database_url), "sleepy_early", 1.5)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    assert job(conn, job_id)["status"] == "processing"
    assert wait_status(conn, job_id, "done")["retry_count"] == 0


def test_jobs_that_have_not_started_are_not_held_by_a_worker_that_dies(
    worker: Start, database_url: str, conn: Conn
) -> None:
    first = worker(name="w1", options={**FAST, "lease_seconds": 15})
    app = client(database_url)
    ids = [send(app, "sleepy", 3) for _ in range(6)]
    eventually(lambda: runs(conn, "start") == 2)
    held = conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE status = 'processing'").fetchone()
    assert held == (2,)
    first.kill9()
    worker(name="w2", options=FAST, concurrency=4)
    eventually(lambda: runs(conn, "start") == 6, 3)  # the four others at once, not after a lease
    eventually(ended(conn, ids), 40)
    counts = conn.execute("SELECT retry_count, count(*) FROM pgtruth.jobs GROUP BY 1 ORDER BY 1").fetchall()
    assert counts == [(0, 4), (1, 2)]


def test_a_long_job_keeps_its_lease(worker: Start, database_url: str, conn: Conn) -> None:
    for number in (1, 2):
        worker(name=f"w{number}", options=FAST)
    job_id = send(client(database_url), "sleepy", 10)
    row = wait_status(conn, job_id, "done", 25)
    assert (row["lease_version"], row["retry_count"], runs(conn, "start", job_id)) == (1, 0, 1)


def test_a_short_job_is_never_renewed(worker: Start, database_url: str, conn: Conn) -> None:
    worker()
    job_id = send(client(database_url), "sleepy", 3)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    before = job(conn, job_id)["lease_expires_at"]
    eventually(lambda: runs(conn, "end", job_id) == 1, 10)
    claimed = attempts(conn, job_id) or eventually(lambda: attempts(conn, job_id))
    assert (before - claimed[0]["claimed_at"]).total_seconds() == pytest.approx(15, abs=0.1)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_hard_time_limit_ends_the_job(worker: Start, database_url: str, conn: Conn, pool: str) -> None:
    running = worker(options=FAST, pool=pool, concurrency=2)
    job_id = send(client(database_url), "sleepy", 6, time_limit=2)
    row = wait_status(conn, job_id, "failed", 15)
    assert "TimeLimitExceeded" in row["error"]
    eventually(lambda: runs(conn, "start", job_id) == 1)
    good = send(client(database_url), "run", 1)
    wait_status(conn, good, "done", 15)
    assert job(conn, job_id) == row
    assert running.is_running()


def test_warm_shutdown_finishes_what_runs_and_releases_the_rest(worker: Start, database_url: str, conn: Conn) -> None:
    first = worker(name="w1", concurrency=2)
    app = client(database_url)
    ids = [send(app, "sleepy", 0.2) for _ in range(40)]
    eventually(lambda: runs(conn, "end") >= 4)
    first.sigterm()
    assert first.wait() == 0
    held = conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE status = 'processing'").fetchone()
    assert held == (0,)
    worker(name="w2", concurrency=4)
    eventually(ended(conn, ids), 20)
    assert runs(conn, "start") == 40
    assert runs(conn, "end") == 40
    assert conn.execute("SELECT max(retry_count) FROM pgtruth.jobs").fetchone() == (0,)


def test_cold_shutdown_releases_late_ack_jobs_at_once(worker: Start, database_url: str, conn: Conn) -> None:
    first = worker(name="w1")
    job_id = send(client(database_url), "sleepy", 30)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    first.sigquit()
    first.wait()
    row = job(conn, job_id)
    assert (row["status"], row["retry_count"], row["owned_by"]) == ("queued", 0, None)
    assert "Restoring 1 unacknowledged message(s)" in first.output
    assert "Traceback" not in first.output


def test_what_ends_within_a_soft_shutdown_is_done(worker: Start, database_url: str, conn: Conn) -> None:
    """The loop sleeps meanwhile: what the pool has reported by then is read before the rest is cancelled."""
    first = worker(name="w1", conf={"worker_soft_shutdown_timeout": 4})
    app = client(database_url)
    short, long = send(app, "sleepy", 1, time_limit=3), send(app, "sleepy", 60)
    eventually(lambda: runs(conn, "start", short) == runs(conn, "start", long) == 1)
    first.sigquit()
    first.wait()
    assert job(conn, short)["status"] == "done"
    row = job(conn, long)
    assert (row["status"], row["retry_count"], row["owned_by"]) == ("queued", 0, None)
    assert "Restoring 1 unacknowledged message(s)" in first.output
    assert "Traceback" not in first.output


def test_a_task_that_no_worker_knows_waits_for_one_that_does(worker: Start, database_url: str, conn: Conn) -> None:
    running = worker(options={**FAST, "unknown_task_wait": 6})
    app = client(database_url)
    result = app.send_task("nobody.knows", (), queue="celery")
    running.wait_output("task unknown to this worker")
    row = job(conn, result.id)
    assert (row["retry_count"], row["status"]) == (0, "queued")
    row = wait_status(conn, result.id, "failed", 20)
    assert "no worker knew this task" in row["error"]
    assert row["lease_version"] < 20  # no tight loop
