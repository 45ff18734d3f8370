"""Steps that are aborted for a first token: when, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from bros.core.clock import ManualClock
from bros.core.plan import StepPlan, StepResult
from bros.core.request import (
    EngineRequest,
    FinishReason,
    Hints,
    RequestGroup,
    SamplingParams,
    Slo,
)
from bros.engine.engine import Engine
from bros.scheduler.cost_model import StepLoad, StepTimePredictor
from support.scheduling import engine_info, make_scheduler, request
from support.toy_model import ToyModel
from support.virtual_time import BE, RT, VirtualRun, plan_seconds

# Of support.scheduling.MODEL: a step takes 20 ms and 1 ms per token. The first token is due after
# 0.4 s, so a prompt of 300 tokens has to start within 80 ms; best-effort work makes steps of 0.2 s.
LONG, SHORT = 300, 100


def run_with_best_effort(**options: object) -> VirtualRun:
    run = VirtualRun("bros", max_batch_tokens=400, **options)
    run.submit("be", 9000, BE)
    return run


def arrival(prompt: int, arrived_s: float, slo: Slo | None = None) -> EngineRequest:
    return replace(request("new", prompt, slo=slo), arrival_s=arrived_s)


def asked_at(run: VirtualRun, prompt: int, after_s: float, **options: object) -> bool:
    """Whether a step is aborted for a request that comes so long after it has begun."""
    run.scheduler.schedule(run.now)
    assert run.scheduler.may_abort
    at = run.now + after_s
    return run.scheduler.yields([arrival(prompt, at, **options)], at)


def test_a_step_with_best_effort_is_aborted_for_a_first_token_that_would_be_late() -> None:
    run = run_with_best_effort()
    plan = run.scheduler.schedule(run.now)
    assert plan is not None and 0.15 < plan_seconds(plan) <= 0.2
    assert run.scheduler.yields([arrival(LONG, 0.01)], 0.01)


def test_not_if_the_first_token_can_wait_for_the_end_of_the_step() -> None:
    assert not asked_at(run_with_best_effort(), SHORT, 0.01)
    assert not asked_at(run_with_best_effort(), LONG, 0.19)


def test_not_if_the_first_token_would_be_late_all_the_same() -> None:
    assert not asked_at(run_with_best_effort(), 420, 0.01)
    run = run_with_best_effort()
    run.scheduler.schedule(0.0)
    known_late = arrival(LONG, -0.3)
    assert not run.scheduler.yields([known_late], 0.01)


def test_the_rest_of_an_answer_that_was_lost_can_still_be_in_time() -> None:
    run = run_with_best_effort()
    run.scheduler.schedule(0.0)
    rest = replace(arrival(LONG, -9.0), resumed=5, sampling=SamplingParams(max_tokens=9))
    assert run.scheduler.yields([rest], 0.01)


@pytest.mark.parametrize("slo", [Slo(1.0), Slo(0.31)])
def test_the_objective_is_the_request_s_own(slo: Slo) -> None:
    assert not asked_at(run_with_best_effort(), LONG, 0.01, slo=slo)


def test_not_for_best_effort_work() -> None:
    run = run_with_best_effort()
    run.scheduler.schedule(0.0)
    assert not run.scheduler.yields([replace(arrival(LONG, 0.01), service_class=BE)], 0.01)


@pytest.mark.parametrize("token_id", [-1, 2**40])
def test_not_for_a_request_that_will_be_refused(token_id: int) -> None:
    run = run_with_best_effort()
    run.scheduler.schedule(0.0)
    refused = replace(arrival(LONG, 0.01), prompt_token_ids=[token_id] * LONG)
    assert not run.scheduler.yields([refused], 0.01)


def test_not_if_a_running_answer_would_stall_for_it() -> None:
    """Its last token is 0.25 s old when the new prompt would be done after 0.33 s more."""
    run = run_with_best_effort()
    run.submit("watched", 10, max_tokens=50)
    while not run.token_times["watched"]:
        run.step()
    run.scheduler.schedule(run.now)
    assert run.scheduler.may_abort
    at = run.now + 0.1
    assert not run.scheduler.yields([arrival(LONG, run.now)], at)
    run = run_with_best_effort()
    run.submit("ahead of its pace", 10, max_tokens=50, slo=Slo(0.4, 0.4))
    run.steps(12)
    run.scheduler.schedule(run.now)
    assert run.scheduler.yields([arrival(LONG, run.now)], run.now + 0.05)


def test_newcomers_of_the_same_step_are_looked_at_together() -> None:
    """After a step of 0.2 s one prompt of 100 tokens ends in time, a second one does not."""
    run = run_with_best_effort()
    run.scheduler.schedule(run.now)
    assert not run.scheduler.yields([arrival(SHORT, 0.01)], 0.01)
    assert run.scheduler.yields([arrival(SHORT, 0.01)], 0.01)
    run = run_with_best_effort()
    run.scheduler.schedule(run.now)
    assert run.scheduler.yields(2 * [arrival(SHORT, 0.01)], 0.01)


def test_a_newcomer_of_an_earlier_step_does_not_count() -> None:
    run = run_with_best_effort()
    plan = run.scheduler.schedule(run.now)
    assert plan is not None
    assert not run.scheduler.yields([arrival(SHORT, 0.01)], 0.01)
    run.now = plan_seconds(plan)
    run.scheduler.apply(run._executor.execute(plan), run.now)
    assert not asked_at(run, SHORT, 0.01)


def test_a_newcomer_that_is_late_anyway_leaves_others_their_time() -> None:
    run = run_with_best_effort()
    run.scheduler.schedule(run.now)
    assert not run.scheduler.yields([arrival(LONG, -0.3)], 0.01)
    assert not run.scheduler.yields([arrival(50, 0.01)], 0.01)  # 0.38 s with LONG


def test_a_flood_of_newcomers_costs_few_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with_best_effort()
    run.scheduler.schedule(run.now)
    count = 0
    seconds = StepTimePredictor.seconds

    def counted(predictor: StepTimePredictor, load: StepLoad) -> float:
        nonlocal count
        count += 1
        return seconds(predictor, load)

    monkeypatch.setattr(StepTimePredictor, "seconds", counted)
    for _ in range(30):
        assert not run.scheduler.yields(20 * [arrival(LONG, -0.3)], 0.01)
    assert count == 30, "the first one is late anyway, and all others are due by then"


def test_members_of_a_task_group_stop_no_step() -> None:
    """Only the end of the last one is waited for."""
    for awaited in (False, True):
        run = run_with_best_effort()
        run.scheduler.schedule(run.now)
        hints = Hints(group=RequestGroup(id="votes", awaited=awaited))
        members = 4 * [replace(arrival(60, 0.01), hints=hints)]
        assert run.scheduler.yields(members, 0.01) is awaited


@pytest.mark.parametrize(
    ("share", "prompt", "expected"), [(0.99, 255, False), (0.65, 255, True), (0.65, 275, False)]
)
def test_where_steps_vary_much_a_step_yields_if_a_first_token_might_be_late(
    share: float, prompt: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step takes 0.135 s, and a stream's token is due 0.30 s after it began. If the step
    yields, a prompt of 255 tokens ends before that, and one of 275 does not."""
    run, at = run_with_stream()
    monkeypatch.setattr(StepTimePredictor, "rare_share", share)
    new = arrival(prompt, at, Slo(0.5))
    assert not run.scheduler.yields([new], at), "work would be lost"
    run, at = run_with_stream()
    assert run.scheduler.yields([new], at, suspends=True) is expected


