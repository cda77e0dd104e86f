"""Field cases of leases, heartbeats, rescue and fencing (L01 to L12): what users of other queues reported, tried here.

Each test's name begins with the id of its case; its docstring says what people saw. Times are a fifth of the defaults:
leases of 3 s instead of 15 s, sweeps every second instead of every 5 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pgtruth_transport import lifecycle
from pgtruth_transport.db import Database
from tests.support import ROOT, WorkerProcess, app_environment, eventually, runs, statuses
from tests.support_field import APP, FAST, Conn, one, own_database, proxied
from tests.support_jobs import attempts, client, counter, ended, job, outcomes, send, wait_status

Start = Callable[..., WorkerProcess]

#: Seconds: a lease, a sweep, and a loaded machine.
REAPED = 12


def field(url: str, task: str, *args: object, **options: object) -> str:
    """Publish a task of ``tests.apps.field_faults``; its id."""
    return str(client(url, FAST).send_task(f"{APP}.{task}", args, **options).id)


def test_l01_rescue_needs_no_registry_and_survives_a_dead_sweep(
    worker: Start, database_url: str, conn: Conn, db: Database
) -> None:
    """procrastinate#1518: the dead worker's registry row goes first, and its jobs match no rescue query any more."""
    first = worker(name="w1", options=FAST)
    worker(name="w2", options=FAST, args=("-Q", "elsewhere"))  # no beat, and it does not even consume this queue
    job_id = send(client(database_url), "sleepy", 60)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    first.kill9()
    conn.execute("DELETE FROM pgtruth.duties")
    conn.execute("DELETE FROM pgtruth.bindings")
    conn.execute("DELETE FROM pgtruth.queues")
    eventually(lambda: one(conn, "SELECT lease_expires_at < clock_timestamp() FROM pgtruth.jobs"), 5, every=0.005)
    with db.open("dying") as sweeper, sweeper.transaction(force_rollback=True):
        lifecycle.reap(sweeper, db, 10)  # it took the job (or the other one was first) and dies before its COMMIT
    row = wait_status(conn, job_id, "queued", REAPED)
    assert (row["retry_count"], row["owned_by"]) == (1, None)


def test_l02_two_live_workers_of_one_name_do_not_keep_each_others_leases(
    worker: Start, database_url: str, conn: Conn
) -> None:
    """procrastinate#1518, oban#862: whoever has the same name makes a dead worker's jobs look alive."""
    frozen = worker(name="same", options=FAST, concurrency=1)
    job_id = send(client(database_url), "sleepy", 2)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    frozen.sigstop()
    worker(name="same", options=FAST, concurrency=1)
    wait_status(conn, job_id, "done", REAPED)
    owners = [attempt["owned_by"] for attempt in attempts(conn, job_id)]
    assert outcomes(conn, job_id) == ["lease_expired", "done"]
    assert len(set(owners)) == 2
    assert all(owner.startswith("same@localhost:") for owner in owners)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_l03_an_attempt_that_wakes_up_late_changes_nothing(
    worker: Start, database_url: str, conn: Conn, tmp_path: Path, pool: str
) -> None:
    """aegra#547: its heartbeat, release and final write hit the replacement's row. Each way to end, all at once."""
    ends = ("return", "retry", "requeue", "progress", "publish")
    first = worker(name="w1", app=APP, options=FAST, pool=pool, concurrency=len(ends))
    go = tmp_path / "go"
    ids = {end: field(database_url, "waits_for", str(go), end) for end in ends}
    eventually(lambda: runs(conn, "start") == len(ends))
    first.sigstop()
    second = worker(name="w2", app=APP, options=FAST, concurrency=len(ends))
    eventually(lambda: runs(conn, "start") == 2 * len(ends), REAPED)
    held = {end: job(conn, job_id) for end, job_id in ids.items()}  # by the second worker
    go.touch()
    first.sigcont()
    eventually(ended(conn, list(ids.values())), 10)
    eventually(
        lambda: counter(conn, "stale_writes") + first.output.count("lost the lease") >= len(ends), 10
    )  # the first one was told
    for end, job_id in ids.items():
        row = job(conn, job_id)
        assert row["status"] == "done", row
        assert outcomes(conn, job_id)[0] == "lease_expired"
        assert outcomes(conn, job_id)[-1] == "done"
        by_second = attempts(conn, job_id)[1:]
        assert {attempt["owned_by"] for attempt in by_second} == {held[end]["owned_by"]}, end
    assert one(conn, "SELECT count(*) FROM pgtruth.jobs WHERE queue = 'nowhere'") >= 1
    again = send(client(database_url), "run", 1)
    wait_status(conn, again, "done")
    assert first.is_running()
    assert second.is_running()


