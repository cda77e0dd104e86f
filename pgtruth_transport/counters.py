"""Counts of things that leave no row behind: stale writes refused, wake-ups that found nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from .db import Database

STALE_WRITES = "stale_writes"
WAKEUPS_IGNORED = "wakeups_ignored"
LEASES_EXPIRED = "leases_expired"
JOBS_REQUEUED = "jobs_requeued"
UNKNOWN_TASKS = "unknown_tasks"


def add(conn: psycopg.Connection[Any], db: Database, counts: Mapping[str, int]) -> None:
    """Add to the counters, one statement."""
    names = sorted(name for name, value in counts.items() if value)
    if names:
        conn.execute(db.sql("counter_add"), {"names": names, "values": [counts[name] for name in names]})


def read(conn: psycopg.Connection[Any], db: Database) -> dict[str, int]:
    """All counters."""
    return {row[0]: row[1] for row in conn.execute(db.sql("counter_read")).fetchall()}
