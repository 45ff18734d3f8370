"""What each policy promises, on a virtual clock."""

from __future__ import annotations

import gc
import itertools
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.config import POLICIES, EngineConfig
from bros.core.request import FinishReason, Hints, RequestGroup, ServiceClass, Slo
from bros.kvcache.manager import KvCacheManager
from bros.scheduler.build import best_effort_yields, objectives_too_tight, unused_options
from bros.scheduler.cost_model import StepTimePredictor
from bros.scheduler.packing import Bounds, Packing, Rules
from bros.scheduler.policies.best_effort_order import BestEffortOrder
from bros.scheduler.policies.bros import BrosPolicy, OverloadGuard
from bros.scheduler.state import Queues, RequestState
from support.scheduling import MODEL, request
from support.tier import examples
from support.virtual_time import BE, RT, VirtualRun

# The baselines


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from([RT, BE])), min_size=1, max_size=8))
def test_fcfs_starts_in_order_of_arrival_whatever_the_class(
    arrivals: list[tuple[int, ServiceClass]],
) -> None:
    run = VirtualRun("fcfs", max_num_seqs=3)
    for number, (length, service_class) in enumerate(arrivals):
        run.submit(f"r{number}", length, service_class)
        run.step()
    run.drain()
    assert list(run.first_run) == [f"r{number}" for number in range(len(arrivals))]


def test_edf_starts_by_deadline_with_those_that_have_none_at_the_end() -> None:
    run = VirtualRun("edf", max_num_seqs=1)
    run.submit("none", 5, BE)
    run.submit("far", 5, BE, slo=Slo(deadline_s=9.0))
    run.submit("rt", 5)
    run.submit("near", 5, BE, slo=Slo(deadline_s=0.1))
    run.submit("tight", 5, slo=Slo(0.2, 0.1))
    run.drain()
    assert list(run.first_run) == ["near", "tight", "rt", "far", "none"]


def test_rr_alternates_between_the_classes_while_both_have_work() -> None:
    run = VirtualRun("rr")
    for number in range(3):
        run.submit(f"rt{number}", 5, max_tokens=6)
        run.submit(f"be{number}", 5, BE, max_tokens=6)
    run.drain()
    served = [run.classes(plan) for plan in run.plans]
    assert all(len(classes) == 1 for classes in served)
    assert all(before != after for before, after in itertools.pairwise(served))
    run.submit("alone", 5, max_tokens=4)
    run.drain()
    assert [run.classes(plan) for plan in run.plans[-4:]] == [{RT}] * 4


def test_priority_queues_rt_first_but_does_not_displace_what_runs() -> None:
    run = VirtualRun("priority", max_num_seqs=2)
    for number in range(4):
        run.submit(f"be{number}", 5, BE, max_tokens=6, salt=50 * number)
    run.step()
    run.submit("rt", 5)
    run.drain()
    assert list(run.first_run) == ["be0", "be1", "rt", "be2", "be3"]
    assert run.first_run["rt"] == max(run.token_times["be0"]), "it waited for a row"
    assert run.scheduler.stats().by_class[BE].preemptions == 0


def test_priority_newcomers_never_preempt_but_growth_does() -> None:
    run = VirtualRun("priority", blocks=8)
    run.submit("be", 24, BE, max_tokens=8)
    run.step()
    run.submit("rt", 12)
    run.step()
    assert "rt" not in run.first_run, "six of eight blocks are taken"
    run.drain()
    assert run.scheduler.stats().by_class[BE].preemptions == 0
    run = VirtualRun("priority", blocks=8)
    run.submit("rt", 8, max_tokens=12)
    run.submit("be", 12, BE, max_tokens=8)
    run.drain()
    preemptions = {cls: run.scheduler.stats().by_class[cls].preemptions for cls in (RT, BE)}
    assert preemptions[RT] == 0 and preemptions[BE] > 0


# Order


_RULES = Rules()


def policy(rows: int = 100, rules: Rules = _RULES, **options: float) -> BrosPolicy:
    """options: fields of EngineConfig."""
    predictor = StepTimePredictor(MODEL)
    bounds = Bounds(rows=rows, tokens=256, rules=rules)
    guard = OverloadGuard("late", predictor, 8, KvCacheManager(250, 4), lambda state: 10)
    config = EngineConfig(**options)  # type: ignore[arg-type]
    order = partial(BestEffortOrder, config.be_max_wait)
    return BrosPolicy(config, bounds, predictor, guard, lambda state: 10, order)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.5, 1.0, 1.5, 2.0]), st.booleans(), st.sampled_from([RT, BE])),
        max_size=12,
    )
)
def test_the_order_of_urgency_is_that_of_a_full_sort(
    population: list[tuple[float, bool, ServiceClass]],
) -> None:
    bros, queues, real_time = policy(), Queues(), []
    for index, (ttft_s, runs, service_class) in enumerate(population):
        slo = Slo(ttft_s, 0.2) if service_class is RT else Slo()
        state = RequestState(
            request(f"r{index}", 9, service_class),
            service_class=service_class,
            slo=slo,
            now=0.1 * index,
            arrival_index=index,
            seed=0,
            max_length=50,
            eos_token_ids=frozenset(),
        )
        bros.assign_rank(state, 0.1 * index)
        queues.enqueue(state)
        if runs:
            queues.start(state)
            state.num_computed_tokens = 3
        if service_class is RT:
            real_time.append(state)
    found = [(s.deadline_s, s.arrival_index) for s in bros.propose(queues, 0.0).urgent]
    assert found == sorted((s.deadline_s, s.arrival_index) for s in real_time)


