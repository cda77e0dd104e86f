"""What PostgreSQL reads for each hot statement, over thousands of rows, whatever it knows or believes about them.

Each statement runs with a plan for its parameters and with a generic one, on tables without statistics, with good and
with misleading ones. The right index, no whole read of ``jobs``, no sort of a backlog, and a bounded number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
import pytest

from pgtruth_transport import lifecycle
from pgtruth_transport.db import Database
from pgtruth_transport.settings import Settings
from pgtruth_transport.testing.servers import PostgresServer
from pgtruth_transport.urls import parse_url
from tests.support_lifecycle import forget_everything, fresh_database, job_row, search
from tests.support_plans import Plan, explain, explain_prepared, prepare

Connection = psycopg.Connection[Any]


class Hot(NamedTuple):
    """What a statement may read."""

    indexes: set[str]
    rows: int
    pages: int


HOT = {
    "job_claim": Hot({"jobs_claim"}, rows=60, pages=1200),
    "job_next_due": Hot({"jobs_claim"}, rows=200, pages=1000),
    "job_renew": Hot({"jobs_pkey"}, rows=8, pages=100),
    "job_progress": Hot({"jobs_pkey"}, rows=1, pages=30),
    "job_finish": Hot({"jobs_pkey"}, rows=8, pages=300),
    "job_requeue": Hot({"jobs_pkey"}, rows=8, pages=300),
    "job_reap": Hot({"jobs_processing", "jobs_pkey"}, rows=350, pages=2500),
    "job_recover": Hot({"jobs_enqueue_failed", "jobs_pkey"}, rows=250, pages=3000),
    "job_lock_expired": Hot({"jobs_expiring"}, rows=100, pages=400),
    "job_lock_forbidden": Hot({"jobs_expiring"}, rows=100, pages=400),
    "job_forbid": Hot({"jobs_pkey"}, rows=24, pages=150),  # 24 ids, each by its own path through the index
    "job_lock_unknown": Hot({"jobs_unknown"}, rows=100, pages=400),
    "job_lock_spent": Hot({"jobs_processing"}, rows=300, pages=600),
    "job_lock_queued": Hot({"jobs_pkey"}, rows=24, pages=100),
    "job_due_queues": Hot({"jobs_claim"}, rows=250, pages=2000),
    "job_delete_old": Hot({"jobs_ended", "jobs_pkey"}, rows=200, pages=2500),
    "job_enqueue": Hot(set(), rows=0, pages=300),
    "job_enqueue_one": Hot(set(), rows=0, pages=100),
    "job_flush": Hot({"jobs_pkey"}, rows=1, pages=10),
    "job_signal_failed": Hot({"jobs_pkey"}, rows=8, pages=300),
    "job_end_queued": Hot({"jobs_pkey"}, rows=8, pages=300),
    "job_store": Hot(set(), rows=0, pages=200),
    "job_read": Hot({"jobs_pkey"}, rows=24, pages=100),
    "job_annotate": Hot({"jobs_pkey"}, rows=1, pages=30),
    "job_forget": Hot({"jobs_pkey"}, rows=1, pages=30),
}
FILL = """
INSERT INTO pgtruth.jobs (id, status, task, queue, priority, run_at, expires_at, unknown_since, owned_by, claimed_at,
    lease_expires_at, lease_version, created_at, updated_at, headers, properties, body)
SELECT gen_random_uuid()::text, %(status)s, 'tests.noop', 'q' || n %% %(queues)s, n / %(queues)s %% %(priorities)s,
    clock_timestamp() + %(due)s * interval '1 s' - n * interval '1 ms',
    clock_timestamp() + %(expires)s * interval '1 s', clock_timestamp() + %(unknown)s * interval '1 s',
    CASE WHEN held THEN 'w1' END, CASE WHEN held THEN clock_timestamp() END,
    CASE WHEN held THEN clock_timestamp() + %(lease)s * interval '1 s' END, held::int,
    clock_timestamp() - interval '1 h', clock_timestamp() - n * interval '1 s',
    convert_to(repeat('h', 400), 'UTF8'), convert_to(repeat('p', 200), 'UTF8'), convert_to(repeat('b', 120), 'UTF8')
FROM generate_series(1, %(count)s) AS n, LATERAL (SELECT %(status)s = 'processing') AS s(held)
"""


def fill(conn: Connection, count: int, status: str, **changes: Any) -> None:
    """``count`` jobs, of the width that Celery's messages have."""
    values = {"queues": 4, "priorities": 10, "due": -60.0, "expires": None, "unknown": None, "lease": 10.0}
    conn.execute(FILL, {**values, **changes, "count": count, "status": status})


