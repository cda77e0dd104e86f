"""What tests share: waiting for a condition, worker processes that are really killed, and looking at what happened."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil
import psycopg

from pgtruth_transport.testing.processes import ServerProcess

T = TypeVar("T")
ROOT: Final = Path(__file__).resolve().parents[1]
RUNS_TABLE: Final = """
CREATE TABLE public.runs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id text,
    event text NOT NULL,
    pid integer NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""


def eventually(condition: Callable[[], T], timeout: float = 10.0, every: float = 0.02) -> T:
    """The first true value of ``condition``; an AssertionError with its last value when the time is up.

    An AssertionError inside ``condition`` means "not yet".
    """
    deadline = time.monotonic() + timeout
    while True:
        failure: AssertionError | None = None
        value: Any = None
        try:
            value = condition()
        except AssertionError as exc:
            failure = exc
        if value:
            return value  # type: ignore[no-any-return]
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s; last: {value!r}") from failure
        time.sleep(every)


class WorkerProcess:
    """One ``celery … worker``, in a process group of its own, its output in a file."""

    def __init__(
        self,
        broker: str,
        log: Path,
        *,
        name: str = "w",
        result: str = "pgtruth://",
        app: str = "tests.apps.basic",
        options: Mapping[str, object] | None = None,
        conf: Mapping[str, object] | None = None,
        install: Mapping[str, object] | None = None,
        pool: str = "prefork",
        concurrency: int = 2,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        level: str = "INFO",
    ) -> None:
        self.name, self.log = name, log
        variables = os.environ | app_environment(broker, result, options, conf, install) | dict(env or {})
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "-n", f"{name}@localhost", "-l", level]
        command += ["-P", pool, "-c", str(concurrency), *args]
        self.process = ServerProcess(command, log, env=variables, cwd=ROOT)

    @property
    def pid(self) -> int:
        """The main process."""
        return self.process.pid

    @property
    def output(self) -> str:
        """All that it has written so far."""
        return self.log.read_text(errors="replace")

    def wait_ready(self, timeout: float = 30.0) -> WorkerProcess:
        """Wait until it says that it is ready."""
        self.process.wait_until(lambda: " ready." in self.output, timeout)
        return self

    def wait_output(self, text: str, timeout: float = 10.0, times: int = 1) -> None:
        """Wait until ``text`` stands in its output, ``times`` times."""
        try:
            eventually(lambda: self.output.count(text) >= times, timeout)
        except AssertionError:
            raise AssertionError(f"no {text!r} within {timeout:g} s in:\n{self.process.tail(60)}") from None

    def children(self) -> list[int]:
        """The pool's processes."""
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]

    def is_running(self) -> bool:
        """Whether the main process has not ended."""
        return self.process.is_running()

    def kill9(self) -> None:
        """``kill -9`` the whole process group, as a crashed machine would."""
        self.process.end(signal.SIGKILL)

    def kill9_main(self) -> None:
        """``kill -9`` the main process only: its children are orphans."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(10)

    def sigterm(self) -> None:
        """Ask for a warm shutdown."""
        os.kill(self.pid, signal.SIGTERM)

    def sigquit(self) -> None:
        """Ask for a cold shutdown."""
        os.kill(self.pid, signal.SIGQUIT)

    def sigstop(self, *pids: int) -> None:
        """Freeze these processes; without any, the whole group."""
        for pid in pids or (self.pid, *self.children()):
            os.kill(pid, signal.SIGSTOP)

    def sigcont(self, *pids: int) -> None:
        """Let them go on."""
        for pid in pids or (self.pid, *self.children()):
            os.kill(pid, signal.SIGCONT)

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for its end; the return code."""
        return self.process.wait(timeout)

    def stop(self) -> None:
        """End it, gently first."""
        self.process.end(signal.SIGTERM, 10)


def app_environment(
    broker: str,
    result: str = "pgtruth://",
    options: Mapping[str, object] | None = None,
    conf: Mapping[str, object] | None = None,
    install: Mapping[str, object] | None = None,
) -> dict[str, str]:
    """The variables that ``tests.apps.basic`` reads."""
    variables = {
        "BROKER": broker,
        "RESULT": result,
        "OPTIONS": json.dumps(dict(options or {})),
        "CONF": json.dumps(dict(conf or {})),
        "PYTHONUNBUFFERED": "1",
    }
    if install is not None:
        variables["INSTALL"] = json.dumps(dict(install))
    return variables


def runs(conn: psycopg.Connection[Any], event: str = "start", job_id: str | None = None) -> int:
    """How many lines of ``public.runs`` there are of this event (and job)."""
    row = conn.execute(
        "SELECT count(*) FROM public.runs WHERE event = %s AND (%s::text IS NULL OR job_id = %s)",
        (event, job_id, job_id),
    ).fetchone()
    assert row is not None
    return int(row[0])


def statuses(conn: psycopg.Connection[Any], schema: str = "pgtruth") -> dict[str, int]:
    """Jobs by status."""
    query = psycopg.sql.SQL("SELECT status, count(*) FROM {} GROUP BY status").format(
        psycopg.sql.Identifier(schema, "jobs")
    )
    return dict(conn.execute(query).fetchall())
