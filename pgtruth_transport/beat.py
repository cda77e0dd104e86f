"""``celery -A app beat -S pgtruth``: any number of beats, and exactly one job per entry and tick.

Promises: the row of the tick, the entry's ``last_run_at`` and the job commit in one transaction, which only one beat
can make; so there is no leader, and a beat that dies or hangs takes nothing with it. Only the database clock counts. A
job's id follows from its entry and tick, so asking twice, or never hearing the answer to COMMIT, is harmless.

* An entry runs for the first time one interval after a beat has first seen it; ``last_run_at`` outlives restarts.
* Ticks that were missed, because no beat or no database was up, are made up for by one run, never by a burst.
* An interval keeps its beat: its ticks are whole intervals apart, however late one of them was sent.
* After an outage of the database a beat goes on within a second or so of its return.
* An entry whose job cannot be published is tried again every 30 s; the others do not wait for it.

Entries are known by their names: apps that share a schema share the entries that have the same name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import NAMESPACE_URL, uuid5

from celery.beat import ScheduleEntry, Scheduler, SchedulingError
from celery.schedules import BaseSchedule, crontab, schedule
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from pgtruth_transport import migrate
from pgtruth_transport.db import CONNECTION_ERRORS, Connection
from pgtruth_transport.errors import SchemaError
from pgtruth_transport.runtime import runtime
from pgtruth_transport.settings import Settings
from pgtruth_transport.transactions import in_transaction

logger = get_logger("celery.beat")

#: Seconds between two tries to reach a database that is away.
RETRY: Final = 1.0
#: Seconds until an entry that could not be published is tried again.
HOLD: Final = 30.0
#: Seconds that a server may take to answer before its connection is given up.
PATIENCE: Final = 20.0
#: How long the rows of sent ticks are kept, in seconds, how often old ones are deleted, and how many at a time.
KEEP, TIDY, TIDY_BATCH = 86_400.0, 60.0, 1000
_OUTAGE: Final = (*CONNECTION_ERRORS, OperationalError)
_CLOCK_SET_BACK: Final = timedelta(minutes=1)


class Tick(NamedTuple):
    """One time at which an entry is due."""

    at: datetime  # its identity
    last_run_at: datetime  # the entry's, once it has been sent


def tick_of(plan: BaseSchedule, last_run_at: datetime, now: datetime) -> Tick:
    """The tick of an entry that is due ``now``: the same for every beat that has read the same ``last_run_at``."""
    if isinstance(plan, schedule) and not plan.relative and plan.run_every > timedelta(0):
        latest = last_run_at + max(1, (now - last_run_at) // plan.run_every) * plan.run_every
        return Tick(latest, latest)
    try:
        due = now + plan.remaining_estimate(last_run_at)  # the first after the last run
    except NotImplementedError:
        due = now
    due = min(max(due, last_run_at), now)
    if isinstance(plan, crontab):
        due = (due + timedelta(seconds=30)).replace(second=0, microsecond=0)
    return Tick(due, now)


def job_id_of(schema: str, entry: str, tick: datetime) -> str:
    """The id of a tick's job."""
    return str(uuid5(NAMESPACE_URL, f"pgtruth-beat:{schema}:{entry}:{tick.astimezone(UTC).isoformat()}"))


