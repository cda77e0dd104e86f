"""One file of a suite in one process, with a bound on its time, on a fresh database."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import redis

from pgtruth_transport import db as connections
from pgtruth_transport.migrate import migrate
from pgtruth_transport.settings import Settings
from pgtruth_transport.testing.servers import PostgresServer, RedisServer

from .report import Outcome, read
from .suites import Suite

HERE: Final = Path(__file__).parent
MODES: Final = ("notify", "redis", "control")
#: Seconds for one file, whatever its tests do.
FILE_LIMIT: Final = 2400
OURS: Final = "test_pgtruth.py"


def exceptions(suite: str) -> dict[str, str]:
    """The tests that are not run, with the reason of each."""
    found: dict[str, str] = tomllib.loads((HERE / "exceptions.toml").read_text())[suite]
    return found


class Bench:
    """The servers of a run: PostgreSQL, a Redis for what the tests write themselves, and one for the signals."""

    def __init__(
        self,
        scratch: Path,
        postgres: PostgresServer,
        own: RedisServer,
        signals: RedisServer,
        timeout: float,
        extra: list[str],
    ) -> None:
        self._scratch, self._postgres, self._own, self._signals = scratch, postgres, own, signals
        self._timeout, self._extra = timeout, extra

    def files(self, suite: Suite, root: Path, wanted: Iterable[str]) -> list[str]:
        """The files to run: those that are named, else every one."""
        folder = root / suite.folder
        if suite.name == "kombu":
            shutil.copyfile(HERE / "kombu_classes.py", folder / OURS)
            return [OURS]
        left_out = {test.rstrip("*") for test in exceptions(suite.name) if test.endswith(".py*")}
        every = sorted(folder.rglob("test_*.py"))
        return list(wanted) or [str(path.relative_to(folder)) for path in every if path.name not in left_out]

    def run(self, suite: Suite, root: Path, mode: str, file: str) -> Outcome:
        """Run one file; a file that does not end in time is ended, and counts as one error."""
        database = f"conformance_{secrets.token_hex(4)}"
        self._postgres.create_database(database)
        url = self._postgres.url_for(database)
        migrate(Settings.make(url))
        connections.close_all()
        for server in (self._own, self._signals):
            with redis.Redis.from_url(server.url) as client:
                client.flushall()
        xml = self._scratch / "outcome.xml"
        xml.unlink(missing_ok=True)
        try:
            self._pytest(suite, root, file, xml, self._environment(suite, root, mode, url))
        finally:
            self._postgres.drop_database(database)
        return read(xml)

    def _environment(self, suite: Suite, root: Path, mode: str, url: str) -> dict[str, str]:
        own = urlsplit(self._own.url)
        signal_url = self._signals.url if mode == "redis" else ""
        overrides = {"broker_transport_options": {"signal_url": signal_url}} if signal_url else {}
        (root / "integration-tests-config.json").write_text(json.dumps(overrides))
        control = mode == "control"
        return {
            **os.environ,
            "WORKER_LOGLEVEL": "INFO",  # as Celery's own tox.ini has it
            "PYTHONPATH": os.pathsep.join([str(root), str(HERE.parents[1])]),
            "TEST_BROKER": f"redis://{own.hostname}:{own.port}/1" if control else url,
            "TEST_BACKEND": f"redis://{own.hostname}:{own.port}/0" if control else url,
            "TEST_SIGNAL": signal_url,
            "REDIS_HOST": own.hostname or "localhost",
            "REDIS_PORT": str(own.port),
            "PGTRUTH_CONFORMANCE_TIMEOUT": str(self._timeout),
            "PGTRUTH_CONFORMANCE_EXCEPTIONS": "{}" if control else json.dumps(exceptions(suite.name)),
            "PGTRUTH_CONFORMANCE_CONTROL": "1" if control else "",
            "PGTRUTH_TEST_CONTAINERS": "local",
            "PYTEST_PLUGINS": ",".join(suite.plugins),
        }

    def _pytest(self, suite: Suite, root: Path, file: str, xml: Path, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "pytest", f"{suite.folder}/{file}", "-p", "tests.conformance.plugin"]
        command += ["-p", "no:cacheprovider", f"--junitxml={xml}", "-ra", "--tb=short", "--disable-warnings"]
        process = subprocess.Popen([*command, *self._extra], cwd=root, env=environment, start_new_session=True)
        try:
            process.wait(FILE_LIMIT)
        except subprocess.TimeoutExpired:
            print(f"{suite.name} {file}: ended after {FILE_LIMIT} s", flush=True)
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Nothing that a file started outlives it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait(10)
