"""Random interleavings of several owners, stale ones among them, against a model of the contract.

Each step runs one of the lifecycle's functions on a real database and in a model that fits on a page; after each step
every row and every note of an attempt must be what the model says. So: at most one holder, an end never changes, one
note per ended attempt, a lease version never falls, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pgtruth_transport import lifecycle
from pgtruth_transport.db import Database
from pgtruth_transport.jobs import Ending, Lease, Requeue, Stored
from pgtruth_transport.states import TERMINAL, Outcome, Status, is_legal
from tests.support_lifecycle import CANCELLED, COLUMNS, DONE, FAILED, job_row, purge, search

LIMIT = 3  # retry_limit
IDS = [f"j{n:02}" for n in range(24)]
OWNERS = ["w1", "w2", "w3"]
QUEUES = ["a", "b"]

#: What may happen next, and how often.
STEPS = {
    "enqueue": 3,
    "signal_failed": 2,
    "store_failure": 1,
    "cancel": 1,
    "purge": 1,
    "claim": 8,
    "settle": 8,
    "renew": 2,
    "progress": 1,
    "lease_runs_out": 4,
    "falls_due": 3,
    "expires": 1,
    "reap": 4,
    "end_what_is_spent": 2,
    "recover": 2,
    "end_what_is_expired_or_unknown": 1,
}
Draw = Callable[[st.SearchStrategy[Any]], Any]

job_ids = st.sampled_from(IDS)
some_ids = st.lists(job_ids, min_size=1, max_size=4, unique=True)
owners = st.sampled_from(OWNERS)
queues = st.sampled_from(QUEUES)
outcomes = st.sampled_from(["done", "failed", "retry", "retry later", "release", "replace", "unknown"])


@dataclass(slots=True)
class Model:
    """What the contract says of one job."""

    status: Status
    queue: str
    priority: int
    version: int = 0
    retries: int = 0
    owner: str | None = None
    due: bool = True
    open: bool = False
    expired: bool = False
    lease_over: bool = False
    unknown: bool = False
    forbidden: bool = False  # revoked while it was held: it never begins again
    revoked_first: bool = False  # before anybody had published it
    notes: list[tuple[int, str, str]] = field(default_factory=list)  # (lease version, owner, outcome)

    def claimable(self) -> bool:
        held_back = self.open or self.expired or self.forbidden
        return self.status is Status.QUEUED and self.due and not held_back

    def holds(self, lease: Lease) -> bool:
        """The authority predicate (contract, section 3)."""
        mine = (self.status, self.version, self.owner)
        return mine == (Status.PROCESSING, lease.lease_version, lease.owned_by)

    def move(self, new: Status) -> None:
        assert is_legal(self.status, new)
        self.status = new

    def leave(self, outcome: Outcome, new: Status) -> None:
        """An attempt ends."""
        assert self.owner is not None
        self.notes.append((self.version, self.owner, outcome.value))
        self.move(new)
        self.owner, self.lease_over = None, False
        if new is Status.QUEUED:
            self.version += 1

    def shown(self) -> tuple[object, ...]:
        return (self.status.value, self.queue, self.priority, self.version, self.retries, self.owner, self.open)


class Lifecycle(RuleBasedStateMachine):
    """Owners keep every lease that they ever had, and go on using it."""

    conn: psycopg.Connection[Any]
    db: Database

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, Model] = {}
        self.leases: list[Lease] = []
        self.ends: dict[str, tuple[object, ...]] = {}

    @initialize()
    def start(self) -> None:
        self.conn.execute("DELETE FROM pgtruth.jobs; DELETE FROM pgtruth.attempts")
        self.publish(IDS[:8], "a", 5, due=True)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One rule for all: given many, hypothesis would leave half of them out of each example."""
        possible = [name for name, weight in STEPS.items() for _ in range(weight) if self.is_possible(name)]
        getattr(self, data.draw(st.sampled_from(possible)))(data.draw)

    def is_possible(self, name: str) -> bool:
        match name:
            case "renew" | "progress" | "settle":
                return bool(self.leases)
            case "lease_runs_out":
                return bool(self.held())
            case "falls_due":
                return bool(self.delayed())
            case "expires":
                return bool(self.waiting())
        return True

    def known(self, *statuses: Status) -> list[str]:
        return [job_id for job_id, job in self.jobs.items() if job.status in statuses]

    def held(self) -> list[str]:
        return self.known(Status.PROCESSING)

    def waiting(self) -> list[str]:
        return [i for i in self.known(Status.QUEUED, Status.ENQUEUE_FAILED) if not self.jobs[i].open]

    def delayed(self) -> list[str]:
        return [i for i in self.known(Status.QUEUED) if not self.jobs[i].due and not self.jobs[i].open]

    # Producers.

    def enqueue(self, draw: Draw) -> None:
        self.publish(draw(some_ids), draw(queues), draw(st.sampled_from([0, 5, 9])), due=draw(st.booleans()))

    def publish(self, ids: list[str], queue: str, priority: int, due: bool) -> None:
        rows = [job_row(i, queue=queue, priority=priority, delay=None if due else 3600.0) for i in ids]
        new = lifecycle.enqueue(self.conn, self.db, rows)
        assert new == {i for i in ids if i not in self.jobs or (self.jobs[i].status, self.jobs[i].open) == OPEN}
        for job_id in new:
            old = self.jobs.get(job_id)
            if old is None:
                self.jobs[job_id] = Model(Status.QUEUED, queue, priority, due=due)
            else:
                old.queue, old.priority, old.due = queue, priority, due
                old.open = old.expired = old.forbidden = False
        for job_id in ids:
            if job_id not in new and self.jobs[job_id].revoked_first:  # another row tells its chord, by expiring
                stand_in = Model(Status.QUEUED, queue, priority, forbidden=True)
                self.jobs.setdefault(f"{job_id}:revoked", stand_in)

    def signal_failed(self, draw: Draw) -> None:
        ids = draw(some_ids)
        lifecycle.signal_failed(self.conn, self.db, ids)
        for job_id in ids:
            job = self.jobs.get(job_id)
            if job and job.status is Status.QUEUED and job.version == 0 and not job.open:
                job.move(Status.ENQUEUE_FAILED)

    def store_failure(self, draw: Draw) -> None:
        """A chain failed before this step: its id gets an end if nobody has published it."""
        job_id = draw(job_ids)
        item = Stored(job_id, Status.FAILED, "", "FAILURE", None, b"m", "its chain failed")
        lifecycle.store(self.conn, self.db, [item])
        job = self.jobs.get(job_id)
        if job is None:
            self.jobs[job_id] = Model(Status.FAILED, "", 0)
        elif (job.status, job.open) == OPEN:
            job.move(Status.FAILED)
            job.open = False

    def cancel(self, draw: Draw) -> None:
        job_id = draw(job_ids)
        gone = lifecycle.cancel(self.conn, self.db, [job_id])
        job = self.jobs.get(job_id)
        assert bool(gone) == (job is not None and job.status in (Status.QUEUED, Status.ENQUEUE_FAILED))
        if job is None:
            self.jobs[job_id] = Model(Status.FAILED, "", 0, revoked_first=True)
        elif gone:
            job.move(Status.FAILED)
            job.open = False
        elif job.status is Status.PROCESSING:
            job.forbidden = True

    def purge(self, draw: Draw) -> None:
        queue = draw(queues)
        gone = [job for job in map(self.jobs.__getitem__, self.waiting()) if job.queue == queue]
        assert purge(self.conn, self.db, queue, batch=2) == len(gone)
        for job in gone:
            job.move(Status.FAILED)

    # Workers.

    def claim(self, draw: Draw) -> None:
        owner, count = draw(owners), draw(st.integers(1, 4))
        where = draw(st.sampled_from([["a"], ["b"], ["a", "b"], ["b", "a"]]))
        ready = [job for job in self.jobs.values() if job.claimable() and job.queue in where]
        jobs = lifecycle.claimed(lifecycle.claim(self.conn, self.db, search(*where), count, owner))
        assert len(jobs) == min(count, len(ready))
        order = [(-job.priority, where.index(job.queue)) for job in ready]
        assert sorted((-j.priority, where.index(j.queue)) for j in jobs) == sorted(order)[: len(jobs)]
        for job in jobs:
            model = self.jobs[job.id]
            assert model in ready
            model.move(Status.PROCESSING)
            model.version, model.owner = model.version + 1, owner
            assert (job.lease_version, job.retry_count) == (model.version, model.retries)
            self.leases.append(Lease(job.id, job.lease_version, owner, job.claimed_at))

    def renew(self, draw: Draw) -> None:
        leases, owner = self.some_leases(draw), draw(owners)
        kept = lifecycle.renew(self.conn, self.db, leases, owner)
        good = [x for x in leases if self.jobs[x.job_id].holds(x._replace(owned_by=owner))]
        assert kept == {(x.job_id, x.lease_version) for x in good}
        for lease in good:
            self.jobs[lease.job_id].lease_over = False

    def progress(self, draw: Draw) -> None:
        (lease, *_) = self.some_leases(draw)
        shown = lifecycle.progress(self.conn, self.db, lease, "PROGRESS", b"m")
        assert shown == self.jobs[lease.job_id].holds(lease)

    def settle(self, draw: Draw) -> None:
        """One turn of a worker: a batch of ends, some of them long overtaken, some claimed to be somebody else's."""
        leases = self.some_leases(draw)
        if draw(st.integers(0, 5)) == 0:
            leases = [lease._replace(owned_by=draw(owners)) for lease in leases]
        wanted = {lease: draw(outcomes) for lease in dict.fromkeys(leases)}
        good = [lease for lease in wanted if self.jobs[lease.job_id].holds(lease)]
        endings = [(x, DONE if how == "done" else FAILED) for x, how in wanted.items() if how in ("done", "failed")]
        requeues = [(x, self.requeue_for(x, how)) for x, how in wanted.items() if how not in ("done", "failed")]
        with self.conn.transaction():
            accepted: set[tuple[str, int]] = set()
            if endings:
                accepted |= lifecycle.ended(lifecycle.finish(self.conn, self.db, endings)).leases
            if requeues:
                accepted |= lifecycle.requeued(lifecycle.requeue(self.conn, self.db, requeues)).keys()
        assert accepted == {(x.job_id, x.lease_version) for x in good}
        for lease in good:
            self.apply(self.jobs[lease.job_id], wanted[lease])

    def some_leases(self, draw: Draw) -> list[Lease]:
        """Any that were ever given, or only those that still hold."""
        good = [lease for lease in self.leases if self.jobs[lease.job_id].holds(lease)]
        pool = draw(st.sampled_from([good or self.leases, self.leases]))
        return draw(st.lists(st.sampled_from(pool), min_size=1, max_size=4, unique=True))

    def requeue_for(self, lease: Lease, how: str) -> Requeue:
        retries = self.jobs[lease.job_id].retries + 1
        return {
            "retry": Requeue(Outcome.RETRIED, retries, celery_state="RETRY", error="e"),
            "retry later": Requeue(Outcome.RETRIED, retries, delay=3600.0, celery_state="RETRY", error="e"),
            "release": Requeue(Outcome.RELEASED),
            "replace": Requeue(Outcome.RELEASED, open=True),
            "unknown": Requeue(Outcome.RELEASED, delay=3600.0, unknown=True),
        }[how]

    def apply(self, job: Model, how: str) -> None:
        if how in ("done", "failed"):
            job.leave(Outcome(how), Status(how))
            return
        retried = how.startswith("retry")
        job.leave(Outcome.RETRIED if retried else Outcome.RELEASED, Status.QUEUED)
        job.retries += retried
        job.due, job.open, job.unknown = how in ("retry", "release"), how == "replace", how == "unknown"

    # Time, and what the sweep makes of it.

    def lease_runs_out(self, draw: Draw) -> None:
        job_id = draw(st.sampled_from(self.held()))
        self.conn.execute("UPDATE pgtruth.jobs SET lease_expires_at = '2020-01-01' WHERE id = %s", (job_id,))
        self.jobs[job_id].lease_over = True

    def falls_due(self, draw: Draw) -> None:
        job_id = draw(st.sampled_from(self.delayed()))
        self.conn.execute("UPDATE pgtruth.jobs SET run_at = clock_timestamp() WHERE id = %s", (job_id,))
        self.jobs[job_id].due = True

    def expires(self, draw: Draw) -> None:
        job_id = draw(st.sampled_from(self.waiting()))
        self.conn.execute("UPDATE pgtruth.jobs SET expires_at = clock_timestamp() WHERE id = %s", (job_id,))
        self.jobs[job_id].expired, self.jobs[job_id].forbidden = True, False

    def reap(self, draw: Draw) -> None:
        batch = draw(st.integers(1, 3))
        over = {i for i in self.known(Status.PROCESSING) if self.jobs[i].lease_over and self.jobs[i].retries < LIMIT}
        found = {row[0] for row in lifecycle.reap(self.conn, self.db, batch)}
        assert len(found) == min(batch, len(over))
        assert found <= over
        for job_id in found:
            self.jobs[job_id].leave(Outcome.LEASE_EXPIRED, Status.QUEUED)
            self.jobs[job_id].retries += 1
            self.jobs[job_id].unknown = False

    def end_what_is_spent(self, draw: Draw) -> None:
        over = {i for i in self.known(Status.PROCESSING) if self.jobs[i].lease_over and self.jobs[i].retries >= LIMIT}
        with self.conn.transaction():
            found = lifecycle.lock_spent(self.conn, self.db, 10)
            endings: list[tuple[Lease, Ending]] = [(lease, FAILED) for _, lease in found]
            ended = lifecycle.ended(lifecycle.finish(self.conn, self.db, endings)).leases if endings else frozenset()
        assert {job_id for job_id, _ in ended} == over
        for job_id in over:
            self.jobs[job_id].leave(Outcome.FAILED, Status.FAILED)

    def recover(self, draw: Draw) -> None:
        parked = self.known(Status.ENQUEUE_FAILED)
        assert {row[0] for row in lifecycle.recover(self.conn, self.db, 10)} == set(parked)
        for job_id in parked:
            self.jobs[job_id].move(Status.QUEUED)

    def end_what_is_expired_or_unknown(self, draw: Draw) -> None:
        queued = {i: self.jobs[i] for i in self.known(Status.QUEUED)}
        with self.conn.transaction():
            expired = {job.id for job in lifecycle.lock_expired(self.conn, self.db, 100)}
            assert expired == {i for i, job in queued.items() if job.expired}
            forbidden = {job.id for job in lifecycle.lock_forbidden(self.conn, self.db, 100)}
            assert forbidden == {i for i, job in queued.items() if job.forbidden}
            aged = "unknown_since IS NOT NULL AND status = 'queued'"
            self.conn.execute(f"UPDATE pgtruth.jobs SET unknown_since = '2020-01-01' WHERE {aged}")
            unknown = {job.id for job in lifecycle.lock_unknown(self.conn, self.db, 100)}
            assert unknown == {i for i, job in queued.items() if job.unknown}
            gone = expired | forbidden | unknown
            if gone:
                endings = [(job_id, CANCELLED) for job_id in sorted(gone)]
                assert {i for i, _ in lifecycle.end_queued(self.conn, self.db, endings).leases} == gone
        for job_id in gone:
            self.jobs[job_id].move(Status.FAILED)
            self.jobs[job_id].open = False

    # What must hold after every step.

    @invariant()
    def the_rows_are_what_the_model_says(self) -> None:
        rows = self.conn.execute(
            "SELECT id, status, queue, priority, lease_version, retry_count, owned_by, status = 'queued' AND"
            " run_at = 'infinity', claimed_at IS NULL, lease_expires_at IS NULL FROM pgtruth.jobs"
        ).fetchall()
        assert {row[0]: row[1:8] for row in rows} == {job_id: job.shown() for job_id, job in self.jobs.items()}
        for row in rows:
            assert row[8:] == ((row[1] != "processing",) * 2)

    @invariant()
    def there_is_one_note_for_each_ended_attempt(self) -> None:
        notes: dict[str, list[tuple[int, str, str]]] = {}
        for job_id, *note in self.conn.execute(
            "SELECT job_id, lease_version, owned_by, outcome FROM pgtruth.attempts ORDER BY job_id, lease_version"
        ):
            notes.setdefault(job_id, []).append(tuple(note))
        assert notes == {job_id: job.notes for job_id, job in self.jobs.items() if job.notes}
        for lease in self.leases:
            ended = [version for version, _, _ in notes.get(lease.job_id, [])]
            assert (lease.lease_version in ended) != self.jobs[lease.job_id].holds(lease)

    @invariant()
    def an_end_never_changes(self) -> None:
        """To the last column and the last microsecond."""
        ids = self.known(*TERMINAL)
        query = f"SELECT {COLUMNS} FROM pgtruth.jobs WHERE id = ANY(%s)"
        rows = {row[0]: row for row in self.conn.execute(query, (ids,))}
        assert rows.keys() == set(ids)
        for job_id, row in rows.items():
            assert self.ends.setdefault(job_id, row) == row


OPEN = (Status.QUEUED, True)


@pytest.fixture
def machine(database_url: str, db: Database, conn: psycopg.Connection[Any]) -> type[Lifecycle]:
    assert db.settings.retry_limit == LIMIT
    return type("Machine", (Lifecycle,), {"conn": conn, "db": db})


@pytest.mark.timeout(600)  # to make a failing example short takes minutes
def test_every_interleaving_keeps_the_contract(machine: type[Lifecycle]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
