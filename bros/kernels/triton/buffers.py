"""A work list in device memory: allocated for a step, or at fixed addresses for a graph.

It is one int32 buffer, so that one copy uploads it. Sections start at multiples of 16 bytes,
because Triton compiles a kernel anew for pointers of other alignment.

    counts | one_items | tile_items | listed | merge_tokens | merge_start | merge_slots | segments

counts holds the actual lengths of one_items, tile_items and merge_tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
import torch
from torch import Tensor

from bros.kernels.interface import AttentionBatch, GraphLimits, HeadLayout
from bros.kernels.offsets import Ints
from bros.kernels.staging import Staging
from bros.kernels.triton.plan import ITEM_WIDTH, PlanRules, WorkList
from bros.kernels.triton.work_list import batch_counts, write_list
from bros.kernels.xformers_attention import XformersWork

_COUNTS = 4
_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class ListSizes:
    """Capacities of the sections, and of the partial results, in entries."""

    one_items: int
    tile_items: int
    listed: int
    merge_tokens: int
    merge_slots: int
    segments: int
    partials: int

    @staticmethod
    def of(work: WorkList) -> ListSizes:
        """The sizes of this list."""
        return ListSizes(
            len(work.one_items),
            len(work.tile_items),
            len(work.listed),
            len(work.merge_tokens),
            len(work.merge_slots),
            len(work.segments),
            work.partials,
        )

    @staticmethod
    def for_limits(limits: GraphLimits, rules: PlanRules) -> ListSizes:
        """Upper bounds for the list of any step within the limits."""
        one_items = limits.rows + rules.one.extra_items(limits.segments, rules.programs_per_one)
        tile_items = tile_partials = 0
        if limits.shared_rows or limits.chunks:
            chunk_tiles = limits.tokens // rules.tile_tokens + limits.chunks
            # Every tile reads all segments of its shared part or of its chunk.
            tiles = -(-limits.shared_rows // rules.tile_tokens) + chunk_tiles
            extra = rules.tile.extra_items(tiles * limits.segments, rules.programs_per_tile)
            shared_tiles = _most_tiles(limits.shared_rows, rules.tile_tokens)
            tile_items = shared_tiles + chunk_tiles + extra
            tile_partials = limits.shared_rows + limits.tokens + extra * rules.tile_tokens
        partials = one_items + tile_partials
        return ListSizes(
            one_items,
            tile_items,
            limits.shared_rows,
            max(limits.rows, limits.tokens),
            partials,
            limits.segments,
            partials,
        )

    def holds(self, work: WorkList) -> bool:
        need = ListSizes.of(work)
        return all(
            getattr(need, name) <= getattr(self, name) for name in ListSizes.__dataclass_fields__
        )

    def section_lengths(self) -> tuple[int, ...]:
        """In int32 numbers, in the order of the sections."""
        return (
            _COUNTS,
            self.one_items * ITEM_WIDTH,
            self.tile_items * ITEM_WIDTH,
            self.listed,
            self.merge_tokens,
            self.merge_tokens + 1,
            self.merge_slots,
            self.segments * 3,
        )

    def section_starts(self) -> list[int]:
        """The start of each section, and the end of the last one."""
        starts = [0]
        for length in self.section_lengths():
            starts.append(starts[-1] + -(-length // _ALIGNMENT) * _ALIGNMENT)
        return starts


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for the partial results of one layer's attention.

    out: fp32 [partials, heads, head_dim].
    lse: fp32 [partials, heads], log2 of the sum of 2 ** score.
    """

    out: Tensor
    lse: Tensor

    @staticmethod
    def allocate(capacity: ListSizes, layout: HeadLayout, device: torch.device) -> Scratch:
        shape = (max(1, capacity.partials), layout.num_heads)
        return Scratch(
            torch.empty(*shape, layout.head_dim, device=device), torch.empty(shape, device=device)
        )

    def holds(self, capacity: ListSizes, layout: HeadLayout) -> bool:
        partials, *heads = self.out.shape
        return partials >= capacity.partials and heads == [layout.num_heads, layout.head_dim]


