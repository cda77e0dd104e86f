"""The decisions of the ledger as functions of values: nothing here reads a clock, a table or a network."""

from __future__ import annotations

import random
from typing import Final, assert_never

from pgtruth_transport.effects.kinds import Kind
from pgtruth_transport.effects.states import Answer, Applied, NotApplied, StillUnknown

FIRST_WAIT: Final = 1.0
LONGEST_WAIT: Final = 60.0


def wait_for(age: float, jitter: float | None = None) -> float:
    """Seconds until a job asks again about an effect that has been open for ``age`` seconds: half of that again.

    So the waits grow by half each time, from one second to a minute, with a jitter of a fifth either way.
    """
    spread = random.uniform(-1, 1) if jitter is None else jitter
    return min(max(age / 2, FIRST_WAIT), LONGEST_WAIT) * (1 + spread / 5)


def has_given_up(kind: Kind, age: float) -> bool:
    """Whether a job has waited long enough for an effect that has been unknown for ``age`` seconds."""
    return age >= kind.give_up_after


def believe(kind: Kind, answer: Answer, age: float, *, sealed: bool) -> Answer:
    """What an answer to a look-up is worth, for an effect that has been unknown for ``age`` seconds.

    "Not found" proves nothing while the request may still be on its way, unless the recipient has been ``sealed``
    against it by a tombstone or a raised fence.
    """
    match answer:
        case Applied() | StillUnknown():
            return answer
        case NotApplied():
            if sealed or age >= kind.in_flight:
                return answer
            return StillUnknown(f"not found so far, but a request may be on its way for {kind.in_flight:g} s")
    assert_never(answer)
