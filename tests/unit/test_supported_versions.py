"""The versions that the README names are those that the matrix runs and that ``pyproject.toml`` accepts."""

from __future__ import annotations

import re
import tomllib

from tests.matrix.combinations import combinations, lower_bounds
from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _table() -> dict[str, tuple[str, str]]:
    """Oldest and newest of each row under "Supported versions"."""
    section = (ROOT / "README.md").read_text().partition("## Supported versions")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\w-]+) +\| ([\d.]+) +\| ([\d.]+) +\|$", section, re.MULTILINE)
    return {name: (oldest, newest) for name, oldest, newest in rows}


def test_the_oldest_packages_are_the_lower_bounds() -> None:
    pins = {name.lower(): version for name, _, version in (pin.partition("==") for pin in lower_bounds())}
    named = {name.lower(): oldest for name, (oldest, _) in _table().items() if name not in ("Python", "PostgreSQL")}
    assert named == {name: pins[name] for name in named}
    assert {"celery", "kombu", "psycopg", "sqlalchemy"} <= set(named)


def test_each_end_of_python_and_postgres_has_a_combination() -> None:
    rows = combinations()
    by_age = [tuple(map(int, row.pythons[0].split("."))) for row in rows]
    ends = [".".join(map(str, end)) for end in (min(by_age), max(by_age))]
    assert list(_table()["Python"]) == ends
    majors = sorted({row.postgres for row in rows})
    assert [str(majors[0]), str(majors[-1])] == list(_table()["PostgreSQL"])
    assert majors == list(range(majors[0], majors[-1] + 1))
    assert f">={ends[0]}" == PROJECT["requires-python"]


def test_each_python_that_the_package_names_has_a_combination() -> None:
    named = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert named == {row.pythons[0] for row in combinations()}
