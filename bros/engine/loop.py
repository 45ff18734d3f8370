"""Drives an engine from a transport: commands in, replies out, one step in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from bros.core.clock import Clock, SystemClock
from bros.core.collector import Collector
from bros.core.errors import BrosError, InvalidRequestError
from bros.core.request import EngineRequest
from bros.engine.engine import Engine
from bros.engine.messages import (
    Abort,
    Accepted,
    Command,
    Compiled,
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
from bros.engine.outbox import Outbox
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

    def put(self, command: Command) -> None:
        """Receive a command of the engine itself as if it had arrived. Any thread may call it."""
        ...


class _Compiling:
    """Submitted requests whose grammar is being compiled. They are not queued yet, so that nothing
    waits for them."""

    def __init__(self, engine: Engine, transport: Transport, client: Sender) -> None:
        """transport: receives a Compiled command, from another thread, once a request can be
        queued. client: hears of requests that are aborted before that."""
        self._engine = engine
        self._transport = transport
        self._client = client
        self._held: dict[str, Submit] = {}

    def hold(self, command: Submit) -> bool:
        """Whether the request has to wait for its grammar, and is held for that."""
        request = command.request
        if request.sampling.grammar is None or request.request_id in self._held:
            return False
        done = Compiled(request.request_id)
        if self._engine.prepare(request, lambda: self._transport.put(done)):
            return False
        self._held[request.request_id] = command
        return True

    def ready(self, commands: Iterable[Command]) -> Iterator[Command]:
        """The commands to handle now: without requests that are held, and with those whose grammar
        is compiled."""
        for command in commands:
            match command:
                case Submit():
                    pass
                case Compiled(request_id):
                    submit = self._held.pop(request_id, None)
                    if submit is None:  # it was aborted
                        continue
                    command = submit
                case Abort(request_id) if self._held.pop(request_id, None) is not None:
                    error = InvalidRequestError("The request was aborted before it was queued.")
                    self._engine.abort(request_id)
                    self._client.send(Refused.from_error(request_id, error))
                    continue
            if not (isinstance(command, Submit) and self.hold(command)):
                yield command


def run_engine(
    engine: Engine,
    transport: Transport,
    progress: Progress | None = None,
    collector: Collector | None = None,
    clock: Clock | None = None,
) -> None:
    """Serve one client until it sends Shutdown. Exceptions of a step pass through.

    progress: updated for a watchdog.
    collector: makes its full collections while there are no requests.
    clock: for how long outputs may be gathered; None: the system's.
    """
    progress = progress or Progress()
    outbox = Outbox(transport.send, clock or SystemClock())
    deferred: list[Command] = []  # received during the step, handled after it
    compiling = _Compiling(engine, transport, outbox)
    no_requests: list[EngineRequest] = []

    def arrivals() -> list[EngineRequest]:
        """Requests that have arrived during the step; the policy may abort the step for them."""
        if not transport.has_arrivals:
            return no_requests
        new = [
            command
            for command in transport.receive(wait=False)
            if not (isinstance(command, Submit) and compiling.hold(command))
        ]
        deferred.extend(new)
        return [command.request for command in new if isinstance(command, Submit)]

    transport.send(Ready(engine.info))
    while True:
        progress.idle = idle = not (deferred or engine.has_work)
        if collector is not None:
            collector.collect_if_due(idle=idle)
        commands = [*deferred, *transport.receive(wait=idle)]
        progress.iterations += 1
        progress.idle = False
        deferred.clear()
        for command in compiling.ready(commands):
            if isinstance(command, Shutdown):
                progress.idle = True
                return
            if isinstance(command, Submit):
                outbox.open(command.request)
            handle(command, engine, outbox)
        outputs = engine.step(arrivals)
        if outputs:
            outbox.send(Outputs(tuple(outputs)))
        report = engine.due_report()
        if report is not None:  # after the output tokens that it may list as cached
            outbox.send(Reported(report))
        outbox.flush_if_due()


def handle(command: Command, engine: Engine, client: Sender) -> None:
    """Handle any command but Shutdown. Call it between two steps."""
    match command:
        case Submit(request):
            client.send(_submit(engine, request))
        case Abort(request_id):
            output = engine.abort(request_id)
            if output is not None:
                client.send(Outputs((output,)))
        case Promote(request_id, slo, awaited):
            engine.promote(request_id, slo, awaited)
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
