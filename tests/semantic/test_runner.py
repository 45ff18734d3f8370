"""How programs run: what the engine is asked for, when, and on which terms."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from bros.core.errors import QueueFullError
from bros.core.interfaces import Prices
from bros.core.request import EngineRequest, ServiceClass, Slo
from bros.semantic.schema import CallSpec, Criteria, Message, Parameter, Perf, SharingMode
from support.program_engine import (
    BLOCK,
    STEP_S,
    TOKENIZER,
    ProgramEngine,
    byte_ids,
    echo,
    text_of,
)
from support.programs import (
    DUE_LATER,
    LATENCY,
    TENANT,
    THROUGHPUT,
    Desk,
    call,
    native,
    virtually,
)

LONG = "You are a very careful reviewer of code that others have written. "


@virtually
async def test_nothing_runs_until_a_value_is_wanted() -> None:
    desk = Desk()
    desk.submit(call("Say {{output:a}}"), call("Do {{a}} {{output:b}}"), call("No {{output:c}}"))
    await asyncio.sleep(1.0)
    assert not desk.engine.submitted

    await desk.value("b")
    prompts = [text_of(request.prompt_token_ids) for request in desk.engine.llm_calls()]
    a = echo("Say ")
    assert prompts == ["Say ", f"Do {a} "]


@virtually
async def test_a_consumer_starts_the_moment_its_inputs_are_there() -> None:
    desk = Desk()
    first, second = desk.submit(call("Say {{output:a}}"), call("Do {{a}} {{output:b}}"))
    await desk.value("b")
    produced, consumed = desk.view(first), desk.view(second)
    assert produced.end_s == consumed.queued_s
    started = desk.engine.submitted_s[second] - desk.engine.submitted_s[first]
    assert started == pytest.approx(produced.end_s)


@virtually
async def test_generated_tokens_are_passed_on_as_they_are() -> None:
    """The answer is not what a tokenizer makes of its text, so encoding it again would show."""
    engine = ProgramEngine(lambda prompt: "the quick brown fox")
    desk = Desk(engine)
    desk.submit(call("Say {{output:a}}"), call("Do {{a}} now {{output:b}}"))
    await desk.value("b")

    generated = byte_ids("the quick brown fox")
    assert TOKENIZER.encode("the quick brown fox") != list(generated)
    expected = [*TOKENIZER.encode("Do "), *generated, *TOKENIZER.encode(" now ")]
    assert list(engine.llm_calls()[1].prompt_token_ids) == expected


@virtually
async def test_changed_values_are_encoded() -> None:
    engine = ProgramEngine(lambda prompt: "the quick brown fox")
    desk = Desk(engine)
    desk.submit(
        call("Say {{output:a}}", transforms={"a": "upper"}),
        call("Do {{a}}{{output:b}}"),
        call("Say {{output:c}}"),
        call("Do {{c}}{{output:d}}", transforms={"c": "truncate(3)"}),
    )
    assert await desk.value("a") == "THE QUICK BROWN FOX"
    await desk.value("b")
    await desk.value("d")
    prompts = [list(request.prompt_token_ids) for request in engine.llm_calls()]
    assert TOKENIZER.encode("Do ") + TOKENIZER.encode("THE QUICK BROWN FOX") in prompts
    assert TOKENIZER.encode("Do ") + TOKENIZER.encode("the") in prompts


@virtually
async def test_after_a_stop_string_the_text_stands_for_the_tokens() -> None:
    engine = ProgramEngine(lambda prompt: "fox and dog. then more")
    desk = Desk(engine)
    desk.submit(
        call("Say {{output:a}} so {{output:b}}", samplings={"a": {"stop": ["then"]}}),
        call("Do {{a}}{{output:c}}"),
    )
    assert await desk.value("a") == "fox and dog. "
    await desk.value("b")
    await desk.value("c")
    encoded = TOKENIZER.encode("fox and dog. ")
    prompts = [list(request.prompt_token_ids) for request in engine.llm_calls()]
    assert TOKENIZER.encode("Say ") + encoded + TOKENIZER.encode(" so ") in prompts
    assert TOKENIZER.encode("Do ") + encoded in prompts
    assert all(request.sampling.stop == () for request in engine.llm_calls())


@virtually
async def test_markers_in_a_value_are_text_to_other_calls() -> None:
    """Else a document that makes one call write a marker could begin a tool call in another."""
    (marker,) = TOKENIZER.encode("<tool_call>", add_special_tokens=False)
    engine = ProgramEngine(lambda prompt: [*byte_ids("use "), marker, *byte_ids(" now")])
    desk = Desk(engine)
    desk.submit(call("Say {{output:a}}"), call("Do {{a}}{{output:b}}"))
    await desk.value("b")
    prompt = engine.llm_calls()[1].prompt_token_ids
    assert marker not in prompt
    assert text_of(prompt) == "Do use <tool_call> now"


@virtually
async def test_tokens_that_do_not_show_are_not_passed_on() -> None:
    """A special token amid the answer is no text, so it must not get into other prompts."""
    start = TOKENIZER.bos_token_id
    assert start is not None
    engine = ProgramEngine(lambda prompt: [*byte_ids("fox"), start, *byte_ids("dog")])
    desk = Desk(engine)
    desk.submit(call("Say {{output:a}}"), call("Do {{a}}{{output:b}}"))
    await desk.value("b")
    prompt = engine.llm_calls()[1].prompt_token_ids
    assert start not in prompt
    assert text_of(prompt) == "Do foxdog"


@virtually
async def test_several_outputs_of_a_call_are_one_sequence() -> None:
    """Each LLM call's prompt goes on where the one before ended: with its raw tokens, even if the
    variable has been transformed."""
    desk = Desk()
    (request,) = desk.submit(
        call("A {{output:x}} B {{output:y}} C {{output:z}}", transforms={"x": "upper"})
    )
    await desk.value("z")
    llm_calls = desk.engine.llm_calls()
    assert [llm_call.request_id for llm_call in llm_calls] == [f"{request}.{i}" for i in range(3)]
    for before, after in zip(llm_calls, llm_calls[1:], strict=False):
        answer = byte_ids(echo(text_of(before.prompt_token_ids)))
        start = [*before.prompt_token_ids, *answer]
        assert list(after.prompt_token_ids[: len(start)]) == start
    assert await desk.value("x") == echo("A ").upper()


@virtually
async def test_kv_is_kept_between_llm_calls_and_given_back() -> None:
    desk = Desk(pin_s=33.0)
    desk.submit(call("A {{output:x}} B {{output:y}}"))
    await desk.value("x")
    (first,) = desk.engine.llm_calls()
    assert first.hints.keep_s == 33.0
    assert desk.engine.kept == {first.request_id}
    await desk.value("y")
    assert desk.engine.llm_calls()[1].hints.keep_s == 0.0
    await asyncio.sleep(0.1)
    assert not desk.engine.kept


@pytest.mark.parametrize("how", ["cancel", "delete"])
@virtually
async def test_kept_kv_is_given_back_whatever_happens(how: str) -> None:
    desk = Desk()
    desk.submit(call("A {{output:x}} B {{late}} {{output:y}}"))
    request = desk.service.variable(TENANT, desk.session, "x").producer
    assert request is not None
    desk.want("y")
    await desk.value("x")
    await asyncio.sleep(1.0)
    assert desk.engine.kept
    if how == "cancel":
        desk.service.cancel(TENANT, desk.session, request)
        await asyncio.sleep(0.1)
    else:
        await desk.close()
    assert not desk.engine.kept


@virtually
async def test_the_beginning_of_a_consumer_is_computed_meanwhile() -> None:
    desk = Desk()
    first, second = desk.submit(call("Say {{output:a}}"), call(LONG + "{{a}}{{output:b}}"))
    await desk.value("b")
    (fill,) = desk.engine.fills()
    assert text_of(fill.prompt_token_ids) == LONG
    assert fill.service_class is ServiceClass.BE
    assert fill.hints.keep_s > 0
    times = desk.engine.submitted_s
    assert times[first] < times[fill.request_id] < times[second]
    await asyncio.sleep(0.1)
    assert fill.request_id in desk.engine.released and not desk.engine.kept
    assert desk.service.figures().prefills == 1


@virtually
async def test_short_or_known_beginnings_are_not_worth_it() -> None:
    desk = Desk()
    text = text_of(TOKENIZER.encode(LONG)[: 2 * BLOCK - 1])
    desk.submit(call("Say {{output:a}}"), call(text + "{{a}}{{output:b}}"))
    await desk.value("b")
    assert not desk.engine.fills()

    desk.submit(*(call(f"{LONG}{{{{c}}}}{{{{output:d{i}}}}}") for i in range(4)))
    desk.submit(call("Say {{output:c}}"))
    for i in range(4):
        desk.want(f"d{i}")
    await desk.value("d0")
    assert len(desk.engine.fills()) == 1


@virtually
async def test_a_beginning_that_could_not_be_computed_is_tried_again() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "x" * 100))
    desk.submit(
        call("Say {{output:a}}"),
        call("Say more {{output:b}}"),
        call(LONG + "{{a}}{{output:c}}"),
        call(LONG + "{{b}}{{output:d}}"),
    )
    desk.want("c")
    await asyncio.sleep(0.02)
    desk.engine.refusals = [QueueFullError(5, 3.0)]
    await asyncio.sleep(0.1)
    assert not desk.engine.refusals and not desk.engine.fills()
    assert desk.service.figures().prefills == 0
    desk.want("d")
    await asyncio.sleep(0.2)
    (fill,) = desk.engine.fills()
    assert text_of(fill.prompt_token_ids) == LONG
    assert desk.service.figures().prefills == 1
    await desk.close()


@virtually
async def test_a_fill_that_comes_too_late_is_stopped() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "x"))
    _, second = desk.submit(call("S{{output:a}}"), call(20 * LONG + "{{a}}{{output:b}}"))
    await desk.value("b")
    (fill,) = desk.engine.fills()
    assert desk.engine.aborted == [fill.request_id]
    order = [request.request_id for request in desk.engine.submitted]
    assert order[-1] == second


@virtually
async def test_a_prefill_that_no_call_needs_any_more_is_aborted() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "x" * 100))
    _, second = desk.submit(call("S{{output:a}}"), call(20 * LONG + "{{a}}{{output:b}}"))
    desk.want("b")
    await asyncio.sleep(0.1)
    (fill,) = desk.engine.fills()
    desk.service.cancel(TENANT, desk.session, second)
    await asyncio.sleep(0.01)
    assert desk.engine.aborted == [fill.request_id]
    assert desk.state("a") == "pending"  # the producer goes on
    await desk.close()


@virtually
async def test_prefixes_that_grow_while_one_is_computed_are_one_task() -> None:
    """1,200 values that come at once made a chain of as many tasks, too long to be cancelled."""
    count = 1200
    desk = Desk(ProgramEngine(lambda prompt: "x", step_s=10.0))
    desk.submit(*(call(f"{n} {{{{output:v{n}}}}}") for n in range(count)))
    desk.submit(call(LONG + "".join(f"{{{{v{n}}}}}" for n in range(count)) + " {{output:all}}"))
    for n in range(count):  # so that the values come one after the other
        desk.want(f"v{n}")
        await asyncio.sleep(0.001)
    assert await desk.value("all") == "x"
    prompt = text_of(desk.engine.llm_calls()[-1].prompt_token_ids)
    assert prompt == LONG + count * "x" + " "
    await desk.close()
    assert not desk.engine.kept


@virtually
async def test_a_failed_fill_does_no_harm() -> None:
    engine = ProgramEngine()

    async def refuse_fills(request: object) -> object:
        if getattr(request, "prefill_only", False):
            raise RuntimeError("no fills today")
        return await submit(request)

    submit = engine.submit
    engine.submit = refuse_fills  # type: ignore[method-assign,assignment]
    desk = Desk(engine)
    desk.submit(call("Say {{output:a}}"), call(LONG + "{{a}}{{output:b}}"))
    assert await desk.value("b") == echo(LONG + echo("Say "))


@virtually
async def test_map_reduce_is_served_as_its_objectives_say() -> None:
    desk = Desk()
    maps = [call(f"Part {i} {{{{output:m{i}}}}}", name="map") for i in range(4)]
    inputs = " ".join(f"{{{{m{i}}}}}" for i in range(4))
    *_, reduce = desk.submit(*maps, call(f"All {inputs} {{{{output:r}}}}"))
    await desk.value("r", Criteria(perf=Perf.LATENCY, deadline_s=60.0))
    *mapped, reduced = desk.engine.llm_calls()
    assert {request.service_class for request in mapped} == {ServiceClass.BE}
    (group,) = {request.hints.group for request in mapped}
    assert group is not None and group.id.startswith(desk.session)
    assert reduced.hints.group is None
    assert {request.hints.depth for request in mapped} == {0}
    assert all(0 < (request.slo.deadline_s or 0) < 60.0 for request in mapped)
    assert reduced.service_class is ServiceClass.RT
    assert reduced.hints.depth == 1
    assert 0 < (reduced.slo.deadline_s or 0) < 60.0
    programs = {request.hints.program for request in desk.engine.submitted}
    assert programs == {desk.session}
    view = desk.view(reduce)
    assert (view.stage, view.level, view.depth) == (0, "rt", 1)
    groups = {call.group for call in desk.service.inspect(TENANT, desk.session).calls[:4]}
    assert len(groups) == 1 and None not in groups


@virtually
async def test_maps_that_a_user_waits_for_are_ordinary_real_time_requests() -> None:
    desk = Desk()
    maps = [call(f"Part {i} {{{{output:m{i}}}}}", name="map") for i in range(4)]
    *_, reduce = desk.submit(*maps, call("{{m0}}{{m1}}{{m2}}{{m3}}{{output:r}}"))
    await desk.value("r", LATENCY)
    *mapped, _ = desk.engine.llm_calls()
    assert {request.service_class for request in mapped} == {ServiceClass.RT}
    assert len({request.arrival_s for request in mapped}) == 1
    assert {request.slo for request in mapped} == {Slo()}
    (group,) = {request.hints.group for request in mapped}
    assert group is not None
    assert desk.view(reduce).level == "rt"


@virtually
async def test_a_member_that_something_waits_for_alone_is_not_only_one_of_a_group() -> None:
    """A user reads one of the maps as well; another value needs a second one alone."""
    desk = Desk()
    maps = [call(f"Part {i} {{{{output:m{i}}}}}", name="map") for i in range(4)]
    reduce = call("{{m0}}{{m1}}{{m2}}{{m3}}{{output:r}}")
    desk.submit(*maps, reduce, call("{{m1}}{{output:title}}"), call("{{m2}}{{output:later}}"))
    desk.want("r", LATENCY)
    desk.want("m0", Criteria(perf=Perf.TTFT, ttft_s=0.2))
    desk.want("title", LATENCY)
    desk.want("later", Criteria(perf=Perf.THROUGHPUT))
    await desk.value("r")
    groups = [request.hints.group for request in desk.engine.llm_calls()[:4]]
    assert [group and group.awaited for group in groups] == [True, True, False, False]
    assert len({group.id for group in groups if group is not None}) == 1
    await desk.close()


@virtually
async def test_maps_for_throughput_are_a_group_that_precedes_no_others() -> None:
    desk = Desk()
    maps = [call(f"Part {i} {{{{output:m{i}}}}}", name="map") for i in range(4)]
    *_, reduce = desk.submit(*maps, call("{{m0}}{{m1}}{{m2}}{{m3}}{{output:r}}"))
    await desk.value("r", Criteria(perf=Perf.THROUGHPUT))
    *mapped, reduced = desk.engine.llm_calls()
    assert {request.service_class for request in (*mapped, reduced)} == {ServiceClass.BE}
    (group,) = {request.hints.group for request in mapped}
    assert group is not None and not group.precedes
    assert desk.view(reduce).level == "throughput"


@virtually
async def test_the_last_of_a_group_is_promoted() -> None:
    def answer(prompt: str) -> str:
        return "x" * (500 if prompt == "Part 3 " else 5)

    desk = Desk(ProgramEngine(answer))
    requests = desk.submit(
        *(call(f"Part {i} {{{{output:m{i}}}}}") for i in range(4)),
        call("{{m0}}{{m1}}{{m2}}{{m3}}{{output:r}}", sampling={"max_tokens": 5}),
    )
    desk.want("r", DUE_LATER)
    await asyncio.sleep(1.0)
    assert set(desk.engine.promoted) == {requests[3]}
    assert desk.engine.awaited[requests[3]], "all that follows waits for it"
    assert desk.view(requests[3]).service_class is ServiceClass.RT
    await desk.close()


@virtually
async def test_an_upgrade_promotes_what_runs_and_what_waits_for_room() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "x" * 200))
    (running,) = desk.submit(call("A {{output:a}}"))
    desk.want("a", THROUGHPUT)
    await asyncio.sleep(0.5)
    desk.engine.refusals = [QueueFullError(5, 3.0)]
    (refused,) = desk.submit(call("B {{output:b}}"))
    desk.want("b", THROUGHPUT)
    await asyncio.sleep(0.5)
    desk.want("a", Criteria(perf=Perf.TTFT, ttft_s=0.125))
    desk.want("b", LATENCY)
    await asyncio.sleep(0.01)
    assert desk.engine.promoted[running].ttft_s == 0.125
    await desk.value("b")
    served = {request.request_id: request.service_class for request in desk.engine.llm_calls()}
    assert served[running] is ServiceClass.BE
    assert served[f"{refused}~2"] is ServiceClass.RT


@virtually
async def test_stricter_criteria_reach_a_call_that_is_real_time_already() -> None:
    """A member of an urgent group, which a client then reads; another one that a client awaits; and
    one that is needed for one more value."""
    desk = Desk(ProgramEngine(lambda prompt: "x" * 100))
    maps = desk.submit(
        *(call(f"Part {i} {{{{output:m{i}}}}}") for i in range(4)),
        call("{{m0}}{{m1}}{{m2}}{{m3}}{{output:r}}"),
        call("More of {{m2}}{{output:more}}"),
    )[:4]
    desk.want("r", LATENCY)
    await asyncio.sleep(0.05)
    submitted = {request.request_id: request for request in desk.engine.llm_calls()}
    assert {submitted[each].service_class for each in maps} == {ServiceClass.RT}
    assert not any(group.awaited for each in maps if (group := submitted[each].hints.group))
    desk.want("m0", Criteria(perf=Perf.TTFT, ttft_s=0.2))
    await asyncio.sleep(0.01)
    assert desk.engine.promoted == {maps[0]: Slo(ttft_s=0.2)}
    desk.want("m1", LATENCY)
    desk.want("more", LATENCY)
    await asyncio.sleep(0.01)
    assert desk.engine.promoted.keys() == set(maps[:3])
    assert desk.engine.promoted[maps[1]] == desk.engine.promoted[maps[2]] == Slo()
    assert set(desk.engine.awaited.values()) == {True}
    desk.want("m0", THROUGHPUT)
    desk.want("m1", LATENCY)
    desk.engine.promoted.clear()
    await asyncio.sleep(0.01)
    assert not desk.engine.promoted, "nothing has become stricter"
    await desk.close()


@virtually
async def test_an_earlier_deadline_is_no_reason_to_promote_what_an_overloaded_engine_refused() -> (
    None
):
    desk = Desk(ProgramEngine(lambda prompt: "x" * 100))
    desk.engine.relegates = True
    (request,) = desk.submit(call("Say {{output:a}}"))
    desk.want("a", Criteria(perf=Perf.TTFT, deadline_s=50.0))
    await asyncio.sleep(0.05)
    desk.want("a", Criteria(perf=Perf.TTFT, deadline_s=40.0))
    await asyncio.sleep(0.05)
    assert not desk.engine.promoted
    assert desk.view(request).service_class is ServiceClass.BE
    desk.want("a", Criteria(perf=Perf.TTFT, ttft_s=0.2))
    await asyncio.sleep(0.05)
    assert set(desk.engine.promoted) == {request}
    await desk.close()


def behind_a_door() -> tuple[Desk, asyncio.Event]:
    """A desk whose engine accepts requests once the event is set."""
    engine = ProgramEngine()
    door, submit = asyncio.Event(), engine.submit

    async def slow_submit(request: EngineRequest) -> object:
        await door.wait()
        return await submit(request)

    engine.submit = slow_submit  # type: ignore[method-assign,assignment]
    return Desk(engine), door


@virtually
async def test_an_upgrade_while_the_engine_is_being_asked_is_not_lost() -> None:
    desk, door = behind_a_door()
    (request,) = desk.submit(call("A {{output:a}}"))
    desk.want("a", THROUGHPUT)
    await asyncio.sleep(0.1)
    desk.want("a", LATENCY)
    await asyncio.sleep(0.1)
    assert not desk.engine.promoted
    door.set()
    await desk.value("a")
    (llm_call,) = desk.engine.llm_calls()
    assert llm_call.service_class is ServiceClass.BE
    assert set(desk.engine.promoted) == {request}
    assert desk.view(request).service_class is ServiceClass.RT


@virtually
async def test_a_deadline_at_risk_promotes() -> None:
    """By the timer, without anything else happening."""
    desk = Desk(ProgramEngine(lambda prompt: "x" * 250))
    (request,) = desk.submit(call("A {{output:a}}"))
    desk.want("a", Criteria(perf=Perf.THROUGHPUT, deadline_s=5.0))
    await asyncio.sleep(0.1)
    assert not desk.engine.promoted
    (llm_call,) = desk.engine.llm_calls()
    assert (llm_call.service_class, llm_call.slo.deadline_s) == (ServiceClass.BE, 5.0)
    desk.engine.answer = lambda prompt: ""
    await asyncio.sleep(2.3)
    assert set(desk.engine.promoted) == {request}
    await desk.close()


@pytest.mark.parametrize("history", [(0.0,), (0.5,), (0.99,), (0.99, 0.0, 0.5)], ids=str)
@pytest.mark.parametrize(
    ("template", "cached"),
    [("{new}", 0), ("{old}", 900), ("{half}{{{{x}}}}", 450), ("{{{{x}}}}{half}", 0)],
    ids=["uncached", "cached", "partly", "only after a value"],
)
@virtually
async def test_what_is_cached_of_a_prompt_is_known_from_its_pieces(
    template: str, cached: int, history: tuple[float, ...]
) -> None:
    """However much was cached of earlier prompts of the function. The deadline of 4 s is at risk
    when the time for the prompt and 0.31 s are left."""
    engine = ProgramEngine(lambda prompt: "12345", step_s=0.03)
    engine.info = dataclasses.replace(engine.info, prices=Prices(token_s=0.0015, row_s=0.01))
    texts = {"old": "a" * 900, "half": "a" * 450, "new": "b" * 900}
    desk, sampling = Desk(engine), {"max_tokens": 6}
    for engine.cached in history:
        for part in ("old", "half"):
            other = desk.service.create(TENANT).id
            before = call(texts[part] + "{{output:y}}", name="f", sampling=sampling)
            desk.service.submit(TENANT, other, [before])
            await desk.service.get(TENANT, other, "y", THROUGHPUT)
            await desk.service.delete(TENANT, other)
    template = template.format(**texts) + "{{output:y}}"
    desk.submit(call(template, name="f", sampling=sampling, values={"x": "b" * 450}))
    desk.want("y", Criteria(perf=Perf.THROUGHPUT, deadline_s=4.0))
    at_risk_s = 4.0 - 0.0015 * (900 - cached) - 0.31
    await asyncio.sleep(at_risk_s - 0.15)
    assert not engine.promoted
    await asyncio.sleep(0.3)
    assert engine.promoted
    await desk.close()


@virtually
async def test_lengths_are_learnt_by_name() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "12345"))
    for i in range(3):
        desk.submit(call(f"A{i} {{{{output:a{i}}}}}", name="count"))
        await desk.value(f"a{i}")
    desk.submit(call("B {{output:b}}", name="other"))
    await desk.value("b")
    expected = [request.hints.expected_tokens for request in desk.engine.llm_calls()]
    assert expected[1:3] == [6, 6]  # five and the end
    assert expected[0] == expected[3] != 6


@virtually
async def test_native_functions_are_left_to_the_client() -> None:
    desk = Desk()
    desk.submit(
        call("A {{output:a}}"), native("a", "b c", name="cut"), call("D {{b}}{{c}}{{output:d}}")
    )
    desk.want("d")
    a = await desk.value("a")
    desk.set("b", a[:3])
    assert desk.state("d") == "pending"
    desk.set("c", "tail")
    assert await desk.value("d") == echo(f"D {a[:3]}tail")


@virtually
async def test_sampling_of_an_output_over_that_of_the_call_over_that_of_the_session() -> None:
    desk = Desk(max_tokens=99)
    session = desk.service.create(TENANT, sampling={"temperature": 0.5, "top_k": 7, "seed": 1})
    spec = call(
        "A {{output:a}} B {{output:b}}",
        sampling={"top_k": 8, "seed": 2},
        samplings={"b": {"seed": 3, "max_tokens": 4}},
    )
    desk.service.submit(TENANT, session.id, [spec])
    await desk.service.get(TENANT, session.id, "b")
    a, b = (request.sampling for request in desk.engine.llm_calls())
    assert (a.temperature, a.top_k, a.seed, a.max_tokens) == (0.5, 8, 2, 99)
    assert (b.temperature, b.top_k, b.seed, b.max_tokens) == (0.5, 8, 3, 4)


@virtually
async def test_conversations_are_written_in_the_models_format() -> None:
    desk = Desk()
    spec = CallSpec(
        messages=[
            Message(role="system", content="Be brief."),
            Message(role="user", content="About {{topic}}?"),
        ],
        parameters=[Parameter(name="topic", value="dogs"), Parameter(name="output", variable="o")],
    )
    desk.submit(spec, call("Cats {{output:p}}", chat=True))
    await desk.value("o")
    await desk.value("p")
    first, second = (text_of(request.prompt_token_ids) for request in desk.engine.llm_calls())
    assert first == (
        "<|start|>system\nBe brief.<|end|>\n<|start|>user\nAbout dogs?<|end|>\n<|start|>assistant\n"
    )
    assert second == "<|start|>user\nCats<|end|>\n<|start|>assistant\n"


@virtually
async def test_who_may_share_what() -> None:
    """The constant beginning within the tenant, the rest too, or within a session or a scope."""
    desk = Desk()
    create = desk.service.create
    shared = [desk.session, create(TENANT).id]
    scoped = [create(TENANT, scope="team").id for _ in range(2)]
    alone = [create(TENANT, sharing=SharingMode.SESSION).id for _ in range(2)]
    alone.append(create(TENANT, scope="team", sharing=SharingMode.SESSION).id)
    sessions = [(TENANT, session) for session in (*shared, *scoped, *alone)]
    sessions.append(("other", create("other").id))
    for tenant, session in sessions:
        desk.service.submit(
            tenant, session, [call("Long {{x}} text {{output:a}}", values={"x": "v"})]
        )
        await desk.service.get(tenant, session, "a")
    llm_calls = desk.engine.llm_calls()
    assert [(each.tenant, each.cache_salt) for each in llm_calls] == [
        *[(TENANT, "")] * 7,
        ("other", ""),
    ]
    constant = len(TOKENIZER.encode("Long "))
    assert [each.hints.private_from for each in llm_calls] == [
        *[None] * 2,
        *[constant] * 5,
        None,
    ]
    private = [each.hints.private_salt for each in llm_calls[2:7]]
    assert private[0] == private[1]
    assert len(set(private)) == 4

    prefixes = [
        desk.service.inspect(tenant, session).calls[0].prefixes for tenant, session in sessions
    ]
    for index, distinct in ((0, 2), (1, 6), (2, 6)):
        assert len({borders[index].hash for borders in prefixes}) == distinct


@virtually
async def test_what_is_prefilled_ahead_is_private_as_the_prompt_is() -> None:
    for sharing in SharingMode:
        desk = Desk()
        desk.session = desk.service.create(TENANT, sharing=sharing).id
        long = "long enough to be worth it, " * 4
        desk.submit(
            call("{{x}}{{late}}{{output:a}}", values={"x": long}), call("Say {{output:late}}")
        )
        await desk.value("a")
        requests = [each for each in desk.engine.submitted if each.prompt_token_ids[:1] != [0]]
        (ahead,) = (each for each in requests if each.prefill_only)
        (whole,) = (each for each in desk.engine.llm_calls() if each.request_id in ahead.request_id)
        for each in (ahead, whole):
            assert each.kv_salt == whole.kv_salt
            assert each.hints.private_salt == whole.hints.private_salt
            assert each.hints.private_from == (None if sharing is SharingMode.TENANT else 0)


@virtually
async def test_what_is_seen_of_a_call_adds_up() -> None:
    desk = Desk()
    (request,) = desk.submit(call("A {{output:x}} B {{output:y}}", name="two"))
    await desk.value("y")
    view = desk.view(request)
    assert (view.name, view.kind, view.state, view.outputs) == (
        "two",
        "llm",
        "finished",
        ("x", "y"),
    )
    assert view.output_tokens == sum(llm_call.output_tokens for llm_call in view.llm_calls) == 22
    assert view.prompt_tokens == len(desk.engine.llm_calls()[1].prompt_token_ids)
    assert [llm_call.attempts for llm_call in view.llm_calls] == [1, 1]
    first, second = view.llm_calls
    assert 0 == first.queued_s < first.first_token_s < first.end_s <= second.queued_s
    assert first.first_token_s == pytest.approx(STEP_S * (1 + first.prompt_tokens // BLOCK))
    assert (view.queued_s, view.end_s) == (first.queued_s, second.end_s)


@virtually
async def test_a_call_of_which_only_the_beginning_is_wanted_is_seen_as_that() -> None:
    desk = Desk()
    (request,) = desk.submit(call("A {{output:x}} B {{output:y}}"))
    assert desk.view(request).service_class is None
    await desk.value("x")
    view = desk.view(request)
    assert (view.state, view.service_class, view.level) == ("waiting", ServiceClass.RT, "rt")
    await desk.value("y", THROUGHPUT)
    assert desk.view(request).service_class is ServiceClass.BE


class RecordingEngine(ProgramEngine):
    """calls: aborts and releases, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    async def abort(self, request_id: str) -> None:
        self.calls.append(f"abort {request_id}")
        await super().abort(request_id)

    async def release(self, request_id: str) -> None:
        self.calls.append(f"release {request_id}")
        await super().release(request_id)


