"""What PostgreSQL really did for a statement: its plan, node by node, with the rows that each node touched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

PARAMETER = re.compile(rb"%\((\w+)\)s")


@dataclass(frozen=True, slots=True)
class Plan:
    """An executed plan."""

    root: dict[str, Any]
    text: str

    def nodes(self) -> Iterator[dict[str, Any]]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.get("Plans", ()))

    def indexes(self, relation: str | None = None) -> set[str]:
        """The indexes in use (of one table)."""
        found = {n["Index Name"] for n in self.nodes() if "Index Name" in n and n["Actual Loops"]}
        return {name for name in found if relation is None or name.startswith(f"{relation}_")}

    def read_as_a_whole(self, relation: str) -> bool:
        """Whether the table was read from its beginning to its end."""
        return any(n.get("Relation Name") == relation and n["Node Type"] == "Seq Scan" for n in self.nodes())

    def touched(self, relation: str) -> int:
        """How many rows (or index entries) of the table were looked at."""
        total = 0.0
        for node in self.nodes():
            mine = node.get("Relation Name") == relation or node.get("Index Name", "").startswith(f"{relation}_")
            if not mine or node["Node Type"] in ("ModifyTable", "Bitmap Heap Scan"):
                continue
            seen = node["Actual Rows"]
            seen += node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
            total += seen * node["Actual Loops"]
        return round(total)

    def sorted(self) -> int:
        """The most rows that any one sort was given."""
        sorts = [n for n in self.nodes() if n["Node Type"] in ("Sort", "Incremental Sort")]
        given = [child["Actual Rows"] * child["Actual Loops"] for node in sorts for child in node["Plans"]]
        return round(max(given, default=0))

    @property
    def pages(self) -> int:
        """How many pages were looked at; what an index scan passes over in silence shows here."""
        return int(self.root.get("Shared Hit Blocks", 0)) + int(self.root.get("Shared Read Blocks", 0))


def prepare(conn: psycopg.Connection[Any], name: str, statement: bytes) -> list[str]:
    """``PREPARE`` the statement; returns its parameters in order."""
    names: list[str] = []

    def number(match: re.Match[bytes]) -> bytes:
        parameter = match[1].decode()
        if parameter not in names:
            names.append(parameter)
        return b"$%d" % (names.index(parameter) + 1)

    text = PARAMETER.sub(number, statement).replace(b"%%", b"%")
    conn.execute(b"PREPARE " + name.encode() + b" AS " + text)
    return names


def explain_prepared(conn: psycopg.Connection[Any], name: str, names: list[str], parameters: Mapping[str, Any]) -> Plan:
    """Run a prepared statement with its generic plan, and undo it."""
    with psycopg.ClientCursor(conn) as cursor, conn.transaction(force_rollback=True):
        cursor.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        values = [parameters[n] for n in names]
        arguments = f"({', '.join(['%s'] * len(names))})" if names else ""
        return _plan(cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE {name}{arguments}", values))


def explain(
    conn: psycopg.Connection[Any], statement: bytes, parameters: Mapping[str, Any], *, generic: bool = False
) -> Plan:
    """Run ``statement`` with a plan for these parameters, or for any (as a prepared one is), and undo it."""
    if generic:
        name = f"explained_{abs(hash(statement))}"
        try:
            return explain_prepared(conn, name, prepare(conn, name, statement), parameters)
        finally:
            conn.execute(f"DEALLOCATE {name}")
    with conn.transaction(force_rollback=True):
        return _plan(conn.execute(b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement, parameters))


def _plan(cursor: psycopg.Cursor[Any]) -> Plan:
    row = cursor.fetchone()
    assert row is not None
    (found,) = row[0]
    return Plan(found["Plan"], "\n".join(_lines(found["Plan"], 0)))


def _lines(node: dict[str, Any], depth: int) -> Iterator[str]:
    names = [node[key] for key in ("Relation Name", "Index Name", "CTE Name", "Subplan Name") if key in node]
    keys = ("Index Cond", "Filter", "Hash Cond", "Merge Cond")
    conditions = " ".join(f"[{key}: {node[key]}]" for key in keys if key in node)
    yield (
        f"{'  ' * depth}{node['Node Type']} {' '.join(names)} rows={node['Plan Rows']}/{node['Actual Rows']}"
        f" -{node.get('Rows Removed by Filter', 0)} loops={node['Actual Loops']} {conditions}"
    )
    for child in node.get("Plans", ()):
        yield from _lines(child, depth + 1)
