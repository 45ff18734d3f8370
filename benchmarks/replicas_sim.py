"""Routers with several simulated replicas: Preble's experiments, and others.

    python benchmarks/replicas_sim.py [--parts workloads,ablation,...] [--jobs N] [--json FILE]
        [--trace FILE] [--azure CODE CHATS] [--quick]

Schedulers, KV memory, prefix caches and router are the real ones; step times are those of Preble's
own simulator for Mistral-7B on an A6000 and Llama-3-70B on four H100; no text is generated. Each
part replaces its results in the file; replicas_report.py renders the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from harness import chosen, environment, existing_file
from quick import add_quick
from rich.console import Console

from bros.cli.simulate_tables import progress_bar
from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.request import ServiceClass
from bros.profiling.profiles import load_profile
from bros.router.state import RouterSettings
from bros.simulator.fleet import FleetReport, FleetScenario, fleet_config, run_fleet
from bros.simulator.prefix_workloads import (
    AzureLoad,
    MooncakeLoad,
    Part,
    PrefixLoad,
    PrefixRequest,
    published,
    read_azure_times,
)
from bros.simulator.simulation import device_of
from bros.simulator.sweep import run_all
from bros.workload.arrivals import generator, poisson_times, read_mooncake_trace

ROOT = Path(__file__).resolve().parents[1]
A6000, H100 = "1x-a6000/mistral-7b-fp16", "4x-h100/llama-3-70b-fp16"
STEP_TOKENS = {A6000: 512, H100: 1024}
PAPER = EngineConfig(policy="fcfs", prefix_cache="lru")
"""The configuration of the paper's replicas."""

ROUTERS = ("rr", "least", "oracle", "e2")
FEWER = ("rr", "oracle", "e2")
E2_ALONE = {"rebalancing": False, "replication": False, "decode_aware": False}


@dataclass(frozen=True, slots=True)
class Case:
    """One run. group: its figures are compared within it. way: what distinguishes it there."""

    group: str
    way: str
    load: PrefixLoad
    replicas: int
    router: str = "e2"
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: EngineConfig = PAPER
    profile: str = A6000
    kv_blocks: int | None = None
    classes: bool = False

    def scenario(self) -> FleetScenario:
        device = device_of(load_profile(ROOT / "profiles" / f"{self.profile}.json"), self.kv_blocks)
        config = dataclasses.replace(self.config, max_batch_tokens=STEP_TOKENS[self.profile])
        return FleetScenario(
            config=fleet_config(config),
            device=device,
            replicas=self.replicas,
            router=self.router,
            load=self.load,
            seed=0,
            settings=RouterSettings(**self.settings),
            classes=self.classes,
        )


@dataclass(frozen=True, slots=True)
class MadeLoad:
    """A share `hot` of the requests has the prefix of the first family, the others of a random one.

    shared, own, output: tokens.
    """

    label: str
    rate: float
    count: int
    families: int
    shared: int
    own: int
    output: int
    hot: float = 0.0

    def requests(self, seed: int) -> list[PrefixRequest]:
        rng = generator(seed, "made")
        found = []
        for number, time_s in enumerate(islice(poisson_times(self.rate, rng), self.count)):
            family = 0 if rng.random() < self.hot else rng.randrange(1, self.families + 1)
            parts = (Part(f"family {family}", self.shared), Part(f"own {number}", self.own))
            found.append(
                PrefixRequest(
                    time_s=time_s,
                    parts=tuple(part for part in parts if part.tokens),
                    output_tokens=self.output,
                    family=family,
                )
            )
        return found


def workload_cases() -> Iterator[Case]:
    """Figure 7: five workloads at the paper's rates, on 2 and 4 A6000 and on 8 H100.

    Programming at more as well: these replicas are not busy at what the paper's were.
    """
    rates = {
        "toolbench": (9.0, 15.0, 18.0),
        "embodied": (10.0, 15.0),
        "programming": (4.5, 5.5, 7.0, 8.5),
        "video": (2.0, 3.0),
        "loogle": (0.6, 1.2),
    }
    for name, each in rates.items():
        for rate in each:
            yield from _paper_cases(name, rate, 2, A6000)
        yield from _paper_cases(name, each[-1], 4, A6000)
        yield from _paper_cases(name, each[-1], 2, H100)


