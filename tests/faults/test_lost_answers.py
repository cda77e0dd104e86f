"""A COMMIT whose answer is lost, and a row that an application's transaction keeps for long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from pgtruth_transport import lifecycle
from pgtruth_transport.db import Database
from tests.support import WorkerProcess, eventually, runs
from tests.support_jobs import attempts, client, job, outcomes, send, wait_status
from tests.support_lifecycle import claim, job_row

Conn = psycopg.Connection[Any]
Start = Callable[..., WorkerProcess]


def test_a_claim_whose_commit_was_not_answered_is_given_back_at_the_reconnect(
    worker: Start, database_url: str, db: Database, conn: Conn
) -> None:
    """It costs no retry and waits for no lease; what the worker knows to hold goes on."""
    process = worker(conf={"worker_cancel_long_running_tasks_on_connection_loss": False})
    app = client(database_url)
    running = send(app, "sleepy", 4)
    eventually(lambda: runs(conn, "start", running) == 1)
    owner = job(conn, running)["owned_by"]
    lifecycle.enqueue(conn, db, [job_row("lost", queue="elsewhere")])  # as if this worker had asked for it
    assert [found.id for found in claim(conn, db, owner, 1, "elsewhere")] == ["lost"]
    conn.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE '%:work'"
    )
    send(app, "noop")
    row = wait_status(conn, "lost", "queued", 10)
    assert (row["retry_count"], row["lease_version"]) == (0, 2)
    (attempt,) = attempts(conn, "lost")
    assert (attempt["outcome"], attempt["owned_by"]) == ("released", owner)
    wait_status(conn, running, "done", 10)
    assert outcomes(conn, running) == ["done"]
    assert runs(conn, "start", running) == 1
    assert process.is_running()
