"""Prefill-only requests that no request waits for yet: they run where they cost others little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bros.core.request import Hints, ServiceClass, Slo
from bros.scheduler.cost_model import CostModel
from bros.scheduler.packing import Bounds, Packing, Rules, pack
from support.packing import MODEL, Blocks, Item, names, predictor, row
from support.prefix_run import BE, RT, Run
from support.scheduling import READING

EARLY_HINTS = Hints(early=True)


def early(name: str = "early", tokens: int = 400, cached: int = 0) -> Item:
    return Item(name, tokens, cached, samples=False, early=True)


def packed(
    model: CostModel,
    *best_effort: Item,
    urgent: tuple[Item, ...] = (),
    bounds: Bounds | None = None,
) -> Packing:
    bounds = bounds or Bounds(rows=16, tokens=1000)
    return pack(urgent, best_effort, bounds, Blocks(), predictor(model), now=0.0)


# What one step takes of them


LIMITED = Bounds(rows=16, tokens=1000, best_effort_s=0.2)


def test_they_take_the_time_that_others_leave() -> None:
    assert packed(MODEL, early()).selected == [(early(), 400)]
    packing = packed(MODEL, early(), urgent=(row("chat"),), bounds=LIMITED)
    assert names(packing.selected) == ["chat", "early"]
    (_, chunk) = packing.selected[1]
    assert packing.seconds <= 0.2 < packing.seconds + MODEL.token_s and chunk < 400


def test_one_that_finds_no_time_waits_without_ending_the_step() -> None:
    bounds = replace(LIMITED, best_effort_s=0.0)
    packing = packed(MODEL, early(), early("second"), urgent=(row("chat"),), bounds=bounds)
    assert names(packing.selected) == ["chat"]
    assert packing.passed_over == [(early(), "early"), (early("second"), "early")]


def test_what_has_begun_goes_on() -> None:
    """Others may wait for what it computes."""
    begun = early(tokens=200, cached=200)
    assert names(packed(MODEL, begun, urgent=(row("chat"),)).selected) == ["chat", "early"]


def test_what_is_owed_to_best_effort_work_is_not_owed_to_them() -> None:
    bounds = Bounds(rows=16, tokens=1000, best_effort_s=0.0, best_effort_credit_s=1.0)
    packing = packed(MODEL, early(), urgent=(row("chat"),), bounds=bounds)
    assert names(packing.selected) == ["chat"] and not packing.spends_credit


def test_prompts_that_may_not_be_cut_are_not() -> None:
    bounds = replace(LIMITED, best_effort_s=0.12, rules=Rules(chunked=False))
    assert names(packed(READING, early(), urgent=(row("chat"),), bounds=bounds).selected) == [
        "chat"
    ]
    few = early(tokens=190)
    packing = packed(READING, few, urgent=(row("chat"),), bounds=bounds)
    assert packing.selected[1] == (few, 190)


# In a scheduler


def fill(run: Run, name: str, first: int, tokens: int = 40) -> None:
    run.submit(name, [first, *range(2, tokens + 1)], BE, prefill_only=True, hints=EARLY_HINTS)


def test_it_waits_for_a_pause_and_is_there_for_what_comes() -> None:
    run = Run(max_batch_tokens=256)
    run.submit("chat", 20, RT, max_tokens=6, slo=Slo(1.0, 0.023))  # leaves no time
    run.step()
    fill(run, "early", 600)
    while "chat" not in run.ends:
        assert set(run.step()) == {"chat"}
    trace = run.scheduler.trace("early")
    assert trace is not None and set(trace.waits) == {"early"}
    assert set(run.step()) == {"early"}
    run.submit("next", [600, *range(2, 41), 7], RT)
    run.drain()
    assert (run.cached["next"], run.computed["next"]) == (40, 1)


def test_many_of_them_are_not_in_the_way_of_a_batch_job() -> None:
    """However early they came, and however few requests the scheduler looks at."""
    run = Run(max_batch_tokens=256, max_num_seqs=4)
    run.submit("chat", 20, RT, max_tokens=30)
    run.step()
    for number in range(20):
        fill(run, f"early {number}", 600 + number)
    run.submit("batch", range(500, 540), BE, max_tokens=2)
    while "batch" not in run.ends:
        assert "chat" not in run.ends
        assert set(run.step()) <= {"chat", "batch"}
    run.drain()
    assert all(run.computed[f"early {number}"] == 40 for number in range(20))


def test_they_earn_best_effort_work_no_time() -> None:
    """A chat leaves no time, and best-effort work gets what it is owed: from when it waits."""
    begins = []
    for beside in (False, True):
        run = Run(max_batch_tokens=256, be_share=0.1)
        run.submit("chat", 20, RT, max_tokens=150, slo=Slo(1.0, 0.023))
        run.step()
        if beside:
            fill(run, "early", 600)
        for _ in range(30):
            assert set(run.step()) == {"chat"}
        run.submit("batch", range(500, 540), BE, max_tokens=2)
        begins.append(next(step for step in range(100) if "batch" in run.step()))
    assert begins[0] == begins[1] > 0


@pytest.mark.parametrize("service_class", ServiceClass)
def test_only_best_effort_prefill_only_requests_are_early(service_class: ServiceClass) -> None:
    run = Run(max_batch_tokens=256)
    run.submit("chat", 20, RT, max_tokens=9)
    run.step()
    run.submit("answer", range(100, 140), service_class, hints=EARLY_HINTS)
    assert "answer" in run.step()
