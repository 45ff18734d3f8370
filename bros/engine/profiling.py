"""The step time model an engine starts with: given, stored or measured on the spot."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bros.core.clock import Clock
from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.core.interfaces import EngineInfo, Executor
from bros.engine.copy_timing import COPIED_TOKENS, OVERLAPPED_TOKENS, measure_copies
from bros.engine.step_grid import StepLimits, full_grid, quick_grid, random_steps
from bros.engine.step_timing import Progress, measure_steps
from bros.executor.layers.linear import token_padding
from bros.scheduler.cost_model import CostModel
from bros.scheduler.fitting import CopySample, Fit, Sample, fit, with_copies
from bros.scheduler.profiles import (
    MEASURED,
    QUICK,
    Profile,
    ProfileKey,
    available_cores,
    device_slug,
    find_profile,
    iso_date,
    load_profile,
    versions,
)

MAX_STORED_ERROR = 0.10
"""Mean relative error above which quick measurements are not kept: the machine was busy."""

_QUICK_REPEATS, _QUICK_LIMIT_S = 2, 10.0
_QUICK_TOKENS, _QUICK_GPU_TOKENS = 256, 4096
_QUICK_COPIES_S, _COPIES_S, _COPY_REPEATS = 2.0, 30.0, 8
_HELD_OUT_STEPS = 60


def profile_key(config: EngineConfig, info: EngineInfo) -> ProfileKey:
    """What a profile of this engine holds for. The number of threads matters on a CPU only."""
    cores = available_cores()
    on_cpu = info.device == "cpu"
    return ProfileKey(
        device=device_slug(info.device, cores),
        model=info.model,
        weights=info.weights,
        kernels=info.kernels,
        kv_dtype=info.kv_dtype,
        threads=config.threads_of_rank(cores, info.tp) if on_cpu else 0,
        tp=info.tp,
    )


def step_time_model(
    config: EngineConfig,
    executor: Executor,
    info: EngineInfo,
    clock: Clock,
    folders: Sequence[Path],
    report: Callable[[str], None],
) -> CostModel:
    """config.profile if there is one, else a stored profile that matches, else a quick measuring.

    folders: where profiles are stored, see profiles.profile_folders; what was measured is kept
    in the first one, unless it does not fit well. report is told, one line each, what takes long
    and what is not as it should be. Measuring overwrites the KV memory.
    Raises ConfigError if config.profile cannot be read.
    """
    key = profile_key(config, info)
    if config.profile is not None:
        return _given(Path(config.profile).expanduser(), key, report).model
    found = find_profile(folders, key, report, _quick_tokens(config, info))
    if found is not None:
        return found.model
    report("Measuring how long steps take, for some seconds; `bros profile` does it thoroughly ...")
    profile = quick_profile(config, executor, info, clock)
    assert profile.fitted is not None
    if profile.fitted.mape > MAX_STORED_ERROR:
        report(
            f"the measured step times vary by {profile.fitted.mape:.0%}, perhaps because the "
            "machine is busy; they are used, but not kept"
        )
    elif folders:
        _keep(profile, folders[0], report)
    return profile.model


def quick_profile(
    config: EngineConfig, executor: Executor, info: EngineInfo, clock: Clock
) -> Profile:
    """Measured in seconds, with about thirty steps of up to 256 tokens, or 4096 on a GPU,
    and a few with copies of KV."""
    limits = StepLimits.of(config, info)
    limits = dataclasses.replace(limits, tokens=_quick_tokens(config, info))
    samples = measure_steps(
        executor,
        info,
        limits,
        quick_grid(limits),
        clock,
        repeats=_QUICK_REPEATS,
        time_limit_s=_QUICK_LIMIT_S,
    )
    fitting = fit(samples, token_padding(info.device))
    copies = _copies(executor, info, clock, _QUICK_REPEATS, _QUICK_COPIES_S)
    return _profile(QUICK, config, info, fitting, samples, copies, clock)


def _copies(
    executor: Executor, info: EngineInfo, clock: Clock, repeats: int, time_limit_s: float
) -> list[CopySample]:
    overlap = _overlaps(info)
    sizes = OVERLAPPED_TOKENS if overlap else COPIED_TOKENS
    return measure_copies(
        executor, info, clock,
        repeats=repeats, sizes=sizes, overlap=overlap, time_limit_s=time_limit_s,
    )  # fmt: skip


def _overlaps(info: EngineInfo) -> bool:
    """Whether copies of KV run beside the computation."""
    return info.device != "cpu"


def _quick_tokens(config: EngineConfig, info: EngineInfo) -> int:
    """Of the largest step that is measured quickly."""
    most = _QUICK_TOKENS if info.device == "cpu" else _QUICK_GPU_TOKENS
    return min(config.step_bounds(info.device).tokens, most)


@dataclass(frozen=True, slots=True)
class Measured:
    """A full profile with the measurements behind it: those fitted to, the others, and copies."""

    profile: Profile
    fitted: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    copies: tuple[CopySample, ...]


def full_profile(
    config: EngineConfig,
    executor: Executor,
    info: EngineInfo,
    clock: Clock,
    *,
    repeats: int,
    progress: Progress,
) -> Measured:
    """Measured in minutes, and judged by random mixed steps that it is not fitted to."""
    limits = StepLimits.of(config, info)
    grid = full_grid(limits)
    others = [
        shape
        for shape in random_steps(limits, _HELD_OUT_STEPS, random.Random(0))
        if shape not in grid
    ]
    samples = measure_steps(
        executor, info, limits, [*grid, *others], clock, repeats=repeats, progress=progress
    )
    fitted, held_out = samples[: len(grid)], samples[len(grid) :]
    copies = _copies(executor, info, clock, max(repeats, _COPY_REPEATS), _COPIES_S)
    fitting = fit(fitted, token_padding(info.device), held_out)
    profile = _profile(MEASURED, config, info, fitting, fitted, copies, clock)
    return Measured(profile, tuple(fitted), tuple(held_out), tuple(copies))


def _profile(
    kind: str,
    config: EngineConfig,
    info: EngineInfo,
    fitting: Fit,
    samples: Sequence[Sample],
    copies: Sequence[CopySample],
    clock: Clock,
) -> Profile:
    return Profile(
        key=profile_key(config, info),
        kind=kind,
        model=with_copies(fitting.model, copies, _overlaps(info)),
        versions=versions(),
        date=iso_date(clock),
        steps=len(samples),
        max_step_tokens=max(sum(chunk.tokens for chunk in s.chunks) for s in samples),
        fitted=fitting.fitted,
        held_out=fitting.held_out,
    )


def _given(path: Path, key: ProfileKey, report: Callable[[str], None]) -> Profile:
    try:
        profile = load_profile(path)
    except ConfigError as error:
        raise ConfigError(f"--profile: {error}") from None
    for field in dataclasses.fields(ProfileKey):
        here, there = getattr(key, field.name), getattr(profile.key, field.name)
        if here != there:
            name = field.name.replace("_", " ")
            report(f"{path} is for {name} {there}, but this engine has {here}")
    return profile


def _keep(profile: Profile, folder: Path, report: Callable[[str], None]) -> None:
    """A folder that cannot be written to costs the next start some seconds, no more."""
    try:
        profile.save(folder)
    except OSError as error:
        report(f"the measured step times cannot be kept in {folder}: {error}")
