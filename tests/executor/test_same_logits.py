"""A request has the same logits, bit by bit, whatever else is in its steps, and however much of its
prompt was cached or computed in which chunks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bros.core.plan import StepPlan
from bros.executor.kv_storage import KV_BLOCK_SIZE
from bros.executor.models.spec import ModelSpec
from bros.executor.runner import ModelRunner
from bros.executor.target import grouping_for
from support.common_prefixes import with_shared
from support.device_runners import OPT, VOCAB, Scripted, tiny_spec
from support.kernel_cases import torch_threads
from support.same_bits import needs_one_order, runner_of
from support.tier import by_tier

SPECS = {
    "llama": tiny_spec(),
    "biases": tiny_spec(attention_bias=True, mlp_bias=True),
    "qwen3": tiny_spec(architectures=["Qwen3ForCausalLM"], head_dim=32),
    "opt": OPT,
}
BLOCKS = 256
OPTIONS = {"kv_blocks": BLOCKS, "threads": 2}


def last_logits(runner: ModelRunner, requests: Sequence[Scripted]) -> list[Tensor]:
    """The logits after each request, computed alone, in one chunk."""
    return [
        runner.logits(StepPlan(0, (request.chunk(request.remaining),)))[0].clone()
        for request in requests
    ]


def check(runner: ModelRunner, vocab: int, length: int, seed: int) -> None:
    """Requests with a common beginning."""
    rng = random.Random(seed)
    common = [rng.randrange(vocab) for _ in range(length // KV_BLOCK_SIZE * KV_BLOCK_SIZE)]
    tokens = [
        [*common, *(rng.randrange(vocab) for _ in range(rng.randint(1, 70)))] for _ in range(6)
    ]
    tokens.append([rng.randrange(vocab) for _ in range(90)])
    sizes = [-(-len(each) // KV_BLOCK_SIZE) for each in tokens]
    alone = last_logits(
        runner,
        [Scripted("alone", each, range(size), 0) for each, size in zip(tokens, sizes, strict=True)],
    )
    free = iter(rng.sample(range(BLOCKS), BLOCKS))
    cached = [next(free) for _ in range(len(common) // KV_BLOCK_SIZE)]
    requests = []
    for each, size in zip(tokens, sizes, strict=True):
        begins = cached if each[: len(common)] == common else []
        blocks = [*begins, *(next(free) for _ in range(size - len(begins)))]
        requests.append(Scripted(str(len(requests)), each, blocks, 0))
    first, grouping = requests[0], grouping_for("cpu", KV_BLOCK_SIZE)
    assert grouping is not None
    while first.computed < len(common):  # the beginning of all, in chunks
        size = min(rng.choice([1, 30, 64, 100]), len(common) - first.computed)
        runner.logits(StepPlan(0, (first.chunk(size),)))
    for request in requests[1:-1]:
        request.computed = len(common)
    found: dict[str, Tensor] = {}
    while live := [request for request in requests if request.remaining]:
        chunks = tuple(
            request.chunk(min(request.remaining, rng.choice([1, 1, 1, 5, 40])))
            for request in rng.sample(live, rng.randint(1, len(live)))
        )
        plan = with_shared(StepPlan(0, chunks), grouping)
        logits = runner.logits(plan)
        found |= {chunk.request_id: logits[i].clone() for i, chunk in enumerate(chunks)}
    for number, expected in enumerate(alone):
        assert torch.equal(found[str(number)], expected), number


@needs_one_order
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_request_has_the_same_logits_in_any_steps(spec: ModelSpec, weights: str) -> None:
    runner = runner_of(spec, weights, **OPTIONS)
    for seed in range(by_tier(fast=2, long=20)):
        with torch_threads(2):
            check(runner, VOCAB, 256 if seed % 2 else 290, seed)


@needs_one_order
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16"])
def test_the_type_of_the_cache_makes_no_difference_to_that(kv_dtype: str) -> None:
    check(runner_of(SPECS["llama"], "bf16", kv_dtype=kv_dtype, **OPTIONS), VOCAB, 300, seed=3)


@needs_one_order
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
def test_the_embedded_model_has_the_same_logits_in_any_steps(weights: str) -> None:
    runner = runner_of(None, weights, **OPTIONS)
    for seed in range(by_tier(fast=1, long=10)):
        check(runner, 49152, by_tier(fast=260, long=1100), seed)
