"""The worker's side of the queue, one per worker process: take jobs, hand them to Celery, settle what they leave.

Promises: a job is handed to the pool only by an attempt that holds it; every end is written once, fenced, batched with
the others of the same turn and with the next claim; what the worker holds is renewed by its keeper and given back when
it stops. If this process dies at any point, its leases run out and the jobs run again within their budget. If the
database goes away, what has ended is kept here and settled after the reconnect, if the authority is still ours.

Threads: Celery's loop calls :meth:`Worker.turn`; pool threads call :meth:`Worker.conclude`; the keeper thread renews.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from celery.exceptions import Reject, WorkerLostError
from celery.utils.log import get_logger

from .. import attempts, counters, lifecycle
from ..attempts import Attempt
from ..db import CONNECTION_ERRORS, Database, retrying
from ..jobs import Job, Lease, Requeue, described, readable
from ..publish import wake_quietly
from ..settings import Settings
from ..signals import Signal
from ..states import Outcome
from .demand import Demand
from .held import LOOK_AHEAD_SECONDS, Held
from .settle import DEFERRED, Settler
from .takeback import send_now, take_back, was_dropped

logger = get_logger(__name__)

#: How long an outcome may wait for others while the pool still has work ahead of it. Seconds.
SETTLE_WAIT = 0.01


class Worker:
    """What one Celery worker process holds and does."""

    def __init__(self, app: Any, consumer: Any, settings: Settings, database: Database, wake_up: Signal) -> None:
        self.app = app
        self.consumer = consumer
        self.settings = settings
        self.database = database
        self.signal = wake_up
        # unique per process start: a restarted worker of the same name never inherits its predecessor's leases
        self.owner = f"{consumer.hostname}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.settler = Settler(self)
        self.demand = Demand(app, consumer, self.in_flight)
        self.held: dict[tuple[str, int], Held] = {}
        self.deliver: Callable[[Job], None] | None = None  # set by the transport that consumes
        self.request_turn: Callable[[float], None] | None = None  # ask the loop for a turn in that many seconds
        self.transient_queues: Callable[[], list[str]] = list  # set by the transport: kept alive by the keeper
        self.draining = False  # shutting down: nothing is claimed, ends are settled at once
        self._ended: deque[Held] = deque()
        self._overrun: set[tuple[str, int]] = set()  # settled as timed out, but the body still runs in its slot
        self._woken = False  # by a signal, and has not looked since
        self._hungry = True  # the last claim filled every slot, or something has changed since
        self._lock = threading.RLock()  # over what is held and what has ended; never kept while waiting for the server
        self._turn_lock = threading.RLock()  # one turn at a time
        self.restored = 0  # jobs given back by a stop, since that was logged
        self.next_due: float | None = None  # seconds, as of the last claim that found nothing

    # What the consumer tells.

    def consume(self, queues: Iterable[str]) -> None:
        """The task queues to claim from, from now on."""
        self.demand.queues = tuple(dict.fromkeys(queues))
        self.hungry()

    @property
    def queues(self) -> tuple[str, ...]:
        """The task queues that it claims from."""
        return self.demand.queues

    def hungry(self, *, woken: bool = False) -> None:
        """Something may be claimable: a signal came (``woken``), the poll is due, a queue was added."""
        self._hungry = True
        self._woken = self._woken or woken
        if self.request_turn is not None and not self.draining and self.demand.free() > 0:
            self.request_turn(0)

    # Capacity.

    def in_flight(self) -> int:
        """How many bodies are running or about to; also those that overran their limit and cannot be stopped."""
        return len(self.held) - len(self._ended) + len(self._overrun)

    def busy(self) -> bool:
        """Whether it could not take anything more now."""
        return self.demand.free() <= 0

    def give_back_waiting(self) -> None:
        """Give back what was taken ahead, where the pool does not move any more: another worker may be idle."""
        if self.demand.pace() is not None or self.draining:
            return
        too_long = time.monotonic() - 2 * LOOK_AHEAD_SECONDS
        for held in self.unstarted():
            if held.taken_at <= too_long and take_back(self.consumer, held):
                logger.info("%s[%s]: given back, the pool is busy with longer tasks", held.job.task, held.job.id)
                self.release(held)

    def wanted(self) -> int:
        """How many jobs the next turn should claim."""
        if self.draining or not self._hungry or not self.queues or self.deliver is None:
            return 0
        return max(0, self.demand.free())

    # The turn.

    def turn(self, *, claim: bool = True) -> int:
        """Settle everything that has ended and claim for the free slots, in one transaction; hand over the claimed.

        Returns how many jobs were handed over. Raises the database's connection errors, with nothing forgotten.
        """
        with self._turn_lock:
            with self._lock:
                due = float("inf") if self.draining else time.monotonic()
                batch = [held for held in self._ended if not held.closing and held.settle_at <= due]
                if any(held.attempt.rows for held in batch):
                    self._hungry = True  # for what follows, in the same transaction
                want = self.wanted() if claim else 0
                enough = self.demand.enough(want)
            if not batch and not want:
                return 0
            jobs = self.settler.run(batch, want)  # without the lock: the keeper and the pool never wait for it
            self._forget([held for held in batch if not held.settle_at])
            if any(held.settle_at for held in batch) and self.request_turn is not None:
                self.request_turn(DEFERRED)
            if want:
                self._hungry = len(jobs) >= enough
                if self._woken and not jobs:
                    self.settler.count(counters.WAKEUPS_IGNORED)
                self._woken = False
            if not self.held and not jobs:
                self.demand.pace.idle()
            taken = [self._take(job) for job in jobs]
        try:
            for held in taken:
                self._hand_over(held)
        except BaseException:
            for held in taken:
                if held.request is None:
                    self.release(held)  # nobody would ever start it, and its lease would be renewed for ever
            raise
        if taken and not batch:
            send_now(self.consumer)
        return len(taken)

    def check_server(self) -> None:
        """Raise a connection error if the server is away or was restarted, which a full worker would learn late."""
        with self._turn_lock:
            self.settler.check()

    def _forget(self, batch: list[Held]) -> None:
        if not batch:
            return
        with self._lock:
            done = {id(held) for held in batch}
            self._ended = deque(held for held in self._ended if id(held) not in done)
            for held in batch:
                self.held.pop(held.key, None)
        self.demand.pace.ended(len(batch))

    def _take(self, job: Job) -> Held:
        limit = self.settings.retry_limit if job.max_retries is None else job.max_retries
        lease = Lease(job.id, job.lease_version, self.owner, job.claimed_at)
        attempt = Attempt(lease, self.settings, job.retry_count, limit)
        held = Held(job, attempt, time.monotonic() + self.settings.lease_seconds * 2 / 3)
        with self._lock:
            self.held[held.key] = held
        self.demand.pace.started()
        return held

    def _hand_over(self, held: Held) -> None:
        if held.job.task not in self.consumer.strategies:
            self._leave_to_others(held)
            return
        try:
            if self.deliver is None:
                self.release(held)  # the connection went in this very turn
            else:
                self.deliver(held.job)
        except CONNECTION_ERRORS:
            raise
        except Exception as exc:
            logger.exception("%s[%s] cannot be delivered", held.job.task, held.job.id)
            held.attempt.end(attempts.failed(f"the message could not be delivered: {type(exc).__name__}: {exc}"))
            self.conclude(held)

    def _leave_to_others(self, held: Held) -> None:
        """Give back at once a job whose task this worker does not know, and look away from that task for a while."""
        task = held.job.task
        self.settler.count(counters.UNKNOWN_TASKS)
        if task not in self.demand.strangers.away(time.monotonic()):
            seconds = self.demand.strangers.meet(task, time.monotonic())
            logger.warning("%s[%s]: task unknown to this worker, left for another", task, held.job.id)
            logger.info("%s: not taken again for %g s", task, seconds)
        error = f"no worker that took this job knows the task {task!r}"
        held.attempt.ask_requeue(Requeue(Outcome.RELEASED, unknown=True, error=readable(error)))
        self.conclude(held)

    def disown(self) -> None:
        """After a reconnect: give back what a COMMIT without an answer has claimed; nobody else knows of it either."""
        with self._turn_lock, self.database.connection(patience=self.settings.connect_timeout) as conn:
            lost = retrying(lambda: lifecycle.disown(conn, self.database, self.owner, list(self.held)))
        if lost:
            logger.warning("%d job(s) were claimed as the connection was lost: given back", len(lost))
            queues: dict[str, list[str]] = {}
            for job_id, queue in lost:
                queues.setdefault(queue, []).append(job_id)
            wake_quietly(self.signal, queues)

    def held_of(self, message: Any) -> Held | None:
        """The held job that a delivered message belongs to."""
        key = getattr(message, "held_key", None)
        return self.held.get(key) if key is not None else None

    # What Celery and the pool report.

    def accepted(self, held: Held) -> None:
        """The body starts now."""
        held.accepted_at = time.monotonic()
        if held.lost:
            self._stop_lost(held)
        if not self.enforces_limits() and held.request is not None:
            limit = (held.request.time_limits or (None, None))[0] or held.request.task.time_limit
            if limit:
                held.deadline = held.accepted_at + float(limit)

    def enforces_limits(self) -> bool:
        """Whether the pool itself kills a body at its hard time limit."""
        return "prefork" in type(self.consumer.pool).__module__

    def runs_in_loop(self) -> bool:
        """Whether a body runs in the thread of Celery's loop, which takes no turn meanwhile."""
        return "solo" in type(self.consumer.pool).__module__

    def conclude(self, held: Held) -> None:
        """The outcome of ``held`` is known: settle it in the next turn, with the others."""
        with self._lock:
            if held.concluded:
                if held.key in self._overrun:  # at last
                    self._overrun.discard(held.key)
                    self.hungry()
                return
            held.concluded = True
            self._ended.append(held)
            running = self.in_flight()
        if self.draining:
            self._settle_or_keep()
        elif self.request_turn is None:
            return  # no connection: settled when there is one again
        elif running > min(self.demand.slots(), len(self._ended)):
            self.request_turn(SETTLE_WAIT)  # the pool has work ahead: a batch costs a tenth
        else:
            self.request_turn(0)

    def closed(self, held: Held, *, answered: bool) -> None:
        """The report of an end is complete; ``answered``: with an ack or a reject, which may still be on its way."""
        if held.attempt.has_outcome:
            self.conclude(held)
        elif held.answer is not None:
            acknowledged, requeue = held.answer
            held.answer = None
            self.acknowledge(held) if acknowledged else self.reject(held, requeue)
        elif not answered and held.fallback is not None:  # acknowledged before it ran, and no result is kept
            self.acknowledge(held)

    def acknowledge(self, held: Held) -> None:
        """An ack settles whatever is not settled yet; an early one only says that the job may not run again."""
        if held.concluded:
            return
        if held.closing:
            held.answer = (True, False)
            return
        if not held.attempt.has_outcome:
            if held.request is not None and not held.request.task.acks_late and held.fallback is None:
                return  # acknowledged before the body: the outcome is still to come
            if held.request is None:
                held.attempt.end(attempts.failed("the message could not be decoded by the worker"))
            elif held.fallback is not None:
                held.attempt.end(attempts.failed(held.fallback))
            else:
                held.attempt.end(attempts.ignored())
        self.conclude(held)

    def reject(self, held: Held, requeue: bool) -> None:
        """Reject with requeue is a counted failure, without it the end of the job."""
        if held.concluded:
            return
        if held.closing:
            held.answer = (False, requeue)
            return
        if not held.attempt.has_outcome:
            if requeue:
                self.count_failure(held, held.cause or Reject("rejected by the task, to be requeued", requeue=True))
                return
            held.attempt.end(attempts.failed(held.fallback or "rejected"))
        self.conclude(held)

    def failed(self, held: Held, exc: BaseException) -> None:
        """Note why an attempt ended without its own word, for the ack or reject that follows."""
        held.cause, held.fallback = exc, described(exc)

    def retries_time_outs(self, held: Held) -> bool:
        """Whether a hard time limit counts as a failure to be retried (the contract's policy), with budget left."""
        policy = getattr(held.request.task, "truth_retries_failures", False) if held.request else False
        return bool(policy) and held.attempt.retry_count < held.attempt.limit

    def count_failure(self, held: Held, exc: BaseException, delay: float | None = None) -> None:
        """A failure outside the body: requeue while the budget lasts, else fail with everything that follows."""
        attempt = held.attempt
        error = described(exc)
        if attempt.retry_count < attempt.limit:
            attempt.ask_requeue(Requeue(Outcome.RETRIED, attempt.retry_count + 1, delay, error=error))
        else:
            self.fail(held, exc)
        if not held.closing:
            self.conclude(held)

    def fail(self, held: Held, exc: BaseException) -> None:
        """End as failed, through the result backend: errbacks, the rest of the chain and the chord are told."""
        request = held.request
        if request is not None:
            with attempts.ending(held.attempt):
                try:
                    request.task.backend.mark_as_failure(
                        held.job.id, exc, request=request._context, store_result=request.store_errors
                    )
                except Exception:
                    logger.exception("%s[%s]: not all could be told of its end", held.job.task, held.job.id)
        held.attempt.end(attempts.failed(described(exc)))

    def timed_out(self, held: Held) -> None:
        """A body passed its hard limit in a pool that cannot kill it: its end is written now, a late one is stale."""
        from celery.exceptions import TimeLimitExceeded

        with self._lock:
            if held.concluded:
                return
            self._overrun.add(held.key)
        exc = TimeLimitExceeded(held.deadline and held.accepted_at and held.deadline - held.accepted_at)
        held.deadline = None
        logger.error("Hard time limit exceeded for %s[%s]: its result will be refused", held.job.task, held.job.id)
        if self.retries_time_outs(held):
            self.count_failure(held, exc)
        else:
            self.fail(held, exc)
            self.conclude(held)

    # Leases and stopping.

    def leases_due(self, now: float) -> list[Held]:
        """The held jobs of whose lease a third is left; without the lock, which a slow turn may have for seconds."""
        return [h for h in list(self.held.values()) if not h.lost and h.renew_at <= now]

    def lost(self, held: Held) -> None:
        """The authority is gone: stop the body where the pool can. What it still leaves is refused, and counted.

        Called by the keeper's thread; the loop acts, because by then the child may have gone on to another job.
        """
        held.lost = True
        logger.warning("lost the lease of %s[%s]: its result will be refused", held.job.task, held.job.id)
        if self.enforces_limits():
            self.consumer.call_soon(self._stop_lost, held)

    def _stop_lost(self, held: Held) -> None:
        pid = held.request.worker_pid if held.request is not None else None
        if pid and not held.concluded and self.enforces_limits():
            self.consumer.pool.terminate_job(pid, signal.SIGKILL)

    def release(self, held: Held) -> None:
        """Give a job back that did not run to its end here; it costs no retry. One acknowledged early ends instead."""
        if held.job.at_most_once and (held.accepted_at is not None or not was_dropped(held)):
            self.fail(held, WorkerLostError("its worker stopped after the early acknowledgement; it may not run twice"))
        else:
            held.attempt.ask_requeue(Requeue(Outcome.RELEASED))
        if not held.closing:
            self.conclude(held)

    def restore(self, held: Held) -> None:
        """Release a job because this worker stops, or stops consuming."""
        self.release(held)
        requeue = held.attempt.requeue
        self.restored += requeue is not None and requeue.outcome is Outcome.RELEASED

    def unstarted(self) -> list[Held]:
        """Held jobs whose body has not started."""
        with self._lock:
            return [h for h in self.held.values() if h.accepted_at is None and not h.concluded]

    def drain(self) -> None:
        """Stopping: claim nothing more, settle each end at once, and do not wait twice for a silent database."""
        self.draining = True
        self.database.leave()

    def unsettled(self) -> int:
        """How many ends are known here and nowhere else."""
        return len(self._ended)

    def _settle_or_keep(self) -> None:
        try:
            self.settle_now()
        except CONNECTION_ERRORS as exc:  # tried once more as the last thing that this process does
            logger.warning("%d end(s) wait for the database: %s", self.unsettled(), str(exc).strip().splitlines()[0])

    def settle_now(self) -> None:
        """Settle outside the loop's turns: at a shutdown, or where a body has the loop's thread."""
        if self._ended:
            self.turn(claim=False)
