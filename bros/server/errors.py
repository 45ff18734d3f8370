"""Exceptions as OpenAI's error envelope: {"error": {message, type, param, code}}."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from bros.batch.objects import StoreError, StoreFullError
from bros.core.errors import (
    AuthenticationError,
    BrosError,
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    OverTenantLimitError,
    QueueFullError,
    ServerLimitError,
    TenantLimitError,
)
from bros.core.tenants import REQUESTS, Resource
from bros.semantic.errors import (
    ConflictError,
    GetTimeoutError,
    SessionGoneError,
    SessionLimitError,
    UpstreamError,
)

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"

MAX_RETRY_AFTER_S = 120
"""OpenAI's clients fail instead of waiting longer than this. So estimates are cut to it; how long a
limit of a tenant lasts is known."""

_USUAL_RETRY_S = 5.0
_FULL_RETRY_S = 60
"""Until an engine, a store or the next server may be there, if nothing says when."""

_MAX_MESSAGE_CHARS = 2000

MESSAGES_PATH = "/v1/messages"
"""Its errors have Anthropic's envelope: {"type": "error", "error": {type, message}}."""

_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


class BodyTooLargeError(BrosError):
    """The request body exceeds the size limit (HTTP 413)."""


class MediaTypeError(BrosError):
    """The body has another content type than the route takes (HTTP 415)."""


class ServerStoppingError(BrosError):
    """The server shut down before the request was finished (HTTP 503)."""


class GenerationFailedError(BrosError):
    """The engine ended a request before it was complete (HTTP 500)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiError:
    """An error response.

    more: further fields of the error object.
    """

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, object] = field(default_factory=dict)

    def to_json(self, path: str = "") -> str:
        """path: of the request; its API may have another envelope than OpenAI's."""
        error: dict[str, object] = {
            "message": self.message[:_MAX_MESSAGE_CHARS],
            "type": self.type,
            "param": self.param,
            "code": self.code,
            **self.more,
        }
        body: dict[str, object] = {"error": error}
        if path.startswith(MESSAGES_PATH):
            error["type"] = _ANTHROPIC_TYPES.get(self.status, "api_error")
            body = {"type": "error", **body}
        return json.dumps(body, separators=(",", ":"))

    def to_response(self, path: str = "") -> Response:
        """path: as in to_json."""
        return Response(self.to_json(path), self.status, dict(self.headers), "application/json")

    def to_event(self) -> bytes:
        """The error inside an event stream whose status line has already been sent."""
        return f"data: {self.to_json()}\n\n".encode()


