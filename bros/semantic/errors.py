"""What can go wrong with sessions in the caller's terms.

BrosError
├── ConflictError            a variable is set twice, or calls wait for each other   (HTTP 409)
├── SessionGoneError         the session has been deleted or has expired            (HTTP 410)
├── UpstreamError            a call that the value needs has failed                 (HTTP 424)
├── SessionLimitError        too many sessions, calls, variables or waiting         (HTTP 429)
├── GetTimeoutError          the value was not there in time                        (HTTP 504)
└── ServerUnreachableError   the client got no answer, or none of a server like this
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from bros.core.errors import BrosError


class FailedStage(enum.StrEnum):
    """Where a call failed."""

    FILL = "fill"  # its prompt: an input, its transform, or too long
    GENERATE = "generate"  # its answer: the engine refused it, or gave it up
    ENGINE = "engine"  # the engine died, did not come back, or had no room for too long
    TRANSFORM = "transform"  # of an output
    NATIVE = "native"  # a function of the client
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Cause:
    """The first failure, of which all others follow.

    variable: its id, if it is about one.
    name: of the call's function, if it has one.
    """

    request_id: str
    stage: FailedStage
    message: str
    variable: str | None = None
    name: str = ""


class ConflictError(BrosError):
    """Something is there already, or would wait for itself. code: already_set, already_produced,
    cyclic, already_exists, key_reused."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class SessionGoneError(BrosError):
    """The session was there, and is not any more."""


class UpstreamError(BrosError):
    """The value will never be there: `cause` says what failed first."""

    def __init__(self, cause: Cause) -> None:
        cancelled = cause.stage is FailedStage.CANCELLED
        verb = "was cancelled" if cancelled else f"failed ({cause.stage})"
        who = f"{cause.name} ({cause.request_id})" if cause.name else cause.request_id
        super().__init__(f"The request {who} {verb}: {cause.message}")
        self.cause = cause


class SessionLimitError(BrosError):
    """There is no room for more of it here; the message says of what."""


class GetTimeoutError(BrosError):
    """The value was not there in time; asking again is fine."""


class ServerUnreachableError(BrosError):
    """Raised on the client: the server does not answer, or not in its own words."""
