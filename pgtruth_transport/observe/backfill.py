"""Jobs as the task events that Flower's state is made of, so that Flower knows what it has not seen.

The rows are the truth. A job that Flower does not know, or knows in another state, is brought to the row's state; one
that it already shows like that is left alone. Reading is bounded; if it fails, Flower shows what events told it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from celery import states
from celery.events.state import State

from pgtruth_transport.db import Database
from pgtruth_transport.states import Status

from . import queries
from .tables import worker_name

#: ``after`` for "everything".
EVER: Final = "-infinity"
_SUBJECTS: Final = {
    states.PENDING: "sent",
    states.STARTED: "started",
    states.RETRY: "retried",
    states.SUCCESS: "succeeded",
    states.FAILURE: "failed",
    states.REVOKED: "revoked",
}


@dataclass(frozen=True, slots=True)
class KnownJob:
    """What a row says of a job, as far as Flower shows it. Times are epoch seconds."""

    id: str
    status: str
    task: str
    queue: str
    celery_state: str | None
    retry_count: int
    root_id: str | None
    parent_id: str | None
    created_at: float
    claimed_at: float | None  # of the attempt that runs, or of the last one
    updated_at: float
    owned_by: str | None  # likewise
    error: str | None
    result: bytes | None  # its first bytes
    headers: bytes | None

    @property
    def state(self) -> str:
        """The Celery state to show."""
        match Status(self.status):
            case Status.DONE:
                return "SUCCESS"
            case Status.FAILED:
                return "REVOKED" if self.celery_state == "REVOKED" else "FAILURE"
            case Status.PROCESSING:
                return "STARTED"
            case Status.QUEUED | Status.ENQUEUE_FAILED:
                return "RETRY" if self.retry_count else "PENDING"

    @property
    def worker(self) -> str | None:
        return worker_name(self.owned_by) or None

    def fields(self) -> dict[str, Any]:
        """What Flower shows of the message."""
        headers: dict[str, Any] = json.loads(bytes(self.headers)) if self.headers else {}
        return {
            "name": self.task,
            "args": headers.get("argsrepr"),
            "kwargs": headers.get("kwargsrepr"),
            "retries": self.retry_count,
            "eta": headers.get("eta"),
            "expires": headers.get("expires"),
            "root_id": self.root_id,
            "parent_id": self.parent_id,
            "routing_key": self.queue,
            "client": headers.get("origin"),
        }

    def outcome(self) -> dict[str, Any]:
        """What Flower shows of the end, or of the retry."""
        if self.state == states.SUCCESS:
            runtime = self.updated_at - self.claimed_at if self.claimed_at is not None else None
            return {"result": _text(self.result), "runtime": runtime}
        return {"exception": self.error} if self.error and self.state != states.STARTED else {}


def _text(result: bytes | None) -> str | None:
    if result is None:
        return None
    try:
        return bytes(result).decode()
    except UnicodeDecodeError:
        return "(not text)"


def read(db: Database, after: str = EVER, limit: int = 5_000, waiting: int = 0) -> tuple[list[KnownJob], str]:
    """Jobs that changed after ``after``, oldest first, and the moment to ask from next time.

    At most ``limit`` of them, the newest; of the jobs that wait only the next ``waiting``. The next moment lies a
    little back, because a statement may commit later than the time that it writes; what is read twice changes nothing.
    """
    with queries.looking(db) as conn:
        moment = queries.clock(conn, db, ago=10)
        params = {"after": after, "limit": limit, "waiting": waiting}
        rows = conn.execute(db.sql("observe_recent"), params).fetchall()
    return [KnownJob(*row) for row in reversed(rows)], moment


def apply(state: State, jobs: Iterable[KnownJob]) -> Iterator[tuple[Any, str | None]]:
    """Bring ``state`` to what the rows say; yields each task that changed, and the id that was evicted for it."""
    for job in jobs:
        task = state.tasks.data.get(job.id)
        if task is not None and not _differs(task, job):
            continue
        evicted = _next_out(state) if task is None else None
        yield _bring(state, job), evicted


def _differs(task: Any, job: KnownJob) -> bool:
    if task.state == job.state:
        return False
    if task.state not in states.READY_STATES and job.state not in states.READY_STATES:
        # events are quicker than rows here: received and custom states say more than the row does
        return job.state == states.RETRY and task.state == states.STARTED and (task.started or 0) < job.updated_at
    return job.state in states.READY_STATES  # a row read before the event of its end never takes the end back


def _next_out(state: State) -> str | None:
    limit = state.tasks.limit
    return next(iter(state.tasks), None) if limit and len(state.tasks) >= limit else None


def _bring(state: State, job: KnownJob) -> Any:
    """Feed the events that lead to the row's state. No worker is made to look alive by it."""
    worker = job.worker
    fields = job.fields()
    client = fields["client"] or "unknown"
    base = {"uuid": job.id, "clock": 0, "local_received": None}
    known = state.tasks.data.get(job.id)
    if known is None or known.name is None:
        state.event({**base, **fields, "type": "task-sent", "hostname": client, "timestamp": job.created_at})
    if worker is not None and job.claimed_at is not None:
        received = {**base, **fields, "hostname": worker, "timestamp": job.claimed_at}
        state.event({**received, "type": "task-received"})
        state.event({**base, "type": "task-started", "hostname": worker, "timestamp": job.claimed_at})
    task = state.tasks.data[job.id]
    if job.state not in (states.STARTED, states.PENDING):
        task.event(_SUBJECTS[job.state], job.updated_at, None, job.outcome())
    if task.state in states.READY_STATES or job.state in states.READY_STATES:
        task.state = job.state  # an event of an attempt that had lost its lease may have said otherwise
    return task
