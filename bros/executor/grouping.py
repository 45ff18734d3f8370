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
from torch import Tensor

from bros.kernels.interface import AttentionBatch, SharedParts
from bros.kernels.parts import offsets, ranges

MIN_SHARED_BLOCKS = 4
"""Shorter common prefixes stay with their rows: a part of its own costs each row of it a merge."""

_Ints = NDArray[np.int32]


class _Part(NamedTuple):
    """Sorted rows [first, end) have the segments [lo, hi) of each in common."""

    first: int
    end: int
    lo: int
    hi: int


def group_shared(
    batch: AttentionBatch, block_size: int, min_blocks: int = MIN_SHARED_BLOCKS
) -> AttentionBatch:
    """The same attention, with common prefixes of at least min_blocks full blocks as shared parts.

    batch: without shared parts; it is returned as it is if no rows have so much in common.
    """
    assert batch.shared is None
    start, segments = batch.segment_start.numpy(), batch.segments.numpy()
    rows = _candidates(start, segments, block_size, min_blocks)
    if not len(rows):
        return batch
    blocks = _leading_blocks(rows, start, segments, block_size)
    keys = [row.tobytes() for row in blocks]  # bytes sort much faster than arrays of a table
    order = sorted(range(len(rows)), key=keys.__getitem__)
    rows, blocks = rows[order], blocks[order]
    parts = _parts(np.argmax(blocks[1:] != blocks[:-1], axis=1), min_blocks)
    return _regrouped(batch, rows, parts) if parts else batch


def _candidates(start: _Ints, segments: _Ints, block_size: int, min_blocks: int) -> _Ints:
    """Rows that begin with a full block that another row begins with, too."""
    rows = np.flatnonzero(np.diff(start) >= max(min_blocks, 1))
    first = segments[start[rows]]
    full = first[:, 2] - first[:, 1] == block_size
    rows, first = rows[full], first[full]
    _, which, counts = np.unique(first[:, 0], return_inverse=True, return_counts=True)
    found: _Ints = rows[counts[which] > 1].astype(np.int32)
    return found


def _leading_blocks(rows: _Ints, start: _Ints, segments: _Ints, block_size: int) -> _Ints:
    """[rows, longest + 1]: the blocks of each row; what is not a full block, or beyond the last,
    is a number that no other row has."""
    lengths = (start[1:] - start[:-1])[rows]
    blocks = np.empty((len(rows), int(lengths.max()) + 1), np.int32)
    blocks[:] = -1 - np.arange(len(rows), dtype=np.int32)[:, None]
    own = segments[ranges(start[rows], lengths)]
    into = np.arange(blocks.shape[1]) < lengths[:, None]
    alone = np.repeat(blocks[:, -1], lengths)
    blocks[into] = np.where(own[:, 2] - own[:, 1] == block_size, own[:, 0], alone)
    return blocks


def _parts(common: NDArray[np.intp], min_blocks: int) -> list[_Part]:
    """common[i]: what sorted rows i and i + 1 have in common, in blocks. Outer parts come first."""
    parts = []
    todo = [(0, len(common) + 1, 0)]  # rows [first, end) have `lo` blocks in parts already
    while todo:
        first, end, lo = todo.pop()
        within = common[first : end - 1]
        hi = int(within.min())
        if hi - lo >= min_blocks:
            parts.append(_Part(first, end, lo, hi))
            lo = hi
        cuts = [first, *(np.flatnonzero(within == hi) + first + 1).tolist(), end]
        todo += [(a, b, lo) for a, b in zip(cuts, cuts[1:], strict=False) if b - a > 1]
    return parts


def _regrouped(batch: AttentionBatch, rows: _Ints, parts: list[_Part]) -> AttentionBatch:
    """rows: sorted as for `parts`. The segments of parts are left out of those of the rows."""
    start, segments = batch.segment_start.numpy(), batch.segments.numpy()
    covered = np.zeros(batch.num_rows, np.int32)  # leading segments that are in parts
    for first, end, _, hi in parts:
        members = rows[first:end]
        covered[members] = np.maximum(covered[members], hi)
    lengths = np.diff(start) - covered
    firsts = np.array([start[rows[part.first]] + part.lo for part in parts], np.int32)
    sizes = np.array([part.hi - part.lo for part in parts], np.int32)
    counts = np.array([part.end - part.first for part in parts], np.int32)
    shared = SharedParts(
        row_start=_tensor(offsets(counts)),
        rows=_tensor(np.concatenate([np.sort(rows[first:end]) for first, end, _, _ in parts])),
        segment_start=_tensor(offsets(sizes)),
        segments=_tensor(segments[ranges(firsts, sizes)]),
    )
    return AttentionBatch(
        batch.query_start,
        _tensor(offsets(lengths)),
        _tensor(segments[ranges(start[:-1] + covered, lengths)]),
        shared,
    )


def _tensor(values: _Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
