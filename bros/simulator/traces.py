"""Recorded arrivals: CSV files with the columns of the Azure LLM inference traces of 2023.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44

Times count from the first row. Fractions of a second may have any number of digits.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from bros.core.errors import ConfigError
from bros.simulator.workload import Arrival, Size

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure_trace(path: Path) -> tuple[Arrival, ...]:
    """All rows, sorted by time. Raises ConfigError naming the file and the line that is wrong."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(_rows(path, csv.reader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--trace: {path} cannot be read: {error}") from None
    if not rows:
        raise ConfigError(f"--trace: {path} has no requests")
    first = min(time_s for time_s, _ in rows)
    return tuple(sorted(Arrival(time_s - first, size) for time_s, size in rows))


def _rows(path: Path, lines: Iterator[list[str]]) -> Iterator[tuple[float, Size]]:
    header = next(lines, [])
    if tuple(header) != COLUMNS:
        raise ConfigError(f"--trace: {path}:1: the first line must be {','.join(COLUMNS)}")
    origin: datetime | None = None
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        try:
            stamp, prompt, output = line
            moment, fraction = _parse_time(stamp)
            size = Size(int(prompt), int(output))
        except ValueError:
            raise ConfigError(
                f"--trace: {path}:{number}: {','.join(line)!r} is not a time and two token counts"
            ) from None
        if size.prompt_tokens < 1 or size.output_tokens < 1:
            raise ConfigError(f"--trace: {path}:{number}: token counts must be at least 1")
        origin = origin or moment
        yield (moment - origin).total_seconds() + fraction, size


def _parse_time(stamp: str) -> tuple[datetime, float]:
    """The whole second and the fraction after it, which may be finer than datetime is."""
    whole, _, digits = stamp.partition(".")
    if digits and not digits.isdecimal():
        raise ValueError(stamp)
    return datetime.strptime(whole, "%Y-%m-%d %H:%M:%S"), float(f"0.{digits or 0}")
