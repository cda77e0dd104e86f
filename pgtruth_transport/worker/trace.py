"""Running one attempt in the pool: Celery's tracer, with the outcome collected instead of written.

Promises: the body runs as under any Celery worker; what it leaves behind (state, encoded result, follow-up tasks,
chord parts) comes back with the pool's return value, so a pool child needs no connection of its own unless the body
publishes or reports progress. A child that dies takes all of it along: nothing was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import current_app
from celery.app.task import Context
from celery.app.trace import build_tracer, fast_trace_task, trace_task_ret
from celery.exceptions import Ignore, Reject, Retry

from .. import attempts
from ..attempts import Attempt, Collected
from ..jobs import Ending, Lease, Requeue, described
from ..settings import Settings
from ..states import Outcome, Status

#: The key under which a request carries its lease into the pool.
LEASE_KEY = "pgtruth_lease"

Returned = tuple[int, Any, Any, Collected]


def trace_attempt(*args: Any, **extra: Any) -> Returned:
    """What the pool runs: Celery's ``trace_task_ret`` with what the attempt left behind as a fourth value."""
    return _trace(trace_task_ret, *args, **extra)


def fast_trace_attempt(*args: Any, **extra: Any) -> Returned:
    """The same on Celery's ``fast_trace_task``, where its worker optimisations are set up."""
    return _trace(fast_trace_task, *args, **extra)


def _trace(
    tracer: Callable[..., tuple[int, Any, Any]], name: str, uuid: str, request: dict[str, Any], *args: Any, **extra: Any
) -> Returned:
    if name not in _ready:  # without it callbacks and chain steps are published before the end, not with it
        _make_ready(name, request.get("hostname"))
    *lease, retry_count, limit = request.pop(LEASE_KEY)
    attempt = Attempt(Lease._make(lease), _settings(), retry_count, limit)
    attempt.in_pool = True
    with attempts.running(attempt):
        failed, value, runtime = tracer(name, uuid, request, *args, **extra)
        _conclude(attempt, failed, value)
        if failed and isinstance(_raised(value), Reject) and attempt.ending and attempt.ending.status is Status.DONE:
            _follow_own_success(name, uuid, request, attempt.ending)
    return failed, value, runtime, attempt.collected()


_ready: set[str] = set()  # tasks whose tracer in this process runs a marked body


def _make_ready(name: str, hostname: str | None) -> None:
    """Rebuild a tracer that was built before its task was marked: a pool child starts before the strategies."""
    app = current_app._get_current_object()
    task = app.tasks.get(name)
    if task is not None and not getattr(task, "_pgtruth_marked", False):
        mark_body(task)
        task.__trace__ = build_tracer(name, task, app.loader, hostname, app=app)
    _ready.add(name)


def lease_fields(attempt: Attempt) -> tuple[Any, ...]:
    """What ``request[LEASE_KEY]`` holds: plain values, pickled with every task."""
    return (*attempt.lease, attempt.retry_count, attempt.limit)


_process_settings: Settings | None = None


def set_settings(settings: Settings) -> None:
    """Remember the worker's settings before its pool forks."""
    global _process_settings
    _process_settings = settings


def _settings() -> Settings:
    if _process_settings is None:  # a pool child that was spawned, not forked
        set_settings(Settings.from_app(current_app))
    assert _process_settings is not None
    return _process_settings


def _conclude(attempt: Attempt, failed: int, value: Any) -> None:
    """Name the outcome where no result backend was told: no backend at all, ignored results, ``Ignore``."""
    if attempt.has_outcome:
        return
    if not failed:
        attempt.end(attempts.ignored())
        return
    exc = _raised(value)
    if isinstance(exc, Reject):
        return  # the main process knows what its message's reject means
    if isinstance(exc, Ignore):
        if attempt.replaced:  # by a chain or chord: its last step will be published under this id
            attempt.ask_requeue(Requeue(Outcome.RELEASED, open=True))
        else:
            attempt.end(attempts.ignored())
    elif isinstance(exc, Retry):
        attempt.end(attempts.ignored())
    else:
        attempt.end(attempts.failed(described(exc)))


def _raised(value: Any) -> Any:
    """What a failed body has raised, without what billiard wraps it in."""
    exc = getattr(value, "exception", value)
    return getattr(exc, "exc", exc) if type(exc).__name__ == "ExceptionWithTraceback" else exc


def _follow_own_success(name: str, uuid: str, request: dict[str, Any], ending: Ending) -> None:
    """A body has stored its own success, and then rejected its message: a stored end is the end, and this follows it.

    Elsewhere the message comes again, and the worker finds the result there.
    """
    app = current_app._get_current_object()
    backend = app.tasks[name].backend
    value = backend.decode(ending.result)
    options: dict[str, Any] = {"parent_id": uuid, "root_id": request.get("root_id") or uuid}
    if app.conf.task_inherit_parent_priority:
        options["priority"] = (request.get("delivery_info") or {}).get("priority")
    for callback in request.get("callbacks") or ():
        app.signature(callback).apply_async((value,), **options)
    if chain := list(request.get("chain") or ()):
        app.signature(chain.pop()).apply_async((value,), chain=chain, **options)
    backend.mark_as_done(uuid, value, Context(request), store_result=False)


def mark_body(task: Any) -> None:
    """Wrap ``task.run`` and ``task.on_replace`` of a worker's task, so that the attempt knows when its body is over.

    Celery publishes callbacks and the next chain step right after ``run``, before it tells the result backend.
    """
    if getattr(task, "_pgtruth_marked", False):
        return
    run, on_replace = task.run, task.on_replace

    def marked_run(*args: Any, **kwargs: Any) -> Any:
        attempt = attempts.find(task.request.id)
        returned = False
        try:
            value = run(*args, **kwargs)
            returned = True
            return value
        finally:
            if attempt is not None:
                attempt.body_ended(returned=returned)

    def marked_replace(sig: Any) -> Any:
        attempt = attempts.find(task.request.id)
        if attempt is not None:
            attempt.replaced = attempt.buffering = True
        return on_replace(sig)

    marked_run.__wrapped__ = run  # type: ignore[attr-defined]
    task.run, task.on_replace, task._pgtruth_marked = marked_run, marked_replace, True
