"""Prepares the work list of a batch and launches the attention kernels."""

from __future__ import annotations

import math
from array import array
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bros.kernels.interface import AttentionBatch, GraphLimits, HeadLayout
from bros.kernels.staging import Staging
from bros.kernels.triton.attention_kernels import attend, merge
from bros.kernels.triton.buffers import (
    GraphWork,
    ListSizes,
    Scratch,
    TritonBatch,
    WorkTensors,
)
from bros.kernels.triton.plan import ITEM_WIDTH, PlanRules, Split, plan_work
from bros.kernels.triton.settings import (
    MIN_ROWS,
    Kind,
    Shape,
    TritonSettings,
    power_of_two,
)
from bros.kernels.triton.work_list import COMPILED, list_sizes, pack_rules
from bros.kernels.xformers_attention import XformersAttention

_MAX_ROWS = 128
_MERGED_AT_ONCE = 16
_MERGED_TOKENS = 64  # by different programs: about as many programs as a device runs at once
_ONES, _TILES, _MERGES = range(3)  # places in WorkTensors.counts
_GRAIN = 8  # segments; a tile of keys has at most 128 tokens
_LOG2_E = math.log2(math.e)

_TYPES = {
    torch.float32: triton.language.float32,
    torch.bfloat16: triton.language.bfloat16,
    torch.float16: triton.language.float16,
}


_Key = tuple[Kind, int, HeadLayout, torch.dtype, torch.dtype, int]
"""Kind, rows, layout, dtypes of activations and cache, tokens per block."""


class _Launcher(NamedTuple):
    """The arguments that all launches of a key share, cached because a step launches per layer."""

    programs_per_item: int
    constants: dict[str, Any]


