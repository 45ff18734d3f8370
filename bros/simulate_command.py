"""`bros simulate`: policies compared on a virtual clock, without a model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bros import __version__
from bros.core.clock import Clock
from bros.core.config import EngineConfig
from bros.core.config_sources import given_flags, load_config, near_matches
from bros.core.errors import ConfigError
from bros.core.flag_values import number, policies, rates, whole
from bros.scheduler.build import unused_options, without_effect
from bros.scheduler.profiles import Profile, available_cores, profile_folders
from bros.simulate_replicas import run_replicas
from bros.simulator.flags import DEFAULT_POLICIES, DEFAULT_PROFILE, OF_REPLICAS, changed_flags
from bros.simulator.metrics import Report
from bros.simulator.simulation import (
    Disturbance,
    Scenario,
    check_scenario,
    device_of,
    read_profile,
    with_step_bounds,
)
from bros.simulator.sweep import run_sweep
from bros.simulator.tables import print_reports, progress_bar, wide, writable, write
from bros.simulator.traces import read_azure_trace
from bros.simulator.workload import RT_SIZES, BeLoad, PoissonLoad, RtLoad, TraceLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line asks for."""

    scenarios: tuple[Scenario, ...]
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

    Raises ConfigError for a wrong option.
    """
    if args.simulate_replicas is not None:
        return run_replicas(args, environ, warn, clock, console)
    settings = read_settings(args, environ, warn)
    console = wide(console)
    start_s = clock.now()
    with progress_bar(len(settings.scenarios)) as told:
        reports = run_sweep(settings.scenarios, settings.jobs, told)
    wall_s = clock.now() - start_s
    key, first = settings.profile.key, settings.scenarios[0]
    warm_up = f", the first {first.warm_up_s:g} s not counted" if first.warm_up_s else ""
    console.print(
        f"{key.model} ({key.weights}) on {first.device.name}, {settings.profile.kind} profile; "
        f"{first.duration_s:g} s simulated{warm_up}, seed {first.seed}\n"
    )
    print_reports(console, list(zip(settings.scenarios, reports, strict=True)))
    if settings.json_path is not None:
        content = {**as_json(settings, reports), "wall_s": round(wall_s, 3)}
        write(settings.json_path, json.dumps(content, indent=2) + "\n")
    runs = f"{len(reports)} runs" if len(reports) > 1 else "1 run"
    console.print(f"{runs} in {wall_s:.1f} s", style="dim")
    return 0


def read_settings(
    args: argparse.Namespace, environ: Mapping[str, str], warn: Callable[[str], None]
) -> Settings:
    """Raises ConfigError naming the flag that is wrong and what is allowed."""
    flags = given_flags(args)
    names = policies("--policy", args.simulate_policy or DEFAULT_POLICIES)
    config = load_config({**flags, "policy": names[0]}, environ, warn)
    engine = config.engine
    data_dir = Path(config.server.data_dir or "~/.cache/bros").expanduser()
    profile = read_profile(engine.profile or DEFAULT_PROFILE, profile_folders(data_dir))
    device = device_of(profile, engine.kv_blocks)
    duration_s = number("--duration", args.simulate_duration, above=0)
    warm_up_s = number("--warm-up", args.simulate_warm_up, low=0)
    if warm_up_s >= duration_s:
        raise ConfigError(f"--warm-up: {warm_up_s:g} s leave nothing of --duration {duration_s:g}")
    scenarios = tuple(
        Scenario(
            config=_engine_config(engine, policy, alone=len(names) == 1),
            device=device,
            rt=load,
            be=BeLoad(whole("--be", args.simulate_be, low=0), args.be_batches),
            seed=engine.seed,
            duration_s=duration_s,
            warm_up_s=warm_up_s,
            disturbance=Disturbance(
                noise=number("--noise", args.simulate_noise, low=0),
                slowdown=number("--slowdown", args.simulate_slowdown, above=0),
            ),
        )
        for load in _loads(args)
        for policy in names
    )
    for scenario in scenarios:
        check_scenario(scenario)
    _warn_of_unused(engine, names, warn)
    unused = [flag for flag in changed_flags(args) if flag in OF_REPLICAS]
    if unused:
        warn(f"{', '.join(unused)}: without effect, --replicas is missing")
    jobs = args.simulate_jobs
    return Settings(
        scenarios=scenarios,
        profile=profile,
        jobs=available_cores() if jobs is None else whole("--jobs", jobs, low=1),
        json_path=writable(args.simulate_json),
    )


def as_json(settings: Settings, reports: Sequence[Report]) -> dict[str, Any]:
    """Everything that determines the runs, and what came of them."""
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
            for scenario, report in zip(settings.scenarios, reports, strict=True)
        ],
    }


def _scenario_json(scenario: Scenario) -> dict[str, Any]:
    rt = scenario.rt
    arrivals: dict[str, Any] = (
        {"trace": rt.source, "speed": rt.speed}
        if isinstance(rt, TraceLoad)
        else dataclasses.asdict(rt)  # type: ignore[call-overload]
    )
    return {
        "seed": scenario.seed,
        "duration_s": scenario.duration_s,
        "warm_up_s": scenario.warm_up_s,
        "rt": arrivals,
        "be": dataclasses.asdict(scenario.be),
        "kv_blocks": scenario.device.kv_blocks,
        "disturbance": dataclasses.asdict(scenario.disturbance),
        "engine": dataclasses.asdict(scenario.config),
    }


def _engine_config(engine: EngineConfig, policy: str, alone: bool) -> EngineConfig:
    """The options under one of the policies; what only bros can do is not asked of the others."""
    changes = {"policy": policy}
    if policy != "bros" and not alone:
        changes["overload"] = "late"
    return dataclasses.replace(with_step_bounds(engine), **changes)  # type: ignore[arg-type]


def _warn_of_unused(
    engine: EngineConfig, policies: Sequence[str], warn: Callable[[str], None]
) -> None:
    """One line for each policy that options were given for which it has no use."""
    for policy in policies:
        unused = unused_options(dataclasses.replace(engine, policy=policy))
        if _engine_config(engine, policy, alone=len(policies) == 1).overload != engine.overload:
            unused.append("--overload")
        if unused:
            warn(without_effect(unused, policy))


def _loads(args: argparse.Namespace) -> list[RtLoad]:
    if args.simulate_trace is not None:
        path = Path(args.simulate_trace)
        speed = number("--trace-speed", args.simulate_trace_speed, above=0)
        return [TraceLoad(path.name, read_azure_trace(path), speed)]
    sizes = args.simulate_rt_lengths
    if sizes not in RT_SIZES:
        near = near_matches(sizes, RT_SIZES)
        raise ConfigError(f"--rt-lengths: {sizes!r} is not one of {', '.join(RT_SIZES)}{near}")
    return [PoissonLoad(rate, sizes) for rate in rates("--rt-rate", args.simulate_rt_rate)]
