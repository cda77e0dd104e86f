"""One module moves a job's status, by guarded statements, and they are the moves that ``states.MOVES`` declares.

These tests read the sources: every ``.sql`` file and every module of the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pgtruth_transport import sql
from pgtruth_transport.schema import build
from pgtruth_transport.states import MOVES, Outcome, Status
from tests.support import ROOT
from tests.support_sql import Write, text_of, writes

PACKAGE = ROOT / "pgtruth_transport"
MODULES = sorted(PACKAGE.rglob("*.py"))
WRITES = writes()
MOVERS = sorted({write.statement for write in WRITES if write.new()})

#: What a reader should find in sql/: each statement that moves a status, from what, to what.
TABLE = {
    "job_claim": ("queued", "processing"),
    "job_signal_failed": ("queued", "enqueue_failed"),
    "job_recover": ("enqueue_failed", "queued"),
    "job_finish": ("processing", "done failed"),
    "job_requeue": ("processing", "queued"),
    "job_reap": ("processing", "queued"),
    "job_disown": ("processing", "queued"),
    "job_end_queued": ("queued enqueue_failed", "failed"),
    "job_purge": ("queued enqueue_failed", "failed"),
    "job_store": ("queued", "failed"),  # an open job only: its message was never published
}
#: What a holder does with the job that it holds.
OF_A_HOLDER = {"job_finish", "job_requeue", "job_renew", "job_progress", "job_disown"}


def _ids(write: Write) -> str:
    return write.statement


# The statements.


def test_the_statements_that_move_a_status_are_these() -> None:
    found = {write.statement: (write.old(), write.new()) for write in WRITES if write.new()}
    assert found == {name: (frozenset(old.split()), frozenset(new.split())) for name, (old, new) in TABLE.items()}


def test_the_moves_in_the_sql_are_the_legal_ones() -> None:
    in_sql = {(old, new) for write in WRITES for old in write.old() for new in write.new()}
    declared = {(old.value, new.value) for old, targets in MOVES.items() for new in targets}
    assert in_sql == declared


def test_every_state_and_only_these_are_known() -> None:
    known = {status.value for status in Status}
    for name in sql.names():
        text = text_of(name)
        compared = re.findall(r"(?:jobs|j)\.status (?:=|<>) '(\w+)'", text)
        listed = [
            word for group in re.findall(r"j?\.?status IN \(([^)]*)\)", text) for word in re.findall(r"\w+", group)
        ]
        if "{schema}.jobs" in text:
            assert set(compared) | set(listed) <= known, name
    assert set(MOVES) == set(Status)


@pytest.mark.parametrize("write", WRITES, ids=_ids)
def test_a_write_names_the_old_status(write: Write) -> None:
    assert write.old(), f"{write.statement} writes to jobs whatever their status is"


@pytest.mark.parametrize("write", [w for w in WRITES if w.old() == {"processing"}], ids=_ids)
def test_a_write_to_a_held_job_names_the_lease(write: Write) -> None:
    """A holder names both halves of its authority; the sweep names the lease version that it found expired."""
    assert write.names("lease_version")
    if write.statement == "job_reap":
        assert "lease_expires_at <= clock_timestamp()" in text_of("job_reap")
        assert "FOR UPDATE SKIP LOCKED" in text_of("job_reap")
    else:
        assert write.names("owned_by")


def test_the_statements_of_a_holder_are_the_fenced_ones() -> None:
    fenced = {w.statement for w in WRITES if w.old() == {"processing"} and w.names("owned_by")}
    assert fenced == OF_A_HOLDER


@pytest.mark.parametrize("write", [w for w in WRITES if w.new()], ids=_ids)
def test_a_move_is_dated_by_the_database(write: Write) -> None:
    assert write.sets["updated_at"].replace(" ", "") == "clock_timestamp()"


@pytest.mark.parametrize("write", [w for w in WRITES if w.old() == {"processing"} and w.new()], ids=_ids)
def test_what_ends_an_attempt_clears_its_ownership_and_notes_it(write: Write) -> None:
    for column in ("owned_by", "claimed_at", "lease_expires_at"):
        assert write.sets[column] == "NULL"
    assert "INSERT INTO {schema}.attempts" in text_of(write.statement)


@pytest.mark.parametrize("write", [w for w in WRITES if "queued" in w.new() and w.old() == {"processing"}], ids=_ids)
def test_what_takes_a_job_from_its_holder_raises_the_lease_version(write: Write) -> None:
    assert write.sets["lease_version"] == "j.lease_version + 1"


def test_the_claim_raises_the_lease_version() -> None:
    (write,) = [w for w in WRITES if w.statement == "job_claim"]
    assert write.sets["lease_version"] == "j.lease_version + 1"


def test_jobs_are_born_queued_or_as_a_known_end() -> None:
    born = {name for name in sql.names() if re.search(r"INSERT INTO \{schema\}\.jobs\b", text_of(name))}
    assert born == {"job_enqueue", "job_enqueue_one", "job_stand_in", "job_store"}
    assert "SELECT g.id, 'queued', " in text_of("job_enqueue")
    assert "VALUES ( %(id)s, 'queued', " in text_of("job_enqueue_one")


def _after(text: str, word: str) -> str:
    return text[text.index(word) :]


def test_one_job_and_many_are_enqueued_alike() -> None:
    one, many = text_of("job_enqueue_one"), text_of("job_enqueue")
    assert _after(one, "ON CONFLICT").startswith(_after(many, "ON CONFLICT"))
    assert one[: one.index("VALUES")] == many[: many.index("SELECT")]


def test_jobs_are_deleted_once_they_have_ended() -> None:
    deleting = {name for name in sql.names() if re.search(r"DELETE FROM \{schema\}\.jobs\b", text_of(name))}
    assert deleting == {"job_delete_old"}
    assert "AND j.status || '' IN ('done', 'failed') RETURNING" in text_of("job_delete_old")


def test_outcomes_in_the_sql_are_known() -> None:
    assert "'lease_expired'" in text_of("job_reap")
    assert Outcome("lease_expired") is Outcome.LEASE_EXPIRED


def test_only_the_moving_clock_counts() -> None:
    """``now()`` stands still in a transaction: a lease or due time taken from it would be as old as the transaction."""
    functions = r"\b(now|statement_timestamp|transaction_timestamp) ?\("
    words = r"\b(current_timestamp|current_time|current_date|localtime|localtimestamp)\b"
    frozen = re.compile(f"{functions}|{words}", re.IGNORECASE)
    assert [name for name in sql.names() if frozen.search(text_of(name))] == []


def test_columns_are_not_dated_by_the_frozen_clock_either() -> None:
    for table in build().tables.values():
        for column in table.columns:
            default = getattr(column.server_default, "arg", "")
            assert "now()" not in str(default)
            assert "current_timestamp" not in str(default).lower()


def test_a_statement_begins_with_three_lines_about_itself() -> None:
    for name in sql.names():
        first = sql.source(name).splitlines()[:4]
        assert [line.partition(": ")[0] for line in first[:3]] == ["-- Called by", "-- Locks", "-- Index"], name
        assert not first[3].startswith("--"), name


def test_the_schema_is_the_only_placeholder() -> None:
    for name in sql.names():
        source = sql.source(name)
        assert set(re.findall(r"\{[^}]*\}?", source)) <= {"{schema}"}, name
        assert not re.search(r"%(?!\(\w+\)s)", source.replace("%%", "")), f"{name} holds a parameter without a name"


def test_every_table_is_written_with_its_schema() -> None:
    tables = {table.name for table in build().tables.values()}
    for name in sql.names():
        text = text_of(name)
        own = set(re.findall(r"(?:WITH|,|\)|RECURSIVE) (\w+) AS (?:MATERIALIZED )?\(", text))  # its own CTEs
        bare = re.findall(r"\b(?:FROM|JOIN|UPDATE|INTO|USING) (?!\{schema\})(\w+)\b(?! *\()", text)
        assert not (tables - own) & set(bare), name


# Who runs them.


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _texts(tree: ast.AST) -> Iterator[ast.Constant]:
    """Every string of a module but the docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node


