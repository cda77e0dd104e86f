"""Statements without a cursor: what each of a round trip's calls may and may not do to the others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from typing import Any

import kombu
import psycopg
import pytest

from pgtruth_transport import db as connections
from pgtruth_transport import lifecycle, publish, roundtrip
from pgtruth_transport.db import Connection, Database, Silent
from pgtruth_transport.migrate import migrate
from pgtruth_transport.roundtrip import Call, Statement
from pgtruth_transport.runtime import runtime
from pgtruth_transport.settings import Settings
from pgtruth_transport.signals.notify import NotifySignal
from pgtruth_transport.testing.servers import EmbeddedPostgres
from tests.support_lifecycle import job_row, search

NUMBER = (roundtrip.integer,)


def asks(query: str, *values: object, columns: tuple[roundtrip.Column, ...] = NUMBER) -> Call:
    """A call of a statement that is not in ``sql/``."""
    names = tuple(f"p{n}" for n in range(len(values)))
    made = Statement(f"test_{abs(hash(query))}".encode(), query.encode(), names, columns)
    return Call.of(made, dict(zip(names, values, strict=True)))


@pytest.fixture(params=["prepared", "as it comes"])
def own(db: Database, request: pytest.FixtureRequest) -> Iterator[Connection]:
    """A connection of this project's class, with and without prepared statements."""
    conn = db.open("test")
    if request.param == "as it comes":
        conn.prepare_threshold = None
    yield conn
    conn.close()


def test_every_kind_of_value_comes_back_as_it_went(own: Connection) -> None:
    everything = bytes(range(256)) * 100
    quotes = ["plain", 'a "quoted" one', "back\\slash", "{brace},comma", "", "NULL", "ünïcode ☃"]
    call = asks(
        "SELECT $1::text, $2::bytea, $3::int, $4::int8, $5::float8::text, $6::text[] = $7::text[],"
        " $8::int[] = '{1,-2}', $9::text, $10::bool",
        *("naïve \"'\\ ☃", everything, -7, 2**40, 0.1, quotes, quotes, [1, -2], None, "true"),
        columns=(
            *(roundtrip.text, roundtrip.binary, roundtrip.integer, roundtrip.integer, roundtrip.text),
            *(roundtrip.boolean, roundtrip.boolean, roundtrip.text, roundtrip.boolean),
        ),
    )
    for _ in range(2):  # prepared now, then used
        assert roundtrip.one(own, call) == [("naïve \"'\\ ☃", everything, -7, 2**40, "0.1", True, True, None, True)]
    elements = asks("SELECT unnest($1::text[])", quotes, columns=(roundtrip.text,))
    assert [row[0] for row in roundtrip.one(own, elements)] == quotes


def test_calls_are_transactions_of_their_own(own: Connection) -> None:
    current = asks("SELECT pg_current_xact_id()::text::int8")
    first, second = roundtrip.run(own, [current, current])
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first[0][0] < second[0][0]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_that_fails_fails_alone(own: Connection, bad: int) -> None:
    calls = [asks("SELECT $1::int", n) for n in range(3)]
    calls[bad] = asks("SELECT 1 / $1::int", 0)
    for _ in range(2):
        outcomes = roundtrip.run(own, calls)
        assert isinstance(outcomes[bad], psycopg.errors.DivisionByZero)
        assert [outcomes[n] for n in range(3) if n != bad] == [[(n,)] for n in range(3) if n != bad]
    assert own.execute("SELECT 1").fetchone() == (1,)  # the connection is as good as before


def test_a_statement_that_cannot_be_prepared_is_told_and_asked_again(own: Connection) -> None:
    missing = asks("SELECT count(*)::int FROM not_there_yet")
    (outcome,) = roundtrip.run(own, [missing])
    assert isinstance(outcome, psycopg.errors.UndefinedTable)
    own.execute("CREATE TEMPORARY TABLE not_there_yet ()")
    assert roundtrip.one(own, missing) == [(0,)]


def test_more_than_a_socket_takes_at_once(own: Connection) -> None:
    big = b"x" * 20_000_000
    call = asks("SELECT length($1::bytea), $1", big, columns=(roundtrip.integer, roundtrip.binary))
    outcomes = roundtrip.run(own, [call, call])
    assert outcomes == [[(len(big), big)]] * 2


def test_a_lost_connection_is_an_error_of_what_was_not_answered(own: Connection) -> None:
    kill = asks("SELECT pg_terminate_backend(pg_backend_pid())::int", columns=NUMBER)
    first, *others = roundtrip.run(own, [asks("SELECT 1"), kill, asks("SELECT 2")])
    assert first == [(1,)]
    assert all(isinstance(outcome, psycopg.OperationalError) for outcome in others)
    assert len(others) == 2
    assert own.closed
    assert all(isinstance(o, psycopg.OperationalError) for o in roundtrip.run(own, [asks("SELECT 1")]))


