"""The cost of scheduling per step: schedule and apply, without executing the step.

    python benchmarks/scheduler_speed.py [--profile] [--json FILE]

A thousand requests are queued and 128 run, half of each class. Measured are steps of steady
decoding with enough memory, and steps during constant admission of new requests. The target is 1 ms
per step. Run nothing else on the machine. The last rows are `bros` with a subscriber to its engine
reports, which gets one every 0.1 s of the engine's time, and with best-effort requests ordered in
groups by their cached prefix.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from dataclasses import asdict
from pathlib import Path

from quick import add_quick
from rich.console import Console
from rich.table import Table

from bros.bench.results import environment
from bros.core.clock import SystemClock
from bros.core.config import POLICIES, EngineConfig
from bros.core.interfaces import EngineInfo
from bros.core.plan import SampledToken, StepPlan, StepResult
from bros.core.request import EngineRequest, SamplingParams, ServiceClass
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import CostModel
from bros.scheduler.scheduler import Scheduler

RUNNING, QUEUED = 128, 1000
TARGET_MS = 1.0
# A fast device, so that rows and not time bound the steps: the worst case for the scheduler.
FAST = CostModel(
    constant_s=0.008, token_s=2e-6, sample_s=1e-6, pair_s=1e-10, context_s=1e-9,
    hinges=((256, 2e-5),), padding=((16, 1), (128, 8), (256, 16)),
)  # fmt: skip


VARIANTS: dict[str, tuple[str, dict[str, str], bool]] = {
    **{policy: (policy, {}, False) for policy in POLICIES},
    "bros, with reports": ("bros", {}, True),
    "bros, by prefix": ("bros", {"be_order": "prefix-groups"}, False),
}
"""Row -> (policy, options, whether a client subscribes to engine reports)."""


def make(variant: str, outputs: int) -> Scheduler:
    """A scheduler with RUNNING running and QUEUED waiting requests, once stepped."""
    policy, options, subscribed = VARIANTS[variant]
    info = EngineInfo(
        model="none", weights="", kernels="", kv_dtype="", device="", max_model_len=4096,
        vocab_size=1000, block_size=16, num_kv_blocks=100_000, policy=policy,
    )  # fmt: skip
    config = EngineConfig(
        policy=policy, max_num_seqs=RUNNING, max_batch_tokens=2048, max_queue=QUEUED * 2, **options
    )
    scheduler = build_scheduler(config, info, FAST)
    if subscribed:
        scheduler.reporter.subscribe()
    for number in range(RUNNING + QUEUED):
        scheduler.submit(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=[number % 1000, number // 1000, *range(2, 200 + number % 50)],
                sampling=SamplingParams(max_tokens=outputs, ignore_eos=True),
                service_class=ServiceClass.RT if number % 2 else ServiceClass.BE,
            ),
            now=0.0,
        )
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--profile", action="store_true", help="profile the scheduler")
    parser.add_argument("--steps", type=int, default=300, help="decode steps of each policy")
    parser.add_argument("--json", type=Path, help="where to save the figures")
    add_quick(parser, steps=20)
    args = parser.parse_args()
    console = Console()
    table = Table(title=f"{QUEUED} queued, {RUNNING} running: ms per step (target: {TARGET_MS:g})")
    for name in ("policy", "decoding, median", "p99", "rows", "admitting, median", "p99"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    results = {}
    for variant in VARIANTS:
        scheduler = make(variant, outputs=3000)
        run(scheduler, 100)  # until every row decodes
        running = scheduler.stats().by_class
        rows = sum(counts.running for counts in running.values())
        decoding = run(scheduler, args.steps)
        admitting = run(make(variant, outputs=20), max(2, args.steps // 4))
        results[variant] = {
            "decoding_ms": statistics.median(decoding),
            "decoding_p99_ms": statistics.quantiles(decoding, n=100)[-1],
            "rows": rows,
            "admitting_ms": statistics.median(admitting),
            "admitting_p99_ms": statistics.quantiles(admitting, n=100)[-1],
        }
        table.add_row(variant, *(f"{value:.3g}" for value in results[variant].values()))
        if args.profile and variant == "bros":
            profile = cProfile.Profile()
            profile.runcall(run, scheduler, args.steps)
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    console.print(table)
    if args.json:
        found = {"environment": asdict(environment(SystemClock())), "ms_per_step": results}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
        console.print(f"saved {args.json}")


if __name__ == "__main__":
    main()
