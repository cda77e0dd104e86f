"""The jobs that this worker process holds, and how many more it should take."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from ..attempts import Attempt
from ..jobs import Job

if TYPE_CHECKING:
    from celery.worker.request import Request

#: How much work, in seconds at the pool's recent pace, is claimed ahead of the free slots.
LOOK_AHEAD_SECONDS = 0.5


class Held:
    """A claimed job in the worker's main process, from its claim until its end has been settled."""

    __slots__ = (
        "accepted_at",
        "answer",
        "attempt",
        "cause",
        "closing",
        "concluded",
        "deadline",
        "doubted",
        "fallback",
        "job",
        "lost",
        "renew_at",
        "request",
        "settle_at",
        "taken_at",
    )

    def __init__(self, job: Job, attempt: Attempt, renew_at: float) -> None:
        self.job = job
        self.attempt = attempt
        self.taken_at = time.monotonic()
        self.renew_at = renew_at  # monotonic time at which a third of the lease is left
        self.request: Request | None = None  # once Celery has accepted the message
        self.accepted_at: float | None = None  # monotonic time at which the body started
        self.deadline: float | None = None  # monotonic time after which it may not go on (pools without hard limits)
        self.closing = False  # its end is being reported: an ack may come before the failure that it belongs to
        self.answer: tuple[bool, bool] | None = None  # (acknowledged, requeue) that came while closing
        self.cause: BaseException | None = None  # why it ended without its own word
        self.fallback: str | None = None  # the same, readable: recorded if it is acknowledged without an outcome
        self.concluded = False  # its outcome is known and waits to be settled
        self.doubted = False  # a renewal did not find the authority; a second one decides
        self.lost = False  # the authority is gone
        self.settle_at = 0.0  # monotonic time before which its end is not tried again: somebody keeps its chord's row

    @property
    def key(self) -> tuple[str, int]:
        return self.attempt.lease.job_id, self.attempt.lease.lease_version


def look_ahead(slots: int, pace: float | None, multiplier: int) -> int:
    """How many jobs to hold ahead of ``slots`` running ones: about half a second of work at ``pace`` jobs a second.

    Nothing while the pace is unknown, and never more than ``multiplier`` x ``slots`` (0: no such bound; 1: nothing, so
    that the most urgent job is always the next). So one long task never hides work from an idle worker, and short ones
    still move in batches.
    """
    if pace is None or multiplier == 1:
        return 0
    ahead = int(pace * LOOK_AHEAD_SECONDS)
    return ahead if multiplier == 0 else min(ahead, multiplier * slots)


class Pace:
    """How many jobs a second have ended lately; ``None`` until some have."""

    def __init__(self, window: float = 1.0) -> None:
        self._window = window
        self._ends: deque[tuple[float, int]] = deque()
        self._count = 0
        self._busy_since: float | None = None

    def started(self) -> None:
        """The worker went from idle to busy."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def idle(self) -> None:
        """The worker has nothing to do: what it learnt says nothing about the next load."""
        self._busy_since = None
        self._ends.clear()
        self._count = 0

    def ended(self, count: int) -> None:
        self._ends.append((time.monotonic(), count))
        self._count += count

    def __call__(self) -> float | None:
        now = time.monotonic()
        while self._ends and now - self._ends[0][0] > self._window:
            self._count -= self._ends.popleft()[1]
        if not self._count or self._busy_since is None:
            return None
        return self._count / max(0.02, min(self._window, now - self._busy_since))


class Strangers:
    """The task names that this worker has met and does not know: which to leave alone now, longer each time."""

    FIRST, MOST = 1.0, 30.0  # seconds

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}  # name -> when to ask again, how long it was

    def meet(self, task: str, now: float) -> float:
        """``task`` was met; returns the seconds for which it is left to others."""
        _, before = self._until.get(task, (0.0, self.FIRST / 2))
        seconds = min(self.MOST, before * 2)
        self._until[task] = now + seconds, seconds
        return seconds

    def away(self, now: float) -> tuple[str, ...]:
        """The names to leave alone now."""
        return tuple([task for task, (until, _) in self._until.items() if until > now])
