"""A result backend that is not ours (Redis, django-db, …), told only what the database has accepted.

Promises: the truth is settled first, in the pool child, by the same fenced finish; only then is the foreign backend
told. A stale attempt's result is never stored there. A crash between the two leaves the truth right, and the foreign
result, errbacks and chord count missing: the row does not note who has been told, so no sweep can make up for it.
"""

from __future__ import annotations

from typing import Any

from . import afterwards, attempts, chords, lifecycle, publish
from .attempts import Attempt
from .backend import PgTruthBackend
from .db import retrying
from .jobs import Ending, described
from .runtime import runtime
from .states import Outcome, Status

_wrapped: dict[int, Any] = {}


def settled_first(backend: Any) -> Any:
    """``backend`` itself if it is ours, else a stand-in that settles the job before it stores."""
    if isinstance(backend, PgTruthBackend | SettledFirst):
        return backend
    found = _wrapped.get(id(backend))
    if found is None or found._backend is not backend:
        found = _wrapped[id(backend)] = SettledFirst(backend)
    return found


class SettledFirst:
    """Everything of the wrapped backend, but ends go to the database first."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def mark_as_done(self, task_id: str, result: Any, request: Any = None, *args: Any, **kwargs: Any) -> None:
        if self._settle(task_id, Ending(Status.DONE, Outcome.DONE, "SUCCESS", None, None, None)):
            self._backend.mark_as_done(task_id, result, request, *args, **kwargs)

    def mark_as_failure(self, task_id: str, exc: BaseException, *args: Any, **kwargs: Any) -> None:
        if self._settle(task_id, attempts.failed(described(exc))):
            self._backend.mark_as_failure(task_id, exc, *args, **kwargs)

    def mark_as_revoked(self, task_id: str, reason: str = "", *args: Any, **kwargs: Any) -> None:
        ending = Ending(Status.FAILED, Outcome.CANCELLED, "REVOKED", None, None, reason or "revoked")
        if self._settle(task_id, ending):
            self._backend.mark_as_revoked(task_id, reason, *args, **kwargs)

    def mark_as_retry(self, task_id: str, exc: BaseException, *args: Any, **kwargs: Any) -> None:
        attempt = attempts.find(task_id)
        if attempt is not None:
            attempt.annotate_retry(None, described(exc))
        self._backend.mark_as_retry(task_id, exc, *args, **kwargs)

    def _settle(self, task_id: str, ending: Ending) -> bool:
        """Finish the attempt now, with its follow-ups; ``False`` if its authority is gone or it ended otherwise."""
        attempt = attempts.find(task_id)
        if attempt is None or attempt.settled or attempt.settings is None:
            return attempt is None
        if attempt.requeue is not None:
            return False
        attempt.end(ending)
        return finish_now(attempt) and attempt.ending is ending


def finish_now(attempt: Attempt) -> bool:
    """Settle ``attempt`` here, not in the worker's main process; ``False`` if its authority is gone."""
    from celery import current_app

    assert attempt.settings is not None
    assert attempt.ending is not None
    _, database, signal = runtime(attempt.settings)
    lease, ending = attempt.lease, attempt.ending

    def finish() -> chords.FollowUps | None:
        with database.connection() as conn, conn.transaction():
            ended = lifecycle.ended(lifecycle.finish(conn, database, [(lease, ending)]))
            if not ended.leases:
                return None
            follow = chords.FollowUps()
            follow.add(attempt)
            chords.write(conn, database, current_app, follow)
            return follow

    follow = retrying(finish)
    attempt.settled, attempt.buffering = True, False
    attempt.rows, attempt.stored, attempt.parts, attempt.after = [], [], [], []
    if follow is None:
        return False
    call = afterwards.call_now if attempt.in_pool else afterwards.call_later
    try:
        publish.wake(database, signal, follow.rows)
        signal.announce(follow.waited)
    finally:
        call(follow.after)
    return True
