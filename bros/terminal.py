"""Tables and progress bars, drawn by rich or, where it is not installed, in plain text.

rich is optional because GPU machines often have only the libraries that a model needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

Advance = Callable[[int, int, str], None]
"""Called with the number of completed items, the total and a note."""


def print_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> None:
    """Print a table. The first `left` columns are left-aligned text, the others right-aligned."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(plain_table(title, headings, rows, left=left))
        return
    table = Table(title=title, show_header=any(headings))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def plain_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> str:
    """The text of the table without rich."""
    lines = [headings, *rows] if any(headings) else list(rows)
    widths = [max((len(line[column]) for line in lines), default=0) for column in _columns(lines)]
    text = [title] if title else []
    for line in lines:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def _columns(lines: Sequence[Sequence[str]]) -> range:
    return range(len(lines[0]) if lines else 0)


@contextlib.contextmanager
def progress_bar(label: str, unit: str = "", *, shown: bool | None = None) -> Iterator[Advance]:
    """Show a progress bar on stderr within the block; yields the function that advances it.

    shown: None: only if stderr is a terminal, or in a notebook. There is no bar without rich.
    """
    if shown is False:
        yield _ignore
        return
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        yield _ignore
        return
    console = Console(stderr=True)
    if shown is None and not (console.is_terminal or console.is_jupyter):
        yield _ignore
        return
    columns = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    # What other threads print appears above the bar, but not on stderr if stdout is a file.
    above = Console().is_terminal
    with Progress(*columns, console=console, redirect_stdout=above) as bar:
        task = bar.add_task("", total=None, note="")

        def advance(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield advance


def _ignore(done: int, total: int, note: str) -> None:
    pass
