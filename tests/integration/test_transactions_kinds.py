"""``in_transaction`` on every kind of connection: commit, rollback, savepoints, order, wake-ups, refusals.

The same cases run on each kind through one small driver, so that no kind is promised more or less than another.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgtruth_transport import db as connections
from pgtruth_transport import runtime as runtimes
from pgtruth_transport.db import Database
from pgtruth_transport.jobs import JobRow
from pgtruth_transport.publish import publish
from pgtruth_transport.runtime import Runtime
from pgtruth_transport.settings import Settings
from pgtruth_transport.signals import nothing_to_await
from pgtruth_transport.testing.servers import PostgresServer
from pgtruth_transport.transactions import TransactionError, in_transaction
from pgtruth_transport.transactions.scope import join
from pgtruth_transport.urls import parse_url
from tests.support_transactions import sqlalchemy_url

KINDS = [
    "session-psycopg",
    "session-psycopg2",
    "connection-psycopg",
    "connection-psycopg2",
    "asyncsession-psycopg",
    "asyncsession-asyncpg",
    "asyncconnection-psycopg",
    "asyncconnection-asyncpg",
    "psycopg",
    "asyncpsycopg",
]


class Recorder:
    """A signal that remembers what it was told."""

    name = "recorder"

    def __init__(self) -> None:
        self.woken: list[str] = []

    def wake(self, queues: Mapping[str, Sequence[str]]) -> None:
        for ids in queues.values():
            self.woken.extend(ids)

    def notify_channel(self, queue: str) -> None: ...

    def send(self, queue: str, job_id: str) -> Callable[[], None]:
        self.woken.append(job_id)
        return nothing_to_await

    def announce(self, job_ids: Sequence[str]) -> None: ...


@pytest.fixture
def signal(db: Database, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What is woken, instead of anybody."""
    recorder = Recorder()
    monkeypatch.setitem(runtimes._runtimes, db.settings, Runtime(db.settings, db, recorder))  # type: ignore[arg-type]
    return recorder


def job(name: str | None = None) -> JobRow:
    """A job with every kind of value in its columns."""
    return JobRow(
        id=name or secrets.token_hex(8),
        task="t",
        queue="q",
        priority=3,
        eta=None,
        delay=None,
        expires="2999-01-01T00:00:00+00:00",
        expires_in=None,
        retries=0,
        root_id=None,
        parent_id=None,
        group_id="g",
        headers=json.dumps({"n": name}).encode(),
        properties=b"{}",
        body=b"\x00\xff'%s%%",
    )


class Handle:
    """A connection of one kind, by what the cases need of it; every method is async, whatever the kind."""

    def __init__(self, kind: str, target: Any) -> None:
        self.kind, self.target = kind, target
        self.is_async = kind.startswith("async")

    async def execute(self, query: str) -> Any:
        statement: Any = query if self.kind == "psycopg" or self.kind == "asyncpsycopg" else sa.text(query)
        result = self.target.execute(statement)
        return await result if self.is_async else result

    async def commit(self) -> None:
        result = self.target.commit()
        if self.is_async:
            await result

    async def rollback(self) -> None:
        result = self.target.rollback()
        if self.is_async:
            await result

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        raw = self.kind in ("psycopg", "asyncpsycopg")
        context = self.target.transaction() if raw else self.target.begin_nested()
        if self.is_async:
            async with context:
                yield
        else:
            with context:
                yield

    @asynccontextmanager
    async def block(self) -> AsyncIterator[None]:
        if self.is_async:
            async with in_transaction(self.target):
                yield
        else:
            with in_transaction(self.target):
                yield


@asynccontextmanager
async def opened(kind: str, database_url: str) -> AsyncIterator[Handle]:
    """A connection of ``kind`` to ``database_url``."""
    if kind == "psycopg":
        with psycopg.connect(parse_url(database_url)) as connection:
            yield Handle(kind, connection)
        return
    if kind == "asyncpsycopg":
        async with await psycopg.AsyncConnection.connect(parse_url(database_url)) as connection:
            yield Handle(kind, connection)
        return
    what, _, driver = kind.partition("-")
    url = sqlalchemy_url(database_url, driver)
    if what.startswith("async"):
        engine = create_async_engine(url)
        try:
            async with AsyncSession(engine) if what == "asyncsession" else engine.connect() as target:
                yield Handle(kind, target)
        finally:
            await engine.dispose()
        return
    sync_engine = sa.create_engine(url)
    try:
        with Session(sync_engine) if what == "session" else sync_engine.connect() as target:
            yield Handle(kind, target)
    finally:
        sync_engine.dispose()


Case = Callable[[Handle], Awaitable[None]]


@pytest.fixture(scope="module")
def module_database(pg_server: PostgresServer, template_database: str) -> Iterator[str]:
    """One database for all cases: making one for each would take longer than the cases."""
    name = f"pgtruth_test_{secrets.token_hex(6)}"
    pg_server.create_database(name, template_database)
    yield pg_server.url_for(name)
    connections.close_all()
    pg_server.drop_database(name)


