"""RowLimiter: the smallest key of the tenant with the fewest rows first, and none is ever lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.batch.admission import RowLimiter


async def settle() -> None:
    """Let everything happen that can: nothing here takes more than a few turns of the loop."""
    for _ in range(8):
        await asyncio.sleep(0)


class Guest:
    """A task that takes a slot and keeps it until told to leave."""

    def __init__(self, limiter: RowLimiter, key: int, name: int, came_in: list[int]) -> None:
        self.key = key
        self.name = name
        self._limiter = limiter
        self._came_in = came_in
        self._leaves = asyncio.Event()
        self._is_in = False
        self.task = asyncio.create_task(self._visit())

    @property
    def is_in(self) -> bool:
        return self._is_in and not self.task.done()

    @property
    def waits(self) -> bool:
        return not self._is_in and not self.task.done()

    def leave(self) -> None:
        self._leaves.set()

    async def _visit(self) -> None:
        await self._limiter.acquire(self.key)
        self._is_in = True
        self._came_in.append(self.name)
        try:
            await self._leaves.wait()
        finally:
            self._limiter.release()


async def test_the_smallest_key_comes_in_first_and_equal_ones_in_turn() -> None:
    limiter, came_in = RowLimiter(1), list[int]()
    guests = [Guest(limiter, key, name, came_in) for name, key in enumerate([0, 5, 3, 5, 3, 1])]
    await settle()
    for name in (0, 5, 2, 4, 1, 3):
        assert came_in[-1] == name
        guests[name].leave()
        await settle()
    assert came_in == [0, 5, 2, 4, 1, 3]
    assert limiter.used == 0


async def test_a_higher_limit_lets_more_in_and_a_lower_one_throws_nobody_out() -> None:
    limiter, came_in = RowLimiter(1), list[int]()
    guests = [Guest(limiter, name, name, came_in) for name in range(5)]
    await settle()
    assert (limiter.limit, limiter.used) == (1, 1)
    limiter.limit = 3
    await settle()
    assert came_in == [0, 1, 2]
    limiter.limit = 1
    assert limiter.used == 3
    for name, inside in ((0, 2), (1, 1), (2, 1)):  # the last one makes room
        guests[name].leave()
        await settle()
        assert limiter.used == inside
    assert came_in == [0, 1, 2, 3]
    for guest in guests:
        guest.leave()
    await settle()
    assert limiter.used == 0


async def test_tenants_have_as_many_rows_each_whatever_their_keys() -> None:
    limiter, inside = RowLimiter(4), list[str]()

    async def row(tenant: str, key: int) -> None:
        await limiter.acquire(key, tenant)
        inside.append(tenant)

    tasks = [asyncio.create_task(row("a", 0)) for _ in range(9)]
    await settle()
    assert inside == ["a"] * 4  # no place is kept free
    tasks += [asyncio.create_task(row("b", 1)) for _ in range(3)]
    for _ in range(4):
        limiter.release("a")
        await settle()
    assert inside[4:] == ["b", "b", "a", "a"]  # two rows each
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("turns", [0, 1])
async def test_who_is_cancelled_as_it_is_let_in_gives_the_place_on(turns: int) -> None:
    """Before the event loop has come to that, or when it has and the task does not know yet."""
    limiter, came_in = RowLimiter(1), list[int]()
    guests = [Guest(limiter, 0, name, came_in) for name in range(3)]
    await settle()
    limiter.limit = 2
    for _ in range(turns):
        await asyncio.sleep(0)
    assert limiter.used == 1 + turns
    guests[1].task.cancel()
    await settle()
    assert came_in == [0, 2]
    assert limiter.used == 2
    await close(guests, limiter)


@dataclass
class Model:
    """What limiter should do, written down naively. `inside` holds names."""

    limit: int
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (key, name)
    inside: list[int] = field(default_factory=list)

    def admit(self) -> None:
        while self.waiting and len(self.inside) < self.limit:
            first = min(self.waiting)
            self.waiting.remove(first)
            self.inside.append(first[1])


orders = st.one_of(
    st.tuples(st.just("acquire"), st.integers(0, 3)),
    st.tuples(st.just("leave"), st.integers(0, 30)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("resize"), st.integers(0, 4)),
)


def obey(order: tuple[str, int], guests: list[Guest], limiter: RowLimiter, model: Model) -> None:
    what, number = order
    if what == "resize":
        limiter.limit = model.limit = number
    elif guests:
        guest = guests[number % len(guests)]
        if what == "leave" and guest.is_in:
            guest.leave()
            model.inside.remove(guest.name)
        elif what == "cancel" and not guest.task.done():
            guest.task.cancel()
            if guest.is_in:
                model.inside.remove(guest.name)
            else:
                model.waiting.remove((guest.key, guest.name))


@given(script=st.lists(orders, max_size=40), limit=st.integers(0, 3))
def test_it_does_what_a_naive_model_does(script: list[tuple[str, int]], limit: int) -> None:
    async def run() -> None:
        limiter, model, came_in = RowLimiter(limit), Model(limit), list[int]()
        guests: list[Guest] = []
        for order in script:
            if order[0] == "acquire":
                model.waiting.append((order[1], len(guests)))
                guests.append(Guest(limiter, order[1], len(guests), came_in))
            else:
                obey(order, guests, limiter, model)
            model.admit()
            await settle()
            assert {guest.name for guest in guests if guest.is_in} == set(model.inside)
            assert limiter.used == len(model.inside)
        await close(guests, limiter)

    asyncio.run(run())


@given(
    script=st.lists(st.tuples(orders, st.integers(0, 3)), max_size=40),
    limit=st.integers(0, 3),
)
def test_no_slot_is_lost_whenever_somebody_is_cancelled(
    script: list[tuple[tuple[str, int], int]], limit: int
) -> None:
    """Orders follow one another so quickly that they meet every state in between."""

    async def run() -> None:
        limiter, came_in = RowLimiter(limit), list[int]()
        guests: list[Guest] = []
        for (what, number), turns in script:
            if what == "acquire":
                guests.append(Guest(limiter, number, len(guests), came_in))
            elif what == "resize":
                limiter.limit = number
            elif guests:
                guest = guests[number % len(guests)]
                guest.leave() if what == "leave" else guest.task.cancel()
            for _ in range(turns):
                await asyncio.sleep(0)
        await settle()
        inside = sum(guest.is_in for guest in guests)
        assert limiter.used == inside
        if any(guest.waits for guest in guests):
            assert inside >= limiter.limit  # no row waits while there is a free place
        await close(guests, limiter)

    asyncio.run(run())


async def close(guests: list[Guest], limiter: RowLimiter) -> None:
    """Everybody goes; all limiter are free again."""
    for guest in guests:
        guest.task.cancel()
    await asyncio.gather(*(guest.task for guest in guests), return_exceptions=True)
    assert limiter.used == 0


async def test_who_needs_several_gets_all_of_them_before_somebody_less_urgent() -> None:
    limiter, came_in = RowLimiter(0), list[str]()

    async def need(name: str, key: int) -> None:
        for _ in range(4):
            await limiter.acquire(key)
            came_in.append(name)

    tasks = [asyncio.create_task(need("late", 2)), asyncio.create_task(need("early", 1))]
    await settle()
    limiter.limit = 6
    await settle()
    assert came_in == ["early"] * 4 + ["late"] * 2
    limiter.limit = 8
    await asyncio.gather(*tasks)
    assert came_in == ["early"] * 4 + ["late"] * 4