def test_l05_renewals_that_take_half_a_lease_lose_nothing(worker: Start, database_url: str, conn: Conn) -> None:
    """pgqueuer#323: heartbeats as slow as the time-out hand a running job to a second worker."""
    conn.execute("""
        CREATE FUNCTION public.dawdle() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM pg_sleep(1.6); RETURN NEW; END'
    """)
    conn.execute("""
        CREATE TRIGGER dawdle BEFORE UPDATE ON pgtruth.jobs FOR EACH ROW
        WHEN (OLD.status = 'processing' AND NEW.status = 'processing') EXECUTE FUNCTION public.dawdle()
    """)
    for number in (1, 2):
        worker(name=f"w{number}", options=FAST, concurrency=1)
    job_id = send(client(database_url), "sleepy", 8)
    row = wait_status(conn, job_id, "done", 20)
    assert (row["lease_version"], row["retry_count"], runs(conn, "start", job_id)) == (1, 0, 1)


def test_l05_a_c_call_that_keeps_the_interpreter_is_run_again_and_fenced(
    worker: Start, database_url: str, conn: Conn
) -> None:
    """pgqueuer#430: the keeper of a threads pool gets no turn. The documented price is a second run, never two ends."""
    first = worker(name="w1", app=APP, options=FAST, pool="threads", concurrency=1)
    job_id = field(database_url, "holds_the_interpreter", 7)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    worker(name="w2", app=APP, options=FAST, concurrency=1)
    row = wait_status(conn, job_id, "done", REAPED)
    assert outcomes(conn, job_id) == ["lease_expired", "done"]
    assert row["retry_count"] == 1
    eventually(lambda: counter(conn, "stale_writes") >= 1 or "lost the lease" in first.output, 10)
    assert job(conn, job_id) == row


@pytest.mark.parametrize("pool", ["solo", "gevent"])
def test_l05_a_long_job_keeps_its_lease_and_its_workers_control_queue(
    worker: Start, database_url: str, conn: Conn, pool: str
) -> None:
    """A body that has the loop's thread for three leases; what was asked meanwhile is answered afterwards."""
    worker(name="w1", options=FAST, pool=pool, concurrency=1)
    worker(name="w2", options=FAST, concurrency=1, args=("-Q", "elsewhere"))
    app = client(database_url, FAST)
    job_id = send(app, "sleepy", 9)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    eventually(lambda: one(conn, "SELECT clock_timestamp() > claimed_at + interval '7 s' FROM pgtruth.jobs"), 10)
    answers = app.control.ping(timeout=8, limit=2)
    assert sorted(name for answer in answers for name in answer) == ["w1@localhost", "w2@localhost"]
    row = wait_status(conn, job_id, "done", 10)
    assert (row["lease_version"], row["retry_count"], runs(conn, "start", job_id)) == (1, 0, 1)


@pytest.mark.parametrize("seconds", [1.6, 8.0], ids=["half a lease", "nearly three leases"])
def test_l07_a_database_that_is_stopped_hard(worker: Start, database_url: str, conn: Conn, seconds: float) -> None:
    """graphile/worker#224, solid_queue#589: live work pruned wholesale, and a flood of log lines."""
    arguments = {"options": FAST, "pool": "threads", "concurrency": 20, "env": {"RUNS": database_url}}
    with own_database() as own:
        workers = [worker(own.url, name=f"w{n}", **arguments) for n in (1, 2)]
        app = client(own.url, FAST)
        ids = [send(app, "sleepy", 4 + seconds * n / 40) for n in range(40)]  # some end while it is away
        eventually(lambda: runs(conn) == 40, 20)
        before = [len(process.output.splitlines()) for process in workers]
        stopped = time.monotonic()
        own.server.stop_hard()
        eventually(lambda: time.monotonic() > stopped + seconds, seconds + 5)
        own.server.start()
        with own.connect() as mine:
            eventually(ended(mine, ids), 30)
            assert statuses(mine) == {"done": 40}
            assert one(mine, "SELECT max(retry_count) FROM pgtruth.jobs") == 0
        assert runs(conn) == runs(conn, "end") == 40
        lasted = time.monotonic() - stopped
        for process, lines in zip(workers, before, strict=True):
            new = [line for line in process.output.splitlines()[lines:] if line.startswith("[20")]
            said = [line for line in new if "succeeded in" not in line]
            assert len(said) < 10 + 3 * lasted, "\n".join(said)
            assert process.is_running()


