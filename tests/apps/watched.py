"""``tests.apps.basic`` in a worker that says after each turn what the pool has still not been sent."""

from __future__ import annotations

import logging
from typing import Any

from pgtruth_transport.worker.core import Worker
from tests.apps.basic import app

__all__ = ["app"]

_turn = Worker.turn


def turn(self: Worker, **options: Any) -> int:
    taken = _turn(self, **options)
    if taken:
        unsent = len(self.consumer.pool._pool.outbound_buffer)
        logging.getLogger("celery.worker").info("turn: %d taken, %d unsent", taken, unsent)
    return taken


Worker.turn = turn  # type: ignore[method-assign]
