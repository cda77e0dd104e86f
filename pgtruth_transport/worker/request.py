"""Celery's request and strategy, with the outcome handed to the worker instead of written by the pool child.

``Task.Strategy`` is Celery's plug point for how a received message becomes a call of the pool. Ours differs in three
things: the pool runs :mod:`pgtruth_transport.worker.trace`, a job never waits here for its time (``run_at`` does that
in the database) nor is judged expired by this machine's clock, and every end passes through :class:`Worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.app import trace as celery_trace
from celery.exceptions import TaskRevokedError, TimeLimitExceeded
from celery.utils.imports import symbol_by_name
from celery.utils.log import get_logger
from celery.worker.request import create_request_cls
from celery.worker.state import task_ready, task_reserved
from celery.worker.strategy import default, hybrid_to_proto2, proto1_to_proto2

from .. import attempts
from ..transport import encoding
from . import trace
from .core import Worker
from .held import Held
from .takeback import forget_limits, has_reported

logger = get_logger("celery.worker.strategy")


def request_class(worker: Worker, task: Any, consumer: Any) -> type[Any]:
    """The request class of one task: the user's own ``Task.Request`` where there is one, plus our ends."""
    app = consumer.app
    tracer = trace.fast_trace_attempt if app.use_fast_trace_task else trace.trace_attempt
    base: Any = create_request_cls(
        symbol_by_name(task.Request),
        task,
        consumer.pool,
        consumer.hostname,
        consumer.event_dispatcher,
        trace=tracer,
        app=app,
    )

    class TruthRequest(base):
        held: Held
        future: Any = None  # the thread pool's, of which Celery keeps a weak reference only
        sent: Any = None  # what the pool returned, until the body has started: it knows whether a child was sent it

        def maybe_expire(self) -> bool:
            return False  # only the database clock judges that: what is expired is not claimed

        def info(self, safe: bool = False) -> dict[str, Any]:
            found: dict[str, Any] = super().info(safe)
            found["acknowledged"] |= self.time_start is not None  # the queue no longer holds what runs
            return found

        def execute_using_pool(self, pool: Any, **kwargs: Any) -> Any:
            if self.held.concluded or self.held.lost:  # given back, or taken, while it waited for a token or a slot
                worker.release(self.held)
                raise TaskRevokedError(self.id)
            result = super().execute_using_pool(pool, **kwargs)
            self.future = getattr(result, "f", None)
            self.sent = result if self.held.accepted_at is None else None
            return result

        def on_accepted(self, pid: int, time_accepted: float) -> None:
            self.sent = None
            worker.accepted(self.held)
            super().on_accepted(pid, time_accepted)

        def on_success(self, returned: Any, **kwargs: Any) -> None:
            if isinstance(returned, ExceptionInfo):  # a thread's body has left by SystemExit
                self.on_failure(returned)
                return
            failed, value, runtime, collected = returned
            self.held.attempt.merge(collected)
            if failed:
                super().on_success((failed, value, runtime), **kwargs)
            else:
                self.acknowledged = True  # the settle is the acknowledgement
                super().on_success((failed, value, runtime), **kwargs)
                worker.conclude(self.held)

        def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
            exc = _unwrapped(exc_info)
            if isinstance(exc, SystemExit | KeyboardInterrupt) and hasattr(self, "_worker_lost_info"):
                exc = _unwrapped(self._worker_lost_info(exc))  # billiard reports the exit, the process goes with it
            if isinstance(exc, TimeLimitExceeded) and self._retry_time_out(exc):
                return
            with self._closing():
                worker.failed(self.held, exc)
                super().on_failure(exc_info, send_failed_event, return_ok)

        def on_timeout(self, soft: bool, timeout: float) -> None:
            if soft:
                super().on_timeout(soft, timeout)
            elif not self._retry_time_out(TimeLimitExceeded(timeout)):
                with self._closing():
                    worker.failed(self.held, TimeLimitExceeded(timeout))
                    super().on_timeout(soft, timeout)

        def _retry_time_out(self, exc: TimeLimitExceeded) -> bool:
            """Count a hard time limit as a failure to be retried, where that is the policy and the budget lasts."""
            if self.held.concluded or not worker.retries_time_outs(self.held):
                return False
            task_ready(self)
            logger.error("Hard time limit exceeded for %s[%s], retrying", self.name, self.id)
            worker.count_failure(self.held, exc)
            return True

        def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
            with self._closing():
                super()._announce_revoked(reason, terminated, signum, expired)
                if not self.held.attempt.has_outcome:
                    self.held.attempt.end(attempts.failed(reason, state="REVOKED"))

        def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
            """Not where the body has ended while the loop slept, as in a soft shutdown: its report is read next."""
            if self.time_start and has_reported(pool, self.worker_pid):
                forget_limits(pool, self._apply_result and self._apply_result())
            else:
                super().cancel(pool, signal, emit_retry)

        def _announce_cancelled(self, emit_retry: bool = True) -> None:
            with self._closing():
                super()._announce_cancelled(emit_retry)
                worker.restore(self.held)

        @contextmanager
        def _closing(self) -> Iterator[None]:
            """While an end is being reported: what is published now belongs to it, and an early ack waits for it."""
            outer, acknowledged = self.held.closing, self.acknowledged
            self.held.closing = True
            try:
                with attempts.ending(self.held.attempt):
                    yield
            finally:
                self.held.closing = outer
                if not outer:
                    worker.closed(self.held, answered=self.acknowledged and not acknowledged)

    return TruthRequest


