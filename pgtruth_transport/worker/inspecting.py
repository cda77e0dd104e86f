"""``inspect scheduled`` and ``inspect query_task`` with what waits in the database for its time.

Under other transports a worker holds such jobs in its memory and answers from there. Here they are rows, so each
worker answers with those of its queues, the next ``SHOWN`` of them. Looking claims nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from celery.utils.functional import maybe_list
from celery.worker import control

from ..endings import context_of
from ..jobs import Job

#: How many scheduled jobs one answer lists.
SHOWN: Final = 1000
#: What Celery's own answer has here: the priority of its timer.
TIMER_PRIORITY: Final = 6


@control.inspect_command(alias="dump_schedule")
def scheduled(state: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """List of currently scheduled ETA/countdown tasks."""
    found: list[dict[str, Any]] = celery_scheduled(state, **kwargs)
    for job, run_at in _read(state, "job_scheduled", {"count": SHOWN}):
        entry = {"eta": run_at.astimezone(UTC).isoformat(), "priority": TIMER_PRIORITY, "request": _info(state, job)}
        found.append(entry)
    return found


@control.inspect_command(variadic="ids", signature="[id1 [id2 [... [idN]]]]")
def query_task(state: Any, ids: Any, **kwargs: Any) -> dict[str, Any]:
    """Query for task information by id."""
    found: dict[str, Any] = celery_query_task(state, ids, **kwargs)
    wanted = [task_id for task_id in maybe_list(ids) or [] if task_id not in found]
    for job, _ in _read(state, "job_scheduled_find", {"ids": wanted}) if wanted else ():
        found[job.id] = ("scheduled", _info(state, job))
    return found


celery_scheduled, celery_query_task = control.scheduled, control.query_task


def _read(state: Any, statement: str, params: dict[str, Any]) -> Iterable[tuple[Job, datetime]]:
    worker = getattr(state.consumer, "pgtruth", None)
    if worker is None:
        return []
    queues = [queue.name for queue in state.consumer.task_consumer.queues]
    database = worker.database
    with database.connection() as conn:
        rows = conn.execute(database.sql(statement), {**params, "queues": queues}).fetchall()
    return [(Job._make(row[:-1]), row[-1]) for row in rows]


def _info(state: Any, job: Job) -> dict[str, Any]:
    """What ``Request.info`` says of a request that has not started."""
    context = context_of(state.app, job)
    delivered = context.delivery_info or {}
    return {
        "id": job.id,
        "name": job.task,
        "args": context.args,
        "kwargs": context.kwargs,
        "type": job.task,
        "hostname": state.hostname,
        "time_start": None,
        "acknowledged": False,
        "delivery_info": {
            "exchange": delivered.get("exchange"),
            "routing_key": delivered.get("routing_key"),
            "priority": job.priority,
            "redelivered": delivered.get("redelivered", False),
        },
        "worker_pid": None,
    }
