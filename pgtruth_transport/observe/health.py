"""What the server says about the health of the tables: dead rows, old snapshots, lock waits, unknown effects.

These are the review triggers of ADR-007. Read from the server's statistics; no table is scanned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pgtruth_transport.db import Connection, Database

#: Sustained volume at which ADR-007 asks for a review, in jobs per minute.
VOLUME_TRIGGER: Final = 500
#: A snapshot older than this is worth a name: until it ends, no vacuum can remove a row that died after it began.
OLD_SNAPSHOT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class TableHealth:
    """Estimates of the server's statistics for one table."""

    table: str
    live: int
    dead: int
    updates: int
    hot_updates: int
    table_bytes: int
    index_bytes: int
    vacuumed: float | None  # seconds since the last vacuum; None = never

    @property
    def dead_share(self) -> float:
        return self.dead / (self.live + self.dead) if self.dead else 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Something that keeps an old view of the database alive."""

    kind: str  # session | replication slot | prepared transaction
    name: str
    pid: int | None
    age: int  # transactions since it began
    seconds: float | None

    @property
    def is_old(self) -> bool:
        return self.seconds is not None and self.seconds >= OLD_SNAPSHOT_SECONDS

    def __str__(self) -> str:
        pid = f", pid {self.pid}" if self.pid else ""
        since = f" for {self.seconds:,.0f} s" if self.seconds is not None else ""
        return f"{self.kind} {self.name}{pid} holds back vacuum{since} ({self.age:,} transactions)"


@dataclass(frozen=True, slots=True)
class UnknownEffects:
    """Outside effects of one kind that may or may not have happened."""

    kind: str
    count: int
    oldest: float  # seconds


def tables(conn: Connection, db: Database) -> list[TableHealth]:
    """The big tables."""
    params = {"schema": db.settings.schema}
    return [TableHealth(*row) for row in conn.execute(db.sql("observe_bloat"), params).fetchall()]


def snapshots(conn: Connection, db: Database, limit: int = 5) -> list[Snapshot]:
    """Who holds back vacuum, oldest first. Other users' sessions show only to a role with ``pg_read_all_stats``."""
    return [Snapshot(*row) for row in conn.execute(db.sql("observe_snapshots"), {"limit": limit}).fetchall()]


def lock_waits(conn: Connection, db: Database) -> tuple[int, float]:
    """Sessions of this database that wait for a lock, and the longest wait in seconds."""
    row = conn.execute(db.sql("observe_lock_waits")).fetchone()
    assert row is not None
    return int(row[0]), float(row[1])


def unknown_effects(conn: Connection, db: Database, limit: int = 10_000) -> list[UnknownEffects]:
    """Unknown effects by kind."""
    return [UnknownEffects(*row) for row in conn.execute(db.sql("observe_effects"), {"limit": limit}).fetchall()]
