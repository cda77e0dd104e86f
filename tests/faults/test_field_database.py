"""Field cases of database transports and result backends (K01 to K06): what users reported, tried here.

Each test's name begins with the id of its case; its docstring says what people saw. Times are a fifth of the defaults.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgtruth_transport import lifecycle, reaper
from pgtruth_transport.db import Database
from pgtruth_transport.states import Status
from pgtruth_transport.urls import parse_url
from tests.support import WorkerProcess, eventually, runs, statuses
from tests.support_field import APP, FAST, Conn, one
from tests.support_jobs import attempts, client, counter, ended, job, outcomes, send, wait_status
from tests.support_pooler import POOLERS, start_pooler

Start = Callable[..., WorkerProcess]
REAPED = 12


def test_k01_an_insert_that_fails_is_heard_of(database_url: str, conn: Conn) -> None:
    """kombu's SQL transport used to swallow it."""
    app = client(database_url, FAST)
    conn.execute("ALTER TABLE pgtruth.jobs ADD CONSTRAINT never CHECK (queue <> 'broken') NOT VALID")
    with pytest.raises(psycopg.errors.CheckViolation):
        send(app, "noop", queue="broken")
    conn.execute("ALTER TABLE pgtruth.jobs RENAME TO elsewhere")
    with pytest.raises(psycopg.errors.UndefinedTable):
        send(app, "noop")
    conn.execute("ALTER TABLE pgtruth.elsewhere RENAME TO jobs")
    assert statuses(conn) == {}


def test_k01_sixteen_claimers_do_not_wait_for_each_other(database_url: str, conn: Conn, db: Database) -> None:
    """Workers queued behind one row lock; here each takes its own, even while others keep theirs locked."""
    app = client(database_url, FAST)
    for number in range(64):
        send(app, "noop", number, queue=f"q{number % 2}")
    search = lifecycle.Search(("q0", "q1"), (0, 0), (), (), (), ())
    barrier, taken, took = threading.Barrier(16), [], []

    def claim(number: int) -> None:
        with db.open("claimer") as mine, mine.transaction():
            barrier.wait(20)
            begun = time.monotonic()
            jobs = lifecycle.claimed(lifecycle.claim(mine, db, search, 4, f"claimer:{number}:x"))
            took.append(time.monotonic() - begun)
            taken.extend(job.id for job in jobs)
            barrier.wait(20)  # all hold their rows at once

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(taken) == len(set(taken)) == 64
    assert max(took) < 2