@pytest.mark.parametrize(
    ("rows", "paper", "waiting"),
    [
        (4, False, ["a0", "b1", "a4"]),  # none can start: the first of each tenant, and the last
        (5, False, ["a0", "b1", "b2", "a3", "a4", "b5"]),  # one can: one more than rows
        (4, True, ["a0", "b1", "b2", "a3", "a4"]),
    ],
)
def test_late_requests_that_cannot_start_only_tell_why_they_wait(
    rows: int, paper: bool, waiting: list[str]
) -> None:
    bros, queues = policy(rows, Rules.paper() if paper else _RULES), Queues()
    running = [f"run{index}" for index in range(4)]
    for index, name in enumerate((*running, "a0", "b1", "b2", "a3", "a4", "b5")):
        state = RequestState(
            replace(request(name, 9), tenant=name[0]),
            service_class=RT,
            slo=Slo(0.1, 0.2),
            now=0.01 * index,
            arrival_index=index,
            seed=0,
            max_length=50,
            eos_token_ids=frozenset(),
        )
        bros.assign_rank(state, 0.0)
        queues.enqueue(state)
        if index < len(running):
            queues.start(state)
            state.num_computed_tokens = 3
    bros.on_step_done(Packing(), 0.01, False)  # so that this step is none that begins with a turn
    found = [state.request_id for state in bros.propose(queues, 5.0).urgent]
    assert found == [*running, *waiting]


def test_all_tenants_without_a_row_wait_for_rows() -> None:
    run = VirtualRun("bros", max_num_seqs=4)
    for index in range(4):
        run.submit(f"run{index}", 5, max_tokens=200)
    run.step()
    names = [f"{tenant}{index}" for tenant in "abc" for index in range(2)]
    for name in names:
        run.submit(name, 5, max_tokens=1, slo=Slo(0.01, 1.0), tenant=name[0])
    run.steps(20)
    waits = [run.scheduler.trace(name).waits for name in names]  # type: ignore[union-attr]
    assert all(found.keys() == {"rows"} for found in waits), waits


@pytest.mark.parametrize(
    ("group", "patient"),
    [(None, False), (RequestGroup("g"), True), (RequestGroup("g", awaited=True), False)],
)
def test_only_what_nothing_waits_for_alone_is_patient(
    group: RequestGroup | None, patient: bool
) -> None:
    state = RequestState(
        replace(request("r", 9), hints=Hints(group=group)),
        service_class=RT,
        slo=Slo(0.2, 0.2),
        now=0.0,
        arrival_index=0,
        seed=0,
        max_length=50,
        eos_token_ids=frozenset(),
    )
    assert state.patient is patient


# Real-time under load


def test_a_step_with_best_effort_is_short_enough_for_arrivals() -> None:
    run = VirtualRun(rt_wait=0.3, max_batch_tokens=1000, max_num_seqs=30)
    for number in range(20):
        run.submit(f"be{number}", 400, BE, max_tokens=50, salt=40 * number)
    run.steps(60)
    assert max(run.seconds) <= 0.3 * 0.4
    assert max(run.seconds) > 0.08, "and no shorter than that"
    for number in range(10):
        run.submit(f"rt{number}", 20, max_tokens=3)
        run.steps(12)
        ttft_s = run.token_times[f"rt{number}"][0] - run.requests[f"rt{number}"].arrival_s
        assert ttft_s <= 0.4
    assert max(run.seconds) <= 0.3 * 0.4


@pytest.mark.parametrize("step_s", [0.15, 0.3, 3.0])
def test_best_effort_requests_run_together_where_one_alone_takes_longer_than_a_step_may(
    step_s: float,
) -> None:
    slow = replace(MODEL, constant_s=step_s)
    run = VirtualRun(truth=slow, model=slow, rt_wait=0.25)  # at most 0.1 s
    for number in range(8):
        run.submit(f"be{number}", 4, BE, max_tokens=8)
    run.drain()
    assert len(run.plans) < 24, "8 tokens each, one after the other: 64 steps"


