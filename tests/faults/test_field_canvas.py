"""Field cases of canvas and results (C01 to C06): what users of Celery reported, tried here with real workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from celery import chain, chord
from celery.exceptions import ChordError

from tests.support import WorkerProcess, eventually, runs, statuses
from tests.support_jobs import client, counter, ended, job, outcomes, send, wait_status

Conn = psycopg.Connection[Any]
Start = Callable[..., WorkerProcess]

FAST = {"lease_seconds": 3, "reap_interval": 1, "poll_interval": 0.3}
BASIC, FIELD = "tests.apps.basic", "tests.apps.field"
AWKWARD = "NeedsMore: 7: no seats"


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_c01_a_failed_header_fails_a_chord_whose_body_is_a_chain(
    worker: Start, database_url: str, conn: Conn, pool: str
) -> None:
    """celery/celery#6792: an error about a missing id, and ``get()`` never returns."""
    worker(options=FAST, app=FIELD, pool=pool)
    app = client(database_url, FAST)
    step, note = app.signature(f"{FIELD}.step"), app.signature(f"{BASIC}.note")
    ok, boom = app.signature(f"{BASIC}.run", args=("x",)), app.signature(f"{BASIC}.boom")
    body = chain(step.clone(), step.clone())
    result = chord([ok.clone(), boom, ok.clone()], body.on_error(note)).apply_async()
    with pytest.raises((ChordError, ValueError), match="boom"):  # Celery raises a parent's failure first
        result.get(timeout=20)
    assert isinstance(result.get(timeout=5, propagate=False), ChordError)
    eventually(lambda: runs(conn, "note 3") == 1, 5)
    eventually(lambda: statuses(conn).keys() <= {"done", "failed"}, 5)
    assert runs(conn, "step") == 0
    assert runs(conn, "note 3") == 1
    row = job(conn, result.id)
    assert row["status"] == "failed"
    assert "ChordError" in row["error"]


def test_c03_a_member_that_runs_twice_counts_once(worker: Start, database_url: str, conn: Conn) -> None:
    """celery/django-celery-results#397: a member run twice takes the counter to zero early; the body is lost."""
    frozen = worker(name="w1", options=FAST, app=FIELD, args=("-Q", "slow"), concurrency=1)
    app = client(database_url, FAST)
    member = app.signature(f"{FIELD}.member")
    header = [member.clone((0.5, 0)).set(queue="slow"), *(member.clone((0, number)) for number in range(1, 5))]
    result = chord(header, app.signature(f"{FIELD}.body")).apply_async()
    eventually(lambda: runs(conn, "start") == 1)
    frozen.sigstop()
    worker(name="w2", options=FAST, app=FIELD, args=("-Q", "slow,celery"))
    assert result.get(timeout=25) == [0, 1, 2, 3, 4]
    first = conn.execute("SELECT job_id FROM public.runs ORDER BY at LIMIT 1").fetchone()
    assert first is not None
    before = job(conn, first[0])
    frozen.sigcont()
    eventually(lambda: counter(conn, "stale_writes") >= 1 or "lost the lease" in frozen.output)
    again = send(app, "run", queue="slow")
    wait_status(conn, again, "done")
    assert job(conn, first[0]) == before
    assert outcomes(conn, first[0]) == ["lease_expired", "done"]
    assert runs(conn, "body") == 1
    parts = conn.execute("SELECT count(*), count(DISTINCT part_id) FROM pgtruth.chord_parts").fetchone()
    assert parts in ((5, 5), (0, 0))  # one per member, until they are tidied away


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_c05_an_exception_that_cannot_be_rebuilt_fails_its_task_only(
    worker: Start, database_url: str, conn: Conn, pool: str
) -> None:
    """celery/celery#6990: an exception whose constructor needs more arguments takes the main worker down."""
    only = worker(options=FAST, app=FIELD, concurrency=4, pool=pool)
    app = client(database_url, FAST)
    beside = [send(app, "sleepy", 4) for _ in range(3)]
    eventually(lambda: runs(conn) == 3)
    raised = app.send_task(f"{FIELD}.raises_awkwardly")
    retried = app.send_task(f"{FIELD}.retries_awkwardly")
    for result, count in ((raised, 0), (retried, 1)):
        row = wait_status(conn, result.id, "failed", 15)
        assert AWKWARD in row["error"]
        assert row["retry_count"] == count
        assert result.state == "FAILURE"
        with pytest.raises(Exception, match="no seats"):
            result.get(timeout=5)
    eventually(ended(conn, beside), 20)
    assert only.is_running()
    for job_id in beside:
        row = job(conn, job_id)
        assert (row["status"], row["lease_version"], row["retry_count"]) == ("done", 1, 0)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_c06_a_retry_under_a_broad_autoretry_runs_as_often_as_asked(
    worker: Start, database_url: str, conn: Conn, pool: str
) -> None:
    """celery/celery#3138: retry publishes the same id again. Here it spends ``retry_count``, as a crash does."""
    worker(options=FAST, app=FIELD, pool=pool)
    app = client(database_url, FAST)
    result = app.send_task(f"{FIELD}.retries_broadly", (2,))
    assert result.get(timeout=20) == 2
    assert runs(conn, "start", result.id) == 3
    row = job(conn, result.id)
    assert (row["status"], row["retry_count"], row["lease_version"]) == ("done", 2, 5)
    assert outcomes(conn, result.id) == ["retried", "retried", "done"]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_c06_a_task_that_replaces_itself_by_a_chain_gives_its_value(
    worker: Start, database_url: str, conn: Conn, pool: str
) -> None:
    """celery/celery#7596: a broad autoretry runs a replaced task again."""
    worker(options=FAST, app=FIELD, pool=pool)
    app = client(database_url, FAST)
    result = app.send_task(f"{FIELD}.replaces_by_chain", (5,))
    assert result.get(timeout=20) == 16
    assert runs(conn, "start", result.id) == 1
    assert runs(conn, "start") == 2
    row = job(conn, result.id)
    assert (row["status"], row["retry_count"]) == ("done", 0)
    assert statuses(conn) == {"done": 3}


def test_c06_a_replaced_task_survives_the_death_of_a_worker_between_its_steps(
    worker: Start, database_url: str, conn: Conn
) -> None:
    """The id stays open until its last step: neither done nor lost."""
    first = worker(name="w1", options=FAST, app=FIELD, concurrency=1, args=("-Q", "celery"))
    app = client(database_url, FAST)
    result = app.send_task(f"{FIELD}.replaces_by_chain", (5,))
    eventually(lambda: runs(conn, "start", result.id) == 1)
    first.kill9()
    worker(name="w2", options=FAST, app=FIELD)
    assert result.get(timeout=25) == 16
    assert job(conn, result.id)["status"] == "done"