def fill_live(conn: Connection) -> None:
    """What is under way besides the bulk of the table."""
    fill(conn, 200, "processing")
    fill(conn, 50, "processing", lease=-5.0)
    fill(conn, 100, "enqueue_failed")
    fill(conn, 50, "queued", expires=-1.0)
    fill(conn, 50, "queued", unknown=-7200.0)


def note_attempts(conn: Connection) -> None:
    conn.execute(
        "INSERT INTO pgtruth.attempts (job_id, lease_version, owned_by, claimed_at, outcome)"
        " SELECT id, 1, 'w1', clock_timestamp(), 'done' FROM pgtruth.jobs WHERE status IN ('done', 'failed')"
    )


@dataclass(frozen=True, slots=True)
class Jobs:
    """A filled table and what to ask it."""

    conn: Connection
    db: Database
    parameters: dict[str, dict[str, Any]]

    def check(self, name: str, *, generic: bool) -> None:
        """Run the statement; fail with its plan if it read more than it may."""
        plan = explain(self.conn, self.db.sql(name), self.parameters[name], generic=generic)
        check(name, plan)


def check(name: str, plan: Plan) -> None:
    hot = HOT[name]
    assert not plan.read_as_a_whole("jobs"), plan.text
    assert plan.indexes("jobs") <= hot.indexes, plan.text
    assert plan.touched("jobs") <= hot.rows, plan.text
    assert plan.sorted() <= max(hot.rows, 10), plan.text
    assert plan.pages <= hot.pages, f"{plan.pages} pages\n{plan.text}"


def parameters(conn: Connection, queues: int = 4) -> dict[str, dict[str, Any]]:
    """Parameters for every hot statement, about jobs that are there."""
    held = conn.execute(
        "SELECT id, lease_version, owned_by, claimed_at::text FROM pgtruth.jobs WHERE status = 'processing' LIMIT 8"
    ).fetchall()
    queued = [row[0] for row in conn.execute("SELECT id FROM pgtruth.jobs WHERE status = 'queued' LIMIT 8")]
    ended = [row[0] for row in conn.execute("SELECT id FROM pgtruth.jobs WHERE status = 'done' LIMIT 1")]
    where = search(*(f"q{n}" for n in range(queues)), started=["tests.noop"], limit_tasks=["tests.noop"], limits=[5])
    ids, versions, owners, claimed_ats = (list(column) for column in zip(*held, strict=True))
    leases = {"ids": ids, "versions": versions, "owners": owners, "claimed_ats": claimed_ats}
    count, none = len(held), [None] * len(held)
    ends = {"states": ["X"] * len(queued), "metas": [None] * len(queued), "errors": ["e"] * len(queued)}
    kept = ("tasks", "queues", "priorities", "headers", "properties", "bodies")
    one = job_row("one", queue="q1")
    return {
        "job_claim": where.parameters(10, "w9", 15.0),
        "job_next_due": where.parameters(),
        "job_renew": {"ids": ids, "versions": versions, "owner": "w1", "lease": 15.0},
        "job_progress": {"id": ids[0], "version": 1, "owner": "w1", "state": "PROGRESS", "meta": b"m"},
        "job_finish": {
            **leases,
            "statuses": ["done"] * count,
            "outcomes": ["done"] * count,
            "states": ["SUCCESS"] * count,
            "results": [b"1"] * count,
            "metas": none,
            "errors": none,
        },
        "job_requeue": {
            **leases,
            "outcomes": ["retried"] * count,
            "retry_counts": [1] * count,
            "delays": [1.0] * count,
            "etas": none,
            "states": none,
            "metas": none,
            "errors": none,
            "unknowns": [False] * count,
            **dict.fromkeys(kept, none),
        },
        "job_reap": {"count": 500, "limit": 3},
        "job_recover": {"count": 500},
        "job_lock_expired": {"count": 500},
        "job_lock_forbidden": {"count": 500},
        "job_forbid": {"ids": ids},
        "job_lock_unknown": {"count": 500, "wait": 3600.0},
        "job_lock_spent": {"count": 500, "limit": 0},
        "job_lock_queued": {"ids": queued},
        "job_due_queues": {},
        "job_delete_old": {"status": "done", "keep": 10.0, "count": 100},
        "job_enqueue": lifecycle.enqueue_parameters([job_row(f"new{n}", queue="q1") for n in range(8)]),
        "job_enqueue_one": {**one._asdict(), "channel": None},
        "job_flush": {"id": queued[0]},
        "job_signal_failed": {"ids": queued},
        "job_end_queued": {"ids": queued, **ends},
        "job_store": {
            "ids": queued,
            "statuses": ["failed"] * len(queued),
            "tasks": [""] * len(queued),
            **ends,
            "results": [None] * len(queued),
        },
        "job_read": {"ids": queued},
        "job_annotate": {"id": queued[0], "state": "PROGRESS", "meta": b"m"},
        "job_forget": {"id": ended[0] if ended else queued[0]},
    }


