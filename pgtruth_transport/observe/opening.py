"""What the commands share: the app's database, its errors in words, and options that mean the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console

from pgtruth_transport import migrate
from pgtruth_transport.db import CONNECTION_ERRORS, Database
from pgtruth_transport.errors import PgTruthError
from pgtruth_transport.settings import Settings

from . import tables

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


if TYPE_CHECKING:
    _FloatType = click.ParamType[float]
else:
    _FloatType = click.ParamType  # no generic class in the oldest Click that Celery accepts


class Span(_FloatType):
    """A length of time: ``30s``, ``10m``, ``2h``, ``1d``; a bare number is seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no length of time; write 30s, 10m, 2h or 1d", param, ctx)
        return float(found[1]) * _UNITS[found[2] or "s"]


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
ids_argument = click.argument("ids", nargs=-1, required=True, metavar="ID...")


@contextmanager
def truth(ctx: click.Context) -> Iterator[Database]:
    """The app's database, with its schema checked; turns what goes wrong into a message and exit code 1."""
    try:
        settings = Settings.from_app(ctx.obj.app)
    except PgTruthError as exc:
        raise click.ClickException(str(exc)) from None
    try:
        migrate.check(settings)
        yield Database.of(settings)
    except PgTruthError as exc:
        raise click.ClickException(str(exc)) from None
    except CONNECTION_ERRORS as exc:
        reason = str(exc).strip().partition("\n")[0]
        raise click.ClickException(
            f"cannot work with {settings.masked()}: {reason}; check broker_url and that the server is up"
        ) from None


def terminal(ctx: click.Context) -> Console:
    return tables.console(getattr(ctx.obj, "no_color", False))


def say(ctx: click.Context, renderable: Any) -> None:
    terminal(ctx).print(renderable)
