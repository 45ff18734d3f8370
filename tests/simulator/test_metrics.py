"""Every figure of a report against records made by hand and a naive recomputation."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.interfaces import ClassStats, EngineStats
from bros.core.request import FinishReason, ServiceClass, Slo
from bros.simulator.metrics import ClassReport, Report, report_of
from bros.simulator.simulation import SimulatedRequest, SimulationResult, Totals
from bros.workload.arrivals import Size
from bros.workload.attainment import Attainment

SLO = Slo(ttft_s=1.0, tpot_s=0.5)
END_S = 10.0
DONE = FinishReason.LENGTH


def record(
    arrival_s: float,
    times: Sequence[float],
    finish: FinishReason | None = DONE,
    *,
    prompt: int = 10,
    output: int = 100,
    refused: bool = False,
    service_class: ServiceClass = ServiceClass.RT,
) -> SimulatedRequest:
    """output: of a request that has not finished."""
    size = Size(prompt, len(times) if finish is DONE else output)
    return SimulatedRequest(
        "x", service_class, arrival_s, size, array("d", times), finish, refused=refused
    )


def result_of(
    *records: SimulatedRequest,
    stats: EngineStats | None = None,
    warm_up_s: float = 0.0,
    warm_up: Totals | None = None,
) -> SimulationResult:
    return SimulationResult(
        records=records,
        end_s=END_S,
        busy_s=8.0,
        idle_s=2.0,
        steps=40,
        stats=stats or EngineStats(),
        warm_up_s=warm_up_s,
        warm_up=warm_up or Totals(),
    )


def real_time(*records: SimulatedRequest) -> ClassReport:
    return report_of(result_of(*records), SLO).by_class[ServiceClass.RT]


def test_report_of_finished_requests() -> None:
    report = real_time(
        record(0.0, [1.0, 1.25, 1.5]),  # ttft 1.0, tpot 0.25
        record(1.0, [2.5, 4.0]),  # ttft 1.5 late, tpot 1.5 late
        record(2.0, [2.5, 2.75, 3.75], prompt=30),  # ttft 0.5, tpot 0.625 late, one gap late
        record(3.0, [3.5]),  # a single token: no tpot
    )
    assert (report.requests, report.finished, report.unfinished, report.refused) == (4, 4, 0, 0)
    assert report.ttft_met == Attainment(3, 4)
    assert report.tpot_met == Attainment(1, 3)
    assert report.both_met == Attainment(2, 4)
    # First tokens 3 of 4; gaps 2 of 2, 0 of 1, 1 of 2.
    assert report.tokens_on_time == Attainment(6, 9)
    assert report.ttft_s.mean == pytest.approx((1.0 + 1.5 + 0.5 + 0.5) / 4)
    assert report.tpot_s.mean == pytest.approx((0.25 + 1.5 + 0.625) / 3)
    assert report.normalized_latency_s == pytest.approx((1.5 / 3 + 3 / 2 + 1.75 / 3 + 0.5) / 4)
    assert report.requests_per_s == 0.4
    assert report.output_tokens_per_s == 0.9
    assert report.tokens_per_s == pytest.approx((9 + 60) / 10)


def test_open_requests_that_are_overdue_count_as_missed() -> None:
    report = real_time(record(8.0, [], None))
    assert (report.finished, report.unfinished) == (0, 1)
    assert report.ttft_met == Attainment(0, 1) and report.both_met == Attainment(0, 1)
    assert report.tpot_met == Attainment(0, 0) and report.tpot_met.value is None
    assert report.ttft_s.mean == 2.0  # at least
    assert report.tokens_on_time == Attainment(0, 1)
    assert report.normalized_latency_s is None


def test_open_requests_that_may_still_make_it_are_left_out() -> None:
    report = real_time(record(9.5, [], None), record(9.0, [9.5, 9.75], None))
    assert report.unfinished == 2
    assert report.ttft_met == Attainment(1, 1)
    assert report.tpot_met == report.both_met == Attainment(0, 0)
    assert report.tokens_on_time == Attainment(2, 2)
    assert report.ttft_s.count == 1 and report.tpot_s.count == 0


def test_an_open_request_can_have_missed_its_tpot_already() -> None:
    # Three tokens by 6.0 and none since: the fourth makes it (10 - 5) / 3 at best.
    report = real_time(record(4.5, [5.0, 5.5, 6.0], None, output=4))
    assert report.ttft_met == Attainment(1, 1)
    assert report.tpot_met == report.both_met == Attainment(0, 1)
    assert report.tpot_s.mean == pytest.approx(5 / 3)
    assert report.tokens_on_time == Attainment(3, 4)


def test_an_open_request_whose_other_tokens_can_make_up_for_it_is_not_late_yet() -> None:
    report = real_time(record(4.5, [5.0, 5.5, 6.0], None, output=12))  # 5 / 11 at best
    assert report.tpot_met == report.both_met == Attainment(0, 0)
    assert report.tpot_s.count == 0
    assert report.tokens_on_time == Attainment(3, 4)


def test_refused_requests_are_missed_be_it_on_arrival_or_later() -> None:
    report = real_time(record(9.9, [], None, refused=True), record(9.9, [], FinishReason.ERROR))
    assert (report.requests, report.refused, report.unfinished, report.finished) == (2, 2, 0, 0)
    assert report.ttft_met == report.tpot_met == report.both_met == Attainment(0, 2)
    assert report.ttft_s.count == 0


def test_a_request_dropped_on_the_way_is_missed_but_its_first_token_was_in_time() -> None:
    report = real_time(record(1.0, [1.5, 1.6], FinishReason.ERROR))
    assert report.ttft_met == Attainment(1, 1)
    assert report.tpot_met == report.both_met == Attainment(0, 1)
    assert report.tokens_per_s == pytest.approx(12 / 10)


def test_best_effort_is_held_to_nothing() -> None:
    be = ServiceClass.BE
    stats = EngineStats(by_class={be: ClassStats(preemptions=7, relegated=3)})
    result = result_of(
        record(0.0, [5.0, 9.0], service_class=be),
        record(0.0, [], None, service_class=be),
        stats=stats,
    )
    report = report_of(result, SLO).by_class[be]
    assert (report.preemptions, report.relegated) == (7, 3)
    shares = (report.ttft_met, report.tpot_met, report.both_met, report.tokens_on_time)
    assert set(shares) == {Attainment(0, 0)}
    assert report.ttft_s.mean == 5.0 and report.tpot_s.mean == 4.0
    assert report_of(result, SLO).by_class[ServiceClass.RT].requests == 0


def test_figures_of_the_whole_run() -> None:
    report: Report = report_of(result_of(record(0.0, [1.0])), SLO)
    assert (report.end_s, report.idle_s, report.steps) == (10.0, 2.0, 40)
    assert report.busy == 0.8
    assert report.mean_step_s == 0.2


def test_a_deadline_met_to_the_rounding_is_met() -> None:
    assert real_time(record(0.1 + 0.2, [1.3])).ttft_met == Attainment(1, 1)


def test_digest_tells_records_apart() -> None:
    digests = {
        result_of(*records).digest()
        for records in (
            [],
            [record(0.0, [1.0, 2.0])],
            [record(0.0, [1.0, 2.0 + 1e-15])],
            [record(0.0, [1.0]), record(0.0, [2.0])],
            [record(0.0, [1.0, 2.0], None)],
            [record(0.0, [1.0, 2.0], prompt=11)],
            [record(0.5, [1.0, 2.0])],
        )
    }
    assert len(digests) == 7
    assert result_of(record(0.0, [1.0])).digest() == result_of(record(0.0, [1.0])).digest()


gaps = st.lists(st.floats(0.001, 1.5), min_size=1, max_size=12)


@given(st.lists(st.tuples(st.floats(0, 5), gaps), min_size=1, max_size=10))
def test_against_a_naive_recomputation(drawn: list[tuple[float, list[float]]]) -> None:
    records = []
    for arrival_s, steps in drawn:
        times, now = [], arrival_s
        for step in steps:
            now += step
            times.append(now)
        records.append(record(arrival_s, times))
    ttfts = [r.token_times_s[0] - r.arrival_s for r in records]
    tpots = [
        (r.token_times_s[-1] - r.token_times_s[0]) / (len(r.token_times_s) - 1)
        if len(r.token_times_s) > 1
        else None
        for r in records
    ]
    close = any(abs(ttft - 1.0) < 1e-6 for ttft in ttfts)
    if close or any(tpot is not None and abs(tpot - 0.5) < 1e-6 for tpot in tpots):
        return  # rounding decides
    report = real_time(*records)
    assert report.ttft_met.met == sum(ttft <= 1.0 for ttft in ttfts)
    assert report.tpot_met.met == sum(t is not None and t <= 0.5 for t in tpots)
    assert report.both_met.met == sum(
        ttft <= 1.0 and (tpot is None or tpot <= 0.5)
        for ttft, tpot in zip(ttfts, tpots, strict=True)
    )
    assert report.ttft_met.decided == report.both_met.decided == len(records)
    assert report.tokens_on_time.decided == sum(len(r.token_times_s) for r in records)
    assert report.normalized_latency_s == pytest.approx(
        sum((r.token_times_s[-1] - r.arrival_s) / len(r.token_times_s) for r in records)
        / len(records)
    )


def test_a_warm_up_is_left_out() -> None:
    records = (
        record(0.5, [1.0, 4.0, 4.5]),  # arrived before, two tokens and its end after
        record(1.5, [1.8, 1.9], prompt=99),  # all before
        record(2.0, [2.5, 3.0], prompt=20),
        record(3.0, [9.0, 9.5], prompt=7),  # late
        record(9.9, [], None),
    )
    report = report_of(result_of(*records, warm_up_s=2.0), SLO).by_class[ServiceClass.RT]
    assert (report.requests, report.finished, report.unfinished) == (3, 2, 1)
    assert report.ttft_met == Attainment(1, 2)
    assert report.normalized_latency_s == pytest.approx((0.5 + 3.25) / 2)
    seconds = END_S - 2.0
    assert report.requests_per_s == pytest.approx(3 / seconds)
    assert report.output_tokens_per_s == pytest.approx((2 + 2 + 2) / seconds)
    assert report.tokens_per_s == pytest.approx((2 + 2 + 2 + 20 + 7) / seconds)


def test_what_the_engine_did_in_the_warm_up_is_left_out() -> None:
    rt, be = ServiceClass.RT, ServiceClass.BE
    before = EngineStats(
        suspended_steps=2,
        suspended_s=0.25,
        by_class={rt: ClassStats(relegated=4), be: ClassStats(preemptions=7)},
    )
    stats = EngineStats(
        suspended_steps=5,
        suspended_s=1.0,
        by_class={rt: ClassStats(relegated=6, preemptions=1), be: ClassStats(preemptions=10)},
    )
    # A step was running when the warm-up ended at 2.0, and took another half second.
    warm_up = Totals(time_s=2.5, busy_s=2.25, idle_s=0.25, steps=30, stats=before)
    report = report_of(result_of(stats=stats, warm_up_s=2.0, warm_up=warm_up), SLO)
    assert report.end_s == END_S
    assert report.busy == pytest.approx((8.0 - 2.25) / (END_S - 2.5))
    assert report.idle_s == 1.75
    assert report.steps == 10
    assert (report.suspended_steps, report.suspended_s) == (3, 0.75)
    assert report.mean_step_s == pytest.approx((8.0 - 2.25 - 0.75) / 10)
    counts = {cls: (part.relegated, part.preemptions) for cls, part in report.by_class.items()}
    assert counts == {rt: (2, 1), be: (0, 3)}


def test_suspended_steps_are_not_in_the_mean_of_completed_ones() -> None:
    report = report_of(result_of(stats=EngineStats(suspended_steps=8, suspended_s=2.0)), SLO)
    assert (report.steps, report.suspended_steps, report.suspended_s) == (40, 8, 2.0)
    assert report.busy == 0.8
    assert report.mean_step_s == pytest.approx(6.0 / 40)
