"""Connections: reuse, forks, broken links, bounded waits, and errors that say where and not how."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pgtruth_transport import db as module
from pgtruth_transport.db import CONNECTION_ERRORS, Database, is_transient, retrying
from pgtruth_transport.settings import Settings
from pgtruth_transport.testing.servers import EmbeddedPostgres, free_port
from tests.support import ROOT


def _pid(database: Database) -> int:
    with database.connection() as connection:
        return connection.info.backend_pid


def test_one_database_per_settings(settings: Settings) -> None:
    assert Database.of(settings) is Database.of(Settings.make(settings.masked().replace("**", _password(settings))))


def _password(settings: Settings) -> str:
    return str(conninfo_to_dict(settings.conninfo)["password"])


def test_connections_are_reused_last_in_first_out(db: Database) -> None:
    with db.connection() as one, db.connection() as two:
        pids = one.info.backend_pid, two.info.backend_pid
    assert _pid(db) == _pid(db) == pids[0]  # the one returned last


def test_at_most_four_stay_idle(db: Database) -> None:
    contexts = [db.connection() for _ in range(6)]
    opened = [context.__enter__() for context in contexts]
    for context in contexts:
        context.__exit__(None, None, None)
    assert sum(connection.closed for connection in opened) == 2


def test_connections_are_in_autocommit_and_named(db: Database, conn: psycopg.Connection[Any]) -> None:
    with db.connection() as connection, db.open("lease") as own:
        assert connection.autocommit
        assert own.autocommit
        names = conn.execute("SELECT application_name FROM pg_stat_activity WHERE datname = current_database()")
        assert {"pgtruth", "pgtruth:lease"} <= {row[0] for row in names}


def test_what_a_body_leaves_in_a_transaction_is_closed(db: Database) -> None:
    with db.connection() as connection:
        connection.execute("BEGIN")
    assert connection.closed
    with pytest.raises(ZeroDivisionError), db.connection() as connection, connection.transaction():
        raise ZeroDivisionError
    assert not connection.closed


def test_a_connection_that_the_server_closed_does_not_fail_the_next_statement(
    db: Database, conn: psycopg.Connection[Any]
) -> None:
    for _ in range(3):
        pid = _pid(db)
        conn.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        assert _pid(db) != pid


def test_an_idle_session_timeout_is_survived(db: Database, conn: psycopg.Connection[Any], eventually: Any) -> None:
    name = conn.info.dbname
    conn.execute(
        psycopg.sql.SQL("ALTER DATABASE {} SET idle_session_timeout = '50ms'").format(psycopg.sql.Identifier(name))
    )
    pid = _pid(db)
    eventually(lambda: not conn.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchone())
    assert _pid(db) != pid


def test_a_fork_shares_nothing_and_leaves_the_parents_connections_alone(db: Database) -> None:
    held = db.open("held")
    parent = _pid(db)
    with db.connection() as busy:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # pragma: no cover - in the child
            try:
                mine = [_pid(db), _pid(Database.of(db.settings))]
                held.close()
                with pytest.raises((psycopg.Error, ValueError)):
                    busy.execute("SELECT 1")
                os.write(write, repr(mine).encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        pids = eval(os.read(read, 1000))
        os.close(read)
        assert len(set(pids)) == 1
        assert parent not in pids
        assert busy.execute("SELECT 1").fetchone() == (1,)
    assert _pid(db) == parent
    assert held.execute("SELECT 2").fetchone() == (2,)
    held.close()


def test_a_child_does_not_keep_the_parents_sessions_alive(
    db: Database, conn: psycopg.Connection[Any], eventually: Any
) -> None:
    with db.open("held") as held:
        pid = held.info.backend_pid
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # pragma: no cover - in the child
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        os.close(held.fileno())  # as the kernel does when a process is killed: no farewell
        try:
            eventually(lambda: not conn.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchone())
        finally:
            os.close(write)
            os.close(read)
            os.waitpid(child, 0)


def test_threads_share_the_pool(db: Database) -> None:
    seen: list[int] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(30):
                with db.connection() as connection:
                    row = connection.execute("SELECT pg_backend_pid()").fetchone()
                    assert row == (connection.info.backend_pid,)
                    seen.append(row[0])
        except Exception as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(seen) == 180


def test_an_unreachable_server_is_an_operational_error_that_names_the_place() -> None:
    port = free_port()
    database = Database(Settings.make(f"pgtruth://someone:secret@127.0.0.1:{port}/jobs"))
    with pytest.raises(psycopg.OperationalError) as caught, database.connection():
        pass
    assert f"127.0.0.1:{port}, database 'jobs'" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value, CONNECTION_ERRORS)


@pytest.fixture
def own_server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres() as server:
        yield server


def test_a_server_that_stops_answering_is_waited_for_only_so_long(own_server: EmbeddedPostgres) -> None:
    database = Database(Settings.make(own_server.url, {"connect_timeout": 2}))
    assert _pid(database)
    own_server.pause()
    try:
        for _ in range(2):  # with an open connection, then with a new one
            started = time.monotonic()
            with pytest.raises(CONNECTION_ERRORS), database.connection(patience=0.5) as connection:
                connection.execute("SELECT 1")
            assert time.monotonic() - started < 4
    finally:
        own_server.resume()
    assert _pid(database)
    own_server.restart()
    assert _pid(database)
    own_server.stop_hard()
    with pytest.raises(CONNECTION_ERRORS), database.connection() as connection:
        connection.execute("SELECT 1")
    own_server.start()
    assert _pid(database)
    database.close()


def test_patience_does_not_hinder_a_slow_answer_within_it(db: Database) -> None:
    with db.connection(patience=5) as connection:
        assert connection.execute("SELECT 1 FROM pg_sleep(0.3)").fetchone() == (1,)
        with connection.pipeline():
            cursor = connection.execute("SELECT 2")
        assert cursor.fetchone() == (2,)


def test_a_read_only_server_is_a_lost_one(db: Database) -> None:
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction) as caught, db.connection() as connection:
        connection.execute("BEGIN READ ONLY; CREATE TABLE t ()")
    assert isinstance(caught.value, CONNECTION_ERRORS)
    assert connection.closed


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (psycopg.errors.SerializationFailure(), True),
        (psycopg.errors.DeadlockDetected(), True),
        (psycopg.errors.UniqueViolation(), False),
        (psycopg.OperationalError(), False),
        (ValueError(), False),
    ],
)
def test_which_errors_are_transient(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient


@pytest.mark.parametrize(("failures", "calls"), [(0, 1), (4, 5), (5, 5)])
def test_retrying_calls_five_times_at_most(failures: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _seconds: None)
    made = 0

    def call() -> str:
        nonlocal made
        made += 1
        if made <= failures:
            raise psycopg.errors.DeadlockDetected
        return "done"

    if failures < 5:
        assert retrying(call) == "done"
    else:
        with pytest.raises(psycopg.errors.DeadlockDetected):
            retrying(call)
    assert made == calls


def test_retrying_passes_other_errors_on_at_once() -> None:
    made = []

    def call() -> None:
        made.append(1)
        raise psycopg.errors.UniqueViolation

    with pytest.raises(psycopg.errors.UniqueViolation):
        retrying(call)
    assert len(made) == 1


@pytest.mark.parametrize("prepare", [True, False])
def test_prepared_statements_can_be_turned_off(database_url: str, prepare: bool) -> None:
    database = Database.of(Settings.make(database_url, {"prepare": prepare}))
    with database.connection() as connection:
        for _ in range(8):
            connection.execute("SELECT %s::int", (1,))
        found = connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
    assert found == (1 if prepare else 0,)


def test_greenlets_wait_side_by_side(database_url: str) -> None:
    """Under gevent one waiting statement does not hold the others."""
    code = """
