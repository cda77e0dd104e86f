"""This project, as a team would first try it: the two URLs and nothing else (no ``install``, no base class).

The queue is filled with single ``delay()`` calls like every other system; ``many`` is a batch in one transaction.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import psycopg
from celery import Celery
from mark import hit

import pgtruth_transport

NAME = os.environ["BENCH_SYSTEM"]
PG = os.environ["BENCH_PG_URL"]
SIGNAL = {
    "pgtruth-notify": None,
    "pgtruth-redis": os.environ.get("BENCH_REDIS_URL", "") + "/0",
    "pgtruth-silent": "silent://",
}[NAME]

app = Celery("bench", broker=PG.replace("postgresql://", "pgtruth://"), backend="pgtruth://")
if SIGNAL:
    app.conf.broker_transport_options = {"signal_url": SIGNAL}


@app.task(name="noop")
def noop(i: int, t: int) -> None:
    hit(i, t)


def setup() -> None:
    if NAME == "pgtruth-redis":
        import redis

        redis.from_url(os.environ["BENCH_REDIS_URL"]).flushall()
    from pgtruth_transport.migrate import migrate
    from pgtruth_transport.settings import Settings

    migrate(Settings.make(PG, {}))


class Producer:
    def one(self, i: int, t: int) -> None:
        noop.delay(i, t)

    def many(self, jobs: Sequence[tuple[int, int]]) -> None:
        with psycopg.connect(PG) as c, pgtruth_transport.in_transaction(c):
            for i, t in jobs:
                noop.delay(i, t)

    def far(self, n: int) -> None:
        for i in range(n):
            noop.apply_async((i, 0), countdown=3600)


def worker(conc: int) -> list[str]:
    return ["celery", "-A", "adapters.pgtruth_", "worker", "-c", str(conc), "-l", "WARNING"]
