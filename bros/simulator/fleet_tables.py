"""Reports of runs on several replicas as tables for the terminal, 100 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bros.core.request import ServiceClass
from bros.simulator.fleet_build import FleetScenario
from bros.simulator.fleet_metrics import FleetReport

FleetRow = tuple[FleetScenario, FleetReport]
_NOTHING = "-"


def print_fleet_reports(console: Console, rows: Sequence[FleetRow]) -> None:
    """One table per load and policy, in the order of the rows: a line per router."""
    groups: dict[tuple[int, str, str], list[FleetRow]] = {}
    for scenario, report in rows:
        key = (scenario.replicas, scenario.load.label, scenario.config.policy)
        groups.setdefault(key, []).append((scenario, report))
    for (replicas, label, policy), group in groups.items():
        several = f"{replicas} replicas" if replicas > 1 else "1 replica"
        requests = group[0][1].requests
        console.print(f"[bold]{several}, {label}[/bold]: {requests} requests, policy {policy}")
        console.print(_table(group))


def _table(rows: Sequence[FleetRow]) -> Table:
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
    """How many times as long requests take with round robin: the mean, and the slowest ones."""
    if baseline is None:
        return _NOTHING, _NOTHING
    theirs, ours = baseline.latency_s, report.latency_s
    return _ratio(theirs.mean, ours.mean), _ratio(theirs.p99, ours.p99)


def _ratio(theirs: float | None, ours: float | None) -> str:
    return _short(theirs / ours) if theirs is not None and ours else _NOTHING


def _of_classes(report: FleetReport) -> tuple[str, str]:
    met = report.by_class[ServiceClass.RT].both_met
    share = None if met is None else met.value
    return (
        _NOTHING if share is None else f"{100 * share:.1f}",
        _seconds(report.by_class[ServiceClass.BE].latency_s.mean),
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.3f}" if value < 1 else _short(value)


def _short(value: float) -> str:
    """Three digits, or more where there are more before the point."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
