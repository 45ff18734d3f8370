"""Sends planned requests and records the responses and their timing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, Self

import aiohttp

from bros.bench.dialects import RequestFormat
from bros.bench.plan import BenchTenants, Planned
from bros.core.sse import Event, EventReader, EventTooLongError

# ---- The record of one request, by the client's clock.
#
#     due_s          sent_s       chunks                            end_s
#       |--- lag ------|            |-- gap --|-- gap --| ... --------|
#       |--- ttft ------------------|
#
# Times are in seconds after the start of the run. A request that fails has a record as well.


class Outcome(StrEnum):
    """How a request ended.

    COMPLETED: with a finish reason and all its tokens.
    CUT: the stream ended early, or the response has fewer tokens than were forced.
    REFUSED: status 429 or 503.
    FAILED: another status, an error event, an invalid response, or a broken connection.
    OPEN: still running when the run ended.
    """

    COMPLETED = "completed"
    CUT = "cut"
    REFUSED = "refused"
    FAILED = "failed"
    OPEN = "open"


@dataclass(slots=True)
class Record:
    """One request and its response.

    due_s: when the plan sends it.
    sent_s: when the client sent it; None if it never did.
    chunk_times_s: arrival of each chunk of text (or, without text, of each token).
    prompt_tokens, output_tokens, cached_tokens: from the server's `usage`; None if it has none.
    tier: the service tier that the response names.
    detail: human-readable reason why the request was not completed.
    """

    planned: Planned
    due_s: float
    sent_s: float | None = None
    chunk_times_s: array[float] = field(default_factory=lambda: array("d"))
    end_s: float | None = None
    outcome: Outcome = Outcome.OPEN
    status: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    tier: str | None = None
    detail: str | None = None


# ---- Parsing the response of an OpenAI-compatible server into a record.


_DONE = b"[DONE]"
_MAX_DETAIL_CHARS = 300
# Fields of a chat delta that count as output.
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal", "function_call")
_UNFINISHED_REASONS = {"abort": Outcome.CUT, "error": Outcome.FAILED}


class Failure(Exception):
    """The response is invalid or incomplete."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


