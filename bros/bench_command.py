"""`bros bench`: policies or servers compared under a hybrid load."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console

from bros.bench.dialects import dialect_of
from bros.bench.load import OnProgress
from bros.bench.local_server import local_server
from bros.bench.planning import (
    Case,
    Range,
    cases_of_policy,
    cases_of_target,
    find_capacity,
    mixed_scenario,
)
from bros.bench.report.files import (
    read_result,
    requests_file_name,
    write_report,
    write_requests,
)
from bros.bench.report.terminal import LiveView, print_report
from bros.bench.results import BadResultsError, BenchResult, CapacityResult, Scenario
from bros.bench.running import Run, Runner, Target
from bros.bench.settings import Settings, read_settings
from bros.core.clock import Clock
from bros.core.errors import ConfigError
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.simulator.metrics import Share
from bros.simulator.tables import wide
from bros.text.tokenizer import Tokenizer


def run_bench(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
    clock: Clock,
    console: Console | None = None,
) -> int:
    """Measure, print the report and write its files; returns the exit status.

    The files are written anew after every run, so that an interrupted comparison keeps what it
    has. Raises ConfigError for a wrong option, NoServerError, ServerStartError or ModelError.
    """
    console = wide(console)
    if args.bench_report_only is not None:
        folder = Path(args.bench_report_only).expanduser()
        result = _read("--report-only", folder)
        write_report(folder, result)
    else:
        settings = read_settings(args, environ, warn, clock)
        folder, result = settings.out, _measure(settings, clock, console)
    print_report(console, result)
    console.print(f"The report is in {folder}/report.html", highlight=False)
    return 0


def _measure(settings: Settings, clock: Clock, console: Console) -> BenchResult:
    data_dir = settings.config.server.data_dir
    cache_dir = Path(data_dir).expanduser() if data_dir else default_cache_dir()
    files = resolve_model(settings.config.engine.model, cache_dir, console.print)
    bench = _Bench(settings, Tokenizer.load(files.folder), clock, console)
    asyncio.run(bench.run())
    return bench.result


def _read(flag: str, folder: Path) -> BenchResult:
    try:
        return read_result(folder)
    except (OSError, UnicodeDecodeError, BadResultsError) as error:
        raise ConfigError(f"{flag}: the result.json in {folder} cannot be used: {error}") from None


class _Bench:
    """The runs of one command and what has come of them so far."""

    def __init__(
        self, settings: Settings, tokenizer: Tokenizer, clock: Clock, console: Console
    ) -> None:
        self._settings = settings
        self._command = settings.measuring.command
        self._tokenizer = tokenizer
        self._clock = clock
        self._console = console
        self.result = BenchResult(results=())
        if settings.append and (settings.out / "result.json").exists():
            self.result = _read("--append", settings.out)

    async def run(self) -> None:
        """Raises NoServerError, ServerStartError or ConfigError."""
        async for target, cases in self._targets():
            runner = Runner(
                target,
                self._settings.wanted,
                self._settings.measuring,
                self._tokenizer,
                self._clock,
                self._view,
            )
            for case in cases:
                if case.scenario is not Scenario.S2 or self._settings.wanted.in_flight:
                    self._take(await runner.run(case))
            if self._settings.capacity is not None:
                await self._search(runner, target, *self._settings.capacity)

    async def _targets(self) -> AsyncIterator[tuple[Target, list[Case]]]:
        """Every server with its cases, while it runs."""
        settings = self._settings
        if settings.target is not None:
            classes = dialect_of(settings.target.dialect).has_classes
            yield (
                settings.target,
                cases_of_target(settings.rates, settings.scenarios, has_classes=classes),
            )
            return
        for policy in settings.policies:
            cases = cases_of_policy(policy, settings.policies, settings.rates, settings.scenarios)
            if not cases and settings.capacity is None:
                continue
            self._console.print(f"Starting bros with --policy {policy} ...", highlight=False)
            arguments = (*settings.server_arguments, "--policy", policy)
            async with local_server(arguments) as url:
                key = settings.config.server.api_key
                yield (
                    Target(url=url, name="bros", dialect="bros", policy=policy, api_key=key),
                    cases,
                )

    async def _search(self, runner: Runner, target: Target, asked: float, tried: Range) -> None:
        classes = dialect_of(target.dialect).has_classes
        scenario = mixed_scenario(target.policy, has_classes=classes)

        async def attempt(rate: float) -> Share:
            run = await runner.run(Case(scenario, rate))
            self._take(run)
            return run.result.rt.both_met

        found = await find_capacity(attempt, tried, asked)
        capacity = CapacityResult(
            command=self._command,
            target=target.name,
            policy=target.policy,
            asked=asked,
            rate=found.rate,
            tried=found.tried,
        )
        self.result = self.result.with_capacity(capacity)
        self._write()

    def _take(self, run: Run) -> None:
        self.result = self.result.with_run(run.result)
        self._write()
        path = self._settings.out / requests_file_name(run.result)
        write_requests(path, run.records, self._command.slo, run.window)
        for note in run.notes:
            self._console.print(f"note: {note}", highlight=False)

    def _write(self) -> None:
        write_report(self._settings.out, self.result)

    @contextlib.contextmanager
    def _view(self, title: str) -> Iterator[OnProgress]:
        with LiveView(self._console, title, self._command.slo) as live:
            yield lambda elapsed_s, records: live.update(
                elapsed_s, self._settings.wanted.duration_s, records
            )