@pytest.mark.parametrize(
    ("step_s", "warning"),
    [
        (0.05, "^$"),
        (0.15, r"takes 151 ms here, longer than --rt-wait times --slo-ttft \(100 ms\)"),
        (0.3, r"takes 301 ms here, so no stream keeps --slo-tpot \(200 ms\)"),
    ],
)
def test_objectives_that_a_single_request_exceeds_are_told(step_s: float, warning: str) -> None:
    config = EngineConfig(rt_wait=0.25)
    assert re.search(warning, objectives_too_tight(config, replace(MODEL, constant_s=step_s)))


def test_best_effort_gets_less_time_as_real_time_requests_fill_the_memory() -> None:
    """Its tokens would keep them there longer, while new ones wait for room."""
    longest = {}
    for rows in (6, 15, 19):  # of 20 that fit
        run = VirtualRun(
            rt_wait=0.5, rt_slowdown=1000.0, max_batch_tokens=1000, max_num_seqs=40, blocks=505
        )
        for number in range(rows):
            run.submit(f"rt{number}", 78, slo=Slo(9.0, 0.2), max_tokens=80, salt=100 * number)
        run.steps(20)
        assert run.scheduler.stats().by_class[RT].running == rows
        begun = len(run.seconds)
        for number in range(4):
            run.submit(f"be{number}", 300, BE, max_tokens=2, salt=5000 + 300 * number)
        run.steps(2)
        longest[rows] = max(run.seconds[begun:])
    assert longest[6] > 1.2 * longest[15] > 1.44 * longest[19]
    assert longest[6] <= 0.2


def test_a_tighter_objective_makes_steps_with_best_effort_shorter_for_a_while() -> None:
    run = VirtualRun(rt_wait=0.3, max_batch_tokens=1000)
    for number in range(8):
        run.submit(f"be{number}", 400, BE, max_tokens=400, salt=40 * number)
    run.submit("tight", 5, slo=Slo(0.25, 0.2), max_tokens=1)
    run.steps(10)
    assert max(run.seconds[1:]) <= 0.3 * 0.25
    run.submit("impossible", 5, slo=Slo(0.001, 0.2), max_tokens=1)
    run.steps(10)
    assert 0.3 * 0.2 < max(run.seconds[-5:]) <= 0.3 * 0.25, "what cannot be met changes nothing"


def test_the_tightest_objective_of_the_last_minute_counts() -> None:
    """Not the tightest one ever, and not none as soon as that is forgotten."""
    bros = policy(slo_ttft=400.0, slo_tpot=400.0, rt_wait=0.5)
    queues, found = Queues(), []
    for at_s, ttft_s in ((0.0, 0.25), (30.0, 0.3), (50.0, 0.4), (59.0, None), (61.0, None),
                         (91.0, None), (111.0, None)):  # fmt: skip
        if ttft_s is not None:
            slo = Slo(ttft_s, 0.2)
            state = RequestState(
                request("r", 5), service_class=RT, slo=slo, now=at_s, arrival_index=0, seed=0,
                max_length=10, eos_token_ids=frozenset(),
            )  # fmt: skip
            bros.assign_rank(state, at_s)
        found.append(bros.propose(queues, at_s).bounds.best_effort_s)
    assert found == pytest.approx([0.125, 0.125, 0.125, 0.125, 0.15, 0.2, 0.2])


def late_and_new(late: str) -> VirtualRun:
    """After a second without a step, one request is late and another just came."""
    run = VirtualRun(late=late, max_batch_tokens=32)
    run.submit("early", 4, max_tokens=1)
    run.drain()
    run.submit("late", 30, slo=Slo(0.1, 0.1), max_tokens=1)
    run.now += 1.0
    run.submit("new", 30, max_tokens=1, salt=100)
    return run


@pytest.mark.parametrize(("late", "order"), [("renew", ["new", "late"]), ("edf", ["late", "new"])])
def test_who_goes_first_once_one_is_late(late: str, order: list[str]) -> None:
    run = late_and_new(late)
    run.drain()
    done = sorted(order, key=lambda name: run.token_times[name][0])
    assert done == order


def test_shed_drops_late_requests_and_says_when_to_retry() -> None:
    run = late_and_new("shed")
    plan = run.step()
    assert plan is not None and [c.request_id for c in plan.chunks] == ["new"]
    dropped = next(output for output in run.outputs if output.request_id == "late")
    assert dropped.finish_reason is FinishReason.ERROR
    assert dropped.error and dropped.token_ids == ()
    assert dropped.retry_after_s is not None and dropped.retry_after_s >= 1.0
    assert run.scheduler.abort("late", run.now) is None, "it is gone"
    trace = run.scheduler.trace("late")
    assert trace is not None and trace.finish_reason is FinishReason.ERROR
    run.drain()
    run.scheduler.check_integrity()


def test_only_shed_requests_leave_nothing_to_run() -> None:
    run = VirtualRun(late="shed")
    run.submit("late", 30, slo=Slo(0.1, 0.1))
    run.now += 1.0
    assert run.step() is None
    assert [output.request_id for output in run.outputs] == ["late"]
    assert not run.scheduler.has_work