@dataclass(frozen=True, slots=True)
class WorkTensors:
    """The sections as device tensors, and memory for partial results. All layers share them.

    room: the capacity and the starts of the sections, see write_list.
    """

    scratch: Scratch
    capacity: ListSizes
    room: array[int]
    buffer: Tensor
    counts: Tensor
    one_items: Tensor
    tile_items: Tensor
    listed: Tensor
    merge_tokens: Tensor
    merge_start: Tensor
    merge_slots: Tensor
    segments: Tensor

    @staticmethod
    def allocate(
        capacity: ListSizes,
        layout: HeadLayout,
        device: torch.device,
        scratch: Scratch | None = None,
    ) -> WorkTensors:
        starts = capacity.section_starts()
        buffer = torch.empty(starts[-1], dtype=torch.int32, device=device)
        lengths = capacity.section_lengths()
        sections = [
            buffer[start : start + n] for start, n in zip(starts[:-1], lengths, strict=True)
        ]
        scratch = scratch or Scratch.allocate(capacity, layout, device)
        room = array("q", [*astuple(capacity), *starts])
        return WorkTensors(scratch, capacity, room, buffer, *sections)

    def write(self, batch: AttentionBatch, rules: array[int], staging: Staging) -> None:
        """Make the list of a batch by one compiled call, and upload it as `fill` does.

        rules: from pack_rules.
        Raises ValueError if the list exceeds the capacity.
        """
        host = staging.take(self.room[-1])  # whole, since sections stand where their capacity ends
        used, _ = write_list(batch, rules, host, self.room)
        self.buffer[:used].copy_(host[:used], non_blocking=True)
        staging.sent()

    def fill(self, work: WorkList, staging: Staging) -> None:
        """Upload a list, in stream order; the host does not wait.

        Raises ValueError if the list exceeds the capacity.
        """
        if not self.capacity.holds(work):
            raise ValueError("the work list exceeds its capacity")
        starts = self.capacity.section_starts()
        counts = np.array(
            [len(work.one_items), len(work.tile_items), len(work.merge_tokens), 0], np.int32
        )
        parts: Sequence[Ints] = (
            counts,
            work.one_items.ravel(),
            work.tile_items.ravel(),
            work.listed,
            work.merge_tokens,
            work.merge_start,
            work.merge_slots,
            work.segments.ravel(),
        )
        used = starts[len(parts) - 1] + len(parts[-1])
        host = staging.take(used)
        array = host.numpy()
        for start, part in zip(starts[:-1], parts, strict=True):
            array[start : start + len(part)] = part
        self.buffer[:used].copy_(host, non_blocking=True)
        staging.sent()


@dataclass(frozen=True, slots=True)
class TritonBatch(AttentionBatch):
    """A prepared batch. The tensors of the base class are the original ones, on the CPU.

    work: its work list on the device.
    tile_rows: rows (queries times heads) of a tile, for which the tile kernel is launched.
    own: the part of the attention that xformers computes.
    """

    work: WorkTensors = field(kw_only=True)
    tile_rows: int = field(kw_only=True)
    own: XformersWork | None = field(kw_only=True, default=None)


class GraphWork:
    """Implements GraphBuffers."""

    def __init__(self, limits: GraphLimits, work: WorkTensors, tile_rows: int) -> None:
        self._limits = limits
        self.work = work
        self.tile_rows = tile_rows

    def fits(self, batch: AttentionBatch) -> bool:
        """See GraphBuffers."""
        limits = self._limits
        shared_rows = 0 if batch.shared is None else batch.shared.rows.shape[0]
        if batch.num_rows > limits.rows or shared_rows > limits.shared_rows:
            return False
        counts = batch_counts(batch)
        if counts.segments > limits.segments:
            return False
        if not limits.chunks:
            return not counts.several and not counts.empty
        return counts.several <= limits.chunks and counts.tokens <= limits.tokens


def _most_tiles(readers: int, tile_tokens: int) -> int:
    """The most tiles of shared parts with `readers` readers in all and at least two each.

    The worst case is parts of three readers if a tile holds two, else parts of two readers or of
    one more than a tile holds.
    """
    if tile_tokens == 1:
        return readers
    return readers * 2 // 3 if tile_tokens == 2 else readers // 2
