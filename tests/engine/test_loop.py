"""What the engine's side of a connection answers, command by command."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import pytest

from bros.core.clock import ManualClock
from bros.core.errors import BrosError, OverloadedError, QueueFullError
from bros.core.interfaces import EngineReport, EngineStats, RequestTrace
from bros.core.request import (
    EngineRequest,
    FinishReason,
    Grammar,
    Output,
    RequestOutput,
    SamplingParams,
    ServiceClass,
    Slo,
    expanded,
)
from bros.engine.loop import run_engine
from bros.engine.messages import (
    Abort,
    Accepted,
    Command,
    GetStats,
    GetTrace,
    Outputs,
    Promote,
    Ready,
    Refused,
    Reply,
    Shutdown,
    StatsReply,
    Submit,
    TraceReply,
)
from support.wire import ASK, INFO

TRACE = RequestTrace(
    request_id="r", service_class=ServiceClass.BE, requested_class=ServiceClass.RT, slo=Slo(),
    prompt_tokens=1, output_tokens=0, events=(), waits={},
)  # fmt: skip


class FullEngine:
    """Relegates every request, or refuses it with `refusal`; never has anything to run."""

    info = INFO
    has_work = False

    def __init__(self, refusal: BrosError | None = None) -> None:
        self._refusal = refusal

    def submit(self, request: EngineRequest) -> ServiceClass:
        if self._refusal is not None:
            raise self._refusal
        return ServiceClass.BE

    def stats(self) -> EngineStats:
        return EngineStats(steps=3)

    def trace(self, request_id: str) -> RequestTrace | None:
        return TRACE if request_id == "r" else None

    def due_report(self) -> EngineReport | None:
        return None

    def step(self, arrivals: Callable[[], Iterable[EngineRequest]]) -> list[Output]:
        return []


class Script:
    """A transport that gives the commands of a test at once, and keeps the replies."""

    has_arrivals = True

    def __init__(self, *commands: Command) -> None:
        self._commands: Sequence[Command] = (*commands, Shutdown())
        self.replies: list[Reply] = []

    def receive(self, *, wait: bool) -> Iterable[Command]:
        return self._commands

    def send(self, reply: Reply) -> None:
        self.replies.append(reply)


def replies(engine: FullEngine, *commands: Command) -> list[Reply]:
    script = Script(*commands)
    run_engine(engine, script)  # type: ignore[arg-type]
    assert script.replies[0] == Ready(INFO)
    return script.replies[1:]


def test_a_relegated_request_is_accepted_as_what_it_is_served_as() -> None:
    assert replies(FullEngine(), Submit(ASK)) == [Accepted("r", ServiceClass.BE)]


@pytest.mark.parametrize("error", [OverloadedError("Too much.", 2.5), QueueFullError(3, 1.0)])
def test_a_refusal_says_when_to_come_back(error: BrosError) -> None:
    (reply,) = replies(FullEngine(error), Submit(ASK))
    assert isinstance(reply, Refused) and reply.request_id == "r"
    refused = reply.to_error()
    assert isinstance(refused, type(error))
    assert (str(refused), vars(refused)) == (str(error), vars(error))


def test_questions_are_answered_with_their_numbers() -> None:
    commands = (GetTrace(7, "r"), GetStats(8), GetTrace(4, "unknown"))
    answers = [TraceReply(7, TRACE), StatsReply(8, EngineStats(steps=3)), TraceReply(4, None)]
    assert replies(FullEngine(), *commands) == answers


class BusyEngine(FullEngine):
    """Accepts everything; each step looks twice at what arrives meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.handled: list[str] = []
        self.seen: list[list[str]] = []

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return bool(self.handled)

    def submit(self, request: EngineRequest) -> ServiceClass:
        self.handled.append(f"submit {request.request_id}")
        return request.service_class

    def abort(self, request_id: str) -> RequestOutput | None:
        self.handled.append(f"abort {request_id}")
        return RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT)

    def promote(self, request_id: str, slo: Slo, awaited: bool = True) -> None:
        self.handled.append(f"promote {request_id} {slo.ttft_s}")

    def step(self, arrivals: Callable[[], Iterable[EngineRequest]]) -> list[Output]:
        before = list(self.handled)
        self.seen.append([request.request_id for _ in range(2) for request in arrivals()])
        assert self.handled == before, "the engine is busy: what arrives is handled after the step"
        return []


class Drip:
    """A transport that gives one batch of commands per call, and says when it is asked to wait."""

    has_arrivals = True

    def __init__(self, *batches: Sequence[Command]) -> None:
        self._batches = list(batches)
        self.waited: list[bool] = []
        self.replies: list[Reply] = []

    def receive(self, *, wait: bool) -> Iterable[Command]:
        self.waited.append(wait)
        return self._batches.pop(0)

    def send(self, reply: Reply) -> None:
        self.replies.append(reply)


def test_what_arrives_during_a_step_is_seen_at_once_and_handled_after_it_in_order() -> None:
    first, second, third = (dataclasses.replace(ASK, request_id=name) for name in "abc")
    engine = BusyEngine()
    transport = Drip(
        [Submit(first)],
        [Submit(second), Abort("a")],  # during the step
        [Submit(third), Promote("c", Slo(0.3), True), GetStats(1)],
        [Abort("b")],
        [], [Shutdown()],  # during the second step
        [],
    )  # fmt: skip
    run_engine(engine, transport)  # type: ignore[arg-type]
    assert engine.seen == [["b", "c"], []]
    assert engine.handled == [
        "submit a", "submit b", "abort a", "submit c", "promote c 0.3", "abort b",
    ]  # fmt: skip
    assert [type(reply) for reply in transport.replies] == [
        Ready, Accepted, Accepted, Outputs, Accepted, StatsReply, Outputs,
    ]  # fmt: skip


