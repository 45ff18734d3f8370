"""Traces and counters against what an observer of the run saw."""

from __future__ import annotations

import bisect
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.config import POLICIES
from bros.core.interfaces import RequestTrace
from bros.core.request import FinishReason, Slo
from bros.scheduler.metrics import ClassCounters, RequestRecord
from support.virtual_time import BE, RT, VirtualRun, random_run

DEFAULT = Slo(0.4, 0.2)

random_runs = st.builds(
    random_run,
    st.sampled_from(POLICIES),
    st.integers(0, 10**6),
    requests=st.just(15),
    late=st.sampled_from(["renew", "edf"]),
)


def trace_of(run: VirtualRun, name: str) -> RequestTrace:
    trace = run.scheduler.trace(name)
    assert trace is not None
    return trace


# Waits


@given(run=random_runs)
def test_waits_add_up_to_all_the_time_a_request_did_not_run(run: VirtualRun) -> None:
    """Waiting or holding memory: whenever a step ran without it, there is a reason."""
    for name in run.requests:
        trace = trace_of(run, name)
        began = trace.events[0][0]
        ended = trace.events[-1][0]
        at, ran = 0.0, 0.0
        for plan, seconds in zip(run.plans, run.seconds, strict=True):
            if any(chunk.request_id == name for chunk in plan.chunks):
                ran += seconds
            at += seconds
        assert sum(trace.waits.values()) == pytest.approx(ended - began - ran, abs=1e-9)


@pytest.mark.parametrize(
    ("policy", "options", "first", "reason"),
    [
        ("priority", {"max_num_seqs": 1}, (20, RT), "rows"),
        ("fcfs", {"max_batch_tokens": 8}, (100, RT), "tokens"),
        ("fcfs", {"blocks": 8}, (28, RT), "memory"),
        ("rr", {}, (20, RT), "turn"),
        ("bros", {"max_num_seqs": 1, "be_share": 0.0}, (20, RT), "rows"),
    ],
)
def test_why_a_request_waited(
    policy: str, options: dict[str, object], first: tuple[int, object], reason: str
) -> None:
    run = VirtualRun(policy, **options)  # type: ignore[arg-type]
    length, service_class = first
    run.submit("first", length, service_class, salt=300)  # type: ignore[arg-type]
    run.submit("waits", 6, BE)
    run.drain()
    waits = trace_of(run, "waits").waits
    assert set(waits) == {reason}
    assert waits[reason] >= run.first_run["waits"] > 0.0


@given(random_runs)
def test_waits_cover_the_time_in_the_queue_and_not_more_than_was_lost(run: VirtualRun) -> None:
    """A request could have run whenever it was there; steps it was in are no waiting."""
    for name in run.requests:
        trace = trace_of(run, name)
        arrived_s = run.requests[name].arrival_s
        left_s = arrived_s + trace.events[-1][0]
        ran_s = sum(
            seconds
            for plan, seconds in zip(run.plans, run.seconds, strict=True)
            if any(chunk.request_id == name for chunk in plan.chunks)
        )
        waited_s = sum(trace.waits.values())
        assert waited_s <= left_s - arrived_s - ran_s + 1e-9
        queued_s = run.first_run.get(name, left_s) - arrived_s
        assert waited_s >= queued_s - 1e-9
        assert all(seconds > 0.0 for seconds in trace.waits.values())
        assert trace.waits.keys() <= {"time", "rows", "tokens", "memory", "turn"}


def test_a_row_that_does_not_fit_into_the_time_waits_too() -> None:
    run = VirtualRun(be_share=0.0)
    run.submit("be", 5, BE, max_tokens=90)
    run.step()
    run.submit("rt", 5, slo=Slo(0.4, 0.0224), max_tokens=60)
    run.steps(50)
    lost_s = sum(
        seconds
        for plan, seconds in zip(run.plans, run.seconds, strict=True)
        if all(chunk.request_id != "be" for chunk in plan.chunks)
    )
    assert lost_s > 0.1
    assert trace_of(run, "be").waits == {"time": pytest.approx(lost_s)}


def test_a_request_that_still_waits_says_so_far() -> None:
    run = VirtualRun("priority", max_num_seqs=1)
    run.submit("first", 20, max_tokens=50)
    run.step()
    since_s = run.now
    run.submit("waits", 20)
    run.steps(3)
    assert trace_of(run, "waits").waits == {"rows": pytest.approx(run.now - since_s)}
    assert trace_of(run, "waits").finish_reason is None


# Events


@given(random_runs)
def test_events_are_in_order_and_complete(run: VirtualRun) -> None:
    for name, asked in run.requests.items():
        trace, tokens = trace_of(run, name), run.token_times[name]
        times = [at for at, _ in trace.events]
        what = [event for _, event in trace.events]
        assert times == sorted(times)
        assert what[0] == f"queued as {asked.service_class.value}"
        assert what[-1] == f"ended: {trace.finish_reason}"
        assert what.count("preempted") == trace.preemptions
        starts = what.count("starts over") + (name in run.first_run)
        starts -= what[-2] == "starts over"  # aborted while it waited to start over
        assert what.count("scheduled") == starts
        assert ("first token" in what) == bool(tokens)
        if tokens:
            first_s = tokens[0] - asked.arrival_s
            assert times[what.index("first token")] == pytest.approx(first_s)
            assert trace.ttft_s == pytest.approx(first_s)
        assert trace.output_tokens == len(tokens)
        if trace.finish_reason is FinishReason.LENGTH:
            assert len(tokens) == asked.sampling.max_tokens


