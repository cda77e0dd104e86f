"""Applying an effect: begin, call, record; and what an attempt does that finds it begun already.

Promises: the call is made by whoever ``begin`` lets through, once per number, and by nobody else; what cannot be
recorded as applied or as definitely refused is left unknown; an unknown effect is asked about, never called again by
guesswork. A crash at any point leaves either nothing, or a ``started`` row under a dead lease, which the next attempt
and beat read as unknown.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from typing import Any, Final, NoReturn

from celery import current_app

from pgtruth_transport import attempts
from pgtruth_transport.db import CONNECTION_ERRORS, Database
from pgtruth_transport.effects import codec, policy, settling
from pgtruth_transport.effects.errors import (
    EffectConflict,
    EffectGivenUp,
    EffectUnknown,
    EffectWaiting,
    NoEffect,
    ResultUnreadable,
    StaleAttempt,
)
from pgtruth_transport.effects.kinds import Call, Kind, Request
from pgtruth_transport.effects.ledger import Begun, Ledger, Row, Seen
from pgtruth_transport.effects.states import Answer, Applied, EffectState, NotApplied, StillUnknown
from pgtruth_transport.settings import Settings

logger = logging.getLogger(__name__)

#: How often one attempt may find that somebody else moved the effect before it waits.
ROUNDS: Final = 8


def apply(kind: Kind, request: Request, call: Call, settings: Settings | None) -> Any:
    """Make the effect happen once; see :meth:`Kind.apply`."""
    return run(kind, request, call, here(settings, kind.outside_lease))


def here(settings: Settings | None = None, outside_lease: float = 60.0) -> Ledger:
    """The ledger for what runs in this context: the current attempt's, or outside a task the application's."""
    attempt = attempts.current()
    if attempt is not None and not attempt.job_id:
        attempt = None  # something is being ended or collected; no job's body runs
    if attempt is not None and attempt.settings is not None:
        settings = attempt.settings
    elif settings is None:
        settings = Settings.from_app(current_app)
    return Ledger(Database.of(settings), attempt, owner=owner(), outside_lease=outside_lease)


def owner() -> str:
    """This process, for the ledger."""
    return f"{socket.gethostname()}:{os.getpid()}"


def run(kind: Kind, request: Request, call: Call, ledger: Ledger) -> Any:
    """Begin, or find out what became of the one who did."""
    for _ in range(ROUNDS):
        begun = ledger.begin(request)
        if begun is not None:
            return _perform(kind, begun, call, ledger)
        seen = ledger.read(request.key)
        _check(request, seen, ledger)
        row = seen.row
        match None if row is None else row.state:
            case EffectState.APPLIED:
                return _stored(row)
            case EffectState.UNKNOWN | EffectState.STARTED:
                _find_out(kind, request, row, ledger)
            case _:  # nothing, or no_effect: it could have begun, were the resource free
                _clear(kind, request, ledger)
    raise _waiting(ledger, request.key, 0.0, f"effect {request.key!r} is being moved by others just now")


def _check(request: Request, seen: Seen, ledger: Ledger) -> None:
    """Refuse an attempt that has lost its lease, and a key that means something else."""
    if not seen.lease_held:
        raise StaleAttempt(
            f"effect {request.key!r} was not begun: this attempt has lost its lease on the job", key=request.key
        )
    row = seen.row
    if row is None:
        return
    if (row.kind, row.fingerprint, row.resource) == (request.kind, request.fingerprint, request.resource):
        return
    if row.kind != request.kind:
        what = f"a {row.kind!r} effect; let keys of different kinds differ"
    elif row.fingerprint != request.fingerprint:
        what = "an effect with other content; a changed intention needs a key of its own"
    else:
        what = "an effect on another resource: order_by was changed"
    ledger.note(
        request.key,
        f"conflict: {request.kind!r} with fingerprint {request.fingerprint} was refused, "
        f"{row.kind!r} with {row.fingerprint} stands",
        fingerprint=request.fingerprint,
    )
    raise EffectConflict(
        f"effect {request.key!r} is already {what}"
        f" (stored fingerprint {row.fingerprint[:12]}…, offered {request.fingerprint[:12]}…; nothing was called)",
        key=request.key,
        stored=row.fingerprint,
        offered=request.fingerprint,
    )


def _stored(row: Row | None) -> Any:
    assert row is not None
    if row.result is None and row.error is not None:
        raise _unreadable(row.key, row.error)
    return codec.decode(row.result)


def _unreadable(key: str, error: str) -> ResultUnreadable:
    return ResultUnreadable(f"effect {key!r} was applied, but its result is not JSON ({error}); return plain values",
                            key=key)  # fmt: skip


def _find_out(kind: Kind, request: Request, row: Row | None, ledger: Ledger) -> None:
    """Ask about an effect that is open; comes back when it has moved, otherwise the job waits."""
    assert row is not None
    if row.state is EffectState.STARTED:
        if row.live:
            raise _waiting(ledger, request.key, row.age, f"effect {request.key!r} is being called by a live attempt")
        ledger.lapse(row)
        return
    answer = settling.ask_and_settle(kind, row, ledger, who=ledger.who)
    if isinstance(answer, StillUnknown):
        _wait_unknown(kind, request.key, row, ledger, answer.why)


def _clear(kind: Kind, request: Request, ledger: Ledger) -> None:
    """Deal with what is open on an ordered effect's resource; comes back when something has moved."""
    for row in ledger.blockers(request) if request.exclusive else ():
        if row.live:
            raise _waiting(ledger, request.key, row.age, f"effect {row.key!r} is being called on the same resource")
        if row.state is EffectState.STARTED:
            ledger.lapse(row)
            return
        answer = settling.ask_and_settle(None, row, ledger, who=ledger.who)
        if isinstance(answer, StillUnknown):
            _wait_unknown(kind, row.key, row, ledger, answer.why)
        return


