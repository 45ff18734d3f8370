"""Shared parts of a batch given back to the rows that read them. No Python loop over segments."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def with_own_copies(
    start: Ints, segments: Ints, rows: Ints, first: Ints, end: Ints, shared: Ints
) -> tuple[Ints, Ints]:
    """segment_start and segments of all rows after row rows[i] has got shared[first[i]:end[i]].

    start: [rows + 1]; segments, shared: [n, 3]; rows, first, end: [k].
    """
    num_rows = len(start) - 1
    owner = np.concatenate([rows, np.arange(num_rows, dtype=np.int32)])
    source = np.concatenate([first + len(segments), start[:-1]])
    length = np.concatenate([end - first, lengths_of(start)])
    order = np.argsort(owner, kind="stable")
    taken = ranges(source[order], length[order])
    counts = np.bincount(owner, length, num_rows).astype(np.int32)
    return offsets(counts), np.concatenate([segments, shared])[taken]


def ranges(first: Ints, length: Ints) -> Ints:
    """first[0], first[0] + 1, ..., length[0] numbers of it, then those from first[1], and so on."""
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    numbers = np.arange(total, dtype=np.int32)
    numbers += np.repeat(first - (ends - length), length).astype(np.int32)
    return numbers


def lengths_of(start: Ints) -> Ints:
    """What `offsets` is given, from what it returns. np.diff takes several times as long, which
    counts where every step asks for a handful of small ones."""
    return start[1:] - start[:-1]


def offsets(lengths: Ints) -> Ints:
    """[n] lengths -> int32 [n + 1] running sums from 0."""
    sums = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=sums[1:])
    return sums
