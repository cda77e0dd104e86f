"""Two threads of a worker process that no full pool and no busy loop can hold up: the lease keeper and the duties.

Promises: a lease is renewed when a third of it is left, batched, on a connection of its own, for as long as this
process lives; a job of up to two thirds of the lease is never renewed. A renewal that finds the authority gone tells
the worker. While the database is away the keeper tries again at every tick and says so once; nothing that it holds is
given up before the database says that it is gone. Whichever worker (or beat) comes first after ``reap_interval``
sweeps. If this process dies, both threads die with it, and others reap what it held.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from celery.utils.log import get_logger

from .. import lifecycle, reaper
from ..db import CONNECTION_ERRORS, Connection, retrying
from ..transport.entities import Entities
from .core import Worker

logger = get_logger(__name__)

#: Seconds between two looks at the leases.
TICK = 0.5


class Duty(threading.Thread):
    """A daemon thread that calls ``work`` every ``interval`` seconds until it is stopped. It survives errors."""

    def __init__(self, name: str, interval: Callable[[], float], work: Callable[[], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._interval, self._work = interval, work
        self._stopped = threading.Event()
        self._trouble = ""

    def run(self) -> None:
        while not self._stopped.wait(self._interval()):
            try:
                self._work()
            except CONNECTION_ERRORS as exc:
                self._complain(f"{self.name}: the database is out of reach, trying on: {exc}")
            except Exception as exc:
                logger.exception("%s failed", self.name)
                self._trouble = str(exc)
            else:
                if self._trouble:
                    logger.warning("%s: works again", self.name)
                self._trouble = ""

    def _complain(self, trouble: str) -> None:
        if not self._trouble:
            logger.warning("%s", trouble.strip().splitlines()[0])
        self._trouble = trouble

    def stop(self) -> None:
        """Ask the thread to end; does not wait for a statement in flight."""
        self._stopped.set()


class LeaseKeeper:
    """Renews what the worker holds."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._conn: Connection | None = None
        self._touch_at = 0.0

    def keep(self) -> None:
        """One look: renew what is due, tell the worker what is lost or has overrun its time limit."""
        now = time.monotonic()
        worker = self._worker
        self._renew(now)
        for held in [h for h in list(worker.held.values()) if h.deadline is not None and h.deadline <= now]:
            worker.timed_out(held)
            if worker.runs_in_loop():
                worker.settle_now()
        if now >= self._touch_at:
            Entities.of(worker.database).touch(self._connection(), worker.transient_queues())
            self._touch_at = now + 2.0  # not before: while the database is away every look finds it so

    def _renew(self, now: float) -> None:
        worker = self._worker
        due = worker.leases_due(now)
        if not due:
            return
        leases = [held.attempt.lease for held in due]
        try:
            kept = retrying(lambda: lifecycle.renew(self._connection(), worker.database, leases, worker.owner))
        except CONNECTION_ERRORS:
            self.close()
            raise
        for held in due:
            if held.key in kept:
                held.renew_at = now + worker.settings.lease_seconds * 2 / 3
            elif held.concluded:
                held.renew_at = now + worker.settings.lease_seconds
            elif held.doubted:
                worker.lost(held)
            else:
                held.doubted = True  # its child may have settled it itself: look again at the next tick

    def _connection(self) -> Connection:
        if self._conn is None or self._conn.closed:
            self._conn = self._worker.database.open("lease")
            self._conn.patience = self._worker.settings.lease_seconds / 3
        return self._conn

    def close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()


def _sweep(worker: Worker) -> None:
    worker.settler.flush_counts()
    reaper.sweep_if_due(worker.app, worker.database, worker.signal, worker.owner)


def start(worker: Worker) -> list[Duty]:
    """Start the keeper and the duties of ``worker``."""
    interval = worker.settings.reap_interval
    keeper = LeaseKeeper(worker)
    threads = [
        Duty("pgtruth lease keeper", lambda: min(TICK, worker.settings.lease_seconds / 10), keeper.keep),
        Duty(
            "pgtruth sweep",
            lambda: interval * random.uniform(0.5, 1.0) / 2,
            lambda: _sweep(worker),
        ),
    ]
    for thread in threads:
        thread.start()
    return threads
