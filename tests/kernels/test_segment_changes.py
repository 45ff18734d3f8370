"""What has changed of the segments of a step, said and understood in two ways."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bros.kernels import segment_changes as module

try:
    from bros.kernels import _C
except ImportError:
    _C = None  # type: ignore[assignment]

Numbers = NDArray[np.int32]
Rows = list[list[int]]
WIDTH = 3

needs_compiled = pytest.mark.skipif(_C is None, reason="the kernels were not built")


@st.composite
def histories(draw: st.DrawFn) -> tuple[Rows, list[int], Rows]:
    """Rows of a step, places of those of the next one, and what these are: mostly as they were."""
    number = st.integers(0, 3)

    def segments(count: int) -> list[int]:
        return draw(st.lists(number, min_size=WIDTH * count, max_size=WIDTH * count))

    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 60]), max_size=5))
    before = [segments(size) for size in sizes]
    places = draw(st.lists(st.integers(-1, len(before) - 1), max_size=6))
    now = []
    for place in places:
        row = list(before[place]) if place >= 0 else []
        row += segments(draw(st.integers(0, 2)))
        if draw(st.booleans()):
            del row[WIDTH * draw(st.integers(0, len(row) // WIDTH)) :]
        for _ in range(draw(st.integers(0, 3)) if row else 0):
            row[draw(st.integers(0, len(row) - 1))] = draw(number)
        now.append(row)
    return before, places, now


def flat(rows: Rows) -> tuple[Numbers, Numbers]:
    """(starts, numbers)"""
    starts = np.cumsum([0, *(len(row) // WIDTH for row in rows)]).astype(np.int32)
    return starts, np.array([number for row in rows for number in row], np.int32)


def naive(before: Rows, places: list[int], now: Rows) -> list[int]:
    """The changes: a number that was not there, or in a row that was not there, was 0."""
    old = [
        before[place][index] if 0 <= place and index < len(before[place]) else 0
        for place, row in zip(places, now, strict=True)
        for index in range(len(row))
    ]
    new = [number for row in now for number in row]
    changed = [index for index, number in enumerate(new) if number != old[index]]
    return [*changed, *(new[index] for index in changed)]


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        pytest.param(module.segment_changes, module.changed_segments, marks=needs_compiled),
        (module.reference_segment_changes, module.reference_changed_segments),
    ],
    ids=["compiled", "reference"],
)
@given(history=histories())
def test_changes_are_those_of_a_naive_model_and_lead_back(
    changes: Callable[..., Numbers],
    changed: Callable[..., Numbers],
    history: tuple[Rows, list[int], Rows],
) -> None:
    before, places, now = history
    old, (starts, numbers) = flat(before), flat(now)
    given_places = np.array(places, np.int32)
    found = changes(*old, given_places, starts, numbers)
    assert found.dtype == np.int32 and found.tolist() == naive(before, places, now)
    again = changed(*old, given_places, starts, found)
    assert again.dtype == np.int32 and again.flags.writeable
    assert again.tolist() == numbers.tolist()


def test_the_compiled_ones_are_used_where_they_are() -> None:
    compiled = module.segment_changes is not module.reference_segment_changes
    assert compiled == (_C is not None)


def ints(*values: int) -> Numbers:
    return np.array(values, np.int32)


OLD = (ints(0, 1, 2), ints(1, 0, 16, 2, 0, 16))
WRONG = {
    "a place that there is not": (*OLD, ints(2), ints(0, 1), ints(1, 0, 16)),
    "too few places": (*OLD, ints(), ints(0, 1), ints(1, 0, 16)),
    "starts that go back": (*OLD, ints(0, 1), ints(0, 2, 1), ints(1, 0, 16)),
    "starts that begin later": (*OLD, ints(0), ints(1, 2), ints(1, 0, 16)),
    "no starts": (*OLD, ints(), ints(), ints()),
    "starts of others": (ints(0, 3), OLD[1], ints(0), ints(0, 1), ints(1, 0, 16)),
}


@needs_compiled
@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_together_is_refused(case: str) -> None:
    *known, _ = WRONG[case]
    with pytest.raises(ValueError, match="do not fit"):
        module.segment_changes(*WRONG[case])
    with pytest.raises(ValueError, match="do not fit"):
        module.changed_segments(*known, ints())


@needs_compiled
def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        module.segment_changes(*OLD, ints(0), ints(0, 1), ints(1, 0))
    for changes in (ints(0), ints(3, 7), ints(-1, 7)):
        with pytest.raises(ValueError, match="do not fit"):
            module.changed_segments(*OLD, ints(0), ints(0, 1), changes)
    with pytest.raises(TypeError):
        module._segment_changes(*OLD)
