"""Every legal move by name, every illegal one tried, and what each leaves in the row (contract, sections 2 to 5)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgtruth_transport import lifecycle
from pgtruth_transport.db import Database
from pgtruth_transport.jobs import Ending, Lease, Requeue, Stored
from pgtruth_transport.states import MOVES, TERMINAL, Outcome, Status
from tests.support_lifecycle import (
    CANCELLED,
    DONE,
    FAILED,
    RELEASE,
    attempts_of,
    claim,
    clock,
    finish,
    held,
    job_row,
    lease_of,
    let_lease_run_out,
    purge,
    read,
    requeue,
    retry,
    search,
)

pytestmark = pytest.mark.one_database
Connection = psycopg.Connection[Any]
Row = dict[str, Any]


def shows(row: Row, **expected: Any) -> None:
    """The row holds these values."""
    assert {name: row[name] for name in expected} == expected


def shows_no_owner(row: Row) -> None:
    """Nobody holds it (contract, section 4)."""
    shows(row, owned_by=None, claimed_at=None, lease_expires_at=None)


# Births.


def test_an_enqueued_job_is_queued(conn: Connection, db: Database) -> None:
    before = clock(conn)
    assert lifecycle.enqueue(conn, db, [job_row("a", group_id="g", parent_id="p", root_id="r")]) == {"a"}
    row = read(conn)
    shows(row, status="queued", lease_version=0, retry_count=0, result=None, error=None, celery_state=None)
    shows(
        row, task="tests.noop", queue="celery", priority=0, group_id="g", parent_id="p", root_id="r", max_retries=None
    )
    shows_no_owner(row)
    assert before <= row["created_at"] <= row["updated_at"] <= clock(conn)
    assert before <= row["run_at"] <= clock(conn)
    assert attempts_of(conn) == []


def test_the_first_write_of_an_id_wins(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row("a", body=b"first")])
    first = read(conn)
    second = job_row("a", body=b"second", queue="other", priority=5, delay=9.0)
    assert lifecycle.enqueue(conn, db, [second]) == set()
    assert lifecycle.enqueue(conn, db, [second, job_row("b")]) == {"b"}
    assert read(conn) == first


def test_one_job_and_many_are_enqueued_alike(conn: Connection, db: Database) -> None:
    given: dict[str, Any] = {
        "task": "tests.add",
        "queue": "slow",
        "priority": 7,
        "eta": "2030-01-01T00:00:00+00:00",
        "expires_in": 60.0,
        "retries": 2,
        "root_id": "r",
        "parent_id": "p",
        "group_id": "g",
        "headers": b"h\x00",
        "properties": b"p\xff",
        "body": b"\x80\x00",
    }
    lifecycle.enqueue(conn, db, [job_row("one", **given)])
    lifecycle.enqueue(conn, db, [job_row("two", **given), job_row("three", delay=60.0)])
    one, two = read(conn, "one"), read(conn, "two")
    own = {"id", "created_at", "updated_at", "expires_at"}
    assert {k: v for k, v in one.items() if k not in own} == {k: v for k, v in two.items() if k not in own}
    shows(one, **{name: value for name, value in given.items() if name not in ("eta", "expires_in", "retries")})
    shows(one, retry_count=2)
    assert two["expires_at"] - one["expires_at"] < timedelta(seconds=1)


def test_the_first_row_of_a_batch_wins(conn: Connection, db: Database) -> None:
    rows = [job_row("a", body=b"first"), job_row("b"), job_row("a", body=b"second")]
    assert lifecycle.enqueue(conn, db, rows) == {"a", "b"}
    assert read(conn)["body"] == b"first"


def test_a_result_for_an_unknown_id_is_a_job_that_was_never_queued(conn: Connection, db: Database) -> None:
    lifecycle.store(conn, db, [Stored("a", Status.FAILED, "", "FAILURE", None, b"{}", "its chain failed")])
    shows(read(conn), status="failed", celery_state="FAILURE", error="its chain failed", lease_version=0)
    assert read(conn)["run_at"] is not None  # an end has a real time: clients cannot read an infinite one
    assert lifecycle.enqueue(conn, db, [job_row("a")]) == set()


@pytest.mark.parametrize("how", ["store", "cancel"])
def test_queued_to_failed_for_an_open_job(conn: Connection, db: Database, how: str) -> None:
    assert requeue(conn, db, held(conn, db), Requeue(Outcome.RELEASED, open=True))
    assert read(conn)["run_at"] is None
    if how == "store":
        lifecycle.store(conn, db, [Stored("a", Status.FAILED, "", "FAILURE", None, b"m", "its chain failed")])
        shows(read(conn), status="failed", celery_state="FAILURE", meta=b"m", error="its chain failed")
    else:
        assert lifecycle.cancel(conn, db, ["a"]) == {"a"}
        shows(read(conn), status="failed", celery_state="REVOKED", error="revoked")
    assert read(conn)["run_at"] is not None
    assert lifecycle.enqueue(conn, db, [job_row("a")]) == set()


@pytest.mark.parametrize("more", [0, 1])
def test_an_open_job_is_not_claimable_until_its_message_comes(conn: Connection, db: Database, more: int) -> None:
    lifecycle.store(conn, db, [Stored("a", Status.QUEUED, "", "PROGRESS", None, b"{}", None)])
    assert claim(conn, db) == []
    assert claim(conn, db, "w1", 1, "") == []
    assert lifecycle.next_due(conn, db, search("", "celery")) is None
    assert lifecycle.due_queues(conn, db) == []
    others = [job_row(f"z{n}", queue="other") for n in range(more)]
    assert "a" in lifecycle.enqueue(conn, db, [job_row("a"), *others])
    assert [job.id for job in claim(conn, db)] == ["a"]


# Legal moves.


def test_queued_to_processing_by_claim(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row("a")])
    before = clock(conn)
    found = search(early=["tests.noop"], started=["tests.noop"], limit_tasks=["tests.noop"], limits=[7])
    (job,) = lifecycle.claimed(lifecycle.claim(conn, db, found, 5, "w1"))
    row = read(conn)
    shows(row, status="processing", owned_by="w1", lease_version=1, retry_count=0)
    shows(row, celery_state="STARTED", at_most_once=True, max_retries=7)
    assert before <= row["claimed_at"] <= clock(conn)
    assert row["lease_expires_at"] - row["claimed_at"] < timedelta(seconds=db.settings.lease_seconds + 0.1)
    assert row["lease_expires_at"] - row["claimed_at"] >= timedelta(seconds=db.settings.lease_seconds)
    assert (job.id, job.lease_version, job.retry_count, job.max_retries, job.at_most_once) == ("a", 1, 0, 7, True)
    assert (job.headers, job.properties, job.body) == (b"{}", b"{}", b"[[], {}, {}]")
    assert attempts_of(conn) == []


def test_a_claim_of_a_task_without_own_settings(conn: Connection, db: Database) -> None:
    held(conn, db)
    shows(read(conn), celery_state=None, at_most_once=False, max_retries=None)


def test_queued_to_enqueue_failed_by_signal_failed(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row("a"), job_row("b")])
    lifecycle.signal_failed(conn, db, ["a"])
    row = read(conn)
    shows(row, status="enqueue_failed", lease_version=0, retry_count=0)
    shows_no_owner(row)
    assert row["updated_at"] > row["created_at"]
    shows(read(conn, "b"), status="queued")
    assert [job.id for job in claim(conn, db, "w1", 5)] == ["b"]


@pytest.mark.parametrize("parked", [False, True], ids=["queued", "enqueue_failed"])
def test_queued_or_enqueue_failed_to_failed_by_cancel(conn: Connection, db: Database, parked: bool) -> None:
    lifecycle.enqueue(conn, db, [job_row("a")])
    if parked:
        lifecycle.signal_failed(conn, db, ["a"])
    assert lifecycle.cancel(conn, db, ["a"], "not wanted") == {"a"}
    row = read(conn)
    shows(row, status="failed", celery_state="REVOKED", error="not wanted", result=None, lease_version=0, retry_count=0)
    shows_no_owner(row)
    assert attempts_of(conn) == []


def test_queued_to_failed_by_expiry(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row("a", expires_in=-1.0), job_row("b", expires_in=60.0), job_row("c")])
    assert [job.id for job in claim(conn, db, "w1", 5)] == ["b", "c"]
    with conn.transaction():
        assert [job.id for job in lifecycle.lock_expired(conn, db, 10)] == ["a"]
        ending = CANCELLED._replace(error="expired")
        assert lifecycle.end_queued(conn, db, [("a", ending)]).leases == {("a", 0)}
    shows(read(conn), status="failed", error="expired", celery_state="REVOKED")


@pytest.mark.parametrize("parked", [False, True], ids=["queued", "enqueue_failed"])
def test_queued_or_enqueue_failed_to_failed_by_purge(conn: Connection, db: Database, parked: bool) -> None:
    rows = [job_row(f"j{n}", queue="full", priority=n) for n in range(5)]
    lifecycle.enqueue(conn, db, [*rows, job_row("other")])
    if parked:
        lifecycle.signal_failed(conn, db, ["j1", "j3", "other"])
    assert purge(conn, db, "full", batch=2) == 5
    for n in range(5):
        shows(read(conn, f"j{n}"), status="failed", error="purged", celery_state="REVOKED")
    shows(read(conn, "other"), status="enqueue_failed" if parked else "queued")


def test_queued_to_failed_when_no_worker_knows_the_task(conn: Connection, db: Database) -> None:
    lease = held(conn, db)
    assert requeue(conn, db, lease, Requeue(Outcome.RELEASED, delay=30.0, unknown=True))
    assert lifecycle.lock_unknown(conn, db, 10) == []
    first = read(conn)["unknown_since"]
    conn.execute("UPDATE pgtruth.jobs SET run_at = clock_timestamp(), unknown_since = unknown_since - interval '1 h'")
    (job,) = claim(conn, db, "w2")
    assert requeue(conn, db, lease_of(job, "w2"), Requeue(Outcome.RELEASED, unknown=True))
    row = read(conn)
    assert row["unknown_since"] == first - timedelta(hours=1)
    shows(row, retry_count=0, lease_version=4)
    with conn.transaction():
        assert [job.id for job in lifecycle.lock_unknown(conn, db, 10)] == ["a"]
        lifecycle.end_queued(conn, db, [("a", FAILED)])
    shows(read(conn), status="failed", celery_state="FAILURE", error="ValueError: no")


def test_enqueue_failed_to_queued_by_recover(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row("a"), job_row("b", queue="other"), job_row("c")])
    lifecycle.signal_failed(conn, db, ["a", "b"])
    assert sorted(lifecycle.recover(conn, db, 10)) == [("a", "celery"), ("b", "other")]
    shows(read(conn), status="queued", lease_version=0, retry_count=0)
    assert lifecycle.recover(conn, db, 10) == []
    assert [job.id for job in claim(conn, db, "w1", 9, "celery", "other")] == ["a", "b", "c"]


def test_processing_to_done_by_finish(conn: Connection, db: Database) -> None:
    lease = held(conn, db)
    claimed_at = read(conn)["claimed_at"]
    assert finish(conn, db, lease, DONE._replace(meta=b"m"))
    row = read(conn)
    shows(
        row, status="done", result=b"42", meta=b"m", celery_state="SUCCESS", error=None, lease_version=1, retry_count=0
    )
    shows_no_owner(row)
    (attempt,) = attempts_of(conn)
    shows(attempt, lease_version=1, owned_by="w1", claimed_at=claimed_at, outcome="done", error=None)
    assert claimed_at <= attempt["ended_at"] <= clock(conn)


def test_processing_to_failed_by_finish(conn: Connection, db: Database) -> None:
    lease = held(conn, db)
    assert finish(conn, db, lease, FAILED)
    row = read(conn)
    shows(row, status="failed", result=None, celery_state="FAILURE", error="ValueError: no", lease_version=1)
    shows(row, retry_count=0)  # how many retries were made, not how many failures there were
    shows_no_owner(row)
    (attempt,) = attempts_of(conn)
    shows(attempt, lease_version=1, owned_by="w1", outcome="failed", error="ValueError: no")


def test_processing_to_failed_by_the_holder_of_a_cancelled_job(conn: Connection, db: Database) -> None:
    lease = held(conn, db)
    assert lifecycle.cancel(conn, db, ["a"]) == set()
    shows(read(conn), status="processing")
    assert finish(conn, db, lease, CANCELLED)
    shows(read(conn), status="failed", celery_state="REVOKED", error="revoked")
    shows(attempts_of(conn)[0], outcome="cancelled", error="revoked")


def test_processing_to_queued_by_retry(conn: Connection, db: Database) -> None:
    lease = held(conn, db)
    before = clock(conn)
    assert requeue(conn, db, lease, retry(1, delay=30.0, meta=b"m"))
    row = read(conn)
    shows(row, status="queued", retry_count=1, error="failure 1", result=None, lease_version=2, celery_state="RETRY")
    shows(row, meta=b"m", body=b"[[], {}, {}]", queue="celery")
    shows_no_owner(row)
    assert timedelta(seconds=30) <= row["run_at"] - before <= timedelta(seconds=31)
    (attempt,) = attempts_of(conn)
    shows(attempt, lease_version=1, owned_by="w1", outcome="retried", error="failure 1")
    assert claim(conn, db) == []
    due = lifecycle.next_due(conn, db, search())
    assert due is not None
    assert 25 < due <= 30


def test_processing_to_queued_by_a_retry_with_a_new_message(conn: Connection, db: Database) -> None:
    lease = held(conn, db)
    row = job_row("a", task="tests.other", queue="slow", priority=4, body=b"new", headers=b"h", properties=b"p")
    assert requeue(conn, db, lease, retry(1, row=row))
    shows(read(conn), task="tests.other", queue="slow", priority=4, body=b"new", headers=b"h", properties=b"p")
    (job,) = claim(conn, db, "w2", 1, "slow")
    assert (job.id, job.retry_count, job.lease_version) == ("a", 1, 3)


def test_processing_to_queued_by_release(conn: Connection, db: Database) -> None:
    lease = held(conn, db)
    assert requeue(conn, db, lease, RELEASE)
    row = read(conn)
    shows(row, status="queued", retry_count=0, lease_version=2, error=None, celery_state=None)
    shows_no_owner(row)
    shows(attempts_of(conn)[0], lease_version=1, outcome="released", error=None)
    (job,) = claim(conn, db, "w2")
    assert (job.lease_version, job.retry_count) == (3, 0)


def test_processing_to_queued_by_replace_is_open(conn: Connection, db: Database) -> None:
    lease = held(conn, db)
    assert requeue(conn, db, lease, Requeue(Outcome.RELEASED, open=True))
    assert claim(conn, db) == []
    assert lifecycle.enqueue(conn, db, [job_row("a", body=b"the last step")]) == {"a"}
    (job,) = claim(conn, db)
    assert (job.body, job.lease_version) == (b"the last step", 3)


def test_processing_to_queued_by_reap(conn: Connection, db: Database) -> None:
    held(conn, db)
    before = read(conn)
    assert lifecycle.reap(conn, db, 10) == []
    let_lease_run_out(conn, "a")
    assert lifecycle.reap(conn, db, 10) == [("a", "celery")]
    row = read(conn)
    shows(row, status="queued", lease_version=2, retry_count=1, result=None)
    shows_no_owner(row)
    assert "w1" in row["error"]
    assert row["run_at"] == before["run_at"]  # claimable at once, and ahead of a younger backlog
    (attempt,) = attempts_of(conn)
    shows(attempt, lease_version=1, owned_by="w1", claimed_at=before["claimed_at"], outcome="lease_expired")
    (job,) = claim(conn, db, "w2")
    assert (job.lease_version, job.retry_count) == (3, 1)


def test_a_reaped_job_shows_nothing_of_its_dead_attempt(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row("a")])
    found = search(started=["tests.noop"])
    (job,) = lifecycle.claimed(lifecycle.claim(conn, db, found, 1, "w1"))
    lifecycle.progress(conn, db, lease_of(job, "w1"), "PROGRESS", b"half")
    conn.execute("UPDATE pgtruth.jobs SET unknown_since = clock_timestamp() - interval '2 h'")
    let_lease_run_out(conn, "a")
    assert lifecycle.reap(conn, db, 10)
    shows(read(conn), celery_state=None, meta=None, unknown_since=None)
    assert lifecycle.lock_unknown(conn, db, 10) == []


@pytest.mark.parametrize("why", ["budget", "own budget", "at most once"])
def test_processing_to_failed_by_the_sweep(conn: Connection, db: Database, why: str) -> None:
    lifecycle.enqueue(conn, db, [job_row("a", retries={"budget": 3, "own budget": 1}.get(why, 0))])
    knows = {"budget": {}, "own budget": {"limit_tasks": ["tests.noop"], "limits": [1]}}
    found = search(**knows.get(why, {"early": ["tests.noop"]}))
    assert len(lifecycle.claimed(lifecycle.claim(conn, db, found, 1, "w1"))) == 1
    assert lifecycle.lock_spent(conn, db, 10) == []
    let_lease_run_out(conn, "a")
    before = read(conn)
    assert lifecycle.reap(conn, db, 10) == []
    with conn.transaction():
        ((job, lease),) = lifecycle.lock_spent(conn, db, 10)
        assert job.id == "a"
        assert lease == Lease("a", 1, "w1", job.claimed_at)
        assert finish(conn, db, lease, FAILED)
    row = read(conn)
    shows(row, status="failed", lease_version=1, retry_count=before["retry_count"])
    shows_no_owner(row)
    shows(attempts_of(conn)[0], owned_by="w1", claimed_at=before["claimed_at"], outcome="failed")


def test_a_task_may_have_more_retries_than_the_setting(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row("a", retries=3)])
    found = search(limit_tasks=["tests.noop"], limits=[4])
    lifecycle.claim(conn, db, found, 1, "w1")
    let_lease_run_out(conn, "a")
    assert lifecycle.lock_spent(conn, db, 10) == []
    assert lifecycle.reap(conn, db, 10) == [("a", "celery")]
    shows(read(conn), retry_count=4)


def test_three_retries_make_four_attempts_and_then_it_fails(conn: Connection, db: Database) -> None:
    """Contract, section 4: at most three retries; one budget for whatever went wrong."""
    lifecycle.enqueue(conn, db, [job_row("a")])
    for count in (1, 2, 3):
        (job,) = claim(conn, db, f"w{count}")
        assert job.retry_count == count - 1
        if count == 2:
            let_lease_run_out(conn, "a")
            assert len(lifecycle.reap(conn, db, 10)) == 1
        else:
            assert requeue(conn, db, lease_of(job, f"w{count}"), retry(count))
    (job,) = claim(conn, db, "w4")
    let_lease_run_out(conn, "a")
    assert lifecycle.reap(conn, db, 10) == []
    ((_, lease),) = lifecycle.lock_spent(conn, db, 10)
    assert finish(conn, db, lease, FAILED)
    shows(read(conn), status="failed", retry_count=3, lease_version=7)
    assert [(a["lease_version"], a["owned_by"], a["outcome"]) for a in attempts_of(conn)] == [
        (1, "w1", "retried"),
        (3, "w2", "lease_expired"),
        (5, "w3", "retried"),
        (7, "w4", "failed"),
    ]


# Illegal moves: every pair that states.MOVES does not hold, by every function that could make it.

Try = Callable[[Connection, Database, Lease], object]


def arrange(conn: Connection, db: Database, status: Status) -> Lease:
    """A job in ``status``, and the authority of its last holder (or of nobody)."""
    if status in (Status.QUEUED, Status.ENQUEUE_FAILED):
        # due later, so that a claim is no legal move
        lifecycle.enqueue(conn, db, [job_row("a", delay=60.0 if status is Status.QUEUED else None)])
        if status is Status.ENQUEUE_FAILED:
            lifecycle.signal_failed(conn, db, ["a"])
        return Lease("a", 0, "w1", clock(conn).isoformat())
    lease = held(conn, db)
    if status in TERMINAL:
        assert finish(conn, db, lease, DONE if status is Status.DONE else FAILED)
    return lease


def _with_any_lease(call: Callable[[Connection, Database, Lease], bool], stale: bool) -> Try:
    def attempt(conn: Connection, db: Database, lease: Lease) -> object:
        versions = [lease.lease_version + n for n in (-1, 1, 2)] + ([] if stale else [lease.lease_version])
        leases = [lease._replace(lease_version=v, owned_by=o) for v in versions for o in ("w1", "w2", "")]
        return [found for found in leases if call(conn, db, found)]

    return attempt


def _ends(ending: Ending) -> Callable[[Connection, Database, Lease], bool]:
    return lambda conn, db, lease: finish(conn, db, lease, ending)


def _end_queued(conn: Connection, db: Database, lease: Lease) -> object:
    return lifecycle.end_queued(conn, db, [("a", FAILED)]).leases


def _store(status: Status) -> Try:
    return lambda conn, db, _: lifecycle.store(conn, db, [Stored("a", status, "", "X", b"r", b"m", "e")])


def _signal_failed(conn: Connection, db: Database, lease: Lease) -> object:
    return lifecycle.signal_failed(conn, db, ["a"])


#: Everything that leads to a status, tried on a job that is not where that begins.
LEADS_TO: dict[Status, list[Try]] = {
    Status.PROCESSING: [lambda conn, db, _: claim(conn, db, "w2", 5)],
    Status.DONE: [_with_any_lease(_ends(DONE), stale=False), _store(Status.DONE)],
    Status.FAILED: [
        _with_any_lease(_ends(FAILED), stale=False),
        _end_queued,
        _store(Status.FAILED),
        lambda conn, db, _: lifecycle.cancel(conn, db, ["a"]),
        lambda conn, db, _: purge(conn, db, "celery"),
    ],
    Status.QUEUED: [
        _with_any_lease(requeue, stale=False),
        _store(Status.QUEUED),
        lambda conn, db, _: lifecycle.reap(conn, db, 10),
        lambda conn, db, _: lifecycle.recover(conn, db, 10),
        lambda conn, db, _: lifecycle.enqueue(conn, db, [job_row("a", body=b"again")]),
    ],
    Status.ENQUEUE_FAILED: [_signal_failed],
}
ILLEGAL = [(old, new) for old in Status for new in Status if new not in MOVES[old]]


@pytest.mark.parametrize(("old", "new"), ILLEGAL, ids=[f"{old}-{new}" for old, new in ILLEGAL])
def test_an_illegal_move_changes_nothing(conn: Connection, db: Database, old: Status, new: Status) -> None:
    lease = arrange(conn, db, old)
    before, attempts = read(conn), attempts_of(conn)
    for attempt in LEADS_TO[new]:
        assert not attempt(conn, db, lease)
        assert read(conn) == before
        assert attempts_of(conn) == attempts


@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_nothing_at_all_changes_an_ended_job(conn: Connection, db: Database, status: Status) -> None:
    lease = arrange(conn, db, status)
    before = read(conn)
    for tries in LEADS_TO.values():
        for attempt in tries:
            attempt(conn, db, lease)
    assert not lifecycle.renew(conn, db, [lease], "w1")
    assert not lifecycle.progress(conn, db, lease, "PROGRESS", b"m")
    assert not lifecycle.annotate(conn, db, "a", "PROGRESS", b"m")
    assert read(conn) == before


def test_a_parked_job_that_was_claimed_meanwhile_is_left_alone(conn: Connection, db: Database) -> None:
    """The signal fails, but a poll has found the job: it is neither parked while it runs, nor after a release."""
    lease = held(conn, db)
    lifecycle.signal_failed(conn, db, ["a"])
    shows(read(conn), status="processing")
    requeue(conn, db, lease)
    lifecycle.signal_failed(conn, db, ["a"])
    shows(read(conn), status="queued")


# The authority: lease_version, owned_by and status, each of them wrong in turn.

OPERATIONS: dict[str, Callable[[Connection, Database, Lease], bool]] = {
    "done": lambda conn, db, lease: finish(conn, db, lease, DONE),
    "failed": lambda conn, db, lease: finish(conn, db, lease, FAILED),
    "retry": lambda conn, db, lease: requeue(conn, db, lease, retry(1)),
    "release": lambda conn, db, lease: requeue(conn, db, lease, RELEASE),
    "renew": lambda conn, db, lease: bool(lifecycle.renew(conn, db, [lease], lease.owned_by)),
    "progress": lambda conn, db, lease: lifecycle.progress(conn, db, lease, "PROGRESS", b"m"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_holder_has_the_authority(conn: Connection, db: Database, operation: str) -> None:
    assert OPERATIONS[operation](conn, db, held(conn, db))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_field_of_the_authority_counts(conn: Connection, db: Database, operation: str) -> None:
    lease = held(conn, db)
    before = read(conn)
    call = OPERATIONS[operation]
    for wrong in (
        lease._replace(lease_version=0),
        lease._replace(lease_version=2),
        lease._replace(owned_by="w2"),
        lease._replace(owned_by=""),
        lease._replace(job_id="b"),
    ):
        assert not call(conn, db, wrong), wrong
    assert read(conn) == before
    assert attempts_of(conn) == []
    for status in ("queued", "enqueue_failed", "done", "failed"):  # the right lease, and nobody is processing
        conn.execute(
            "UPDATE pgtruth.jobs SET status = %s, lease_expires_at = NULL WHERE id = 'a'",
            (status,),
        )
        assert not call(conn, db, lease), status
        shows(read(conn), status=status, lease_version=1, owned_by="w1")


def test_a_stale_owner_changes_nothing_of_its_successor(conn: Connection, db: Database) -> None:
    """Also where the successor is the same worker process, which has claimed its own job again."""
    for successor in ("w2", "w1"):
        conn.execute("DELETE FROM pgtruth.jobs; DELETE FROM pgtruth.attempts")
        stale = held(conn, db)
        let_lease_run_out(conn, "a")
        lifecycle.reap(conn, db, 10)
        (job,) = claim(conn, db, successor)
        before = read(conn)
        assert [name for name, call in OPERATIONS.items() if call(conn, db, stale)] == []
        assert read(conn) == before
        assert finish(conn, db, lease_of(job, successor))


def test_ends_that_have_no_authority_do_not_hold_up_the_others_of_their_batch(conn: Connection, db: Database) -> None:
    good, gone, other = held(conn, db, "a"), held(conn, db, "b"), held(conn, db, "c", "w2")
    let_lease_run_out(conn, "b")
    lifecycle.reap(conn, db, 10)
    batch = [(good, DONE), (gone, DONE), (other._replace(owned_by="w1"), FAILED), (other, DONE), (good, FAILED)]
    ended = lifecycle.ended(lifecycle.finish(conn, db, batch))
    assert ended.leases == {("a", 1), ("c", 1)}
    assert [read(conn, name)["status"] for name in "abc"] == ["done", "queued", "done"]
    assert [[a["outcome"] for a in attempts_of(conn, name)] for name in "abc"] == [
        ["done"],
        ["lease_expired"],
        ["done"],
    ]


def test_releases_that_have_no_authority_do_not_hold_up_the_others(conn: Connection, db: Database) -> None:
    good, other = held(conn, db, "a"), held(conn, db, "b", "w2")
    batch = [(good, RELEASE), (other._replace(owned_by="w1"), RELEASE), (other, retry(1)), (good, retry(1))]
    assert lifecycle.requeued(lifecycle.requeue(conn, db, batch)) == {("a", 1): "celery", ("b", 1): "celery"}
    shows(read(conn, "a"), retry_count=0, lease_version=2)
    shows(read(conn, "b"), retry_count=1, lease_version=2)


def test_a_renewal_extends_the_lease_and_nothing_else(conn: Connection, db: Database) -> None:
    lease = held(conn, db)
    let_lease_run_out(conn, "a")
    before = read(conn)
    assert lifecycle.renew(conn, db, [lease, lease._replace(lease_version=9)], "w1") == {("a", 1)}
    after = read(conn)
    assert after["lease_expires_at"] > clock(conn)
    assert {**before, "lease_expires_at": None} == {**after, "lease_expires_at": None}
    assert lifecycle.reap(conn, db, 10) == []


def test_what_somebody_waits_for_is_said(conn: Connection, db: Database) -> None:
    first, second = held(conn, db, "a"), held(conn, db, "b")
    conn.execute("INSERT INTO pgtruth.waiters VALUES ('a', 'me', 'infinity'), ('c', 'me', 'infinity')")
    assert lifecycle.ended(lifecycle.finish(conn, db, [(first, DONE), (second, DONE)])).waited == ("a",)
    assert lifecycle.store(conn, db, [Stored("c", Status.FAILED, "", "REVOKED", None, None, None)]) == ("c",)


# The table's own rules.


@pytest.mark.parametrize(
    "change",
    [
        "status = 'running'",
        "status = ''",
        "status = 'processing'",
        "status = 'processing', owned_by = 'w1'",
        "status = 'processing', lease_expires_at = clock_timestamp()",
        "owned_by = 'w1', lease_expires_at = clock_timestamp()",
        "priority = 10",
        "priority = -1",
    ],
)
def test_the_table_refuses_what_no_job_may_be(conn: Connection, db: Database, change: str) -> None:
    lifecycle.enqueue(conn, db, [job_row("a")])
    with pytest.raises(psycopg.errors.CheckViolation):
        conn.execute(f"UPDATE pgtruth.jobs SET {change}")


@pytest.mark.parametrize("column", ["status", "task", "queue", "run_at", "lease_version", "retry_count", "created_at"])
def test_the_table_refuses_nulls(conn: Connection, db: Database, column: str) -> None:
    lifecycle.enqueue(conn, db, [job_row("a")])
    with pytest.raises(psycopg.errors.NotNullViolation):
        conn.execute(f"UPDATE pgtruth.jobs SET {column} = NULL")


def test_an_attempt_can_be_noted_only_once(conn: Connection, db: Database) -> None:
    finish(conn, db, held(conn, db))
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute("INSERT INTO pgtruth.attempts SELECT * FROM pgtruth.attempts")


# Only the database's clock.


def test_times_do_not_stand_still_in_a_long_transaction(conn: Connection, db: Database) -> None:
    with conn.transaction():
        conn.execute("SELECT pg_sleep(0.05)")
        began = clock(conn)
        lease = held(conn, db)
        row = read(conn)
        for column in ("created_at", "run_at", "claimed_at", "updated_at"):
            assert row[column] > began, column
        assert requeue(conn, db, lease, retry(1))
        assert read(conn)["run_at"] > row["claimed_at"]
        (job,) = claim(conn, db)
        let_lease_run_out(conn, "a")
        assert len(lifecycle.reap(conn, db, 10)) == 1
        (job,) = claim(conn, db)
        assert finish(conn, db, lease_of(job, "w1"))
        assert [a["ended_at"] > began for a in attempts_of(conn)] == [True, True, True]


def test_this_machine_s_clock_does_not_count(conn: Connection, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day off, or the session in another time zone: nothing is due, expired or abandoned because of it."""
    monkeypatch.setattr("time.time", lambda: 0.0)
    conn.execute("SET TimeZone = 'Pacific/Kiritimati'")
    lifecycle.enqueue(conn, db, [job_row("now", expires_in=60.0), job_row("later", delay=60.0)])
    (job,) = claim(conn, db, "w1", 9)
    assert job.id == "now"
    conn.execute("SET TimeZone = 'America/Adak'")
    assert lifecycle.reap(conn, db, 10) == []
    claimed_at = read(conn, "now")["claimed_at"]
    assert finish(conn, db, lease_of(job, "w1"))
    assert attempts_of(conn, "now")[0]["claimed_at"] == claimed_at


