"""Which messages a revoke by stamps means, as Celery's worker judges it."""

from __future__ import annotations

from typing import Any

import pytest

from pgtruth_transport.control import has_stamp

HEADERS: dict[str, Any] = {"stamped_headers": ["tenant", "run"], "stamps": {"tenant": ["acme", "zeta"], "run": 7}}


@pytest.mark.parametrize(
    ("headers", "wanted", "expected"),
    [
        (HEADERS, {"tenant": "acme"}, True),
        (HEADERS, {"tenant": ["other", "zeta"]}, True),
        (HEADERS, {"tenant": ["other"]}, False),
        (HEADERS, {"run": 7}, True),
        (HEADERS, {"run": [7, 8]}, True),
        (HEADERS, {"run": "7"}, False),
        (HEADERS, {"elsewhere": "acme"}, False),
        (HEADERS, {"elsewhere": "acme", "run": 7}, True),
        ({"stamped_headers": None, "stamps": {}}, {"tenant": "acme"}, False),
        ({"stamped_headers": ["tenant"]}, {"tenant": "acme"}, False),
        ({}, {"tenant": "acme"}, False),
    ],
)
def test_a_stamp_matches_by_name_and_any_of_its_values(
    headers: dict[str, Any], wanted: dict[str, Any], expected: bool
) -> None:
    assert has_stamp(headers, wanted) is expected
