"""The five states of a job and the moves between them (lifecycle specification v1).

Pure values. :mod:`pgtruth_transport.lifecycle` is the only module that makes these moves, each by one guarded SQL
statement; a test reads every statement and compares it with ``MOVES``.
"""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """``jobs.status``; the database allows nothing else (CHECK constraint)."""

    QUEUED = "queued"
    PROCESSING = "processing"
    DONE = "done"
    FAILED = "failed"
    ENQUEUE_FAILED = "enqueue_failed"


TERMINAL = frozenset({Status.DONE, Status.FAILED})

#: Legal moves: old status -> the statuses that it may become, and who makes the move.
MOVES: dict[Status, dict[Status, str]] = {
    Status.QUEUED: {
        Status.PROCESSING: "a worker's claim",
        Status.ENQUEUE_FAILED: "the producer, when the signal could not be sent after the commit",
        Status.FAILED: "cancel, expiry, purge, or a sweep that finds that no worker knows the task",
    },
    Status.ENQUEUE_FAILED: {
        Status.QUEUED: "the sweep",
        Status.FAILED: "cancel or purge",
    },
    Status.PROCESSING: {
        Status.DONE: "the holder's fenced finish",
        Status.FAILED: "the holder's fenced finish, cancel, or the sweep when the retry budget is spent",
        Status.QUEUED: "the holder's fenced retry or release, or the sweep when the lease has run out",
    },
    Status.DONE: {},
    Status.FAILED: {},
}


def is_legal(old: Status, new: Status) -> bool:
    """Whether a job may move from ``old`` to ``new``."""
    return new in MOVES[old]


class Outcome(StrEnum):
    """How an attempt ended: ``attempts.outcome``."""

    DONE = "done"
    FAILED = "failed"
    RETRIED = "retried"  # the body asked for a retry, or a failure within the retry budget
    RELEASED = "released"  # given back unstarted or at a shutdown; costs no retry
    LEASE_EXPIRED = "lease_expired"  # the sweep took the job from a holder that stopped renewing
    CANCELLED = "cancelled"  # revoked while it ran
