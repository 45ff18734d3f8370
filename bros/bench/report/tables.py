"""Tables that are wider than the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

_ANY_WIDTH = 10_000
_NAME_WIDTH = 12


def print_table(console: Console, table: Table, kept: int = 1) -> None:
    """Print a table in parts that fit, one below the other. kept: see `parts`."""
    for number, part in enumerate(parts(console, table, kept)):
        if number and table.box is None:
            console.print()
        console.print(part)


def parts(
    console: Console, table: Table, kept: int = 1, width: int | None = None
) -> Iterator[Table]:
    """The table, in parts of as many columns as fit.

    Rich would cut off figures and leave no room for the names of the rows.

    kept: the first columns, which name the rows; each part has them.
    width: in characters; None: that of the console.
    """
    width = console.width if width is None else width
    if len(table.columns) <= kept:
        yield table
    start = kept
    while start < len(table.columns):
        end = start + 1
        while (
            end < len(table.columns)
            and _least_width(console, _part(table, kept, start, end + 1)) <= width
        ):
            end += 1
        yield _part(table, kept, start, end)
        start = end


def _least_width(console: Console, table: Table) -> int:
    """The width with which only names are wrapped, and none to fewer than _NAME_WIDTH."""
    width = _width(console, table)
    for column in table.columns:
        if not column.no_wrap:
            texts = (column.header, *column.cells)
            width -= max(0, max(_width(console, text) for text in texts) - _NAME_WIDTH)
    return width


def _width(console: Console, shown: RenderableType) -> int:
    return Measurement.get(console, console.options.update_width(_ANY_WIDTH), shown).maximum


def _part(table: Table, kept: int, start: int, end: int) -> Table:
    """A table of the first `kept` columns and those from `start` to `end`."""
    part = Table(box=table.box, padding=table.padding, pad_edge=table.pad_edge)
    columns = [*table.columns[:kept], *table.columns[start:end]]
    for column in columns:
        part.add_column(
            column.header,
            justify=column.justify,
            vertical=column.vertical,
            overflow=column.overflow,
            no_wrap=column.no_wrap,
        )
    cells = zip(*(column.cells for column in columns), strict=True)
    for row, texts in zip(table.rows, cells, strict=True):
        part.add_row(*texts, end_section=row.end_section)
    return part