def test_a_request_that_is_preempted_very_often_still_shows_its_end() -> None:
    record = RequestRecord(1.0, Slo())
    for number in range(200):
        record.event(1.0 + number, "preempted")
    record.event(500.0, "ended: stop")
    assert len(record.events) <= 64
    assert record.events[0] == (1.0, "preempted")
    assert record.events[-1] == (500.0, "ended: stop")


# Objectives


@given(random_runs)
def test_counters_equal_what_an_observer_counts(run: VirtualRun) -> None:
    stats = run.scheduler.stats()
    bounds = stats.by_class[RT].slack.bounds
    for service_class in (RT, BE):
        finished = ttft_met = tpot_met = both_met = gap_met = on_time = tokens = 0
        slack, histogram = 0.0, [0] * (len(bounds) + 1)
        for name, asked in run.requests.items():
            if asked.service_class is not service_class:
                continue
            slo = Slo(asked.slo.ttft_s or 0.4, asked.slo.tpot_s or 0.2)
            if service_class is BE:
                slo = Slo(math.inf, math.inf)
            assert slo.ttft_s is not None and slo.tpot_s is not None
            deadline_s, most = asked.slo.deadline_s, asked.sampling.max_tokens
            if deadline_s is not None and service_class is RT and most > 1:
                scale = min(1.0, deadline_s / (slo.ttft_s + (most - 1) * slo.tpot_s))
                slo = Slo(scale * slo.ttft_s, scale * slo.tpot_s)
            times = run.token_times[name]
            due_s = asked.arrival_s + slo.ttft_s
            for at in times:
                tokens += 1
                on_time += at <= due_s
                if due_s < math.inf:
                    slack += due_s - at
                    histogram[bisect.bisect_left(bounds, due_s - at)] += 1
                due_s = at + slo.tpot_s
            if len(times) != asked.sampling.max_tokens:
                continue  # aborted
            finished += 1
            first = times[0] - asked.arrival_s <= slo.ttft_s
            gaps = len(times) - 1
            pace = gaps == 0 or (times[-1] - times[0]) / gaps <= slo.tpot_s
            ttft_met, tpot_met = ttft_met + first, tpot_met + pace
            both_met += first and pace
            longest_s = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
            gap_met += longest_s <= 1.5 * slo.tpot_s
            trace = trace_of(run, name)
            assert trace.longest_gap_s == (longest_s if gaps else None)
        got = stats.by_class[service_class]
        assert (got.finished, got.ttft_met, got.tpot_met, got.both_met, got.gap_met) == (
            finished, ttft_met, tpot_met, both_met, gap_met
        )  # fmt: skip
        assert (got.output_tokens, got.tokens_on_time) == (tokens, on_time)
        assert got.slack.counts == tuple(histogram)
        assert got.slack.total == pytest.approx(slack)
        assert sum(got.slack.counts) == (tokens if service_class is RT else 0)


quarters = st.integers(0, 32).map(lambda count: count / 4)  # exact in binary


@given(
    resumed=st.integers(1, 6),
    tpot=quarters,
    before=quarters,
    deadline=quarters,
    gaps=st.lists(quarters, min_size=1, max_size=6),
)
def test_a_resumed_request_is_held_to_what_one_is_that_was_on_pace_until_then(
    resumed: int, tpot: float, before: float, deadline: float, gaps: list[float]
) -> None:
    slo = Slo(1.0, tpot, deadline)
    whole, now = RequestRecord(1.0, slo), 1.0 + before
    for number in range(resumed):
        now += tpot if number else 0.0
        whole.token(now, slo)
    late = whole.late_tokens
    rest = RequestRecord(1.0, slo, resumed, now)
    for gap in gaps:
        now += gap
        assert rest.token(now, slo) == whole.token(now, slo)
    assert rest.late_tokens == whole.late_tokens - late
    assert rest.met(slo) == (True, whole.met(slo)[1])
    assert rest.met_deadline(slo) == whole.met_deadline(slo)


@given(random_runs)
def test_step_sums_equal_what_an_observer_counts(run: VirtualRun) -> None:
    stats = run.scheduler.stats()
    assert stats.steps == len(run.plans)
    assert stats.step_s == pytest.approx(sum(run.seconds))
    assert stats.kv_blocks_used == 0
    for service_class in (RT, BE):
        names = [n for n, r in run.requests.items() if r.service_class is service_class]
        traces = [trace_of(run, name) for name in names]
        counted = stats.by_class[service_class]
        assert counted.preemptions == sum(trace.preemptions for trace in traces)
        late = sum(trace.late_tokens for trace in traces)
        assert counted.output_tokens - counted.tokens_on_time == late
        served = [trace for trace in traces if trace.output_tokens]
        assert counted.prompt_tokens == sum(trace.prompt_tokens for trace in served)


def test_slack_on_a_bound_counts_below_it_and_far_away_in_the_last_bucket() -> None:
    counters = ClassCounters()
    for slack_s in (-99.0, -10.0, 0.0, 0.2, 0.21, 99.0, math.inf):
        counters.note_tokens([slack_s])
    got = counters.snapshot(0, 0, 0, 0, {}).slack
    counts = dict(zip(got.bounds, got.counts, strict=False))
    assert (counts[-10.0], counts[0.0], counts[0.2], counts[0.3]) == (2, 1, 1, 1)
    assert got.counts[-1] == 1 and sum(got.counts) == 6


@given(st.lists(st.floats(0.0, 500.0), max_size=50), st.floats(500.0, 600.0))
def test_retry_after_is_a_recent_interval_within_bounds(times: list[float], now: float) -> None:
    counters = ClassCounters()
    for at in sorted(times):
        counters.note_departure(at)
    recent = sorted(times)[-32:]
    expected = math.ceil((now - recent[0]) / len(recent)) if recent else 1
    assert counters.retry_after_s(now) == min(max(expected, 1), 60)
