"""Finding out what became of an unknown effect: ask its recipient, believe what can be believed, record it.

Promises: an answer is recorded only if the effect is still unknown about the call that was asked about, with who asked
and why; "not applied" is believed only where a late arrival is ruled out. A crash in between leaves the effect unknown.
"""

from __future__ import annotations

import logging

from pgtruth_transport.effects import codec, kinds, policy
from pgtruth_transport.effects.kinds import Ask, Effect, Kind
from pgtruth_transport.effects.ledger import Ledger, Row
from pgtruth_transport.effects.states import Answer, Applied, EffectState, NotApplied, StillUnknown

logger = logging.getLogger(__name__)


def ask_and_settle(kind: Kind | None, row: Row, ledger: Ledger, *, who: str) -> Answer | None:
    """Ask about an unknown effect and record the answer; None: somebody else has moved it meanwhile."""
    kind = kind or kinds.find(row.kind)
    if kind is None:
        return StillUnknown(f"no kind {row.kind!r} is declared in this process; import the module that declares it")
    answer = ask(kind, row, ledger)
    match answer:
        case None:
            return None
        case Applied(result, why):
            kept = None if result is None else codec.encode(result)  # its form was checked by answer_of
            moved = ledger.settle(row, EffectState.APPLIED, why, result=kept, who=who)
        case NotApplied(why):
            moved = ledger.settle(row, EffectState.NO_EFFECT, why, result=None, who=who)
        case StillUnknown(why):
            ledger.postpone(row, why, policy.wait_for(row.age))
            return answer
    return answer if moved else None


def ask(kind: Kind, row: Row, ledger: Ledger) -> Answer | None:
    """What the recipient says, as far as it can be believed; None: the effect has moved on."""
    fence = None
    if kind.fence:
        fence = ledger.refence(row)
        if fence is None:
            return None
    effect = row.effect(fence)
    answer: Answer = StillUnknown(
        "no reconciler is declared: a person has to say ('celery -A … pgtruth effects resolve')"
    )
    if kind.reconcile is not None:
        answer = answer_of(kind.reconcile, effect)
    if kind.tombstone is not None and not isinstance(answer, Applied):
        return answer_of(kind.tombstone, effect)
    return policy.believe(kind, answer, row.age, sealed=kind.fence)


def answer_of(function: Ask, effect: Effect) -> Answer:
    """What one of the application's functions says; a failure or a wrong type is no answer."""
    try:
        answer: object = function(effect)
        if isinstance(answer, Applied):
            codec.encode(answer.result)
    except Exception as exc:
        logger.warning("effect %r: the recipient could not be asked: %s", effect.key, codec.describe(exc))
        return StillUnknown(f"the recipient could not be asked: {codec.describe(exc)}")
    if not isinstance(answer, Applied | NotApplied | StillUnknown):
        return StillUnknown(
            f"the reconciler of {effect.kind!r} returned {type(answer).__name__}; it must return effects.Applied(…), "
            "effects.NO_EFFECT or effects.STILL_UNKNOWN"
        )
    return answer
