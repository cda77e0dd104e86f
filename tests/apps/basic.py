"""The app that most worker processes of the tests run. Everything comes from the environment:

``BROKER`` and ``RESULT`` (URLs), ``OPTIONS`` (broker_transport_options, JSON), ``CONF`` (further Celery settings,
JSON), ``INSTALL`` (keyword arguments of ``pgtruth_transport.install``, JSON; unset: not installed).

Tasks write a line per start and per end to the table ``public.runs`` over an autocommit connection of their own, so
that a test knows what ran without asking the code under test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import psycopg
from celery import Celery, Task
from celery.exceptions import Ignore, Reject

import pgtruth_transport
from pgtruth_transport.urls import parse_url

BROKER = os.environ["BROKER"]

app = Celery("tests.apps.basic", broker=BROKER, backend=os.environ.get("RESULT", "pgtruth://"))
app.conf.broker_transport_options = json.loads(os.environ.get("OPTIONS", "{}"))
app.conf.update(json.loads(os.environ.get("CONF", "{}")))
if "INSTALL" in os.environ:
    pgtruth_transport.install(app, **json.loads(os.environ["INSTALL"]))


def record(job_id: str | None, event: str) -> None:
    """One line in ``public.runs``."""
    target = os.environ.get("RUNS", BROKER)
    with psycopg.connect(parse_url(target), autocommit=True) as connection:
        connection.execute(
            "INSERT INTO public.runs (job_id, event, pid) VALUES (%s, %s, %s)", (job_id, event, os.getpid())
        )


class recorded:
    """Writes ``start`` and ``end`` around a body."""

    def __init__(self, task: Task) -> None:
        self.job_id: str | None = task.request.id

    def __enter__(self) -> None:
        record(self.job_id, "start")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        record(self.job_id, "end" if error is None else "error")


@app.task
def noop() -> None:
    """Nothing, as fast as it goes."""


@app.task
def echo(value: Any = None) -> Any:
    """What it was given."""
    return value


@app.task
def add(x: Any, y: Any) -> Any:
    """A sum."""
    return x + y


@app.task
def total(values: list[Any]) -> Any:
    """The sum of a list: a chord's body."""
    return sum(values)


@app.task(bind=True)
def run(self: Task, value: Any = None) -> Any:
    """Recorded, at once, what it was given."""
    with recorded(self):
        return value


@app.task(bind=True)
def sleepy(self: Task, seconds: float, value: Any = None) -> Any:
    """Recorded; works for ``seconds``."""
    with recorded(self):
        time.sleep(seconds)
        return value


@app.task(bind=True, acks_late=False)
def sleepy_early(self: Task, seconds: float) -> None:
    """Recorded; acknowledged before it starts: at most once."""
    with recorded(self):
        time.sleep(seconds)


@app.task(bind=True)
def busy(self: Task, seconds: float) -> None:
    """Recorded; keeps a core busy."""
    with recorded(self):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass


@app.task(bind=True)
def boom(self: Task, text: str = "boom") -> None:
    """Recorded; raises."""
    with recorded(self):
        raise ValueError(text)


@app.task(bind=True)
def die(self: Task, times: int = 1000) -> str:
    """Recorded; kills its own process in its first ``times`` attempts."""
    record(self.request.id, "start")
    if _starts(self.request.id) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


@app.task(bind=True)
def flaky(self: Task, failures: int) -> int:
    """Recorded; raises in its first ``failures`` attempts, then returns how many there were."""
    with recorded(self):
        starts = _starts(self.request.id)
        if starts <= failures:
            raise ConnectionError(f"attempt {starts}")
        return starts


@app.task(bind=True, max_retries=5)
def retries(self: Task, times: int) -> int:
    """Recorded; asks Celery for ``times`` retries, then returns how many there were."""
    with recorded(self):
        if self.request.retries < times:
            raise self.retry(countdown=0)
        return int(self.request.retries)


@app.task(bind=True)
def progress(self: Task, seconds: float) -> str:
    """Reports a state of its own, then works on."""
    self.update_state(state="PROGRESS", meta={"done": 1})
    time.sleep(seconds)
    return "ready"


@app.task(bind=True)
def ignored(self: Task) -> None:
    """Recorded; raises Ignore."""
    record(self.request.id, "start")
    raise Ignore()


@app.task(bind=True)
def rejected(self: Task, requeue: bool = False) -> None:
    """Recorded; raises Reject."""
    record(self.request.id, "start")
    raise Reject("no", requeue=requeue)


@app.task(bind=True)
def leaves(self: Task) -> None:
    """Recorded; ends its own process in each attempt."""
    record(self.request.id, "start")
    sys.exit(1)


@app.task(bind=True)
def stores_then_rejects(self: Task, value: Any) -> None:
    """Recorded; stores its own success, and asks to be run again all the same."""
    with recorded(self):
        self.backend.store_result(self.request.id, value, "SUCCESS")
        raise Reject(requeue=True)


@app.task(bind=True)
def publishes(self: Task, count: int, seconds: float = 0) -> list[str]:
    """Recorded; publishes ``count`` jobs from its body, then works on."""
    with recorded(self):
        ids = [run.delay(number).id for number in range(count)]
        time.sleep(seconds)
        return ids


@app.task(bind=True)
def replaces(self: Task, value: Any) -> Any:
    """Recorded; replaces itself by ``add(value, 1)``."""
    record(self.request.id, "start")
    raise self.replace(add.s(value, 1))


@app.task
def note(*args: Any) -> None:
    """An errback or link: writes what it was called with."""
    record(None, f"note {len(args)}")


def _starts(job_id: str | None) -> int:
    with psycopg.connect(parse_url(os.environ.get("RUNS", BROKER)), autocommit=True) as connection:
        row = connection.execute(
            "SELECT count(*) FROM public.runs WHERE job_id = %s AND event = 'start'", (job_id,)
        ).fetchone()
        assert row is not None
        return int(row[0])
