"""Errbacks that Celery calls instead of publishing them: after the commit, without a lock, and with nobody waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from celery import Celery, chord
from psycopg.errors import LockNotAvailable

from pgtruth_transport import endings, lifecycle, reaper
from pgtruth_transport.attempts import Attempt
from pgtruth_transport.db import Database
from pgtruth_transport.jobs import Job, Lease
from pgtruth_transport.runtime import runtime
from pgtruth_transport.settings import Settings
from tests.support import WorkerProcess, eventually, runs
from tests.support_jobs import NAME, QUICK, client, send, wait_status
from tests.support_lifecycle import FAILED, claim, lease_of, let_lease_run_out, read

Connection = psycopg.Connection[Any]
Start = Callable[..., WorkerProcess]


@pytest.fixture
def app(database_url: str) -> Celery:
    return client(database_url, {**QUICK, "retry_limit": 0})


@pytest.fixture
def db(app: Celery) -> Database:
    return runtime(Settings.from_app(app)).database


def errback(app: Celery, call: Callable[[], object]) -> Any:
    """The signature of an errback that Celery calls."""

    @app.task(name="tests.called", shared=False)
    def called(request: Any, exc: Any, traceback: Any) -> None:
        call()

    return called.s()


def watch(conn: Connection, seen: list[Any], names: list[str]) -> Callable[[], None]:
    """What an errback sees of the row of the job that is named first, and whether all their rows are free."""

    def look() -> None:
        row = conn.execute("SELECT status FROM pgtruth.jobs WHERE id = %s", names[:1]).fetchone()
        try:
            conn.execute("SELECT FROM pgtruth.jobs WHERE id = ANY(%s) FOR UPDATE NOWAIT", (names,))
            conn.execute("SELECT FROM pgtruth.chords FOR UPDATE NOWAIT")
            seen.append((row and row[0], "free"))
        except LockNotAvailable:
            seen.append((row and row[0], "locked"))

    return look


def die(app: Celery, db: Database, conn: Connection, *ids: str) -> None:
    """The worker that holds these jobs is dead, and its leases have run out."""
    assert {job.id for job in claim(conn, db, "w1", 9)} == set(ids)
    let_lease_run_out(conn, *ids)


@pytest.mark.parametrize("why", ["spent", "unknown"])
def test_of_a_job_that_the_sweep_ends(app: Celery, db: Database, conn: Connection, why: str) -> None:
    seen: list[Any] = []
    names: list[str] = []
    link = errback(app, watch(conn, seen, names))
    names.append(app.send_task("tests.noop", link_error=link).id)
    if why == "spent":
        die(app, db, conn, *names)
    else:
        conn.execute("UPDATE pgtruth.jobs SET unknown_since = '2000-01-01'")
    reaper.sweep(app)
    eventually(lambda: seen == [("failed", "free")])
    reaper.sweep(app)
    assert len(seen) == 1


def test_of_a_chord_whose_member_the_sweep_ends(app: Celery, db: Database, conn: Connection) -> None:
    seen: list[Any] = []
    names: list[str] = []
    body = app.signature("tests.total").on_error(errback(app, watch(conn, seen, names)))
    result = chord([app.signature("tests.one"), app.signature("tests.two")], app=app)(body)
    members = [child.id for child in result.parent.results]
    names.extend([result.id, *members])
    die(app, db, conn, *members)
    assert reaper.sweep(app).spent == 2
    eventually(lambda: seen == [("failed", "free")])


def test_one_that_raises_changes_nothing(app: Celery, db: Database, conn: Connection) -> None:
    calls: list[int] = []

    def broken() -> None:
        calls.append(1)
        raise ValueError("no")

    job_id = app.send_task("tests.noop", link_error=errback(app, broken)).id
    die(app, db, conn, job_id)
    assert reaper.sweep(app).spent == 1
    eventually(lambda: calls)
    assert read(conn, job_id)["status"] == "failed"


def test_a_slow_one_holds_up_no_sweep(app: Celery, db: Database, conn: Connection) -> None:
    go, calls = threading.Event(), []

    def slow() -> None:
        go.wait(30)
        calls.append(1)

    try:
        link = errback(app, slow)
        ids = [app.send_task("tests.noop", link_error=link).id for _ in range(2)]
        die(app, db, conn, *ids)
        assert reaper.sweep(app).spent == 2
        later = app.send_task("tests.noop", link_error=link).id
        die(app, db, conn, later)
        assert reaper.sweep(app).spent == 1
        assert {read(conn, job_id)["status"] for job_id in (*ids, later)} == {"failed"}
        assert not calls
    finally:
        go.set()
    eventually(lambda: len(calls) == 3)


def test_an_end_that_is_refused_calls_nobody(app: Celery, db: Database, conn: Connection) -> None:
    calls: list[str] = []
    ids = [app.send_task("tests.noop").id for _ in range(2)]
    jobs = claim(conn, db, "w1", 2)
    leases = {job.id: lease_of(job, owner) for job, owner in zip(jobs, ("w1", "somebody else"), strict=True)}

    def end(job: Job, lease: Lease) -> Attempt:
        attempt = Attempt(lease, db.settings)
        attempt.end(FAILED)
        attempt.after.append(lambda: calls.append(job.id))
        return attempt

    def write(conn: Any, dead: list[Attempt]) -> lifecycle.Ended:
        return lifecycle.ended(lifecycle.finish(conn, db, [(attempt.lease, FAILED) for attempt in dead]))

    signal = runtime(db.settings).signal
    done = endings.end(app, db, signal, endings.Ends(lambda _: [(job, leases[job.id]) for job in jobs], end, write))
    assert (done.found, done.ended) == (2, 1)
    eventually(lambda: calls)
    reaper.sweep(app)
    assert calls == [jobs[0].id]
    assert {read(conn, job_id)["status"] for job_id in ids} == {"failed", "processing"}


def test_what_one_publishes_is_published_at_once(app: Celery, db: Database, conn: Connection) -> None:
    published: list[str] = []
    job_id = app.send_task(
        "tests.noop", link_error=errback(app, lambda: published.append(app.send_task("tests.next").id))
    ).id
    die(app, db, conn, job_id)
    reaper.sweep(app)
    eventually(lambda: published)
    assert read(conn, published[0])["status"] == "queued"


@pytest.mark.parametrize(
    ("pool", "task"),
    [
        ("prefork", f"{NAME}.boom"),
        ("threads", f"{NAME}.boom"),
        ("solo", f"{NAME}.boom"),
        ("prefork", f"{NAME}.die"),  # here and below the main process ends the job
        ("prefork", "tests.apps.endings.too_long"),
        ("threads", "tests.apps.endings.too_long"),
        ("solo", "tests.apps.endings.too_long"),
    ],
)
def test_in_a_worker(worker: Start, database_url: str, conn: Connection, task: str, pool: str) -> None:
    started = worker(app="tests.apps.endings", pool=pool, options={"retry_limit": 0})
    app = client(database_url)
    told = app.signature("tests.apps.endings.told")
    job_id = str(app.send_task(task, link_error=told).id)
    wait_status(conn, job_id, "failed", 20)
    eventually(lambda: runs(conn, "told failed, free", job_id) == 1)
    assert started.is_running()


@pytest.mark.parametrize(("pool", "task"), [("prefork", "boom"), ("threads", "boom"), ("prefork", "die")])
def test_of_a_chord_in_a_worker(worker: Start, database_url: str, conn: Connection, task: str, pool: str) -> None:
    worker(app="tests.apps.endings", pool=pool, options={"retry_limit": 0})
    app = client(database_url)
    body = app.signature(f"{NAME}.total").on_error(app.signature("tests.apps.endings.told"))
    result = chord([app.signature(f"{NAME}.{task}"), app.signature(f"{NAME}.noop")], app=app)(body)
    wait_status(conn, result.id, "failed", 20)
    eventually(lambda: runs(conn, "told failed, free", result.id) == 1)


def test_the_end_of_a_process_waits_for_them(worker: Start, database_url: str, conn: Connection) -> None:
    started = worker(app="tests.apps.endings", concurrency=1, options={"retry_limit": 0})
    slow = client(database_url).signature("tests.apps.endings.told_slowly")
    job_id = send(client(database_url), "die", link_error=slow)
    eventually(lambda: runs(conn, "start, slowly", job_id) == 1, 15)
    started.sigterm()
    started.wait(30)
    assert runs(conn, "end, slowly", job_id) == 1
