"""``finish_with``: the work of a task and the end of its job commit together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery, chord
from sqlalchemy.ext.asyncio import AsyncSession

from pgtruth_transport.transactions import TransactionError, finish_with, finish_with_async
from pgtruth_transport.urls import parse_url
from tests.support import WorkerProcess, eventually, runs, statuses

APP = "tests.apps.orders"


@pytest.fixture
def app(database_url: str, conn: psycopg.Connection[Any]) -> Iterator[Celery]:
    """A producer in this process, and one order."""
    conn.execute("CREATE TABLE public.orders (id int PRIMARY KEY, shipped int NOT NULL DEFAULT 0)")
    conn.execute("INSERT INTO orders (id) VALUES (5)")
    app = Celery("producer", broker=database_url, backend="pgtruth://", set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def start(worker: Callable[..., WorkerProcess]) -> Callable[..., WorkerProcess]:
    """Start a worker with short leases."""
    return lambda **more: worker(app=APP, options={"lease_seconds": 3, "reap_interval": 1}, **more)


def shipped(conn: psycopg.Connection[Any]) -> int:
    """How often order 5 was shipped."""
    row = conn.execute("SELECT shipped FROM orders WHERE id = 5").fetchone()
    assert row is not None
    return int(row[0])


def outcomes(conn: psycopg.Connection[Any], job_id: str) -> list[str]:
    """How the attempts of a job ended."""
    query = "SELECT outcome FROM pgtruth.attempts WHERE job_id = %s ORDER BY lease_version"
    return [row[0] for row in conn.execute(query, (job_id,)).fetchall()]


@pytest.mark.parametrize("kind", ["psycopg", "session", "connection", "asyncsession"])
def test_work_and_end_commit_together(
    kind: str, app: Celery, start: Callable[..., WorkerProcess], conn: psycopg.Connection[Any]
) -> None:
    log = start()
    result = app.send_task(f"{APP}.finish", (5, kind))
    assert result.get(timeout=20) == 5  # what finish_with was given
    follow = 1 if kind == "connection" else 0
    eventually(lambda: statuses(conn) == {"done": 1 + follow}, 10)
    assert shipped(conn) == 1 + follow
    assert outcomes(conn, result.id) == ["done"]
    eventually(lambda: runs(conn, "end") == 1 + follow)
    assert "stale" not in log.output


def test_links_chains_and_chords_commit_with_it(
    app: Celery, start: Callable[..., WorkerProcess], conn: psycopg.Connection[Any]
) -> None:
    start()
    finish, ship = app.signature(f"{APP}.finish", (5,)), app.signature(f"{APP}.ship")
    linked = finish.clone()
    linked.link(ship.clone())
    linked.apply_async()
    eventually(lambda: statuses(conn) == {"done": 2}, 20)
    assert (finish | ship).apply_async().get(timeout=20) == 5
    assert shipped(conn) == 4
    total = chord([finish.clone(), finish.clone(), finish.clone()], app.signature(f"{APP}.total"))
    assert total.apply_async().get(timeout=20) == 15
    assert shipped(conn) == 7
    eventually(lambda: statuses(conn) == {"done": 8}, 10)


def test_a_crash_after_the_commit_runs_nothing_again(
    app: Celery, start: Callable[..., WorkerProcess], conn: psycopg.Connection[Any]
) -> None:
    start()
    result = app.send_task(f"{APP}.finish", (5, "psycopg", "after"))
    assert result.get(timeout=20) == 5
    later = app.send_task(f"{APP}.ship", (5,))  # the worker has dealt with its lost child
    assert later.get(timeout=20) == 5
    assert shipped(conn) == 2
    assert outcomes(conn, result.id) == ["done"]
    assert runs(conn, "start", result.id) == 1


def test_a_crash_before_the_commit_leaves_nothing_and_runs_again(
    app: Celery, start: Callable[..., WorkerProcess], conn: psycopg.Connection[Any]
) -> None:
    start()
    result = app.send_task(f"{APP}.finish", (5, "psycopg", "before"))
    assert result.get(timeout=20) == 5
    assert shipped(conn) == 1
    assert runs(conn, "start", result.id) == 2
    assert outcomes(conn, result.id)[-1] == "done"
    assert len(outcomes(conn, result.id)) == 2


def test_after_a_rollback_the_body_decides_as_ever(
    app: Celery, start: Callable[..., WorkerProcess], conn: psycopg.Connection[Any]
) -> None:
    start()
    result = app.send_task(f"{APP}.finish", (5, "psycopg", "rollback"))
    assert result.get(timeout=20) == "what the body returns"
    assert shipped(conn) == 0


def test_a_stale_attempt_is_told_before_its_commit(
    app: Celery, start: Callable[..., WorkerProcess], conn: psycopg.Connection[Any]
) -> None:
    """The job is taken away, as a sweep would, while the body waits for the order's row."""
    log = start()
    with psycopg.connect(parse_url(app.conf.broker_url)) as blocker:
        blocker.execute("SELECT * FROM orders FOR UPDATE")
        result = app.send_task(f"{APP}.finish", (5,))
        eventually(lambda: runs(conn) == 1, 20)
        conn.execute(
            "UPDATE pgtruth.jobs SET status = 'failed', owned_by = NULL, claimed_at = NULL, lease_expires_at = NULL,"
            " lease_version = lease_version + 1 WHERE id = %s",
            (result.id,),
        )
    eventually(lambda: "lost its lease" in log.output or "has been lost" in log.output or runs(conn, "error"), 10)
    assert shipped(conn) == 0
    assert statuses(conn) == {"failed": 1}


def test_outside_a_task_or_on_an_asynchronous_connection_it_is_refused(conn: psycopg.Connection[Any]) -> None:
    with pytest.raises(TransactionError, match="outside the body"):
        finish_with(conn, 1)
    with pytest.raises(TransactionError, match="it takes"):
        finish_with(object())
    with pytest.raises(TransactionError, match="it takes"):
        asyncio.run(finish_with_async(conn))
    with pytest.raises(TransactionError, match="finish_with_async"):
        finish_with(AsyncSession())
