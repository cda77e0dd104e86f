"""What can go wrong with an effect, each in its own class; messages name keys and fields, never payloads.

``FINAL`` are the errors that another attempt of the same job cannot mend: a retry policy should let them fail the job.
"""

from __future__ import annotations

from typing import Final

from celery.exceptions import Ignore

from pgtruth_transport.errors import PgTruthError


class EffectError(PgTruthError):
    """Base of the effects' errors; ``key`` is the logical-effect key where one is known."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class DeclarationRefused(EffectError, ValueError):
    """An effect was declared in a way that cannot keep the promise; the message says why."""


class PayloadRefused(EffectError, ValueError):
    """A key or a payload has no stable fingerprint: a field is missing or of a type that is not allowed."""


class NoEffect(EffectError):
    """Raised *by the caller's call*: the recipient has definitely done nothing, and never will for this call.

    Only a definite refusal qualifies (a declined card, a 4xx answer that the recipient documents as "not done"). A
    time-out, a reset or a 5xx does not: leave those as they are, and the effect becomes ``unknown``.
    """


class EffectConflict(EffectError):
    """The key belongs to an effect with another fingerprint, kind or resource. Both fingerprints are in its history."""

    def __init__(self, message: str, *, key: str | None = None, stored: str = "", offered: str = "") -> None:
        super().__init__(message, key=key)
        self.stored = stored
        self.offered = offered


class StaleAttempt(EffectError):
    """This attempt has lost its lease: it may begin no effect, and what it did is for the reconciler to find out."""


class EffectUnknown(EffectError):
    """Nobody can say yet whether the recipient acted. No call was made after that; the reconciler has to ask."""


class EffectWaiting(EffectUnknown, Ignore):
    """``EffectUnknown`` inside a task: the job has been told to wait, uncounted; Celery ends this attempt quietly."""


class EffectGivenUp(EffectUnknown):
    """The effect has been unknown longer than ``give_up_after``: the job fails, the effect stays listed as unknown."""


class ResultUnreadable(EffectError, TypeError):
    """The effect was applied, but what the call returned is no JSON and could not be stored; return plain values."""


#: Another attempt ends the same way: not worth a retry.
FINAL: Final[tuple[type[EffectError], ...]] = (
    DeclarationRefused,
    PayloadRefused,
    EffectConflict,
    StaleAttempt,
    EffectGivenUp,
    ResultUnreadable,
)
