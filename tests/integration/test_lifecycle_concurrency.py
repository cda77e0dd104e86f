"""Many connections at once: each job has one holder, and nobody sees a serialization failure or a deadlock."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pgtruth_transport import lifecycle
from pgtruth_transport.db import Database, retrying
from pgtruth_transport.jobs import Ending, Job, Lease, Requeue
from pgtruth_transport.settings import Settings
from pgtruth_transport.states import Outcome
from pgtruth_transport.testing.servers import PostgresServer
from pgtruth_transport.urls import parse_url
from tests.support import eventually
from tests.support_lifecycle import (
    CANCELLED,
    DONE,
    claim,
    finish,
    fresh_database,
    job_row,
    lease_of,
    let_lease_run_out,
    purge,
    read_all,
    search,
)

pytestmark = pytest.mark.one_database
Connection = psycopg.Connection[Any]


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` returns in ``count`` threads that start together; raises what any of them raised."""
    gate = threading.Barrier(count)

    def run(number: int) -> Any:
        gate.wait(30)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [future.result(60) for future in [pool.submit(run, number) for number in range(count)]]


def notes(conn: Connection) -> Counter[tuple[str, str]]:
    """How many notes there are of each job and outcome."""
    return Counter(conn.execute("SELECT job_id, outcome FROM pgtruth.attempts").fetchall())


def test_eight_workers_claim_each_job_once(db: Database, conn: Connection) -> None:
    ids = [f"j{n:03}" for n in range(500)]
    lifecycle.enqueue(conn, db, [job_row(i, priority=n % 3, queue="ab"[n % 2]) for n, i in enumerate(ids)])

    def work(number: int) -> list[Job]:
        taken: list[Job] = []
        with closing(db.open("work")) as mine:
            while jobs := claim(mine, db, f"w{number}", random.randint(1, 7), "a", "b"):
                taken.extend(jobs)
            return taken

    taken = at_once(8, work)
    assert sorted(job.id for jobs in taken for job in jobs) == ids
    rows = read_all(conn)
    for number, jobs in enumerate(taken):
        assert {rows[job.id]["owned_by"] for job in jobs} <= {f"w{number}"}
    assert {(row["status"], row["lease_version"]) for row in rows.values()} == {("processing", 1)}


def test_workers_that_finish_and_claim_at_once_run_each_job_once(db: Database, conn: Connection) -> None:
    ids = [f"j{n:03}" for n in range(400)]
    lifecycle.enqueue(conn, db, [job_row(i) for i in ids])

    def work(number: int) -> int:
        owner, done = f"w{number}", 0
        held: list[Lease] = []
        with closing(db.open("work")) as mine:
            while True:
                with mine.transaction():
                    if held:
                        endings: list[tuple[Lease, Ending]] = [(lease, DONE) for lease in held]
                        assert len(lifecycle.ended(lifecycle.finish(mine, db, endings)).leases) == len(held)
                    jobs = claim(mine, db, owner, 8)
                done += len(held)
                held = [lease_of(job, owner) for job in jobs]
                if not held:
                    return done

    assert sum(at_once(8, work)) == 400
    assert set(notes(conn).values()) == {1}
    assert {(row["status"], row["lease_version"]) for row in read_all(conn).values()} == {("done", 1)}


def test_one_claim_does_not_wait_for_another(db: Database, conn: Connection) -> None:
    lifecycle.enqueue(conn, db, [job_row(f"j{n}") for n in range(6)])
    with closing(db.open("work")) as first, closing(db.open("work")) as second:
        with first.transaction():
            assert [job.id for job in claim(first, db, "w1", 2)] == ["j0", "j1"]
            second.execute("SET statement_timeout = '2s'")
            assert [job.id for job in claim(second, db, "w2", 2)] == ["j2", "j3"]
            assert lifecycle.reap(second, db, 10) == []
            assert purge(second, db, "celery") == 2
        assert Counter(row["status"] for row in read_all(conn).values()) == {"processing": 4, "failed": 2}


def test_a_finish_and_a_reap_of_the_same_lease_agree(db: Database, conn: Connection) -> None:
    """Whoever comes first; the other changes nothing."""
    for round_ in range(30):
        job_id = f"j{round_}"
        lifecycle.enqueue(conn, db, [job_row(job_id)])
        (job,) = claim(conn, db)
        let_lease_run_out(conn, job_id)

        def work(number: int, lease: Lease) -> bool:
            with db.connection() as mine:
                return bool(lifecycle.reap(mine, db, 10)) if number else finish(mine, db, lease)

        finished, reaped = at_once(2, partial(work, lease=lease_of(job, "w1")))
        assert finished != reaped
        row = read_all(conn)[job_id]
        assert (row["status"], row["lease_version"]) == (("done", 1) if finished else ("queued", 2))
        if reaped:
            lifecycle.cancel(conn, db, [job_id])
    assert set(notes(conn).values()) == {1}


