"""A runner that leads and others that follow do the same, in the same order.

Every rank has the whole model here and the ranks are threads, so that what one computes is what
all must compute: their KV memories end alike. Sums and shards are tried elsewhere.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.config import EngineConfig
from bros.core.errors import RanksLostError
from bros.core.interfaces import LaunchingExecutor
from bros.core.plan import Kept, KvCopies, StepPlan, StepResult, SuspendedStep
from bros.executor.loader import random_executor
from bros.executor.parallel.ranks import SingleRank
from bros.executor.parallel.runner import lead
from support.device_runners import BLOCK, Assembled, Scripted, assemble, family_plans, tiny_spec
from support.growing_requests import make_requests, run_ahead, run_one_by_one, script
from support.thread_ranks import team
from support.tier import examples

DEEP = tiny_spec(num_hidden_layers=20)


def check_alike(made: Sequence[Assembled], layers: int | None = None) -> None:
    """KV memories hold the same bits, and something."""
    first, *others = (each.kv.layers for each in made)
    for other in others:
        for one, another in zip(first, other, strict=True):
            assert torch.equal(one[0], another[0]) and torch.equal(one[1], another[1])
    written = [bool(keys.any()) for keys, _ in first]
    assert written == [layers is None or index < layers for index in range(len(first))]


@pytest.mark.parametrize("graph_rows", [None, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_followers_compute_what_the_first_rank_computes(size: int, graph_rows: int | None) -> None:
    made = [assemble(graph_rows=graph_rows) for _ in range(size)]
    alone = assemble(graph_rows=graph_rows)
    with team([each.runner for each in made]) as group:
        for plan in family_plans(random.Random(3), 4, 64):
            assert group.executor.execute(plan) == alone.runner.execute(plan)
        group.ranks[0].settle()
        check_alike([alone, *made])
    assert not group.errors
    assert all(ranks.said == group.ranks[0].said for ranks in group.ranks)


@settings(max_examples=examples(25))
@given(
    count=st.integers(1, 5),
    steps=st.integers(1, 7),
    graph_rows=st.sampled_from([None, 2, 8]),
    seed=st.integers(0, 2**32 - 1),
)
def test_running_ahead_chooses_the_same_tokens_on_all_ranks(
    count: int, steps: int, graph_rows: int | None, seed: int
) -> None:
    plain, *made = [assemble(), *(assemble(graph_rows=graph_rows) for _ in range(2))]
    chosen = script(random.Random(seed), count, steps)
    requests = [make_requests(random.Random(seed), count) for _ in range(2)]
    expected = run_one_by_one(plain.runner, requests[0], chosen)
    with team([each.runner for each in made]) as group:
        assert isinstance(group.executor, LaunchingExecutor)
        found = run_ahead(group.executor, requests[1], chosen)  # type: ignore[arg-type]
        group.ranks[0].settle()
        check_alike(made)
    assert not group.errors
    tokens = [[(s.request_id, s.token_id) for s in samples] for samples in expected]
    assert [[(s.request_id, s.token_id) for s in samples] for samples in found] == tokens
    assert group.ranks[0].said == group.ranks[1].said


def test_copies_are_made_by_all() -> None:
    made = [assemble(host_blocks=2) for _ in range(2)]
    request = Scripted("a", list(range(40)), [5, 6, 7], 0)
    out, host = array("i", range(5 * BLOCK, 6 * BLOCK)), array("i", range(3, 3 + BLOCK))
    back = array("i", range(9 * BLOCK, 10 * BLOCK))
    with team([each.runner for each in made]) as group:
        group.executor.execute(StepPlan(0, (request.chunk(30),)))
        group.ranks[0].settle()
        there = made[1].kv.layers[0][0][5].clone()
        copies = KvCopies(out, host, host, back)
        group.executor.execute(StepPlan(1, (request.chunk(1),), copies))
        group.ranks[0].settle()
        check_alike(made)
        assert torch.equal(made[1].kv.layers[0][0][9], there)


@pytest.mark.parametrize("asked", [1, 2, 5])
def test_all_ranks_suspend_a_step_at_the_same_layer(asked: int) -> None:
    """They ask about eight times in a step: here, before every third of twenty layers."""
    made = [assemble(DEEP) for _ in range(2)]
    plans = family_plans(random.Random(3), 3, 64)
    answers = iter([*[False] * (asked - 1), True])
    with team([each.runner for each in made]) as group:
        stopped = group.executor.execute(plans[0], lambda: next(answers))
        assert stopped == SuspendedStep(0, layer := 3 * (asked - 1), 20)
        group.ranks[0].settle()
        check_alike(made, layers=layer)
        kept = [Kept(0, row, layer) for row in range(len(plans[0].chunks))] if layer else []
        assert [sorted(each.runner._kept._states) for each in made] == [kept, kept]
        plans[0] = replace(plans[0], dropped=tuple(kept))
        for plan in plans:
            assert group.executor.execute(plan, lambda: False) is not None
        group.ranks[0].settle()
        check_alike(made)
    assert not group.errors and not any(each.runner._kept for each in made)
    assert group.ranks[0].said == group.ranks[1].said
    assert group.ranks[0].said.count("any") == asked + 7 * len(plans)


def test_followers_continue_what_was_suspended_as_the_first_rank_does() -> None:
    """A prompt stops at layer 6 and again at 12, beside others, and is done as if it had not."""
    made, alone = [assemble(DEEP) for _ in range(2)], assemble(DEEP)
    prompt, other = Scripted("a", range(50), range(4), 0), Scripted("b", range(40), range(4, 8), 0)
    chunk = prompt.chunk(50)
    expected = alone.runner.execute(StepPlan(9, (other.chunk(30), chunk)))
    assert isinstance(expected, StepResult)
    other.computed = 0
    with team([each.runner for each in made]) as group:
        asked = iter([False, False, True])
        group.executor.execute(StepPlan(1, (chunk,)), lambda: next(asked))
        again = replace(chunk, kept=Kept(1, 0, 6))
        asked = iter([False, False, False, False, True])
        plan = StepPlan(2, (other.chunk(20), again))
        assert group.executor.execute(plan, lambda: next(asked)) == SuspendedStep(2, 12, 20)
        last = [replace(c, kept=Kept(2, row, 12)) for row, c in enumerate(plan.chunks)]
        group.executor.execute(StepPlan(3, (last[0],)))
        found = group.executor.execute(StepPlan(9, (other.chunk(10), last[1])))
        group.ranks[0].settle()
        check_alike(made)
    assert isinstance(found, StepResult) and found.samples[1] == expected.samples[1]
    assert not group.errors and not any(each.runner._kept for each in made)


def test_a_replayed_step_is_aborted_before_it_begins_or_not_at_all() -> None:
    made = [assemble(DEEP, graph_rows=4) for _ in range(2)]
    prompt = Scripted("a", list(range(40)), [5, 6, 7], 0)
    with team([each.runner for each in made]) as group:
        group.executor.execute(StepPlan(0, (prompt.chunk(30),)))
        decode = StepPlan(1, (prompt.chunk(1),))
        assert group.executor.execute(decode, lambda: True) is None
        group.ranks[0].settle()
        replayed = [sum(each.replays.counts) for each in made]
        assert group.executor.execute(decode, lambda: False) is not None
        group.ranks[0].settle()
        check_alike(made)
    assert [sum(each.replays.counts) for each in made] == [count + 1 for count in replayed]
    assert not group.errors


def test_closing_ends_the_following_ranks() -> None:
    made = [assemble() for _ in range(3)]
    with team([each.runner for each in made]) as group:
        group.executor.close()
        group.wait()
        group.executor.close()
    assert not group.errors
    for each in made:
        with pytest.raises(AssertionError, match="the executor is closed"):
            each.runner.execute(family_plans(random.Random(3), 1, 64)[0])


def test_a_rank_that_is_lost_ends_the_others() -> None:
    made = [assemble() for _ in range(3)]
    with team([each.runner for each in made]) as group:
        group.ranks[1].close()
        with pytest.raises(RanksLostError):
            group.executor.execute(family_plans(random.Random(3), 1, 64)[0])
        group.wait()
        group.executor.close()  # all the same
    assert [type(error) for error in group.errors] == [RanksLostError] * 2


def test_one_rank_needs_no_others() -> None:
    runner = assemble().runner
    assert lead(runner, SingleRank()) is runner


def test_only_what_can_launch_alone_can_launch_with_others() -> None:
    config = EngineConfig(device="cpu", kv_blocks=64, threads=1, kernels="reference")
    plain = [random_executor(tiny_spec(), config)[0] for _ in range(2)]
    alone, _ = random_executor(tiny_spec(), config)
    with team(plain) as group:
        assert not isinstance(group.executor, LaunchingExecutor)
        for plan in family_plans(random.Random(5), 2, 64):
            assert group.executor.execute(plan) == alone.execute(plan)
    assert not group.errors
