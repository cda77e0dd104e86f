"""The failure matrix, row by row, at the level of the lifecycle and the sweep; ``tests/faults`` kills real workers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import psycopg
import pytest
from celery import Celery, chord

from pgtruth_transport import counters, lifecycle, publish, reaper
from pgtruth_transport.db import Database
from pgtruth_transport.jobs import Requeue, Stored
from pgtruth_transport.runtime import runtime
from pgtruth_transport.settings import Settings
from pgtruth_transport.states import Outcome, Status
from pgtruth_transport.testing.processes import free_port
from tests.support_jobs import QUICK
from tests.support_lifecycle import (
    DONE,
    FAILED,
    attempts_of,
    claim,
    finish,
    held,
    job_row,
    lease_of,
    let_lease_run_out,
    read,
    read_all,
    requeue,
    retry,
    search,
)

pytestmark = pytest.mark.one_database
Connection = psycopg.Connection[Any]


class Service(NamedTuple):
    """An app, and the database that its processes share."""

    app: Celery
    db: Database

    def sweep(self) -> reaper.Swept:
        return reaper.sweep(self.app)


@pytest.fixture
def service(database_url: str) -> Callable[..., Service]:
    def make(**options: object) -> Service:
        app = Celery("tests.matrix", broker=database_url, backend="pgtruth://", set_as_current=False)
        app.conf.broker_transport_options = {**QUICK, **options}
        return Service(app, runtime(Settings.from_app(app)).database)

    return make


@pytest.fixture
def refusing() -> str:
    """The URL of a Redis server that is down."""
    return f"redis://127.0.0.1:{free_port()}/0"


@pytest.fixture
def hanging() -> Iterator[str]:
    """The URL of a Redis server that accepts connections and never says a word."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"


def kill(conn: Connection, victim: Connection) -> None:
    """Cut the server's side of a connection, and wait until it is gone."""
    conn.execute("SELECT pg_terminate_backend(%s, 5000)", (victim.info.backend_pid,))


# Redis enqueue fails | API | queued -> enqueue_failed


@pytest.mark.parametrize("server", ["refusing", "hanging"])
def test_redis_enqueue_fails(
    request: pytest.FixtureRequest, service: Callable[..., Service], conn: Connection, server: str
) -> None:
    _, db = parts = service(signal_url=request.getfixturevalue(server))
    began = time.monotonic()
    publish.publish(db, runtime(db.settings).signal, [job_row("a"), job_row("later", delay=60.0)])
    assert time.monotonic() - began < 2  # signal_timeout, and a loaded machine
    assert read(conn)["status"] == "enqueue_failed"
    assert read(conn, "later")["status"] == "queued"  # nobody had to be told of it
    assert claim(conn, db) == []
    assert parts.sweep().recovered == 1
    assert read(conn)["status"] == "queued"
    (job,) = claim(conn, db)
    assert (job.lease_version, job.retry_count) == (1, 0)
    assert counters.read(conn, db)["jobs_requeued"] == 1


def test_redis_enqueue_fails_and_delay_returns(
    service: Callable[..., Service], conn: Connection, refusing: str
) -> None:
    app, _ = service(signal_url=refusing)
    result = app.send_task("tests.noop")
    assert read(conn, result.id)["status"] == "enqueue_failed"
    assert result.state == "PENDING"


# Worker crashes during processing | lease recovery | processing -> queued


def test_worker_crashes_during_processing(service: Callable[..., Service], conn: Connection) -> None:
    _, db = parts = service()
    stale = held(conn, db)
    assert parts.sweep().requeued == 0
    let_lease_run_out(conn, "a")
    assert parts.sweep().requeued == 1
    row = read(conn)
    assert (row["status"], row["lease_version"], row["retry_count"]) == ("queued", 2, 1)
    assert (row["owned_by"], row["claimed_at"]) == (None, None)
    (job,) = claim(conn, db, "w2")
    assert not finish(conn, db, stale)
    assert finish(conn, db, lease_of(job, "w2"))
    assert [a["outcome"] for a in attempts_of(conn)] == ["lease_expired", "done"]
    assert counters.read(conn, db) == {"leases_expired": 1, "jobs_requeued": 1}


# Lease expires beyond retry limit | recovery process | processing -> failed


