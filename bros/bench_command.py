"""`bros bench`: policies or servers compared under a hybrid load."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bros.bench.capacity import Range, find_capacity
from bros.bench.cases import Case, cases_of_policy, cases_of_target, mixed_scenario
from bros.bench.dialects import Endpoint, dialect_of
from bros.bench.environment import environment
from bros.bench.flags import SCENARIOS
from bros.bench.load import OnProgress
from bros.bench.local_server import local_server
from bros.bench.planning import Wanted, has_own_times
from bros.bench.report.files import requests_file_name, write_report, write_requests
from bros.bench.report.live import LiveView
from bros.bench.report.terminal import print_report
from bros.bench.results import BadResultsError, BenchResult, CapacityResult, Scenario
from bros.bench.running import Measuring, Run, Runner, Target
from bros.bench.workloads.catalogue import find
from bros.bench.workloads.fitting import Overlong
from bros.core.clock import Clock
from bros.core.config import Config
from bros.core.config_sources import given_flags, load_config
from bros.core.errors import ConfigError
from bros.core.flag_values import number, policies, rates, whole
from bros.core.request import Slo
from bros.engine.tokenizer import Tokenizer
from bros.executor.model_store import default_cache_dir, resolve_model

WIDTH = 100
"""Columns where the output is no terminal."""

T = TypeVar("T")

_NOT_FOR_SERVERS = ("policy", "host", "port")
_NOT_SHOWN = ("api_key", "config")
_RESULT = "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line asks for. server_arguments: for the servers that are started here."""

    config: Config
    policies: tuple[str, ...]
    target: Target | None
    scenarios: frozenset[Scenario]
    rates: tuple[float | None, ...]
    capacity: tuple[float, Range] | None
    wanted: Wanted
    measuring: Measuring
    server_arguments: tuple[str, ...]
    out: Path
    append: bool
    shown: dict[str, str | int | float | bool | None]


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
    settings = read_settings(args, environ, warn)
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    data_dir = settings.config.server.data_dir
    cache_dir = Path(data_dir).expanduser() if data_dir else default_cache_dir()
    files = resolve_model(settings.config.engine.model, cache_dir, console.print)
    bench = _Bench(settings, Tokenizer.load(files.folder), clock, console)
    asyncio.run(bench.run())
    print_report(console, bench.result)
    console.print(f"The report is in {settings.out}/report.html", highlight=False)
    return 0


class _Bench:
    """The runs of one command and what has come of them so far."""

    def __init__(
        self, settings: Settings, tokenizer: Tokenizer, clock: Clock, console: Console
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._clock = clock
        self._console = console
        self.result = _begin(settings, clock)

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

        async def attempt(rate: float) -> float | None:
            run = await runner.run(Case(scenario, rate))
            self._take(run)
            return run.result.rt.both_met.value

        found = await find_capacity(attempt, tried, asked)
        capacity = CapacityResult(
            target=target.name,
            policy=target.policy,
            asked=asked,
            rate=found.rate,
            tried=found.tried,
        )
        self.result = replace(self.result, capacities=(*self.result.capacities, capacity))
        self._write()

    def _take(self, run: Run) -> None:
        new = run.result
        kept = [old for old in self.result.results if _key(old) != _key(new)]
        self.result = replace(self.result, results=(*kept, new))
        self._write()
        path = self._settings.out / requests_file_name(new)
        write_requests(path, run.records, self._settings.measuring.slo, run.window)
        for note in run.notes:
            self._console.print(f"note: {note}", highlight=False)

    def _write(self) -> None:
        write_report(self._settings.out, self.result)

    @contextlib.contextmanager
    def _view(self, title: str) -> Iterator[OnProgress]:
        settings = self._settings
        with LiveView(self._console, title, settings.measuring.slo) as live:
            yield lambda elapsed_s, records: live.update(
                elapsed_s, settings.wanted.duration_s, records
            )


def _key(result: object) -> tuple[object, ...]:
    names = ("scenario", "target", "policy", "rt_rate")
    return tuple(getattr(result, name) for name in names)


def _begin(settings: Settings, clock: Clock) -> BenchResult:
    """An empty result, or what is in the folder already."""
    fresh = BenchResult(
        environment=environment(clock),
        settings=settings.shown,
        seeds=(settings.wanted.seed,),
        slo=settings.measuring.slo,
        results=(),
    )
    path = settings.out / _RESULT
    if not settings.append or not path.exists():
        return fresh
    try:
        old = BenchResult.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, BadResultsError) as error:
        raise ConfigError(f"--append: {path} cannot be used: {error}") from None
    if old.slo != fresh.slo:
        raise ConfigError(f"--append: {path} was measured against other objectives")
    seeds = tuple(dict.fromkeys((*old.seeds, *fresh.seeds)))
    return replace(fresh, seeds=seeds, results=old.results, capacities=old.capacities)


