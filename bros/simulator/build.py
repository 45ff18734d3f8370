"""Everything that determines a run, and how a run is put together from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.core.interfaces import EngineInfo
from bros.core.plan import StepPlan
from bros.core.request import Slo
from bros.engine.engine import Engine
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import CostModel
from bros.scheduler.scheduler import Scheduler
from bros.simulator.sim_executor import Disturbance, SimExecutor
from bros.simulator.simulation import Simulation
from bros.simulator.workload import BeLoad, RtLoad, generator

BLOCK_SIZE = 16
_VOCAB = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What is simulated: step times of a model on a machine, and its KV memory in blocks."""

    name: str
    model: str
    weights: str
    steps: CostModel
    kv_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run. Two runs of equal scenarios give the same records to the bit.

    disturbance: what the device does differently from what the scheduler is told. warm_up_s:
    the beginning that reports leave out, see metrics.py; less than duration_s.
    """

    config: EngineConfig
    device: Device
    rt: RtLoad
    be: BeLoad
    seed: int
    duration_s: float
    disturbance: Disturbance = Disturbance()
    warm_up_s: float = 0.0

    @property
    def slo(self) -> Slo:
        """What real-time requests are held to."""
        return slo_of(self.config)


def build_simulation(
    scenario: Scenario,
    *,
    observe: Callable[[StepPlan, float], None] | None = None,
    progress: Callable[[float], None] | None = None,
    watched: Callable[[Scheduler], Scheduler] = lambda scheduler: scheduler,
) -> Simulation:
    """Engine, virtual clock and workload. observe: see SimExecutor. watched: what the engine is
    given for its scheduler, such as one that takes the time of its calls.

    Raises ConfigError if the scenario cannot be run.
    """
    check_scenario(scenario)
    info = engine_info(scenario.config, scenario.device)
    clock = ManualClock()
    executor = SimExecutor(
        scenario.device.steps,
        clock,
        disturbance=scenario.disturbance,
        rng=generator(scenario.seed, "noise"),
        observe=observe,
    )
    scheduler = build_scheduler(_config(scenario), info, scenario.device.steps)
    engine = Engine(watched(scheduler), executor, clock, info)
    return Simulation(
        engine,
        executor,
        clock,
        rt=scenario.rt.arrivals(scenario.duration_s, scenario.seed),
        be=scenario.be,
        seed=scenario.seed,
        duration_s=scenario.duration_s,
        warm_up_s=scenario.warm_up_s,
        progress=progress,
    )


def check_scenario(scenario: Scenario) -> None:
    """Raise ConfigError if it cannot be run: options that do not go together, or requests that
    can never all be in flight.
    """
    info = engine_info(scenario.config, scenario.device)
    build_scheduler(_config(scenario), info, scenario.device.steps)
    be, max_model_len = scenario.be, info.max_model_len
    if be.in_flight > scenario.config.max_queue:
        raise ConfigError(
            f"--be: {be.in_flight} requests in flight need --max-queue {be.in_flight} or more, "
            f"it is {scenario.config.max_queue}"
        )
    if be.in_flight and be.sizes.longest > max_model_len:
        raise ConfigError(
            f"--be: requests of up to {be.sizes.longest} tokens do not fit, the longest that "
            f"can be served is {max_model_len}; see --kv-blocks and --max-model-len"
        )


def _config(scenario: Scenario) -> EngineConfig:
    """No two prompts begin alike."""
    return dataclasses.replace(with_step_bounds(scenario.config), prefix_cache="off")


def with_step_bounds(config: EngineConfig) -> EngineConfig:
    """The same, with the defaults of a CPU on every device: published figures depend on them."""
    rows, tokens = config.step_bounds("cpu")
    return dataclasses.replace(config, max_num_seqs=rows, max_batch_tokens=tokens)


def engine_info(config: EngineConfig, device: Device) -> EngineInfo:
    """What an engine says of itself that has these options and runs on this device."""
    fits = device.kv_blocks * BLOCK_SIZE
    return EngineInfo(
        model=device.model,
        weights=device.weights,
        kernels="simulated",
        kv_dtype="simulated",
        device=device.name,
        max_model_len=min(config.max_model_len or fits, fits),
        vocab_size=_VOCAB,
        block_size=BLOCK_SIZE,
        num_kv_blocks=device.kv_blocks,
        num_host_kv_blocks=(
            device.kv_blocks if config.host_kv_blocks is None else config.host_kv_blocks
        ),
        policy=config.policy,
        max_queue=config.max_queue,
        default_slo=slo_of(config),
        prices=device.steps.prices(with_step_bounds(config).step_bounds("cpu").tokens),
    )


def slo_of(config: EngineConfig) -> Slo:
    """What real-time requests are held to."""
    return Slo(ttft_s=config.slo_ttft / 1e3, tpot_s=config.slo_tpot / 1e3)
