"""Drives an engine from a transport: commands in, replies out, one step in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from bros.core.errors import BrosError
from bros.core.request import EngineRequest
from bros.engine.engine import Engine
from bros.engine.messages import (
    Abort,
    Accepted,
    AskStats,
    AskTrace,
    Command,
    Outputs,
    Promote,
    Ready,
    Refused,
    Release,
    Reply,
    Reported,
    Shutdown,
    StatsReply,
    Submit,
    Subscribe,
    TraceReply,
)


class Sender(Protocol):
    """Takes what an engine says to its client."""

    def send(self, reply: Reply) -> None: ...


class Transport(Sender, Protocol):
    """The engine's end of a connection to one client."""

    @property
    def has_arrivals(self) -> bool:
        """Whether `receive` would give something at once. Asked before every layer of a step."""
        ...

    def receive(self, *, wait: bool) -> Iterable[Command]:
        """All commands that have arrived; blocks for the first one if `wait`."""
        ...


def run_engine(engine: Engine, transport: Transport) -> None:
    """Serve one client until it says Shutdown. Exceptions of a step pass through."""
    came_meanwhile: list[Command] = []
    no_requests: list[EngineRequest] = []

    def arrivals() -> list[EngineRequest]:
        """What comes while a step runs is handled after it, but looked at right away."""
        if not transport.has_arrivals:
            return no_requests
        new = list(transport.receive(wait=False))
        came_meanwhile.extend(new)
        return [command.request for command in new if isinstance(command, Submit)]

    transport.send(Ready(engine.info))
    while True:
        idle = not (came_meanwhile or engine.has_work)
        commands = [*came_meanwhile, *transport.receive(wait=idle)]
        came_meanwhile.clear()
        for command in commands:
            if isinstance(command, Shutdown):
                return
            handle(command, engine, transport)
        outputs = engine.step(arrivals)
        if outputs:
            transport.send(Outputs(tuple(outputs)))
        report = engine.due_report()
        if report is not None:  # after the tokens that it may be about
            transport.send(Reported(report))


def handle(command: Command, engine: Engine, client: Sender) -> None:
    """Do what a client says between two steps; not for Shutdown."""
    match command:
        case Submit(request):
            client.send(_submit(engine, request))
        case Abort(request_id):
            output = engine.abort(request_id)
            if output is not None:
                client.send(Outputs((output,)))
        case Promote(request_id, slo):
            engine.promote(request_id, slo)
        case Release(request_id):
            engine.release(request_id)
        case AskStats(question):
            client.send(StatsReply(question, engine.stats()))
        case AskTrace(question, request_id):
            client.send(TraceReply(question, engine.trace(request_id)))
        case Subscribe():
            engine.subscribe()
            report = engine.report(full=True)
            assert report is not None, "a client has subscribed"
            client.send(Reported(report))


def _submit(engine: Engine, request: EngineRequest) -> Reply:
    try:
        service_class = engine.submit(request)
    except BrosError as error:
        return Refused.from_error(request.request_id, error)
    return Accepted(request.request_id, service_class)
