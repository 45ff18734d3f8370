"""What becomes of LLM calls when the engine, a transform or the server itself fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import pytest

from bros.core.errors import OverloadedError, QueueFullError, TenantLimitError
from bros.core.request import EngineRequest, FinishReason, RequestOutput, ServiceClass
from bros.semantic.service.generating import RETRIES_TOGETHER
from support.played_stream import PlayedStream
from support.program_engine import MAX_LEN, ProgramEngine, byte_ids, echo
from support.programs import LATENCY, TENANT, THROUGHPUT, Desk, call, native, soon, virtually

GREEDY = {"temperature": 0.0}


@pytest.mark.parametrize("sampling", [GREEDY, {"seed": 5}])
@virtually
async def test_what_gives_the_same_again_survives_the_engine(sampling: dict[str, float]) -> None:
    desk = Desk(retries=2)
    (request,) = desk.submit(call("Say {{output:a}}", sampling=sampling))
    desk.want("a")
    for _ in range(2):
        await asyncio.sleep(0.08)
        desk.engine.die()
        await asyncio.sleep(5.0)
        desk.engine.revive()
    assert await desk.value("a") == echo("Say ")
    attempts = [llm_call.request_id for llm_call in desk.engine.llm_calls()]
    assert attempts == [request, f"{request}~2", f"{request}~3"]
    assert desk.view(request).llm_calls[0].attempts == 3


@virtually
async def test_what_would_come_out_differently_fails_with_the_engine() -> None:
    desk = Desk()
    (request,) = desk.submit(call("Say {{output:a}}"))
    desk.want("a")
    await asyncio.sleep(0.08)
    desk.engine.die()
    desk.engine.revive()
    assert await desk.cause("a") == (request, "engine", "The engine died.")


@virtually
async def test_a_call_without_output_is_restarted_whatever_its_sampling() -> None:
    desk = Desk()
    desk.engine.die()
    desk.submit(call("Say {{output:a}}"))
    desk.want("a")
    await asyncio.sleep(5.0)
    desk.engine.revive()
    assert await desk.value("a") == echo("Say ")


async def predicted_s(desk: Desk, engine_is: str) -> float:
    """How long a call is predicted to take after eight that found the engine like this."""
    desk.submit(*(call(f"Say {n} {{{{output:v{n}}}}}", name="f") for n in range(8)))
    if engine_is == "dead":
        desk.engine.die()
    elif engine_is == "full":
        desk.engine.refusals = [OverloadedError("It is full.", 50.0)] * 8
    elif engine_is == "limited":
        error = TenantLimitError("It has too many.", "be_requests", 50.0, ends_soon=True)
        desk.engine.refusals = [error] * 8
    for n in range(8):
        desk.want(f"v{n}")
    await asyncio.sleep(50.0)
    desk.engine.revive()
    for n in range(8):
        await desk.value(f"v{n}")
    desk.submit(call("Say more {{output:more}}", name="f"))
    desk.want("more")
    view = desk.service.inspect(TENANT, desk.session)
    (path,) = view.critical_paths
    await desk.value("more")
    return path.predicted_end_s - view.now_s


@pytest.mark.parametrize("engine_is", ["dead", "full", "limited"])
@virtually
async def test_waits_outside_the_engine_are_not_expected_of_later_calls(engine_is: str) -> None:
    usual_s = await predicted_s(Desk(), "up")
    found_s = await predicted_s(Desk(), engine_is)
    assert found_s <= 2.0 * usual_s


@virtually
async def test_a_call_fails_when_the_engine_dies_too_often() -> None:
    desk = Desk(retries=2)
    (request,) = desk.submit(call("Say {{output:a}}", sampling=GREEDY))
    desk.want("a")
    for _ in range(3):
        await asyncio.sleep(0.08)
        desk.engine.die()
        desk.engine.revive()
    assert await soon(desk.cause("a"), 1.0) == (request, "engine", "The engine died.")
    assert len(desk.engine.llm_calls()) == 3


@virtually
async def test_a_call_fails_when_the_engine_does_not_come_back() -> None:
    desk = Desk(recovery_s=30.0)
    (request,) = desk.submit(call("Say {{output:a}}", sampling=GREEDY))
    desk.want("a")
    await asyncio.sleep(0.08)
    desk.engine.die()
    with pytest.raises(TimeoutError):
        await soon(desk.value("a"), 29.0)
    assert await soon(desk.cause("a"), 2.0) == (request, "engine", "The engine died.")


class WatchedEngine(ProgramEngine):
    """looks: how often it was asked whether it is alive."""

    looks = 0
    _alive = True

    @property
    def alive(self) -> bool:
        self.looks += 1
        return self._alive

    @alive.setter
    def alive(self, alive: bool) -> None:
        self._alive = alive


@virtually
async def test_a_dead_engine_is_looked_at_as_often_however_many_wait() -> None:
    engine = WatchedEngine()
    desk = Desk(engine, recovery_s=30.0)
    names = [f"v{i}" for i in range(100)]
    calls = [call(f"{name} {{{{output:{name}}}}}", sampling=GREEDY) for name in names]
    requests = desk.submit(*calls)
    for name in names:
        desk.want(name)
    await asyncio.sleep(0.001)
    engine.die()
    await asyncio.sleep(1.0)
    desk.service.cancel(TENANT, desk.session, requests[0])
    engine.looks = 0
    await asyncio.sleep(10.0)
    assert 100 <= engine.looks <= 300
    engine.revive()
    for name in names[1:]:
        assert await soon(desk.value(name), 10.0) == echo(f"{name} ")
    engine.looks = 0
    await asyncio.sleep(10.0)
    assert not engine.looks


@pytest.mark.parametrize("refusal", [QueueFullError(9, 2.5), OverloadedError("Too busy.", 2.5)])
@virtually
async def test_an_engine_without_room_is_asked_again(refusal: Exception) -> None:
    """As late as it says, once more when another call has ended, and without harm to what else runs
    in the session."""
    desk = Desk()
    desk.engine.refusals = [refusal] * 3
    (request, other) = desk.submit(call("Say {{output:a}}"), call("Other {{output:b}}"))
    desk.want("a")
    await asyncio.sleep(0.1)
    desk.engine.refusals, left = [], desk.engine.refusals
    assert await desk.value("b") == echo("Other ")
    desk.engine.refusals = left
    assert await desk.value("a") == echo("Say ")
    late = desk.engine.submitted_s[f"{request}~4"] - 5000.0
    assert 5.2 <= late < 5.3
    assert desk.view(request).llm_calls[0].attempts == 1
    assert other in desk.engine.submitted_s


@virtually
async def test_a_call_fails_when_the_engine_never_has_room() -> None:
    desk = Desk(patience_s=60.0)
    desk.engine.refusals = [QueueFullError(9, 7.0)] * 100
    (request,) = desk.submit(call("Say {{output:a}}"))
    _, stage, message = await soon(desk.cause("a"), 61.0)
    assert (stage, message) == ("engine", "9 requests are already waiting; retry in 7 s.")
    assert 100 - len(desk.engine.refusals) == 9


@virtually
async def test_a_request_dropped_for_lack_of_capacity_is_submitted_again() -> None:
    desk = Desk()
    desk.engine.errors = [
        RequestOutput(
            request_id="", finish_reason=FinishReason.ERROR, error="No room.", retry_after_s=1.5
        )
    ]
    (request,) = desk.submit(call("Say {{output:a}}"))
    assert await desk.value("a") == echo("Say ")
    assert desk.engine.submitted_s[f"{request}~2"] > 5001.5


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (RequestOutput(request_id="", finish_reason=FinishReason.ERROR, error="NaN!"), "NaN!"),
        (
            RequestOutput(request_id="", finish_reason=FinishReason.ABORT),
            "The request was aborted.",
        ),
    ],
)
@virtually
async def test_what_the_engine_says_of_a_failure_is_the_cause(
    output: RequestOutput, message: str
) -> None:
    desk = Desk()
    desk.engine.errors = [output]
    (request, *_) = desk.submit(call("Say {{output:a}}"), call("{{a}}{{output:b}}"))
    assert await desk.cause("b") == (request, "generate", message)
    assert await desk.cause("a") == (request, "generate", message)


@virtually
async def test_a_prompt_that_is_too_long_fails_to_fill() -> None:
    desk = Desk()
    (request,) = desk.submit(call("{{x}}{{output:a}}", values={"x": "#" * 3900}))
    failed, stage, message = await desk.cause("a")
    assert (failed, stage) == (request, "fill")
    assert str(MAX_LEN) in message


@virtually
async def test_a_failing_transform_of_an_output() -> None:
    desk = Desk()
    request, *_ = desk.submit(
        call("Say {{output:a}} and {{output:b}}", transforms={"a": "json"}),
        call("{{b}}{{output:c}}"),
        call("Other {{output:d}}"),
    )
    desk.want("d")
    failed, stage, _ = await desk.cause("c")
    assert (failed, stage) == (request, "transform")
    assert desk.view(request).error.variable == "a"
    assert await desk.value("d") == echo("Other ")
    await asyncio.sleep(0.1)
    assert not desk.engine.kept


@virtually
async def test_a_failing_transform_of_an_input() -> None:
    desk = Desk()
    _, request = desk.submit(
        call("Say {{output:a}}"), call("Long {{a}}{{output:b}}", transforms={"a": "json"})
    )
    failed, stage, _ = await desk.cause("b")
    assert (failed, stage) == (request, "fill")
    assert await desk.value("a") == echo("Say ")


@virtually
async def test_a_failing_native_function() -> None:
    desk = Desk()
    _, request, _ = desk.submit(
        call("Say {{output:a}}"), native("a", "b"), call("{{b}}{{output:c}}")
    )
    desk.want("c")
    await desk.value("a")
    desk.service.fail(TENANT, desk.session, request, "ValueError: no")
    assert await desk.cause("c") == (request, "native", "ValueError: no")


@virtually
async def test_a_bug_fails_one_llm_call_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def answer(prompt: str) -> str | Sequence[int]:
        if prompt.startswith("Bad"):
            raise ZeroDivisionError("a bug")
        return byte_ids(prompt[:3])

    desk = Desk(ProgramEngine(answer))
    bad, *_ = desk.submit(
        call("Bad {{output:a}}"), call("{{a}}{{output:b}}"), call("Good {{output:c}}")
    )
    with caplog.at_level(logging.ERROR, "bros.semantic.service.runner"):
        failed, stage, message = await desk.cause("b")
    assert (failed, stage) == (bad, "generate")
    assert "a bug" in caplog.text and "a bug" not in message
    assert await desk.value("c") == "Goo"


@virtually
async def test_what_is_cancelled_within_the_engine_has_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    desk.engine.refusals = [asyncio.CancelledError()]
    bad, _ = desk.submit(call("Bad {{output:a}}"), call("{{a}}{{output:b}}"))
    failed, stage, _ = await soon(desk.cause("b"), 10.0)
    assert (failed, stage) == (bad, "generate")
    assert bad in caplog.text
    desk.submit(call("Good {{output:c}}"))
    assert await desk.value("c") == echo("Good ")
    await desk.close()


@virtually
async def test_a_cancelled_call_leaves_the_engine_at_once() -> None:
    desk = Desk(ProgramEngine(lambda prompt: "x" * 500))
    request, _ = desk.submit(
        call("A {{output:a}}", sampling={"max_tokens": 400}), call("{{a}}{{output:b}}")
    )
    waiting = asyncio.create_task(desk.cause("b"))
    await asyncio.sleep(1.0)
    desk.service.cancel(TENANT, desk.session, request)
    failed, stage, _ = await soon(waiting, 0.1)
    assert (failed, stage) == (request, "cancelled")
    assert desk.state("a") == desk.state("b") == "cancelled"
    await asyncio.sleep(0.1)
    assert desk.engine.aborted == [request]
    assert not desk.engine.open


@virtually
async def test_cancelled_before_the_engine_has_heard_of_it() -> None:
    desk = Desk()
    (request,) = desk.submit(call("A {{output:a}}"))
    desk.want("a")
    desk.service.cancel(TENANT, desk.session, request)
    await asyncio.sleep(1.0)
    assert not desk.engine.open
    view = await desk.service.delete(TENANT, desk.session)
    assert view.state == "closed"


@virtually
async def test_refusals_do_not_count_as_engine_deaths() -> None:
    desk = Desk(retries=1)
    desk.engine.refusals = [QueueFullError(9, 1.0)] * 3
    desk.submit(call("Say {{output:a}}", sampling=GREEDY))
    desk.want("a")
    await asyncio.sleep(3.08)
    assert not desk.engine.refusals
    desk.engine.die()
    desk.engine.revive()
    assert await desk.value("a") == echo("Say ")


@virtually
async def test_thousands_of_refused_calls_try_again_in_turn() -> None:
    """Not each by itself: with one answer of a full engine the others need not ask."""
    desk = Desk()
    count = 1000
    requests = desk.submit(*(call(f"{i} {{{{output:a{i}}}}}") for i in range(count)))
    desk.engine.refusals = [QueueFullError(9, 1.0)] * 100_000
    for i in range(count):
        desk.service.want(TENANT, desk.session, f"a{i}", THROUGHPUT)
    await asyncio.sleep(2.0)
    before = len(desk.engine.refusals)
    await asyncio.sleep(10.0)
    assert 10 <= before - len(desk.engine.refusals) <= 11 * 2 * RETRIES_TOGETHER
    desk.engine.refusals = []
    await soon(desk.value(f"a{count - 1}", THROUGHPUT), 60.0)
    last_s = {request.split("~")[0]: at for request, at in desk.engine.submitted_s.items()}
    later = [last_s[request] for request in requests[2 * RETRIES_TOGETHER :]]
    assert later == sorted(later)


class SteppingEngine(ProgramEngine):
    """It answers between two steps of a second, and has 100 places. A step ends 30 requests.

    asked: after each step, how many requests it had to answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self._asking: list[asyncio.Future[asyncio.Future[None]]] = []
        self._places: list[asyncio.Future[None]] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            ending, self._places = self._places[:30], self._places[30:]
            for place in ending:
                place.set_result(None)
            asking, self._asking = self._asking, []
            self.asked.append(len(asking))
            for answer in asking:
                if len(self._places) < 100:
                    self._places.append(loop.create_future())
                    answer.set_result(self._places[-1])
                else:
                    answer.set_exception(QueueFullError(100, 5.0))

    async def submit(self, request: EngineRequest) -> PlayedStream:
        self._asking.append(asyncio.get_running_loop().create_future())
        place = await self._asking[-1]
        return PlayedStream(request.service_class, self._answers(request, place))

    async def _answers(
        self, request: EngineRequest, place: asyncio.Future[None]
    ) -> AsyncIterator[RequestOutput]:
        await place
        yield RequestOutput(
            request_id=request.request_id,
            token_ids=byte_ids("x"),
            finish_reason=FinishReason.LENGTH,
        )


