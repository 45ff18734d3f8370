"""Arithmetic on arrays of offsets, without Python loops: part i is [start[i], start[i + 1])."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def offsets(lengths: Ints) -> Ints:
    """[n] lengths -> int32 [n + 1] running sums from 0."""
    sums = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=sums[1:])
    return sums


def lengths_of(start: Ints) -> Ints:
    """[n + 1] offsets -> [n] lengths. np.diff is several times slower on small arrays, which
    matters because every step calls this several times."""
    return start[1:] - start[:-1]


def ranges(first: Ints, length: Ints) -> Ints:
    """The concatenated ranges first[i] .. first[i] + length[i] - 1."""
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    numbers = np.arange(total, dtype=np.int32)
    numbers += np.repeat(first - (ends - length), length).astype(np.int32)
    return numbers
