"""Reconciling outside any attempt: beat's round over what is due, and a person's questions and decisions.

Promises: each due effect is given to one asker at a time; every decision is recorded with who and why. A crash leaves
effects unknown, to be asked about again a minute later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pgtruth_transport.db import Database
from pgtruth_transport.effects import book, codec, kinds, settling
from pgtruth_transport.effects.errors import EffectError
from pgtruth_transport.effects.flow import owner
from pgtruth_transport.effects.ledger import Ledger, Row
from pgtruth_transport.effects.states import Answer, Applied, EffectState, NotApplied, StillUnknown
from pgtruth_transport.settings import Settings

logger = logging.getLogger(__name__)

CHUNK: Final = 5


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What one round found."""

    lapsed: int = 0  # started effects whose attempts are gone
    applied: int = 0
    no_effect: int = 0
    still_unknown: int = 0


def reconcile_due(settings: Settings, limit: int = 100, who: str | None = None) -> Reconciled:
    """One round: find what has become unknown, ask about what is due, record the answers."""
    database = Database.of(settings)
    who = who or f"beat on {owner()}"
    ledger = Ledger(database, None, owner=who)
    lapsed = len(book.lapse_due(database, who, limit))
    counts = {Applied: 0, NotApplied: 0, StillUnknown: 0}
    for key in _due(database, limit):
        row = ledger.read(key).row
        if row is None or row.state is not EffectState.UNKNOWN:
            continue
        answer = settling.ask_and_settle(None, row, ledger, who=who)
        if answer is not None:
            counts[type(answer)] += 1
    done = Reconciled(lapsed, counts[Applied], counts[NotApplied], counts[StillUnknown])
    if done != Reconciled():
        logger.info("effects reconciled: %s", done)
    return done


def _due(database: Database, limit: int) -> Iterator[str]:
    """What is due, taken a few at a time: a slow recipient must not outlast the minute for which it is ours to ask."""
    while limit > 0:
        keys = book.due(database, kinds.names(), min(limit, CHUNK))
        yield from keys
        limit = limit - len(keys) if len(keys) == CHUNK else 0


def reconcile(database: Database, key: str, who: str) -> Answer | None:
    """Ask about one unknown effect now; None: somebody else moved it meanwhile."""
    ledger = Ledger(database, None, owner=who)
    row = _unknown(ledger, key)
    answer = settling.ask_and_settle(None, row, ledger, who=who)
    if isinstance(answer, StillUnknown):
        ledger.note(key, f"asked by hand: {answer.why}", who=who)
    return answer


def resolve(database: Database, key: str, state: EffectState, *, who: str, why: str, result: Any = None) -> bool:
    """Record a person's decision about an unknown effect; False: it moved meanwhile.

    ``no_effect`` allows a fresh call, so where the kind has a tombstone it is written first; where that fails or says
    that the recipient has acted, the decision is refused (:class:`EffectError`).
    """
    if not why.strip():
        raise EffectError("say why: the decision is recorded", key=key)
    if state not in (EffectState.APPLIED, EffectState.NO_EFFECT):
        raise EffectError(f"an unknown effect can be resolved as applied or no_effect, not as {state}", key=key)
    ledger = Ledger(database, None, owner=who)
    row = _unknown(ledger, key)
    if state is EffectState.NO_EFFECT:
        _seal(row)
    kept = None if result is None else codec.encode(result)
    return ledger.settle(row, state, f"decided by hand: {why}", result=kept, who=who)


def _seal(row: Row) -> None:
    kind = kinds.find(row.kind)
    if kind is None:
        raise EffectError(
            f"no kind {row.kind!r} is declared here, so it is not known whether a tombstone must be written first; "
            "use the app that declares it (-A)",
            key=row.key,
        )
    if kind.tombstone is None:
        return
    match settling.answer_of(kind.tombstone, row.effect()):
        case NotApplied():
            return
        case Applied(_, why):
            raise EffectError(f"the recipient says that it has acted ({why}); use 'effects reconcile'", key=row.key)
        case StillUnknown(why):
            raise EffectError(f"the tombstone was not confirmed, so nothing was decided: {why}", key=row.key)


def _unknown(ledger: Ledger, key: str) -> Row:
    """The row of an unknown effect; one whose attempt is gone becomes unknown by being looked at."""
    row = ledger.read(key).row
    if row is not None and row.state is EffectState.STARTED and not row.live:
        ledger.lapse(row)
        row = ledger.read(key).row
    if row is None:
        raise EffectError(f"there is no effect {key!r}", key=key)
    if row.state is not EffectState.UNKNOWN:
        live = ", by an attempt that is alive: wait for it" if row.live else ""
        raise EffectError(f"effect {key!r} is not unknown, it is {row.state}{live}", key=key)
    return row
