"""What an engine client and an engine say to each other, on any transport.

client -> engine   Submit, Abort, AskStats, AskTrace, Shutdown, Promote, Release
engine -> client   Ready, Accepted, Refused, Outputs, StatsReply, TraceReply, Failed, Heartbeat
"""

from __future__ import annotations

import queue
from dataclasses import dataclass

from bros.core.errors import (
    BrosError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    QueueFullError,
)
from bros.core.interfaces import EngineInfo, EngineReport, EngineStats, RequestTrace
from bros.core.request import EngineRequest, RequestOutput, ServiceClass, Slo


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class AskStats:
    question: int
    """Its number, which the answer repeats."""


@dataclass(frozen=True, slots=True)
class AskTrace:
    question: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Stop after the current step."""


@dataclass(frozen=True, slots=True)
class Promote:
    """Serve a best-effort request as real-time from now on, held to `slo`."""

    request_id: str
    slo: Slo


@dataclass(frozen=True, slots=True)
class Release:
    """What a request that has ended has left is kept no longer (Hints.keep_s)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Tell from now on what is cached and how busy the engine is, everything first."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded; the first message of every engine that comes up."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Accepted:
    """service_class: what the engine serves it as; BE for a relegated real-time request."""

    request_id: str
    service_class: ServiceClass


@dataclass(frozen=True, slots=True)
class Refused:
    """An error on submission, taken apart so that it survives any encoding."""

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
    """Everything one step produced."""

    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True, slots=True)
class StatsReply:
    question: int
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class TraceReply:
    """trace: None if nothing is known of the request."""

    question: int
    trace: RequestTrace | None


@dataclass(frozen=True, slots=True)
class Reported:
    """After Subscribe, whenever something has changed."""

    report: EngineReport


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot start or go on; nothing follows."""

    message: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Every so often from rank 0 of several, whatever it is doing: its process is not stopped.

    host: from the process that has started the engine on another machine.
    """

    host: bool = False


Command = Submit | Abort | AskStats | AskTrace | Shutdown | Promote | Release | Subscribe
Reply = (
    Ready | Accepted | Refused | Outputs | StatsReply | TraceReply | Failed | Heartbeat | Reported
)
COMMANDS: tuple[type, ...] = (
    *(Submit, Abort, AskStats, AskTrace, Shutdown, Promote, Release),
    Subscribe,
)
REPLIES: tuple[type, ...] = (
    *(Ready, Accepted, Refused, Outputs, StatsReply, TraceReply, Failed),
    *(Heartbeat, Reported),
)


class Inbox:
    """Commands that have arrived at an engine. Any thread puts them in, the engine's takes them."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Command | Exception] = queue.SimpleQueue()

    def put(self, command: Command | Exception) -> None:
        """An exception says why nothing arrives any more."""
        self._arrived.put(command)

    @property
    def has_arrivals(self) -> bool:
        """Whether there are any; a look at a counter, asked before every layer of a step."""
        return not self._arrived.empty()

    def receive(self, *, wait: bool) -> list[Command]:
        """All of them; blocks for the first one if `wait`. Raises an exception that was put in."""
        found: list[Command] = []
        while (wait and not found) or not self._arrived.empty():
            command = self._arrived.get()
            if isinstance(command, Exception):
                raise command
            found.append(command)
        return found
