"""Chords: members counted by distinct id, and the body published by the transaction that ends the last of them.

Promises: a member that returns twice counts once; exactly one transaction sees the chord become complete, and the body
(or, if a member failed, the error of the body with its errbacks) commits with it. A crash before that COMMIT leaves the
last member unfinished: it runs again and completes the chord then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from celery import states
from celery._state import _task_stack
from celery.canvas import maybe_signature
from celery.exceptions import ChordError
from celery.result import AsyncResult, GroupResult
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError
from kombu.utils.uuid import uuid

from . import attempts, lifecycle
from .attempts import Attempt
from .db import CONNECTION_ERRORS, Database
from .jobs import ChordPart, JobRow, Stored

logger = get_logger(__name__)

#: How many overdue chords are looked for among the open jobs in one statement.
BATCH = 50
#: Milliseconds to wait for a chord's row: at first, as members of one chord crowd; and once it is known to be kept.
PATIENCE, GLANCE = 1000, 20


class FollowUps:
    """What commits together with the end of one or more attempts."""

    def __init__(self) -> None:
        self.rows: list[JobRow] = []
        self.stored: list[Stored] = []
        self.parts: list[ChordPart] = []
        self.waited: list[str] = []  # stored ids whose result somebody waits for
        self.after: list[Callable[[], object]] = []  # for the caller to call, once it has committed

    def add(self, attempt: Attempt) -> None:
        """Everything that this attempt leaves behind."""
        self.rows.extend(attempt.rows)
        self.stored.extend(attempt.stored)
        self.parts.extend(attempt.parts)
        self.after.extend(attempt.after)


def write(conn: psycopg.Connection[Any], db: Database, app: Any, follow: FollowUps) -> None:
    """Count the parts, finish the chords that are complete, and write every row; in the caller's transaction.

    ``follow.rows`` is left with the rows that were new, ``follow.waited`` with the ids to announce, ``follow.after``
    with what the caller is to call after its commit.
    """
    parts = follow.parts
    while parts:  # a failed body may itself be a member of an outer chord
        last = {part.chord_id: part for part in parts}
        complete = _count(conn, db, parts)
        parts = []
        for chord_id in complete:
            done = _finish(conn, db, app, last[chord_id])
            follow.rows.extend(done.rows)
            follow.stored.extend(done.stored)
            follow.after.extend(done.after)
            parts.extend(done.parts)
    if follow.rows:
        new = lifecycle.enqueue(conn, db, follow.rows)
        follow.rows[:] = [row for row in follow.rows if row.id in new]
    if follow.stored:
        follow.waited.extend(lifecycle.store(conn, db, follow.stored))


def be_brief(conn: psycopg.Connection[Any], db: Database, milliseconds: int) -> None:
    """Wait no longer than this for a row in the open transaction; raises ``LockNotAvailable`` then.

    An application's ``finish_with`` keeps its chord's row until its COMMIT, however long that takes.
    """
    most = db.settings.connect_timeout * 500  # sooner than a worker takes the database for silent
    conn.execute(db.sql("lock_patience"), {"timeout": f"{min(milliseconds, most)}ms"})


def _count(conn: psycopg.Connection[Any], db: Database, parts: list[ChordPart]) -> list[str]:
    params = {
        "chord_ids": [p.chord_id for p in parts],
        "part_ids": [p.part_id for p in parts],
        "positions": [p.position for p in parts],
        "states": [p.state for p in parts],
        "results": [p.result for p in parts],
    }
    return [row[0] for row in conn.execute(db.sql("chord_count"), params).fetchall() if row[1]]


def _finish(conn: psycopg.Connection[Any], db: Database, app: Any, last: ChordPart) -> Attempt:
    """Publish the body with the members' results, or fail it, as the last member would; collected, not written."""
    chord_id = last.chord_id
    rows = conn.execute(db.sql("chord_parts"), {"id": chord_id}).fetchall()
    callback = maybe_signature(last.body, app=app)
    with attempts.collecting(db.settings) as collected, _acting_as(app, last):
        try:
            results = _results(app, chord_id, rows)
            callback.delay(results)
        except ChordError as exc:
            logger.error("chord %s: %s", chord_id, exc)
            _fail(app, callback, exc)
        except (OperationalError, *CONNECTION_ERRORS):  # for the caller to try again, not the body's failure
            raise
        except Exception as exc:
            logger.exception("chord %s: its body cannot be published", chord_id)
            collected.rows.clear()
            _fail(app, callback, ChordError(f"Callback error: {exc!r}"))
    return collected


def _fail(app: Any, body: Any, exc: ChordError) -> None:
    """Store the error of the body that will not run; before Celery 5.7 a chain may come without an id."""
    if not body.id:
        tasks = getattr(body, "tasks", None)
        body.options["task_id"] = (tasks and tasks[-1].id) or uuid()
    app.backend.chord_error_from_stack(body, exc=exc)


@contextmanager
def _acting_as(app: Any, member: ChordPart) -> Iterator[None]:
    """Let what is published and stored here have ``member`` as its parent: Celery does this within the last member."""
    task = app.tasks["celery.accumulate"]  # any task: only its request matters
    task.push_request(id=member.part_id, root_id=member.root_id or member.part_id, called_directly=False, children=[])
    _task_stack.push(task)
    try:
        yield
    finally:
        _task_stack.pop()
        task.pop_request()


def _results(app: Any, chord_id: str, rows: list[tuple[str, str, bytes]]) -> list[Any]:
    """The members' results in the header's order and shape; raises ``ChordError`` if a member failed."""
    by_id: dict[str, Any] = {}
    for part_id, state, encoded in rows:
        value = app.backend.decode(bytes(encoded))
        if state in states.EXCEPTION_STATES:
            exc = app.backend.exception_to_python(value)
            error = ChordError(f"Dependency {part_id} raised {exc!r}")
            error.__cause__ = exc
            raise error
        by_id[part_id] = value
    header = GroupResult.restore(chord_id, app=app)
    if header is not None:
        shaped: list[Any] = _shaped(header, by_id)
        return shaped
    return list(by_id.values())


def _shaped(result: Any, by_id: dict[str, Any]) -> Any:
    if isinstance(result, GroupResult):
        return [_shaped(child, by_id) for child in result.results]
    assert isinstance(result, AsyncResult)
    return by_id.get(result.id)


def extend(conn: psycopg.Connection[Any], db: Database, chord_id: str) -> None:
    """One member more (``Task.add_to_chord``)."""
    conn.execute(db.sql("chord_extend"), {"id": chord_id})


def delete_forgotten(conn: psycopg.Connection[Any], db: Database, keep: float) -> int:
    """Delete chords older than ``keep`` seconds that still miss members, where no open job could bring them.

    A member may be due in a month, or be what a chain or an inner chord comes to; every such job names the chord, in
    ``group_id`` or in its message. An index for that would cost each publish and claim of a member something, to spare
    one look an hour at what is open.
    """
    total, after = 0, ""
    while True:
        params = {"keep": keep, "after": after, "count": BATCH}
        ids = [row[0] for row in conn.execute(db.sql("chord_waiting"), params).fetchall()]
        if not ids:
            return total
        awaited = lifecycle.mentioned(conn, db, ids)
        params = {"keep": keep, "ids": [chord_id for chord_id in ids if chord_id not in awaited]}
        gone = conn.execute(db.sql("chord_delete"), params).fetchall()
        if gone:
            logger.warning("deleted %d chord(s) that nothing can complete any more, first %s", len(gone), gone[0][0])
        total, after = total + len(gone), ids[-1]