def test_a_first_token_that_would_be_late_may_delay_a_stream() -> None:
    """Its token is due after 0.30 s, at the latest after 0.50 s; the prompt takes 0.33 s."""
    run, at = run_with_stream()
    assert run.scheduler.yields([arrival(LONG, at, Slo(0.4))], at)


@pytest.mark.parametrize(("ttft_s", "keeps_gap"), [(0.4, True), (0.35, False)])
def test_a_stream_keeps_its_gap_objective_if_the_newcomer_has_time_for_it(
    ttft_s: float, keeps_gap: bool
) -> None:
    """The stream's gap objective is 0.3 s. The prompt takes 0.32 s, its row in a step of its own
    0.02 s."""
    run, at = run_with_stream()
    assert run.scheduler.yields([arrival(LONG, at, Slo(ttft_s))], at)
    run.now = at
    run.scheduler.abort_step(run.plans[-1], at)
    run.submit("new", LONG, slo=Slo(ttft_s))
    while not run.token_times["new"]:
        run.step()
    assert run.token_times["new"][0] - at <= ttft_s
    run.step()
    times = run.token_times["watched"]
    longest_s = max(after - before for before, after in pairwise(times))
    assert (longest_s <= 0.3) is keeps_gap and longest_s <= 0.5


def test_no_stream_stalls_because_its_step_took_longer_than_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its token is late already when the newcomer comes; it may come after 0.50 s at the latest."""
    run, _ = run_with_stream()
    monkeypatch.setattr(StepTimePredictor, "rare_share", 0.65)
    at = run.now + 0.31
    assert not run.scheduler.yields([arrival(LONG, at, Slo(0.4))], at, suspends=True)
    assert run.scheduler.yields([arrival(SHORT, at, Slo(0.13))], at, suspends=True)


def run_with_stream() -> tuple[VirtualRun, float]:
    """A step with best-effort work and a stream has run for 10 ms."""
    run = run_with_best_effort()
    run.submit("watched", 10, max_tokens=50, slo=Slo(0.4, 0.2))
    run.steps(5)
    plan = run.scheduler.schedule(run.now)
    assert plan is not None and 0.13 < plan_seconds(plan) < 0.14
    run.plans.append(plan)
    return run, run.now + 0.01


def test_a_step_without_best_effort_is_never_aborted() -> None:
    run = VirtualRun("bros", max_batch_tokens=400)
    run.submit("rt", 300)
    run.scheduler.schedule(0.0)
    assert not run.scheduler.may_abort


def test_a_step_that_gives_best_effort_work_its_share_is_not_aborted() -> None:
    """A chat leaves no time, so best-effort work runs only when its share is due."""
    run = VirtualRun("bros", max_batch_tokens=64, be_share=0.1)
    run.submit("chat", 20, max_tokens=150, slo=Slo(1.0, 0.023))
    run.step()
    run.submit("be", 30, BE, max_tokens=2)
    for _ in range(100):
        plan = run.scheduler.schedule(run.now)
        assert plan is not None
        if any(chunk.request_id == "be" for chunk in plan.chunks):
            break
        run.now += plan_seconds(plan)
        run.scheduler.apply(run._executor.execute(plan), run.now)
    else:
        raise AssertionError("its share is never due")
    assert not run.scheduler.may_abort


@pytest.mark.parametrize("options", [{"packing": "paper"}, {"policy": "fcfs"}, {"policy": "rr"}])
def test_other_policies_do_not_abort_steps(options: dict[str, str]) -> None:
    run = VirtualRun(**{"policy": "bros", **options})  # type: ignore[arg-type]
    run.submit("be", 50, BE)
    run.scheduler.schedule(0.0)
    assert not run.scheduler.may_abort


def test_nothing_is_left_of_an_aborted_step() -> None:
    run = VirtualRun("bros", max_batch_tokens=64, rt_slowdown=1000.0)
    run.submit("half done", 150, BE)
    run.submit("rt", 5, max_tokens=9)
    run.steps(2)
    run.submit("new", 10, BE)
    stats = run.scheduler.stats()
    first = run.scheduler.schedule(run.now)
    assert first is not None and {c.request_id for c in first.chunks} >= {"half done", "rt"}
    run.scheduler.abort_step(first, run.now)
    run.scheduler.check_integrity()
    after = run.scheduler.stats()
    assert after.aborted_steps == 1 and after.aborted_s == 0.0
    assert replace(after, aborted_steps=0) == stats
    again = run.scheduler.schedule(run.now)
    assert again is not None
    assert [(c.request_id, c.start, c.token_ids) for c in again.chunks] == [
        (c.request_id, c.start, c.token_ids) for c in first.chunks
    ]


def test_requests_of_an_aborted_step_record_that_they_yielded() -> None:
    run = run_with_best_effort()
    plan = run.scheduler.schedule(0.0)
    assert plan is not None
    run.scheduler.abort_step(plan, 0.05)
    trace = run.scheduler.trace("be")
    assert trace is not None
    assert trace.waits == {"yielded": pytest.approx(0.05)}
    assert [what for _, what in trace.events] == ["queued as be", "scheduled", "yielded"]
    assert run.waiting(BE) == 1
    assert run.scheduler.stats().aborted_s == pytest.approx(0.05)


def test_a_request_aborted_while_its_step_ran_is_gone() -> None:
    scheduler = make_scheduler("bros")
    scheduler.submit(request("a", 5, BE), 0.0)
    scheduler.submit(request("b", 5, BE), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    output = scheduler.abort("a", 0.01)
    assert output is not None and output.finish_reason is FinishReason.ABORT
    scheduler.abort_step(plan, 0.01)
    scheduler.check_integrity()
    assert scheduler.stats().by_class[BE].waiting == 1
    assert scheduler.stats().by_class[RT].waiting == 0
    assert scheduler.stats().kv_blocks_used == 0


def test_the_new_prompt_has_the_next_step_and_both_classes_their_tokens() -> None:
    run = run_with_best_effort()
    run.submit("watched", 10, max_tokens=40, slo=Slo(0.4, 0.4))
    run.steps(12)
    plan = run.scheduler.schedule(run.now)
    assert plan is not None
    at = run.now + 0.05
    assert run.scheduler.yields([arrival(LONG, run.now)], at)
    came = run.now
    run.now = at
    run.scheduler.abort_step(plan, at)
    run.submit("new", LONG, arrived_s=came)
    run.drain()
    assert run.token_times["new"][0] - came <= 0.4
    gaps = [b - a for a, b in zip(run.token_times["watched"], run.token_times["watched"][1:])]  # noqa: B905
    assert max(gaps) <= 2.5 * 0.4
    assert len(run.token_times["be"]) == 4


def test_a_request_whose_pace_is_impossible_aborts_no_step() -> None:
    run = run_with_best_effort()
    run.submit("impossible", 10, max_tokens=500, slo=Slo(0.4, 0.001))
    run.steps(5)
    run.scheduler.schedule(run.now)
    assert run.scheduler.may_abort
    needed = arrival(LONG - 50, run.now, Slo(0.34))
    assert run.scheduler.yields([needed], run.now + 0.01)


def test_however_many_ask_for_it_little_time_is_lost() -> None:
    """Requests of one token with a tight objective, many per second."""
    run = VirtualRun("bros", max_batch_tokens=400, max_num_seqs=64, max_queue=10**6)
    for number in range(40):
        run.submit(f"be{number}", 800, BE, salt=20 * number)
    number = 0
    while run.now < 30.0:
        plan = run.scheduler.schedule(run.now)
        assert plan is not None
        at = run.now + 0.3 * plan_seconds(plan)
        new = arrival(20, at, Slo(0.1, 0.2))
        if run.scheduler.may_abort and run.scheduler.yields([new], at):
            run.scheduler.abort_step(plan, at)
            run.now = at
        else:
            run.scheduler.apply(run._executor.execute(plan), run.now + plan_seconds(plan))
            run.now += plan_seconds(plan)
        run.submit(f"rt{number}", 20, slo=Slo(0.1, 0.2), max_tokens=1, salt=number)
        number += 1
        if run.waiting(BE) == 0:
            run.submit(f"be{40 + number}", 800, BE, salt=20 * number)
    stats = run.scheduler.stats()
    assert stats.aborted_steps > 10
    assert stats.aborted_s < 1.0 + 0.05 * run.now


def test_a_request_with_the_name_of_one_that_was_in_the_step_is_left_alone() -> None:
    run = run_with_best_effort()
    plan = run.scheduler.schedule(run.now)
    assert plan is not None
    run.scheduler.abort("be", 0.01)
    run.scheduler.submit(request("be", SHORT, BE), 0.01)
    run.scheduler.abort_step(plan, 0.02)
    run.scheduler.check_integrity()
    again = run.scheduler.schedule(0.02)
    assert again is not None and again.chunks[0].start == 0


class AskingModel(ToyModel):
    """Asks once in each step whether to abort it."""

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        if should_abort is not None and should_abort():
            return None
        return super().execute(plan)


def test_one_urgent_request_among_several_arrivals_aborts_the_step() -> None:
    scheduler = make_scheduler("bros", blocks=4000, max_batch_tokens=400)
    info = engine_info(blocks=4000, block_size=4, policy="bros")
    engine = Engine(scheduler, AskingModel(4), ManualClock(), info)
    engine.submit(request("be", [7] * 9000, BE))
    assert engine.step(lambda: [arrival(50, 0.0), arrival(LONG, 0.0)]) == []
    assert engine.stats().aborted_steps == 1
