"""Prometheus metrics, read from the tables at every scrape.

Promises: a scrape costs a handful of bounded statements and never fails: where the database cannot be read,
``pgtruth_up`` is 0 and the rest is missing, not zero. Gauges and the ``_total`` counters come from the database, so
every exporter shows the same and a restart loses nothing. The two histograms count the jobs that end while this
collector lives; they start at zero, as a process's counters do. They trail the clock by :data:`TRAIL_SECONDS`, so that
an end that commits a little after its time stamp is counted; one that commits later than that is missing from them.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pgtruth_transport import counters
from pgtruth_transport.db import CONNECTION_ERRORS, Connection, Database
from pgtruth_transport.states import Status

from . import health, queries

logger = logging.getLogger(__name__)

TRAIL_SECONDS: Final = 2.0
#: Where counting a queue's jobs stops in a scrape, whose price must not grow with a backlog.
SCRAPE_COUNT_LIMIT: Final = 5_000
#: Ends read per scrape: at 15 s between scrapes this keeps up with 3,000 jobs/s; what is left over comes next time.
ENDS_PER_SCRAPE: Final = 50_000
#: The longest wait for one statement of a scrape, in seconds.
PATIENCE: Final = 5.0
TOOK_BUCKETS: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 60.0, 120.0, 300.0)
RETRY_BUCKETS: Final = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0)
#: counters.name -> metric (without ``_total``), help.
COUNTERS: Final = {
    counters.LEASES_EXPIRED: ("pgtruth_lease_expired", "Leases that ran out: their job was taken from its holder"),
    counters.STALE_WRITES: ("pgtruth_stale_writes", "Writes of attempts that had lost their authority: refused"),
    counters.JOBS_REQUEUED: (
        "pgtruth_jobs_requeued",
        "Jobs that went back to the queue: retries, releases, recoveries",
    ),
    counters.WAKEUPS_IGNORED: ("pgtruth_wakeups_ignored", "Wake-ups that found nothing to claim"),
    counters.UNKNOWN_TASKS: ("pgtruth_unknown_tasks", "Claims of jobs whose task the worker did not know"),
}


class Tally:
    """A cumulative histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        names = [*(f"{bound:g}" if bound % 1 else f"{bound:.1f}" for bound in self.bounds), "+Inf"]
        return [(name, float(n)) for name, n in zip(names, accumulate(self.counts), strict=True)]


