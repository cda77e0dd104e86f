"""A pool child starts before the worker marks its tasks: what follows a body waits for the finish all the same."""

from __future__ import annotations

from typing import Any

import psycopg
from celery import Celery
from celery.app.trace import build_tracer

from pgtruth_transport.attempts import Collected
from pgtruth_transport.jobs import Lease
from pgtruth_transport.settings import Settings
from pgtruth_transport.worker import trace
from tests.support import statuses


def test_a_callback_waits_for_the_finish_whenever_its_tracer_was_built(
    database_url: str, conn: psycopg.Connection[Any]
) -> None:
    app = Celery("follow", broker=database_url, backend=database_url)
    trace.set_settings(Settings.make(database_url))

    @app.task(name="follow.first")
    def first() -> int:
        return 1

    app.finalize()
    task = app.tasks["follow.first"]
    task.__trace__ = build_tracer(task.name, task, app.loader, "child", app=app)  # as a pool child does at its start
    lease = Lease("id-1", 1, "owner", "2026-01-01")
    link = app.signature("follow.second", immutable=True)
    request = {"id": "id-1", "task": task.name, "hostname": "child", trace.LEASE_KEY: (*lease, 0, 3)}
    body = ((), {}, {"callbacks": [link], "errbacks": None, "chain": None, "chord": None})
    try:
        returned = trace.trace_attempt(task.name, "id-1", request, body, None, None)
    finally:
        app.close()
    collected = returned[3]
    assert isinstance(collected, Collected)
    assert [row.task for row in collected.rows] == ["follow.second"]
    assert statuses(conn) == {}