def test_k01_old_rows_go_in_small_batches_and_the_size_is_the_true_one(
    database_url: str, conn: Conn, db: Database
) -> None:
    """Taken rows were never removed, and the queue's size was made up."""
    app = client(database_url, FAST, result_expires=3600)
    conn.execute("""
        INSERT INTO pgtruth.jobs (id, status, task, queue, run_at, updated_at)
        SELECT 'old-' || n, 'done', 't', 'celery', now() - interval '2 h', now() - interval '2 h'
        FROM generate_series(1, 20000) n
    """)
    for _ in range(7):
        send(app, "noop")
    send(app, "noop", countdown=600)
    search = lifecycle.Search(("celery",), (0,), (), (), (), ())
    with app.connection_for_read() as connection:
        assert connection.default_channel._size("celery") == 7
    sweeps, claims = [], []
    while statuses(conn).get("done"):
        begun = time.monotonic()
        swept = reaper.sweep(app)
        sweeps.append(time.monotonic() - begun)
        assert 0 < swept.deleted <= 2 * reaper.DELETE_BATCH
        begun = time.monotonic()
        with conn.transaction(force_rollback=True):
            lifecycle.claimed(lifecycle.claim(conn, db, search, 4, "x:1:x"))
        claims.append(time.monotonic() - begun)
    assert len(sweeps) == 20000 // reaper.DELETE_BATCH
    assert sorted(claims)[len(claims) // 2] < 0.05
    with app.connection_for_read() as connection:
        assert connection.default_channel._size("celery") == 7
    with db.connection() as mine:
        assert lifecycle.delete_old(mine, db, Status.DONE, 3600, 10) == 0


def test_k02_an_old_holders_ack_and_reject_change_nothing(
    worker: Start, database_url: str, conn: Conn, tmp_path: Path
) -> None:
    """kombu#2559: an ack deletes by message number, whoever owns it now. Here it is the frozen one that ends first."""
    first = worker(name="w1", app=APP, options=FAST, pool="threads", concurrency=2)
    go, never = tmp_path / "go", tmp_path / "later"
    app = client(database_url, FAST)
    ids = [str(app.send_task(f"{APP}.waits_for", (str(go), end)).id) for end in ("return", "requeue")]
    eventually(lambda: runs(conn) == 2)
    first.sigstop()
    for job_id in ids:  # the second attempt waits for another file
        eventually(lambda j=job_id: one(conn, "SELECT lease_expires_at < now() FROM pgtruth.jobs WHERE id = %s", j), 8)
    second = worker(name="w2", app=APP, options=FAST, concurrency=2, env={"GO": str(never)})
    eventually(lambda: runs(conn) == 4, REAPED)
    held = [job(conn, job_id) for job_id in ids]
    go.touch()
    first.sigcont()
    eventually(lambda: counter(conn, "stale_writes") >= 2, 10)
    for row in held:
        now = job(conn, row["id"])
        assert (now["status"], now["owned_by"], now["lease_version"]) == (
            "processing",
            row["owned_by"],
            row["lease_version"],
        )
    never.touch()
    eventually(ended(conn, ids), 10)
    for row in held:
        assert job(conn, row["id"])["status"] == "done"
        last = attempts(conn, row["id"])[-1]
        assert (last["outcome"], last["lease_version"]) == ("done", row["lease_version"])
    assert second.is_running()


def test_k03_idle_sessions_that_the_server_closes_fail_nothing(worker: Start, database_url: str, conn: Conn) -> None:
    """celery#10109: the next task, or the storing of a result, met a closed connection."""
    conn.execute(f"ALTER DATABASE {conn.info.dbname} SET idle_session_timeout = '1s'")
    running = worker(options=FAST)
    with psycopg.connect(parse_url(database_url), autocommit=True) as mine:
        mine.execute("SET idle_session_timeout = 0")
        app = client(database_url, FAST)
        first = app.send_task("tests.apps.basic.run", (1,))
        assert first.get(timeout=10) == 1
        begun = time.monotonic()
        eventually(lambda: time.monotonic() > begun + 4, 6)  # idle for four time-outs
        results = [app.send_task("tests.apps.basic.run", (n,)) for n in range(20)]
        assert [result.get(timeout=20) for result in results] == list(range(20))
        assert runs(mine, "start") == 21
        assert running.is_running()


def test_k03_sessions_killed_between_the_end_and_its_write_cost_no_run(
    worker: Start, database_url: str, conn: Conn
) -> None:
    """django-celery-results#428, with every session killed again and again while results are being stored."""
    worker(options=FAST, concurrency=4)
    app = client(database_url, FAST)
    results = [app.send_task("tests.apps.basic.sleepy", (0.05, n)) for n in range(60)]
    ids = [result.id for result in results]

    def killing() -> bool:
        conn.execute("""
            SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'pgtruth:work'
        """)
        return ended(conn, ids)()

    eventually(killing, 60, every=0.4)
    assert statuses(conn) == {"done": 60}
    assert [result.get(timeout=10) for result in results] == list(range(60))
    assert one(conn, "SELECT max(retry_count) FROM pgtruth.jobs") <= 1  # a claim whose COMMIT was lost is found again
    assert runs(conn, "end") == 60


AWKWARD = ["a\x00b", {"k": "\u0000"}, "\ud800 alone", {"\x00": ["\udfff", None]}, "\U0001f600 \u2028"]


def test_k04_nul_and_lone_surrogates_wedge_nothing(worker: Start, database_url: str, conn: Conn) -> None:
    """kestra#10326, awa#85: a NUL in an error, a result or an argument cannot be stored; the job stays running."""
    running = worker(app=APP, options=FAST, concurrency=2)
    app = client(database_url, FAST)
    echoed = [app.send_task("tests.apps.basic.echo", (value,)) for value in AWKWARD]
    for value, result in zip(AWKWARD, echoed, strict=True):
        assert result.get(timeout=15) == value
    said = [app.send_task(f"{APP}.says", (text,)) for text in ("a\x00b", "lone \ud800")]
    for result in said:
        with pytest.raises(ValueError, match=r"a\x00b|lone"):
            result.get(timeout=15)
    errors = [job(conn, result.id)["error"] for result in said]
    assert errors == ["ValueError: a\\x00b", "ValueError: lone \\ud800"]
    with pytest.raises((ValueError, psycopg.DataError)):
        send(app, "noop", task_id="nul\x00id")
    with pytest.raises((ValueError, psycopg.DataError)):
        send(app, "noop", queue="nul\x00queue")
    assert one(conn, "SELECT count(*) FROM pgtruth.jobs WHERE status NOT IN ('done', 'failed')") == 0
    assert running.is_running()


@pytest.mark.parametrize("pooler", POOLERS)
@pytest.mark.parametrize("mode", ["listen", "redis"])
def test_k06_everything_through_a_transaction_pooler(
    worker: Start, database_url: str, conn: Conn, redis_url: str, tmp_path: Path, pooler: str, mode: str
) -> None:
    """pgbouncer#655, good_job#269: LISTEN is silently useless, prepared statements vanish, session state leaks."""
    with start_pooler(pooler, database_url, tmp_path) as url:
        options: dict[str, Any] = {**FAST, "prepare": False}
        if mode == "redis":
            options["signal_url"] = redis_url
        workers = [
            worker(url, name=f"w{n}", options=options, concurrency=2, env={"RUNS": database_url}) for n in (1, 2)
        ]
        app = client(url, options)
        results = [app.send_task("tests.apps.basic.run", (n,)) for n in range(60)]
        assert [result.get(timeout=30) for result in results] == list(range(60))
        assert statuses(conn) == {"done": 60}
        assert runs(conn, "start") == 60
        for running in workers:
            if mode == "listen":
                running.wait_output("LISTEN has no effect", 15)
            for word in ("prepared statement", "Traceback", "Connection to broker lost"):
                assert word not in running.output
        left = one(
            conn,
            """
            SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
            WHERE a.datname = current_database() AND l.locktype = 'advisory'
        """,
        )
        assert left == 0
        for running in workers:
            running.sigterm()
        assert [running.wait(20) for running in workers] == [0, 0]


def test_k06_a_server_session_is_left_as_it_was_found(database_url: str, conn: Conn, tmp_path: Path) -> None:
    """A pooled session that we have used shows no setting, listener, prepared statement or temporary table of ours."""
    with start_pooler("stand-in", database_url, tmp_path, sessions=1) as url:
        options: dict[str, Any] = {**FAST, "prepare": False, "signal_url": "silent://"}
        app = client(url, options)
        job_id = send(app, "noop", countdown=1)
        assert app.AsyncResult(job_id).state == "PENDING"
        app.control.revoke(job_id)
        assert app.AsyncResult(job_id).state == "REVOKED"
        with psycopg.connect(parse_url(url), autocommit=True, prepare_threshold=None) as same:
            look = same.execute
            assert look("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
            assert look("SELECT count(*) FROM pg_listening_channels()").fetchone() == (0,)
            assert look("SELECT count(*) FROM pg_settings WHERE source = 'session'").fetchone() == (0,)
            assert look("SELECT count(*) FROM pg_class WHERE relpersistence = 't'").fetchone() == (0,)
    assert outcomes(conn, job_id) == []
    wait_status(conn, job_id, "failed")
