"""`bros simulate --replicas`: routers compared on a virtual clock, without a model."""

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
from bros.core.flag_values import doublings, number, policies, whole
from bros.router.state import ROUTERS
from bros.scheduler.profiles import Profile, available_cores, profile_folders
from bros.simulator.flags import (
    AZURE,
    AZURE_RATE,
    MOONCAKE_RATE,
    MOST_REQUESTS,
    ONE_ENGINE,
    POPULARITIES,
    RECORDED,
    REPLICA_POLICY,
    REPLICA_PROFILE,
    WORKLOADS,
    changed_flags,
)
from bros.simulator.fleet import (
    FleetReport,
    FleetScenario,
    check_fleet_scenario,
    fleet_config,
    run_fleet,
)
from bros.simulator.prefix_workloads import (
    KINDS,
    AzureLoad,
    MooncakeLoad,
    PrefixLoad,
    Workload,
    published,
    read_azure_times,
    read_mooncake_trace,
)
from bros.simulator.simulation import device_of, read_profile
from bros.simulator.sweep import run_all
from bros.simulator.tables import print_fleet_reports, progress_bar, wide, writable, write

_MOST_REPLICAS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """What the command line asks for. shortened: replicas for which there would be more requests
    if runs with as many were not too long."""

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

    Raises ConfigError for a wrong option.
    """
    settings = read_replica_settings(args, environ, warn)
    console = wide(console)
    start_s = clock.now()
    with progress_bar(len(settings.scenarios)) as told:
        reports = run_all(run_fleet, settings.scenarios, settings.jobs, told)
    wall_s = clock.now() - start_s
    key, first = settings.profile.key, settings.scenarios[0]
    console.print(
        f"{key.model} ({key.weights}) on {first.device.name}, {settings.profile.kind} profile, "
        f"each replica; seed {first.seed}"
    )
    if settings.shortened:
        counts = ", ".join(map(str, settings.shortened))
        console.print(
            f"With {counts} replicas: only {MOST_REQUESTS} requests, and families to match, "
            "so these runs are shorter than others; --requests N asks for more"
        )
    console.print()
    print_fleet_reports(console, list(zip(settings.scenarios, reports, strict=True)))
    if settings.json_path is not None:
        content = {**replicas_json(settings, reports), "wall_s": round(wall_s, 3)}
        write(settings.json_path, json.dumps(content, indent=2) + "\n")
    runs = f"{len(reports)} runs" if len(reports) > 1 else "1 run"
    console.print(f"{runs} in {wall_s:.1f} s", style="dim")
    return 0


def read_replica_settings(
    args: argparse.Namespace, environ: Mapping[str, str], warn: Callable[[str], None]
) -> ReplicaSettings:
    """Raises ConfigError naming the flag that is wrong and what is allowed."""
    names = policies("--policy", args.simulate_policy or REPLICA_POLICY)
    config = load_config({**given_flags(args), "policy": names[0]}, environ, warn)
    engine = config.engine
    data_dir = Path(config.server.data_dir or "~/.cache/bros").expanduser()
    profile = read_profile(engine.profile or REPLICA_PROFILE, profile_folders(data_dir))
    device = device_of(profile, engine.kv_blocks)
    counts = doublings("--replicas", args.simulate_replicas, _MOST_REPLICAS)
    loads = {replicas: _load(args, replicas) for replicas in counts}
    be_share = number("--be-requests", args.simulate_be_requests, low=0)
    scenarios = tuple(
        FleetScenario(
            config=_under(engine, policy),
            device=device,
            replicas=replicas,
            router=router,
            load=loads[replicas],
            seed=engine.seed,
            notice_s=number("--notice-delay", args.simulate_notice_delay, low=0) / 1e3,
            decision_s=number("--decision-time", args.simulate_decision_time, low=0) / 1e3,
            classes=be_share > 0.0,
        )
        for policy in names
        for replicas in counts
        for router in _names("--router", args.simulate_router, ROUTERS)
    )
    for scenario in scenarios:
        check_fleet_scenario(scenario)
    _warn_of_one_engine(args, warn)
    jobs, asked = args.simulate_jobs, args.simulate_requests
    return ReplicaSettings(
        scenarios=scenarios,
        profile=profile,
        shortened=tuple(n for n in counts if asked is None and _is_shortened(loads[n], n)),
        jobs=available_cores() if jobs is None else whole("--jobs", jobs, low=1),
        json_path=writable(args.simulate_json),
    )


def replicas_json(settings: ReplicaSettings, reports: Sequence[FleetReport]) -> dict[str, Any]:
    """Everything that determines the runs, and what came of them."""
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
            for scenario, report in zip(settings.scenarios, reports, strict=True)
        ],
    }


def scenario_json(scenario: FleetScenario) -> dict[str, Any]:
    """Without the recorded requests of a trace."""
    load = dataclasses.asdict(scenario.load)  # type: ignore[call-overload]
    load.pop("recorded", None)
    return {
        "seed": scenario.seed,
        "load": load,
        "kv_blocks": scenario.device.kv_blocks,
        "notice_s": scenario.notice_s,
        "decision_s": scenario.decision_s,
        "router": dataclasses.asdict(scenario.settings),
        "engine": dataclasses.asdict(scenario.config),
    }


def _under(engine: EngineConfig, policy: str) -> EngineConfig:
    return dataclasses.replace(fleet_config(engine), policy=policy)


def _load(args: argparse.Namespace, replicas: int) -> PrefixLoad:
    """The workload of one run, scaled to so many replicas where nothing else is asked for."""
    (name,) = _names("--workload", args.simulate_workload, WORKLOADS, most=1)
    (popularity,) = _names("--popularity", args.simulate_popularity, POPULARITIES, most=1)
    rate = _optional_number("--rate", args.simulate_rate)
    count = _optional_whole("--requests", args.simulate_requests)
    families = _optional_whole("--families", args.simulate_families)
    be_share = number("--be-requests", args.simulate_be_requests, low=0)
    if be_share > 1.0:
        raise ConfigError(f"--be-requests: {be_share:g} must be at most 1")
    if name in RECORDED:
        if families is not None or popularity != POPULARITIES[0]:
            raise ConfigError(f"--families, --popularity: not to be set with --workload {name}")
        return _recorded(name, args.simulate_trace, replicas, rate, count, be_share)
    if args.simulate_trace is not None:
        raise ConfigError(f"--trace: only --workload {' and '.join(RECORDED)} have one")
    if count is None:
        count = min(_published_count(name, replicas), MOST_REQUESTS)
    return published(
        name,
        replicas,
        rate=rate,
        count=count,
        families=families,
        popularity=popularity,
        be_share=be_share,
    )


def _recorded(
    name: str,
    trace: str | None,
    replicas: int,
    rate: float | None,
    count: int | None,
    be_share: float,
) -> PrefixLoad:
    if trace is None:
        raise ConfigError(f"--workload {name}: --trace says which file")
    if name == AZURE:
        paths = [Path(part.strip()).expanduser() for part in trace.split(",")]
        if len(paths) != 2:
            raise ConfigError(f"--trace: {AZURE} has two, of code and of conversations: CODE,CHATS")
        times = read_azure_times(*paths)
        return AzureLoad(
            recorded=times,
            rate=rate or AZURE_RATE * replicas,
            count=min(count or MOST_REQUESTS, len(times)),
            be_share=be_share,
        )
    path = Path(trace).expanduser()
    lines = read_mooncake_trace(path)
    return MooncakeLoad(
        source=path.name,
        recorded=lines,
        rate=rate or MOONCAKE_RATE * replicas,
        count=min(count or MOST_REQUESTS, len(lines)),
        be_share=be_share,
    )


def _published_count(name: str, replicas: int) -> int:
    return max(1, KINDS[name].count * replicas // 2)


def _is_shortened(load: PrefixLoad, replicas: int) -> bool:
    return isinstance(load, Workload) and load.count < _published_count(load.name, replicas)


def _names(flag: str, text: str, known: Sequence[str], most: int | None = None) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            near = near_matches(name, known)
            raise ConfigError(f"{flag}: {name!r} is not one of {', '.join(known)}{near}")
    if most is not None and len(names) > most:
        raise ConfigError(f"{flag}: takes one of {', '.join(known)}, not {len(names)}")
    return names


def _optional_number(flag: str, text: str | None) -> float | None:
    return None if text is None else number(flag, text, above=0)


def _optional_whole(flag: str, text: str | None) -> int | None:
    return None if text is None else whole(flag, text, low=1)


def _warn_of_one_engine(args: argparse.Namespace, warn: Callable[[str], None]) -> None:
    """One line if flags were changed that only a single engine has a use for."""
    unused = [flag for flag in changed_flags(args) if flag in ONE_ENGINE]
    if unused:
        warn(f"{', '.join(unused)}: without effect with --replicas")
