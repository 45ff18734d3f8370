"""The executor on a CUDA device. Needs one; what can be tested without is tested elsewhere."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch

from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo, StopRule
from bros.core.plan import SampleSpec, StepPlan
from bros.core.request import SamplingParams
from bros.executor.cuda.graphs import CudaGraphCapture
from bros.executor.cuda.kv_storage import CudaStreams
from bros.executor.kv_storage import DTYPES, bytes_per_block
from bros.executor.loader import random_executor
from bros.executor.models.spec import ModelSpec
from bros.executor.runner import LaunchingRunner, ModelRunner
from bros.executor.sampler import DeviceStepSampler, HostStepSampler, NumpySampler
from support.device_runners import (
    OPT,
    check_alike,
    family_plans,
    tiny_spec,
)
from support.grammars import ScriptState
from support.growing_requests import Request, make_requests, run_ahead, run_one_by_one, script
from support.sampling import IndexedSpec, ask

pytestmark = pytest.mark.gpu

SMALL = tiny_spec()
WIDE = tiny_spec(hidden_size=512, head_dim=128, intermediate_size=1024)
KV_BLOCKS = 64

FEW_CLEAR = {"graphs": 0.5, "precision": 0.1}
"""Rows per plan. The best two logits of random weights are seldom further apart than bf16 rounds:
by three times the bounds of these tests, in 15 rows of 25 plans and in 4 of 22."""


def executor(spec: ModelSpec, **options: Any) -> tuple[ModelRunner, EngineInfo]:
    """The same model on every device."""
    defaults: dict[str, Any] = {
        "device": "cuda",
        "kv_blocks": KV_BLOCKS,
        "threads": 1,
        "weights": "fp32",
    }
    defaults |= {"max_num_seqs": 16, "on_pressure": "recompute"}  # copies have their own tests
    config = EngineConfig(**{**defaults, **options})
    return random_executor(spec, config, rng_device="cpu")


def runner(spec: ModelSpec, **options: Any) -> ModelRunner:
    return executor(spec, **options)[0]


def plans_of(seed: int) -> list[StepPlan]:
    return family_plans(random.Random(seed), 12, KV_BLOCKS)


def test_facts_name_the_gpu() -> None:
    made, info = executor(SMALL, weights="auto", kv_dtype="auto")
    assert info.device == torch.cuda.get_device_name(0)
    assert info.kernels == "triton" and info.weights == info.kv_dtype
    assert isinstance(made, LaunchingRunner)


def test_nothing_is_compiled_when_requests_come() -> None:
    """Neither for chunks of any length, nor for groups of rows, nor for draws."""
    # Late, because only machines with a GPU need it.
    from bros.kernels.triton.attention_kernels import attend, merge
    from bros.kernels.triton.sampling_kernels import choose

    def compiled() -> list[int]:
        kernels = [kernel.device_caches[0][0] for kernel in (attend, merge, choose)]
        return [len(cache) for cache in kernels]

    spec = tiny_spec(num_attention_heads=6, num_key_value_heads=2, head_dim=24)
    made = runner(spec, cuda_graphs="on")
    before = compiled()
    for plan in plans_of(5):
        made.execute(plan)
    drawn = SampleSpec(SamplingParams(min_p=0.1), seed=1)
    for plan in plans_of(6):
        for chunk in plan.chunks:
            chunk.sample = drawn
        made.execute(plan)
    assert compiled() == before


@pytest.mark.parametrize("spec", [SMALL, WIDE, OPT], ids=["small", "wide", "opt"])
def test_tokens_are_those_of_the_cpu(spec: ModelSpec) -> None:
    """In fp32, where the two best tokens are not about as good."""
    check_alike(runner(spec, device="cpu"), runner(spec), plans_of(1), atol=2e-3)


@pytest.mark.parametrize("weights", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("spec", [SMALL, WIDE], ids=["small", "wide"])
def test_graphs_change_nothing(
    spec: ModelSpec, weights: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same kernels run; a product of more rows may round otherwise."""
    with caplog.at_level(logging.WARNING):
        recorded = runner(spec, weights=weights, cuda_graphs="on")
    assert not caplog.records, "recording failed"
    atol = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.15}[weights]
    plain = runner(spec, weights=weights, cuda_graphs="off")
    least = FEW_CLEAR["graphs"] if weights == "bf16" else 1.0
    check_alike(plain, recorded, plans_of(2), atol=atol, least_clear=least)


