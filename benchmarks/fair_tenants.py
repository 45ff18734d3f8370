"""One tenant sends much more than its share: what the others notice of it, in virtual time.

    python benchmarks/fair_tenants.py [--profile NAME] [--json FILE] [--quick]

Four tenants chat, and each keeps best-effort requests in flight. Then one of them sends ten or
twenty times as many chats, or has ten times as many best-effort requests in flight. Each case runs
twice with each seed: as the engine sees the tenants, and as if all requests were of one tenant, so
that shares play no part.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness import benchmark_parser, profile_named, save, table_of
from rich.console import Console

from bros.core.config import EngineConfig
from bros.core.request import EngineRequest, ServiceClass
from bros.profiling.profiles import Profile
from bros.scheduler.scheduler import Scheduler
from bros.simulator.metrics import report_of
from bros.simulator.simulation import (
    SimulatedScenario,
    SimulationResult,
    build_simulation,
    device_of,
)
from bros.workload.arrivals import BeLoad, PoissonLoad, TenantLoad
from bros.workload.attainment import Summary

RT, BE = ServiceClass.RT, ServiceClass.BE
PROFILES = Path(__file__).parents[1] / "profiles"
HEAVY, OTHERS = "heavy", ("ann", "bob", "cid")
RATE, IN_FLIGHT = 1.0, 16
"""Chats per second and best-effort requests in flight of each tenant, as usual."""

CASES: Mapping[str, tuple[float, int, str | None]] = {
    "as usual": (RATE, IN_FLIGHT, None),
    "10 x real-time": (10 * RATE, IN_FLIGHT, None),
    "20 x real-time": (20 * RATE, IN_FLIGHT, None),
    "10 x best-effort": (RATE, 10 * IN_FLIGHT, None),
    "weights 3, 1, 1, 1": (RATE, 10 * IN_FLIGHT, f"{HEAVY}=3"),
}
"""Case -> (chats per second and best-effort requests in flight of the heavy tenant, weights)."""


def without_tenants(scheduler: Scheduler) -> Scheduler:
    """A scheduler that takes all requests for those of one tenant."""
    submit = scheduler.submit

    def submit_alike(request: EngineRequest, *args: object, **kwargs: object) -> ServiceClass:
        return submit(dataclasses.replace(request, tenant=""), *args, **kwargs)  # type: ignore[arg-type]

    scheduler.submit = submit_alike  # type: ignore[method-assign,assignment]
    return scheduler


def unchanged(scheduler: Scheduler) -> Scheduler:
    return scheduler


def scenario(profile: Profile, case: str, duration_s: float, seed: int) -> SimulatedScenario:
    rate, in_flight, weights = CASES[case]
    usual = PoissonLoad(RATE, "sharegpt")
    others = [TenantLoad(name, usual, BeLoad(IN_FLIGHT)) for name in OTHERS]
    heavy = TenantLoad(HEAVY, PoissonLoad(rate, "sharegpt"), BeLoad(in_flight))
    config = EngineConfig(
        max_queue=5000, max_num_seqs=256, max_batch_tokens=2048, tenant_weights=weights
    )
    return SimulatedScenario(
        config=config,
        device=device_of(profile, None),
        rt=PoissonLoad(0.0, "sharegpt"),
        be=BeLoad(0),
        tenants=(heavy, *others),
        seed=seed,
        duration_s=duration_s,
        warm_up_s=duration_s / 2,
    )


def waits_s(result: SimulationResult, service_class: ServiceClass) -> list[float]:
    """Times to the first token of the others, which arrived after the warm-up."""
    return [
        (r.token_times_s[0] if r.token_times_s else result.end_s) - r.arrival_s
        for r in result.records
        if r.tenant in OTHERS
        and r.service_class is service_class
        and r.arrival_s >= result.warm_up_s
    ]


def figures(
    loads: Sequence[SimulatedScenario], wrap: Callable[[Scheduler], Scheduler]
) -> dict[str, object]:
    """The figures of one case: of all runs together."""
    results = [build_simulation(load, wrap_scheduler=wrap).run() for load in loads]
    used_s: Counter[str] = Counter()
    for result in results:
        used_s.update(result.stats.by_class[BE].device_s)
        used_s.subtract(result.warm_up.stats.by_class[BE].device_s)
    classes = [
        part
        for load, result in zip(loads, results, strict=True)
        for part in report_of(result, load.slo).by_class.values()
    ]
    return {
        "rt_ttft": dataclasses.asdict(Summary.of([s for r in results for s in waits_s(r, RT)])),
        "be_ttft": dataclasses.asdict(Summary.of([s for r in results for s in waits_s(r, BE)])),
        "tokens_per_s": sum(part.tokens_per_s for part in classes) / len(loads),
        "output_tokens_per_s": sum(part.output_tokens_per_s for part in classes) / len(loads),
        "be_device_shares": {t: s / used_s.total() for t, s in sorted(used_s.items())},
    }


def main() -> None:
    parser = benchmark_parser(__doc__, seconds=4, seeds=1)
    parser.add_argument("--profile", default="4x-a100-40g/opt-30b-fp16")
    parser.add_argument("--seconds", type=float, default=120.0, help="half of it is warm-up")
    parser.add_argument("--seeds", type=int, default=6, help="runs of each case")
    args = parser.parse_args()
    profile = profile_named(parser, "--profile", args.profile, [PROFILES])
    results: dict[str, dict[str, object]] = {}
    for case in CASES:
        for label, wrap in (("one tenant", without_tenants), ("tenants", unchanged)):
            loads = [scenario(profile, case, args.seconds, 1 + run) for run in range(args.seeds)]
            results[f"{case}, {label}"] = figures(loads, wrap)
    rows = [
        (
            name,
            *(f"{found[part]['p99'] or math.nan:.3f}" for part in ("rt_ttft", "be_ttft")),  # type: ignore[index]
            f"{found['tokens_per_s']:.0f}",
            " ".join(f"{share:.3f}" for share in found["be_device_shares"].values()),  # type: ignore[attr-defined]
        )
        for name, found in results.items()
    ]
    headings = (
        "case",
        "RT TTFT p99 s",
        "BE TTFT p99 s",
        "tokens/s",
        "BE device time: ann to heavy",
    )
    Console().print(table_of("the other tenants", headings, rows))
    settings = {"profile": args.profile, "seconds": args.seconds, "seeds": args.seeds}
    save(args.json, {**settings, "cases": results})


if __name__ == "__main__":
    main()