POPULATIONS = [
    "mostly queued",
    "mostly finished",
    "far etas",
    "many queues",
    "one backlog",
    "burst after analyze",
    "first end",
]


def populate(conn: Connection, name: str) -> int:
    """Fill the table; returns the number of queues."""
    match name:
        case "mostly queued":
            fill(conn, 8000, "queued")
        case "mostly finished":
            fill(conn, 8000, "done")
            fill(conn, 100, "queued")
        case "far etas":
            fill(conn, 20_000, "queued", queues=1, priorities=1, due=3600.0)
            fill(conn, 50, "queued", queues=1, priorities=1)
        case "many queues":
            fill(conn, 10_000, "queued", queues=20)
        case "one backlog":
            fill(conn, 20_000, "queued", queues=1, priorities=1)
        case "burst after analyze":  # the statistics say that nothing is queued, held, parked or expired
            fill(conn, 8000, "done")
            conn.execute("VACUUM (ANALYZE) pgtruth.jobs")
            fill(conn, 8000, "queued")
        case _:  # they say that nothing has ever ended
            fill(conn, 3000, "queued")
            conn.execute("VACUUM (ANALYZE) pgtruth.jobs")
            fill(conn, 8000, "done")
    fill_live(conn)
    note_attempts(conn)
    return 20 if name == "many queues" else 4


@pytest.fixture(scope="module", params=POPULATIONS)
def jobs(request: pytest.FixtureRequest, pg_server: PostgresServer, template_database: str) -> Iterator[Jobs]:
    """A table full of jobs, without statistics or with old ones."""
    with fresh_database(pg_server, template_database) as url, psycopg.connect(parse_url(url), autocommit=True) as conn:
        conn.execute("ALTER TABLE pgtruth.jobs SET (autovacuum_enabled = off)")
        conn.execute("ALTER TABLE pgtruth.attempts SET (autovacuum_enabled = off)")
        queues = populate(conn, request.param)
        yield Jobs(conn, Database.of(Settings.make(url)), parameters(conn, queues))


@pytest.fixture(scope="module")
def analysed_jobs(jobs: Jobs) -> Jobs:
    """The same table after ANALYZE."""
    jobs.conn.execute("ANALYZE")
    return jobs


@pytest.mark.parametrize("name", HOT)
def test_a_hot_statement_reads_little_without_good_statistics(jobs: Jobs, name: str) -> None:
    for generic in (False, True):
        jobs.check(name, generic=generic)


@pytest.mark.parametrize("name", HOT)
def test_a_hot_statement_reads_little_after_analyze(analysed_jobs: Jobs, name: str) -> None:
    for generic in (False, True):
        analysed_jobs.check(name, generic=generic)


#: What every job passes, and every worker that found none.
FREQUENT = ("job_enqueue_one", "job_flush", "job_enqueue", "job_claim", "job_finish", "job_next_due")


def planned(conn: Connection, name: str, statement: bytes, parameters: dict[str, Any]) -> tuple[int, int]:
    """Run the prepared statement ten times, undoing each: how often with a plan for all, how often with its own?"""
    names = prepare(conn, name, statement)
    with psycopg.ClientCursor(conn) as cursor:
        for _ in range(10):
            with conn.transaction(force_rollback=True):
                cursor.execute(f"EXECUTE {name}({', '.join(['%s'] * len(names))})", [parameters[n] for n in names])
        row = cursor.execute(
            "SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE name = %s", [name]
        ).fetchone()
    conn.execute(f"DEALLOCATE {name}")
    assert row is not None
    return row


