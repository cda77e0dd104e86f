"""The attempt that runs here and now, and what it leaves behind.

An :class:`Attempt` is one holder's try at a job. It lives in the worker's main process, and as a copy in the pool
child that runs the body. Nothing that it collects (the ending, follow-up tasks, chord parts, results of later steps)
is written until the worker settles it, fenced, in one transaction; if the process dies first, all of it is gone, the
lease runs out and the job runs again. So an attempt that lost its lease cannot have left half of its end behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from .jobs import ChordPart, Ending, JobRow, Lease, Requeue, Stored, readable
from .settings import Settings
from .states import Outcome, Status

_current: ContextVar[Attempt | None] = ContextVar("pgtruth_attempt", default=None)


class Collected(NamedTuple):
    """What an attempt leaves behind, as a child hands it to the worker's main process (picklable)."""

    ending: Ending | None
    requeue: Requeue | None
    rows: tuple[JobRow, ...]
    stored: tuple[Stored, ...]
    parts: tuple[ChordPart, ...]
    settled: bool


class Attempt:
    """One holder's try at a job."""

    __slots__ = (
        "after",
        "body_rows",
        "buffering",
        "ending",
        "in_pool",
        "lease",
        "limit",
        "parts",
        "replaced",
        "requeue",
        "retry_count",
        "returned",
        "rows",
        "settings",
        "settled",
        "stored",
    )

    def __init__(self, lease: Lease, settings: Settings | None, retry_count: int = 0, limit: int = 0) -> None:
        self.lease = lease
        self.settings = settings
        self.retry_count = retry_count
        self.limit = limit  # how many retries the job may have
        self.buffering = False  # the body has ended: publishes wait for the finish
        self.body_rows = 0  # how many of the rows the body itself published
        self.returned = False  # the body has returned: what is published next are the callbacks of a success
        self.in_pool = False  # this is the copy beside the body, which may settle it
        self.replaced = False
        self.settled = False  # already written (by the child, or together with the application's own commit)
        self.ending: Ending | None = None
        self.requeue: Requeue | None = None
        self.rows: list[JobRow] = []
        self.stored: list[Stored] = []
        self.parts: list[ChordPart] = []
        self.after: list[Callable[[], object]] = []  # what to call in this process once all of it is committed

    # What tasks and effects may read.

    @property
    def job_id(self) -> str:
        return self.lease.job_id

    @property
    def lease_version(self) -> int:
        return self.lease.lease_version

    @property
    def owned_by(self) -> str:
        return self.lease.owned_by

    def body_ended(self, *, returned: bool) -> None:
        """From here on publishes belong to the finish."""
        self.buffering, self.returned = True, returned
        self.body_rows = len(self.rows)

    # What it collects. The first outcome wins: Celery sometimes reports the same end twice.

    @property
    def has_outcome(self) -> bool:
        return self.ending is not None or self.requeue is not None or self.settled

    def end(self, ending: Ending) -> None:
        """Record the terminal outcome."""
        if self.has_outcome:
            return
        self.ending = ending
        if ending.status is Status.FAILED and self.returned:
            # the result could not be encoded after the callbacks were published: they belong to a success
            del self.rows[self.body_rows :]

    def ask_requeue(self, requeue: Requeue) -> None:
        """Record that the job goes back to ``queued``; a retry asked for in the body wins over what it returns."""
        if self.requeue is None and self.ending is None and not self.settled:
            self.requeue = requeue

    def take(self, rows: Sequence[JobRow], *, joined: bool = False) -> list[JobRow]:
        """Keep the publishes that belong to the finish; return those to be written at once.

        ``joined``: the body publishes in a transaction of the application's, which they belong to then.
        """
        at_once: list[JobRow] = []
        for row in rows:
            if row.id == self.lease.job_id:
                self._take_own(row)
            elif self.buffering or (not joined and self.settings is not None and self.settings.buffer_publishes):
                self.rows.append(row)
            else:
                at_once.append(row)
        return at_once

    def _take_own(self, row: JobRow) -> None:
        # retry() and replace() publish the id of the job that runs: the job goes back to the queue, it is not a new one
        if self.replaced:
            self.ask_requeue(Requeue(Outcome.RELEASED, row.retries, row=row))
        else:
            self.ask_requeue(Requeue(Outcome.RETRIED, row.retries, row=row))  # RETRY shows once the backend is told

    def annotate_retry(self, meta: bytes | None, error: str | None) -> None:
        """Add to a recorded retry what AsyncResult shows of it."""
        if self.requeue is not None:
            self.requeue = self.requeue._replace(celery_state="RETRY", meta=meta, error=readable(error))

    def collected(self) -> Collected:
        """What the pool returns. Of a retried attempt nothing follows, of a replaced one what replaces it."""
        rows = tuple(self.rows) if self.requeue is None or self.replaced else ()
        return Collected(self.ending, self.requeue, rows, tuple(self.stored), tuple(self.parts), self.settled)

    def merge(self, other: Collected) -> None:
        """Take over what the child's copy of this attempt collected."""
        if self.has_outcome:
            return
        self.ending, self.requeue, rows, stored, parts, self.settled = other
        self.rows, self.stored, self.parts = list(rows), list(stored), list(parts)


