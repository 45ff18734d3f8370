"""Small simulations of several replicas of a made-up device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bros.core.config import EngineConfig
from bros.router.state import RouterSettings
from bros.simulator.fleet import FleetScenario, fleet_config
from bros.simulator.prefix_workloads import Part, PrefixLoad, PrefixRequest, published
from bros.simulator.simulation import Device
from support.scenarios import STEPS


@dataclass(frozen=True, slots=True)
class GivenLoad:
    """These and no others."""

    given: tuple[PrefixRequest, ...]
    label: str = "given"

    def requests(self, seed: int) -> Sequence[PrefixRequest]:
        return self.given


def request(
    time_s: float, *, shared: int = 0, own: int = 8, output: int = 4, family: int = 0, **more: Any
) -> PrefixRequest:
    """`shared` tokens that its family has in common, and `own` ones of this moment."""
    parts = (Part(f"family {family}", shared),) if shared else ()
    name = more.pop("name", f"own {time_s} {family}")
    return PrefixRequest(
        time_s=time_s,
        parts=(*parts, Part(name, own)),
        output_tokens=output,
        family=family,
        **more,
    )


def fleet_scenario(
    router: str = "e2", load: PrefixLoad | None = None, **changes: Any
) -> FleetScenario:
    """A little of ToolBench on two replicas that have room for about eight tools.

    changes: fields of FleetScenario, or kv_blocks=, and options of EngineConfig.
    """
    fields = {
        name: changes.pop(name)
        for name in ("replicas", "report_delay_s", "decision_s", "seed", "classes", "settings")
        if name in changes
    }
    fields.setdefault("replicas", 2)
    fields.setdefault("seed", 1)
    fields.setdefault("settings", RouterSettings(warm_up=5))
    device = Device(
        name="toy",
        model="toy",
        weights="fp32",
        steps=changes.pop("steps", STEPS),
        kv_blocks=changes.pop("kv_blocks", 1000),
    )
    load = load or published("toolbench", 2, rate=20.0, count=120, families=10)
    config = fleet_config(EngineConfig(**{"policy": "fcfs", **changes}))
    return FleetScenario(config=config, device=device, router=router, load=load, **fields)
