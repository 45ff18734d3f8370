"""The front end's way to a server, over HTTP."""

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
from bros.semantic.client.connection import Backend
from bros.semantic.errors import (
    Cause,
    ConflictError,
    FailedStage,
    GetTimeoutError,
    ServerUnreachableError,
    SessionGoneError,
    SessionLimitError,
    UpstreamError,
)
from bros.semantic.schema import CallSpec, Criteria, Parameter, SubmittedCall

_CONNECT_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 60.0
"""For what needs no waiting on the server's side, and on top of what does."""


class HttpBackend:
    """A Backend over `http`, whose base URL ends with /v1/."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def create(
        self,
        criteria: Criteria | None,
        ttl_s: float | None,
        tenant: str,
        metadata: Mapping[str, str],
    ) -> str:
        wanted = {
            "criteria": None if criteria is None else _criteria(criteria),
            "ttl_s": ttl_s,
            "tenant": tenant or None,
            "metadata": dict(metadata) or None,
        }
        return str((await self._ask("POST", "sessions", _given(wanted)))["id"])

    async def submit(
        self, session_id: str, calls: Sequence[CallSpec], key: str
    ) -> Sequence[SubmittedCall]:
        body = {"requests": [_call(call) for call in calls], "key": key}
        answer = await self._ask("POST", f"sessions/{session_id}/requests", body)
        return [
            SubmittedCall(request_id=str(request["id"]), variables=dict(request["variables"]))
            for request in answer["requests"]
        ]

    async def declare(
        self, session_id: str, variable_id: str, name: str, value: str | None
    ) -> None:
        wanted = {"id": variable_id, "name": name, "value": value}
        await self._ask("POST", f"sessions/{session_id}/variables", _given(wanted))

    async def set(self, session_id: str, variable_id: str, value: str) -> None:
        await self._ask("PUT", _variable(session_id, variable_id), {"value": value})

    async def fail(self, session_id: str, request_id: str, message: str) -> None:
        path = f"sessions/{session_id}/requests/{quote(request_id, safe='')}/fail"
        await self._ask("POST", path, {"message": message})

    async def want(self, session_id: str, variable_id: str, criteria: Criteria) -> None:
        body = {"criteria": _criteria(criteria)}
        await self._ask("PATCH", _variable(session_id, variable_id), body)

    async def get(
        self, session_id: str, variable_id: str, criteria: Criteria, timeout_s: float
    ) -> str:
        query = {"wait": "true", "timeout": f"{timeout_s:.3f}", **_query(criteria)}
        path = _variable(session_id, variable_id)
        answer = await self._ask("GET", path, query=query, waits_s=timeout_s)
        return str(answer["value"])

    async def stream(
        self, session_id: str, variable_id: str, criteria: Criteria
    ) -> AsyncGenerator[str, None]:
        query = {"stream": "true", **_query(criteria)}
        # Between pieces the server says every now and then that it is still there.
        timeout = httpx.Timeout(_ANSWER_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        with self._readable_errors():
            path = _variable(session_id, variable_id)
            async with self._http.stream("GET", path, params=query, timeout=timeout) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise read_refusal(answer)
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
        await self._ask("DELETE", path)

    async def inspect(self, session_id: str) -> Mapping[str, Any]:
        return await self._ask("GET", f"sessions/{session_id}")

    async def delete(self, session_id: str) -> None:
        await self._ask("DELETE", f"sessions/{session_id}")

    @property
    def _server(self) -> str:
        return str(self._http.base_url).removesuffix("/v1/")

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        waits_s: float = 0.0,
    ) -> Mapping[str, Any]:
        timeout = httpx.Timeout(
            _ANSWER_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S, read=_ANSWER_TIMEOUT_S + waits_s
        )
        with self._readable_errors():
            answer = await self._http.request(
                method, path, json=body, params=query, timeout=timeout
            )
            if not answer.is_success:
                raise read_refusal(answer)
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
            raise  # these are ValueErrors, too
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"{self._server} does not have semantic sessions: {error!r}"
            raise ServerUnreachableError(message) from error


def open_http(
    url: str, api_key: str | None = None, transport: httpx.AsyncBaseTransport | None = None
) -> Callable[[], AbstractAsyncContextManager[Backend]]:
    """What opens a backend at `url`, with or without /v1.

    Raises ConfigError for something that is no URL.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url: {url!r} must start with http:// or https://")
    base = url.rstrip("/").removesuffix("/v1") + "/v1/"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        httpx.URL(base)
        httpx.Headers(headers)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ConfigError(f"url or api_key: {error}") from None

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[Backend]:
        # Each value that is waited for holds a connection.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        client = httpx.AsyncClient(
            base_url=base, headers=headers, limits=limits, transport=transport
        )
        async with client as http:
            yield HttpBackend(http)

    return opening