@pytest.fixture
def database_url(module_database: str) -> str:
    """The module's database, empty."""
    with psycopg.connect(parse_url(module_database), autocommit=True) as connection:
        connection.execute("TRUNCATE pgtruth.jobs")
        connection.execute("DROP TABLE IF EXISTS orders")
    return module_database


@pytest.fixture(params=KINDS)
def play(request: pytest.FixtureRequest, database_url: str) -> Callable[[Case], None]:
    """Run a case on a connection of each kind."""

    def run(case: Case) -> None:
        async def body() -> None:
            async with opened(request.param, database_url) as handle:
                await case(handle)

        asyncio.run(body())

    return run


def ids(conn: psycopg.Connection[Any]) -> set[str]:
    """The ids of all committed jobs."""
    return {row[0] for row in conn.execute("SELECT id FROM pgtruth.jobs").fetchall()}


def put(db: Database, *names: str) -> None:
    """Publish jobs by these names."""
    for name in names:
        publish(db, runtimes.runtime(db.settings).signal, [job(name)])


def test_commit_brings_data_and_jobs_together(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    conn.execute("CREATE TABLE orders (id int)")

    async def case(handle: Handle) -> None:
        async with handle.block():
            put(db, "before")
            await handle.execute("INSERT INTO orders VALUES (1)")
            put(db, "after")
        assert ids(conn) == set()
        assert signal.woken == []
        await handle.commit()
        assert ids(conn) == {"before", "after"}

    play(case)
    assert sorted(signal.woken) == ["after", "before"]
    row = conn.execute("SELECT status, priority, body, group_id, expires_at FROM pgtruth.jobs LIMIT 1").fetchone()
    assert row is not None
    assert row[:4] == ("queued", 3, b"\x00\xff'%s%%", "g")
    assert conn.execute("SELECT count(*) FROM orders").fetchone() == (1,)


def test_rollback_leaves_nothing_and_wakes_nobody(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        async with handle.block():
            put(db, "a")
            await handle.execute("SELECT 1")
            put(db, "b")
        await handle.rollback()
        await handle.execute("SELECT 1")
        await handle.commit()

    play(case)
    assert ids(conn) == set()
    assert signal.woken == []


def test_rollback_inside_the_block_drops_only_what_came_before(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        async with handle.block():
            put(db, "a")
            await handle.rollback()
            put(db, "b")
            await handle.commit()
            assert ids(conn) == {"b"}
            put(db, "c")
        await handle.commit()

    play(case)
    assert ids(conn) == {"b", "c"}
    assert sorted(signal.woken) == ["b", "c"]


def test_savepoint_rollback_leaves_nothing_of_the_savepoint(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        async with handle.block():
            await handle.execute("SELECT 1")
            put(db, "outside")
            with suppress(ZeroDivisionError):
                async with handle.savepoint():
                    put(db, "lost")
                    await handle.execute("SELECT 1")
                    put(db, "lost too")
                    raise ZeroDivisionError
            put(db, "between")
            async with handle.savepoint():
                put(db, "kept")
            put(db, "last")
        await handle.commit()

    play(case)
    assert ids(conn) == {"outside", "between", "kept", "last"}
    assert set(signal.woken) == {"outside", "between", "kept", "last"}


def test_savepoint_by_sql_is_kept_account_of(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        async with handle.block():
            put(db, "a")
            await handle.execute("SAVEPOINT s")
            put(db, "b")
            await handle.execute("ROLLBACK TO s")
        await handle.commit()

    play(case)
    assert ids(conn) == {"a"}
    assert signal.woken == ["a"]


def test_block_around_the_savepoint_or_inside_it(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        await handle.execute("SELECT 1")
        with suppress(ZeroDivisionError):
            async with handle.savepoint(), handle.block():
                put(db, "lost")
                raise ZeroDivisionError
        async with handle.savepoint(), handle.block():
            put(db, "kept")
        await handle.commit()

    play(case)
    assert ids(conn) == {"kept"}
    assert signal.woken == ["kept"]


def test_exception_leaves_the_fate_of_the_jobs_to_the_transaction(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        with suppress(ZeroDivisionError):
            async with handle.block():
                put(db, "a")
                raise ZeroDivisionError
        await handle.commit()

    play(case)
    assert ids(conn) == {"a"}


def test_many_are_written_with_few_statements(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        async with handle.block():
            for number in range(2500):
                put(db, f"{number:04}")
        counted = await handle.execute("SELECT count(DISTINCT cmin::text), count(*) FROM pgtruth.jobs")
        row = await counted.fetchone() if handle.kind == "asyncpsycopg" else counted.fetchone()
        assert tuple(row) == (3, 2500)
        await handle.commit()

    play(case)
    assert len(ids(conn)) == len(signal.woken) == 2500


def test_two_blocks_in_one_transaction(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        async with handle.block():
            put(db, "a")
        put(db, "at once")
        assert ids(conn) == {"at once"}
        async with handle.block():
            put(db, "b")
            async with handle.block():
                put(db, "c")
            put(db, "d")
        assert ids(conn) == {"at once"}
        await handle.commit()

    play(case)
    assert ids(conn) == {"at once", "a", "b", "c", "d"}
    assert sorted(signal.woken) == ["a", "at once", "b", "c", "d"]


def test_same_id_twice_is_one_job(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        async with handle.block():
            put(db, "a", "a")
        async with handle.block():
            put(db, "a")
        await handle.commit()

    play(case)
    assert ids(conn) == {"a"}
    assert signal.woken == ["a"]


def test_empty_block_begins_no_transaction(play: Callable[[Case], None]) -> None:
    async def case(handle: Handle) -> None:
        async with handle.block():
            pass
        target = handle.target
        if "psycopg" in (handle.kind, handle.kind.removeprefix("async")):
            assert target.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        else:
            assert not target.in_transaction()

    play(case)


def test_failed_transaction_is_refused(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        async def publish_in_failed() -> None:
            async with handle.block():
                put(db, "a")

        with pytest.raises((psycopg.Error, sa.exc.DBAPIError)):
            await handle.execute("SELECT 1/0")
        with pytest.raises((TransactionError, sa.exc.DBAPIError)):
            await publish_in_failed()
        await handle.rollback()
        async with handle.block():
            put(db, "b")
        await handle.commit()

    play(case)
    assert ids(conn) == {"b"}


def test_another_database_is_refused(
    play: Callable[[Case], None],
    pg_server: PostgresServer,
    template_database: str,
    signal: Recorder,
) -> None:
    other = f"pgtruth_test_{secrets.token_hex(6)}"
    pg_server.create_database(other, template_database)  # a clone: the same tables, the same oids
    database = Database.of(Settings.make(pg_server.url_for(other)))

    async def case(handle: Handle) -> None:
        async def publish_elsewhere() -> None:
            async with handle.block():
                put(database, "a")

        with pytest.raises(TransactionError, match="another database") as caught:
            await publish_elsewhere()
        assert other in str(caught.value)
        await handle.rollback()

    try:
        play(case)
        with database.connection() as connection:
            assert ids(connection) == set()
    finally:
        database.close()
        pg_server.drop_database(other)


def test_closed_connection_is_refused(play: Callable[[Case], None], db: Database, signal: Recorder) -> None:
    async def case(handle: Handle) -> None:
        if "session" in handle.kind:
            return  # a closed session begins anew
        result = handle.target.close()
        if handle.is_async:
            await result

        async def publish_on_closed() -> None:
            async with handle.block():
                put(db, "a")

        with pytest.raises(TransactionError, match="closed"):
            await publish_on_closed()

    play(case)


def test_plain_with_on_an_asynchronous_connection(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        with in_transaction(handle.target):
            put(db, "a")
            await handle.execute("SELECT 1")
            put(db, "b")
        assert ids(conn) == set()
        await handle.commit()
        assert ids(conn) == {"a", "b"}

    play(case)
    assert sorted(signal.woken) == ["a", "b"]


def test_other_statements_may_join(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        assert not join(db, "chord_size", {"id": "c", "size": 2})
        for end in (handle.rollback, handle.commit):
            async with handle.block():
                put(db, "a")
                assert join(db, "chord_size", {"id": "c", "size": 2})
                put(db, "b")
            assert chords() == 0
            await end()

    def chords() -> int:
        row = conn.execute("SELECT count(*) FROM pgtruth.chords WHERE id = 'c'").fetchone()
        assert row is not None
        return int(row[0])

    conn.execute("DELETE FROM pgtruth.chords")
    play(case)
    assert chords() == 1
    assert ids(conn) == {"a", "b"}


def test_plain_with_inside_a_savepoint_that_was_never_opened(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        await handle.execute("SELECT 1")
        with suppress(ZeroDivisionError):
            async with handle.savepoint():
                with in_transaction(handle.target):
                    put(db, "lost")
                raise ZeroDivisionError
        await handle.commit()

    play(case)
    assert ids(conn) == set()
    assert signal.woken == []


def test_tasks_and_threads_do_not_see_each_others_blocks(
    play: Callable[[Case], None], db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    async def case(handle: Handle) -> None:
        entered, go_on = asyncio.Event(), asyncio.Event()

        async def stranger() -> None:
            await entered.wait()
            put(db, "at once")
            go_on.set()

        async def straggler(left: asyncio.Event) -> None:
            await left.wait()
            put(db, "late")

        task = asyncio.create_task(stranger())
        left = asyncio.Event()
        async with handle.block():
            put(db, "a")
            entered.set()
            await go_on.wait()
            assert ids(conn) == {"at once"}
            await asyncio.get_running_loop().run_in_executor(None, put, db, "thread")
            late = asyncio.create_task(straggler(left))
            await asyncio.create_task(asyncio.to_thread(put, db, "joined"))
        left.set()
        await asyncio.gather(task, late)
        assert ids(conn) == {"at once", "thread", "late"}
        await handle.rollback()

    play(case)
    assert ids(conn) == {"at once", "thread", "late"}
