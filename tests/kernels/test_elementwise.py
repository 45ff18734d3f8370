"""Norms, rotary embedding and activation of all back ends against the reference in double
precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bros.kernels.interface import HeadLayout
from bros.kernels.reference import ReferenceKernels, split_heads
from support.kernel_cases import (
    HEAD_DIMS,
    KV_DTYPES,
    Backend,
    cpu_kernels,
    each_backend,
    each_level,
    int32,
    needs_triton,
    torch_threads,
    triton_backend,
)

REFERENCE = ReferenceKernels()
# A handful of fp32 roundings (6e-8 each) of a result; sums of n squares of one sign add less.
RTOL = 2e-6
SIZES = st.tuples(st.integers(0, 9), st.integers(1, 200))
SEEDS = st.integers(0, 2**32 - 1)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@each_backend
def test_rms_norm(backend: Backend) -> None:
    @settings(max_examples=backend.examples, phases=backend.phases)
    @given(size=SIZES, seed=SEEDS, scale=st.sampled_from([1e-4, 1.0, 1e4]))
    def check(size: tuple[int, int], seed: int, scale: float) -> None:
        x = normal(seed, *size) * scale
        weight = normal(seed + 1, size[1])
        there = x.to(backend.device, copy=True)
        actual = backend.kernels().rms_norm(there, weight.to(backend.device), 1e-5)
        expected = REFERENCE.rms_norm(x.double(), weight.double(), 1e-5)
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=RTOL, atol=1e-12)
        assert torch.equal(there.cpu(), x)

    check()


@each_backend
def test_add_rms_norm(backend: Backend) -> None:
    @settings(max_examples=backend.examples, phases=backend.phases)
    @given(size=SIZES, seed=SEEDS)
    def check(size: tuple[int, int], seed: int) -> None:
        residual, x = normal(seed, *size), normal(seed + 1, *size)
        weight = normal(seed + 2, size[1])
        there, added = residual.to(backend.device, copy=True), x.to(backend.device, copy=True)
        kernels = backend.kernels()
        actual = kernels.add_rms_norm_(there, added, weight.to(backend.device), 1e-6)
        total = residual + x
        assert torch.equal(there.cpu(), total)  # one fp32 addition: exact
        assert torch.equal(added.cpu(), x)
        expected = REFERENCE.rms_norm(total.double(), weight.double(), 1e-6)
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=RTOL, atol=1e-12)

    check()


@each_backend
def test_silu_and_mul(backend: Backend) -> None:
    @settings(max_examples=backend.examples, phases=backend.phases)
    @given(size=SIZES, seed=SEEDS, scale=st.sampled_from([0.01, 1.0, 30.0]))
    def check(size: tuple[int, int], seed: int, scale: float) -> None:
        gate_up = normal(seed, size[0], 2 * size[1]) * scale
        there = gate_up.to(backend.device, copy=True)
        actual = backend.kernels().silu_and_mul(there)
        # exp saturates at e^-87 (1e-38), far below any fp32 neighbour of the sums it goes into.
        torch.testing.assert_close(
            actual.cpu().double(),
            REFERENCE.silu_and_mul(gate_up.double()),
            rtol=RTOL,
            atol=1e-33,
        )
        assert torch.equal(there.cpu(), gate_up)

    check()


@each_backend
def test_silu_at_the_ends_of_fp32(backend: Backend) -> None:
    gate = torch.tensor([3e38, -3e38, 90.0, -90.0, 0.0, -0.0, float("inf"), float("nan")])
    gate_up = torch.cat([gate, torch.ones(8)])[None].to(backend.device)
    out = backend.kernels().silu_and_mul(gate_up)[0].cpu()
    assert out[0] == gate[0] and out[2] == 90.0 and out[6] == float("inf")
    assert -10 < out[1] <= 0 and -1e-35 < out[3] <= 0  # 3e38 * 1e-38 is the worst case
    assert out[4] == 0 and out[5] == 0 and out[7].isnan()


@st.composite
def rope_cases(draw: st.DrawFn) -> dict[str, object]:
    kv_heads = draw(st.integers(1, 3))
    dim = draw(st.sampled_from(HEAD_DIMS))
    layout = HeadLayout(kv_heads * draw(st.integers(1, 4)), kv_heads, dim)
    tokens, num_blocks = draw(st.integers(0, 20)), draw(st.integers(2, 4))
    block_size = draw(st.sampled_from([1, 16, 10])) if tokens <= 2 else 16
    slots = draw(
        st.lists(
            st.integers(0, num_blocks * block_size - 1),
            min_size=tokens,
            max_size=tokens,
            unique=True,
        )
    )
    seed = draw(SEEDS)
    rotary_dim = draw(st.one_of(st.none(), st.just(dim // 2 * 2), st.integers(1, dim // 2)))
    if rotary_dim is not None:
        rotary_dim -= rotary_dim % 2
    angles = normal(seed + 1, 50, (rotary_dim or 0) // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    dtype = draw(st.sampled_from(KV_DTYPES))
    cache = normal(seed + 2, 2, num_blocks, kv_heads, block_size, dim).to(dtype)
    return {
        "qkv": normal(seed, tokens, layout.qkv_size),
        "layout": layout,
        "positions": torch.randint(
            50, (tokens,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)
        ),
        "slots": int32(slots),
        "cos_sin": None if rotary_dim is None else cos_sin,
        "k_cache": cache[0].clone(),
        "v_cache": cache[1].clone(),
        "q_norm": normal(seed + 3, dim) if draw(st.booleans()) else None,
        "k_norm": normal(seed + 4, dim) if draw(st.booleans()) else None,
        "eps": 1e-5,
    }


def check_rope_and_cache(backend: Backend, case: dict[str, Tensor]) -> None:
    expected = {
        name: x.clone().double() if torch.is_tensor(x) and x.dtype == torch.float32 else x
        for name, x in case.items()
    }
    layout: HeadLayout = case["layout"]  # type: ignore[assignment]
    k_cache, v_cache = case["k_cache"].clone(), case["v_cache"].clone()
    v_before = split_heads(case["qkv"], layout)[2].clone()

    there = {
        name: x.to(backend.device, copy=True) if torch.is_tensor(x) else x
        for name, x in case.items()
    }
    backend.kernels().rope_and_cache_(**there)
    REFERENCE.rope_and_cache_(
        **{**expected, "k_cache": k_cache.clone(), "v_cache": v_cache.clone()}
    )

    # A rotated element is a difference of products of up to 10: absolute error some 1e-6.
    qkv = there["qkv"].cpu()
    torch.testing.assert_close(qkv.double(), expected["qkv"], rtol=RTOL, atol=4e-6)
    _, k, v = split_heads(qkv, layout)
    assert torch.equal(v, v_before)
    # What was computed is what is stored, rounded once, and nothing else is touched.
    slot = case["slots"].long()
    block, offset = slot // k_cache.shape[2], slot % k_cache.shape[2]
    k_cache[block, :, offset] = stored(k, k_cache.dtype, backend)
    v_cache[block, :, offset] = stored(v, v_cache.dtype, backend)
    assert torch.equal(there["k_cache"].cpu(), k_cache)
    assert torch.equal(there["v_cache"].cpu(), v_cache)


def stored(x: Tensor, dtype: torch.dtype, backend: Backend) -> Tensor:
    """x [fp32] as the cache has it."""
    if backend.is_interpreted and dtype == torch.bfloat16:
        # Triton's interpreter cuts bits off where a GPU rounds to the nearest.
        x = (x.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32)
    return x.to(dtype)


@each_backend
def test_rope_and_cache(backend: Backend) -> None:
    @settings(max_examples=backend.examples, phases=backend.phases)
    @given(case=rope_cases())
    def check(case: dict[str, Tensor]) -> None:
        check_rope_and_cache(backend, case)

    check()


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "rotary_dim", "kv_heads", "group", "dtype", "norms"),
    [
        (5, 4, 3, 3, torch.float32, True),
        (12, None, 1, 7, torch.bfloat16, False),
        (72, 36, 2, 5, torch.float16, False),
        (80, 80, 1, 1, torch.bfloat16, True),
        (96, 24, 3, 3, torch.float32, False),
        (256, 256, 2, 1, torch.float16, True),
    ],
)
def test_rope_and_cache_of_odd_shapes_on_a_gpu(
    dim: int, rotary_dim: int | None, kv_heads: int, group: int, dtype: torch.dtype, norms: bool
) -> None:
    """A few that are compiled once; where kernels are interpreted, more are drawn."""
    tokens, blocks = 19, 3
    cache = normal(2, 2, blocks, kv_heads, 16, dim).to(dtype)
    angles = normal(1, 50, (rotary_dim or 0) // 2)
    layout = HeadLayout(kv_heads * group, kv_heads, dim)
    case = {
        "qkv": normal(0, tokens, layout.qkv_size),
        "layout": layout,
        "positions": int32([7 * token % 50 for token in range(tokens)]),
        "slots": int32([5 * token % (16 * blocks) for token in range(tokens)]),
        "cos_sin": None if rotary_dim is None else torch.cat([angles.cos(), angles.sin()], dim=1),
        "k_cache": cache[0].clone(),
        "v_cache": cache[1].clone(),
        "q_norm": normal(3, dim) if norms else None,
        "k_norm": normal(4, dim) if norms else None,
        "eps": 1e-5,
    }
    check_rope_and_cache(triton_backend(), case)  # type: ignore[arg-type]


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 5), (7, 200), (2, 1025), (300, 97)])
def test_norms_and_activation_of_odd_sizes_on_a_gpu(tokens: int, size: int) -> None:
    backend = triton_backend()
    kernels, device = backend.kernels(), backend.device
    residual, x, weight = (normal(seed, tokens, size) for seed in (0, 1, 2))
    there = residual.to(device, copy=True)
    actual = kernels.add_rms_norm_(there, x.to(device), weight[0].to(device), 1e-6)
    assert torch.equal(there.cpu(), residual + x)
    expected = REFERENCE.rms_norm((residual + x).double(), weight[0].double(), 1e-6)
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=RTOL, atol=1e-12)
    actual = kernels.rms_norm(there, weight[0].to(device), 1e-6)
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=RTOL, atol=1e-12)
    gate_up = torch.cat([residual, x], dim=1)
    actual = kernels.silu_and_mul(gate_up.to(device))
    expected = REFERENCE.silu_and_mul(gate_up.double())
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=RTOL, atol=1e-33)


@needs_triton
def test_padding_is_cached_nowhere() -> None:
    backend, layout = triton_backend(), HeadLayout(2, 1, 8)
    cache = torch.zeros(2, 1, 16, 8, device=backend.device)
    qkv = normal(0, 3, layout.qkv_size).to(backend.device)
    v = split_heads(qkv, layout)[2].clone()
    positions, slots = int32([1, 0, 0]).to(backend.device), int32([17, -1, -1]).to(backend.device)
    angles = torch.ones(9, 8, device=backend.device)
    backend.kernels().rope_and_cache_(qkv, layout, positions, slots, angles, cache.clone(), cache)
    assert torch.equal(cache[1, 0, 1], v[0, 0])
    cache[1, 0, 1] = 0
    assert not cache.any()


def cache_values(level: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Send values [tokens, 64] through the cache write."""
    layout = HeadLayout(1, 1, 64)
    tokens = len(values)
    cache = torch.zeros(tokens, 1, 1, 64, dtype=dtype)
    qkv = torch.cat([torch.zeros(tokens, 128), values], dim=1)
    slots = torch.arange(tokens, dtype=torch.int32)
    cpu_kernels(level).rope_and_cache_(qkv, layout, slots, slots, None, cache.clone(), cache)
    return cache.view(tokens, 64)


