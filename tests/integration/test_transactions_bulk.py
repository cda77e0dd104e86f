"""A group in a transaction block: the same rows as member by member, in a fraction of the time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
import pytest
from celery import Celery, chord, group, signals
from celery.canvas import Signature

from pgtruth_transport.transactions import bulk, in_transaction
from pgtruth_transport.urls import parse_url

Row = dict[str, Any]
UUIDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@pytest.fixture
def app(database_url: str) -> Iterator[Celery]:
    """An app with tasks of several kinds."""
    app = Celery("bulk", broker=database_url, backend="pgtruth://", set_as_current=False)

    @app.task(name="noop", shared=False)
    def noop(*args: object, **kwargs: object) -> None: ...

    @app.task(name="urgent", shared=False, ignore_result=True, time_limit=9)
    def urgent(*args: object, **kwargs: object) -> None: ...

    assert app.conf.task_serializer == "json"  # it is configured
    yield app
    app.close()


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids that were published by pattern."""
    found: list[str] = []
    original = bulk.Pattern.next

    def following(self: bulk.Pattern, args: Any, kwargs: Any, task_id: str, index: int) -> Any:
        found.append(task_id)
        return original(self, args, kwargs, task_id, index)

    monkeypatch.setattr(bulk.Pattern, "next", following)
    return found


def published(app: Celery, url: str, canvas: Callable[[Celery], Signature], *, patterns: bool) -> list[Row]:
    """The rows that a canvas makes, with everything that is different from run to run named by its order."""
    if patterns:
        bulk.prepare(app)
    else:
        app.__dict__["send_task"] = app.__class__.send_task.__get__(app)
    with psycopg.connect(parse_url(url), row_factory=psycopg.rows.dict_row) as mine:
        with in_transaction(mine):
            canvas(app).apply_async()
        rows = mine.execute("SELECT * FROM pgtruth.jobs ORDER BY ctid").fetchall()
        mine.rollback()
    del app.__dict__["send_task"]
    names: dict[str, str] = {}
    return [_neutral(row, names) for row in rows]


def _neutral(row: Row, names: dict[str, str]) -> Row:
    for key in ("created_at", "updated_at", "run_at"):
        row.pop(key)
    for key in ("headers", "properties", "body"):
        row[key] = json.loads(row[key])
    text = json.dumps(row, default=str, sort_keys=True)
    neutral: Row = json.loads(UUIDS.sub(lambda found: names.setdefault(found[0], f"id {len(names)}"), text))
    return neutral


ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1, 2.5, None, True), {}),
    (("text", 'quo"ted', "\x00\ud800", "ünï" * 400), {"k": "\\"}),
    (([1, {"a": [None]}], (2, 3)), {"nested": {"b": {"c": {"d": {"e": 1}}}}}),
    ((datetime(2026, 1, 2, tzinfo=UTC), UUID(int=7)), {}),
    ((), {"only": "keywords"}),
]
SAME: dict[str, Callable[[Celery], Signature]] = {
    "arguments": lambda app: group(app.signature("noop", a, k, app=app) for a, k in ARGUMENTS),
    "tasks in turn": lambda app: group(app.tasks[n].s(i) for i in range(3) for n in ("noop", "urgent")),
    "options": lambda app: group(app.tasks["noop"].s(i).set(queue="other", priority=i // 3) for i in range(6)),
    "headers": lambda app: group(app.tasks["noop"].s(i).set(headers={"x": 1}) for i in range(3)),
    "chord": lambda app: chord([app.tasks["noop"].s(i) for i in range(4)], app.tasks["noop"].s(9)),
    "immutable": lambda app: group(app.tasks["noop"].si(i) for i in range(3)),
}
SLOW: dict[str, Callable[[Celery], Signature]] = {
    "countdown": lambda app: group(app.tasks["noop"].s(i).set(countdown=60) for i in range(3)),
    "links": lambda app: group(app.tasks["noop"].s(i).set(link=app.tasks["noop"].s()) for i in range(3)),
    "chains": lambda app: group(app.tasks["noop"].s(i) | app.tasks["noop"].s() for i in range(3)),
}


@pytest.mark.parametrize("name", SAME)
def test_the_rows_are_the_same(name: str, app: Celery, database_url: str, used: list[str]) -> None:
    slow = published(app, database_url, SAME[name], patterns=False)
    assert used == []
    fast = published(app, database_url, SAME[name], patterns=True)
    assert fast == slow
    assert used


@pytest.mark.parametrize("name", ["countdown", "links", "chains"])
def test_what_needs_working_out_goes_celerys_own_way(
    name: str, app: Celery, database_url: str, used: list[str]
) -> None:
    published(app, database_url, SLOW[name], patterns=True)
    assert used == []


def test_whoever_watches_sees_every_publish(app: Celery, database_url: str, used: list[str]) -> None:
    seen: list[str] = []

    def watch(headers: dict[str, Any], **kwargs: Any) -> None:
        seen.append(headers["id"])

    signals.before_task_publish.connect(watch)
    try:
        published(app, database_url, SAME["immutable"], patterns=True)
    finally:
        signals.before_task_publish.disconnect(watch)
    assert len(seen) == 3
    assert used == []


def test_entering_a_block_prepares_the_apps_in_use(
    app: Celery, database_url: str, conn: psycopg.Connection[Any], used: list[str]
) -> None:
    with psycopg.connect(parse_url(database_url)) as mine, in_transaction(mine):
        result = group(app.tasks["noop"].s(number) for number in range(2500)).apply_async()
    assert len(used) == 2499
    found = [row[0] for row in conn.execute("SELECT id FROM pgtruth.jobs ORDER BY ctid").fetchall()]
    assert found == [member.id for member in result.results]


def test_outside_a_block_nothing_changes(app: Celery, conn: psycopg.Connection[Any], used: list[str]) -> None:
    bulk.prepare(app)
    group(app.tasks["noop"].s(number) for number in range(3)).apply_async()
    app.tasks["noop"].delay()
    assert used == []
    assert conn.execute("SELECT count(*) FROM pgtruth.jobs").fetchone() == (4,)
