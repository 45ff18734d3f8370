"""Copies to the host that a step causes are part of its time, before and after it is packed."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.scheduler.cost_model import StepLoad
from bros.scheduler.packing import Bounds, Packing, pack
from support.packing import MODEL, SAFETY, Blocks, Item, predictor, row

COPYING = dataclasses.replace(
    MODEL,
    swap_constant_s=0.001,
    swap_token_s=1e-4,
    swap_out_constant_s=0.002,
    swap_out_token_s=5e-4,
)
BOUNDS = Bounds(rows=8, tokens=256)


def packed(urgent: list[Item], best_effort: list[Item], memory: Blocks, bounds: Bounds) -> Packing:
    return pack(urgent, best_effort, bounds, memory, predictor(COPYING), 0.0)


def seconds(packing: Packing, copied: int) -> float:
    """The step by the model, on the safe side."""
    load = StepLoad()
    for item, count in packing.selected:
        complete = count == item.remaining
        load.add(count, item.num_computed_tokens, complete, swapped=item.num_missing)
    load.copy_out(copied)
    return SAFETY * COPYING.seconds(load)


def test_a_row_that_others_lose_tokens_for_takes_time_for_their_copies() -> None:
    memory = Blocks(free=0, others=(10, 10))
    packing = packed([row("a")], [], memory, BOUNDS)
    assert memory.num_copied == packing.load.swap_out_tokens == 1
    assert packing.seconds == pytest.approx(seconds(packing, 1))


def test_what_has_copies_already_takes_no_time() -> None:
    """It was expected to: copies are counted only when victims are really preempted."""
    for item in (row("a"), Item("a", 20)):
        packing = packed([item], [], Blocks(free=0, others=(100, 0)), BOUNDS)
        assert len(packing.selected) == 1
        assert packing.load.swap_out_tokens == 0
        assert packing.seconds == pytest.approx(seconds(packing, 0))


def test_a_row_whose_copies_would_make_another_late_stays_out() -> None:
    first = row("a", due_s=0.025)
    for others, expected in (((10, 10), ["a"]), ((0, 0), ["a", "b"])):
        memory = Blocks(free=0 if others[0] else 10, others=others)
        # The first one has room in its last block.
        packing = packed(
            [dataclasses.replace(first, num_computed_tokens=6), row("b")], [], memory, BOUNDS
        )
        assert [item.name for item, _ in packing.selected] == expected
        assert packing.seconds <= 0.025


class Forgetting(Blocks):
    """A row that is replaced has no missing tokens any more, as with StepMemory."""

    def cancel(self, item: Item) -> None:
        super().cancel(item)
        object.__setattr__(item, "num_missing", 0)


def test_the_urgent_part_has_no_missing_tokens_of_a_row_that_was_replaced() -> None:
    bounds = dataclasses.replace(BOUNDS, rows=2)
    first, last = row("a"), dataclasses.replace(row("b"), num_missing=3)
    packing = packed([first, last], [row("f")], Forgetting(), bounds)
    assert [item.name for item, _ in packing.selected] == ["a", "f"]
    alone = packed([first], [], Blocks(), bounds)
    assert packing.urgent_s == pytest.approx(alone.urgent_s)
    assert packing.load.swap_tokens == 3, "the step restores them"


def test_best_effort_is_cut_to_what_fits_with_its_copies() -> None:
    bounds = dataclasses.replace(BOUNDS, best_effort_s=0.120)
    urgent = [dataclasses.replace(row("a", due_s=1.0), num_computed_tokens=6)]
    free, tight = Blocks(), Blocks(free=0, others=(200, 200))
    sizes = []
    for memory in (free, tight):
        packing = packed(urgent, [Item("be", 200)], memory, bounds)
        assert packing.seconds <= 0.120 < packing.seconds + SAFETY * 0.002
        assert packing.seconds == pytest.approx(seconds(packing, memory.num_copied))
        sizes.append(packing.selected[1][1])
    assert tight.num_copied == sizes[1] < sizes[0]


def test_without_a_predictor_copies_are_not_asked_for() -> None:
    memory = Blocks(free=0, others=(10, 10))
    packing = pack([row("a")], [], BOUNDS, memory, None, 0.0)
    assert len(packing.selected) == 1


items = st.builds(
    Item,
    name=st.uuids().map(str),
    remaining=st.sampled_from([1, 1, 1, 5, 20, 60]),
    num_computed_tokens=st.integers(1, 30),
    deadline_s=st.sampled_from([0.03, 0.1, 0.3, math.inf]),
    num_missing=st.sampled_from([0, 0, 0, 1]),
)


@given(
    urgent=st.lists(items, max_size=6),
    best_effort=st.lists(items, max_size=6),
    free=st.integers(0, 10),
    others=st.integers(0, 100),
    without_copy=st.integers(0, 100),
    best_effort_s=st.sampled_from([0.05, 0.2, math.inf]),
)
def test_the_predicted_step_is_what_it_holds_and_what_was_copied_for_it(
    urgent: list[Item],
    best_effort: list[Item],
    free: int,
    others: int,
    without_copy: int,
    best_effort_s: float,
) -> None:
    memory = Blocks(free=free, others=(others, without_copy))
    bounds = Bounds(rows=5, tokens=128, best_effort_s=best_effort_s)
    packing = packed(urgent, best_effort, memory, bounds)
    assert packing.load.swap_out_tokens == memory.num_copied
    if packing.selected:
        total = packing.load.swap_tokens
        missing = sum(item.num_missing for item, _ in packing.selected)
        assert total >= missing + memory.num_copied  # a replaced request gets its tokens back, too
        if total == missing + memory.num_copied:
            assert packing.seconds == pytest.approx(seconds(packing, memory.num_copied))
