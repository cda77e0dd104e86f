"""A role that may do no more than the page on operating says is enough for workers, producers and beat's sweep."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery, chord

from pgtruth_transport import db as connections
from pgtruth_transport import reaper
from tests.support import ROOT, WorkerProcess, runs

Connection = psycopg.Connection[Any]


@pytest.fixture
def as_app(database_url: str, conn: Connection) -> Iterator[str]:
    """The URL of a fresh database as the role ``app…``, which has what the page grants."""
    role, password = f"app_{secrets.token_hex(4)}", secrets.token_hex(8)
    page = (ROOT / "docs/how-to/operate.md").read_text()
    grants = page.partition("```sql\n")[2].partition("```")[0]
    assert "GRANT USAGE ON SCHEMA" in grants
    conn.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{password}'")
    conn.execute(grants.replace(" TO app;", f" TO {role};").encode())
    conn.execute(f"GRANT SELECT, INSERT ON public.runs TO {role}".encode())
    yield database_url.replace(database_url.partition("://")[2].partition("@")[0], f"{role}:{password}")
    connections.close_all()
    conn.execute(f"DROP OWNED BY {role} CASCADE".encode())
    conn.execute(f"DROP ROLE {role}".encode())


@pytest.mark.parametrize("mode", ["notify", "redis"])
def test_the_granted_rights_are_enough(
    as_app: str, conn: Connection, redis_url: str, worker: Callable[..., WorkerProcess], mode: str
) -> None:
    options = {"signal_url": redis_url} if mode == "redis" else {}
    running = worker(as_app, options=options)
    client = Celery("client", broker=as_app, backend=as_app, set_as_current=False, broker_transport_options=options)
    run = client.signature("tests.apps.basic.run")
    assert run.delay(1).get(timeout=20) == 1
    total = client.signature("tests.apps.basic.total")
    assert chord([run.clone((n,)) for n in range(3)], total, app=client).delay().get(timeout=20) == 3
    retried = client.send_task("tests.apps.basic.run", (2,), countdown=0.1, expires=60)
    assert retried.get(timeout=20) == 2
    reaper.sweep(client)
    assert client.control.purge() == 0
    assert client.control.ping(timeout=5, limit=1) == [{f"{running.name}@localhost": {"ok": "pong"}}]
    assert runs(conn, "start") == 5
    running.sigterm()
    assert running.wait(20) == 0
    for word in ("permission denied", "Traceback"):
        assert word not in running.output
    client.close()
