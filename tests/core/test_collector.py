"""Garbage collection in short pauses: what each visits, and what becomes of cycles."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from bros.core.collector import THRESHOLDS, Collector
from bros.simulator.virtual_loop import run_virtual

YOUNG, MIDDLE, OLD = THRESHOLDS
MOST = 1.02 * (YOUNG + 1) * ((OLD + 1) * (MIDDLE + 2) + 1)
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
    assert gc.get_freeze_count() == 0


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
            kept = survivors(50_000)
        finally:
            gc.callbacks.remove(note)
        assert collector.is_due
    assert len(kept) == 50_000
    assert FEW < max(visited) < MOST


def test_cycles_that_end_soon_are_freed_without_a_full_collection() -> None:
    with Collector():
        nodes = [weakref.ref(Node()) for _ in range(50_000)]
        assert sum(node() is not None for node in nodes) < MOST


def frozen_cycle() -> weakref.ref[Node]:
    """A cycle that was in use for so long that it is frozen, and then became garbage."""
    node = Node()
    survivors(20_000)
    assert not any(each is node for each in gc.get_objects())
    return weakref.ref(node)


def test_a_full_collection_frees_cycles_that_lasted_longer() -> None:
    with Collector(due=10_000) as collector:
        node = frozen_cycle()
        survivors(20_000)
        assert node() is not None
        collector.collect_if_due(idle=False)
        assert node() is not None, "a user waits"
        assert collector.is_due
        collector.collect_if_due(idle=True)
        assert node() is None
        assert not collector.is_due


def test_a_process_that_is_never_idle_collects_when_too_much_is_frozen() -> None:
    with Collector(due=10_000, overdue=60_000) as collector:
        node = frozen_cycle()
        for _ in range(10):
            survivors(40_000)  # which reference counts free
            collector.collect_if_due(idle=False)
        assert node() is not None
        kept = survivors(100_000)
        collector.collect_if_due(idle=False)
        assert node() is None
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
        node = frozen_cycle()
        run_virtual(main)
