"""Effects in tasks of real workers that are really killed and frozen, counted at the gateway process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support import ROOT, WorkerProcess, app_environment, eventually, runs
from tests.support_effects import GatewayProcess, running_gateway, states
from tests.support_jobs import client, job, outcomes, wait_status

Conn = psycopg.Connection[Any]
Start = Callable[..., WorkerProcess]
APP = "tests.apps.effectful"
FAST = {"lease_seconds": 3, "reap_interval": 1, "poll_interval": 0.3}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    with running_gateway(tmp_path) as process:
        yield process


@pytest.fixture
def shop(worker: Start, gateway: GatewayProcess) -> Callable[..., WorkerProcess]:
    """Start a worker of the app with effects, on the gateway."""

    def start(name: str, timeout: float = 2, **arguments: Any) -> WorkerProcess:
        env = {"GATEWAY_URL": gateway.url, "GATEWAY_TIMEOUT": str(timeout), **arguments.pop("env", {})}
        arguments = {"options": FAST, "install": {}, "concurrency": 1, **arguments}
        return worker(name=name, app=APP, env=env, **arguments)

    return start


def send(url: str, task: str, *args: Any) -> str:
    return str(client(url, FAST).send_task(f"{APP}.{task}", args).id)


def test_a_charge_whose_answer_never_comes_is_made_once_and_the_job_ends_done(
    shop: Start, database_url: str, conn: Conn, gateway: GatewayProcess
) -> None:
    """E01 through a worker: the wait costs no retry."""
    gateway.behave("hang")
    shop("w1", timeout=1)
    job_id = send(database_url, "pay", "7", 1000)
    row = wait_status(conn, job_id, "done", 20)
    assert row["retry_count"] == 0
    assert outcomes(conn, job_id) == ["released", "done"]
    assert gateway.calls("charge:7") == 1
    (act,) = gateway.acts()
    assert client(database_url).AsyncResult(job_id).get(5) == act["receipt"]


def test_a_worker_killed_while_the_gateway_acts(
    shop: Start, database_url: str, conn: Conn, gateway: GatewayProcess
) -> None:
    """E02 through a worker: SIGKILL between the act and the record."""
    gateway.behave("hang")
    first = shop("w1", timeout=60)
    job_id = send(database_url, "pay", "7", 1000)
    eventually(gateway.acts, 10)
    first.kill9()
    assert states(conn) == {"charge:7": "started"}
    shop("w2")
    row = wait_status(conn, job_id, "done", 25)
    assert row["retry_count"] == 1
    assert len(gateway.acts()) == gateway.calls("charge:7") == 1
    assert states(conn) == {"charge:7": "applied"}


def test_a_frozen_attempt_wakes_up_after_another_has_charged(
    shop: Start, database_url: str, conn: Conn, gateway: GatewayProcess, tmp_path: Path
) -> None:
    """E06 through workers: SIGSTOP just before the effect, SIGCONT when it is done."""
    go = tmp_path / "go"
    first = shop("w1")
    job_id = send(database_url, "pay_when", "7", 1000, str(go))
    eventually(lambda: runs(conn, "start", job_id) == 1)
    first.sigstop()
    go.touch()
    shop("w2")
    wait_status(conn, job_id, "done", 25)
    assert len(gateway.acts()) == 1
    first.sigcont()
    eventually(lambda: runs(conn, "stale", job_id) == 1 or "lost the lease" in first.output, 10)
    assert len(gateway.acts()) == gateway.calls("charge:7") == 1
    assert job(conn, job_id)["status"] == "done"


def test_a_job_gives_up_in_the_end_and_the_effect_stays_listed(
    shop: Start, database_url: str, conn: Conn, gateway: GatewayProcess
) -> None:
    shop("w1")
    job_id = send(database_url, "give_up", "lost cause")
    row = wait_status(conn, job_id, "failed", 30)
    assert "has been unknown for" in row["error"]
    assert states(conn) == {"lost cause": "unknown"}
    assert outcomes(conn, job_id)[0] == "released"
    listed = _cli(database_url, "list", "--json")
    assert [json.loads(line)["key"] for line in listed.splitlines()] == ["lost cause"]


def test_beats_task_reconciles(shop: Start, database_url: str, conn: Conn, gateway: GatewayProcess) -> None:
    gateway.behave("hang")
    first = shop("w1", timeout=60)
    send(database_url, "pay", "7", 1000)
    eventually(gateway.acts, 10)
    first.kill9()
    conn.execute("DELETE FROM pgtruth.jobs")  # nobody will ask about it any more
    shop("w2")
    client(database_url, FAST).send_task("pgtruth.reconcile")
    eventually(lambda: states(conn) == {"charge:7": "applied"}, 15)


def _cli(url: str, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "celery", "-A", APP, "pgtruth", "effects", *arguments]
    variables = os.environ | app_environment(url, options=FAST, install={})
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