class JobCollector(Collector):
    """What ``celery -A app pgtruth exporter`` serves. Register it with any ``prometheus_client`` registry."""

    def __init__(self, database: Database, window: float = 300) -> None:
        self.database = database
        self.window = window  # seconds behind the gauges of recent ends
        self._lock = threading.Lock()
        self._read_until: str | None = None  # the ends up to here are in the histograms
        self._took = {status: Tally(TOOK_BUCKETS) for status in ("done", "failed")}
        self._retries = Tally(RETRY_BUCKETS)

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not need the database."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        found: list[Metric] = []
        try:
            with self._lock, queries.looking(self.database, PATIENCE) as conn:
                self._count_ends(conn)
                found += self._jobs(conn)
                found += self._recent(conn)
                found += self._health(conn)
                found += self._histograms()
        except CONNECTION_ERRORS as exc:
            logger.warning("metrics: the database cannot be read: %s", exc)
            found.clear()
        except Exception:
            logger.exception("metrics: a statement failed; is the schema up to date? (celery -A app pgtruth migrate)")
            found.clear()
        yield _gauge("pgtruth_up", "Whether the job tables could be read (1) or not (0)", bool(found))
        yield from found

    def _jobs(self, conn: Connection) -> Iterator[Metric]:
        db = self.database
        jobs = GaugeMetricFamily(
            "pgtruth_jobs",
            f"Open jobs by queue and status, and those due now (status=due); counting stops at {SCRAPE_COUNT_LIMIT}",
            labels=["queue", "status"],
        )
        oldest = GaugeMetricFamily(
            "pgtruth_oldest_due_seconds", "How long the longest waiting claimable job has been due", labels=["queue"]
        )
        for depth in queries.queues(conn, db, SCRAPE_COUNT_LIMIT):
            queued = depth.due.value + depth.scheduled.value + depth.open.value
            jobs.add_metric([depth.queue, Status.QUEUED], queued)
            jobs.add_metric([depth.queue, "due"], depth.due.value)
            jobs.add_metric([depth.queue, Status.PROCESSING], depth.processing.value)
            jobs.add_metric([depth.queue, Status.ENQUEUE_FAILED], depth.enqueue_failed.value)
            oldest.add_metric([depth.queue], depth.oldest_due or 0.0)
        yield jobs
        yield oldest
        holders = queries.holders(conn, db)
        yield _gauge("pgtruth_holders", "Worker processes that hold a job", len(holders))
        overdue = sum(h.expired for h in holders)
        yield _gauge("pgtruth_leases_overdue", "Leases that have run out and were not reaped yet", overdue)
        longest = max((h.longest for h in holders), default=0.0)
        yield _gauge("pgtruth_longest_attempt_seconds", "Age of the oldest attempt that is running", longest)
        for name, value in {**dict.fromkeys(COUNTERS, 0), **counters.read(conn, db)}.items():
            metric, text = COUNTERS.get(name, (f"pgtruth_{name}", "An event that leaves no row behind"))
            family = CounterMetricFamily(metric, text)
            family.add_metric([], value)
            yield family

    def _recent(self, conn: Connection) -> Iterator[Metric]:
        ends = queries.ends(conn, self.database, self.window)
        minutes = f"{self.window / 60:g} min"
        yield _gauge("pgtruth_jobs_per_minute", f"Jobs that ended per minute, over {minutes}", ends.per_minute)
        if ends.within is not None:
            text = f"Share of the jobs of the last {minutes} that ended within {queries.OBJECTIVE_SECONDS:g} s"
            yield _gauge("pgtruth_within_objective_ratio", text, ends.within)
        kept = GaugeMetricFamily(
            "pgtruth_jobs_kept", f"Ended jobs that are kept; counting stops at {queries.COUNT_LIMIT}", labels=["status"]
        )
        for status, count in queries.totals(conn, self.database).items():
            kept.add_metric([status], count.value)
        yield kept

    def _health(self, conn: Connection) -> Iterator[Metric]:
        db = self.database
        dead = GaugeMetricFamily("pgtruth_dead_rows", "Dead rows that vacuum has not removed yet", labels=["table"])
        share = GaugeMetricFamily("pgtruth_dead_rows_ratio", "Dead rows as a share of all", labels=["table"])
        size = GaugeMetricFamily("pgtruth_table_bytes", "Size on disk with indexes", labels=["table"])
        for table in health.tables(conn, db):
            dead.add_metric([table.table], table.dead)
            share.add_metric([table.table], table.dead_share)
            size.add_metric([table.table], table.table_bytes + table.index_bytes)
        yield from (dead, share, size)
        oldest = max((s.seconds or 0.0 for s in health.snapshots(conn, db)), default=0.0)
        yield _gauge("pgtruth_oldest_snapshot_seconds", "Age of the oldest snapshot that holds back vacuum", oldest)
        waiting, longest = health.lock_waits(conn, db)
        yield _gauge("pgtruth_lock_waits", "Sessions of this database that wait for a lock", waiting)
        yield _gauge("pgtruth_longest_lock_wait_seconds", "The longest of those waits", longest)
        unknown = GaugeMetricFamily(
            "pgtruth_effects_unknown", "Outside effects that may or may not have happened", labels=["kind"]
        )
        age = GaugeMetricFamily(
            "pgtruth_effects_unknown_oldest_seconds", "Age of the oldest unknown effect", labels=["kind"]
        )
        for effect in health.unknown_effects(conn, db):
            unknown.add_metric([effect.kind], effect.count)
            age.add_metric([effect.kind], effect.oldest)
        yield from (unknown, age)

    def _count_ends(self, conn: Connection) -> None:
        """Add the jobs that have ended since the last scrape to the histograms."""
        until = queries.clock(conn, self.database, TRAIL_SECONDS)
        if self._read_until is not None:
            found = queries.ended_since(conn, self.database, self._read_until, until, ENDS_PER_SCRAPE)
            for end in found:
                self._took[end.status].add(max(0.0, end.took))
                self._retries.add(end.retry_count)
            if len(found) >= ENDS_PER_SCRAPE:
                until = found[-1].ended_at
        self._read_until = until

    def _histograms(self) -> Iterator[Metric]:
        took = HistogramMetricFamily(
            "pgtruth_time_to_terminal_seconds",
            "From due (created, where it was retried) to done or failed; the objective is 95 % within 25 s",
            labels=["status"],
        )
        for status, tally in self._took.items():
            took.add_metric([status], tally.buckets(), tally.total)
        yield took
        retries = HistogramMetricFamily("pgtruth_retry_distribution", "Retries that a job had needed when it ended")
        retries.add_metric([], self._retries.buckets(), self._retries.total)
        yield retries


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
