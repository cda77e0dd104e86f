"""``celery -A app pgtruth stats|exporter|flower``: the figures once, served for Prometheus, and in Flower."""

from __future__ import annotations

import threading
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from pgtruth_transport import counters
from pgtruth_transport.db import Connection, Database
from pgtruth_transport.states import Status

from . import health, queries, tables
from .opening import Span, as_json, say, truth


@click.command
@click.option("--window", type=Span(), default="5m", show_default=True, help="How far back the rates look.")
@click.option("--exact", is_flag=True, help=f"Count everything instead of stopping at {queries.COUNT_LIMIT:,}.")
@as_json
@click.pass_context
def stats(ctx: click.Context, window: float, exact: bool, as_json: bool) -> None:
    """Jobs by queue and status, ages, recoveries, and the health of the tables."""
    limit = 2_000_000_000 if exact else queries.COUNT_LIMIT
    with truth(ctx) as db, queries.looking(db, 600 if exact else queries.STATEMENT_SECONDS) as conn:
        found = gather(conn, db, window, limit)
    if as_json:
        click.echo(tables.to_json(found))
        return
    for table in (_queues(found), _states(found), _ends(found), _events(found), _tables(found)):
        say(ctx, table)
        click.echo()
    for warning in warnings(found):
        say(ctx, Text(f"! {warning}", style="yellow"))


def gather(conn: Connection, db: Database, window: float, limit: int) -> dict[str, Any]:
    """All the figures, as values."""
    waiting, longest = health.lock_waits(conn, db)
    return {
        "queues": queries.queues(conn, db, limit),
        "ended": queries.totals(conn, db, limit),
        "holders": queries.holders(conn, db),
        "recent": queries.ends(conn, db, window),
        "counters": counters.read(conn, db),
        "attempts": queries.attempts(conn, db),
        "tables": health.tables(conn, db),
        "snapshots": health.snapshots(conn, db),
        "lock_waits": {"sessions": waiting, "longest": longest},
        "unknown_effects": health.unknown_effects(conn, db),
    }


def _queues(found: dict[str, Any]) -> Table:
    columns = ("QUEUE", "DUE", "LATER", "OPEN", "PROCESSING", "UNSIGNALLED", "OLDEST DUE")
    table = tables.plain_table(*columns, right=columns[1:])
    for q in found["queues"]:
        counts = (q.due, q.scheduled, q.open, q.processing, q.enqueue_failed)
        table.add_row(q.queue, *map(str, counts), tables.duration(q.oldest_due))
    if not found["queues"]:
        table.add_row("(no open jobs)")
    return table


def _states(found: dict[str, Any]) -> Table:
    table = tables.plain_table("KEPT", "JOBS", right=("JOBS",))
    for status, count in found["ended"].items():
        table.add_row(tables.status_text(status), str(count))
    table.add_row(tables.status_text(Status.PROCESSING), f"{sum(h.jobs for h in found['holders']):,}")
    return table


def _ends(found: dict[str, Any]) -> Table:
    ends: queries.Ends = found["recent"]
    table = tables.plain_table("ENDED", "PER MINUTE", "FAILED", "RETRIED", "P50", "P95", "MAX", "WITHIN 25 s")
    within = "" if ends.within is None else f"{ends.within:.1%}"
    times = map(tables.duration, (ends.p50, ends.p95, ends.longest))
    ended = f"{ends.done + ends.failed:,} in {tables.duration(ends.span)}"
    table.add_row(ended, f"{ends.per_minute:,.1f}", f"{ends.failed:,}", f"{ends.retried:,}", *times, within)
    return table


def _events(found: dict[str, Any]) -> Table:
    table = tables.plain_table("EVENT", "TIMES", right=("TIMES",))
    for name, value in found["counters"].items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    for outcome, count in found["attempts"].items():
        table.add_row(f"attempts {outcome}", str(count))
    if not table.rows:
        table.add_row("(none yet)")
    return table


def _tables(found: dict[str, Any]) -> Table:
    table = tables.plain_table("TABLE", "ROWS ~", "DEAD ~", "SIZE", "INDEXES", "VACUUMED")
    for t in found["tables"]:
        vacuumed = "never" if t.vacuumed is None else f"{tables.duration(t.vacuumed)} ago"
        sizes = tables.size(t.table_bytes), tables.size(t.index_bytes)
        table.add_row(t.table, f"{t.live:,}", f"{t.dead:,} ({t.dead_share:.0%})", *sizes, vacuumed)
    return table


def warnings(found: dict[str, Any]) -> list[str]:
    """What deserves a person's attention; the review triggers of ADR-007 among it."""
    said = [str(s) for s in found["snapshots"] if s.is_old]
    if found["recent"].per_minute >= health.VOLUME_TRIGGER:
        said.append(
            f"{found['recent'].per_minute:,.0f} jobs per minute: at a sustained {health.VOLUME_TRIGGER} ADR-007 asks"
            " for a review of queue latency and database impact"
        )
    if overdue := sum(h.expired for h in found["holders"]):
        said.append(f"{overdue} lease(s) have run out and were not reaped: is a worker or beat up? (pgtruth reap)")
    if parked := sum(q.enqueue_failed.value for q in found["queues"]):
        said.append(f"{parked} job(s) wait for the sweep because their signal could not be sent: is Redis up?")
    if found["lock_waits"]["sessions"]:
        longest = tables.duration(found["lock_waits"]["longest"])
        said.append(f"{found['lock_waits']['sessions']} session(s) wait for a lock, the longest for {longest}")
    for effect in found["unknown_effects"]:
        oldest = tables.duration(effect.oldest)
        said.append(
            f"{effect.count} effect(s) of kind {effect.kind} are unknown, the oldest for {oldest} (pgtruth effects)"
        )
    return said


@click.command
@click.option("--host", default="0.0.0.0", show_default=True, help="The address to listen on.")
@click.option("--port", "-p", default=9808, show_default=True, type=click.IntRange(0, 65_535))
@click.option("--window", type=Span(), default="5m", show_default=True, help="How far back the rates look.")
@click.pass_context
def exporter(ctx: click.Context, host: str, port: int, window: float) -> None:
    """Serve metrics for Prometheus at /metrics, and /health."""
    try:
        from .exporter import serve
    except ImportError:
        raise click.ClickException(
            "the exporter needs prometheus_client: pip install 'pgtruth-transport[metrics]'"
        ) from None
    with truth(ctx) as db:
        try:
            server = serve(db, host, port, window)
        except OSError as exc:
            raise click.ClickException(
                f"cannot listen on {host}:{port}: {exc.strerror}; choose another --port"
            ) from None
        click.echo(f"metrics at http://{host}:{server.server_port}/metrics")
        try:
            threading.Event().wait()
        except (KeyboardInterrupt, SystemExit):
            server.shutdown()


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("tornado_argv", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def flower(ctx: click.Context, tornado_argv: tuple[str, ...]) -> None:
    """Flower with true queue lengths, and with the jobs from before it started. Takes Flower's own options."""
    with truth(ctx) as db:
        try:
            from .flower import run
        except ImportError:
            raise click.ClickException("Flower is not installed: pip install 'pgtruth-transport[flower]'") from None
        run(ctx, tornado_argv, db)
