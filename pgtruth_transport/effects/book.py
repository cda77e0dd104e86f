"""The ledger as people and beat read it. Nothing here begins or calls an effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row

from pgtruth_transport.db import Database, retrying
from pgtruth_transport.effects.states import EffectState

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of a list of effects."""

    key: str
    kind: str
    state: str
    calls: int
    job_id: str | None
    resource: str | None
    fence: int | None
    error: str | None
    checks: int
    started_at: datetime
    updated_at: datetime
    unknown_since: datetime | None
    age: float  # seconds since it became unknown; otherwise since it last changed


@dataclass(frozen=True, slots=True)
class Move:
    """One line of an effect's history; ``from_state == to_state``: nothing moved, something was noted."""

    at: datetime
    calls: int
    from_state: str | None
    to_state: str
    who: str
    why: str
    fingerprint: str
    fence: int | None


def listed(
    database: Database, states: Sequence[EffectState], *, kind: str | None = None, limit: int = 100
) -> list[Listed]:
    """Effects in these states: unknown ones first, the oldest first; then the latest change first."""
    parameters = {"states": [state.value for state in states], "kind": kind, "limit": limit}
    with database.connection() as conn, conn.cursor(row_factory=class_row(Listed)) as cursor:
        return cursor.execute(database.sql("effect_list"), parameters).fetchall()


def history(database: Database, key: str) -> list[Move]:
    """Everything that happened to one effect, the first first."""
    with database.connection() as conn, conn.cursor(row_factory=class_row(Move)) as cursor:
        return cursor.execute(database.sql("effect_show"), {"key": key}).fetchall()


def lapse_due(database: Database, who: str, limit: int) -> list[str]:
    """Make unknown what was started by attempts that are gone; the keys."""
    return _keys(database, "effect_lapse_due", {"who": who, "limit": limit})


def due(database: Database, kinds: Sequence[str], limit: int) -> list[str]:
    """Unknown effects of these kinds whose recipient it is time to ask, each given to one asker."""
    return _keys(database, "effect_due", {"kinds": list(kinds), "limit": limit})


def prune(database: Database, older_than: float, *, batch: int = 1000) -> int:
    """Delete settled effects that have not changed for ``older_than`` seconds: their keys may be called again."""
    deleted = 0
    while True:
        with database.connection() as conn:
            number = conn.execute(database.sql("effect_delete_old"), {"age": older_than, "limit": batch}).rowcount
        deleted += number
        if number < batch:
            return deleted


def _keys(database: Database, name: str, parameters: dict[str, Any]) -> list[str]:
    def run() -> list[str]:
        with database.connection() as conn:
            return [row[0] for row in conn.execute(database.sql(name), parameters).fetchall()]

    return retrying(run)