class DatabaseClock:
    """The database's time, carried on between two looks at it by the monotonic clock."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._read = datetime.now(UTC)
        self._at = time.monotonic()
        self._stopped: datetime | None = None

    def set(self, now: datetime) -> None:
        """What the database has just said."""
        self._read, self._at = now.astimezone(UTC), time.monotonic()

    def now(self) -> datetime:
        """The database's time, in the app's zone: the ``nowfun`` of every schedule."""
        passed = timedelta(seconds=time.monotonic() - self._at)
        now: datetime = (self._stopped or self._read + passed).astimezone(self.app.timezone)
        return now

    @contextmanager
    def stopped(self) -> Iterator[datetime]:
        """Let the same moment be now as long as the body runs."""
        self._stopped = self.now().astimezone(UTC)
        try:
            yield self._stopped
        finally:
            self._stopped = None


class PgTruthScheduler(Scheduler):
    """Celery's scheduler interface over the tables ``beat_entries`` and ``beat_ticks``."""

    max_interval = 60.0

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self.settings = Settings.from_app(app)
        self.database = runtime(self.settings).database
        self.clock = DatabaseClock(app)
        self._connection: Connection | None = None
        self._held: dict[str, float] = {}  # entry -> when (monotonic) to try it again
        self._away = False
        self._checked = False  # the schema's revision
        self._misfit = False  # it is not this package's
        self._tidied = float("-inf")
        super().__init__(app, *args, **kwargs)

    # What Celery calls.

    def setup_schedule(self) -> None:
        self.merge_inplace(self.app.conf.beat_schedule)
        self.install_default_entries(self.schedule)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due; the seconds until the next look."""
        try:
            delay = self._look()
        except _OUTAGE as exc:
            self._drop_connection()
            if not self._away:
                logger.error("beat: the database is away, trying again every %g s: %s", RETRY, exc)
            self._away = True
            return RETRY
        except SchemaError as exc:
            logger.critical("beat: %s", exc)
            self._misfit = True
            raise SystemExit(os.EX_CONFIG) from None
        if self._away:
            logger.warning("beat: the database is back")
        self._away = False
        return delay

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._drop_connection()
        if self._misfit:
            raise SystemExit(os.EX_CONFIG)  # once more: Celery takes the first for a wish to stop, and exits with 0

    @property
    def info(self) -> str:
        return f"    . db -> {self.settings.masked()}, schema {self.settings.schema}"

    # One look at the schedule.

    def _look(self) -> float:
        connection = self._connected()
        entries = self.schedule
        if not entries:
            return float(self.max_interval)
        last_runs = self._last_runs(connection, entries)
        delay = float(self.max_interval)
        for name, entry in list(entries.items()):
            held = self._held.get(name, 0.0) - time.monotonic()
            wait = held if held > 0 else self._attend(connection, entry, last_runs[name])
            delay = min(delay, wait)
        self._tidy(connection)
        return max(0.0, delay)

    def _last_runs(self, connection: Connection, entries: Mapping[str, ScheduleEntry]) -> dict[str, datetime]:
        """When each entry last ran; new ones are entered. Sets the clock."""
        while True:
            rows = connection.execute(self.database.sql("beat_read"), {"entries": list(entries)}).fetchall()
            self.clock.set(rows[0][2])
            unknown = [name for name, last_run_at, _ in rows if last_run_at is None]
            if not unknown:
                return {name: last_run_at for name, last_run_at, _ in rows}
            connection.execute(self.database.sql("beat_enter"), {"entries": unknown})

    def _attend(self, connection: Connection, entry: ScheduleEntry, last_run_at: datetime) -> float:
        """Send ``entry`` if it is due; the seconds until it wants to be looked at again."""
        if last_run_at - self.clock.now() > _CLOCK_SET_BACK:
            connection.execute(self.database.sql("beat_rewind"), {"entry": entry.name, "seen": last_run_at})
            return 0.0
        plan = entry.schedule
        if isinstance(plan, BaseSchedule) and plan.nowfun is None:
            plan.nowfun = self.clock.now
        entry.last_run_at = last_run_at.astimezone(self.app.timezone)
        try:
            with self.clock.stopped() as now:
                due, wait = self.is_due(entry)
                tick = tick_of(plan, last_run_at, now) if due else None
        except Exception:
            logger.exception("beat: cannot tell when %r is due, trying again in %g s", entry.name, HOLD)
            return self._hold(entry)
        if tick is not None:
            if not self._send(connection, entry, last_run_at, tick):
                return 0.0  # another beat was first: look at what it has left
            if tick.last_run_at == tick.at and isinstance(plan, schedule):
                wait = (tick.at + plan.run_every - self.clock.now()).total_seconds()
        return float(wait) if isinstance(wait, int | float) else float(self.max_interval)

    def _send(self, connection: Connection, entry: ScheduleEntry, seen: datetime, tick: Tick) -> bool:
        """Publish the tick's job unless another beat has; one transaction. ``False``: another has."""
        job_id = job_id_of(self.settings.schema, entry.name, tick.at)
        found = {
            "entry": entry.name,
            "seen": seen,
            "last_run_at": tick.last_run_at,
            "tick_at": tick.at,
            "job_id": job_id,
        }
        this_run = self.Entry(**dict(entry, options={**entry.options, "task_id": job_id}))
        producer = self.producer
        try:
            with connection.transaction():
                connection.execute(self.database.sql("beat_limit"))
                if connection.execute(self.database.sql("beat_advance"), found).fetchone() is None:
                    return False
                with in_transaction(connection):
                    self.apply_async(this_run, producer=producer, advance=False)
        except SchedulingError as exc:
            cause = exc.__cause__ or exc.__context__
            if isinstance(cause, _OUTAGE):
                raise cause from exc
            logger.exception("beat: %r could not be sent, trying again in %g s", entry.name, HOLD)
            self._hold(entry)
            return True
        logger.info("beat: sent %s (%s), tick %s, job %s", entry.name, entry.task, tick.at.isoformat(), job_id)
        self.schedule[entry.name] = entry._next_instance(tick.last_run_at)
        return True

    def _hold(self, entry: ScheduleEntry) -> float:
        self._held[entry.name] = time.monotonic() + HOLD
        return HOLD

    def _tidy(self, connection: Connection) -> None:
        if time.monotonic() - self._tidied < TIDY:
            return
        self._tidied = time.monotonic()
        full = True
        while full:
            row = connection.execute(
                self.database.sql("beat_delete_old"), {"keep": KEEP, "count": TIDY_BATCH}
            ).fetchone()
            full = row is not None and row[0] >= TIDY_BATCH

    # The connection.

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = self.database.open("beat")
            self._connection.patience = PATIENCE
        if not self._checked:
            if self.settings.auto_migrate:
                migrate.migrate(self.settings)
            else:
                migrate.check(self.settings)
            self._checked = True
        return self._connection

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*CONNECTION_ERRORS):
                connection.close()
