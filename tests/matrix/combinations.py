"""What is run together: a Python, pinned packages and a major version of PostgreSQL.

``oldest`` takes its pins from the lower bounds in ``pyproject.toml``, so that a bound that nobody has run cannot stand
there.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import Final

from tests.support import ROOT

EXTRAS: Final = ("redis", "embedded", "flower", "metrics", "django")
# What an application gets without asking for it: the oldest that Celery 5.5.0 and kombu 5.5.2 accept.
BELOW: Final = ("amqp==5.1.1", "billiard==4.2.1", "vine==5.1.0")
# What the tests need beside the package; never pinned, because no application installs it.
TOOLS: Final = ("asyncpg", "gevent", "hypothesis", "psycopg2-binary", "pytest", "pytest-timeout", "pytest-xdist")
SUITE: Final = (
    "tests/unit",
    "tests/integration/test_atomic_end.py",
    "tests/integration/test_beat.py",
    "tests/integration/test_broadcast_tasks.py",
    "tests/integration/test_celery_behaviours.py",
    "tests/integration/test_cli_tables.py",
    "tests/integration/test_endings.py",
    "tests/integration/test_entities.py",
    "tests/integration/test_failure_matrix.py",
    "tests/integration/test_flower.py",
    "tests/integration/test_follow_ups.py",
    "tests/integration/test_lifecycle_concurrency.py",
    "tests/integration/test_lifecycle_moves.py",
    "tests/integration/test_lifecycle_plans.py",
    "tests/integration/test_messages.py",
    "tests/integration/test_privileges.py",
    "tests/integration/test_roundtrip.py",
    "tests/integration/test_settling.py",
    "tests/integration/test_signals_conformance.py",
    "tests/integration/test_transactions_kinds.py",
)
# The part of it that another server, or Celery between the two ends, could break.
CORE: Final = (
    "tests/unit",
    "tests/integration/test_atomic_end.py",
    "tests/integration/test_celery_behaviours.py",
    "tests/integration/test_entities.py",
    "tests/integration/test_lifecycle_concurrency.py",
    "tests/integration/test_lifecycle_moves.py",
    "tests/integration/test_lifecycle_plans.py",
    "tests/integration/test_messages.py",
    "tests/integration/test_roundtrip.py",
    "tests/integration/test_signals_conformance.py",
)


@dataclass(frozen=True, slots=True)
class Combination:
    """One row of the matrix: the first of ``pythons`` that is there, and ``pins`` for pip; else the newest."""

    name: str
    pythons: tuple[str, ...]
    postgres: int
    pins: tuple[str, ...] = ()
    suite: tuple[str, ...] = SUITE


def combinations() -> list[Combination]:
    """Every row, the oldest first."""
    return [
        Combination("oldest", ("3.11",), 14, lower_bounds() + BELOW),
        Combination("celery-5.6", ("3.12",), 15, ("celery==5.6.*", "kombu==5.6.*"), CORE),
        Combination("newest", ("3.14", "3.13", "3.12", "3.11"), 18),
        Combination("postgres-16", ("3.13", "3.12", "3.11"), 16, suite=CORE),
        Combination("postgres-17", ("3.13", "3.12", "3.11"), 17, suite=CORE),
    ]


def lower_bounds() -> tuple[str, ...]:
    """``name==version`` for the package's own requirements and those of the extras that an application may ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted: list[str] = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    pins = {}
    for requirement in wanted:
        found = re.match(r"([\w.-]+)(?:\[\w+\])?>=([\w.]+)", requirement)
        if found is None:
            raise ValueError(f"pyproject.toml: {requirement!r} has no lower bound")
        pins[found[1]] = found[2]
    return tuple(f"{name}=={version}" for name, version in pins.items())
