"""Field cases of delivery, loss and duplicates (D01 to D14): what users of Celery with Redis reported, tried here.

Each test's name begins with the id of its case; its docstring says what people saw. Times are scaled down: leases of
3 s and sweeps every second instead of 15 s and 5 s.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import psycopg
import pytest
import redis

from pgtruth_transport.testing.valkey import EmbeddedValkey
from tests.support import WorkerProcess, eventually, runs, statuses
from tests.support_jobs import client, ended, job, outcomes, send, wait_status

Conn = psycopg.Connection[Any]
Start = Callable[..., WorkerProcess]

FAST = {"lease_seconds": 3, "reap_interval": 1, "poll_interval": 0.3}
FIELD = "tests.apps.field"
POOLS = ("prefork", "threads")


@pytest.fixture
def own_valkey() -> Iterator[EmbeddedValkey]:
    """A Valkey of the test's own: to stop, to start and to fill."""
    with EmbeddedValkey() as server:
        yield server


def fill(link: Any) -> None:
    """Write until Redis has had enough."""
    for number in range(1000):
        link.set(f"filler{number}", b"x" * 10_000)


def one(conn: Conn, query: str) -> Any:
    """The only row of a query."""
    return conn.execute(query).fetchone()


def test_d01_a_countdown_longer_than_the_lease_runs_once(worker: Start, database_url: str, conn: Conn) -> None:
    """celery/kombu#337: what waits longer than the redelivery window is handed out again and again."""
    options = {**FAST, "lease_seconds": 2}
    worker(name="w1", options=options, wait=False)
    worker(name="w2", options=options, pool="threads", wait=False)
    app = client(database_url, options)
    ids = [send(app, "run", countdown=6) for _ in range(20)]
    # two leases later all of them wait in the table, and nobody holds one
    eventually(lambda: one(conn, "SELECT clock_timestamp() > max(created_at) + interval '5 s' FROM pgtruth.jobs")[0])
    waiting = "SELECT count(*) FROM pgtruth.jobs WHERE status = 'queued' AND owned_by IS NULL AND lease_version = 0"
    assert one(conn, waiting) == (20,)
    eventually(ended(conn, ids), 10)
    assert runs(conn) == 20
    early = "SELECT count(*) FROM public.runs r JOIN pgtruth.jobs j ON j.id = r.job_id WHERE r.at < j.run_at"
    assert one(conn, early) == (0,)
    assert one(conn, "SELECT min(lease_version), max(lease_version), max(retry_count) FROM pgtruth.jobs") == (1, 1, 0)


@pytest.mark.slow
def test_d03_a_task_of_five_leases_has_one_copy(worker: Start, database_url: str, conn: Conn) -> None:
    """celery/celery#5935: with late ack a long task gets one more live copy per window."""
    for number, pool in enumerate(("prefork", "prefork", "prefork", "threads", "threads")):
        worker(name=f"w{number}", options=FAST, pool=pool, args=("-Q", pool), concurrency=1, wait=False)
    app = client(database_url, FAST)
    ids = [send(app, "sleepy", 15, queue=pool) for pool in POOLS]
    eventually(ended(conn, ids), 45)
    assert runs(conn) == 2
    for job_id in ids:
        row = job(conn, job_id)
        assert (row["status"], row["lease_version"], row["retry_count"]) == ("done", 1, 0)


def test_d04_a_killed_worker_loses_nothing_and_hides_nothing(worker: Start, database_url: str, conn: Conn) -> None:
    """celery/celery#1628: kill -9 loses both running and prefetched tasks, or hides them for an hour."""
    ahead = ("--prefetch-multiplier", "4")
    first = [worker(name=pool, options=FAST, pool=pool, args=(*ahead, "-Q", pool), wait=False) for pool in POOLS]
    second = worker(name="w2", options=FAST, concurrency=12, pool="threads", args=("-Q", ",".join(POOLS)))
    second.sigstop()
    app = client(database_url, FAST)
    ids = [send(app, "sleepy", 4, queue=pool) for pool in POOLS for _ in range(6)]
    eventually(lambda: runs(conn) == 4, 20)
    assert statuses(conn) == {"processing": 4, "queued": 8}
    running = {row[0] for row in conn.execute("SELECT job_id FROM public.runs")}
    for victim in first:
        victim.kill9()
    second.sigcont()
    eventually(lambda: runs(conn) >= 12, 2.5)  # the poll interval, and a loaded machine; not a lease
    eventually(ended(conn, ids), 25)
    assert statuses(conn) == {"done": 12}
    assert runs(conn) == 16
    for job_id in ids:
        row = job(conn, job_id)
        assert (row["retry_count"], row["lease_version"]) == ((1, 3) if job_id in running else (0, 1))


