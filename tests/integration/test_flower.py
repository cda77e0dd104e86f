"""Flower 2 on our URL, started for real, asked over HTTP: true queue lengths, and a memory that survives restarts."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery
from celery.events.state import State

from pgtruth_transport.db import Database
from pgtruth_transport.observe import backfill
from pgtruth_transport.testing.processes import ServerProcess, free_port
from pgtruth_transport.testing.servers import PostgresServer
from tests import support

Conn = psycopg.Connection[Any]


class FlowerProcess:
    """One ``celery pgtruth flower`` with the unauthenticated API on."""

    def __init__(self, broker: str, log: Path, *args: str) -> None:
        self.port, self.log = free_port(), log
        self.address = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "celery", "-A", "tests.apps.basic", "pgtruth", "flower"]
        command += ["--address=127.0.0.1", f"--port={self.port}", "--debug=False", *args]
        env = os.environ | support.app_environment(broker) | {"FLOWER_UNAUTHENTICATED_API": "true"}
        self.process = ServerProcess(command, log, env=env, cwd=support.ROOT)

    def get(self, path: str, data: dict[str, Any] | None = None, timeout: float = 20) -> tuple[int, str]:
        """Status and body; POST where there is data (JSON) to send."""
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self.address + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def json(self, path: str, data: dict[str, Any] | None = None) -> Any:
        status, body = self.get(path, data)
        assert status == 200, f"{path}: {status} {body[:300]}"
        return json.loads(body)

    def is_up(self) -> bool:
        try:
            return self.get("/healthcheck", timeout=2)[0] == 200
        except OSError:
            return False


@pytest.fixture
def flower(tmp_path: Path) -> Iterator[Callable[..., FlowerProcess]]:
    """``flower(url, …)`` starts one and waits until it answers."""
    started: list[FlowerProcess] = []

    def start(broker: str, *args: str) -> FlowerProcess:
        found = FlowerProcess(broker, tmp_path / f"flower-{len(started)}.log", *args)
        started.append(found)
        found.process.wait_until(found.is_up, 40)
        return found

    yield start
    for found in started:
        found.process.end(signal.SIGTERM)


@pytest.fixture
def app(database_url: str) -> Celery:
    return Celery("tests.apps.basic", broker=database_url, backend="pgtruth://", set_as_current=False)


PAGES = ["/", "/workers", "/tasks", "/broker", "/metrics", "/healthcheck", "/api/workers", "/api/tasks"]
DATATABLE = "/tasks/datatable?draw=1&start=0&length=10&order[0][column]=0&order[0][dir]=asc&columns[0][data]=name"


def test_every_page_answers_with_what_the_tables_say(
    app: Celery, conn: Conn, database_url: str, worker: Callable[..., Any], flower: Callable[..., FlowerProcess]
) -> None:
    worker(args=["-E"])
    result = app.send_task("tests.apps.basic.add", (2, 3))
    assert result.get(timeout=20) == 5
    failed = app.send_task("tests.apps.basic.boom", ("no luck",))
    support.eventually(lambda: failed.state == "FAILURE", 20)
    waiting = [app.send_task("tests.apps.basic.noop", queue="nobody").id for _ in range(3)]
    later = app.send_task("tests.apps.basic.noop", countdown=3600).id
    page = flower(database_url)
    for path in [*PAGES, f"/task/{result.id}", f"/task/{failed.id}", f"/task/{waiting[0]}", DATATABLE]:
        status, body = page.get(path)
        assert status == 200, f"{path}: {status} {body[:500]}"
    lengths = {queue["name"]: queue for queue in page.json("/api/queues/length")["active_queues"]}
    assert lengths["celery"] == {"name": "celery", "messages": 1, "messages_ready": 0, "messages_unacknowledged": 0}
    assert lengths["nobody"]["messages_ready"] == 3  # no worker works on it: that is what one wants to see
    assert "nobody" in page.get("/broker")[1]
    tasks = page.json("/api/tasks")
    assert {tasks[i]["state"] for i in waiting} == {"PENDING"}
    assert tasks[later]["state"] == "PENDING"
    assert tasks[result.id]["state"] == "SUCCESS"
    assert (tasks[result.id]["args"], tasks[result.id]["result"]) == ("(2, 3)", "5")
    assert tasks[result.id]["worker"] == "w1@localhost"
    assert tasks[failed.id]["state"] == "FAILURE"
    assert "no luck" in tasks[failed.id]["exception"]
    workers = support.eventually(lambda: page.json("/api/workers?refresh=1"), 20, every=0.5)
    assert list(workers) == ["w1@localhost"]


def test_jobs_are_submitted_and_revoked_over_http(
    conn: Conn, database_url: str, worker: Callable[..., Any], flower: Callable[..., FlowerProcess]
) -> None:
    worker(args=["-E"])
    page = flower(database_url)
    support.eventually(lambda: page.json("/api/workers?refresh=1"), 20, every=0.5)
    applied = page.json("/api/task/apply/tests.apps.basic.add", {"args": [1, 2]})
    assert (applied["state"], applied["result"]) == ("SUCCESS", 3)
    later = page.json("/api/task/async-apply/tests.apps.basic.run", {"args": [1], "countdown": 3600})["task-id"]
    assert page.json(f"/api/task/result/{later}?timeout=1")["state"] == "PENDING"
    sent = page.json("/api/task/send-task/tests.apps.basic.add", {"args": [3, 4]})["task-id"]
    support.eventually(lambda: page.json(f"/api/task/result/{sent}?timeout=5")["result"] == 7, 20)
    assert page.json(f"/api/task/revoke/{later}?terminate=false", {})["message"]
    revoked = "SELECT status, celery_state FROM pgtruth.jobs WHERE id = %s"
    support.eventually(lambda: conn.execute(revoked, (later,)).fetchone() == ("failed", "REVOKED"), 20)
    support.eventually(lambda: page.json(f"/api/task/info/{later}")["state"] == "REVOKED", 20, every=0.5)


def test_a_job_whose_events_were_never_sent_shows_by_re_reading(
    app: Celery, database_url: str, worker: Callable[..., Any], flower: Callable[..., FlowerProcess]
) -> None:
    """Workers without ``-E`` and Flower without events: only the rows tell."""
    page = flower(database_url, "--enable_events=False")
    worker()
    result = app.send_task("tests.apps.basic.add", (2, 2))
    assert result.get(timeout=20) == 4
    found = support.eventually(lambda: page.json("/api/tasks").get(result.id), 20, every=0.5)
    assert (found["state"], found["result"]) == ("SUCCESS", "4")
    metrics = page.get("/metrics")[1]
    assert 'flower_events_total{task="tests.apps.basic.add"' not in metrics  # what is read is not counted as an event


def test_nothing_answers_5xx_while_the_database_is_away(
    pg_server: PostgresServer, database_url: str, conn: Conn, flower: Callable[..., FlowerProcess]
) -> None:
    page = flower(database_url)
    name = conn.info.dbname
    with pg_server.connect() as admin:
        admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'.encode())
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        try:
            for path in [*PAGES, "/api/queues/length", "/api/task/result/x?timeout=1"]:
                status, _ = page.get(path)
                assert status < 500 or (status == 503 and "result" in path), path
            assert json.loads(page.get("/api/queues/length")[1]) == {"active_queues": []}
        finally:
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'.encode())
    assert page.get("/broker")[0] == 200


ROW: dict[str, Any] = {
    "id": "a",
    "status": "done",
    "task": "t",
    "queue": "celery",
    "celery_state": "SUCCESS",
    "retry_count": 0,
    "root_id": "a",
    "parent_id": None,
    "created_at": 100.0,
    "claimed_at": 101.0,
    "updated_at": 102.5,
    "owned_by": "w@host:12:abcd",
    "error": None,
    "result": b"5",
    "headers": b'{"argsrepr": "(2, 3)", "kwargsrepr": "{}", "origin": "gen1@host"}',
}


def job(**values: Any) -> backfill.KnownJob:
    return backfill.KnownJob(**{**ROW, **values})


def show(state: State, *jobs: backfill.KnownJob) -> list[str]:
    return [task.uuid for task, _ in backfill.apply(state, jobs)]


def test_a_done_job_is_shown_with_its_times_and_makes_no_worker_alive() -> None:
    state = State()
    assert show(state, job()) == ["a"]
    task = state.tasks["a"]
    assert (task.state, task.received, task.started, task.succeeded) == ("SUCCESS", 101.0, 101.0, 102.5)
    assert (task.runtime, task.result, task.args, task.name) == (1.5, "5", "(2, 3)", "t")
    assert task.worker.hostname == "w@host"
    assert not state.workers["w@host"].alive
    assert show(state, job()) == []  # nothing differs any more


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"status": "queued", "claimed_at": None, "owned_by": None, "result": None}, "PENDING"),
        ({"status": "queued", "retry_count": 1, "error": "ValueError: x", "result": None}, "RETRY"),
        ({"status": "enqueue_failed", "claimed_at": None, "owned_by": None, "result": None}, "PENDING"),
        ({"status": "processing", "celery_state": "PROGRESS", "result": None}, "STARTED"),
        ({"status": "failed", "celery_state": "FAILURE", "error": "ValueError: x", "result": None}, "FAILURE"),
        ({"status": "failed", "celery_state": "REVOKED", "claimed_at": None, "owned_by": None}, "REVOKED"),
        ({"status": "done", "celery_state": None, "result": None}, "SUCCESS"),  # an ignored result
    ],
)
def test_each_status_has_its_celery_state(values: dict[str, Any], expected: str) -> None:
    state = State()
    show(state, job(**values))
    assert state.tasks["a"].state == expected
    assert (state.tasks["a"].exception or "") == (values.get("error") or "")


def event(state: State, kind: str, **fields: Any) -> None:
    state.event({"type": kind, "uuid": "a", "hostname": "w@host", "clock": 5, "timestamp": time.time(), **fields})


def test_an_event_of_an_attempt_that_lost_its_lease_is_put_right() -> None:
    state = State()
    event(state, "task-received", local_received=None, name="t")
    event(state, "task-succeeded", local_received=None, result="stale")
    assert show(state, job(status="failed", celery_state="FAILURE", error="too often", result=None)) == ["a"]
    assert (state.tasks["a"].state, state.tasks["a"].exception) == ("FAILURE", "too often")


def test_a_row_read_before_the_event_of_its_end_takes_nothing_back() -> None:
    state = State()
    event(state, "task-received", local_received=None, name="t")
    event(state, "task-succeeded", local_received=None, result="5")
    assert show(state, job(status="processing", result=None)) == []
    assert show(state, job(status="queued", result=None)) == []
    assert state.tasks["a"].state == "SUCCESS"


def test_a_job_taken_from_a_dead_worker_shows_as_retried() -> None:
    state = State()
    event(state, "task-received", local_received=None, name="t", timestamp=101.0)
    event(state, "task-started", local_received=None, timestamp=101.0)
    lost = job(status="queued", retry_count=1, error="lease expired", result=None, updated_at=120.0)
    assert show(state, lost) == ["a"]
    assert (state.tasks["a"].state, state.tasks["a"].exception) == ("RETRY", "lease expired")


def test_the_oldest_make_room_and_are_named() -> None:
    state = State(max_tasks_in_memory=2)
    jobs = [job(id=str(number)) for number in range(4)]
    assert [(task.uuid, gone) for task, gone in backfill.apply(state, jobs)] == [
        ("0", None),
        ("1", None),
        ("2", "0"),
        ("3", "1"),
    ]


def test_reading_is_bounded_and_newest_first(app: Celery, conn: Conn, db: Database) -> None:
    ids = [app.send_task("t", task_id=f"job-{number}").id for number in range(5)]
    for job_id in ids[:3]:
        conn.execute("UPDATE pgtruth.jobs SET status = 'done', updated_at = clock_timestamp() WHERE id = %s", (job_id,))
    jobs, after = backfill.read(db, limit=2)
    assert [j.id for j in jobs] == ["job-1", "job-2"]  # the newest two, oldest first
    assert [j.id for j in backfill.read(db, waiting=1)[0] if j.status == "queued"] == ["job-3"]
    assert [j.id for j in backfill.read(db, after=after)[0]] == ["job-0", "job-1", "job-2"]  # it looks a little back
