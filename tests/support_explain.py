"""What a statement of ``sql/`` really reads: EXPLAIN ANALYZE, as a value that tests can ask."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from pgtruth_transport.db import Database


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan that was run, and what it met."""

    root: dict[str, Any]

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Every node of the plan."""
        todo = [self.root]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.get("Plans", ()))

    def rows(self, table: str) -> int:
        """Rows of ``table`` that its scans returned or threw away."""
        return round(
            sum(
                (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
                for node in self.nodes()
                if "Scan" in node["Node Type"] and node.get("Relation Name") == table
            )
        )

    def indexes(self) -> set[str]:
        """The indexes that were used."""
        return {node["Index Name"] for node in self.nodes() if "Index Name" in node}

    @property
    def text(self) -> str:
        """For a failing test's message."""
        return json.dumps(self.root, indent=1)


def explain(conn: psycopg.Connection[Any], db: Database, name: str, parameters: Mapping[str, Any]) -> Plan:
    """Run the statement ``name`` and say how it was done; whatever it changed is rolled back."""
    with conn.transaction(force_rollback=True):
        row = conn.execute(b"EXPLAIN (ANALYZE, FORMAT JSON) " + db.sql(name), parameters).fetchone()
    assert row is not None
    return Plan(row[0][0]["Plan"])
