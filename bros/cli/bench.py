"""`bros bench`: compares policies or servers under a hybrid load."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import re
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, TypeVar

from rich.console import Console

from bros.bench.dialects import Endpoint, dialect_of
from bros.bench.load import OnProgress
from bros.bench.plan import BenchTenants
from bros.bench.planning import (
    Case,
    Overlong,
    Range,
    RequestedLoad,
    cases_of_policy,
    cases_of_target,
    find_capacity,
    has_recorded_times,
    mixed_scenario,
)
from bros.bench.report.files import (
    read_result,
    requests_file_name,
    save_result,
    write_report,
    write_requests,
)
from bros.bench.report.terminal import LiveView, print_report
from bros.bench.report.words import name_of
from bros.bench.results import (
    BadResultsError,
    BenchResult,
    CapacityResult,
    Command,
    Scenario,
    ScenarioResult,
    environment,
)
from bros.bench.running import BeAs, BenchRunner, BenchTarget, MeasuredRun, RunOptions
from bros.bench.workloads.catalogue import find_content
from bros.bench.workloads.contents import FILES
from bros.cli.flags import (
    SCENARIOS,
    BenchFlags,
    flag_of,
    names,
    number,
    optional_whole,
    rates,
    read_own,
    whole,
)
from bros.cli.remote import base_url
from bros.cli.simulate_tables import table_console
from bros.core.clock import Clock
from bros.core.config import POLICIES, Config, TenantNumber
from bros.core.config_sources import given_flags, load_config, options_of
from bros.core.errors import BrosError, ConfigError
from bros.core.files import check_folder, expand_user
from bros.core.request import Slo
from bros.executor.model_store import cache_dir_of, resolve_model
from bros.server.tenants import load_tenants
from bros.text.tokenizer import Tokenizer
from bros.workload.attainment import Attainment

# ---- The checked options of `bros bench`.


T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

_NOT_PASSED_ON = ("policy", "host", "port")
_FILE_OPTIONS = ("out", "append", "report_only")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """The checked options.

    target: the server to measure; None: start bros once per policy.
    tenants: that share the load, if any.
    capacity: (required attainment, rates) of a capacity search, if any.
    server_arguments: for the servers that are started here.
    """

    config: Config
    policies: tuple[str, ...]
    target: BenchTarget | None
    tenants: BenchTenants | None
    scenarios: frozenset[Scenario]
    rates: tuple[float | None, ...]
    capacity: tuple[float, Range] | None
    wanted: RequestedLoad
    run_options: RunOptions
    server_arguments: tuple[str, ...]
    out: Path
    append: bool

    def cases(self, policy: str | None) -> list[Case]:
        """The runs on the target, or on a bros server with `policy`, one of `policies`."""
        if self.target is not None:
            classes = dialect_of(self.target.dialect).has_classes
            cases = cases_of_target(self.rates, self.scenarios, has_classes=classes)
        else:
            assert policy is not None, "a server that is started here has a policy"
            cases = cases_of_policy(policy, self.policies, self.rates, self.scenarios)
        in_flight = self.wanted.in_flight
        return [case for case in cases if case.scenario is not Scenario.S2 or in_flight]


def read_settings(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
    clock: Clock,
) -> BenchSettings:
    """Raises ConfigError, naming the invalid flag and the allowed values."""
    flags, own = given_flags(args), read_own(BenchFlags, args)
    config = load_config(flags, environ, warn)
    slo = config.engine.default_slo
    tenants = _tenants(own, config)
    target = _target(own, config, tenants)
    wanted = _wanted(own, config, slo if target is not None else Slo())
    warm_up_s = number("--warm-up", own.warm_up, low=0)
    if warm_up_s >= wanted.duration_s:
        raise ConfigError(f"--warm-up: must be shorter than --duration {wanted.duration_s:g}")
    rt_rates, capacity = _rates(own, wanted)
    fastest = capacity[1].high if capacity else max((rate or 1.0 for rate in rt_rates), default=1.0)
    wanted = replace(wanted, sessions=max(1, round(fastest * wanted.duration_s)))
    passed_on = {name: text for name, text in flags.items() if name not in _NOT_PASSED_ON}
    server_arguments = [part for pair in _by_flag(passed_on).items() for part in pair]
    command = Command(
        environment=environment(clock),
        settings=_reported_settings(own, config),
        seed=wanted.seed,
        slo=slo,
    )
    settings = BenchSettings(
        config=config,
        policies=names("--policies", own.policies, POLICIES),
        target=target,
        tenants=tenants,
        scenarios=_scenarios(own.scenarios),
        rates=rt_rates,
        capacity=capacity,
        wanted=wanted,
        run_options=RunOptions(
            command=command,
            warm_up_s=warm_up_s,
            endpoint=_choice("--endpoint", Endpoint, own.endpoint),
            context=optional_whole("--context", own.context),
            be_as=_choice("--be-as", BeAs, own.be_as),
        ),
        server_arguments=tuple(server_arguments),
        out=expand_user(own.out),
        append=own.append,
    )
    if capacity is None and not any(map(settings.cases, settings.policies)):
        raise ConfigError(
            f"--scenarios: there is nothing to measure in {own.scenarios}: S1 needs a --target or "
            "the policy fcfs, S2 --in-flight, and S3 another policy or a dialect with classes"
        )
    return settings


_SHARE = TenantNumber("a share", 0.001, 1000.0)


def _tenants(own: BenchFlags, config: Config) -> BenchTenants | None:
    """Raises ConfigError."""
    if own.tenants is None:
        return None
    if own.be_as == BeAs.BATCH:
        raise ConfigError("--tenants: a batch is of one tenant; use --be-as requests")
    try:
        shares = _SHARE.parse_all(own.tenants)
    except ConfigError as error:
        raise ConfigError(f"--tenants: {error}") from None
    keys = load_tenants(config.server).keys
    unknown = [name for name in shares if name not in keys]
    if unknown or not shares:
        raise ConfigError(f"--tenants: {', '.join(unknown) or 'nobody'} has no key in --api-keys")
    return BenchTenants(shares, {name: own_keys[0] for name, own_keys in keys.items()})


def _api_key(config: Config, tenants: BenchTenants | None) -> str | None:
    """The key for everything but the load."""
    key = config.server.api_key
    return next(iter(tenants.keys.values())) if key is None and tenants is not None else key


def _target(own: BenchFlags, config: Config, tenants: BenchTenants | None) -> BenchTarget | None:
    if own.target is None:
        of_target = ("dialect", "target_name", "target_policy", "target_model")
        for field in dataclasses.fields(own):
            if field.name in of_target and getattr(own, field.name) != field.default:
                raise ConfigError(f"{flag_of(field.name)}: it is of a --target, and none is given")
        return None
    base_url(own.target, "--target")
    dialect = dialect_of(own.dialect).name
    return BenchTarget(
        url=own.target,
        name=own.target_name or dialect,
        dialect=dialect,
        policy=own.target_policy,
        model=own.target_model,
        api_key=_api_key(config, tenants),
        tenants=tenants,
    )


def _wanted(own: BenchFlags, config: Config, slo: Slo) -> RequestedLoad:
    wanted = RequestedLoad(
        rt=own.rt,
        be=own.be,
        in_flight=whole("--in-flight", own.in_flight, low=0),
        duration_s=number("--duration", own.duration, above=0),
        drain_s=number("--drain", own.drain, low=0),
        seed=config.engine.seed,
        longest_prompt=optional_whole("--longest-prompt", own.longest_prompt),
        burstiness=number("--burstiness", own.burstiness, above=0),
        zipf=number("--zipf", own.zipf, low=0),
        speed=number("--speed", own.speed, above=0),
        forced=not own.natural,
        factor=number("--scale", own.scale, above=0),
        overlong=Overlong.SKIP if own.skip_overlong else Overlong.CLIP,
        slo=slo,
    )
    if wanted.factor > 1:
        raise ConfigError(f"--scale: {own.scale} must be at most 1")
    for flag, name in (("--rt", wanted.rt), ("--be", wanted.be)):
        try:
            if name.startswith("sharegpt:"):  # which needs a tokenizer and takes long
                _check_readable(name.removeprefix("sharegpt:"))
            else:
                find_content(name, seed=wanted.seed, requests=1)
        except ConfigError as error:
            raise ConfigError(f"{flag}: {error}") from None
    return wanted


def _check_readable(path: str) -> None:
    """Raises ConfigError."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _rates(
    own: BenchFlags, wanted: RequestedLoad
) -> tuple[tuple[float | None, ...], tuple[float, Range] | None]:
    """(rates to run, (required attainment, rates) of a capacity search)."""
    if has_recorded_times(wanted.rt):
        if own.capacity is not None:
            raise ConfigError("--capacity: a trace has its own rate; see --speed")
        return (None,), None
    found = rates("--rates", own.rates)
    if own.capacity is None:
        return tuple(found), None
    asked = number("--capacity", own.capacity, above=0)
    if asked > 1 or len(found) < 2 or ":" not in own.rates:
        raise ConfigError(
            "--capacity: needs a share of at most 1, and a range in --rates, e.g. 0.1:2:0.1"
        )
    return (), (asked, Range(found[0], found[-1], found[1] - found[0]))


