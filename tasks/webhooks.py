"""Telling other systems by HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from celery import Task, shared_task


@shared_task(bind=True)
def send_webhook(self: Task, url: str, payload: dict[str, Any], timeout: float = 5.0) -> int:
    """POST ``payload`` as JSON and return the HTTP status; an error or a status from 400 up is retried.

    The job's id travels as ``Idempotency-Key``: it is the same in every attempt, so a recipient that keeps keys
    acts once. A recipient that does not needs the effect ledger (see ``tasks.payments``).
    """
    request = urllib.request.Request(
        url,
        data=json.dumps(payload).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": str(self.request.id)},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            status: int = answer.status
    except urllib.error.HTTPError as exc:
        exc.close()  # the status is all that matters; the error would keep the line open
        raise
    return status