def _paper_cases(name: str, rate: float, replicas: int, profile: str) -> Iterator[Case]:
    """rate: of two replicas, for as long as the paper's lowest one takes, but not too long."""
    scaled = rate * replicas / 2
    load = published(name, replicas, rate=scaled)
    count = min(load.count, round(300 * scaled))
    load = dataclasses.replace(load, count=count)
    where = f"{replicas} A6000" if profile == A6000 else f"{4 * replicas} H100"
    for router in FEWER:
        yield Case(
            f"{name}, {scaled:g}/s on {where}", router, load, replicas, router, profile=profile
        )


def ablation_cases() -> Iterator[Case]:
    """Figure 10: ToolBench, Zipf 1.1, 320 tools on four A6000; one thing more in every row."""
    bros = {"policy": "bros"}
    steps: tuple[tuple[str, str, Mapping[str, Any], Mapping[str, Any]], ...] = (
        ("round robin", "rr", {}, {}),
        ("oracle partition", "oracle", {}, {}),
        ("E2", "e2", E2_ALONE, {}),
        ("+ rebalancing, replication", "e2", {"decode_aware": False}, {}),
        ("+ prefill/decode-aware", "e2", {}, {}),
        ("policy bros on replicas", "e2", {}, bros),
        ("+ priority groups", "e2", {}, {**bros, "be_order": "prefix-groups"}),
    )
    for rate in (36.0, 44.0):
        load = published(
            "toolbench", 4, rate=rate, count=3000, families=320, popularity="zipf", be_share=1.0
        )
        for way, router, settings, options in steps:
            config = dataclasses.replace(PAPER, **options)
            yield Case(f"zipf, {rate:g}/s", way, load, 4, router, settings, config)


def regime_cases() -> Iterator[Case]:
    """Workloads where prefix affinity does not help or hurts."""
    loads = {
        "nothing in common": MadeLoad("unique", 8.0, 2000, 1, 0, 1200, 40),
        "one prefix for all": MadeLoad("hot", 60.0, 6000, 1, 1500, 150, 20, hot=1.0),
        "half of all one prefix": MadeLoad("half", 32.0, 4000, 160, 1500, 150, 20, hot=0.5),
        "very short prompts": MadeLoad("short", 60.0, 6000, 100, 32, 16, 30),
        "long answers": MadeLoad("answers", 4.0, 800, 100, 1000, 100, 400),
    }
    for name, load in loads.items():
        for router in ROUTERS:
            yield Case(name, router, load, 4, router)
    crowded = MadeLoad("crowded", 12.0, 2000, 400, 1500, 150, 20)
    for router in ROUTERS:
        yield Case("caches for a twentieth", router, crowded, 4, router, kv_blocks=1875)


def class_cases() -> Iterator[Case]:
    """Real-time and best-effort requests under policy bros."""
    load = published("toolbench", 2, rate=15.0, count=3000, be_share=0.5)
    config = EngineConfig(policy="bros", slo_ttft=1000)
    for router in ROUTERS:
        yield Case("half best-effort", router, load, 2, router, config=config, classes=True)


def scaling_cases() -> Iterator[Case]:
    """From 1 replica to 1,024: the same load for each."""
    for replicas in (1, 4, 16, 64, 256, 1024):
        count = min(1350 * replicas, max(3000, 8 * replicas))
        load = published("toolbench", replicas, rate=8.0 * replicas, count=count)
        for router in FEWER:
            yield Case(f"{replicas}", router, load, replicas, router)


def trace_cases(path: Path) -> Iterator[Case]:
    """The Mooncake conversation trace, slowed down to the capacity of the devices."""
    recorded = read_mooncake_trace(path)
    for profile, rate in ((A6000, 0.32), (H100, 0.32)):
        load = MooncakeLoad(source=path.name, recorded=recorded, rate=rate, count=1500)
        where = "4 A6000" if profile == A6000 else "16 H100"
        for router in ROUTERS:
            yield Case(f"{rate:g}/s on {where}", router, load, 4, router, profile=profile)