@pytest.mark.slow
def test_d04_long_tasks_behind_short_ones_are_not_hidden_by_the_look_ahead(
    worker: Start, database_url: str, conn: Conn
) -> None:
    """The same, where the worker has learnt from short tasks to take some ahead."""
    app = client(database_url, FAST)
    for pool in POOLS:
        for _ in range(60):
            send(app, "noop", queue=pool)
    long = [send(app, "sleepy", 7, queue=pool) for pool in POOLS for _ in range(6)]
    for pool in POOLS:
        worker(name=pool, options=FAST, pool=pool, args=("--prefetch-multiplier", "4", "-Q", pool), wait=False)
    second = worker(name="w2", options=FAST, concurrency=8, pool="threads", args=("-Q", "later"))
    eventually(lambda: runs(conn) == 4, 20)
    for pool in POOLS:
        app.control.add_consumer(pool, destination=[f"{second.name}@localhost"])
    eventually(lambda: runs(conn) == 12, 5)
    eventually(ended(conn, long), 25)
    assert runs(conn) == 12
    assert one(conn, "SELECT max(retry_count) FROM pgtruth.jobs") == (0,)


def test_d04_what_may_not_run_twice_is_not_taken_ahead(worker: Start, database_url: str, conn: Conn) -> None:
    """The same with early acknowledgement: only what had started is lost, and says so."""
    app = client(database_url, FAST)
    for _ in range(60):
        send(app, "noop")
    ids = [send(app, "sleepy_early", 3) for _ in range(6)]
    first = worker(name="w1", options=FAST, args=("--prefetch-multiplier", "4"))
    eventually(lambda: runs(conn) == 2)
    first.kill9()
    assert statuses(conn) == {"done": 60, "processing": 2, "queued": 4}
    worker(name="w2", options=FAST, concurrency=4, pool="threads")
    eventually(ended(conn, ids), 20)
    assert statuses(conn) == {"done": 64, "failed": 2}
    assert runs(conn) == 6


@pytest.mark.parametrize(
    ("args", "count"), [((), 50), (("--max-tasks-per-child", "1"), 12)], ids=["plain", "recycling"]
)
def test_d06_a_worker_takes_work_again_after_redis_came_and_went(
    worker: Start, database_url: str, conn: Conn, own_valkey: EmbeddedValkey, args: tuple[str, ...], count: int
) -> None:
    """celery/celery#8030: after the link dropped a few times the worker reconnects but takes nothing."""
    options = {**FAST, "signal_url": own_valkey.url}
    only = worker(options=options, args=args)
    app = client(database_url, options)
    wait_status(conn, send(app, "run"), "done")
    for _ in range(3):
        own_valkey.stop_hard()
        own_valkey.start()
    ids = [send(app, "noop") for _ in range(count)]
    eventually(ended(conn, ids), 30)
    own_valkey.stop_hard()  # and left down: polling, no slower
    ids = [send(app, "run") for _ in range(3)]
    eventually(ended(conn, ids), 5)
    assert only.is_running()
    late = (
        "SELECT max(extract(epoch FROM r.at - j.created_at)) FROM public.runs r JOIN pgtruth.jobs j ON j.id = r.job_id"
    )
    assert one(conn, late)[0] < 3


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_d07_rolling_restarts_run_each_task_once(worker: Start, database_url: str, conn: Conn, pool: str) -> None:
    """celery/celery#4354: warm shutdown drops what was read, re-runs what finished, or fails what was prefetched."""
    app = client(database_url, FAST)
    ids = [send(app, "sleepy", 0.2) for _ in range(100)]
    running = worker(name="w0", options=FAST, pool=pool, concurrency=3)
    for number in range(1, 4):
        following = worker(name=f"w{number}", options=FAST, pool=pool, concurrency=3, wait=False)
        eventually(lambda n=number * 15: runs(conn) >= n + random.randint(0, 15), 20)  # type: ignore[misc]
        running.sigterm()
        assert running.wait() == 0
        held = conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE owned_by LIKE %s", (f"{running.name}@%",))
        assert held.fetchone() == (0,)
        running = following.wait_ready()
    eventually(ended(conn, ids), 40)
    assert statuses(conn) == {"done": 100}
    assert (runs(conn, "start"), runs(conn, "end")) == (100, 100)
    assert one(conn, "SELECT max(retry_count) FROM pgtruth.jobs") == (0,)


