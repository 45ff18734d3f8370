"""Finds the cached prefixes that several rows of a step read, so that kernels may read them once.

Rows with a common prefix list literally the same full blocks first, because the KV cache holds a
shared block once. Sorted by these blocks, rows with a common prefix are neighbours, and the number
of blocks each has in common with the one before gives the groups, which nest:

    row 2   4 8 5 .        part 0   blocks 4 8   rows 0 2 3
    row 0   4 8 5 .        part 1   block 5      rows 0 2
    row 3   4 8 . .
    row 1   6 . . .        nothing
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bros.core.interfaces import Grouping
from bros.kernels.interface import AttentionBatch, SharedParts
from bros.kernels.parts import offsets

_Ints = NDArray[np.int32]


def grouping_for(kernels: str, block_size: int) -> Grouping | None:
    """What pays with the kernels of this name (Kernels.name); None: nothing does.

    On the CPU much is won where the lanes of all rows fill the vectors of a tile. Times that a
    decode step's attention took with each row reading for itself, in those with the prefix read
    once, which include finding it; benchmarks/kernels_speed.py, SmolLM2-135M (3 lanes per row), two
    cores with AVX2, fp32 and bf16 KV:

        rows          2          4          8         16         32
        64 tokens   .72 .72    .74 .83               .90 .95
        256         .77 .79                         1.05 1.29
        1,500       .75 1.0   1.20 1.20  1.80 1.68  1.87 1.88  1.79 2.19
    """
    if kernels.startswith("triton"):
        return Grouping(block_size, min_blocks=4)
    if kernels.startswith("cpu"):
        return Grouping(block_size, min_blocks=16, min_rows=4)
    return None


class _Part(NamedTuple):
    """Sorted rows [first, end) have the segments [lo, hi) of each in common."""

    first: int
    end: int
    lo: int
    hi: int


def group_shared(batch: AttentionBatch, grouping: Grouping) -> AttentionBatch:
    """The same attention, with common prefixes as shared parts.

    batch: without shared parts; it is returned as it is if no rows have enough in common.
    """
    assert batch.shared is None
    start, segments = batch.segment_start.numpy(), batch.segments.numpy()
    rows = _candidates(start, segments, grouping)
    if not len(rows):
        return batch
    rows, common = _sorted_rows(rows, start, segments, grouping.block_size)
    parts = _parts(common, grouping)
    return _regrouped(batch, rows, parts) if parts else batch


def _candidates(start: _Ints, segments: _Ints, grouping: Grouping) -> _Ints:
    """Rows that begin with a full block that enough other rows begin with, too."""
    rows = np.flatnonzero(np.diff(start) >= max(grouping.min_blocks, 1))
    first = segments[start[rows]]
    full = first[:, 2] - first[:, 1] == grouping.block_size
    rows, first = rows[full], first[full]
    _, which, counts = np.unique(first[:, 0], return_inverse=True, return_counts=True)
    found: _Ints = rows[counts[which] >= grouping.min_rows].astype(np.int32)
    return found


def _sorted_rows(
    rows: _Ints, start: _Ints, segments: _Ints, block_size: int
) -> tuple[_Ints, _Ints]:
    """The rows sorted by their blocks, and how many each has in common with the one after it.

    What follows a row in the list of segments is sorted with it, which saves filling it up; that
    it is not the row's is seen to afterwards.
    """
    full = segments[:, 2] - segments[:, 1] == block_size
    alone = np.arange(-len(segments), 0, dtype=np.int32)  # equal to no block, nor to each other
    blocks = np.where(full, segments[:, 0], alone)
    lengths = (start[1:] - start[:-1])[rows]
    width = int(np.partition(lengths, -2)[-2])  # two rows have no more in common
    places: _Ints = np.add.outer(start[rows], np.arange(width, dtype=np.int32))
    table = blocks.take(places, mode="clip")
    keys = [row.tobytes() for row in table]  # bytes sort much faster than rows of a table
    order = sorted(range(len(rows)), key=keys.__getitem__)
    table, lengths = table[order], lengths[order]
    differs = table[1:] != table[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    shorter = np.minimum(lengths[1:], lengths[:-1])
    return rows[order], np.minimum(common, shorter).astype(np.int32)


def _parts(common: _Ints, grouping: Grouping) -> list[_Part]:
    """common[i]: what sorted rows i and i + 1 have in common, in blocks. Outer parts come first."""
    parts = []
    least = grouping.min_rows
    todo = [(0, len(common) + 1, 0)]  # rows [first, end) have `lo` blocks in parts already
    while todo:
        first, end, lo = todo.pop()
        within = common[first : end - 1]
        hi = int(within.min())
        if hi - lo >= grouping.min_blocks:
            parts.append(_Part(first, end, lo, hi))
            lo = hi
        cuts = [first, *(np.flatnonzero(within == hi) + first + 1).tolist(), end]
        todo += [(a, b, lo) for a, b in zip(cuts, cuts[1:], strict=False) if b - a >= least]
    return parts


def _regrouped(batch: AttentionBatch, rows: _Ints, parts: list[_Part]) -> AttentionBatch:
    """rows: sorted as for `parts`. The segments of parts are left out of those of the rows."""
    start, segments = batch.segment_start.numpy(), batch.segments.numpy()
    own = start[:-1].copy()  # where what is not in parts begins
    counts, sizes, shared = [], [], []
    for first, end, lo, hi in parts:
        begin = int(start[rows[first]])
        own[rows[first:end]] = start[rows[first:end]] + hi  # inner parts come after outer ones
        counts.append(end - first)
        sizes.append(hi - lo)
        shared.append(segments[begin + lo : begin + hi])
    pieces = [segments[a:b] for a, b in zip(own.tolist(), start[1:].tolist(), strict=True)]
    members = [np.sort(rows[first:end]) for first, end, _, _ in parts]
    return AttentionBatch(
        batch.query_start,
        torch.from_numpy(offsets(start[1:] - own)),
        torch.from_numpy(np.concatenate(pieces)),
        SharedParts(
            row_start=torch.from_numpy(offsets(np.array(counts, np.int32))),
            rows=torch.from_numpy(np.concatenate(members)),
            segment_start=torch.from_numpy(offsets(np.array(sizes, np.int32))),
            segments=torch.from_numpy(np.concatenate(shared)),
        ),
    )
