"""The reference kernels against independent definitions from torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import functional

from bros.kernels.interface import HeadLayout
from bros.kernels.reference import ReferenceKernels, gather_segments, split_heads
from support.kernel_cases import ATTENTION_CASES, AttentionCase, int32
from support.tier import examples

KERNELS = ReferenceKernels()


def sdpa(case: AttentionCase, row: int) -> Tensor:
    """One row by scaled_dot_product_attention on gathered K and V, in double."""
    one = case.row(row)
    q, k, v = (x.double() for x in split_heads(one.qkv, one.layout))
    segments = one.batch.segments.tolist()
    keys = torch.cat([gather_segments(one.k_cache, segments).double(), k])
    values = torch.cat([gather_segments(one.v_cache, segments).double(), v])
    context = len(keys) - len(q)
    mask = torch.ones(len(q), len(keys), dtype=torch.bool).tril(diagonal=context)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=mask,
        scale=one.scale,
        enable_gqa=True,
    )
    return out.transpose(0, 1).flatten(1)


@settings(max_examples=examples(30), deadline=None)
@given(case=ATTENTION_CASES)
def test_attention_is_sdpa_on_gathered_keys(case: AttentionCase) -> None:
    actual = KERNELS.attention(
        case.qkv.double(), case.layout, case.k_cache, case.v_cache, case.batch, case.scale
    )
    expected = torch.cat([sdpa(case, row) for row in range(case.batch.num_rows)])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_gathered_segments_keep_order_and_bounds() -> None:
    cache = torch.arange(3 * 2 * 4 * 1).reshape(3, 2, 4, 1)
    gathered = gather_segments(cache, [[2, 1, 3], [0, 2, 2], [1, 0, 1]])
    assert gathered[:, :, 0].tolist() == [[17, 21], [18, 22], [8, 12]]


def test_rms_norm_is_torchs() -> None:
    x, weight = torch.randn(5, 48), torch.randn(48)
    expected = functional.rms_norm(x, (48,), weight, 1e-5)
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-5), expected)
    residual = torch.randn(5, 48)
    total = residual + x
    torch.testing.assert_close(
        KERNELS.add_rms_norm_(residual, x, weight, 1e-5),
        functional.rms_norm(total, (48,), weight, 1e-5),
    )
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_of_16_bit_numbers_are_rounded_once(
    dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x, weight = torch.randn(5, 48).to(dtype), torch.randn(48).to(weight_dtype)
    exact = KERNELS.rms_norm(x.double(), weight.double(), 1e-5)
    out = KERNELS.rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    # Half a bit, and what fp32 adds to it.
    limit = torch.finfo(dtype).eps * 0.501
    torch.testing.assert_close(out.double(), exact, rtol=limit, atol=1e-6)


@pytest.mark.parametrize("rotary_dim", [0, 4, 10, 16])
def test_rotation_multiplies_complex_numbers(rotary_dim: int) -> None:
    layout = HeadLayout(4, 2, 16)
    half = rotary_dim // 2
    angles = torch.randn(20, half)
    qkv = torch.randn(5, layout.qkv_size)
    positions = int32([3, 19, 0, 7, 7])
    before = [x.clone() for x in split_heads(qkv, layout)]
    cache = torch.zeros(1, 2, 16, 16)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    KERNELS.rope_and_cache_(qkv, layout, positions, int32(range(5)), cos_sin, cache.clone(), cache)
    turn = torch.polar(torch.ones(5, 1, half), angles[positions.long()][:, None])
    after = split_heads(qkv, layout)
    for old, new in zip(before[:2], after[:2], strict=True):
        turned = torch.complex(old[..., :half], old[..., half:rotary_dim]) * turn
        torch.testing.assert_close(new[..., :half], turned.real)
        torch.testing.assert_close(new[..., half:rotary_dim], turned.imag)
        assert torch.equal(new[..., rotary_dim:], old[..., rotary_dim:])
    assert torch.equal(after[2], before[2])


def test_norm_comes_before_rotation_and_both_before_the_cache() -> None:
    layout = HeadLayout(2, 1, 4)
    qkv = torch.randn(3, layout.qkv_size)
    q, k, v = (x.clone() for x in split_heads(qkv, layout))
    q_norm, k_norm = torch.randn(4), torch.randn(4)
    k_cache, v_cache = torch.zeros(2, 1, 2, 4, dtype=torch.bfloat16), torch.zeros(2, 1, 2, 4)
    quarter_turn = torch.tensor([[0.0, 0.0, 1.0, 1.0]])  # (a, b) -> (-b, a)
    KERNELS.rope_and_cache_(
        *(qkv, layout, int32([0, 0, 0]), int32([3, 0, 1]), quarter_turn),
        *(k_cache, v_cache, q_norm, k_norm, 1e-5),
    )
    for new, old, weight in zip(split_heads(qkv, layout), (q, k), (q_norm, k_norm), strict=False):
        normed = functional.rms_norm(old, (4,), weight, 1e-5)
        expected = torch.cat([-normed[..., 2:], normed[..., :2]], dim=-1)
        torch.testing.assert_close(new, expected)
    stored = split_heads(qkv, layout)[1].to(torch.bfloat16)
    assert torch.equal(k_cache[[1, 0, 0], :, [1, 0, 1]], stored)
    assert torch.equal(v_cache[[1, 0, 0], :, [1, 0, 1]], v)
    assert not k_cache[1, :, 0].any() and not v_cache[1, :, 0].any()


def test_silu_and_mul() -> None:
    gate, up = torch.randn(3, 7), torch.randn(3, 7)
    actual = KERNELS.silu_and_mul(torch.cat([gate, up], dim=1))
    torch.testing.assert_close(actual, gate * torch.sigmoid(gate) * up)
