"""An id that is revoked before its publish: its chord and the rest of its chain learn of it as of any other failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from celery import Celery, chain, chord
from celery.exceptions import ChordError, TaskRevokedError

from pgtruth_transport import in_transaction, reaper
from pgtruth_transport.runtime import runtime
from pgtruth_transport.settings import Settings
from pgtruth_transport.urls import parse_url
from tests.support import WorkerProcess, eventually, runs, statuses
from tests.support_jobs import NAME, client
from tests.support_lifecycle import claim, read, read_all

Connection = psycopg.Connection[Any]
Start = Callable[..., WorkerProcess]


@pytest.fixture
def app(database_url: str) -> Celery:
    return client(database_url, {"signal_url": "silent://"})


def publish(database_url: str, canvas: Any, how: str) -> Any:
    if how == "at once":
        return canvas.apply_async()
    with psycopg.connect(parse_url(database_url)) as connection, in_transaction(connection):
        return canvas.apply_async()


@pytest.mark.parametrize("how", ["at once", "in a transaction"])
@pytest.mark.parametrize("members", [1, 3])
def test_its_chord_fails_once(worker: Start, database_url: str, conn: Connection, members: int, how: str) -> None:
    options = {"lease_seconds": 3, "reap_interval": 1}
    worker(options=options)
    app = client(database_url, options)
    reaper.cancel(app, ["wrong"])
    run = app.signature(f"{NAME}.run")
    header = [run.clone() for _ in range(members)]
    header[0].set(task_id="wrong")
    errback = run.clone().set(queue="nobody")
    result = publish(database_url, chord(header, run.on_error(errback), app=app), how)
    assert app.AsyncResult("wrong").state == "REVOKED"
    failure = result.get(timeout=15, propagate=False)
    assert isinstance(failure, ChordError)
    assert "wrong raised TaskRevokedError" in str(failure)
    reaper.sweep(app)
    assert (read(conn, "wrong")["status"], read(conn, "wrong")["error"]) == ("failed", "revoked")
    assert runs(conn, "start", "wrong") == 0
    assert [row["queue"] for row in read_all(conn).values()].count("nobody") == 1
    eventually(lambda: statuses(conn).get("processing") is None)
    assert runs(conn) == members - 1


@pytest.mark.parametrize("how", ["at once", "in a transaction"])
def test_the_rest_of_its_chain_ends(app: Celery, database_url: str, conn: Connection, how: str) -> None:
    reaper.cancel(app, ["wrong"])
    steps = chain(app.signature("tests.noop").set(task_id="wrong"), app.signature("tests.noop"), app=app)
    result = publish(database_url, steps, how)
    reaper.sweep(app)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=5)


@pytest.mark.parametrize("how", ["at once", "in a transaction"])
def test_one_that_nothing_follows_from_leaves_nothing(
    app: Celery, database_url: str, conn: Connection, how: str
) -> None:
    reaper.cancel(app, ["wrong"])
    publish(database_url, app.signature("tests.noop").set(task_id="wrong"), how)
    assert read_all(conn).keys() == {"wrong"}
    assert claim(conn, runtime(Settings.from_app(app)).database) == []
