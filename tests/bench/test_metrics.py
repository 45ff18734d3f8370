"""Figures of a run against a second, naive reckoning of them, and what nothing looks like."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bros.bench.client import Outcome, Record
from bros.bench.metrics import Window, be_efficiency, judge, measure, rt_tax
from bros.core.request import ServiceClass, Slo
from bros.workload.attainment import Attainment, Summary
from support.bench_records import BE, RT, SLO, make_record

WINDOW = Window(10.0, 50.0, 60.0)
LOST = (Outcome.CUT, Outcome.REFUSED, Outcome.FAILED)


@st.composite
def records_of_a_run(draw: st.DrawFn) -> list[Record]:
    """Times in milliseconds, so that no verdict hangs on the last bit."""
    seconds = st.integers(1, 3000).map(lambda n: n / 1000)
    found = []
    for number in range(draw(st.integers(0, 12))):
        outcome = draw(st.sampled_from(Outcome))
        gaps = draw(st.lists(seconds, max_size=8))
        due = draw(st.integers(0, 55_000)) / 1000
        sent = due + draw(st.integers(0, 20)) / 1000
        never_sent = outcome is Outcome.OPEN and not gaps and draw(st.booleans())
        found.append(
            make_record(
                draw(st.sampled_from(ServiceClass)),
                name=f"r{number}",
                due_s=due,
                sent_s=sent,
                gaps_s=gaps,
                outcome=outcome,
                output_tokens=draw(st.none() | st.integers(len(gaps), 2 * len(gaps) + 1)),
                planned_tokens=draw(st.integers(1, 20)),
                prompt_tokens=draw(st.integers(1, 50)),
                never_sent=never_sent,
                own=draw(st.sampled_from((Slo(), Slo(ttft_s=1.0), Slo(ttft_s=0.9, tpot_s=1.1)))),
                cached_tokens=draw(st.none() | st.integers(0, 9)),
                tier=draw(st.sampled_from((None, "default", "flex"))),
                detail=draw(st.sampled_from((None, "broken", "too many"))),
            )  # fmt: skip
        )
    return found


class Oracle:
    """One request, by the definitions alone."""

    def __init__(self, record: Record, slo: Slo) -> None:
        self.record = record
        self.times = list(record.chunk_times_s)
        self.start = record.due_s  # however late it was sent
        self.done = record.outcome is Outcome.COMPLETED
        self.lost = record.outcome in LOST
        self.tokens = len(self.times) if record.output_tokens is None else record.output_tokens
        self.last = self.times[-1] if self.times else record.end_s
        real_time = record.planned.service_class is RT
        own = record.planned.slo
        self.ttft_limit = (own.ttft_s or slo.ttft_s) if real_time else None
        self.tpot_limit = (own.tpot_s or slo.tpot_s) if real_time else None

    @property
    def ttft(self) -> float | None:
        if self.times:
            return self.times[0] - self.start
        so_far = WINDOW.until_s - self.start
        late = self.ttft_limit is not None and so_far > self.ttft_limit + 1e-9
        return so_far if late and not self.done and not self.lost else None

    @property
    def tpot(self) -> float | None:
        if self.done:
            return None if self.tokens < 2 or not self.times else self._spread(self.tokens - 1)
        if self.lost or not self.times or self.tpot_limit is None:
            return None
        most = max(self.record.planned.output_tokens, len(self.times) + 1)
        at_best = (WINDOW.until_s - self.times[0]) / (most - 1)
        return at_best if at_best > self.tpot_limit + 1e-9 else None

    def _spread(self, steps: int) -> float:
        return (self.times[-1] - self.times[0]) / steps

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def ttft_met(self) -> bool | None:
        if self.ttft_limit is None:
            return None
        if self.times:
            return self.times[0] - self.start <= self.ttft_limit + 1e-9
        if self.done:
            assert self.last is not None
            return self.last - self.start <= self.ttft_limit + 1e-9
        return False if self.lost or self.ttft is not None else None

    @property
    def tpot_met(self) -> bool | None:
        if self.tpot_limit is None:
            return None
        if self.done:
            return None if self.tpot is None else self.tpot <= self.tpot_limit + 1e-9
        return False if self.lost or self.tpot is not None else None

    @property
    def both_met(self) -> bool | None:
        if self.ttft_limit is None:
            return None
        if False in (self.ttft_met, self.tpot_met):
            return False
        return True if self.done else None

    @property
    def pieces(self) -> list[bool]:
        """A verdict for each piece of text that came or should have come."""
        found = [] if self.ttft_met is None else [self.ttft_met]
        if self.tpot_limit is None:
            return found
        found += [gap <= self.tpot_limit + 1e-9 for gap in self.gaps]
        late = WINDOW.until_s - self.times[-1] > self.tpot_limit + 1e-9 if self.times else False
        if self.times and (self.lost or (late and not self.done)):
            found.append(False)
        return found

    @property
    def arrivals(self) -> list[tuple[float, float]]:
        """(time, output tokens) of each piece."""
        if self.times:
            return [(at, self.tokens / len(self.times)) for at in self.times]
        return [(self.last, self.tokens)] if self.done and self.last is not None else []


def percentile(values: Sequence[float], p: float) -> float:
    """Between the two nearest ranks, in proportion."""
    found = sorted(values)
    at = (len(found) - 1) * p / 100
    low, high = found[math.floor(at)], found[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def check_summary(summary: Summary, values: Sequence[float | None]) -> None:
    found = [value for value in values if value is not None]
    if not found:
        assert summary == Summary(0)
        return
    assert summary.count == len(found)
    expected = [statistics.fmean(found), statistics.pstdev(found)]
    expected += [percentile(found, p) for p in (50, 90, 95, 99)]
    shown = (summary.mean, summary.std, summary.p50, summary.p90, summary.p95, summary.p99)
    assert shown == pytest.approx(expected, abs=1e-9)


def check_share(share: Attainment, verdicts: Sequence[bool | None]) -> None:
    decided = [verdict for verdict in verdicts if verdict is not None]
    assert (share.met, share.decided) == (decided.count(True), len(decided))


@given(records_of_a_run())
def test_figures_are_those_of_a_naive_reckoning(records: list[Record]) -> None:
    metrics = measure(records, SLO, WINDOW)
    for service_class, part in metrics.by_class.items():
        everything = [Oracle(r, SLO) for r in records if r.planned.service_class is service_class]
        seen = [o for o in everything if 10.0 <= o.record.due_s <= 50.0]
        done = [o for o in seen if o.done]
        check_summary(part.ttft_s, [o.ttft for o in seen])
        check_summary(part.tpot_s, [o.tpot for o in seen])
        check_summary(part.itl_s, [gap for o in seen for gap in o.gaps])
        check_summary(part.e2e_s, [(o.last or 0.0) - o.start for o in done])
        per_token = [((o.last or 0.0) - o.start) / o.tokens for o in done if o.tokens]
        check_summary(part.normalized_latency_s, per_token)
        check_share(part.ttft_met, [o.ttft_met for o in seen])
        check_share(part.tpot_met, [o.tpot_met for o in seen])
        check_share(part.both_met, [o.both_met for o in seen])
        check_share(part.tokens_on_time, [verdict for o in seen for verdict in o.pieces])
        cached = [o.record.cached_tokens for o in done if o.record.cached_tokens is not None]
        assert part.cached_tokens == (sum(cached) if cached else None)


@given(records_of_a_run())
def test_rates_are_those_of_the_window_whenever_requests_came_due(records: list[Record]) -> None:
    metrics = measure(records, SLO, WINDOW)
    for service_class, part in metrics.by_class.items():
        everything = [Oracle(r, SLO) for r in records if r.planned.service_class is service_class]
        arrivals = [arrival for o in everything for arrival in o.arrivals]
        output = sum(tokens for at, tokens in arrivals if 10.0 <= at <= 50.0)
        firsts = [(o.arrivals[0][0], o.record.planned.prompt_tokens) for o in everything
                  if o.arrivals]  # fmt: skip
        prompt = sum(tokens for at, tokens in firsts if 10.0 <= at <= 50.0)
        ended = [o for o in everything if o.done and o.last is not None and 10.0 <= o.last <= 50.0]
        assert part.output_tokens_per_s == pytest.approx(output / 40, abs=1e-9)
        assert part.prompt_tokens_per_s == pytest.approx(prompt / 40, abs=1e-9)
        assert part.requests_per_s == pytest.approx(len(ended) / 40, abs=1e-9)
        good = sum(o.both_met is True for o in ended)
        expected = good / 40 if service_class is RT else None
        assert part.goodput_per_s == (None if expected is None else pytest.approx(expected))


@given(records_of_a_run())
@example([])
def test_every_request_has_exactly_one_outcome(records: list[Record]) -> None:
    metrics = measure(records, SLO, WINDOW)
    parts = metrics.by_class.values()
    assert sum(part.requests + part.outside for part in parts) == len(records)
    for part in parts:
        assert set(part.outcomes) == set(Outcome)
        assert sum(part.outcomes.values()) == part.requests
        assert part.errors == sum(part.outcomes[outcome] for outcome in LOST)
        assert part.completed + part.errors + part.outcomes[Outcome.OPEN] == part.requests
        assert sum(part.reasons.values()) == part.errors


@given(records_of_a_run())
def test_fields_of_vllm_are_of_completed_requests_only(records: list[Record]) -> None:
    fields = measure(records, SLO, WINDOW).vllm
    seen = [Oracle(r, SLO) for r in records if 10.0 <= r.due_s <= 50.0]
    done = [o for o in seen if o.done]
    assert fields["completed"] == len(done)
    assert fields["failed"] == sum(o.lost for o in seen)
    assert fields["total_output_tokens"] == sum(o.tokens for o in done)
    assert fields["total_input_tokens"] == sum(o.record.planned.prompt_tokens for o in done)

    def lag_s(found: Oracle) -> float:
        """vLLM's times count from when a request was sent."""
        assert found.record.sent_s is not None
        return found.record.sent_s - found.record.due_s

    latencies = {
        "ttft": [o.ttft - lag_s(o) for o in done if o.ttft is not None],
        "tpot": [o.tpot for o in done],
        "itl": [gap for o in done for gap in o.gaps],
        "e2el": [(o.last or 0.0) - o.start - lag_s(o) for o in done],
    }
    for name, values in latencies.items():
        known = [1000 * value for value in values if value is not None]
        median, p99 = fields[f"median_{name}_ms"], fields[f"p99_{name}_ms"]
        if not known:
            assert median is None and p99 is None
            continue
        assert median == pytest.approx(statistics.median(known), abs=1e-6)
        assert p99 == pytest.approx(percentile(known, 99), abs=1e-6)