def describe(error: Exception) -> ApiError:
    """The error response for `error`. It gives no details of unexpected exceptions (our bugs)."""
    match error:
        case InvalidRequestError():
            return ApiError(
                status=400,
                message=error.message,
                type=INVALID_REQUEST,
                param=error.param,
                code=error.code or "invalid_value",
            )
        case AuthenticationError():
            return ApiError(
                status=401,
                message=str(error),
                type=INVALID_REQUEST,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        case NotFoundError():
            return ApiError(
                status=404,
                message=str(error),
                type=INVALID_REQUEST,
                param=error.param,
                code=error.code,
            )
        case BodyTooLargeError():
            return ApiError(
                status=413,
                message=str(error),
                type=INVALID_REQUEST,
                # The connection stays open: a client that is still sending when it is closed would
                # see a connection error instead of this response.
                code="request_too_large",
            )
        case MediaTypeError():
            return ApiError(
                status=415,
                message=str(error),
                type=INVALID_REQUEST,
                code="unsupported_media_type",
                headers={"accept": "application/json"},
            )
        case QueueFullError():
            return _describe_busy(error, "rate_limit_exceeded")
        case OverloadedError():
            return _describe_busy(error, "overloaded")
        case ServerLimitError():
            return _describe_busy(error, "server_limit_exceeded", retry=error.ends_soon)
        case TenantLimitError():
            # When an open request ends is not known, and clients that were all told the same time
            # would come back together; without one each takes a time of its own.
            with_retry_after = error.resource not in (each.value for each in REQUESTS.values())
            return _describe_busy(
                error,
                "tenant_limit_exceeded",
                retry=error.ends_soon,
                with_retry_after=with_retry_after,
            )
        case ConflictError() | SessionGoneError() | SessionLimitError() | UpstreamError():
            return _describe_session(error)
        case HTTPException():
            return _describe_http(error)
    return _describe_server_error(error)


def _describe_busy(
    error: QueueFullError | OverloadedError | TenantLimitError | SessionLimitError,
    code: str,
    *,
    retry: bool = True,
    with_retry_after: bool = True,
) -> ApiError:
    """retry: False if OpenAI's clients should not retry by themselves, because it takes longer.
    with_retry_after: whether clients learn when to retry."""
    helps = error.retry_after_s is None or error.retry_after_s < math.inf  # to wait
    headers = {} if retry and helps else {"x-should-retry": "false"}
    if with_retry_after and helps and error.retry_after_s is not None:
        wait_s = max(error.retry_after_s, 1.0)
        if not isinstance(error, TenantLimitError):
            wait_s = min(wait_s, MAX_RETRY_AFTER_S)
        headers["retry-after"] = str(math.ceil(wait_s))
        headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
    return ApiError(status=429, message=str(error), type=RATE_LIMIT, code=code, headers=headers)


def _describe_session(
    error: ConflictError | SessionGoneError | SessionLimitError | UpstreamError,
) -> ApiError:
    if isinstance(error, ConflictError):
        # Some clients retry after a conflict, which would fail again.
        headers = {"x-should-retry": "false"}
        return ApiError(
            status=409,
            message=str(error),
            type=INVALID_REQUEST,
            param=error.param,
            code=error.code,
            headers=headers,
        )
    if isinstance(error, SessionGoneError):
        return ApiError(status=410, message=str(error), type=INVALID_REQUEST, code="session_gone")
    if isinstance(error, SessionLimitError):
        return _describe_busy(error, "session_limit_exceeded", retry=False)
    cause = error.cause
    return ApiError(
        status=424,
        message=str(error),
        type=SERVER_ERROR,
        code="upstream_failed",
        more={
            "cause": {
                "request_id": cause.request_id,
                "stage": cause.stage.value,
                "message": cause.message[:_MAX_MESSAGE_CHARS],
                "variable": cause.variable,
                "name": cause.name,
            }
        },
    )


def _describe_http(error: HTTPException) -> ApiError:
    kind = INVALID_REQUEST if error.status_code < 500 else SERVER_ERROR
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ApiError(
        status=error.status_code,
        message=error.detail,
        type=kind,
        code=code,
        headers=error.headers or {},
    )


def _describe_server_error(error: Exception) -> ApiError:
    if isinstance(error, EngineDeadError):
        status, code = 503, "engine_unavailable"
    elif isinstance(error, ServerStoppingError):
        status, code = 503, "server_shutting_down"
    elif isinstance(error, GetTimeoutError):
        status, code = 504, "get_timeout"
    elif isinstance(error, StoreFullError):
        status, code = 507, "insufficient_storage"
    elif isinstance(error, StoreError):
        status, code = 503, "store_unavailable"
    elif isinstance(error, BrosError):
        status, code = 500, "engine_error"
    else:
        return ApiError(
            status=500,
            message="Internal server error; the server log has the details.",
            type=SERVER_ERROR,
            code="internal_error",
        )
    headers = {}
    if status == 507:
        # OpenAI's clients should not send a whole file again by themselves.
        headers = {"retry-after": str(_FULL_RETRY_S), "x-should-retry": "false"}
    if status == 503:
        wait_s = error.retry_after_s if isinstance(error, EngineDeadError) else None
        wait_s = _USUAL_RETRY_S if wait_s is None else wait_s
        headers["retry-after"] = str(math.ceil(min(max(wait_s, 1.0), MAX_RETRY_AFTER_S)))
    message = error.for_clients if isinstance(error, StoreError) else str(error)
    return ApiError(status=status, message=message, type=SERVER_ERROR, code=code, headers=headers)


@contextlib.contextmanager
def renaming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """An InvalidRequestError of the block names the fields of another API; see `rename_fields`."""
    try:
        yield
    except InvalidRequestError as error:
        rename_fields(error, names)
        raise


def rename_fields(error: InvalidRequestError, names: Mapping[str, str]) -> None:
    """Let an error name the fields of another API.

    names: name of a field of a chat completion -> its name in the API that the client has used. One
        that begins with a dot is of a part of a field.
    """
    given = error.param or ""
    field, rest = _FIELD.fullmatch(given).groups()  # type: ignore[union-attr]
    for part in filter(lambda name: name.startswith("."), names):
        rest = rest.replace(part, names[part])
    if (param := field + rest) != given:
        error.message = error.message.replace(f"'{given}", f"'{param}")
    if field in names:
        error.message = error.message.replace(f"'{field}", f"'{names[field]}")
        param = names[field] + rest
    if param != given:
        error.param, error.args = param, (error.message,)


_FIELD = re.compile(r"(\w*)(.*)", re.DOTALL)


async def handle_expected(request: Request, error: Exception) -> Response:
    """Exception handler for BrosError."""
    if isinstance(error, TenantLimitError | OverTenantLimitError):
        state = request.app.state.server
        shared = isinstance(error, ServerLimitError)
        note = state.accounts.note_server_refusal if shared else state.accounts.note_refusal
        note(state.tenant(request), Resource(error.resource))
    return describe(error).to_response(request.url.path)


async def handle_http(request: Request, error: Exception) -> Response:
    """Exception handler for HTTPException, as for unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    detail = {
        404: f"There is no route {path}.",
        405: f"{request.method} is not allowed on {path}.",
    }.get(error.status_code, error.detail)
    described = describe(HTTPException(error.status_code, detail, error.headers))
    return described.to_response(path)
