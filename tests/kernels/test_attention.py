"""Attention of all back ends against the reference run in double precision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from bros.kernels.interface import AttentionBatch, HeadLayout, Kernels, SharedParts
from support.kernel_cases import (
    KV_DTYPES,
    PAIR_LEVELS,
    AttentionCase,
    Backend,
    Parts,
    attend,
    cpu_kernels,
    each_backend,
    each_level,
    exact_attention,
    int32,
    make_case,
    needs_triton,
    torch_threads,
    triton_backend,
)
from support.tier import is_long

# Scores of unit normal q and k, scaled by dim**-0.5, carry an fp32 dot product's error, at most
# some 2e-6; softmax weights then have a relative error of twice that, and |v| stays below 5.
ATOL = 2e-5
# Where pairs of bf16 are multiplied, Q and weights have 8 bits. Scores are up to 10, so weights may
# be wrong by 10 * 2**-8.
PAIRS_ATOL = 0.1
PAIRS_ERROR = 6e-3  # |result - exact| / |exact|


def run(kernels: Kernels, case: AttentionCase) -> Tensor:
    """As it is, on the CPU."""
    return kernels.attention(
        case.qkv, case.layout, case.k_cache, case.v_cache, case.batch, case.scale
    )


def skip_many_tiles(backend: Backend, rows: Sequence[tuple[int, int]]) -> None:
    """Interpreted, each tile takes long, and those of other cases take the same branches."""
    if backend.is_interpreted and not is_long() and max(length for length, _ in rows) > 100:
        pytest.skip("of the long tier where kernels are interpreted: runs with --long")


def multiplies_pairs(level: str, case: AttentionCase) -> bool:
    """Whether attention multiplies pairs of bf16, see csrc/attention_words.h."""
    bf16 = case.k_cache.dtype is torch.bfloat16
    return level in PAIR_LEVELS and bf16 and case.layout.head_dim % 2 == 0


def assert_matches(backend: Backend, case: AttentionCase) -> None:
    before = case.clone()
    actual = attend(backend.kernels(), case, backend.device)
    exact = exact_attention(before if backend.is_triton else before.with_rounded_chunks())
    pairs = multiplies_pairs(backend.name, case)
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=PAIRS_ATOL if pairs else ATOL)
    if pairs:
        assert (actual - exact).norm() <= PAIRS_ERROR * exact.norm()
    assert torch.equal(case.qkv, before.qkv)
    assert torch.equal(case.k_cache, before.k_cache)
    assert torch.equal(case.v_cache, before.v_cache)


@each_backend
def test_attention_matches_the_reference(backend: Backend) -> None:
    @settings(max_examples=backend.examples, phases=backend.phases)
    @given(case=backend.attention_cases())
    def check(case: AttentionCase) -> None:
        assert_matches(backend, case)

    check()


@each_backend
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(1, 2500)], id="decode in several parts"),
        pytest.param([(40, 2500)], id="one tile over a context in several parts"),
        pytest.param([(500, 1100)], id="chunk of many tiles after a context"),
        pytest.param([(1, 256), (1, 257), (64, 1024), (64, 1025)], id="ends of parts"),
        pytest.param([(2, 1024), (3, 300), (1, 0), (1, 0)], id="few queries, no context"),
    ],
)
def test_long_contexts_are_split_and_merged(backend: Backend, rows: list[tuple[int, int]]) -> None:
    skip_many_tiles(backend, rows)
    with torch_threads(2):
        heads = {"kv_heads": 1, "group": 1, "head_dim": 16} if backend.is_interpreted else {}
        assert_matches(backend, make_case(rows, **heads))


@each_backend
def test_rows_read_the_parts_they_share(backend: Backend) -> None:
    parts = [((0, 1, 3, 5), 300), ((3, 1), 17), ((), 20), ((2,), 40), ((5, 0), 0), ((4, 5), 160)]
    rows = [(1, 30), (1, 0), (3, 40), (1, 5), (20, 5), (1, 130), (0, 3)]
    assert_matches(backend, make_case(rows, kv_heads=2, parts=parts))


@each_backend
@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        pytest.param(
            [(1, 5)] * 70 + [(30, 20), (0, 3), (9, 0)],
            [(range(72), 1100), (range(5, 73), 40)],
            id="more queries than a tile has lanes",
        ),
        pytest.param([(400, 30), (1, 20), (65, 0)], [((2, 0, 1), 600)], id="tiles of a long chunk"),
        pytest.param([(1, 300), (1, 0)], [((0, 1), 700)], id="two rows, in several parts"),
        pytest.param(
            [(1, 4 * row) for row in range(16)],
            [(range(16 >> level), 16 + 130 * level) for level in range(5)],
            id="five levels",
        ),
        pytest.param(
            [(1, 0), (2, 9)], [((0, 1), 513), ((), 9), ((0,), 0), ((1,), 1)], id="few keys"
        ),
    ],
)
def test_parts_are_split_and_merged(
    backend: Backend, rows: list[tuple[int, int]], parts: Parts
) -> None:
    skip_many_tiles(backend, rows)
    with torch_threads(2):
        heads = {"kv_heads": 1, "group": 1, "head_dim": 16} if backend.is_interpreted else {}
        assert_matches(backend, make_case(rows, parts=parts, **heads))


@each_level
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_parts_do_not_depend_on_threads_or_on_what_is_beside_them(
    level: str, kv_dtype: torch.dtype
) -> None:
    rows = [(1, 90)] * 12 + [(40, 70), (1, 1300)]
    case = make_case(rows, kv_dtype=kv_dtype, parts=[(range(12), 1500), (range(3, 13), 30)])
    kernels = cpu_kernels(level)
    with torch_threads(2):
        together = run(kernels, case)
    with torch_threads(1):
        assert torch.equal(together, run(kernels, case))
    last = run(kernels, case.row(len(rows) - 1))  # reads no part
    assert torch.equal(together[-1:], last)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group", "dtype", "kv_dtype"),
    [
        (5, 3, 3, FP32, FP32),
        (12, 1, 7, FP16, FP32),
        (72, 2, 5, BF16, FP16),
        (80, 2, 1, FP32, BF16),
        (96, 1, 13, FP16, FP16),
        (96, 3, 3, BF16, FP32),
        (128, 1, 40, BF16, BF16),
        (256, 2, 3, FP16, BF16),
    ],
)
def test_odd_shapes_and_mixed_types_on_a_gpu(
    head_dim: int, kv_heads: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """A few that are compiled once; where kernels are interpreted, more are drawn."""
    rows = [(1, 300), (40, 130), (1, 17), (1, 0), (3, 50)]
    parts = [((0, 1, 2, 3), 200), ((2, 3), 70)]
    case = make_case(rows, kv_heads, group, head_dim, kv_dtype, parts=parts)
    case = replace(case, qkv=case.qkv.to(dtype))
    backend = triton_backend()
    actual = attend(backend.kernels(), case, backend.device)
    # Weights and output are rounded once each, to so many bits, and |v| stays below 6.
    atol = {FP32: ATOL, BF16: 24 * 2**-8, FP16: 24 * 2**-11}[dtype]
    torch.testing.assert_close(actual.double(), exact_attention(case), rtol=0, atol=atol)


@each_backend
@pytest.mark.parametrize("group", [1, 9, 40, 200])
def test_any_number_of_query_heads_may_share_a_kv_head(backend: Backend, group: int) -> None:
    rows = [(1, 130), (2, 20)] if backend.is_interpreted else [(1, 1300), (70, 33)]
    assert_matches(backend, make_case(rows, kv_heads=1, group=group, head_dim=16))


@each_level
def test_a_row_does_not_depend_on_its_batch_or_on_threads(level: str) -> None:
    # 700 queries have larger tiles, with one thread twice as large as with two.
    rows = [(1, 700), (130, 90), (5, 0), (33, 2100), (1, 0), (700, 45), (2, 300)]
    case = make_case(rows)
    kernels = cpu_kernels(level)
    with torch_threads(2):
        together = run(kernels, case)
    with torch_threads(1):
        alone = [run(kernels, case.row(row)) for row in range(case.batch.num_rows)]
    assert torch.equal(together, torch.cat(alone))


@each_backend
def test_a_row_without_tokens_is_skipped(backend: Backend) -> None:
    assert_matches(backend, make_case([(3, 20), (0, 40), (2, 5)]))


@each_backend
def test_a_step_without_rows_gives_an_empty_output(backend: Backend) -> None:
    assert attend(backend.kernels(), make_case([]), backend.device).shape == (0, 9 * 64)


@each_backend
def test_large_scores_neither_overflow_nor_lose_the_largest(backend: Backend) -> None:
    case = make_case([(70, 300), (1, 300)], kv_heads=1 if backend.is_interpreted else 3)
    case.qkv.mul_(40.0)  # scores in the thousands: softmax is all but one-hot
    actual = attend(backend.kernels(), case, backend.device)
    # Errors of scores grow with them (1e-7 * 5000), those of V by the factor 40.
    torch.testing.assert_close(actual.double(), exact_attention(case), rtol=0, atol=40 * 2e-3)


@each_level
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 9], ids=["decode", "tile"])
def test_every_16_bit_value_is_read_exactly(level: str, dtype: torch.dtype, tokens: int) -> None:
    # One cached key and `tokens` own keys all score 0, and only the cached value is not 0.
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    values = torch.where(patterns.isfinite(), patterns, 0).reshape(1024, 1, 1, 64)
    layout = HeadLayout(1, 1, 64)
    rows = len(values)
    batch = AttentionBatch(
        int32(range(0, rows * tokens + 1, tokens)),
        int32(range(rows + 1)),
        torch.stack([int32(range(rows)), int32([0] * rows), int32([1] * rows)], dim=1),
    )
    qkv = torch.zeros(rows * tokens, layout.qkv_size)
    out = cpu_kernels(level).attention(qkv, layout, torch.zeros_like(values), values, batch, 1.0)
    expected = values.float()
    if level in PAIR_LEVELS and dtype is torch.bfloat16:  # products of pairs: subnormals are 0
        expected = torch.where(expected.abs() < torch.finfo(dtype).tiny, 0.0, expected)
    first = out[::tokens]  # sees the cached key and itself: half the value, exact in fp32
    assert torch.equal(first, expected.view(rows, 64) / 2)


def with_segments(case: AttentionCase, segments: Tensor) -> AttentionCase:
    batch = AttentionBatch(case.batch.query_start, case.batch.segment_start, segments)
    return AttentionCase(case.qkv, case.layout, case.k_cache, case.v_cache, batch, scale=case.scale)


@each_level
@pytest.mark.parametrize(
    "segment", [(-1, 0, 1), (10**6, 0, 1), (0, -1, 2), (0, 2, -1), (0, 17, 2), (0, 0, 17)]
)
def test_segments_outside_the_cache_are_refused(level: str, segment: tuple[int, int, int]) -> None:
    case = make_case([(1, 16)])
    segments = case.batch.segments.clone()
    segments[random.Random(0).randrange(len(segments))] = torch.tensor(segment)
    with pytest.raises(IndexError, match="segment outside"):
        run(cpu_kernels(level), with_segments(case, segments))


@each_level
@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("row_start", [0, 2, 5], "row_start"),
        ("row_start", [-1, 2, 3], "row_start"),
        ("row_start", [0, 3, 2], "row_start"),
        ("rows", [0, 1, 2], "row outside"),
        ("rows", [0, -1, 1], "row outside"),
        ("segment_start", [0, 1, 3], "segment_start"),
        ("segment_start", [-1, 1, 2], "segment_start"),
        ("segment_start", [0, 2, 1], "segment_start"),
        ("segments", [[0, 0, 4], [10**6, 0, 1]], "segment outside"),
        ("segments", [[-1, 0, 4], [1, 0, 1]], "segment outside"),
        ("segments", [[0, 0, 4], [1, 0, 17]], "segment outside"),
        ("segments", [[0, 17, 4], [1, 0, 1]], "segment outside"),
    ],
)
def test_parts_outside_the_batch_or_the_cache_are_refused(
    level: str, field: str, values: list[Any], message: str
) -> None:
    case = make_case([(1, 16), (1, 3)])
    shared = SharedParts(
        int32([0, 2, 3]), int32([0, 1, 1]), int32([0, 1, 2]), int32([[0, 0, 4], [1, 0, 1]])
    )
    good = replace(case, batch=replace(case.batch, shared=shared))
    assert run(cpu_kernels(level), good).isfinite().all()
    wrong = replace(case.batch, shared=replace(shared, **{field: int32(values)}))
    with pytest.raises(IndexError, match=message):
        run(cpu_kernels(level), replace(case, batch=wrong))


@each_level
@pytest.mark.parametrize("query_start", [[0, 3, 4], [1, 3, 5], [0, 6, 5]])
def test_rows_that_do_not_cover_the_tokens_are_refused(level: str, query_start: list[int]) -> None:
    case = make_case([(2, 0), (3, 0)])
    batch = AttentionBatch(int32(query_start), case.batch.segment_start, case.batch.segments)
    wrong = AttentionCase(case.qkv, case.layout, case.k_cache, case.v_cache, batch, case.scale)
    with pytest.raises(IndexError, match="query_start"):
        run(cpu_kernels(level), wrong)


@each_level
def test_a_wrong_dtype_is_caught_before_memory_is_read(level: str) -> None:
    case = make_case([(2, 3)])
    with pytest.raises(AssertionError):
        cpu_kernels(level).attention(
            case.qkv.double(), case.layout, case.k_cache, case.v_cache, case.batch, case.scale
        )