def test_l07_a_database_that_is_read_only_for_a_while(worker: Start, database_url: str, conn: Conn) -> None:
    """Failover to a standby that is promoted late: reads work, no write does, for more than a lease."""
    arguments = {"options": FAST, "pool": "threads", "concurrency": 10, "env": {"RUNS": database_url}}
    with own_database() as own:
        for number in (1, 2):
            worker(own.url, name=f"w{number}", **arguments)
        app = client(own.url, FAST)
        ids = [send(app, "sleepy", 8) for _ in range(20)]
        eventually(lambda: runs(conn) == 20, 20)
        with own.connect() as mine:
            _read_only(mine, "on")
            begun = time.monotonic()
            eventually(lambda: time.monotonic() > begun + 4.5, 6)
            _read_only(mine, "off")
            eventually(ended(mine, ids), 30)
            assert statuses(mine) == {"done": 20}
            assert one(mine, "SELECT max(retry_count) FROM pgtruth.jobs") <= 1
        assert runs(conn) <= 22


def _read_only(conn: Conn, value: str) -> None:
    conn.execute("SET default_transaction_read_only = off")
    conn.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
    conn.execute("SELECT pg_reload_conf()")


SKEW = """
import datetime, os, time
skew = float(os.environ["SKEW"])
true_time, true_ns, true_datetime = time.time, time.time_ns, datetime.datetime
time.time = lambda: true_time() + skew
time.time_ns = lambda: true_ns() + int(skew * 1e9)
class Skewed(true_datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(true_time() + skew, tz)
    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)
datetime.datetime = Skewed
"""


def test_l09_only_the_databases_clock_counts(worker: Start, database_url: str, conn: Conn, tmp_path: Path) -> None:
    """django-q#236: clocks off by minutes cause early claims, early rescue and spinning on sleeping tasks."""
    (tmp_path / "sitecustomize.py").write_text(SKEW)
    skewed = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for name, skew in (("ahead", 120), ("behind", -120)):
        worker(name=name, options=FAST, env={**skewed, "SKEW": str(skew)}, concurrency=2)
    script = (
        "from tests.support_jobs import client, send\n"
        "import os, time\n"
        "app = client(os.environ['BROKER'])\n"
        "assert abs(time.time() - float(os.environ['TRUE_TIME']) - 60) < 30\n"
        "for _ in range(5): send(app, 'run', countdown=4)\n"
        "for _ in range(2): send(app, 'sleepy', 7)\n"
        "for _ in range(5): send(app, 'run', expires=20)\n"
    )
    env = os.environ | app_environment(database_url) | skewed | {"SKEW": "60", "TRUE_TIME": str(time.time())}
    subprocess.run([sys.executable, "-c", script], env=env, cwd=ROOT, check=True, timeout=60)
    eventually(lambda: statuses(conn) == {"done": 12}, 25)
    assert runs(conn, "start") == 12
    assert one(conn, "SELECT max(lease_version) FROM pgtruth.jobs") == 1
    early = one(conn, "SELECT count(*) FROM public.runs r JOIN pgtruth.jobs j ON j.id = r.job_id WHERE r.at < j.run_at")
    waited = one(
        conn,
        "SELECT count(*) FROM pgtruth.jobs WHERE run_at - created_at BETWEEN interval '3.9 s' AND interval '4.1 s'",
    )
    assert (early, waited) == (0, 5)


def test_l11_ownership_outlives_the_sessions(worker: Start, database_url: str, conn: Conn) -> None:
    """good_job#989: ownership by a session lock vanishes with the connection, and a second run starts."""
    for number in (1, 2):
        worker(name=f"w{number}", options=FAST, concurrency=1)
    job_id = send(client(database_url), "sleepy", 10)
    eventually(lambda: runs(conn, "start", job_id) == 1)

    def killing() -> bool:
        conn.execute("""
            SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name LIKE 'pgtruth%%'
        """)
        return runs(conn, "end", job_id) == 1

    eventually(killing, 20, every=0.6)
    row = wait_status(conn, job_id, "done", 15)
    assert (row["lease_version"], row["retry_count"], runs(conn, "start", job_id)) == (1, 0, 1)


#: Seconds that a worker may need to stop, after its last body has ended, with a database that does not answer.
STOPS_WITHIN = 15


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_l12_a_worker_stops_although_the_database_does_not_answer(
    worker: Start, database_url: str, conn: Conn, pool: str
) -> None:
    """procrastinate#1513: with a broken link the worker never finishes shutting down; broken instances pile up."""
    with proxied(database_url) as (proxy, url):
        first = worker(url, name="w1", options=FAST, pool=pool, env={"RUNS": database_url}, concurrency=2)
        job_id = send(client(database_url), "sleepy", 2)
        eventually(lambda: runs(conn, "start", job_id) == 1)
        proxy.hang()
        first.sigterm()
        asked = time.monotonic()
        first.wait(STOPS_WITHIN + 15)
        took = time.monotonic() - asked
        assert took < STOPS_WITHIN, first.output
        assert runs(conn, "end", job_id) == 1
    worker(name="w2", options=FAST)
    row = wait_status(conn, job_id, "done", REAPED)
    assert row["retry_count"] <= 1
