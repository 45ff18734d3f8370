"""The errors that sessions raise.

BrosError
├── ConflictError            a variable is set twice, or calls form a cycle         (HTTP 409)
├── SessionGoneError         the session was deleted or has expired                 (HTTP 410)
├── UpstreamError            a call that the value depends on failed                (HTTP 424)
├── SessionLimitError        too many sessions, calls, variables or waiting gets    (HTTP 429)
├── GetTimeoutError          the value was not ready within the timeout             (HTTP 504)
└── ServerUnreachableError   the client got no response, or not one of a bros server
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from bros.core.errors import BrosError


class FailedStage(enum.StrEnum):
    """Where a call failed."""

    FILL = "fill"  # building the prompt: an input transform failed, or the prompt is too long
    GENERATE = "generate"  # the engine rejected or aborted the request, or three died of it
    ENGINE = "engine"  # the engine died and did not recover, or was overloaded for too long
    TRANSFORM = "transform"  # an output transform failed
    NATIVE = "native"  # a native function on the client failed
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Cause:
    """The root failure that made other calls and variables fail.

    request_id: id of the call that failed.
    variable: id of the variable that it concerns, if any.
    name: function name of the call; empty if it has none.
    """

    request_id: str
    stage: FailedStage
    message: str
    variable: str | None = None
    name: str = ""


class ConflictError(BrosError):
    """The request conflicts with the state of the session.

    code: already_set, already_produced, cyclic, already_exists or key_reused.
    """

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class SessionGoneError(BrosError):
    """The session existed, but was deleted or has expired, or its server process has ended."""


class UpstreamError(BrosError):
    """The value will never be set; `cause` is the root failure."""

    def __init__(self, cause: Cause) -> None:
        cancelled = cause.stage is FailedStage.CANCELLED
        verb = "was cancelled" if cancelled else f"failed ({cause.stage})"
        who = f"{cause.name} ({cause.request_id})" if cause.name else cause.request_id
        super().__init__(f"The request {who} {verb}: {cause.message}")
        self.cause = cause


class SessionLimitError(BrosError):
    """A limit of the session or the server is reached; the message names it.

    retry_after_s: seconds until a retry, None if waiting alone does not help.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


NO_CLIENT_HAS_SET = "No client has set "
"""Begins the last sentence of a GetTimeoutError of the server, if there are unset inputs."""


class GetTimeoutError(BrosError):
    """The value was not ready within the timeout; the client may retry the get."""

    @property
    def unset(self) -> str:
        """The sentence of the message that lists the inputs it waits for and that no client has
        set; empty if there are none."""
        _, begin, rest = str(self).partition(NO_CLIENT_HAS_SET)
        return begin + rest


class ServerUnreachableError(BrosError):
    """Raised by the client: no response, or a response that no bros server sends."""
