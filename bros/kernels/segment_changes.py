"""Encodes the segments of a step as differences from a prediction, the segments of the step before.

    before       [ row a | row b | row c ]
    previous_rows  1, -1, 0: the new rows were b, none (a new request) and a
    prediction   [ row b, padded with 0 or cut | 0 ... | row a, padded with 0 or cut ]

A row has three numbers for each of its segments; `starts` counts segments. The compiled functions
take some ten microseconds for 64 rows of 4,096 tokens, the Python functions ten times as long.
"""

from __future__ import annotations

import numpy as np
import torch  # noqa: F401  must be imported first, as in cpu_ops.py
from numpy.typing import NDArray

Numbers = NDArray[np.int32]

_WIDTH = 3


def predict(
    before_starts: Numbers, before: Numbers, previous_rows: Numbers, starts: Numbers
) -> Numbers:
    """int32 [3 * starts[-1]], the predicted numbers of all rows.

    before_starts, before: [rows before + 1] and [3 * before_starts[-1]], of the previous step.
    previous_rows: [rows], the index of each row in the previous step, -1 for a new row.
    starts: [rows + 1], of this step.
    """
    predicted = np.zeros(_WIDTH * int(starts[-1]), np.int32)
    bounds, old = (_WIDTH * starts).tolist(), (_WIDTH * before_starts).tolist()
    for row, begin, end in zip(previous_rows.tolist(), bounds[:-1], bounds[1:], strict=True):
        if row >= 0:
            known = min(end - begin, old[row + 1] - old[row])
            predicted[begin : begin + known] = before[old[row] : old[row] + known]
    return predicted


def reference_segment_changes(
    before_starts: Numbers,
    before: Numbers,
    previous_rows: Numbers,
    starts: Numbers,
    numbers: Numbers,
) -> Numbers:
    """The indexes of numbers that differ from the prediction, then the values of these numbers."""
    changed = np.flatnonzero(predict(before_starts, before, previous_rows, starts) != numbers)
    return np.concatenate([changed, numbers[changed]], dtype=np.int32, casting="unsafe")


def reference_changed_segments(
    before_starts: Numbers,
    before: Numbers,
    previous_rows: Numbers,
    starts: Numbers,
    changes: Numbers,
) -> Numbers:
    """The numbers from which reference_segment_changes made these changes."""
    numbers = predict(before_starts, before, previous_rows, starts)
    count = len(changes) // 2
    numbers[changes[:count]] = changes[count:]
    return numbers


try:
    from bros.kernels._C import changed_segments as _changed_segments
    from bros.kernels._C import segment_changes as _segment_changes
except ImportError:  # the extension was not built
    segment_changes, changed_segments = reference_segment_changes, reference_changed_segments
else:

    def segment_changes(
        before_starts: Numbers,
        before: Numbers,
        previous_rows: Numbers,
        starts: Numbers,
        numbers: Numbers,
    ) -> Numbers:
        """As reference_segment_changes. Raises ValueError if the arguments are inconsistent."""
        found = _segment_changes(before_starts, before, previous_rows, starts, numbers)
        return np.frombuffer(found, np.int32)

    def changed_segments(
        before_starts: Numbers,
        before: Numbers,
        previous_rows: Numbers,
        starts: Numbers,
        changes: Numbers,
    ) -> Numbers:
        """As reference_changed_segments. Raises ValueError if the arguments are inconsistent."""
        found = _changed_segments(before_starts, before, previous_rows, starts, changes)
        return np.frombuffer(found, np.int32)
