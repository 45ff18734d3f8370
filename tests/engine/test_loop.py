"""What the engine's side of a connection answers, command by command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from bros.core.errors import BrosError, OverloadedError, QueueFullError
from bros.core.interfaces import EngineStats, RequestTrace
from bros.core.request import EngineRequest, RequestOutput, ServiceClass, Slo
from bros.engine.loop import run_engine
from bros.engine.messages import (
    Accepted,
    AskStats,
    AskTrace,
    Command,
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

    def step(self) -> list[RequestOutput]:
        return []


class Script:
    """A transport that gives the commands of a test at once, and keeps the replies."""

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


def test_questions_are_answered_in_their_order() -> None:
    commands = (AskTrace("r"), AskStats(), AskTrace("nobody"))
    answers = [TraceReply(TRACE), StatsReply(EngineStats(steps=3)), TraceReply(None)]
    assert replies(FullEngine(), *commands) == answers
