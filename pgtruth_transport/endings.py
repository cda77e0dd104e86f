"""Ends that no holder writes: of dead holders' jobs, and of jobs that are cancelled, expired, purged or overdue.

Promises: an end commits together with what follows from it (errbacks, the chord's count, the rest of the chain), a
batch in one transaction. A job whose follow-ups the database refuses ends without them, with a line in the log, and
holds up no other. A crash before COMMIT leaves the batch as it was; the next sweep takes it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import psycopg
from celery import Celery, current_app
from celery.app.task import Context
from celery.exceptions import TaskRevokedError, WorkerLostError
from celery.utils.log import get_logger
from kombu.compression import decompress
from kombu.exceptions import OperationalError
from kombu.serialization import loads, prepare_accept_content

from . import afterwards, attempts, chords, lifecycle, publish
from .attempts import Attempt
from .db import Database, is_lost, is_transient, retrying
from .foreign import SettledFirst
from .jobs import Ending, Job, Lease, described
from .settings import Settings
from .signals import Signal
from .states import Outcome, Status
from .transport import encoding
from .transport_names import is_ours

logger = get_logger(__name__)

BATCH = 500


class Ends(NamedTuple):
    """Jobs that are to end, and how: ``lock`` reads them, ``end`` says what each leaves behind, ``write`` ends them."""

    lock: Callable[[Any], list[tuple[Job, Lease]]]
    end: Callable[[Job, Lease], Attempt]
    write: Callable[[Any, list[Attempt]], lifecycle.Ended]
    brief: bool = False  # what somebody's transaction keeps is left for the next time


class Done(NamedTuple):
    found: int
    ended: int
    waited: list[str]
    follow: chords.FollowUps


def end(app: Any, database: Database, signal: Signal, ends: Ends) -> Done:
    """End a batch and tell chords, chains and errbacks in one transaction; what cannot be told holds up nobody else."""
    try:
        done = retrying(lambda: _end_together(app, database, ends))
    except Exception as exc:
        if isinstance(exc, OperationalError) or is_lost(exc):
            raise
        logger.warning("ending a batch of jobs one by one: %s", described(exc))
        done = retrying(lambda: _end_each(app, database, ends))
    afterwards.call_later(done.follow.after)
    publish.wake(database, signal, done.follow.rows)
    ids = [*done.waited, *done.follow.waited]
    if ids:
        signal.announce(ids)
    return done


def _tell(job_id: str, foreign: Callable[[], object]) -> None:
    try:
        foreign()
    except Exception:
        logger.exception("%s: it has ended, but its result backend could not be told", job_id)


def _end_together(app: Any, database: Database, ends: Ends) -> Done:
    with database.connection() as conn, conn.transaction():
        dead = [ends.end(job, lease) for job, lease in ends.lock(conn)]
        if ends.brief and any(attempt.parts for attempt in dead):
            chords.be_brief(conn, database, chords.PATIENCE)
        ended, follow = _write(conn, database, app, ends, dead)
    return Done(len(dead), len(ended.leases), list(ended.waited), follow)


def _end_each(app: Any, database: Database, ends: Ends) -> Done:
    """The same, each within a savepoint of its own; one that the database refuses ends barely."""
    done = Done(0, 0, [], chords.FollowUps())
    kept: set[str] = set()  # chords whose rows somebody keeps
    with database.connection() as conn, conn.transaction():
        if ends.brief:
            chords.be_brief(conn, database, chords.GLANCE)
        for job, lease in ends.lock(conn):
            attempt = ends.end(job, lease)
            mine = {part.chord_id for part in attempt.parts}
            try:
                one = (
                    Done(1, 0, [], chords.FollowUps()) if mine & kept else _end_one(conn, database, app, ends, attempt)
                )
            except psycopg.errors.LockNotAvailable:
                kept |= mine
                one = Done(1, 0, [], chords.FollowUps())
            done.waited.extend(one.waited)
            done.follow.rows.extend(one.follow.rows)
            done.follow.waited.extend(one.follow.waited)
            done.follow.after.extend(one.follow.after)
            done = done._replace(found=done.found + 1, ended=done.ended + one.ended)
    return done


def _end_one(conn: Any, database: Database, app: Any, ends: Ends, attempt: Attempt) -> Done:
    bare = Attempt(attempt.lease, attempt.settings)
    bare.ending = attempt.ending._replace(meta=None) if attempt.ending is not None else None
    bare.after = attempt.after  # these need no database
    for left in (attempt, bare):
        try:
            with conn.transaction():
                ended, follow = _write(conn, database, app, ends, [left])
            return Done(1, len(ended.leases), list(ended.waited), follow)
        except Exception as exc:
            again = is_transient(exc) or isinstance(exc, psycopg.errors.LockNotAvailable)
            if again or isinstance(exc, OperationalError) or is_lost(exc):
                raise
            what = (
                "nobody can be told of its end" if left is attempt else "it cannot be ended, the next sweep tries again"
            )
            logger.exception("%s: %s", attempt.job_id, what)
    return Done(1, 0, [], chords.FollowUps())


def _write(
    conn: Any, database: Database, app: Any, ends: Ends, dead: list[Attempt]
) -> tuple[lifecycle.Ended, chords.FollowUps]:
    follow = chords.FollowUps()
    ended = ends.write(conn, dead) if dead else lifecycle.Ended(frozenset(), ())
    gone = {job_id for job_id, _ in ended.leases}
    for attempt in dead:
        if attempt.job_id in gone:
            follow.add(attempt)
    chords.write(conn, database, app, follow)
    return ended, follow


def end_all(app: Any, database: Database, signal: Signal, ends: Ends) -> int:
    """End every batch; what is kept from it is left for the next sweep."""
    ends = ends._replace(brief=True)
    total = 0
    while True:
        done = end(app, database, signal, ends)
        total += done.ended
        if done.found < BATCH or not done.ended:
            return total


def end_spent(app: Any, database: Database, signal: Signal) -> int:
    """Fail the jobs whose lease has run out and that may not run again, on behalf of their dead holders."""

    def write(conn: Any, dead: list[Attempt]) -> lifecycle.Ended:
        endings = [(attempt.lease, attempt.ending) for attempt in dead if attempt.ending is not None]
        return lifecycle.ended(lifecycle.finish(conn, database, endings))

    return end_all(
        app,
        database,
        signal,
        Ends(
            lambda conn: lifecycle.lock_spent(conn, database, BATCH),
            lambda job, lease: _failed_attempt(app, database, job, lease),
            write,
        ),
    )


def _failed_attempt(app: Any, database: Database, job: Job, lease: Lease) -> Attempt:
    if job.at_most_once:
        text = f"its worker {lease.owned_by} died after the early acknowledgement; it may not run twice"
    else:
        text = f"its worker {lease.owned_by} stopped renewing the lease; {job.retry_count} of its retries were spent"
    attempt = Attempt(lease, database.settings, job.retry_count)
    context, exc = context_of(app, job), WorkerLostError(text)
    _mark(app, attempt, job, lambda backend: backend.mark_as_failure(job.id, exc, request=context))
    attempt.end(attempts.failed(f"WorkerLostError: {text}"))
    return attempt


def unheld(app: Any, database: Database, lock: Callable[[Any], list[Job]], reason: str, state: str) -> Ends:
    """The jobs that ``lock`` returns, which nobody holds."""

    def write(conn: Any, dead: list[Attempt]) -> lifecycle.Ended:
        endings = [(attempt.job_id, attempt.ending) for attempt in dead if attempt.ending is not None]
        return lifecycle.end_queued(conn, database, endings)

    return Ends(
        lambda conn: [(job, Lease(job.id, job.lease_version, "", job.claimed_at)) for job in lock(conn)],
        lambda job, lease: _ended_unheld(app, database, job, lease, reason, state),
        write,
    )


class _Purge:
    """One batch of a purge: what is simple is ended by the statement that finds it, the rest is returned."""

    def __init__(self, database: Database, queue: str) -> None:
        self._database, self._queue = database, queue
        self.purged = lifecycle.Purged(0, (), [])

    def lock(self, conn: Any) -> list[Job]:
        self.purged = lifecycle.purge(conn, self._database, self._queue, BATCH)
        return lifecycle.lock_queued(conn, self._database, self.purged.left) if self.purged.left else []


def purge(app: Any, database: Database, signal: Signal, queue: str) -> int:
    """End everything in a queue that nobody holds, with chords and chains told; returns how many jobs."""
    total = 0
    while True:
        batch = _Purge(database, queue)
        done = end(app, database, signal, unheld(app, database, batch.lock, "purged", "REVOKED"))
        ended, waited, left = batch.purged
        if waited:
            signal.announce(waited)
        total += ended + done.ended
        if ended + len(left) < BATCH or not ended + done.ended:
            return total


_acting: ContextVar[Any] = ContextVar("pgtruth_acting", default=None)


@contextmanager
def acting_for(app: Any) -> Iterator[None]:
    """Let a channel that purges, and knows no app, act for ``app``."""
    token = _acting.set(app)
    try:
        yield
    finally:
        _acting.reset(token)


def acting(url: str, settings: Settings) -> Any:
    """The app to act for: a caller's, the current one if it has this broker, or one that knows only its ``url``."""
    app = _acting.get()
    if app is not None:
        return app
    app = current_app._get_current_object()
    if is_ours(app.conf) and Settings.from_app(app) == settings:
        return app
    return Celery("pgtruth", broker=url, backend="pgtruth://", set_as_current=False)