def _scenarios(text: str) -> frozenset[Scenario]:
    try:
        return frozenset(Scenario(part.strip().upper()) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--scenarios: {text!r} is not a list of {SCENARIOS}") from None


def _choice(flag: str, kind: type[E], text: str) -> E:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not one of {', '.join(kind)}") from None


def _reported_settings(
    own: BenchFlags, config: Config
) -> dict[str, str | int | float | bool | None]:
    """The options for the report: those of `bros bench`, and server options with other values than
    their defaults. API keys are left out, and paths are reduced to file names.
    """
    given = {
        name: value for name, value in dataclasses.asdict(own).items() if name not in _FILE_OPTIONS
    }
    for part in (config.engine, config.server):
        for option in options_of(type(part)):
            value = getattr(part, option.name)
            hidden = option.name in _NOT_PASSED_ON or option.field.metadata.get("secret")
            if value != option.field.default and not hidden:
                given[option.name] = value
    return _by_flag({name: _without_folder(value) for name, value in given.items()})


def _by_flag(values: Mapping[str, T]) -> dict[str, T]:
    """Flag -> value."""
    return {flag_of(name): value for name, value in values.items()}


def _without_folder(value: Any) -> Any:
    """`value`; an absolute path, also one within the name of a workload, loses its folder."""
    if not isinstance(value, str):
        return value
    kind, colon, path = value.partition(":")
    if colon and kind in FILES:
        return f"{kind}:{Path(path).name}"
    return Path(value).name if Path(value).is_absolute() else value


# ---- A local bros server on a free port.


STOP_S = 15.0
"""How long a server may take to exit before it is killed."""

_READY = re.compile(r"bros is ready at (\S+)")
_NUM_LAST_LINES = 5


class ServerStartError(BrosError):
    """The server exited before it was ready; the message has its last lines."""


@contextlib.asynccontextmanager
async def local_server(arguments: Sequence[str]) -> AsyncIterator[str]:
    """Start `bros serve` with these arguments; yields its URL once it is ready.

    Leaving the block stops the server, also by SIGTERM, which is then as Ctrl-C. Raises
    ServerStartError.
    """
    command = (sys.executable, "-m", "bros", "serve", "--host", "127.0.0.1", "--port", "0")
    with (
        tempfile.TemporaryFile() as log,
        tempfile.TemporaryDirectory(prefix="bros-") as folder,
        _sigterm_as_ctrl_c(),
    ):
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--store", folder),  # not the user's: the server would run its batches
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C must reach only this process, which stops the server
        )
        assert process.stdout is not None
        try:
            url = await _ready_url(process.stdout)
            if url is None:
                await process.wait()
                raise ServerStartError(f"the server did not start: {_last_lines(log)}")
            drain = asyncio.create_task(_drain(process.stdout))
            try:
                yield url
            finally:
                drain.cancel()
        finally:
            await _stop(process)


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM would end this process at once, without a report, and a server that it has started
    would run on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


