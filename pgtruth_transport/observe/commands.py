"""``celery -A app pgtruth jobs|job|retry|cancel|reap|stats|exporter|flower``: parse and print.

Every command says what to do when it cannot work (no schema, no server, an unknown id) and then exits with 1.
"""

from __future__ import annotations

import uuid

import click

from pgtruth_transport import lifecycle
from pgtruth_transport.db import Database
from pgtruth_transport.publish import publish
from pgtruth_transport.runtime import runtime
from pgtruth_transport.states import TERMINAL, Status

from . import queries, tables
from .copies import copy_of
from .opening import Span, as_json, ids_argument, say, terminal, truth
from .services import exporter, flower, stats

__all__ = ["cancel", "exporter", "flower", "job", "jobs", "reap", "retry", "stats"]


@click.command
@click.option("--status", "-s", "statuses", multiple=True, type=click.Choice([s.value for s in Status]))
@click.option("--queue", "-q", help="Only this queue.")
@click.option("--task", "-t", help="Only this task, by its full name.")
@click.option("--since", type=Span(), help="Only jobs that changed in this time: 30s, 10m, 2h, 1d.")
@click.option("--limit", "-n", default=20, show_default=True, type=click.IntRange(1, 10_000), help="How many at most.")
@as_json
@click.pass_context
def jobs(
    ctx: click.Context,
    statuses: tuple[str, ...],
    queue: str | None,
    task: str | None,
    since: float | None,
    limit: int,
    as_json: bool,
) -> None:
    """List jobs, the one that changed last first."""
    with truth(ctx) as db, queries.looking(db) as conn:
        found = queries.jobs(conn, db, statuses=statuses, queue=queue, task=task, since=since, limit=limit)
    if as_json:
        click.echo(tables.to_json(found))
    elif found:
        tables.print_jobs(terminal(ctx), found)
    else:
        click.echo("no jobs match")


@click.command
@click.argument("job_id", metavar="ID")
@as_json
@click.pass_context
def job(ctx: click.Context, job_id: str, as_json: bool) -> None:
    """Show one job and all its attempts."""
    with truth(ctx) as db, queries.looking(db) as conn:
        found = queries.job(conn, db, job_id)
        if found is None:
            raise click.ClickException(unknown([job_id]))
        attempts = queries.attempts_of(conn, db, job_id)
    if as_json:
        click.echo(tables.to_json({"job": found, "attempts": attempts}))
        return
    say(ctx, tables.job_table(found))
    if attempts:
        click.echo()
        tables.print_attempts(terminal(ctx), attempts)


@click.command
@ids_argument
@click.option("--queue", "-q", help="Publish to this queue instead of the job's own.")
@as_json
@click.pass_context
def retry(ctx: click.Context, ids: tuple[str, ...], queue: str | None, as_json: bool) -> None:
    """Run ended jobs again: publish a copy of each under a new id."""
    with truth(ctx) as db:
        found = _find(db, ids)
        if running := [job.id for job in found if Status(job.status) not in TERMINAL]:
            raise click.ClickException(f"not ended yet, so there is nothing to retry: {', '.join(running)}")
        rows = [copy_of(job, str(uuid.uuid4()), queue) for job in found]
        publish(db, runtime(db.settings).signal, rows)
    copies = {job.id: row.id for job, row in zip(found, rows, strict=True)}
    if as_json:
        click.echo(tables.to_json(copies))
    else:
        for old, new in copies.items():
            click.echo(f"{old} -> {new}")


@click.command
@ids_argument
@click.option("--reason", default="cancelled by hand", show_default=True, help="Kept in the job's error.")
@click.option("--terminate", is_flag=True, help="Also end those that run, by killing the pool process that runs them.")
@as_json
@click.pass_context
def cancel(ctx: click.Context, ids: tuple[str, ...], reason: str, terminate: bool, as_json: bool) -> None:
    """Cancel jobs that have not started, for good, also when no worker is up."""
    with truth(ctx) as db:
        found = _find(db, ids)
        with db.connection() as conn:
            gone = lifecycle.cancel(conn, db, [job.id for job in found if Status(job.status) not in TERMINAL], reason)
        if terminate and (rest := [job.id for job in found if job.id not in gone and job.status == Status.PROCESSING]):
            ctx.obj.app.control.revoke(rest, terminate=True)
            gone |= set(rest)
        after = {job.id: job.status for job in _find(db, ids)}
    if as_json:
        click.echo(tables.to_json({"cancelled": sorted(gone), "status": after}))
        return
    for job_id, status in after.items():
        click.echo(f"{job_id} {'cancelled' if job_id in gone else f'left alone: {status}'}")
    if len(gone) < len(after):
        ctx.exit(1)


@click.command
@click.pass_context
def reap(ctx: click.Context) -> None:
    """Sweep once, now: recover jobs of dead workers, expire, tidy. Workers and beat do the same every few seconds."""
    from pgtruth_transport import reaper

    with truth(ctx) as db:
        swept = reaper.sweep(ctx.obj.app)
        with queries.looking(db) as conn:
            overdue = sum(holder.expired for holder in queries.holders(conn, db))
    found = ", ".join(f"{count} {name}" for name, count in swept._asdict().items() if count)
    click.echo(f"swept: {found}" if found else "swept: nothing was due")
    if overdue:
        click.echo(f"{overdue} overdue lease(s) left: after a restart of the server their owners have a lease of grace")


def _find(db: Database, ids: tuple[str, ...]) -> list[queries.JobDetail]:
    """The jobs by these ids, each once; an unknown one stops the command before it does anything."""
    with queries.looking(db) as conn:
        found = {job_id: queries.job(conn, db, job_id) for job_id in ids}
    if missing := [job_id for job_id, job in found.items() if job is None]:
        raise click.ClickException(unknown(missing))
    return [job for job in found.values() if job is not None]


def unknown(ids: list[str]) -> str:
    return f"unknown job {', '.join(ids)}: never published here, or deleted after its time (result_expires)"
