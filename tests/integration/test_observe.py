"""What observe says, against real rows: counts, ages, ends, plans, metrics and the exporter."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pgtruth_transport.db import Database
from pgtruth_transport.observe import exporter, health, queries
from pgtruth_transport.observe.metrics import JobCollector
from pgtruth_transport.observe.queries import Count
from pgtruth_transport.settings import Settings
from pgtruth_transport.states import Status
from pgtruth_transport.urls import parse_url

ADD = """
INSERT INTO pgtruth.jobs (id, status, task, queue, priority, run_at, created_at, updated_at, retry_count, owned_by,
    claimed_at, lease_expires_at)
SELECT %(prefix)s || g, %(status)s, %(task)s, %(queue)s, %(priority)s,
    clock_timestamp() + %(due)s::float8 * interval '1 s',
    clock_timestamp() - %(age)s::float8 * interval '1 s', clock_timestamp(), %(retries)s,
    CASE WHEN %(status)s = 'processing' THEN %(owner)s::text END,
    CASE WHEN %(status)s = 'processing' THEN clock_timestamp() END,
    CASE WHEN %(status)s = 'processing' THEN clock_timestamp() + %(lease)s::float8 * interval '1 s' END
FROM generate_series(1, %(count)s) g
"""
Conn = psycopg.Connection[Any]


def add(conn: Conn, status: str, count: int = 1, **values: Any) -> None:
    """Rows as the lifecycle would have left them."""
    defaults = {"prefix": f"{status}-{conn.info.backend_pid}-{add.calls}-", "task": "t.a", "queue": "celery"}
    add.calls += 1  # type: ignore[attr-defined]
    numbers = {"priority": 0, "due": -1.0, "age": 1.0, "retries": 0, "owner": "w@host:1:aa", "lease": 15.0}
    conn.execute(ADD, {"status": status, "count": count, **defaults, **numbers, **values})


add.calls = 0  # type: ignore[attr-defined]


@pytest.fixture
def look(db: Database) -> Callable[..., Any]:
    """``look(queries.queues, …)``: one function in a bounded transaction of its own."""

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with queries.looking(db) as conn:
            return function(conn, db, *args, **kwargs)

    return call


def test_depth_tells_due_scheduled_open_held_and_unsignalled_apart(conn: Conn, look: Callable[..., Any]) -> None:
    add(conn, "queued", 7, due=-60.0)
    add(conn, "queued", 2, priority=9, due=-5.0)
    add(conn, "queued", 3, due=3600.0)
    add(conn, "queued", 1)
    conn.execute("UPDATE pgtruth.jobs SET run_at = 'infinity' WHERE id LIKE %s", (f"queued-%-{add.calls - 1}-1",))
    add(conn, "queued", 4, due=-60.0)
    conn.execute(
        "UPDATE pgtruth.jobs SET expires_at = clock_timestamp() - interval '1 s' WHERE id LIKE %s",
        (f"queued-%-{add.calls - 1}-%",),
    )
    add(conn, "processing", 2)
    add(conn, "enqueue_failed", 5, queue="other")
    celery, other = look(queries.queues)
    assert (celery.queue, celery.due, celery.scheduled, celery.open) == ("celery", Count(9), Count(3), Count(1))
    assert celery.processing == Count(2)
    assert 60 <= celery.oldest_due < 90
    assert (other.queue, other.enqueue_failed, other.oldest_due) == ("other", Count(5), None)


def test_counting_stops_at_the_limit_and_says_so(conn: Conn, look: Callable[..., Any]) -> None:
    add(conn, "queued", 50)
    add(conn, "done", 50)
    (depth,) = look(queries.queues, 20)
    assert depth.due == Count(20, capped=True)
    assert str(depth.due) == "20+"
    assert look(queries.totals, 20)[Status.DONE] == Count(20, capped=True)
    assert look(queries.queues, 1_000)[0].due == Count(50)


def test_ends_of_the_last_minutes(conn: Conn, look: Callable[..., Any]) -> None:
    add(conn, "done", 8, age=2.0, due=-2.0)
    add(conn, "failed", 2, age=100.0, due=-100.0, retries=3)
    add(conn, "done", 1, age=7200.0, due=-1.0)  # scheduled two hours ahead: it counts from when it was due
    ends = look(queries.ends, window=60)
    assert (ends.done, ends.failed, ends.retried) == (9, 2, 2)
    assert ends.per_minute == pytest.approx(11)
    assert ends.p50 == pytest.approx(2, abs=0.5)
    assert ends.longest == pytest.approx(100, abs=0.5)
    assert ends.within == pytest.approx(9 / 11)
    conn.execute("UPDATE pgtruth.jobs SET updated_at = updated_at - interval '5 min'")
    assert look(queries.ends, window=60).done == 0


def test_holders_show_who_holds_what(conn: Conn, look: Callable[..., Any]) -> None:
    add(conn, "processing", 3, owner="w1@host:1:aa")
    add(conn, "processing", 1, owner="w2@host:2:bb", lease=-3.0)
    first, second = look(queries.holders)
    assert (first.owned_by, first.jobs, first.expired) == ("w1@host:1:aa", 3, 0)
    assert (second.jobs, second.expired) == (1, 1)
    assert second.least_lease < 0 < first.least_lease


def test_a_list_filters_by_status_queue_task_and_age(conn: Conn, look: Callable[..., Any]) -> None:
    for status in Status:
        add(conn, status, 2)
    add(conn, "done", 1, task="t.rare", queue="q2")
    conn.execute("UPDATE pgtruth.jobs SET updated_at = clock_timestamp() - interval '1 h' WHERE status = 'failed'")
    assert len(look(queries.jobs)) == 11
    assert {line.status for line in look(queries.jobs, statuses=["done", "queued"])} == {"done", "queued"}
    assert [line.task for line in look(queries.jobs, task="t.rare")] == ["t.rare"]
    assert [line.queue for line in look(queries.jobs, queue="q2")] == ["q2"]
    assert "failed" not in {line.status for line in look(queries.jobs, since=60.0)}
    assert len(look(queries.jobs, limit=3)) == 3
    assert look(queries.jobs)[-1].status == "failed"  # the one that changed last comes first


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("shape", ["mostly queued", "mostly done"])
def test_no_plan_depends_on_statistics(conn: Conn, db: Database, analyzed: bool, shape: str) -> None:
    """A full scan or a sort of a big table is what makes monitoring take the system down that it watches."""
    add(conn, "queued", 20_000 if shape == "mostly queued" else 500)
    add(conn, "done", 20_000 if shape == "mostly done" else 500)
    add(conn, "processing", 5)
    if analyzed:
        conn.execute("ANALYZE pgtruth.jobs")
    everything = [status.value for status in Status]
    statements: dict[str, dict[str, Any]] = {
        "observe_queues": {"limit": 100},
        "observe_totals": {"limit": 100},
        "observe_ended": {"window": 300, "limit": 100, "objective": 25.0},
        "observe_ended_since": {"after": "-infinity", "until": "infinity", "limit": 100},
        "observe_recent": {"after": "-infinity", "limit": 100, "waiting": 100},
        "observe_holders": {},
        "observe_jobs": {"statuses": everything, "queue": None, "task": None, "since": None, "limit": 20, "scan": 100},
    }
    for name, params in statements.items():
        with queries.looking(db) as bounded:
            rows = bounded.execute(b"EXPLAIN (ANALYZE, FORMAT JSON) " + db.sql(name), params).fetchone()
        assert rows is not None
        nodes = list(_nodes(rows[0][0]["Plan"]))
        scanned = [n for n in nodes if n.get("Relation Name") == "jobs"]
        assert scanned, name
        assert not [n for n in scanned if n["Node Type"] == "Seq Scan" and n["Actual Loops"]], name
        read = max(n["Actual Rows"] * n["Actual Loops"] for n in scanned)
        assert read <= 1_100, f"{name} read {read} rows for a limit of 100"


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes(child)


def test_looking_can_change_nothing(db: Database) -> None:
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction), queries.looking(db) as conn:
        conn.execute("DELETE FROM pgtruth.jobs")
    with db.connection() as conn:  # and leaves the pool's connections as they were
        assert conn.execute("SHOW enable_bitmapscan").fetchone() == ("on",)
        conn.execute("DELETE FROM pgtruth.jobs")


def test_the_session_that_holds_back_vacuum_is_named(
    conn: Conn, database_url: str, look: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    with psycopg.connect(parse_url(database_url), application_name="nightly report") as reader:
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT count(*) FROM pgtruth.jobs")
        add(conn, "queued")
        oldest = look(health.snapshots)[0]
        assert "nightly report" in str(oldest)
        assert oldest.pid == reader.info.backend_pid
        assert oldest.age >= 1
    eventually(lambda: not [s for s in look(health.snapshots) if "nightly report" in s.name])


def test_waiting_for_a_lock_shows(
    conn: Conn, database_url: str, look: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    add(conn, "queued", 1, prefix="locked")
    lock = "SELECT 1 FROM pgtruth.jobs WHERE id = 'locked1' FOR UPDATE"

    def wait() -> None:
        with psycopg.connect(parse_url(database_url)) as waiter:
            waiter.execute(lock)

    with ThreadPoolExecutor(1) as threads, psycopg.connect(parse_url(database_url)) as holder:
        holder.execute(lock)
        waiting = threads.submit(wait)
        sessions, longest = eventually(lambda: (found := look(health.lock_waits))[0] and found)
        assert sessions == 1
        assert longest < 10
        holder.rollback()
        waiting.result(10)


def scrape(url: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The samples of an exporter, by name and labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


@pytest.fixture
def served(db: Database) -> Iterator[str]:
    """The address of a running exporter."""
    server = exporter.serve(db, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_exporter_shows_jobs_counters_and_the_objective(
    conn: Conn, served: str, eventually: Callable[..., Any]
) -> None:
    scrape(f"{served}/metrics")  # the histograms begin here
    add(conn, "queued", 3)
    add(conn, "processing", 1)
    add(conn, "done", 4, age=1.0)
    add(conn, "failed", 1, age=60.0, retries=3)
    conn.execute("INSERT INTO pgtruth.counters VALUES ('leases_expired', 2), ('stale_writes', 5)")
    found = scrape(f"{served}/metrics")
    assert found["pgtruth_up"][()] == 1
    assert found["pgtruth_jobs"][("queue", "celery"), ("status", "due")] == 3
    assert found["pgtruth_jobs"][("queue", "celery"), ("status", "processing")] == 1
    assert found["pgtruth_lease_expired_total"][()] == 2
    assert found["pgtruth_stale_writes_total"][()] == 5
    assert found["pgtruth_within_objective_ratio"][()] == pytest.approx(0.8)
    assert found["pgtruth_jobs_per_minute"][()] == pytest.approx(1)
    ended = eventually(
        lambda: (f := scrape(f"{served}/metrics"))["pgtruth_retry_distribution_count"][()] == 5 and f, 10, every=0.5
    )
    assert ended["pgtruth_time_to_terminal_seconds_bucket"][("le", "2.5"), ("status", "done")] == 4
    assert ended["pgtruth_time_to_terminal_seconds_bucket"][("le", "25.0"), ("status", "failed")] == 0
    assert ended["pgtruth_time_to_terminal_seconds_bucket"][("le", "+Inf"), ("status", "failed")] == 1
    assert ended["pgtruth_retry_distribution_bucket"][(("le", "2.0"),)] == 4
    again = scrape(f"{served}/metrics")
    assert again["pgtruth_retry_distribution_count"][()] == 5  # each end is counted once


def test_an_exporter_without_its_database_says_so_and_answers(database_url: str) -> None:
    closed = Settings.make("pgtruth://nobody@127.0.0.1:9/nothing", {"connect_timeout": 2})
    server = exporter.serve(Database.of(closed), "127.0.0.1", 0)
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        assert scrape(f"{address}/metrics") == {"pgtruth_up": {(): 0.0}}
        for path, status in (("health", "503"), ("elsewhere", "404")):
            with pytest.raises(HTTPError, match=status) as refused:
                urllib.request.urlopen(f"{address}/{path}", timeout=10)
            refused.value.close()
    finally:
        server.shutdown()
        server.server_close()


def test_an_exporter_on_a_missing_schema_says_so(empty_database_url: str) -> None:
    collector = JobCollector(Database.of(Settings.make(empty_database_url)))
    assert [(m.name, m.samples[0].value) for m in collector.collect()] == [("pgtruth_up", 0)]
