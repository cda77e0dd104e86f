"""CPU seconds and memory of processes, read from /proc (Linux)."""

from __future__ import annotations

import os

TICK = os.sysconf("SC_CLK_TCK")


def _stats() -> dict[int, tuple[int, int, int]]:
    """pid -> (parent, own ticks, ticks of the children that it has reaped)."""
    out = {}
    for e in os.listdir("/proc"):
        if e.isdigit():
            try:
                with open(f"/proc/{e}/stat") as f:
                    s = f.read()
            except OSError:
                continue
            v = s[s.rindex(")") + 2 :].split()
            out[int(e)] = (int(v[1]), int(v[11]) + int(v[12]), int(v[13]) + int(v[14]))
    return out


def parent(pid: int) -> int:
    """The process that started ``pid``."""
    return _stats()[pid][0]


def tree_cpu(pid: int) -> float:
    """CPU seconds of a process, its living descendants and the children that they have reaped."""
    stats = _stats()
    todo, total = [pid], 0
    while todo:
        p = todo.pop()
        if p in stats:
            total += stats[p][1] + stats[p][2]
            todo += [c for c, (above, _, _) in stats.items() if above == p]
    return total / TICK


def own_cpu(pid: int) -> float:
    """CPU seconds of one process alone."""
    return _stats()[pid][1] / TICK


def rss_mb(pid: int) -> float:
    """Resident memory of one process, in MB."""
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS")) / 1024


def machine_busy() -> float:
    """CPU seconds that the whole machine has been busy since it started."""
    with open("/proc/stat") as f:
        v = [int(x) for x in f.readline().split()[1:9]]
    return (sum(v) - v[3] - v[4]) / TICK
