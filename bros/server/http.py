"""Helpers of all routes: read bodies and query parameters, write JSON, offload long work to a
thread, and cancel work when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json, to_json
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from bros.core.errors import InvalidRequestError
from bros.core.tenants import QuotaHold, Resource, TenantAccounts
from bros.server.errors import BodyTooLargeError, MediaTypeError, ServerStoppingError
from bros.server.openai.schema import ModelRequest
from bros.server.replies import PIECE_BYTES
from bros.server.state import ServerState, StopSignal
from bros.text.json_numbers import SHORT_TEXT, SUSPECT, wrong_number
from bros.text.json_text import JsonParts, WrittenJson, excess_of, parsed_bytes

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=ModelRequest)


def json_response(reply: BaseModel) -> Response:
    return Response(reply.model_dump_json(), media_type="application/json")


_SLICE = 10_000


def json_list(values: Sequence[Any]) -> bytes:
    """A list as JSON, written in slices: between them other threads can run."""
    slices = (to_json(values[i : i + _SLICE])[1:-1] for i in range(0, len(values), _SLICE))
    return b"[%b]" % b",".join(slices)


def list_pieces(reply: BaseModel, items: Iterable[BaseModel]) -> Iterator[bytes]:
    """A reply whose `data` is empty as JSON with these items, each of which is made and written by
    itself: between them other threads can run."""
    before, _, after = reply.model_dump_json().partition('"data":[]')  # no text has such quotes
    yield f'{before}"data":['.encode()
    for number, item in enumerate(items):
        yield (b"," if number else b"") + item.model_dump_json().encode()
    yield f"]{after}".encode()


ITEM_CHARS = 100
"""Making an item of a list and writing it takes as long as so many characters."""

_PIECE_SIZE = 50_000
"""Characters and values that are written at once. More would hold the interpreter for longer than a
millisecond or two: 0.1 s for 11 million characters with escapes."""


def json_pieces(value: Any, write: Callable[[Any], bytes] = to_json) -> Iterator[bytes]:
    """A JSON value as JSON in pieces: between them other threads can run, whatever is in it.

    value: may have WrittenJson for lists. write: writes a value.
    """
    if isinstance(value, WrittenJson):
        yield b"["
        yield from _texts_in_pieces(value)
        yield b"]"
    elif _weight(value) <= _PIECE_SIZE:
        yield write(value)
    elif isinstance(value, str):
        yield b'"'
        for begin in range(0, len(value), _PIECE_SIZE):
            yield write(value[begin : begin + _PIECE_SIZE])[1:-1]
        yield b'"'
    elif isinstance(value, dict):
        between = b"{"
        for key, part in value.items():
            yield between + write(key) + b":"
            yield from json_pieces(part, write)
            between = b","
        yield b"}"
    else:
        between = b"["
        for parts in _grouped(value):
            yield between
            if len(parts) == 1:
                yield from json_pieces(parts[0], write)
            else:
                yield write(parts)[1:-1]
            between = b","
        yield b"]"


def _texts_in_pieces(texts: WrittenJson) -> Iterator[bytes]:
    between = b""
    for group in _grouped(texts):
        yield between + ",".join(group).encode("ascii")
        between = b","


def spliced(text: str, values: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    """A JSON text in which fields that are null have these values; in the order of the text. Of
    several fields of a name it is the first one."""
    for name, value in values.items():
        before, _, text = text.partition(f'"{name}":null')  # no string in JSON has such quotes
        yield f'{before}"{name}":'.encode()
        yield from value
    yield text.encode()


def _grouped(values: Iterable[Any]) -> Iterator[list[Any]]:
    """The values in groups that can be written at once; each larger one by itself."""
    group: list[Any] = []
    size = 0
    for value in values:
        weight = _weight(value)
        if group and size + weight > _PIECE_SIZE:
            yield group
            group, size = [], 0
        group.append(value)
        size += weight
    if group:
        yield group


def json_size(value: Any, more: int = 0) -> int:
    """Number of characters and values in a JSON value; keys do not count. more: what any
    WrittenJson counts for besides its characters."""
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, dict):
        return sum(json_size(part, more) for part in value.values()) + 1
    if isinstance(value, WrittenJson):
        return sum(map(len, value)) + more + 1
    if isinstance(value, list):
        return sum(json_size(part, more) for part in value) + 1
    return 1


def _weight(value: Any) -> int:
    """As json_size, and too large for one piece if there is any WrittenJson in it."""
    return json_size(value, more=_PIECE_SIZE)


async def read_request(request: Request, model: type[R]) -> R:
    """The body as a `model`.

    Raises what read_object raises, InvalidRequestError for an invalid field, and NotFoundError if
    it names another language model than the served one.
    """
    state = ServerState.of(request)
    body = await read_as(request, state.max_body_bytes, lambda fields: validate(model, fields))
    state.check_model(body.model)
    return body


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body.

    Raises MediaTypeError, BodyTooLargeError, or InvalidRequestError for a body that is not UTF-8 or
    not JSON, has NaN or Infinity, is nested too deeply (200 levels), has too many parts, or is not
    an object; and TenantLimitError if bodies of the tenant that wait are too large, or if it has
    used up its CPU time and the body is no short one.
    """
    return await read_as(request, max_bytes, lambda fields: fields)


