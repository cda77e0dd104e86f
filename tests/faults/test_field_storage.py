"""Field cases of storage, the claim query, NOTIFY and isolation (S01 to S09): what users reported, tried here.

Each test's name begins with the id of its case; its docstring says what people saw. Times and volumes are scaled down.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any

import psycopg
import pytest
from celery.result import ResultSet

from pgtruth_transport import db as connections
from pgtruth_transport import lifecycle
from pgtruth_transport.db import Database
from pgtruth_transport.observe import health
from pgtruth_transport.signals import wake_channel
from pgtruth_transport.urls import parse_url
from tests.support import WorkerProcess, eventually, runs, statuses
from tests.support_field import FAST, Conn, one
from tests.support_jobs import client, ended, send
from tests.support_plans import explain

Start = Callable[..., WorkerProcess]


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return quantiles(values, n=20)[-1]


def test_s01_an_old_snapshot_slows_no_claim_and_is_named(
    worker: Start, database_url: str, conn: Conn, db: Database
) -> None:
    """recollect#917, awa#169: one old snapshot stops vacuum, dead rows pile up, and claims slow down."""
    with psycopg.connect(parse_url(database_url), application_name="nightly dump") as old:
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old.execute("SELECT count(*) FROM pgtruth.jobs")
        pid = old.info.backend_pid
        worker(options=FAST, concurrency=2)
        worker(options=FAST, concurrency=2)
        app = client(database_url, FAST)
        long = send(app, "sleepy", 6)  # is renewed meanwhile
        ids = [send(app, "noop") for _ in range(500)]
        eventually(ended(conn, [*ids, long]), 60)
        search = lifecycle.Search(("celery",), (0,), (), (), (), ())
        took = []
        for _ in range(40):
            send(app, "noop", queue="elsewhere")
            begun = time.monotonic()
            with conn.transaction(force_rollback=True):
                lifecycle.claimed(lifecycle.claim(conn, db, search, 10, "x:1:x"))
            took.append(time.monotonic() - begun)
        assert p95(took) < 0.05, took
        conn.execute("SELECT pg_stat_force_next_flush()")
        written = "SELECT n_tup_upd::float8 FROM pg_stat_user_tables WHERE relname = 'jobs' AND schemaname = 'pgtruth'"
        eventually(lambda: one(conn, written) >= 1000, 5)
        per_job = one(conn, written) / 501
        assert per_job < 2.3  # the claim and the end, and a few renewals
        found = {snapshot.pid: snapshot for snapshot in health.snapshots(conn, db)}
        assert "nightly dump" in str(found[pid])
        assert str(pid) in str(found[pid])


