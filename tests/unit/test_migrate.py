"""The schema: migrations and metadata are equal, many processes may migrate at once, and a wrong schema is named."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects.postgresql.base import PGDialect

from pgtruth_transport import migrate as module
from pgtruth_transport.errors import SchemaError
from pgtruth_transport.migrate import check, current, head, migrate, revisions
from pgtruth_transport.schema import build
from pgtruth_transport.settings import Settings
from pgtruth_transport.urls import parse_url
from tests.support import ROOT


@pytest.mark.parametrize("schema", ["pgtruth", "other_1"])
def test_migrations_and_metadata_are_equal(
    empty_database_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Older releases of SQLAlchemy 2.0 take a schema `pgtruth` for one of PostgreSQL's own (LIKE 'pg_%').
    monkeypatch.setattr(PGDialect, "get_schema_names", lambda *_, **__: ["public", schema])
    settings = Settings.make(empty_database_url, {"schema": schema})
    assert migrate(settings)
    engine = sa.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(settings.conninfo), poolclass=sa.NullPool
    )
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "include_schemas": True,
                "include_name": lambda name, kind, _parents: kind != "schema" or name == schema,
                "version_table_schema": schema,
                "compare_server_default": True,
                "compare_type": True,
            },
        )
        assert compare_metadata(context, build(schema)) == []
    assert _constraints(settings, schema) == _constraints_of_metadata(empty_database_url, schema)


def _constraints(settings: Settings, schema: str) -> set[tuple[str, str, str]]:
    """Check constraints, index definitions and storage options: what Alembic does not compare."""
    with psycopg.connect(settings.conninfo, autocommit=True) as connection:
        rows = connection.execute(
            """
            SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)
              FROM pg_constraint WHERE connamespace = %(schema)s::regnamespace AND contype <> 'n'
            UNION ALL SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = %(schema)s::text
            UNION ALL SELECT relname, 'options', reloptions::text
              FROM pg_class WHERE relnamespace = %(schema)s::regnamespace AND reloptions IS NOT NULL
            """,
            {"schema": schema},
        ).fetchall()
    return {
        (table.replace(schema, "S"), name, text.replace(schema, "S"))
        for table, name, text in rows
        if "alembic_version" not in table
    }


def _constraints_of_metadata(url: str, schema: str) -> set[tuple[str, str, str]]:
    other = f"{schema}_made"
    settings = Settings.make(url, {"schema": other})
    engine = sa.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(settings.conninfo), poolclass=sa.NullPool
    )
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema(other))
        build(other).create_all(connection)
    return _constraints(settings, other)


def test_revisions_are_one_line_and_named_like_their_files() -> None:
    config = Config()
    config.set_main_option("script_location", "pgtruth_transport:migrations")
    scripts = list(ScriptDirectory.from_config(config).walk_revisions())
    assert [script.revision for script in reversed(scripts)] == list(revisions())
    assert [script.down_revision for script in reversed(scripts)] == [None, *revisions()[:-1]]


def test_safe_twice_and_without_touching_logging(empty_database_url: str) -> None:
    settings = Settings.make(empty_database_url)
    before = list(logging.root.handlers), logging.root.level
    assert migrate(settings) is True
    assert migrate(settings) is False
    assert current(settings) == head()
    check(settings)
    assert (list(logging.root.handlers), logging.root.level) == before


def test_eight_processes_at_once(empty_database_url: str) -> None:
    code = (
        "import sys; from pgtruth_transport.migrate import migrate; from pgtruth_transport.settings import Settings;"
        "s = Settings.make(sys.argv[1]); sys.stdin.read(1); migrate(s); print('migrated')"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, empty_database_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(8)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("g")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out.strip(), err) == (0, "migrated", "")
    check(Settings.make(empty_database_url))


def test_a_check_at_a_workers_start_loads_neither_alembic_nor_sqlalchemy(database_url: str) -> None:
    code = (
        "import sys; from pgtruth_transport.migrate import check, migrate;"
        "from pgtruth_transport.settings import Settings;"
        "s = Settings.make(sys.argv[1]); check(s); migrate(s); print({'alembic', 'sqlalchemy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, database_url], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def test_a_schema_may_be_prepared_for_a_role_that_cannot_create_schemas(empty_database_url: str) -> None:
    settings = Settings.make(empty_database_url, {"schema": "made"})
    role = "only_here_" + settings.conninfo.partition("pgtruth_test_")[2][:12]
    with psycopg.connect(parse_url(empty_database_url), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'pw'")
        connection.execute(f"CREATE SCHEMA made AUTHORIZATION {role}")
        try:
            url = "pgtruth://" + f"{role}:pw@" + empty_database_url.rpartition("@")[2]
            theirs = Settings.make(url, {"schema": "made"})
            assert migrate(theirs)
            check(theirs)
        finally:
            module.Database.of(theirs).close()
            connection.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


def test_a_missing_schema_names_the_command(empty_database_url: str) -> None:
    with pytest.raises(SchemaError, match="celery -A app pgtruth migrate") as caught:
        check(Settings.make(empty_database_url))
    assert "postgres:**@" in str(caught.value)


def test_a_newer_schema_is_left_alone(settings: Settings, conn: psycopg.Connection[Any]) -> None:
    conn.execute("UPDATE pgtruth.alembic_version SET version_num = '9999_future'")
    for call in (check, migrate):
        with pytest.raises(SchemaError, match="pip install --upgrade pgtruth-transport"):
            call(settings)
    assert current(settings) == "9999_future"


def test_an_older_schema_names_the_command(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "revisions", lambda: (*revisions(), "9999_next"))
    with pytest.raises(SchemaError, match=r"older than this package .* celery -A app pgtruth migrate"):
        check(settings)
