"""Garbage collection in short pauses: what each visits, and what becomes of cycles."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from bros.core.collector import THRESHOLDS, Collector
from bros.simulator.virtual_loop import run_virtual

YOUNG, MIDDLE, _ = THRESHOLDS
MOST = 1.02 * (YOUNG + 1) * (MIDDLE + 2)
"""Objects that the longest collection visits, see THRESHOLDS; a few are made by the test itself."""
FEW = 0.9 * MOST


class Node:
    """An object in a cycle of its own."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    yield
    assert gc.get_threshold() == thresholds
    assert gc.callbacks == callbacks
    assert gc.get_freeze_count() < 1000  # 3.12 freezes immortal objects in full collections


def survivors(count: int) -> list[list[int]]:
    """So many objects for the collector; as a generator makes them, one by one."""
    return [[number] for number in range(count)]


def test_no_automatic_collection_visits_more_than_the_thresholds_allow() -> None:
    visited: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            counts = [len(gc.get_objects(generation=n)) for n in range(info["generation"] + 1)]
            visited.append(sum(counts))

    with Collector(due=20_000) as collector:
        gc.callbacks.append(note)
        try:
            kept = survivors(200_000)
        finally:
            gc.callbacks.remove(note)
        assert collector.may_be_due
    assert len(kept) == 200_000
    assert FEW < max(visited) < MOST


def test_cycles_that_end_soon_are_freed_without_a_full_collection() -> None:
    with Collector():
        nodes = [weakref.ref(Node()) for _ in range(50_000)]
        assert sum(node() is not None for node in nodes) < MOST


def test_objects_made_while_as_many_old_ones_end_are_collected_when_there_are_many() -> None:
    """CPython does not notice them."""
    with Collector() as collector:
        kept = survivors(60_000)
        for first in range(0, 50_000, 10_000):
            for number in range(first, first + 10_000):
                kept[number] = [number]
            assert len(gc.get_objects(generation=0)) > 2 * YOUNG
            collector.collect_young_if_due()
            assert len(gc.get_objects(generation=0)) < YOUNG
        assert len(gc.get_objects(generation=1)) < 40_000  # some have become old
        assert gc.get_count()[1] <= MIDDLE + 1


def test_few_young_objects_are_left_alone() -> None:
    with Collector() as collector:
        gc.collect(1)
        kept = survivors(YOUNG // 2)
        collector.collect_young_if_due()
        assert len(gc.get_objects(generation=0)) >= len(kept)


def old_cycle() -> weakref.ref[Node]:
    """A cycle that was in use for so long that it is old, and then became garbage."""
    node = Node()
    survivors(20_000)
    assert any(each is node for each in gc.get_objects(generation=2))
    return weakref.ref(node)


def visits(collector: Collector, *, idle: bool) -> list[int]:
    """How many objects are visited by the full collections that it makes now."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(len(gc.get_objects()))

    gc.callbacks.append(note)
    try:
        collector.collect_if_due(idle=idle)
    finally:
        gc.callbacks.remove(note)
    return found


def test_a_full_collection_frees_cycles_that_lasted_longer() -> None:
    with Collector(due=10_000) as collector:
        node = old_cycle()
        kept = survivors(20_000)
        assert node() is not None
        collector.collect_if_due(idle=False)
        assert node() is not None, "a user waits"
        (visited,) = visits(collector, idle=True)
        assert node() is None
        assert visited < 2 * len(kept), "what was there before was visited"
        assert not collector.may_be_due


def test_what_reference_counts_have_freed_is_not_looked_for() -> None:
    with Collector(due=10_000) as collector:
        survivors(100_000)
        assert collector.may_be_due
        assert visits(collector, idle=True) == []
        assert not collector.may_be_due


def test_much_that_is_alive_is_not_visited() -> None:
    """A session of 10,000 calls that waits keeps it for hours; a collection would take long."""
    with Collector(due=10_000, max_kept=100_000) as collector:
        node = old_cycle()
        kept = survivors(100_000)
        assert visits(collector, idle=True) == []
        assert node() is not None
        del kept[20_000:]
        assert len(visits(collector, idle=True)) == 1
        assert node() is None


def test_a_process_that_is_never_idle_collects_when_too_much_is_kept() -> None:
    with Collector(due=10_000, max_kept=20_000, overdue=200_000) as collector:
        node = old_cycle()
        for _ in range(10):
            survivors(40_000)  # which reference counts free
            collector.collect_if_due(idle=False)
        assert node() is not None
        kept = survivors(100_000)
        collector.collect_if_due(idle=False)
        assert node() is None
        del kept


def test_a_process_that_is_never_idle_seldom_counts_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine asks in every step."""
    count, counts = sys.getallocatedblocks, []

    def counting() -> int:
        counts.append(count())
        return counts[-1]

    with Collector(due=10_000) as collector:
        kept = survivors(50_000)
        monkeypatch.setattr(sys, "getallocatedblocks", counting)
        for _ in range(1000):
            collector.collect_if_due(idle=False)
    assert len(counts) == 1
    del kept


@pytest.mark.parametrize("idle", [False, True])
def test_it_collects_within_seconds_once_the_process_is_idle(idle: bool) -> None:
    async def is_idle() -> bool:
        return idle

    async def main() -> None:
        task = asyncio.create_task(collector.run(is_idle))
        await asyncio.sleep(5.0)
        assert (node() is None) == idle
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with Collector(due=10_000) as collector:
        node, kept = old_cycle(), survivors(20_000)
        run_virtual(main)
    del kept
