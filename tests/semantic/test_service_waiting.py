"""Waiting for values: each get and stream ends, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from unittest import mock

import pytest

from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.request import ServiceClass
from bros.semantic.core.session import SessionStateMachine
from bros.semantic.errors import (
    GetTimeoutError,
    SessionGoneError,
    SessionLimitError,
    UpstreamError,
)
from bros.semantic.schema import CallSpec, Criteria, VariableView
from support.program_engine import STEP_S, ProgramEngine, echo
from support.programs import DUE_LATER, TENANT, Desk, call, native, soon, virtually


@virtually
async def test_a_value_that_is_there_is_given_at_once() -> None:
    desk = Desk()
    desk.submit(call("A {{output:a}}"))
    first = await desk.value("a")
    before = asyncio.get_running_loop().time()
    assert await desk.value("a", timeout_s=0.0) == first == echo("A ")
    assert asyncio.get_running_loop().time() == before


@virtually
async def test_a_get_that_times_out_changes_nothing() -> None:
    desk = Desk()
    desk.submit(call("A {{output:a}}"))
    with pytest.raises(GetTimeoutError):
        await desk.value("a", timeout_s=0.0)
    with pytest.raises(GetTimeoutError):
        await desk.value("a", timeout_s=0.05)
    assert await desk.value("a") == echo("A ")
    assert len(desk.engine.llm_calls()) == 1


@virtually
async def test_a_timeout_names_the_variables_that_are_not_set() -> None:
    desk = Desk()
    desk.submit(
        call("{{here}} and {{x}} make {{output:a}}"), call("{{a}}{{y}}{{x}} so {{output:b}}")
    )
    desk.set("here", "1")
    for name, unset in (("b", "y, x"), ("a", "x"), ("y", "y")):
        with pytest.raises(GetTimeoutError, match=rf" s\. No client has set {unset} so far\.$"):
            await desk.value(name, timeout_s=1.0)
    desk.set("x", "2")
    with pytest.raises(GetTimeoutError, match=r" 0 s\.$"):
        await desk.value("a", timeout_s=0.0)
    await desk.close()


@virtually
async def test_a_variable_whose_id_the_server_chose_is_named_as_in_its_template() -> None:
    desk = Desk()
    spec = CallSpec(template="On {{input:topic}}: {{output:text}}", name="describe")
    (submitted,) = desk.service.submit(TENANT, desk.session, [spec])
    topic = submitted.variables["topic"]
    with pytest.raises(GetTimeoutError) as timed_out:
        await desk.value(submitted.variables["text"], timeout_s=1.0)
    assert str(timed_out.value) == (
        f"The output text of describe (variable {submitted.variables['text']}) had no value within "
        f"1 s. No client has set topic of describe (variable {topic}) so far."
    )
    await desk.close()


@virtually
async def test_a_value_without_a_producer_times_out() -> None:
    desk = Desk(max_wait_s=70.0)
    variable = desk.service.declare(TENANT, desk.session, "never").id
    for timeout_s, after_s in ((None, 70.0), (1e9, 70.0), (5.0, 5.0)):
        begun = asyncio.get_running_loop().time()
        with pytest.raises(GetTimeoutError):
            await desk.value(variable, timeout_s=timeout_s)
        assert asyncio.get_running_loop().time() - begun == pytest.approx(after_s)
    with pytest.raises(InvalidRequestError):
        await desk.value(variable, timeout_s=-1.0)
    with pytest.raises(NotFoundError):
        await desk.value("unknown")


@virtually
async def test_a_client_that_leaves_does_not_wait_any_more() -> None:
    """A session with a waiting client does not expire, so it shows if one is left."""
    desk = Desk(ttl_s=100.0, max_waiting=2)
    variable = desk.service.declare(TENANT, desk.session, "v").id
    waiting = asyncio.create_task(desk.value(variable))

    async def read() -> None:
        async with aclosing(desk.service.stream(TENANT, desk.session, variable)) as pieces:
            async for _ in pieces:
                pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(1.0)
    assert desk.service.inspect(TENANT, desk.session).expires_in_s is None
    for task in (waiting, reading):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert desk.service.inspect(TENANT, desk.session).expires_in_s == 100.0
    with pytest.raises(GetTimeoutError):  # and there is room again
        await desk.value(variable, timeout_s=1.0)


async def leave(*tasks: asyncio.Task[str]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@virtually
async def test_what_no_client_waits_for_any_more_is_best_effort_until_one_asks_again() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "x" * 100))
    first, second = desk.submit(call("A {{output:a}}"), call("B {{x}}{{a}}{{output:b}}"))
    desk.set("x", "text")

    async def read() -> str:
        return "".join([x async for x in desk.service.stream(TENANT, desk.session, "b")])

    waiting, reading = asyncio.create_task(desk.value("b")), asyncio.create_task(read())
    await asyncio.sleep(10 * STEP_S)
    await leave(waiting)
    assert desk.view(second).level == "rt", "the other one still waits"
    await leave(reading)
    assert {desk.view(request).level for request in (first, second)} == {"throughput"}
    await asyncio.sleep(200 * STEP_S)
    again = asyncio.create_task(desk.value("b"))
    await asyncio.sleep(0.5 * STEP_S)
    assert desk.view(second).level == "rt"
    await again
    classes = {request.request_id: request.service_class for request in desk.engine.llm_calls()}
    assert classes == {first: ServiceClass.RT, second: ServiceClass.BE}


@virtually
async def test_a_timeout_and_a_deadline_leave_the_class_as_it_is() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "x" * 1000))
    timed, dated = desk.submit(call("A {{output:a}}"), call("B {{output:b}}"))
    with pytest.raises(GetTimeoutError):
        await desk.value("a", timeout_s=0.1)
    waiting = asyncio.create_task(desk.value("b", DUE_LATER))
    await asyncio.sleep(0.1)
    await leave(waiting)
    assert {desk.view(request).level for request in (timed, dated)} == {"rt"}
    await desk.close()


@virtually
async def test_clients_that_leave_together_are_looked_at_together() -> None:
    """One by one, the work would grow with the square of the calls behind a common one."""
    desk = Desk(ProgramEngine(lambda prompt: "x" * 500))
    readers = [call(f"{n} {{{{a}}}}{{{{output:b{n}}}}}") for n in range(20)]
    requests = desk.submit(call("A {{output:a}}"), *readers)
    waiting = [asyncio.create_task(desk.value(f"b{n}")) for n in range(20)]
    await asyncio.sleep(2 * STEP_S)
    with mock.patch.object(
        SessionStateMachine, "abandon", autospec=True, side_effect=SessionStateMachine.abandon
    ) as abandon:
        await leave(*waiting)
        await asyncio.sleep(0)
    assert abandon.call_count == 1
    assert {desk.view(request).level for request in requests} == {"throughput"}
    await desk.close()


@virtually
async def test_of_several_values_those_that_are_not_there_are_abandoned() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "x" * (5 if prompt == "A " else 500)))
    requests = desk.submit(*(call(f"{name} {{{{output:{name}}}}}") for name in "ABC"))
    names: list[tuple[str, Criteria | None]] = [("A", None), ("B", None)]
    waiting = asyncio.create_task(desk.service.get_all(TENANT, desk.session, names))
    desk.want("C")
    await desk.value("A")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert [desk.view(request).level for request in requests] == ["rt", "throughput", "rt"]
    await desk.close()


@virtually
async def test_clients_that_come_together_are_limited_like_those_one_after_another() -> None:
    desk = Desk(max_waiting=2)
    variable = desk.service.declare(TENANT, desk.session, "v").id

    async def read() -> None:
        async with aclosing(desk.service.stream(TENANT, desk.session, variable)) as pieces:
            async for _ in pieces:
                pass

    wanted = [(variable, None)]
    clients = [desk.service.get_all(TENANT, desk.session, wanted) for _ in range(3)]
    tasks = [asyncio.create_task(client) for client in (*clients, read(), read())]
    await asyncio.sleep(1.0)
    refused = [task for task in tasks if task.done()]
    assert len(refused) == 3
    for task in refused:
        with pytest.raises(SessionLimitError, match="2 requests already wait for values"):
            await task
    desk.set(variable, "value")
    for task in tasks:
        if task not in refused:
            await task


@pytest.mark.parametrize("how", ["delete", "cancel", "fail"])
@virtually
async def test_all_waiting_clients_are_told(how: str) -> None:
    desk = Desk()
    request, *_ = desk.submit(
        native("", "a"), *(call(f"{{{{a}}}}{{{{output:b{i}}}}}") for i in range(3))
    )

    async def read(variable: str) -> str:
        return "".join([x async for x in desk.service.stream(TENANT, desk.session, variable)])

    waits = [asyncio.create_task(desk.value(f"b{i}")) for i in range(3)]
    waits += [asyncio.create_task(read(f"b{i}")) for i in range(3)]
    await asyncio.sleep(1.0)
    if how == "delete":
        await desk.close()
    elif how == "cancel":
        desk.service.cancel(TENANT, desk.session, request)
    else:
        desk.service.fail(TENANT, desk.session, request, "oh no")
    results = await soon(asyncio.gather(*waits, return_exceptions=True), 1.0)
    for error in results:
        if how == "delete":
            assert isinstance(error, SessionGoneError)
        else:
            assert isinstance(error, UpstreamError)
            assert error.cause.request_id == request


@virtually
async def test_a_stream_gives_a_value_as_it_grows() -> None:
    engine = ProgramEngine(lambda prompt: "abcdef")
    desk = Desk(engine)
    desk.submit(call("A {{output:a}}"))
    pieces: list[tuple[float, str]] = []
    begun = asyncio.get_running_loop().time()
    async for piece in desk.service.stream(TENANT, desk.session, "a"):
        pieces.append((asyncio.get_running_loop().time() - begun, piece))
    assert [piece for _, piece in pieces] == list("abcdef")
    assert [time_s for time_s, _ in pieces] == pytest.approx([STEP_S * i for i in range(1, 7)])


@virtually
async def test_who_comes_late_to_a_stream_gets_all_of_it() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "abcdef"))
    desk.submit(call("A {{output:a}}"))
    desk.want("a")
    await asyncio.sleep(3.5 * STEP_S)
    pieces = [piece async for piece in desk.service.stream(TENANT, desk.session, "a")]
    assert pieces == ["abc", "d", "e", "f"]
    again = [piece async for piece in desk.service.stream(TENANT, desk.session, "a")]
    assert again == ["abcdef"]


@virtually
async def test_transformed_and_set_values_stream_at_once() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "abc"))
    desk.submit(call("A {{output:a}}", transforms={"a": "upper"}))
    assert [x async for x in desk.service.stream(TENANT, desk.session, "a")] == ["ABC"]
    empty = desk.service.declare(TENANT, desk.session, "e", "").id
    assert [x async for x in desk.service.stream(TENANT, desk.session, empty)] == []


@virtually
async def test_a_stream_goes_on_after_the_engine_died() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "abcdef"))
    desk.submit(call("A {{output:a}}", sampling={"temperature": 0.0}))

    async def read() -> list[str]:
        return [piece async for piece in desk.service.stream(TENANT, desk.session, "a")]

    reading = asyncio.create_task(read())
    await asyncio.sleep(3.5 * STEP_S)
    desk.engine.die()
    await asyncio.sleep(1.0)
    desk.engine.revive()
    assert "".join(await reading) == "abcdef"


@virtually
async def test_a_stream_ends_with_the_cause() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "abcdef"))
    desk.submit(call("A {{output:a}}"))
    pieces = []
    with pytest.raises(UpstreamError) as failed:
        async for piece in desk.service.stream(TENANT, desk.session, "a"):
            pieces.append(piece)
            if len(pieces) == 3:
                desk.engine.die()
    assert pieces == ["a", "b", "c"]
    assert failed.value.cause.stage == "engine"


@virtually
async def test_waiting_for_several_values_ends_with_the_last_one_or_the_first_failure() -> None:
    """It counts as one client that waits."""
    desk = Desk(max_waiting=1)
    for name in ("a", "b", "c"):
        desk.service.declare(TENANT, desk.session, name, variable_id=name)
    desk.submit(native("c", "d"))

    def waiting(*names: str) -> asyncio.Task[list[VariableView]]:
        wanted = [(name, None) for name in names]
        asked = desk.service.get_all(TENANT, desk.session, wanted, timeout_s=50.0)
        return asyncio.create_task(asked)

    task = waiting("b", "a", "b")
    await asyncio.sleep(1.0)
    for name in ("a", "b"):
        assert not task.done()
        desk.set(name, name.upper())
        await asyncio.sleep(1.0)
    assert [view.value for view in task.result()] == ["B", "A", "B"]
    with pytest.raises(GetTimeoutError, match="'c' had no value within 50 s"):
        await waiting("a", "c", "d")
    task = waiting("c", "d")
    await asyncio.sleep(1.0)
    (request,) = desk.service.inspect(TENANT, desk.session).calls
    desk.service.cancel(TENANT, desk.session, request.id)
    with pytest.raises(UpstreamError):
        await task
    task = waiting("a", "c")
    await asyncio.sleep(1.0)
    await desk.service.delete(TENANT, desk.session)
    with pytest.raises(SessionGoneError):
        await task
