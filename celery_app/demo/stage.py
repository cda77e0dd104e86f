"""Sets the stage: servers, schema, workers, beat and Flower, all real processes, each waited for until it is ready."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from celery_app.demo.fleet import Fleet, Member
from celery_app.demo.screen import Screen
from celery_app.settings import AppSettings
from pgtruth_transport.testing.processes import ServerError, free_port
from pgtruth_transport.testing.servers import EmbeddedPostgres, EmbeddedValkey

ROOT = Path(__file__).resolve().parents[2]
CONCURRENCY = 2
FLOWER_PORT = 5555
DATABASE = "app"
MODES = ("redis", "notify")


class Trouble(RuntimeError):
    """The demo cannot go on; the message says what was waited for and where to look."""


@dataclass(slots=True)
class Stage:
    """All that runs."""

    mode: str
    folder: Path
    dsn: str
    redis_url: str | None
    env: dict[str, str]
    gateway: str
    fleet: Fleet
    flower: str = ""
    keep: bool = False  # the logs, after the end
    workers: dict[str, Member] = field(default_factory=dict)

    @property
    def settings(self) -> AppSettings:
        """The settings that every process of the stage has."""
        return AppSettings.from_env(self.env)

    def start_worker(self, name: str) -> Member:
        """Start a worker process; does not wait for it."""
        options = ["-n", f"{name}@%h", "-c", str(CONCURRENCY), "-l", "INFO", "-E"]
        member = self.fleet.start(f"worker-{name}", ["celery", "-A", "celery_app", "worker", *options])
        self.workers[name] = member
        return member


@contextmanager
def set_up(mode: str, screen: Screen) -> Iterator[Stage]:
    """Everything up and ready; everything gone afterwards. The logs stay where something went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="pgtruth-demo-"))
    screen.say(f"logs and output: {folder}")
    keep = True
    try:
        with ExitStack() as stack:
            stage = _servers(mode, folder, stack)
            screen.say(f"PostgreSQL is up{' and Valkey' if stage.redis_url else ', no Redis in this mode'}")
            _migrate(stage)
            screen.say("the schema is there (celery -A celery_app pgtruth migrate)")
            _processes(stage, screen)
            yield stage
            keep = stage.keep
    except KeyboardInterrupt:
        keep = False
        raise
    finally:
        if keep:
            screen.say(f"the logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _servers(mode: str, folder: Path, stack: ExitStack) -> Stage:
    postgres = stack.enter_context(EmbeddedPostgres(durable=True))
    postgres.create_database(DATABASE)
    redis_url = stack.enter_context(EmbeddedValkey()).url if mode == "redis" else None
    gateway_port = free_port()
    env = os.environ | {
        "BROKER_URL": postgres.url_for(DATABASE),
        "RESULT_BACKEND": "pgtruth://",
        "SIGNAL_URL": redis_url or "",
        "GATEWAY_URL": f"http://127.0.0.1:{gateway_port}",
        "GATEWAY_TIMEOUT": "2",
        "OUTPUT_DIR": str(folder / "output"),
        "RUNS_FILE": str(folder / "runs.jsonl"),
        "PYTHONUNBUFFERED": "1",
    }
    fleet = stack.enter_context(Fleet(folder, env, ROOT))
    book = ["--port", str(gateway_port), "--db", str(folder / "gateway.sqlite")]
    gateway = fleet.start("gateway", ["celery_app.gateway", *book])
    wait(gateway, "the gateway to be ready", 20, lambda: gateway.says("gateway at"))
    return Stage(mode, folder, postgres.dsn_for(DATABASE), redis_url, env, env["GATEWAY_URL"], fleet)


def _migrate(stage: Stage) -> None:
    command = [sys.executable, "-m", "celery", "-A", "celery_app", "pgtruth", "migrate"]
    done = subprocess.run(command, cwd=ROOT, env=stage.env, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise Trouble(f"the migration failed:\n{done.stdout}{done.stderr}")


def _processes(stage: Stage, screen: Screen) -> None:
    port = _port(int(stage.env.get("FLOWER_PORT", FLOWER_PORT)))
    stage.flower = f"http://127.0.0.1:{port}"
    for name in ("one", "two"):
        stage.start_worker(name)
    beat = stage.fleet.start(
        "beat", ["celery", "-A", "celery_app", "beat", "-l", "INFO", "-s", str(stage.folder / "beat-schedule")]
    )
    flower = stage.fleet.start(
        "flower",
        ["celery", "-A", "celery_app", "pgtruth", "flower", "--address=127.0.0.1", f"--port={port}"],
    )
    for member, words in (
        *((worker, " ready.") for worker in stage.workers.values()),
        (beat, "beat: Starting"),
        (flower, "Visit me"),
    ):
        wait(member, f"{member.name} to be ready", 30, lambda m=member, w=words: m.says(w))
    screen.say(f"two workers, beat and Flower are up ({stage.flower})")


def wait(member: Member, what: str, seconds: float, condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds; a member that ended instead is trouble at once."""
    try:
        member.process.wait_until(condition, seconds)
    except ServerError as error:
        raise Trouble(f"waited for {what}: {error}") from None


def _port(wanted: int) -> int:
    """``wanted`` if nobody listens there, else a free port."""
    with socket.socket() as probe:
        return wanted if probe.connect_ex(("127.0.0.1", wanted)) else free_port()
