"""A comparison for the terminal, 100 columns wide; narrower ones get the tables in parts."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from bros.bench.client import Outcome, Record
from bros.bench.metrics import Window, finish_s, judge, tokens_per_s
from bros.bench.report.tables import parts, print_table
from bros.bench.report.words import (
    CLASS_NAMES,
    NOTHING,
    all_objectives,
    capacity,
    interval_percent,
    ms,
    ordered,
    percent,
    ratio,
    short_name,
    verdict,
    warnings,
)
from bros.bench.results import BenchResult, Scenario, ScenarioResult
from bros.core.request import ServiceClass, Slo
from bros.workload.attainment import Attainment, Summary

COLUMNS = (
    *("both\nmet %", "95 %\nCI", "TTFT\nmet %", "TPOT\nmet %", "gap\nmet %"),
    *("TTFT\np50 ms", "TTFT\np99 ms", "TPOT\np50 ms", "TPOT\np99 ms", "slow-\ndown"),
    *("BE\ntok/s", "of S2\n%", "errors"),
)
"""Headings of cells(): real-time figures, then best-effort ones."""

TENANT_COLUMNS = (
    *("of the\nload %", "both\nmet %", "TTFT\np50 ms", "TTFT\np99 ms"),
    *("RT tok/s\n%", "BE tok/s\n%"),
)


def print_report(console: Console, bench: BenchResult) -> None:
    """Print the verdict, a line per run, and the warnings."""
    console.print(f"[bold]{escape(verdict(bench))}[/bold]")
    console.print(f"Objectives of real-time requests: {all_objectives(bench)}", highlight=False)
    print_table(console, _table(bench))
    if any(result.tenants for result in bench.results):
        print_table(console, _tenants(bench), kept=2)
    for scenario in sorted({result.scenario for result in bench.results}):
        console.print(f"{scenario}  {scenario.label}", highlight=False)
    for found in bench.capacities:
        console.print(escape(capacity(bench, found)))
    for text in warnings(bench):
        console.print(f"[yellow]warning:[/yellow] {escape(text)}", highlight=False)


def cells(bench: BenchResult, result: ScenarioResult) -> list[str]:
    """One text for each of COLUMNS."""
    rt, be = result.rt, result.be
    has_rt, has_be = bool(rt.requests), be.took_part
    return [
        *(percent(rt.both_met), interval_percent(rt.both_met)),
        *(percent(rt.ttft_met), percent(rt.tpot_met), percent(rt.gap_met)),
        *(ms(seconds) for seconds in (rt.ttft_s.p50, rt.ttft_s.p99)),
        *(ms(seconds) for seconds in (rt.tpot_s.p50, rt.tpot_s.p99)),
        NOTHING if result.slowdown is None else f"{result.slowdown:.2f}",
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


def _tenants(bench: BenchResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("tenant", overflow="fold")
    for column in TENANT_COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for run, (tenant, *figures) in tenant_rows(bench):
        table.add_row(escape(short_name(bench, run)), escape(tenant), *figures)
    return table


def tenant_rows(bench: BenchResult) -> Iterator[tuple[ScenarioResult, list[str]]]:
    """What each tenant got in each run: its name, and one text for each of TENANT_COLUMNS."""
    for result in ordered(bench):
        totals = [
            sum(getattr(each, name) for each in result.tenants)
            for name in ("rt_tokens_per_s", "be_tokens_per_s")
        ]
        for each in result.tenants:
            parts = zip((each.rt_tokens_per_s, each.be_tokens_per_s), totals, strict=True)
            yield (
                result,
                [
                    each.name,
                    f"{100 * each.share:.0f}",
                    percent(each.both_met),
                    ms(each.ttft_s.p50),
                    ms(each.ttft_s.p99),
                    *(f"{100 * rate / total:.1f}" if total else NOTHING for rate, total in parts),
                ],
            )


# ---- Progress during a run: a panel on a terminal, else a line from time to time.


LINE_INTERVAL_S = 10.0
"""Interval of progress lines without a terminal."""

_PANEL_EDGES = 4  # characters

_RECENT_S = 30.0
"""Period over which rates are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassProgress:
    """One class so far.

    tokens_per_s: prompt and output, over the last _RECENT_S.
    """

    running: int
    completed: int
    errors: int
    ttft_s: Summary
    tpot_s: Summary
    both_met: Attainment
    tokens_per_s: float


