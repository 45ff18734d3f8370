"""Reports as tables for the terminal, 100 columns wide; narrower ones get the tables in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bros.bench.report.tables import print_table
from bros.core.errors import ConfigError
from bros.core.files import expand_user
from bros.core.request import ServiceClass
from bros.simulator.fleet import FleetReport, FleetScenario
from bros.simulator.metrics import ClassReport, Report
from bros.simulator.program_simulation import ProgramReport, ProgramScenario
from bros.simulator.programs import PROGRAMS
from bros.simulator.simulation import SimulatedScenario
from bros.workload.attainment import Attainment, Summary

Row = tuple[SimulatedScenario, Report]
_NOTHING = "-"
_WIDTH = 100


def table_console(console: Console | None) -> Console:
    """`console` or standard output; without a terminal it is as wide as the tables."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def print_reports(console: Console, rows: Sequence[Row]) -> None:
    """One block per load, in the order of the rows: a table per class, a line per policy."""
    loads: dict[str, list[Row]] = {}
    for scenario, report in rows:
        loads.setdefault(scenario.rt.label, []).append((scenario, report))
    for label, group in loads.items():
        _print_load(console, escape(label), group)


def _print_load(console: Console, label: str, rows: Sequence[Row]) -> None:
    """label: with brackets escaped."""
    scenario, first = rows[0]
    if first.by_class[ServiceClass.RT].requests:
        slo = scenario.config
        console.print(
            f"[bold]Real-time, {label}[/bold]: {first.by_class[ServiceClass.RT].requests} requests,"
            f" first token within {slo.slo_ttft:g} ms, then one every {slo.slo_tpot:g} ms"
        )
        if first.skipped:
            console.print(f"{first.skipped} more were left out as too long")
        print_table(console, _real_time(rows))
    elif first.skipped:
        console.print(
            f"[bold]Real-time, {label}[/bold]: all {first.skipped} requests were left out as too "
            "long\n"
        )
    if scenario.be.in_flight:
        how = "batches of" if scenario.be.batches else "always"
        console.print(
            f"[bold]Best-effort beside {label}[/bold]: {how} {scenario.be.in_flight} in flight"
        )
        print_table(console, _best_effort(rows))
    gaps = [
        f"{scenario.config.policy} {_percent(met)} %"
        for scenario, report in rows
        if (met := report.by_class[ServiceClass.RT].gap_met).decided
    ]
    if gaps:
        console.print(f"Real-time requests without a longer gap than allowed: {', '.join(gaps)}\n")
    slowdowns = [
        f"{scenario.config.policy} {found.mean:.2f} (median {found.p50:.2f})"
        for scenario, report in rows
        if (found := report.by_class[ServiceClass.RT].slowdown).mean is not None
    ]
    if slowdowns:
        console.print(
            "Time per token of real-time requests, in times of that without best-effort work: "
            f"{', '.join(slowdowns)}\n"
        )
    suspended = [
        f"{scenario.config.policy} {report.suspended_steps} ({report.suspended_s:.1f} s, of which "
        f"{report.lost_s:.1f} s were lost)"
        for scenario, report in rows
        if report.suspended_steps
    ]
    if suspended:
        console.print(f"Steps suspended for a first token: {', '.join(suspended)}\n")


def _real_time(rows: Sequence[Row]) -> Table:
    table = _table(
        *("finished", "open", "refused", "TTFT\nmet %", "TPOT\nmet %", "both\nmet %"),
        *("TTFT\np50 ms", "TTFT\np99 ms", "TPOT\np50 ms", "TPOT\np99 ms", "ms per\ntoken"),
    )
    for scenario, report in rows:
        part = report.by_class[ServiceClass.RT]
        table.add_row(
            scenario.config.policy,
            *_counts(part),
            *(_percent(share) for share in (part.ttft_met, part.tpot_met, part.both_met)),
            *_percentiles(part.ttft_s),
            *_percentiles(part.tpot_s),
            _ms(part.normalized_latency_s),
        )
    return table


