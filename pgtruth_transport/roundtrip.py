"""Statements without a cursor: each one a transaction of its own, all of them in one round trip.

For the statements that every job passes one by one (its insert with its wake-up, its claim on an idle worker). There a
cursor, which can adapt any type, costs more than the server, and a second round trip as much as the first.

Promises: the statements run in order, and each commits or fails by itself, so the second is never part of the first's
transaction. A connection that is lost, silent or interrupted on the way is closed; what had not been answered by then
may have happened or not, as after any lost answer to a COMMIT. If this process dies, the same.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from hashlib import md5
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.errors import InvalidSqlStatementName, error_from_result
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGconn, PGresult

from . import sql
from .db import Connection

#: One value of a row, from PostgreSQL's binary format.
Column = Callable[[bytes], Any]
Row = tuple[Any, ...]

# looked up once: a member of an enumeration costs as much as reading a column
_TEXT, _BINARY = Format.TEXT, Format.BINARY
_ROWS, _DONE, _SYNC, _ABORTED = (
    ExecStatus.TUPLES_OK,
    ExecStatus.COMMAND_OK,
    ExecStatus.PIPELINE_SYNC,
    ExecStatus.PIPELINE_ABORTED,
)


def integer(value: bytes) -> int:
    return int.from_bytes(value, "big", signed=True)


def boolean(value: bytes) -> bool:
    return value == b"\x01"


text: Final[Column] = bytes.decode
binary: Final[Column] = bytes


class Statement(NamedTuple):
    """A statement of ``sql/``, with numbered parameters."""

    name: bytes  # under which it is prepared, once per connection
    query: bytes
    parameters: tuple[str, ...]  # in the order of their numbers
    columns: tuple[Column, ...]  # of its rows


class Call(NamedTuple):
    """A statement and its parameters as they travel."""

    statement: Statement
    values: Sequence[bytes | None]
    formats: Sequence[Format]

    @classmethod
    def of(cls, statement: Statement, parameters: Mapping[str, Any]) -> Call:
        """``parameters`` are str, bytes, int, float, None, or a list of str or int."""
        values: list[bytes | None] = []
        formats: list[Format] = []
        for name in statement.parameters:
            value = parameters[name]
            if isinstance(value, bytes):
                values.append(value)
                formats.append(_BINARY)
            else:
                values.append(None if value is None else _encoded(value))
                formats.append(_TEXT)
        return cls(statement, values, formats)


_PARAMETER: Final = re.compile(rb"%\((\w+)\)s|%%")


@cache
def statement(name: str, schema: str, columns: tuple[Column, ...] = ()) -> Statement:
    """The statement of ``sql/<name>.sql``; its rows are read by ``columns``."""
    numbers: dict[str, int] = {}

    def number(found: re.Match[bytes]) -> bytes:
        if found[1] is None:
            return b"%"
        return b"$%d" % numbers.setdefault(found[1].decode(), len(numbers) + 1)

    query = _PARAMETER.sub(number, sql.load(name, schema))
    digest = md5(query, usedforsecurity=False).hexdigest()
    return Statement(f"pgtruth_{name}_{digest[:8]}".encode(), query, tuple(numbers), columns)


def run(
    conn: Connection, calls: Sequence[Call], committed: Callable[[], None] | None = None
) -> list[list[Row] | psycopg.Error]:
    """The rows of each call, or its error; ``conn`` is in autocommit and outside any transaction.

    ``committed`` is called when the first has committed, while the server is busy with the others.
    A rollback discards all that is prepared on the connection (psycopg sees to that). The first call that finds it so
    is run again, and those after it.
    """
    outcomes = _run(conn, calls, committed)
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, InvalidSqlStatementName):
            return outcomes[:index] + _run(conn, calls[index:], None if index else committed)
    return outcomes


def _run(
    conn: Connection, calls: Sequence[Call], committed: Callable[[], None] | None
) -> list[list[Row] | psycopg.Error]:
    pgconn = conn.pgconn
    outcomes: list[list[Row] | psycopg.Error] = []
    known = None if conn.prepare_threshold is None else conn.prepared  # a pooler may give each another session
    # one statement goes without the pipeline, which costs as much again
    alone = len(calls) == 1 and (known is None or calls[0].statement.name in known)
    whole = False
    try:
        if not alone:
            pgconn.enter_pipeline_mode()
        _send(pgconn, calls, alone, known)
        _receive(conn, calls, alone, committed, outcomes)
        if not alone:
            pgconn.exit_pipeline_mode()
        whole = True
    except (psycopg.OperationalError, psycopg.InterfaceError) as exc:
        outcomes.extend([exc] * (len(calls) - len(outcomes)))
    finally:
        if not whole:
            pgconn.finish()
    return outcomes


def one(conn: Connection, call: Call) -> list[Row]:
    """The rows of one call; raises its error."""
    (outcome,) = run(conn, [call])
    if isinstance(outcome, psycopg.Error):
        raise outcome
    return outcome


def _send(pgconn: PGconn, calls: Sequence[Call], alone: bool, known: set[bytes] | None) -> None:
    """Hand all to libpq, which sends what the socket takes."""
    preparing: list[bytes] = []
    for statement, values, formats in calls:
        name = statement.name
        if known is None:
            pgconn.send_query_params(statement.query, values, None, formats, _BINARY)
        else:
            if name not in known and name not in preparing:
                pgconn.send_prepare(name, statement.query)
                preparing.append(name)
            pgconn.send_query_prepared(name, values, formats, _BINARY)
        if not alone:
            pgconn.pipeline_sync()


def _receive(
    conn: Connection,
    calls: Sequence[Call],
    alone: bool,
    committed: Callable[[], None] | None,
    outcomes: list[list[Row] | psycopg.Error],
) -> None:
    """Send the rest and read. Without psycopg's generators, which in a cold process take as long as the statement."""
    pgconn = conn.pgconn
    deadline = None if conn.patience is None else time.monotonic() + conn.patience
    unsent = pgconn.flush()
    failure: psycopg.Error | None = None
    rows: list[Row] = []
    while True:
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                if pgconn.status != ConnStatus.OK:
                    raise psycopg.OperationalError(str(failure or "the connection was lost").strip())
                if alone:
                    outcomes.append(failure or rows)
                    return
                continue  # the end of one statement's results
            made, status = calls[len(outcomes)].statement, result.status
            if status == _SYNC:
                outcomes.append(failure or rows)
                if committed is not None and len(outcomes) == 1 and failure is None:
                    committed()
                failure, rows = None, []
                if len(outcomes) == len(calls):
                    return
            elif status == _ROWS:
                rows = _rows(result, made.columns)
            elif status == _DONE:
                conn.prepared.add(made.name)
            elif status != _ABORTED:
                failure = error_from_result(result, encoding="utf-8")
                if isinstance(failure, InvalidSqlStatementName):  # discarded, as are the others
                    conn.prepared.clear()
        conn.wait_ready(deadline, writing=bool(unsent))
        pgconn.consume_input()
        if unsent:
            unsent = pgconn.flush()


def _rows(result: PGresult, columns: tuple[Column, ...]) -> list[Row]:
    rows: list[Row] = []
    for number in range(result.ntuples):
        row = []
        for column, read in enumerate(columns):
            value = result.get_value(number, column)
            row.append(None if value is None else read(value))
        rows.append(tuple(row))
    return rows


def _encoded(value: Any) -> bytes:
    """A parameter in PostgreSQL's text format."""
    return _array(tuple(value)) if isinstance(value, list) else str(value).encode()


@lru_cache(maxsize=64)
def _array(items: tuple[str | int, ...]) -> bytes:
    """Remembered: a worker looks for the same again and again."""
    return ("{" + ",".join([_element(item) for item in items]) + "}").encode()


def _element(item: str | int) -> str:
    if isinstance(item, int):
        return str(item)
    escaped = item.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