class TritonAttention:
    """Attention on one device. Not thread-safe: all steps use the same staging buffers."""

    def __init__(
        self,
        settings: TritonSettings,
        device: torch.device,
        chunk_attention: XformersAttention | None = None,
    ) -> None:
        """chunk_attention: computes the attention within long chunks, except in captured steps."""
        self._settings = settings
        self._launching = settings.launching
        self._chunk_attention = chunk_attention
        self._device = device
        self._staging = Staging(device)
        self._scratch: Scratch | None = None
        self._launchers: dict[_Key, _Launcher] = {}
        self._packed: dict[tuple[HeadLayout, int], array[int]] = {}

    def graph_work(self, limits: GraphLimits, layout: HeadLayout) -> GraphWork:
        """Buffers for any batch within the limits."""
        queries = max(min(limits.rows, limits.shared_rows), limits.tokens)
        rows = _tile_rows(queries, layout)
        capacity = ListSizes.for_limits(limits, self._rules(layout, rows))
        scratch = self._scratch_for(capacity, layout)
        work = WorkTensors.allocate(capacity, layout, self._device, scratch)
        return GraphWork(limits, work, rows)

    def prepare(
        self, batch: AttentionBatch, layout: HeadLayout, into: GraphWork | None
    ) -> TritonBatch:
        """The batch with its work list on the device.

        into: must fit the batch. Raises ValueError if the list does not fit.
        """
        rows = into.tile_rows if into else _tile_rows(_most_queries(batch), layout)
        own = self._chunk_attention.plan(batch) if self._chunk_attention and into is None else None
        tensors = into.work if into else None
        if COMPILED and own is None:
            packed = self._packed_rules(layout, rows)
            if tensors is None:
                sizes = ListSizes(*list_sizes(batch, packed))
                tensors = WorkTensors.allocate(sizes, layout, self._device)
            tensors.write(batch, packed, self._staging)
        else:
            work = plan_work(batch, self._rules(layout, rows), own.done if own else None)
            if tensors is None:
                tensors = WorkTensors.allocate(ListSizes.of(work), layout, self._device)
            tensors.fill(work, self._staging)
        return TritonBatch(
            batch.query_start,
            batch.segment_start,
            batch.segments,
            batch.shared,
            work=tensors,
            tile_rows=rows,
            own=own,
        )

    def run(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: TritonBatch,
        scale: float,
    ) -> Tensor:
        """Returns [tokens, layout.q_size]; padding rows are not written."""
        assert qkv.shape[1] == layout.qkv_size and qkv.is_contiguous()
        assert k_cache.is_contiguous() and v_cache.is_contiguous()
        assert k_cache.shape == v_cache.shape and k_cache.shape[1] == layout.num_kv_heads
        assert k_cache.shape[3] == layout.head_dim
        out, own_lse = self._begin(qkv, layout, batch, scale)
        work, capacity = batch.work, batch.work.capacity
        group = layout.num_heads // layout.num_kv_heads
        arguments = (out, qkv, layout, (k_cache, v_cache), work, scale)
        if capacity.one_items:
            self._attend("one", _padded_rows(group), *arguments)
        if capacity.tile_items:
            self._attend("tile", batch.tile_rows, *arguments)
        if capacity.merge_tokens:
            merge[(min(capacity.merge_tokens, _MERGED_TOKENS) * layout.num_heads,)](
                out,
                work.scratch.out,
                work.scratch.lse,
                work.counts,
                work.merge_tokens,
                work.merge_start,
                work.merge_slots,
                work.scratch.lse if own_lse is None else own_lse,
                0 if own_lse is None else own_lse.shape[1],
                HEADS=layout.num_heads,
                HEAD_DIM=layout.head_dim,
                BLOCK_D=_padded_dim(layout.head_dim),
                BLOCK_P=_MERGED_AT_ONCE,
                COUNT=_MERGES,
                OWN=own_lse is not None,
                num_warps=4,
                **self._launching,
            )
        return out

    def _begin(
        self, qkv: Tensor, layout: HeadLayout, batch: TritonBatch, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the log-sum-exps of what xformers has already written to it."""
        own = batch.own
        if own is None:
            return qkv.new_empty(qkv.shape[0], layout.q_size), None
        assert self._chunk_attention is not None
        found, lse = self._chunk_attention.run(qkv, layout, own, scale)
        if len(found) == len(qkv):
            return found, lse
        out = qkv.new_empty(qkv.shape[0], layout.q_size)
        out[own.done.first : own.end] = found
        return out, lse

    def _attend(
        self,
        kind: Kind,
        rows: int,
        out: Tensor,
        qkv: Tensor,
        layout: HeadLayout,
        caches: tuple[Tensor, Tensor],
        work: WorkTensors,
        scale: float,
    ) -> None:
        """rows: of an item: queries times query heads of a KV head, or fewer heads if many."""
        key = (kind, rows, layout, qkv.dtype, caches[0].dtype, caches[0].shape[2])
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = self._launcher(*key)
        items = work.one_items if kind == "one" else work.tile_items
        attend[(items.shape[0] // ITEM_WIDTH * launcher.programs_per_item,)](
            out,
            work.scratch.out,
            work.scratch.lse,
            qkv,
            *caches,
            work.counts,
            items,
            work.listed,
            work.segments,
            scale * _LOG2_E,
            **launcher.constants,
        )

    def _launcher(
        self,
        kind: Kind,
        rows: int,
        layout: HeadLayout,
        activations: torch.dtype,
        cached: torch.dtype,
        block_size: int,
    ) -> _Launcher:
        group = layout.num_heads // layout.num_kv_heads
        one = kind == "one"
        compute = self._compute_type(activations, cached)
        block_d = _padded_dim(layout.head_dim)
        launch = self._settings.launch(Shape(kind, compute.itemsize, block_d, rows))
        heads = min(group, launch.block_m)
        group_tiles = -(-group // heads)
        token_tiles = 1 if one else -(-_tile_tokens(rows, group) // (launch.block_m // heads))
        block_slots = power_of_two(block_size)
        constants = {
            "KV_HEADS": layout.num_kv_heads,
            "GROUP": group,
            "HEADS": heads,
            "GROUP_TILES": group_tiles,
            "TOKEN_TILES": token_tiles,
            "HEAD_DIM": layout.head_dim,
            "BLOCK_D": block_d,
            "BLOCK_SIZE": block_size,
            "BLOCK_SLOTS": block_slots,
            "BLOCK_M": launch.block_m,
            "BLOCK_N": max(launch.block_n, block_slots),
            "ONE_TOKEN": one,
            "COMPUTE": _TYPES[compute],
            "COUNT": _ONES if one else _TILES,
            "num_warps": launch.warps,
            "num_stages": launch.stages,
            **self._launching,
        }
        return _Launcher(token_tiles * group_tiles * layout.num_kv_heads, constants)

    def _compute_type(self, activations: torch.dtype, cached: torch.dtype) -> torch.dtype:
        """The dtype of products."""
        compute = torch.promote_types(activations, cached)
        if self._settings.interpreted and compute == torch.bfloat16:
            return torch.float32  # the interpreter's product takes the bits of bf16 for integers
        return compute

    def _scratch_for(self, capacity: ListSizes, layout: HeadLayout) -> Scratch:
        """Memory for partial results of captured steps. Steps run one at a time, so they all share
        it; a larger graph that is captured later gets new memory."""
        if self._scratch is None or not self._scratch.holds(capacity, layout):
            self._scratch = Scratch.allocate(capacity, layout, self._device)
        return self._scratch

    def _packed_rules(self, layout: HeadLayout, tile_rows: int) -> array[int]:
        """_rules for compiled functions, made once."""
        packed = self._packed.get((layout, tile_rows))
        if packed is None:
            packed = pack_rules(self._rules(layout, tile_rows))
            self._packed[layout, tile_rows] = packed
        return packed

    def _rules(self, layout: HeadLayout, tile_rows: int) -> PlanRules:
        """How a batch is divided among this device's programs."""
        group = layout.num_heads // layout.num_kv_heads
        per_item = layout.num_kv_heads * -(-group // min(group, _MAX_ROWS))
        programs, processors = self._settings.programs, self._settings.processors
        return PlanRules(
            Split(processors * programs["one"], _GRAIN, least=1, long=4, waves=4),
            Split(processors * programs["tile"], _GRAIN, least=1, long=4, waves=1),
            _tile_tokens(tile_rows, group),
            per_item,
            per_item,
        )


def _most_queries(batch: AttentionBatch) -> int:
    """The most queries that read the same K and V: those of one row or of one shared part."""
    most = int(batch.query_start.diff().max()) if batch.num_rows else 0
    if batch.shared is not None and batch.shared.num_parts:
        most = max(most, int(batch.shared.row_start.diff().max()))
    return most


def _tile_rows(queries: int, layout: HeadLayout) -> int:
    """Rows of a tile with all heads of this many queries, at most _MAX_ROWS."""
    return _padded_rows(queries * (layout.num_heads // layout.num_kv_heads))


def _padded_rows(rows: int) -> int:
    return min(_MAX_ROWS, max(MIN_ROWS, power_of_two(rows)))


def _tile_tokens(rows: int, group: int) -> int:
    """Tokens of a tile of this many rows; at least one, even if its heads do not fit."""
    return max(1, rows // group)


def _padded_dim(head_dim: int) -> int:
    return max(MIN_ROWS, power_of_two(head_dim))
