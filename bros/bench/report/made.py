"""How the runs of a report were made: a table with a column for each command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bros.bench.report.words import NOTHING, objectives, ordered, short_name
from bros.bench.results import BenchResult, Command, ScenarioResult


class Row(NamedTuple):
    """values: one for each command, in their order."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def rows(bench: BenchResult) -> list[Row]:
    """Runs first, then where and with what, then the options; nothing is a dash."""
    columns = [dict(_column(bench, command)) for command in bench.commands]
    names = dict.fromkeys(name for column in columns for name in column)
    return [Row(name, tuple(column.get(name, NOTHING) for column in columns)) for name in names]


def _column(bench: BenchResult, command: Command) -> Iterator[tuple[str, str]]:
    environment = command.environment
    memory = environment.memory_bytes
    runs = [run for run in ordered(bench) if run.command == command]
    versions = {f"{run.target} {run.server_version}": None for run in runs if run.server_version}
    yield "runs", _names(bench, runs)
    yield "date", environment.date
    yield "server says", ", ".join(versions) or NOTHING
    yield "client", f"bros {environment.bros}"
    yield "commit", _short(environment.commit)
    yield "Python", environment.python
    yield "packages", ", ".join(" ".join(item) for item in environment.packages.items()) or NOTHING
    yield "processor", environment.cpu
    yield "cores", str(environment.cores)
    yield "memory", NOTHING if memory is None else f"{memory / 2**30:.1f} GiB"
    yield "objectives", objectives(command.slo)
    yield "seed", str(command.seed)
    for name, value in command.settings.items():
        if name != "--seed":
            yield name, NOTHING if value is None else str(value)


def _names(bench: BenchResult, runs: Sequence[ScenarioResult]) -> str:
    """`S3 bros at 0.1, 0.2/s; S2 fcfs`."""
    rates: dict[str, list[float]] = {}
    for run in runs:
        found = rates.setdefault(short_name(bench, run), [])
        found += [] if run.rt_rate is None else [run.rt_rate]
    return "; ".join(
        f"{name} at {', '.join(f'{rate:g}' for rate in found)}/s" if found else name
        for name, found in rates.items()
    )


def _short(commit: str | None) -> str:
    """As much of it as names it; the plus of a changed tree stays."""
    if commit is None:
        return NOTHING
    return commit.rstrip("+")[:12] + "+" * commit.endswith("+")
