"""``in_transaction`` on a Django connection alias."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import django
import psycopg
import pytest
from django.conf import settings as django_settings
from django.db import connections, transaction
from django.db.utils import DataError

from pgtruth_transport.db import Database
from pgtruth_transport.settings import Settings
from pgtruth_transport.testing.servers import PostgresServer
from pgtruth_transport.transactions import TransactionError, in_transaction
from pgtruth_transport.urls import parse_url
from tests.integration.test_transactions_kinds import Recorder, ids, put
from tests.integration.test_transactions_kinds import signal as signal  # a fixture

ALIAS = {"ENGINE": "django.db.backends.postgresql", "NAME": "unset", "CONN_MAX_AGE": 60}


@pytest.fixture(autouse=True)
def alias(database_url: str) -> Iterator[None]:
    """Django's ``default`` is the fresh database."""
    if not django_settings.configured:
        sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
        django_settings.configure(DATABASES={"default": dict(ALIAS), "sqlite": sqlite}, USE_TZ=True)
        django.setup()
    point("default", database_url)
    yield
    connections.close_all()


def point(name: str, url: str) -> None:
    """Have an alias lead to ``url``."""
    parts = psycopg.conninfo.conninfo_to_dict(parse_url(url))
    connections[name].close()
    connections[name].settings_dict.update(
        NAME=parts["dbname"],
        HOST=parts["host"],
        PORT=parts["port"],
        USER=parts["user"],
        PASSWORD=parts.get("password") or "",
    )


def run(statement: str) -> None:
    """A statement of the application."""
    with connections["default"].cursor() as cursor:
        cursor.execute(statement)


def test_commit_brings_data_and_jobs_together(db: Database, conn: psycopg.Connection[Any], signal: Recorder) -> None:
    conn.execute("CREATE TABLE orders (id int)")
    with transaction.atomic():
        with in_transaction("default"):
            put(db, "a")
            run("INSERT INTO orders VALUES (1)")
            put(db, "b")
        put(db, "at once")
        assert ids(conn) == {"at once"}
        assert signal.woken == ["at once"]
    assert ids(conn) == {"at once", "a", "b"}
    assert signal.woken == ["at once", "a", "b"]
    assert conn.execute("SELECT count(*) FROM orders").fetchone() == (1,)


def test_rollback_leaves_nothing_and_wakes_nobody(
    db: Database, conn: psycopg.Connection[Any], signal: Recorder
) -> None:
    with suppress(ZeroDivisionError), transaction.atomic(), in_transaction("default"):
        put(db, "a")
        run("SELECT 1")
        put(db, "b")
        raise ZeroDivisionError
    assert ids(conn) == set()
    assert signal.woken == []


def test_savepoints(db: Database, conn: psycopg.Connection[Any], signal: Recorder) -> None:
    with transaction.atomic():
        with in_transaction("default"):
            put(db, "outside")
            with suppress(ZeroDivisionError), transaction.atomic():
                put(db, "lost")
                run("SELECT 1")
                put(db, "lost too")
                raise ZeroDivisionError
            with transaction.atomic():
                put(db, "kept")
        with suppress(ZeroDivisionError), transaction.atomic(), in_transaction("default"):
            put(db, "lost in a block")
            raise ZeroDivisionError
    assert ids(conn) == {"outside", "kept"}
    assert signal.woken == ["outside", "kept"]


def test_exception_that_the_transaction_survives(db: Database, conn: psycopg.Connection[Any], signal: Recorder) -> None:
    with transaction.atomic(), suppress(ZeroDivisionError), in_transaction("default"):
        put(db, "a")
        raise ZeroDivisionError
    assert ids(conn) == {"a"}


def test_hooks_after_the_commit_publish_at_once(db: Database, conn: psycopg.Connection[Any], signal: Recorder) -> None:
    with transaction.atomic(), in_transaction("default"):
        put(db, "a")
        transaction.on_commit(lambda: put(db, "hook"))  # what delay_on_commit does
    assert ids(conn) == {"a", "hook"}
    with suppress(ZeroDivisionError), transaction.atomic(), in_transaction("default"):
        transaction.on_commit(lambda: put(db, "never"))
        raise ZeroDivisionError
    assert ids(conn) == {"a", "hook"}


def test_many_are_written_with_few_statements(db: Database, conn: psycopg.Connection[Any], signal: Recorder) -> None:
    with transaction.atomic():
        with in_transaction("default"):
            put(db, *(f"{number:04}" for number in range(2500)))
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT count(DISTINCT cmin::text), count(*) FROM pgtruth.jobs")
            assert cursor.fetchone() == (3, 2500)
    assert len(signal.woken) == 2500


def test_outside_atomic_is_refused(db: Database) -> None:
    with pytest.raises(TransactionError, match="atomic"), in_transaction("default"):
        put(db, "a")


def test_failed_transaction_is_refused(db: Database, conn: psycopg.Connection[Any]) -> None:
    with transaction.atomic(), in_transaction("default"):
        with pytest.raises(DataError), transaction.atomic(savepoint=False):
            run("SELECT 1/0")
        with pytest.raises(TransactionError, match="failed"):
            put(db, "a")
    assert ids(conn) == set()


def test_another_database_or_engine_or_name_is_refused(
    db: Database, conn: psycopg.Connection[Any], pg_server: PostgresServer, signal: Recorder
) -> None:
    point("default", pg_server.url)
    with pytest.raises(TransactionError, match="another database"), transaction.atomic(), in_transaction("default"):
        put(db, "a")
    with pytest.raises(TransactionError, match="sqlite"):
        in_transaction("sqlite")
    with pytest.raises(TransactionError, match="no such alias"):
        in_transaction("nowhere")
    assert ids(conn) == set()


def test_anything_else_is_refused(db: Database) -> None:
    for target in (None, 7, object(), db, Settings):
        with pytest.raises(TransactionError, match="it takes"):
            in_transaction(target)
