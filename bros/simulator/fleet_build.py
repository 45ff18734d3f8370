"""Everything that determines a run on several replicas, and how it is put together from that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.core.request import EngineRequest
from bros.engine.engine import Engine
from bros.router.build import make_fleet
from bros.router.settings import ReplicaFacts, RouterSettings
from bros.scheduler.build import build_scheduler
from bros.simulator.build import BLOCK_SIZE, Device, engine_info, slo_of
from bros.simulator.flags import REPLICA_ROWS, REPLICA_STEP_TOKENS
from bros.simulator.fleet_metrics import FleetReport, fleet_report
from bros.simulator.fleet_simulation import NO_SLO, FleetSimulation, SimReplica
from bros.simulator.prefix_requests import VOCAB, PrefixLoad, PrefixRequest
from bros.simulator.sim_executor import SimExecutor
from bros.simulator.workload import generator

_MANY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetScenario:
    """One run. Two runs of equal scenarios give the same records to the bit.

    notice_s, decision_s: see FleetSimulation. classes: there are best-effort requests,
    and real-time ones bring their objectives.
    """

    config: EngineConfig
    device: Device
    replicas: int
    router: str
    load: PrefixLoad
    seed: int
    settings: RouterSettings = field(default_factory=RouterSettings)
    notice_s: float = 0.05
    decision_s: float = 0.0
    classes: bool = False


def fleet_config(engine: EngineConfig) -> EngineConfig:
    """The options, with what the paper's engines had where nothing is said: their steps, and no
    copies of KV on the host. No limit to the queue: every request is to be served."""
    return dataclasses.replace(
        engine,
        max_num_seqs=engine.max_num_seqs or REPLICA_ROWS,
        max_batch_tokens=engine.max_batch_tokens or REPLICA_STEP_TOKENS,
        host_kv_blocks=engine.host_kv_blocks or 0,
        max_queue=_MANY,
    )


def run_fleet(
    scenario: FleetScenario, progress: Callable[[float], None] | None = None
) -> FleetReport:
    """Simulate one scenario. Raises ConfigError if it cannot be run."""
    result = build_fleet_simulation(scenario, progress=progress).run()
    return fleet_report(result, slo_of(scenario.config))


def build_fleet_simulation(
    scenario: FleetScenario, *, progress: Callable[[float], None] | None = None
) -> FleetSimulation:
    """Engines, their clocks, router and workload. Raises ConfigError if it cannot be run."""
    check_fleet_scenario(scenario)
    requests = _servable(scenario)
    fleet = make_fleet(
        scenario.router,
        scenario.settings,
        block_size=BLOCK_SIZE,
        oracle=oracle_of(requests, scenario.seed),
    )
    bounds = scenario.config.step_bounds(scenario.device.name)
    yields = scenario.config.policy == "bros"
    facts = ReplicaFacts(
        capacity_tokens=scenario.device.kv_blocks * BLOCK_SIZE,
        prices=scenario.device.steps.prices(bounds.tokens),
        yields=yields,
        ttft_s=slo_of(scenario.config).ttft_s if yields else None,
    )
    replicas = [_replica(scenario) for _ in range(scenario.replicas)]
    for replica in replicas:
        replica.number = fleet.add(facts, 0.0)
    return FleetSimulation(
        replicas,
        fleet,
        requests,
        seed=scenario.seed,
        notice_s=scenario.notice_s,
        decision_s=scenario.decision_s,
        slo=slo_of(scenario.config) if scenario.classes else NO_SLO,
        progress=progress,
    )


def check_fleet_scenario(scenario: FleetScenario) -> None:
    """Raise ConfigError if options do not go together."""
    info = engine_info(scenario.config, scenario.device)
    build_scheduler(scenario.config, info, scenario.device.steps)
    if scenario.config.prefix_cache == "off":
        raise ConfigError("--prefix-cache: off leaves a router nothing to route by")


def oracle_of(requests: Sequence[PrefixRequest], seed: int) -> Callable[[EngineRequest], int]:
    """The part of each request: families in a drawn order, dealt out like cards."""
    families = sorted({request.family for request in requests})
    generator(seed, "oracle").shuffle(families)
    parts = {family: part for part, family in enumerate(families)}
    return lambda request: parts[requests[int(request.request_id)].family]


def _replica(scenario: FleetScenario) -> SimReplica:
    info = dataclasses.replace(engine_info(scenario.config, scenario.device), vocab_size=VOCAB)
    clock = ManualClock()
    executor = SimExecutor(scenario.device.steps, clock)
    scheduler = build_scheduler(scenario.config, info, scenario.device.steps)
    engine = Engine(scheduler, executor, clock, info)
    engine.watch()
    return SimReplica(engine, executor, clock)


def _servable(scenario: FleetScenario) -> Sequence[PrefixRequest]:
    """Raises ConfigError if a request is too long for a replica."""
    requests = scenario.load.requests(scenario.seed)
    limit = engine_info(scenario.config, scenario.device).max_model_len
    longest = max((r.prompt_tokens + r.output_tokens for r in requests), default=0)
    if longest > limit:
        raise ConfigError(
            f"--workload: it has requests of {longest} tokens, the longest that can be served is "
            f"{limit}; see --kv-blocks and --max-model-len"
        )
    return requests