@pytest.mark.parametrize("eta", ["2020-01-01T00:00:00+00:00", "2020-01-01T05:30:00+05:30", "2019-12-31T19:00:00-05:00"])
def test_an_absolute_eta_is_honoured_as_given(conn: Connection, db: Database, eta: str) -> None:
    conn.execute("SET TimeZone = 'Asia/Kolkata'")
    lifecycle.enqueue(conn, db, [job_row("a", eta=eta, delay=99.0, expires="2999-01-01T00:00:00Z")])
    row = read(conn)
    assert row["run_at"].isoformat().startswith("2020-01-01T05:30:00")
    assert row["expires_at"].year == 2999


# What a worker takes, and when.


def test_far_etas_are_claimed_when_they_are_due(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row("later", delay=3600.0), job_row("b", delay=-1.0), job_row("a", delay=-2.0)])
    assert [job.id for job in claim(conn, db, "w1", 9)] == ["a", "b"]
    shows(read(conn, "later"), status="queued", owned_by=None, lease_version=0)
    due = lifecycle.next_due(conn, db, search())
    assert due is not None
    assert 3590 < due <= 3600
    assert lifecycle.next_due(conn, db, search("other")) is None
    assert lifecycle.due_queues(conn, db) == []
    assert lifecycle.size(conn, db, "celery") == 0


