"""The rows that kill the engine are found, and no others are taken for them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.batch.admission import MAX_ATTEMPTS, SuspectIsolation


async def settle() -> None:
    """Let everything happen that can: nothing here takes more than a few turns of the loop."""
    for _ in range(8):
        await asyncio.sleep(0)


@dataclass
class Room:
    """Rows that run, each until it is told to leave."""

    isolation: SuspectIsolation = field(default_factory=SuspectIsolation)
    inside: list[str] = field(default_factory=list)
    _leaves: dict[str, asyncio.Event] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def enter(self, name: str, interruptions: int) -> None:
        self._leaves[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._visit(name, interruptions))
        await settle()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._leaves[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await settle()

    async def _visit(self, name: str, interruptions: int) -> None:
        async with self.isolation.admitted(interruptions):
            self.inside.append(name)
            try:
                await self._leaves[name].wait()
            finally:
                self.inside.remove(name)


async def test_rows_that_were_never_there_run_all_together() -> None:
    room = Room()
    for number in range(100):
        await room.enter(f"row-{number}", 0)
    assert len(room.inside) == 100


async def test_few_suspects_run_at_a_time_beside_others() -> None:
    room = Room()
    for number in range(20):
        await room.enter(f"suspect-{number}", 1)
    await room.enter("fresh", 0)
    assert 1 < len(room.inside) - 1 < 10
    assert "fresh" in room.inside
    first = room.inside[0]
    await room.leave(first)
    assert first not in room.inside and 1 < len(room.inside) - 1 < 10


@pytest.mark.parametrize("interruptions", [2, 3])
async def test_who_was_there_twice_runs_alone(interruptions: int) -> None:
    room = Room()
    await room.enter("early", 0)
    await room.enter("suspect", 1)
    await room.enter("alone", interruptions)
    await room.enter("also", interruptions)
    await room.enter("late", 0)
    assert room.inside == ["early", "suspect"]
    await room.leave("early", "suspect")
    assert room.inside == ["alone"]
    await room.leave("alone")
    assert room.inside == ["also"]  # before others, whom it would wait for again
    await room.leave("also")
    assert room.inside == ["late"]


async def test_who_gives_up_waiting_holds_nobody_up() -> None:
    room = Room()
    await room.enter("early", 0)
    await room.enter("alone", 2)
    await room.enter("next", 2)
    await room.enter("late", 1)
    await room.cancel("alone")
    await room.cancel("next")
    assert room.inside == ["early", "late"]
    await room.cancel("late")
    await room.enter("again", 2)
    await room.leave("early")
    assert room.inside == ["again"]
    await room.cancel("again")
    await room.enter("last", 0)
    assert room.inside == ["last"]


@given(
    poisons=st.sets(st.integers(0, 29), max_size=6),
    slots=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_exactly_the_poison_is_given_up(poisons: set[int], slots: int, seed: int) -> None:
    given_up, deaths = asyncio.run(run_rows(poisons, slots, random.Random(seed)))
    assert given_up == poisons
    assert deaths <= MAX_ATTEMPTS * len(poisons)


async def run_rows(poisons: set[int], slots: int, rng: random.Random) -> tuple[set[int], int]:
    """30 rows, so many at a time, on an engine that dies of some after a while."""
    isolation, room = SuspectIsolation(), asyncio.Semaphore(slots)
    given_up, deaths = set[int](), 0

    async def is_answered(number: int) -> bool:
        nonlocal deaths
        life = deaths
        for _ in range(rng.randrange(1, 10)):
            await asyncio.sleep(0)
            if deaths > life:
                return False
        deaths += number in poisons
        return number not in poisons

    async def run(number: int) -> None:
        async with room:
            for interruptions in range(MAX_ATTEMPTS):
                async with isolation.admitted(interruptions):
                    if await is_answered(number):
                        return
            given_up.add(number)

    await asyncio.gather(*map(run, range(30)))
    return given_up, deaths
