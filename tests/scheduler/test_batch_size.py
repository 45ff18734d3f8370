"""The adaptive batch size as a state machine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.scheduler.policies.bros import AdaptiveBatchSize

V, F, I = "violated", "full", "idle"  # noqa: E741


def rows_after(batch: AdaptiveBatchSize, steps: Sequence[str]) -> list[int]:
    rows = []
    for what in steps:
        batch.on_step_done(violated=what == V, was_full=what != I)
        rows.append(batch.rows)
    return rows


@pytest.mark.parametrize(
    ("growth", "steps", "expected"),
    [
        # Slow start up to the cap.
        ("tcp", [F] * 6, [16, 32, 64, 100, 100, 100]),
        # A violation halves the batch and ends the doubling for good.
        ("tcp", [F, F, F, V, F, F, V, V, F], [16, 32, 64, 32, 33, 34, 17, 8, 9]),
        ("tcp", [V, V, F], [8, 8, 9]),
        # Only steps that were full count.
        ("tcp", [I, F, I, I, F], [8, 16, 16, 16, 32]),
        ("additive", [F, F, I, F, V, F], [9, 10, 10, 11, 8, 9]),
    ],
)  # fmt: skip
def test_traces(growth: str, steps: list[str], expected: list[int]) -> None:
    batch = AdaptiveBatchSize(8, 100, growth)
    assert batch.rows == 8
    assert rows_after(batch, steps) == expected
    assert batch.resets == steps.count(V)


def test_additive_growth_stops_at_the_cap() -> None:
    assert rows_after(AdaptiveBatchSize(8, 10, "additive"), [F] * 4) == [9, 10, 10, 10]


def test_a_cap_below_the_initial_size_holds() -> None:
    assert rows_after(AdaptiveBatchSize(8, 3), [F, V, F, F]) == [3, 3, 3, 3]


@given(
    st.integers(1, 20),
    st.integers(1, 300),
    st.sampled_from(["tcp", "additive"]),
    st.lists(st.sampled_from([V, F, F, F, I]), max_size=60),
)
def test_bounds_always_hold_and_a_violation_always_shrinks(
    initial: int, most: int, growth: str, steps: list[str]
) -> None:
    batch = AdaptiveBatchSize(initial, most, growth)
    for what in steps:
        before = batch.rows
        batch.on_step_done(violated=what == V, was_full=what != I)
        assert min(initial, most) <= batch.rows <= most
        if what == V:
            smallest = min(initial, most)
            assert batch.rows == (max(before // 2, smallest) if growth == "tcp" else smallest)
        elif what == I:
            assert batch.rows == before
        else:
            grown = batch.rows - before
            assert grown >= (before < most)
            assert batch.rows <= 2 * before and (growth == "tcp" or grown <= 1)
