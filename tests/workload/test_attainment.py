"""Definitions that all reports share: percentiles, means, and shares of what is decided."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.request import Slo
from bros.workload.attainment import (
    TOLERANCE_S,
    Attainment,
    Summary,
    Timeline,
    TimelineOutcome,
    judge,
    within,
)


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


QUARTERS = st.integers(0, 12).map(lambda count: count / 4)  # exact in binary


@given(
    gaps=st.lists(QUARTERS, max_size=6),
    waited_s=QUARTERS,
    outcome=st.sampled_from(TimelineOutcome),
    slo=st.sampled_from([Slo(gap_s=1.5), Slo(tpot_s=1.0), Slo(tpot_s=0.25, gap_s=1.5), Slo(0.4)]),
)
def test_a_gap_is_missed_once_it_is_too_long_and_met_only_at_the_end(
    gaps: list[float], waited_s: float, outcome: TimelineOutcome, slo: Slo
) -> None:
    """Without an objective of its own it is one and a half intervals."""
    times = list(itertools.accumulate(gaps, initial=1.0))
    seen = Timeline(start_s=0.0, times_s=times, tokens=len(times), outcome=outcome, end_s=times[-1])
    found = judge(seen, slo, times[-1] + waited_s)
    longest_s = max([*gaps, waited_s if outcome is TimelineOutcome.OPEN else 0.0])
    if slo.tpot_s is None and slo.gap_s is None:
        assert found.gap_met is None
    elif outcome is TimelineOutcome.LOST or longest_s > 1.5:
        assert found.gap_met is False
    elif outcome is TimelineOutcome.OPEN or not gaps:
        assert found.gap_met is None
    else:
        assert (found.gap_met, found.gap_s) == (True, longest_s)


def test_a_request_that_waits_for_its_first_token_has_no_gap_yet() -> None:
    waiting = Timeline(start_s=0.0, times_s=(), tokens=0, outcome=TimelineOutcome.OPEN)
    assert judge(waiting, Slo(gap_s=1.0), 100.0).gap_met is None
