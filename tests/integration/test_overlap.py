"""Steps that overlap, with a real decoder: the same tokens as one step after the other.

A tiny random Llama in fp32, run by an executor that computes each step as late as it may
(support/late_executor.py), in memory that is far too little for all requests at once.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.interfaces import EngineStats
from bros.core.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    ServiceClass,
    Slo,
    expanded,
)
from bros.engine.engine import Engine
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles
from bros.scheduler.build import build_scheduler
from support.late_executor import LateExecutor
from support.scheduling import MODEL
from support.tiny_models import save_tiny_llama
from support.virtual_time import plan_seconds

REQUESTS = 24
LONGEST = 96


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder, vocab_size=512)
    return ModelFiles(folder=folder, name="tiny")


def requests() -> list[EngineRequest]:
    """Greedy and drawn ones, with stop tokens, penalties and common prefixes among them."""
    rng = random.Random(5)
    common = [rng.randrange(1, 512) for _ in range(40)]
    asked = []
    for number in range(REQUESTS):
        own = [rng.randrange(1, 512) for _ in range(rng.randint(1, 30))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0]),
            top_k=rng.choice([0, 50]),
            seed=number,
            max_tokens=rng.randint(2, 24),
            min_tokens=rng.choice([0, 2]),
            stop_token_ids=tuple(rng.sample(range(512), 24)),
            presence_penalty=1.0 if number % 8 == 7 else 0.0,
            logprobs=1,
        )
        asked.append(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=[*common[: rng.choice([0, 20, 40])], *own],
                sampling=sampling,
                service_class=rng.choice(list(ServiceClass)),
                slo=Slo(1.0, 0.3),
            )
        )
    return asked


@dataclasses.dataclass
class Served:
    tokens: dict[str, list[int]]
    reasons: dict[str, FinishReason | None]
    stats: EngineStats
    executor: LateExecutor


def serve(files: ModelFiles, policy: str, kv_blocks: int, mode: str) -> Served:
    config = EngineConfig(
        policy=policy, weights="fp32", kernels="reference", threads=1, kv_blocks=kv_blocks,
        host_kv_blocks=20, max_model_len=LONGEST, max_batch_tokens=32, max_num_seqs=8,
        prefix_cache="class-aware",
    )  # fmt: skip
    runner, info = load_executor(config, files)
    clock = ManualClock()
    executor = LateExecutor(runner, clock, plan_seconds)
    scheduler = build_scheduler(config, info, MODEL, depth=1 if mode == "off" else 2)
    engine = Engine(scheduler, executor, clock, info, async_scheduling=mode)
    tokens: dict[str, list[int]] = {str(number): [] for number in range(REQUESTS)}
    reasons: dict[str, FinishReason | None] = {}

    def step() -> None:
        for output in map(expanded, engine.step()):
            tokens[output.request_id] += output.token_ids
            reasons[output.request_id] = output.finish_reason
        scheduler.check_integrity()

    for asked in requests():
        engine.submit(asked)
        for _ in range(2):
            step()
    while engine.has_work:
        step()
    stats = engine.stats()
    engine.close()
    return Served(tokens, reasons, stats, executor)


@pytest.mark.parametrize(("policy", "kv_blocks"), [("bros", 10), ("fcfs", 8)])
def test_the_same_tokens_as_without_overlap(files: ModelFiles, policy: str, kv_blocks: int) -> None:
    plain, late = (serve(files, policy, kv_blocks, mode) for mode in ("off", "on"))
    assert late.tokens == plain.tokens
    assert late.reasons == plain.reasons
    reasons = set(late.reasons.values())
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert (plain.executor.most_in_flight, late.executor.most_in_flight) == (0, 2)
    assert late.executor.filled > 50
    by_class = late.stats.by_class.values()
    assert sum(counted.kv_preempted for counted in by_class) > 0
    assert sum(counted.kv_restored for counted in by_class) > 0
    assert sum(counted.prefix_tokens for counted in by_class) > 0
    assert late.stats.kv_blocks_used == 0
