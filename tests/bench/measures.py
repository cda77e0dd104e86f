"""The tests: enqueue, drain, growth, latency, idle and far. Each emits one record; none asserts anything."""

from __future__ import annotations

import time
from typing import Any

import mark
import procfs
from harness import SETTLE, Bench


def enqueue(b: Bench, n: int, mode: str = "one", limit: float = 10) -> int:
    """Fill the queue from one process; the number of jobs that went in (a slow system gets fewer)."""
    b.checkpoint()
    before = b.snap()
    r = b.child(mode, n, limit)
    if not r:
        return 0
    n = int(r["n"])
    time.sleep(SETTLE)
    after = b.snap()
    per_job = {k: (after[k] - before[k]) / n for k in ("srv", "wal", "xact")}
    per_job["srv"] *= 1e3
    b.emit(f"enqueue-{mode}", n=n, rate=r["rate"], cpu=r["cpu"] / n * 1e3, **per_job, other=b.other(before, after))
    return n


def drain(b: Bench, n: int, conc: int, limit: float, test: str = "drain", window: float | None = None) -> bool:
    """Start a worker on a full queue. Rates and CPU count from the first job body on."""
    mark.clear(b.marks)
    b.checkpoint()
    before = b.snap()
    w = b.start_worker(conc)
    ok = b.wait_marks(1, 30, w)
    c1, s1, w1, m1 = mark.count(b.marks), b.snap(), procfs.tree_cpu(w.pid), _main_cpu(w.pid)
    ok = ok and b.wait_marks(n, window or limit, w)
    s2, w2, m2 = b.snap(), procfs.tree_cpu(w.pid), _main_cpu(w.pid)
    c2 = mark.count(b.marks)
    if not window:
        time.sleep(SETTLE)
    after = b.snap()
    b.stop_worker(w)
    recs = sorted(mark.read(b.marks), key=lambda r: r[2])
    if len(recs) < 10:
        b.emit(test, n=n, conc=conc, error="no progress", done=len(recs))
        return False
    t0 = recs[0][2]
    if window:
        recs = [r for r in recs if r[2] <= t0 + window * 1e9]
    d = max(1, c2 - c1)
    rec: dict[str, Any] = {
        "rate": (len(recs) - 1) / ((recs[-1][2] - t0) / 1e9),
        "done": len(recs),
        "complete": ok,
        "cpu": (w2 - w1) / d * 1e3,
        "main": (m2 - m1) / d * 1e3,
        "srv": (s2["srv"] - s1["srv"]) / d * 1e3,
        "other": b.other(s1, s2, w2 - w1),
    }
    if not window:
        rec["wal"] = (after["wal"] - before["wal"]) / c2
        rec["xact"] = (after["xact"] - before["xact"]) / c2
        rec["twice"] = len(recs) - len({r[0] for r in recs})
    b.emit(test, n=n, conc=conc, **rec)
    return ok


def _main_cpu(pid: int) -> float:
    try:
        return procfs.own_cpu(pid)
    except KeyError:  # it has gone; the record says so by its own figures
        return 0.0


def growth(b: Bench, backlog: int, window: float, conc: int = 8) -> None:
    """Drain for ``window`` seconds from a backlog: does the claim get slower with its size?"""
    b.clean()
    b.child("seed", backlog)
    b.servers["pg"].vacuum_analyze(b.db)
    drain(b, backlog, conc, 60, test="growth", window=window)


def latency(b: Bench, secs: float) -> None:
    """10 jobs/s with jitter on an idle worker at concurrency 2: enqueue call to body start, in ms."""
    b.clean()
    w = b.start_worker(2)
    b.child("one", 10, 20)
    b.wait_marks(11, 40, w)
    time.sleep(3)
    skip, n = len(mark.read(b.marks)) + 1, int(secs * 10)
    before, wa, t0 = b.snap(), procfs.tree_cpu(w.pid), time.monotonic()
    b.child("pace", n)
    b.wait_marks(skip + n, 25, w)
    after, wb, dt = b.snap(), procfs.tree_cpu(w.pid), time.monotonic() - t0
    b.stop_worker(w)
    ms = sorted((r[2] - r[1]) / 1e6 for r in sorted(mark.read(b.marks), key=lambda r: r[1])[skip:])
    if not ms:
        b.emit("latency", error="no progress")
        return
    figures = {f"p{int(p * 100)}": ms[min(len(ms) - 1, int(p * len(ms)))] for p in (0.5, 0.95, 0.99)}
    figures["cpu_pct"] = (wb - wa) / dt * 100
    figures["srv_pct"] = (after["srv"] - before["srv"]) / dt * 100
    b.emit("latency", n=len(ms), **figures, max=ms[-1], other=b.other(before, after, wb - wa))


def idle(b: Bench, secs: float) -> None:
    """An idle worker: CPU of its main process, of its whole tree and of the servers, in % of one core."""
    b.clean()
    w = b.start_worker(2)
    b.child("one", 10, 20)
    b.wait_marks(11, 40, w)
    time.sleep(5)
    before, main, tree, t0 = b.snap(), procfs.own_cpu(w.pid), procfs.tree_cpu(w.pid), time.monotonic()
    time.sleep(secs)
    after, dt = b.snap(), time.monotonic() - t0
    main, tree = procfs.own_cpu(w.pid) - main, procfs.tree_cpu(w.pid) - tree
    b.stop_worker(w)
    srv = after["srv"] - before["srv"]
    b.emit("idle", main_pct=main / dt * 100, tree_pct=tree / dt * 100, srv_pct=srv / dt * 100)


def far(b: Bench, n: int) -> None:
    """Memory of a running worker before and after ``n`` tasks that are due in an hour; then 10 immediate ones."""
    b.clean()
    w = b.start_worker(2)
    b.child("one", 10, 20)
    b.wait_marks(11, 40, w)
    time.sleep(2)
    before = procfs.rss_mb(w.pid)
    t0 = time.monotonic()
    b.child("far", n)
    sent = time.monotonic() - t0
    time.sleep(10)  # whatever a worker takes into its memory, it has taken by then
    after = procfs.rss_mb(w.pid)
    t0, have = time.monotonic(), mark.count(b.marks)
    b.child("one", 9, 20)  # and the one that connects
    done = b.wait_marks(have + 10, 60, w)
    ten = time.monotonic() - t0
    b.stop_worker(w)
    b.emit("far", n=n, rss_before=before, rss_after=after, grown=after - before, enqueue_s=sent, ten_s=ten, done=done)
