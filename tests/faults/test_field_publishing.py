"""Field cases of publishing (T04): what users of Celery reported of ``delay()`` with a broker that is down or hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psycopg
import pytest
import redis
from kombu.exceptions import OperationalError

from pgtruth_transport.testing.valkey import EmbeddedValkey
from pgtruth_transport.urls import parse_url
from tests.support import WorkerProcess, eventually, runs, statuses
from tests.support_jobs import client, ended, send
from tests.support_proxy import Proxy

Conn = psycopg.Connection[Any]
Start = Callable[..., WorkerProcess]

FAST = {"lease_seconds": 3, "reap_interval": 1, "poll_interval": 0.3}
#: Seconds within which ``delay()`` returns whatever the signal does (contract), and a loaded machine's scheduling.
PROMPT = 1.3


@contextmanager
def refused(server: EmbeddedValkey, proxy: Proxy) -> Iterator[None]:
    """Nothing listens."""
    proxy.refuse()
    yield
    proxy.heal()


@contextmanager
def paused(server: EmbeddedValkey, proxy: Proxy) -> Iterator[None]:
    """The server takes commands and does not answer."""
    with redis.Redis.from_url(server.url) as link:
        link.execute_command("CLIENT", "PAUSE", "60000", "ALL")  # for as long as this server lives
    yield


@contextmanager
def frozen(server: EmbeddedValkey, proxy: Proxy) -> Iterator[None]:
    """The server's process is stopped; its kernel still accepts connections."""
    server.pause()
    yield
    server.resume()


@contextmanager
def black_holed(server: EmbeddedValkey, proxy: Proxy) -> Iterator[None]:
    """Packets vanish."""
    proxy.hang()
    yield
    proxy.heal()


Trouble = Callable[[EmbeddedValkey, Proxy], AbstractContextManager[None]]


@pytest.mark.parametrize("warm", [False, True], ids=["first-call", "connected"])
@pytest.mark.parametrize("trouble", [refused, paused, frozen, black_holed], ids=lambda found: found.__name__)
def test_t04_a_broken_redis_delays_no_publish(
    worker: Start, database_url: str, conn: Conn, trouble: Trouble, warm: bool
) -> None:
    """celery/celery#4296: ``delay()`` hangs for ever; the retry policy works on the first call only."""
    with EmbeddedValkey() as server, Proxy("127.0.0.1", server.port) as proxy:
        options = {**FAST, "signal_url": f"redis://{proxy.host}:{proxy.port}/0"}
        app = client(database_url, options)
        if warm:
            send(app, "noop")
            assert statuses(conn) == {"queued": 1}
        took, ids = [], []
        with trouble(server, proxy):
            for _ in range(3):
                began = time.monotonic()
                ids.append(send(app, "run"))
                took.append(time.monotonic() - began)
            states = dict(conn.execute("SELECT id, status FROM pgtruth.jobs WHERE id = ANY(%s)", (ids,)).fetchall())
            assert states == dict.fromkeys(ids, "enqueue_failed")
            assert max(took) < PROMPT, took
            if warm:
                worker(options=options)
                eventually(ended(conn, ids), 10)  # swept and polled for, with the signal still broken
                assert runs(conn) == 3


@pytest.mark.parametrize("warm", [False, True], ids=["first-call", "connected"])
@pytest.mark.parametrize("trouble", ["refuse", "hang"])
def test_t04_a_broken_postgres_is_said_within_the_limit_each_time(
    database_url: str, conn: Conn, trouble: str, warm: bool
) -> None:
    """The same with the database: every call raises Celery's error within ``connect_timeout``."""
    info = psycopg.conninfo.conninfo_to_dict(parse_url(database_url))
    with Proxy(str(info["host"]), int(str(info["port"]))) as proxy:
        target = f"pgtruth://{info['user']}:{info.get('password') or ''}@{proxy.host}:{proxy.port}/{info['dbname']}"
        app = client(target, {**FAST, "connect_timeout": 2})
        if warm:
            send(app, "noop")
        getattr(proxy, trouble)()
        took = []
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(OperationalError):
                send(app, "noop")
            took.append(time.monotonic() - began)
        assert max(took) < 4, took  # the limit once, and Celery's retries, which do not wait for it again
        proxy.heal()
        sent = send(app, "noop")
        assert conn.execute("SELECT count(*) FROM pgtruth.jobs WHERE id = %s", (sent,)).fetchone() == (1,)