async def read_as(request: Request, max_bytes: int, make: Callable[[dict[str, Any]], T]) -> T:
    """What `make` makes of the JSON object in the body, on a thread if the body is large.

    Raises what read_object and `make` raise.
    """
    with _input_hold(request) as held:
        return await _read_into(held, request, max_bytes, lambda body: make(_parse(body)))


async def read_held(
    request: Request, max_bytes: int, make: Callable[[dict[str, Any]], T]
) -> tuple[T, QuotaHold]:
    """As `read_as`, for what is kept after this call: the body counts for its tenant as what it
    takes when parsed, until the request has ended or the hold is released or resized.

    Raises also TenantLimitError if there is no room for that now.
    """

    def work(body: bytes) -> tuple[T, int]:
        num_bytes = len(body) if len(body) <= _INLINE_SIZE else parsed_bytes(body)
        return make(_parse(body)), num_bytes

    held = request.scope[HELD] = _input_hold(request)
    made, num_bytes = await _read_into(held, request, max_bytes, work)
    accounts = ServerState.of(request).accounts
    most = accounts.most(held.tenant, held.resource)
    # One that takes more than the limit may be the only one.
    num_bytes = max(held.amount, num_bytes if most is None else min(num_bytes, most))
    accounts.check_growth(held, num_bytes)
    held.resize(num_bytes)
    return made, held


HELD = "bros.held"
"""Key in the ASGI scope of what a request holds until it has ended. App releases it."""


def _input_hold(request: Request) -> QuotaHold:
    accounts, tenant = ServerState.of(request).accounts, ServerState.tenant(request)
    return accounts.count(tenant, Resource.INPUT_BYTES, 0)


async def _read_into(
    held: QuotaHold, request: Request, max_bytes: int, work: Callable[[bytes], T]
) -> T:
    """What `work` makes of the body, on a thread if that is large. held: counts it until then."""
    check_coding(request)
    _check_json_type(request)
    state, tenant = ServerState.of(request), held.tenant
    body = await _read_limited(request, max_bytes, state.accounts, held)
    if len(body) > _INLINE_SIZE:
        state.accounts.check_cpu(tenant)
    size = len(body) // _BYTES_PER_SIZE
    if size <= _INLINE_SIZE:
        await state.begin_work(tenant)
        return work(body)
    return await state.threads.run(tenant, partial(work, body), size)


_BYTES_PER_SIZE = 8
"""Bytes of JSON that are parsed and validated in the time in which one character is tokenized."""

_MAX_PARTS = JsonParts(containers=150_000, keys=200_000, values=300_000)
"""The parser and the validation of a list hold the interpreter: 0.3 s for a body of 4 MB that
consists of empty lists, and 0.02 to 0.04 s each for half a million token ids. The largest program
of 10,000 calls that is of use has half of these containers and keys, and OpenAI's embeddings take
300,000 tokens at a time."""

