"""One module per system. Each holds:

setup()          make the (empty) schema or clean the broker; the database itself is fresh
Producer         one(i, t): enqueue job i, t = the enqueue time in ns; optional many([(i, t), ...]),
                 optional far(n): enqueue n jobs that are due in an hour
worker(conc)     the argv of the system's own worker at that concurrency
seed(n)          optional faster fill for big backlogs
"""

from __future__ import annotations

SYSTEMS: dict[str, tuple[str, list[str]]] = {  # name: (module, stores it needs)
    "pgtruth-notify": ("pgtruth_", ["pg"]),
    "pgtruth-redis": ("pgtruth_", ["pg", "redis"]),
    "pgtruth-silent": ("pgtruth_", ["pg"]),
    "celery-redis": ("celery_", ["redis"]),
    "celery-redis-reliable": ("celery_", ["redis"]),
    "celery-redis-reliable-quiet": ("celery_", ["redis"]),
    "celery-redis-reliable-aof": ("celery_", ["redis"]),
    "celery-rabbit-classic": ("celery_", []),
    "celery-rabbit-quorum": ("celery_", ["redis"]),
    "celery-pgmq": ("celery_", ["pg"]),
    "celery-pgmq-reliable": ("celery_", ["pg"]),
    "celery-sqla": ("celery_", ["pg"]),
    "procrastinate": ("procrastinate_", ["pg"]),
    "pgqueuer": ("pgqueuer_", ["pg"]),
    "pgqueuer-unbounded": ("pgqueuer_", ["pg"]),
    "potatoq": ("potatoq_", ["pg"]),
    "awa": ("awa_", ["pg"]),
    "pg-raw": ("pg_raw", ["pg"]),
    "pg-raw-fused": ("pg_raw", ["pg"]),
    "pg-raw-batch10": ("pg_raw", ["pg"]),
    "pg-raw-batch100": ("pg_raw", ["pg"]),
}
