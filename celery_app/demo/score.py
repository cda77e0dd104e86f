"""The final figures and the verdict. Every number is the answer to a query or a count of lines in the runs file.

:func:`judge` is pure: it says what is wrong, and says nothing when all is well.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from celery_app.demo.payments import Charges
from celery_app.demo.work import Submitted
from celery_app.recorder import Runs

OBJECTIVE = 25.0  # seconds: 95 % of jobs are terminal by then (reliability contract, section 6)
SQL = Path(__file__).with_name("sql")
TERMINAL = {"done", "failed"}


@dataclass(frozen=True, slots=True)
class Job:
    """One row of jobs, with what its attempts say."""

    id: str
    status: str
    attempts: int
    ends: int  # attempts that ended the job: never more than one
    expired: int  # attempts that the sweep ended
    stolen: int  # of these, attempts of workers that nothing had happened to


@dataclass(frozen=True, slots=True)
class TaskLine:
    """The jobs of one task."""

    task: str
    jobs: int
    done: int
    failed: int
    open: int
    p95: float | None


@dataclass(frozen=True, slots=True)
class Score:
    """All that the final table shows."""

    jobs: dict[str, Job]
    lines: list[TaskLine]
    counters: dict[str, int]
    times: tuple[float, float, float]  # p50, p95, max
    unknown_effects: int
    outcomes: dict[str, int]  # of attempts

    @property
    def by_status(self) -> Counter[str]:
        """Jobs by status."""
        return Counter(job.status for job in self.jobs.values())

    @property
    def recovered(self) -> int:
        """Attempts that the sweep ended because their lease had run out."""
        return sum(job.expired for job in self.jobs.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong: empty sets where all is well."""

    lost: frozenset[str]  # handed in and not there, or there and not terminal
    doubled: frozenset[str]  # ended twice, run without a claim of its own, or taken from a worker that was well
    broken: frozenset[str]  # failed though nothing but the demo's own faults stood in its way
    late: float | None  # the p95 when it misses the objective
    charges: frozenset[str]  # orders that were not charged exactly once

    @property
    def well(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.doubled or self.broken or self.charges) and self.late is None


def ask(connection: psycopg.Connection[Any], name: str, **values: object) -> list[tuple[Any, ...]]:
    """The rows of one of the statements in ``sql/``."""
    return connection.execute((SQL / f"{name}.sql").read_bytes(), values).fetchall()


def read(connection: psycopg.Connection[Any], victims: list[str]) -> Score:
    """Ask the database for everything; ``victims`` are the workers that the story froze or killed."""
    p50, p95, longest = (float(value or 0) for value in ask(connection, "times")[0])
    return Score(
        jobs={row[0]: Job(*row) for row in ask(connection, "jobs", victims=victims)},
        lines=[TaskLine(*row) for row in ask(connection, "by_task")],
        counters={str(name): int(value) for name, value in ask(connection, "counters")},
        times=(p50, p95, longest),
        unknown_effects=int(ask(connection, "effects_unknown")[0][0]),
        outcomes=dict(ask(connection, "outcomes")),
    )


def judge(score: Score, runs: Runs, work: Submitted, charges: Charges) -> Verdict:
    """Lost, doubled, broken, late, charged twice or never."""
    jobs = score.jobs
    lost = {job_id for job_id in work.ids if job_id not in jobs}
    lost |= {job.id for job in jobs.values() if job.status not in TERMINAL}
    doubled = {job.id for job in jobs.values() if job.ends > 1 or job.stolen}
    doubled |= {job.id for job in jobs.values() if runs.started[job.id] > job.attempts}
    broken = {job.id for job in jobs.values() if job.status == "failed" and job.id not in work.hopeless}
    p95 = score.times[1]
    late = p95 if p95 > OBJECTIVE else None
    return Verdict(frozenset(lost), frozenset(doubled), frozenset(broken), late, charges.wrong)
