"""The compiled CPU kernels. Importing this raises ImportError if they were not built.

They share their work among threads of their own (csrc/team.cpp), as many as torch has.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bros.core.errors import ConfigError
from bros.kernels import _C
from bros.kernels.interface import (
    AttentionBatch,
    DecoderEnds,
    GraphBuffers,
    GraphLimits,
    HeadLayout,
    LayerWeights,
    Product,
    SharedParts,
)
from bros.kernels.panels import PanelLayout, Panels

DRAW = struct.Struct("=2Q 7q 3d 3f 3i")
"""One draw of `sample`, as in csrc/kernels.h."""

LAYER = struct.Struct("=4Qq" + 4 * "2Q3q")
"""The weights of a layer, as in csrc/decoder_layers.h."""

ENDS = struct.Struct("=2Q3qQ2Q3q")
"""DecoderEnds of csrc/decoder_layers.h."""

NOTHING_ALLOWED = -2
"""A token of `sample`: its mask allows none. Any other negative one: no logit is finite."""

_SAMPLED = np.dtype([("token", np.int32), ("peak", np.float32), ("logprob", np.float64)])
_TOKEN_LOGPROB = np.dtype([("token", np.int64), ("logprob", np.float64)])
_KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def levels() -> list[str]:
    """The instruction sets that this machine has kernels for, fastest first, `generic` last."""
    return [name for name, available, emulated in _C.levels() if available and not emulated]


def emulated_levels() -> list[str]:
    """Kernels of other machines, whose instructions are replaced by plain C++: for tests of them on
    any machine. They are slow and never chosen by default."""
    return [name for name, available, emulated in _C.levels() if available and emulated]


def tile_product(level: str, c: Tensor, a: Tensor, b: Tensor, shape: tuple[int, int, int]) -> None:
    """c += a . b of the tile registers (csrc/tiles.h) of a level that has them.

    shape: rows, columns and depth, in elements of 4 bytes: 1 to 16 each. Tensors are [16, 16] such
        elements, of which the first rows and columns are used.
    c: fp32. a, b: bf16, two in an element.
    """
    assert all(x.numel() * x.element_size() == 1024 for x in (c, a, b))
    pairs = torch.bfloat16
    addresses = _address(c, torch.float32), _address(a, pairs), _address(b, pairs)
    _C.tile_product(_level_index(level), *addresses, *shape)


def _level_index(level: str) -> int:
    return [name for name, *_ in _C.levels()].index(level)


def in_order(batch: AttentionBatch, positions: Tensor) -> AttentionBatch:
    """The same attention, with the keys of each row and part in the order of their positions, which
    is the order in which they are summed.

    positions: int32 [blocks, slots], of the token in each slot, -1 if it is unknown. Rows with
        unknown ones stay as they are.
    Segments of the result may be split, and read downwards (see AttentionBatch).
    """
    start, segments = _ordered(batch.segment_start, batch.segments, positions)
    shared = batch.shared
    if shared is not None:
        parts, pieces = _ordered(shared.segment_start, shared.segments, positions)
        shared = replace(shared, segment_start=parts, segments=pieces)
    return AttentionBatch(batch.query_start, start, segments, shared)


def _ordered(start: Tensor, segments: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(start, segments) of the pieces."""
    rows = start.shape[0] - 1
    out_start = torch.empty_like(start)
    out = torch.empty(len(segments) * positions.shape[1], 3, dtype=torch.int32)  # a piece per key
    count = _C.order_segments(
        _address(positions, torch.int32),
        positions.shape[0],
        positions.shape[1],
        _address(start, torch.int32),
        rows,
        _address(segments, torch.int32),
        out_start.data_ptr(),
        out.data_ptr(),
    )
    return out_start, out[:count]


class DrawBuffers(NamedTuple):
    """The draws of a step. Each names its ranges of the other buffers.

    draws: one DRAW after the other.
    edit_tokens, edit_values: fp32 biases of int32 tokens; -inf forbids the token.
    history: int32 tokens that penalties are for.
    masks: one bit per token, the first in the lowest bit of the first byte.
    """

    draws: bytes
    edit_tokens: NDArray[np.int32]
    edit_values: NDArray[np.float32]
    history: NDArray[np.int32]
    masks: bytes


