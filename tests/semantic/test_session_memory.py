"""Reference counts free what a session has had, in slices: nothing is left for the garbage
collector, whose full collections would hold the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from bros.core.errors import QueueFullError
from bros.semantic.core.graph import Graph
from bros.semantic.core.nodes import Call, LlmCall
from bros.semantic.core.retention import SessionLimits
from bros.semantic.core.session import SessionStateMachine
from support.naive_programs import llm
from support.program_engine import STEP_S
from support.programs import TENANT, THROUGHPUT, Desk, call, native, virtually

Use = Callable[[Desk], Coroutine[Any, Any, None]]


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Fails if objects of bros are left that only the collector can free."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(type(each).__qualname__ for each in gc.garbage if _is_ours(each))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


def _is_ours(found: object) -> bool:
    return type(found).__module__.startswith("bros.")


async def waits_for_inputs(desk: Desk) -> None:
    desk.submit(*(call(f"Say {{{{input:x{i}}}}} {{{{output:y{i}}}}}") for i in range(50)))


async def runs(desk: Desk) -> None:
    desk.submit(
        *(call(f"{i} {{{{output:a{i}}}}} and {{{{output:b{i}}}}}") for i in range(20)),
        call("All: " + " ".join(f"{{{{input:b{i}}}}}" for i in range(20)) + " {{output:z}}"),
        native("z", "n"),
    )
    desk.service.want(TENANT, desk.session, "n", THROUGHPUT)
    await desk.value("z")


async def is_deleted_while_it_runs(desk: Desk) -> None:
    desk.submit(*(call(f"{i} {{{{output:a{i}}}}}") for i in range(50)))
    waits = [asyncio.create_task(desk.value(f"a{i}")) for i in range(50)]
    await asyncio.sleep(0.01)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def fails(desk: Desk) -> None:
    desk.engine.refusals = [ValueError("wrong")] * 5
    desk.submit(
        *(call(f"{i} {{{{output:a{i}}}}}") for i in range(5)),
        call("{{input:a0}} {{output:z}}"),
    )
    with contextlib.suppress(Exception):
        await desk.value("z")


async def is_refused(desk: Desk) -> None:
    desk.engine.refusals = [QueueFullError(9, 2.0)] * 1000
    desk.submit(*(call(f"{i} {{{{output:a{i}}}}}") for i in range(100)))
    for i in range(100):
        desk.service.want(TENANT, desk.session, f"a{i}", THROUGHPUT)
    await asyncio.sleep(5.0)


async def is_given_up(desk: Desk) -> None:
    """Its calls are withdrawn from the engine, and end later."""
    maps = (call(f"{i} {{{{output:a{i}}}}}") for i in range(50))
    inputs = "".join(f"{{{{a{i}}}}}" for i in range(50))
    *_, reduce = desk.submit(*maps, call(f"{inputs}{{{{output:b}}}}"))
    desk.want("b")
    await asyncio.sleep(0.5 * STEP_S)
    desk.service.cancel(TENANT, desk.session, reduce)
    await asyncio.sleep(5.0)
    assert len(desk.engine.aborted) == 50


@pytest.mark.parametrize(
    "use",
    [waits_for_inputs, runs, is_deleted_while_it_runs, fails, is_refused, is_given_up],
    ids=lambda use: use.__name__,
)
@virtually
async def test_an_ended_session_leaves_no_garbage(use: Use) -> None:
    desk = Desk()
    with no_garbage():
        await use(desk)
        await desk.service.delete(TENANT, desk.session)
        await asyncio.sleep(1.0)
        desk.engine.refusals = []


def live_calls() -> list[object]:
    return [each for each in gc.get_objects() if type(each) in (Call, LlmCall)]


@virtually
async def test_calls_that_a_session_forgets_leave_no_garbage() -> None:
    desk = Desk(kept_calls=0)
    others = live_calls()  # of tests before this one
    with no_garbage():
        for i in range(20):
            desk.submit(call(f"{i} {{{{output:a{i}}}}} and {{{{output:b{i}}}}}"))
            await desk.value(f"b{i}")
        await asyncio.sleep(1.0)
        assert all(any(each is other for other in others) for each in live_calls())
    assert desk.service.figures().calls == {("finished", "rt"): 20}


def test_a_forgotten_call_keeps_its_state() -> None:
    graph = Graph()
    (added,) = graph.add([llm("a", ("", "x"), ("", "y"))], 0.0)
    assert added.state == "waiting"
    for llm_call in added.llm_calls:
        llm_call.state = type(added.state).CANCELLED
    graph.forget(added)
    assert added.llm_calls == ()
    assert added.state == "cancelled"
    assert not added.open


def test_a_large_session_is_dismantled_in_slices() -> None:
    core = SessionStateMachine(
        "s", estimate=lambda llm_call: 1.0, limits=SessionLimits(slice_calls=10, kept_calls=500)
    )
    core.submit([llm(f"c{i}", ("", f"v{i}")) for i in range(300)], 0.0)
    core.close("It ends.", 1.0)
    sizes = [len(core.graph.calls) + len(core.graph.variables)]
    sizes += [len(core.graph.calls) + len(core.graph.variables) for _ in core.dismantling()]
    assert sizes[0] == 600 and sizes[-1] == 0
    assert max(before - after for before, after in zip(sizes, sizes[1:], strict=False)) <= 20