def test_an_idle_engine_does_not_wait_while_something_is_left_to_handle() -> None:
    """What came during the step that left it idle is answered right after it."""
    engine = FullEngine()
    seen: list[EngineRequest] = []
    engine.step = lambda arrivals: seen.extend(arrivals()) or []  # type: ignore[method-assign,func-returns-value]
    transport = Drip([GetStats(1)], [Submit(ASK)], [], [], [Shutdown()])
    run_engine(engine, transport)  # type: ignore[arg-type]
    assert seen == [ASK]
    assert transport.waited == [True, False, False, False, True]
    assert [type(reply) for reply in transport.replies] == [Ready, StatsReply, Accepted]


def test_nothing_is_received_during_a_step_while_nothing_has_arrived() -> None:
    engine = FullEngine()
    seen: list[EngineRequest] = []
    engine.step = lambda arrivals: seen.extend(arrivals()) or []  # type: ignore[method-assign,func-returns-value]
    transport = Drip([Submit(ASK)], [Shutdown()])
    transport.has_arrivals = False
    run_engine(engine, transport)  # type: ignore[arg-type]
    assert seen == [] and transport.waited == [True, True]


class CountingEngine(FullEngine):
    """Gives each request the tokens 0, 1, 2 ... until it has `length`. A step, of a token for each,
    takes an eighth of a second."""

    def __init__(self, clock: ManualClock, length: int) -> None:
        super().__init__()
        self._clock = clock
        self._length = length
        self._names: list[str] = []
        self._steps = 0

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return self._steps < self._length

    def submit(self, request: EngineRequest) -> ServiceClass:
        self._names.append(request.request_id)
        return request.service_class

    def step(self, arrivals: Callable[[], Iterable[EngineRequest]]) -> list[Output]:
        self._clock.advance(0.125)
        if not self.has_work:
            return []
        token, self._steps = self._steps, self._steps + 1
        if self.has_work:
            return [(name, token) for name in self._names]
        return [
            RequestOutput(name, token_ids=(token,), finish_reason=FinishReason.LENGTH)
            for name in self._names
        ]


def test_tokens_that_are_not_streamed_come_twice_a_second() -> None:
    clock = ManualClock()
    awaited, gathered = (
        dataclasses.replace(ASK, request_id=name, gathered=name == "b") for name in "ab"
    )
    transport = Drip([Submit(awaited), Submit(gathered)], *[[]] * 29, [Shutdown()])
    run_engine(CountingEngine(clock, 30), transport, clock=clock)  # type: ignore[arg-type]
    pieces: dict[str, list[tuple[int, ...]]] = {"a": [], "b": []}
    for reply in transport.replies:
        if isinstance(reply, Outputs):
            for output in map(expanded, reply.outputs):
                pieces[output.request_id].append(output.token_ids)
    assert pieces["a"] == [(token,) for token in range(30)]
    assert pieces["b"][0] == (0,)
    assert [token for piece in pieces["b"] for token in piece] == list(range(30))
    assert {len(piece) for piece in pieces["b"][2:-1]} == {4}


class CompilingEngine(FullEngine):
    """Accepts requests; those with a grammar when `compiled` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], None]] = []
        self.ready = False
        self.aborted: list[str] = []

    def prepare(self, request: EngineRequest, done: Callable[[], None]) -> bool:
        if not self.ready:
            self.waiting.append(done)
        return self.ready

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def compiled(self) -> None:
        self.ready = True
        for done in self.waiting:
            done()


class Line:
    """A transport that gives one command per call, and after the last one those that were put."""

    has_arrivals = False

    def __init__(self, *commands: Command | Callable[[], None]) -> None:
        self._commands = list(commands)
        self._put: list[Command] = []
        self.replies: list[Reply] = []

    def put(self, command: Command) -> None:
        self._put.append(command)

    def receive(self, *, wait: bool) -> Iterable[Command]:
        if self._put:
            return [self._put.pop(0)]
        command = self._commands.pop(0)
        if callable(command):
            command()
            return []
        return [command]

    def send(self, reply: Reply) -> None:
        self.replies.append(reply)


def test_requests_wait_for_their_grammar_and_others_do_not_wait_for_them() -> None:
    sampling = SamplingParams(grammar=Grammar("start: x"))
    slow, gone = (
        dataclasses.replace(ASK, request_id=name, sampling=sampling) for name in ("slow", "gone")
    )
    engine = CompilingEngine()
    line = Line(Submit(slow), Submit(gone), Submit(ASK), Abort("gone"), engine.compiled, Shutdown())
    run_engine(engine, line)  # type: ignore[arg-type]
    accepted = [reply.request_id for reply in line.replies if isinstance(reply, Accepted)]
    assert accepted == [ASK.request_id, "slow"]
    refused = [reply.request_id for reply in line.replies if isinstance(reply, Refused)]
    assert refused == ["gone"], "its client must not wait for it"
    assert engine.aborted == ["gone"], "the engine forgets what it knows of it"