def test_d09_a_full_redis_refuses_nothing(database_url: str, conn: Conn) -> None:
    """celery/celery#5716: with Redis at its memory limit, publishing raises in the web request."""
    with EmbeddedValkey(options={"maxmemory": "2mb", "maxmemory-policy": "noeviction"}) as server:
        with redis.Redis.from_url(server.url) as link, pytest.raises(redis.exceptions.OutOfMemoryError):
            fill(link)
        app = client(database_url, {**FAST, "signal_url": server.url})
        ids = {send(app, "noop") for _ in range(100)}
        assert len(ids) == 100
        assert statuses(conn) == {"queued": 100}


def test_d09_a_flushed_redis_loses_nothing(worker: Start, database_url: str, conn: Conn, redis_url: str) -> None:
    """celery/celery#3239: evicted or flushed keys lose the queue."""
    options = {**FAST, "signal_url": redis_url}
    app = client(database_url, options)
    ids = [send(app, "noop") for _ in range(1000)]
    with redis.Redis.from_url(redis_url) as link:
        link.flushall()
    worker(options=options)
    eventually(ended(conn, ids), 30)
    assert statuses(conn) == {"done": 1000}


def test_d10_priority_nine_starts_next_and_none_is_zero(worker: Start, database_url: str, conn: Conn) -> None:
    """celery/celery#8967: priorities do nothing or work backwards, and no priority is treated as the highest."""
    app = client(database_url, FAST)
    queues = ("celery", "other")
    worker(options=FAST, concurrency=1, args=("--prefetch-multiplier", "1", "-Q", ",".join(queues)))
    blocker = send(app, "sleepy", 3)
    eventually(lambda: runs(conn) == 1)
    ordinary = {queue: [send(app, "run", queue=queue, priority=0) for _ in range(30)] for queue in queues}
    for queue in queues:
        ordinary[queue] += [send(app, "run", queue=queue) for _ in range(3)]  # without a priority
    middle = send(app, "run", queue="celery", priority=5)
    urgent = send(app, "run", queue="other", priority=9)
    assert one(conn, "SELECT count(*) FROM pgtruth.jobs WHERE priority = 0") == (67,)
    assert not ended(conn, [blocker])()
    eventually(lambda: runs(conn) == 69, 30)
    order = [row[0] for row in conn.execute("SELECT job_id FROM public.runs WHERE event = 'start' ORDER BY at")]
    assert order[:3] == [blocker, urgent, middle]
    for queue, published in ordinary.items():
        assert [job_id for job_id in order if job_id in set(published)] == published, queue
    halves = [sum(job_id in set(ordinary["other"]) for job_id in half) for half in (order[3:36], order[36:])]
    assert min(halves) >= 10, "one queue waited for the other"


def test_d10_with_a_prefetch_of_one_nothing_is_taken_before_the_urgent_one(
    worker: Start, database_url: str, conn: Conn
) -> None:
    """The same, while the worker is in the middle of a stream of short tasks."""
    app = client(database_url, FAST)
    for _ in range(40):
        send(app, "sleepy", 0.1)
    worker(options=FAST, concurrency=1, args=("--prefetch-multiplier", "1"))
    eventually(lambda: runs(conn) >= 8)
    urgent = send(app, "run", priority=9)
    eventually(lambda: runs(conn, job_id=urgent) == 1)
    before = """
        SELECT count(*) FROM public.runs r, pgtruth.jobs j
        WHERE j.id = %s AND r.event = 'start' AND r.at > j.created_at
            AND r.at < (SELECT min(at) FROM public.runs u WHERE u.job_id = j.id)
    """
    row = conn.execute(before, (urgent,)).fetchone()
    assert row is not None
    assert row[0] <= 1  # the one that was handed over in that very moment


