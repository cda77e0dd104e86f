"""How much a worker takes, what it looks away from, and what it may take back: pure decisions."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.asynchronous.semaphore import LaxBoundedSemaphore

from pgtruth_transport.worker.held import Strangers, look_ahead
from pgtruth_transport.worker.takeback import can_take_back, take_back, was_dropped


@pytest.mark.parametrize(
    ("slots", "pace", "multiplier", "ahead"),
    [
        (2, None, 4, 0),  # unknown: one long task must not hide work
        (2, 1.0, 4, 0),
        (2, 6.0, 4, 3),  # half a second of work
        (2, 2000.0, 4, 8),  # bounded by the multiplier
        (8, 2000.0, 1, 0),  # the most urgent is next
        (8, 100.0, 0, 50),  # 0: no such bound
    ],
)
def test_half_a_second_of_work_is_taken_ahead(slots: int, pace: float | None, multiplier: int, ahead: int) -> None:
    assert look_ahead(slots, pace, multiplier) == ahead


def test_a_stranger_is_left_alone_longer_each_time() -> None:
    strangers = Strangers()
    assert strangers.away(0) == ()
    waits, now = [], 0.0
    for _ in range(7):
        waits.append(strangers.meet("new.task", now))
        assert strangers.away(now + waits[-1] - 0.01) == ("new.task",)
        now += waits[-1]
        assert strangers.away(now) == ()
    assert waits == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    ("module", "can"),
    [
        ("celery.concurrency.prefork", True),
        ("celery.concurrency.thread", True),
        ("celery.concurrency.solo", False),
        ("celery.concurrency.gevent", False),
    ],
)
def test_only_pools_with_a_line_are_given_jobs_ahead(module: str, can: bool) -> None:
    pool = type("TaskPool", (), {"__module__": module})()
    assert can_take_back(pool) is can


def held(**request: Any) -> Any:
    """A held job whose body has not started."""
    fields = {"future": None, "sent": None, **request}
    return SimpleNamespace(request=SimpleNamespace(**fields), accepted_at=None)


def consumer(semaphore: Any = None) -> Any:
    """A consumer with the pool's semaphore."""
    return SimpleNamespace(controller=SimpleNamespace(semaphore=semaphore))


def test_a_job_that_waits_for_a_slot_is_taken_back_and_leaves_the_line() -> None:
    line, started = LaxBoundedSemaphore(1), list[Any]()
    first, second, third = held(), held(), held()
    for item in (first, second, third):
        line.acquire(started.append, item.request)
    assert not take_back(consumer(line), first)  # it has the slot
    assert take_back(consumer(line), second)
    line.release()
    assert started == [first.request, third.request]


def test_a_job_whose_thread_has_begun_stays() -> None:
    waiting, begun = Future[None](), Future[None]()
    begun.set_running_or_notify_cancel()
    assert take_back(consumer(), held(future=waiting))
    assert not take_back(consumer(), held(future=begun))
    assert not was_dropped(held(future=begun))


def test_a_job_that_waits_for_a_rate_limit_stays() -> None:
    assert not take_back(consumer(LaxBoundedSemaphore(1)), held())


def test_what_was_written_to_a_child_was_not_dropped() -> None:
    assert was_dropped(held(sent=SimpleNamespace(_write_to=None)))
    child = SimpleNamespace(_is_alive=lambda: True)
    assert not was_dropped(held(sent=SimpleNamespace(_write_to=child, _cache={}, _job=1)))