class ResponseReader:
    """Reads the events of one response into its record.

    done: the server has sent [DONE].
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self.done = False

    def feed(self, event: Event, at_s: float) -> None:
        """Raises Failure for an error event or an invalid chunk."""
        if event.data == _DONE:
            self.done = True
        elif event.data and not self.done:
            try:
                chunk = json.loads(event.data)
                # Some servers name an error in every chunk, and it is null where there is none.
                failed = chunk.get("error") is not None or chunk.get("object") == "error"
                if event.kind == "error" or failed:
                    raise Failure(Outcome.FAILED, f"error event: {_error_message(chunk)}")
                self._take_chunk(chunk, at_s)
            except (ValueError, TypeError, AttributeError, RecursionError):
                shown = _shorten(event.data.decode("utf-8", "replace"))
                raise Failure(Outcome.FAILED, f"not a chunk: {shown}") from None

    def end(self, at_s: float, expected_tokens: int | None) -> None:
        """End of the stream. Raises Failure unless the response is complete.

        expected_tokens: the required number of output tokens; None if the server decides.
        """
        record = self._record
        reason, tokens = record.finish_reason, record.output_tokens
        if reason is None:
            raise Failure(Outcome.CUT, "the stream ended without a finish reason")
        if reason in _UNFINISHED_REASONS:
            raise Failure(_UNFINISHED_REASONS[reason], f"finish reason {reason!r}")
        if expected_tokens is not None and tokens is not None and tokens < expected_tokens:
            raise Failure(
                Outcome.CUT, f"{tokens} of {expected_tokens} tokens, finish reason {reason!r}"
            )
        record.end_s, record.outcome = at_s, Outcome.COMPLETED

    def _take_chunk(self, chunk: Mapping[str, Any], at_s: float) -> None:
        record = self._record
        has_text = False
        for choice in chunk.get("choices") or ():
            has_text = has_text or _has_text(choice)
            reason = choice.get("finish_reason")
            if reason is not None:
                record.finish_reason = str(reason)
        if has_text:
            record.chunk_times_s.append(at_s)
        usage = chunk.get("usage")
        if usage is not None:
            self._take_usage(usage)
        tier = chunk.get("service_tier")
        if tier is not None:
            record.tier = str(tier)

    def _take_usage(self, usage: Mapping[str, Any]) -> None:
        record = self._record
        record.prompt_tokens = _count(usage, "prompt_tokens")
        record.output_tokens = _count(usage, "completion_tokens")
        record.cached_tokens = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens")


def describe_body(kind: str, body: bytes) -> str:
    """One line about a body that is not an event stream. kind: its media type."""
    text = body.decode("utf-8", "replace")
    if kind == "text/html" or text.lstrip()[:9].lower() in ("<!doctype", "<html>"):
        title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
        return f"a web page, {_shorten(title[1])!r}" if title else "a web page"
    try:
        return _error_message(json.loads(text))
    except (ValueError, RecursionError):
        return _shorten(text) or "nothing"


def _has_text(choice: Mapping[str, Any]) -> bool:
    if choice.get("text") or choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    return bool(delta) and any(delta.get(name) for name in _TEXT_KEYS)  # type: ignore[union-attr]


def _error_message(body: object) -> str:
    """The message of a JSON error, in OpenAI's envelope or another server's."""
    found = body
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return _shorten(found if isinstance(found, str) else json.dumps(found))


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if type(value) is int else None


def _shorten(text: str) -> str:
    """One line of at most _MAX_DETAIL_CHARS characters."""
    line = " ".join(text[: 10 * _MAX_DETAIL_CHARS].split())
    return line if len(line) <= _MAX_DETAIL_CHARS else line[: _MAX_DETAIL_CHARS - 3] + "..."


# ---- HTTP requests with streamed responses.


KEEP_ALIVE_S = 2.0
"""Idle connections are closed after this time, before the server closes them (uvicorn: 5 s) and
breaks a request that is just being sent."""


class TransportError(Exception):
    """The connection could not be established, or it broke."""


class HttpResponse(NamedTuple):
    """headers: names in lower case.
    body: its bytes as they arrive; raises TransportError if the connection breaks.
    """

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]


class HttpTransport(Protocol):
    """Sends requests."""

    def post(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[HttpResponse]:
        """Entering sends the request and returns once the response headers have arrived; it raises
        TransportError. Leaving drops the rest of the body."""
        ...


class AiohttpTransport:
    """Keeps connections open between requests, without a limit on their number.

    Only connecting has a timeout. Use as an asynchronous context manager.
    """

    def __init__(self, connect_timeout_s: float = 30.0) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            # A gateway that compresses would delay chunks.
            headers={"accept-encoding": "identity", "user-agent": "bros-bench"},
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        await self._session.close()

    @asynccontextmanager
    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[HttpResponse]:
        assert self._session is not None, "not entered"
        try:
            response = await self._session.post(
                url, data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TransportError(described(error)) from error
        try:
            names = {name.lower(): value for name, value in response.headers.items()}
            yield HttpResponse(response.status, names, _Body(response))
        finally:
            response.release()


class _Body:
    """The body of a response; each item is all that has arrived since the last one."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            data = await self._content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TransportError(described(error)) from error
        if not data:
            raise StopAsyncIteration
        return data


def described(error: Exception) -> str:
    """What happened, without the names and the wording of the HTTP library."""
    match error:
        case aiohttp.ClientConnectorError():
            return f"cannot connect to {error.host}:{error.port}: {_os_error_text(error.os_error)}"
        case aiohttp.ServerTimeoutError() | asyncio.TimeoutError():
            return "cannot connect: timed out"
        case aiohttp.ServerDisconnectedError():
            return "the server closed the connection without a response"
        case aiohttp.ClientPayloadError():
            return "the connection broke in the middle of the response"
        case aiohttp.InvalidURL():
            return f"not an address: {error}"
        case OSError():
            return f"the connection broke: {_os_error_text(error)}"
    return f"{type(error).__name__}: {error}"


