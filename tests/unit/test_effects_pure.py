"""Fingerprints, declarations and decisions: everything about effects that needs no database."""

from __future__ import annotations

import enum
import json
import pickle
import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgtruth_transport import effects
from pgtruth_transport.effects import policy
from pgtruth_transport.effects.errors import FINAL
from pgtruth_transport.effects.fingerprint import canonical, checked_key, fingerprint
from pgtruth_transport.effects.states import MOVES, EffectState


class Colour(enum.Enum):
    RED = "red"


class Name(str):
    """A text of a subclass, as ORMs and settings libraries hand them out."""


#: The rules, frozen: an effect begun years ago by another Python must be recognised.
CANONICAL: list[tuple[Any, str]] = [
    (None, "null"),
    (True, "true"),
    (0, "0"),
    (-12345678901234567890, "-12345678901234567890"),
    ("é", r'"\u00e9"'),
    ("e\u0301", r'"e\u0301"'),
    ("\U0001f600", r'"\ud83d\ude00"'),
    ("\x00\ud800", r'"\u0000\ud800"'),
    (Name("n"), '"n"'),
    (Colour.RED, '"red"'),
    (Decimal("10.00"), '"10"'),
    (Decimal("1E+3"), '"1000"'),
    (Decimal("-0.00"), '"0"'),
    (Decimal("0.10"), '"0.1"'),
    (Decimal("12345678901234567890123456789012345678.50"), '"12345678901234567890123456789012345678.5"'),
    (datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), '"2026-01-02T03:04:05.000006Z"'),
    (datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=5))), '"2026-01-01T22:04:05.000000Z"'),
    (date(2026, 1, 2), '"2026-01-02"'),
    (timedelta(days=1, microseconds=3), '"86400000003us"'),
    (timedelta(microseconds=-1), '"-1us"'),
    (uuid.UUID(int=7), '"00000000-0000-0000-0000-000000000007"'),
    (b"\x00\xff", '"00ff"'),
    ((1, [2, "x"]), '[1,[2,"x"]]'),
    ({"b": 1, "a": {"z": None}, "\u00e9": 0}, r'{"a":{"z":null},"b":1,"\u00e9":0}'),
]


@pytest.mark.parametrize(("value", "text"), CANONICAL)
def test_canonical_form(value: Any, text: str) -> None:
    assert canonical({"f": value, "ignored": object()}, ["f"]).decode() == f'{{"f":{text}}}'


def test_known_fingerprints() -> None:
    """Known answers: if one of these changes, every stored effect of every user is a conflict."""
    text = canonical({"order_id": "7", "amount": Decimal("10.50"), "lines": [1, 2]}, ["order_id", "amount", "lines"])
    assert text == b'{"amount":"10.5","lines":[1,2],"order_id":"7"}'
    assert fingerprint(text) == "c9d01f8939dc37184fd5e564e3bb2b3bf859ebfffda8d909f3108dc14e214f32"
    assert fingerprint(b"{}") == "91b0091248b6ee202c108f3e61a854c9a4b26d38e9e056a5adfc7127b02b1948"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "lacks the declared field.s. 'f'"),
        ({"f": 1.5}, "'f' is a float"),
        ({"f": {"a": [1, 2.0]}}, r"'f\.a\[1\]' is a float"),
        ({"f": Decimal("NaN")}, "only finite"),
        ({"f": datetime(2026, 1, 1)}, "without a time zone"),
        ({"f": {1: 2}}, "a key of type int"),
        ({"f": {1, 2}}, "is a set"),
        ({"f": object()}, "is a object"),
    ],
)
def test_what_has_no_stable_form_is_refused(payload: Any, message: str) -> None:
    with pytest.raises(effects.PayloadRefused, match=message):
        canonical(payload, ["f"])


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.decimals(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(payload=st.dictionaries(st.text(), _json))
def test_the_order_of_keys_never_matters_and_the_text_is_stable(payload: dict[str, Any]) -> None:
    fields = list(payload)
    text = canonical(payload, fields)
    assert text == canonical(dict(reversed(payload.items())), fields[::-1])
    plain = json.loads(text)
    assert canonical(plain, list(plain)) == text
    assert text.isascii()


@pytest.mark.parametrize("key", ["", None, 7, "a\x00b", "\ud800", "é" * 501])
def test_keys_that_cannot_be_stored_are_refused(key: Any) -> None:
    with pytest.raises(effects.PayloadRefused, match="key"):
        checked_key(key)


def _yes(effect: effects.Effect) -> effects.Applied:
    return effects.Applied()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"fields": ("r",), "order_by": "r"}, "refuses lower numbers .*tombstone.*ADR-007"),
        ({"fields": ("r",), "order_by": "r", "reconcile": _yes}, "refuses lower numbers"),
        ({"fields": ("r",), "fence": True}, "needs order_by"),
        ({"fields": ("a",), "order_by": "r", "fence": True}, "not among its fields"),
        ({"fields": ()}, "stable fields"),
        ({"fields": ("a", "a")}, "each once"),
        ({"fields": ("a",), "give_up_after": 0}, "give_up_after"),
        ({"fields": ("a",), "in_flight": -1}, "in_flight"),
    ],
)
def test_a_declaration_that_cannot_keep_the_promise_is_refused(how: Any, message: str) -> None:
    with pytest.raises(effects.DeclarationRefused, match=message):
        effects.declare("tests.refused", **how)