def test_lease_expires_beyond_retry_limit(service: Callable[..., Service], conn: Connection) -> None:
    app, db = parts = service()
    job_id = app.send_task("tests.work", link_error=app.signature("tests.errback")).id
    for number in range(4):
        (job,) = claim(conn, db, f"w{number}")
        assert (job.id, job.retry_count) == (job_id, number)
        let_lease_run_out(conn, job_id)
        swept = parts.sweep()
        assert (swept.requeued, swept.spent) == ((1, 0) if number < 3 else (0, 1))
    row = read(conn, job_id)
    assert (row["status"], row["retry_count"], row["lease_version"], row["result"]) == ("failed", 3, 7, None)
    assert (row["owned_by"], row["claimed_at"]) == (None, None)
    assert "w3" in row["error"]
    assert "3 of its retries were spent" in row["error"]
    assert [a["outcome"] for a in attempts_of(conn, job_id)] == ["lease_expired"] * 3 + ["failed"]
    assert app.AsyncResult(job_id).state == "FAILURE"
    (errback,) = [row for row in read_all(conn).values() if row["task"] == "tests.errback"]
    assert errback["status"] == "queued"
    assert parts.sweep()[:5] == (0, 0, 0, 0, 0)


def test_lease_expires_beyond_retry_limit_of_a_chord_member(service: Callable[..., Service], conn: Connection) -> None:
    app, db = parts = service(retry_limit=0)
    body = app.signature("tests.body").on_error(app.signature("tests.errback"))
    result = chord([app.signature("tests.one"), app.signature("tests.two")], app=app)(body)
    jobs = claim(conn, db, "w1", 9)
    assert [job.task for job in jobs] == ["tests.one", "tests.two"]
    let_lease_run_out(conn, *(job.id for job in jobs))
    assert parts.sweep().spent == 2
    assert app.AsyncResult(result.id).state == "FAILURE"
    assert read(conn, result.id)["status"] == "failed"
    errbacks = [row["status"] for row in read_all(conn).values() if row["task"] == "tests.errback"]
    assert errbacks == ["queued"]


def test_lease_of_an_early_acknowledged_job_expires(service: Callable[..., Service], conn: Connection) -> None:
    """At most once: it may have run, so that it must not run again."""
    _, db = parts = service()
    lifecycle.enqueue(conn, db, [job_row("a")])
    lifecycle.claim(conn, db, search(early=["tests.noop"]), 1, "w1")
    let_lease_run_out(conn, "a")
    swept = parts.sweep()
    assert (swept.requeued, swept.spent) == (0, 1)
    assert read(conn)["status"] == "failed"
    assert read(conn)["retry_count"] == 0


# Fence mismatch on final write | worker | stale result discarded


@pytest.mark.parametrize("successor", ["queued", "processing", "done", "failed"])
def test_fence_mismatch_on_final_write(service: Callable[..., Service], conn: Connection, successor: str) -> None:
    _, db = parts = service()
    stale = held(conn, db)
    let_lease_run_out(conn, "a")
    parts.sweep()
    if successor != "queued":
        (job,) = claim(conn, db, "w2")
        if successor != "processing":
            finish(conn, db, lease_of(job, "w2"), DONE._replace(result=b"new") if successor == "done" else FAILED)
    before, attempts = read(conn), attempts_of(conn)
    assert not finish(conn, db, stale, DONE._replace(result=b"stale"))
    assert not finish(conn, db, stale, FAILED)
    assert not requeue(conn, db, stale, retry(1))
    assert not lifecycle.renew(conn, db, [stale], "w1")
    assert (read(conn), attempts_of(conn)) == (before, attempts)
    assert before["status"] == successor


# Final DB write fails | lease recovery | processing -> queued


@pytest.mark.parametrize("when", ["before the statement", "before the commit"])
def test_final_db_write_fails(service: Callable[..., Service], conn: Connection, when: str) -> None:
    _, db = parts = service()
    lease = held(conn, db)

    def settle(work: Connection) -> None:
        with work.transaction():
            if when == "before the commit":
                assert finish(work, db, lease)
                lifecycle.enqueue(work, db, [job_row("follow-up")])
            kill(conn, work)
            finish(work, db, lease)

    with closing(db.open("work")) as work, pytest.raises(psycopg.OperationalError):
        settle(work)
    assert read(conn)["status"] == "processing"
    assert set(read_all(conn)) == {"a"}
    assert attempts_of(conn) == []
    let_lease_run_out(conn, "a")
    assert parts.sweep().requeued == 1
    (job,) = claim(conn, db, "w2")
    assert finish(conn, db, lease_of(job, "w2"))


