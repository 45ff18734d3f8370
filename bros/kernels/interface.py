"""The interface of kernel backends. kernels/reference.py defines the result of every operation.

The tokens of a step are packed: row r has query tokens [query_start[r], query_start[r + 1]). Its
context (cached tokens) is segments [segment_start[r], segment_start[r + 1]), each (block, lo, hi)
for slots [lo, hi) of a block.

      query_start   0            q1       q2      T
    qkv             [ row 0 chunk | row 1 | row 2 ]           new K and V, causal within the row
    segments row 0  (7,0,16) (3,0,16) (9,0,5)                 cached K and V, visible to all queries

The attention of a query merges, by log-sum-exp, its attention over the row's segments, over the
shared parts that the row reads, and causally over the row's chunk. Segments may be empty and in any
order. A backend may round K and V of the chunk to the type of the cache before, as if they had been
read from there: the CPU kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bros.kernels.panels import PanelLayout, Panels

TILE_KEYS = 64
"""The CPU kernels add what tiles of so many keys give in the order of their positions. Shared parts
that begin and end at multiples of it change no bit of a result."""


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Cached prefixes that several rows read. All int32, contiguous, on the CPU.

    Every query of rows[row_start[p]:row_start[p + 1]] attends to
    segments[segment_start[p]:segment_start[p + 1]] in addition to its row's own segments. A row may
    be in several parts (groups nest, as below), but only once in each.

    row_start: [parts + 1].
    rows: [n].
    segment_start: [parts + 1].
    segments: [m, 3].

        part 0   (4,0,16) (8,0,16)     rows 0 1 2 3
        part 1   (5,0,16)              rows 0 1
    """

    row_start: Tensor
    rows: Tensor
    segment_start: Tensor
    segments: Tensor

    @property
    def num_parts(self) -> int:
        return int(self.row_start.shape[0]) - 1


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The queries of a step and their context. All int32, contiguous, on the CPU.

    query_start: [rows + 1].
    segment_start: [rows + 1].
    segments: [n, 3] of (block, lo, hi). With lo > hi: from slot lo - 1 down to hi, which only
        kernels of the CPU are given.
    shared: prefixes that are not in `segments`.
    """

    query_start: Tensor
    segment_start: Tensor
    segments: Tensor
    shared: SharedParts | None = None

    @property
    def num_rows(self) -> int:
        return int(self.query_start.shape[0]) - 1


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The columns of a fused QKV tensor: heads x head_dim of Q, then of K, then of V."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The largest step that a captured CUDA graph can replay.

    rows: rows.
    segments: own and shared segments together.
    shared_rows: entries of SharedParts.rows; 0 if the graph does not support shared parts.
    chunks: rows of several tokens; 0 if the graph supports rows of one token only.
    tokens: of all rows together, if there are chunks; else 0.
    """

    rows: int
    segments: int
    shared_rows: int = 0
    chunks: int = 0
    tokens: int = 0


class GraphBuffers(Protocol):
    """Device memory at fixed addresses, which `Kernels.prepare` fills before each replay."""

    def fits(self, batch: AttentionBatch) -> bool:
        """Whether the batch is within the limits."""
        ...


