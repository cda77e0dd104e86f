"""How jobs and figures look on a terminal of 80 columns, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pgtruth_transport.printing import Column, print_table
from pgtruth_transport.states import Status

from .queries import AttemptLine, Count, JobDetail, JobLine

STYLES: Final = {
    "done": "green",
    "failed": "red",
    "processing": "cyan",
    "queued": "yellow",
    "enqueue_failed": "magenta",
}
#: Narrower than this, a list shows only the columns that it must.
WIDE: Final = 100
_PAYLOAD: Final = {"headers", "properties", "body"}


def console(no_color: bool = False) -> Console:
    return Console(no_color=no_color, highlight=False)


def age(since: datetime | None, now: datetime | None = None) -> str:
    """How long ago, in two or three characters and a unit."""
    return "" if since is None else duration(((now or datetime.now(UTC)) - since).total_seconds())


def moment(at: datetime) -> str:
    """A point in time, and how far it is from now."""
    away = (datetime.now(UTC) - at).total_seconds()
    distance = f"{duration(away)} ago" if away >= 0 else f"in {duration(-away)}"
    return f"{at.isoformat(sep=' ', timespec='milliseconds')}  ({distance})"


def duration(seconds: float | None) -> str:
    """``0.35s``, ``12s``, ``3m``, ``5h``, ``2d``; empty for None."""
    if seconds is None:
        return ""
    if abs(seconds) < 10:
        return f"{seconds:.2g}s"
    for unit, length, upto in (("s", 1, 120), ("m", 60, 7200), ("h", 3600, 172_800)):
        if abs(seconds) < upto:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def size(count: int | None) -> str:
    """A number of bytes for people."""
    value = float(count or 0)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True, overflow="ellipsis")
    return table


def status_text(status: str) -> Text:
    return Text(status, style=STYLES.get(status, ""))


def print_jobs(to: Console, lines: Iterable[JobLine]) -> None:
    """One line per job; the id is never cut, because it is what one copies."""
    wide = to.width >= WIDE
    more = [Column("QUEUE", least=5), Column("WORKER", least=8)] if wide else []
    counts = [Column("RETRIES", right=True), Column("AGE", right=True)]
    now = datetime.now(UTC)
    rows = [
        (
            line.id,
            status_text(line.status),
            line.task,
            *((line.queue, worker_name(line.owned_by)) if wide else ()),
            str(line.retry_count),
            age(line.updated_at, now),
        )
        for line in lines
    ]
    print_table(to, [Column("ID"), Column("STATUS"), Column("TASK", least=8), *more, *counts], rows)


def worker_name(owned_by: str | None) -> str:
    """The worker's host name in ``jobs.owned_by`` (``<hostname>:<pid>:<start>``)."""
    return (owned_by or "").rsplit(":", 2)[0]


def job_table(job: JobDetail) -> Table:
    """One job, a field per line; never its payload."""
    table = Table(box=None, pad_edge=False, show_header=False, show_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _shown(job):
        table.add_row(name, value)
    return table


def _shown(job: JobDetail) -> Iterable[tuple[str, Text]]:
    for field in fields(job):
        value = getattr(job, field.name)
        if field.name in _PAYLOAD or value is None:
            continue
        if field.name == "error" and job.status != Status.FAILED:
            yield "latest failure", Text(value)  # of an attempt before: the job has not ended by it
        elif field.name == "status":
            yield field.name, status_text(value)
        elif isinstance(value, datetime):
            yield field.name, Text(moment(value))
        elif field.name == "run_at" and value != "infinity":
            yield field.name, Text(moment(datetime.fromisoformat(value)))
        else:
            yield field.name, Text(str(value))


def print_attempts(to: Console, attempts: Iterable[AttemptLine]) -> None:
    rows = [
        (
            str(a.lease_version),
            a.outcome,
            worker_name(a.owned_by),
            duration((a.ended_at - a.claimed_at).total_seconds()),
            a.ended_at.strftime("%m-%d %H:%M:%S"),
            (a.error or "").partition("\n")[0],
        )
        for a in attempts
    ]
    columns = [
        Column("LEASE", right=True),
        Column("OUTCOME"),
        Column("WORKER", least=12),
        Column("TOOK", right=True),
        Column("ENDED"),
        Column("ERROR", least=20, fold=True),
    ]
    print_table(to, columns, rows)


def to_json(value: Any) -> str:
    """JSON for scripts: times in ISO 8601, a count that stopped early as a string with ``+``, never a payload."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False)


def _plain(value: Any) -> Any:
    match value:
        case Count():
            return f"{value.value}+" if value.capped else value.value
        case datetime():
            return value.isoformat()
        case dict():
            return {str(k): _plain(v) for k, v in value.items() if k not in _PAYLOAD}
        case list() | tuple():
            return [_plain(v) for v in value]
        case bytes() | memoryview():
            return None
        case _ if hasattr(value, "__dataclass_fields__"):
            return _plain({f.name: getattr(value, f.name) for f in fields(value)})
        case _:
            return value