# Retry limit exceeded | recovery process | queued -> failed


@pytest.mark.parametrize("spent", [3, 5], ids=["at the limit", "over a limit that was lowered"])
def test_retry_limit_exceeded(service: Callable[..., Service], conn: Connection, spent: int) -> None:
    """The last retry is queued, and dies: the recovery process fails the job instead of queueing it once more."""
    _, db = parts = service(retry_limit=3)
    lifecycle.enqueue(conn, db, [job_row("a", retries=spent)])
    assert len(claim(conn, db)) == 1
    let_lease_run_out(conn, "a")
    swept = parts.sweep()
    assert (swept.requeued, swept.spent) == (0, 1)
    assert (read(conn)["status"], read(conn)["retry_count"]) == ("failed", spent)
    assert claim(conn, db, "w2", 9) == []


# The sweep itself.


def test_sweeps_at_the_same_moment_do_no_harm(service: Callable[..., Service], conn: Connection) -> None:
    _, db = parts = service()
    ids = [f"j{n}" for n in range(120)]
    rows = [job_row(n) for n in ids]
    lifecycle.enqueue(conn, db, rows)
    lifecycle.signal_failed(conn, db, ids[100:])
    assert len(claim(conn, db, "w1", 80)) == 80
    let_lease_run_out(conn, *ids[:80])
    found: list[reaper.Swept] = []
    gate = threading.Barrier(4)

    def run() -> None:
        gate.wait(10)
        found.append(parts.sweep())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(swept.requeued for swept in found) == 80
    assert sum(swept.recovered for swept in found) == 20
    everything = read_all(conn).values()
    assert {row["status"] for row in everything} == {"queued"}
    assert sorted(row["retry_count"] for row in everything) == [0] * 40 + [1] * 80
    assert counters.read(conn, db) == {"leases_expired": 80, "jobs_requeued": 100}


def test_who_comes_first_sweeps(service: Callable[..., Service]) -> None:
    app, db = service(reap_interval=1.0)
    signal = runtime(db.settings).signal
    found = [reaper.sweep_if_due(app, db, signal, f"w{n}") for n in range(5)]
    assert [swept is not None for swept in found] == [True, False, False, False, False]


def test_owners_may_renew_before_anything_is_reaped_after_a_restart(
    service: Callable[..., Service], conn: Connection
) -> None:
    """The server of this run is younger than this lease: as if it had just come back."""
    _, db = parts = service(lease_seconds=9e6, reap_interval=1.0)
    held(conn, db)
    let_lease_run_out(conn, "a")
    lifecycle.enqueue(conn, db, [job_row("b")])
    lifecycle.signal_failed(conn, db, ["b"])
    swept = parts.sweep()
    assert (swept.requeued, swept.spent, swept.recovered) == (0, 0, 1)
    assert read(conn)["status"] == "processing"


def test_expired_jobs_end_with_their_reason(service: Callable[..., Service], conn: Connection) -> None:
    app, _ = parts = service()
    late = app.send_task("tests.noop", expires=60).id
    kept = app.send_task("tests.noop", expires=3600).id
    conn.execute("UPDATE pgtruth.jobs SET expires_at = clock_timestamp() WHERE id = %s", (late,))
    assert parts.sweep().expired == 1
    assert (read(conn, late)["status"], read(conn, late)["error"]) == ("failed", "expired")
    assert app.AsyncResult(late).state == "REVOKED"
    assert read(conn, kept)["status"] == "queued"


