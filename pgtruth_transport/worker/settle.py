"""Writing ends and claiming in one transaction per turn: the worker's hot path.

Cost per turn: one round trip, one commit, one to three statements (finish, requeue, claim) in the common case,
whatever the batch. Ends with follow-ups (callbacks, chain steps, chord parts) take a round trip per statement more, in
the same transaction: the final write, its attempt row, the chord's count and every follow-up commit together or not
at all. A crash before the COMMIT loses one attempt of each job in the batch, nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from .. import afterwards, attempts, chords, counters, lifecycle, publish
from ..attempts import Attempt
from ..db import CONNECTION_ERRORS, Connection, Silent, retrying
from ..jobs import Job
from .held import Held

if TYPE_CHECKING:
    from .core import Worker

logger = get_logger(__name__)

#: The database is out of reach, for the settle itself or for a follow-up that is being published.
LOST = (*CONNECTION_ERRORS, OperationalError)

#: Seconds after which a turn is slow. A generic plan made on an empty table reads the whole of a grown one.
SLOW_TURN = 0.05
#: Seconds until an end is tried again whose chord's row somebody else's transaction keeps.
DEFERRED = 1.0


class Settler:
    """The one connection of a worker process that claims and settles."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._db = worker.database
        self._conn: Connection | None = None
        self._counts: dict[str, int] = {}
        self._prepared_at = time.monotonic()
        self._alone = True
        self._server_started: Any = None

    def run(self, batch: Sequence[Held], want: int) -> list[Job]:
        """Settle ``batch`` and claim at most ``want`` jobs."""
        if any(held.settle_at for held in batch):
            return self._run_around(batch, want)
        started, kept = time.monotonic(), self._conn is not None
        try:
            jobs = retrying(lambda: self._try(batch, want))
            self._watch_plans(started)
            return jobs
        except psycopg.errors.LockNotAvailable:
            return self._run_around(batch, want)
        except LOST as exc:
            self.close()
            if not kept or isinstance(exc, Silent):
                raise
            # a session closed since the turn before is replaced once: for Celery a lost connection is a restart
            if want:
                self._worker.disown()
            return self.run(batch, want)
        except Exception:
            if not batch:
                raise
        # one end that the database refuses must not hold up the others
        for held in batch:
            self._run_alone(held)
        return self.run((), want)

    def _run_around(self, batch: Sequence[Held], want: int) -> list[Job]:
        """Somebody's transaction keeps the row of a chord: settle all but its members, whose turn comes later."""
        groups: dict[frozenset[str], list[Held]] = {}
        for held in batch:
            groups.setdefault(frozenset(part.chord_id for part in held.attempt.parts), []).append(held)
        for group in groups.values():
            try:
                retrying(partial(self._try, group, 0, chords.GLANCE))
            except psycopg.errors.LockNotAvailable:
                self._defer(group)
            except LOST:
                self.close()
                raise
            except Exception:
                for held in group:
                    self._run_alone(held)
            else:
                for held in group:
                    held.settle_at = 0.0
        return self.run((), want)

    def _defer(self, group: Sequence[Held]) -> None:
        if not group[0].settle_at:
            logger.info("%d end(s) wait: a transaction elsewhere keeps the row of their chord", len(group))
        for held in group:
            held.settle_at = time.monotonic() + DEFERRED

    def _try(self, batch: Sequence[Held], want: int, patience: int = chords.PATIENCE) -> list[Job]:
        try:
            return self._run(batch, want, patience)
        except psycopg.errors.SerializationFailure:
            self._alone = False  # this server's default is stricter: only an explicit transaction says read committed
            raise

    def _watch_plans(self, started: float) -> None:
        """Prepare the statements anew after a slow turn: their plans may stem from when the table was nearly empty."""
        now = time.monotonic()
        if now - started > SLOW_TURN and now - self._prepared_at > 60:
            self._prepared_at = now
            self.close()

    def _run_alone(self, held: Held) -> None:
        try:
            retrying(lambda: self._run((held,), 0))
            held.settle_at = 0.0
        except psycopg.errors.LockNotAvailable:
            self._defer((held,))
        except LOST:
            raise
        except Exception:
            logger.exception("the end of %s[%s] cannot be stored, recording a failure", held.job.task, held.job.id)
            self._write_off(held)

    def _write_off(self, held: Held) -> None:
        """Record a failure instead, with errbacks and chord told; without, where it is they that cannot be stored."""
        exc = RuntimeError("the outcome could not be stored; the worker's log has the reason")
        held.attempt = Attempt(held.attempt.lease, held.attempt.settings)
        self._worker.fail(held, exc)
        try:
            self._run((held,), 0)
        except LOST:
            raise
        except Exception:
            logger.exception("%s[%s]: nobody can be told of its end", held.job.task, held.job.id)
            held.attempt = Attempt(held.attempt.lease, held.attempt.settings)
            held.attempt.end(attempts.failed(str(exc)))
            self._run((held,), 0)

    def _run(self, batch: Sequence[Held], want: int, patience: int = chords.PATIENCE) -> list[Job]:
        conn = self._connection()
        if not batch and self._alone:
            return self._claim(conn, want) if want else []
        worker, db = self._worker, self._db
        open_ends = [h.attempt for h in batch if not h.attempt.settled]
        endings = [(a.lease, a.ending) for a in open_ends if a.requeue is None and a.ending is not None]
        requeues = [(a.lease, a.requeue) for a in open_ends if a.requeue is not None]
        follows = any(a.rows or a.stored or a.parts or a.after for a in open_ends)
        search = worker.demand.search() if want else None
        finished = requeued = claimed = None
        follow = chords.FollowUps()
        alone = self._alone and not follows and bool(endings) + bool(requeues) + bool(search) == 1
        with ExitStack() as stack:
            if not alone:  # a statement that is alone is its own transaction: a third of the time of an explicit one
                if not follows:
                    stack.enter_context(conn.pipeline())
                stack.enter_context(conn.transaction())
            if any(a.parts for a in open_ends):
                chords.be_brief(conn, db, patience)
            if endings:
                finished = lifecycle.finish(conn, db, endings)
            if requeues:
                requeued = lifecycle.requeue(conn, db, requeues)
            if follows:
                ended = lifecycle.ended(finished) if finished else lifecycle.Ended(frozenset(), ())
                back = lifecycle.requeued(requeued) if requeued else {}
                follow = self._follow_ups(conn, open_ends, ended, back)
            if search is not None:
                claimed = lifecycle.claim(conn, db, search, want, worker.owner)
        if not follows:
            ended = lifecycle.ended(finished) if finished else lifecycle.Ended(frozenset(), ())
            back = lifecycle.requeued(requeued) if requeued else {}
        jobs = lifecycle.claimed(claimed) if claimed else []
        try:
            if batch:
                self._after_commit(batch, ended, back, follow, {job.id for job in jobs})
            if search is not None and not jobs:
                worker.next_due = lifecycle.next_due(conn, db, search)
        except Exception as exc:  # what is committed stays: the claimed must reach the pool, no end is written twice
            logger.warning("settled and claimed, but nobody could be woken: %s", exc)
        return jobs

    def _claim(self, conn: Connection, want: int) -> list[Job]:
        """Claim at most ``want`` jobs where nothing is to be settled: what an idle worker does when it is woken."""
        search = self._worker.demand.search()
        jobs = lifecycle.claim_now(conn, self._db, search, want, self._worker.owner)
        if not jobs:
            self._worker.next_due = lifecycle.next_due(conn, self._db, search)
        return jobs

    def _follow_ups(
        self,
        conn: psycopg.Connection[Any],
        done: Iterable[Attempt],
        ended: lifecycle.Ended,
        back: dict[tuple[str, int], str],
    ) -> chords.FollowUps:
        """Write what the attempts that still had the authority leave behind, in the open transaction."""
        follow = chords.FollowUps()
        for attempt in done:
            key = attempt.lease.job_id, attempt.lease.lease_version
            if key in ended.leases:
                follow.add(attempt)
            elif key in back:
                follow.rows.extend(attempt.rows)  # of a task that replaced itself
        chords.write(conn, self._db, self._worker.app, follow)
        return follow

    def _after_commit(
        self,
        batch: Sequence[Held],
        ended: lifecycle.Ended,
        back: dict[tuple[str, int], str],
        follow: chords.FollowUps,
        taken: set[str],
    ) -> None:
        for held in batch:
            if held.key in ended.leases or held.key in back or held.attempt.settled:
                continue
            logger.info("%s[%s]: stale, its end was refused", held.job.task, held.job.id)
            self.count(counters.STALE_WRITES)
        afterwards.call_later(follow.after)
        left = [row for row in follow.rows if row.id not in taken]  # not claimed in the same transaction
        if left:
            publish.wake(self._db, self._worker.signal, left)
            self._worker.hungry()
        if back:
            self._wake_requeued(batch, back)
        waited = [*ended.waited, *follow.waited]
        if waited:  # after those who have work to do
            self._worker.signal.announce(waited)
        if self._counts.get(counters.STALE_WRITES):
            self.flush_counts()

    def _wake_requeued(self, batch: Sequence[Held], back: dict[tuple[str, int], str]) -> None:
        queues: dict[str, list[str]] = {}
        for held in batch:
            item = held.attempt.requeue
            if held.key not in back or item is None or item.open or item.delay:
                continue
            if item.row is None or item.row.due_soon:
                queues.setdefault(back[held.key], []).append(held.job.id)
        if queues:
            publish.wake_quietly(self._worker.signal, queues)
            self._worker.hungry()

    def count(self, name: str, by: int = 1) -> None:
        """Count something that leaves no row behind; written by the next sweep of this worker."""
        self._counts[name] = self._counts.get(name, 0) + by

    def flush_counts(self) -> None:
        """Write what was counted; from any thread."""
        counts, self._counts = self._counts, {}
        if counts:
            with self._db.connection() as conn:
                counters.add(conn, self._db, counts)

    def _connection(self) -> Connection:
        self._db.refuse_in_vain()
        if self._conn is None or self._conn.closed:
            self._conn = self._db.open("work")
            self._conn.patience = self._db.settings.connect_timeout  # then Celery reconnects
            self._notice_restart(self._conn)
        return self._conn

    def _notice_restart(self, conn: Connection) -> None:
        """A server that was restarted is a lost broker: Celery reconnects, in its own words."""
        row = conn.execute(self._db.sql("server_started")).fetchone()
        started, self._server_started = self._server_started, row[0] if row else None
        if started is not None and started != self._server_started:
            self.close()
            raise psycopg.OperationalError("PostgreSQL was restarted")

    def begin_anew(self) -> None:
        """Celery has connected: whatever server there is now, it is no news."""
        self.close()
        self._server_started = None

    def check(self) -> None:
        """Connect anew if the server has closed the connection: is it away or restarted, that raises."""
        if self._conn is None:
            return
        try:
            self._conn.pgconn.consume_input()  # does not wait
        except psycopg.OperationalError:
            self.close()
            self._connection()

    def close(self) -> None:
        """Close the connection; the next run opens another."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()
