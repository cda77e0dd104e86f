"""Reading the statements of ``sql/``: which of them write to ``jobs``, under which conditions, and what they set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pgtruth_transport import sql

WORD = re.compile(r"'(?:[^']|'')*'|[A-Za-z_][\w.]*|\|\||\S")
LITERAL = re.compile(r"'(\w+)'")


@dataclass(frozen=True, slots=True)
class Write:
    """One UPDATE of ``jobs`` (or the DO UPDATE of an INSERT), split into its clauses."""

    statement: str
    alias: str
    clauses: dict[str, str] = field(repr=False)

    @property
    def where(self) -> str:
        return self.clauses.get("WHERE", "")

    @property
    def sets(self) -> dict[str, str]:
        """Column -> expression."""
        parts = _split(self.clauses["SET"], ",")
        return {name.strip(): value.strip() for name, _, value in (part.partition("=") for part in parts)}

    def old(self) -> frozenset[str]:
        """The statuses that the WHERE clause asks the row to have."""
        return self._statuses(self.alias)

    def new(self) -> frozenset[str]:
        """The statuses that it sets; empty if it sets none."""
        value = self.sets.get("status")
        if value is None:
            return frozenset()
        if value.startswith("'"):
            return frozenset(LITERAL.findall(value))
        if value.startswith("CASE"):  # what stands after THEN; ELSE leaves the row's own
            return frozenset(LITERAL.findall(" ".join(re.findall(r"THEN '\w+'", value))))
        return self._statuses(value.partition(".")[0])

    def _statuses(self, alias: str) -> frozenset[str]:
        name = rf"(?<![\w.]){alias}\.status" if alias else r"(?<![\w.])status"
        name += r"(?: \|\| '')?"  # says the same, but keeps the planner from partial indexes
        found = re.findall(rf"{name} = ('\w+')", self.where) + re.findall(rf"{name} IN (\([^)]*\))", self.where)
        return frozenset(word for text in found for word in LITERAL.findall(text))

    def names(self, column: str) -> bool:
        """Whether the WHERE clause compares the row's ``column`` with something for equality."""
        prefix = rf"{self.alias}\." if self.alias else ""
        return re.search(rf"(?<![\w.]){prefix}{column} = (?!{prefix}{column}\b)", self.where) is not None


def text_of(name: str) -> str:
    """A statement without comments, on one line."""
    lines = (line for line in sql.source(name).splitlines() if not line.startswith("--"))
    return re.sub(r"\s+", " ", " ".join(lines)).strip()


def writes(table: str = "jobs") -> list[Write]:
    """Every UPDATE of the table in every statement."""
    return [write for name in sql.names() for write in _writes(name, table)]


def _writes(name: str, table: str) -> Iterator[Write]:
    text = text_of(name)
    for match in re.finditer(rf"UPDATE \{{schema\}}\.{table}\b(?: (?:AS )?(?!SET\b)(\w+))?", text):
        yield Write(name, match[1] or "", _clauses(text[match.end() :]))
    inserted = re.search(rf"INSERT INTO \{{schema\}}\.{table} AS (\w+)", text)
    if inserted:
        conflict = re.search(r"DO UPDATE ", text)
        if conflict:
            yield Write(name, inserted[1], _clauses(text[conflict.end() :]))


def _clauses(text: str) -> dict[str, str]:
    """The clauses of the statement that ``text`` begins with, up to the bracket that closes it."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    depth = 0
    for match in WORD.finditer(text):
        word = match[0]
        if word == ")" and depth == 0:
            break
        depth += (word == "(") - (word == ")")
        if depth == 0 and word in ("SET", "FROM", "WHERE", "RETURNING"):
            current = found.setdefault(word, [])
        else:
            current.append(text[match.start() : match.end()])
    return {name: _joined(words) for name, words in found.items()}


def _joined(words: list[str]) -> str:
    text = " ".join(words)
    return re.sub(r" ([,)])", r"\1", re.sub(r"\( ", "(", text)).replace(" . ", ".")


def _split(text: str, mark: str) -> list[str]:
    """``text`` cut at ``mark`` outside of brackets and quotes."""
    parts, depth, start = [], 0, 0
    for match in WORD.finditer(text):
        depth += (match[0] == "(") - (match[0] == ")")
        if match[0] == mark and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]
