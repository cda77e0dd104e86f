"""``celery pgtruth jobs|job|retry|cancel|reap|stats``: what they print and do, on real rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from celery import Celery
from click.testing import CliRunner, Result

from pgtruth_transport.cli import pgtruth
from pgtruth_transport.observe.copies import copy_of
from pgtruth_transport.testing.servers import free_port

Conn = psycopg.Connection[Any]
TASK = "shop.orders.send_confirmation_with_a_long_name"


@pytest.fixture
def app(database_url: str) -> Celery:
    """A producer on the fresh database; nobody works on it."""
    app = Celery("cli", broker=database_url, backend="pgtruth://", set_as_current=False)

    @app.task(name=TASK, shared=False)
    def confirm(*args: object) -> object:
        return args

    return app


def run(app: Celery, *arguments: str, columns: int = 80) -> Result:
    """One command, as on a terminal of so many columns."""
    result = CliRunner().invoke(pgtruth, arguments, obj=SimpleNamespace(app=app), env={"COLUMNS": str(columns)})
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def publish(app: Celery, count: int = 1, **options: Any) -> list[str]:
    return [app.tasks[TASK].apply_async((number,), **options).id for number in range(count)]


def end(conn: Conn, job_id: str, status: str = "failed", error: str | None = "ValueError: no such order") -> None:
    """As an attempt would have ended it."""
    conn.execute(
        "UPDATE pgtruth.jobs SET status = %s, error = %s, lease_version = 2, retry_count = 1,"
        " updated_at = clock_timestamp() WHERE id = %s",
        (status, error, job_id),
    )
    for version, outcome in ((1, "lease_expired"), (2, status)):
        conn.execute(
            "INSERT INTO pgtruth.attempts (job_id, lease_version, owned_by, claimed_at, outcome, error)"
            " VALUES (%s, %s, 'celery@host:12:ab', clock_timestamp(), %s, %s)",
            (job_id, version, outcome, error),
        )


def test_a_list_fits_80_columns_and_never_cuts_an_id(app: Celery, conn: Conn) -> None:
    ids = publish(app, 3)
    end(conn, ids[0])
    output = run(app, "jobs").output
    assert all(job_id in output for job_id in ids)
    assert max(map(len, output.splitlines())) <= 80
    assert output.splitlines()[1].split()[:2] == [ids[0], "failed"]  # the one that changed last
    assert "celery@" not in output
    assert "QUEUE" in run(app, "jobs", columns=120).output


@pytest.mark.parametrize("columns", [80, 90, 99, 100, 110, 120, 200])
def test_no_header_and_no_id_is_cut_at_any_width(app: Celery, conn: Conn, columns: int) -> None:
    ids = publish(app, 2)
    end(conn, ids[0])
    header, *lines = run(app, "jobs", columns=columns).output.splitlines()
    assert header.split() == ["ID", "STATUS", "TASK", *(["QUEUE", "WORKER"] * (columns >= 100)), "RETRIES", "AGE"]
    assert {line.split()[0] for line in lines} == set(ids)
    assert all(line.split()[-2] in ("0", "1") for line in lines)  # the retries
    attempts = run(app, "job", ids[0], columns=columns).output.partition("\n\n")[2]
    assert attempts.splitlines()[0].split() == ["LEASE", "OUTCOME", "WORKER", "TOOK", "ENDED", "ERROR"]
    assert "lease_expired" in attempts
    assert all(len(line) <= columns for line in (header, *lines, *attempts.splitlines()))


def test_the_error_of_a_job_that_goes_on_is_called_the_latest_failure(app: Celery, conn: Conn) -> None:
    waiting, ended = publish(app, 2)
    conn.execute("UPDATE pgtruth.jobs SET error = 'ConnectionError: gone' WHERE id = %s", (waiting,))
    end(conn, ended)
    assert "latest failure  ConnectionError: gone" in run(app, "job", waiting).output
    assert "\nerror  " in run(app, "job", ended).output


def test_a_list_is_filtered(app: Celery, conn: Conn) -> None:
    first, second = publish(app, 2)
    (third,) = publish(app, queue="other")
    end(conn, first)
    assert first in (only := run(app, "jobs", "--status", "failed").output)
    assert second not in only
    assert third in run(app, "jobs", "--queue", "other").output
    assert "no jobs match" in run(app, "jobs", "--task", "nothing.like.it").output
    assert second in run(app, "jobs", "--since", "10m").output
    assert "write 30s" in run(app, "jobs", "--since", "yesterday").output
    assert [line["id"] for line in json.loads(run(app, "jobs", "--json", "-n", "1", "-s", "failed").output)] == [first]


def test_a_job_shows_its_attempts_and_never_its_payload(app: Celery, conn: Conn) -> None:
    job_id = app.tasks[TASK].delay("card number 4111").id
    end(conn, job_id)
    output = run(app, "job", job_id).output
    assert "lease_expired" in output
    assert "ValueError: no such order" in output
    assert "celery@host" in output
    assert "4111" not in output
    found = run(app, "job", job_id, "--json").output
    assert "4111" not in found
    assert [a["outcome"] for a in json.loads(found)["attempts"]] == ["lease_expired", "failed"]


def test_unknown_ids_are_refused_before_anything_is_done(app: Celery, conn: Conn) -> None:
    (known,) = publish(app)
    for arguments in (["job", "nope"], ["retry", known, "nope"], ["cancel", known, "nope"]):
        result = run(app, *arguments)
        assert result.exit_code == 1
        assert "unknown job nope" in result.output
    assert conn.execute("SELECT status FROM pgtruth.jobs").fetchall() == [("queued",)]


def test_retry_publishes_a_copy_and_leaves_the_end_alone(app: Celery, conn: Conn) -> None:
    (old,) = publish(app, priority=7, expires=3600)
    end(conn, old)
    copies = json.loads(run(app, "retry", old, "--json").output)
    new = copies[old]
    assert new != old
    rows = dict(
        conn.execute("SELECT id, (status, retry_count, priority, expires_at)::text FROM pgtruth.jobs").fetchall()
    )
    assert rows[old].startswith("(failed,1,7,")
    assert rows[new] == "(queued,0,7,)"
    headers, body = conn.execute("SELECT headers, body FROM pgtruth.jobs WHERE id = %s", (new,)).fetchone() or ("", "")
    assert json.loads(headers)["id"] == json.loads(headers)["root_id"] == new
    assert json.loads(body)[0] == [0]
    assert "not ended yet" in run(app, "retry", new).output


def test_a_copy_belongs_to_no_chord(app: Celery, db: Any, conn: Conn) -> None:
    from celery import chord

    from pgtruth_transport.observe import queries

    task = app.tasks[TASK]
    chord([task.s(1), task.s(2)], app=app)(task.s())
    with queries.looking(db) as looking:
        member = next(line for line in queries.jobs(looking, db))
        job = queries.job(looking, db, member.id)
    assert job is not None
    assert job.group_id is not None
    assert job.body is not None
    assert json.loads(job.body)[2]["chord"]
    row = copy_of(job, "new")
    assert row.group_id is None
    assert json.loads(row.headers)["group"] is None
    assert json.loads(row.body)[2]["chord"] is None


def test_cancel_is_for_good_and_says_what_it_left_alone(app: Celery, conn: Conn) -> None:
    waiting, done = publish(app, 2)
    end(conn, done, "done", None)
    result = run(app, "cancel", waiting, done, "--reason", "customer gave up")
    assert result.exit_code == 1  # not all of them
    assert f"{waiting} cancelled" in result.output
    assert f"{done} left alone: done" in result.output
    assert app.AsyncResult(waiting).state == "REVOKED"
    row = conn.execute("SELECT status, error FROM pgtruth.jobs WHERE id = %s", (waiting,)).fetchone()
    assert row == ("failed", "customer gave up")
    assert run(app, "cancel", publish(app)[0]).exit_code == 0


def test_reap_sweeps_now(app: Celery, conn: Conn, eventually: Callable[..., Any]) -> None:
    publish(app)
    conn.execute(
        "UPDATE pgtruth.jobs SET status = 'processing', owned_by = 'gone@host:1:aa', claimed_at = clock_timestamp(),"
        " lease_version = 1, lease_expires_at = clock_timestamp() - interval '1 s'"
    )

    def requeued() -> bool:
        output = run(app, "reap").output
        assert "1 requeued" in output or "a lease of grace" in output  # after a start of the server
        return "1 requeued" in output

    eventually(requeued, 25, every=0.5)
    assert conn.execute("SELECT status, retry_count FROM pgtruth.jobs").fetchall() == [("queued", 1)]
    assert "nothing was due" in run(app, "reap").output


def test_stats_show_figures_and_warn(app: Celery, conn: Conn) -> None:
    ids = publish(app, 5)
    end(conn, ids[0])
    end(conn, ids[1], "done", None)
    conn.execute("UPDATE pgtruth.jobs SET status = 'enqueue_failed' WHERE id = %s", (ids[2],))
    conn.execute("INSERT INTO pgtruth.counters VALUES ('stale_writes', 3)")
    output = run(app, "stats").output
    assert max(map(len, output.splitlines())) <= 80
    assert "stale writes" in output
    assert "wait for the sweep" in output
    found = json.loads(run(app, "stats", "--exact", "--json").output)
    assert found["queues"][0]["due"] == 2
    assert found["ended"] == {"done": 1, "failed": 1}
    assert found["recent"]["failed"] == 1
    assert found["attempts"]["lease_expired"] == 2


@pytest.mark.parametrize("command", [["jobs"], ["job", "x"], ["retry", "x"], ["cancel", "x"], ["reap"], ["stats"]])
def test_what_cannot_work_says_what_to_do(command: list[str], empty_database_url: str) -> None:
    missing = run(Celery("cli", broker=empty_database_url, set_as_current=False), *command)
    assert missing.exit_code == 1
    assert "celery -A app pgtruth migrate" in missing.output
    nobody = f"pgtruth://someone:secret@127.0.0.1:{free_port()}/jobs"
    down = run(Celery("cli", broker=nobody, set_as_current=False), *command)
    assert down.exit_code == 1
    assert "cannot connect" in down.output
    assert "secret" not in down.output
