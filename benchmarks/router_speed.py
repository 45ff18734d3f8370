"""Requests per second that a router can place on one core, and its memory after a million.

    python benchmarks/router_speed.py [--memory 1000000] [--json FILE]

Prompts are those of Preble's workloads, as lists of ints from a tokenizer. The time includes all
calls of the router for a request: routing, its first token and its end. Preble's own scheduler
places 2,931 per second for VideoQA, 634 and 245 for ToolBench with 200 and 1,500 tools.
"""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from harness import benchmark_parser, save, table_of
from rich.console import Console

from bros.core.interfaces import Prices
from bros.core.request import EngineRequest, SamplingParams
from bros.router.fleet import Fleet, make_fleet
from bros.router.state import ReplicaFacts
from bros.simulator.prefix_workloads import prompt_of, published

CASES = (("video", 150, 2931), ("toolbench", 200, 634), ("toolbench", 1500, 245))
REPLICAS = (1, 2, 8, 64)
POLICIES = ("e2", "rr", "least")
MISTRAL_A6000 = Prices(constant_s=0.0047, token_s=1.2e-4, pair_s=2e-8, row_s=1.2e-4, context_s=2e-7)
CAPACITY = 198_516
ROUNDS = 3
WARM = 500
PER_REPLICA_S = 9.0
ANSWER_S = 0.5


def requests(workload: str, families: int, count: int) -> list[EngineRequest]:
    load = published(workload, 2, count=count, families=families)
    return [
        EngineRequest(
            request_id=f"{number}",
            prompt_token_ids=list(prompt_of(made, 0)),
            sampling=SamplingParams(max_tokens=made.output_tokens, temperature=0.0),
        )
        for number, made in enumerate(load.requests(0))
    ]


def fleet_of(policy: str, replicas: int) -> Fleet:
    fleet = make_fleet(policy)
    for _ in range(replicas):
        fleet.add(ReplicaFacts(capacity_tokens=CAPACITY, prices=MISTRAL_A6000), 0.0)
    return fleet


def place(fleet: Fleet, asked: Sequence[EngineRequest], rate: float, first: int = 0) -> float:
    """Processor seconds to place all requests; each ends ANSWER_S after its arrival."""
    open_: list[EngineRequest] = []
    at_once = max(1, round(rate * ANSWER_S))
    answer = (1,) * 16
    began = time.process_time()
    for number, request in enumerate(asked, start=first):
        now = number / rate
        fleet.route([request], now)
        open_.append(request)
        if len(open_) > at_once:
            over = open_.pop(0)
            fleet.on_first_token(over.request_id, now)
            fleet.on_finished(over.request_id, answer, now)
    for over in open_:
        fleet.on_first_token(over.request_id, now)
        fleet.on_finished(over.request_id, answer, now)
    return time.process_time() - began


def speed(asked: Sequence[EngineRequest], policy: str, replicas: int) -> float:
    """Requests per second, the median of ROUNDS."""
    found = []
    for _ in range(ROUNDS):
        fleet = fleet_of(policy, replicas)
        rate = PER_REPLICA_S * replicas
        place(fleet, asked[:WARM], rate)
        seconds = place(fleet, asked[WARM:], rate, WARM)
        found.append((len(asked) - WARM) / seconds)
    return statistics.median(found)


def speeds(count: int, report: Console) -> Iterator[dict[str, Any]]:
    for workload, families, paper in CASES:
        asked = requests(workload, families, count)
        mean = statistics.mean(len(request.prompt_token_ids) for request in asked)
        for policy in POLICIES:
            for replicas in REPLICAS if policy == "e2" else (2,):
                report.print(f"{workload}, {families}, {policy}, {replicas}", style="dim")
                yield {
                    "workload": workload,
                    "families": families,
                    "prompt_tokens": round(mean),
                    "policy": policy,
                    "replicas": replicas,
                    "per_s": round(speed(asked, policy, replicas)),
                    "paper_per_s": paper,
                }


def memory(total: int, report: Console) -> dict[str, Any]:
    """The memory of a router over `total` requests, with prompts of ToolBench's shape and a sixth
    of their length, for a changing set of tools. Each point has nodes and tokens, the maximum of
    nodes since the previous point, and the peak memory of the process."""
    replicas, rate, chunk = 2, 100.0, 10_000
    fleet, rng = fleet_of("e2", replicas), random.Random(0)
    points: list[dict[str, Any]] = []
    most = 0
    for first in range(0, total, chunk):
        asked = [_small(number, rng) for number in range(first, min(first + chunk, total))]
        place(fleet, asked, rate, first)
        del asked
        forest = fleet.forest
        most = max(most, forest.num_nodes)
        if first // chunk % 10 == 9:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            points.append(
                {
                    "requests": first + chunk,
                    "nodes": forest.num_nodes,
                    "most_nodes": most,
                    "tokens": forest.num_tokens,
                    "peak_mebibytes": round(peak),
                }
            )
            most = 0
            report.print(str(points[-1]), style="dim")
    fleet.forest.check_integrity()
    return {"rate": rate, "replicas": replicas, "capacity_tokens": CAPACITY, "points": points}


def _small(number: int, rng: random.Random) -> EngineRequest:
    """A request for one of 1,500 tools of skewed popularity, with a unique question. Every fifth
    second a new tool replaces an old one."""
    tool = number // 500 + min(int(rng.paretovariate(0.3)), 1500)
    question = range(2000 + number, 2064 + number)
    return EngineRequest(
        request_id=f"{number}",
        prompt_token_ids=[*([tool] * 240), *question],
        sampling=SamplingParams(max_tokens=16, temperature=0.0),
    )


def main() -> None:
    parser = benchmark_parser(__doc__, requests=100)
    parser.add_argument("--requests", type=int, default=4000, help="requests per case")
    parser.add_argument("--memory", type=int, default=0, help="requests of the memory run; 0: none")
    args = parser.parse_args()
    console = Console()
    found = list(speeds(args.requests, console))
    rows = [
        (*islice(row.values(), 5), f"{row['per_s']:,}", f"{row['paper_per_s']:,}") for row in found
    ]
    headings = ("workload", "families", "prompt", "router", "replicas", "per s", "Preble")
    console.print(table_of("requests placed per second, one core", headings, rows, left=0))
    figures: dict[str, Any] = {"speed": found}
    if args.memory:
        figures["memory"] = memory(args.memory, console)
    save(args.json, {"figures": figures})


if __name__ == "__main__":
    main()
