"""Sixteen ways in which the system of the Parrot paper fails, and that bros does not fail in.

    W1   who waits for a failed variable waits for ever
    W2   errors of native functions are never seen
    W3   a failed fill of a shared prefix makes other sessions hang
    W4   an engine that goes away, or an error in the background, takes everything along
    W5   running out of KV memory kills the engine, and one block of the pool is never used
    W6   nothing is evicted under pressure, only after a time
    W7   the first token is not checked for the end
    W8   the user's sampling parameters are changed in place
    W9   nodes of the graph are never removed
    W10  ids of sessions are used again, and anybody may use them
    W11  a request that is in several groups may be run twice
    W12  what was freed leaves stale entries in the prefix cache
    W13  who shares a prefix is not where the prefix is
    W14  giving KV back holds up everything else
    W15  GET needs a body
    W16  no cancellation, and a full queue costs the session

Each has a test here, of the whole service; the parts have more of their own.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from bros.core.errors import NotFoundError, QueueFullError
from bros.core.request import ServiceClass
from bros.semantic.errors import SessionGoneError, UpstreamError
from bros.semantic.schema import Criteria, Perf
from support.program_engine import ProgramEngine, echo
from support.programs import LATENCY, TENANT, THROUGHPUT, Desk, call, native, soon, virtually
from support.scripted_server import Server
from support.session_server import SessionClient, keeping, ok
from support.toy_programs import toy_engine

SYSTEM = "You are a careful reviewer; the quick brown fox is over there. "
GREEDY = {"temperature": 0.0, "max_tokens": 12}


@virtually
async def test_w01_who_waits_for_a_failed_variable_is_told() -> None:
    desk = Desk()
    request, *_ = desk.submit(
        call("A {{output:a}}", transforms={"a": "json"}),
        call("{{a}} {{output:b}}"),
        call("{{b}} {{output:c}}"),
    )
    waits = [asyncio.create_task(desk.cause(name)) for name in "abcabc"]
    causes = await soon(asyncio.gather(*waits), 10.0)
    assert {(failed, stage) for failed, stage, _ in causes} == {(request, "transform")}
    assert await soon(desk.cause("c"), 0.1) == causes[0]  # and clients that ask later


@virtually
async def test_w02_errors_of_native_functions_are_seen_and_the_session_goes_on() -> None:
    desk = Desk()
    request, _ = desk.submit(native("", "a"), call("{{a}} {{output:b}}"))
    desk.service.fail(TENANT, desk.session, request, "ValueError: no")
    assert await soon(desk.cause("b")) == (request, "native", "ValueError: no")
    assert desk.view(request).state == "failed"
    desk.submit(call("C {{output:c}}"))
    assert await desk.value("c") == echo("C ")


@virtually
async def test_w03_a_shared_prefix_survives_whoever_was_computing_it() -> None:
    """Both want the same long beginning; the one who computes it is stopped on the way."""
    async with toy_engine(max_batch_tokens=8) as engine:
        first, second = Desk(engine), Desk(engine, seed=1)
        spec = call(3 * SYSTEM + "{{output:a}}", sampling=GREEDY)
        (request,) = first.submit(spec)
        second.submit(spec)
        first.want("a")
        second.want("a")
        await asyncio.sleep(0.03)
        assert first.view(request).first_token_s is None
        first.service.cancel(TENANT, first.session, request)
        assert await soon(second.value("a"), 10.0)
        with pytest.raises(UpstreamError):
            await first.value("a")
        for desk in (first, second):
            await desk.close()
        await engine.check_empty()


@virtually
async def test_w04_sessions_outlive_the_engine_and_bugs(caplog: pytest.LogCaptureFixture) -> None:
    def answer(prompt: str) -> str:
        if "bug" in prompt:
            raise ZeroDivisionError
        return echo(prompt)

    desk = Desk(ProgramEngine(answer))
    service = asyncio.create_task(desk.service.run())
    desk.submit(
        call("A {{output:a}}", sampling=GREEDY),
        call("bug {{output:b}}"),
        call("C {{output:c}} D {{output:d}}", sampling=GREEDY),
    )
    with caplog.at_level(logging.CRITICAL, "bros.semantic.service.runner"):
        waits = [asyncio.create_task(desk.value(name)) for name in "abd"]
        await asyncio.sleep(0.25)
        desk.engine.die()  # with what it has kept of the first LLM call
        await asyncio.sleep(3.0)
        desk.engine.revive()
        a, b, d = await soon(asyncio.gather(*waits, return_exceptions=True))
    assert a == echo("A ")
    assert isinstance(b, UpstreamError)
    assert isinstance(d, str)
    assert not service.done()
    await desk.close()
    service.cancel()
    await asyncio.gather(service, return_exceptions=True)


@virtually
async def test_w05_programs_larger_than_the_kv_memory_run_and_all_of_it_is_used() -> None:
    async with toy_engine(blocks=16, max_num_seqs=4) as engine:
        desk = Desk(engine)
        calls = [call(f"{SYSTEM}{i} {{{{output:v{i}}}}}", sampling=GREEDY) for i in range(12)]
        desk.submit(*calls)
        values = await soon(asyncio.gather(*(desk.value(f"v{i}") for i in range(12))))
        assert all(isinstance(value, str) for value in values)

        whole = "a" * (16 * 4 - 1)  # leaves room for one token
        desk.submit(call(whole + "{{output:w}}", sampling={"max_tokens": 1, "ignore_eos": True}))
        assert len(await desk.value("w")) == 1
        await desk.close()
        await engine.check_empty()


@virtually
async def test_w06_what_is_kept_for_later_makes_way_at_once() -> None:
    async with toy_engine(blocks=24) as engine:
        desk = Desk(engine, pin_s=1e5)
        desk.submit(
            *(
                call(
                    f"{SYSTEM}{i} {{{{output:a{i}}}}} {{{{x}}}} {{{{output:b{i}}}}}",
                    sampling=GREEDY,
                )
                for i in range(3)
            )
        )
        for i in range(3):
            desk.want(f"b{i}")
            await desk.value(f"a{i}")
        await asyncio.sleep(1.0)
        assert (await engine.stats()).kv_blocks_pinned > 6
        desk.submit(call("b" * 80 + "{{output:c}}", sampling=GREEDY))
        await soon(desk.value("c"), 5.0)
        await desk.close()
        await engine.check_empty()


@pytest.mark.parametrize(("answer", "value"), [("", ""), ("abc", "a")])
@virtually
async def test_w07_the_first_token_may_be_the_last(answer: str, value: str) -> None:
    desk = Desk(ProgramEngine(lambda prompt: answer))
    desk.submit(
        call("A {{output:a}}", sampling={"max_tokens": 1}),
        call("[{{a}}]{{output:b}}", sampling={"max_tokens": 1}),
    )
    assert await desk.value("a") == value
    await desk.value("b")
    assert [len(t.prompt_token_ids) for t in desk.engine.llm_calls()][1] == 2 + len(value)


@virtually
async def test_w08_sampling_parameters_stay_as_the_user_wrote_them() -> None:
    desk = Desk()
    stop_ids, own = [7, 8], {"stop_token_ids": [9], "stop": ["x"]}
    sampling = {"stop_token_ids": stop_ids, "temperature": 0.5}
    desk.submit(
        call("A {{output:a}} {{output:b}}", sampling=sampling, samplings={"b": own}),
        call("B {{output:c}}", sampling=sampling),
    )
    for name in "abc":
        await desk.value(name)
    assert sampling == {"stop_token_ids": [7, 8], "temperature": 0.5} and stop_ids == [7, 8]
    assert own == {"stop_token_ids": [9], "stop": ["x"]}
    asked = [request.sampling.stop_token_ids for request in desk.engine.llm_calls()]
    assert sorted(asked) == [(7, 8), (7, 8), (9,)]


@virtually
async def test_w09_calls_that_are_over_are_forgotten_in_time() -> None:
    desk = Desk()
    sizes = []
    for _ in range(5):
        for _ in range(700):
            joined = desk.service.join(TENANT, desk.session)
            joined.accepted(ServiceClass.RT)
            joined.finished("text", prompt_tokens=1, cached_tokens=0, output_tokens=1)
        sizes.append(len(desk.service.inspect(TENANT, desk.session).calls))
    assert sizes[0] == 700
    assert sizes[2] == sizes[3] == sizes[4]
    assert desk.service.figures().calls == {("finished", "rt"): 3500}


@virtually
async def test_w10_ids_of_sessions_are_used_once_and_by_their_tenant() -> None:
    desk = Desk()
    seen = {desk.session}
    for _ in range(50):
        session = desk.service.create(TENANT).id
        assert session not in seen
        seen.add(session)
        with pytest.raises(NotFoundError):
            desk.service.submit("other", session, [call("A {{output:a}}")])
        await desk.service.delete(TENANT, session)
        with pytest.raises(SessionGoneError):
            desk.service.inspect(TENANT, session)
        with pytest.raises(NotFoundError):
            desk.service.inspect("other", session)


@virtually
async def test_w11_everything_runs_once_however_many_want_it() -> None:
    desk = Desk()
    desk.submit(
        call("A {{output:a}}"),
        call("B {{output:b}}"),
        call("C {{a}}{{b}}{{output:c}} and {{output:d}}"),
        call("E {{a}}{{c}}{{output:e}}"),
        call("F {{b}}{{c}}{{d}}{{output:f}}"),
    )
    criteria = [THROUGHPUT, LATENCY, Criteria(perf=Perf.TTFT), Criteria(deadline_s=0.01), None]
    waits = []
    for each in criteria:
        waits += [asyncio.create_task(desk.value(name, each)) for name in "fedcba"]
        await asyncio.sleep(0.07)
    await soon(asyncio.gather(*waits))
    llm_calls = [request.request_id for request in desk.engine.llm_calls()]
    assert len(llm_calls) == len(set(llm_calls)) == 6


@virtually
async def test_w12_what_was_freed_is_never_taken_for_something_else() -> None:
    """The same and similar prompts over and over, in a cache that is far too small."""
    async with toy_engine(blocks=20) as engine:
        values: dict[str, set[str]] = {}
        for round_ in range(4):
            desk = Desk(engine, seed=round_)
            for end in ("fox", "dog", "fox. stop", "dog. stop"):
                name = f"v{end[:3]}{len(end)}"
                desk.submit(call(f"{SYSTEM}{end}{{{{output:{name}}}}}", sampling=GREEDY))
                values.setdefault(end, set()).add(await desk.value(name))
            await desk.close()
            await engine.check_empty()
        assert {len(found) for found in values.values()} == {1}
        assert len(set.union(*values.values())) == 4


@virtually
async def test_w13_who_shares_a_prefix_uses_it() -> None:
    """Also within one program that is handed over at once."""
    async with toy_engine() as engine:
        desk = Desk(engine)
        calls = [call(f"{SYSTEM}{i}{{{{output:v{i}}}}}", sampling=GREEDY) for i in range(6)]
        desk.submit(
            *calls,
            call("".join(f"{{{{v{i}}}}}" for i in range(6)) + "{{output:r}}", sampling=GREEDY),
        )
        await desk.value("r")
        views = desk.service.inspect(TENANT, desk.session).calls[:6]
        cached = sorted(view.cached_tokens for view in views)
        assert cached[0] == 0
        assert min(cached[1:]) >= views[0].prefixes[0].offset - 8
        await desk.close()


@virtually
async def test_w14_giving_kv_back_holds_up_nothing() -> None:
    engine = ProgramEngine()
    held_up = asyncio.Event()

    async def release(request_id: str) -> None:
        await held_up.wait()

    engine.release = release  # type: ignore[method-assign]
    desk = Desk(engine)
    desk.submit(call("A {{output:a}} B {{output:b}} C {{output:c}}"))
    await soon(desk.value("c"), 5.0)
    await soon(desk.close(), 60.0)
    held_up.set()
    await asyncio.sleep(0.1)


async def test_w15_everything_about_a_get_is_in_its_url() -> None:
    server = Server()
    async with keeping(server):
        session = await SessionClient.open(server.http)
        variables = await session.call("Say {{output:y}}")
        found = ok(
            await session.look(
                variables["y"], wait="true", timeout=5.0, criteria="ttft", ttft_ms=250
            )
        )
        assert found["state"] == "ready"
        assert server.engine.submitted[-1].slo.ttft_s == 0.25
        assert ok(await session.ask("GET", "/variables"))
        assert ok(await server.http.get("/v1/sessions"))
        assert ok(await session.ask("DELETE"))
        await server.http.aclose()


@virtually
async def test_w16_cancelling_and_a_full_queue_leave_the_session_as_it_is() -> None:
    desk = Desk()
    desk.engine.refusals = [QueueFullError(9, 1.0)] * 4
    requests = desk.submit(*(call(f"{i} {{{{output:v{i}}}}}") for i in range(4)))
    waits = [asyncio.create_task(desk.value(f"v{i}", THROUGHPUT)) for i in range(4)]
    await asyncio.sleep(0.5)
    desk.service.cancel(TENANT, desk.session, requests[0])
    first, *others = await soon(asyncio.gather(*waits, return_exceptions=True))
    assert isinstance(first, UpstreamError)
    assert others == [echo(f"{i} ") for i in range(1, 4)]
    assert desk.service.inspect(TENANT, desk.session).state == "open"
    assert not desk.engine.open
