"""Tasks of the field cases about pools, databases and leases; environment and table as in :mod:`tests.apps.basic`."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from celery import Task
from celery.exceptions import Ignore, Reject

from pgtruth_transport import attempts
from pgtruth_transport.db import Database
from tests.apps.basic import app, note, record, recorded

__all__ = ["app"]


@app.task(bind=True)
def where(self: Task) -> tuple[int, int]:
    """The ids of this process and of the server process that answers it."""
    attempt = attempts.current()
    assert attempt is not None
    assert attempt.settings is not None
    self.update_state(state="PROGRESS", meta={})  # the same connection
    with Database.of(attempt.settings).connection() as conn:
        return os.getpid(), conn.info.backend_pid


@app.task(bind=True)
def holds_the_interpreter(self: Task, seconds: int) -> str:
    """Recorded; its first attempt keeps the interpreter lock in one C call."""
    record(self.request.id, "start")
    if self.request.retries == 0:
        ctypes.PyDLL(None).sleep(seconds)
    return "over"


@app.task(bind=True, max_retries=5)
def waits_for(self: Task, path: str, then: str) -> str:
    """Recorded; waits until the file ``path`` exists (``GO`` of its worker wins), then ends as ``then`` says."""
    record(self.request.id, "start")
    path = os.environ.get("GO", path)
    while not Path(path).exists():
        time.sleep(0.02)
    match then:
        case "retry" if self.request.retries == 0:
            raise self.retry(countdown=0)
        case "requeue" if self.request.retries == 0:
            raise Reject("again", requeue=True)
        case "progress":
            self.update_state(state="PROGRESS", meta={"of": os.getpid()})
        case "publish":
            note.apply_async(("from the end",), queue="nowhere")
            raise Ignore
    return then


@app.task(bind=True)
def says(self: Task, text: str) -> None:
    """Recorded; raises with ``text``."""
    with recorded(self):
        raise ValueError(text)


@app.task(bind=True, rate_limit="1/s")
def limited(self: Task, seconds: float = 0) -> None:
    """Recorded; one a second per worker."""
    with recorded(self):
        time.sleep(seconds)


if "TOUCH" in os.environ:  # as an app that publishes and asks while it is imported, before the pool forks
    with app.connection_for_write() as _connection:
        _connection.ensure_connection(max_retries=1)
    assert app.AsyncResult("nothing").state == "PENDING"
    app.send_task(f"{__name__}.where")