async def _ready_url(lines: asyncio.StreamReader) -> str | None:
    """The URL at which the server is ready; None if its output ends first."""
    async for line in lines:
        found = _READY.search(line.decode(errors="replace"))
        if found:
            return found[1]
    return None


async def _drain(lines: asyncio.StreamReader) -> None:
    """Discard the rest of the output: a full pipe would block the server."""
    while await lines.read(65536):
        pass


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(asyncio.shield(process.wait()), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _last_lines(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return "; ".join(line.strip() for line in lines[-_NUM_LAST_LINES:]) or "it printed nothing"


def run_bench(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
    clock: Clock,
    console: Console | None = None,
) -> int:
    """Measure, print the report and write its files; returns the exit status.

    Results are saved after every run, and an interrupted comparison still gets a report of its
    finished runs. Raises ConfigError, NoServerError, ServerStartError or ModelError.
    """
    console = table_console(console)
    report_only = read_own(BenchFlags, args).report_only
    if report_only is not None:
        folder = expand_user(report_only)
        result = _read("--report-only", folder)
        _check_out("--report-only", folder)
        write_report(folder, result)
    else:
        settings = read_settings(args, environ, warn, clock)
        folder, result = settings.out, _measure(settings, clock, console)
    print_report(console, result)
    console.print(
        f"The report is in {folder}/report.html", markup=False, highlight=False, soft_wrap=True
    )
    return 0


def _measure(settings: BenchSettings, clock: Clock, console: Console) -> BenchResult:
    _check_out("--out", settings.out)  # before minutes of measuring
    cache_dir = cache_dir_of(settings.config.server.data_dir)
    files = resolve_model(settings.config.engine.model, cache_dir, console.print)
    bench = _Bench(settings, Tokenizer.load(files.folder), clock, console)
    with _sigterm_as_ctrl_c():
        asyncio.run(bench.run())
    return bench.result


def _check_out(flag: str, folder: Path) -> None:
    try:
        check_folder(folder)
    except OSError as error:
        message = f"{flag}: the report cannot be written to {folder}: {error.strerror}"
        raise ConfigError(message) from None


def _read(flag: str, folder: Path) -> BenchResult:
    try:
        return read_result(folder)
    except (OSError, UnicodeDecodeError, BadResultsError) as error:
        raise ConfigError(f"{flag}: the result.json in {folder} cannot be used: {error}") from None


_MAX_NAMES = 4


class _Bench:
    """The runs of one command.

    result: of the finished ones.
    """

    def __init__(
        self, settings: BenchSettings, tokenizer: Tokenizer, clock: Clock, console: Console
    ) -> None:
        self._settings = settings
        self._command = settings.run_options.command
        self._tokenizer = tokenizer
        self._clock = clock
        self._console = console
        self.result = BenchResult(results=())
        if settings.append and (settings.out / "result.json").exists():
            self.result = _read("--append", settings.out)
        elif not settings.append:
            self._say_what_is_replaced()

    async def run(self) -> None:
        """Measure and write the report, also after an error.

        Raises NoServerError, ServerStartError or ConfigError.
        """
        before = self.result
        try:
            await self._measure()
        finally:
            if self.result is not before:
                out = self._settings.out
                write_report(out, self.result)
                if sys.exception() is not None:
                    message = f"The report of the finished runs is in {out}/report.html"
                    self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    async def _measure(self) -> None:
        async for target, cases in self._targets():
            runner = BenchRunner(
                target,
                self._settings.wanted,
                self._settings.run_options,
                self._tokenizer,
                self._clock,
                self._view,
            )
            for case in cases:
                self._record(await self._run(runner, target, case))
            if self._settings.capacity is not None:
                await self._search_capacity(runner, target, *self._settings.capacity)

    async def _targets(self) -> AsyncIterator[tuple[BenchTarget, list[Case]]]:
        """Every server with its cases. A local server runs until the next iteration."""
        settings = self._settings
        if settings.target is not None:
            yield settings.target, settings.cases(None)
            return
        for policy in settings.policies:
            cases = settings.cases(policy)
            if not cases and settings.capacity is None:
                continue
            self._console.print(f"Starting bros with --policy {policy} ...", highlight=False)
            arguments = (*settings.server_arguments, "--policy", policy)
            async with local_server(arguments) as url:
                yield (
                    BenchTarget(
                        url=url,
                        name="bros",
                        dialect="bros",
                        policy=policy,
                        api_key=_api_key(settings.config, settings.tenants),
                        tenants=settings.tenants,
                    ),
                    cases,
                )

    async def _search_capacity(
        self, runner: BenchRunner, target: BenchTarget, asked: float, tried: Range
    ) -> None:
        classes = dialect_of(target.dialect).has_classes
        scenario = mixed_scenario(target.policy, has_classes=classes)

        async def attempt(rate: float) -> Attainment:
            run = await self._run(runner, target, Case(scenario, rate))
            self._record(run)
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
        save_result(self._settings.out, self.result)

    async def _run(self, runner: BenchRunner, target: BenchTarget, case: Case) -> MeasuredRun:
        """Run a case; says before if that replaces an earlier run."""
        key = (case.scenario, target.name, target.policy, case.rate)
        for old in self.result.results:
            if old.key == key:
                self._say_replaced(old)
        run = await runner.run(case)
        if run.result.key != key:  # the rate of a trace is known only now
            for old in self.result.results:
                if old.key == run.result.key:
                    self._say_replaced(old)
        return run

    def _say_replaced(self, old: ScenarioResult) -> None:
        name, date = name_of(self.result, old), old.command.environment.date
        self._note(f"this replaces the run of {name} from {date}")

    def _say_what_is_replaced(self) -> None:
        """The runs of a report that the first finished run replaces."""
        try:
            old = read_result(self._settings.out)
        except (OSError, UnicodeDecodeError, BadResultsError):
            return
        if old.results:
            names = "; ".join(name_of(old, run) for run in old.results[:_MAX_NAMES])
            more = len(old.results) - _MAX_NAMES
            names += f" and {more} more" if more > 0 else ""
            self._note(
                f"this replaces the report in {self._settings.out} of {names}; --append adds to it"
            )

    def _note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)

    def _record(self, run: MeasuredRun) -> None:
        self.result = self.result.with_run(run.result)
        save_result(self._settings.out, self.result)
        path = self._settings.out / requests_file_name(run.result)
        write_requests(path, run.records, self._command.slo, run.window)
        for note in run.result.notes:
            self._note(note)

    @contextlib.contextmanager
    def _view(self, title: str) -> Iterator[OnProgress]:
        with LiveView(self._console, title, self._command.slo) as live:
            yield lambda elapsed_s, records: live.update(
                elapsed_s, self._settings.wanted.duration_s, records
            )
