"""Starts the servers and the workers, fills and drains the queues, and writes one JSON line per figure."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

import mark
import procfs
import stores
from adapters import SYSTEMS

HERE = os.path.dirname(os.path.abspath(__file__))
SETTLE = 1.3  # PostgreSQL backends publish their counters about once a second
Snap = dict[str, float]


class Bench:
    """One run: the servers that the chosen systems need, and one system in use at a time."""

    def __init__(self, systems: list[str], out: str) -> None:
        need = {s for x in systems for s in SYSTEMS[x][1]}
        self.servers: dict[str, Any] = {}
        os.makedirs(stores.WORK, exist_ok=True)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.marks = tempfile.mkdtemp(prefix="marks-", dir="/dev/shm")
        self.out = open(out, "a")  # noqa: SIM115 - closed by close()
        self.system, self.rep, self.db, self.needs, self.env = "", 0, "", list[str](), dict[str, str]()
        try:
            if "pg" in need:
                self.servers["pg"] = stores.Postgres()
            if "redis" in need:
                self.servers["redis"] = stores.Redis()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for w in self.workers[:]:
            self.stop_worker(w)
        for server in self.servers.values():
            server.stop()
        mark.clear(self.marks)
        os.rmdir(self.marks)
        self.out.close()

    def use(self, system: str, rep: int) -> None:
        """Make ``system`` the one under test, on a fresh database or a flushed broker."""
        self.system, self.rep, self.db = system, rep, "bench_" + system.replace("-", "_")
        self.needs = SYSTEMS[system][1]
        here = os.pathsep.join(filter(None, [HERE, os.path.dirname(os.path.dirname(HERE))]))
        path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
        self.env = dict(os.environ, BENCH_SYSTEM=system, BENCH_MARKS=self.marks, PYTHONPATH=here, PATH=path)
        if "pg" in self.servers:
            self.env["BENCH_PG_URL"] = self.servers["pg"].url(self.db)
        if "redis" in self.servers:
            self.env["BENCH_REDIS_URL"] = self.servers["redis"].url
        self.clean()

    def clean(self) -> None:
        if "pg" in self.needs:
            self.servers["pg"].recreate(self.db)
        mark.clear(self.marks)
        self.child("setup")

    def child(self, *args: object) -> dict[str, Any]:
        argv = [sys.executable, f"{HERE}/child.py", self.system, *map(str, args)]
        r = subprocess.run(argv, env=self.env, stdout=subprocess.PIPE, check=True, timeout=560, cwd=HERE)
        answer: dict[str, Any] = json.loads(r.stdout.splitlines()[-1]) if r.stdout.strip() else {}
        return answer

    def snap(self) -> Snap:
        """CPU seconds of the servers; bytes of WAL and commits of this system's database."""
        srv = sum(procfs.tree_cpu(self.servers[n].pid) for n in self.needs)
        wal, xact = self.servers["pg"].stats(self.db) if "pg" in self.needs else (0, 0)
        own = sum(sum(resource.getrusage(w)[:2]) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return {"srv": srv, "wal": wal, "xact": xact, "t": time.monotonic(), "other": procfs.machine_busy() - own - srv}

    @staticmethod
    def other(a: Snap, b: Snap, worker: float = 0) -> float:
        """CPU used by everything else on the machine meanwhile, in % of one core."""
        return max(0.0, (b["other"] - a["other"] - worker) / (b["t"] - a["t"]) * 100)

    def start_worker(self, conc: int) -> subprocess.Popen[bytes]:
        argv = self.child("worker", conc)["argv"]
        with open(f"{stores.WORK}/worker-{self.system}.log", "a") as log:
            worker = subprocess.Popen(argv, env=self.env, cwd=HERE, stdout=log, stderr=log, start_new_session=True)
        self.workers.append(worker)
        return worker

    def stop_worker(self, w: subprocess.Popen[bytes]) -> None:
        self.workers.remove(w)
        w.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            w.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(w.pid, signal.SIGKILL)  # its own session: whatever of it is left
        w.wait()

    def wait_marks(self, n: int, limit: float, w: subprocess.Popen[bytes] | None = None) -> bool:
        """Wait for n records; False at the limit (seconds) or when nothing moves for 20 s."""
        end, last, moved = time.monotonic() + limit, -1, time.monotonic()
        while (c := mark.count(self.marks)) < n:
            now = time.monotonic()
            if c != last:
                last, moved = c, now
            if now > end or now - moved > 20 or (w and w.poll() is not None):
                return False
            time.sleep(0.01)
        return True

    def emit(self, test: str, **figures: Any) -> None:
        rec = {"system": self.system, "rep": self.rep, "test": test, **figures}
        line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in rec.items()})
        print(line, file=self.out, flush=True)
        print(line, flush=True)

    def checkpoint(self) -> None:
        if "pg" in self.needs:
            self.servers["pg"].checkpoint()
