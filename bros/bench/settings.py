"""What the command line of `bros bench` asks for, checked."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from bros.bench.dialects import Endpoint, dialect_of
from bros.bench.flags import SCENARIOS
from bros.bench.planning import Range, Wanted, has_own_times
from bros.bench.results import Command, Scenario, environment
from bros.bench.running import BeAs, Measuring, Target
from bros.bench.workloads.catalogue import find
from bros.bench.workloads.contents import FILES
from bros.bench.workloads.fitting import Overlong
from bros.core.clock import Clock
from bros.core.config import Config
from bros.core.config_sources import given_flags, load_config, options_of
from bros.core.errors import ConfigError
from bros.core.flag_values import number, policies, rates, whole
from bros.core.request import Slo

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

_NOT_FOR_SERVERS = ("policy", "host", "port")
_OF_FILES = ("bench_out", "bench_append", "bench_report_only")


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


def read_settings(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
    clock: Clock,
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
    command = Command(
        environment=environment(clock), settings=_shown(args, config), seed=wanted.seed, slo=slo
    )
    return Settings(
        config=config,
        policies=policies("--policies", args.bench_policies),
        target=target,
        scenarios=_scenarios(args.bench_scenarios),
        rates=rt_rates,
        capacity=capacity,
        wanted=wanted,
        measuring=Measuring(
            command=command,
            warm_up_s=warm_up_s,
            endpoint=_choice("--endpoint", Endpoint, args.bench_endpoint),
            context=_optional_whole("--context", args.bench_context),
            be_as=_choice("--be-as", BeAs, args.bench_be_as),
        ),
        server_arguments=tuple(server_arguments),
        out=Path(args.bench_out).expanduser(),
        append=args.bench_append,
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


def _choice(flag: str, kind: type[E], text: str) -> E:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not one of {', '.join(kind)}") from None


def _optional_whole(flag: str, text: str | None) -> int | None:
    return None if text is None else whole(flag, text, low=1)


def _shown(args: argparse.Namespace, config: Config) -> dict[str, str | int | float | bool | None]:
    """Our own options, and those of servers that are no defaults, wherever they were set.

    No keys, and of folders only their names.
    """
    given = {
        name.removeprefix("bench_"): value
        for name, value in sorted(vars(args).items())
        if name.startswith("bench_") and name not in _OF_FILES
    }
    for part in (config.engine, config.server):
        for option in options_of(type(part)):
            value = getattr(part, option.name)
            hidden = option.name in _NOT_FOR_SERVERS or option.field.metadata.get("secret")
            if value != option.field.default and not hidden:
                given[option.name] = value
    return _by_flag({name: _without_folder(value) for name, value in given.items()})


def _by_flag(values: Mapping[str, T]) -> dict[str, T]:
    """Option names as they are written."""
    return {"--" + name.replace("_", "-"): value for name, value in values.items()}


def _without_folder(value: Any) -> Any:
    """`value`, or of a path, or of a path in the name of a workload, the file name."""
    if not isinstance(value, str):
        return value
    kind, colon, path = value.partition(":")
    if colon and kind in FILES:
        return f"{kind}:{Path(path).name}"
    return Path(value).name if Path(value).is_absolute() else value
