"""The demo's view of the payment gateway: how it is made to misbehave, and what it did in the end.

The figures come from the gateway's own book, not from our tables.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: How the gateway treats the first call for some of the orders. In the first three it acts and never says so.
MISBEHAVIOUR = ("hang", "reset", "late", "error", "down")


@dataclass(frozen=True, slots=True)
class Charges:
    """What the gateway did for the demo's orders."""

    made: dict[str, int]  # order -> charges: one each, if all is well
    calls: int  # how often it was asked to charge

    @property
    def wrong(self) -> frozenset[str]:
        """Orders that were not charged exactly once."""
        return frozenset(order for order, charges in self.made.items() if charges != 1)


def misbehave(gateway: str) -> int:
    """Make the gateway fail in each of its ways for one order each; returns how many."""
    for number, behaviour in enumerate(MISBEHAVIOUR):
        _ask(gateway, "/admin/behave", {"key": f"charge:order-{number}", "behaviours": [behaviour]})
    return len(MISBEHAVIOUR)


def read(gateway: str, orders: Iterable[str]) -> Charges:
    """Ask the gateway."""
    acts = Counter(act["key"] for act in _ask(gateway, "/acts"))
    requests: dict[str, int] = _ask(gateway, "/admin/requests")
    calls = sum(count for key, count in requests.items() if key.startswith("charge:"))
    return Charges({order: acts[f"charge:{order}"] for order in orders}, calls)


def _ask(gateway: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(gateway + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return json.load(answer)
