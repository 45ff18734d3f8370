"""How fast rows get done, when a job will be, and how urgent its rows are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.batch.pacing import Backlog, JobPace, Throughput


def test_the_rate_is_unknown_until_some_rows_are_done() -> None:
    throughput = Throughput()
    assert throughput.rate(0.0) is None
    throughput.began(0.0)
    for second in range(1, 4):
        throughput.note(float(second), 100)
        assert throughput.rate(float(second)) is None
    throughput.note(4.0, 100)
    assert throughput.rate(4.0) == pytest.approx(100.0)


def test_time_without_work_does_not_count() -> None:
    throughput = Throughput()
    throughput.began(0.0)
    for second in range(1, 5):
        throughput.note(float(second), 100)
    throughput.began(1_000.0)
    assert throughput.rate(1_000.0) is None
    for second in range(1, 5):
        throughput.note(1_000.0 + second, 50)
    assert throughput.rate(1_004.0) == pytest.approx(50.0)


def test_rows_that_are_all_done_at_once_have_a_rate() -> None:
    throughput = Throughput()
    throughput.began(5.0)
    for _ in range(4):
        throughput.note(5.0, 100)
    rate = throughput.rate(5.0)
    assert rate is not None and rate > 0


@given(
    gaps=st.lists(st.floats(0.01, 40.0), min_size=4, max_size=60),
    tokens=st.integers(1, 10_000),
    later_s=st.floats(0.0, 30.0),
)
def test_the_rate_is_of_what_was_done_in_the_last_minute(
    gaps: list[float], tokens: int, later_s: float
) -> None:
    throughput, now, ends = Throughput(), 0.0, []
    throughput.began(now)
    for gap in gaps:
        now += gap
        ends.append(now)
        throughput.note(now, tokens)
    recent = [end for end in ends if end >= now - 60.0]
    before = [0.0, *(end for end in ends if end < now - 60.0)]
    if len(recent) < 4:
        assert throughput.rate(now) is None
    else:
        expected = tokens * len(recent) / (now + later_s - before[-1])
        assert throughput.rate(now + later_s) == pytest.approx(expected)


def test_a_job_learns_the_size_of_its_rows() -> None:
    pace = JobPace(10, deadline_s=100.0)
    assert pace.tokens_per_row is None
    pace.note(100, 1.0)
    pace.note(300, 1.0)
    assert pace.tokens_per_row == 200
    assert pace.remaining == 8


def test_a_row_is_due_when_the_job_is_on_schedule() -> None:
    pace = JobPace(10, deadline_s=100.0)
    assert pace.due_in_s(0.0, in_flight=1) == pytest.approx(10.0)
    assert pace.due_in_s(0.0, in_flight=4) == pytest.approx(40.0)
    assert pace.due_in_s(0.0, in_flight=0) == pytest.approx(10.0)
    assert pace.due_in_s(50.0, in_flight=1) == pytest.approx(5.0)


def test_the_schedule_does_not_wait_for_slow_rows() -> None:
    """Else a batch that is slowed down would be given ever more time."""
    pace = JobPace(10, deadline_s=100.0)
    pace.note(100, 60.0)
    assert pace.schedule_s(10.0, in_flight=2) == pytest.approx(20.0)
    assert pace.due_in_s(10.0, in_flight=2) == pytest.approx(120.0)
    assert pace.schedule_s(200.0, in_flight=2) == 0.0


def test_a_late_row_is_given_twice_what_rows_take_and_never_nothing() -> None:
    pace = JobPace(10, deadline_s=100.0)
    assert pace.due_in_s(200.0, in_flight=8) == 1.0
    pace.note(100, 4.0)
    pace.note(100, 8.0)
    assert pace.due_in_s(200.0, in_flight=8) == pytest.approx(12.0)


def test_more_rows_than_a_job_had_do_no_harm() -> None:
    """Rows are counted by who runs them; a former owner may have stored some more."""
    pace = JobPace(0, deadline_s=100.0)
    pace.note(10, 1.0)
    assert pace.due_in_s(0.0, in_flight=1) == pytest.approx(100.0)


@given(
    remaining=st.integers(1, 1_000),
    deadline_s=st.floats(1.0, 1e6),
    steps=st.lists(st.floats(0.0, 1e5), min_size=2, max_size=10).map(sorted),
    in_flight=st.integers(0, 256),
)
def test_the_nearer_the_deadline_the_more_urgent(
    remaining: int, deadline_s: float, steps: list[float], in_flight: int
) -> None:
    pace = JobPace(remaining, deadline_s)
    dues = [pace.due_in_s(now, in_flight) for now in steps]
    assert dues == sorted(dues, reverse=True)
    assert dues[-1] >= 1.0


def _seconds(rate: float | None, *jobs: JobPace) -> float | None:
    backlog = Backlog()
    for job in jobs:
        backlog.add(job)
    return backlog.seconds(rate)


def test_how_long_it_takes_is_unknown_without_a_rate_or_a_row() -> None:
    fresh, known = JobPace(10, 100.0), JobPace(10, 100.0)
    known.note(100, 1.0)
    assert _seconds(None, known) is None
    assert _seconds(10.0, fresh) is None


def test_what_jobs_have_left_adds_up_and_unknown_rows_are_like_known_ones() -> None:
    mine, first, fresh = JobPace(11, 300.0), JobPace(21, 100.0), JobPace(5, 200.0)
    mine.note(100, 1.0)
    first.note(300, 1.0)
    assert _seconds(50.0, mine) == pytest.approx(10 * 100 / 50)
    assert _seconds(50.0, mine, first) == pytest.approx((1_000 + 6_000) / 50)
    # 5 rows of (100 + 300) / 2 tokens.
    assert _seconds(50.0, mine, first, fresh) == pytest.approx((1_000 + 6_000 + 1_000) / 50)
