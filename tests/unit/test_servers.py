"""The embedded servers: they restart with their data, and they end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psycopg
import pytest
import redis

from pgtruth_transport.testing.servers import EmbeddedPostgres, EmbeddedValkey, PostgresServer, RedisServer
from pgtruth_transport.urls import parse_url
from tests.support import ROOT, eventually


def test_postgres_keeps_its_data_through_restart_and_crash() -> None:
    with EmbeddedPostgres() as server:
        server.create_database("kept")
        for again in (server.restart, lambda: (server.stop_hard(), server.start())):
            again()
            with psycopg.connect(parse_url(server.url_for("kept"))) as connection:
                assert connection.execute("SELECT current_database()").fetchone() == ("kept",)
        folder = server.log.parent
    assert not folder.exists()


def test_valkey_comes_back_empty_on_the_same_port() -> None:
    with EmbeddedValkey(options={"maxmemory": "2mb"}) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        server.restart()
        assert client.get("key") is None
        server.stop_hard()
        with pytest.raises(redis.ConnectionError):
            client.ping()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_process_that_is_killed(number: signal.Signals) -> None:
    code = (
        "import signal; from pgtruth_transport.testing.servers import EmbeddedPostgres, EmbeddedValkey\n"
        "p, v = EmbeddedPostgres().start(), EmbeddedValkey().start()\n"
        "print(p.log.parent, p._process.pid, v._process.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        folder, *pids = process.stdout.readline().split()
        process.send_signal(number)
    eventually(lambda: not os.path.exists(folder) and not any(_alive(int(pid)) for pid in pids))


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("dsn", "database", "expected"),
    [
        ("postgresql://u:p@h:1/postgres", "x", "pgtruth://u:p@h:1/x"),
        ("postgresql://h/postgres?sslmode=require", "x", "pgtruth://h/x?sslmode=require"),
    ],
)
def test_urls_of_a_server_that_the_environment_names(dsn: str, database: str, expected: str) -> None:
    assert PostgresServer(dsn).url_for(database) == expected


def test_urls_of_a_redis_that_the_environment_names() -> None:
    assert RedisServer("redis://:p@h:1/0?x=1").url_for(3) == "redis://:p@h:1/3?x=1"
    assert RedisServer("redis://h").url_for(3) == "redis://h/3"
