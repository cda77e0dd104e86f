"""A task that is sent to every worker at once is no job with one owner: each worker runs it, as with any broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from kombu import Queue
from kombu.common import Broadcast

from tests.support import WorkerProcess, eventually, runs
from tests.support_jobs import NAME, client


def test_every_worker_runs_a_broadcast_task(
    worker: Callable[..., WorkerProcess], database_url: str, conn: psycopg.Connection[Any]
) -> None:
    for _ in range(2):
        worker(app="tests.apps.broadcast", concurrency=1)
    app = client(database_url)
    app.conf.task_queues = (Queue("celery"), Broadcast("everyone"))
    result = app.send_task(f"{NAME}.run", (7,), queue="everyone")
    eventually(lambda: runs(conn, "end", result.id) == 2, 10)
    assert result.get(timeout=5) == 7
    held = "SELECT count(*) FROM pgtruth.messages WHERE owned_by IS NOT NULL"
    eventually(lambda: conn.execute(held).fetchone() == (0,), 5)


def test_a_broadcast_task_is_no_job_where_one_worker_listens(
    worker: Callable[..., WorkerProcess], database_url: str, conn: psycopg.Connection[Any]
) -> None:
    """A row in a queue that goes with its worker would never end."""
    worker(app="tests.apps.broadcast", concurrency=1)
    app = client(database_url)
    app.conf.task_queues = (Queue("celery"), Broadcast("everyone"))
    ours = app.send_task(f"{NAME}.run", (7,), queue="everyone")
    eventually(lambda: runs(conn, "end", ours.id) == 1, 10)
    jobs = "SELECT count(*) FROM pgtruth.jobs WHERE queue LIKE 'bcast%'"
    assert conn.execute(jobs).fetchone() == (0,)
    assert conn.execute("SELECT count(*) FROM pgtruth.attempts").fetchone() == (0,)


def test_a_task_for_an_auto_delete_queue_is_a_message(database_url: str, conn: psycopg.Connection[Any]) -> None:
    """Through its exchange, and through the default one, by the process that declares it."""
    app = client(database_url, {"signal_url": "silent://"})
    passing = Queue("passing", exchange="named", routing_key="passing", auto_delete=True)
    for options in ({"queue": passing}, {"exchange": "named", "routing_key": "passing"}):
        app.send_task(f"{NAME}.noop", **options)
    app.send_task(f"{NAME}.noop", queue="lasting")
    assert conn.execute("SELECT queue FROM pgtruth.jobs").fetchall() == [("lasting",)]
    assert conn.execute("SELECT queue FROM pgtruth.messages").fetchall() == [("passing",), ("passing",)]
