"""What the tests of the field cases share: fast options, and a PostgreSQL of the test's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgtruth_transport import db as connections
from pgtruth_transport.migrate import migrate
from pgtruth_transport.settings import Settings
from pgtruth_transport.testing.servers import EmbeddedPostgres
from pgtruth_transport.urls import parse_url
from tests.support import RUNS_TABLE
from tests.support_proxy import Proxy

Conn = psycopg.Connection[Any]

#: A fifth of the defaults: leases of 3 s, sweeps every second.
FAST: Final = {"lease_seconds": 3, "reap_interval": 1, "poll_interval": 0.3}
APP: Final = "tests.apps.field_faults"


@dataclass(frozen=True, slots=True)
class OwnDatabase:
    """A migrated database on a server of its own."""

    server: EmbeddedPostgres
    url: str

    def connect(self) -> Conn:
        """A plain connection; the caller closes it, and opens another after a restart."""
        return psycopg.connect(parse_url(self.url), autocommit=True)


@contextmanager
def own_database(options: Mapping[str, str] | None = None) -> Iterator[OwnDatabase]:
    """Start a server for one test, with the job tables and ``public.runs``."""
    with EmbeddedPostgres(options=options) as server:
        server.create_database("field")
        url = server.url_for("field")
        migrate(Settings.make(url))
        connections.close_all()
        with psycopg.connect(parse_url(url), autocommit=True) as conn:
            conn.execute(RUNS_TABLE)
        yield OwnDatabase(server, url)
        connections.close_all()


@contextmanager
def proxied(url: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy in front of a database, and the URL that goes through it."""
    where = conninfo_to_dict(parse_url(url))
    with Proxy(str(where["host"]), int(str(where["port"]))) as proxy:
        yield proxy, url.replace(f"{where['host']}:{where['port']}", f"{proxy.host}:{proxy.port}")


def one(conn: Conn, query: str, *params: Any) -> Any:
    """The first value of the only row of a query."""
    row = conn.execute(query, params).fetchone()  # type: ignore[call-overload]
    assert row is not None
    return row[0]
