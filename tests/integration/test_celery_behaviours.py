"""What Celery's users see through any transport: remote control, revokes, purge, reconnects, pools, plain kombu."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import celery
import kombu
import psycopg
import pytest
from celery import Celery, chain, chord
from celery.exceptions import ChordError, TaskRevokedError
from kombu.exceptions import OperationalError

from pgtruth_transport import db as connections
from pgtruth_transport.migrate import migrate
from pgtruth_transport.settings import Settings
from pgtruth_transport.testing.servers import EmbeddedPostgres
from pgtruth_transport.urls import parse_url
from tests import support
from tests.support import WorkerProcess, eventually, runs
from tests.support_field import proxied

Start = Callable[..., WorkerProcess]


@pytest.fixture
def app(database_url: str) -> Any:
    """A client's view of ``tests.apps.basic``: it knows URLs and names, no task."""
    client = Celery("client", broker=database_url, backend=database_url, set_as_current=False)
    yield client
    client.close()


def queued(app: Celery, task: str = "run", **options: Any) -> Any:
    return app.send_task(f"tests.apps.basic.{task}", args=options.pop("args", (1,)), **options)


def test_a_revoke_before_any_worker_is_up_lasts(app: Celery, worker: Start, conn: psycopg.Connection[Any]) -> None:
    revoked, kept = queued(app), queued(app)
    revoked.revoke()
    worker()
    assert kept.get(timeout=20) == 1
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=20)
    assert runs(conn) == 1


def test_a_revoke_by_stamps_before_any_worker_is_up_lasts(
    app: Celery, worker: Start, conn: psycopg.Connection[Any]
) -> None:
    stamps = {"stamped_headers": ["tenant"], "tenant": ["acme"]}
    revoked, kept = queued(app, **stamps), queued(app)
    app.control.revoke_by_stamped_headers({"tenant": ["acme", "other"]})
    worker()
    assert kept.get(timeout=20) == 1
    assert revoked.state == "REVOKED"
    assert runs(conn) == 1


def test_a_chord_ends_when_a_member_that_waits_for_a_slot_is_revoked(
    app: Celery, worker: Start, conn: psycopg.Connection[Any]
) -> None:
    worker(concurrency=1)
    slow, quick = app.signature("tests.apps.basic.sleepy", (5, 1)), app.signature("tests.apps.basic.run", (2,))
    result = chord([slow, quick], app.signature("tests.apps.basic.total"), app=app).apply_async()
    blocking, waiting = result.parent.results
    eventually(lambda: runs(conn, "start", blocking.id) == 1)
    waiting.revoke()
    assert isinstance(result.get(timeout=20, propagate=False), ChordError)
    assert "TaskRevokedError" in str(result.result)
    assert (blocking.get(timeout=20), waiting.state) == (1, "REVOKED")
    assert runs(conn, "start", waiting.id) == 0


def test_a_success_that_a_body_stores_itself_is_the_end_and_what_follows_runs(
    app: Celery, worker: Start, conn: psycopg.Connection[Any]
) -> None:
    worker()
    first, echo = app.signature("tests.apps.basic.stores_then_rejects", (7,)), app.signature("tests.apps.basic.echo")
    linking = first.clone()
    linking.link(echo.clone().set(task_id="linked"))
    steps = chain(linking, echo, app=app).apply_async()
    assert (steps.get(timeout=20), steps.parent.get(timeout=20)) == (7, 7)
    assert app.AsyncResult("linked").get(timeout=20) == 7
    assert runs(conn, "start", steps.parent.id) == 1
    header = [first, app.signature("tests.apps.basic.run", (1,))]
    result = chord(header, app.signature("tests.apps.basic.total"), app=app).apply_async()
    assert result.get(timeout=20) == 8


def test_inspect_lists_what_waits_for_its_time(app: Celery, worker: Start) -> None:
    process = worker()
    later = queued(app, countdown=600)
    name = f"{process.name}@localhost"
    (entry,) = app.control.inspect(timeout=5, limit=1).scheduled()[name]
    assert entry["request"]["id"] == later.id
    assert entry["request"]["args"] == [1]
    state, info = app.control.inspect(timeout=5, limit=1).query_task(later.id)[name][later.id]
    assert (state, info["id"]) == ("scheduled", later.id)
    assert app.control.inspect(timeout=5, limit=1).query_task("unknown")[name] == {}


def test_each_worker_answers_once(app: Celery, worker: Start) -> None:
    names = {f"{worker().name}@localhost" for _ in range(2)}
    answers = app.control.ping(timeout=5, limit=2)
    assert {name for answer in answers for name in answer} == names
    assert len(answers) == 2


def test_workers_know_of_each_other(worker: Start) -> None:
    first = worker(level="DEBUG")
    second = worker()
    second.wait_output("mingle: sync with 1 nodes", timeout=10)
    first.wait_output(f"{second.name}@localhost joined the party", timeout=20)


