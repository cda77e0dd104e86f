"""Tasks that end in ways that Celery reports without a result: see ``tests.apps.basic``."""

from __future__ import annotations

import sys
import time
from typing import Any

import psycopg

from pgtruth_transport.urls import parse_url
from tests.apps.basic import BROKER, app, record


@app.task
def out_of_memory() -> None:
    """Raises what Celery does not count as a failure of the task."""
    raise MemoryError("no more")


@app.task
def leaves() -> None:
    """Ends its process, or its thread."""
    sys.exit(3)


@app.task(time_limit=1)
def too_long() -> None:
    """Works for longer than it may."""
    time.sleep(3)


@app.task
def told(request: Any, exc: BaseException, traceback: Any) -> None:
    """An errback that Celery calls: writes what it sees of the job, and whether its row is free."""
    with psycopg.connect(parse_url(BROKER), autocommit=True) as conn:
        row = conn.execute("SELECT status FROM pgtruth.jobs WHERE id = %s", (request.id,)).fetchone()
        free = conn.execute("SELECT FROM pgtruth.jobs WHERE id = %s FOR UPDATE SKIP LOCKED", (request.id,)).fetchone()
    record(request.id, f"told {row and row[0]}, {'locked' if free is None else 'free'}")


@app.task
def told_slowly(request: Any, exc: BaseException, traceback: Any) -> None:
    """An errback that takes its time."""
    record(request.id, "start, slowly")
    time.sleep(2)
    record(request.id, "end, slowly")
