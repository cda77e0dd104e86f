"""What an application declares about one kind of effect, and what its functions are given.

A declaration is checked when it is made: one that cannot keep the promise is refused with the reason (ADR-007). Nothing
is opened or written here. The processes that reconcile (beat's task, the command line) find the declaration by its
name, so it belongs into a module that every worker imports.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pgtruth_transport.effects.errors import DeclarationRefused, PayloadRefused
from pgtruth_transport.effects.fingerprint import canonical, checked_key, fingerprint
from pgtruth_transport.effects.states import Answer

DAY: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Effect:
    """One call of one effect, as the application's functions see it."""

    key: str  # the logical effect, the same for every call: the recipient's idempotency key
    kind: str
    payload: Mapping[str, Any] = field(repr=False)  # the declared fields in their canonical form
    number: int  # of the call: 1, 2, …
    resource: str | None = None
    fence: int | None = None  # present it to the recipient: it must refuse anything lower from then on
    late_result: Any = field(default=None, repr=False)  # what a call returned when it was no longer its to record

    @property
    def call_id(self) -> str:
        """Names this very call: what a tombstone forbids, together with every earlier one."""
        return f"{self.key}#{self.number}"


Call = Callable[[Effect], Any]
Ask = Callable[[Effect], Answer]
OrderBy = str | Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Request:
    """One effect that somebody wants applied: what the ledger keeps of it for ever."""

    key: str
    kind: str
    fingerprint: str
    payload: bytes
    resource: str | None
    numbered: bool  # each call gets a fence
    exclusive: bool  # begins only when nothing else is open on the resource


@dataclass(frozen=True, slots=True)
class Kind:
    """A declared kind of effect; made by :func:`declare`."""

    name: str
    fields: tuple[str, ...]
    reconcile: Ask | None
    tombstone: Ask | None
    order_by: OrderBy | None
    fence: bool
    give_up_after: float
    in_flight: float
    outside_lease: float

    def apply(self, key: str, payload: Mapping[str, object], call: Call, *, settings: Any = None) -> Any:
        """Make the effect happen once, and return what the call returned, then or now.

        ``call`` is given the :class:`Effect` and talks to the recipient. Inside a task the attempt's lease guards it;
        outside one the effect itself is leased for ``outside_lease`` seconds, in the database of ``settings`` (default:
        the current Celery app's). Raises :class:`NoEffect` as ``call`` raised it, :class:`EffectUnknown` (inside a task
        the job then waits, uncounted), :class:`EffectConflict`, :class:`StaleAttempt`, :class:`EffectGivenUp`.
        """
        from pgtruth_transport.effects import flow

        return flow.apply(self, self.request(key, payload), call, settings)

    def request(self, key: str, payload: Mapping[str, object]) -> Request:
        """The effect of this key and payload, fingerprinted; raises :class:`PayloadRefused`."""
        text = canonical(payload, self.fields)
        return Request(
            key=checked_key(key),
            kind=self.name,
            fingerprint=fingerprint(text),
            payload=text,
            resource=self._resource(text),
            numbered=self.order_by is not None,
            exclusive=self.order_by is not None and not self.fence,
        )

    def _resource(self, text: bytes) -> str | None:
        if self.order_by is None:
            return None
        plain = json.loads(text)
        if isinstance(self.order_by, str):
            return checked_key(f"{self.order_by}={plain[self.order_by]}")
        found = self.order_by(plain)
        if not isinstance(found, str) or not found:
            raise PayloadRefused(f"order_by of {self.name!r} must return the resource's name, a text that is not empty")
        return checked_key(found)


_declared: dict[str, Kind] = {}


def declare(
    name: str,
    *,
    fields: Sequence[str],
    reconcile: Ask | None = None,
    tombstone: Ask | None = None,
    order_by: OrderBy | None = None,
    fence: bool = False,
    give_up_after: float = DAY,
    in_flight: float = 30.0,
    outside_lease: float = 60.0,
) -> Kind:
    """Declare a kind of effect.

    ``fields``: the payload's fields that make the effect what it is; they are fingerprinted and stored.
    ``reconcile(effect)``: asks the recipient what became of an unknown effect. Without it only a person can say.
    ``tombstone(effect)``: has the recipient promise, durably, that this call and every earlier one of the key will
    never act; ``Applied`` if one has. Written before every fresh call, and when a look-up did not find the effect.
    ``order_by``: a field (or a function of the fields) that names the resource whose effects must not overtake each
    other. Needs ``fence=True``, which states that *the recipient* refuses a number lower than one it has seen for that
    resource, or a ``tombstone``.
    ``give_up_after``: seconds that a job waits for an unknown effect before it fails.
    ``in_flight``: seconds that a request may still be under way after its caller gave up. "Not found" is believed only
    after that, unless a tombstone or a fence rules a late arrival out. 0 only where no request outlives its caller.
    ``outside_lease``: seconds that a call outside a task may take.

    The first declaration of a process gives its apps the task ``pgtruth.reconcile`` and a beat entry for it.
    """
    kind = Kind(
        name, tuple(fields), reconcile, tombstone, order_by, fence, float(give_up_after), float(in_flight),
        float(outside_lease),
    )  # fmt: skip
    reason = refusal(kind) or _other(kind)
    if reason:
        raise DeclarationRefused(f"effect {name!r} is refused: {reason}")
    if not _declared:
        from pgtruth_transport.effects import tasks

        tasks.offer()
    _declared[name] = kind
    return kind


def refusal(kind: Kind) -> str | None:
    """Why this declaration cannot keep the promise; None if it can."""
    if not isinstance(kind.name, str) or not kind.name.isprintable() or not 0 < len(kind.name) <= 100:
        return "its name must be a printable text of 1 to 100 characters"
    if not kind.fields or len(set(kind.fields)) != len(kind.fields):
        return "fields must name the payload's stable fields, each once; without one, a changed payload is not seen"
    if kind.order_by is not None and not kind.fence and kind.tombstone is None:
        return (
            "order_by needs a recipient that refuses lower numbers (fence=True) or one that can be told never to act "
            "on a call (tombstone=…); a lease here cannot stop a late call that is already on its way there (ADR-007)"
        )
    if kind.fence and kind.order_by is None:
        return "fence=True needs order_by: a fence is a number per resource"
    if isinstance(kind.order_by, str) and kind.order_by not in kind.fields:
        return f"order_by names {kind.order_by!r}, which is not among its fields: the resource must not change"
    if kind.give_up_after <= 0 or kind.in_flight < 0 or kind.outside_lease <= 0:
        return "give_up_after and outside_lease must be above 0 seconds, in_flight 0 or more"
    return None


def _other(kind: Kind) -> str | None:
    """Two different meanings under one name would read each other's rows."""
    known = _declared.get(kind.name)
    if known is None:
        return None
    same_order = known.order_by == kind.order_by or (callable(known.order_by) and callable(kind.order_by))
    if (known.fields, known.fence) == (kind.fields, kind.fence) and same_order:
        return None  # the same module, imported twice
    return "another kind has this name and other fields or another order; choose another name"


def find(name: str) -> Kind | None:
    """The declaration of this name in this process."""
    return _declared.get(name)


def names() -> list[str]:
    """Every kind declared in this process."""
    return sorted(_declared)