def _os_error_text(error: OSError) -> str:
    """The system's text for `error`; failed name lookups have negative numbers."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


logger = logging.getLogger(__name__)

IDLE_S = 300.0
"""Default idle timeout of a stream: a best-effort request may be queued for this long."""

LINGER_S = 0.005
"""How long the client waits for the end of the body after [DONE], so that it can reuse the
connection. The limit is short because it delays the next turn of a session."""

_REFUSALS = frozenset({429, 503})
_ERROR_BODY_TIMEOUT_S = 5.0
_ERROR_BODY_MAX_BYTES = 1 << 16

Now = Callable[[], float]
"""Seconds since the start of the run."""

Render = Callable[[Planned], tuple[Sequence[int], str]]
"""Returns the prompt of a request as token ids and as text."""


class Prepared(NamedTuple):
    """The body of a request.

    problem: why it could not be built; then the body is empty.
    """

    body: bytes
    problem: str | None = None


class Client:
    """Sends requests in one format to one server.

    base_url: scheme, host and port, with or without `/v1`.
    tenants: whose key a request is sent with, instead of `api_key`.
    idle_s: a request fails if the server sends nothing for this long; None waits forever.
    """

    def __init__(
        self,
        http: HttpTransport,
        base_url: str,
        request_format: RequestFormat,
        render: Render,
        *,
        api_key: str | None = None,
        tenants: BenchTenants | None = None,
        idle_s: float | None = IDLE_S,
    ) -> None:
        self._http = http
        self._url = base_url.rstrip("/").removesuffix("/v1") + request_format.path
        self._format = request_format
        self._render = render
        self._idle_s = idle_s
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._tenants = tenants

    def prepare(self, planned: Planned) -> Prepared:
        """Build the body ahead of the send time. Never raises."""
        try:
            token_ids, text = self._render(planned)
            return Prepared(self._format.body(planned, token_ids, text))
        except Exception as error:
            logger.exception("cannot build the request %s", planned.name)
            return Prepared(b"", f"the request cannot be built: {_error_text(error)}")

    async def send(self, record: Record, prepared: Prepared, now: Now) -> float | None:
        """Send the request now and fill in `record` until the response has ended.

        On cancellation the record stays OPEN with the chunks so far. Returns the server's
        Retry-After in seconds if it sent one.
        """
        if prepared.problem is not None:
            record.end_s = now()
            record.outcome, record.detail = Outcome.FAILED, prepared.problem
            return None
        record.sent_s = now()
        headers = self._headers
        if self._tenants is not None:
            key = self._tenants.keys[self._tenants.tenant_of(record.planned)]
            headers = {**headers, "authorization": f"Bearer {key}"}
        try:
            async with asyncio.timeout(self._idle_s) as idle_timeout:
                async with self._http.post(self._url, prepared.body, headers) as response:
                    record.status = response.status
                    return await self._receive(record, response, now, idle_timeout)
        except Failure as failure:
            outcome, detail = failure.outcome, failure.detail
        except (TransportError, EventTooLongError) as error:
            outcome, detail = Outcome.FAILED, str(error)
        except TimeoutError:
            outcome, detail = Outcome.FAILED, f"stalled: nothing came for {self._idle_s:g} s"
        except Exception as error:
            logger.exception("%s failed in the client", record.planned.name)
            outcome, detail = Outcome.FAILED, f"the client failed: {_error_text(error)}"
        if record.outcome is Outcome.OPEN:  # else the response was complete before the error
            record.end_s = now()
            record.outcome = outcome
            record.detail = detail + _progress(record)
        return None

    async def _receive(
        self, record: Record, response: HttpResponse, now: Now, idle_timeout: asyncio.Timeout
    ) -> float | None:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.status == 200 and kind == "text/event-stream":
            await self._read(record, response.body, now, idle_timeout)
            return None
        arrived_s = now()
        idle_timeout.reschedule(None)
        what = describe_body(kind, await _read_error_body(response.body))
        record.end_s = arrived_s
        record.outcome = Outcome.REFUSED if response.status in _REFUSALS else Outcome.FAILED
        if response.status == 200:
            what = f"not an event stream: {what}"
        record.detail = f"{response.status}: {what}"
        return _retry_after_s(response.headers)

    async def _read(
        self,
        record: Record,
        body: AsyncIterator[bytes],
        now: Now,
        idle_timeout: asyncio.Timeout,
    ) -> None:
        events, reader = EventReader(), ResponseReader(record)
        loop_time = asyncio.get_running_loop().time
        expected = record.planned.output_tokens if self._format.forces(record.planned) else None
        idle_s = self._idle_s
        at_s = now()
        async for data in body:
            at_s = now()
            if idle_s is not None:
                idle_timeout.reschedule(loop_time() + idle_s)
            for event in events.feed(data):
                reader.feed(event, at_s)
            if reader.done:
                break
        else:
            at_s = now()
        reader.end(at_s, expected)
        if reader.done:
            with contextlib.suppress(TransportError, TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    async for _ in body:
                        pass


async def _read_error_body(body: AsyncIterator[bytes]) -> bytes:
    """The start of an error response, limited in size and time."""
    content = b""
    with contextlib.suppress(TransportError, TimeoutError):
        async with asyncio.timeout(_ERROR_BODY_TIMEOUT_S):
            async for data in body:
                content += data
                if len(content) >= _ERROR_BODY_MAX_BYTES:
                    break
    return content[:_ERROR_BODY_MAX_BYTES]


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with contextlib.suppress(KeyError, ValueError):
            return max(0.0, float(headers[name]) * unit_s)
    return None


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _progress(record: Record) -> str:
    if record.sent_s is None or not record.chunk_times_s:
        return ""
    count = len(record.chunk_times_s)
    last_s = record.chunk_times_s[-1] - record.sent_s
    return f" (after {count} chunks, the last {last_s:.3f} s after the request)"
