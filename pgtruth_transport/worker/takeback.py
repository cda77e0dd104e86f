"""Taking a claimed job back from the pool's line before its body starts.

Promises: a job is taken back only if no body can start for it any more, so giving it to another worker never makes a
second run. Where that is not certain it stays, and runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from celery.concurrency.asynpool import SCHED_STRATEGY_FAIR

from .held import Held


def can_take_back(pool: Any) -> bool:
    """Whether jobs wait for this pool in a line that they can leave; the others are given only what they start at once.

    A solo pool starts a body in the loop's own thread, a green pool blocks the loop while it is full.
    """
    module = type(pool).__module__
    return "prefork" in module or "thread" in module


def take_back(consumer: Any, held: Held) -> bool:
    """Take ``held`` out of the line before the pool; ``False`` if its body has started or may start any moment.

    Called in the loop's thread. What waits for a rate limit stays where it is.
    """
    request = held.request
    if request is None or held.accepted_at is not None:
        return False
    if request.future is not None:
        return bool(request.future.cancel())
    semaphore = getattr(consumer.controller, "semaphore", None)
    if semaphore is None:
        return False
    for waiter in list(semaphore._waiting):
        if waiter[1] and waiter[1][0] is request:
            semaphore._waiting.remove(waiter)
            return True
    return False


def was_dropped(held: Held) -> bool:
    """Whether Celery, which has stopped consuming, has dropped ``held`` from its own lines and the pool's."""
    request = held.request
    if request is None:
        return True
    if request.future is not None:
        return bool(request.future.cancel())
    sent = request.sent
    if sent is None:
        return True
    if not hasattr(sent, "_write_to"):
        return False
    if sent._write_to is None:  # billiard's asynchronous pool notes the process that it was written to
        return True
    vars(sent).pop("discard", None)
    child = vars(sent).pop("sent_to", sent._write_to)
    if child._is_alive() or sent.ready():
        return False
    sent.discard()  # it was sent to a child that was about to leave, and no other will be sent it
    return True


def has_reported(pool: Any, pid: int | None) -> bool:
    """Whether pool child ``pid`` has sent something that nobody has read yet: of a body that runs, how it has ended."""
    children = getattr(getattr(pool, "_pool", None), "_pool", None) or ()
    for child in children:
        if child.pid == pid:
            reader = getattr(getattr(child, "outq", None), "_reader", None)
            return reader is not None and not reader.closed and bool(reader.poll(0))
    return False


def forget_limits(pool: Any, sent: Any) -> None:
    """Cancel the time limits of a body that has ended: they would pass before its report is read."""
    if sent is None:
        return
    sent._timeout = sent._soft_timeout = 0  # None would be the pool's own
    cancel = getattr(pool._pool, "on_timeout_cancel", None)
    if cancel is not None:
        cancel(sent)


def send_now(consumer: Any) -> None:
    """Write what a prefork pool was just given to its idle children: Celery's loop would, a round later.

    A stop of the worker in between would empty the pool's line. Not to be called when bodies have just ended: such a
    child may be about to leave, which the loop sees first.
    """
    children: Any = getattr(consumer.pool, "_pool", None)
    if getattr(children, "outbound_buffer", None) and children.sched_strategy == SCHED_STRATEGY_FAIR:
        idle = children._all_inqueues - children._busy_workers
        if idle:
            consumer.hub.consolidate_callback(list(idle))


def keep_sent(pool: Any, held: Callable[[], Iterable[Held]]) -> None:
    """Have the pool go on listening for what its children were sent, when Celery stops consuming and empties it.

    Celery's flush forgets what no child has confirmed yet (before 5.6.3 also what runs), because other brokers deliver
    that again. Here it is held, and a child may be running it: nobody would hear how it ends.
    """
    flush, children = pool.flush, pool._pool
    if not hasattr(children, "outbound_buffer") or hasattr(flush, "keeps_sent"):
        return

    def keeping() -> None:
        for back in children.outbound_buffer:  # not the pool's own name for it: a cold shutdown has stopped that
            back._write_to = None  # put back when its child left: no child has it, and the flush forgets it
        for item in held():
            sent: Any = item.request.sent if item.request is not None else None
            if getattr(sent, "_write_to", None) is not None:
                sent.discard = lambda: None
                sent.sent_to = sent._write_to  # billiard names the next child whose pipe gets the same number
        kept = {
            number: result
            for number, result in children._cache.items()
            if getattr(result, "_accepted", False) or hasattr(result, "sent_to")
        }
        flush()
        children._cache.update({number: result for number, result in kept.items() if not result.ready()})

    keeping.keeps_sent = True  # type: ignore[attr-defined]
    pool.flush = keeping