@pytest.mark.parametrize("more", [0, 1], ids=["alone", "in a pipeline"])
def test_more_than_the_socket_takes_at_once(own: Connection, more: int) -> None:
    large = asks("SELECT length($1::text)", "x" * 30_000_000)
    for _ in range(2):  # prepared, the second time
        assert roundtrip.run(own, [large, *[asks("SELECT 7")] * more]) == [[(30_000_000,)], *[[(7,)]] * more]
    assert roundtrip.one(own, asks("SELECT 8")) == [(8,)]


def test_a_server_that_keeps_silent_is_not_waited_for_for_ever(own: Connection) -> None:
    own.patience = 0.3
    first, second = roundtrip.run(own, [asks("SELECT 1"), asks("SELECT 1 FROM pg_sleep(60)")])
    assert first == [(1,)]
    assert isinstance(second, Silent)
    assert own.closed


def test_a_connection_that_was_interrupted_is_not_used_again(own: Connection) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Interrupted):
            roundtrip.run(own, [asks("SELECT pg_sleep(20)")])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert own.closed


def test_threads_on_connections_of_their_own(db: Database) -> None:
    found: list[int] = []

    def ask(number: int) -> None:
        for n in range(50):
            with db.connection() as conn:
                found.append(roundtrip.one(conn, asks("SELECT $1::int", number * 1000 + n))[0][0])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [number * 1000 + n for number in range(8) for n in range(50)]


def test_a_publish_and_its_cursor_twin_write_the_same_row(own: Connection, db: Database) -> None:
    given = {"eta": "2999-01-01T00:00:00+00:00", "priority": 7, "expires_in": 5.0, "retries": 2, "group_id": "g"}
    assert lifecycle.enqueue_now(own, db, job_row("now", body=b"\x00\xff", **given))
    assert lifecycle.enqueue(own, db, [job_row("cursor", body=b"\x00\xff", **given)]) == {"cursor"}
    assert not lifecycle.enqueue_now(own, db, job_row("now", body=b"other"))
    columns = "status, task, queue, priority, run_at, retry_count, headers, properties, body, parent_id, group_id"
    rows = own.execute(f"SELECT {columns} FROM pgtruth.jobs").fetchall()
    assert len(rows) == 2
    assert rows[0] == rows[1]


def test_a_claim_and_its_cursor_twin_return_the_same_job(own: Connection, db: Database) -> None:
    lifecycle.enqueue(own, db, [job_row("a", body=b"\x00\xff", priority=3), job_row("b", body=b"\x00\xff", priority=3)])
    (mine,) = lifecycle.claim_now(own, db, search(limit_tasks=["tests.noop"], limits=[7]), 1, "w1")
    (twin,) = lifecycle.claimed(lifecycle.claim(own, db, search(limit_tasks=["tests.noop"], limits=[7]), 1, "w1"))
    assert mine == twin._replace(id="a", claimed_at=mine.claimed_at)
    assert mine.max_retries == 7
    assert mine.body == b"\x00\xff"


def test_what_runs_meanwhile_runs_after_the_first_commit(own: Connection, db: Database) -> None:
    """Before the second is answered; once; and not where the first has failed."""
    seen: list[tuple[object, ...] | None] = []

    def committed() -> None:
        with db.connection() as other:
            seen.append(other.execute("SELECT count(*) FROM meanwhile").fetchone())
            other.execute("INSERT INTO meanwhile VALUES (2)")

    own.execute("CREATE TABLE meanwhile (n int)")
    insert = asks("INSERT INTO meanwhile VALUES (1) RETURNING n")
    waits = asks("SELECT 1 FROM pg_sleep(0.5)")
    counts = asks("SELECT count(*)::int FROM meanwhile")
    assert roundtrip.run(own, [insert, waits, counts], committed) == [[(1,)], [(1,)], [(2,)]]
    roundtrip.run(own, [asks("SELECT 1 / 0"), counts], committed)
    assert seen == [(1,)]


@pytest.mark.parametrize("known", [False, True])
def test_an_insert_leaves_the_session_as_it_was(own: Connection, db: Database, known: bool) -> None:
    """It commits without waiting for the flush, and says so for its own transaction only."""
    for _ in range(1 + known):
        lifecycle.enqueue_now(own, db, job_row("a"))
    assert own.execute("SHOW synchronous_commit").fetchone() == ("on",)


def test_a_publish_in_an_applications_transaction_leaves_its_commit_alone(own: Connection, db: Database) -> None:
    with own.transaction():
        lifecycle.enqueue(own, db, [job_row("a")])
        assert own.execute("SHOW synchronous_commit").fetchone() == ("on",)