def test_first_in_first_out_within_a_priority(conn: Connection, db: Database) -> None:
    for n in range(20):
        lifecycle.enqueue(conn, db, [job_row(f"j{n:02}")])
    taken = [job.id for count in (1, 4, 7, 20) for job in claim(conn, db, "w1", count)]
    assert taken == [f"j{n:02}" for n in range(20)]


def test_priority_nine_comes_first(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row(f"p{n}", priority=n) for n in (3, 0, 9, 5, 1)])
    assert [job.id for job in claim(conn, db, "w1", 2)] == ["p9", "p5"]
    lifecycle.enqueue(conn, db, [job_row("late", priority=9, queue="other")])
    order = [job.id for _ in range(4) for job in claim(conn, db, "w1", 1, "celery", "other")]
    assert order == ["late", "p3", "p1", "p0"]


def test_queues_are_searched_in_the_order_given(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row(f"{queue}{n}", queue=queue) for queue in "xyz" for n in range(2)])
    assert [job.id for job in claim(conn, db, "w1", 1, "y", "z", "x")] == ["y0"]
    assert {job.id for job in claim(conn, db, "w1", 3, "z", "y", "x")} == {"z0", "z1", "y1"}
    assert claim(conn, db, "w1", 9, "nothing") == []
    assert {job.id for job in claim(conn, db, "w1", 9, "x", "y", "z")} == {"x0", "x1"}


