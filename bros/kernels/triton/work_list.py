"""The work list of a batch in one compiled call (csrc/work_list.h), where the extension was built.

It gives what `plan_work` and `WorkTensors.fill` give, bit by bit, up to 2 ** 27 entries and with
rules below 2 ** 20. These are dozens of small NumPy operations, which took the host of an H100 half
a millisecond per step; the call takes a quarter of their time or less.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bros.kernels.interface import AttentionBatch, SharedParts
from bros.kernels.offsets import lengths_of
from bros.kernels.triton.plan import PlanRules, Split, readers_that_share

try:
    from bros.kernels._C import batch_counts as _batch_counts
    from bros.kernels._C import work_list as _work_list
    from bros.kernels._C import work_list_sizes as _work_list_sizes
except ImportError:  # the extension was not built
    COMPILED = False
else:
    COMPILED = True
"""Whether `list_sizes` and `write_list` can be called."""

Addresses = tuple[int, int, int, int, int, int, int, int, int, int, int, int]


class BatchCounts(NamedTuple):
    """What decides whether a batch is within the limits of a recording.

    tokens: query tokens.
    empty, several: rows of no token and of several tokens.
    segments: of its work list: own and shared ones, and the copies of shared ones.
    """

    tokens: int
    empty: int
    several: int
    segments: int


def pack_rules(rules: PlanRules) -> array[int]:
    """int64 [13], as the compiled functions read them."""
    return array(
        "q",
        [
            *_split_numbers(rules.one),
            *_split_numbers(rules.tile),
            rules.tile_tokens,
            rules.programs_per_one,
            rules.programs_per_tile,
        ],
    )


def list_sizes(
    batch: AttentionBatch, rules: array[int]
) -> tuple[int, int, int, int, int, int, int]:
    """The fields of ListSizes.of(plan_work(batch, rules)), without making the list.

    rules: from pack_rules.
    Raises ValueError if offsets of the batch decrease or are out of range, if a shared part has a
    row that is none of the batch, or if a rule is not positive or 2 ** 20 or more.
    """
    return _work_list_sizes(*_addresses(batch), rules)


def write_list(
    batch: AttentionBatch, rules: array[int], out: Tensor, room: array[int]
) -> tuple[int, int]:
    """Write the list's sections; returns how many numbers of `out` are used, and partial results.

    rules: from pack_rules.
    out: int32 [room[-1]], contiguous, on the CPU. Gaps between sections are not written.
    room: int64 [16]: the fields of ListSizes, then its section_starts().
    Raises ValueError as list_sizes does, and if the list does not fit; nothing is written then.
    """
    if out.shape[0] < room[-1]:
        raise ValueError(f"{out.shape[0]} numbers, and the sections end at {room[-1]}")
    assert out.dtype is torch.int32 and out.is_contiguous()
    return _work_list(*_addresses(batch), rules, out.data_ptr(), room)


def reference_batch_counts(batch: AttentionBatch) -> BatchCounts:
    """The counts, by NumPy."""
    query_start = batch.query_start.numpy()
    lengths = lengths_of(query_start)
    segments = len(batch.segments)
    if batch.shared is not None:
        segments += _shared_segments(batch.shared, lengths == 1)
    return BatchCounts(
        int(query_start[-1]), int((lengths == 0).sum()), int((lengths > 1).sum()), segments
    )


if COMPILED:

    def batch_counts(batch: AttentionBatch) -> BatchCounts:
        """As reference_batch_counts. Raises ValueError as list_sizes does."""
        return BatchCounts(*_batch_counts(*_addresses(batch)))

else:
    batch_counts = reference_batch_counts


def _split_numbers(split: Split) -> tuple[int, ...]:
    return split.programs, split.grain, split.least, split.long, split.waves


def _shared_segments(shared: SharedParts, single: np.ndarray) -> int:
    """The number of shared segments, and of the copies that plan_work makes of them.

    single: bool [rows], the rows of one token.
    """
    readers = lengths_of(shared.row_start.numpy())
    lengths = lengths_of(shared.segment_start.numpy())
    part = np.repeat(np.arange(len(readers)), readers)
    stays = readers_that_share(part, single[shared.rows.numpy()], len(readers))
    return int(lengths.sum() + lengths[part[~stays]].sum())


def _addresses(batch: AttentionBatch) -> Addresses:
    rows, num_segments = batch.query_start.shape[0] - 1, batch.segments.shape[0]
    assert batch.segment_start.shape[0] == rows + 1
    assert batch.segments.shape == (num_segments, 3)
    own = (
        _address(batch.query_start),
        _address(batch.segment_start),
        _address(batch.segments),
        rows,
        num_segments,
    )
    shared = batch.shared
    if shared is None:
        return *own, 0, 0, 0, 0, 0, 0, 0
    parts, num_shared = shared.num_parts, shared.segments.shape[0]
    assert shared.segment_start.shape[0] == parts + 1
    assert shared.segments.shape == (num_shared, 3)
    return (
        *own,
        _address(shared.row_start),
        _address(shared.rows),
        _address(shared.segment_start),
        _address(shared.segments),
        parts,
        shared.rows.shape[0],
        num_shared,
    )


def _address(numbers: Tensor) -> int:
    assert numbers.dtype is torch.int32 and numbers.is_contiguous() and not numbers.is_cuda
    return numbers.data_ptr()
