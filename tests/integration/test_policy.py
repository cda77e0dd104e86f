"""What an exception means: Celery's own meaning by the URLs alone, the contract's retry policy with ``install``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from celery import Celery

import pgtruth_transport
from pgtruth_transport.errors import SettingsError
from tests.support import WorkerProcess, eventually, runs
from tests.support_jobs import client, job, outcomes, send, wait_status

Conn = psycopg.Connection[Any]
Start = Callable[..., WorkerProcess]


def test_by_the_urls_alone_an_exception_fails_the_task(worker: Start, database_url: str, conn: Conn) -> None:
    worker()
    job_id = send(client(database_url), "boom")
    row = wait_status(conn, job_id, "failed")
    assert (row["retry_count"], row["error"], row["celery_state"]) == (0, "ValueError: boom", "FAILURE")
    assert outcomes(conn, job_id) == ["failed"]
    assert runs(conn, "start", job_id) == 1


def test_by_the_urls_alone_celerys_retry_counts(worker: Start, database_url: str, conn: Conn) -> None:
    worker()
    app = client(database_url)
    job_id = send(app, "retries", 3)
    assert app.AsyncResult(job_id).get(timeout=20) == 3
    row = job(conn, job_id)
    assert (row["retry_count"], row["lease_version"]) == (3, 7)
    assert outcomes(conn, job_id) == ["retried"] * 3 + ["done"]


def test_install_retries_a_failure_and_then_succeeds(worker: Start, database_url: str, conn: Conn) -> None:
    worker(install={})
    app = client(database_url)
    job_id = send(app, "flaky", 2)
    assert app.AsyncResult(job_id).get(timeout=30) == 3
    row = job(conn, job_id)
    assert row["retry_count"] == 2
    assert row["status"] == "done"


def test_install_ends_failed_when_the_budget_is_spent(worker: Start, database_url: str, conn: Conn) -> None:
    worker(install={}, options={"retry_limit": 1})
    job_id = send(client(database_url), "boom")
    row = wait_status(conn, job_id, "failed", 20)
    assert (row["retry_count"], row["result"], row["error"]) == (1, None, "ValueError: boom")
    assert runs(conn, "start", job_id) == 2


def test_a_tasks_own_max_retries_wins(worker: Start, database_url: str, conn: Conn) -> None:
    worker(install={}, options={"retry_limit": 1})
    app = client(database_url)
    job_id = send(app, "retries", 3)  # max_retries=5 of its own
    assert app.AsyncResult(job_id).get(timeout=30) == 3


def test_a_crash_and_an_exception_share_the_budget(worker: Start, database_url: str, conn: Conn) -> None:
    options = {"retry_limit": 2, "lease_seconds": 3, "reap_interval": 1, "poll_interval": 0.3}
    worker(install={}, options=options)
    app = client(database_url)
    job_id = send(app, "die", 1)  # one lost child, then alive
    assert app.AsyncResult(job_id).get(timeout=30) == "alive"
    assert job(conn, job_id)["retry_count"] == 1
    poison = send(app, "die")
    assert wait_status(conn, poison, "failed", 40)["retry_count"] == 2


def test_install_without_retries_keeps_celerys_meaning(worker: Start, database_url: str, conn: Conn) -> None:
    worker(install={"retry_failures": False})
    job_id = send(client(database_url), "boom")
    assert wait_status(conn, job_id, "failed")["retry_count"] == 0


def test_install_shows_started(worker: Start, database_url: str, conn: Conn) -> None:
    worker(install={})
    app = client(database_url)
    job_id = send(app, "sleepy", 2)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    result = app.AsyncResult(job_id)
    assert result.state == "STARTED"
    assert result.info["hostname"] == "w1@localhost"
    assert result.info["pid"] > 0


def test_a_time_out_is_retried_with_install(worker: Start, database_url: str, conn: Conn) -> None:
    worker(install={}, options={"retry_limit": 1})
    job_id = send(client(database_url), "sleepy", 30, time_limit=1)
    row = wait_status(conn, job_id, "failed", 30)
    assert "TimeLimitExceeded" in row["error"]
    assert row["retry_count"] == 1
    assert runs(conn, "start", job_id) == 2


def test_install_adds_the_reapers_beat_entry_and_keeps_what_the_user_set(database_url: str) -> None:
    app = Celery("t", broker=database_url, set_as_current=False)
    app.conf.task_track_started = False
    app.conf.beat_schedule = {"mine": {"task": "mine", "schedule": 1}}
    assert pgtruth_transport.install(app) is app
    assert set(app.conf.beat_schedule) == {"mine", "pgtruth.reap"}
    assert app.conf.beat_schedule["pgtruth.reap"]["schedule"] == 5
    assert app.conf.task_track_started is False
    assert issubclass(app.Task, pgtruth_transport.TruthTask)


def test_install_refuses_another_broker() -> None:
    app = Celery("t", broker="redis://localhost", set_as_current=False)
    with pytest.raises(SettingsError, match="pgtruth://"):
        pgtruth_transport.install(app)


def test_defaults_are_only_for_this_broker_and_only_where_the_user_has_not_chosen(database_url: str) -> None:
    ours = Celery("t", broker=database_url, set_as_current=False)
    chosen = Celery("t", broker=database_url, set_as_current=False)
    chosen.conf.task_acks_late = False
    other = Celery("t", broker="redis://localhost", set_as_current=False)
    assert (ours.conf.task_acks_late, chosen.conf.task_acks_late, other.conf.task_acks_late) == (True, False, False)


@pytest.mark.parametrize("install", [{}, {"retry_failures": False}])
def test_a_foreign_result_backend_hears_the_truth_last(
    worker: Start, database_url: str, redis_url: str, conn: Conn, install: dict[str, Any]
) -> None:
    worker(result=redis_url, install=install)
    app = client(database_url)
    foreign = Celery("t", broker=database_url, backend=redis_url, set_as_current=False)
    good, bad = send(app, "add", 1, 2), send(app, "boom")
    assert foreign.AsyncResult(good).get(timeout=20) == 3
    assert wait_status(conn, good, "done")["retry_count"] == 0
    row = wait_status(conn, bad, "failed", 60)
    assert row["retry_count"] == (3 if install == {} else 0)
    with pytest.raises(ValueError, match="boom"):
        foreign.AsyncResult(bad).get(timeout=20)
