"""The own part of prompt chunks by xformers: merged with cached parts, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.errors import ConfigError
from bros.kernels.dispatch import select_kernels
from bros.kernels.interface import GraphLimits, HeadLayout, Kernels
from bros.kernels.xformers_attention import MIN_TOKENS, XformersAttention, load_xformers
from support.fake_xformers import FakeFmha, install
from support.kernel_cases import (
    ANY_PARTS,
    AttentionCase,
    attend,
    exact_attention,
    make_any_case,
    make_case,
    needs_triton,
    triton_backend,
)

CPU = torch.device("cpu")
BACKEND = triton_backend()
LAYOUT = HeadLayout(6, 2, 64)
FP32 = (torch.float32,)
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}

# The fake computes on the CPU, wherever a GPU is.
interpreted = pytest.mark.skipif(BACKEND.device.type != "cpu", reason="there is a CUDA device")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
needs_xformers = pytest.mark.skipif(find_spec("xformers") is None, reason="xformers is missing")


def kernels_with(fmha: FakeFmha) -> Kernels:
    return select_kernels("triton", CPU, XformersAttention(fmha, CPU))


def assert_exact(case: AttentionCase, fmha: FakeFmha) -> None:
    before = case.clone()
    actual = attend(kernels_with(fmha), case, CPU)
    # As for the Triton kernels alone; the fake is exact but for one rounding.
    torch.testing.assert_close(actual.double(), exact_attention(before), rtol=0, atol=2e-5)
    assert torch.equal(case.qkv, before.qkv)


MIXES = {
    "a prompt": ([(70, 0)], []),
    "a chunk after a context": ([(64, 50)], []),
    "a context in several parts": ([(65, 900)], []),
    "prompts": ([(64, 0), (90, 0), (70, 0)], []),
    "decode rows around a chunk": ([(1, 20), (80, 30), (1, 0), (1, 200)], []),
    "short rows between chunks": ([(64, 9), (1, 40), (0, 5), (63, 20), (1, 0), (66, 0)], []),
    "shared parts": ([(1, 5), (70, 20), (1, 0), (66, 0), (3, 8)], [((0, 2, 1, 3), 90), ((1,), 9)]),
    "segments without tokens": ([(64, 0), (1, 3)], [((0, 1), 0)]),
}


@needs_triton
@interpreted
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long)
        if name not in ("a chunk after a context", "shared parts", "segments without tokens")
        else name
        for name in MIXES
    ],
)
def test_chunks_are_merged_with_what_is_cached(name: str) -> None:
    rows, parts = MIXES[name]
    fmha = FakeFmha(FP32)
    assert_exact(make_case(rows, kv_heads=1, group=2, head_dim=16, parts=parts), fmha)
    [lengths] = fmha.calls
    assert max(lengths) >= MIN_TOKENS and 0 not in lengths


@needs_triton
@interpreted
@pytest.mark.parametrize(
    ("kv_heads", "group"), [(2, 1), pytest.param(2, 3, marks=pytest.mark.long)]
)
def test_heads_are_told_apart(kv_heads: int, group: int) -> None:
    case = make_case([(1, 9), (64, 20)], kv_heads=kv_heads, group=group, head_dim=8)
    assert_exact(case, FakeFmha(FP32, padding=5))


@needs_triton
@interpreted
@settings(max_examples=BACKEND.examples, phases=BACKEND.phases)
@given(
    case=st.builds(
        make_any_case,
        rows=st.lists(
            st.tuples(
                st.sampled_from([0, 1, 1, 5, 63, 64, 70]),
                st.one_of(st.just(0), st.integers(1, 40), st.integers(100, 300)),
            ),
            min_size=1,
            max_size=5,
        ),
        parts=ANY_PARTS,
        kv_heads=st.just(1),
        group=st.integers(1, 3),
        head_dim=st.sampled_from([8, 16, 72]),
        seed=st.integers(0, 2**32 - 1),
    )
)
def test_any_mix_of_rows(case: AttentionCase) -> None:
    fmha = FakeFmha(FP32)
    assert_exact(case, fmha)
    assert len(fmha.calls) == int((case.batch.query_start.diff() >= MIN_TOKENS).any())


@needs_triton
@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_activations(dtype: torch.dtype) -> None:
    rows = [(70, 40), (1, 30), (64, 0)]
    case = make_case(rows, kv_heads=1, group=2, head_dim=16, kv_dtype=dtype)
    case = replace(case, qkv=case.qkv.to(dtype))
    fmha = FakeFmha()
    actual = attend(kernels_with(fmha), case, CPU)
    assert actual.dtype == dtype and fmha.calls
    # Weights, partial results and the output are rounded or cut off once each, and |v| is below 5.
    error = 5 * 5 * EPSILON[dtype]
    torch.testing.assert_close(actual.double(), exact_attention(case), rtol=0, atol=error)


@needs_triton
@interpreted
def test_large_scores_are_merged_without_overflow() -> None:
    case = make_case([(70, 60)], kv_heads=1, group=1, head_dim=16)
    case.qkv.mul_(40.0)  # scores in the thousands
    actual = attend(kernels_with(FakeFmha(FP32)), case, CPU)
    torch.testing.assert_close(actual.double(), exact_attention(case), rtol=0, atol=40 * 2e-3)


@needs_triton
@interpreted
@pytest.mark.parametrize("rows", [[], [(1, 20)] * 3, [(63, 10), (1, 5)]])
def test_steps_without_a_long_row_are_left_alone(rows: list[tuple[int, int]]) -> None:
    fmha = FakeFmha(FP32)
    case = make_case(rows, kv_heads=1, head_dim=16)
    attend(kernels_with(fmha), case, CPU)
    assert not fmha.calls


@needs_triton
@interpreted
def test_recorded_steps_are_left_alone() -> None:
    fmha = FakeFmha(FP32)
    kernels = kernels_with(fmha)
    case = make_case([(1, 20)] * 3, kv_heads=1, head_dim=16)
    buffers = kernels.graph_buffers(GraphLimits(rows=4, segments=30), case.layout, CPU)
    batch = kernels.prepare(case.batch, case.layout, CPU, buffers)
    out = kernels.attention(case.qkv, case.layout, case.k_cache, case.v_cache, batch, case.scale)
    torch.testing.assert_close(out.double(), exact_attention(case), rtol=0, atol=2e-5)
    assert not fmha.calls


@needs_triton
@interpreted
def test_the_name_tells() -> None:
    assert kernels_with(FakeFmha()).name == "triton-xformers"
    assert select_kernels("triton", CPU).name == "triton"


# --- opening it ---


def test_xformers_that_works_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    fmha = FakeFmha()
    install(monkeypatch, fmha)
    load_xformers(CPU, LAYOUT, torch.float16)
    assert fmha.calls == [[64, 65]]  # it has been tried


def test_without_xformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(ConfigError, match=r"^--self-attention xformers: install bros\[xformers\]"):
        load_xformers(CPU, LAYOUT, torch.bfloat16)


def test_fp32_is_refused() -> None:
    with pytest.raises(ConfigError, match="for bf16 and fp16 only"):
        load_xformers(CPU, LAYOUT, torch.float32)


def test_heads_it_has_no_kernel_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeFmha())
    with pytest.raises(ConfigError, match=r"not usable here: Not.*for `x`; query.shape\[-1\]"):
        load_xformers(CPU, HeadLayout(2, 2, 12), torch.float16)


class PaddedFmha(FakeFmha):
    """Log-sum-exps as cutlass.FwOp gives them, [rows, G, H, longest row]."""

    def memory_efficient_attention_partial(self, *args: Any, **rest: Any) -> Any:
        out, lse = super().memory_efficient_attention_partial(*args, **rest)
        return out, lse.new_zeros(2, *lse.shape[1:3], 65)


class Base2Fmha(FakeFmha):
    def memory_efficient_attention_partial(self, *args: Any, **rest: Any) -> Any:
        out, lse = super().memory_efficient_attention_partial(*args, **rest)
        return out, lse * 1.4426950408889634


@pytest.mark.parametrize("fmha", [PaddedFmha(), Base2Fmha()], ids=lambda fmha: type(fmha).__name__)
def test_other_log_sum_exps_are_noticed(monkeypatch: pytest.MonkeyPatch, fmha: FakeFmha) -> None:
    install(monkeypatch, fmha)
    with pytest.raises(ConfigError, match="returns wrong results"):
        load_xformers(CPU, LAYOUT, torch.float16)


def test_an_xformers_for_another_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stumbling(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            # As flash.py does, through torch_attention_compat.ensure_pt_flash_ok.
            raise ImportError("Current Torch doesnt have\na compatible schema")

    monkeypatch.setitem(sys.modules, "xformers", ModuleType("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", Stumbling("xformers.ops"))
    with pytest.raises(ConfigError, match="this torch: ImportError: .* doesnt have; a compatible"):
        load_xformers(CPU, LAYOUT, torch.float16)


# --- the real one, on a GPU ---

REAL = {
    "prefill": ([(2048, 0), (500, 1500)], []),
    "mixed": ([(1, 700)] * 30 + [(300, 900), (7, 64), (1, 5), (900, 0)] + [(1, 20)] * 3, []),
    "shared": ([(1, 100)] * 20 + [(200, 40), (64, 0)], [(range(22), 1000)]),
}
LAYOUTS = {"llama": (8, 4, 128), "smollm": (3, 3, 64), "one group": (4, 1, 64), "wide": (2, 2, 256)}


@needs_xformers
@on_gpu
@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model", LAYOUTS)
@pytest.mark.parametrize("shape", REAL)
def test_the_real_one_at_real_sizes(shape: str, model: str, dtype: torch.dtype) -> None:
    rows, parts = REAL[shape]
    case = make_case(rows, *LAYOUTS[model], kv_dtype=dtype, parts=parts)
    case = replace(case, qkv=case.qkv.to(dtype)).to(BACKEND.device)
    own = load_xformers(BACKEND.device, case.layout, dtype)
    kernels = select_kernels("triton", BACKEND.device, own)
    batch = kernels.prepare(case.batch, case.layout, BACKEND.device)
    actual = kernels.attention(case.qkv, case.layout, case.k_cache, case.v_cache, batch, case.scale)
    expected = exact_attention(case)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=6 * 4 * EPSILON[dtype])
    assert (actual.double() - expected).norm() / expected.norm() < 5 * EPSILON[dtype]


@needs_xformers
@on_gpu
@pytest.mark.gpu
def test_the_real_one_says_what_it_has_no_kernel_for() -> None:
    with pytest.raises(ConfigError, match="not usable here: NotImplementedError"):
        load_xformers(BACKEND.device, HeadLayout(2, 2, 12), torch.float16)
