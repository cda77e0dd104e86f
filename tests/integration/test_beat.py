"""Beats: one job per entry and tick, whatever happens to the beats, the database or the process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule

from pgtruth_transport.beat import PgTruthScheduler, job_id_of, tick_of
from pgtruth_transport.errors import SettingsError
from pgtruth_transport.migrate import migrate
from pgtruth_transport.settings import Settings
from pgtruth_transport.testing.processes import ServerProcess
from pgtruth_transport.testing.servers import EmbeddedPostgres, PostgresServer
from pgtruth_transport.urls import parse_url
from tests.support import ROOT, app_environment, eventually

EVERY = {"beat_schedule": {"entry": {"task": "tests.apps.basic.noop", "schedule": 1.0}}}
NOW = datetime(2026, 3, 4, 12, 0, 30, tzinfo=UTC)


class Beats:
    """Real ``celery beat -S pgtruth`` processes."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.started: list[ServerProcess] = []

    def start(self, conf: dict[str, Any] | None = None) -> ServerProcess:
        env = os.environ | app_environment(self.url, conf=conf or EVERY)
        command = [sys.executable, "-m", "celery", "-A", "tests.apps.basic", "beat", "-S", "pgtruth", "-l", "INFO"]
        command += ["--pidfile="]
        beat = ServerProcess(command, self.folder / f"beat-{len(self.started) + 1}.log", env=env, cwd=ROOT)
        self.started.append(beat)
        return beat

    def stop(self) -> None:
        for beat in self.started:
            beat.end(signal.SIGKILL)


@pytest.fixture
def beats(database_url: str, tmp_path: Path) -> Iterator[Beats]:
    """Start beats on the fresh database; all are killed at the end."""
    found = Beats(database_url, tmp_path)
    yield found
    found.stop()


def sent(conn: psycopg.Connection[Any]) -> int:
    """How many jobs there are."""
    row = conn.execute("SELECT count(*) FROM pgtruth.jobs").fetchone()
    assert row is not None
    return int(row[0])


def check_ticks(conn: psycopg.Connection[Any]) -> list[tuple[datetime, datetime]]:
    """Every tick has its job, every job its tick, and ticks are whole seconds apart; returns (tick, sent)."""
    query = "SELECT t.tick_at, j.created_at, j.id FROM pgtruth.beat_ticks t FULL JOIN pgtruth.jobs j ON j.id = t.job_id"
    rows = conn.execute(query + " ORDER BY t.tick_at").fetchall()
    assert all(tick is not None and job_id is not None for tick, _, job_id in rows)
    for earlier, later in pairwise(rows):
        assert (later[0] - earlier[0]) % timedelta(seconds=1) == timedelta(0)
    return [(tick, created) for tick, created, _ in rows]


def test_three_beats_send_each_tick_once_though_one_is_killed(beats: Beats, conn: psycopg.Connection[Any]) -> None:
    for _ in range(3):
        beats.start()
    eventually(lambda: sent(conn) >= 3, 30)
    beats.started[0].end(signal.SIGKILL)
    eventually(lambda: sent(conn) >= 8, 30)
    rows = check_ticks(conn)
    first, last = rows[0][0], rows[-1][0]
    assert len(rows) == (last - first) // timedelta(seconds=1) + 1  # none doubled, none left out
    assert all(created - tick < timedelta(seconds=0.9) for tick, created in rows)


def test_a_frozen_beat_does_not_hold_up_the_others(beats: Beats, conn: psycopg.Connection[Any]) -> None:
    frozen = beats.start()
    eventually(lambda: sent(conn) >= 1, 30)
    beats.start()
    eventually(lambda: "beat: Starting" in beats.started[1].tail(50), 30)
    os.kill(frozen.pid, signal.SIGSTOP)
    before = sent(conn)
    eventually(lambda: sent(conn) >= before + 3, 20)
    os.kill(frozen.pid, signal.SIGCONT)
    after = sent(conn)
    eventually(lambda: sent(conn) >= after + 2, 10)
    check_ticks(conn)


def test_restarts_closer_together_than_the_interval_keep_the_beat(beats: Beats, conn: psycopg.Connection[Any]) -> None:
    every = {"beat_schedule": {"entry": {"task": "tests.apps.basic.noop", "schedule": 4.0}}}
    begin = datetime.now(UTC)
    while sent(conn) < 3:
        assert datetime.now(UTC) - begin < timedelta(seconds=40)
        beat = beats.start(every)
        before = sent(conn)
        beat.wait_until(lambda beat=beat: "beat: Starting" in beat.tail(50), 20)  # type: ignore[misc]
        with suppress(AssertionError):
            eventually(lambda before=before: sent(conn) > before, 2)  # type: ignore[misc]
        beat.end(signal.SIGTERM, 5)
    rows = check_ticks(conn)
    assert (rows[-1][0] - rows[0][0]) // timedelta(seconds=4) <= 3
    assert all(created - tick < timedelta(seconds=4) for tick, created in rows)


