"""Field cases of pools, limits and forks (P01, P02, P05), and what the design promises of each pool.

Each test's name begins with the id of its case; its docstring says what people saw. Times are a fifth of the defaults.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support import ROOT, WorkerProcess, app_environment, eventually, runs, statuses
from tests.support_field import APP, FAST, Conn, one
from tests.support_jobs import client, counter, ended, job, outcomes, send, wait_status

Start = Callable[..., WorkerProcess]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_p01_a_busy_loop_past_its_hard_limit_ends_failed(
    worker: Start, database_url: str, conn: Conn, pool: str
) -> None:
    """celery#1958: limits are not enforced outside prefork, so that tasks pile up until the worker is stuck."""
    running = worker(name="w1", options=FAST, pool=pool, concurrency=1)
    app = client(database_url, FAST)
    job_id = send(app, "busy", 6, time_limit=1.5)
    row = wait_status(conn, job_id, "failed", 15)
    assert "TimeLimitExceeded" in row["error"]
    assert row["retry_count"] == 0
    assert outcomes(conn, job_id) == ["failed"]
    behind = send(app, "run", 1)
    if pool == "threads":  # its only thread is still busy: it takes nothing that it could not start
        assert runs(conn, "end", job_id) == 0
        assert job(conn, behind)["status"] == "queued"
    wait_status(conn, behind, "done", 20)
    assert job(conn, job_id) == row
    assert (runs(conn, "start", job_id), runs(conn, "end", job_id)) == (1, 0 if pool == "prefork" else 1)
    assert running.is_running()


def test_p01_a_body_that_blocks_a_green_pool_spends_its_retries_and_ends_failed(
    worker: Start, database_url: str, conn: Conn
) -> None:
    """celery#9203: blocking code holds up everything under gevent, its own limit and its renewals too: documented."""
    options = {**FAST, "retry_limit": 1}
    worker(name="sweeper", options=options, concurrency=1, args=("-Q", "elsewhere"))
    stuck = worker(name="w1", options=options, pool="gevent", concurrency=4)
    job_id = send(client(database_url), "busy", 5, time_limit=1)
    row = wait_status(conn, job_id, "failed", 40)
    assert outcomes(conn, job_id) == ["lease_expired", "failed"]
    assert row["retry_count"] == 1
    eventually(lambda: counter(conn, "stale_writes") == 2, 15)
    good = send(client(database_url), "run", 1)
    wait_status(conn, good, "done")
    assert job(conn, job_id) == row  # the late ends changed nothing
    assert stuck.is_running()


def test_p02_no_connection_is_shared_over_a_fork(worker: Start, database_url: str) -> None:
    """celery#1564: connections opened before the fork are shared: protocol errors, and answers to others' questions."""
    touch = {"TOUCH": "1"}
    running = worker(database_url, app=APP, options=FAST, concurrency=8, env=touch)
    app = client(database_url, FAST)
    results = [app.send_task(f"{APP}.where") for _ in range(200)]
    seen: dict[int, set[int]] = {}
    for result in results:
        pid, backend = result.get(timeout=60)
        seen.setdefault(backend, set()).add(pid)
    assert all(len(pids) == 1 for pids in seen.values())
    assert len(set().union(*seen.values())) > 1  # several children took part
    for word in ("SSL", "decryption", "Traceback", "lost synchronization"):
        assert word not in running.output


def test_p02_a_preloaded_web_server_publishes_from_every_child(database_url: str, conn: Conn) -> None:
    """Gunicorn with preload, uWSGI: the parent has published before it forks."""
    script = """
import os, sys
from tests.support_jobs import client, send
app = client(os.environ["BROKER"])
result = app.send_task("tests.apps.basic.noop")
assert result.state == "PENDING"
children = []
for child in range(4):
    pid = os.fork()
    if pid == 0:
        try:
            for _ in range(20):
                assert app.send_task("tests.apps.basic.noop").state == "PENDING"
        except BaseException as exc:
            print(repr(exc), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
assert app.send_task("tests.apps.basic.noop").state == "PENDING"
"""
    env = os.environ | app_environment(database_url)
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert statuses(conn) == {"queued": 82}


def test_p05_a_frozen_child_is_ended_by_the_limit(worker: Start, database_url: str, conn: Conn) -> None:
    """celery#4185: the child hangs, the main process lives and renews, and nothing notices."""
    running = worker(options=FAST, concurrency=2)
    job_id = send(client(database_url), "sleepy", 60, time_limit=12)
    eventually(lambda: runs(conn, "start", job_id) == 1)
    child = one(conn, "SELECT pid FROM public.runs")
    running.sigstop(child)
    eventually(lambda: one(conn, "SELECT clock_timestamp() > claimed_at + interval '4 s' FROM pgtruth.jobs"), 8)
    row = job(conn, job_id)
    assert row["status"] == "processing"  # renewed past its first lease
    env = os.environ | app_environment(database_url, options=FAST)
    command = [sys.executable, "-m", "celery", "-A", "tests.apps.basic", "pgtruth", "jobs", "--status", "processing"]
    listed = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert job_id[:8] in listed.stdout, listed.stdout + listed.stderr  # with its running time
    row = wait_status(conn, job_id, "failed", 20)
    assert "TimeLimitExceeded" in row["error"]
    good = send(client(database_url), "run", 1)
    wait_status(conn, good, "done", 15)


