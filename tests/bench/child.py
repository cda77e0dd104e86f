"""What runs in a child process of the harness: ``python child.py SYSTEM WHAT [N [LIMIT]]``.

One adapter is imported per process, so no system's imports or threads disturb another's figures. The answer is one
line of JSON on standard output.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import sys
import time
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def pace(producer: Any, n: int) -> None:
    """10 jobs/s with jitter, so that no poll interval is in step with it."""
    producer.one(-1, time.monotonic_ns())  # not counted: it connects
    time.sleep(1)
    rnd, t0 = random.Random(1), time.monotonic()
    for i in range(n):
        time.sleep(max(0, t0 + (i + rnd.random()) / 10 - time.monotonic()))
        producer.one(i, time.monotonic_ns())


def enqueue(producer: Any, what: str, n: int, limit: float) -> dict[str, float]:
    """Enqueue ``n`` jobs one by one or in the API's own batches; a slow system is cut after ``limit`` seconds."""
    now = time.monotonic_ns
    if what == "one":
        producer.one(-1, now())  # connect and declare outside the timed part
    u0, t0 = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    if what == "one":
        end = t0 + limit
        for i in range(n):
            producer.one(i, now())
            if time.monotonic() > end:
                n = i + 1
                break
    else:
        for a in range(0, n, 1000):
            producer.many([(i, now()) for i in range(a, min(n, a + 1000))])
    t1, u1 = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    return {"n": n, "rate": n / (t1 - t0), "cpu": u1.ru_utime + u1.ru_stime - u0.ru_utime - u0.ru_stime}


def main(system: str, what: str, *args: str) -> None:
    sys.path.insert(0, HERE)
    from adapters import SYSTEMS

    module = importlib.import_module("adapters." + SYSTEMS[system][0])
    if what == "setup":
        module.setup()
        return
    n = int(args[0])
    if what == "worker":
        print(json.dumps({"argv": module.worker(n)}))
    elif what == "seed" and hasattr(module, "seed"):
        module.seed(n)
    else:
        produce(module.Producer(), what, n, *map(float, args[1:]))


def produce(producer: Any, what: str, n: int, limit: float = 0) -> None:
    if what == "seed":  # a big backlog, as fast as the API goes
        for a in range(0, n, 1000):
            producer.many([(i, 0) for i in range(a, min(n, a + 1000))])
    elif what == "far":
        producer.far(n)
    elif what == "pace":
        pace(producer, n)
    elif what == "many" and not hasattr(producer, "many"):
        print(json.dumps({}))
    else:
        print(json.dumps(enqueue(producer, what, n, limit)))


if __name__ == "__main__":
    main(*sys.argv[1:])