@pytest.mark.parametrize("pool", ["solo", "threads", "gevent"])
def test_every_pool_runs_answers_and_stops(
    pool: str, app: Celery, worker: Start, conn: psycopg.Connection[Any]
) -> None:
    process = worker(pool=pool)
    assert [queued(app, args=(n,)).get(timeout=20) for n in range(3)] == [0, 1, 2]
    ids = queued(app, "publishes", args=(2,)).get(timeout=20)
    assert [app.AsyncResult(job_id).get(timeout=20) for job_id in ids] == [0, 1]
    assert app.control.ping(timeout=5, limit=1) == [{f"{process.name}@localhost": {"ok": "pong"}}]
    process.sigterm()
    assert process.wait(20) == 0


#: A worker that hardly ever wakes by itself.
SLEEPY: dict[str, Any] = {
    "options": {"poll_interval": 8.0},
    "args": ("--without-heartbeat", "--without-gossip", "--without-mingle"),
}


@pytest.mark.parametrize(
    ("pool", "busy"), [("prefork", 0), ("threads", 0), ("solo", 0), ("prefork", 1), ("threads", 1)]
)
def test_a_job_that_falls_due_does_not_wait_for_the_next_poll(
    app: Celery, worker: Start, conn: psycopg.Connection[Any], pool: str, busy: int
) -> None:
    worker(pool=pool, concurrency=busy + 1, **SLEEPY)
    for _ in range(busy):
        other = queued(app, "sleepy", args=(12,))
        eventually(lambda: runs(conn, "start", other.id) == 1)  # noqa: B023
    for _ in range(2):
        later = queued(app, countdown=1.0)
        eventually(lambda: runs(conn, "end", later.id) == 1, 4)  # noqa: B023


def test_an_idle_child_is_sent_its_job_with_the_claim(app: Celery, worker: Start) -> None:
    """What a stop finds in the pool's line goes back to the queue, though a child was free for it."""
    process = worker(app="tests.apps.watched", concurrency=1)
    assert queued(app).get(timeout=20) == 1  # which may come before the child has told that it is there
    for _ in range(3):
        time.sleep(0.2)  # until nothing has just ended
        assert queued(app).get(timeout=20) == 1
    turns = [line.partition("turn: ")[2] for line in process.output.splitlines() if "turn: " in line]
    assert turns[1:] == ["1 taken, 0 unsent"] * 3


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_an_end_is_settled_at_once_while_others_run_on(app: Celery, worker: Start, pool: str) -> None:
    worker(pool=pool, concurrency=3, **SLEEPY)
    others = [queued(app, "sleepy", args=(7,)) for _ in range(2)]
    assert queued(app, "sleepy", args=(0.5, "quick")).get(timeout=4) == "quick"
    assert [other.state for other in others] == ["PENDING"] * 2


def test_purge_returns_a_count_then_none(app: Celery) -> None:
    for _ in range(3):
        queued(app)
    assert app.control.purge() == 3
    assert app.control.purge() == 0


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_whose_database_restarts_says_so_and_works_on(tmp_path: Path, busy: bool) -> None:
    """One that has no slot free as well; and a queue whose consumer was cancelled stays cancelled."""
    with EmbeddedPostgres() as server:
        name = f"restart_{secrets.token_hex(4)}"
        server.create_database(name)
        url = server.url_for(name)
        migrate(Settings.make(url))
        with psycopg.connect(parse_url(url), autocommit=True) as conn:
            conn.execute(support.RUNS_TABLE)
        client = Celery("client", broker=url, backend=url, set_as_current=False)
        process = WorkerProcess(url, tmp_path / "worker.log", result=url, concurrency=1, args=["-Q", "celery,other"])
        inspect = client.control.inspect(timeout=5, limit=1)
        try:
            process.wait_ready()
            assert queued(client).get(timeout=20) == 1
            client.control.cancel_consumer("other", reply=True, timeout=5, limit=1)
            first = queued(client, "sleepy", args=(5, 1)) if busy else queued(client)
            with psycopg.connect(parse_url(url), autocommit=True) as conn:
                eventually(lambda: runs(conn, "start", first.id) == 1)
            if not busy:
                assert first.get(timeout=20) == 1  # a body whose own connection is cut would leave a traceback
            server.restart()
            process.wait_output("Connection to broker lost", timeout=20)
            process.wait_output("Connected to", timeout=30, times=2)
            connections.close_all()
            if celery.VERSION[:2] >= (5, 7):  # older ones write the traceback of every lost connection themselves
                assert "Traceback" not in process.output
            assert [first.get(timeout=30), queued(client).get(timeout=30)] == [1, 1]
            (active,) = inspect.active_queues().values()
            assert [queue["name"] for queue in active] == ["celery"]
        finally:
            process.stop()
            client.close()
            connections.close_all()