def test_a_lost_lease_kills_its_own_child_and_no_other(worker: Start, database_url: str, conn: Conn) -> None:
    """Prefork: the body of an attempt without authority is stopped, its neighbours go on."""
    running = worker(name="w1", options=FAST, concurrency=3)
    ids = [send(client(database_url), "sleepy", 7) for _ in range(3)]
    eventually(lambda: runs(conn, "start") == 3)
    victim = ids[1]
    pids = dict(conn.execute("SELECT job_id, pid FROM public.runs").fetchall())
    conn.execute(
        "UPDATE pgtruth.jobs SET lease_version = lease_version + 1, owned_by = 'another:1:x',"
        " lease_expires_at = clock_timestamp() + interval '20 s' WHERE id = %s",
        (victim,),
    )
    running.wait_output(f"[{victim}]: its result will be refused", 10)
    eventually(lambda: pids[victim] not in running.children(), 10)
    eventually(ended(conn, [ids[0], ids[2]]), 15)
    assert runs(conn, "end") == 2
    assert one(conn, "SELECT max(retry_count) FROM pgtruth.jobs") == 0
    assert job(conn, victim)["owned_by"] == "another:1:x"
    assert pids[ids[0]] in running.children()
    assert pids[ids[2]] in running.children()
    assert counter(conn, "stale_writes") <= 1


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_jobs_that_wait_for_a_rate_limit_are_renewed_and_given_back(
    worker: Start, database_url: str, conn: Conn, pool: str
) -> None:
    """What waits in a bucket is held: kept while the worker lives, released once when it stops."""
    first = worker(name="w1", app=APP, options=FAST, pool=pool, concurrency=2)
    app = client(database_url, FAST)
    ids = [str(app.send_task(f"{APP}.limited", (0.1,)).id) for _ in range(8)]
    eventually(lambda: runs(conn, "start") >= 4, 20)
    first.sigterm()
    assert first.wait(20) == 0
    assert one(conn, "SELECT count(*) FROM pgtruth.jobs WHERE status = 'processing'") == 0
    started = runs(conn, "start")
    assert statuses(conn) == {"done": started, "queued": 8 - started}
    worker(name="w2", app=APP, options=FAST, pool="threads", concurrency=8)
    eventually(ended(conn, ids), 20)
    assert runs(conn, "start") == 8
    assert one(conn, "SELECT max(retry_count) FROM pgtruth.jobs") == 0


@pytest.mark.parametrize(
    "args", [("--max-tasks-per-child", "1"), ("--autoscale", "4,1")], ids=["one task per child", "autoscale"]
)
def test_children_that_come_and_go_cost_no_run(
    worker: Start, database_url: str, conn: Conn, args: tuple[str, ...]
) -> None:
    """Celery's recycling and autoscaling: each job once, also over a warm shutdown in the middle."""
    first = worker(name="w1", options=FAST, concurrency=2, args=args)
    app = client(database_url, FAST)
    ids = [send(app, "sleepy", 0.15) for _ in range(40)]
    eventually(lambda: runs(conn, "end") >= 8, 20)
    first.sigterm()
    assert first.wait(20) == 0
    assert one(conn, "SELECT count(*) FROM pgtruth.jobs WHERE status = 'processing'") == 0
    assert runs(conn, "start") == runs(conn, "end") == statuses(conn)["done"]
    worker(name="w2", options=FAST, concurrency=2, args=args)
    eventually(ended(conn, ids), 40)
    assert statuses(conn) == {"done": 40}
    assert runs(conn, "start") == runs(conn, "end") == 40
    assert one(conn, "SELECT max(retry_count) FROM pgtruth.jobs") == 0


def test_a_frozen_worker_that_is_told_to_stop_gives_nothing_back_twice(
    worker: Start, database_url: str, conn: Conn
) -> None:
    """SIGTERM while frozen: it wakes up, has lost everything, and leaves without touching what others run."""
    first = worker(name="w1", options=FAST, concurrency=2)
    ids = [send(client(database_url), "sleepy", 4) for _ in range(2)]
    eventually(lambda: runs(conn, "start") == 2)
    first.sigstop()
    worker(name="w2", options=FAST, concurrency=2)
    eventually(lambda: runs(conn, "start") == 4, 15)
    os.kill(first.pid, signal.SIGTERM)
    first.sigcont()
    first.wait(20)
    eventually(ended(conn, ids), 15)
    for job_id in ids:
        assert outcomes(conn, job_id) == ["lease_expired", "done"]
    assert runs(conn, "start") == 4
