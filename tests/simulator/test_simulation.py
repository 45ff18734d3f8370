"""The virtual clock: what is repeated, what is conserved, what is counted."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

import numpy as np
import pytest

from bros.core.clock import ManualClock
from bros.core.config import KV_LAYOUTS, POLICIES
from bros.core.errors import ConfigError
from bros.core.plan import StepPlan
from bros.core.request import FinishReason, ServiceClass, Slo
from bros.scheduler.cost_model import CostModel, StepLoad
from bros.simulator.metrics import report_of
from bros.simulator.simulation import (
    Disturbance,
    SimExecutor,
    SimulatedRequest,
    SimulatedScenario,
    SimulationResult,
    build_simulation,
    load_of,
)
from bros.workload.arrivals import BE_SIZES, RT_SIZES, Arrival, BeLoad, Size, TraceLoad, generator
from support.scenarios import SLOW, STEPS, scenario
from support.tier import by_tier

CROWDED_S = by_tier(fast=6.0, long=20.0)
"""How long runs are in which requests are preempted all the time."""

Observed = list[tuple[StepPlan, float]]


def run(what: SimulatedScenario) -> tuple[SimulationResult, Observed]:
    observed: Observed = []
    simulation = build_simulation(what, observe=lambda *seen: observed.append(seen))
    return simulation.run(), observed


def of(result: SimulationResult, service_class: ServiceClass) -> list[SimulatedRequest]:
    return [record for record in result.records if record.service_class is service_class]


def trace(*arrivals: tuple[float, int, int]) -> TraceLoad:
    """arrivals: (time, prompt tokens, output tokens)."""
    return TraceLoad("test", tuple(Arrival(t, Size(p, o)) for t, p, o in arrivals))


@pytest.mark.parametrize("policy", by_tier(fast=["bros", "priority"], long=POLICIES))
def test_equal_scenarios_give_equal_records_and_plans(policy: str) -> None:
    duration_s = by_tier(fast=4.0, long=10.0)
    what = scenario(policy, disturbance=Disturbance(noise=0.1), duration_s=duration_s)
    first, first_plans = run(what)
    second, second_plans = run(what)
    assert first.records == second.records
    assert first == second
    assert first_plans == second_plans
    assert first.digest() == second.digest()


def test_other_seeds_give_other_records() -> None:
    assert run(scenario(seed=1))[0].digest() != run(scenario(seed=2))[0].digest()


def test_policies_get_the_same_requests() -> None:
    fcfs, priority = run(scenario("fcfs"))[0], run(scenario("priority"))[0]
    assert fcfs.digest() != priority.digest()
    for cls in ServiceClass:
        sizes = zip(of(fcfs, cls), of(priority, cls), strict=False)
        assert all(a.size == b.size for a, b in sizes)
    arrivals = [[r.arrival_s for r in of(result, ServiceClass.RT)] for result in (fcfs, priority)]
    assert arrivals[0] == arrivals[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_second_is_either_a_step_or_idle(policy: str) -> None:
    result, observed = run(scenario(policy, rate=1.0, be=BeLoad(0)))
    assert result.busy_s == pytest.approx(sum(seconds for _, seconds in observed))
    assert result.busy_s + result.idle_s == pytest.approx(result.end_s)
    assert result.idle_s > 0 and result.busy_s > 0
    assert result.steps == len(observed)
    assert 10.0 <= result.end_s < 10.0 + max(seconds for _, seconds in observed)


@pytest.mark.parametrize("policy", by_tier(fast=["bros", "priority"], long=POLICIES))
def test_finished_requests_have_exactly_the_tokens_of_the_workload(policy: str) -> None:
    # Little memory, so that requests are preempted and start over on the way.
    result, _ = run(scenario(policy, rate=8.0, be=BeLoad(8), kv_blocks=260, duration_s=CROWDED_S))
    assert sum(stats.preemptions for stats in result.stats.by_class.values()) > 0
    finished = [record for record in result.records if record.finished]
    assert len(finished) > CROWDED_S
    for record in result.records:
        tokens = len(record.token_times_s)
        wanted = record.size.output_tokens
        assert tokens == wanted if record.finished else tokens < wanted
        assert record.finish in (FinishReason.LENGTH, None)
        assert list(record.token_times_s) == sorted(record.token_times_s)
        assert all(time_s > record.arrival_s for time_s in record.token_times_s)


def test_sizes_of_records_are_those_of_the_workload() -> None:
    what = scenario("fcfs")
    result, _ = run(what)
    for cls, name, sizes in (
        (ServiceClass.RT, "rt sizes", RT_SIZES["lmsys"]),
        (ServiceClass.BE, "be sizes", BE_SIZES),
    ):
        records = of(result, cls)
        drawn = sizes.stream(generator(what.seed, name))
        assert [record.size for record in records] == list(itertools.islice(drawn, len(records)))


def in_flight(records: list[SimulatedRequest], time_s: float) -> int:
    ends = (r.token_times_s[-1] if r.finished else float("inf") for r in records)
    return sum(r.arrival_s <= time_s < end for r, end in zip(records, ends, strict=True))


def test_closed_loop_keeps_its_number_in_flight() -> None:
    result, _ = run(scenario("fcfs", be=BeLoad(5), duration_s=20.0))
    records = of(result, ServiceClass.BE)
    assert len(records) > 20
    for step in range(200):
        assert in_flight(records, step / 10) == 5


def test_batches_follow_each_other_as_a_whole() -> None:
    result, _ = run(scenario("fcfs", be=BeLoad(5, batches=True), duration_s=20.0))
    records = of(result, ServiceClass.BE)
    assert len(records) > 20 and len(records) % 5 == 0
    batches = [records[i : i + 5] for i in range(0, len(records), 5)]
    for before, after in itertools.pairwise(batches):
        last = max(record.token_times_s[-1] for record in before)
        assert {record.arrival_s for record in after} == {last}


def test_idle_time_jumps_to_the_next_arrival() -> None:
    result, observed = run(scenario(rt=trace((2.0, 10, 1), (7.0, 10, 1)), be=BeLoad(0)))
    alone = StepLoad()
    alone.add(10, 0, True)
    assert [seconds for _, seconds in observed] == [STEPS.seconds(alone)] * 2
    first, second = result.records
    assert first.token_times_s[0] == pytest.approx(2.0 + STEPS.seconds(alone))
    assert second.token_times_s[0] == pytest.approx(7.0 + STEPS.seconds(alone))
    assert result.end_s == 10.0


def test_same_time_arrivals_keep_their_order() -> None:
    load = trace(*((1.0, 20 + i, 2) for i in range(6)))
    result, observed = run(scenario("fcfs", rt=load, be=BeLoad(0)))
    assert [record.size.prompt_tokens for record in result.records] == [20, 21, 22, 23, 24, 25]
    chunks = observed[0][0].chunks
    assert [len(chunk.token_ids) for chunk in chunks] == [20, 21, 22, 23, 24, 25]


def test_arrival_is_the_true_one_and_not_when_the_step_ended() -> None:
    load = trace((0.0, 200, 3), (0.001, 10, 1))
    result, observed = run(scenario(rt=load, be=BeLoad(0)))
    assert observed[0][1] > 0.001
    assert result.records[1].arrival_s == 0.001


def test_what_is_open_at_the_end_is_in_the_records() -> None:
    slow = scenario(rt=trace((0.0, 10, 3000), (9.996, 10, 1), (9.9999, 10, 1)), be=BeLoad(0))
    result, _ = run(slow)
    assert len(result.records) == 3
    running, *late = result.records
    assert not running.finished and len(running.token_times_s) > 100
    assert all(record.finish is None and not record.refused for record in late)


def test_requests_that_no_engine_could_serve_are_left_out_and_counted() -> None:
    load = trace((0.0, 50, 50), (1.0, 51, 50), (2.0, 5000, 50))
    result, _ = run(scenario(rt=load, be=BeLoad(0), max_model_len=100))
    assert len(result.records) == 1
    assert result.skipped == 2


def test_full_queue_refuses_and_the_closed_loop_comes_back() -> None:
    crowd = trace(*((0.5, 100, 50) for _ in range(30)))
    result, _ = run(scenario(rt=crowd, be=BeLoad(4), max_queue=4, max_num_seqs=2))
    refused = Counter(r.service_class for r in result.records if r.refused)
    assert refused[ServiceClass.RT] == 26
    assert all(not r.token_times_s for r in result.records if r.refused)
    assert len(of(result, ServiceClass.BE)) < 200  # no storm of retries


def test_dropped_requests_are_recorded_as_errors() -> None:
    crowd = trace(*((0.0, 1000, 50) for _ in range(40)))
    what = scenario("bros", rt=crowd, be=BeLoad(0), late="shed", slo_ttft=50, max_num_seqs=4)
    result, _ = run(what)
    reasons = Counter(record.finish for record in result.records)
    assert reasons[FinishReason.ERROR] > 0
    assert reasons[FinishReason.ERROR] + reasons[FinishReason.LENGTH] == 40


def test_prompts_share_no_prefix() -> None:
    _, observed = run(scenario("fcfs"))
    starts = [
        tuple(chunk.token_ids[:2])
        for plan, _ in observed
        for chunk in plan.chunks
        if chunk.start == 0 and len(chunk.token_ids) > 1
    ]
    assert len(starts) > 20
    assert len(set(starts)) == len(starts)


def test_executor_takes_the_time_that_the_model_says() -> None:
    _, observed = run(scenario("priority", disturbance=Disturbance(slowdown=1.5)))
    for plan, seconds in observed:
        load = StepLoad()
        for chunk in plan.chunks:
            load.add(len(chunk.token_ids), chunk.start, chunk.sample is not None)
        assert seconds == 1.5 * STEPS.seconds(load)


COPYING = dataclasses.replace(
    STEPS,
    swap_constant_s=2e-4,
    swap_token_s=3e-6,
    swap_out_constant_s=4e-4,
    swap_out_token_s=8e-6,
)


@pytest.mark.parametrize("overlap", by_tier(fast=[True], long=[False, True]))
@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_steps_with_copies_take_what_was_predicted(layout: str, overlap: bool) -> None:
    """Of all that scheduler and device know in common, copies in both directions are part."""
    steps = dataclasses.replace(COPYING, overlap_swap=overlap)
    result, observed = run(
        scenario(
            "bros", steps=steps, rate=8.0, be=BeLoad(8), kv_blocks=260, duration_s=CROWDED_S,
            kv_layout=layout,
        )
    )  # fmt: skip
    copies = [plan.copies for plan, _ in observed if plan.copies is not None]
    assert sum(len(c.out_device) for c in copies) > 25 * CROWDED_S
    assert sum(len(c.back_device) for c in copies) > 25 * CROWDED_S
    stats = result.stats
    assert stats.step_s == pytest.approx(stats.predicted_s)
    assert stats.step_error_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_noise_has_mean_one_and_the_deviation_and_correlation_asked_for(
    correlation: float,
) -> None:
    noisy = Disturbance(noise=0.2, correlation=correlation)
    alone = scenario(rt=trace((0.0, 1, 4000)), be=BeLoad(0), duration_s=40.0)
    _, exact = run(alone)
    _, varied = run(dataclasses.replace(alone, disturbance=noisy))
    factors = np.array([got / meant for (_, got), (_, meant) in zip(varied, exact, strict=False)])
    logs = np.log(factors)
    assert len(factors) > 3000 and len(set(factors)) == len(factors)
    assert np.mean(factors) == pytest.approx(1.0, abs=0.02)
    assert np.std(logs) == pytest.approx(0.2, rel=0.1)
    assert np.corrcoef(logs[:-1], logs[1:])[0, 1] == pytest.approx(correlation, abs=0.05)


def test_predictor_learns_that_the_device_is_slower() -> None:
    result, _ = run(
        scenario(
            "bros",
            duration_s=by_tier(fast=20.0, long=60.0),
            be=BeLoad(16),
            disturbance=Disturbance(slowdown=1.5),
        )
    )
    stats = result.stats
    ratio = stats.step_s / stats.predicted_s
    assert 1.0 < ratio < 1.1  # the first steps were underestimated by a third, the others not


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise": -0.1},
        {"slowdown": 0.0},
        {"noise": float("nan")},
        {"slowdown": -1.0},
        {"correlation": 1.0},
        {"correlation": -0.1},
    ],
)
def test_wrong_disturbances_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Disturbance(**wrong)


def test_noise_without_a_generator_is_refused() -> None:
    with pytest.raises(ValueError, match="random generator"):
        SimExecutor(STEPS, ManualClock(), disturbance=Disturbance(noise=0.1))
    SimExecutor(STEPS, ManualClock(), disturbance=Disturbance(noise=0.1), rng=random.Random(1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"be": BeLoad(20), "max_queue": 10}, "--max-queue 20"),
        ({"kv_blocks": 10}, "up to 1152 tokens do not fit"),
        ({"overload": "reject"}, "--overload"),
    ],
)
def test_scenarios_that_cannot_run_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_simulation(scenario(**wrong))


def test_progress_is_reported_from_start_to_end() -> None:
    told: list[float] = []
    build_simulation(scenario(), progress=told.append).run()
    assert told[0] == 0.0 and 0.95 < told[-1] <= 1.0
    assert told == sorted(told)
    assert 100 < len(told) <= 201


def test_steps_are_suspended_for_first_tokens_that_would_be_late() -> None:
    arrivals = trace(*((3.0 + 1.37 * i, 250, 5) for i in range(40)))
    what = scenario("bros", rt=arrivals, steps=SLOW, duration_s=60.0)
    result, observed = run(what)
    stats = result.stats
    assert stats.suspended_steps > 3
    assert result.steps == stats.steps == len(observed) - stats.suspended_steps
    assert stats.step_s + stats.suspended_s == pytest.approx(result.busy_s)
    assert sum(seconds for _, seconds in observed) == pytest.approx(result.busy_s)
    cut_short = [s for plan, s in observed if s < SLOW.seconds(load_of(plan))]
    assert len(cut_short) == stats.suspended_steps
    assert stats.lost_s == stats.aborted_s == 0.0
    assert result.busy_s + result.idle_s == pytest.approx(result.end_s)
    first_tokens = [r.token_times_s[0] - r.arrival_s for r in of(result, ServiceClass.RT)]
    assert max(first_tokens) <= 0.4
    for record in result.records:
        assert not record.finished or len(record.token_times_s) == record.size.output_tokens
    assert run(what)[0] == result


def test_what_arrives_after_the_end_is_not_counted_although_a_step_runs_on() -> None:
    what = scenario("bros", rt=trace((9.99, 20, 2), (10.05, 20, 2)), steps=SLOW, rt_wait=1.0)
    result, _ = run(what)
    assert result.end_s > 10.05
    assert [record.arrival_s for record in of(result, ServiceClass.RT)] == [9.99]


def test_a_device_that_takes_no_time_is_refused() -> None:
    nothing = CostModel(constant_s=0.0, token_s=0.0, sample_s=0.0, pair_s=0.0, context_s=0.0)
    with pytest.raises(ConfigError, match="steps take no time"):
        run(scenario("fcfs", steps=nothing))


@pytest.mark.parametrize(
    "policy",
    [
        policy if policy == "bros" else pytest.param(policy, marks=pytest.mark.long)
        for policy in POLICIES
    ],
)
def test_a_warm_up_counts_what_a_run_of_that_length_counts(policy: str) -> None:
    # So little memory that requests are preempted all the time.
    common = {"rate": 8.0, "be": BeLoad(8), "kv_blocks": 260, "duration_s": CROWDED_S}
    whole, _ = run(scenario(policy, **common))
    result, _ = run(scenario(policy, **common, warm_up_s=0.6 * CROWDED_S))
    short, _ = run(scenario(policy, **common | {"duration_s": 0.6 * CROWDED_S}))
    assert result.digest() == whole.digest()
    warm_up = result.warm_up
    assert warm_up.time_s == short.end_s >= 0.6 * CROWDED_S
    assert (warm_up.busy_s, warm_up.idle_s) == (short.busy_s, short.idle_s)
    assert (warm_up.steps, warm_up.stats.by_class) == (short.steps, short.stats.by_class)
    first, rest, both = (
        report_of(each, Slo(ttft_s=0.4, tpot_s=0.2)) for each in (short, result, whole)
    )
    assert 0 < first.steps < both.steps == first.steps + rest.steps
    counted = [
        sum(part.preemptions for part in report.by_class.values()) for report in (first, rest, both)
    ]
    assert 0 < counted[0] < counted[2] == counted[0] + counted[1]


def test_a_warm_up_may_end_while_nothing_runs() -> None:
    common: dict[str, object] = {"rt": trace((2.0, 10, 9), (7.0, 10, 5)), "be": BeLoad(0)}
    whole, _ = run(scenario(**common))
    result, _ = run(scenario(**common, warm_up_s=5.0))
    assert result.digest() == whole.digest()
    assert (result.warm_up.time_s, result.warm_up.steps) == (5.0, 9)
    assert result.warm_up.idle_s == pytest.approx(5.0 - result.warm_up.busy_s)
    report = report_of(result, Slo(ttft_s=0.4, tpot_s=0.2))
    assert report.steps == 5 and report.mean_step_s is not None
    assert report.busy == pytest.approx(5 * report.mean_step_s / 5.0)
    assert report.idle_s == pytest.approx(5.0 - 5 * report.mean_step_s)


def test_requests_too_long_to_be_served_are_not_counted_in_the_warm_up() -> None:
    load = trace((0.0, 90, 50), (1.0, 50, 50), (5.0, 90, 50), (6.0, 90, 50))
    what = scenario(rt=load, be=BeLoad(0), max_model_len=100, warm_up_s=5.0)
    assert run(what)[0].skipped == 2


def test_requests_shed_are_counted_as_refused() -> None:
    crowd = trace(*((0.0, 1000, 50) for _ in range(40)))
    what = scenario("bros", rt=crowd, be=BeLoad(0), late="shed", slo_ttft=50, max_num_seqs=4)
    result, _ = run(what)
    part = report_of(result, what.slo).by_class[ServiceClass.RT]
    assert part.requests == part.finished + part.unfinished + part.refused == 40
    assert part.refused == sum(r.finish is FinishReason.ERROR for r in result.records) > 0
    assert part.unfinished == 0
