"""Small simulations of a made-up device."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from bros.core.config import EngineConfig
from bros.scheduler.cost_model import CostModel
from bros.simulator.simulation import Device, SimulatedScenario
from bros.workload.arrivals import BeLoad, PoissonLoad

STEPS = CostModel(
    constant_s=6e-3,
    token_s=1e-6,
    sample_s=2e-6,
    pair_s=1e-9,
    context_s=3e-8,
    hinges=((256, 2e-5),),
)
"""About an 8-billion model on a large accelerator."""

SLOW = CostModel(constant_s=0.03, token_s=0.001, sample_s=2e-4, pair_s=4e-7, context_s=2e-6)
"""About the embedded model on two cores: a prompt of 250 tokens leaves little time to wait."""


def scenario(policy: str = "priority", **changes: Any) -> SimulatedScenario:
    """4 real-time requests per second and 4 best-effort ones in flight, for 10 s.

    changes: fields of Scenario, or rate=, kv_blocks=, steps=, and options of EngineConfig.
    """
    own = {
        name: changes.pop(name)
        for name in ("rt", "be", "disturbance", "warm_up_s")
        if name in changes
    }
    own["seed"], own["duration_s"] = changes.pop("seed", 1), changes.pop("duration_s", 10.0)
    own.setdefault("rt", PoissonLoad(changes.pop("rate", 4.0), "lmsys"))
    own.setdefault("be", BeLoad(4))
    device = Device(
        name="toy",
        model="toy",
        weights="fp32",
        steps=changes.pop("steps", STEPS),
        kv_blocks=changes.pop("kv_blocks", 4000),
    )
    config = EngineConfig(policy=policy, **changes)
    return SimulatedScenario(config=config, device=device, **own)


class DeadlyLoad:
    """Ends the process that asks what arrives, as running out of memory would."""

    label = "deadly"

    def arrivals(self, duration_s: float, seed: int) -> NoReturn:
        os._exit(3)