def test_open_request_is_decided_once_it_is_overdue() -> None:
    waiting = make_record(due_s=10.0, outcome=Outcome.OPEN)
    early, late = judge(waiting, SLO, 10.3), judge(waiting, SLO, 10.5)
    assert (early.ttft_s, early.ttft_met, early.both_met, early.overdue) == (None,) * 3 + (False,)
    assert (late.ttft_met, late.both_met, late.overdue) == (False, False, True)
    assert late.ttft_s == pytest.approx(0.5)
    begun = make_record(due_s=10.0, gaps_s=[0.3, 0.1], outcome=Outcome.OPEN)
    early, late = judge(begun, SLO, 10.6), judge(begun, SLO, 10.8)
    assert (early.ttft_met, early.tpot_met, early.both_met) == (True, None, None)
    assert (late.ttft_met, late.tpot_met, late.both_met, late.overdue) == (True, False, False, True)


def test_open_request_with_several_tokens_in_each_chunk_is_not_late_for_that() -> None:
    """Four tokens every 0.24 s are one every 0.06 s, but the client sees only chunks."""
    chunks = make_record(
        due_s=10.0, gaps_s=[0.1, *[0.24] * 30], planned_tokens=200, outcome=Outcome.OPEN
    )
    seen = judge(chunks, SLO, 17.4)
    assert (seen.ttft_met, seen.tpot_met, seen.both_met) == (True, None, None)
    assert (seen.tpot_s, seen.overdue) == (None, False)
    late = judge(chunks, SLO, 10.1 + 199 * 0.2 + 0.01)  # even if all tokens came then
    assert (late.tpot_met, late.overdue) == (False, True)