def _call(call: CallSpec) -> dict[str, Any]:
    messages = None
    if call.messages is not None:
        messages = [{"role": part.role, "content": part.content} for part in call.messages]
    wanted = {
        "name": call.name or None,
        "template": call.template,
        "messages": messages,
        "chat": call.chat or None,
        "native": call.native or None,
        "parameters": [_parameter(parameter) for parameter in call.parameters],
        "sampling": _sampling(call.sampling),
    }
    return _given(wanted)


def _parameter(parameter: Parameter) -> dict[str, Any]:
    wanted = {
        "name": parameter.name,
        "role": None if parameter.role is None else parameter.role.value,
        "variable": parameter.variable,
        "value": parameter.value,
        "transforms": parameter.transforms,
        "sampling": None if parameter.sampling is None else _sampling(parameter.sampling),
        "criteria": None if parameter.criteria is None else _criteria(parameter.criteria),
    }
    return _given(wanted)


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no numbers as keys, and no way to say that there is no seed but leaving it out."""
    given = _given(fields)
    if "logit_bias" in given:
        given["logit_bias"] = {str(key): bias for key, bias in given["logit_bias"].items()}
    return given


def _criteria(criteria: Criteria) -> dict[str, Any]:
    wanted = {
        "perf": criteria.perf.value,
        "ttft_ms": _ms(criteria.ttft_s),
        "tpot_ms": _ms(criteria.tpot_s),
        "deadline_ms": _ms(criteria.deadline_s),
    }
    return _given(wanted)


def _query(criteria: Criteria) -> dict[str, str]:
    fields = _criteria(criteria)
    return {"criteria": fields.pop("perf"), **{name: f"{ms:g}" for name, ms in fields.items()}}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _variable(session_id: str, variable_id: str) -> str:
    return f"sessions/{session_id}/variables/{quote(variable_id, safe='')}"


async def read_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event; our server writes one line each, and comments."""
    rest = b""
    async for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                yield event.removeprefix(b"data:").strip()


def read_refusal(answer: httpx.Response) -> BrosError:
    """What the server said instead of an answer, as what it raised."""
    try:
        error = answer.json()["error"]
        retry_after_s = float(answer.headers.get("retry-after", 1.0))
        return read_error(answer.status_code, error, retry_after_s)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ServerUnreachableError(
            f"{answer.url} answered {answer.status_code}, and not as a server of bros does."
        )


def read_error(
    status: int | None, error: Mapping[str, Any], retry_after_s: float | None
) -> BrosError:
    """An error in a reply as what the server raised; status: None in the middle of a stream."""
    message, code, param = str(error["message"]), error.get("code"), error.get("param")
    cause = error.get("cause")
    if cause is not None:
        stage = FailedStage(cause["stage"])
        return UpstreamError(
            Cause(
                cause["request_id"],
                stage,
                cause["message"],
                cause.get("variable"),
                cause.get("name", ""),
            )
        )
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
            return EngineDeadError(message)
    return BrosError(message)