@pytest.mark.parametrize(("weights", "atol"), [("bf16", 0.3), ("fp16", 0.03)])
@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_half_precision_stays_close_to_the_cpu(weights: str, atol: float, kernels: str) -> None:
    check_alike(
        runner(WIDE, device="cpu"),
        runner(WIDE, weights=weights, kernels=kernels),
        plans_of(3),
        atol=atol,
        least_clear=FEW_CLEAR["precision"] if weights == "bf16" else 1.0,
    )


def test_recording_leaves_the_stream_that_replays_and_copies_are_ordered_by() -> None:
    """Also if it fails: what a stream of its own did would go unnoticed."""
    device = torch.device("cuda", 0)
    streams, recorder = CudaStreams(device), CudaGraphCapture()
    before = streams.compute()
    numbers = torch.zeros(2**20, device=device)

    def add() -> None:
        numbers.add_(1)

    replay = recorder(add)
    assert streams.compute() == before
    numbers.zero_()
    for _ in range(10):
        replay()
        numbers.mul_(2)  # after this replay and before the next
    assert torch.equal(numbers, torch.full_like(numbers, 2.0**11 - 2))

    def fail() -> None:
        numbers.add_(1)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not this one")

    with pytest.raises(RuntimeError, match="not this one"):
        recorder(fail)
    assert streams.compute() == before


@pytest.mark.parametrize("cuda_graphs", ["on", "off"])
def test_running_ahead_chooses_the_same_tokens(cuda_graphs: str) -> None:
    one, other = (runner(WIDE, cuda_graphs=cuda_graphs) for _ in range(2))
    assert isinstance(other, LaunchingRunner)

    def requests() -> list[Request]:
        return make_requests(random.Random(4), 6)

    steps = script(random.Random(4), 6, 20)
    expected = run_one_by_one(one, requests(), steps)
    assert run_ahead(other, requests(), steps) == expected


def test_kv_memory_is_what_is_left_of_the_share() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    share = (total - free) / total + 0.1
    made, info = executor(
        WIDE, weights="bf16", kv_blocks=None, gpu_memory_utilization=share, max_num_seqs=4
    )
    kv_bytes = info.num_kv_blocks * bytes_per_block(WIDE, DTYPES["bf16"])
    assert 0.05 * total < kv_bytes < 0.11 * total
    assert torch.cuda.mem_get_info(0)[0] > free - 0.13 * total
    made.close()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=100),
        SamplingParams(min_p=0.01),
        SamplingParams(logprobs=3),
    ],
    ids=["greedy", "plain", "top_p and top_k", "min_p", "logprobs"],
)
def test_the_gpu_chooses_what_the_host_chooses(params: SamplingParams) -> None:
    """Its exponential rounds otherwise, so that one draw in very many may differ. Rows with a
    grammar are the host's."""
    # Late: it needs Triton, which other machines may lack.
    from bros.executor.cuda.device_sampler import best, draw

    logits = torch.randn(64, 128256, generator=torch.Generator().manual_seed(0)) * 3
    logits[7, 100] = float("nan")
    state = ScriptState([[5, 77_000, 128_255]], StopRule(frozenset(), 0, 0))
    constraints = {row: state.constraint() for row in (3, 40)}
    asked = [
        ask(str(row), IndexedSpec(params, seed=row, index=3, constraint=constraints.get(row)))
        for row in range(64)
    ]
    there = DeviceStepSampler(NumpySampler(), draw, best)(logits.cuda(), asked)
    here = HostStepSampler(NumpySampler())(logits, asked)
    assert [token.error for token in there] == [token.error for token in here]
    assert {there[row].token_id for row in constraints} <= {5, 77_000, 128_255}
    same = sum(a.token_id == b.token_id for a, b in zip(there, here, strict=True))
    assert same >= (64 if params.greedy else 63)