def _best_effort(rows: Sequence[Row]) -> Table:
    table = _table(
        *("finished", "open", "refused", "requests\nper s", "tokens\nper s", "output\nper s"),
        *("ms per\ntoken", "preemp-\ntions", "busy\n%", "step\nms"),
    )
    for scenario, report in rows:
        part = report.by_class[ServiceClass.BE]
        table.add_row(
            scenario.config.policy,
            *_counts(part),
            f"{part.requests_per_s:.2f}",
            f"{part.tokens_per_s:.0f}",
            f"{part.output_tokens_per_s:.0f}",
            _ms(part.normalized_latency_s),
            str(part.preemptions),
            f"{100 * report.busy:.0f}",
            _ms(report.mean_step_s),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _counts(part: ClassReport) -> tuple[str, str, str]:
    return str(part.finished), str(part.unfinished), str(part.refused)


def _percent(share: Attainment) -> str:
    """Rounded down: never 100 if one was missed."""
    if share.value is None:
        return _NOTHING
    tenths = share.met * 1000 // share.decided
    return f"{tenths / 10:.1f}"


def _percentiles(summary: Summary) -> tuple[str, str]:
    return _ms(summary.p50), _ms(summary.p99)


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    ms = 1000 * seconds
    return f"{ms:.1f}" if ms < 99.95 else f"{ms:.0f}"


# ---- Tables of runs on several replicas.


FleetRow = tuple[FleetScenario, FleetReport]


def print_fleet_reports(console: Console, rows: Sequence[FleetRow]) -> None:
    """One table per load and policy, in the order of the rows: a line per router."""
    groups: dict[tuple[int, str, str], list[FleetRow]] = {}
    for scenario, report in rows:
        key = (scenario.replicas, scenario.load.label, scenario.config.policy)
        groups.setdefault(key, []).append((scenario, report))
    for (replicas, label, policy), group in groups.items():
        several = f"{replicas} replicas" if replicas > 1 else "1 replica"
        requests = group[0][1].requests
        console.print(
            f"[bold]{several}, {escape(label)}[/bold]: {requests} requests, policy {policy}"
        )
        print_table(console, _fleet_table(group))
        refused = [
            f"{scenario.router} {report.requests - report.finished}"
            for scenario, report in group
            if report.finished < report.requests
        ]
        if refused:
            counts = ", ".join(refused)
            console.print(f"Refused by all replicas, and in no latency above: {counts}")


def _fleet_table(rows: Sequence[FleetRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("router", no_wrap=True, vertical="bottom")
    mixed = rows[0][0].classes
    for column in (
        *("latency\nmean s", "p99 s", "x faster\nthan rr\nmean", "p99"),
        *("TTFT\np50 s", "p99 s", "cached\n%", "busy\n%", "most/\nmean", "req\nper s"),
        *(("RT\nmet %", "BE\nmean s") if mixed else ()),
    ):
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    baseline = next((report for scenario, report in rows if scenario.router == "rr"), None)
    for scenario, report in rows:
        table.add_row(
            scenario.router,
            _seconds(report.latency_s.mean),
            _seconds(report.latency_s.p99),
            *_times_faster(report, baseline),
            _seconds(report.ttft_s.p50),
            _seconds(report.ttft_s.p99),
            f"{100 * report.hits:.1f}",
            f"{100 * report.busy:.0f}",
            f"{report.balance:.2f}",
            _short(report.requests_per_s),
            *(_of_classes(report) if mixed else ()),
        )
    return table


def _times_faster(report: FleetReport, baseline: FleetReport | None) -> tuple[str, str]:
    """The speed-up over round robin in mean and p99 latency."""
    if baseline is None:
        return _NOTHING, _NOTHING
    theirs, ours = baseline.latency_s, report.latency_s
    return _ratio(theirs.mean, ours.mean), _ratio(theirs.p99, ours.p99)


def _ratio(theirs: float | None, ours: float | None) -> str:
    return _short(theirs / ours) if theirs is not None and ours else _NOTHING


def _of_classes(report: FleetReport) -> tuple[str, str]:
    met = report.by_class[ServiceClass.RT].both_met
    return (
        _NOTHING if met is None else _percent(met),
        _seconds(report.by_class[ServiceClass.BE].latency_s.mean),
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.3f}" if value < 1 else _short(value)


def _short(value: float) -> str:
    """Three significant digits, or more for large numbers."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


# ---- Tables of programs.


ProgramRow = tuple[ProgramScenario, ProgramReport]


def print_program_reports(console: Console, rows: Sequence[ProgramRow]) -> None:
    """One table per program, load of chats and policy, in the order of the rows. `x faster` is the
    latency of calls on the same replicas, divided by this one."""
    groups: dict[tuple[str, str, str], list[ProgramRow]] = {}
    for scenario, report in rows:
        key = (scenario.program, scenario.chats.label, scenario.config.policy)
        groups.setdefault(key, []).append((scenario, report))
    for (name, chats, policy), group in groups.items():
        slo = group[0][0].config
        console.print(f"[bold]{name}[/bold]: {PROGRAMS[name].title}; policy {policy}")
        console.print(
            f"chats beside: {escape(chats)}, first token within {slo.slo_ttft:g} ms, then one "
            f"every {slo.slo_tpot:g} ms"
        )
        print_table(console, _program_table(group), kept=2)


def _program_table(rows: Sequence[ProgramRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("replicas", "run as"):
        table.add_column(column, no_wrap=True, vertical="bottom")
    for column in (
        *("pro-\ngrams", "per s", "latency\nmean s", "p99 s", "x faster\nmean", "p99"),
        *("chats\nmet %", "tokens\nper s", "output\nper s", "cached\n%"),
    ):
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    calls = {_place(scenario): report for scenario, report in rows if scenario.way == "calls"}
    for scenario, report in rows:
        baseline = calls.get(_place(scenario))
        theirs, ours = baseline and baseline.latency_s, report.latency_s
        table.add_row(
            _place(scenario),
            scenario.way,
            str(report.programs),
            f"{scenario.rate:g}",
            _seconds(ours.mean),
            _seconds(ours.p99),
            _ratio(theirs.mean, ours.mean) if theirs else _NOTHING,
            _ratio(theirs.p99, ours.p99) if theirs else _NOTHING,
            _NOTHING if report.chats_met.value is None else _percent(report.chats_met),
            f"{report.prompt_tokens_per_s + report.output_tokens_per_s:.0f}",
            f"{report.output_tokens_per_s:.0f}",
            f"{100 * report.cached:.1f}",
        )
    return table


def _place(scenario: ProgramScenario) -> str:
    """`4, e2`, or `1`."""
    if scenario.replicas == 1:
        return "1"
    return f"{scenario.replicas}, {scenario.router}"


# ---- The output file and the progress bar of `bros simulate`.


def writable(text: str | None) -> Path | None:
    """The path of --json. Raises ConfigError before minutes of work, not after them."""
    if text is None:
        return None
    path = expand_user(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"--json: {text} cannot be written: its folder does not exist, or it is a folder"
        )
    return path


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def progress_bar(runs: int, text: str = "simulating") -> Iterator[Callable[[int, float], None]]:
    """A bar on stderr while the block runs, if stderr is a terminal."""
    shares = [0.0] * runs
    columns = (TextColumn(text), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(text, total=runs)

        def on_progress(index: int, share: float) -> None:
            shares[index] = share
            bar.update(task, completed=sum(shares))

        yield on_progress
