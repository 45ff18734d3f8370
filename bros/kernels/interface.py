"""What a kernel back end provides. `reference` is the living definition of every operation.

Tokens of one step are packed: row r of a step owns query tokens
[query_start[r], query_start[r + 1]), and its already cached tokens are the segments
[segment_start[r], segment_start[r + 1]), each (block, lo, hi) = slots [lo, hi) of that block.

      query_start   0            q1       q2      T
    qkv             [ row 0 chunk | row 1 | row 2 ]           fresh K and V, causal in the row
    segments row 0  (7,0,16) (3,0,16) (9,0,5)                 cached K and V, seen by all queries

Attention of a query = merge by log-sum-exp of the part over its segments and the causal part
over its own chunk. Segments may be empty, and come in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the queries of a step and their cached context lie. All int32, contiguous, on CPU.

    query_start: [rows + 1]; segment_start: [rows + 1]; segments: [n, 3] of (block, lo, hi).
    """

    query_start: Tensor
    segment_start: Tensor
    segments: Tensor

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


class Kernels(Protocol):
    """Operations of one decoder layer. Activations are fp32 [tokens, features], contiguous.

    KV caches are [num_blocks, num_kv_heads, block_size, head_dim] in fp32, bf16 or fp16, one
    pair per layer.
    """

    @property
    def name(self) -> str: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last axis, in a new tensor."""
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

        qkv has been through rope_and_cache_. Returns [tokens, layout.q_size].
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 * n] -> silu(first half) * second half, [tokens, n]."""
        ...
