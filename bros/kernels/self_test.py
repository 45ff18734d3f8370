"""Checks a backend against the reference in a few seconds, for `bros doctor`.

Inputs are small and random, and cover all that a step may have: rows of one and of several tokens,
with and without context, segments that start late, end early or are empty, shared parts. The
reference computes in fp64 on the CPU from exactly the numbers that the backend gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bros.kernels.interface import (
    AttentionBatch,
    HeadLayout,
    Kernels,
    LayerWeights,
    Product,
    Products,
    RowProducts,
    SharedParts,
)
from bros.kernels.panels import GROUP, Panels
from bros.kernels.reference import ReferenceKernels

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""The largest relative error that rounding to a dtype explains, for activations and for writes to
the cache. Products of fp32 numbers in tf32, which lose 13 bits, exceed it."""

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

_LAYOUT = HeadLayout(num_heads=8, num_kv_heads=2, head_dim=64)
_BLOCK_SIZE = 16
_BLOCKS = 64
_EPS = 1e-5
_CHUNKS = ((1, 3), (1, 0), (7, 2), (1, 9), (33, 0), (1, 3))
"""(query tokens, segments) of each row."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    activations, cache: names of dtypes; cache is "" if the operation does not use it.
    error: |result - reference| / |reference|, Euclidean norms over all numbers.
    """

    operation: str
    activations: str
    cache: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


def check_kernels(
    kernels: Kernels,
    device: torch.device,
    types: Sequence[tuple[torch.dtype, torch.dtype]],
    seed: int,
) -> Iterator[Check]:
    """Check every operation.

    types: pairs of the dtypes of activations and KV cache.
    Raises whatever the backend raises.
    """
    generator = torch.Generator().manual_seed(seed)
    for dtype in dict.fromkeys(dtype for dtype, _ in types):
        yield from _elementwise(kernels, _Inputs(generator, device, dtype))
    for dtype, cache in types:
        inputs = _Inputs(generator, device, dtype)
        yield _rope(kernels, inputs, cache, norm=False)
        yield _rope(kernels, inputs, cache, norm=True)
        yield _attention(kernels, inputs, cache, shared=False)
        yield _attention(kernels, inputs, cache, shared=True)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Random tensors for the backend."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self.generator)
        return values.to(self.device, dtype or self.dtype)

    def ints(self, values: Tensor) -> Tensor:
        return values.to(self.device, torch.int32)

    def compared(
        self,
        name: str,
        out: Tensor,
        expected: Tensor,
        cache: torch.dtype | None = None,
        *,
        rounds_as_cache: bool = False,
    ) -> Check:
        tolerance = TOLERANCE[self.dtype]
        if cache is not None and rounds_as_cache:
            tolerance = max(tolerance, TOLERANCE[cache])
        return Check(
            operation=name,
            activations=NAMES[self.dtype],
            cache="" if cache is None else NAMES[cache],
            error=_error(out, expected),
            tolerance=tolerance,
        )


def _elementwise(kernels: Kernels, inputs: _Inputs) -> Iterator[Check]:
    reference, tokens, size = ReferenceKernels(), 9, 160
    x, residual = inputs.normal(tokens, size), inputs.normal(tokens, size)
    weight = inputs.normal(size, dtype=torch.float32)
    out = kernels.rms_norm(x, weight, _EPS)
    yield inputs.compared("rms_norm", out, reference.rms_norm(_exact(x), _exact(weight), _EPS))
    summed = _exact(residual)
    expected = reference.add_rms_norm_(summed, _exact(x), _exact(weight), _EPS)
    out = kernels.add_rms_norm_(residual, x, weight, _EPS)
    both = torch.cat([out, residual]), torch.cat([expected, summed])
    yield inputs.compared("add_rms_norm_", *both)
    gate_up = inputs.normal(tokens, 2 * size)
    expected = reference.silu_and_mul(_exact(gate_up))
    yield inputs.compared("silu_and_mul", kernels.silu_and_mul(gate_up), expected)
    if kernels.products is not None:
        yield from _products(kernels.products, inputs)
        yield from _layers(kernels, kernels.products, inputs)
    if kernels.row_products is not None:
        yield from _row_products(kernels.row_products, inputs)


def _row_products(row_products: RowProducts, inputs: _Inputs) -> Iterator[Check]:
    """The smallest matrix of each number of rows."""
    smallest = {
        rows: (outputs, size)
        for rows, outputs, size in sorted(
            row_products.shapes(inputs.dtype), key=lambda shape: -shape[1] * shape[2]
        )
    }
    for rows, (outputs, size) in smallest.items():
        x, weight = inputs.normal(rows, size), inputs.normal(outputs, size)
        out = row_products(x, weight)
        assert out is not None, "it computes the shapes that it names"
        expected = F.linear(_exact(x), _exact(weight))
        yield inputs.compared(f"product, {rows} rows", out, expected)
        gated = row_products.gated(x, weight)
        assert gated is not None, "it computes the shapes that it names"
        expected = ReferenceKernels().silu_and_mul(expected)
        yield inputs.compared(f"gated product, {rows} rows", gated, expected)