def read_settings(
    args: argparse.Namespace, environ: Mapping[str, str], warn: Callable[[str], None]
) -> Settings:
    """Raises ConfigError naming the flag that is wrong and what is allowed."""
    flags = given_flags(args)
    config = load_config(flags, environ, warn)
    slo = Slo(config.engine.slo_ttft / 1e3, config.engine.slo_tpot / 1e3)
    target = _target(args, config)
    wanted = _wanted(args, config, slo if target is not None else Slo())
    warm_up_s = number("--warm-up", args.bench_warm_up, low=0)
    if warm_up_s >= wanted.duration_s:
        raise ConfigError(f"--warm-up: nothing is left of --duration {wanted.duration_s:g}")
    rt_rates, capacity = _rates(args, wanted)
    fastest = capacity[1].high if capacity else max((rate or 1.0 for rate in rt_rates), default=1.0)
    wanted = replace(wanted, sessions=max(1, round(fastest * wanted.duration_s)))
    passed_on = {name: text for name, text in flags.items() if name not in _NOT_FOR_SERVERS}
    server_arguments = [part for pair in _by_flag(passed_on).items() for part in pair]
    return Settings(
        config=config,
        policies=policies("--policies", args.bench_policies),
        target=target,
        scenarios=_scenarios(args.bench_scenarios),
        rates=rt_rates,
        capacity=capacity,
        wanted=wanted,
        measuring=Measuring(
            slo=slo,
            warm_up_s=warm_up_s,
            endpoint=_endpoint(args.bench_endpoint),
            context=_optional_whole("--context", args.bench_context),
        ),
        server_arguments=tuple(server_arguments),
        out=Path(args.bench_out).expanduser(),
        append=args.bench_append,
        shown=_shown(args, flags),
    )


def _target(args: argparse.Namespace, config: Config) -> Target | None:
    if args.bench_target is None:
        return None
    dialect = dialect_of(args.bench_dialect).name
    return Target(
        url=args.bench_target,
        name=args.bench_target_name or dialect,
        dialect=dialect,
        policy=args.bench_target_policy,
        model=args.bench_target_model,
        api_key=config.server.api_key,
    )


def _wanted(args: argparse.Namespace, config: Config, slo: Slo) -> Wanted:
    wanted = Wanted(
        rt=args.bench_rt,
        be=args.bench_be,
        in_flight=whole("--in-flight", args.bench_in_flight, low=0),
        duration_s=number("--duration", args.bench_duration, above=0),
        seed=config.engine.seed,
        longest_prompt=_optional_whole("--longest-prompt", args.bench_longest_prompt),
        burstiness=number("--burstiness", args.bench_burstiness, above=0),
        zipf=number("--zipf", args.bench_zipf, low=0),
        speed=number("--speed", args.bench_speed, above=0),
        forced=not args.bench_natural,
        factor=number("--scale", args.bench_scale, above=0),
        overlong=Overlong.SKIP if args.bench_skip_overlong else Overlong.CLIP,
        slo=slo,
    )
    if wanted.factor > 1:
        raise ConfigError(f"--scale: {args.bench_scale} must be at most 1")
    for flag, name in (("--rt", wanted.rt), ("--be", wanted.be)):
        if not name.startswith("sharegpt:"):  # which needs a tokenizer and takes its time
            try:
                find(name, seed=wanted.seed, requests=1)
            except ConfigError as error:
                raise ConfigError(f"{flag}: {error}") from None
    return wanted


def _rates(
    args: argparse.Namespace, wanted: Wanted
) -> tuple[tuple[float | None, ...], tuple[float, Range] | None]:
    """The rates to run, and where the highest good one is searched."""
    if has_own_times(wanted.rt):
        if args.bench_capacity is not None:
            raise ConfigError("--capacity: a trace has its own rate; see --speed")
        return (None,), None
    found = rates("--rates", args.bench_rates)
    if args.bench_capacity is None:
        return tuple(found), None
    asked = number("--capacity", args.bench_capacity, above=0)
    if asked > 1 or len(found) < 2 or ":" not in args.bench_rates:
        raise ConfigError(
            "--capacity: needs a share of at most 1, and a range in --rates, e.g. 0.1:2:0.1"
        )
    return (), (asked, Range(found[0], found[-1], found[1] - found[0]))


def _scenarios(text: str) -> frozenset[Scenario]:
    try:
        return frozenset(Scenario(part.strip().upper()) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--scenarios: {text!r} is not a list of {SCENARIOS}") from None


def _endpoint(text: str) -> Endpoint:
    try:
        return Endpoint(text)
    except ValueError:
        raise ConfigError(f"--endpoint: {text!r} is not one of {', '.join(Endpoint)}") from None


def _optional_whole(flag: str, text: str | None) -> int | None:
    return None if text is None else whole(flag, text, low=1)


def _shown(
    args: argparse.Namespace, flags: Mapping[str, str]
) -> dict[str, str | int | float | bool | None]:
    """What was asked, by flag; no keys, and of folders only their names."""
    given = {
        name.removeprefix("bench_"): value
        for name, value in sorted(vars(args).items())
        if name.startswith("bench_") and name != "bench_out"
    }
    given |= {name: text for name, text in sorted(flags.items()) if name not in _NOT_SHOWN}
    return _by_flag({name: _without_folder(value) for name, value in given.items()})


def _by_flag(values: Mapping[str, T]) -> dict[str, T]:
    """Option names as they are written."""
    return {"--" + name.replace("_", "-"): value for name, value in values.items()}


def _without_folder(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