@pytest.mark.parametrize("outcome", LOST)
def test_lost_request_is_missed_even_if_its_tokens_were_in_time(outcome: Outcome) -> None:
    part = measure([make_record(due_s=20.0, gaps_s=[0.1] * 4, outcome=outcome)], SLO, WINDOW)
    rt = part.by_class[RT]
    assert (rt.ttft_met, rt.tpot_met, rt.both_met) == (
        Attainment(1, 1),
        Attainment(0, 1),
        Attainment(0, 1),
    )
    assert rt.tokens_on_time == Attainment(4, 5)
    assert rt.ttft_s.count == 1


def test_answer_after_the_window_counts_for_latency_and_not_for_rates() -> None:
    record = make_record(due_s=49.0, gaps_s=[0.2, 2.0])
    rt = measure([record], SLO, WINDOW).by_class[RT]
    assert rt.completed == 1
    assert rt.e2e_s.p50 == pytest.approx(2.2)
    assert (rt.requests_per_s, rt.goodput_per_s) == (0.0, 0.0)
    assert rt.output_tokens_per_s == pytest.approx(1 / 40)


def test_request_that_came_before_the_window_counts_for_rates_only() -> None:
    record = make_record(due_s=9.0, gaps_s=[0.2, 0.1, 2.0])
    rt = measure([record], SLO, WINDOW).by_class[RT]
    assert (rt.requests, rt.outside, rt.ttft_s, rt.both_met) == (0, 1, Summary(0), Attainment(0, 0))
    assert rt.requests_per_s == pytest.approx(1 / 40)
    assert rt.output_tokens_per_s == pytest.approx(1 / 40)
    assert rt.prompt_tokens_per_s == 0.0


