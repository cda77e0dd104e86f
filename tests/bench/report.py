"""Tables and ratios from the JSON lines of one or more runs."""

from __future__ import annotations

import json
import statistics as st
from collections.abc import Iterable
from typing import Any

from adapters import SYSTEMS

BASE = "celery-redis-reliable"
Record = dict[str, Any]
COLUMNS = {
    "enqueue-one": ["rate", "cpu", "srv", "wal", "xact", "other"],
    "enqueue-many": ["rate", "cpu", "srv", "wal", "xact"],
    "drain": ["rate", "cpu", "main", "srv", "wal", "xact", "twice", "other"],
    "growth": ["rate", "done", "cpu", "srv", "other"],
    "latency": ["p50", "p95", "p99", "max", "cpu_pct", "srv_pct", "other"],
    "idle": ["main_pct", "tree_pct", "srv_pct"],
    "far": ["rss_before", "rss_after", "grown", "ten_s"],
}
#: What is compared with the baseline of the same round. Rates: more is better; the others: less is better.
RATIO = {"latency": ["p50", "p99"], "idle": ["main_pct"], "far": ["grown"]}


def load(paths: Iterable[str]) -> list[Record]:
    rows = []
    for p in paths:
        with open(p) as f:
            rows += [json.loads(line) for line in f]
    return rows


def _groups(rows: list[Record]) -> dict[tuple[str, int, int], dict[str, list[Record]]]:
    """(test, concurrency, backlog) -> system -> its records."""
    groups: dict[tuple[str, int, int], dict[str, list[Record]]] = {}
    for r in rows:
        key = (r["test"], r.get("conc", 0), r["n"] if r["test"] == "growth" else 0)
        groups.setdefault(key, {}).setdefault(r["system"], []).append(r)
    return dict(sorted(groups.items()))


def _rank(system: str) -> int:
    return list(SYSTEMS).index(system) if system in SYSTEMS else len(SYSTEMS)


def _number(x: float) -> str:
    return f"{x:.3g}" if abs(x) < 100 else f"{x:.0f}"


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{_number(st.median(values))} ({_number(min(values))}-{_number(max(values))})"


def _ratio(records: list[Record], base: list[Record], key: str) -> str:
    """Median over the rounds of figure / the baseline's figure of the same round."""
    ours, theirs = _by_round(records, key), _by_round(base, key)
    ratios = [ours[rep] / theirs[rep] for rep in ours if theirs.get(rep)]
    return f"{st.median(ratios):.2f}" if ratios else "-"


def _by_round(records: list[Record], key: str) -> dict[int, float]:
    rounds: dict[int, list[float]] = {}
    for r in records:
        if key in r:
            rounds.setdefault(r["rep"], []).append(r[key])
    return {rep: st.mean(values) for rep, values in rounds.items()}


def table(rows: list[Record], base: str = BASE) -> str:
    """Median (min-max) of every figure, and the ratios to the baseline of the same round."""
    lines = []
    for (test, conc, n), by in _groups(rows).items():
        columns, keys = COLUMNS.get(test, []), RATIO.get(test, ["rate"])
        title = f"{test}{f' conc={conc}' if conc else ''}{f' backlog={n}' if n else ''}"
        ratios = [f"{k} / base" for k in keys]
        heads = ["system", "runs", *columns, *ratios]
        lines += [f"\n### {title}\n", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for s in sorted(by, key=_rank):
            good = [r for r in by[s] if "error" not in r]
            errors = [r["error"] for r in by[s] if "error" in r]
            cells = [_cell([r[c] for r in good if c in r]) for c in columns]
            cells += [_ratio(good, by.get(base, []), k) for k in keys]
            lines.append(f"| {s} | {len(good)} | " + " | ".join(cells) + " |" + (f" {errors[0]}" if errors else ""))
    return "\n".join(lines)


#: The comparison that the project answers for: figure, what it should be at least or at most, against the baseline.
AIMS = [
    ("throughput, concurrency 2", ("drain", 2, 0), "rate", ">= 1.0"),
    ("throughput, concurrency 8", ("drain", 8, 0), "rate", ">= 1.5"),
    ("single delay()", ("enqueue-one", 0, 0), "rate", ">= 1.0"),
    ("pickup at 10 jobs/s, p50", ("latency", 0, 0), "p50", "<= 1.0"),
    ("pickup at 10 jobs/s, p99", ("latency", 0, 0), "p99", "<= 1.0"),
]


def summary(rows: list[Record], base: str = BASE) -> str:
    """The aims and the ratios measured, then the two figures that stand alone."""
    groups = _groups(rows)
    systems = sorted({r["system"] for r in rows} - {base}, key=_rank)
    lines = [f"Ratios to {base} (medians over the rounds):", ""]
    lines.append(f"{'':34}{'aim':>9}" + "".join(f"{s:>18}" for s in systems))
    for title, key, figure, aim in AIMS:
        by = groups.get(key, {})
        cells = [_ratio([r for r in by.get(s, []) if "error" not in r], by.get(base, []), figure) for s in systems]
        lines.append(f"{title:34}{aim:>9}" + "".join(f"{c:>18}" for c in cells))
    everyone = [*systems, base]
    lines += ["", f"{'':36}{'aim':>7}" + "".join(f"{s:>23}" for s in everyone)]
    for title, test, figure, aim in (
        ("idle worker, main process, % core", "idle", "main_pct", "< 2"),
        ("memory grown by 20,000 far ETAs, MB", "far", "grown", "~ 0"),
    ):
        by = groups.get((test, 0, 0), {})
        cells = [_cell([r[figure] for r in by.get(s, []) if figure in r]) for s in everyone]
        lines.append(f"{title:36}{aim:>7}" + "".join(f"{c:>23}" for c in cells))
    return "\n".join(lines)
