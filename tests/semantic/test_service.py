"""Sessions: whose they are, how long they live, how many there may be, and what joins them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.request import ServiceClass
from bros.semantic.errors import ConflictError, SessionGoneError, SessionLimitError
from bros.semantic.schema import CallSpec, Criteria, Parameter, Perf, Role
from bros.semantic.service.live import STARTS_PER_TURN
from bros.semantic.service.service import SessionService
from support.loops import MeasuredLoop, check_turns
from support.program_engine import ProgramEngine, echo, make_service
from support.programs import LATENCY, TENANT, Desk, call, native, soon, virtually


@contextlib.asynccontextmanager
async def running(service: SessionService) -> AsyncIterator[None]:
    task = asyncio.create_task(service.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@virtually
async def test_a_session_is_there_for_its_tenant_alone() -> None:
    service = make_service(ProgramEngine())
    mine = service.create("a", metadata={"app": "x"}, criteria=Criteria(perf=Perf.THROUGHPUT))
    theirs = service.create("b", session_id="same")
    also = service.create("a", session_id="same")
    assert [view.id for view in service.sessions("a")] == [mine.id, also.id]
    assert service.inspect("a", mine.id).metadata == {"app": "x"}
    assert service.inspect("a", mine.id).criteria.perf is Perf.THROUGHPUT
    with pytest.raises(NotFoundError) as refused:
        service.inspect("b", mine.id)
    assert refused.value.code == "session_not_found"
    await service.delete("b", theirs.id)
    assert service.inspect("a", "same").state == "open"


OPERATIONS: dict[str, Any] = {
    "inspect": lambda s, i: s.inspect(TENANT, i),
    "submit": lambda s, i: s.submit(TENANT, i, [call("A {{output:a}}")]),
    "declare": lambda s, i: s.declare(TENANT, i, "x"),
    "set": lambda s, i: s.set(TENANT, i, "x", "y"),
    "fail": lambda s, i: s.fail(TENANT, i, "x", "y"),
    "variable": lambda s, i: s.variable(TENANT, i, "x"),
    "variables": lambda s, i: s.variables(TENANT, i),
    "want": lambda s, i: s.want(TENANT, i, "x"),
    "get": lambda s, i: s.get(TENANT, i, "x"),
    "stream": lambda s, i: s.stream(TENANT, i, "x"),
    "cancel": lambda s, i: s.cancel(TENANT, i, "x"),
    "join": lambda s, i: s.join(TENANT, i),
    "ensure": lambda s, i: s.ensure(TENANT, i),
    "delete": lambda s, i: s.delete(TENANT, i),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@virtually
async def test_gone_is_told_from_never_there(operation: str) -> None:
    service = make_service(ProgramEngine())
    deleted, expired = service.create(TENANT).id, service.create(TENANT, ttl_s=10.0).id
    await service.delete(TENANT, deleted)
    await asyncio.sleep(11.0)

    async def attempt(session_id: str) -> None:
        result = OPERATIONS[operation](service, session_id)
        if asyncio.iscoroutine(result):
            await result

    for session_id in (deleted, expired):
        with pytest.raises(SessionGoneError):
            await attempt(session_id)
    with pytest.raises(NotFoundError):
        await attempt("sess-unknown")


def test_thousands_of_sessions_may_expire_at_the_same_time() -> None:
    async def main(loop: MeasuredLoop) -> None:
        service = make_service(ProgramEngine(), max_sessions=10_000, ttl_s=0.01)
        for _ in range(10_000):
            service.create(TENANT)
        with loop.measuring():
            async with running(service):
                while service.figures().sessions:
                    await asyncio.sleep(0.01)

    check_turns(main)


@virtually
async def test_idle_sessions_expire_and_what_they_keep_is_given_back() -> None:
    engine = ProgramEngine()
    service = make_service(engine, ttl_s=100.0, pin_s=1e6)
    async with running(service):
        session = service.create(TENANT).id
        service.submit(TENANT, session, [call("A {{output:a}} B {{late}}{{output:b}}")])
        service.want(TENANT, session, "b")
        await asyncio.sleep(50.0)
        assert engine.kept
        assert service.inspect(TENANT, session).expires_in_s == pytest.approx(50.0, abs=1.0)
        await asyncio.sleep(52.0)
        assert service.figures().sessions == 0
        assert not engine.kept and not engine.open
        with pytest.raises(SessionGoneError, match="idle"):
            service.variable(TENANT, session, "a")


@virtually
async def test_waiting_and_running_work_keep_a_session_alive() -> None:
    engine = ProgramEngine(lambda prompt: "x" * 1500, step_s=1.0)
    service = make_service(engine, ttl_s=100.0, max_wait_s=1e6)
    async with running(service):
        session = service.create(TENANT).id
        service.submit(TENANT, session, [call("A {{output:a}}", sampling={"max_tokens": 500})])
        service.want(TENANT, session, "a")
        await asyncio.sleep(400.0)
        assert service.inspect(TENANT, session).expires_in_s is None  # it runs
        await asyncio.sleep(150.0)
        view = service.declare(TENANT, session, "later")
        waiting = asyncio.create_task(service.get(TENANT, session, view.id))
        await asyncio.sleep(1000.0)
        assert service.inspect(TENANT, session).expires_in_s is None  # a client waits
        service.set(TENANT, session, view.id, "now")
        assert (await waiting).value == "now"
        await asyncio.sleep(99.0)
        assert service.sessions(TENANT)
        await asyncio.sleep(2.0)
        assert not service.sessions(TENANT)


@virtually
async def test_the_end_of_a_service_ends_its_sessions() -> None:
    engine = ProgramEngine(lambda prompt: "x" * 500)
    service = make_service(engine)
    async with running(service):
        session = service.create(TENANT).id
        service.submit(TENANT, session, [call("A {{output:a}} B {{output:b}}")])
        waiting = asyncio.create_task(service.get(TENANT, session, "b"))
        await asyncio.sleep(0.5)
        assert engine.open
    assert not engine.open and not engine.kept
    with pytest.raises(SessionGoneError, match="server"):
        await soon(waiting)


@virtually
async def test_only_so_many_past_ids_are_remembered() -> None:
    service = make_service(ProgramEngine(), max_gone=2)
    ids = [service.create(TENANT).id for _ in range(3)]
    for session_id in ids:
        await service.delete(TENANT, session_id)
    with pytest.raises(NotFoundError):
        service.inspect(TENANT, ids[0])
    for session_id in ids[1:]:
        with pytest.raises(SessionGoneError):
            service.inspect(TENANT, session_id)


@virtually
async def test_names_may_be_used_again_and_nothing_of_the_past_comes_back() -> None:
    desk = Desk()
    views = []
    for _ in range(2):
        desk.service.create(TENANT, session_id="mine")
        with pytest.raises(ConflictError):
            desk.service.create(TENANT, session_id="mine")
        desk.service.submit(TENANT, "mine", [call("A {{x}}{{output:a}}", values={"x": "1"})])
        views.append(await desk.service.get(TENANT, "mine", "a"))
        await desk.service.delete(TENANT, "mine")
    first, second = desk.engine.llm_calls()
    assert first.hints.program != second.hints.program
    with pytest.raises(InvalidRequestError):
        desk.service.create(TENANT, session_id="sess-abc")


@virtually
async def test_limits() -> None:
    service = make_service(
        ProgramEngine(), max_sessions=2, max_calls=3, max_waiting=2, max_chars=100, max_ttl_s=50.0
    )
    session = service.create(TENANT, ttl_s=1e9)
    assert session.ttl_s == 50.0
    running = service.join(TENANT, "other")
    with pytest.raises(SessionLimitError):
        service.create(TENANT)
    with pytest.raises(SessionLimitError):
        service.join(TENANT, "third")
    running.cancelled()

    specs = [call(f"{i} {{{{output:a{i}}}}}") for i in range(4)]
    with pytest.raises(SessionLimitError):
        service.submit(TENANT, session.id, specs)
    assert not await service.variables(TENANT, session.id)
    with pytest.raises(SessionLimitError):
        service.submit(TENANT, session.id, [call("x" * 101 + "{{output:a}}")])
    with pytest.raises(SessionLimitError):
        service.declare(TENANT, session.id, "v", "x" * 101)

    waits = [
        asyncio.create_task(
            service.get(TENANT, session.id, service.declare(TENANT, session.id, n).id)
        )
        for n in "ab"
    ]
    await asyncio.sleep(1.0)
    more = service.declare(TENANT, session.id, "c").id
    with pytest.raises(SessionLimitError):
        await service.get(TENANT, session.id, more)
    with pytest.raises(SessionLimitError):
        service.stream(TENANT, session.id, more)
    await service.delete(TENANT, session.id)
    gone = await asyncio.gather(*waits, return_exceptions=True)
    assert all(isinstance(error, SessionGoneError) for error in gone)


@virtually
async def test_a_program_is_added_as_a_whole_or_not_at_all() -> None:
    desk = Desk()
    good = call("A {{output:a}}")
    wrong: list[tuple[CallSpec, type[Exception], str | None]] = [
        (call("no output"), InvalidRequestError, "requests[1].template"),
        (call("B {{output:a}}"), ConflictError, None),
        (call("{{b}}{{output:b}}"), InvalidRequestError, "requests[1].template"),
        (native("b", "b"), InvalidRequestError, "requests[1].parameters[1].name"),
        (call("B {{output:b}}", sampling={"tempo": 1}), InvalidRequestError,
         "requests[1].sampling.tempo"),
        (call("B {{output:b}}", sampling={"temperature": -1}), InvalidRequestError,
         "requests[1].sampling.temperature"),
        (call("B {{output:b}}", samplings={"b": {"top_p": 7}}), InvalidRequestError,
         "requests[1].parameters[0].sampling.top_p"),
        (call("B {{output:b}}", sampling={"n": 2}), InvalidRequestError, "requests[1].sampling.n"),
        (call("B {{output:b}}", sampling={"max_tokens": 1.5}), InvalidRequestError,
         "requests[1].sampling.max_tokens"),
        (call("B {{output:b}}", sampling={"stop": 7}), InvalidRequestError, None),
        (call("B {{output:b}}", transforms={"b": "nonsense("}), InvalidRequestError,
         "requests[1].parameters[0].transforms"),
        (call("B {{output:b:fine}}"), InvalidRequestError, None),
        (native("x", ""), InvalidRequestError, "requests[1].parameters"),
        (CallSpec(template="{{x}}{{output:b}}", parameters=[
            Parameter(name="x", variable="v", value="w")]), InvalidRequestError,
         "requests[1].parameters[0].value"),
        (CallSpec(template="A{{output:b}}", parameters=[Parameter(name="b", value="w")]),
         InvalidRequestError, "requests[1].parameters[0].value"),
        (CallSpec(native=True, template="x"), InvalidRequestError, "requests[1].native"),
        (CallSpec(native=True, parameters=[
            Parameter(name="o", role=Role.OUTPUT, transforms="strip")]), InvalidRequestError,
         "requests[1].parameters[0].transforms"),
        (CallSpec(template="{{x}}{{output:b}}", parameters=[
            Parameter(name="x", sampling={"seed": 1})]), InvalidRequestError,
         "requests[1].parameters[0].sampling"),
        (CallSpec(template="{{x}}{{output:b}}", parameters=[
            Parameter(name="x", criteria=Criteria())]), InvalidRequestError,
         "requests[1].parameters[0].criteria"),
    ]  # fmt: skip
    for spec, kind, param in wrong:
        with pytest.raises(kind) as refused:
            desk.submit(good, spec)
        if param is not None:
            assert getattr(refused.value, "param", None) == param, spec
        view = desk.service.inspect(TENANT, desk.session)
        assert not view.calls and not view.variables
    desk.submit(good)


@virtually
async def test_a_program_that_comes_again_with_its_key_is_taken_once() -> None:
    desk = Desk(kept_calls=0, max_calls=2)
    submit = desk.service.submit
    program = [call("A {{output:a}}"), call("{{a}} {{output:b}}")]
    answer = submit(TENANT, desk.session, program, "first")
    assert submit(TENANT, desk.session, program, "first") == answer
    await desk.value(answer[1].variables["b"])
    assert submit(TENANT, desk.session, program, "first") == answer
    assert len(desk.engine.llm_calls()) == 2
    with pytest.raises(ConflictError):
        submit(TENANT, desk.session, [call("A {{output:a}}")], "second")
    with pytest.raises(ConflictError):  # what was refused has no answer
        submit(TENANT, desk.session, [call("A {{output:a}}")], "second")
    for number in range(8):
        key = f"key-{number}"
        (done,) = submit(TENANT, desk.session, [call(f"{number} {{{{output:v{number}}}}}")], key)
        await desk.value(done.variables[f"v{number}"])
    with pytest.raises(ConflictError):  # only so many keys are remembered
        submit(TENANT, desk.session, program, "first")


@virtually
async def test_a_key_is_of_one_program() -> None:
    desk = Desk()
    submit = desk.service.submit
    submit(TENANT, desk.session, [call("A {{output:a}}")], "key")
    for other in (
        [call("B {{output:a}}")],
        [],
        [call("A {{output:a}}", sampling={"temperature": 0.0})],
    ):
        with pytest.raises(ConflictError) as refused:
            submit(TENANT, desk.session, other, "key")
        assert (refused.value.code, refused.value.param) == ("key_reused", "key")
    assert len(desk.service.inspect(TENANT, desk.session).calls) == 1


@virtually
async def test_calls_that_wait_for_each_other_are_refused() -> None:
    desk = Desk()
    with pytest.raises(ConflictError) as refused:
        desk.submit(call("{{b}} x {{output:a}}"), call("{{a}} x {{output:b}}"))
    assert refused.value.code == "cyclic"
    assert not await desk.service.variables(TENANT, desk.session)


@virtually
async def test_criteria_with_an_output_start_it_at_once() -> None:
    desk = Desk()
    desk.submit(call("A {{output:a}}", criteria={"a": Criteria(perf=Perf.THROUGHPUT)}))
    await asyncio.sleep(0.01)
    (llm_call,) = desk.engine.llm_calls()
    assert llm_call.service_class is ServiceClass.BE
    assert desk.service.variable(TENANT, desk.session, "a").perf == "throughput"
    await desk.close()


@virtually
async def test_variables_that_clients_set() -> None:
    desk = Desk()
    made = desk.service.declare(TENANT, desk.session, "question", variable_id="q")
    assert (made.id, made.name, made.state) == ("q", "question", "pending")
    desk.submit(call("Answer {{q}} {{output:a}}"))
    desk.want("a")
    await asyncio.sleep(1.0)
    assert not desk.engine.llm_calls()
    desk.set("q", "why?")
    with pytest.raises(ConflictError):
        desk.set("q", "again")
    with pytest.raises(ConflictError):
        desk.set("a", "mine")
    with pytest.raises(ConflictError):
        desk.service.declare(TENANT, desk.session, "other", variable_id="q")
    assert await desk.value("a") == echo("Answer why? ")
    shown = desk.service.variable(TENANT, desk.session, "q")
    assert (shown.value, len(shown.consumers), shown.producer) == ("why?", 1, None)


@virtually
async def test_plain_requests_are_part_of_a_session() -> None:
    desk = Desk()
    service, engine = desk.service, desk.engine
    for number in range(2):
        joined = service.join(TENANT, "crew", "planner")
        assert joined.hints.program == desk_program(service, "crew")
        assert joined.hints.keep_s > 0
        engine.kept.add(f"plain-{number}")
        joined.accepted(ServiceClass.RT, [f"plain-{number}"])
        assert service.inspect(TENANT, "crew").expires_in_s is None
        await asyncio.sleep(1.0)
        joined.first_token()
        joined.first_token()
        await asyncio.sleep(1.0)
        joined.finished("plan", prompt_tokens=9, cached_tokens=4, output_tokens=3)
        joined.failed("too late to say")
    await asyncio.sleep(0.01)
    assert engine.kept == {"plain-1"}
    assert service.join(TENANT, "crew", "planner").hints.expected_tokens == 3

    view = service.inspect(TENANT, "crew").calls[0]
    assert (view.name, view.kind, view.state) == ("planner", "plain", "finished")
    assert (view.queued_s, view.first_token_s, view.end_s) == (0.0, 1.0, 2.0)
    assert (view.prompt_tokens, view.cached_tokens, view.output_tokens) == (9, 4, 3)
    assert view.service_class is ServiceClass.RT
    assert service.figures().calls["finished", "rt"] == 2
    await service.delete(TENANT, "crew")
    assert not engine.kept


@virtually
async def test_a_client_that_names_each_plain_request_anew_pins_few() -> None:
    engine = ProgramEngine()
    service = make_service(engine)
    for number in range(150):
        joined = service.join(TENANT, "crew", f"agent-{number}")
        engine.kept.add(f"plain-{number}")
        joined.accepted(ServiceClass.RT, [f"plain-{number}"])
        joined.finished("text", prompt_tokens=1, cached_tokens=0, output_tokens=1)
    await asyncio.sleep(0.1)
    assert engine.kept == {f"plain-{number}" for number in range(150 - 64, 150)}
    await service.delete(TENANT, "crew")
    assert not engine.kept


@virtually
async def test_plain_requests_that_fail_or_leave() -> None:
    engine = ProgramEngine()
    service = make_service(engine)
    failed, left, late = (service.join(TENANT, "crew") for _ in range(3))
    engine.kept = {"a", "b"}
    failed.accepted(ServiceClass.RT, ["a"])
    left.accepted(ServiceClass.RT, ["b"])
    failed.failed("The engine died.")
    left.cancelled()
    await asyncio.sleep(0.1)
    assert not engine.kept
    states = [(view.state, view.error) for view in service.inspect(TENANT, "crew").calls]
    assert [state for state, _ in states] == ["failed", "cancelled", "ready"]
    assert states[0][1] is not None and states[0][1].message == "The engine died."
    await service.delete(TENANT, "crew")
    late.accepted(ServiceClass.BE, ["x"])
    late.first_token()
    late.finished("text", prompt_tokens=1, cached_tokens=0, output_tokens=1)


@virtually
async def test_idle_sessions_of_plain_clients_are_removed_for_new_ones() -> None:
    """Those of the same tenant first, of them the one that has been idle the longest."""
    engine = ProgramEngine()
    service = make_service(engine, max_sessions=5, pin_s=1e6)
    made = service.create("a").id
    for tenant, name in (("b", "theirs"), ("a", "first"), ("a", "second"), ("a", "third")):
        joined = service.join(tenant, name)
        engine.kept.add(name)
        joined.accepted(ServiceClass.RT, [name])
        await asyncio.sleep(1.0)
        joined.finished("x", prompt_tokens=1, cached_tokens=0, output_tokens=1)
    await asyncio.sleep(1.0)
    service.join("a", "first").cancelled()  # now "second" has been idle for longer
    running = service.join("a", "fourth")
    await asyncio.sleep(0.01)
    assert "second" not in engine.kept
    with pytest.raises(SessionGoneError, match="no room"):
        service.inspect("a", "second")
    program = service.create("a").id
    service.submit("a", "first", [call("A {{output:a}}")])
    assert {s.id for s in service.sessions("a")} == {made, "first", "fourth", program}
    service.join("c", "new").cancelled()  # there is one of "b" alone that is idle
    assert not service.sessions("b")
    service.join("c", "newer").cancelled()
    assert [s.id for s in service.sessions("c")] == ["newer"]
    last = service.join("c", "newer")
    for tenant in "abc":
        with pytest.raises(SessionLimitError):
            service.join(tenant, "more")
    for joined in (running, last):
        joined.cancelled()
    await asyncio.sleep(0.01)


def desk_program(service: SessionService, session_id: str) -> str:
    """By what the engine knows the session: as any other of its requests says."""
    joined = service.join(TENANT, session_id)
    joined.cancelled()
    return joined.hints.program


@virtually
async def test_a_program_of_which_every_value_is_wanted_runs() -> None:
    """All of a long chain is behind each, more than may be labeled."""
    desk = Desk(max_labels=300)
    names = [f"v{i}" for i in range(40)]
    chain = [
        call(f"{{{{{before}}}}} {{{{output:{name}}}}}", criteria={name: Criteria()})
        for before, name in zip(names, names[1:], strict=False)
    ]
    desk.submit(*chain)
    desk.set("v0", "x")
    await desk.value("v39")
    served = {shown.service_class for shown in desk.service.inspect(TENANT, desk.session).calls}
    assert served == {ServiceClass.RT}


@virtually
async def test_a_value_without_room_is_not_declared() -> None:
    desk = Desk(max_chars=10)
    with pytest.raises(SessionLimitError):
        desk.service.declare(TENANT, desk.session, "v", "eleven char", "v")
    assert not await desk.service.variables(TENANT, desk.session)
    desk.service.declare(TENANT, desk.session, "v", "ten chars.", "v")


@virtually
async def test_few_llm_calls_start_in_one_round_of_the_event_loop() -> None:
    """However many could."""
    desk = Desk()
    names = [f"v{i}" for i in range(50)]
    desk.submit(*(call(f"{n} {{{{output:{n}}}}}", criteria={n: Criteria()}) for n in names))
    most = before = 0
    while before < len(names):
        await asyncio.sleep(0)
        most = max(most, len(desk.engine.submitted) - before)
        before = len(desk.engine.submitted)
    await desk.service.delete(TENANT, desk.session)
    assert most == STARTS_PER_TURN


@virtually
async def test_calls_that_are_forgotten_at_once_are_counted() -> None:
    desk = Desk(kept_calls=2)
    calls = desk.submit(*(call(f"{i} {{{{input:x}}}} {{{{output:v{i}}}}}") for i in range(9)))
    for request in calls:
        desk.service.cancel(TENANT, desk.session, request)
    desk.submit(call("one {{output:w}}"))
    await desk.value("w")
    await desk.service.delete(TENANT, desk.session)
    ended = desk.service.figures().calls
    assert sum(count for (state, _), count in ended.items() if state == "cancelled") == 9
    assert sum(ended.values()) == 10


@virtually
async def test_a_session_that_ends_with_more_than_it_remembers_counts_all_of_it() -> None:
    desk = Desk(kept_calls=2)
    desk.submit(*(call(f"{i} {{{{input:x}}}} {{{{output:v{i}}}}}") for i in range(9)))
    await desk.service.delete(TENANT, desk.session)
    assert sum(desk.service.figures().calls.values()) == 9


@virtually
@pytest.mark.parametrize("words", ["some twenty chars", "a hundred chars " * 6])
async def test_what_is_forgotten_makes_room(words: str) -> None:
    """Of a long life only the latest calls count, and no more of their templates either."""
    desk = Desk(kept_calls=5, max_chars=5000)
    for i in range(300):
        (request,) = desk.submit(call(f"{i} {words} {{{{output:v{i}}}}}"))
        await desk.value(f"v{i}")
    calls = desk.service.inspect(TENANT, desk.session).calls
    assert len(calls) == 5
    assert calls[-1].id == request


@virtually
async def test_a_plain_request_that_ends_after_its_session_releases_its_kv() -> None:
    engine = ProgramEngine()
    service = make_service(engine)
    late = service.join(TENANT, "crew")
    await service.delete(TENANT, "crew")
    engine.kept = {"x"}
    late.accepted(ServiceClass.RT, ["x"])
    late.finished("text", prompt_tokens=1, cached_tokens=0, output_tokens=1)
    await asyncio.sleep(0.1)
    assert not engine.kept


MANY = 95


def many(desk: Desk, key: str | None = None) -> asyncio.Task[Any]:
    """A program whose values are all requested with it is being added."""
    calls = [call(f"{n} {{{{output:v{n}}}}}", criteria={f"v{n}": LATENCY}) for n in range(MANY)]
    return asyncio.create_task(desk.service.accept(TENANT, desk.session, calls, key))


def num_requested(desk: Desk) -> int:
    variables = desk.service.inspect(TENANT, desk.session).variables
    return sum(variable.perf is not None for variable in variables)


async def until_some_are_requested(desk: Desk) -> None:
    while not 0 < num_requested(desk) < MANY:
        await asyncio.sleep(0)


@virtually
async def test_the_values_of_a_program_are_requested_in_slices() -> None:
    desk = Desk()
    adding, seen = many(desk), [0]
    while not adding.done():
        await asyncio.sleep(0)
        seen.append(num_requested(desk))
        assert seen[-1] == MANY or not desk.engine.submitted, "groups are not known before"
    assert seen[-1] == MANY
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 20
    for n in range(MANY):
        await desk.value(f"v{n}")
    await desk.close()


@virtually
async def test_a_program_whose_client_goes_while_it_is_requested_is_requested_as_a_whole() -> None:
    desk = Desk()
    adding = many(desk, "once")
    await until_some_are_requested(desk)
    adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)
    assert num_requested(desk) == MANY
    again = await many(desk, "once")
    assert len(again) == len(desk.service.inspect(TENANT, desk.session).calls) == MANY
    for n in range(MANY):
        await desk.value(f"v{n}")
    await desk.close()


@virtually
async def test_a_session_may_end_while_values_are_requested() -> None:
    desk = Desk()
    adding = many(desk)
    await until_some_are_requested(desk)
    await desk.close()
    with pytest.raises(SessionGoneError):
        await adding
    assert not desk.engine.open