@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("name", FREQUENT)
def test_a_frequent_statement_is_not_planned_at_every_run(analysed_jobs: Jobs, name: str, most: int) -> None:
    """Planning a claim takes longer than running it. After five times, a plan for all is kept if it looks as cheap."""
    statement, given = analysed_jobs.db.sql(name), analysed_jobs.parameters[name]
    parameters = {key: value[:most] if isinstance(value, list) else value for key, value in given.items()}
    assert planned(analysed_jobs.conn, f"frequent_{name}", statement, parameters) == (5, 5)


def test_old_attempts_are_found_by_their_index(analysed_jobs: Jobs) -> None:
    conn, db = analysed_jobs.conn, analysed_jobs.db
    notes = conn.execute("SELECT count(*) FROM pgtruth.attempts").fetchone()
    for generic in (False, True):
        plan = explain(conn, db.sql("job_delete_old"), analysed_jobs.parameters["job_delete_old"], generic=generic)
        if notes and notes[0] > 1000:
            assert not plan.read_as_a_whole("attempts"), plan.text
            assert plan.touched("attempts") <= 100, plan.text


def test_a_plan_made_for_an_idle_table_is_replaced_once_it_has_been_analysed(
    pg_server: PostgresServer, template_database: str
) -> None:
    """A worker prepares its statements when it starts, perhaps on a table of one page, and keeps them for weeks.

    What reads a tiny table as a whole is cheapest there; ANALYZE (by autovacuum, after a minute at most) undoes it.
    """
    with fresh_database(pg_server, template_database) as url, psycopg.connect(parse_url(url), autocommit=True) as conn:
        db = Database.of(Settings.make(url))
        fill(conn, 1, "processing")
        fill(conn, 1, "queued")
        names = {name: prepare(conn, f"early_{name}", db.sql(name)) for name in HOT}
        first = parameters(conn)
        for name in HOT:
            explain_prepared(conn, f"early_{name}", names[name], first[name])
        fill(conn, 8000, "queued")
        fill_live(conn)
        conn.execute("ANALYZE pgtruth.jobs")
        later = parameters(conn)
        for name in HOT:
            check(name, explain_prepared(conn, f"early_{name}", names[name], later[name]))


def test_a_claim_from_a_new_table_does_not_read_all_of_it(pg_server: PostgresServer, template_database: str) -> None:
    """It has no statistics yet and looks tiny; where it is, reading the dead rows takes longer than the claim."""
    with fresh_database(pg_server, template_database) as url, psycopg.connect(parse_url(url), autocommit=True) as conn:
        db = Database.of(Settings.make(url))
        fill(conn, 8, "queued")
        fill(conn, 1, "processing")
        given = parameters(conn)["job_claim"]
        for generic in (False, True):
            plan = explain(conn, db.sql("job_claim"), given, generic=generic)
            assert not plan.read_as_a_whole("jobs"), plan.text


# The claim's LIMIT, whatever the planner does.

FORCED = {
    "nested loop": "SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_material = off",
    "hash join": "SET enable_nestloop = off; SET enable_mergejoin = off",
    "merge join": "SET enable_nestloop = off; SET enable_hashjoin = off",
    "no index": "SET enable_indexscan = off; SET enable_bitmapscan = off; SET enable_indexonlyscan = off",
    "generic": "SET plan_cache_mode = force_generic_plan",
    "generic nested loop": "SET plan_cache_mode = force_generic_plan; SET enable_hashjoin = off; "
    "SET enable_mergejoin = off; SET enable_seqscan = off",
}


@pytest.mark.parametrize("plan", FORCED)
def test_a_claim_takes_no_more_than_it_was_asked_for(one_database: str, plan: str) -> None:
    forget_everything(one_database)
    db = Database.of(Settings.make(one_database))
    with psycopg.connect(parse_url(one_database), autocommit=True, prepare_threshold=0) as conn:
        fill(conn, 2000, "queued")
        conn.execute("ANALYZE pgtruth.jobs")
        for setting in FORCED[plan].split("; "):
            conn.execute(setting.encode())
        where = search("q0", "q1", "q2", "q3")
        for round_, count in enumerate((10, 1, 37), 1):
            assert len(lifecycle.claimed(lifecycle.claim(conn, db, where, count, f"w{round_}"))) == count
            taken = conn.execute("SELECT count(*), min(priority) FROM pgtruth.jobs WHERE owned_by = %s", [f"w{round_}"])
            assert taken.fetchone() == (count, 9)
        conn.execute("RESET ALL")