def _products(products: Products, inputs: _Inputs) -> Iterator[Check]:
    """Weights and activations are multiples of a power of two, so that no format rounds them.

    The last group of activations is an outlier, for which int4 has codes of 16 bits.
    """
    outputs, size, layout = 70, 5 * GROUP, products.panel_layout
    codes = torch.randint(0, 16, (outputs, size), generator=inputs.generator)
    codes[:, ::GROUP] = 0  # every group has the whole range, so that int8 has these steps
    codes[:, 1::GROUP] = 15
    scale, minimum = (torch.full((outputs, size // GROUP), value) for value in (0.25, -2.0))
    weight = codes * 0.25 - 2.0
    eighths = (codes * 16 - 120).clamp(-127, 127) / 8.0
    eighths[:, ::GROUP] = 127 / 8.0
    for rows in (1, 9, 40):  # few, and more than one part of each kernel for many
        steps = torch.randint(-127, 128, (rows, size), generator=inputs.generator)
        steps[:, ::GROUP] = 127
        steps[:, -GROUP:] *= 2
        x = (steps / 16.0).to(inputs.device, inputs.dtype)
        for name, panels, values in (
            ("fp32", Panels.fp32(weight, layout), weight),
            ("bf16", Panels.bf16(weight, layout), weight),
            ("int8", Panels.int8(eighths, layout), eighths),
            ("int4", Panels.int4(codes, scale, minimum, layout), weight),
        ):
            out = products.linear(x, panels, None)
            expected = _exact(x) @ _exact(values).T
            yield inputs.compared(f"linear, {name}, {rows} rows", out, expected)
            if rows == 1 and name != "int4":
                tokens = torch.arange(0, outputs, 9, dtype=torch.int32, device=inputs.device)
                found = products.embed(tokens, panels)
                yield inputs.compared(f"embedding, {name}", found, _exact(values)[tokens.long()])


def _layers(kernels: Kernels, products: Products, inputs: _Inputs) -> Iterator[Check]:
    """A layer as one native call, compared with one kernel after the other: the same sums."""
    hidden, inner, layout = _LAYOUT.q_size, 3 * GROUP, products.panel_layout
    ones = torch.ones(hidden)
    for form in ("fp32", "bf16", "int8", "int4"):

        def linear(outputs: int, size: int, form: str = form) -> Product:
            weight = inputs.normal(outputs, size) / size**0.5
            if form != "int4":
                return Product(getattr(Panels, form)(weight, layout), None)
            codes = torch.randint(0, 16, (outputs, size), generator=inputs.generator)
            step, minimum = (torch.full((outputs, size // GROUP), x) for x in (0.01, -0.075))
            return Product(Panels.int4(codes, step, minimum, layout), None)

        layer = LayerWeights(
            attention_norm=ones,
            qkv=linear(_LAYOUT.qkv_size, hidden),
            q_norm=None,
            k_norm=None,
            rotates=False,
            attention_out=linear(hidden, _LAYOUT.q_size),
            mlp_norm=ones,
            gate_up=linear(2 * inner, hidden),
            down=linear(hidden, inner),
        )
        native = products.layers([layer], _LAYOUT, None, _EPS)
        if native is None:
            return
        for rows in (1, 40):  # the MLP of many rows has a kernel of its own
            x = inputs.normal(rows, hidden)
            positions = torch.arange(rows, dtype=torch.int32)
            batch = AttentionBatch(
                torch.tensor([0, rows], dtype=torch.int32),
                torch.zeros(2, dtype=torch.int32),
                torch.empty(0, 3, dtype=torch.int32),
            )
            cache = _caches(inputs, torch.float32, -(-rows // _BLOCK_SIZE))
            _, residual, delta = native(
                range(1), None, x.clone(), None, positions, positions, [cache], batch, None, None,
                None,
            )  # fmt: skip
            assert delta is not None
            expected, qkv = x.clone(), products.linear(kernels.rms_norm(x, ones, _EPS), *layer.qkv)
            kernels.rope_and_cache_(qkv, _LAYOUT, positions, positions, None, *cache)
            scale = _LAYOUT.head_dim**-0.5
            attended = kernels.attention(qkv, _LAYOUT, *cache, batch, scale)
            out = products.linear(attended, *layer.attention_out)
            normalized = kernels.add_rms_norm_(expected, out, ones, _EPS)
            gated = kernels.silu_and_mul(products.linear(normalized, *layer.gate_up))
            both = torch.cat([residual, delta])
            wanted = torch.cat([expected, products.linear(gated, *layer.down)])
            yield inputs.compared(f"layer, {form}, {rows} rows", both, wanted)


def _rope(kernels: Kernels, inputs: _Inputs, cache: torch.dtype, norm: bool) -> Check:
    """Compares Q and K, and all of both caches, to detect writes to wrong slots."""
    tokens, blocks = 21, 4
    qkv = inputs.normal(tokens, _LAYOUT.qkv_size)
    angles = torch.rand(50, _LAYOUT.head_dim // 2, generator=inputs.generator) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(inputs.device)
    positions = torch.randint(0, 50, (tokens,), generator=inputs.generator)
    slots = torch.randperm(blocks * _BLOCK_SIZE, generator=inputs.generator)[:tokens]
    k_cache, v_cache = _caches(inputs, cache, blocks)
    q_norm, k_norm = (
        inputs.normal(_LAYOUT.head_dim, dtype=torch.float32) if norm else None for _ in range(2)
    )
    exact = [_exact(each) for each in (qkv, k_cache, v_cache)]
    kernels.rope_and_cache_(
        qkv,
        _LAYOUT,
        inputs.ints(positions),
        inputs.ints(slots),
        cos_sin,
        k_cache,
        v_cache,
        q_norm,
        k_norm,
        _EPS,
    )
    ReferenceKernels().rope_and_cache_(
        exact[0],
        _LAYOUT,
        positions,
        slots,
        _exact(cos_sin),
        exact[1],
        exact[2],
        None if q_norm is None else _exact(q_norm),
        None if k_norm is None else _exact(k_norm),
        _EPS,
    )
    got = torch.cat([_exact(each).flatten() for each in (qkv, k_cache, v_cache)])
    wanted = torch.cat([each.flatten() for each in exact])
    name = "rope_and_cache_, norms" if norm else "rope_and_cache_"
    return inputs.compared(name, got, wanted, cache, rounds_as_cache=True)


def _attention(kernels: Kernels, inputs: _Inputs, cache: torch.dtype, shared: bool) -> Check:
    batch = _batch(inputs.generator, shared)
    qkv = inputs.normal(int(batch.query_start[-1]), _LAYOUT.qkv_size)
    own = qkv[:, _LAYOUT.q_size :]  # kernels may round these K and V to the type of the cache
    own.copy_(own.to(cache))
    k_cache, v_cache = _caches(inputs, cache, _BLOCKS)
    scale = _LAYOUT.head_dim**-0.5
    expected = ReferenceKernels().attention(
        _exact(qkv), _LAYOUT, _exact(k_cache), _exact(v_cache), batch, scale
    )
    prepared = kernels.prepare(batch, _LAYOUT, inputs.device)
    out = kernels.attention(qkv, _LAYOUT, k_cache, v_cache, prepared, scale)
    name = "attention, shared" if shared else "attention"
    rounds = cache is torch.bfloat16  # some CPUs multiply pairs of bf16
    return inputs.compared(name, out, expected, cache, rounds_as_cache=rounds)


def _caches(inputs: _Inputs, dtype: torch.dtype, blocks: int) -> tuple[Tensor, Tensor]:
    shape = (blocks, _LAYOUT.num_kv_heads, _BLOCK_SIZE, _LAYOUT.head_dim)
    return inputs.normal(*shape, dtype=dtype), inputs.normal(*shape, dtype=dtype)


def _batch(generator: torch.Generator, shared: bool) -> AttentionBatch:
    """The rows of _CHUNKS; with `shared`, also two nested prefixes, four and two blocks long."""
    counts = torch.tensor(_CHUNKS, dtype=torch.int32)
    blocks = torch.randperm(_BLOCKS, generator=generator)
    own = int(counts[:, 1].sum())
    batch = AttentionBatch(
        query_start=_offsets(counts[:, 0]),
        segment_start=_offsets(counts[:, 1]),
        segments=_segments(generator, blocks[:own]),
    )
    if not shared:
        return batch
    whole = torch.tensor([0, _BLOCK_SIZE]).expand(6, 2)
    parts = SharedParts(
        row_start=torch.tensor([0, 4, 6], dtype=torch.int32),
        rows=torch.tensor([0, 2, 3, 5, 0, 5], dtype=torch.int32),
        segment_start=torch.tensor([0, 4, 6], dtype=torch.int32),
        segments=torch.cat([blocks[own : own + 6, None], whole], dim=1).int(),
    )
    return dataclasses.replace(batch, shared=parts)


def _segments(generator: torch.Generator, blocks: Tensor) -> Tensor:
    """A segment (block, lo, hi) of each block: random ones, a full, a partial and an empty one."""
    ends = torch.randint(0, _BLOCK_SIZE + 1, (len(blocks), 2), generator=generator)
    ends = ends.sort(dim=1).values
    ends[0], ends[1], ends[2] = torch.tensor([[0, _BLOCK_SIZE], [9, _BLOCK_SIZE], [4, 4]])
    return torch.cat([blocks[:, None], ends], dim=1).int()


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])


def _exact(values: Tensor) -> Tensor:
    """A copy in fp64 on the CPU."""
    return values.detach().to("cpu", torch.float64, copy=True)


def _error(out: Tensor, expected: Tensor) -> float:
    assert out.shape == expected.shape
    return float((_exact(out) - expected).norm() / expected.norm())
