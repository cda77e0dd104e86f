"""Rules that no linter knows: where connections are made, and how light the package is at every ``celery`` start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pgtruth_transport import sql
from tests.support import ROOT

PACKAGE = ROOT / "pgtruth_transport"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "testing" not in path.parts)


def _import_and_list(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("module", ["pgtruth_transport", "pgtruth_transport.cli"])
def test_what_every_celery_start_imports_is_light(module: str) -> None:
    before = _import_and_list("import celery, click, kombu, kombu.transport, celery.app.base")
    added = _import_and_list(f"import celery, click, kombu, kombu.transport, celery.app.base, {module}") - before
    assert not added & {"psycopg", "psycopg_binary", "redis", "valkey", "sqlalchemy", "alembic", "rich", "flower"}


def test_only_db_opens_connections() -> None:
    """``signals`` open their own to Redis; to PostgreSQL there is one place, which knows about forks and time-outs."""
    opening = re.compile(r"psycopg\.(Async)?(Connection\.)?connect\(|\bConnection\.connect\(")
    found = [path.relative_to(PACKAGE) for path in SOURCES if opening.search(path.read_text())]
    assert found == [Path("db.py")]


@pytest.mark.parametrize("name", sql.names())
def test_a_statement_says_who_calls_it_what_it_locks_and_which_index_it_uses(name: str) -> None:
    source = sql.source(name)
    header = [line for line in source.splitlines() if line.startswith("--")]
    assert source.startswith("-- Called by: ")
    assert [line.split(":")[0] for line in header if re.match(r"-- (Called by|Locks|Index):", line)] == [
        "-- Called by",
        "-- Locks",
        "-- Index",
    ]
    assert re.fullmatch(r"[a-z]+(_[a-z]+)+", name)


@pytest.mark.parametrize("name", sql.names())
def test_a_statement_is_one_and_belongs_to_its_schema(name: str) -> None:
    statement = sql.load(name, "elsewhere").decode()
    assert "pgtruth." not in statement
    assert ";" not in re.sub(r"'[^']*'|--[^\n]*", "", statement)


def test_a_statement_that_is_not_there_is_named() -> None:
    with pytest.raises(LookupError, match="job_clam"):
        sql.load("job_clam", "pgtruth")


def test_a_schema_that_is_no_identifier_is_refused() -> None:
    with pytest.raises(ValueError, match="identifier"):
        sql.load("job_claim", 'x"; DROP SCHEMA pgtruth; --')