def _users(statements: set[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in MODULES:
        for node in _texts(_tree(path)):
            if node.value in statements:
                found.setdefault(str(path.relative_to(PACKAGE)), set()).add(node.value)
    return found


def test_only_the_lifecycle_moves_a_status() -> None:
    assert _users(set(MOVERS)) == {"lifecycle.py": set(MOVERS)}


def test_only_the_lifecycle_touches_what_a_holder_holds() -> None:
    assert _users(OF_A_HOLDER) == {"lifecycle.py": OF_A_HOLDER}


def test_jobs_are_written_by_known_modules_only() -> None:
    """A publish inside an application's transaction runs the same insert on the application's connection."""
    users = _users({write.statement for write in WRITES} | {"job_enqueue"})
    users.pop("lifecycle.py")
    assert users == {"transactions/scope.py": {"job_enqueue"}, "backend.py": {"job_forget"}}


def test_no_statement_is_named_piecemeal() -> None:
    """A name that is put together would escape the tests above."""
    for path in MODULES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
                assert not re.match(r"job_|_(claim|finish|requeue|reap|recover|purge|store)$", text), path


def test_the_header_names_the_function_that_calls_it() -> None:
    tree = _tree(PACKAGE / "lifecycle.py")
    users = {
        node.value: function.name
        for function in tree.body
        if isinstance(function, ast.FunctionDef)
        for node in _texts(function)
        if node.value in sql.names()
    }
    for name, function in users.items():
        assert f"lifecycle.{function}" in sql.source(name).splitlines()[0]


# Nothing else is SQL.

VERB = re.compile(r"\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH|MERGE INTO|LISTEN|TRUNCATE|SET)\s")
#: Migrations are versioned DDL, and the schema's name is part of it.
WRITTEN_IN_SQL_FILES = [path for path in MODULES if "migrations" not in path.parts]


def _where(path: Path, node: ast.expr) -> str:
    return f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_no_sql_is_put_together() -> None:
    found = []
    for path in WRITTEN_IN_SQL_FILES:
        for node in ast.walk(_tree(path)):
            match node:
                case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
                    pass
                case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod() | ast.Add()):
                    pass
                case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format" | "join")):
                    pass
                case _:
                    continue
            if VERB.match(text):
                found.append(_where(path, node))
    assert found == []


def test_no_module_writes_to_jobs_by_itself() -> None:
    writing = re.compile(r"(?i)\b(update|insert into|delete from)\s+\S*jobs\b")
    texts = [(path, node) for path in WRITTEN_IN_SQL_FILES for node in _texts(_tree(path))]
    assert [_where(path, node) for path, node in texts if writing.search(node.value)] == []