def test_missed_ticks_are_made_up_for_by_one_run(beats: Beats, conn: psycopg.Connection[Any]) -> None:
    conn.execute(
        "INSERT INTO pgtruth.beat_entries (name, last_run_at) VALUES ('entry', clock_timestamp() - interval '1 hour')"
    )
    beats.start()
    eventually(lambda: sent(conn) >= 3, 30)
    rows = check_ticks(conn)
    assert len(rows) <= 4
    assert rows[0][1] - rows[0][0] < timedelta(seconds=1)  # the latest of the missed ticks, not the first


def test_beats_go_on_within_one_interval_of_an_outage(tmp_path: Path) -> None:
    with EmbeddedPostgres() as server:
        server.create_database("beat")
        url = server.url_for("beat")
        beats = Beats(url, tmp_path)
        try:
            beat = beats.start({**EVERY, "broker_transport_options": {"auto_migrate": True}})
            eventually(lambda: count(url) >= 2, 40)
            before = count(url)
            server.stop_hard()
            beat.wait_until(lambda: "the database is away" in beat.tail(50), 10)
            server.start()
            began = time.monotonic()
            eventually(lambda: count(url) >= before + 1, 10)
            assert time.monotonic() - began < 3
            eventually(lambda: count(url) >= before + 3, 10)
            with psycopg.connect(parse_url(url), autocommit=True) as conn:
                check_ticks(conn)
        finally:
            beats.stop()


def count(url: str) -> int:
    """How many jobs there are; none where there is nobody to ask, or no table yet."""
    try:
        with psycopg.connect(parse_url(url), autocommit=True) as conn:
            return sent(conn)
    except psycopg.Error:
        return 0


class Custom(BaseSchedule):
    """A schedule of the user's own: always due."""

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        return True, 5.0


TABLE: list[tuple[BaseSchedule, datetime, datetime, datetime]] = [
    # schedule, last run, its tick, last run after it; all at NOW
    (schedule(10), NOW - timedelta(seconds=10), NOW, NOW),
    (schedule(10), NOW - timedelta(seconds=14), NOW - timedelta(seconds=4), NOW - timedelta(seconds=4)),
    (schedule(10), NOW - timedelta(seconds=95), NOW - timedelta(seconds=5), NOW - timedelta(seconds=5)),
    (schedule(0.5), NOW - timedelta(seconds=0.7), NOW - timedelta(seconds=0.2), NOW - timedelta(seconds=0.2)),
    (schedule(0), NOW - timedelta(seconds=1), NOW - timedelta(seconds=1), NOW),
    (crontab(), NOW - timedelta(seconds=40), NOW.replace(second=0), NOW),
    (crontab(minute="30"), NOW.replace(hour=9, minute=40), NOW.replace(hour=10, minute=30, second=0), NOW),
    (crontab(minute="0", hour="3"), NOW - timedelta(days=3), NOW.replace(day=2, hour=3, second=0), NOW),
    (Custom(), NOW - timedelta(seconds=5), NOW, NOW),
]


@pytest.mark.parametrize(("plan", "last_run_at", "tick", "after"), TABLE)
def test_tick_of_an_entry(plan: BaseSchedule, last_run_at: datetime, tick: datetime, after: datetime) -> None:
    plan.app = Celery(set_as_current=False)
    plan.nowfun = lambda: NOW
    assert tick_of(plan, last_run_at, NOW) == (tick, after)


def test_job_id_follows_from_entry_and_tick() -> None:
    tokyo = NOW.astimezone(timezone(timedelta(hours=9)))
    assert job_id_of("pgtruth", "entry", NOW) == job_id_of("pgtruth", "entry", tokyo)
    assert len({job_id_of(s, e, t) for s in "ab" for e in "cd" for t in (NOW, NOW + timedelta(microseconds=1))}) == 8


@pytest.fixture
def app(database_url: str) -> Iterator[Celery]:
    """An app with one task and no schedule yet."""
    app = Celery("test_beat", broker=database_url, set_as_current=False)

    @app.task(name="noop", shared=False)
    def noop(*args: object) -> None: ...

    yield app
    app.close()


@pytest.fixture
def scheduler(app: Celery) -> Iterator[Callable[..., PgTruthScheduler]]:
    """``scheduler(entry=schedule, …)``: a scheduler in this process."""
    with ExitStack() as stack:

        def make(**entries: Any) -> PgTruthScheduler:
            app.conf.beat_schedule = {name: {"task": "noop", "schedule": plan} for name, plan in entries.items()}
            return stack.enter_context(closing(PgTruthScheduler(app)))

        yield make


