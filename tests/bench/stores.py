"""Private PostgreSQL and Redis/Valkey servers, the way a careful team would run them, ended with the harness.

They come from the ``embedded`` extra, like the tests' servers, but with durable commits and production-sized buffers.
RabbitMQ is not started: its systems run only where ``BENCH_AMQP_URL`` names a server.
"""

from __future__ import annotations

import os
import tempfile

import procfs
import psycopg

from pgtruth_transport.testing.servers import EmbeddedPostgres, EmbeddedValkey

WORK = os.environ.get("BENCH_WORK") or os.path.join(tempfile.gettempdir(), "pgtruth-bench")
PG_CONF = {"synchronous_commit": "on", "shared_buffers": "1GB", "max_wal_size": "4GB"}
#: As Debian packages it: snapshots, no append-only file (an adapter may switch it on).
REDIS_CONF = {"save": "3600 1 300 100 60 10000"}


class Postgres:
    """One server, a database per system."""

    def __init__(self) -> None:
        self.server = EmbeddedPostgres(durable=True, options=PG_CONF).start()
        self.admin = self.server.connect()
        self.pid = procfs.parent(self.admin.info.backend_pid)

    def url(self, db: str) -> str:
        return self.server.dsn_for(db)

    def recreate(self, db: str) -> None:
        self.server.drop_database(db)
        self.server.create_database(db)

    def stats(self, db: str) -> tuple[int, int]:
        """Bytes of WAL so far; commits of this database."""
        q = "SELECT pg_current_wal_lsn() - '0/0', (SELECT xact_commit FROM pg_stat_database WHERE datname = %s)"
        wal, commits = self.admin.execute(q, (db,)).fetchone() or (0, 0)
        return int(str(wal or 0)), int(str(commits or 0))

    def checkpoint(self) -> None:
        self.admin.execute("CHECKPOINT")

    def vacuum_analyze(self, db: str) -> None:
        """As autovacuum would have by the time that a big backlog stands."""
        with psycopg.connect(self.url(db), autocommit=True) as c:
            c.execute("VACUUM ANALYZE")

    def stop(self) -> None:
        self.admin.close()
        self.server.stop()


class Redis:
    """One server; adapters flush it."""

    def __init__(self) -> None:
        import redis

        self.server = EmbeddedValkey(options=REDIS_CONF).start()
        self.url = self.server.url.removesuffix("/0")
        self.pid = int(redis.from_url(self.url).info("server")["process_id"])

    def stop(self) -> None:
        self.server.stop()
