"""The files of a comparison: JSON, CSV, PNG and HTML."""

from __future__ import annotations

import base64
import csv
import importlib.resources
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from warnings import catch_warnings, filterwarnings

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from bros.bench.client import Outcome, Record
from bros.bench.metrics import (
    ATTAINMENTS,
    ClassMetrics,
    Window,
    confidence_interval,
    finish_s,
    judge,
    output_tokens,
    prompt_tokens,
)
from bros.bench.report.plots import DARK, LIGHT, figures
from bros.bench.report.terminal import COLUMNS, TENANT_COLUMNS, cells, tenant_rows
from bros.bench.report.words import (
    CLASS_NAMES,
    NOTHING,
    all_objectives,
    capacity,
    counts,
    file_name,
    interval_percent,
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
from bros.bench.results import (
    BadResultsError,
    BenchResult,
    CapacityResult,
    Command,
    Scenario,
    ScenarioResult,
)
from bros.core.request import ServiceClass, Slo
from bros.workload.attainment import Summary

# ---- The HTML page, which is self-contained: pictures are inlined, there are no scripts or fonts.


class PageRow(NamedTuple):
    """A row of the table of commands.

    values: one per command, in their order.
    """

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def rows_of_commands(bench: BenchResult) -> list[PageRow]:
    """One column per command: its runs, its environment, its options."""
    columns = [dict(_column(bench, command)) for command in bench.commands]
    names = dict.fromkeys(name for column in columns for name in column)
    return [PageRow(name, tuple(column.get(name, NOTHING) for column in columns)) for name in names]


def _column(bench: BenchResult, command: Command) -> Iterator[tuple[str, str]]:
    environment = command.environment
    memory = environment.memory_bytes
    runs = [run for run in ordered(bench) if run.command == command]
    versions = {f"{run.target} {run.server_version}": None for run in runs if run.server_version}
    yield "runs", _names(bench, runs)
    yield "date", environment.date
    yield "server version", ", ".join(versions) or NOTHING
    since = dict.fromkeys(f"when a request was {run.metrics.times_from}" for run in runs)
    yield "latencies count from", ", ".join(since) or NOTHING
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
    """The first 12 digits, and the plus of a modified tree."""
    if commit is None:
        return NOTHING
    return commit.rstrip("+")[:12] + "+" * commit.endswith("+")


def page(bench: BenchResult) -> str:
    """Complete HTML with plots for light and dark mode; page.html is its template."""
    light = figures(bench, LIGHT)
    return _page(bench, light, _as_pngs(light))


def _page(bench: BenchResult, light: Mapping[str, Figure], pictures: Mapping[str, bytes]) -> str:
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
        plots=_plots(bench, light, pictures),
        columns=[column.replace("\n", " ") for column in COLUMNS],
        tenant_columns=[column.replace("\n", " ") for column in TENANT_COLUMNS],
        tenants=[(name_of(bench, run), *row) for run, row in tenant_rows(bench)],
        runs=[(name_of(bench, run), *cells(bench, run)) for run in runs],
        starts=[n for n in range(1, len(runs)) if runs[n].rt_rate != runs[n - 1].rt_rate],
        scenarios=[f"{s}: {s.label}" for s in Scenario if any(r.scenario is s for r in runs)],
        notes=[f"{name_of(bench, run)}: {note}" for run in runs for note in run.notes],
        capacities=[_capacity(bench, found) for found in bench.capacities],
        taxes=list(_taxes(bench)),
        details=[_details(bench, run) for run in runs],
        commands=[f"command{number if len(numbers) > 1 else ''}" for number in numbers],
        settings=[(row.name, *row.values) for row in commands],
        # Rows that differ between commands are highlighted.
        marked=[number for number, row in enumerate(commands) if row.differs],
    )


def _plots(
    bench: BenchResult, light: Mapping[str, Figure], pictures: Mapping[str, bytes]
) -> dict[str, list[dict[str, str]]]:
    """Heading -> plots: the measurements, then the servers' own metrics."""
    dark = _as_pngs(figures(bench, DARK))
    found: dict[str, list[dict[str, str]]] = {"Plots": [], "Server metrics": []}
    for name, figure in light.items():
        heading = "Server metrics" if name.startswith("timeline") else "Plots"
        picture = {"light": _data_url(pictures[name]), "dark": _data_url(dark[name])}
        found[heading].append({**picture, "title": figure.get_suptitle()})
    return found


