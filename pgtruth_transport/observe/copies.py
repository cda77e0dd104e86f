"""A copy of an ended job's message under a new id: what ``celery pgtruth retry`` publishes. Pure.

Terminal is terminal: the ended job keeps its end, and the copy is a job of its own. It belongs to no group or chord any
more, because its chord has already been told how the original ended.
"""

from __future__ import annotations

from json import dumps, loads  # not kombu's: what it has encoded stays as it is
from typing import Any

from pgtruth_transport.errors import RefusedMessage
from pgtruth_transport.jobs import JobRow

from .queries import JobDetail


def copy_of(job: JobDetail, new_id: str, queue: str | None = None) -> JobRow:
    """The row to publish; due at once, never expiring, with a fresh retry budget.

    Raises :class:`RefusedMessage` where the job has no message to copy.
    """
    headers: dict[str, Any] = loads(bytes(job.headers)) if job.headers else {}
    if job.body is None or not headers.get("task"):
        raise RefusedMessage(f"job {job.id} has no message to copy: it was never published, or by an old protocol")
    properties: dict[str, Any] = loads(bytes(job.properties)) if job.properties else {}
    root_id = new_id if job.root_id in (None, job.id) else job.root_id
    headers |= {"id": new_id, "root_id": root_id, "retries": 0, "eta": None, "expires": None}
    headers |= {"group": None, "group_index": None}
    properties["correlation_id"] = new_id
    return JobRow(
        id=new_id,
        task=job.task,
        queue=queue or job.queue,
        priority=job.priority,
        eta=None,
        delay=None,
        expires=None,
        expires_in=None,
        retries=0,
        root_id=root_id,
        parent_id=job.parent_id,
        group_id=None,
        headers=dumps(headers).encode(),
        properties=dumps(properties).encode(),
        body=_without_chord(bytes(job.body), properties.get("content_type")),
    )


def _without_chord(body: bytes, content_type: str | None) -> bytes:
    """The body without its chord. A body that is no JSON is left as it is: without a group it counts in none."""
    if content_type != "application/json":
        return body
    args, kwargs, embed = loads(body)
    return dumps((args, kwargs, {**embed, "chord": None})).encode() if embed.get("chord") else body