@virtually
async def test_kv_of_a_cancelled_call_is_released_after_its_requests_are_aborted() -> None:
    """KV released before would stay pinned if the request completed in between."""
    engine = RecordingEngine()
    desk = Desk(engine)
    (request,) = desk.submit(call("A {{output:x}} B {{output:y}}"))
    desk.want("y")
    await asyncio.sleep(0.08)
    (running,) = engine.open
    desk.service.cancel(TENANT, desk.session, request)
    await asyncio.sleep(0.1)
    assert engine.calls == [f"abort {running}", f"release {running}"]


def _maps(count: int) -> list[CallSpec]:
    inputs = "".join(f"{{{{m{i}}}}}" for i in range(count))
    maps = (call(f"Part {i} {{{{output:m{i}}}}}") for i in range(count))
    return [*maps, call(f"{inputs}{{{{output:r}}}}")]


@virtually
async def test_what_waits_in_the_engine_for_a_cancelled_value_is_best_effort_from_then_on() -> None:
    """What has its first token goes on."""
    desk = Desk()
    *maps, reduce = desk.submit(*_maps(3), call("A" * 40 * BLOCK + "{{output:long}}"))[:-1]
    (late,) = desk.submit(call("Set {{x}} {{output:s}}"))
    (sink,) = desk.submit(call("{{r}}{{long}}{{s}}{{output:out}}"))
    desk.want("out")
    await asyncio.sleep(4 * STEP_S)
    (long,) = [request for request in desk.engine.open if request not in maps]
    assert {desk.view(request).state for request in maps} == {"running"}
    assert desk.view(long).state == "ready"
    desk.service.cancel(TENANT, desk.session, sink)
    await asyncio.sleep(0.5 * STEP_S)
    assert desk.engine.aborted == [long] and set(desk.engine.open) == {*maps, f"{long}~2"}
    view = desk.view(long)
    assert (view.state, view.service_class, view.level) == ("ready", ServiceClass.BE, "throughput")
    assert view.why == desk.view(maps[0]).why == "no requested value needs it any more"
    assert desk.view(maps[0]).service_class is ServiceClass.RT
    desk.set("x", "text")
    await asyncio.sleep(1000 * STEP_S)
    served = {request.request_id: request.service_class for request in desk.engine.llm_calls()}
    assert served == {
        **dict.fromkeys([*maps, long], ServiceClass.RT),
        **dict.fromkeys([f"{long}~2", late, reduce], ServiceClass.BE),
    }
    assert {desk.state(name) for name in ("m0", "r", "long", "s")} == {"ready"}


