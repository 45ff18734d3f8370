"""The segments of a step as what is not as in the step before: small, and soon found.

    before   [ row a | row b | row c ]      places: 1, -1, 0, for rows that b, nobody and a were
    guess    [ row b, and 0 if there is more | 0 ... | as much of row a as there is ]

A row has the numbers of its segments, three for each; `starts` count segments. The compiled
functions take some ten microseconds for 64 rows of 4,096 tokens, those in Python ten times as long.
"""

from __future__ import annotations

import numpy as np
import torch  # noqa: F401  first, as in cpu_ops.py
from numpy.typing import NDArray

Numbers = NDArray[np.int32]

_WIDTH = 3


def guess(before_starts: Numbers, before: Numbers, places: Numbers, starts: Numbers) -> Numbers:
    """int32 [3 * starts[-1]]: what the rows had when they were at these places, -1 for new rows.

    before_starts, before: of all rows then. starts: [rows + 1], of the rows now.
    """
    found = np.zeros(_WIDTH * int(starts[-1]), np.int32)
    borders, old = (_WIDTH * starts).tolist(), (_WIDTH * before_starts).tolist()
    for place, begin, end in zip(places.tolist(), borders[:-1], borders[1:], strict=True):
        if place >= 0:
            known = min(end - begin, old[place + 1] - old[place])
            found[begin : begin + known] = before[old[place] : old[place] + known]
    return found


def reference_changes(
    before_starts: Numbers, before: Numbers, places: Numbers, starts: Numbers, numbers: Numbers
) -> Numbers:
    """Which of the numbers are not as guessed, and behind all these places what they are."""
    changed = np.flatnonzero(guess(before_starts, before, places, starts) != numbers)
    return np.concatenate([changed, numbers[changed]], dtype=np.int32, casting="unsafe")


def reference_changed(
    before_starts: Numbers, before: Numbers, places: Numbers, starts: Numbers, changes: Numbers
) -> Numbers:
    """The numbers of which these are the changes."""
    found = guess(before_starts, before, places, starts)
    count = len(changes) // 2
    found[changes[:count]] = changes[count:]
    return found


try:
    from bros.kernels._C import changed_segments as _changed_segments
    from bros.kernels._C import segment_changes as _segment_changes
except ImportError:  # they were not built
    segment_changes, changed_segments = reference_changes, reference_changed
else:

    def segment_changes(
        before_starts: Numbers, before: Numbers, places: Numbers, starts: Numbers, numbers: Numbers
    ) -> Numbers:
        """As reference_changes. Raises ValueError if what it is given does not fit together."""
        found = _segment_changes(before_starts, before, places, starts, numbers)
        return np.frombuffer(found, np.int32)

    def changed_segments(
        before_starts: Numbers, before: Numbers, places: Numbers, starts: Numbers, changes: Numbers
    ) -> Numbers:
        """As reference_changed. Raises ValueError if what it is given does not fit together."""
        found = _changed_segments(before_starts, before, places, starts, changes)
        return np.frombuffer(found, np.int32)
