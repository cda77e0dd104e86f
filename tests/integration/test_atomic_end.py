"""The end of a job and everything that follows from it commit together, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import ChordError

from tests.support import WorkerProcess, eventually, runs
from tests.support_jobs import NAME, client, job, outcomes, send, wait_status

Conn = psycopg.Connection[Any]
Start = Callable[..., WorkerProcess]
FAST = {"lease_seconds": 3, "reap_interval": 1, "poll_interval": 0.3}


def sig(app: Celery, name: str, *args: Any, **options: Any) -> Any:
    return app.signature(f"{NAME}.{name}", args, **options)


def test_a_chain_runs_step_by_step(worker: Start, database_url: str, conn: Conn) -> None:
    worker()
    app = client(database_url)
    result = chain(sig(app, "add", 1, 2), sig(app, "add", 3), sig(app, "add", 4), app=app).apply_async()
    assert result.get(timeout=20) == 10
    assert result.parent.get(timeout=5) == 6


def test_the_next_step_exists_if_and_only_if_the_step_before_is_done(
    worker: Start, database_url: str, conn: Conn
) -> None:
    first = worker(name="w1", options=FAST, concurrency=1)
    app = client(database_url)
    result = chain(sig(app, "sleepy", 2, 1), sig(app, "add", 1), app=app).apply_async()
    step = result.parent.id
    eventually(lambda: runs(conn, "start", step) == 1)
    first.sigstop()  # its end will be stale
    worker(name="w2", options=FAST, concurrency=1)
    assert result.get(timeout=30) == 2
    first.sigcont()
    eventually(lambda: "stale" in first.output or "lost the lease" in first.output, 15)
    count = conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE task LIKE '%%.add'").fetchone()
    assert count == (1,)
    assert outcomes(conn, step) == ["lease_expired", "done"]


def test_a_failed_step_ends_the_steps_after_it(worker: Start, database_url: str, conn: Conn) -> None:
    worker()
    app = client(database_url)
    result = chain(sig(app, "boom"), sig(app, "add", 1), sig(app, "add", 2), app=app).apply_async()
    with pytest.raises(ValueError, match="boom"):
        result.get(timeout=20)
    assert job(conn, result.id)["status"] == "failed"
    assert conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE status NOT IN ('done', 'failed')").fetchone() == (0,)


def test_links_and_errbacks(worker: Start, database_url: str, conn: Conn) -> None:
    worker()
    app = client(database_url)
    good = send(app, "add", 1, 2, link=sig(app, "run"))
    bad = send(app, "boom", link=sig(app, "run"), link_error=sig(app, "note"))
    wait_status(conn, good, "done")
    wait_status(conn, bad, "failed")
    eventually(lambda: runs(conn, "note 3") == 1)
    eventually(lambda: conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE status = 'done'").fetchone() == (2,))
    assert conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE task = %s", (f"{NAME}.run",)).fetchone() == (1,)


@pytest.mark.parametrize("size", [1, 2, 30])
def test_a_chord_fires_its_body_once_with_every_result(worker: Start, database_url: str, conn: Conn, size: int) -> None:
    worker(concurrency=4)
    app = client(database_url)
    header = [sig(app, "add", number, 1) for number in range(size)]
    result = chord(header, sig(app, "total"), app=app).apply_async()
    assert result.get(timeout=30) == sum(range(1, size + 1))
    assert conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE task = %s", (f"{NAME}.total",)).fetchone() == (1,)


def test_a_member_that_runs_twice_counts_once(worker: Start, database_url: str, conn: Conn) -> None:
    first = worker(name="w1", options=FAST, concurrency=1)
    app = client(database_url)
    header = [sig(app, "sleepy", 2, 1)] + [sig(app, "add", 1, 1)] * 4
    header[0].set(queue="slow")
    slow = worker(name="w2", options=FAST, concurrency=1, args=["-Q", "slow"])
    result = chord(header, sig(app, "total"), app=app).apply_async()
    eventually(lambda: runs(conn, "start") == 1)
    slow.sigstop()
    worker(name="w3", options=FAST, concurrency=1, args=["-Q", "slow"])
    assert result.get(timeout=30) == 9
    slow.sigcont()
    eventually(lambda: "stale" in slow.output or "lost the lease" in slow.output, 15)
    assert conn.execute("SELECT count(*) FROM pgtruth.chord_parts").fetchone() == (5,)
    assert conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE task = %s", (f"{NAME}.total",)).fetchone() == (1,)
    assert first.is_running()


def test_a_chord_whose_body_is_a_chain_fails_with_its_header(worker: Start, database_url: str, conn: Conn) -> None:
    worker()
    app = client(database_url)
    body = chain(sig(app, "total"), sig(app, "run"), app=app)
    body.link_error(sig(app, "note"))
    header = [sig(app, "add", 1, 1), sig(app, "boom"), sig(app, "add", 2, 2)]
    result = chord(header, body, app=app).apply_async()
    with pytest.raises((ChordError, ValueError), match="boom"):  # the body's error, or its parent's
        result.get(timeout=20)
    wait_status(conn, result.id, "failed")
    assert isinstance(app.AsyncResult(result.id).result, ChordError)
    eventually(lambda: runs(conn, "note 3") == 1)
    assert runs(conn, "start") == 1  # boom; the body's steps never ran
    assert conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE status NOT IN ('done', 'failed')").fetchone() == (0,)


def test_a_poisoned_member_fails_the_chord(worker: Start, database_url: str, conn: Conn) -> None:
    worker(options={**FAST, "retry_limit": 1})
    app = client(database_url)
    result = chord([sig(app, "add", 1, 1), sig(app, "die")], sig(app, "total"), app=app).apply_async()
    with pytest.raises(Exception, match="exited prematurely"):
        result.get(timeout=40)
    row = wait_status(conn, result.id, "failed")
    assert "WorkerLostError" in row["error"]


def test_a_chord_with_a_group_among_its_members(worker: Start, database_url: str, conn: Conn) -> None:
    worker()
    app = client(database_url)
    inner = group([sig(app, "add", 1, 1), sig(app, "add", 2, 2)], app=app)
    result = chord([sig(app, "add", 0, 1), inner], sig(app, "total"), app=app).apply_async()
    assert result.get(timeout=20) == 7  # Celery flattens the group


def test_a_task_replaced_by_another_keeps_its_id(worker: Start, database_url: str, conn: Conn) -> None:
    worker()
    app = client(database_url)
    job_id = send(app, "replaces", 5)
    assert app.AsyncResult(job_id).get(timeout=20) == 6
    row = job(conn, job_id)
    assert (row["task"], row["status"], row["retry_count"]) == (f"{NAME}.add", "done", 0)


def test_an_ignored_result_is_done_and_reads_pending(worker: Start, database_url: str, conn: Conn) -> None:
    worker()
    app = client(database_url)
    job_id = send(app, "add", 1, 2, ignore_result=True)
    row = wait_status(conn, job_id, "done")
    assert row["result"] is None
    assert app.AsyncResult(job_id).state == "PENDING"


def test_the_result_arrives_without_tight_polling(
    worker: Start, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker()
    app = client(database_url)
    for number in range(3):
        assert app.AsyncResult(send(app, "add", number, 1)).get(timeout=20) == number + 1
    looks = []
    read = app.backend._read
    monkeypatch.setattr(app.backend, "_read", lambda ids: looks.append(1) or read(ids))
    job_id = send(app, "sleepy", 3, "late")
    assert app.AsyncResult(job_id).get(timeout=20) == "late"
    assert len(looks) < 15  # twice a second, and when it was told
