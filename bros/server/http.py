"""What routes of all kinds do with requests: read a body, whatever its bytes are, read a URL's
parameters, do long work beside the event loop, and end work that no client waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio.to_thread
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from bros.core.errors import InvalidRequestError
from bros.server.errors import BodyTooLargeError, ServerStoppingError
from bros.server.openai.schema import ModelRequest
from bros.server.state import ServerState, StopSignal

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=ModelRequest)


async def read_request(request: Request, model: type[R]) -> R:
    """The body as a `model`, meant for the model that is served here.

    Raises what read_object raises, NotFoundError for another model, and InvalidRequestError for
    a field that is wrong.
    """
    state = ServerState.of(request)
    body = validate(model, await read_object(request, state.max_body_bytes))
    state.check_model(body.model)
    return body


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body.

    Raises BodyTooLargeError, or InvalidRequestError for anything else that is wrong with it:
    not UTF-8, not JSON, NaN or Infinity, nested too deeply (200 levels), no object.
    """
    body = await _read_limited(request, max_bytes)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(
            f"The body is not valid JSON: {error}.", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.", code="invalid_type")
    return value


def validate(model: type[M], value: Mapping[str, Any]) -> M:
    """Check `value` against a model; raises InvalidRequestError naming the first wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        raise _explain(details) from None


async def _read_limited(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = BodyTooLargeError(f"The request body is larger than {max_bytes} bytes.")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def _explain(details: ErrorDetails) -> InvalidRequestError:
    param = _path(details["loc"])
    kind = details["type"]
    if kind == "missing":
        return InvalidRequestError(
            f"Missing required parameter: '{param}'.", param, "missing_required_parameter"
        )
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    reason = details["msg"][:1].lower() + details["msg"][1:]
    return InvalidRequestError(f"Invalid value for '{param}': {reason}.", param, code)


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> messages[0].content"""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")[:200]


# ---- Parameters in the query of a URL.


def query_names(query: QueryParams, known: Sequence[str]) -> None:
    """Raises InvalidRequestError for a parameter that is none of these."""
    for name in query:
        if name not in known:
            message = f"There is no parameter {name[:50]!r} here; there are {', '.join(known)}."
            raise InvalidRequestError(message, param=name[:50], code="invalid_value")


def query_int(query: QueryParams, name: str, default: int, *, low: int, high: int) -> int:
    """Raises InvalidRequestError for anything but a whole number in the range."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        message = f"'{name}' must be a whole number from {low} to {high}."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return int(text)


def query_choice(query: QueryParams, name: str, choices: Sequence[str]) -> str:
    """The first choice if there is none. Raises InvalidRequestError for any other."""
    text = query.get(name, choices[0])
    if text not in choices:
        message = f"'{name}' must be one of {', '.join(choices)}."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return text


def query_flag(query: QueryParams, name: str) -> bool:
    """False if there is none. Raises InvalidRequestError for anything but true and false."""
    return query_choice(query, name, ("false", "true")) == "true"


def query_number(query: QueryParams, name: str, *, most: float) -> float | None:
    """Raises InvalidRequestError for anything but a number above 0, and at most `most`."""
    text = query.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        message = f"'{name}' must be a number above 0, at most {most:g}."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return value


# ---- Work that would hold up every stream is done on a thread.


T = TypeVar("T")

_INLINE_SIZE = 2000
"""Less takes under a millisecond or so, which is less than going to a thread is worth."""


async def run(state: ServerState, work: Callable[[], T], size: int) -> T:
    """Do `work`, on a thread if it is large. size: characters or tokens it goes through."""
    if size <= _INLINE_SIZE:
        return work()
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=state.threads)


# ---- Work that ends early when its client has left, or when the server stops.


class UntilClientLeaves:
    """Cancels the block when the client has left or the server stops.

        async with UntilClientLeaves(request.receive, state.stopping):
            reply = await work

    Raises ClientDisconnect or ServerStoppingError instead of the CancelledError that the block was
    ended with. The request's body must have been read before. One task waits for what the client
    sends; the work goes on in the task that it is in.
    """

    __slots__ = ("_cancelling", "_reason", "_receive", "_stopping", "_task", "_watcher")

    def __init__(self, receive: Receive, stopping: StopSignal) -> None:
        self._receive = receive
        self._stopping = stopping
        self._reason: Exception | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._stopping.is_set():
            raise _stopping()
        self._task, self._cancelling = task, task.cancelling()
        self._stopping.subscribe(self._on_stopping)
        self._watcher = asyncio.ensure_future(_disconnected(self._receive))
        self._watcher.add_done_callback(self._on_watched)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._stopping.unsubscribe(self._on_stopping)
        self._watcher.remove_done_callback(self._on_watched)
        self._watcher.cancel()
        if self._reason is not None:
            # As asyncio.timeout: if others have cancelled the task as well, it stays cancelled.
            others = self._task.uncancel() > self._cancelling
            if kind is asyncio.CancelledError and not others:
                raise self._reason from None

    def _on_watched(self, watcher: asyncio.Future[None]) -> None:
        if not watcher.cancelled():
            failure = watcher.exception()
            self._end(failure if isinstance(failure, Exception) else ClientDisconnect())

    def _on_stopping(self) -> None:
        self._end(_stopping())

    def _end(self, reason: Exception) -> None:
        if self._reason is None:
            self._reason = reason
            self._task.cancel()


def _stopping() -> ServerStoppingError:
    return ServerStoppingError("The server is shutting down.")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