def test_order_needs_a_fence_or_a_tombstone() -> None:
    fenced = effects.declare("tests.fenced", fields=("r", "n"), order_by="r", fence=True)
    buried = effects.declare("tests.buried", fields=("r",), order_by=lambda fields: f"x{fields['r']}", tombstone=_yes)
    request = fenced.request("k", {"r": 7, "n": 1})
    assert (request.resource, request.numbered, request.exclusive) == ("r=7", True, False)
    request = buried.request("k", {"r": 7})
    assert (request.resource, request.numbered, request.exclusive) == ("x7", True, True)


def test_one_name_means_one_thing() -> None:
    effects.declare("tests.name", fields=("a",))
    effects.declare("tests.name", fields=("a",), reconcile=_yes)
    with pytest.raises(effects.DeclarationRefused, match="choose another name"):
        effects.declare("tests.name", fields=("a", "b"))


def test_waits_grow_by_half_up_to_a_minute() -> None:
    assert [policy.wait_for(age, 0) for age in (0, 1, 4, 60, 1e6)] == [1, 1, 2, 30, 60]
    assert 0.8 <= policy.wait_for(0) <= 1.2


@pytest.mark.parametrize(
    ("answer", "age", "sealed", "believed"),
    [
        (effects.Applied(1), 0, False, effects.Applied),
        (effects.STILL_UNKNOWN, 1e6, True, effects.StillUnknown),
        (effects.NO_EFFECT, 29, False, effects.StillUnknown),
        (effects.NO_EFFECT, 30, False, effects.NotApplied),
        (effects.NO_EFFECT, 0, True, effects.NotApplied),
    ],
)
def test_not_found_is_believed_when_nothing_can_arrive_any_more(
    answer: Any, age: float, sealed: bool, believed: type
) -> None:
    kind = effects.declare("tests.believe", fields=("a",), in_flight=30)
    assert type(policy.believe(kind, answer, age, sealed=sealed)) is believed


def test_moves_name_every_state_and_applied_is_the_end() -> None:
    assert set(MOVES) == set(EffectState)
    assert MOVES[EffectState.APPLIED] == {}


@pytest.mark.parametrize("kind", [*FINAL, effects.NoEffect, effects.EffectUnknown, effects.EffectWaiting])
def test_errors_survive_the_way_to_another_process(kind: type[effects.EffectError]) -> None:
    error = pickle.loads(pickle.dumps(kind("text", key="k")))
    assert (type(error), str(error), error.key) == (kind, "text", "k")
