"""What stands between an app and the reliability contract: one finding per question, each with what to do about it.

Looks and changes nothing; the only thing it sends is one signal to a queue that nobody has. A check that cannot be made
is a finding too, never an exception.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import psycopg
from psycopg.rows import namedtuple_row

from pgtruth_transport import migrate
from pgtruth_transport.db import CONNECTION_ERRORS, Database
from pgtruth_transport.errors import PgTruthError, SchemaError
from pgtruth_transport.settings import Settings, mask_url
from pgtruth_transport.signals import open_signal

OLDEST_SERVER: Final = 140000
OBJECTIVE: Final = 25.0  # seconds to a terminal state after a single crash: ADR-003
WORK: Final = 5.0  # seconds of computing that ADR-003 reckons with
CLOCK_TOLERANCE: Final = 1.0
SIGNAL_TOLERANCE: Final = 3.0
PROBE_QUEUE: Final = "pgtruth.doctor"


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"  # it works, and not as well as it could
    FAIL = "fail"  # a worker would not start, or a promise does not hold


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer."""

    level: Level
    subject: str
    text: str


def examine(settings: Settings) -> list[Finding]:
    """Every finding, in the order in which they should be dealt with."""
    findings = [Finding(Level.OK, "URL", settings.masked())]
    database = Database(settings)
    try:
        with database.connection(patience=settings.connect_timeout) as connection:
            findings += _server(database, connection)
    except CONNECTION_ERRORS as exc:
        findings.append(
            Finding(Level.FAIL, "server", f"{_first_line(exc)}; check broker_url and that the server is up")
        )
    else:
        findings.append(_schema(settings))
        findings += _signal(settings, database)
    finally:
        database.close()
    findings.append(_objective(settings))
    return findings


def _server(database: Database, connection: psycopg.Connection[Any]) -> Iterator[Finding]:
    before = time.time()
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        row: Any = cursor.execute(database.sql("server_describe")).fetchone()
    middle = (before + time.time()) / 2
    if row.version_number < OLDEST_SERVER:
        yield Finding(Level.FAIL, "server", f"PostgreSQL {row.version} is too old; 14 or newer is needed")
    elif row.standby or row.read_only == "on":
        yield Finding(
            Level.FAIL,
            "server",
            f"PostgreSQL {row.version} is read-only here; give the URL every host and target_session_attrs=read-write",
        )
    else:
        yield Finding(Level.OK, "server", f"PostgreSQL {row.version}")
    if row.encoding != "UTF8":
        yield Finding(Level.WARN, "encoding", f"the database is {row.encoding}; names outside it cannot be stored")
    if row.fsync == "off" or row.synchronous_commit == "off":
        yield Finding(
            Level.WARN,
            "durability",
            f"fsync is {row.fsync}, synchronous_commit is {row.synchronous_commit}: a crash of the server may lose jobs"
            " that delay() has confirmed",
        )
    yield _clock(row.clock - middle)
    yield _connections(row.connections, row.max_connections)
    if connection.info.backend_pid != row.backend_pid:
        yield _pooler(database.settings)


def _clock(difference: float) -> Finding:
    text = (
        f"the database's clock is {abs(difference):.1f} s {'ahead of' if difference > 0 else 'behind'} this machine's"
    )
    if abs(difference) <= CLOCK_TOLERANCE:
        return Finding(Level.OK, "clock", text)
    return Finding(
        Level.WARN,
        "clock",
        f"{text}; only the database's counts, so countdowns and leases are right, and an absolute eta is off",
    )


def _connections(used: int, limit: int) -> Finding:
    text = f"{used} of {limit} in use; a worker process needs 3"
    level = Level.OK if used < 0.8 * limit else Level.WARN
    return Finding(level, "connections", text)


def _pooler(settings: Settings) -> Finding:
    advice = []
    if settings.prepare:
        advice.append("set prepare to False unless the pooler keeps prepared statements")
    if settings.signal_url is None and settings.listen_url is None:
        advice.append("give LISTEN a direct URL with listen_url")
    if not advice:
        return Finding(Level.OK, "pooler", "a connection pooler is in between, and the options suit it")
    return Finding(Level.WARN, "pooler", f"a connection pooler is in between: {', and '.join(advice)}")


def _schema(settings: Settings) -> Finding:
    try:
        migrate.check(settings)
    except SchemaError as exc:
        return Finding(Level.FAIL, "schema", str(exc))
    except psycopg.Error as exc:
        return Finding(Level.FAIL, "schema", f"cannot be read: {_first_line(exc)}")
    return Finding(Level.OK, "schema", f"{settings.schema} is at {migrate.head()}")


def _signal(settings: Settings, database: Database) -> Iterator[Finding]:
    """Send one signal and wait for its arrival."""
    shown = mask_url(settings.signal_url) if settings.signal_url else "LISTEN/NOTIFY"
    poll = f"polling finds every job within {settings.poll_interval:g} s"
    try:
        signal = open_signal(settings, database)
        if signal.name == "silent":
            yield Finding(Level.OK, "signal", f"{shown}: {poll}")
            return
        listener = signal.listener()
        try:
            took = _round_trip(signal, listener)
        finally:
            listener.close()
    except PgTruthError as exc:
        reason = _first_line(exc).rstrip(".")
        yield Finding(Level.WARN, "signal", f"{reason if shown in reason else f'{shown}: {reason}'}; {poll}")
        return
    if took is None:
        why = (
            "a transaction pooler swallows LISTEN: set listen_url" if settings.signal_url is None else "is it blocked?"
        )
        yield Finding(
            Level.WARN, "signal", f"{shown}: sent, and not heard within {SIGNAL_TOLERANCE:g} s ({why}); {poll}"
        )
    else:
        yield Finding(Level.OK, "signal", f"{shown}: heard after {took * 1000:.0f} ms")


def _round_trip(signal: Any, listener: Any) -> float | None:
    """Seconds from a wake-up to hearing it; None where it is not heard."""
    listener.watch([PROBE_QUEUE])
    deadline = time.monotonic() + SIGNAL_TOLERANCE
    while listener.fileno() < 0 and time.monotonic() < deadline:
        listener.drain()
        time.sleep(0.01)
    settled = time.monotonic() + 0.2  # a queue also counts as woken when its subscription begins: hear that first
    while time.monotonic() < settled:
        listener.drain()
        time.sleep(0.01)
    sent = time.monotonic()
    signal.wake({PROBE_QUEUE: ["doctor"]})
    while time.monotonic() < deadline:
        if PROBE_QUEUE in listener.drain().queues:
            return time.monotonic() - sent
        time.sleep(0.001)
    return None


def _objective(settings: Settings) -> Finding:
    bound = WORK + settings.lease_seconds + settings.reap_interval
    sum_ = f"{WORK:g} s of work + {settings.lease_seconds:g} s lease + {settings.reap_interval:g} s sweep = {bound:g} s"
    if bound <= OBJECTIVE:
        return Finding(Level.OK, "recovery", f"{sum_}, within {OBJECTIVE:g} s")
    return Finding(
        Level.WARN,
        "recovery",
        f"{sum_}: a crash takes longer than the objective of {OBJECTIVE:g} s; lower lease_seconds or reap_interval",
    )


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