def test_a_late_request_is_served_though_others_that_are_on_time_never_stop_coming() -> None:
    run = VirtualRun(max_batch_tokens=32)
    run.submit("early", 4, max_tokens=1)
    run.drain()
    run.submit("late", 60, slo=Slo(0.1, 0.1), max_tokens=2)
    run.now += 1.0
    for number in range(40):
        run.submit(f"new{number}", 30, max_tokens=1, slo=Slo(5.0, 0.2), salt=20 * number)
        run.step()
        if len(run.plans) == 1 + 8:
            assert "late" in run.first_run, "every eighth step is its turn"
    assert len(run.token_times["late"]) == 2


def test_a_late_request_is_served_beside_rows_that_leave_no_time_for_prompts() -> None:
    """Steps of these rows alone take 35 ms."""
    run = VirtualRun(max_num_seqs=32, max_batch_tokens=256)
    for number in range(12):
        slo = Slo(1.0, 0.035)
        run.submit(f"row{number}", 4, slo=slo, salt=9 * number, max_tokens=99, ignore_eos=True)
    run.steps(20)
    run.submit("late", 30, slo=Slo(0.05, 0.05), salt=500, max_tokens=1)
    run.steps(10)
    assert run.token_times["late"], "every eighth step is its turn"


@pytest.mark.parametrize("prompt", [10, 40, 200])
@pytest.mark.parametrize("together", [True, False], ids=["100 wait", "1600 tokens per second"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_streams_keep_their_gap_beside_a_flood_of_prompts(
    prompt: int, together: bool, tokens: int
) -> None:
    """By deadline alone, the longest gap was up to 0.57 s."""
    run = VirtualRun(blocks=8000, max_batch_tokens=512, max_queue=10**5, prefix_cache="off")
    streams = [f"stream{number}" for number in range(4)]
    for name in streams:
        run.submit(name, 3, max_tokens=900)
    sent = 0
    while run.now < 8.0:
        while run.waiting(RT) < 100 if together else sent * prompt < 1600 * run.now:
            run.submit(f"flood{sent}", prompt, salt=sent, max_tokens=tokens)
            sent += 1
        run.step()
    for name in streams:
        gaps = [after - before for before, after in itertools.pairwise(run.token_times[name])]
        assert max(gaps) <= 0.3


def test_a_stream_beside_a_backlog_gets_ahead_by_its_reserve_and_goes_on_at_its_pace() -> None:
    run = VirtualRun(rt_slowdown=1000.0, max_batch_tokens=1000, max_queue=1000, prefix_cache="off")
    for number in range(60):
        run.submit(f"be{number}", 900, BE, max_tokens=1, salt=number)
    run.steps(120)  # predictions are exact since, so that their margin leaves nothing
    run.submit("stream", 5, max_tokens=60, ignore_eos=True)
    run.steps(60)
    first_s, *rest = run.token_times["stream"]
    ahead = [first_s + 0.2 * number - at for number, at in enumerate(rest, 1)]
    assert ahead[20] >= 0.3 - 0.2, "what its gap objective lets it wait beyond its interval"
    gained = [after - before for before, after in itertools.pairwise(ahead)]
    assert min(gained[:8]) > 0.007
    assert max(gained[20:]) < 0.003, "steps are full again"


def test_max_num_seqs_bounds_those_that_hold_memory() -> None:
    run = VirtualRun(max_num_seqs=4, max_batch_tokens=64)
    for number in range(30):
        run.submit(f"rt{number}", 10, max_tokens=8, salt=9 * number)
        run.submit(f"be{number}", 10, BE, max_tokens=8, salt=11 * number)
        run.step()
        by_class = run.scheduler.stats().by_class
        assert by_class[RT].running <= 4
        assert by_class[BE].running <= 4
    run.drain()


# Best-effort


def saturated(be_share: float, steps: int, *, be_requests: int, tpot_s: float) -> VirtualRun:
    """More real-time requests than can be served, and best-effort ones beside them."""
    run = VirtualRun(be_share=be_share, max_num_seqs=8, max_batch_tokens=64, max_queue=10**6)
    for number in range(be_requests):
        run.submit(f"be{number}", 40, BE, max_tokens=400, salt=37 * number)
    for number in range(steps):
        while run.waiting(RT) < 4:
            run.submit(f"rt{number}-{run.waiting(RT)}", 30, max_tokens=20, slo=Slo(0.4, tpot_s))
        run.step()
    return run


@pytest.mark.parametrize("share", [0.1, pytest.param(0.05, marks=pytest.mark.long)])
def test_best_effort_work_gets_about_its_share_of_a_saturated_engine(share: float) -> None:
    run = saturated(share, 500, be_requests=20, tpot_s=0.04)
    assert share * 0.7 <= run.be_share() <= share * 1.3


@settings(max_examples=examples(3, long=60))
@given(
    share=st.sampled_from([0.05, 0.2]),
    rt_wait=st.sampled_from([0.01, 0.05, 0.1, 0.5, 1.0]),
    slo_ttft=st.sampled_from([40.0, 400.0, 4000.0]),
    slowdown=st.sampled_from([1.0, 1.4]),
)
def test_the_share_is_given_whatever_the_other_options_are(
    share: float, rt_wait: float, slo_ttft: float, slowdown: float
) -> None:
    """Rows of real-time requests leave no time, or steps are shorter than a piece of a prompt."""
    truth = replace(MODEL, constant_s=slowdown * MODEL.constant_s, token_s=slowdown * MODEL.token_s)
    run = VirtualRun(
        truth=truth, be_share=share, rt_wait=rt_wait, slo_ttft=slo_ttft, max_num_seqs=64
    )
    for number in range(12):
        run.submit(f"rt{number}", 5, max_tokens=900, slo=Slo(60.0, 0.04), salt=9 * number)
    for number in range(20):
        run.submit(f"be{number}", 100, BE, max_tokens=30, salt=30 * number)
    run.steps(250)
    assert run.be_share() > 0.6 * share


@pytest.mark.parametrize("rows", [1, 8])
def test_the_share_begins_although_real_time_requests_hold_all_rows(rows: int) -> None:
    """And take each row that becomes free."""
    run = VirtualRun(be_share=0.3, max_num_seqs=rows, max_batch_tokens=64, max_queue=10**6)
    numbers = itertools.count()
    for number in range(200):
        while sum(run.scheduler._queues.open_of[RT].values()) < 2 * rows:
            run.submit(f"rt{next(numbers)}", 20, max_tokens=50)
        if number == 20:
            run.submit("be", 100, BE, max_tokens=5, salt=500)
        run.step()
        run.scheduler.check_integrity()
    assert len(run.token_times["be"]) == 5


def test_without_a_share_best_effort_work_waits() -> None:
    run = saturated(0.0, 300, be_requests=20, tpot_s=0.04)
    assert run.be_share() < 0.01


def test_pressing_deadlines_go_first_among_best_effort_requests() -> None:
    run = VirtualRun(max_num_seqs=1)
    run.now = 10.0
    for number in range(3):
        run.submit(f"be{number}", 20, BE, salt=70 * number)
    run.submit("hopeless", 20, BE, slo=Slo(deadline_s=0.5), salt=200)
    run.submit("pressing", 20, BE, slo=Slo(deadline_s=10.0), salt=300, arrived_s=0.5)
    run.submit("relaxed", 20, BE, slo=Slo(deadline_s=500.0), salt=400)
    run.drain()
    assert list(run.first_run) == ["pressing", "be0", "be1", "be2", "hopeless", "relaxed"]


def test_a_long_prompt_with_much_time_does_not_make_others_late() -> None:
    run = VirtualRun(max_batch_tokens=4096, max_num_seqs=20)
    run.submit("patient", 3000, slo=Slo(60.0, 1.0))
    run.step()
    assert run.seconds == [pytest.approx(0.2, rel=0.1)]
    run.submit("usual", 50)
    run.drain()
    assert run.token_times["usual"][0] < 0.4
    assert run.token_times["patient"][0] < 60.0
    run = VirtualRun(max_batch_tokens=4096, max_num_seqs=20)
    run.submit("not so patient", 1000, slo=Slo(1.6, 1.0))
    run.step()
    assert run.seconds[0] > 1.0, "in short steps it might be late"


@pytest.mark.parametrize("rt_wait", [0.05, 0.5])
def test_a_patient_prompt_goes_on_beside_rows_that_fill_a_short_step(rt_wait: float) -> None:
    run = VirtualRun(max_batch_tokens=4096, max_num_seqs=64, rt_wait=rt_wait)
    for number in range(30):
        run.submit(f"row{number}", 5, max_tokens=900, slo=Slo(60.0, 0.2), salt=9 * number)
    run.steps(3)
    run.submit("patient", 300, slo=Slo(60.0, 1.0))
    began = run.now
    while not run.token_times["patient"]:
        run.step()
    assert run.now - began < 5.0


def test_order_of_best_effort_work() -> None:
    """Rows, then what is pressing, prompts that have begun, newcomers."""
    run = VirtualRun(max_batch_tokens=300, rt_wait=1.0, max_num_seqs=20)
    run.now = 100.0
    run.submit("row", 5, BE, max_tokens=50)
    run.submit("long", 900, BE)
    run.step()
    run.submit("short", 500, BE, salt=300)
    run.steps(2)
    run.submit("new", 20, BE, salt=700)
    run.submit("pressing", 20, BE, slo=Slo(deadline_s=50.5), salt=800, arrived_s=run.now - 50)
    plan = run.step()
    assert plan is not None
    assert [chunk.request_id for chunk in plan.chunks][:3] == ["row", "pressing", "long"]
    run.drain()
    order = list(run.first_run)
    assert order.index("pressing") < order.index("new")


def test_a_deadline_presses_once_there_is_just_time_enough() -> None:
    run = VirtualRun(max_num_seqs=1)
    for number in range(20):
        run.submit(f"be{number}", 20, BE, max_tokens=10, salt=40 * number)
    run.submit("due", 20, BE, max_tokens=10, slo=Slo(deadline_s=4.0), salt=850)
    run.drain()
    order = list(run.first_run)
    assert 0 < order.index("due") < 20
    assert run.token_times["due"][-1] <= 4.0


@pytest.mark.parametrize(
    ("slo", "max_tokens", "held_to"),
    [
        (Slo(deadline_s=1.1), 10, Slo(0.2, 0.1, 1.1)),
        (Slo(deadline_s=9.0), 10, Slo(0.4, 0.2, 9.0)),
        (Slo(deadline_s=1.3), None, Slo(0.4, 0.2, 1.3)),
        (Slo(deadline_s=0.1), None, Slo(0.1, 0.05, 0.1)),
        (Slo(1.0, 0.05, 1.9), 10, Slo(1.0, 0.05, 1.9)),
    ],
)
def test_a_deadline_of_a_real_time_request_sets_its_pace(
    slo: Slo, max_tokens: int | None, held_to: Slo
) -> None:
    run = VirtualRun()
    run.submit("rt", 5, slo=slo, max_tokens=max_tokens)
    trace = run.scheduler.trace("rt")
    assert trace is not None
    found = (trace.slo.ttft_s, trace.slo.tpot_s, trace.slo.deadline_s)
    assert found == pytest.approx((held_to.ttft_s, held_to.tpot_s, held_to.deadline_s))


def test_a_deadline_of_a_real_time_request_is_met_beside_best_effort_work() -> None:
    """At the default pace it would take 0.4 + 19 x 0.2 seconds."""
    run = VirtualRun(max_batch_tokens=256, max_num_seqs=20)
    for number in range(30):
        run.submit(f"be{number}", 200, BE, salt=30 * number)
    run.submit("rt", 20, slo=Slo(deadline_s=2.0), max_tokens=20)
    run.drain()
    assert len(run.token_times["rt"]) == 20 and run.token_times["rt"][-1] <= 2.0
    assert run.scheduler.stats().by_class[RT].deadlines_met == 1


def test_deadlines_are_counted_by_class() -> None:
    run = VirtualRun()
    run.submit("met", 5, BE, slo=Slo(deadline_s=5.0))
    run.submit("missed", 5, BE, slo=Slo(deadline_s=0.01))
    run.submit("none", 5, BE)
    run.drain()
    counted = run.scheduler.stats().by_class
    assert (counted[BE].deadlines, counted[BE].deadlines_met) == (2, 1)
    assert (counted[RT].deadlines, counted[RT].deadlines_met) == (0, 0)


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ({"policy": "fcfs"}, []),
        ({"policy": "fcfs", "rt_wait": 0.3, "packing": "paper"}, ["--rt-wait", "--packing"]),
        ({"policy": "rr", "batch_growth": "additive"}, ["--batch-growth"]),
        ({"policy": "bros", "rt_wait": 0.3, "packing": "paper"}, []),
    ],
)
def test_options_that_a_policy_has_no_use_for(options: dict[str, Any], unused: list[str]) -> None:
    assert unused_options(EngineConfig(**options)) == unused


