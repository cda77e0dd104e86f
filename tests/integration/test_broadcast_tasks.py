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
