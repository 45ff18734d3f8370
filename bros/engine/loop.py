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
    Command,
    GetStats,
    GetTrace,
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
from bros.engine.watchdog import Progress


class Sender(Protocol):
    """Sends the replies of an engine to its client."""

    def send(self, reply: Reply) -> None: ...


class Transport(Sender, Protocol):
    """The engine's end of a connection to one client."""

    @property
    def has_arrivals(self) -> bool:
        """Whether `receive` would return something at once. Read before every layer of a step."""
        ...

    def receive(self, *, wait: bool) -> Iterable[Command]:
        """All commands that have arrived; blocks for the first one if `wait`."""
        ...


def run_engine(engine: Engine, transport: Transport, progress: Progress | None = None) -> None:
    """Serve one client until it sends Shutdown. Exceptions of a step pass through.

    progress: updated for a watchdog.
    """
    progress = progress or Progress()
    deferred: list[Command] = []  # received during the step, handled after it
    no_requests: list[EngineRequest] = []

    def arrivals() -> list[EngineRequest]:
        """Requests that have arrived during the step; the policy may abort the step for them."""
        if not transport.has_arrivals:
            return no_requests
        new = list(transport.receive(wait=False))
        deferred.extend(new)
        return [command.request for command in new if isinstance(command, Submit)]

    transport.send(Ready(engine.info))
    while True:
        progress.idle = idle = not (deferred or engine.has_work)
        commands = [*deferred, *transport.receive(wait=idle)]
        progress.turns += 1
        progress.idle = False
        deferred.clear()
        for command in commands:
            if isinstance(command, Shutdown):
                progress.idle = True
                return
            handle(command, engine, transport)
        outputs = engine.step(arrivals)
        if outputs:
            transport.send(Outputs.of(outputs))
        report = engine.due_report()
        if report is not None:  # after the output tokens that it may list as cached
            transport.send(Reported(report))


def handle(command: Command, engine: Engine, client: Sender) -> None:
    """Handle any command but Shutdown. Call it between two steps."""
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
        case GetStats(query_id):
            client.send(StatsReply(query_id, engine.stats()))
        case GetTrace(query_id, request_id):
            client.send(TraceReply(query_id, engine.trace(request_id)))
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