def test_prompts_with_a_common_prefix_run_next_to_each_other_for_a_while() -> None:
    run = VirtualRun(max_num_seqs=1, be_max_wait=10.0)
    run.submit("a1", 70, BE, salt=0, max_tokens=1)
    run.submit("b1", 70, BE, salt=400, max_tokens=1)
    run.now = 9.0
    run.submit("a2", 75, BE, salt=0, max_tokens=1)
    run.submit("b2", 80, BE, salt=400, max_tokens=1)
    run.now = 11.0
    run.submit("a3", 90, BE, salt=0, max_tokens=1)
    run.drain()
    assert list(run.first_run) == ["a1", "a2", "b1", "b2", "a3"]


def test_a_common_prefix_overtakes_others_for_a_bounded_time() -> None:
    """However fast a group grows, one that waits is passed for `be_max_wait` seconds at most."""
    run = VirtualRun(max_num_seqs=1, be_max_wait=2.0, max_queue=10**6)
    run.submit("a", 70, BE, salt=0, max_tokens=1)
    run.submit("other", 70, BE, salt=400, max_tokens=1)
    for number in itertools.count():
        if "other" in run.first_run:
            break
        for copy in range(2):
            run.submit(f"a{number}-{copy}", 70, BE, salt=0, max_tokens=1)
        run.step()
        assert run.now < 30.0, "starved"
    most_behind = math.ceil(2.0 / min(run.seconds)) * 2
    assert list(run.first_run).index("other") <= most_behind


