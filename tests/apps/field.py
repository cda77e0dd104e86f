"""Tasks of the field cases, beside those of :mod:`tests.apps.basic`, whose environment and table they share."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Task

from tests.apps.basic import add, app, record, recorded, run

if "NEW_TASK" in os.environ:  # a worker of the next release

    @app.task(bind=True)
    def new_task(self: Task) -> None:
        """Recorded; unknown to workers of the old release."""
        record(self.request.id, "start")


class NeedsMore(Exception):
    """Cannot be rebuilt from its ``args``: the constructor needs more."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


@app.task(bind=True)
def raises_awkwardly(self: Task) -> None:
    """Recorded; raises what cannot be unpickled."""
    with recorded(self):
        raise NeedsMore(7, "no seats")


@app.task(bind=True, max_retries=1)
def retries_awkwardly(self: Task) -> None:
    """Recorded; hands what cannot be unpickled to ``retry``."""
    with recorded(self):
        raise self.retry(exc=NeedsMore(7, "no seats"), countdown=0)


@app.task(bind=True, autoretry_for=(Exception,), retry_backoff=False, default_retry_delay=0)
def retries_broadly(self: Task, times: int) -> int:
    """Recorded; asks for ``times`` retries under a broad autoretry."""
    with recorded(self):
        if self.request.retries < times:
            raise self.retry(countdown=0)
        return int(self.request.retries)


@app.task(bind=True, autoretry_for=(Exception,), retry_backoff=False, default_retry_delay=0)
def replaces_by_chain(self: Task, value: int) -> Any:
    """Recorded; replaces itself by a chain of two recorded steps and a sum."""
    record(self.request.id, "start")
    raise self.replace(run.s(value) | add.s(1) | add.s(10))


@app.task(bind=True)
def member(self: Task, seconds: float, value: Any) -> Any:
    """A chord's member: recorded, works for ``seconds``."""
    with recorded(self):
        time.sleep(seconds)
        return value


@app.task(bind=True)
def body(self: Task, values: list[Any]) -> list[Any]:
    """A chord's body: recorded, what it was given."""
    record(self.request.id, "body")
    return values


@app.task(bind=True)
def step(self: Task, value: Any = None) -> Any:
    """A step of a chord's body: recorded as such."""
    record(self.request.id, "step")
    return value
