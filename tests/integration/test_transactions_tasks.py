"""``in_transaction`` with Celery's own calls, real workers, and processes that die around COMMIT (ADR-007)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from celery import Celery, group
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgtruth_transport import in_transaction
from pgtruth_transport.urls import parse_url
from tests.support import ROOT, WorkerProcess, app_environment, eventually, runs, statuses
from tests.support_transactions import sqlalchemy_url

ORDERS = "CREATE TABLE public.orders (id int PRIMARY KEY, shipped int NOT NULL DEFAULT 0)"
APP = "tests.apps.orders"


@pytest.fixture
def app(database_url: str, signal_url: str | None, conn: psycopg.Connection[Any]) -> Iterator[Celery]:
    """A producer in this process, with the orders table, for each way to signal."""
    conn.execute(ORDERS)
    app = Celery("producer", broker=database_url, backend="pgtruth://", set_as_current=False)
    app.conf.broker_transport_options = {"signal_url": signal_url}
    yield app
    app.close()


@pytest.fixture
def start(worker: Callable[..., WorkerProcess], signal_url: str | None) -> Callable[..., WorkerProcess]:
    """Start a worker that ships orders."""
    return lambda **more: worker(app=APP, options={"signal_url": signal_url, "poll_interval": 0.5}, **more)


def test_a_task_never_starts_before_the_commit_that_it_needs(
    app: Celery, start: Callable[..., WorkerProcess], database_url: str, conn: psycopg.Connection[Any]
) -> None:
    start()
    with psycopg.connect(parse_url(database_url)) as mine:
        for order in range(60):
            with in_transaction(mine):
                mine.execute("INSERT INTO orders (id) VALUES (%s)", (order,))
                app.send_task(f"{APP}.ship", (order,))
                mine.execute("SELECT pg_sleep(0.03)")
            if order % 3 == 2:
                mine.rollback()
            else:
                mine.commit()
    eventually(lambda: statuses(conn) == {"done": 40}, 20)
    assert runs(conn) == 40
    assert conn.execute("SELECT count(*) FROM orders WHERE shipped = 1").fetchone() == (40,)


def test_a_group_and_a_chord_commit_or_vanish_with_the_data(
    app: Celery, start: Callable[..., WorkerProcess], database_url: str, conn: psycopg.Connection[Any]
) -> None:
    engine = sa.create_engine(sqlalchemy_url(database_url, "psycopg"))
    orders = [1, 2, 3]
    header = [app.signature(f"{APP}.ship", (order,)) for order in orders]
    with Session(engine) as session:
        with in_transaction(session):
            session.execute(sa.text("INSERT INTO orders (id) VALUES (9)"))
            (group(header) | app.signature(f"{APP}.total")).apply_async()
        session.rollback()
        assert statuses(conn) == {}
        with in_transaction(session):
            session.execute(sa.text("INSERT INTO orders SELECT generate_series(1, 4)"))
            result = (group(header) | app.signature(f"{APP}.total")).apply_async()
            single = app.send_task(f"{APP}.ship", (4,))
        assert statuses(conn) == {}
        session.commit()
    start()
    assert result.get(timeout=20) == 6
    assert single.get(timeout=20) == 4
    assert statuses(conn) == {"done": 5}
    engine.dispose()


def test_an_idle_worker_is_woken_after_the_commit_of_an_async_session(
    app: Celery, start: Callable[..., WorkerProcess], database_url: str, conn: psycopg.Connection[Any]
) -> None:
    start()

    async def request() -> list[Any]:
        engine = create_async_engine(sqlalchemy_url(database_url, "asyncpg"))
        results = []
        async with AsyncSession(engine) as session:
            for order in range(3):
                async with session.begin(), in_transaction(session):
                    await session.execute(sa.text("INSERT INTO orders (id) VALUES (:id)"), {"id": order})
                    results.append(app.send_task(f"{APP}.ship", (order,)))
        await engine.dispose()
        return results

    results = asyncio.run(request())
    assert [result.get(timeout=10) for result in results] == [0, 1, 2]


def test_a_body_may_use_it_for_its_own_data(
    app: Celery, start: Callable[..., WorkerProcess], conn: psycopg.Connection[Any]
) -> None:
    start(install={"retry_failures": False})
    shipping = app.send_task(f"{APP}.place", (1,)).get(timeout=20)
    assert app.AsyncResult(shipping).get(timeout=20) == 1
    with pytest.raises(ValueError, match="no"):
        app.send_task(f"{APP}.place", (2, True)).get(timeout=20)
    assert conn.execute("SELECT id FROM orders").fetchall() == [(1,)]
    assert statuses(conn) == {"done": 2, "failed": 1}


CRASH = """
    import asyncio, os, sys
    import psycopg, sqlalchemy as sa
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
    from sqlalchemy.orm import Session
    from pgtruth_transport import in_transaction
    from pgtruth_transport.transactions import scope
    from pgtruth_transport.urls import parse_url
    from tests.apps.orders import BROKER, ship
    from tests.support_transactions import sqlalchemy_url

    kind, when, times = sys.argv[1:]

    def die(*_):
        os._exit(7)

    scope.wake_committed = die  # what comes first after COMMIT has returned

    def work(order):
        insert = f"INSERT INTO orders (id) VALUES ({order})"
        if kind == "psycopg":
            connection = psycopg.connect(parse_url(BROKER))
            with in_transaction(connection):
                connection.execute(insert)
                ship.delay(order)
            if when == "before":
                die()
            connection.commit()
        elif kind == "session":
            session = Session(sa.create_engine(sqlalchemy_url(BROKER, "psycopg2")))
            with in_transaction(session):
                session.execute(sa.text(insert))
                ship.delay(order)
            if when == "before":
                die()
            session.commit()
        else:
            asyncio.run(work_async(insert, order))

    async def work_async(insert, order):
        session = AsyncSession(create_async_engine(sqlalchemy_url(BROKER, "asyncpg")))
        async with in_transaction(session):
            await session.execute(sa.text(insert))
            ship.delay(order)
        if when == "before":
            die()
        scope._aside = die
        await session.commit()

    for order in range(int(times)):
        pid = os.fork()
        if pid == 0:
            try:
                work(order)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""


@pytest.mark.parametrize(("kind", "times"), [("psycopg", 50), ("session", 15), ("asyncsession", 15)])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_around_commit_loses_neither_data_nor_job_alone(
    kind: str,
    times: int,
    when: str,
    database_url: str,
    conn: psycopg.Connection[Any],
    worker: Callable[..., WorkerProcess],
) -> None:
    """Many processes that die just before, or straight after, COMMIT."""
    conn.execute(ORDERS)
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CRASH), kind, when, str(times)],
        check=True,
        cwd=ROOT,
        env=os.environ | app_environment(database_url),
        timeout=100,
    )
    orders = conn.execute("SELECT count(*) FROM orders").fetchone()
    if when == "before":
        assert orders == (0,)
        assert statuses(conn) == {}
        return
    assert orders == (times,)
    assert statuses(conn) == {"queued": times}
    worker(app=APP, options={"signal_url": "silent://", "poll_interval": 0.5})
    eventually(lambda: statuses(conn) == {"done": times}, 20)
    assert runs(conn) == times