class _Seen:
    """The requests of one class. Each is judged once when it has ended, so that an update of a long
    run does not hold up what the client sends and receives."""

    def __init__(self, slo: Slo | None) -> None:
        self._slo = slo
        self._open: list[Record] = []
        self._recent: list[Record] = []  # that have ended, but count for the rates
        self._ttft_s, self._tpot_s = array("d"), array("d")
        self._met = Attainment(0, 0)
        self._completed = 0
        self._errors = 0

    def progress(self, added: Sequence[Record], elapsed_s: float) -> ClassProgress:
        """added: the requests that came due since the last call."""
        known = [*self._open, *added]
        self._open = [record for record in known if record.outcome is Outcome.OPEN]
        ended = [record for record in known if record.outcome is not Outcome.OPEN]
        ttft_s, tpot_s, met = self._judged(ended, elapsed_s)
        self._ttft_s.extend(ttft_s)
        self._tpot_s.extend(tpot_s)
        self._met = Attainment.total([self._met, met])
        completed = sum(record.outcome is Outcome.COMPLETED for record in ended)
        self._completed += completed
        self._errors += len(ended) - completed
        since_s = max(0.0, elapsed_s - _RECENT_S)
        recent = [r for r in (*self._recent, *ended) if (finish_s(r) or 0.0) >= since_s]
        self._recent = recent
        rates = (0.0, 0.0)
        if elapsed_s > 0:
            rates = tokens_per_s([*recent, *self._open], Window(since_s, elapsed_s))
        ttft_s, tpot_s, met = self._judged(self._open, elapsed_s)
        return ClassProgress(
            running=sum(record.sent_s is not None for record in self._open),
            completed=self._completed,
            errors=self._errors,
            ttft_s=Summary.of(self._ttft_s + array("d", ttft_s)),
            tpot_s=Summary.of(self._tpot_s + array("d", tpot_s)),
            both_met=Attainment.total([self._met, met]),
            tokens_per_s=sum(rates),
        )

    def _judged(
        self, records: Sequence[Record], elapsed_s: float
    ) -> tuple[list[float], list[float], Attainment]:
        """(TTFTs, TPOTs, attainment of both objectives)"""
        judged = [judge(record, self._slo, elapsed_s) for record in records]
        return (
            [j.ttft_s for j in judged if j.ttft_s is not None],
            [j.tpot_s for j in judged if j.tpot_s is not None],
            Attainment.of([j.both_met for j in judged]),
        )


class LiveView:
    """Shows progress; a context manager.

    It draws only in `update`, in the caller's thread: call `update` about once a second.
    """

    def __init__(self, console: Console, title: str, slo: Slo) -> None:
        self._console = console
        self._title = title
        self._seen = {ServiceClass.RT: _Seen(slo), ServiceClass.BE: _Seen(None)}
        self._num_seen = 0
        self._live: Live | None = None
        self._next_line_s = LINE_INTERVAL_S
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, elapsed_s: float, duration_s: float, records: Sequence[Record]) -> None:
        """Show the progress after elapsed_s of the run's duration_s.

        records: those of the last call, and behind them the ones that have come due since then.
        """
        if self._live is None and elapsed_s < self._next_line_s:
            return
        added = records[self._num_seen :]
        self._num_seen = len(records)
        found = {}
        for service_class, seen in self._seen.items():
            part = [record for record in added if record.planned.service_class is service_class]
            now = seen.progress(part, elapsed_s)
            if now.running or now.completed or now.errors:
                found[service_class] = now
        if self._live is not None:
            panel = _panel(self._console, self._title, elapsed_s, duration_s, found)
            self._live.update(panel, refresh=True)
            return
        self._next_line_s = elapsed_s - elapsed_s % LINE_INTERVAL_S + LINE_INTERVAL_S
        text = _line(self._title, elapsed_s, duration_s, found)
        self._console.print(escape(text), highlight=False, soft_wrap=True)


def _panel(
    console: Console,
    title: str,
    elapsed_s: float,
    duration_s: float,
    found: dict[ServiceClass, ClassProgress],
) -> Panel:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in (
        *("running", "done", "errors", "both\nmet %", "TTFT\np50 ms", "TTFT\np99 ms"),
        *("TPOT\np50 ms", "TPOT\np99 ms", "tokens\nper s"),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for service_class, now in found.items():
        errors = f"[bold red]{now.errors}[/bold red]" if now.errors else "0"
        table.add_row(
            CLASS_NAMES[service_class],
            str(now.running),
            str(now.completed),
            errors,
            percent(now.both_met),
            *map(ms, (now.ttft_s.p50, now.ttft_s.p99, now.tpot_s.p50, now.tpot_s.p99)),
            f"{now.tokens_per_s:.0f}",
        )
    bar = ProgressBar(total=duration_s, completed=min(elapsed_s, duration_s))
    clock = f"{elapsed_s:.0f} of {duration_s:.0f} s"
    tables = parts(console, table, width=console.width - _PANEL_EDGES)
    return Panel(Group(bar, *tables), title=escape(title), subtitle=clock, title_align="left")


def _line(
    title: str, elapsed_s: float, duration_s: float, found: dict[ServiceClass, ClassProgress]
) -> str:
    parts = [f"{title}: {elapsed_s:.0f} of {duration_s:.0f} s"]
    for service_class, now in found.items():
        text = (
            f"{CLASS_NAMES[service_class]} {now.completed} done, {now.running} running, "
            f"{now.errors} errors, {now.tokens_per_s:.0f} tokens/s, "
            f"TTFT {ms(now.ttft_s.p50)} ms, TPOT {ms(now.tpot_s.p50)} ms"
        )
        if percent(now.both_met) != NOTHING:
            text += f", both met {percent(now.both_met)} %"
        parts.append(text)
    return "; ".join(parts)