def _perform(kind: Kind, begun: Begun, call: Call, ledger: Ledger) -> Any:
    """Call the recipient and record what it gave."""
    match _bury(kind, begun):
        case Applied() as earlier:
            return _record(begun, ledger, earlier)
        case StillUnknown(why):
            _no_answer(begun, ledger, EffectUnknown(f"the tombstone for the call before was not confirmed: {why}"))
    try:
        answer = call(begun.effect())
    except NoEffect as exc:
        _refused(begun, ledger, exc)
        raise
    except Exception as exc:
        _no_answer(begun, ledger, exc)
    except BaseException as exc:  # the process is being stopped; it may still have time to say so
        _interrupted(begun, ledger, f"interrupted: {codec.describe(exc)}")
        raise
    return _record(begun, ledger, Applied(answer, "the call returned"))


def _bury(kind: Kind, begun: Begun) -> Answer:
    """Before a fresh call: have the recipient promise that no earlier one will act. Applied: one of them has."""
    if begun.number == 1 or kind.tombstone is None:
        return NotApplied()
    return settling.answer_of(kind.tombstone, begun.effect(begun.number - 1))


def _record(begun: Begun, ledger: Ledger, applied: Applied) -> Any:
    """Store an answer; give back what every later attempt will be given."""
    error = None
    try:
        result: bytes | None = codec.encode(applied.result)
    except (TypeError, ValueError) as exc:
        result, error = None, codec.describe(exc)
    state = _finish(begun, ledger, EffectState.APPLIED, applied.why, result=result, error=error)
    if state is not EffectState.APPLIED:
        _too_late(begun, ledger, state, f"a late answer: {applied.why}", result)
    if error is not None:
        raise _unreadable(begun.request.key, error)
    return codec.decode(result)


def _refused(begun: Begun, ledger: Ledger, exc: NoEffect) -> None:
    exc.key = exc.key or begun.request.key
    why = f"the recipient refused: {codec.describe(exc.__cause__ or exc)}"
    state = _finish(begun, ledger, EffectState.NO_EFFECT, why, error=str(exc))
    if state is not EffectState.NO_EFFECT:
        _too_late(begun, ledger, state, f"a late answer: {why}", None, refused=True)


def _no_answer(begun: Begun, ledger: Ledger, exc: Exception) -> NoReturn:
    """Anything but an answer or a definite refusal: nobody knows."""
    why = f"no definite answer: {codec.describe(exc)}"
    state = _finish(begun, ledger, EffectState.UNKNOWN, why, error=codec.describe(exc))
    if state is None:
        _too_late(begun, ledger, state, f"a late end: {why}", None)
    raise _waiting(ledger, begun.request.key, 0.0, f"effect {begun.request.key!r} is unknown: {codec.describe(exc)}") \
        from exc  # fmt: skip


def _interrupted(begun: Begun, ledger: Ledger, why: str) -> None:
    with suppress(*CONNECTION_ERRORS):
        if ledger.finish(begun, EffectState.UNKNOWN, why, error=why) is None:
            ledger.late(begun, f"a late end: {why}", None, refused=False)


def _finish(begun: Begun, ledger: Ledger, state: EffectState, why: str, **more: Any) -> EffectState | None:
    try:
        return ledger.finish(begun, state, why, **more)
    except CONNECTION_ERRORS as exc:
        key = begun.request.key
        raise _waiting(ledger, key, 0.0, f"effect {key!r}: the database could not be told what the call gave") from exc


def _too_late(
    begun: Begun, ledger: Ledger, state: EffectState | None, why: str, result: bytes | None, *, refused: bool = False
) -> NoReturn:
    """The answer came when it was no longer this attempt's to record: keep it as evidence, and stop."""
    key = begun.request.key
    if state is None:
        ledger.late(begun, why, result, refused=refused)
    seen = ledger.read(key)
    logger.warning("effect %r, call %d: %s; the effect is %s", key, begun.number, why, seen.row and seen.row.state)
    if not seen.lease_held:
        raise StaleAttempt(f"effect {key!r}: the lease was lost during the call; the reconciler has to ask", key=key)
    raise _waiting(ledger, key, 0.0, f"effect {key!r} is unknown: its answer came too late to be recorded")


def _wait_unknown(kind: Kind, key: str, row: Row, ledger: Ledger, why: str) -> NoReturn:
    if policy.has_given_up(kind, row.age):
        raise EffectGivenUp(
            f"effect {key!r} has been unknown for {row.age:.0f} s ({why}); the job gives up. It stays listed: see "
            f"'celery -A … pgtruth effects show {key}', then 'effects reconcile' or 'effects resolve'",
            key=key,
        )
    raise _waiting(ledger, key, row.age, f"effect {key!r} is unknown: {why}")


def _waiting(ledger: Ledger, key: str, age: float, reason: str) -> EffectUnknown:
    """The exception that ends this attempt; inside a task the job has been told to come back, uncounted."""
    if not ledger.in_task:
        return EffectUnknown(reason, key=key)
    attempts.postpone(policy.wait_for(age), reason)
    return EffectWaiting(reason, key=key)
