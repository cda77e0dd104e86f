"""``tests.apps.basic`` with tasks that have effects, on the gateway that ``GATEWAY_URL`` names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from celery import Task

from pgtruth_transport import effects
from tasks import payments
from tests.apps.basic import app, record

#: Nobody can be asked about it, and its jobs do not wait long.
hopeless = effects.declare("hopeless", fields=("n",), give_up_after=2)


@app.task(bind=True)
def pay(self: Task, order_id: str, cents: int) -> Any:
    """Recorded; charges."""
    record(self.request.id, "start")
    return payments.charge_order(order_id, cents)


@app.task(bind=True)
def pay_when(self: Task, order_id: str, cents: int, file: str) -> Any:
    """Recorded; charges once ``file`` is there."""
    record(self.request.id, "start")
    while not Path(file).exists():
        time.sleep(0.02)
    try:
        return payments.charge_order(order_id, cents)
    except effects.StaleAttempt:
        record(self.request.id, "stale")
        raise


@app.task(bind=True)
def give_up(self: Task, key: str) -> None:
    """Recorded; its call fails, and then nobody knows."""
    record(self.request.id, "start")
    hopeless.apply(key, {"n": 1}, _fail)


def _fail(effect: effects.Effect) -> None:
    raise TimeoutError("no answer")
