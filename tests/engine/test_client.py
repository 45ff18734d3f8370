"""What a client makes of an engine's messages, without an engine."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.clock import SystemClock
from bros.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
)
from bros.core.interfaces import EngineReport, EngineStats, RequestStream, RequestTrace
from bros.core.request import (
    FinishReason,
    Output,
    RequestOutput,
    ServiceClass,
    Slo,
    expanded,
)
from bros.engine.client import MessageClient, OutputStream
from bros.engine.messages import (
    Abort,
    Accepted,
    Command,
    Failed,
    GetStats,
    GetTrace,
    Outputs,
    Promote,
    Ready,
    Refused,
    Reply,
    Reported,
    StatsReply,
    Submit,
    Subscribe,
    TraceReply,
)
from bros.router.client import RouterClient
from support.outputs import outputs_of
from support.turn_fleet import TurnFleet
from support.wire import ASK, INFO


class _Engine(MessageClient):
    async def close(self) -> None:
        self.on_death("It was closed.")


class Wire:
    """A client that is up, and what its engine was sent; client: of that engine, or of several
    of which it is the only one."""

    def __init__(self, kind: str) -> None:
        self.all_sent: list[Command] = []
        self.engine = _Engine(self.all_sent.append)
        self.engine.on_reply(Ready(INFO))
        self.client: _Engine | RouterClient = self.engine
        if kind == "several":
            self.client = RouterClient(TurnFleet(), SystemClock(), random.Random(0))
            self.client.add(self.engine)

    @property
    def sent(self) -> list[Command]:
        """Without what a router wants to know for itself."""
        return [command for command in self.all_sent if command != Subscribe()]

    async def settle(self) -> None:
        """Until all has been sent that goes without an answer."""
        for _ in range(5):
            await asyncio.sleep(0)


KINDS = ("one", "several")


@pytest.fixture(params=KINDS)
async def any_wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    made = Wire(request.param)
    yield made
    await made.client.close()


@pytest.fixture
async def wire() -> Wire:
    return Wire("one")


def trace_of(request_id: str) -> RequestTrace:
    return RequestTrace(
        request_id=request_id, service_class=ServiceClass.RT, requested_class=ServiceClass.RT,
        slo=Slo(), prompt_tokens=1, output_tokens=2, events=((0.0, "queued"),), waits={"rows": 0.5},
    )  # fmt: skip


async def test_a_refusal_is_freed_without_the_garbage_collector(any_wire: Wire) -> None:
    async def refusal(request_id: str) -> weakref.ref[BaseException]:
        submitting = asyncio.ensure_future(
            any_wire.client.submit(replace(ASK, request_id=request_id))
        )
        await any_wire.settle()
        any_wire.engine.on_reply(Refused.from_error(request_id, QueueFullError(5, 1.0)))
        try:
            await submitting
        except QueueFullError as error:
            return weakref.ref(error)
        finally:
            del submitting  # it has the error, which knows this frame
        raise AssertionError("it was not refused")

    gc.disable()
    try:
        refusals = [await refusal(f"r{number}") for number in range(3)]
        await any_wire.settle()
        assert [refused() for refused in refusals] == [None] * 3
    finally:
        gc.enable()


# ---- The slot of a stream


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    taken_after=st.sets(st.integers(0, 12)),
    dies=st.booleans(),
)
def test_any_turns_of_putting_and_reading_give_the_same_tokens(
    sizes: list[int], taken_after: set[int], dies: bool
) -> None:
    async def run() -> list[RequestOutput]:
        stream, read = OutputStream(ServiceClass.RT), list[RequestOutput]()
        reader = aiter(stream)
        waits = False
        for i, size in enumerate(sizes):
            ends = i + 1 == len(sizes) and not dies
            stream.put(
                RequestOutput(
                    request_id="r", token_ids=(i,) * size, cached_tokens=i,
                    finish_reason=FinishReason.LENGTH if ends else None,
                )
            )  # fmt: skip
            waits = True
            if i in taken_after:
                read.append(await anext(reader))
                waits = False
        if dies:
            stream.put(EngineDeadError("It burnt."))
            if waits:
                read.append(await anext(reader))
            with pytest.raises(EngineDeadError, match="burnt"):
                await anext(reader)
        else:
            read += [output async for output in reader]
        return read

    outputs = asyncio.run(run())
    assert len(outputs) <= len(sizes)
    tokens = [token_id for output in outputs for token_id in output.token_ids]
    assert tokens == [i for i, size in enumerate(sizes) for _ in range(size)]
    assert [output.finish_reason for output in outputs] == [
        *[None] * (len(outputs) - 1), None if dies else FinishReason.LENGTH
    ]  # fmt: skip
    assert outputs[-1].cached_tokens == len(sizes) - 1


@pytest.mark.parametrize("kind", KINDS)
@given(
    steps=st.lists(
        st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.sampled_from((0, 8))),
            max_size=5,
        ),
        max_size=6,
    ),
    connected_after=st.fixed_dictionaries({name: st.integers(0, 6) for name in "abc"}),
)
def test_short_and_full_outputs_of_a_request_keep_their_order(
    kind: str, steps: list[list[tuple[str, int, int]]], connected_after: dict[str, int]
) -> None:
    """steps: (request, number of tokens, cached tokens) of each output.
    connected_after: the step after which a sink is connected."""
    codec = pytest.importorskip("bros.transport.ipc", exc_type=ImportError).reply_codec()
    taken = {name: list[RequestOutput | EngineDeadError]() for name in "abc"}
    sent: dict[str, list[int]] = {name: [] for name in "abc"}

    def message(outputs: list[RequestOutput]) -> Reply:
        reply = codec.decode(codec.encode(outputs_of(outputs)))
        assert isinstance(reply, Outputs)
        return reply

    def take(name: str, item: Output | EngineDeadError) -> None:
        taken[name].append(item if isinstance(item, EngineDeadError) else expanded(item))

    async def run() -> None:
        wire, streams = Wire(kind), dict[str, RequestStream]()
        for name in "abc":
            submission = asyncio.create_task(wire.client.submit(replace(ASK, request_id=name)))
            await wire.settle()
            wire.engine.on_reply(Accepted(name, ServiceClass.RT))
            streams[name] = await submission
        for number, step in enumerate([[], *steps, [(name, 1, 0) for name in "abc"]]):
            outputs = []
            for name, size, cached in step:
                token_ids = tuple(range(len(sent[name]), len(sent[name]) + size))
                sent[name] += token_ids
                reason = FinishReason.LENGTH if number == len(steps) + 1 else None
                outputs.append(RequestOutput(
                    request_id=name, token_ids=token_ids, cached_tokens=cached,
                    finish_reason=reason,
                ))  # fmt: skip
            wire.engine.on_reply(message(outputs))
            for name in "abc":
                if number == min(connected_after[name], len(steps)):
                    streams[name].connect(partial(take, name))
        await wire.client.close()

    asyncio.run(run())
    for name, items in taken.items():
        outputs = [item for item in items if isinstance(item, RequestOutput)]
        assert outputs == items, "the engine died after the end"
        assert [i for output in outputs for i in output.token_ids] == sent[name]
        reasons = [output.finish_reason for output in outputs]
        assert reasons == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]


async def test_a_sink_gets_what_came_before_it_and_then_everything_at_once() -> None:
    stream, taken = OutputStream(ServiceClass.RT), list[RequestOutput | EngineDeadError]()
    for token_id in (1, 2, 3):
        stream.put(RequestOutput(request_id="r", token_ids=(token_id,)))
    stream.connect(taken.append)
    last = RequestOutput(request_id="r", token_ids=(4,), finish_reason=FinishReason.STOP)
    stream.put(last)
    assert taken == [RequestOutput(request_id="r", token_ids=(1, 2, 3)), last]


async def test_a_reader_that_waits_is_woken_by_what_comes() -> None:
    stream = OutputStream(ServiceClass.RT)
    reader = asyncio.ensure_future(anext(aiter(stream)))
    await asyncio.sleep(0)
    assert not reader.done()
    output = RequestOutput(request_id="r", token_ids=(1,))
    stream.put(output)
    assert await reader == output


# ---- Submissions, questions, death


@pytest.mark.parametrize("served_as", ServiceClass)
async def test_a_stream_tells_what_the_engine_took_the_request_as(
    any_wire: Wire, served_as: ServiceClass
) -> None:
    wire = any_wire
    submission = asyncio.create_task(wire.client.submit(ASK))
    await wire.settle()
    assert wire.sent == [Submit(ASK)]
    wire.engine.on_reply(Accepted("r", served_as))
    # In the same message as far as the event loop is concerned: nothing may be lost.
    last = RequestOutput(request_id="r", token_ids=(7,), finish_reason=FinishReason.LENGTH)
    wire.engine.on_reply(Outputs((last,)))
    stream = await submission
    assert stream.service_class is served_as
    assert [output async for output in stream] == [last]


async def test_a_refusal_for_overload_reaches_the_caller(any_wire: Wire) -> None:
    wire = any_wire
    submission = asyncio.create_task(wire.client.submit(ASK))
    await wire.settle()
    wire.engine.on_reply(Refused.from_error("r", OverloadedError("Too busy.", 7.5)))
    with pytest.raises(OverloadedError, match="Too busy") as refused:
        await submission
    assert refused.value.retry_after_s == 7.5
    assert wire.client.num_open == 0


ENDED = Outputs((RequestOutput(request_id="r", finish_reason=FinishReason.ABORT),))


@pytest.mark.parametrize(
    "replies",
    [
        [Accepted("r", ServiceClass.RT), ENDED],
        [Refused.from_error("r", OverloadedError("Too busy.", 1.0))],
    ],
    ids=["accepted", "refused"],
)
async def test_an_id_is_in_use_until_the_engine_has_left_a_withdrawn_request(
    wire: Wire, replies: list[Reply]
) -> None:
    """Else what it says about that one would be taken for the answer to the next one."""
    withdrawn = asyncio.create_task(wire.client.submit(ASK))
    await asyncio.sleep(0)
    withdrawn.cancel()
    await asyncio.wait([withdrawn])
    assert wire.sent == [Submit(ASK), Abort("r")]
    for reply in replies:
        with pytest.raises(InvalidRequestError, match="in use"):
            await wire.client.submit(ASK)
        wire.client.on_reply(reply)
    again = asyncio.create_task(wire.client.submit(ASK))
    await asyncio.sleep(0)
    wire.client.on_reply(Accepted("r", ServiceClass.RT))
    assert (await again).service_class is ServiceClass.RT


@pytest.mark.parametrize("ended", [True, False])
async def test_an_id_is_free_if_the_engine_has_answered_as_submit_is_cancelled(
    wire: Wire, ended: bool
) -> None:
    submission = asyncio.create_task(wire.client.submit(ASK))
    await asyncio.sleep(0)
    if ended:
        wire.client.on_reply(Accepted("r", ServiceClass.RT))
        wire.client.on_reply(ENDED)
    else:
        wire.client.on_reply(Refused.from_error("r", OverloadedError("Too busy.", 1.0)))
    submission.cancel()
    await asyncio.wait([submission])
    again = asyncio.create_task(wire.client.submit(ASK))
    await asyncio.sleep(0)
    wire.client.on_reply(Accepted("r", ServiceClass.RT))
    assert (await again).service_class is ServiceClass.RT


async def test_only_what_is_open_is_promoted(wire: Wire) -> None:
    soon = Slo(ttft_s=0.2)
    await wire.client.promote("r", soon)
    assert wire.sent == []
    submission = asyncio.create_task(wire.client.submit(ASK))
    await asyncio.sleep(0)
    await wire.client.promote("r", soon)
    await wire.client.promote("other", soon)
    assert wire.sent == [Submit(ASK), Promote("r", soon, True)], (
        "in this order, accepted or not yet"
    )
    wire.client.on_reply(Accepted("r", ServiceClass.BE))
    stream = await submission
    await wire.client.promote("r", soon)
    assert len(wire.sent) == 3
    last = RequestOutput(request_id="r", finish_reason=FinishReason.LENGTH)
    wire.client.on_reply(Outputs((last,)))
    await wire.client.promote("r", soon)
    wire.client.on_death("It burnt.")
    await wire.client.promote("r", soon)
    assert len(wire.sent) == 3
    assert stream.service_class is ServiceClass.BE, "what it was accepted as"


async def test_questions_are_answered_in_whatever_order_the_answers_come(any_wire: Wire) -> None:
    wire = any_wire
    first = asyncio.create_task(wire.client.trace("a"))
    cancelled = asyncio.create_task(wire.client.trace("b"))
    stats = asyncio.create_task(wire.client.stats())
    last = asyncio.create_task(wire.client.trace("c"))
    await wire.settle()
    asked = [command for command in wire.sent if isinstance(command, GetStats | GetTrace)]
    assert len({question.query_id for question in asked}) == len(asked) == 4
    assert {q.request_id for q in asked if isinstance(q, GetTrace)} == {"a", "b", "c"}
    cancelled.cancel()
    await asyncio.wait([cancelled])
    for question in reversed(asked):
        number = question.query_id
        if isinstance(question, GetStats):
            wire.engine.on_reply(StatsReply(number, EngineStats(steps=3)))
        else:
            known = question.request_id != "c"
            trace = trace_of(question.request_id) if known else None
            wire.engine.on_reply(TraceReply(number, trace))
    assert await first == trace_of("a")
    assert cancelled.cancelled()
    assert (await stats).steps == 3
    assert await last is None


async def test_a_question_that_cannot_be_sent_leaves_nothing() -> None:
    sent: list[GetTrace] = []

    def send(command: Command) -> None:
        assert isinstance(command, GetTrace)
        if command.request_id == "bad":
            raise ValueError("not to be encoded")
        sent.append(command)

    client = MessageClient(send)
    client.on_reply(Ready(INFO))
    with pytest.raises(ValueError, match="encoded"):
        await client.trace("bad")
    good = asyncio.create_task(client.trace("good"))
    await asyncio.sleep(0)
    client.on_reply(TraceReply(sent[0].query_id, trace_of("good")))
    assert await good == trace_of("good")
    client.on_reply(TraceReply(sent[0].query_id, None))  # once more, or from an earlier life


async def test_death_ends_questions_and_the_next_engine_starts_afresh(any_wire: Wire) -> None:
    wire = any_wire
    asked = [asyncio.create_task(wire.client.trace("a")), asyncio.create_task(wire.client.stats())]
    await wire.settle()
    wire.engine.on_death("It burnt.")
    for task in asked:
        with pytest.raises(EngineDeadError, match="burnt"):
            await task
    with pytest.raises(EngineDeadError, match="burnt"):
        await wire.client.trace("a")
    wire.engine.on_reply(Ready(INFO))
    again = asyncio.create_task(wire.client.trace("b"))
    await wire.settle()
    question = wire.sent[-1]
    assert isinstance(question, GetTrace)
    wire.engine.on_reply(TraceReply(question.query_id, trace_of("b")))
    assert await again == trace_of("b")


async def test_a_listener_hears_of_every_engine_that_comes_up() -> None:
    sent: list[Command] = []
    client, heard = MessageClient(sent.append), list[EngineReport]()
    reports = [EngineReport(version=version, full=version == 1) for version in (1, 2)]
    client.subscribe(heard.append)
    assert sent == [], "the engine is not ready yet"
    for _ in range(2):
        client.on_reply(Ready(INFO))
        for report in reports:
            client.on_reply(Reported(report))
        client.on_death("It was killed.")
    assert sent == [Subscribe()] * 2 and heard == reports * 2


async def test_the_death_of_an_engine_that_was_up_may_be_reported_twice() -> None:
    """By the engine's last message, and by the end of its process."""
    client = _Engine([].append)
    client.on_reply(Ready(INFO))
    client.on_reply(Failed("Out of memory."))
    client.on_death("Out of memory.")
    waiting = asyncio.create_task(client.wait_ready())
    await asyncio.sleep(0)
    assert not waiting.done(), "the next life is waited for"
    client.on_reply(Ready(INFO))
    assert await waiting == INFO
    await client.close()


async def test_an_engine_that_is_up_is_asked_at_once(wire: Wire) -> None:
    wire.client.on_reply(Reported(EngineReport(version=1)))  # without a subscriber
    wire.client.subscribe(lambda report: None)
    assert wire.all_sent == [Subscribe()]


def test_a_sink_that_connects_after_a_death_gets_the_output_and_the_error() -> None:
    stream, output = OutputStream(ServiceClass.RT), RequestOutput(request_id="r", token_ids=(1,))
    death = EngineDeadError("It is gone.")
    stream.put(output)
    stream.put(death)
    received: list[RequestOutput | EngineDeadError] = []
    stream.connect(received.append)
    assert received == [output, death]


async def test_merged_outputs_keep_the_cached_tokens_of_the_first_one() -> None:
    stream = OutputStream(ServiceClass.RT)
    stream.put(RequestOutput(request_id="r", token_ids=(1,), cached_tokens=8))
    stream.put(RequestOutput(request_id="r", finish_reason=FinishReason.ABORT))
    (output,) = [output async for output in stream]
    assert (output.token_ids, output.finish_reason) == ((1,), FinishReason.ABORT)
    assert output.cached_tokens == 8
