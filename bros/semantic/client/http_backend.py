"""The backend for a server over HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import quote

import httpx

from bros.core.errors import (
    AuthenticationError,
    BrosError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from bros.core.sse import read_events
from bros.semantic.client.connection import Backend
from bros.semantic.errors import (
    Cause,
    ConflictError,
    GetTimeoutError,
    ServerUnreachableError,
    SessionGoneError,
    SessionLimitError,
    UpstreamError,
)
from bros.semantic.schema import (
    CallSpec,
    CreateSession,
    CreateVariable,
    Criteria,
    FailCall,
    SessionSummary,
    SetVariable,
    SharingMode,
    SubmitProgram,
    SubmittedCall,
    SubmittedProgram,
    WantVariable,
    from_json,
    to_json,
)

_CONNECT_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 60.0
"""Response timeout, in addition to the time that a request waits on the server."""


class HttpBackend:
    """A Backend over `http`, whose base URL ends with /v1/."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def create(
        self,
        criteria: Criteria | None,
        ttl_s: float | None,
        tenant: str,
        sharing: SharingMode,
        metadata: Mapping[str, str],
    ) -> str:
        body = CreateSession(
            criteria=criteria,
            ttl_s=ttl_s,
            tenant=tenant,
            sharing=sharing,
            metadata=metadata or None,
        )
        answer = await self._request("POST", "sessions", body)
        return from_json(SessionSummary, answer).id

    async def submit(
        self, session_id: str, calls: Sequence[CallSpec], key: str
    ) -> Sequence[SubmittedCall]:
        body = SubmitProgram(requests=calls, key=key)
        answer = await self._request("POST", f"sessions/{session_id}/requests", body)
        return from_json(SubmittedProgram, answer).requests

    async def declare(
        self, session_id: str, variable_id: str, name: str, value: str | None
    ) -> None:
        body = CreateVariable(id=variable_id, name=name, value=value)
        await self._request("POST", f"sessions/{session_id}/variables", body)

    async def set(self, session_id: str, variable_id: str, value: str) -> None:
        await self._request("PUT", _variable(session_id, variable_id), SetVariable(value=value))

    async def fail(self, session_id: str, request_id: str, message: str) -> None:
        path = f"sessions/{session_id}/requests/{quote(request_id, safe='')}/fail"
        await self._request("POST", path, FailCall(message=message))

    async def want(self, session_id: str, variable_id: str, criteria: Criteria) -> None:
        body = WantVariable(criteria=criteria)
        await self._request("PATCH", _variable(session_id, variable_id), body)

    async def get(
        self, session_id: str, variable_id: str, criteria: Criteria, timeout_s: float
    ) -> str:
        query = {"wait": "true", "timeout": f"{timeout_s:.3f}", **_query(criteria)}
        path = _variable(session_id, variable_id)
        answer = await self._request("GET", path, query=query, wait_s=timeout_s)
        return str(answer["value"])

    async def stream(
        self, session_id: str, variable_id: str, criteria: Criteria
    ) -> AsyncGenerator[str, None]:
        query = {"stream": "true", **_query(criteria)}
        # The server sends heartbeats between pieces, so this is a timeout for silence.
        timeout = httpx.Timeout(_ANSWER_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        with self._readable_errors():
            path = _variable(session_id, variable_id)
            async with self._http.stream("GET", path, params=query, timeout=timeout) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise read_error_response(answer)
                async for data in read_events(answer.aiter_bytes()):
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise read_error(None, event["error"], None)
                    if "delta" in event:
                        yield str(event["delta"])
        raise ServerUnreachableError(f"{self._server} ended the stream in the middle of the value.")

    async def cancel(self, session_id: str, request_id: str) -> None:
        path = f"sessions/{session_id}/requests/{quote(request_id, safe='')}"
        await self._request("DELETE", path)

    async def inspect(self, session_id: str) -> Mapping[str, Any]:
        return await self._request("GET", f"sessions/{session_id}")

    async def delete(self, session_id: str) -> None:
        await self._request("DELETE", f"sessions/{session_id}")

    @property
    def _server(self) -> str:
        return str(self._http.base_url).removesuffix("/v1/")

    async def _request(
        self,
        method: str,
        path: str,
        record: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Mapping[str, Any]:
        timeout = httpx.Timeout(
            _ANSWER_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S, read=_ANSWER_TIMEOUT_S + wait_s
        )
        body = None if record is None else to_json(record, defaults=False)
        with self._readable_errors():
            answer = await self._http.request(
                method, path, json=body, params=query, timeout=timeout
            )
            if not answer.is_success:
                raise read_error_response(answer)
            found: Mapping[str, Any] = answer.json()
            return found

    @contextlib.contextmanager
    def _readable_errors(self) -> Any:
        try:
            yield
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachableError(f"{self._server} does not answer: {reason}") from error
        except (InvalidRequestError, ConfigError):
            raise  # these are subclasses of ValueError
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"a text cannot be sent: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"{self._server} does not have semantic sessions: {error!r}"
            raise ServerUnreachableError(message) from error


def open_http(
    url: str, api_key: str | None = None, transport: httpx.AsyncBaseTransport | None = None
) -> Callable[[], AbstractAsyncContextManager[Backend]]:
    """A factory of context managers that open a backend at `url`, with or without /v1.

    Raises ConfigError if the URL or the key is invalid.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url: {url!r} must start with http:// or https://")
    base = url.rstrip("/").removesuffix("/v1") + "/v1/"
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        # The message does not show the key, because messages get into logs.
        raise ConfigError(
            "api_key: a header carries it, so it must be printable ASCII characters; a key that is "
            "read from a file may end with a line break"
        )
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        httpx.URL(base)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ConfigError(f"url: {error}") from None

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[Backend]:
        # Each waiting get holds a connection.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        client = httpx.AsyncClient(
            base_url=base, headers=headers, limits=limits, transport=transport
        )
        async with client as http:
            yield HttpBackend(http)

    return opening


def _query(criteria: Criteria) -> dict[str, str]:
    fields = to_json(criteria)
    perf = fields.pop("perf")
    return {"criteria": perf, **{name: f"{ms:g}" for name, ms in fields.items() if ms is not None}}


def _variable(session_id: str, variable_id: str) -> str:
    return f"sessions/{session_id}/variables/{quote(variable_id, safe='')}"


def read_error_response(answer: httpx.Response) -> BrosError:
    """An error response as the exception that the server raised."""
    try:
        error = answer.json()["error"]
        retry_after_s = float(answer.headers.get("retry-after", 1.0))
        return read_error(answer.status_code, error, retry_after_s)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ServerUnreachableError(
            f"{answer.url} answered {answer.status_code} without an error object of bros."
        )


def read_error(
    status: int | None, error: Mapping[str, Any], retry_after_s: float | None
) -> BrosError:
    """An error object as the exception that the server raised. status: None within a stream."""
    message, code, param = str(error["message"]), error.get("code"), error.get("param")
    cause = error.get("cause")
    if cause is not None:
        return UpstreamError(from_json(Cause, cause))
    if code == "session_limit_exceeded":
        return SessionLimitError(message)
    if code == "session_gone":
        return SessionGoneError(message)
    if code == "get_timeout":
        return GetTimeoutError(message)
    match status:
        case 400 | 413 | 422:
            return InvalidRequestError(message, param, code)
        case 401 | 403:
            return AuthenticationError(message)
        case 404:
            return NotFoundError(message, param, code)
        case 409:
            return ConflictError(message, str(code), param)
        case 429:
            return OverloadedError(message, retry_after_s or 1.0)
        case 503:
            return EngineDeadError(message, retry_after_s)
    return BrosError(message)
