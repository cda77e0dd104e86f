"""The four states of an effect, the moves between them, and the answers that move it. Pure values.

The database refuses every other move by itself (the trigger ``effects_guard``); a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class EffectState(StrEnum):
    """``effects.state``; the database allows nothing else."""

    STARTED = "started"  # a call may be under way, by the attempt that the row names
    APPLIED = "applied"  # done, once; the stored result is the answer from now on
    NO_EFFECT = "no_effect"  # the recipient did nothing; a fresh call is allowed
    UNKNOWN = "unknown"  # nobody can say; only the recipient's word moves it


#: Legal moves: old state -> new state -> who makes it. An effect is born ``started``.
MOVES: Final[dict[EffectState, dict[EffectState, str]]] = {
    EffectState.STARTED: {
        EffectState.APPLIED: "the attempt that called, still holding its lease",
        EffectState.NO_EFFECT: "the attempt that called and was definitely refused, still holding its lease",
        EffectState.UNKNOWN: "the attempt that got no definite answer, or whoever finds that its lease is dead",
    },
    EffectState.UNKNOWN: {
        EffectState.APPLIED: "the reconciler, or a person",
        EffectState.NO_EFFECT: "the reconciler, or a person",
    },
    EffectState.NO_EFFECT: {
        EffectState.STARTED: "an attempt that begins a fresh call",
        EffectState.UNKNOWN: "an attempt that comes back late from its call, with anything but a refusal",
    },
    EffectState.APPLIED: {},
}


@dataclass(frozen=True, slots=True)
class Applied:
    """The recipient says: done. ``result`` is what the call would have returned; None keeps a late answer."""

    result: object = None
    why: str = "the recipient says that it has acted"


@dataclass(frozen=True, slots=True)
class NotApplied:
    """The recipient says: not done."""

    why: str = "the recipient says that it has not acted"


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """The recipient could not be asked, or does not know."""

    why: str = "the recipient gave no definite answer"


#: What a reconciler or a tombstone operation returns.
Answer = Applied | NotApplied | StillUnknown

#: Shorter to write in reconcilers.
NO_EFFECT: Final = NotApplied()
STILL_UNKNOWN: Final = StillUnknown()
