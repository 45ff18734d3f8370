"""The same model gives the same tokens with any kernels, formats of weights and kind of runner."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo
from bros.core.plan import SampledToken, StepPlan
from bros.executor.kv_storage import KV_BLOCK_SIZE
from bros.executor.loader import random_executor
from bros.executor.models.spec import ModelSpec
from bros.executor.runner import ModelRunner
from bros.executor.target import CPU, grouping_for
from bros.executor.weights import RandomWeights
from bros.kernels.dispatch import select_kernels
from support.common_prefixes import with_shared
from support.device_runners import (
    OPT,
    VOCAB,
    Scripted,
    assemble,
    check_alike,
    family_plans,
    tiny_spec,
)
from support.kernel_cases import reference_and_cpu

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
}


def loaded(spec: ModelSpec, **options: Any) -> tuple[ModelRunner, EngineInfo]:
    config = EngineConfig(
        **{"device": "cpu", "weights": "fp32", "kv_blocks": 64, "threads": 1, **options}
    )
    return random_executor(spec, config)


def test_a_random_executor_needs_no_files() -> None:
    runner, info = loaded(tiny_spec(), kernels="reference", policy="fcfs")
    assert (info.model, info.device) == ("random-LlamaForCausalLM", "cpu")
    assert (info.num_kv_blocks, info.vocab_size, info.eos_token_ids) == (64, VOCAB, ())
    assert runner.execute(family_plans(random.Random(0), 1, 64)[0]) is not None


@reference_and_cpu
def test_compiled_kernels_sample_as_well(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native = pytest.importorskip("bros.executor.native_sampler", exc_type=ImportError)
    sample, calls = native.NativeSampler.sample, []

    def counted(*args: Any) -> list[SampledToken]:
        calls.append(args)
        return sample(*args)

    monkeypatch.setattr(native.NativeSampler, "sample", counted)
    runner, _ = loaded(tiny_spec(), kernels=kernels)
    assert runner.execute(family_plans(random.Random(0), 1, 64)[0]) is not None
    assert bool(calls) == (kernels == "cpu")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_plain_weights_give_what_packed_ones_give(shape: str, kernels: str) -> None:
    spec = tiny_spec(**SHAPES[shape])
    packed, _ = loaded(spec, kernels=kernels)
    check_alike(packed, assemble(spec).runner, family_plans(random.Random(1), 6, 64))


@reference_and_cpu
def test_what_rows_begin_with_may_be_read_once_for_all(kernels: str) -> None:
    """It changes no bit: kernels sum in one order. Nothing is grouped for the reference."""
    spec, rng = tiny_spec(max_position_embeddings=512), random.Random(5)
    prefix = [rng.randrange(VOCAB) for _ in range(20 * KV_BLOCK_SIZE)]
    blocks = list(range(20))
    first = Scripted("first", prefix, blocks, 0)
    rows = [
        Scripted(f"row {row}", [*prefix, row, 5, 7], [*blocks, 20 + row], len(prefix))
        for row in range(6)
    ]
    plans = [
        StepPlan(0, (first.chunk(len(prefix)),)),
        StepPlan(1, tuple(row.chunk(2) for row in rows)),
        StepPlan(2, tuple(row.chunk(1) for row in rows)),
    ]
    (on, info), (off, info_off) = (
        loaded(spec, kernels=kernels, shared_attention=choice) for choice in ("on", "off")
    )
    assert info_off.grouping is None
    assert info.grouping == grouping_for(info.kernels, KV_BLOCK_SIZE), "the scheduler is told"
    if info.grouping is not None:
        plans = [with_shared(plan, info.grouping) for plan in plans]
        assert plans[1].shared and plans[2].shared
    check_alike(on, off, [replace(plan, shared=()) for plan in plans])
    check_alike(on, off, plans)
    alone = replace(plans[2], shared=())
    assert torch.equal(on.logits(plans[2]), off.logits(alone))


def test_plain_weights_of_opt() -> None:
    packed, _ = loaded(OPT)
    check_alike(packed, assemble(OPT).runner, family_plans(random.Random(1), 4, 64))


@pytest.mark.parametrize(("weights", "tolerance"), [("bf16", 0.3), ("fp16", 0.03)])
@pytest.mark.parametrize("spec", [tiny_spec(), OPT], ids=["llama", "opt"])
def test_half_precision_stays_close(spec: ModelSpec, weights: str, tolerance: float) -> None:
    """Logits have a standard deviation of about 1."""
    precise, half = assemble(spec).runner, assemble(spec, weights=weights, graph_rows=8).runner
    for plan in family_plans(random.Random(2), 4, 64):
        logits = half.logits(plan)
        assert logits.dtype == torch.float32
        error = (logits - precise.logits(plan)).abs().max().item()
        assert 1e-5 < error < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("build", ["recorded", pytest.param("loaded", marks=pytest.mark.long)])
def test_triton_gives_what_the_cpu_kernels_give(build: str) -> None:
    pytest.importorskip("triton")
    builders: dict[str, Callable[[], ModelRunner]] = {
        "loaded": lambda: loaded(tiny_spec(), kernels="triton")[0],
        "recorded": lambda: (
            assemble(kernels=select_kernels("triton", CPU), graph_rows=4, groups=True).runner
        ),
    }
    plans = family_plans(random.Random(100), 3, 64, most_decodes=2)
    grouping = grouping_for("triton", KV_BLOCK_SIZE)
    assert grouping is not None
    plans = [with_shared(plan, grouping) for plan in plans]
    assert any(plan.shared for plan in plans)
    by_cpu, by_triton = loaded(tiny_spec())[0], builders[build]()
    for plan in plans:
        torch.testing.assert_close(by_triton.logits(plan), by_cpu.logits(plan), atol=1e-4, rtol=0)


def test_random_weights_depend_on_name_shape_and_seed_alone() -> None:
    weights = RandomWeights(3)
    matrix = weights.dense("a.weight", (40, 50))
    half = torch.empty(40, 50, dtype=torch.bfloat16)
    RandomWeights(3).copy_into(half, "a.weight", (40, 50))
    assert torch.equal(half, matrix.bfloat16())
    assert not torch.equal(matrix, weights.dense("b.weight", (40, 50)))
    assert not torch.equal(matrix, RandomWeights(4).dense("a.weight", (40, 50)))
    assert matrix.std().item() == pytest.approx(50**-0.5, rel=0.1)
    assert weights.dense("a.bias", (5000,)).std().item() == pytest.approx(0.02, rel=0.1)
    assert 0.8 <= weights.dense("norm.weight", (100,)).min() < 1
    assert torch.equal(RandomWeights(3, CPU).dense("a.weight", (40, 50)), matrix)
    codes = weights.int4("a.weight", (40, 64))
    torch.testing.assert_close(
        codes.dequantize(), weights.dense("a.weight", (40, 64)), atol=0.05, rtol=0
    )
    assert weights.unread == frozenset()