@virtually
async def test_a_full_engine_is_asked_for_as_many_calls_as_it_may_have_places() -> None:
    """It answers between two steps, while all streams wait."""
    engine = SteppingEngine()
    steps = asyncio.create_task(engine.run())
    desk = Desk(engine)
    count = 2000
    desk.submit(*(call(f"{i} {{{{output:a{i}}}}}") for i in range(count)))
    for i in range(count):
        desk.service.want(TENANT, desk.session, f"a{i}", THROUGHPUT)
    await soon(desk.value(f"a{count - 1}", THROUGHPUT), count / 30 + 10.0)
    steps.cancel()
    asked = [number for number in engine.asked if number]
    assert max(asked[1:]) <= 30 + RETRIES_TOGETHER, "at first, all ask"
    assert sum(asked[1:]) < 1.2 * count
    assert len(engine.asked) < count / 30 + 5, "each step had its 30 requests"


@virtually
async def test_what_others_leave_free_is_used_after_the_time_that_the_engine_has_said() -> None:
    """None of the program's own calls has been accepted, so that none ends."""
    desk = Desk()
    desk.engine.refusals = [QueueFullError(9, 5.0)] * 200
    desk.submit(*(call(f"{i} {{{{output:a{i}}}}}") for i in range(200)))
    for i in range(200):
        desk.service.want(TENANT, desk.session, f"a{i}", THROUGHPUT)
    await asyncio.sleep(4.0)
    assert not desk.engine.submitted and not desk.engine.refusals
    await asyncio.sleep(2.0)
    assert len(desk.engine.submitted) == 200


