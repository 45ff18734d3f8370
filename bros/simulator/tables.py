"""Reports as tables for the terminal, 100 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bros.core.request import ServiceClass
from bros.simulator.build import Scenario
from bros.simulator.metrics import ClassReport, Report, Share, Summary

Row = tuple[Scenario, Report]
_NOTHING = "-"
_WIDTH = 100


def wide(console: Console | None) -> Console:
    """`console` or standard output, as wide as tables are where it is no terminal."""
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
        _print_load(console, label, group)


def _print_load(console: Console, label: str, rows: Sequence[Row]) -> None:
    scenario, first = rows[0]
    if first.by_class[ServiceClass.RT].requests:
        slo = scenario.config
        console.print(
            f"[bold]Real-time, {label}[/bold]: {first.by_class[ServiceClass.RT].requests} requests,"
            f" first token within {slo.slo_ttft:g} ms, then one every {slo.slo_tpot:g} ms"
        )
        if first.skipped:
            console.print(f"{first.skipped} more left out, too long to be served")
        console.print(_real_time(rows))
    if scenario.be.in_flight:
        how = "batches of" if scenario.be.batches else "always"
        console.print(
            f"[bold]Best-effort beside {label}[/bold]: {how} {scenario.be.in_flight} in flight"
        )
        console.print(_best_effort(rows))
    given_up = [
        f"{scenario.config.policy} {report.abandoned_steps} ({report.abandoned_s:.1f} s)"
        for scenario, report in rows
        if report.abandoned_steps
    ]
    if given_up:
        console.print(f"Steps given up for somebody's first token: {', '.join(given_up)}\n")


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


def _percent(share: Share) -> str:
    """Never 100 if one was missed."""
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
