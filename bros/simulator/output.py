"""Where results of `bros simulate` go, and how far it has come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from bros.core.errors import ConfigError


def writable(text: str | None) -> Path | None:
    """Found out before minutes of work and not after. Raises ConfigError."""
    if text is None:
        return None
    path = Path(text).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--json: {text} cannot be written: no such folder, or it is one")
    return path


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def progress_bar(runs: int) -> Iterator[Callable[[int, float], None]]:
    """A bar on stderr while the block runs, if that is a terminal."""
    shares = [0.0] * runs
    columns = (TextColumn("simulating"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("simulating", total=runs)

        def told(index: int, share: float) -> None:
            shares[index] = share
            bar.update(task, completed=sum(shares))

        yield told