_SMALL_BODY = 100_000


def _parse(body: bytes) -> dict[str, Any]:
    if len(body) > _SMALL_BODY:
        _check_parts(body)
    if len(body) > SHORT_TEXT or SUSPECT.search(body):
        _check_numbers(body)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(
            f"The body is not valid JSON: {error}.", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.", code="invalid_type")
    return value


def _check_parts(body: bytes) -> None:
    """Raises InvalidRequestError for more objects, lists, keys and values than can be parsed at
    once."""
    found = excess_of(body, _MAX_PARTS)
    if found is not None:
        raise InvalidRequestError(
            f"The body has {found}; at most {_MAX_PARTS.limits} are allowed.", code="invalid_value"
        )


def _check_numbers(body: bytes) -> None:
    """Raises InvalidRequestError for numbers that are too long or too large."""
    wrong = wrong_number(body)
    if wrong is not None:
        raise InvalidRequestError(f"The body has {wrong}.", code="invalid_value")


def has_body(request: Request) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def check_coding(request: Request) -> None:
    """Raises MediaTypeError for a compressed body."""
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise MediaTypeError(
            f"Content-Encoding {coding[:100]!r} is not supported: bodies are sent as they are."
        )


def _check_json_type(request: Request) -> None:
    """Raises MediaTypeError unless a body says that it is JSON. Browsers send some other types from
    any web page to any server, but JSON only if the server has allowed it to the page."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and has_body(request):
        given = f"{kind[:100]!r}" if kind else "none"
        raise MediaTypeError(
            "The body must be JSON, sent with the header 'Content-Type: application/json'. "
            f"The content type of this request is {given}."
        )


def validate(model: type[M], value: Mapping[str, Any]) -> M:
    """`value` as a model. Raises InvalidRequestError naming the first invalid field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        raise _to_invalid_request(details) from None


async def _read_limited(
    request: Request, max_bytes: int, accounts: TenantAccounts, held: QuotaHold
) -> bytes:
    """held: what the body counts as for its tenant; it grows with the body."""
    declared = request.headers.get("content-length", "")
    too_large = BodyTooLargeError(f"The request body is larger than {max_bytes} bytes.")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
        accounts.check_growth(held, len(body))
        held.resize(len(body))
    return bytes(body)


_REASONS: Mapping[str, str] = MappingProxyType(
    {"model_type": "must be an object", "dict_type": "must be an object",
     "list_type": "must be a list"}
)  # fmt: skip
"""Kind of error -> what a client reads, where Pydantic's text names types of Python."""


def _to_invalid_request(details: ErrorDetails) -> InvalidRequestError:
    param = _path(details["loc"])
    kind = details["type"]
    if kind == "missing":
        return InvalidRequestError(
            f"Missing required parameter: '{param}'.", param, "missing_required_parameter"
        )
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    reason = _REASONS.get(kind) or details["msg"][:1].lower() + details["msg"][1:]
    where = f"for '{param}'" if param else "of the body"
    return InvalidRequestError(f"Invalid value {where}: {reason}.", param or None, code)


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> messages[0].content

    Pydantic names a form of a field that has several, such as "dict[str,any]", after the field.
    """
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif "[" not in step:
            path += f".{step}"
    return path.removeprefix(".")[:200]


# ---- Query parameters.


def check_query_names(query: QueryParams, known: Sequence[str]) -> None:
    """Raises InvalidRequestError for an unknown parameter."""
    for name in query:
        if name not in known:
            message = f"Unknown parameter {name[:50]!r}; known are {', '.join(known)}."
            raise InvalidRequestError(message, param=name[:50], code="invalid_value")


def query_int(query: QueryParams, name: str, default: int, *, low: int, high: int) -> int:
    """Raises InvalidRequestError for anything but an integer in [low, high]."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        message = f"'{name}' must be an integer from {low} to {high}."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return int(text)


def query_choice(query: QueryParams, name: str, choices: Sequence[str]) -> str:
    """One of `choices`, by default the first. Raises InvalidRequestError for any other value."""
    text = query.get(name, choices[0])
    if text not in choices:
        message = f"'{name}' must be one of {', '.join(choices)}."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return text


def query_flag(query: QueryParams, name: str) -> bool:
    """False by default. Raises InvalidRequestError for anything but true and false."""
    return query_choice(query, name, ("false", "true")) == "true"


def query_number(query: QueryParams, name: str, *, most: float, least: float = 0.0) -> float | None:
    """None by default. Raises InvalidRequestError for anything but a positive number in
    [least, most]."""
    text = query.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most or value < least:
        low = f"at least {least:g}" if least else "above 0"
        message = f"'{name}' must be a number {low} and at most {most:g}."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return value


# ---- Long work runs on a thread, because on the event loop it would stall every stream.


_INLINE_SIZE = 2000
"""Work up to this size takes about a millisecond, too little to be worth a thread."""


async def offload(state: ServerState, tenant: str, work: Callable[[], T], size: int) -> T:
    """Do `work` on an input of a tenant, on a thread if it is large. size: characters or tokens.

    Raises TenantLimitError if inputs of the tenant that wait are too large.
    """
    if size <= _INLINE_SIZE:
        return work()
    with state.accounts.hold(tenant, Resource.INPUT_BYTES, size):
        return await state.threads.run(tenant, work, size)


async def offload_held(state: ServerState, tenant: str, work: Callable[[], T], size: int) -> T:
    """As `offload`, on an input that counts already, see `read_held`."""
    return work() if size <= _INLINE_SIZE else await state.threads.run(tenant, work, size)


KEPT_FREE_BYTES = 2**16
"""So much of its body may be kept for each open request without counting: its schema, its stop
strings, what the response repeats of it. Open requests are limited by their number."""


def count_kept(held: QuotaHold | None, num_bytes: int) -> None:
    """So many bytes of a body are kept until the request has ended."""
    if held is not None:
        held.resize(num_bytes if num_bytes > KEPT_FREE_BYTES else 0)


async def offload_reply(state: ServerState, tenant: str, work: Callable[[], T], size: int) -> T:
    """Do `work` on a reply to a tenant, on a thread if it is large. size: characters or tokens."""
    if size > _INLINE_SIZE:
        return await state.threads.write(tenant, work)
    await state.begin_reply(tenant)
    return work()


_JSON = "application/json"
_CHUNK_BYTES = 2**18


async def large_response(
    state: ServerState, tenant: str, make: Callable[[], Any], size: int
) -> Response:
    """A response with the JSON value that `make` returns.

    A large one is written on a thread, and of one of more than 256 KiB each part when the client
    has read those before, so that the server never has all of it in memory.
    size: characters and values.
    """
    return await pieces_response(state, tenant, lambda: json_pieces(make()), size)


async def pieces_response(
    state: ServerState,
    tenant: str,
    make: Callable[[], Iterable[bytes]],
    size: int,
    *,
    kept_bytes: int = 0,
) -> Response:
    """As `large_response`, with the pieces of JSON that `make` returns.

    kept_bytes: what they are made of, which counts while they are read, see `held_output`. The
        response raises TenantLimitError if there is no room for it.
    """
    if size <= _INLINE_SIZE:
        await state.begin_reply(tenant)
        return Response(b"".join(make()), media_type=_JSON)
    chunks = chunked(make)
    write = partial(state.threads.write, tenant, partial(next, chunks, b""))
    first = await write()
    if len(first) < _CHUNK_BYTES:
        return Response(first, media_type=_JSON)

    async def body() -> AsyncIterator[bytes]:
        chunk = first
        while chunk:
            yield chunk
            chunk = await write()

    return _PiecesResponse(body(), kept_bytes)


class _PiecesResponse(StreamingResponse):
    """JSON that is made as it is read, of what takes `kept_bytes` until its end."""

    def __init__(self, body: AsyncIterator[bytes], kept_bytes: int) -> None:
        super().__init__(body, media_type=_JSON)
        self._kept_bytes = kept_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with held_output(Request(scope), self._kept_bytes):
            await super().__call__(scope, receive, send)


def held_output(request: Request, num_bytes: int) -> QuotaHold:
    """Counts what a reply is made of as output of its tenant, if it is much; it may be the only
    one. Raises TenantLimitError if the tenant, or all together, have no room for it."""
    accounts = ServerState.of(request).accounts
    held = accounts.count(ServerState.tenant(request), Resource.OUTPUT_BYTES, 0)
    if num_bytes > PIECE_BYTES:
        accounts.grow(held, num_bytes)
    return held


def chunked(make: Callable[[], Iterable[bytes]]) -> Iterator[bytes]:
    """The pieces in chunks of at least _CHUNK_BYTES but for the last one; `make` is called with the
    first."""
    chunk = bytearray()
    for piece in make():
        chunk += piece
        if len(chunk) >= _CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


async def in_turns(items: Iterable[T], most: int) -> AsyncIterator[T]:
    """The items, for work on the event loop; other tasks run after each `most` of them."""
    for number, item in enumerate(items, start=1):
        yield item
        if not number % most:
            await asyncio.sleep(0)


# ---- Writing to a connection without a coroutine.


class ChunkedBody:
    """Writes chunks of a response body to uvicorn's transport. It costs a third of ASGI's `send`.

    The response must have been started with `send`, and `send` also writes its last part.

    wrote: set by `write`.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._write = cycle.transport.write
        self.wrote = False

    @classmethod
    def behind(cls, send: Send) -> ChunkedBody | None:
        """None if `send` is not that of uvicorn's httptools protocol."""
        cycle = getattr(send, "__self__", None)
        return cls(cycle) if isinstance(cycle, RequestResponseCycle) else None

    def ready(self) -> bool:
        """False if the client reads too slowly or has left, or if the body is not chunked. Then use
        `send`, which handles these cases."""
        cycle = self._cycle
        paused = cycle.flow.write_paused or cycle.disconnected
        return not paused and cycle.chunked_encoding is True and not cycle.response_complete

    def write(self, body: bytes) -> None:
        """Write one chunk. Call it only when ready; `body` must not be empty."""
        self.wrote = True
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


# ---- Cancelling work whose client has disconnected.


class CancelOnDisconnect:
    """Cancels the block when the client disconnects or the server stops.

        async with CancelOnDisconnect(request.receive, state.stopping):
            reply = await work

    Raises ClientDisconnect or ServerStoppingError in place of the CancelledError that ended the
    block. Read the request's body before. A second task waits for the disconnect; the block runs
    in the caller's task.
    """

    __slots__ = ("_cancelling", "_is_over", "_reason", "_receive", "_stopping", "_task", "_watcher")

    def __init__(self, receive: Receive, stopping: StopSignal) -> None:
        self._receive = receive
        self._stopping = stopping
        self._reason: Exception | None = None
        self._is_over = False

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
        self._is_over = True  # if the watcher has just ended, its callback is still to come
        self._stopping.unsubscribe(self._on_stopping)
        self._watcher.remove_done_callback(self._on_watched)
        self._watcher.cancel()
        reason, self._reason = self._reason, None
        try:
            # Like asyncio.timeout: if something else cancelled the task, too, it stays cancelled.
            if (
                reason is not None
                and self._task.uncancel() <= self._cancelling
                and kind is asyncio.CancelledError
            ):
                raise reason from None
        finally:
            # The traceback of the reason has this frame: with it, or with the error that it
            # replaces, it would be a cycle, which keeps all of the request until a full collection.
            del reason, error, trace, self._task, self._watcher

    def _on_watched(self, watcher: asyncio.Future[None]) -> None:
        if not watcher.cancelled():
            failure = watcher.exception()
            self._end(failure if isinstance(failure, Exception) else ClientDisconnect())

    def _on_stopping(self) -> None:
        self._end(_stopping())

    def _end(self, reason: Exception) -> None:
        if self._reason is None and not self._is_over:
            self._reason = reason
            self._task.cancel()


def _stopping() -> ServerStoppingError:
    return ServerStoppingError("The server is shutting down.")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
