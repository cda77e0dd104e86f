"""Ends that no holder writes: one that the database refuses holds up no other, and everybody else is told."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from celery import Celery, chain, chord
from celery.result import AsyncResult

from pgtruth_transport import lifecycle, reaper
from pgtruth_transport.db import Database
from pgtruth_transport.runtime import runtime
from pgtruth_transport.settings import Settings
from pgtruth_transport.task import TruthTask
from tests.support import eventually
from tests.support_jobs import QUICK, client
from tests.support_lifecycle import claim, job_row, let_lease_run_out, read, read_all

Connection = psycopg.Connection[Any]
SIMPLE_BODY = b'[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'


@pytest.fixture
def app(database_url: str) -> Celery:
    return client(database_url, {**QUICK, "retry_limit": 0})


@pytest.fixture
def db(app: Celery) -> Database:
    return runtime(Settings.from_app(app)).database


def member(app: Celery) -> tuple[AsyncResult[Any], str]:
    """A chord of one member: its body's result, and the member's id."""
    body = chord([app.signature("tests.noop")], app=app)(app.signature("tests.total"))
    return body, str(body.parent.results[0].id)


def spoil(conn: Connection, job_id: str) -> None:
    """The chord of this job has a name that PostgreSQL refuses."""
    headers = json.loads(bytes(read(conn, job_id)["headers"]))
    headers["group"] = "a\0b"
    conn.execute("UPDATE pgtruth.jobs SET headers = %s WHERE id = %s", (json.dumps(headers).encode(), job_id))


@pytest.mark.parametrize("why", ["spent", "expired"])
def test_one_end_that_the_database_refuses_does_not_hold_up_the_others(
    app: Celery, db: Database, conn: Connection, why: str
) -> None:
    good, bad = [member(app) for _ in range(2)], member(app)
    ids = [job_id for _, job_id in (*good, bad)]
    spoil(conn, bad[1])
    if why == "spent":
        assert len(claim(conn, db, "w1", 9)) == 3
        let_lease_run_out(conn, *ids)
    else:
        conn.execute("UPDATE pgtruth.jobs SET expires_at = clock_timestamp() WHERE id = ANY(%s)", (ids,))
    swept = reaper.sweep(app)
    assert swept.spent + swept.expired == 3
    assert {read(conn, job_id)["status"] for job_id in ids} == {"failed"}
    assert [body.state for body, _ in good] == ["FAILURE", "FAILURE"]
    assert bad[0].id not in read_all(conn)  # nobody could tell its chord
    assert app.AsyncResult(bad[1]).state == ("FAILURE" if why == "spent" else "REVOKED")
    assert reaper.sweep(app)[:5] == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("by", ["control", "queue", "default app", "another app"])
def test_a_purge_tells_chords_chains_and_whoever_waits(
    app: Celery, conn: Connection, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Also through a kombu queue, which knows no app."""
    body, first = member(app)
    steps = chain(app.signature("tests.noop"), app.signature("tests.noop"), app=app).apply_async()
    singles = [app.send_task("tests.noop").id for _ in range(3)]
    waiting = [body, steps, app.AsyncResult(singles[0])]
    with ThreadPoolExecutor(len(waiting)) as pool:
        ends = [pool.submit(result.get, timeout=10, propagate=False) for result in waiting]
        waiters = "SELECT count(DISTINCT job_id) FROM pgtruth.waiters"
        eventually(lambda: conn.execute(waiters).fetchone() == (3,), 5)
        if by == "control":
            assert app.control.purge() == 5
        else:
            if by == "another app":  # with another broker, whose chords these are not
                other = Celery("tests.other", broker="pgtruth://nobody@127.0.0.1:1/none", set_as_current=False)
                monkeypatch.setattr("celery._state.default_app", other)
            if by == "default app":
                monkeypatch.setattr("celery._state.default_app", app)
            with app.connection_for_write() as connection:
                assert connection.default_channel.queue_purge("celery") == 5
        assert [type(end.result()).__name__ for end in ends] == ["ChordError", "TaskRevokedError", "TaskRevokedError"]
    rows = read_all(conn)
    assert {rows[i]["error"] for i in (first, steps.parent.id, *singles)} == {"purged"}
    assert [result.state for result in waiting] == ["FAILURE", "REVOKED", "REVOKED"]


def test_a_long_purge_is_bounded_batches(app: Celery, conn: Connection) -> None:
    publish = [job_row(f"j{n:04}", body=b"[[], {}, {}]" if n % 2 else SIMPLE_BODY) for n in range(1200)]
    database = runtime(Settings.from_app(app)).database
    lifecycle.enqueue(conn, database, publish)
    assert app.control.purge() == 1200
    assert {row["status"] for row in read_all(conn).values()} == {"failed"}


def test_a_sweep_that_is_the_victim_of_a_deadlock_tries_again(
    app: Celery, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, job_id = member(app)
    conn.execute("UPDATE pgtruth.jobs SET expires_at = clock_timestamp() WHERE id = %s", (job_id,))
    write, failures = lifecycle.end_queued, [psycopg.errors.DeadlockDetected(), psycopg.errors.SerializationFailure()]

    def end_queued(*args: Any) -> lifecycle.Ended:
        if failures:
            raise failures.pop()
        return write(*args)

    monkeypatch.setattr(lifecycle, "end_queued", end_queued)
    assert reaper.sweep(app).expired == 1
    assert body.state == "FAILURE"


@pytest.mark.parametrize("why", ["spent", "expired"])
def test_an_end_that_no_holder_writes_is_told_to_a_foreign_backend(
    database_url: str, conn: Connection, why: str
) -> None:
    """After its commit, in the sweep's own transaction: no second connection waits for the rows that it has locked."""
    options = {**QUICK, "retry_limit": 0}
    app = Celery("tests.foreign", broker=database_url, backend="cache+memory://", set_as_current=False)
    app.conf.broker_transport_options = options

    @app.task(name="tests.truthful", base=TruthTask, shared=False)  # type: ignore[untyped-decorator]
    def truthful() -> None: ...

    result = truthful.delay()
    if why == "spent":
        claim(conn, runtime(Settings.from_app(app)).database)
        let_lease_run_out(conn, result.id)
    else:
        conn.execute("UPDATE pgtruth.jobs SET expires_at = clock_timestamp()")
    with ThreadPoolExecutor(1) as pool:
        sweep = pool.submit(reaper.sweep, app)
        try:
            swept = sweep.result(timeout=5)
        finally:
            conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    assert swept.spent + swept.expired == 1
    assert read(conn, result.id)["status"] == "failed"
    eventually(lambda: result.state == ("FAILURE" if why == "spent" else "REVOKED"))