@virtually
async def test_what_is_submitted_again_as_best_effort_is_promoted_when_it_is_requested() -> None:
    desk = Desk()
    *maps, reduce = desk.submit(*_maps(2))
    desk.want("r")
    await asyncio.sleep(0.5 * STEP_S)
    desk.service.cancel(TENANT, desk.session, reduce)
    desk.want("m0")
    await asyncio.sleep(0)
    desk.want("m1")
    assert await desk.value("m0") == echo("Part 0 ")
    assert await desk.value("m1") == echo("Part 1 ")
    served = [(r.request_id, r.service_class) for r in desk.engine.llm_calls()]
    again = [f"{request}~2" for request in maps]
    assert [key for key, _ in served] == [*maps, *again]
    best_effort = {key for key, served_as in served if served_as is ServiceClass.BE}
    assert best_effort == set(desk.engine.promoted) <= set(again)


@virtually
async def test_a_value_given_up_while_the_engine_is_being_asked_is_best_effort() -> None:
    desk, door = behind_a_door()
    first, second = desk.submit(call("A {{output:a}}"), call("B {{a}}{{output:b}}"))
    desk.want("b")
    await asyncio.sleep(0.1)
    desk.service.cancel(TENANT, desk.session, second)
    door.set()
    await desk.value("a", THROUGHPUT)
    served = [(r.request_id, r.service_class) for r in desk.engine.llm_calls()]
    assert served == [(first, ServiceClass.RT), (f"{first}~2", ServiceClass.BE)]
    assert desk.engine.aborted == [first]


@virtually
async def test_a_refused_call_that_no_value_needs_any_more_asks_as_best_effort() -> None:
    desk = Desk()
    desk.engine.refusals = [QueueFullError(5, 3.0)] * 2
    *maps, reduce = desk.submit(*_maps(2))
    desk.want("r")
    await asyncio.sleep(0.5)
    desk.service.cancel(TENANT, desk.session, reduce)
    await desk.value("m0", THROUGHPUT)
    await desk.value("m1", THROUGHPUT)
    assert {request.service_class for request in desk.engine.llm_calls()} == {ServiceClass.BE}


@virtually
async def test_a_call_that_is_cancelled_while_it_is_withdrawn_has_ended() -> None:
    desk = Desk()
    *maps, reduce = desk.submit(*_maps(2))
    desk.want("r")
    await asyncio.sleep(0.5 * STEP_S)
    desk.service.cancel(TENANT, desk.session, reduce)
    desk.service.cancel(TENANT, desk.session, maps[0])
    await desk.value("m1", THROUGHPUT)
    assert desk.state("m0") == "cancelled"
    assert [request.request_id for request in desk.engine.llm_calls()] == [*maps, f"{maps[1]}~2"]
