"""Fixtures: real servers, a fresh migrated database per test, and worker processes.

A missing server is a failure, never a skip. ``PGTRUTH_TEST_POSTGRES_URL`` and ``PGTRUTH_TEST_REDIS_URL`` name servers
to use instead of the embedded ones.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from celery import _state

from pgtruth_transport import db as connections
from pgtruth_transport.db import Database
from pgtruth_transport.migrate import migrate
from pgtruth_transport.settings import Settings
from pgtruth_transport.testing.servers import PostgresServer, RedisServer, postgres_server, redis_server
from pgtruth_transport.urls import parse_url
from tests import support
from tests.support import WorkerProcess
from tests.support_lifecycle import forget_everything, fresh_database

SIGNALS = ("notify", "redis", "silent")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_database: a module's tests share a database: making hundreds takes minutes")


@pytest.fixture(scope="session")
def pg_server() -> Iterator[PostgresServer]:
    """The PostgreSQL server of this run; ``.dsn``, ``.url_for(database)``."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[RedisServer]:
    """The Redis or Valkey server of this run; ``.url``."""
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def template_database(pg_server: PostgresServer) -> Iterator[str]:
    """A migrated database with the table ``public.runs``; tests work on copies of it."""
    name = f"pgtruth_template_{secrets.token_hex(4)}"
    pg_server.create_database(name)
    url = pg_server.url_for(name)
    migrate(Settings.make(url))
    connections.close_all()
    with psycopg.connect(parse_url(url), autocommit=True) as connection:
        connection.execute(support.RUNS_TABLE)
    yield name
    pg_server.drop_database(name)


@pytest.fixture(scope="module")
def one_database(pg_server: PostgresServer, template_database: str) -> Iterator[str]:
    """The ``pgtruth://`` URL of a migrated database for all tests of a module; it is as the test before has left it."""
    with fresh_database(pg_server, template_database) as url:
        yield url


@pytest.fixture
def database_url(request: pytest.FixtureRequest, pg_server: PostgresServer, template_database: str) -> Iterator[str]:
    """The ``pgtruth://`` URL of a fresh, migrated database; under the mark ``one_database`` the module's, emptied."""
    if request.node.get_closest_marker("one_database") is None:
        with fresh_database(pg_server, template_database) as url:
            yield url
    else:
        shared: str = request.getfixturevalue("one_database")
        forget_everything(shared)
        yield shared


@pytest.fixture
def empty_database_url(pg_server: PostgresServer) -> Iterator[str]:
    """The ``pgtruth://`` URL of a fresh database without our schema."""
    with fresh_database(pg_server, "template0") as url:
        yield url


@pytest.fixture
def redis_url(valkey_server: RedisServer) -> str:
    """The URL of an empty Redis database."""
    with redis.Redis.from_url(valkey_server.url) as client:
        client.flushall()
    return valkey_server.url


@pytest.fixture(params=SIGNALS)
def signal_url(request: pytest.FixtureRequest) -> str | None:
    """Each way to signal in turn, as the option ``signal_url``."""
    match request.param:
        case "notify":
            return None
        case "silent":
            return "silent://"
        case _:
            url: str = request.getfixturevalue("redis_url")
            return url


@pytest.fixture
def settings(database_url: str) -> Settings:
    """Default settings for a fresh database."""
    return Settings.make(database_url)


@pytest.fixture
def db(settings: Settings) -> Database:
    """The pool for a fresh database."""
    return Database.of(settings)


@pytest.fixture
def conn(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A plain connection in autocommit: to arrange, and to look."""
    with psycopg.connect(parse_url(database_url), autocommit=True) as connection:
        yield connection


@pytest.fixture(autouse=True)
def celery_forgets() -> Iterator[None]:
    """Apps that a test makes are forgotten: Celery keeps shared tasks and a default app for the whole process.

    What imported modules share stays, since a module is imported once.
    """
    known, default = set(_state._on_app_finalizers), _state.default_app
    modules = set(sys.modules)
    yield
    imported = {
        name for name in set(sys.modules) - modules if name.startswith(("tasks", "celery", "pgtruth_transport"))
    }
    if not imported:
        _state._on_app_finalizers.intersection_update(known)
    _state.default_app = default


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """``eventually(condition, timeout)``: wait for a condition with a deadline."""
    return support.eventually


@pytest.fixture
def worker(database_url: str, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """``worker(name=…, pool=…, options=…, wait=True, …)`` starts a real worker process on the fresh database.

    Keyword arguments are those of :class:`tests.support.WorkerProcess`. Workers still alive at the end are ended.
    """
    started: list[WorkerProcess] = []

    def start(broker: str = database_url, *, wait: bool = True, **arguments: Any) -> WorkerProcess:
        arguments.setdefault("name", f"w{len(started) + 1}")
        log = tmp_path / f"worker-{len(started) + 1}-{arguments['name']}.log"
        process = WorkerProcess(broker, log, **arguments)
        started.append(process)
        return process.wait_ready() if wait else process

    yield start
    for process in started:
        if process.is_running():
            process.kill9()
        else:
            process.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Show the end of every worker's log beside a failure."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "call" and report.failed and folder is not None:
        for log in sorted(Path(folder).glob("*.log")):
            report.sections.append((log.name, "\n".join(log.read_text(errors="replace").splitlines()[-60:])))
    return report