@virtually
async def test_a_new_call_asks_although_others_wait_to_try_again() -> None:
    desk = Desk()
    desk.submit(*(call(f"{i} {{{{output:a{i}}}}}") for i in range(100)), call("New {{output:n}}"))
    desk.engine.refusals = [QueueFullError(9, 60.0)] * 100
    for i in range(100):
        desk.want(f"a{i}")
    await asyncio.sleep(1.0)
    assert not desk.engine.refusals
    assert await soon(desk.value("n"), 1.0) == echo("New ")
    await desk.close()


@virtually
async def test_a_promoted_call_does_not_wait_in_the_line_of_its_old_class() -> None:

    class FullOfBestEffort(ProgramEngine):
        async def submit(self, request: EngineRequest) -> PlayedStream:
            if request.service_class is ServiceClass.BE:
                raise QueueFullError(9, 1.0)
            return await super().submit(request)

    desk = Desk(FullOfBestEffort())
    last = 20 * RETRIES_TOGETHER
    desk.submit(*(call(f"{i} {{{{output:a{i}}}}}") for i in range(last + 1)))
    for i in range(last + 1):
        desk.service.want(TENANT, desk.session, f"a{i}", THROUGHPUT)
    await asyncio.sleep(5.0)
    assert await soon(desk.value(f"a{last}", LATENCY), 2.5) == echo(f"{last} ")
    await desk.service.delete(TENANT, desk.session)


@virtually
async def test_a_refused_call_that_waits_for_others_is_cancelled_at_once() -> None:
    desk = Desk()
    desk.engine.refusals = [QueueFullError(9, 5.0)] * 100_000
    requests = desk.submit(*(call(f"{i} {{{{output:a{i}}}}}") for i in range(100)))
    waits = [asyncio.create_task(desk.value(f"a{i}")) for i in range(100)]
    await asyncio.sleep(1.0)
    for request in requests:
        desk.service.cancel(TENANT, desk.session, request)
    await soon(asyncio.gather(*waits, return_exceptions=True), 0.1)
    before = len(desk.engine.refusals)
    await asyncio.sleep(20.0)
    assert len(desk.engine.refusals) == before
