"""``celery -A app pgtruth effects …``: look at effects, ask about unknown ones, decide. Parse and print only.

Every question and decision made here is recorded with who and why.
"""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC
from typing import Any, Final

import click
from rich.console import Console

from pgtruth_transport.db import Database
from pgtruth_transport.effects import book, codec, kinds, reconciling
from pgtruth_transport.effects.errors import EffectError
from pgtruth_transport.effects.ledger import Ledger
from pgtruth_transport.effects.states import Applied, EffectState, NotApplied, StillUnknown
from pgtruth_transport.printing import Column, print_table
from pgtruth_transport.settings import Settings

STATES: Final = [state.value for state in EffectState]
#: From this width on, a list shows the job and the latest word as well.
WIDE: Final = 140
DECISIONS: Final = [EffectState.APPLIED.value, EffectState.NO_EFFECT.value]


def _whoami() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _database(context: click.Context) -> Database:
    """The app's database; the app's modules are imported, because they declare the kinds."""
    app = context.obj.app
    app.loader.import_default_modules()
    app.finalize()
    return Database.of(Settings.from_app(app))


@click.group()
def effects() -> None:
    """Effects on the outside world: what was done, what is unknown, and what to do about it."""


@effects.command("list")
@click.option("--state", "states", type=click.Choice(STATES), multiple=True, help="Only these; default: unknown.")
@click.option("--all", "everything", is_flag=True, help="Effects in every state.")
@click.option("--kind", help="Only effects of this kind.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 100_000))
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.pass_context
def list_(
    context: click.Context, states: tuple[str, ...], everything: bool, kind: str | None, limit: int, as_json: bool
) -> None:
    """List effects, unknown ones by age."""
    wanted = [EffectState(name) for name in (STATES if everything else states or ["unknown"])]
    database = _database(context)
    book.lapse_due(database, _whoami(), limit)  # what dead attempts have left behind reads as unknown
    rows = book.listed(database, wanted, kind=kind, limit=limit)
    if as_json:
        _print_json(asdict(row) for row in rows)
        return
    if rows:
        _print_list(rows)
    which = "in any state" if everything else " or ".join(wanted)
    click.echo(f"{len(rows)} effect(s), {which}" + (", more may exist" * (len(rows) == limit)))


@effects.command()
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def show(context: click.Context, key: str, as_json: bool) -> None:
    """Show one effect and everything that happened to it."""
    database = _database(context)
    row = Ledger(database, None, owner=_whoami()).read(key).row
    if row is None:
        raise click.ClickException(f"there is no effect {key!r}; list them with: effects list --all")
    facts = {
        "key": row.key,
        "kind": row.kind + ("" if kinds.find(row.kind) else " (not declared in this app)"),
        "state": row.state.value + (" (a live attempt is calling)" if row.live else ""),
        "calls": row.calls,
        "fingerprint": row.fingerprint,
        "fields": codec.decode(row.payload),
        "resource": row.resource,
        "fence": row.fence,
        "result": codec.decode(row.result),
        "late answer": codec.decode(row.late_result),
        "latest word": row.error,
    }
    moves = book.history(database, key)
    if as_json:
        _print_json([{**facts, "history": [asdict(move) for move in moves]}])
        return
    for name, value in facts.items():
        if value is not None:
            click.echo(f"{name:>12}  {_plain(value)}")
    click.echo()
    _print_moves(moves)


@effects.command()
@click.argument("keys", nargs=-1)
@click.option("--due", is_flag=True, help="Ask about everything that is due, as beat does.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 100_000), help="With --due.")
@click.option("--who", default=_whoami, show_default="you@this host", help="Recorded in the history.")
@click.pass_context
def reconcile(context: click.Context, keys: tuple[str, ...], due: bool, limit: int, who: str) -> None:
    """Ask the recipients what became of unknown effects, and record what they say."""
    database = _database(context)
    if due == bool(keys):
        raise click.UsageError("name the keys, or say --due")
    if due:
        done = reconciling.reconcile_due(database.settings, limit, who)
        click.echo(", ".join(f"{name.replace('_', ' ')}: {number}" for name, number in asdict(done).items()))
        return
    unknown = False
    for key in keys:
        try:
            answer = reconciling.reconcile(database, key, who)
        except EffectError as exc:
            raise click.ClickException(str(exc)) from exc
        match answer:
            case None:
                click.echo(f"{key}: somebody else has settled it meanwhile")
            case Applied(_, why):
                click.echo(f"{key}: applied ({why})")
            case NotApplied(why):
                click.echo(f"{key}: no effect ({why}); a fresh call is allowed")
            case StillUnknown(why):
                unknown = True
                click.echo(f"{key}: still unknown ({why})")
    if unknown:
        context.exit(1)


@effects.command()
@click.argument("key")
@click.argument("state", type=click.Choice(DECISIONS))
@click.option("--why", required=True, help="What you know and how; recorded in the history.")
@click.option("--who", default=_whoami, show_default="you@this host", help="Recorded in the history.")
@click.option("--result", help="JSON; what the call would have returned (with 'applied').")
@click.pass_context
def resolve(context: click.Context, key: str, state: str, why: str, who: str, result: str | None) -> None:
    """Decide about an unknown effect: it was 'applied', or it had 'no_effect' (then a fresh call is allowed)."""
    if result is not None and state != EffectState.APPLIED:
        raise click.UsageError("--result goes with 'applied' only")
    try:
        value = None if result is None else json.loads(result)
    except ValueError as exc:
        raise click.BadParameter(f"not JSON: {exc}", param_hint="--result") from exc
    try:
        moved = reconciling.resolve(_database(context), key, EffectState(state), who=who, why=why, result=value)
    except EffectError as exc:
        raise click.ClickException(str(exc)) from exc
    if not moved:
        raise click.ClickException(f"effect {key!r} was settled by somebody else meanwhile; see: effects show {key}")
    click.echo(f"{key}: {state}, recorded as decided by {who}")


@effects.command()
@click.option("--older-than", required=True, type=click.FloatRange(min=1), help="Days without a change.")
@click.confirmation_option(prompt="A deleted key may be called again. Delete settled effects that old?")
@click.pass_context
def prune(context: click.Context, older_than: float) -> None:
    """Delete settled effects that no attempt will ask about any more."""
    click.echo(f"{book.prune(_database(context), older_than * 86_400)} effect(s) deleted")


def _print_list(rows: Sequence[book.Listed]) -> None:
    """A line for each; the key is never cut, because it is what one copies."""
    console = Console(highlight=False)
    columns = [Column("KEY"), Column("STATE"), Column("AGE", right=True), Column("CALLS", right=True)]
    columns += [Column("ASKED", right=True), Column("KIND", least=10)]
    wide = console.width >= WIDE
    if wide:
        columns += [Column("JOB", least=36), Column("LATEST WORD", least=16)]
    lines = []
    for row in rows:
        more = (row.job_id or "-", (row.error or "").partition("\n")[0]) if wide else ()
        lines.append((row.key, row.state, _age(row.age), str(row.calls), str(row.checks), row.kind, *more))
    print_table(console, columns, lines)


def _print_moves(moves: Sequence[book.Move]) -> None:
    columns = [Column("AT (UTC)"), Column("CALL", right=True), Column("STATE"), Column("BY", least=12, fold=True)]
    lines = [
        (
            move.at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S"),
            str(move.calls),
            move.to_state if move.from_state != move.to_state else f"({move.to_state})",  # noted, nothing moved
            move.who,
            move.why,
        )
        for move in moves
    ]
    print_table(Console(highlight=False), [*columns, Column("WHY", least=16, fold=True)], lines)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _print_json(values: Iterable[dict[str, Any]]) -> None:
    for value in values:
        click.echo(json.dumps(value, default=str))


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
