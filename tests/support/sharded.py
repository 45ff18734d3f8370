"""Models of which every rank has a part: what ranks that are tested compute, and with what."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo
from bros.core.plan import StepPlan
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles
from bros.executor.models.spec import ModelSpec
from bros.executor.parallel.ranks import SINGLE_RANK, Ranks
from support.checkpoints import VOCAB, ScatteredRequest
from support.device_runners import assemble

KV_BLOCKS = 32

Case = tuple[Path, Mapping[str, object]]
"""A model's folder, and options of EngineConfig."""


def mixed_plans(lengths: Sequence[int] = (30, 17, 4), seed: int = 2) -> Iterator[StepPlan]:
    """Prompts in chunks and decodes, packed at random, over blocks in random order; in one step
    nothing is sampled."""
    rng = random.Random(seed)
    blocks = rng.sample(range(KV_BLOCKS), KV_BLOCKS)
    requests = []
    for index, length in enumerate(lengths):
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        own = [blocks.pop() for _ in range(-(-length // 16))]
        requests.append(ScatteredRequest(str(index), tokens, own))
    silent = requests[0].next_chunk(3, rng)
    yield StepPlan(0, (replace(silent, sample=None),))
    step = 1
    while waiting := [request for request in requests if request.remaining]:
        packed = rng.sample(waiting, rng.randint(1, len(waiting)))
        sizes = [1 if rng.random() < 0.5 else rng.randint(1, r.remaining) for r in packed]
        chunks = [r.next_chunk(size, rng) for r, size in zip(packed, sizes, strict=True)]
        yield StepPlan(step, tuple(chunks))
        step += 1


def logits_of(case: Case, ranks: Ranks = SINGLE_RANK) -> tuple[list[Tensor], EngineInfo]:
    """Of every step of mixed_plans."""
    folder, options = case
    config = EngineConfig(
        **{
            "weights": "fp32",
            "threads": 1,
            "kv_blocks": KV_BLOCKS,
            "host_kv_blocks": 9,
            **options,
        }  # type: ignore[arg-type]
    )
    runner, info = load_executor(config, ModelFiles(folder, "tiny"), ranks)
    logits = [runner.logits(plan) for plan in mixed_plans()]
    runner.close()
    return logits, info


def logits_of_all(ranks: Ranks, cases: Sequence[Case]) -> list[tuple[list[Tensor], EngineInfo]]:
    return [logits_of(case, ranks) for case in cases]


def logits_as_on_a_device(spec: ModelSpec, ranks: Ranks = SINGLE_RANK) -> list[Tensor]:
    """Of every step of mixed_plans, and of some that are replayed; from plain matrices."""
    runner = assemble(spec, graph_rows=8, ranks=ranks).runner
    logits = [runner.logits(plan) for plan in mixed_plans()]
    for rows in (1, 3, 8):
        rng = random.Random(rows)
        requests = [ScatteredRequest(str(row), [row], [row]) for row in range(rows)]
        plan = StepPlan(rows, tuple(request.next_chunk(1, rng) for request in requests))
        logits.append(runner.logits(plan))
    return logits


def logits_of_all_as_on_a_device(ranks: Ranks, specs: Sequence[ModelSpec]) -> list[list[Tensor]]:
    return [logits_as_on_a_device(spec, ranks) for spec in specs]


def threads_and_info(ranks: Ranks, case: Case) -> tuple[int, EngineInfo]:
    """How many threads a rank takes, and what it says of the model."""
    _, info = logits_of(case, ranks)
    return torch.get_num_threads(), info