def test_the_share_holds_for_a_single_best_effort_request_that_already_runs() -> None:
    """No other request of its class waits, and the token budget ends every step."""
    run = VirtualRun("bros", be_share=0.1, max_batch_tokens=64, blocks=100_000)
    run.submit("be", 4, BE, max_tokens=10_000, ignore_eos=True)
    run.steps(2)
    for number in range(60):
        run.submit(f"rt{number}", 500, RT, salt=number, max_tokens=1)
    began = len(run.token_times["be"])
    run.steps(400)
    steps_with = sum(any(c.request_id == "be" for c in plan.chunks) for plan in run.plans[2:])
    assert len(run.token_times["be"]) - began == steps_with > 40


def test_what_is_owed_is_paid_in_steps_of_usual_length() -> None:
    """However much has added up while there was no memory, steps keep to the usual bound."""
    run = VirtualRun("bros", be_share=0.5, max_batch_tokens=1000, blocks=130)
    run.submit("rt", 250, RT, max_tokens=260, ignore_eos=True)
    run.steps(1)
    run.submit("be", 400, BE, max_tokens=1)
    run.drain()
    assert run.first_run["be"] > 5.0
    assert max(run.seconds[1:]) <= 0.16 + 0.16


def test_a_prompt_that_exceeds_the_token_budget_is_no_violation_by_the_paper() -> None:
    run = VirtualRun("bros", packing="paper", max_batch_tokens=20, max_num_seqs=64)
    run.submit("row", 4, RT, max_tokens=30, ignore_eos=True)
    run.steps(2)
    run.submit("long", 20, RT, max_tokens=1)
    run.submit("be", 4, BE, max_tokens=5)
    plan = run.step()
    assert plan is not None
    assert {chunk.request_id for chunk in plan.chunks} == {"row", "be"}
    assert run.scheduler.stats().batch_resets == 0