class Products(Protocol):
    """Products with packed weights.

    Every number of a product is summed in fp32, in one order that depends on its row alone, so that
    a row of it has the same bits whatever the other rows, their number and the threads are.

    Activations are multiplied in fp32 with fp32 weights, and with bf16 weights unless the CPU has
    AVX-512 BF16 or AMX, for which they are rounded to bf16. For int8 weights they are rounded to 16
    bits in blocks of 128 inputs, for int4 to 8 bits in groups of 32, of which the largest have 16
    bits; with AMX both are widened to bf16 and multiplied as such. Rounding depends on the row
    alone, too.
    """

    @property
    def panel_layout(self) -> PanelLayout:
        """The layout of panels that the products take."""
        ...

    def linear(self, x: Tensor, weight: Panels, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias in a new fp32 tensor [rows, outputs].

        x: fp32 [rows, inputs].
        bias: fp32 [outputs].
        """
        ...

    def embed(self, token_ids: Tensor, weight: Panels) -> Tensor:
        """Rows of packed weights, fp32 [tokens, inputs], exactly.

        Raises IndexError if a token is no output of `weight`, or if `weight` is int4.

        token_ids: int32 [tokens].
        """
        ...

    def layers(
        self,
        weights: Sequence[LayerWeights],
        layout: HeadLayout,
        cos_sin: Tensor | None,
        eps: float,
        ends: DecoderEnds | None = None,
    ) -> DecoderLayers | None:
        """The layers of a decoder as one call; None if there is no such call.

        cos_sin: see Kernels.rope_and_cache_.
        eps: of all norms.
        ends: for calls with token_ids or `samples`.
        """
        ...


class Product(NamedTuple):
    """A linear layer of packed weights: arguments of Products.linear."""

    weight: Panels
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a decoder layer with RMSNorm before attention and MLP, and a gated MLP.

    attention_norm, mlp_norm: fp32 [hidden].
    qkv: hidden -> layout.qkv_size.
    q_norm, k_norm: fp32 [head_dim]; None for no norm per head.
    rotates: whether positions rotate Q and K.
    attention_out: layout.q_size -> hidden.
    gate_up: hidden -> 2 * inner, the gate first.
    down: inner -> hidden.
    """

    attention_norm: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    rotates: bool
    attention_out: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class DecoderEnds:
    """What a decoder has before its first layer and behind its last one.

    embedding: [vocab, hidden], see Products.embed.
    final_norm: fp32 [hidden].
    lm_head: hidden -> vocab.
    """

    embedding: Panels
    final_norm: Tensor
    lm_head: Product


class DecoderLayers(Protocol):
    """A decoder, or some of its layers. It computes, with the operations and the bits of Kernels,

    residual = embed(token_ids)
    in each layer
        residual += delta
        x = attention(rope_and_cache_(rms_norm(residual) @ qkv))
        residual += x @ attention_out
        delta = silu_and_mul(rms_norm(residual) @ gate_up) @ down
    hidden = rms_norm(residual + delta)
    logits = hidden[:samples] @ lm_head
    """

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
        """Compute some layers. Returns (the layer before which it stopped or where it ended,
        residual, delta); (that layer, hidden, logits) if it ended and `samples` is given.

        layers: consecutive ones.
        token_ids: int32 [tokens]: begin with their embeddings; or None.
        residual: fp32 [tokens, hidden]; overwritten. None if there are token_ids.
        delta: fp32 [tokens, hidden]; None before the first layer of the decoder.
        positions, slots, batch: see Kernels.
        caches: K and V of all layers of the decoder, in a sequence that does not change.
        rows: int32; the tokens that the last of `layers` keeps once K and V are cached; None keeps
            all.
        samples: go on behind the last layer, with logits of this many of the first rows; or None.
        before_layer: asked before each layer; if it returns True, the call stops there. What it
            raises is passed on; then `residual` has no meaning any more.

        Raises IndexError, before anything is written, if a token, a slot, a position, a segment or
        a row is out of range.
        """
        ...


class RowProducts(Protocol):
    """Products of few rows with plain matrices on a GPU."""

    def shapes(self, dtype: torch.dtype) -> Sequence[tuple[int, int, int]]:
        """(most rows, outputs, inputs) of the products that this computes in a dtype."""
        ...

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """x @ weight.T in a new tensor [rows, outputs], summed in fp32; None if torch computes a
        product of this shape faster.

        x: [rows, inputs]; weight: [outputs, inputs], of the same dtype.
        """
        ...

    def gated(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """silu(x @ gate.T) * (x @ up.T) in a new tensor [rows, outputs / 2], with the same bits as
        silu_and_mul of the product; None as above.

        weight: [outputs, inputs], the rows of gate and then those of up.
        """
        ...


class Kernels(Protocol):
    """The operations of a decoder layer. Activations are [tokens, features], contiguous: fp32 on
    the CPU; fp32, bf16 or fp16 on CUDA.

    A layer's K and V caches are [num_blocks, num_kv_heads, block_size, head_dim] each, in fp32,
    bf16 or fp16, whatever the dtype of the activations.
    """

    @property
    def name(self) -> str: ...

    @property
    def products(self) -> Products | None:
        """Products with packed weights; None if these kernels have none."""
        ...

    @property
    def row_products(self) -> RowProducts | None:
        """Products of few rows with plain matrices; None: those of torch."""
        ...

    def graph_buffers(
        self, limits: GraphLimits, layout: HeadLayout, device: torch.device
    ) -> GraphBuffers | None:
        """Buffers for `prepare(into=...)`; None if a graph cannot capture these kernels."""
        ...

    def prepare(
        self,
        batch: AttentionBatch,
        layout: HeadLayout,
        device: torch.device,
        into: GraphBuffers | None = None,
        slot_positions: Tensor | None = None,
    ) -> AttentionBatch:
        """Prepare a batch, once per step, for `attention` of every layer.

        slot_positions: int32 [blocks, slots], of the token in each slot, -1 if it is unknown. With
            them the CPU kernels read the keys of a row in the order of their positions: in another
            order, sums have other last bits.
        into: from graph_buffers; into.fits(batch) must be True. `attention` then reads the batch
            only from these buffers, so that a graph that captured it can be replayed after any
            later prepare. The captured step may have more tokens than the batch: the last ones are
            padding with slot -1 (not cached) and position 0, whose output is undefined.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last axis, in a new tensor of x's dtype."""
        ...

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place; returns rms_norm(residual) in a new tensor."""
        ...

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
        """Normalize and rotate Q and K in place, then write K and V into the caches.

        qkv: [tokens, layout.qkv_size].
        positions: int32 [tokens], rows of cos_sin.
        slots: int32 [tokens]; slot s is offset s % block_size of block s // block_size.
        cos_sin: fp32 [max_positions, rotary_dim], cosines, then sines, rotary_dim / 2 of each; None
            for no rotation. Element i is rotated with i + rotary_dim / 2 (NeoX); elements from
            rotary_dim on are unchanged.
        q_norm, k_norm: [head_dim], weights of RMSNorm per head; None for no norm.
        """
        ...

    def attention(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        """Softmax attention of every query over its context and, causally, its chunk.

        qkv: after rope_and_cache_.
        batch: from prepare. Only the reference and the CPU kernels accept an unprepared batch.
        Returns [tokens, layout.q_size].
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 * n] -> silu(first half) * second half, [tokens, n]."""
        ...
