"""What is late is not lost: chords and open jobs outlive their keeping time for as long as a job can still end them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from celery import chain, chord

from pgtruth_transport import reaper
from pgtruth_transport.db import Database
from tests.support import WorkerProcess, eventually
from tests.support_jobs import NAME, client
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
