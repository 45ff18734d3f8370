"""What is moved when a replica comes up: as few as it takes, and nothing that has begun."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from bros.core.interfaces import EngineReport
from bros.core.request import EngineRequest, SamplingParams
from bros.router.replica_set import ReplicaHandle, RoutedRequest, requests_to_rebalance
from support.killable_engine import KillableEngine


def member(number: int, begun: int, waiting: int, *, draining: bool = False) -> ReplicaHandle:
    """Its requests are named by it and their turn; the first `begun` have begun."""
    found = ReplicaHandle(
        number, f"replica-{number}", KillableEngine(), fleet_id=number, draining=draining
    )
    found.report = EngineReport(version=1, waiting=waiting)
    for turn in range(begun + waiting):
        name = f"{number}-{turn}"
        item = RoutedRequest(
            EngineRequest(request_id=name, prompt_token_ids=[1], sampling=SamplingParams())
        )
        item.replica, item.fleet_id, item.accepted = found, number, True
        item.has_output = turn < begun
        found.open[item.id] = item
    return found


async def test_the_latest_of_a_queue_go() -> None:
    moved = requests_to_rebalance([member(0, 4, 8), member(1, 0, 0)])
    assert [item.id for item in moved] == ["0-11", "0-10", "0-9", "0-8", "0-7", "0-6"]


async def test_who_serves_all_that_it_has_keeps_it() -> None:
    assert requests_to_rebalance([member(0, 10, 0), member(1, 0, 0)]) == []


async def test_who_takes_none_is_neither_relieved_nor_relieves() -> None:
    assert requests_to_rebalance([member(0, 0, 10), member(1, 0, 0, draining=True)]) == []


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=5))
def test_moving_evens_out_and_never_twice(sizes: list[tuple[int, int, bool]]) -> None:
    asyncio.run(_evens_out(sizes))


async def _evens_out(sizes: list[tuple[int, int, bool]]) -> None:
    members = [
        member(number, begun, waiting, draining=draining)
        for number, (begun, waiting, draining) in enumerate(sizes)
    ]
    moved = requests_to_rebalance(members)
    assert not any(item.has_output for item in moved)
    left = {each.number: len(each.open) for each in members if each.available}
    total = sum(left.values())
    for item in moved:
        assert item.replica is not None
        left[item.replica.number] -= 1
        item.moving = True
    for each in members:
        if each.available and len(left) > 1:
            fair = -(-total // len(left))
            before = len(each.open)
            assert left[each.number] == before - max(0, min(each.report.waiting, before - fair))
    assert len(moved) == len({item.id for item in moved})
    assert requests_to_rebalance(members) == [], "what is on its way counts"
