"""What tasks do to the outside world, once, or known to be unknown (ADR-007).

    from pgtruth_transport import effects

    charge = effects.declare("charge", fields=("order_id", "amount"), reconcile=find_charge)

    @shared_task
    def pay(order_id, amount):
        return charge.apply(
            f"charge:{order_id}", {"order_id": order_id, "amount": amount},
            lambda effect: gateway.charge(order_id, amount, idempotency_key=effect.key),
        )

The first attempt calls; every later one is given the stored result. An attempt that dies, or gets no definite answer,
leaves the effect *unknown*: from then on the recipient is asked, never called by guesswork. Only calls made through
``apply`` are covered. The rules are in ``docs/reference/effects.md``.
"""

from __future__ import annotations

from pgtruth_transport.effects.errors import (
    FINAL,
    DeclarationRefused,
    EffectConflict,
    EffectError,
    EffectGivenUp,
    EffectUnknown,
    EffectWaiting,
    NoEffect,
    PayloadRefused,
    ResultUnreadable,
    StaleAttempt,
)
from pgtruth_transport.effects.kinds import Effect, Kind, declare
from pgtruth_transport.effects.reconciling import Reconciled, reconcile_due
from pgtruth_transport.effects.states import (
    NO_EFFECT,
    STILL_UNKNOWN,
    Applied,
    EffectState,
    NotApplied,
    StillUnknown,
)

__all__ = [
    "FINAL",
    "NO_EFFECT",
    "STILL_UNKNOWN",
    "Applied",
    "DeclarationRefused",
    "Effect",
    "EffectConflict",
    "EffectError",
    "EffectGivenUp",
    "EffectState",
    "EffectUnknown",
    "EffectWaiting",
    "Kind",
    "NoEffect",
    "NotApplied",
    "PayloadRefused",
    "Reconciled",
    "ResultUnreadable",
    "StaleAttempt",
    "StillUnknown",
    "declare",
    "reconcile_due",
]
