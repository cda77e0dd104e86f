"""The short way to the repr of plain arguments says what Celery's says, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from celery.utils.saferepr import saferepr
from hypothesis import given
from hypothesis import strategies as st

from pgtruth_transport.amqp import simple_repr

ITEMS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.integers()))


@given(st.one_of(st.lists(ITEMS), st.lists(ITEMS).map(tuple), st.dictionaries(st.text(), ITEMS)))
def test_it_agrees_with_celerys_or_leaves_it_to_it(arguments: Any) -> None:
    assert simple_repr(arguments) in (None, saferepr(arguments, 1024))


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2.5, None, True), [1], [], {}, ("a\n\\", "ü ☃"), ("",)])
def test_plain_arguments_go_the_short_way(arguments: Any) -> None:
    assert simple_repr(arguments) == saferepr(arguments, 1024)


@pytest.mark.parametrize("arguments", [("it's",), ("x" * 65,), (10**18,), (b"",), ([],), {"a": 1}, (1,) * 9, None, "a"])
def test_others_do_not(arguments: Any) -> None:
    assert simple_repr(arguments) is None
