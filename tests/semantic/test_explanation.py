"""What is said of a program while it runs: why a call has its class, and when it will end."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.slices import whole
from bros.router.client import RouterClient
from bros.semantic.core.explanation import Forecast, explain, forecast
from bros.semantic.core.nodes import LlmCall, NewCall
from bros.semantic.core.session import SessionStateMachine
from bros.semantic.errors import ConflictError
from bros.semantic.schema import Criteria, Perf
from bros.simulator.virtual_loop import LoopClock
from support.naive_programs import criteria, llm, llm_calls, native, programs, variables
from support.program_engine import ProgramEngine, echo, make_service
from support.programs import LATENCY, TENANT, THROUGHPUT, Desk, call, virtually
from support.tier import examples
from support.turn_fleet import TurnFleet

MAPS = 20


def core_of(*calls: NewCall) -> SessionStateMachine:
    core = SessionStateMachine("s", estimate=lambda llm_call: 1.0)
    core.submit(calls, 0.0)
    return core


def map_reduce(count: int = MAPS) -> tuple[NewCall, ...]:
    maps = (llm(f"map{n}", ("doc", f"m{n}")) for n in range(count))
    return (*maps, llm("reduce", (" ".join(f"m{n}" for n in range(count)), "all")))


def reasons(core: SessionStateMachine) -> dict[str, str]:
    return {call: explain(llm_call) for (call, _), llm_call in llm_calls(core).items()}


def predict(core: SessionStateMachine, seconds: dict[str, float], now: float = 0.0) -> Forecast:
    def rest_s(llm_call: LlmCall, beside: float | None) -> float:
        return seconds[llm_call.call.id]

    return whole(forecast(core.graph.calls.values(), rest_s, now))


def finish(core: SessionStateMachine, *calls: str, now: float = 1.0) -> None:
    for name in calls:
        core.finished(llm_calls(core)[name, 0], "done", None, now)


def test_reasons_of_a_map_reduce_in_its_course() -> None:
    core = core_of(*map_reduce())
    assert set(reasons(core).values()) == {"no requested value needs it"}
    core.want("all", Criteria(perf=Perf.LATENCY, deadline_s=1000.0), 0.0)
    core.set("doc", "text", 0.0)
    assert reasons(core)["reduce"] == "its value is requested with LATENCY"
    assert reasons(core)["map0"] == "member of the task group all:1: 20 of 20 unfinished"
    finish(core, "map0")
    assert reasons(core)["map1"] == "member of the task group all:1: 19 of 20 unfinished"
    ended = llm_calls(core)["map0", 0]
    assert explain(ended, "all:1") == "member of the task group all:1"
    finish(core, *(f"map{n}" for n in range(1, MAPS - 2)))
    assert reasons(core)["map19"] == "promoted: one of the last of its task group before all"


def test_the_reason_of_an_urgent_group() -> None:
    core = core_of(*map_reduce())
    core.want("all", LATENCY, 0.0)
    expected = "member of the task group all:1: 20 of 20 unfinished; a client waits for all"
    assert reasons(core)["map0"] == expected


def test_reasons_of_chains_functions_and_criteria() -> None:
    core = core_of(
        llm("a", ("doc", "x")), native("f", "x", "y"), llm("b", ("y", "z")), llm("c", ("z", "t"))
    )
    core.want("t", THROUGHPUT, 0.0)
    assert reasons(core) == {
        "a": "it is 2 calls before t, which is requested with THROUGHPUT",
        "f": "native function, which the client runs",
        "b": "it is 1 call before t, which is requested with THROUGHPUT",
        "c": "its value is requested with THROUGHPUT",
    }
    core.want("z", Criteria(perf=Perf.TTFT), 0.0)
    assert reasons(core)["a"] == "alone 1 call before z: all after it waits for it"
    assert reasons(core)["b"] == "its value is requested with TTFT"
    assert reasons(core)["c"] == "its value is requested with THROUGHPUT"


def test_the_reason_of_a_deadline_at_risk() -> None:
    core = core_of(*map_reduce())
    core.want("all", Criteria(perf=Perf.LATENCY, deadline_s=10.0), 0.0)
    core.set("doc", "text", 0.0)
    core.tick(9.5)
    assert reasons(core)["map3"] == "promoted: the deadline of all is at risk"


def test_the_reason_of_what_was_requested_for_throughput_and_is_late() -> None:
    core = core_of(llm("a", ("", "x")))
    core.want("x", Criteria(perf=Perf.THROUGHPUT, deadline_s=10.0), 0.0)
    assert reasons(core)["a"] == "its value is requested with THROUGHPUT"
    core.tick(9.5)
    assert reasons(core)["a"] == "promoted: the deadline of x is at risk"
    core.want("x", LATENCY, 9.6)
    assert reasons(core)["a"] == "its value is requested with LATENCY"


@pytest.mark.parametrize(
    ("perf", "first", "second"),
    [
        (
            Perf.TTFT,
            "alone before b in the same call: all after it waits for it",
            "its value is requested with TTFT",
        ),
        (
            Perf.THROUGHPUT,
            "it is before b in the same call, which is requested with THROUGHPUT",
            "its value is requested with THROUGHPUT",
        ),
    ],
)
def test_reasons_of_two_outputs_of_a_call(perf: Perf, first: str, second: str) -> None:
    core = core_of(llm("talk", ("doc", "a"), ("", "b")))
    core.want("b", Criteria(perf=perf), 0.0)
    assert [explain(llm_call) for llm_call in llm_calls(core).values()] == [first, second]


def test_the_deadline_that_is_at_risk_is_named_and_not_the_nearest_one() -> None:
    core = core_of(
        *(llm(f"map{n}", ("doc", f"m{n}")) for n in range(2)),
        llm("near", ("m0 m1", "n")),
        llm("between", ("m0 m1", "b")),
        llm("far", ("b", "f")),
    )
    core.want("n", Criteria(deadline_s=100.0), 0.0)
    core.want("f", Criteria(deadline_s=10.0), 0.0)
    core.tick(9.0)
    for n in range(2):
        assert reasons(core)[f"map{n}"] == "promoted: the deadline of f is at risk"


def test_a_member_that_another_value_waits_for_alone_is_real_time_for_that() -> None:
    core = core_of(*map_reduce(3), llm("next", ("m0", "more")), llm("last", ("more", "end")))
    core.want("all", Criteria(deadline_s=1000.0), 0.0)
    core.want("end", LATENCY, 0.0)
    assert reasons(core)["map0"] == "alone 2 calls before end: all after it waits for it"
    assert reasons(core)["map1"] == "member of the task group all:1: 3 of 3 unfinished"


def test_the_critical_path_and_the_slack_of_what_is_beside_it() -> None:
    core = core_of(
        llm("a", ("doc", "x")), llm("b", ("x", "y")), llm("c", ("doc", "z")), llm("d", ("y z", "t"))
    )
    core.want("t", Criteria(perf=Perf.LATENCY, deadline_s=10.0), 0.0)
    found = predict(core, {"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.0}, now=5.0)
    (path,) = found.paths
    assert [each.id for each in path.calls] == ["a", "b", "d"]
    assert (path.variable.id, path.end_s, path.slack_s) == ("t", 9.0, 1.0)
    assert {llm_call.call.id for llm_call in found.critical} == {"a", "b", "d"}
    by_call = {llm_call.call.id: llm_call for llm_call in found.end_s}
    # Latest finish times were deduced from estimates of 1 s each: of c 9 s, of a 8 s.
    assert {name: found.end_s[llm_call] for name, llm_call in by_call.items()} == {
        **{"a": 7.0, "b": 8.0, "c": 6.0, "d": 9.0}
    }
    assert found.slack_s(by_call["d"]) == 1.0
    assert found.slack_s(by_call["a"]) == 1.0


def test_calls_that_run_at_the_same_time_slow_each_other_down() -> None:
    """Also if they are no task group, because each leads to a value of its own."""
    core = core_of(
        llm("a1", ("x", "a")), llm("a2", ("a", "A")), llm("b1", ("x", "b")), llm("b2", ("b", "B"))
    )
    core.set("x", "text", 0.0)
    for name in ("A", "B"):
        core.want(name, LATENCY, 0.0)
    alone = {"a1": 2.0, "a2": 2.0, "b1": 1.0, "b2": 3.0}
    beside: dict[str, float] = {}

    def rest_s(llm_call: LlmCall, together: float | None) -> float:
        if together is not None:
            beside[llm_call.call.id] = together
        return alone[llm_call.call.id] * (together or 1.0)

    found = whole(forecast(core.graph.calls.values(), rest_s, 0.0))
    assert beside == {"a1": 2.0, "a2": 2.0, "b1": 2.0, "b2": 2.0}
    assert sorted(found.end_s.values()) == [2.0, 4.0, 8.0, 8.0]
    core.finished(llm_calls(core)["b1", 0], "done", None, 0.0)
    alone["b2"] = 1.0
    whole(forecast(core.graph.calls.values(), rest_s, 0.0))
    assert beside == {"a1": 1.5, "a2": 1.0, "b1": 2.0, "b2": 2.0}


def test_a_chain_of_requested_values_has_one_path() -> None:
    core = core_of(*(llm(f"c{n}", (f"v{n}", f"v{n + 1}")) for n in range(2000)))
    for n in (500, 1000, 2000):
        core.want(f"v{n}", LATENCY, 0.0)
    found = predict(core, {f"c{n}": 1.0 for n in range(2000)})
    (path,) = found.paths
    assert (path.variable.id, len(path.calls), path.end_s) == ("v2000", 2000, 2000.0)


@given(programs(), st.data())
@settings(max_examples=examples(30, long=600), deadline=None)
def test_a_forecast_is_the_longest_path(calls: list[NewCall], data: st.DataObject) -> None:
    core = SessionStateMachine("s", estimate=lambda llm_call: 1.0)
    try:
        core.submit(calls, 0.0)
    except ConflictError:
        return
    for name in data.draw(st.lists(st.sampled_from(variables(calls)), max_size=3)):
        core.want(name, data.draw(criteria()), 0.0)
    for name in variables(calls):
        if core.variable(name).producer is None and data.draw(st.booleans()):
            core.set(name, "text", 0.0)
    for llm_call in list(llm_calls(core).values()):
        if llm_call.started and not llm_call.native and data.draw(st.booleans()):
            core.finished(llm_call, "done", None, 1.0)
    seconds = {t: data.draw(st.integers(0, 5)) for t in llm_calls(core).values()}

    def naive_end(llm_call: LlmCall) -> float:
        own = 0 if llm_call.native else seconds[llm_call]
        return own + max((naive_end(t) for t in llm_call.open_predecessors()), default=3.0)

    found = whole(forecast(core.graph.calls.values(), lambda t, beside: float(seconds[t]), 3.0))
    running = {t for t in seconds if t.open and t.wanted}
    assert found.end_s == {llm_call: naive_end(llm_call) for llm_call in running}
    on_paths = [each for path in found.paths for each in path.calls]
    assert set(on_paths) == {llm_call.call for llm_call in found.critical}
    requested = {
        v for v in core.graph.variables.values() if v.want is not None and v.pending and v.producer
    }
    assert {v.producer for v in requested} <= set(found.critical)
    for path in found.paths:
        assert path.variable in requested and path.variable.producer is not None
        assert path.end_s == naive_end(path.variable.producer)


@virtually
async def test_a_view_in_slices_is_the_whole_view() -> None:
    desk = Desk()
    desk.submit(*(call(f"{n} {{{{x}}}} {{{{output:v{n}}}}}") for n in range(130)))
    desk.submit(call(" ".join(f"{{{{v{n}}}}}" for n in range(130)) + "{{output:all}}"))
    desk.want("all")
    desk.set("x", "text")
    await asyncio.sleep(0.05)
    pauses = 0

    async def count() -> None:
        nonlocal pauses
        while True:
            await asyncio.sleep(0)
            pauses += 1

    counting = asyncio.create_task(count())
    view = await desk.service.view(TENANT, desk.session)
    counting.cancel()
    assert view == desk.service.inspect(TENANT, desk.session)
    assert pauses > 4
    await desk.close()
    await asyncio.gather(counting, return_exceptions=True)


@virtually
async def test_calls_that_end_while_a_view_is_made_are_in_it() -> None:
    desk = Desk()
    requests = desk.submit(*(call(f"{n} {{{{output:v{n}}}}}") for n in range(300)))
    for n in range(300):
        desk.want(f"v{n}")

    def disturb(n: int) -> None:
        if n < 3:
            desk.service.cancel(TENANT, desk.session, requests[n * 100])
            desk.submit(call(f"{{{{output:new{n}}}}}"))
            asyncio.get_running_loop().call_soon(disturb, n + 1)

    asyncio.get_running_loop().call_soon(disturb, 0)
    view = await desk.service.view(TENANT, desk.session)
    assert [each.id for each in view.calls] == requests
    assert "cancelled" in {each.state for each in view.calls}
    await desk.close()


@virtually
async def test_times_of_a_running_call_add_up() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "a long answer " * 10))
    (request,) = desk.submit(call("Say {{output:a}}", criteria={"a": LATENCY}))
    await asyncio.sleep(0.3)
    view = desk.view(request)
    now_s = desk.service.inspect(TENANT, desk.session).now_s
    assert view.queueing_s + view.prefill_s + view.decode_s == pytest.approx(now_s - view.queued_s)
    assert view.predicted_end_s > now_s and view.critical
    await desk.value("a")
    view = desk.view(request)
    assert (view.predicted_end_s, view.slack_s, view.critical) == (None, None, False)
    assert view.queueing_s + view.prefill_s + view.decode_s == pytest.approx(
        view.end_s - view.queued_s
    )
    await desk.close()


class Reporting(ProgramEngine):
    """An engine that a router can have."""

    def subscribe(self, listener: object) -> None:
        del listener


@virtually
async def test_placements_of_calls_that_run_and_that_have_ended() -> None:
    router = RouterClient(TurnFleet(), LoopClock(), random.Random(0))
    for engine in (Reporting(echo), Reporting(echo)):
        router.add(engine)
    await asyncio.sleep(1.0)
    service = make_service(router, router=router)
    session = service.create(TENANT).id
    service.submit(TENANT, session, [call(f"Say {n} {{{{output:v{n}}}}}") for n in range(3)])
    for n in range(3):
        service.want(TENANT, session, f"v{n}", LATENCY)
    await asyncio.sleep(0.005)
    running = [each.placement for each in service.inspect(TENANT, session).calls]
    for n in range(3):
        await service.get(TENANT, session, f"v{n}")
    ended = [each.placement for each in service.inspect(TENANT, session).calls]
    assert running == ended
    assert [placed.reason for placed in running if placed is not None] == ["turn"] * 3
    assert {placed.replica for placed in running if placed is not None} == {0, 1}
    await service.delete(TENANT, session)
    await router.close()
