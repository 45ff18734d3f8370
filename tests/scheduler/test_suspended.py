"""Suspended steps: what continues, at which price, and when it is dropped instead.

The executor is a SuspendingModel, which fails if a plan continues or drops what is not kept, or
continues it with other tokens or slots, or if KV of some layers only is read or copied.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.config import KV_LAYOUTS
from bros.core.plan import Kept, StepPlan, StepResult, SuspendedStep
from bros.core.request import Slo
from support.scheduling import MODEL, request
from support.suspending_model import LAYERS, SuspendingModel
from support.tier import examples
from support.toy_model import ToyModel
from support.virtual_time import BE, RT, VirtualRun, plan_seconds

HALF = LAYERS // 2


def suspending_run(**options: object) -> tuple[VirtualRun, SuspendingModel]:
    model = SuspendingModel(4)
    options = {"max_batch_tokens": 400, **options}
    return VirtualRun("bros", executor=model, **options), model  # type: ignore[arg-type]


def chunks(plan: StepPlan | None) -> dict[str, tuple[int, int, Kept | None]]:
    """request id -> (start, tokens, where it continues)"""
    assert plan is not None
    return {c.request_id: (c.start, len(c.token_ids), c.kept) for c in plan.chunks}


def test_a_suspended_chunk_continues_where_it_stopped() -> None:
    run, model = suspending_run()
    run.submit("be", 300, BE, max_tokens=2)
    first = run.step(stops_before=HALF)
    stats = run.scheduler.stats()
    assert (stats.suspended_steps, stats.steps, stats.lost_s) == (1, 0, 0.0)
    assert stats.suspended_s == pytest.approx(run.now) and run.now > 0.0
    again = run.step()
    assert again is not None and first is not None
    start, tokens, kept = chunks(first)["be"]
    assert kept is None
    assert chunks(again) == {"be": (start, tokens, Kept(first.step, 0, HALF))}
    assert again.chunks[0].slots == first.chunks[0].slots
    assert model.layers_run == LAYERS, "no layer is computed twice"
    run.drain()
    assert run.scheduler.stats().lost_s == 0.0
    assert len(run.token_times["be"]) == 2


def test_the_rest_of_a_chunk_costs_the_rest_of_its_layers() -> None:
    run, _ = suspending_run()
    run.submit("be", 300, BE)
    first = run.step(stops_before=6)
    whole_s = plan_seconds(first, MODEL) - MODEL.constant_s  # type: ignore[arg-type]
    again = run.step()
    assert again is not None
    rest_s = run.seconds[-1] - MODEL.constant_s
    assert rest_s == pytest.approx(whole_s / 4)
    assert run.scheduler.stats().predicted_s == pytest.approx(run.seconds[-1])


def test_a_newcomer_has_the_next_step_and_what_was_suspended_joins_it_or_a_later_one() -> None:
    run, model = suspending_run(max_num_seqs=16)
    for number in range(4):
        run.submit(f"row{number}", 8, BE, salt=20 * number, max_tokens=9)
    run.submit("prompt", 900, BE, salt=500, max_tokens=2)
    run.steps(3)
    stopped = run.step(stops_before=5)
    assert stopped is not None and "prompt" in chunks(stopped)
    run.submit("new", 250, max_tokens=3)
    came = run.now
    layers = model.layers_run
    plans = [run.step() for _ in range(3)]
    assert run.token_times["new"][0] - came <= 0.4
    assert "new" in chunks(plans[0])
    continued = {
        name: kept
        for plan in plans
        for name, (_, _, kept) in chunks(plan).items()
        if kept is not None
    }
    assert continued.keys() == chunks(stopped).keys()
    assert {kept.layer for kept in continued.values()} == {5}
    fresh = sum(kept is None for plan in plans for _, _, kept in chunks(plan).values())
    assert model.layers_run - layers == fresh * LAYERS + len(continued) * (LAYERS - 5)
    run.drain()
    assert run.scheduler.stats().lost_s == 0.0


def test_rows_may_be_kept_before_different_layers() -> None:
    run, model = suspending_run(max_batch_tokens=64)
    run.submit("a", 60, BE, max_tokens=1)
    run.step(stops_before=2)
    run.submit("b", 4, BE, salt=300, max_tokens=1)
    both = run.step(stops_before=6)
    assert chunks(both) == {"b": (0, 4, None), "a": (0, 60, Kept(1, 0, 2))}
    assert {kept.layer for kept in model.kept} == {6}
    run.submit("c", 200, BE, salt=600, max_tokens=1)
    run.step(stops_before=1)
    last = run.step()
    assert last is not None
    layers = [chunk.kept.layer for chunk in last.chunks if chunk.kept is not None]
    assert layers == sorted(layers) and 6 in layers


def test_a_chunk_that_is_stopped_before_it_joins_is_kept_as_before() -> None:
    run, model = suspending_run()
    run.submit("be", 300, BE)
    run.step(stops_before=6)
    (kept,) = model.kept
    run.submit("rt", 30, slo=Slo(5.0, 1.0))
    run.step(stops_before=3)
    assert kept in model.kept
    assert {name: k for name, (_, _, k) in chunks(run.step()).items()}["be"] == kept


def test_a_step_that_stops_before_its_first_layer_keeps_nothing() -> None:
    run, model = suspending_run()
    run.submit("be", 300, BE)
    run.step(stops_before=0)
    run.scheduler.check_integrity()
    assert not model.kept and run.scheduler.stats().kv_blocks_used == 0
    assert run.waiting(BE) == 1
    assert chunks(run.step())["be"][2] is None


def test_what_is_kept_of_a_request_that_is_aborted_is_dropped_with_the_next_plan() -> None:
    run, model = suspending_run()
    run.submit("be", 300, BE)
    run.step(stops_before=HALF)
    (kept,) = model.kept
    run.abort("be")
    run.scheduler.check_integrity()
    run.submit("be", 20, BE)
    plan = run.step()
    assert plan is not None and plan.dropped == (kept,)
    assert chunks(plan) == {"be": (0, 20, None)} and not model.kept
    assert run.scheduler.stats().lost_s == 0.0, "its client did not want it"


def test_a_request_that_ends_while_its_step_runs_leaves_nothing_behind() -> None:
    run, model = suspending_run()
    run.submit("be", 100, BE)
    run.submit("other", 100, BE, salt=300)
    plan = run.scheduler.schedule(run.now)
    assert plan is not None and len(plan.chunks) == 2
    asked = iter(range(LAYERS))
    stopped = model.execute(plan, lambda: next(asked) == HALF)
    run.scheduler.abort("be", run.now)
    assert isinstance(stopped, SuspendedStep)
    run.scheduler.suspend_step(plan, stopped, 0.1)
    run.scheduler.check_integrity()
    again = run.step()
    assert again is not None and len(again.dropped) == 1
    assert chunks(again)["other"][2] is not None and not model.kept


def test_a_preempted_request_loses_what_was_kept() -> None:
    run, model = suspending_run(blocks=40, max_batch_tokens=64)
    run.submit("be", 120, BE)
    run.step(stops_before=HALF)
    run.submit("rt", 140, max_tokens=9)
    while run.scheduler.stats().lost_s == 0.0:
        run.step()
        run.scheduler.check_integrity()
    assert not model.kept
    run.drain()
    assert run.outputs[-1].request_id == "be"
    stats = run.scheduler.stats()
    assert stats.lost_s == pytest.approx(stats.suspended_s)


def test_the_oldest_are_dropped_beyond_the_bound() -> None:
    """A prompt fills a whole step each time, and newcomers leave no time for what is kept."""
    run, model = suspending_run(max_batch_tokens=100)
    run.submit("first", 99, BE)
    run.step(stops_before=HALF)
    run.submit("rt", 95, slo=Slo(0.2, 0.2), max_tokens=1, salt=300)
    run.submit("second", 50, BE, salt=600)
    for _ in range(6):
        run.step(stops_before=HALF)
        run.scheduler.check_integrity()
        assert model.kept_tokens <= 200
    run.drain()
    assert not model.kept


def test_a_chunk_that_no_longer_fits_continues_in_pieces() -> None:
    run, model = suspending_run()
    run.submit("be", 380, BE, max_tokens=1)
    run.step(stops_before=2)
    first_chunk = model.kept_tokens
    run.submit("rt", 120, slo=Slo(0.4, 0.06), max_tokens=60, salt=500)
    pieces = []
    while model.kept:
        assert len(pieces) < 40
        plan = run.step(stops_before=5 if len(pieces) == 1 else None)
        pieces += [c for c in chunks(plan).values() if c[2] is not None and c[2].layer == 2]
        run.scheduler.check_integrity()
    assert len(pieces) > 1 and sum(tokens for _, tokens, _ in pieces) == first_chunk
    run.drain()
    assert run.token_times["be"] and run.scheduler.stats().lost_s == 0.0


def test_an_aborted_step_loses_what_it_continued() -> None:
    """As where the head scores prompts: the layers are done, but their results are not kept."""
    run, model = suspending_run()
    run.submit("be", 300, BE, max_tokens=1)
    run.step(stops_before=HALF)
    spent_s = run.now
    plan = run.scheduler.schedule(run.now)
    assert plan is not None and plan.chunks[0].kept is not None
    model.kept.clear()
    run.now += 0.01
    run.scheduler.abort_step(plan, run.now)
    run.scheduler.check_integrity()
    stats = run.scheduler.stats()
    assert stats.lost_s == pytest.approx(spent_s + 0.01)
    assert stats.aborted_steps == 1 and run.waiting(BE) == 1
    run.drain()


def test_streams_continue_too() -> None:
    run, model = suspending_run()
    run.submit("stream", 20, max_tokens=9, slo=Slo(0.4, 0.4))
    run.steps(3)
    run.submit("be", 300, BE, salt=300)
    run.step(stops_before=HALF)
    plan = run.step()
    assert chunks(plan)["stream"][2] is not None
    assert model.layers_run % LAYERS == 0


def test_how_long_a_newcomer_has_waited_for_the_step_to_yield_is_counted() -> None:
    run, model = suspending_run()
    run.submit("be", 9000, BE)
    plan = run.scheduler.schedule(0.0)
    assert plan is not None
    new = replace(request("new", 300), arrival_s=0.02)
    assert run.scheduler.yields([new], 0.024, suspends=True)
    asked = iter(range(LAYERS))
    stopped = model.execute(plan, lambda: next(asked) == 1)
    assert isinstance(stopped, SuspendedStep)
    run.scheduler.suspend_step(plan, stopped, 0.026)
    yielding = run.scheduler.stats().yielding
    assert sum(yielding.counts) == 1 and yielding.total == pytest.approx(0.006)


def test_nothing_is_lost_however_many_ask_for_it() -> None:
    """Requests of one token with a tight objective, many per second, as in test_abort_step."""
    run, model = suspending_run(max_num_seqs=64, max_queue=10**6)
    for number in range(40):
        run.submit(f"be{number}", 800, BE, salt=20 * number)
    number = 0
    while run.now < 20.0:
        run.step(stops_before=2 + number % 5 if number % 3 else None)
        run.submit(f"rt{number}", 20, slo=Slo(0.1, 0.2), max_tokens=1, salt=number)
        number += 1
        if run.waiting(BE) == 0:
            run.submit(f"be{40 + number}", 800, BE, salt=20 * number)
    stats = run.scheduler.stats()
    assert stats.suspended_steps > 10
    assert stats.suspended_s > 3.0 and stats.lost_s == 0.0


@pytest.mark.parametrize("suspends", [False, True])
def test_little_is_lost_where_steps_can_only_be_aborted(suspends: bool) -> None:
    """Steps that score prompts, which comes after the last layer: newcomers with a tight objective
    ask for all of them."""
    model = ToyModel(4)
    run = VirtualRun(executor=model, max_num_seqs=64, max_queue=10**6, max_batch_tokens=400)
    number = 0
    while run.now < 40.0:
        if run.waiting(BE) == 0:
            run.submit(f"be{number}", 300, BE, salt=number, max_tokens=1, prompt_logprobs=0)
        plan = run.scheduler.schedule(run.now)
        assert plan is not None
        seconds = plan_seconds(plan)
        stopped_s = run.now + 0.5 * seconds
        new = request(f"rt{number}", 20, slo=Slo(0.065, 0.2), max_tokens=1, arrival_s=stopped_s)
        may_yield = run.scheduler.may_abort
        if may_yield and run.scheduler.yields([new], stopped_s, suspends=suspends):
            run.now = stopped_s
            run.scheduler.abort_step(plan, run.now)
        else:
            result = model.execute(plan)
            assert isinstance(result, StepResult)
            run.now += seconds
            run.scheduler.apply(result, run.now)
        run.scheduler.submit(new, run.now)
        number += 1
    stats = run.scheduler.stats()
    assert stats.aborted_steps > 5
    assert stats.lost_s <= 1.0 + 0.03 * run.now + 0.2


def test_tenants_pay_for_what_ran() -> None:
    """A chunk continues at a late layer, and its step stops five times before that."""
    run, _ = suspending_run()
    run.submit("be", 300, BE, max_tokens=1)
    run.step(stops_before=6)
    for _ in range(5):
        run.step(stops_before=0)
    run.step()
    (paid_s,) = run.scheduler.stats().by_class[BE].device_s.values()
    assert paid_s == pytest.approx(run.now, rel=0.1)


@given(seed=st.integers(0, 10**6), layout=st.sampled_from(KV_LAYOUTS))
@settings(max_examples=examples(40, long=400))
def test_plans_and_the_executor_agree_whatever_happens(seed: int, layout: str) -> None:
    """Random requests, suspensions, aborts and promotions, in memory that is tight or is not."""
    rng = random.Random(seed)
    run, model = suspending_run(
        blocks=rng.choice([24, 60, 400]),
        max_batch_tokens=(most := rng.choice([16, 64])),
        host_blocks=rng.choice([0, 30]),
        kv_layout=layout,
        prefix_cache=rng.choice(["off", "class-aware"]),
    )
    for number in range(30):
        run.submit(
            f"r{number}",
            rng.choice([1, 5, 20, 60]),
            rng.choice([RT, BE, BE]),
            slo=rng.choice([Slo(), Slo(0.1, 0.05), Slo(5.0, 1.0)]),
            salt=rng.randrange(9),
            max_tokens=rng.randint(1, 12),
        )
        if rng.random() < 0.1:
            run.abort(f"r{rng.randrange(number + 1)}")
        if rng.random() < 0.1:
            run.scheduler.promote(f"r{rng.randrange(number + 1)}", Slo(0.4, 0.2), run.now)
        for _ in range(rng.choice([0, 1, 2, 5])):
            run.step(rng.choice([None, rng.randrange(LAYERS), rng.randrange(LAYERS)]))
            run.scheduler.check_integrity()
            assert model.kept_tokens <= 2 * most
    run.drain()
    run.submit("last", 1, BE, max_tokens=1)
    run.drain()
    assert not model.kept and run.scheduler.stats().kv_blocks_used == 0
    answers: dict[str, list[int]] = {name: [] for name in run.requests}
    aborted = set()
    for output in run.outputs:
        answers[output.request_id] += output.token_ids
        if output.finish_reason is not None and not output.finish_reason.complete:
            aborted.add(output.request_id)
    for name, asked in run.requests.items():
        assert asked.sampling.max_tokens is not None
        expected = ToyModel.continuation(asked.prompt_token_ids, asked.sampling.max_tokens)
        assert answers[name] == (expected[: len(answers[name])] if name in aborted else expected)
