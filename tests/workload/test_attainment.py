"""Definitions that all reports share: percentiles, means, and shares of what is decided."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.workload.attainment import TOLERANCE_S, Attainment, Summary, within


def interpolated(values: list[float], share: float) -> float:
    """The percentile by its definition: a point on the line through the sorted values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_percentiles_are_interpolated_linearly(values: list[float]) -> None:
    summary = Summary.of(values)
    assert summary.count == len(values)
    assert summary.mean == pytest.approx(statistics.fmean(values))
    assert summary.std == pytest.approx(statistics.pstdev(values), abs=1e-5)
    found = (summary.p50, summary.p90, summary.p95, summary.p99)
    for share, value in zip((0.5, 0.9, 0.95, 0.99), found, strict=True):
        assert value == pytest.approx(interpolated(values, share))


def test_nothing_has_no_percentiles() -> None:
    assert Summary.of([]) == Summary(0)


@given(st.lists(st.sampled_from([True, False, None])))
def test_what_is_not_decided_does_not_count(verdicts: list[bool | None]) -> None:
    share = Attainment.of(verdicts)
    assert share == Attainment(verdicts.count(True), verdicts.count(True) + verdicts.count(False))
    assert share.value == (share.met / share.decided if share.decided else None)


def test_rounding_of_times_makes_nothing_late() -> None:
    assert within(0.3, 0.1 + 0.1 + 0.1) and within(0.1 + 0.1 + 0.1, 0.3)
    assert not within(0.3 + 2 * TOLERANCE_S, 0.3)