def test_a_task_that_no_worker_knows_fails_after_the_set_wait(
    service: Callable[..., Service], conn: Connection
) -> None:
    app, db = parts = service(unknown_task_wait=60.0)
    job_id = app.send_task("tests.unheard_of").id
    (job,) = claim(conn, db)
    assert requeue(conn, db, lease_of(job, "w1"), Requeue(Outcome.RELEASED, delay=5.0, unknown=True))
    assert parts.sweep().unknown == 0
    conn.execute("UPDATE pgtruth.jobs SET unknown_since = unknown_since - interval '1 min'")
    assert parts.sweep().unknown == 1
    row = read(conn, job_id)
    assert (row["status"], row["retry_count"]) == ("failed", 0)
    assert "no worker knew this task" in row["error"]
    assert app.AsyncResult(job_id).state == "FAILURE"


def test_a_cancelled_job_stays_cancelled(service: Callable[..., Service], conn: Connection) -> None:
    app, db = parts = service()
    queued, later = app.send_task("tests.noop").id, app.send_task("tests.noop", countdown=60).id
    running = app.send_task("tests.noop", priority=9).id
    (job,) = claim(conn, db)
    assert job.id == running
    assert reaper.cancel(app, [queued, later, running, "never-published"]) == 2
    assert {i: read(conn, i)["status"] for i in (queued, later, running, "never-published")} == {
        queued: "failed",
        later: "failed",
        running: "processing",
        "never-published": "failed",
    }
    lifecycle.enqueue(conn, db, [job_row("never-published")])
    parts.sweep()
    assert claim(conn, db, "w1", 9) == []
    assert app.AsyncResult(queued).state == app.AsyncResult("never-published").state == "REVOKED"


def test_cancelling_an_id_that_has_no_message_yet(service: Callable[..., Service], conn: Connection) -> None:
    app, db = service()
    """It ends, unless somebody has set a state of its own: that is whose business it is, as in Celery."""
    states = {"a": "RECEIVED", "b": "PROGRESS"}
    lifecycle.store(conn, db, [Stored(i, Status.QUEUED, "", state, None, b"{}", None) for i, state in states.items()])
    assert reaper.cancel(app, ["a", "b"]) == 1
    assert {job_id: row["status"] for job_id, row in read_all(conn).items()} == {"a": "failed", "b": "queued"}


@pytest.mark.parametrize("broken", ["headers", "properties", "body"])
def test_one_job_that_cannot_be_read_does_not_stop_the_sweep(
    service: Callable[..., Service], conn: Connection, broken: str
) -> None:
    """Its errbacks cannot be known, but it ends, and so do the others."""
    app, db = parts = service(retry_limit=0, unknown_task_wait=1.0)
    ids = [app.send_task("tests.noop").id for _ in range(2)]
    jobs = claim(conn, db, "w1", 2)
    let_lease_run_out(conn, *ids)
    expired = [app.send_task("tests.noop", expires=60).id for _ in range(2)]
    conn.execute("UPDATE pgtruth.jobs SET expires_at = clock_timestamp() WHERE id = ANY(%s)", (expired,))
    for job_id in (jobs[0].id, expired[0]):
        # a column name from the parameters above
        conn.execute(f"UPDATE pgtruth.jobs SET {broken} = '\\x00ff7b' WHERE id = %s", (job_id,))  # type: ignore[call-overload]
    swept = parts.sweep()
    assert (swept.spent, swept.expired) == (2, 2)
    assert {row["status"] for row in read_all(conn).values()} == {"failed"}


def test_a_dead_sweep_is_taken_up_by_the_next(service: Callable[..., Service], conn: Connection) -> None:
    """It died in the middle of a transaction: what it had locked is free, what it had not written is as it was."""
    _, db = parts = service(retry_limit=0)
    for n in range(3):
        held(conn, db, f"j{n}")
    let_lease_run_out(conn, "j0", "j1", "j2")

    def die(dying: Connection) -> None:
        with dying.transaction():
            for job, lease in lifecycle.lock_spent(dying, db, 2):
                assert job.id in ("j0", "j1")
                finish(dying, db, lease, FAILED)
            assert parts.sweep().spent == 1  # what the first has locked is not waited for
            kill(conn, dying)
            dying.execute("SELECT 1")

    with closing(db.open("sweep")) as dying, pytest.raises(psycopg.OperationalError):
        die(dying)
    assert parts.sweep().spent == 2
    assert {row["status"] for row in read_all(conn).values()} == {"failed"}
    assert all(len(attempts_of(conn, f"j{n}")) == 1 for n in range(3))
