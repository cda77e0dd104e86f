"""Publishing to the workers of a test, and looking at the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psycopg
from celery import Celery
from psycopg.rows import dict_row

from tests.support import eventually

NAME = "tests.apps.basic"
#: Options with which a sweep in the test's own process finds what it is to find at once.
QUICK = {"lease_seconds": 1.0, "reap_interval": 1.0, "signal_url": "silent://"}


def client(broker: str, options: Mapping[str, object] | None = None, **conf: object) -> Celery:
    """A producer's app: it knows the tasks by name only, as another service would."""
    app = Celery("tests.client", broker=broker, backend="pgtruth://", set_as_current=False)
    app.conf.broker_transport_options = dict(options or {})
    app.conf.update(conf)
    return app


def send(app: Celery, task: str, *args: Any, **options: Any) -> str:
    """Publish a task of ``tests.apps.basic``; its id."""
    result = app.send_task(f"{NAME}.{task}", args, **options)
    return str(result.id)


def job(conn: psycopg.Connection[Any], job_id: str) -> dict[str, Any]:
    """The row of a job, as a dictionary."""
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute("SELECT * FROM pgtruth.jobs WHERE id = %s", (job_id,)).fetchone()
    assert row is not None, f"no job {job_id}"
    return row


def attempts(conn: psycopg.Connection[Any], job_id: str) -> list[dict[str, Any]]:
    """The ended attempts of a job, oldest first."""
    with conn.cursor(row_factory=dict_row) as cursor:
        query = "SELECT * FROM pgtruth.attempts WHERE job_id = %s ORDER BY lease_version"
        return cursor.execute(query, (job_id,)).fetchall()


def outcomes(conn: psycopg.Connection[Any], job_id: str) -> list[str]:
    """How its attempts ended."""
    return [attempt["outcome"] for attempt in attempts(conn, job_id)]


def ended(conn: psycopg.Connection[Any], ids: Sequence[str]) -> Callable[[], bool]:
    """A condition: all of these jobs are terminal."""

    def condition() -> bool:
        row = conn.execute(
            "SELECT count(*) FROM pgtruth.jobs WHERE id = ANY(%s) AND status IN ('done', 'failed')", (list(ids),)
        ).fetchone()
        return row is not None and row[0] == len(ids)

    return condition


def wait_status(conn: psycopg.Connection[Any], job_id: str, status: str, timeout: float = 10.0) -> dict[str, Any]:
    """Wait until the job has this status; its row."""

    def found() -> dict[str, Any] | None:
        row = job(conn, job_id)
        return row if row["status"] == status else None

    row = eventually(found, timeout)
    assert row is not None
    return row


def counter(conn: psycopg.Connection[Any], name: str) -> int:
    """A value of ``pgtruth.counters``."""
    row = conn.execute("SELECT value FROM pgtruth.counters WHERE name = %s", (name,)).fetchone()
    return int(row[0]) if row else 0