def test_what_is_published_outlives_the_server() -> None:
    """All of it; the insert alone would not, since nothing else is flushed on this server for a while."""
    lazy = {"fsync": "on", "wal_writer_delay": "10s", "bgwriter_delay": "10s", "autovacuum": "off"}
    with EmbeddedPostgres(options=lazy | {"synchronous_commit": "on"}) as server:
        url = server.url
        migrate(Settings.make(url))
        database = Database(Settings.make(url))
        with database.connection() as conn:
            assert lifecycle.enqueue_now(conn, database, job_row("a"))
        server.stop_hard()
        server.start()
        database.close()
        with database.connection() as conn:
            assert conn.execute("SELECT id FROM pgtruth.jobs").fetchall() == [("a",)]
            insert = roundtrip.statement("job_enqueue_one", "pgtruth", (roundtrip.text,))
            row = job_row("b")
            values = row._asdict()
            roundtrip.one(conn, Call.of(insert, {**values, "channel": None}))
            assert conn.execute("SELECT id FROM pgtruth.jobs WHERE id = 'b'").fetchone() == ("b",)
        server.stop_hard()
        server.start()
        database.close()
        with database.connection() as conn:
            assert conn.execute("SELECT id FROM pgtruth.jobs").fetchall() == [("a",)]
        database.close()
        connections.close_all()


def test_a_server_that_does_not_have_the_job_is_a_lost_connection(own: Connection, db: Database) -> None:
    """As behind an address that moves to another server between the commit and the flush."""
    own.execute("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    own.execute("CREATE TRIGGER lost BEFORE INSERT ON pgtruth.jobs FOR EACH ROW EXECUTE FUNCTION nothing()")
    with pytest.raises(psycopg.OperationalError, match="does not have job a"):
        lifecycle.enqueue_now(own, db, job_row("a"))


def test_a_wake_up_that_fails_parks_the_job(db: Database, conn: psycopg.Connection[tuple[object, ...]]) -> None:
    """ADR-002: the row is committed, ``enqueue_failed``, and the publish does not fail."""

    class Mute(NotifySignal):
        def notify_channel(self, queue: str) -> str:
            return "longer than a channel may be" * 4

        def _channels(self, queues: Iterable[str]) -> list[str]:
            return [self.notify_channel("")]

    publish.publish(db, Mute(db.settings, db), [job_row("a")])
    assert conn.execute("SELECT status FROM pgtruth.jobs").fetchall() == [("enqueue_failed",)]


@pytest.mark.parametrize("channel", ["here", None])
def test_the_commit_of_an_insert_wakes(own: Connection, db: Database, channel: str | None) -> None:
    with closing(db.open("test")) as ear:
        ear.execute("LISTEN here")
        lifecycle.enqueue_now(own, db, job_row("a"), channel)
        assert [heard.channel for heard in ear.notifies(timeout=0.5, stop_after=1)] == [channel] * bool(channel)


def test_a_statement_that_was_discarded_is_prepared_again(db: Database) -> None:
    conn = db.open("test")
    call = asks("SELECT 1")
    assert roundtrip.one(conn, call) == [(1,)]
    conn.execute("DEALLOCATE ALL")
    assert roundtrip.one(conn, call) == [(1,)]
    with suppress(psycopg.errors.DivisionByZero), conn.transaction():  # psycopg discards everything at a rollback
        conn.execute("SELECT 1", prepare=True)
        conn.execute("SELECT 1 / 0")
    assert roundtrip.run(conn, [asks("SELECT 2"), call]) == [[(2,)], [(1,)]]
    conn.close()


def test_a_consumer_of_this_very_process_is_woken_last(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the interpreter, and the job, before the publish has returned."""
    order: list[str] = []
    insert, wake = lifecycle.enqueue_now, NotifySignal.wake

    def inserted(*args: Any, **kwargs: Any) -> bool:
        new = insert(*args, **kwargs)
        order.append(f"flushed, {'woken' if args[3] else 'silent'}")
        return new

    def woke(self: NotifySignal, queues: Any) -> None:
        order.append("woken")
        wake(self, queues)

    monkeypatch.setattr(lifecycle, "enqueue_now", inserted)
    monkeypatch.setattr(NotifySignal, "wake", woke)
    database, signal = runtime(Settings.make(database_url))[1:]
    publish.publish(database, signal, [job_row("a")])
    assert (database.consumers, order) == (0, ["flushed, woken"])
    order.clear()
    with kombu.Connection(database_url) as connection:
        connection.SimpleQueue("somewhere").consumer.consume()
        assert database.consumers == 1
        publish.publish(database, signal, [job_row("b")])
        assert order == ["flushed, silent", "woken"]
    assert database.consumers == 0
