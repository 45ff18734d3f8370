"""A comparison as one page that needs nothing else: no scripts, no fonts, pictures inside."""

from __future__ import annotations

import base64
import importlib.resources
import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from bros.bench.metrics import ClassMetrics, Summary
from bros.bench.report.plots import DARK, LIGHT, figures
from bros.bench.report.terminal import COLUMNS, cells
from bros.bench.report.words import (
    CLASS_NAMES,
    NOTHING,
    all_objectives,
    capacity,
    counts,
    likely_percent,
    ms,
    name_of,
    objectives,
    ordered,
    percent,
    ratio,
    server_name,
    short_name,
    verdict,
    warnings,
)
from bros.bench.results import BenchResult, CapacityResult, Command, Scenario, ScenarioResult

# ---- How the runs of a report were made: a table with a column for each command.


class Row(NamedTuple):
    """values: one for each command, in their order."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def rows_of_commands(bench: BenchResult) -> list[Row]:
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


def page(bench: BenchResult) -> str:
    """Complete HTML with pictures for light and dark screens; page.html is its template."""
    source = importlib.resources.files("bros.bench.report").joinpath("page.html")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    runs, commands = ordered(bench), rows_of_commands(bench)
    numbers = [f" {number}" for number in range(1, 1 + len(bench.commands))]
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        date=max((command.environment.date for command in bench.commands), default=None),
        verdict=verdict(bench),
        objectives=all_objectives(bench),
        warnings=warnings(bench),
        plots=_plots(bench),
        columns=[column.replace("\n", " ") for column in COLUMNS],
        runs=[(name_of(bench, run), *cells(bench, run)) for run in runs],
        starts=[n for n in range(1, len(runs)) if runs[n].rt_rate != runs[n - 1].rt_rate],
        scenarios=[f"{s}: {s.label}" for s in Scenario if any(r.scenario is s for r in runs)],
        capacities=[_capacity(bench, found) for found in bench.capacities],
        taxes=list(_taxes(bench)),
        details=[_details(bench, run) for run in runs],
        commands=[f"command{number if len(numbers) > 1 else ''}" for number in numbers],
        settings=[(row.name, *row.values) for row in commands],
        # What differs between commands stands out.
        marked=[number for number, row in enumerate(commands) if row.differs],
    )


def _plots(bench: BenchResult) -> dict[str, list[dict[str, str]]]:
    """By heading: what was measured first, then what servers say of themselves."""
    light, dark = figures(bench, LIGHT), figures(bench, DARK)
    found: dict[str, list[dict[str, str]]] = {"Plots": [], "Inside the servers": []}
    for name, figure in light.items():
        heading = "Inside the servers" if name.startswith("timeline") else "Plots"
        picture = {"light": _png(figure), "dark": _png(dark[name])}
        found[heading].append({**picture, "title": figure.get_suptitle()})
    return found


def _png(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _capacity(bench: BenchResult, found: CapacityResult) -> dict[str, Any]:
    return {
        "words": capacity(bench, found),
        "name": server_name(bench, found.target, found.policy),
        "asked": f"{100 * found.asked:g}",
        "rows": [
            (
                f"{tried.rate:g}",
                percent(tried.both_met),
                likely_percent(tried.both_met),
                tried.both_met.decided,
                "yes" if tried.keeps(found.asked) else "no",
            )
            for tried in found.tried
        ],
    }


def _taxes(bench: BenchResult) -> Iterator[Sequence[str]]:
    for result in ordered(bench):
        tax = bench.rt_tax(result) if result.scenario.mixed else None
        if tax is not None:
            points = NOTHING if tax.both_met is None else f"{100 * tax.both_met:+.1f}"
            times = (tax.ttft_p50_s, tax.ttft_p99_s, tax.tpot_p50_s, tax.tpot_p99_s)
            shares = (bench.be_efficiency(result, base) for base in (Scenario.S1, Scenario.S2))
            yield name_of(bench, result), points, *map(ms, times), *map(ratio, shares)


def _details(bench: BenchResult, result: ScenarioResult) -> dict[str, Any]:
    client = result.client
    version = f"version {result.server_version}, " if result.server_version else ""
    sent = (("real-time", result.rt_digest), ("best-effort", result.be_digest))
    digests = ", ".join(f"{kind} {digest[:12]}" for kind, digest in sent if digest) or NOTHING
    texts = [
        f"{result.scenario.label}; server {result.target}, {version}spoken to as {result.dialect}",
        f"Requests sent: {digests}",
        f"Client: sent {ms(client.lateness_p50_s)} ms late at the median, "
        f"{ms(client.lateness_p99_s)} ms at p99, {ms(client.lateness_max_s)} ms at most; "
        f"{100 * client.cpu_share:.1f} % of the cores",
    ]
    loads = [load for load in (result.rt_load, result.be_load) if load]
    texts += [f"Load: {'; '.join(loads)}"] if loads else []
    return {
        "name": name_of(bench, result),
        "texts": texts,
        "parts": [
            {
                "name": CLASS_NAMES[service_class].capitalize(),
                "texts": list(_class_texts(part)),
                "latencies": list(_latencies(part)),
            }
            for service_class, part in result.metrics.by_class.items()
            if part.requests
        ],
    }


def _class_texts(part: ClassMetrics) -> Iterator[str]:
    yield f"{part.requests} requests in the window: {counts(part)}"
    yield (
        f"{part.requests_per_s:.3g} requests/s, {part.prompt_tokens_per_s:.0f} prompt and "
        f"{part.output_tokens_per_s:.0f} output tokens/s"
    )
    if part.goodput_per_s is not None:
        yield f"Goodput: {part.goodput_per_s:.3g} requests/s within their objectives"
    if part.tokens_on_time.decided:
        yield f"{percent(part.tokens_on_time)} % of tokens within the objective of their own"
    if part.cached_tokens is not None:
        yield f"{part.cached_tokens} of {part.prompt_tokens} prompt tokens were cached"
    if part.tiers:
        found = ", ".join(f"{count} x {tier}" for tier, count in part.tiers.items())
        yield f"Service tiers named by the answers: {found}"


def _latencies(part: ClassMetrics) -> Iterator[Sequence[str]]:
    summaries: Sequence[tuple[str, Summary]] = (
        ("TTFT", part.ttft_s),
        ("TPOT", part.tpot_s),
        ("ITL", part.itl_s),
        ("latency per token", part.normalized_latency_s),
        ("end to end", part.e2e_s),
    )
    for name, found in summaries:
        times = (found.mean, found.std, found.p50, found.p90, found.p95, found.p99)
        yield name, str(found.count), *map(ms, times)