def test_answer_without_pieces_counts_when_it_ends() -> None:
    be = measure([make_record(BE, due_s=20.0, end_s=25.0, output_tokens=80)], SLO, WINDOW)
    part = be.by_class[BE]
    assert part.output_tokens_per_s == pytest.approx(2.0)
    assert part.prompt_tokens_per_s == pytest.approx(8 / 40)
    assert (part.ttft_s, part.tpot_s) == (Summary(0), Summary(0))
    assert part.normalized_latency_s.mean == pytest.approx(5 / 80)


def test_one_token_has_a_first_token_time_only() -> None:
    rt = measure([make_record(due_s=20.0, gaps_s=[0.1])], SLO, WINDOW).by_class[RT]
    assert (rt.ttft_s.count, rt.tpot_s, rt.itl_s) == (1, Summary(0), Summary(0))
    assert (rt.tpot_met, rt.both_met) == (Attainment(0, 0), Attainment(1, 1))


def test_nothing_is_none_and_not_nan() -> None:
    metrics = measure([], Slo(), WINDOW)
    for part in metrics.by_class.values():
        assert part.ttft_s == part.e2e_s == Summary(0)
        assert part.both_met.value is None
        assert part.goodput_per_s is None
        assert part.tokens_per_s == 0.0
        assert be_efficiency(part, part) is None
    assert metrics.vllm["median_ttft_ms"] is None
    tax = rt_tax(metrics.by_class[RT], metrics.by_class[RT])
    assert (tax.both_met, tax.ttft_p99_s) == (None, None)


def test_objectives_of_a_request_go_before_those_of_the_run() -> None:
    own = make_record(due_s=20.0, gaps_s=[0.5], own=Slo(ttft_s=0.6))
    rt = measure([own, make_record(due_s=20.0, gaps_s=[0.5])], SLO, WINDOW).by_class[RT]
    assert rt.ttft_met == Attainment(1, 2)


def test_best_effort_work_is_held_to_nothing() -> None:
    slow = make_record(BE, due_s=20.0, gaps_s=[9.0, 9.0], own=Slo(ttft_s=0.1))
    be = measure([slow], SLO, WINDOW).by_class[BE]
    assert (be.both_met, be.tokens_on_time, be.goodput_per_s) == (
        Attainment(0, 0),
        Attainment(0, 0),
        None,
    )


def test_requests_served_in_another_class_are_counted() -> None:
    tiers = ["default", "flex", "flex", None]
    records = [make_record(due_s=20.0, gaps_s=[0.1], tier=tier) for tier in tiers]
    records.append(make_record(BE, due_s=20.0, gaps_s=[0.1], tier="flex"))
    metrics = measure(records, SLO, WINDOW)
    assert metrics.by_class[RT].tiers == {"default": 1, "flex": 2}
    assert metrics.by_class[RT].relegated == 2
    assert metrics.by_class[BE].relegated == 0


def test_rare_reasons_are_summed_up() -> None:
    records = [
        make_record(name=f"{kind}-{n}", due_s=20.0, outcome=Outcome.FAILED, detail=f"reason {kind}")
        for kind in range(8)
        for n in range(9 - kind)
    ]
    records.append(make_record(due_s=20.0, outcome=Outcome.REFUSED, status=429))
    reasons = measure(records, SLO, WINDOW).by_class[RT].reasons
    assert reasons == {**{f"reason {kind}": 9 - kind for kind in range(5)}, "other reasons": 10}
    [alone] = measure(records[-1:], SLO, WINDOW).by_class[RT].reasons
    assert alone == "refused, HTTP 429"


def test_tax_and_efficiency_compare_two_runs() -> None:
    alone = measure([make_record(due_s=20.0, gaps_s=[0.1, 0.1])], SLO, WINDOW)
    both = [make_record(due_s=20.0, gaps_s=[0.3, 0.15]), make_record(due_s=20.0, gaps_s=[0.5])]
    both.append(make_record(BE, due_s=20.0, gaps_s=[1.0]))
    mixed = measure(both, SLO, WINDOW)
    free = measure([make_record(BE, due_s=20.0, gaps_s=[1.0])] * 4, SLO, WINDOW)
    tax = rt_tax(mixed.by_class[RT], alone.by_class[RT])
    assert tax.both_met == pytest.approx(-0.5)
    assert tax.ttft_p50_s == pytest.approx(0.3)
    assert tax.tpot_p99_s == pytest.approx(0.05)
    assert be_efficiency(mixed.by_class[BE], free.by_class[BE]) == pytest.approx(0.25)


@pytest.mark.parametrize("times", [(-1.0, 5.0), (5.0, 5.0), (5.0, 4.0), (0.0, 5.0, 4.0)])
def test_no_window_without_time(times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="not a window"):
        Window(*times)
