"""`bros simulate`: compares policies, routers and programs on a virtual clock, without a model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.markup import escape

from bros import __version__
from bros.cli.flags import (
    AZURE,
    AZURE_RATE,
    DEFAULT_POLICIES,
    DEFAULT_PROFILE,
    DEFAULT_ROUTERS,
    DEFAULT_RT_RATE,
    MAX_REQUESTS,
    MOONCAKE_RATE,
    NOT_FOR_PROGRAMS,
    ONE_ENGINE,
    POPULARITIES,
    PROGRAM_NAMES,
    PROGRAM_POLICY,
    PROGRAM_ROUTERS,
    PROGRAM_RT_RATE,
    PROGRAM_WAYS,
    RECORDED,
    REPLICA_POLICY,
    REPLICA_PROFILE,
    WORKLOADS,
    ProgramsFlags,
    ReplicasFlags,
    SimulateFlags,
    changed_flags,
    doublings,
    names,
    number,
    optional_whole,
    rates,
    read_own,
    whole,
)
from bros.cli.simulate_tables import (
    print_fleet_reports,
    print_program_reports,
    print_reports,
    progress_bar,
    table_console,
    writable,
    write,
)
from bros.core.clock import Clock
from bros.core.config import POLICIES, EngineConfig
from bros.core.config_sources import given_flags, load_config, near_matches
from bros.core.errors import ConfigError
from bros.core.files import expand_user
from bros.core.machine import available_cores
from bros.executor.model_store import cache_dir_of
from bros.profiling.profiles import Profile, profile_folders
from bros.router.state import ROUTERS
from bros.scheduler.build import needs_cost_model, unused_options, without_effect
from bros.simulator.fleet import (
    FleetReport,
    FleetScenario,
    check_fleet_scenario,
    fleet_config,
    run_fleet,
)
from bros.simulator.metrics import Report
from bros.simulator.prefix_workloads import (
    KINDS,
    AzureLoad,
    MooncakeLoad,
    PrefixLoad,
    PrefixWorkload,
    published,
    read_azure_times,
)
from bros.simulator.program_simulation import (
    ProgramReport,
    ProgramScenario,
    check_program_scenario,
    run_programs,
)
from bros.simulator.programs import PROGRAMS
from bros.simulator.simulation import (
    Device,
    Disturbance,
    SimulatedScenario,
    check_scenario,
    device_of,
    read_profile,
    with_step_bounds,
)
from bros.simulator.sweep import run_all, run_scenario
from bros.workload.arrivals import (
    RT_SIZES,
    BeLoad,
    PoissonLoad,
    RtLoad,
    TraceLoad,
    read_azure_trace,
    read_mooncake_trace,
)

Scenario = TypeVar("Scenario")
Result = TypeVar("Result")
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs(Generic[Scenario, Result]):
    """The runs of a command.

    finished: scenarios and their results, in order; after Ctrl-C not of all.
    unfinished: number of the others.
    wall_s: seconds that all of them took.
    """

    finished: Sequence[tuple[Scenario, Result]]
    unfinished: int
    wall_s: float


def _run_timed(
    run: Callable[[Scenario, Callable[[float], None]], Result],
    scenarios: Sequence[Scenario],
    jobs: int,
    clock: Clock,
) -> _Runs[Scenario, Result]:
    """Raises KeyboardInterrupt if no run has finished before Ctrl-C."""
    start_s = clock.now()
    results: dict[int, Result] = {}
    with progress_bar(len(scenarios)) as on_progress:
        try:
            run_all(run, scenarios, jobs, on_progress, results.__setitem__)
        except KeyboardInterrupt:
            if not results:
                raise
    return _Runs(
        finished=[(each, results[n]) for n, each in enumerate(scenarios) if n in results],
        unfinished=len(scenarios) - len(results),
        wall_s=clock.now() - start_s,
    )


def _simulated(profile: Profile, device: Device) -> str:
    """The model, the device and the kind of profile, for a rich console."""
    return escape(
        f"{profile.key.model} ({profile.key.weights}) on {device.name}, {profile.kind} profile"
    )


def _conclude(
    console: Console, runs: _Runs[Any, Any], path: Path | None, content: Mapping[str, Any]
) -> None:
    """Write the file, if one is asked for, and print how long it took.

    Raises KeyboardInterrupt after that if runs are missing.
    """
    if path is not None:
        unfinished = {"unfinished": runs.unfinished} if runs.unfinished else {}
        whole_content = {**content, **unfinished, "wall_s": round(runs.wall_s, 3)}
        write(path, json.dumps(whole_content, indent=2) + "\n")
    count = len(runs.finished)
    if runs.unfinished:
        asked = count + runs.unfinished
        console.print(f"interrupted after {count} of {asked} runs, in {runs.wall_s:.1f} s")
        raise KeyboardInterrupt
    console.print(f"{count} run{'s' * (count > 1)} in {runs.wall_s:.1f} s", style="dim")


# ---- `bros simulate --replicas`: compares routers.


_MAX_REPLICAS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """The checked options.

    shortened: numbers of replicas whose runs are limited to MAX_REQUESTS.
    """

    scenarios: tuple[FleetScenario, ...]
    profile: Profile
    shortened: tuple[int, ...]
    jobs: int
    json_path: Path | None


def run_replicas(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
    clock: Clock,
    console: Console | None = None,
) -> int:
    """Simulate, print tables and write the file; returns the exit status.

    Raises ConfigError for an invalid option, KeyboardInterrupt after Ctrl-C: the runs that had
    finished by then are printed and written before.
    """
    settings = read_replica_settings(args, environ, warn)
    console = table_console(console)
    runs = _run_timed(run_fleet, settings.scenarios, settings.jobs, clock)
    first = settings.scenarios[0]
    console.print(f"{_simulated(settings.profile, first.device)}, each replica; seed {first.seed}")
    if settings.shortened:
        counts = ", ".join(map(str, settings.shortened))
        console.print(
            f"With {counts} replicas: limited to {MAX_REQUESTS} requests and a matching number of "
            "families, so these runs are shorter; override with --requests N"
        )
    console.print()
    print_fleet_reports(console, runs.finished)
    _conclude(console, runs, settings.json_path, replicas_json(settings, runs.finished))
    return 0


def read_replica_settings(
    args: argparse.Namespace, environ: Mapping[str, str], warn: Callable[[str], None]
) -> ReplicaSettings:
    """Raises ConfigError, naming the invalid flag and the allowed values."""
    own, fleet = read_own(SimulateFlags, args), read_own(ReplicasFlags, args)
    selected = names("--policy", own.policy or REPLICA_POLICY, POLICIES)
    config = load_config({**given_flags(args), "policy": selected[0]}, environ, warn)
    engine = config.engine
    data_dir = cache_dir_of(config.server.data_dir)
    profile = read_profile(engine.profile or REPLICA_PROFILE, profile_folders(data_dir))
    device = device_of(profile, engine.kv_blocks)
    counts = doublings("--replicas", fleet.replicas or "", _MAX_REPLICAS)
    loads = {replicas: _load(own, fleet, replicas) for replicas in counts}
    be_share = number("--be-requests", fleet.be_requests, low=0)
    scenarios = tuple(
        FleetScenario(
            config=_fleet_config_with(engine, policy),
            device=device,
            replicas=replicas,
            router=router,
            load=loads[replicas],
            seed=engine.seed,
            report_delay_s=number("--notice-delay", fleet.notice_delay, low=0) / 1e3,
            decision_s=number("--decision-time", fleet.decision_time, low=0) / 1e3,
            classes=be_share > 0.0,
        )
        for policy in selected
        for replicas in counts
        for router in names("--router", fleet.router or DEFAULT_ROUTERS, ROUTERS)
    )
    for scenario in scenarios:
        check_fleet_scenario(scenario)
    _warn_of_unused_with_replicas(own, warn)
    jobs, asked = own.jobs, fleet.requests
    return ReplicaSettings(
        scenarios=scenarios,
        profile=profile,
        shortened=tuple(n for n in counts if asked is None and _is_shortened(loads[n], n)),
        jobs=available_cores() if jobs is None else whole("--jobs", jobs, low=1),
        json_path=writable(own.json),
    )


def replicas_json(
    settings: ReplicaSettings, finished: Sequence[tuple[FleetScenario, FleetReport]]
) -> dict[str, Any]:
    """Everything that determines the runs, and their results."""
    return {
        "bros": __version__,
        "python": platform.python_version(),
        "profile": json.loads(settings.profile.to_json()),
        "runs": [
            {
                "replicas": scenario.replicas,
                "router": scenario.router,
                "policy": scenario.config.policy,
                "load": scenario.load.label,
                "settings": scenario_json(scenario),
                "results": dataclasses.asdict(report),
            }
            for scenario, report in finished
        ],
    }


def scenario_json(scenario: FleetScenario) -> dict[str, Any]:
    """The settings of a run, without the recorded requests of a trace."""
    load = dataclasses.asdict(scenario.load)  # type: ignore[call-overload]
    load.pop("recorded", None)
    return {
        "seed": scenario.seed,
        "load": load,
        "kv_blocks": scenario.device.kv_blocks,
        "report_delay_s": scenario.report_delay_s,
        "decision_s": scenario.decision_s,
        "router": dataclasses.asdict(scenario.settings),
        "engine": dataclasses.asdict(scenario.config),
    }


def _fleet_config_with(engine: EngineConfig, policy: str) -> EngineConfig:
    return dataclasses.replace(fleet_config(engine), policy=policy)


def _load(own: SimulateFlags, fleet: ReplicasFlags, replicas: int) -> PrefixLoad:
    """The workload of one run; its defaults scale with `replicas`."""
    (name,) = names("--workload", fleet.workload, WORKLOADS, most=1)
    (popularity,) = names("--popularity", fleet.popularity, POPULARITIES, most=1)
    rate = _optional_number("--rate", fleet.rate)
    count = optional_whole("--requests", fleet.requests)
    families = optional_whole("--families", fleet.families)
    be_share = number("--be-requests", fleet.be_requests, low=0)
    if be_share > 1.0:
        raise ConfigError(f"--be-requests: {be_share:g} must be at most 1")
    if name in RECORDED:
        if families is not None or popularity != POPULARITIES[0]:
            raise ConfigError(f"--families, --popularity: not available with --workload {name}")
        return _recorded_load(name, own.trace, replicas, rate, count, be_share)
    if own.trace is not None:
        raise ConfigError(f"--trace: requires --workload {' or '.join(RECORDED)}")
    if count is None:
        count = min(_published_count(name, replicas), MAX_REQUESTS)
    return published(
        name,
        replicas,
        rate=rate,
        count=count,
        families=families,
        popularity=popularity,
        be_share=be_share,
    )


def _read(read: Callable[[], Read]) -> Read:
    """What it reads from the files of --trace. Its ConfigErrors then name the option."""
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"--trace: {error}") from None


def _recorded_load(
    name: str,
    trace: str | None,
    replicas: int,
    rate: float | None,
    count: int | None,
    be_share: float,
) -> PrefixLoad:
    if trace is None:
        raise ConfigError(f"--workload {name}: requires --trace")
    if name == AZURE:
        paths = [expand_user(part.strip()) for part in trace.split(",")]
        if len(paths) != 2:
            raise ConfigError(f"--trace: {AZURE} requires two files, CODE,CONVERSATIONS")
        times = _read(lambda: read_azure_times(*paths))
        return AzureLoad(
            recorded=times,
            rate=rate or AZURE_RATE * replicas,
            count=min(count or MAX_REQUESTS, len(times)),
            be_share=be_share,
        )
    path = expand_user(trace)
    lines = _read(lambda: read_mooncake_trace(path))
    return MooncakeLoad(
        source=path.name,
        recorded=lines,
        rate=rate or MOONCAKE_RATE * replicas,
        count=min(count or MAX_REQUESTS, len(lines)),
        be_share=be_share,
    )


def _published_count(name: str, replicas: int) -> int:
    return max(1, KINDS[name].count * replicas // 2)


def _is_shortened(load: PrefixLoad, replicas: int) -> bool:
    return isinstance(load, PrefixWorkload) and load.count < _published_count(load.name, replicas)


def _optional_number(flag: str, text: str | None) -> float | None:
    return None if text is None else number(flag, text, low=1e-6, below=1e6)


def _warn_of_unused_with_replicas(own: SimulateFlags, warn: Callable[[str], None]) -> None:
    """Warn of options that have no effect on several replicas."""
    unused = [flag for flag in changed_flags(own) if flag in ONE_ENGINE]
    if unused:
        warn(f"{', '.join(unused)}: without effect with --replicas")


# ---- `bros simulate --programs`: runs programs in sessions and call by call.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    """The checked options."""

    scenarios: tuple[ProgramScenario, ...]
    profile: Profile
    jobs: int
    json_path: Path | None


def run_program_scenarios(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
    clock: Clock,
    console: Console | None = None,
) -> int:
    """Simulate, print tables and write the file; returns the exit status.

    Raises ConfigError for an invalid option, KeyboardInterrupt after Ctrl-C: the runs that had
    finished by then are printed and written before.
    """
    settings = read_program_settings(args, environ, warn)
    console = table_console(console)
    runs = _run_timed(run_programs, settings.scenarios, settings.jobs, clock)
    first = settings.scenarios[0]
    console.print(
        f"{_simulated(settings.profile, first.device)}, each replica; "
        f"{1e3 * first.delay_s:g} ms of network latency, seed {first.seed}\n"
    )
    print_program_reports(console, runs.finished)
    _conclude(console, runs, settings.json_path, programs_json(settings, runs.finished))
    return 0


def read_program_settings(
    args: argparse.Namespace, environ: Mapping[str, str], warn: Callable[[str], None]
) -> ProgramSettings:
    """Raises ConfigError, naming the invalid flag and the allowed values."""
    own, fleet = read_own(SimulateFlags, args), read_own(ReplicasFlags, args)
    programs = read_own(ProgramsFlags, args)
    assert programs.programs is not None
    policies = names("--policy", own.policy or PROGRAM_POLICY, POLICIES)
    # Only the simulator of independent requests knows which ones belong together.
    known = [router for router in ROUTERS if router != "oracle"]
    routers = names("--router", fleet.router or PROGRAM_ROUTERS, known)
    config = load_config({**given_flags(args), "policy": policies[0]}, environ, warn)
    engine = config.engine
    data_dir = cache_dir_of(config.server.data_dir)
    profile = read_profile(engine.profile or DEFAULT_PROFILE, profile_folders(data_dir))
    device = device_of(profile, engine.kv_blocks)
    rate, count = (
        _optional_number("--rate", fleet.rate),
        optional_whole("--requests", fleet.requests),
    )
    scenarios = tuple(
        ProgramScenario(
            program=name,
            way=way,
            config=_fleet_config_with(engine, policy),
            device=device,
            replicas=replicas,
            router=router,
            rate=rate or PROGRAMS[name].rate * replicas,
            count=count or PROGRAMS[name].count * replicas,
            chats=chats,
            seed=engine.seed,
            delay_s=number("--network-delay", programs.network_delay, low=0, below=1e7) / 1e3,
        )
        for name in names("--programs", programs.programs, PROGRAM_NAMES)
        for chats in _loads(own, PROGRAM_RT_RATE)
        for policy in policies
        for replicas in doublings("--replicas", fleet.replicas or "1", _MAX_REPLICAS)
        for router in (routers if replicas > 1 else routers[:1])
        for way in names("--run-as", programs.run_as, PROGRAM_WAYS)
    )
    for scenario in scenarios:
        check_program_scenario(scenario)
    unused = [
        flag for flag in (*changed_flags(own), *changed_flags(fleet)) if flag in NOT_FOR_PROGRAMS
    ]
    if unused:
        warn(f"{', '.join(unused)}: without effect with --programs")
    jobs = own.jobs
    return ProgramSettings(
        scenarios=scenarios,
        profile=profile,
        jobs=available_cores() if jobs is None else whole("--jobs", jobs, low=1),
        json_path=writable(own.json),
    )


def programs_json(
    settings: ProgramSettings, finished: Sequence[tuple[ProgramScenario, ProgramReport]]
) -> dict[str, Any]:
    """Everything that determines the runs, and their results."""
    return {
        "bros": __version__,
        "python": platform.python_version(),
        "profile": json.loads(settings.profile.to_json()),
        "runs": [
            {
                "programs": scenario.program,
                "run_as": scenario.way,
                "replicas": scenario.replicas,
                "router": scenario.router if scenario.replicas > 1 else None,
                "policy": scenario.config.policy,
                "settings": {
                    "seed": scenario.seed,
                    "rate": scenario.rate,
                    "count": scenario.count,
                    "chats": _arrivals_json(scenario.chats),
                    "delay_s": scenario.delay_s,
                    "kv_blocks": scenario.device.kv_blocks,
                    "engine": dataclasses.asdict(scenario.config),
                },
                "results": dataclasses.asdict(report),
            }
            for scenario, report in finished
        ],
    }


# ---- `bros simulate` with one replica.


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSettings:
    """The checked options."""

    scenarios: tuple[SimulatedScenario, ...]
    profile: Profile
    jobs: int
    json_path: Path | None


def run_simulate(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
    clock: Clock,
    console: Console | None = None,
) -> int:
    """Simulate, print tables and write the file; returns the exit status.

    Raises ConfigError for an invalid option, KeyboardInterrupt after Ctrl-C: the runs that had
    finished by then are printed and written before.
    """
    if read_own(ProgramsFlags, args).programs is not None:
        return run_program_scenarios(args, environ, warn, clock, console)
    unused = changed_flags(read_own(ProgramsFlags, args))
    if unused:
        warn(f"{', '.join(unused)}: without effect, needs --programs")
    if read_own(ReplicasFlags, args).replicas is not None:
        return run_replicas(args, environ, warn, clock, console)
    settings = read_settings(args, environ, warn)
    console = table_console(console)
    runs = _run_timed(run_scenario, settings.scenarios, settings.jobs, clock)
    first = settings.scenarios[0]
    warm_up = f", the first {first.warm_up_s:g} s not counted" if first.warm_up_s else ""
    console.print(
        f"{_simulated(settings.profile, first.device)}; "
        f"{first.duration_s:g} s simulated{warm_up}, seed {first.seed}\n"
    )
    print_reports(console, runs.finished)
    _conclude(console, runs, settings.json_path, as_json(settings, runs.finished))
    return 0


def read_settings(
    args: argparse.Namespace, environ: Mapping[str, str], warn: Callable[[str], None]
) -> SimulateSettings:
    """Raises ConfigError, naming the invalid flag and the allowed values."""
    flags, own = given_flags(args), read_own(SimulateFlags, args)
    selected = names("--policy", own.policy or DEFAULT_POLICIES, POLICIES)
    config = load_config({**flags, "policy": selected[0]}, environ, warn)
    engine = config.engine
    data_dir = cache_dir_of(config.server.data_dir)
    profile = read_profile(engine.profile or DEFAULT_PROFILE, profile_folders(data_dir))
    device = device_of(profile, engine.kv_blocks)
    duration_s = number("--duration", own.duration, above=0)
    warm_up_s = number("--warm-up", own.warm_up, low=0)
    if warm_up_s >= duration_s:
        raise ConfigError(f"--warm-up: {warm_up_s:g} s must be less than --duration {duration_s:g}")
    noise = number("--noise", own.noise, low=0, below=10)
    correlation = number("--noise-correlation", own.noise_correlation, low=0, below=1)
    if correlation and not noise:
        raise ConfigError("--noise-correlation: has no effect without --noise")
    slowdown = number("--slowdown", own.slowdown, low=0.01, below=1000)
    scenarios = tuple(
        SimulatedScenario(
            config=_engine_config(engine, policy, alone=len(selected) == 1),
            device=device,
            rt=load,
            be=BeLoad(whole("--be", own.be, low=0), own.be_batches),
            seed=engine.seed,
            duration_s=duration_s,
            warm_up_s=warm_up_s,
            disturbance=Disturbance(noise=noise, correlation=correlation, slowdown=slowdown),
        )
        for load in _loads(own)
        for policy in selected
    )
    for scenario in scenarios:
        check_scenario(scenario)
    _warn_of_unused(engine, selected, warn)
    unused = changed_flags(read_own(ReplicasFlags, args))
    if unused:
        warn(f"{', '.join(unused)}: without effect, needs --replicas")
    jobs = own.jobs
    return SimulateSettings(
        scenarios=scenarios,
        profile=profile,
        jobs=available_cores() if jobs is None else whole("--jobs", jobs, low=1),
        json_path=writable(own.json),
    )


def as_json(
    settings: SimulateSettings, finished: Sequence[tuple[SimulatedScenario, Report]]
) -> dict[str, Any]:
    """Everything that determines the runs, and their results."""
    return {
        "bros": __version__,
        "python": platform.python_version(),
        "profile": json.loads(settings.profile.to_json()),
        "runs": [
            {
                "policy": scenario.config.policy,
                "load": scenario.rt.label,
                "settings": _scenario_json(scenario),
                "results": dataclasses.asdict(report),
            }
            for scenario, report in finished
        ],
    }


def _arrivals_json(load: RtLoad) -> dict[str, Any]:
    if isinstance(load, TraceLoad):
        return {"trace": load.source, "speed": load.speed}
    return dataclasses.asdict(load)  # type: ignore[call-overload, no-any-return]


def _scenario_json(scenario: SimulatedScenario) -> dict[str, Any]:
    return {
        "seed": scenario.seed,
        "duration_s": scenario.duration_s,
        "warm_up_s": scenario.warm_up_s,
        "rt": _arrivals_json(scenario.rt),
        "be": dataclasses.asdict(scenario.be),
        "kv_blocks": scenario.device.kv_blocks,
        "disturbance": dataclasses.asdict(scenario.disturbance),
        "engine": dataclasses.asdict(scenario.config),
    }


def _engine_config(engine: EngineConfig, policy: str, alone: bool) -> EngineConfig:
    """The options with one of the policies; --overload is reset for policies that cannot act on
    it, because they do not know how long steps take."""
    config = dataclasses.replace(with_step_bounds(engine), policy=policy)
    if alone or needs_cost_model(config):
        return config
    return dataclasses.replace(config, overload="late")


def _warn_of_unused(
    engine: EngineConfig, policies: Sequence[str], warn: Callable[[str], None]
) -> None:
    """Warn, once per policy, of options that have no effect with it."""
    for policy in policies:
        unused = unused_options(dataclasses.replace(engine, policy=policy))
        if _engine_config(engine, policy, alone=len(policies) == 1).overload != engine.overload:
            unused.append("--overload")
        if unused:
            warn(without_effect(unused, policy))


def _loads(own: SimulateFlags, default_rate: str = DEFAULT_RT_RATE) -> list[RtLoad]:
    if own.trace is not None:
        path = expand_user(own.trace)
        speed = number("--trace-speed", own.trace_speed, above=0)
        return [TraceLoad(path.name, _read(lambda: read_azure_trace(path)), speed)]
    sizes = own.rt_lengths
    if sizes not in RT_SIZES:
        near = near_matches(sizes, RT_SIZES)
        raise ConfigError(f"--rt-lengths: {sizes!r} is not one of {', '.join(RT_SIZES)}{near}")
    return [PoissonLoad(rate, sizes) for rate in rates("--rt-rate", own.rt_rate or default_rate)]