def test_a_queue_asked_for_twice_gives_its_jobs_once(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row(f"j{n}") for n in range(3)])
    assert [job.id for job in claim(conn, db, "w1", 9, "celery", "celery")] == ["j0", "j1", "j2"]


def test_the_sweep_finds_the_queues_in_which_something_is_due(conn: Connection, db: Database) -> None:
    lifecycle.enqueue(conn, db, [job_row(f"{q}{n}", queue=q, priority=n) for q in ("é", "a", "z") for n in (0, 9)])
    lifecycle.enqueue(conn, db, [job_row("later", queue="m", delay=60.0)])
    assert sorted(lifecycle.due_queues(conn, db)) == ["a", "z", "é"]
    claim(conn, db, "w1", 9, "a")
    assert sorted(lifecycle.due_queues(conn, db)) == ["z", "é"]


def test_size_is_what_could_be_claimed_now(conn: Connection, db: Database) -> None:
    rows = [job_row(f"j{n}") for n in range(4)]
    lifecycle.enqueue(conn, db, [*rows, job_row("later", delay=60.0), job_row("other", queue="other")])
    claim(conn, db)
    assert lifecycle.size(conn, db, "celery") == 3


# Keeping.


def test_old_ends_are_deleted_with_their_attempts_in_batches(conn: Connection, db: Database) -> None:
    for n in range(5):
        finish(conn, db, held(conn, db, f"j{n}"), DONE if n < 3 else FAILED)
    lifecycle.enqueue(conn, db, [job_row("queued")])
    held(conn, db, "held", queue="other")
    assert lifecycle.delete_old(conn, db, Status.DONE, 3600.0, 100) == 0
    conn.execute("UPDATE pgtruth.jobs SET updated_at = updated_at - interval '2 h'")
    assert lifecycle.delete_old(conn, db, Status.DONE, 3600.0, 2) == 2
    assert lifecycle.delete_old(conn, db, Status.DONE, 3600.0, 2) == 1
    left = {row[0] for row in conn.execute("SELECT id FROM pgtruth.jobs")}
    assert left == {"j3", "j4", "queued", "held"}
    assert {row[0] for row in conn.execute("SELECT job_id FROM pgtruth.attempts")} == {"j3", "j4"}
    assert lifecycle.delete_old(conn, db, Status.FAILED, 3600.0, 9) == 2
    with pytest.raises(ValueError, match="runs"):
        Status("runs")


@pytest.mark.parametrize("status", ["queued", "processing", "enqueue_failed"])
def test_no_living_job_is_ever_deleted(conn: Connection, db: Database, status: str) -> None:
    arrange(conn, db, Status(status))
    conn.execute("UPDATE pgtruth.jobs SET updated_at = updated_at - interval '9 days'")
    assert lifecycle.delete_old(conn, db, Status(status), 1.0, 100) == 0
    read(conn)


def test_a_note_that_somebody_left_behind_does_not_hold_up_a_job(conn: Connection, db: Database) -> None:
    """A job row deleted by hand and published again: its attempts' numbers start anew."""
    for end in ("finish", "retry", "reap"):
        conn.execute("DELETE FROM pgtruth.jobs")
        lease = held(conn, db)
        match end:
            case "finish":
                assert finish(conn, db, lease)
            case "retry":
                assert requeue(conn, db, lease, retry(1))
            case _:
                let_lease_run_out(conn, "a")
                assert lifecycle.reap(conn, db, 10) == [("a", "celery")]
        (note,) = attempts_of(conn)
        shows(note, outcome={"finish": "done", "retry": "retried", "reap": "lease_expired"}[end])