@each_level
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_kind_of_value_is_rounded_like_torch(level: str, dtype: torch.dtype) -> None:
    # Neighbours and midpoints of every 16-bit value, and infinities, NaN and overflow.
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    bits = patterns.view(torch.int32)
    step = 1 << (15 if dtype == torch.bfloat16 else 12)
    values = torch.cat([(bits + d).view(torch.float32) for d in (0, step - 1, step, step + 1)])
    actual = cache_values(level, values.view(-1, 64), dtype).flatten()
    expected = values.to(dtype)
    assert torch.equal(actual.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(actual[known].view(torch.int16), expected[known].view(torch.int16))


@each_level
@pytest.mark.parametrize(
    ("slots", "positions", "message"),
    [([0, 32], [0, 0], "slot"), ([-1, 0], [0, 0], "slot"), ([0, 1], [0, 9], "position")],
)
def test_slots_and_positions_out_of_range_write_nothing(
    level: str, slots: list[int], positions: list[int], message: str
) -> None:
    layout = HeadLayout(1, 1, 8)
    qkv, cache = normal(0, 2, 24), torch.zeros(2, 1, 16, 8)
    before = qkv.clone()
    with pytest.raises(IndexError, match=message):
        cpu_kernels(level).rope_and_cache_(
            qkv, layout, int32(positions), int32(slots), torch.ones(9, 8), cache, cache
        )
    assert torch.equal(qkv, before) and not cache.any()


@each_level
def test_results_do_not_depend_on_threads(level: str) -> None:
    kernels = cpu_kernels(level)
    x, weight = normal(0, 301, 576), normal(1, 576)

    def compute(threads: int) -> list[Tensor]:
        with torch_threads(threads):
            residual = x.clone()
            normed = kernels.add_rms_norm_(residual, x, weight, 1e-5)
            return [normed, residual, kernels.silu_and_mul(x)]

    for one, two in zip(compute(1), compute(2), strict=True):
        assert torch.equal(one, two)
