"""Between kombu's message dictionaries and the columns of a job. Pure: no I/O.

A task message that cannot be stored is refused here, before anything is written, with the field to mend.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from kombu.utils.json import JSONEncoder, loads

from ..errors import RefusedMessage
from ..jobs import Job, JobRow

#: Set by the app's ``create_task_message`` hook: seconds from the database's now, whatever this machine's clock says.
DELAY, EXPIRES_IN = "pgtruth_delay", "pgtruth_expires_in"
#: Where a delivered message says for when its task was asked; nobody is to wait for it again.
ETA = "pgtruth_eta"

Payload = dict[str, Any]
_encoded = JSONEncoder().encode  # kombu's dumps makes an encoder per call


def is_task(message: Payload) -> bool:
    """Whether a message is a Celery task (protocol 2, or 1): then it becomes a job."""
    headers = message.get("headers") or {}
    if headers.get("task") and headers.get("id"):
        return True
    return not headers.get("task") and _protocol1(message) is not None


def _protocol1(message: Payload) -> dict[str, Any] | None:
    body = message.get("body")
    if message.get("content-type") != "application/json" or not isinstance(body, str) or '"task"' not in body:
        return None
    try:
        found = loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("task") and found.get("id") else None


def job_row(message: Payload, queue: str, priority: int) -> JobRow:
    """The row of a task message; raises :class:`RefusedMessage`."""
    headers = dict(message.get("headers") or {})
    facts = headers if headers.get("task") else (_protocol1(message) or {})
    delay, expires_in = headers.pop(DELAY, None), headers.pop(EXPIRES_IN, None)
    properties = {
        **message["properties"],
        "content_type": message.get("content-type"),
        "content_encoding": message.get("content-encoding"),
    }
    return JobRow(
        id=_text("id", facts["id"]),
        task=_text("task", facts["task"]),
        queue=_text("queue", queue),
        priority=priority,
        eta=None if delay is not None else _moment("eta", facts.get("eta")),
        delay=delay,
        expires=None if expires_in is not None else _moment("expires", facts.get("expires")),
        expires_in=expires_in,
        retries=int(facts.get("retries") or 0),
        root_id=_optional("root_id", facts.get("root_id")),
        parent_id=_optional("parent_id", facts.get("parent_id")),
        group_id=_optional("group", facts.get("group")),
        headers=_encoded(headers).encode(),
        properties=_encoded(properties).encode(),
        body=_body(message.get("body")),
    )


def payload(job: Job) -> Payload:
    """The message dictionary of a claimed job, as ``kombu.transport.virtual.Message`` takes it."""
    headers, properties = _mapping(job.headers), _mapping(job.properties)
    sent_retries = int(headers.get("retries") or 0)
    if headers:
        headers["retries"] = job.retry_count
        headers[ETA], headers["eta"] = headers.get("eta"), None  # it is due: the database has judged that
    info = properties.setdefault("delivery_info", {})
    # delivered before, by an attempt that did not get to ask for the retry itself
    info["redelivered"] = job.lease_version > 1 and not (job.retry_count and sent_retries == job.retry_count)
    properties["priority"] = job.priority
    properties["delivery_tag"] = f"j{job.id}:{job.lease_version}"
    return {
        "body": bytes(job.body) if job.body is not None else b"",
        "content-type": properties.pop("content_type", None),
        "content-encoding": properties.pop("content_encoding", None),
        "headers": headers,
        "properties": properties,
        "held_key": (job.id, job.lease_version),
    }


def _mapping(encoded: bytes | None) -> Payload:
    text = bytes(encoded or b"{}")
    # kombu's way makes a call per mapping, for which only this marker gives a reason
    found: Payload = loads(text) if b"__type__" in text else json.loads(text)
    return found


def _body(body: Any) -> bytes:
    if isinstance(body, str):
        return body.encode("utf-8", "surrogatepass")
    return bytes(body or b"")


def _text(name: str, value: Any) -> str:
    text = str(value)
    if "\x00" in text:
        raise RefusedMessage(f"the message's {name} holds a NUL byte, which PostgreSQL's text cannot; nothing was sent")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise RefusedMessage(f"the message's {name} is not valid Unicode ({exc.reason}); nothing was sent") from None
    return text


def _optional(name: str, value: Any) -> str | None:
    return None if value is None else _text(name, value)


def _moment(name: str, value: Any) -> str | None:
    """An absolute time as the database reads it; one without a zone is UTC, as in Celery."""
    if not value:
        return None
    try:
        found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        raise RefusedMessage(
            f"the message's {name} is no ISO 8601 time: {str(value)[:64]!r}; nothing was sent"
        ) from None
    return found.isoformat() if found.tzinfo else f"{found.isoformat()}+00:00"
