"""Tables on a terminal: headers, and what one copies (ids, keys), stay whole; the columns that may give way do.

Where even their least widths do not fit, the lines are longer than the terminal: it wraps them, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cell = str | Text
_GAP = 2


class Column(NamedTuple):
    """``least``: how narrow it may become; None for one that keeps its width. ``fold``: its text goes on below."""

    title: str
    right: bool = False
    least: int | None = None
    fold: bool = False


def widths(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> list[int]:
    """How wide each column becomes on ``width`` columns: the widest of those that may give way does so first."""
    found = [max([cell_len(c.title), *(_len(row[n]) for row in rows)]) for n, c in enumerate(columns)]
    least = [
        w if c.least is None else min(w, max(c.least, cell_len(c.title))) for w, c in zip(found, columns, strict=True)
    ]
    excess = sum(found) + _GAP * (len(columns) - 1) - width
    while excess > 0:
        slack, widest = max((w if w > low else 0, n) for n, (w, low) in enumerate(zip(found, least, strict=True)))
        if not slack:
            break
        found[widest] -= 1
        excess -= 1
    return found


def print_table(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """Print ``rows`` under ``columns``; cells are taken literally."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, _GAP, 0, 0))
    fitting = widths(columns, rows, console.width)
    for column, width in zip(columns, fitting, strict=True):
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            width=width,
            no_wrap=not column.fold,
            overflow="fold" if column.fold else "ellipsis",
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    console.width = max(console.width, sum(fitting) + _GAP * len(fitting))
    console.print(table, soft_wrap=False)


def _len(cell: Cell) -> int:
    return max((cell_len(line) for line in str(cell).splitlines()), default=0)
