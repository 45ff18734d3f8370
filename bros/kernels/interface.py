"""What a kernel back end provides. `reference` is the living definition of every operation.

Tokens of one step are packed: row r of a step owns query tokens
[query_start[r], query_start[r + 1]), and its already cached tokens are the segments
[segment_start[r], segment_start[r + 1]), each (block, lo, hi) = slots [lo, hi) of that block.

      query_start   0            q1       q2      T
    qkv             [ row 0 chunk | row 1 | row 2 ]           fresh K and V, causal in the row
    segments row 0  (7,0,16) (3,0,16) (9,0,5)                 cached K and V, seen by all queries

Attention of a query = merge by log-sum-exp of the part over its segments, of the shared parts its
row reads, and of the causal part over its own chunk. Segments may be empty, and come in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Cached prefixes that several rows read. All int32, contiguous, on CPU.

    Every query of rows[row_start[p]:row_start[p + 1]] attends to
    segments[segment_start[p]:segment_start[p + 1]] as well as to its own. A row is at most once in
    one part, and in any number of parts: groups nest, as below.

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
    """Where the queries of a step and their cached context lie. All int32, contiguous, on CPU.

    query_start: [rows + 1].
    segment_start: [rows + 1].
    segments: [n, 3] of (block, lo, hi).
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
    """How the columns of a fused QKV tensor are split: heads x head_dim for Q, then K, then V."""

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
    """The most that a decode step may hold whose attention is recorded in a graph.

    rows: of one token each.
    segments: private and shared ones together.
    shared_rows: entries of SharedParts.rows, 0 if no recorded step has shared parts.
    """

    rows: int
    segments: int
    shared_rows: int = 0


class GraphBuffers(Protocol):
    """Device memory at fixed addresses that `Kernels.prepare` fills anew before each replay."""

    @property
    def limits(self) -> GraphLimits: ...

    def fits(self, batch: AttentionBatch) -> bool:
        """Whether prepare can write this batch: one token per row, and all within the limits."""
        ...


class Kernels(Protocol):
    """Operations of one decoder layer. Activations are [tokens, features], contiguous: fp32 on
    the CPU; fp32, bf16 or fp16 on CUDA.

    KV caches are [num_blocks, num_kv_heads, block_size, head_dim] in fp32, bf16 or fp16, which
    need not be the type of the activations, one pair per layer.
    """

    @property
    def name(self) -> str: ...

    def graph_buffers(
        self, limits: GraphLimits, layout: HeadLayout, device: torch.device
    ) -> GraphBuffers | None:
        """Buffers for `prepare(into=...)`; None if these kernels cannot be recorded in a graph."""
        ...

    def prepare(
        self,
        batch: AttentionBatch,
        layout: HeadLayout,
        device: torch.device,
        into: GraphBuffers | None = None,
    ) -> AttentionBatch:
        """What `attention` of every layer takes in place of `batch`. Called once per step.

        With `into`, from graph_buffers and with into.fits(batch), attention reads nothing but these
        buffers: a graph that recorded it once is replayed with the contents of any later prepare.
        A recorded step may have more tokens than the batch: the last ones are padding, get slot
        -1 (nothing is cached for them) and position 0, and any attention output.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last axis, in a new tensor of x's type, whatever that of
        weight is."""
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
        """Normalise (per head, if weights [head_dim] are given) and rotate Q and K in place in
        qkv [tokens, layout.qkv_size], then write K and V into the caches.

        positions: int32 [tokens], indexes rows of cos_sin; slots: int32 [tokens], slot s is
        offset s % block_size of block s // block_size. cos_sin: fp32 [max_positions, rotary_dim]:
        cosines, then sines, rotary_dim / 2 of each; None means no rotation. NeoX halves: element i
        pairs with i + rotary_dim / 2; elements past rotary_dim are left alone.
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
        """Softmax attention of every query over its cached segments and, causally, its chunk.

        qkv has been through rope_and_cache_; batch has been through prepare, without which only
        the reference and the CPU kernels work. Returns [tokens, layout.q_size].
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 * n] -> silu(first half) * second half, [tokens, n]."""
        ...