def strategy(task: Any, app: Any, consumer: Any, **kwargs: Any) -> Callable[..., Any]:
    """``Task.Strategy``: how a claimed job of ``task`` reaches the pool."""
    worker: Worker = consumer.pgtruth
    trace.mark_body(task)
    cls = request_class(worker, task, consumer)
    plain = default(task, app, consumer)  # for what is no job with one owner: a task sent to several queues at once
    hostname = consumer.hostname
    eventer = consumer.event_dispatcher
    task_events = bool(eventer and eventer.enabled and task.send_events)
    bucket_of = (lambda: None) if consumer.disable_rate_limits else (lambda: consumer.task_buckets[task.name])
    revoked, does_info = consumer.controller.state.revoked, logger.isEnabledFor(20)

    def handle(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **_: Any) -> Any:
        if getattr(message, "held_key", None) is None:
            return plain(message, body, ack, reject, callbacks)
        body, headers, decoded, utc = _decoded(app, message, body)
        headers = dict(headers)
        headers["eta"] = headers.pop(encoding.ETA, None)  # what the body sees; it is due
        held = worker.held_of(message)
        if held is not None:
            headers[trace.LEASE_KEY] = trace.lease_fields(held.attempt)
        request = cls(
            message,
            on_ack=ack,
            on_reject=reject,
            app=app,
            hostname=hostname,
            eventer=eventer,
            task=task,
            connection_errors=consumer.connection_errors,
            body=body,
            headers=headers,
            decoded=decoded,
            utc=utc,
        )
        if held is None:
            return reject(requeue=True)
        request.held, held.request = held, request
        if does_info:
            context = {
                "id": request.id,
                "name": request.name,
                "args": request.argsrepr,
                "kwargs": request.kwargsrepr,
                "eta": request.eta,
            }
            logger.info(celery_trace.LOG_RECEIVED, context, extra={"data": context})
        if (request.id in revoked or request.stamped_headers) and request.revoked():
            return None
        signals.task_received.send(sender=consumer, request=request)
        if task_events:
            _send_received(eventer, request)
        bucket = bucket_of()
        if bucket:
            return consumer._limit_task(request, bucket, 1)
        task_reserved(request)
        for callback in callbacks or ():
            callback(request)
        consumer.on_task_request(request)
        return None

    return handle


def _unwrapped(exc_info: Any) -> Any:
    """The exception, which billiard wraps with its traceback."""
    return getattr(exc_info.exception, "exc", exc_info.exception)


def _decoded(app: Any, message: Any, body: Any) -> tuple[Any, dict[str, Any], bool, bool]:
    """The message in task protocol 2, whichever it was sent in."""
    if body is None and "args" not in message.payload:
        return message.body, message.headers, False, app.uses_utc_timezone()
    if "args" in message.payload:
        found: tuple[Any, dict[str, Any], bool, bool] = hybrid_to_proto2(message, message.payload)
    else:
        found = proto1_to_proto2(message, body)
    return found


def _send_received(eventer: Any, request: Any) -> None:
    eventer.send(
        "task-received",
        uuid=request.id,
        name=request.name,
        args=request.argsrepr,
        kwargs=request.kwargsrepr,
        root_id=request.root_id,
        parent_id=request.parent_id,
        retries=request.request_dict.get("retries", 0),
        eta=None,
        expires=request.expires and request.expires.isoformat(),
    )
