"""Tasks that misbehave, to see what the queue makes of it."""

from __future__ import annotations

import os
import signal
import time

from celery import Task, shared_task


class NotYet(RuntimeError):
    """What :func:`flaky` raises while it is still failing."""


@shared_task(bind=True)
def flaky(self: Task, failures: int = 1) -> int:
    """Fail the first ``failures`` attempts, then return the number of the attempt that worked (0 is the first)."""
    attempt: int = self.request.retries
    if attempt < failures:
        raise NotYet(f"attempt {attempt} of {failures} that fail")
    return attempt


@shared_task
def slow(seconds: float = 3.0) -> float:
    """Take ``seconds``, as a call to a slow service would."""
    time.sleep(seconds)
    return seconds


@shared_task(bind=True)
def crash(self: Task, crashes: int = 1) -> int:
    """Kill the process that runs it (SIGKILL, as the out-of-memory killer does) in the first ``crashes`` attempts.

    Meant for the prefork pool, where that process is a pool child; in the other pools it is the whole worker.
    """
    attempt: int = self.request.retries
    if attempt < crashes:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt
