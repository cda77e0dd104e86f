"""Celery on Redis, RabbitMQ, kombu's pgmq transport and kombu's SQLAlchemy transport.

The baseline is ``celery-redis-reliable``: what a team sets today to lose as little as Redis allows.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from mark import hit

NAME = os.environ["BENCH_SYSTEM"]
REDIS = os.environ.get("BENCH_REDIS_URL", "")
AMQP = os.environ.get("BENCH_AMQP_URL", "")
PG = os.environ.get("BENCH_PG_URL", "")
SQLA = PG.replace("postgresql://", "postgresql+psycopg://")
RELIABLE = {"task_acks_late": True, "task_reject_on_worker_lost": True, "worker_prefetch_multiplier": 1}
PGMQ = {
    "broker_url": PG.replace("postgresql://", "pgmq://"),
    "broker_transport_options": {"use_notify": True, "init_extension": False},
}
CONF: dict[str, dict[str, Any]] = {
    "celery-redis": {"broker_url": f"{REDIS}/0"},
    "celery-redis-reliable": {"broker_url": f"{REDIS}/0", "result_backend": f"{REDIS}/1", **RELIABLE},
    "celery-rabbit-classic": {"broker_url": AMQP},
    "celery-rabbit-quorum": {
        "broker_url": AMQP,
        "task_default_queue": "celery_q",
        "result_backend": f"{REDIS}/1",
        "task_default_queue_type": "quorum",
        "broker_transport_options": {"confirm_publish": True},
        **RELIABLE,
    },
    "celery-pgmq": PGMQ,
    "celery-pgmq-reliable": {"result_backend": f"db+{SQLA}", **PGMQ, **RELIABLE},
    "celery-sqla": {"broker_url": f"sqla+{SQLA}"},
}
QUIET = ["--without-gossip", "--without-mingle", "--without-heartbeat"]

app = Celery("bench")
app.conf.update(CONF[NAME.removesuffix("-quiet").removesuffix("-aof")])


@app.task(name="noop")
def noop(i: int, t: int) -> None:
    hit(i, t)


def setup() -> None:
    if NAME.startswith("celery-redis"):
        import redis

        r = redis.from_url(REDIS)
        aof = NAME.endswith("-aof")
        r.config_set("appendfsync", "always" if aof else "everysec")
        r.config_set("appendonly", "yes" if aof else "no")
        r.flushall()
    elif "rabbit" in NAME:
        with app.connection() as c:
            c.default_channel.queue_delete(app.conf.task_default_queue)
    elif "pgmq" in NAME:
        import psycopg
        from pgmq.install import get_embedded_install_sql

        with psycopg.connect(PG) as c:
            c.execute(get_embedded_install_sql())


class Producer:
    def one(self, i: int, t: int) -> None:
        noop.delay(i, t)

    def far(self, n: int) -> None:
        for i in range(n):
            noop.apply_async((i, 0), countdown=3600)


def worker(conc: int) -> list[str]:
    quiet = QUIET if NAME.endswith("-quiet") else []
    return ["celery", "-A", "adapters.celery_", "worker", "-c", str(conc), "-l", "WARNING", *quiet]


def seed(n: int) -> None:
    """Clone one real message n - 1 times in SQL, with fresh task and delivery ids."""
    import json

    import psycopg

    Producer().one(0, 0)
    pgmq = "pgmq" in NAME
    table, col, rest = (
        ("pgmq.q_celery", "message", "vt, headers")
        if pgmq
        else ("kombu_message", "payload", "visible, timestamp, version, queue_id")
    )
    with psycopg.connect(PG, autocommit=True) as c:
        (text,) = c.execute(f"SELECT {col}::text FROM {table} LIMIT 1").fetchone()
        msg = json.loads(text)
        task, tag = msg["headers"]["id"], msg["properties"]["delivery_tag"]
        cast = "jsonb" if pgmq else "text"
        ids = "" if pgmq else "nextval('message_id_sequence'), "
        c.execute(
            f"INSERT INTO {table} ({'id, ' if ids else ''}{col}, {rest}) "
            f"SELECT {ids}replace(replace({col}::text, %s, gen_random_uuid()::text), %s, "
            f"gen_random_uuid()::text)::{cast}, {rest} FROM {table}, generate_series(2, %s)",
            (task, tag, n),
        )