def test_the_same_id_published_by_many_is_one_job(db: Database, conn: Connection) -> None:
    def work(number: int) -> set[str]:
        rows = [job_row(f"j{n}", body=b"%d" % number) for n in range(20)]
        random.shuffle(rows)

        def insert() -> set[str]:
            with db.connection() as mine:
                return lifecycle.enqueue(mine, db, rows)

        return retrying(insert)

    new = at_once(6, work)
    assert Counter(job_id for ids in new for job_id in ids) == {f"j{n}": 1 for n in range(20)}
    winner = {job_id: b"%d" % number for number, ids in enumerate(new) for job_id in ids}
    assert {job_id: row["body"] for job_id, row in read_all(conn).items()} == winner


# S06: a database whose default isolation is stricter than PostgreSQL's.


@pytest.fixture(params=["repeatable read", "serializable"])
def strict_url(request: pytest.FixtureRequest, pg_server: PostgresServer, template_database: str) -> Iterator[str]:
    """A database in which every transaction is at least repeatable read, unless it says otherwise."""
    with fresh_database(pg_server, template_database) as url:
        name = url.rpartition("/")[2].partition("?")[0]
        alter = sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = {}")
        with psycopg.connect(parse_url(url), autocommit=True) as conn:
            conn.execute(alter.format(sql.Identifier(name), sql.Literal(request.param)))
        with psycopg.connect(parse_url(url), autocommit=True) as conn:
            assert conn.execute("SHOW transaction_isolation").fetchone() == (request.param,)
        yield url


def test_a_strict_default_isolation_shows_nobody_a_retryable_error(strict_url: str) -> None:
    """Producers, workers, keepers, sweeps and cancels in random order, all through ``db.retrying``."""
    db = Database.of(Settings.make(strict_url))
    ids = [f"j{n:03}" for n in range(240)]
    over = threading.Event()

    def call(function: Callable[[Connection], Any]) -> Any:
        def run() -> Any:
            with db.connection() as mine, mine.transaction():
                return function(mine)

        return retrying(run)

    def ended() -> int:
        with db.connection() as mine:
            row = mine.execute("SELECT count(*) FROM pgtruth.jobs WHERE status IN ('done', 'failed')").fetchone()
            return row[0] if row else 0

    def produce(number: int) -> None:
        for start in range(number * 120, number * 120 + 120, 10):
            call(lambda mine, start=start: lifecycle.enqueue(mine, db, [job_row(i) for i in ids[start : start + 10]]))

    def work(owner: str) -> None:
        random_ = random.Random(owner)
        while not over.is_set():
            jobs = call(lambda mine: claim(mine, db, owner, 6))
            leases = [lease_of(job, owner) for job in jobs]
            call(lambda mine, leases=leases: lifecycle.renew(mine, db, leases, owner))
            random_.shuffle(leases)
            again = [(lease, Requeue(Outcome.RELEASED)) for lease in leases if random_.random() < 0.2]
            released = {lease for lease, _ in again}
            ends = [(lease, DONE) for lease in leases if lease not in released]

            def settle(mine: Connection, ends: Any = ends, again: Any = again) -> None:
                if ends:
                    lifecycle.ended(lifecycle.finish(mine, db, ends))
                if again:
                    lifecycle.requeued(lifecycle.requeue(mine, db, again))

            call(settle)

    def sweep() -> None:
        while not over.is_set():
            call(lambda mine: lifecycle.recover(mine, db, 50))
            call(lambda mine: lifecycle.reap(mine, db, 50))
            call(lambda mine: [lifecycle.lock_expired(mine, db, 50), lifecycle.due_queues(mine, db)])
            call(lambda mine: lifecycle.next_due(mine, db, search()))

    def cancel() -> None:
        random_ = random.Random(1)
        while not over.is_set():
            some = random_.sample(ids, 5)
            call(lambda mine, some=some: lifecycle.end_queued(mine, db, [(i, CANCELLED) for i in some]))
            call(lambda mine, some=some: lifecycle.signal_failed(mine, db, some))

    parts: list[Callable[[], None]] = [lambda: produce(0), lambda: produce(1), sweep, cancel]
    parts += [lambda n=n: work(f"w{n}") for n in range(4)]  # type: ignore[misc]
    with ThreadPoolExecutor(len(parts)) as pool:
        futures = [pool.submit(part) for part in parts]
        try:
            eventually(lambda: ended() == len(ids) or any(f.done() and f.exception() for f in futures), 30)
        finally:
            over.set()
        for future in futures:
            future.result(30)
    with db.connection() as conn:
        rows = read_all(conn).values()
        assert len(rows) == len(ids)
        done = [row["id"] for row in rows if row["status"] == "done"]
        assert Counter(job_id for job_id, outcome in notes(conn).elements() if outcome == "done") == Counter(done)
        assert len(done) > 50
