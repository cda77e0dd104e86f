"""Charging a card and telling the shipping system: effects outside the database that must happen once.

Both go through the effect ledger. The gateway here (``celery_app.gateway``) acts as often as it is asked, cuts lines
and answers too late; still each order is charged once, and a late word about an order never overtakes a newer one.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from celery import shared_task

from pgtruth_transport import effects

#: Answers that the gateway documents as "nothing was done, and nothing will be": declined, overtaken, buried.
DEFINITE_REFUSALS = {402, 409, 410}


def look_up(effect: effects.Effect) -> effects.Applied | effects.NotApplied:
    """Ask the gateway what became of an effect. The fence goes with the question, so that an older call stays out."""
    query = {"resource": effect.resource, "fence": effect.fence} if effect.fence is not None else {}
    try:
        return effects.Applied(_ask("GET", f"/acts/{urllib.parse.quote(effect.key, safe='')}", query=query))
    except urllib.error.HTTPError as exc:
        if exc.code == 404:
            return effects.NO_EFFECT
        raise


def bury(effect: effects.Effect) -> effects.Applied | effects.NotApplied:
    """Have the gateway promise that this call and earlier ones will never act; or learn that one has."""
    answer = _ask("PUT", "/tombstones", {"key": effect.key, "number": effect.number})
    if "applied" in answer:
        return effects.Applied(answer["applied"])
    return effects.NotApplied("the gateway keeps a tombstone for this call")


charge = effects.declare("charge", fields=("order_id", "cents", "currency"), reconcile=look_up, tombstone=bury)

shipping = effects.declare(
    "shipping", fields=("order_id", "status"), reconcile=look_up, order_by="order_id", fence=True
)


@shared_task
def charge_order(order_id: str, cents: int, currency: str = "EUR") -> str:
    """Charge the order's card once, however often this runs, and return the gateway's receipt."""
    order = {"order_id": order_id, "cents": cents, "currency": currency}
    receipt = charge.apply(f"charge:{order_id}", order, _send)
    return str(receipt["receipt"])


@shared_task
def tell_shipping(order_id: str, status: str) -> str:
    """Tell the shipping system an order's new status; of two words about one order the later one stands."""
    told = shipping.apply(f"shipping:{order_id}:{status}", {"order_id": order_id, "status": status}, _send)
    return str(told["receipt"])


def _send(effect: effects.Effect) -> Any:
    """One call of the gateway. What is no definite refusal is left as it is: then the effect is unknown."""
    body = {**effect.payload, "key": effect.key, "number": effect.number}
    if effect.fence is not None:
        body |= {"resource": effect.resource, "fence": effect.fence}
    try:
        return _ask("POST", "/acts", body)
    except urllib.error.HTTPError as exc:
        if exc.code in DEFINITE_REFUSALS:
            raise effects.NoEffect(f"the gateway answered {exc.code}") from exc
        raise


def _ask(method: str, path: str, body: dict[str, Any] | None = None, query: dict[str, Any] | None = None) -> Any:
    base = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8555")
    timeout = float(os.environ.get("GATEWAY_TIMEOUT", "5"))
    request = urllib.request.Request(
        base + path + ("?" + urllib.parse.urlencode(query) if query else ""),
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as exc:
        exc.close()  # the status is all that matters; the error would keep the line open
        raise