def test_d11_twenty_thousand_etas_cost_a_worker_nothing(worker: Start, database_url: str, conn: Conn) -> None:
    """celery/celery#9849: tasks with an ETA are fetched without limit until the worker runs out of memory."""
    app = client(database_url, FAST)
    only = worker(options=FAST)
    wait_status(conn, send(app, "run"), "done")
    before = psutil.Process(only.pid).memory_info().rss
    send(app, "noop", countdown=3600)
    copies = """
        INSERT INTO pgtruth.jobs (id, status, task, queue, priority, run_at, headers, properties, body)
        SELECT id || n, status, task, queue, priority, run_at, headers, properties, body
        FROM pgtruth.jobs CROSS JOIN generate_series(1, 19999) n WHERE status = 'queued'
    """
    conn.execute(copies)
    ids = [send(app, "noop") for _ in range(10)]
    eventually(ended(conn, ids), 5)
    assert psutil.Process(only.pid).memory_info().rss - before < 50_000_000
    waiting = "SELECT count(*) FROM pgtruth.jobs WHERE status = 'queued' AND owned_by IS NULL AND lease_version = 0"
    assert one(conn, waiting) == (20_000,)


def test_d12_a_revoke_outlives_every_worker(worker: Start, database_url: str, conn: Conn, redis_url: str) -> None:
    """celery/celery#1246: a revoke lives only in workers' memory, so the cancelled task runs after a restart."""
    options = {**FAST, "signal_url": redis_url}
    app = client(database_url, options)
    now, later, kept = send(app, "run"), send(app, "run", countdown=2), send(app, "run")
    app.control.revoke(now)
    app.AsyncResult(later).revoke()
    app.control.revoke("not-published-yet")
    with redis.Redis.from_url(redis_url) as link:
        link.flushall()
    worker(options=options)
    send(app, "run", task_id="not-published-yet")
    wait_status(conn, kept, "done")
    eventually(lambda: one(conn, "SELECT clock_timestamp() > max(run_at) + interval '0.5 s' FROM pgtruth.jobs")[0])
    assert runs(conn) == 1
    for job_id in (now, later, "not-published-yet"):
        row = job(conn, job_id)
        assert (row["status"], row["error"]) == ("failed", "revoked")
        assert app.AsyncResult(job_id).state == "REVOKED"


def test_d12_what_was_revoked_while_a_dead_worker_held_it_does_not_run_again(
    worker: Start, database_url: str, conn: Conn
) -> None:
    """The same, where nobody knows yet that the worker is dead."""
    app = client(database_url, FAST)
    first = worker(name="w1", options=FAST)
    job_id = send(app, "sleepy", 30)
    eventually(lambda: runs(conn) == 1)
    first.kill9()
    app.control.revoke(job_id)
    assert job(conn, job_id)["status"] == "processing"
    worker(name="w2", options=FAST)
    row = wait_status(conn, job_id, "failed", 15)
    assert (row["celery_state"], row["error"]) == ("REVOKED", "revoked")
    assert app.AsyncResult(job_id).state == "REVOKED"
    assert runs(conn) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "other"), [POOLS, POOLS[::-1]])
def test_d14_a_task_of_the_next_release_waits_for_a_worker_that_knows_it(
    worker: Start, database_url: str, conn: Conn, pool: str, other: str
) -> None:
    """celery/celery#6485: a worker that does not know a task's name discards it, or meets it again for ever."""
    options = {**FAST, "unknown_task_wait": 5}
    old = worker(name="old", options=options, app=FIELD, pool=pool)
    new = worker(name="new", options=options, app=FIELD, pool=other, env={"NEW_TASK": "1"})
    app = client(database_url, options)
    ids = [app.send_task(f"{FIELD}.new_task").id for _ in range(100)]
    eventually(ended(conn, ids), 60)
    assert statuses(conn) == {"done": 100}
    assert runs(conn) == 100
    assert one(conn, "SELECT max(retry_count) FROM pgtruth.jobs") == (0,)
    new.sigterm()
    new.wait()
    last = app.send_task(f"{FIELD}.new_task").id
    row = eventually(lambda: (found := job(conn, last))["lease_version"] and found, 20)  # met, and given back
    assert (row["status"], row["retry_count"]) in (("queued", 0), ("processing", 0))
    row = wait_status(conn, last, "failed", 20)
    assert "no worker knew this task" in row["error"]
    assert row["retry_count"] == 0
    assert row["updated_at"] - row["unknown_since"] >= timedelta(seconds=5)
    assert row["lease_version"] <= 8  # no tight loop
    assert set(outcomes(conn, last)) == {"released"}
    assert old.is_running()
