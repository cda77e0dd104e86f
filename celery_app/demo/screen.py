"""What the demo shows: a line per event, a progress bar, the final tables. Fits 80 columns; plain lines in a log."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from celery_app.demo.payments import Charges
from celery_app.demo.score import OBJECTIVE, Score, Verdict
from celery_app.demo.work import HOPELESS
from celery_app.recorder import Runs

WIDTH = 80
PLAIN_EVERY = 5.0  # seconds between progress lines where there is no terminal


class Screen:
    """Prints; knows nothing of processes or databases."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self.console = (
            console if console.is_terminal and console.width <= WIDTH else Console(highlight=False, width=WIDTH)
        )
        self._begin = self._plain_at = time.monotonic()
        self._bar = Progress(
            TextColumn("jobs ended"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @property
    def elapsed(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._begin

    def say(self, text: str, style: str = "") -> None:
        """One event."""
        self.console.print(f"{self.elapsed:5.1f} s  {text}", style=style, soft_wrap=False, markup=False)

    def progress(self, ended: int, known: int, planned: int) -> None:
        """How far the work is; ``planned`` counts what is still to be handed in."""
        self._bar.update(self._task, completed=ended, total=max(known, planned))
        if not self.console.is_terminal and time.monotonic() - self._plain_at >= PLAIN_EVERY:
            self._plain_at = time.monotonic()
            self.say(f"{ended} of {known} jobs ended")

    def final(self, mode: str, score: Score, runs: Runs, charges: Charges, verdict: Verdict) -> None:
        """The tables and the verdict."""
        self._bar.stop()
        self.console.print(_by_task(score, runs))
        self.console.print(_figures(mode, score, runs, charges))
        for line in complaints(verdict):
            self.console.print(line, style="bold red")
        if verdict.well:
            self.console.print("Nothing lost, nothing doubled, nothing late.", style="bold green")


def complaints(verdict: Verdict) -> list[str]:
    """A line for each thing that is wrong."""
    lines = []
    for name, ids in (
        ("LOST", verdict.lost),
        ("DOUBLED", verdict.doubled),
        ("BROKEN", verdict.broken),
        ("NOT CHARGED ONCE", verdict.charges),
    ):
        if ids:
            shown = ", ".join(sorted(ids)[:3]) + (", …" if len(ids) > 3 else "")
            lines.append(f"{name}: {len(ids)}: {shown}")
    if verdict.late is not None:
        lines.append(f"LATE: 95 % of the jobs took up to {verdict.late:.1f} s; the objective is {OBJECTIVE:.0f} s")
    return lines


def _by_task(score: Score, runs: Runs) -> Table:
    table = Table(width=WIDTH, title="Jobs and runs of their bodies, by task", title_justify="left")
    table.add_column("task", no_wrap=True, ratio=1)
    for name in ("jobs", "done", "failed", "bodies run", "p95 s"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in score.lines:
        p95 = "" if line.p95 is None else f"{line.p95:.2f}"
        table.add_row(
            line.task.removeprefix("tasks."),
            str(line.jobs),
            str(line.done),
            str(line.failed),
            str(runs.by_task[line.task]),
            p95,
        )
    return table


def _figures(mode: str, score: Score, runs: Runs, charges: Charges) -> Table:
    p50, p95, longest = score.times
    by_status = score.by_status
    statuses = ", ".join(f"{by_status[status]} {status}" for status in sorted(by_status))
    ran = sum(runs.started[job_id] for job_id in score.jobs)
    table = Table(width=WIDTH, show_header=False, title=f"What happened (SIGNAL={mode})", title_justify="left")
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row("jobs by status", f"{statuses} ({HOPELESS} on purpose)")
    table.add_row("attempts by outcome", ", ".join(f"{count} {name}" for name, count in score.outcomes.items()))
    table.add_row("bodies run / jobs", f"{ran} / {len(score.jobs)}")
    table.add_row("recovered: leases that ran out", str(score.recovered))
    table.add_row("stale writes refused", str(score.counters.get("stale_writes", 0)))
    table.add_row("duplicate or empty wake-ups ignored", str(score.counters.get("wakeups_ignored", 0)))
    table.add_row(
        "orders / charges / calls to charge", f"{len(charges.made)} / {sum(charges.made.values())} / {charges.calls}"
    )
    table.add_row("effects still unknown", str(score.unknown_effects))
    table.add_row("to a terminal state, p50 / p95 / max", f"{p50:.2f} s / {p95:.2f} s / {longest:.2f} s")
    table.add_row("objective: p95 within", f"{OBJECTIVE:.0f} s")
    return table
