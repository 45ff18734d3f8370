"""The messages between an engine client and an engine, on any transport.

client -> engine   Submit, Abort, Promote, Release, GetStats, GetTrace, Subscribe, Shutdown
engine -> client   Ready, Accepted, Refused, Outputs, StatsReply, TraceReply, Reported, Failed,
                   Heartbeat
"""

from __future__ import annotations

import dataclasses
import queue
from dataclasses import dataclass
from typing import get_args

from bros.core.errors import (
    BrosError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    QueueFullError,
)
from bros.core.interfaces import EngineInfo, EngineReport, EngineStats, RequestTrace
from bros.core.request import EngineRequest, Output, ServiceClass, Slo


@dataclass(frozen=True, slots=True)
class Submit:
    """sent_s: Clock.now() of the sender, for an engine on another machine, whose clock begins
    elsewhere; None: both have the same clock."""

    request: EngineRequest
    sent_s: float | None = None

    def received(self, now: float) -> Submit:
        """The same on the clock of the engine, which receives it `now`. The time that it was on its
        way does not count."""
        if self.sent_s is None:
            return self
        arrival_s = self.request.arrival_s
        if arrival_s:  # else it has none
            arrival_s += now - self.sent_s
        return Submit(dataclasses.replace(self.request, arrival_s=arrival_s))


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class GetStats:
    query_id: int
    """The reply repeats it."""


@dataclass(frozen=True, slots=True)
class GetTrace:
    query_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Stop after the current step."""


@dataclass(frozen=True, slots=True)
class Promote:
    """Serve a request as real-time from now on, with the objectives `slo` or stricter ones it has.

    awaited: see EngineClient.promote.
    """

    request_id: str
    slo: Slo
    awaited: bool


@dataclass(frozen=True, slots=True)
class Release:
    """Unpin the KV of an ended request (Hints.keep_s)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Send engine reports (Reported) from now on, a digest first."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammar of a submitted request is compiled. The engine sends it to itself."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. The first message of every engine."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Accepted:
    """service_class: the class the engine serves it as; BE for a relegated real-time request."""

    request_id: str
    service_class: ServiceClass


@dataclass(frozen=True, slots=True)
class Refused:
    """The error of a submission, as plain fields that every encoding supports.

    numbers: of a PromptTooLongError (prompt tokens, max_model_len), of a QueueFullError (waiting
        requests, retry_after_s), of an OverloadedError (retry_after_s, 0).
    """

    request_id: str
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    numbers: tuple[float, float] = (0, 0)

    @classmethod
    def from_error(cls, request_id: str, error: BrosError) -> Refused:
        if isinstance(error, PromptTooLongError):
            numbers = (error.prompt_tokens, error.max_model_len)
            return cls(request_id, "prompt_too_long", str(error), error.param, None, numbers)
        if isinstance(error, QueueFullError):
            waiting = (error.waiting, error.retry_after_s)
            return cls(request_id, "queue_full", str(error), numbers=waiting)
        if isinstance(error, OverloadedError):
            return cls(request_id, "overloaded", str(error), numbers=(error.retry_after_s, 0))
        if isinstance(error, InvalidRequestError):
            return cls(request_id, "invalid", error.message, error.param, error.code)
        return cls(request_id, "other", str(error))

    def to_error(self) -> BrosError:
        first, second = self.numbers
        if self.kind == "prompt_too_long":
            return PromptTooLongError(int(first), int(second), self.param or "messages")
        if self.kind == "queue_full":
            return QueueFullError(int(first), second)
        if self.kind == "overloaded":
            return OverloadedError(self.message, first)
        if self.kind == "invalid":
            return InvalidRequestError(self.message, self.param, self.code)
        return BrosError(self.message)


@dataclass(frozen=True, slots=True)
class Outputs:
    """All outputs of one step."""

    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class StatsReply:
    query_id: int
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class TraceReply:
    """trace: None if the engine does not know the request."""

    query_id: int
    trace: RequestTrace | None


@dataclass(frozen=True, slots=True)
class Reported:
    """An engine report; sent after Subscribe, whenever something has changed."""

    report: EngineReport


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot start or continue. Its last message.

    hung: it made no progress.
    """

    message: str
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent periodically by a thread of rank 0 while its engine makes progress (watchdog.py).

    pid: process id of the sender, on its machine.
    host: the sender is not the engine, but has started it on another machine.
    """

    pid: int = 0
    host: bool = False


ClientCommand = Submit | Abort | GetStats | GetTrace | Shutdown | Promote | Release | Subscribe
Command = ClientCommand | Compiled
Reply = (
    Ready | Accepted | Refused | Outputs | StatsReply | TraceReply | Failed | Heartbeat | Reported
)
COMMANDS: tuple[type, ...] = get_args(ClientCommand)
REPLIES: tuple[type, ...] = get_args(Reply)
"""Transports send the index of a message's type in these, so new types come last."""


class Inbox:
    """Commands that have arrived at an engine. Any thread puts, the engine's thread receives."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Command | Exception] = queue.SimpleQueue()

    def put(self, command: Command | Exception) -> None:
        """command: an exception if the connection has failed; `receive` raises it."""
        self._arrived.put(command)

    @property
    def has_arrivals(self) -> bool:
        """Whether commands wait. Costs less than a microsecond: asked before every layer."""
        return not self._arrived.empty()

    def receive(self, *, wait: bool) -> list[Command]:
        """All waiting commands. wait: block for the first one. Raises an exception from `put`."""
        found: list[Command] = []
        while (wait and not found) or not self._arrived.empty():
            command = self._arrived.get()
            if isinstance(command, Exception):
                raise command
            found.append(command)
        return found
