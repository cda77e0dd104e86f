"""The values that pass between the transport, the worker and the lifecycle. No I/O here.

A published task is a :class:`JobRow`; a claimed one a :class:`Job`; what an attempt leaves behind is an
:class:`Ending` (terminal) or a :class:`Requeue` (back to ``queued``), with the :class:`Stored` results and
:class:`ChordPart` counts that must commit with it.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from .states import Outcome, Status


class JobRow(NamedTuple):
    """A task message on its way into ``jobs``.

    ``eta`` and ``expires`` are absolute (ISO 8601) and honoured as given; ``delay`` and ``expires_in`` are seconds
    counted by the database clock from the insert.
    """

    id: str
    task: str
    queue: str
    priority: int
    eta: str | None
    delay: float | None
    expires: str | None
    expires_in: float | None
    retries: int
    root_id: str | None
    parent_id: str | None
    group_id: str | None
    headers: bytes
    properties: bytes
    body: bytes

    @property
    def due_soon(self) -> bool:
        """Whether an idle worker must hear of it now; what is further off is found by its own timer."""
        return self.eta is None and (self.delay or 0) < 5


class Job(NamedTuple):
    """A claimed job: one row of ``job_claim`` (and of the sweep's locking reads)."""

    id: str
    task: str
    queue: str
    priority: int
    lease_version: int
    retry_count: int
    max_retries: int | None
    at_most_once: bool
    claimed_at: str
    headers: bytes | None
    properties: bytes | None
    body: bytes | None


class Lease(NamedTuple):
    """The authority of one attempt: what every write of a holder must match."""

    job_id: str
    lease_version: int
    owned_by: str
    claimed_at: str


class Ending(NamedTuple):
    """A terminal outcome: ``processing`` -> ``done`` or ``failed``."""

    status: Literal[Status.DONE, Status.FAILED]
    outcome: Outcome
    celery_state: str | None  # what AsyncResult says; None = PENDING (an ignored result)
    result: bytes | None
    meta: bytes | None
    error: str | None


class Requeue(NamedTuple):
    """Back to ``queued``: a retry, or a release.

    ``row`` is the message to run next (``None``: the same); ``retry_count`` its new value (``None``: unchanged);
    ``open`` keeps the job unclaimable until its message is published.
    """

    outcome: Outcome
    retry_count: int | None = None
    delay: float | None = None
    row: JobRow | None = None
    open: bool = False
    unknown: bool = False
    celery_state: str | None = None
    meta: bytes | None = None
    error: str | None = None


class Stored(NamedTuple):
    """A result for an id that nobody holds: a step after a failed one, a chord's body, a revoke before the publish."""

    id: str
    status: Status
    task: str
    celery_state: str
    result: bytes | None
    meta: bytes | None
    error: str | None


class ChordPart(NamedTuple):
    """One returned member of a chord's header."""

    chord_id: str
    part_id: str
    position: float | None
    state: str
    result: bytes
    body: dict[str, Any]  # the chord's body, as a signature dict
    root_id: str | None = None


def readable(value: object) -> str | None:
    """``value`` as text that a ``text`` column can hold: no NUL, no lone surrogates, at most 10,000 characters."""
    if value is None:
        return None
    text = str(value).replace("\x00", "\\x00")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")[:10_000]


def described(exc: BaseException) -> str:
    """The class and the text of an exception, also of one that Celery had to wrap because it cannot be pickled."""
    name, text = type(exc).__name__, _text(exc)
    original = getattr(exc, "exc_cls_name", None)
    if original is not None:
        name, text = original, ", ".join(map(str, getattr(exc, "exc_args", ()))) or text
    return readable(f"{name}: {text}") or name


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as broken:  # its __str__ is the user's
        return f"its text cannot be read: {type(broken).__name__}"
