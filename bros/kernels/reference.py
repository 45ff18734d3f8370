"""The definition of every kernel in plain torch, for any device and KV dtype."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bros.kernels.interface import AttentionBatch, GraphBuffers, GraphLimits, HeadLayout


class ReferenceKernels:
    """Implements `Kernels`. Slow and simple; every other backend is tested against it."""

    @property
    def name(self) -> str:
        return "reference"

    @property
    def products(self) -> None:
        """None."""
        return None

    @property
    def row_products(self) -> None:
        """None."""
        return None

    def graph_buffers(
        self, limits: GraphLimits, layout: HeadLayout, device: torch.device
    ) -> GraphBuffers | None:
        """None: these operations read numbers on the host, which a graph cannot capture."""
        return None

    def prepare(
        self,
        batch: AttentionBatch,
        layout: HeadLayout,
        device: torch.device,
        into: GraphBuffers | None = None,
        slot_positions: Tensor | None = None,
    ) -> AttentionBatch:
        """The batch, unchanged."""
        assert into is None
        return batch

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # rounded once, at the end
        out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
        return out.to(x.dtype)

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        residual += x
        return self.rms_norm(residual, weight, eps)

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
        q, k, v = split_heads(qkv, layout)
        for heads, weight in ((q, q_norm), (k, k_norm)):
            if weight is not None:
                heads.copy_(self.rms_norm(heads, weight, eps))
            if cos_sin is not None:
                _rotate_(heads, cos_sin[positions.long()])
        slot = slots.long()
        block_size = k_cache.shape[2]
        block, offset = slot // block_size, slot % block_size
        k_cache[block, :, offset] = k.to(k_cache.dtype)
        v_cache[block, :, offset] = v.to(v_cache.dtype)

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
        q, k, v = split_heads(qkv, layout)
        out = torch.empty_like(q)
        query_start = batch.query_start.tolist()
        for row, context in enumerate(segments_of_rows(batch)):
            chunk = slice(query_start[row], query_start[row + 1])
            keys = torch.cat([gather_segments(k_cache, context).to(k.dtype), k[chunk]])
            values = torch.cat([gather_segments(v_cache, context).to(v.dtype), v[chunk]])
            out[chunk] = _causal_attention(q[chunk], keys, values, scale)
        return out.flatten(1)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See Kernels."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def split_heads(qkv: Tensor, layout: HeadLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Views into qkv: Q [tokens, heads, head_dim], K and V [tokens, kv_heads, head_dim]."""
    tokens = qkv.shape[0]
    q, k, v = torch.split(qkv, [layout.q_size, layout.kv_size, layout.kv_size], dim=-1)
    return (
        q.view(tokens, layout.num_heads, layout.head_dim),
        k.view(tokens, layout.num_kv_heads, layout.head_dim),
        v.view(tokens, layout.num_kv_heads, layout.head_dim),
    )


def segments_of_rows(batch: AttentionBatch) -> list[list[list[int]]]:
    """For each row, the (block, lo, hi) of its shared parts and of its own segments."""
    start, segments = batch.segment_start.tolist(), batch.segments.tolist()
    own = [segments[first:end] for first, end in pairwise(start)]
    if batch.shared is not None:
        start, segments = batch.shared.segment_start.tolist(), batch.shared.segments.tolist()
        row_start, rows = batch.shared.row_start.tolist(), batch.shared.rows.tolist()
        for part in range(batch.shared.num_parts):
            for row in rows[row_start[part] : row_start[part + 1]]:
                own[row] = segments[start[part] : start[part + 1]] + own[row]
    return own


def gather_segments(cache: Tensor, segments: list[list[int]]) -> Tensor:
    """The cached tokens of (block, lo, hi) segments, [tokens, kv_heads, head_dim]."""
    parts = []
    for block, lo, hi in segments:
        part = cache[block, :, min(lo, hi) : max(lo, hi)].transpose(0, 1)
        parts.append(part if lo <= hi else part.flip(0))
    return torch.cat([cache.new_empty(0, cache.shape[1], cache.shape[3]), *parts])


def _rotate_(heads: Tensor, cos_sin: Tensor) -> None:
    """Rotate the first rotary_dim elements of heads [tokens, heads, head_dim] in place."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    heads[..., : 2 * half] = rotated


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [n, heads, dim] are the last n of the m tokens of k and v [m, kv_heads, dim]."""
    n, m = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    future = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(diagonal=m - n + 1)
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, v)
