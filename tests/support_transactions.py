"""What the tests of ``in_transaction`` and their worker's app share."""

from __future__ import annotations

import psycopg
import sqlalchemy as sa

from pgtruth_transport.urls import parse_url


def sqlalchemy_url(database_url: str, driver: str) -> sa.URL:
    """The same database for SQLAlchemy."""
    parts = psycopg.conninfo.conninfo_to_dict(parse_url(database_url))
    return sa.URL.create(
        f"postgresql+{driver}",
        str(parts["user"]),
        str(parts.get("password") or "") or None,
        str(parts["host"]),
        int(parts.get("port") or 5432),
        str(parts["dbname"]),
    )