def azure_cases(paths: Sequence[Path]) -> Iterator[Case]:
    """Figure 8: tools and videos at recorded times on four A6000."""
    recorded = read_azure_times(*paths)
    for rate in (4.0, 6.0, 8.0):
        load = AzureLoad(recorded=recorded, rate=rate, count=round(500 * rate))
        for router in ROUTERS:
            yield Case(f"{rate:g}/s", router, load, 4, router)


def summary(case: Case, report: FleetReport) -> dict[str, Any]:
    by_class = {
        str(cls): {
            "latency_mean_s": part.latency_s.mean,
            "ttft_p99_s": part.ttft_s.p99,
            "both_met": None if part.both_met is None else part.both_met.value,
        }
        for cls, part in report.by_class.items()
    }
    return {
        "group": case.group,
        "way": case.way,
        "router": case.router,
        "replicas": case.replicas,
        "profile": case.profile,
        "settings": dict(case.settings),
        "load": case.load.label,
        "requests": report.requests,
        "finished": report.finished,
        "end_s": report.end_s,
        "requests_per_s": report.requests_per_s,
        "latency_s": dataclasses.asdict(report.latency_s),
        "ttft_s": dataclasses.asdict(report.ttft_s),
        "hits": report.hits,
        "believed": report.believed,
        "busy": report.busy,
        "balance": report.balance,
        "reasons": dict(report.reasons),
        "by_class": by_class if report.by_class[ServiceClass.BE].requests else {},
    }


PARTS = {
    "workloads": workload_cases,
    "ablation": ablation_cases,
    "regimes": regime_cases,
    "classes": class_cases,
    "scaling": scaling_cases,
}


def main() -> None:
    parts = {
        **PARTS,
        "azure": lambda: azure_cases(args.azure),
        "mooncake": lambda: trace_cases(args.trace),
    }
    parser = argparse.ArgumentParser(description="Routers with simulated replicas.")
    parser.add_argument(
        "--parts",
        help=f"of {', '.join(parts)}, with commas (default: all that have their traces)",
    )
    parser.add_argument(
        "--trace", type=existing_file, metavar="FILE", help="Mooncake trace, for part mooncake"
    )
    parser.add_argument(
        "--azure", type=existing_file, nargs=2, metavar=("CODE", "CHATS"),
        help="Azure traces, for part azure",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2)
    default = ROOT / "benchmarks" / "results" / "replicas_sim.json"
    parser.add_argument("--json", type=Path, default=default)
    add_quick(parser, parts="regimes", json=None)
    args = parser.parse_args()
    traces = {"azure": args.azure, "mooncake": args.trace}
    names = [name for name in parts if traces.get(name, True)]
    if args.parts is not None:
        names = chosen(parser, "--parts", args.parts, parts)
    for name, option in (("azure", "--azure"), ("mooncake", "--trace")):
        if name in names and not traces[name]:
            parser.error(f"part {name} needs {option}")
    clock, console = SystemClock(), Console(highlight=False, width=120)
    for part in names:
        cases = list(parts[part]())
        start_s = clock.now()
        with progress_bar(len(cases)) as on_progress:
            reports = run_all(
                run_fleet, [case.scenario() for case in cases], args.jobs, on_progress
            )
        seconds = clock.now() - start_s
        rows = [summary(case, report) for case, report in zip(cases, reports, strict=True)]
        for row in rows:
            latency = row["latency_s"]
            console.print(
                f"{row['group']:34} {row['way']:28} {latency['mean']:8.3f} {latency['p99']:8.2f} s"
                f" {100 * row['hits']:5.1f} % cached, balance {row['balance']:.2f}"
            )
        if args.json is None:
            continue
        content = json.loads(args.json.read_text()) if args.json.exists() else {"parts": {}}
        made = {**environment(), "wall_s": round(seconds, 1)}
        content["parts"][part] = {"environment": made, "rows": rows}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