@pytest.mark.parametrize("service_class", [RT, BE])
def test_a_prompt_that_no_step_has_room_for_is_cut_by_the_paper_as_well(
    service_class: ServiceClass,
) -> None:
    """Else it would wait until nothing else is in a step."""
    run = VirtualRun("bros", packing="paper", max_batch_tokens=20, max_num_seqs=64)
    run.submit("row", 4, RT, max_tokens=200, ignore_eos=True)
    run.steps(2)
    run.submit("long", 50, service_class, max_tokens=1)
    run.steps(5)
    assert len(run.token_times["long"]) == 1


def test_tenants_take_no_turns_in_the_rules_of_the_paper() -> None:
    """Who is held back there would wait for a step of its own, beside a stream that never ends."""
    run = VirtualRun(
        "bros", packing="paper", late="edf", max_batch_tokens=64, tenant_weights="big=100"
    )
    run.submit("stream", 4, RT, max_tokens=500, ignore_eos=True, tenant="big")
    run.steps(30)
    prompts = [f"prompt{number}" for number in range(8)]
    for number, name in enumerate(prompts):
        size = 64 if number % 2 else 10
        run.submit(
            name, size, RT, salt=90 * number, max_tokens=1, tenant="small", slo=Slo(0.05, 1.0)
        )
    run.steps(20)
    assert all(len(run.token_times[name]) == 1 for name in prompts)


def test_an_answer_that_has_begun_is_never_shed() -> None:
    """Four requests in memory for two take it from each other; each gets all its tokens."""
    run = VirtualRun("bros", late="shed", blocks=12)
    for number in range(4):
        run.submit(f"r{number}", 8, RT, salt=50 * number, max_tokens=30, ignore_eos=True)
    run.drain()
    begun = {name for name, times in run.token_times.items() if times}
    assert run.scheduler.stats().by_class[RT].preemptions > 0
    assert all(len(run.token_times[name]) == 30 for name in begun)
    refused = [o for o in run.outputs if o.finish_reason is FinishReason.ERROR]
    assert run.scheduler.stats().by_class[RT].rejected == len(refused) == 4 - len(begun)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("ttft_s", [None, 0.001])
def test_streams_that_start_over_with_an_impossible_objective_are_put_in_order(
    ttft_s: float | None,
) -> None:
    """Their new deadline leaves time for the tokens to recompute; else it was renewed for ever."""
    bros, queues = policy(), Queues()
    for index in range(3):
        state = RequestState(
            request(f"r{index}", 200),
            service_class=RT,
            slo=Slo(ttft_s, 0.2),
            now=0.0,
            arrival_index=index,
            seed=0,
            max_length=300,
            eos_token_ids=frozenset(),
        )
        state.token_ids.append(7)
        bros.assign_rank(state, 0.0)
        queues.enqueue(state)
    found = list(bros.propose(queues, 100.0).urgent)
    assert len(found) == 3
    least_s = StepTimePredictor(MODEL).prefill_seconds(201)
    assert all(state.deadline_s >= 100.0 + least_s for state in found)


