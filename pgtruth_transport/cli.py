"""``celery -A app pgtruth …``: parse and print only.

Celery loads this module at every ``celery`` start, also where there is no database: it imports click and nothing else.
A command's own module is imported when that command runs. To add one, name it in ``COMMANDS``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from pgtruth_transport.doctor import Finding
    from pgtruth_transport.settings import Settings

#: Where each command lives: ``module:attribute``.
COMMANDS: Final = {
    "cancel": "pgtruth_transport.observe.commands:cancel",
    "doctor": "pgtruth_transport.cli:doctor",
    "effects": "pgtruth_transport.effects.commands:effects",
    "exporter": "pgtruth_transport.observe.commands:exporter",
    "flower": "pgtruth_transport.observe.commands:flower",
    "job": "pgtruth_transport.observe.commands:job",
    "jobs": "pgtruth_transport.observe.commands:jobs",
    "migrate": "pgtruth_transport.cli:migrate",
    "reap": "pgtruth_transport.observe.commands:reap",
    "retry": "pgtruth_transport.observe.commands:retry",
    "stats": "pgtruth_transport.observe.commands:stats",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = COMMANDS.get(cmd_name)
        if target is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = target.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours is a line of text, not a traceback."""
        from pgtruth_transport.errors import PgTruthError

        try:
            return super().invoke(ctx)
        except PgTruthError as exc:
            raise click.ClickException(str(exc)) from exc
        except Exception as exc:
            if _is_lost_connection(exc):
                raise click.ClickException(str(exc).strip()) from exc
            raise


@click.group(cls=LazyGroup)
def pgtruth() -> None:
    """Jobs in PostgreSQL: the schema, the state of every job, and what to do about them."""


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; fail unless the schema is this package's.")
@click.pass_context
def migrate(ctx: click.Context, check: bool) -> None:
    """Bring the database's schema to this package's version. Safe to run twice, and by many at once."""
    from pgtruth_transport import migrate as migrations

    settings = settings_of(ctx)
    changed = False
    if check:
        migrations.check(settings)
    else:
        changed = migrations.migrate(settings)
    state = "is now at" if changed else "is already at"
    click.echo(f"schema {settings.schema!r} in {settings.masked()} {state} {migrations.head()}")


@click.command()
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Check the URL, server, schema, signal and settings. Exit code 1 if a worker could not work like this."""
    from pgtruth_transport.doctor import Finding, Level, examine
    from pgtruth_transport.transport_names import is_ours

    findings = examine(settings_of(ctx))
    if not is_ours(ctx.obj.app.conf):
        findings.insert(0, Finding(Level.FAIL, "scheme", "broker_url has to begin with pgtruth://"))
    _print_findings(findings)
    if any(finding.level is Level.FAIL for finding in findings):
        ctx.exit(1)


def settings_of(ctx: click.Context) -> Settings:
    """The settings of the app that ``-A`` names."""
    from pgtruth_transport.settings import Settings

    return Settings.from_app(ctx.obj.app)


def _print_findings(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.level, styles[finding.level]), finding.subject, Text(finding.text))
    console = Console()
    console.width = min(console.width, 100)
    console.print(table)


def _is_lost_connection(exc: Exception) -> bool:
    import sys

    if "pgtruth_transport.db" not in sys.modules:
        return False
    from pgtruth_transport.db import CONNECTION_ERRORS

    return isinstance(exc, CONNECTION_ERRORS)
