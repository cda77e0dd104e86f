"""Ends that Celery tells no result backend of: they are settled all the same, with what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.support import WorkerProcess, eventually, runs
from tests.support_jobs import NAME, client, send, wait_status

Conn = psycopg.Connection[Any]
Start = Callable[..., WorkerProcess]
IGNORED = {"task_ignore_result": True}


@pytest.mark.parametrize("task", ["boom", "die"])
def test_errbacks_run_where_results_are_ignored(worker: Start, database_url: str, conn: Conn, task: str) -> None:
    worker(conf=IGNORED, options={"retry_limit": 0})
    app = client(database_url)
    job_id = send(app, task, link_error=app.signature(f"{NAME}.run"))
    wait_status(conn, job_id, "failed", 15)
    query = "SELECT status FROM pgtruth.jobs WHERE task = %s"
    eventually(lambda: conn.execute(query, (f"{NAME}.run",)).fetchall() == [("done",)], 10)


def test_a_lost_child_ends_a_job_acknowledged_early(worker: Start, database_url: str, conn: Conn) -> None:
    worker(conf=IGNORED | {"task_acks_late": False})
    job_id = send(client(database_url), "die")
    assert "Worker" in wait_status(conn, job_id, "failed", 8)["error"]
    assert runs(conn, "start", job_id) == 1


def test_a_hard_time_limit_ends_a_job_acknowledged_early(worker: Start, database_url: str, conn: Conn) -> None:
    worker(conf=IGNORED | {"task_acks_late": False, "task_time_limit": 1})
    job_id = send(client(database_url), "sleepy", 30)
    assert "TimeLimitExceeded" in wait_status(conn, job_id, "failed", 10)["error"]


@pytest.mark.parametrize(
    ("pool", "task"),
    [("prefork", "out_of_memory"), ("threads", "out_of_memory"), ("prefork", "leaves"), ("threads", "leaves")],
)
def test_what_celery_does_not_count_as_a_failure_ends(
    worker: Start, database_url: str, conn: Conn, pool: str, task: str
) -> None:
    worker(app="tests.apps.endings", pool=pool, options={"retry_limit": 0})
    job_id = str(client(database_url).send_task(f"tests.apps.endings.{task}").id)
    wait_status(conn, job_id, "failed", 10)


def test_a_cold_shutdown_runs_nothing_twice_that_was_acknowledged_early(
    worker: Start, database_url: str, conn: Conn
) -> None:
    options = {"lease_seconds": 3, "reap_interval": 1}
    first = worker(concurrency=1, options=options)
    job_id = send(client(database_url), "sleepy_early", 60)
    eventually(lambda: runs(conn, "start", job_id), 10)
    worker(options=options)
    first.sigquit()
    assert "may not run twice" in wait_status(conn, job_id, "failed", 15)["error"]
    assert runs(conn, "start", job_id) == 1