from gevent import monkey; monkey.patch_all()
import sys, time, gevent
from pgtruth_transport.db import Database
from pgtruth_transport.settings import Settings
database = Database.of(Settings.make(sys.argv[1]))
def work(number):
    with database.connection(patience=20) as connection:
        return connection.execute("SELECT %s::int FROM pg_sleep(1)", (number,)).fetchone()[0]
started = time.monotonic()
jobs = [gevent.spawn(work, number) for number in range(10)]
gevent.joinall(jobs, raise_error=True)
assert [job.value for job in jobs] == list(range(10))
assert time.monotonic() - started < 5, time.monotonic() - started
assert work(3) == 3
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, database_url], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
def test_a_stricter_default_isolation_is_nobodys_business(
    db: Database, conn: psycopg.Connection[Any], isolation: str
) -> None:
    conn.execute(f"ALTER DATABASE {conn.info.dbname} SET default_transaction_isolation = '{isolation}'")
    conn.execute("CREATE TABLE public.numbers (n integer)")
    conn.execute("INSERT INTO public.numbers VALUES (0)")
    add = "UPDATE public.numbers SET n = n + 1"

    def work() -> None:
        for number in range(40):
            with db.connection() as connection:
                if number % 2:
                    connection.execute(add)  # run again where another one came first
                else:
                    with connection.transaction():
                        connection.execute(add)
                        shown = connection.execute("SHOW transaction_isolation").fetchone()
                        assert shown == ("read committed",)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert conn.execute("SELECT n FROM public.numbers").fetchone() == (160,)
