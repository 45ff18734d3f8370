"""Builds an engine from its configuration. Imports torch: not for the server process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from bros.core.clock import Clock
from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo, Executor, find_launcher
from bros.engine.engine import Engine
from bros.engine.grammars import Grammars
from bros.engine.group import Group
from bros.executor.model_store import ModelFiles
from bros.profiling.measuring import step_time_profile
from bros.scheduler.build import (
    best_effort_yields,
    build_scheduler,
    needs_cost_model,
    objectives_too_tight,
    unused_options,
    without_effect,
)
from bros.scheduler.cost_model import CostModel


def build_engine(
    config: EngineConfig,
    files: ModelFiles,
    clock: Clock,
    *,
    profiles: Sequence[Path] = (),
    profile_before: str = "",
    report: Callable[[str], None] = lambda line: None,
    group: Group | None = None,
) -> Engine:
    """Load the model and set up KV memory and scheduling.

    profiles: folders of profiles, the user's own first; without a matching profile, some steps
        are measured now.
    profile_before: EngineInfo.profile of the engine that this one replaces; empty without one.
    report: called with one line for each operation that takes long.
    group: the ranks that run the model, of which this is rank 0; None: this process is alone.

    Raises ModelError if the model cannot be served, ConfigError if an option does not fit it.
    """
    executor, info = (group or Group(config)).lead(files)
    info = dataclasses.replace(
        info, default_slo=config.default_slo, yields=best_effort_yields(config)
    )
    unused = unused_options(config)
    if unused:
        report(without_effect(unused, config.policy))
    model = None
    if needs_cost_model(config):
        profile = step_time_profile(config, executor, info, clock, profiles, report, profile_before)
        model = profile.model
        if warning := objectives_too_tight(config, model):
            report(warning)
        info = dataclasses.replace(
            info,
            prices=model.prices(config.step_bounds(info.device).tokens),
            profile=profile.to_json(),
        )
    grammars = Grammars(files.folder, info, clock)
    return with_scheduler(config, executor, info, clock, model, grammars)


def with_scheduler(
    config: EngineConfig,
    executor: Executor,
    info: EngineInfo,
    clock: Clock,
    model: CostModel | None = None,
    grammars: Grammars | None = None,
) -> Engine:
    """An engine of this executor, with the scheduler that the configuration asks for.

    model: predicts step times, for the policies that need it.
    grammars: None: requests with grammars are refused.

    Raises ConfigError if an option does not fit the executor.
    """
    launches = find_launcher(executor, config.async_scheduling) is not None
    scheduler = build_scheduler(config, info, model, depth=2 if launches else 1)
    return Engine(
        scheduler,
        executor,
        clock,
        info,
        async_scheduling=config.async_scheduling,
        grammars=grammars,
    )
