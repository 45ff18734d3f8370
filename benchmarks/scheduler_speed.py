"""The cost of scheduling per step: schedule and apply, without executing the step.

    python benchmarks/scheduler_speed.py [--profile] [--json FILE]

A thousand requests are queued and 128 run, half of each class. Measured are steps of steady
decoding with enough memory, and steps during constant admission of new requests. The target is 0.6
ms per decode step of `bros`. Run nothing else on the machine. The last rows are `bros` with a
subscriber to its engine reports, which gets one every 0.1 s of the engine's time, and with
best-effort requests ordered in groups by their cached prefix. Garbage is collected as in an engine
process.
"""

from __future__ import annotations

import cProfile
import pstats
import time

from harness import FAST, benchmark_parser, greedy_request, model_free_info, save, table_of
from rich.console import Console

from bros.core.collector import Collector
from bros.core.config import POLICIES, EngineConfig
from bros.core.plan import SampledToken, StepPlan, StepResult
from bros.core.request import ServiceClass
from bros.scheduler.build import build_scheduler
from bros.scheduler.scheduler import Scheduler
from bros.workload.attainment import Summary

RUNNING, QUEUED = 128, 1000
TARGET_MS = 0.6

VARIANTS: dict[str, tuple[str, dict[str, str], bool]] = {
    **{policy: (policy, {}, False) for policy in POLICIES},
    "bros, with reports": ("bros", {}, True),
    "bros, by prefix": ("bros", {"be_order": "prefix-groups"}, False),
}
"""Row -> (policy, options, whether a client subscribes to engine reports)."""


def make(variant: str, outputs: int) -> Scheduler:
    """A scheduler with RUNNING running and QUEUED waiting requests, once stepped."""
    policy, options, subscribed = VARIANTS[variant]
    info = model_free_info(100_000, policy=policy)
    config = EngineConfig(
        policy=policy, max_num_seqs=RUNNING, max_batch_tokens=2048, max_queue=QUEUED * 2, **options
    )
    scheduler = build_scheduler(config, info, FAST)
    if subscribed:
        scheduler.reporter.subscribe()
    for number in range(RUNNING + QUEUED):
        prompt = [number % 1000, number // 1000, *range(2, 200 + number % 50)]
        service_class = ServiceClass.RT if number % 2 else ServiceClass.BE
        scheduler.submit(greedy_request(str(number), prompt, outputs, service_class), now=0.0)
    return scheduler


def answer(plan: StepPlan) -> StepResult:
    samples = tuple(SampledToken(c.request_id, 7) for c in plan.chunks if c.sample is not None)
    return StepResult(plan.step, samples)


def run(scheduler: Scheduler, steps: int) -> list[float]:
    """Milliseconds of schedule, apply and report per step. A step advances the time by 10 ms."""
    times, now = [], 0.0
    for _ in range(steps):
        began = time.perf_counter()
        plan = scheduler.schedule(now)
        middle = time.perf_counter()
        assert plan is not None
        result = answer(plan)
        now += 0.01
        resumed = time.perf_counter()
        scheduler.apply(result, now)
        scheduler.reporter.due(now, False)
        times.append((time.perf_counter() - resumed + middle - began) * 1e3)
    return times


def main() -> None:
    parser = benchmark_parser(__doc__, steps=20)
    parser.add_argument("--profile", action="store_true", help="profile the scheduler")
    parser.add_argument("--steps", type=int, default=300, help="decode steps of each policy")
    args = parser.parse_args()
    results = {}
    for variant in VARIANTS:
        with Collector():
            scheduler = make(variant, outputs=3000)
            run(scheduler, 100)  # until every row decodes
            running = scheduler.stats().by_class
            rows = sum(counts.running for counts in running.values())
            decoding = run(scheduler, args.steps)
            admitting = run(make(variant, outputs=20), max(2, args.steps // 4))
        results[variant] = {
            "decoding_ms": Summary.of(decoding).p50,
            "decoding_p99_ms": Summary.of(decoding).p99,
            "rows": rows,
            "admitting_ms": Summary.of(admitting).p50,
            "admitting_p99_ms": Summary.of(admitting).p99,
        }
        if args.profile and variant == "bros":
            profile = cProfile.Profile()
            profile.runcall(run, scheduler, args.steps)
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    title = f"{QUEUED} queued, {RUNNING} running: ms per step (target: {TARGET_MS:g})"
    headings = ("policy", "decoding, median", "p99", "rows", "admitting, median", "p99")
    cells = [
        (variant, *(f"{value:.3g}" for value in found.values()))
        for variant, found in results.items()
    ]
    Console().print(table_of(title, headings, cells))
    save(args.json, {"ms_per_step": results})


if __name__ == "__main__":
    main()