def test_a_heartbeat_that_meets_a_dead_server_first_does_not_hold_the_worker(
    worker: Start, database_url: str, redis_url: str
) -> None:
    """Celery sends it again for as long as it gets connection errors, in the loop; the poll must come to its turn."""
    with proxied(database_url) as (proxy, url):
        process = worker(
            url, result=url, options={"signal_url": redis_url, "poll_interval": 8}, args=["--heartbeat-interval=1"]
        )
        time.sleep(1)  # past what the start publishes
        proxy.refuse()
        process.wait_output("Connection to broker lost", timeout=20)
        process.wait_output("Trying again in", timeout=20)
        proxy.heal()
        process.wait_output("Connected to", timeout=20, times=2)
        with closing(Celery("client", broker=database_url, backend=database_url, set_as_current=False)) as client:
            assert queued(client).get(timeout=20) == 1


def test_a_dead_server_is_a_connection_error_within_ten_seconds() -> None:
    with closing(socket.socket()) as taken:  # bound, not listening: refused at once
        taken.bind(("127.0.0.1", 0))
        connection = kombu.Connection(f"pgtruth://nobody@127.0.0.1:{taken.getsockname()[1]}/nowhere")
        begun = time.monotonic()
        with pytest.raises(connection.connection_errors):
            connection.connect()
        client = Celery("client", broker=connection.hostname, set_as_current=False)
        client.conf.task_publish_retry = False
        with pytest.raises(OperationalError):
            client.send_task("anything")
        assert time.monotonic() - begun < 10


def test_a_worker_that_cannot_connect_tries_again_with_the_usual_words(tmp_path: Path) -> None:
    process = WorkerProcess("pgtruth://nobody@127.0.0.1:1/nowhere", tmp_path / "worker.log", result="disabled://")
    try:
        process.wait_output("Trying again in 2.00 seconds", timeout=30)
    finally:
        process.kill9()


def test_a_pool_that_spawns_its_children(app: Celery, worker: Start, conn: psycopg.Connection[Any]) -> None:
    worker(conf={"worker_pool_start_method": "spawn"}, concurrency=1)
    assert queued(app).get(timeout=30) == 1
    ids = queued(app, "publishes", args=(2,)).get(timeout=30)
    assert [app.AsyncResult(job_id).get(timeout=30) for job_id in ids] == [0, 1]


def test_autoscale_grows_with_the_backlog(app: Celery, worker: Start, conn: psycopg.Connection[Any]) -> None:
    process = worker(args=("--autoscale=3,1",))
    waiting = [queued(app, "sleepy", args=(3, number)) for number in range(6)]
    eventually(lambda: len(process.children()) >= 3, timeout=20)
    assert [result.get(timeout=40) for result in waiting] == list(range(6))


def test_the_pool_grows_shrinks_and_consumes_other_queues(app: Celery, worker: Start) -> None:
    process = worker(concurrency=1)
    app.control.pool_grow(1, reply=True, timeout=5, limit=1)
    eventually(lambda: len(process.children()) == 2)
    app.control.add_consumer("extra", reply=True, timeout=5, limit=1)
    assert queued(app, queue="extra").get(timeout=20) == 1
    app.control.cancel_consumer("extra", reply=True, timeout=5, limit=1)
    left = queued(app, queue="extra")
    assert queued(app).get(timeout=20) == 1
    assert left.state == "PENDING"


def test_a_connection_that_closes_gives_back_what_it_holds(database_url: str) -> None:
    name = f"q{secrets.token_hex(4)}"
    with kombu.Connection(database_url) as first:
        queue = first.SimpleQueue(name)
        queue.put({"n": 1})
        queue.put({"n": 2})
        assert queue.get(timeout=5).payload == {"n": 1}
    with kombu.Connection(database_url) as second, closing(second.SimpleQueue(name)) as queue:
        again = queue.get(timeout=5)
        assert (again.payload, again.delivery_info["redelivered"]) == ({"n": 1}, True)
        again.ack()
        last = queue.get(timeout=5)
        assert last.payload == {"n": 2}
        last.ack()


def test_a_topic_queue_keeps_what_comes_before_its_consumer(database_url: str) -> None:
    exchange = kombu.Exchange("news", "topic")
    queue = kombu.Queue("all-news", exchange, routing_key="news.#")
    with kombu.Connection(database_url) as connection:
        queue(connection.default_channel).declare()
        kombu.Producer(connection, exchange).publish("early", routing_key="news.today", serializer="json")
    found: list[Any] = []
    with kombu.Connection(database_url) as connection:
        consumer = kombu.Consumer(connection, [queue], callbacks=[lambda body, m: (found.append(body), m.ack())])
        with consumer:
            connection.drain_events(timeout=5)
    assert found == ["early"]