def test_an_impossible_pace_does_not_shrink_the_batch() -> None:
    run = VirtualRun("bros", max_batch_tokens=64, max_num_seqs=64)
    run.submit("impossible", 4, RT, slo=Slo(0.4, 0.001), max_tokens=100, ignore_eos=True)
    for number in range(40):
        run.submit(f"be{number}", 4, BE, salt=9 * number, max_tokens=60, ignore_eos=True)
    run.steps(60)
    assert run.scheduler.stats().batch_resets == 0


def test_ended_requests_with_distant_deadlines_are_forgotten() -> None:
    def states() -> int:
        gc.collect()
        return sum(type(found) is RequestState for found in gc.get_objects())

    run, before = VirtualRun("bros"), states()
    for number in range(300):
        run.submit(f"be{number}", 4, BE, slo=Slo(deadline_s=86_400.0), max_tokens=1)
        run.drain()
    assert states() - before < 150


def test_edf_heeds_a_best_effort_deadline_after_the_first_token() -> None:
    run = VirtualRun("edf", max_num_seqs=1)
    run.submit("be", 4, BE, slo=Slo(deadline_s=1.0), max_tokens=20, ignore_eos=True)
    run.steps(2)
    run.submit("rt", 4, RT, slo=Slo(50.0, 50.0), max_tokens=2)
    run.drain()
    assert run.token_times["be"][-1] < run.token_times["rt"][0]


@pytest.mark.long
@pytest.mark.parametrize("prompt_tokens", [60, 220])
def test_best_effort_leaves_time_for_what_prompts_take_here(prompt_tokens: int) -> None:
    """Newcomers come at every point of a step, and more work waits than can ever run. Steps of
    half the objective are too long before prompts that take most of the other half: 15 of 40
    would be late. Here no step is aborted for those that come right at its beginning."""
    run = VirtualRun(max_num_seqs=64, max_batch_tokens=1024)
    for number in range(60):
        run.submit(f"be{number}", 400, BE, max_tokens=200, salt=30 * number)
    names = []
    for number in range(40):
        arrives_s = 1.0 + 1.013 * number
        while run.now < arrives_s:
            run.step()
        names.append(f"rt{number}")
        run.submit(
            names[-1], prompt_tokens, max_tokens=5, salt=7000 + 90 * number, arrived_s=arrives_s
        )
    run.steps(40)
    late = [name for name in names if run.token_times[name][0] - 1.0 - 1.013 * int(name[2:]) > 0.4]
    assert len(late) <= 8, late
    best_effort = [seconds for seconds in run.seconds if seconds > 0.1]
    assert best_effort, "nothing is gained by steps that have no room for best-effort work"


def test_a_preempted_stream_that_waits_gets_a_new_deadline_whenever_it_misses_one() -> None:
    """With its first deadline it would come before all requests that are on time."""
    bros, queues = policy(), Queues()

    def arrives(name: str, slo: Slo, now: float, outputs: int = 0) -> None:
        state = RequestState(
            request(name, 9, RT),
            service_class=RT,
            slo=slo,
            now=now,
            arrival_index=int(now),
            seed=0,
            max_length=50,
            eos_token_ids=frozenset(),
        )
        for _ in range(outputs):
            state.add_output(7)
        bros.assign_rank(state, now)
        queues.enqueue(state)

    arrives("begun", Slo(0.5, 0.2), 0.0, outputs=1)
    assert [state.deadline_s for state in bros.propose(queues, 1.0).urgent] == [1.5]
    arrives("new", Slo(0.4, 0.2), 2.0)
    urgent = list(bros.propose(queues, 2.0).urgent)
    assert [(state.request_id, state.deadline_s) for state in urgent] == [
        ("new", pytest.approx(2.4)),
        ("begun", 2.5),
    ]


def test_best_effort_work_yields_to_real_time_requests_under_bros_only() -> None:
    yielding = [name for name in POLICIES if best_effort_yields(EngineConfig(policy=name))]
    assert yielding == ["bros"]


quarters = st.integers(0, 16).map(lambda count: count / 4)  # exact in binary


@given(st.lists(quarters, min_size=1, max_size=8), st.sampled_from([0.5, 1.0, 1.5, 3.0]))
def test_the_next_token_is_due_at_the_mean_pace_but_not_before_an_interval_nor_after_the_gap(
    gaps: list[float], longest_s: float
) -> None:
    """A request that is behind its pace need not catch up; one that is ahead waits for so long."""
    slo, now = Slo(0.5, 1.0, gap_s=longest_s), 0.0
    state = RequestState(
        request("a", 9, RT), service_class=RT, slo=slo, now=0.0, arrival_index=0,
        seed=0, max_length=50, eos_token_ids=frozenset(),
    )  # fmt: skip
    state.running = True
    for number, gap in enumerate(gaps):
        now += gap
        state.record.token(now, slo)
        state.add_output(7)
        on_pace_s = gaps[0] + number + 1
        assert state.deadline_s == min(max(now + 1.0, on_pace_s), now + longest_s)
