"""A COMMIT whose answer is lost, and a row that an application's transaction keeps for long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
from celery import chord

from pgtruth_transport import lifecycle
from pgtruth_transport.db import Database
from tests.support import WorkerProcess, eventually, runs
from tests.support_jobs import NAME, attempts, client, job, outcomes, send, wait_status
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


def test_a_chord_that_an_application_keeps_holds_up_nobody_else(
    worker: Start, database_url: str, db: Database, conn: Conn
) -> None:
    """For longer than the worker's patience and its leases; the members end when it is let go, and ran once."""
    options = {"lease_seconds": 3.0, "reap_interval": 1.0, "connect_timeout": 2}
    process = worker(options=options)
    app = client(database_url)
    member = app.signature(f"{NAME}.run")
    header = [member.clone((n,), countdown=1) for n in range(2)]
    expiring = member.clone((9,), countdown=60)
    body = chord([*header, expiring], app=app)(app.signature(f"{NAME}.total"))
    group = body.parent
    assert group is not None
    first, second, late = (result.id for result in group.results)
    with db.connection() as application, application.transaction():
        application.execute("SELECT FROM pgtruth.chords WHERE id = %s FOR UPDATE", (group.id,))
        eventually(lambda: runs(conn, "end") == 2)
        process.wait_output("keeps the row of their chord")
        conn.execute("UPDATE pgtruth.jobs SET expires_at = clock_timestamp() WHERE id = %s", (late,))
        until = time.monotonic() + 6
        while time.monotonic() < until:  # two leases
            other = send(app, "noop")
            wait_status(conn, other, "done", 2.5)
        assert {job(conn, job_id)["status"] for job_id in (first, second)} == {"processing"}
        assert job(conn, late)["status"] == "queued"
    wait_status(conn, first, "done", 5)
    wait_status(conn, second, "done", 5)
    wait_status(conn, late, "failed", 5)
    assert "expired" in wait_status(conn, body.id, "failed", 5)["error"]
    assert (outcomes(conn, first), outcomes(conn, second)) == (["done"], ["done"])
    assert runs(conn, "start") == 2
    assert "onnection to broker lost" not in process.output
