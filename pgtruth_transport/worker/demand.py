"""What a worker looks for, and for how many jobs it has room."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .. import lifecycle
from .held import Pace, Strangers, look_ahead
from .takeback import can_take_back

#: ``max_retries=None``: as many retries as an integer column can count.
UNBOUNDED = 2**31 - 1


class Demand:
    """``in_flight`` says how many bodies are running or about to."""

    def __init__(self, app: Any, consumer: Any, in_flight: Callable[[], int]) -> None:
        self._app = app
        self._consumer = consumer
        self._in_flight = in_flight
        self.queues: tuple[str, ...] = ()
        self.pace = Pace()
        self.strangers = Strangers()
        self._rotation = 0
        self._knowledge: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[int, ...]] = ((), (), (), ())

    def learn_tasks(self) -> None:
        """Note what the claim must know of the registered tasks."""
        early, started, limit_tasks, limits = list[str](), list[str](), list[str](), list[int]()
        for name, task in self._app.tasks.items():
            if not task.acks_late:
                early.append(name)
            if task.track_started and not task.ignore_result:
                started.append(name)
            own = _own_max_retries(task)
            if own is not None:
                limit_tasks.append(name)
                limits.append(own)
        self._knowledge = tuple(early), tuple(started), tuple(limit_tasks), tuple(limits)

    def slots(self) -> int:
        """How many bodies may run at once (the most that an autoscaler may grow to); none once the pool is gone."""
        most = getattr(self._consumer.controller, "max_concurrency", None)
        pool = self._consumer.pool
        try:
            if getattr(pool, "is_green", False):  # whose own word, before Celery 5.7, is how many greenlets run now
                return int(most or pool._pool.size or 0)
            return int(most or pool.num_processes or 0)
        except AttributeError:  # Celery asks the pool's own pool, which is None after a stop
            return 0

    def room(self) -> int:
        """How many bodies could start now."""
        return max(0, self.slots() - self._in_flight())

    def free(self) -> int:
        """How many more jobs it could hold, running or in line; negative if it holds too many."""
        slots = self.slots()
        multiplier = int(self._consumer.prefetch_multiplier or 0)
        pace = self.pace() if can_take_back(self._consumer.pool) else None
        return slots + look_ahead(slots, pace, multiplier) - self._in_flight()

    def enough(self, want: int) -> int:
        """How many claimed jobs, of those wanted, say that there may be more.

        Tasks that are acknowledged early are not claimed ahead: fewer than wanted may still not be all.
        """
        return min(want, self.room()) if self._knowledge[0] else want

    def search(self) -> lifecycle.Search:
        """Priority 9 first over all queues; within a priority the queues take turns."""
        queues = self.queues[self._rotation :] + self.queues[: self._rotation]
        self._rotation = (self._rotation + 1) % max(1, len(queues))
        priorities = tuple([priority for priority in range(9, -1, -1) for _ in queues])
        strangers = self.strangers.away(time.monotonic())
        return lifecycle.Search(queues * 10, priorities, *self._knowledge, strangers, self.room())


def _own_max_retries(task: Any) -> int | None:
    """The ``max_retries`` that a task class sets itself (its ``None``: no bound); ``None`` for Celery's default."""
    for cls in type(task).__mro__:
        if cls.__module__.startswith("celery.app.task") or cls is object:
            return None
        if "max_retries" in vars(cls):
            found = vars(cls)["max_retries"]
            return int(found) if found is not None else UNBOUNDED
    return None
