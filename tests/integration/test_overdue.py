"""What is late is not lost: chords and open jobs outlive their keeping time for as long as a job can still end them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from celery import Celery, chain, chord
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from pgtruth_transport import reaper
from pgtruth_transport.db import Database
from pgtruth_transport.jobs import Requeue
from pgtruth_transport.states import Outcome
from tests.support import WorkerProcess, eventually
from tests.support_jobs import NAME, client
from tests.support_lifecycle import claim, lease_of, read, requeue
from tests.support_plans import explain

Connection = psycopg.Connection[Any]
DAY = 86400.0
LATER = 25 * 3600


def age(conn: Connection, days: int = 8) -> None:
    """As if everything had been made so long ago, and nobody had looked for what is overdue since."""
    for table, column in (("chords", "created_at"), ("groups", "created_at"), ("jobs", "updated_at")):
        # names from the line above
        conn.execute(f"UPDATE pgtruth.{table} SET {column} = {column} - {days} * interval '1 day'")
    conn.execute("DELETE FROM pgtruth.duties")


def chords(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgtruth.chords").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_chord_waits_for_a_member_that_is_due_after_the_results_have_expired(
    worker: Callable[..., WorkerProcess], database_url: str, conn: Connection, compression: str | None
) -> None:
    """Also where the member is the end of a chain, or of an inner chord, and has no job of its own yet."""
    app = client(database_url, {"signal_url": "silent://"}, task_compression=compression)

    def add(x: int, y: int | None = None) -> Any:
        return app.signature(f"{NAME}.add", (x,) if y is None else (x, y))

    total = app.signature(f"{NAME}.total")
    headers = [
        [add(1, 1), add(2, 2).set(countdown=LATER)],
        [add(1, 1), chain(add(2, 1).set(countdown=LATER), add(1))],
        [add(1, 1), chord([add(2, 1).set(countdown=LATER), add(0, 1)], total.clone())],
    ]
    results = [chord(header, app=app)(total.clone()) for header in headers]
    worker()
    done = "SELECT count(*) FROM pgtruth.jobs WHERE status = 'done'"
    eventually(lambda: conn.execute(done).fetchone() == (4,), 15)
    age(conn)
    reaper.sweep(app)
    assert chords(conn) == 4
    conn.execute("UPDATE pgtruth.jobs SET run_at = clock_timestamp() WHERE status = 'queued'")
    assert [result.get(timeout=15) for result in results] == [6, 6, 6]
    age(conn)
    reaper.sweep(app)
    assert chords(conn) == 0
    assert conn.execute("SELECT count(*) FROM pgtruth.chord_parts").fetchone() == (0,)
    reaper.sweep(app)
    assert conn.execute("SELECT count(*) FROM pgtruth.groups").fetchone() == (0,)


def test_a_chord_that_nothing_can_complete_is_deleted_after_the_results_have_expired(
    database_url: str, conn: Connection
) -> None:
    app = client(database_url, {"signal_url": "silent://"})
    app.backend.set_chord_size("lost", 2)
    app.send_task(f"{NAME}.noop")
    reaper.sweep(app)
    assert chords(conn) == 1
    age(conn)
    reaper.sweep(app)
    assert chords(conn) == 0


def test_looking_for_what_is_awaited_reads_the_open_jobs_once(db: Database, conn: Connection) -> None:
    conn.execute(
        "INSERT INTO pgtruth.jobs (id, status, task, queue, body)"
        " SELECT 'j' || n, CASE WHEN n %% 10 = 0 THEN 'queued' ELSE 'done' END, 't', 'q', 'body'"
        " FROM generate_series(1, 20000) AS n",
        (),
    )
    conn.execute("ANALYZE pgtruth.jobs")
    plan = explain(conn, db.sql("job_mention"), {"ids": [f"c{n}" for n in range(50)]})
    assert plan.touched("jobs") <= 2000, plan.text


def open_jobs(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE status = 'queued' AND run_at = 'infinity'").fetchone()
    assert row is not None
    return int(row[0])


def replaced(app: Celery, db: Database, conn: Connection, countdown: float = 0) -> tuple[AsyncResult[Any], str]:
    """A job that has replaced itself by a chain, whose first step is queued: its result, and that step's id."""
    result = app.send_task(f"{NAME}.noop")
    (job,) = claim(conn, db)
    steps = chain(app.signature(f"{NAME}.add", (1, 1)), app.signature(f"{NAME}.add", (1,)), app=app)
    steps.freeze(result.id)
    with conn.transaction():
        assert requeue(conn, db, lease_of(job, "w1"), Requeue(Outcome.RELEASED, open=True))
    first = steps.apply_async(countdown=countdown or None, task_id=result.id).parent
    assert open_jobs(conn) == 1
    return result, str(first.id)


@pytest.mark.parametrize("how", ["expired", "revoked", "unknown"])
def test_a_replaced_job_ends_with_a_step_that_will_never_run(
    database_url: str, db: Database, conn: Connection, how: str
) -> None:
    app = client(database_url, {"signal_url": "silent://"})
    result, first = replaced(app, db, conn)
    match how:
        case "expired":
            conn.execute("UPDATE pgtruth.jobs SET expires_at = clock_timestamp() WHERE id = %s", (first,))
        case "revoked":
            app.control.revoke(first)
        case "unknown":
            conn.execute("UPDATE pgtruth.jobs SET unknown_since = '2000-01-01' WHERE id = %s", (first,))
    reaper.sweep(app)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=5)
    assert result.state == ("FAILURE" if how == "unknown" else "REVOKED")
    assert open_jobs(conn) == 0


def test_an_open_job_ends_when_nothing_is_left_that_could_publish_its_message(
    database_url: str, db: Database, conn: Connection
) -> None:
    app = client(database_url, {"signal_url": "silent://"})
    app.backend.store_result("noted", {"done": 3}, "PROGRESS")
    assert open_jobs(conn) == 1
    reaper.sweep(app)
    assert open_jobs(conn) == 1
    age(conn)
    reaper.sweep(app)
    row = read(conn, "noted")
    assert (row["status"], row["celery_state"]) == ("failed", "FAILURE")
    assert "no job is left that could" in row["error"]
    with pytest.raises(Exception, match="not published within 86400 s"):
        app.AsyncResult("noted").get(timeout=5)


def test_a_replaced_job_stays_open_for_as_long_as_a_step_may_come_to_it(
    database_url: str, db: Database, conn: Connection
) -> None:
    app = client(database_url, {"signal_url": "silent://"})
    result, first = replaced(app, db, conn, LATER)
    age(conn)
    reaper.sweep(app)
    assert open_jobs(conn) == 1
    conn.execute("DELETE FROM pgtruth.jobs WHERE id = %s", (first,))  # nothing of ours does that to an open job
    age(conn)
    reaper.sweep(app)
    assert open_jobs(conn) == 0
    assert result.state == "FAILURE"


def test_looking_for_open_jobs_does_not_walk_the_backlog(db: Database, conn: Connection) -> None:
    conn.execute(
        "INSERT INTO pgtruth.jobs (id, status, task, queue, run_at, updated_at)"
        " SELECT 'j' || n, 'queued', 't', 'q' || n %% 3, CASE WHEN n %% 1000 = 0 THEN 'infinity'::timestamptz"
        " ELSE clock_timestamp() END, '2000-01-01' FROM generate_series(1, 20000) AS n",
        (),
    )
    conn.execute("ANALYZE pgtruth.jobs")
    plan = explain(conn, db.sql("job_open"), {"keep": DAY, "count": 50})
    assert plan.touched("jobs") <= 100, plan.text