def age(conn: psycopg.Connection[Any], entry: str, by: str) -> None:
    """Move an entry's last run into the past."""
    conn.execute(
        "UPDATE pgtruth.beat_entries SET last_run_at = last_run_at - %s::interval WHERE name = %s", (by, entry)
    )


def test_two_schedulers_that_read_the_same_state_send_one_job(
    scheduler: Callable[..., PgTruthScheduler], conn: psycopg.Connection[Any]
) -> None:
    one, other = scheduler(entry=60.0), scheduler(entry=60.0)
    assert one.tick() > 50
    age(conn, "entry", "61 seconds")
    stale = other._last_runs(other._connected(), other.schedule)
    assert one.tick() == pytest.approx(59, abs=1)
    assert other._attend(other._connected(), other.schedule["entry"], stale["entry"]) == 0.0
    assert other.tick() == pytest.approx(59, abs=1)
    assert sent(conn) == 1


def test_crontab_and_custom_schedules_are_sent_once_per_tick(
    scheduler: Callable[..., PgTruthScheduler], conn: psycopg.Connection[Any]
) -> None:
    beat = scheduler(cron=crontab(minute="0", hour="3"), interval=3600.0)
    beat.tick()
    assert sent(conn) == 0
    age(conn, "cron", "3 days")
    assert beat.tick() <= 60
    beat.tick()
    assert sent(conn) == 1
    assert conn.execute("SELECT extract(minute FROM tick_at) FROM pgtruth.beat_ticks").fetchone() == (0,)


def test_the_database_clock_counts_not_the_process(
    scheduler: Callable[..., PgTruthScheduler], conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = scheduler(entry=60.0)
    monkeypatch.setattr(Celery, "now", lambda self: datetime.now(UTC) + timedelta(days=1))
    assert 50 < beat.tick() <= 60
    assert sent(conn) == 0


def test_a_last_run_in_the_future_is_brought_back(
    scheduler: Callable[..., PgTruthScheduler], conn: psycopg.Connection[Any]
) -> None:
    beat = scheduler(entry=5.0)
    beat.tick()
    age(conn, "entry", "-1 day")
    assert beat.tick() == 0.0
    assert 0 < beat.tick() <= 5
    assert sent(conn) == 0


def test_an_entry_that_cannot_be_sent_does_not_stop_the_others(
    scheduler: Callable[..., PgTruthScheduler], conn: psycopg.Connection[Any], app: Celery
) -> None:
    beat = scheduler(bad=60.0, good=60.0)
    beat.schedule["bad"].args = (object(),)
    beat.tick()
    age(conn, "bad", "61 seconds")
    age(conn, "good", "61 seconds")
    beat.tick()
    beat.tick()
    assert conn.execute("SELECT entry FROM pgtruth.beat_ticks").fetchall() == [("good",)]
    beat.schedule["bad"].args = ()
    beat._held.clear()
    beat.tick()
    assert sent(conn) == 2  # the tick was not lost


def test_old_ticks_are_deleted(scheduler: Callable[..., PgTruthScheduler], conn: psycopg.Connection[Any]) -> None:
    conn.execute(
        "INSERT INTO pgtruth.beat_ticks SELECT 'old', clock_timestamp() - n * interval '1 second', 'x',"
        " clock_timestamp() - interval '2 days' FROM generate_series(1, 2500) n"
    )
    scheduler(entry=60.0).tick()
    assert conn.execute("SELECT count(*) FROM pgtruth.beat_ticks").fetchone() == (0,)


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (None, "there is no schema 'pgtruth' in pgtruth://postgres:**@"),
        ("0001_core", "older than this package"),
        ("9999_future", "pip install --upgrade pgtruth-transport"),
    ],
)
def test_a_wrong_schema_is_one_line_that_says_what_to_do(
    pg_server: PostgresServer, empty_database_url: str, tmp_path: Path, version: str | None, advice: str
) -> None:
    if version is not None:
        migrate(Settings.make(empty_database_url))
        with psycopg.connect(parse_url(empty_database_url), autocommit=True) as conn:
            conn.execute("UPDATE pgtruth.alembic_version SET version_num = %s", (version,))
    beats = Beats(empty_database_url, tmp_path)
    try:
        beat = beats.start()
        assert beat.wait(20) == 78
    finally:
        beats.stop()
    log = (tmp_path / "beat-1.log").read_text()
    (said,) = [line for line in log.splitlines() if "CRITICAL" in line]
    assert advice in said
    assert ("celery -A app pgtruth migrate" in said) is (version != "9999_future")
    assert "Traceback" not in log
    assert log.endswith(said + "\n")


def test_another_broker_is_said() -> None:
    with pytest.raises(SettingsError, match="pgtruth://"):
        PgTruthScheduler(Celery("other", broker="memory://", set_as_current=False))
