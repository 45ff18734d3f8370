"""A comparison for the terminal, 100 columns wide."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bros.bench.report.cautions import warnings
from bros.bench.report.words import (
    NOTHING,
    all_objectives,
    capacity,
    likely_percent,
    ms,
    ordered,
    percent,
    ratio,
    short_name,
    verdict,
)
from bros.bench.results import BenchResult, Scenario, ScenarioResult

COLUMNS = (
    *("both\nmet %", "95 %\nlikely", "TTFT\nmet %", "TPOT\nmet %"),
    *("TTFT\np50 ms", "TTFT\np99 ms", "TPOT\np50 ms", "TPOT\np99 ms"),
    *("BE\ntok/s", "of S2\n%", "errors"),
)
"""Of cells(): real-time figures first, then best-effort ones."""


def print_report(console: Console, bench: BenchResult) -> None:
    """Verdict, a line per run, and what to be careful about."""
    console.print(f"[bold]{escape(verdict(bench))}[/bold]")
    console.print(f"Objectives of real-time requests: {all_objectives(bench)}", highlight=False)
    console.print(_table(bench))
    for scenario in sorted({result.scenario for result in bench.results}):
        console.print(f"{scenario}  {scenario.label}", highlight=False)
    for found in bench.capacities:
        console.print(escape(capacity(bench, found)))
    for text in warnings(bench):
        console.print(f"[yellow]warning:[/yellow] {escape(text)}", highlight=False)


def cells(bench: BenchResult, result: ScenarioResult) -> list[str]:
    """One text for each of COLUMNS."""
    rt, be = result.rt, result.be
    has_rt, has_be = bool(rt.requests), bool(be.requests)
    return [
        *(percent(rt.both_met), likely_percent(rt.both_met)),
        *(percent(rt.ttft_met), percent(rt.tpot_met)),
        *(ms(seconds) for seconds in (rt.ttft_s.p50, rt.ttft_s.p99)),
        *(ms(seconds) for seconds in (rt.tpot_s.p50, rt.tpot_s.p99)),
        f"{be.tokens_per_s:.0f}" if has_be else NOTHING,
        ratio(bench.be_efficiency(result, Scenario.S2)),
        str(rt.errors + be.errors) if has_rt or has_be else NOTHING,
    ]


def _table(bench: BenchResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("run", overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for result in ordered(bench):
        if last is None or last.rt_rate != result.rt_rate:
            table.add_section()
            if result.rt_rate is not None:
                table.add_row(f"[dim]{result.rt_rate:g} requests/s[/dim]")
        table.add_row(escape(short_name(bench, result)), *cells(bench, result))
        last = result
    return table