@pytest.mark.parametrize("backlog", [60_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_s02_a_backlog_is_never_sorted_or_walked(conn: Conn, db: Database, backlog: int) -> None:
    """pgqueuer#667, pg-boss#418: with a large backlog the claim sorts or scans, and eats the CPU. No ANALYZE here."""
    if backlog >= 1_000_000 and not one(conn, "SELECT current_setting('fsync') = 'off'"):
        pytest.fail("the big run needs a server that may be slow to flush: use the embedded one")
    conn.execute("ALTER TABLE pgtruth.jobs SET (autovacuum_enabled = off)")
    conn.execute(
        """
        INSERT INTO pgtruth.jobs (id, status, task, queue, priority, run_at)
        SELECT md5(n::text), CASE WHEN n <= %(backlog)s THEN 'queued' ELSE 'done' END, 't', 'q' || n %% 20, n %% 10,
            now() - interval '1 d' + (n %% 172800) * interval '1 s'
        FROM generate_series(1, %(backlog)s * 3 / 2) n
        """,
        {"backlog": backlog},
    )
    queues = [f"q{n}" for n in range(20)]
    pairs = [(queue, priority) for priority in range(9, -1, -1) for queue in queues]
    search = lifecycle.Search(tuple(q for q, _ in pairs), tuple(p for _, p in pairs), (), (), (), ())
    params = search.parameters(10, "x:1:x", 15.0)
    plan = explain(conn, db.sql("job_claim"), params, generic=True)
    assert not plan.read_as_a_whole("jobs"), plan.text
    assert plan.touched("jobs") <= 100, plan.text
    assert plan.sorted() <= 10, plan.text
    took = []
    with db.open("work") as mine:
        for _ in range(60):
            begun = time.monotonic()
            assert len(lifecycle.claimed(lifecycle.claim(mine, db, search, 10, "x:1:x"))) == 10
            took.append(time.monotonic() - begun)
    assert p95(took[10:]) < 0.02, took  # 10 ms on a machine of its own


def test_s02_a_backlog_makes_no_worker_poll_faster(worker: Start, database_url: str, conn: Conn) -> None:
    """A full worker asks for nothing, whatever lies in the queue."""
    worker(options=FAST, concurrency=1)
    app = client(database_url, FAST)
    ids = [send(app, "sleepy", 7, priority=9)]
    eventually(lambda: runs(conn) == 1)
    without = _commits(conn, 2)
    for _ in range(100):
        ids.append(send(app, "noop"))
    connections.close_all()  # a session's commits are counted late, or when it ends: these are none of the worker's
    time.sleep(0.5)
    assert _commits(conn, 2) < 2 * without
    assert runs(conn, "end") == 0  # the worker was full all the time
    eventually(ended(conn, ids), 30)


def _commits(conn: Conn, seconds: float) -> int:
    """How many transactions end within so many seconds."""
    query = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    begun = time.monotonic()
    first: int = one(conn, query)
    eventually(lambda: time.monotonic() > begun + seconds, seconds + 1)
    last: int = one(conn, query)
    return last - first


def test_s04_no_notify_in_the_applications_transaction(database_url: str, conn: Conn, redis_url: str) -> None:
    """graph-node#1266, awx#12999: NOTIFY takes a global lock at commit; payloads above 8000 bytes abort it."""
    queue = "очередь-" + "長" * 100
    channel = wake_channel("pgtruth", queue)
    with psycopg.connect(parse_url(database_url), autocommit=True) as listening:
        listening.execute(f'LISTEN "{channel}"')
        for options in ({}, {"signal_url": redis_url}):
            app = client(database_url, {**FAST, **options})
            ids = [send(app, "echo", "x" * 9000, queue=queue) for _ in range(5)]
            assert statuses(conn)["queued"] % 5 == 0
            heard = list(listening.notifies(timeout=0.5))
            assert all(notify.payload == "" for notify in heard)
            assert bool(heard) is (not options)
            assert one(conn, "SELECT count(*) FROM pgtruth.jobs WHERE id = ANY(%s)", ids) == 5
            if heard:  # never by the session that inserted
                inserting = one(conn, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", heard[0].pid)
                assert inserting <= 1
    assert len(channel.encode()) <= 63


@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
def test_s06_stricter_isolation_costs_no_run_and_shows_no_error(
    worker: Start, database_url: str, conn: Conn, isolation: str
) -> None:
    """graphile/worker#387, kombu#524: claims or ends fail with 40001, and finished work stays "running"."""
    conn.execute(f"ALTER DATABASE {conn.info.dbname} SET default_transaction_isolation = '{isolation}'")
    workers = [worker(name=f"w{n}", options=FAST, concurrency=2, pool="threads") for n in range(4)]
    app = client(database_url, FAST)
    failures: list[BaseException] = []

    def publish_and_revoke(seed: int) -> None:
        dice = random.Random(seed)
        mine = []
        try:
            for number in range(60):
                mine.append(send(app, "run", number, countdown=dice.choice((0, 0, 0, 2))))
                if number % 6 == 5:
                    batch = dice.sample(mine, 3)
                    app.control.revoke(batch)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=publish_and_revoke, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    eventually(lambda: set(statuses(conn)) <= {"done", "failed"}, 40)
    assert sum(statuses(conn).values()) == 240
    assert one(conn, "SELECT count(*) FROM pgtruth.jobs WHERE status = 'failed' AND celery_state <> 'REVOKED'") == 0
    assert one(conn, "SELECT max(retry_count) FROM pgtruth.jobs") == 0
    doubled = one(
        conn,
        "SELECT count(*) FROM (SELECT FROM public.runs WHERE event = 'start' GROUP BY job_id HAVING count(*) > 1) d",
    )
    assert doubled == 0
    for running in workers:
        for word in ("could not serialize", "deadlock", "Connection to broker lost", "Traceback"):
            assert word not in running.output


def test_s08_no_session_stays_in_a_transaction(worker: Start, database_url: str, conn: Conn) -> None:
    """OpenTranscribe#440: sessions held open across slow work stay idle in a transaction."""
    worker(options=FAST, concurrency=5)
    worker(options=FAST, concurrency=5, pool="threads")
    app = client(database_url, FAST)
    ids = [send(app, "sleepy", 4) for _ in range(10)]
    worst = []

    def sampling() -> bool:
        worst.append(
            one(
                conn,
                """
                SELECT COALESCE(max(EXTRACT(EPOCH FROM clock_timestamp() - xact_start)), 0)::float8
                FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE 'pgtruth%%'
                    AND state LIKE 'idle in transaction%%'
                """,
            )
        )
        return ended(conn, ids)()

    eventually(sampling, 30, every=0.05)
    assert max(worst) < 1
    assert len(worst) > 30
    first = one(conn, "SELECT min(at) FROM public.runs")
    claimed = one(conn, "SELECT max(claimed_at) FROM pgtruth.attempts")
    assert (claimed - first).total_seconds() < 5


def test_s09_priorities_are_strict_and_queues_take_turns(worker: Start, database_url: str, conn: Conn) -> None:
    """timescaledb#9918: an unbroken stream of higher priority starves the rest. The rule here is: it does."""
    app = client(database_url, FAST)
    low = [send(app, "run", "low", priority=0) for _ in range(10)]
    high = [send(app, "run", "high", priority=9) for _ in range(60)]
    other = [send(app, "run", "other", priority=9, queue="other") for _ in range(60)]
    worker(options=FAST, concurrency=1, args=("-Q", "celery,other"))
    eventually(ended(conn, [*low, *high, *other]), 60)
    order = [row[0] for row in conn.execute("SELECT job_id FROM public.runs WHERE event = 'start' ORDER BY id")]
    assert set(order[120:]) == set(low)  # strictly after everything of priority 9, in both queues
    place = {job_id: n for n, job_id in enumerate(order)}
    for half in (order[:60], order[60:120]):
        share = sum(1 for job_id in half if job_id in set(other)) / 60
        assert 0.25 <= share <= 0.75, (share, place)


def test_s09_a_busy_queue_does_not_starve_another(worker: Start, database_url: str, conn: Conn) -> None:
    """One queue never empty: the other's jobs, of the same priority, run all the same."""
    app = client(database_url, FAST)
    busy = [send(app, "sleepy", 0.02, queue="busy") for _ in range(100)]
    worker(options=FAST, concurrency=2, args=("-Q", "busy,quiet"))
    eventually(lambda: runs(conn, "end") >= 10, 20)
    quiet: Any = [app.send_task("tests.apps.basic.echo", (n,), queue="quiet") for n in range(10)]
    assert ResultSet(quiet, app=app).join(timeout=10) == list(range(10))
    assert statuses(conn).get("queued", 0) > 0  # the busy one still is
    eventually(ended(conn, busy), 30)
