"""Short work of many requests is spread over turns of the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.clock import ManualClock
from bros.server.batches.rows import RowRunner
from bros.server.http import offload_reply, pieces_response
from bros.server.turns import MAX_CALLS_S, MAX_TURN_S, LoopTurns, SpreadCalls
from support.scripted_server import Server
from support.turns import use_turns, used_up_turns

MAX_WOKEN = 8


async def changes_by_turn(count: Callable[[], int], work: Awaitable[object]) -> list[int]:
    """By how much `count()` grew in each turn of the event loop until `work` was done."""
    task, found, before = asyncio.ensure_future(work), list[int](), count()
    while not task.done():
        await asyncio.sleep(0)
        found.append(count() - before)
        before = count()
    await task
    return found


async def started(costs_s: Sequence[float]) -> list[list[int]]:
    """Works that take so long come at once; returns which of them began in each turn."""
    clock = ManualClock()
    turns, begun = LoopTurns(clock.now), list[int]()

    async def work(number: int) -> None:
        await turns.begin("all")
        begun.append(number)
        clock.advance(costs_s[number])

    found = await changes_by_turn(
        lambda: len(begun), asyncio.gather(*(work(i) for i in range(len(costs_s))))
    )
    numbers = iter(begun)
    return [[next(numbers) for _ in range(count)] for count in found]


@given(st.lists(st.floats(0.00001, 0.003), min_size=1, max_size=60))
def test_work_that_come_at_once_begin_in_order_and_few_in_a_turn(costs_s: list[float]) -> None:
    first, *others = asyncio.run(started(costs_s))
    assert [*first, *itertools.chain(*others)] == list(range(len(costs_s)))
    # The last one that begins at once takes as long as it takes.
    assert sum(costs_s[i] for i in first[:-1]) < MAX_TURN_S
    assert all(len(each) <= MAX_WOKEN for each in others)
    long = [sum(costs_s[i] for i in each) for each in others]
    steady = max(costs_s) / min(costs_s) < 1.5
    assert not steady or max(long, default=0.0) <= 2 * MAX_TURN_S + max(costs_s)


@given(st.lists(st.tuples(st.floats(0.00001, 0.01), st.sampled_from("abc")), min_size=1))
def test_calls_that_come_at_once_are_made_in_turns_and_few_in_a_turn(
    calls: list[tuple[float, str]],
) -> None:
    """costs_s, owner: of each call."""
    clock, made = ManualClock(), list[int]()

    async def run() -> list[int]:
        spread = SpreadCalls(clock.now)

        def call(number: int) -> None:
            made.append(number)
            clock.advance(calls[number][0])

        for number, (_, owner) in enumerate(calls):
            spread.make(owner, functools.partial(call, number))
        counts = [len(made)]
        while len(made) < len(calls):
            await asyncio.sleep(0)
            counts.append(len(made) - sum(counts))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        spread.make("a", lambda: made.append(-1))
        assert made.pop() == -1, "a lone call is made at once"
        return counts

    at_once, *later = asyncio.run(run())
    begin = 0
    for count in (at_once, *later):
        costs_s = [calls[number][0] for number in made[begin : begin + count]]
        assert sum(costs_s[:-1]) < MAX_CALLS_S + 1e-9
        begin += count
    assert made[:at_once] == list(range(at_once))
    assert made == made[:at_once] + _in_turns(calls, at_once)


def _in_turns(calls: list[tuple[float, str]], begin: int) -> list[int]:
    """The numbers of the calls from `begin` on, in the order in which they are to be made."""
    of_owner: dict[str, list[int]] = {}
    for number, (_, owner) in enumerate(calls[begin:], begin):
        of_owner.setdefault(owner, []).append(number)
    rounds = itertools.zip_longest(*of_owner.values())
    return [number for each in rounds for number in each if number is not None]


async def test_a_call_that_fails_does_not_keep_the_others_from_being_made() -> None:
    clock, made, failed = ManualClock(), list[int](), list[object]()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failed.append(context["exception"])
    )
    spread = SpreadCalls(clock.now)
    error = ValueError("wrong")

    def fail() -> None:
        raise error

    spread.make("a", lambda: clock.advance(1.0))
    for call in (lambda: made.append(1), fail, lambda: made.append(2)):
        spread.make("a", call)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (made, failed) == ([1, 2], [error])


async def test_calls_do_not_see_the_context_of_another_client() -> None:
    whose = contextvars.ContextVar("whose", default="nobody")
    clock, seen = ManualClock(), list[str]()
    spread = SpreadCalls(clock.now)

    def call() -> None:
        seen.append(whose.get())

    def first() -> None:
        whose.set("ann")
        spread.make("a", lambda: clock.advance(1.0))
        spread.make("b", call)

    contextvars.copy_context().run(first)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == ["nobody"]


def test_a_lone_work_begins_at_once() -> None:
    async def run() -> None:
        turns = LoopTurns()
        for _ in range(3):
            waits = turns.begin("a")
            with pytest.raises(StopIteration):
                waits.send(None)  # it does not wait
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())


async def test_another_owner_does_not_wait_for_those_that_came_before() -> None:
    turns, begun = used_up_turns(), list[str]()

    async def work(owner: str) -> None:
        await turns.begin(owner)
        begun.append(owner)

    flood = [asyncio.ensure_future(work("flood")) for _ in range(100)]
    await asyncio.sleep(0)
    await asyncio.gather(work("other"), work("third"))
    assert begun.count("flood") <= 6
    await asyncio.gather(*flood)
    assert begun.count("flood") == 100


async def test_who_no_longer_waits_delays_nobody() -> None:
    turns, begun = used_up_turns(), list[int]()

    async def work(number: int) -> None:
        await turns.begin("a")
        begun.append(number)

    tasks = [asyncio.ensure_future(work(number)) for number in range(50)]
    await asyncio.sleep(0)
    for task in tasks[1:49]:
        task.cancel()
    found = await changes_by_turn(
        lambda: len(begun), asyncio.gather(*tasks, return_exceptions=True)
    )
    assert begun == [0, 49] and len(found) < 10
    await turns.begin("a")  # and the next one begins


async def test_cancelled_work_does_not_cost_its_owner_a_turn() -> None:
    turns, begun = used_up_turns(), list[str]()

    async def work(owner: str) -> None:
        await turns.begin(owner)
        begun.append(owner)

    first = asyncio.ensure_future(work("busy"))
    left = [asyncio.ensure_future(work("left")) for _ in range(20)]
    busy = [asyncio.ensure_future(work("busy")) for _ in range(20)]
    last = asyncio.ensure_future(work("left"))
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await last
    assert begun.count("busy") <= 4
    await asyncio.gather(first, *busy)


def test_work_of_a_loop_that_ended_holds_up_no_other_loop() -> None:
    turns = used_up_turns()

    async def flood() -> None:
        for _ in range(5):
            asyncio.ensure_future(turns.begin("a"))
        await asyncio.sleep(0)

    async def one() -> None:
        await asyncio.wait_for(turns.begin("a"), 10)

    asyncio.run(flood())
    asyncio.run(one())


async def test_requests_that_arrive_at_once_are_submitted_in_several_turns(server: Server) -> None:
    use_turns(server, used_up_turns())
    submitted = server.engine.submitted
    calls = (server.chat() if i % 2 else server.complete(stream=True) for i in range(30))
    found = await changes_by_turn(lambda: len(submitted), asyncio.gather(*calls))
    assert len(submitted) == 30 and max(found) <= 2


async def test_requests_do_not_wait_for_rows_of_batches_of_their_tenant(server: Server) -> None:
    state = dataclasses.replace(server.state, turns=used_up_turns())
    rows = RowRunner(state).state
    waiting = [asyncio.ensure_future(rows.begin_work("ann")) for _ in range(30)]
    await asyncio.sleep(0)
    await state.begin_work("ann")
    assert sum(row.done() for row in waiting) <= 5
    await asyncio.gather(*waiting)


async def test_a_reply_does_not_wait_for_requests_of_its_tenant(server: Server) -> None:
    state = dataclasses.replace(server.state, turns=used_up_turns())
    waiting = [asyncio.ensure_future(state.begin_work("ann")) for _ in range(30)]
    await asyncio.sleep(0)
    assert await offload_reply(state, "ann", lambda: "written", 1) == "written"
    await pieces_response(state, "ann", lambda: [b"{}"], 1)
    assert sum(each.done() for each in waiting) <= 5
    await asyncio.gather(*waiting)


async def test_probes_do_not_wait_for_requests_that_came_before(server: Server) -> None:
    use_turns(server, used_up_turns())
    calls = [asyncio.ensure_future(server.chat()) for _ in range(30)]
    await asyncio.sleep(0)
    assert (await server.http.get("/health")).status_code == 200
    assert not any(call.done() for call in calls)
    assert [reply.status_code for reply in await asyncio.gather(*calls)] == [200] * 30