def current() -> Attempt | None:
    """The attempt whose body, or whose end, runs in this context; ``None`` outside a task of this transport."""
    return _current.get()


def find(job_id: str | None) -> Attempt | None:
    """The current attempt, if it holds ``job_id``."""
    attempt = _current.get()
    return attempt if attempt is not None and attempt.lease.job_id == job_id else None


@contextmanager
def running(attempt: Attempt) -> Iterator[Attempt]:
    """Make ``attempt`` the current one."""
    token = _current.set(attempt)
    try:
        yield attempt
    finally:
        _current.reset(token)


@contextmanager
def outside() -> Iterator[None]:
    """Be in no attempt: what is published here is published at once."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def ending(attempt: Attempt) -> Iterator[Attempt]:
    """Make ``attempt`` the current one, with its body over: everything published now belongs to its finish."""
    already = attempt.buffering
    attempt.buffering = True
    before = len(attempt.rows), len(attempt.stored), len(attempt.parts), len(attempt.after)
    had_outcome = attempt.has_outcome
    try:
        with running(attempt):
            yield attempt
    finally:
        attempt.buffering = already
        if had_outcome:  # the same end reported twice: its follow-ups are there already
            del attempt.rows[before[0] :], attempt.stored[before[1] :]
            del attempt.parts[before[2] :], attempt.after[before[3] :]


@contextmanager
def collecting(settings: Settings | None) -> Iterator[Attempt]:
    """Collect what is published and stored in this context without writing it (for the end of a chord, a cancel)."""
    attempt = Attempt(Lease("", 0, "", ""), settings)
    attempt.buffering = True
    with running(attempt):
        yield attempt


def postpone(delay_seconds: float, reason: str) -> None:
    """Give the running job back, to run again after ``delay_seconds``, without spending its retry budget.

    Raise :class:`celery.exceptions.Ignore` afterwards, so that the body ends. Does nothing outside a task.
    """
    attempt = _current.get()
    if attempt is not None:
        attempt.ask_requeue(Requeue(Outcome.RELEASED, delay=delay_seconds, error=readable(reason)))


def failed(error: str, *, state: str = "FAILURE", meta: bytes | None = None) -> Ending:
    """The ending of an attempt that failed without a result backend having been told."""
    return Ending(Status.FAILED, Outcome.FAILED, state, None, meta, readable(error))


def ignored() -> Ending:
    """The ending of an attempt whose result is not kept."""
    return Ending(Status.DONE, Outcome.DONE, None, None, None, None)