def _as_pngs(plots: Mapping[str, Figure]) -> dict[str, bytes]:
    """Each as a PNG."""
    return {name: _png(figure) for name, figure in plots.items()}


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    with catch_warnings():
        # A line for each character that the font does not have; the tables show the names.
        filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(file, format="png")
    return file.getvalue()


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _capacity(bench: BenchResult, found: CapacityResult) -> dict[str, Any]:
    return {
        "words": capacity(bench, found),
        "name": server_name(bench, found.target, found.policy),
        "asked": f"{100 * found.asked:g}",
        "rows": [
            (
                f"{tried.rate:g}",
                percent(tried.both_met),
                interval_percent(tried.both_met),
                tried.both_met.decided,
                "yes" if tried.meets(found.asked) else "no",
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
        f"{result.scenario.label}; server {result.target}, {version}dialect {result.dialect}",
        f"Digests of the requests: {digests}",
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
            if part.took_part
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
        yield f"{percent(part.tokens_on_time)} % of tokens on time"
    if part.cached_tokens is not None:
        yield f"{part.cached_tokens} of {part.prompt_tokens} prompt tokens were cached"
    if part.tiers:
        found = ", ".join(f"{count} x {tier}" for tier, count in part.tiers.items())
        yield f"Service tiers of the responses: {found}"


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


Row = dict[str, Any]

_SUMMARIES = ("ttft", "tpot", "gap", "itl", "normalized_latency", "e2e")
_STATISTICS = ("mean", "std", "p50", "p90", "p95", "p99")
_SHARES = (*ATTAINMENTS, "tokens_on_time")
_PLAIN = (
    *("requests", "outside", "unsent", "relegated", "overdue", "goodput_per_s", "requests_per_s"),
    *("prompt_tokens_per_s", "output_tokens_per_s", "tokens_per_s"),
    *("prompt_tokens", "output_tokens", "cached_tokens"),
)
REQUEST_COLUMNS = (
    *("name", "class", "outcome", "status", "tier", "finish_reason", "due_s", "sent_s"),
    *("first_s", "last_s", "end_s", "prompt_tokens", "output_tokens", "cached_tokens", "pieces"),
    *("ttft_s", "tpot_s", "gap_s", "ttft_met", "tpot_met", "both_met", "gap_met"),
    *("in_window", "detail"),
)


def write_report(folder: Path, bench: BenchResult) -> list[Path]:
    """result.json, summary.csv, report.html and a PNG for each plot; returns their paths.

    Creates the folder and replaces existing files. Plots and request files of runs that are no
    longer part of the result are removed if the previous result.json lists them. Raises OSError.
    """
    light = figures(bench, LIGHT)
    pictures = _as_pngs(light)
    paths = save_result(folder, bench, plots=[f"{name}.png" for name in pictures])
    paths.append(folder / "report.html")
    paths[-1].write_text(_page(bench, light, pictures), encoding="utf-8")
    for name, png in pictures.items():
        paths.append(folder / f"{name}.png")
        paths[-1].write_bytes(png)
    return paths


def save_result(folder: Path, bench: BenchResult, plots: Sequence[str] | None = None) -> list[Path]:
    """Write only result.json and summary.csv, which takes milliseconds; returns their paths.

    plots: names of the plot files that belong to the result; None: those of the previous one.
    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = _previous_files(folder)
    if plots is None:
        plots = sorted(name for name in before if name.endswith(".png"))
    files = (*plots, *(requests_file_name(result) for result in bench.results))
    for name in before - set(files):
        (folder / name).unlink(missing_ok=True)
    path = folder / "result.json"
    path.write_text(replace(bench, files=files).to_json(), encoding="utf-8")
    return [path, write_summary(folder / "summary.csv", bench)]


def read_result(folder: Path) -> BenchResult:
    """Raises OSError, UnicodeDecodeError or BadResultsError."""
    return BenchResult.from_json((folder / "result.json").read_text(encoding="utf-8"))


def _previous_files(folder: Path) -> set[str]:
    """The files that the result.json in the folder lists."""
    try:
        names = read_result(folder).files
    except (OSError, UnicodeDecodeError, BadResultsError):
        return set()
    return {name for name in names if re.fullmatch(r"[A-Za-z0-9_.-]+\.(png|csv)", name)}


def write_summary(path: Path, bench: BenchResult) -> Path:
    """A line per run and class. Missing values are empty cells."""
    rows = [
        _summary_row(bench, result, service_class)
        for result in ordered(bench)
        for service_class in ServiceClass
    ]
    return _write(path, rows, list(rows[0]) if rows else [])


def write_requests(path: Path, records: Sequence[Record], slo: Slo, window: Window) -> Path:
    """A line per request of one run, in or outside the window. Missing values are empty cells."""
    return _write(path, [_request_row(record, slo, window) for record in records], REQUEST_COLUMNS)


def requests_file_name(result: ScenarioResult) -> str:
    """`requests_S3_bros_0.5.csv`, unique within a comparison."""
    parts = (result.scenario, result.target, result.policy, result.rt_rate)
    text = "_".join(str(part) for part in parts if part is not None)
    return f"requests_{file_name(text)}.csv"


def _summary_row(bench: BenchResult, result: ScenarioResult, service_class: ServiceClass) -> Row:
    part = result.metrics.by_class[service_class]
    best_effort = service_class is ServiceClass.BE
    return {
        "scenario": result.scenario.value,
        "label": result.scenario.label,
        "target": result.target,
        "dialect": result.dialect,
        "policy": result.policy,
        "rt_rate": result.rt_rate,
        "class": service_class.value,
        **_class_cells(part),
        "slowdown": None if best_effort else result.slowdown,
        "be_share_of_s1": bench.be_efficiency(result, Scenario.S1) if best_effort else None,
        "be_share_of_s2": bench.be_efficiency(result, Scenario.S2) if best_effort else None,
        "client_fell_behind": result.client.fell_behind,
        "client_cpu_share": result.client.cpu_share,
        "rt_digest": result.rt_digest,
        "be_digest": result.be_digest,
        "slo_ttft_s": result.command.slo.ttft_s,
        "slo_tpot_s": result.command.slo.tpot_s,
        "seed": result.command.seed,
        "date": result.command.environment.date,
        "commit": result.command.environment.commit,
        "server_version": result.server_version,
    }


def _class_cells(part: ClassMetrics) -> Row:
    row: Row = {name: getattr(part, name) for name in _PLAIN}
    row |= {outcome.value: part.outcomes[outcome] for outcome in Outcome}
    for name in _SHARES:
        share = getattr(part, name)
        row |= {name: share.met, f"{name}_of": share.decided}
        if name in ATTAINMENTS:
            low, high = confidence_interval(share) or (None, None)
            row |= {f"{name}_low": low, f"{name}_high": high}
    for name in _SUMMARIES:
        summary: Summary = getattr(part, f"{name}_s")
        row |= {f"{name}_{which}_s": getattr(summary, which) for which in _STATISTICS}
    return row


def _request_row(record: Record, slo: Slo, window: Window) -> Row:
    real_time = record.planned.service_class is ServiceClass.RT
    judged = judge(record, slo if real_time else None, window.until_s)
    times = record.chunk_times_s
    return {
        "name": record.planned.name,
        "class": record.planned.service_class.value,
        "outcome": record.outcome.value,
        "status": record.status,
        "tier": record.tier,
        "finish_reason": record.finish_reason,
        "due_s": record.due_s,
        "sent_s": record.sent_s,
        "first_s": times[0] if times else None,
        "last_s": finish_s(record) if times else None,
        "end_s": record.end_s,
        "prompt_tokens": prompt_tokens(record),
        "output_tokens": output_tokens(record),
        "cached_tokens": record.cached_tokens,
        "pieces": len(times),
        "ttft_s": judged.ttft_s,
        "tpot_s": judged.tpot_s,
        "gap_s": judged.gap_s,
        "ttft_met": judged.ttft_met,
        "tpot_met": judged.tpot_met,
        "both_met": judged.both_met,
        "gap_met": judged.gap_met,
        "in_window": record.due_s in window,
        "detail": record.detail,
    }


def _write(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path
