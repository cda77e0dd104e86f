"""Side-by-side figures of job queues on one machine. See README.md."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time

import measures
import report
from adapters import SYSTEMS
from harness import HERE, Bench

RESULTS = os.path.join(HERE, "results")
SHORT = "celery-redis-reliable,pgtruth-notify,pgtruth-redis"


def run(o: argparse.Namespace) -> None:
    """Rounds over the systems in turn, so that a noisy minute hits all of them."""
    systems = o.systems.split(",")
    b = Bench(systems, o.out)
    try:
        for rep in range(o.rep0, o.rep0 + o.reps):
            for s in systems:
                try:
                    b.use(s, rep)
                    round_of(b, o)
                except Exception as e:  # one broken system must not end the run
                    for w in b.workers[:]:
                        b.stop_worker(w)
                    b.emit("failed", error=f"{type(e).__name__}: {e}"[:300])
    finally:
        b.close()


def round_of(b: Bench, o: argparse.Namespace) -> None:
    """Every chosen test once, with the system that is in use."""
    tests = o.tests.split(",")
    if "drain" in tests:
        for conc in map(int, o.conc.split(",")):
            n = measures.enqueue(b, o.jobs, limit=o.enq_secs)
            if not measures.drain(b, n + 1, conc, o.limit):
                b.clean()
    if "batch" in tests:
        b.clean()
        measures.enqueue(b, o.jobs, "many")
    if "latency" in tests:
        measures.latency(b, o.secs)
    if "growth" in tests and "pg" in b.needs:
        for n in map(int, o.backlog.split(",")):
            measures.growth(b, n, o.window)
    if b.rep == o.rep0 and "idle" in tests:  # once is enough: nothing in it varies with the round
        measures.idle(b, o.idle_secs)
    if b.rep == o.rep0 and "far" in tests:
        measures.far(b, o.far)


def short(o: argparse.Namespace) -> None:
    """The project's own comparison: run it, print the table and the ratios."""
    os.makedirs(RESULTS, exist_ok=True)
    if not o.out:
        o.out = os.path.join(RESULTS, time.strftime("%Y%m%d-%H%M%S.jsonl"))
    run(o)
    rows = report.load([o.out])
    print(report.table(rows))
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%F')}")
    print(report.summary(rows))
    print(f"\nRecords: {os.path.relpath(o.out)}")


def table(o: argparse.Namespace) -> None:
    rows = report.load(o.results)
    print(report.table(rows, o.base))
    print(report.summary(rows, o.base))


def _run_options(p: argparse.ArgumentParser, **defaults: object) -> None:
    p.add_argument("--systems", default=",".join(s for s in SYSTEMS if "rabbit" not in s))
    p.add_argument("--tests", default="drain,batch,latency,growth,idle,far")
    p.add_argument("--reps", type=int, default=3, help="rounds over the systems")
    p.add_argument("--rep0", type=int, default=0)
    p.add_argument("--jobs", type=int, default=5000)
    p.add_argument("--conc", default="2,8")
    p.add_argument("--enq-secs", type=float, default=10, help="seconds after which an enqueue is cut")
    p.add_argument("--limit", type=float, default=40, help="seconds after which a drain is cut")
    p.add_argument("--secs", type=float, default=30, help="length of the latency test")
    p.add_argument("--idle-secs", type=float, default=30, help="length of the idle test")
    p.add_argument("--far", type=int, default=20_000, help="tasks with a far ETA")
    p.add_argument("--backlog", default="5000,50000,200000")
    p.add_argument("--window", type=float, default=20, help="seconds of a growth test")
    p.add_argument("--out", required="out" not in defaults)
    p.set_defaults(**defaults)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    sub = ap.add_subparsers(required=True)
    _run_options(sub.add_parser("run", help="everything"), f=run)
    p = sub.add_parser("short", help="what `make bench` runs")
    _run_options(p, f=short, systems=SHORT, tests="drain,latency,idle,far", jobs=4000, secs=15, idle_secs=15, out=None)
    p = sub.add_parser("table", help="medians and ratios of earlier runs")
    p.set_defaults(f=table)
    p.add_argument("results", nargs="+")
    p.add_argument("--base", default=report.BASE)
    o = ap.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and servers end with us
    o.f(o)


if __name__ == "__main__":
    main()