class CpuKernels:
    """Implements `Kernels` for CPU tensors, on torch.get_num_threads() threads.

    Asserts check shapes and dtypes. Slots, positions, segments and rows of shared parts out of
    range raise IndexError before anything is written.
    """

    def __init__(self, level: str | None = None) -> None:
        """level: one of levels(), by default the fastest, or of emulated_levels().

        Raises ConfigError for any other.
        """
        available = levels()
        self.level = available[0] if level is None else level
        if self.level not in available + emulated_levels():
            raise ConfigError(
                f"CPU kernels: level {level!r} is not one of {', '.join(available)} (this machine)"
            )
        self._level = _level_index(self.level)
        self.panel_layout = PanelLayout(*_C.panel_layout(self._level))  # see Products

    @property
    def name(self) -> str:
        return f"cpu-{self.level}"

    def graph_buffers(
        self, limits: GraphLimits, layout: HeadLayout, device: torch.device
    ) -> GraphBuffers | None:
        """None: a CPU has no graphs."""
        return None

    def prepare(
        self,
        batch: AttentionBatch,
        layout: HeadLayout,
        device: torch.device,
        into: GraphBuffers | None = None,
        slot_positions: Tensor | None = None,
    ) -> AttentionBatch:
        """The batch, with the keys of each row in the order of their positions."""
        assert device.type == "cpu" and into is None
        if slot_positions is None:
            return batch
        return in_order(batch, slot_positions)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        return self._norm(0, x, weight, eps)

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        assert residual.shape == x.shape
        return self._norm(_address(residual), x, weight, eps)

    def _norm(self, residual: int, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        assert weight.shape == (size,)
        out = torch.empty(rows, size)
        _C.rms_norm(
            self._level,
            out.data_ptr(),
            residual,
            _address(x),
            _address(weight),
            rows,
            size,
            eps,
            torch.get_num_threads(),
        )
        return out

    def rope_and_cache_(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> None:
        """See Kernels."""
        tokens = qkv.shape[0]
        assert qkv.shape[1] == layout.qkv_size
        assert q_norm is None or q_norm.shape == (layout.head_dim,)
        assert k_norm is None or k_norm.shape == (layout.head_dim,)
        _C.rope_and_cache(
            self._level,
            _address(qkv),
            tokens,
            layout.num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            *_place_arguments(positions, slots, cos_sin, tokens, layout),
            *_cache_arguments(k_cache, v_cache, layout),
            _optional_address(q_norm),
            _optional_address(k_norm),
            eps,
            torch.get_num_threads(),
        )

    def attention(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        """See Kernels."""
        assert qkv.shape[1] == layout.qkv_size and layout.num_heads % layout.num_kv_heads == 0
        out = torch.empty(qkv.shape[0], layout.q_size)
        _C.attention(
            self._level,
            out.data_ptr(),
            _address(qkv),
            qkv.shape[0],
            layout.num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            *_cache_arguments(k_cache, v_cache, layout),
            *_batch_arguments(batch),
            scale,
            torch.get_num_threads(),
        )
        return out

    @property
    def row_products(self) -> None:
        """None."""
        return None

    @property
    def products(self) -> CpuKernels:
        """See Kernels."""
        return self

    def linear(self, x: Tensor, weight: Panels, bias: Tensor | None) -> Tensor:
        """See Products."""
        rows, inputs = x.shape
        assert inputs == weight.inputs and weight.layout == self.panel_layout
        assert bias is None or bias.shape == (weight.outputs,)
        out = torch.empty(rows, weight.outputs)
        _C.linear(
            self._level,
            out.data_ptr(),
            _address(x.contiguous()),
            _address(weight.data, torch.uint8),
            _optional_address(bias),
            weight.format,
            rows,
            inputs,
            weight.outputs,
            torch.get_num_threads(),
        )
        return out

    def embed(self, token_ids: Tensor, weight: Panels) -> Tensor:
        """See Products."""
        assert weight.layout == self.panel_layout
        out = torch.empty(len(token_ids), weight.inputs)
        _C.embed(
            self._level,
            out.data_ptr(),
            _address(token_ids, torch.int32),
            len(token_ids),
            _address(weight.data, torch.uint8),
            weight.format,
            weight.inputs,
            weight.outputs,
            torch.get_num_threads(),
        )
        return out

    def layers(
        self,
        weights: Sequence[LayerWeights],
        layout: HeadLayout,
        cos_sin: Tensor | None,
        eps: float,
        ends: DecoderEnds | None = None,
    ) -> CpuLayers | None:
        """See Products."""
        return CpuLayers(self._level, self.panel_layout, weights, layout, cos_sin, eps, ends)

    def sample(
        self, logits: Tensor, draws: DrawBuffers, most: int
    ) -> tuple[list[tuple[int, float, float]], list[list[tuple[int, float]]]]:
        """Draw tokens of rows of logits, see csrc/sampling.h.

        logits: fp32 [rows, vocab].
        most: log-probabilities of the best tokens, at most that a draw asks for.

        Returns (token, largest logit, log-probability if asked for) of each draw, and for each draw
        `most` of (token, log-probability), of which as many are valid as it asks for.
        """
        rows, vocab = logits.shape
        count = len(draws.draws) // DRAW.size
        sampled = np.empty(count, _SAMPLED)
        tops = np.empty((count, most), _TOKEN_LOGPROB)
        _C.sample(
            self._level,
            sampled,
            tops,
            most,
            _address(logits),
            rows,
            vocab,
            *draws,
            torch.get_num_threads(),
        )
        tokens: list[Any] = sampled.tolist()
        best: list[Any] = tops.tolist()
        return tokens, best

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See Kernels."""
        tokens, double = gate_up.shape
        assert double % 2 == 0
        out = torch.empty(tokens, double // 2)
        _C.silu_and_mul(
            self._level,
            out.data_ptr(),
            _address(gate_up),
            tokens,
            double // 2,
            torch.get_num_threads(),
        )
        return out


class CpuLayers:
    """Implements DecoderLayers, on torch.get_num_threads() threads.

    Other Python threads can run meanwhile, but for the calls of `before_layer`.
    """

    def __init__(
        self,
        level: int,
        panel_layout: PanelLayout,
        weights: Sequence[LayerWeights],
        layout: HeadLayout,
        cos_sin: Tensor | None,
        eps: float,
        ends: DecoderEnds | None,
    ) -> None:
        """level, panel_layout: of the kernels. Everything else: see Products.layers."""
        assert weights and layout.num_heads % layout.num_kv_heads == 0
        self._level = level
        self._weights = tuple(weights), ends  # the tables have only their addresses
        self._hidden, inner = weights[0].qkv.weight.inputs, weights[0].down.weight.inputs
        packed = [
            _layer_record(each, layout, self._hidden, inner, panel_layout) for each in weights
        ]
        self._table = b"".join(packed)
        self._vocab = 0 if ends is None else ends.lm_head.weight.outputs
        self._ends = b"" if ends is None else _ends_record(ends, self._hidden, panel_layout)
        self._layout = layout
        self._cos_sin = cos_sin
        self._eps = eps
        self._caches: Sequence[tuple[Tensor, Tensor]] = ()
        self._kv = array("Q")

    def __call__(
        self,
        layers: range,
        token_ids: Tensor | None,
        residual: Tensor | None,
        delta: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        caches: Sequence[tuple[Tensor, Tensor]],
        batch: AttentionBatch,
        rows: Tensor | None,
        samples: int | None,
        before_layer: Callable[[int], bool] | None,
    ) -> tuple[int, Tensor, Tensor | None]:
        """See DecoderLayers."""
        layout, tokens = self._layout, len(positions)
        kept = 0 if rows is None else len(rows)
        assert (token_ids is None) != (residual is None)
        if residual is None:
            assert token_ids is not None and token_ids.shape == (tokens,)
            assert delta is None and layers.start == 0
            residual = torch.empty(tokens, self._hidden)
        assert residual.shape == (tokens, self._hidden) and layers.step == 1
        assert delta is None or delta.shape == residual.shape
        if caches is not self._caches:
            self._kv, self._caches = _cache_addresses(caches, layout), caches
        new_delta = torch.empty(max(tokens, kept), self._hidden)
        new_residual = residual if rows is None else torch.empty(kept, self._hidden)
        hidden = logits = None
        if samples is not None:
            hidden = torch.empty(len(new_residual), self._hidden)
            logits = torch.empty(samples, self._vocab)
        layer = _C.run_layers(
            self._level,
            self._table,
            self._kv,
            self._ends,
            layers.start,
            layers.stop,
            0 if token_ids is None else _address(token_ids, torch.int32),
            _address(residual),
            _optional_address(delta),
            new_delta.data_ptr(),
            tokens,
            layout.num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            *_place_arguments(positions, slots, self._cos_sin, tokens, layout),
            *_cache_arguments(*caches[0], layout),
            *_batch_arguments(batch),
            layout.head_dim**-0.5,
            rows is None,
            0 if rows is None else _address(rows, torch.int32),
            kept,
            new_residual.data_ptr(),
            _optional_address(hidden),
            _optional_address(logits),
            samples or 0,
            self._eps,
            torch.get_num_threads(),
            before_layer,
        )
        if layer == layers.start:
            return layer, residual, delta
        if layer < layers.stop:
            return layer, residual, new_delta[:tokens]
        if hidden is not None:
            return layer, hidden, logits
        return layer, new_residual, new_delta[: len(new_residual)]


def _layer_record(
    layer: LayerWeights, layout: HeadLayout, hidden: int, inner: int, panel_layout: PanelLayout
) -> bytes:
    """One LAYER. It has addresses only: the weights must be kept as long as it is used."""
    products = (
        *_product_record(layer.qkv, layout.qkv_size, hidden, panel_layout),
        *_product_record(layer.attention_out, hidden, layout.q_size, panel_layout),
        *_product_record(layer.gate_up, 2 * inner, hidden, panel_layout),
        *_product_record(layer.down, hidden, inner, panel_layout),
    )
    assert layer.attention_norm.shape == layer.mlp_norm.shape == (hidden,)
    for norm in (layer.q_norm, layer.k_norm):
        assert norm is None or norm.shape == (layout.head_dim,)
    return LAYER.pack(
        _address(layer.attention_norm),
        _address(layer.mlp_norm),
        _optional_address(layer.q_norm),
        _optional_address(layer.k_norm),
        layer.rotates,
        *products,
    )


def _ends_record(ends: DecoderEnds, hidden: int, panel_layout: PanelLayout) -> bytes:
    """One ENDS, as above."""
    assert ends.final_norm.shape == (hidden,)
    vocab = ends.lm_head.weight.outputs
    return ENDS.pack(
        *_product_record(Product(ends.embedding, None), vocab, hidden, panel_layout),
        _address(ends.final_norm),
        *_product_record(ends.lm_head, vocab, hidden, panel_layout),
    )


def _product_record(
    product: Product, outputs: int, inputs: int, panel_layout: PanelLayout
) -> tuple[int, int, int, int, int]:
    """A Product of csrc/decoder_layers.h."""
    weight, bias = product
    assert (weight.outputs, weight.inputs, weight.layout) == (outputs, inputs, panel_layout)
    assert bias is None or bias.shape == (outputs,)
    data = _address(weight.data, torch.uint8)
    return data, _optional_address(bias), weight.format, outputs, inputs


def _address(x: Tensor, dtype: torch.dtype = torch.float32) -> int:
    assert x.dtype is dtype and x.is_contiguous() and x.is_cpu
    return x.data_ptr()


def _optional_address(x: Tensor | None) -> int:
    return 0 if x is None else _address(x)


def _place_arguments(
    positions: Tensor, slots: Tensor, cos_sin: Tensor | None, tokens: int, layout: HeadLayout
) -> tuple[int, int, int, int, int]:
    max_positions, rotary_dim = (0, 0) if cos_sin is None else cos_sin.shape
    assert rotary_dim <= layout.head_dim and rotary_dim % 2 == 0
    assert positions.shape == slots.shape == (tokens,)
    return (
        _address(positions, torch.int32),
        _address(slots, torch.int32),
        _optional_address(cos_sin),
        max_positions,
        rotary_dim,
    )


def _batch_arguments(
    batch: AttentionBatch,
) -> tuple[int, int, int, int, int, int, int, int, int, int, int, int]:
    rows = batch.num_rows
    num_segments = batch.segments.numel() // 3
    assert rows >= 0 and batch.segment_start.shape == (rows + 1,)
    assert batch.segments.numel() == 3 * num_segments
    return (
        _address(batch.query_start, torch.int32),
        _address(batch.segment_start, torch.int32),
        _address(batch.segments, torch.int32),
        rows,
        num_segments,
        *_shared_arguments(batch.shared),
    )


def _cache_arguments(
    k_cache: Tensor, v_cache: Tensor, layout: HeadLayout
) -> tuple[int, int, int, int, int]:
    num_blocks, kv_heads, block_size, head_dim = k_cache.shape
    dtype = k_cache.dtype
    assert v_cache.shape == k_cache.shape and block_size > 0
    assert kv_heads == layout.num_kv_heads and head_dim == layout.head_dim
    return (
        _address(k_cache, dtype),
        _address(v_cache, dtype),
        _KV_TYPES[dtype],
        num_blocks,
        block_size,
    )


def _cache_addresses(caches: Sequence[tuple[Tensor, Tensor]], layout: HeadLayout) -> array[int]:
    """Of K and V of each layer, which are alike but for their place."""
    arguments = [_cache_arguments(k, v, layout) for k, v in caches]
    assert len({(dtype, blocks, size) for _, _, dtype, blocks, size in arguments}) == 1
    return array("Q", [address for k, v, *_ in arguments for address in (k, v)])


def _shared_arguments(
    shared: SharedParts | None,
) -> tuple[int, int, int, int, int, int, int]:
    if shared is None:
        return 0, 0, 0, 0, 0, 0, 0
    parts = shared.num_parts
    num_segments = shared.segments.numel() // 3
    assert parts >= 0 and shared.segment_start.shape == (parts + 1,)
    assert shared.segments.numel() == 3 * num_segments
    return (
        _address(shared.row_start, torch.int32),
        _address(shared.rows, torch.int32),
        _address(shared.segment_start, torch.int32),
        _address(shared.segments, torch.int32),
        parts,
        shared.rows.numel(),
        num_segments,
    )