def _ended_unheld(app: Any, database: Database, job: Job, lease: Lease, reason: str, state: str) -> Attempt:
    attempt = Attempt(lease, database.settings)
    context, exc = context_of(app, job), TaskRevokedError(reason)
    if state == "REVOKED":
        _mark(app, attempt, job, lambda backend: backend.mark_as_revoked(job.id, reason, request=context))
    else:
        _mark(app, attempt, job, lambda backend: backend.mark_as_failure(job.id, exc, request=context))
    meta = attempt.ending.meta if attempt.ending is not None else None
    outcome = Outcome.CANCELLED if state == "REVOKED" else Outcome.FAILED
    attempt.ending = Ending(Status.FAILED, outcome, state, None, meta, reason)
    return attempt


def _mark(app: Any, attempt: Attempt, job: Job, mark: Callable[[Any], object]) -> None:
    """Have the job's result backend note its end in ``attempt``.

    One of a ``TruthTask`` that is not ours would settle by a connection of its own, and wait: told after the commit.
    """
    task = app.tasks.get(job.task)
    backend = app.backend if task is None else task.backend
    if isinstance(backend, SettledFirst):
        attempt.after.append(partial(_tell, job.id, partial(mark, backend._backend)))
        return
    with attempts.ending(attempt):
        try:
            mark(backend)
        except Exception:
            logger.exception("%s[%s]: an errback or the chord could not be told of its end", job.task, job.id)


def context_of(app: Any, job: Job) -> Context:
    """Celery's view of a job that no worker holds: enough for errbacks, chains and chords."""
    request: dict[str, Any] = {"id": job.id, "task": job.task, "delivery_info": {}, "hostname": None}
    if job.body is None:  # open from the beginning: it has had no message yet
        return Context(request)
    try:
        payload = encoding.payload(job)
        request = {**request, **payload["headers"], "hostname": None}
        request["delivery_info"] = payload["properties"].get("delivery_info") or {}
        args, kwargs, embed = _decode(app, payload)
        request.update({"args": args, "kwargs": kwargs, **(embed or {})})
    except Exception:
        logger.warning("%s[%s]: its message cannot be decoded, its callbacks are unknown", job.task, job.id)
    return Context(request)


def _decode(app: Any, payload: dict[str, Any]) -> Any:
    """The decoded body of a message, by the app's accepted content types."""
    body = payload["body"]
    compression = payload["headers"].get("compression")
    if compression:
        body = decompress(body, compression)
    accept = prepare_accept_content(app.conf.accept_content)
    return loads(body, payload["content-type"], payload["content-encoding"], accept=accept)
