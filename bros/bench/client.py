"""Sends planned requests and writes down what came back, and when."""

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

from bros.bench.dialects import Wording
from bros.bench.plan import Planned
from bros.core.sse import Event, EventReader, EventTooLongError

# ---- What became of one request, by the client's own clock.
#
#     due_s          sent_s       chunks                            end_s
#       |--- lag ------|--- ttft ---|-- gap --|-- gap --| ... --------|
#
# All times are seconds after the start of the run. Requests that fail are records like others.


class Outcome(StrEnum):
    """How a request ended.

    COMPLETED: with a finish reason and all its tokens. CUT: the stream ended, or the answer has
    fewer tokens than were forced. REFUSED: 429 or 503. FAILED: another status, an error event,
    something that is no answer, or a broken connection. OPEN: still running at the end.
    """

    COMPLETED = "completed"
    CUT = "cut"
    REFUSED = "refused"
    FAILED = "failed"
    OPEN = "open"


@dataclass(slots=True)
class Record:
    """One request.

    due_s: when it was to be sent.
    sent_s: when it was (None: never).
    chunk_times_s: when each piece of text (or, without text, each token) came.
    prompt_tokens, output_tokens, cached_tokens: as the server counts them in `usage`; None if it
        does not say.
    tier: the service tier that the answer names.
    detail: why it was not completed, for people.
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


# ---- What an answer of an OpenAI-compatible server says, read into a record.


_DONE = b"[DONE]"
_MAX_DETAIL_CHARS = 300
# Where a chat's delta can have text or what stands for it.
_SPOKEN = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal", "function_call")
_UNFINISHED = {"abort": Outcome.CUT, "error": Outcome.FAILED}


class Failure(Exception):
    """The answer is none, or not a whole one."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


class AnswerReader:
    """Takes the events of one answer. done: the server has said that nothing follows."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.done = False

    def take(self, event: Event, at_s: float) -> None:
        """Raises Failure for an error event or something that is no chunk."""
        if event.data == _DONE:
            self.done = True
        elif event.data and not self.done:
            try:
                chunk = json.loads(event.data)
                if event.kind == "error" or "error" in chunk or chunk.get("object") == "error":
                    raise Failure(Outcome.FAILED, f"error event: {_message(chunk)}")
                self._take_chunk(chunk, at_s)
            except (ValueError, TypeError, AttributeError, RecursionError):
                shown = _shorten(event.data.decode("utf-8", "replace"))
                raise Failure(Outcome.FAILED, f"not a chunk: {shown}") from None

    def end(self, at_s: float, expected_tokens: int | None) -> None:
        """Nothing follows. Raises Failure unless the answer is whole.

        expected_tokens: how many it must have, None if that is up to the server.
        """
        record = self._record
        reason, tokens = record.finish_reason, record.output_tokens
        if reason is None:
            raise Failure(Outcome.CUT, "the stream ended without a finish reason")
        if reason in _UNFINISHED:
            raise Failure(_UNFINISHED[reason], f"finish reason {reason!r}")
        if expected_tokens is not None and tokens is not None and tokens < expected_tokens:
            raise Failure(
                Outcome.CUT, f"{tokens} of {expected_tokens} tokens, finish reason {reason!r}"
            )
        record.end_s, record.outcome = at_s, Outcome.COMPLETED

    def _take_chunk(self, chunk: Mapping[str, Any], at_s: float) -> None:
        record = self._record
        spoken = False
        for choice in chunk.get("choices") or ():
            spoken = spoken or _speaks(choice)
            reason = choice.get("finish_reason")
            if reason is not None:
                record.finish_reason = str(reason)
        if spoken:
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
    """What a body that is no event stream says, in a line. kind: its media type."""
    text = body.decode("utf-8", "replace")
    if kind == "text/html" or text.lstrip()[:9].lower() in ("<!doctype", "<html>"):
        title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
        return f"a web page, {_shorten(title[1])!r}" if title else "a web page"
    try:
        return _message(json.loads(text))
    except (ValueError, RecursionError):
        return _shorten(text) or "nothing"


def _speaks(choice: Mapping[str, Any]) -> bool:
    if choice.get("text") or choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    return bool(delta) and any(delta.get(name) for name in _SPOKEN)  # type: ignore[union-attr]


def _message(body: object) -> str:
    """The message in an error's JSON: OpenAI's envelope, or what other servers use for it."""
    found = body
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return _shorten(found if isinstance(found, str) else json.dumps(found))


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if type(value) is int else None


def _shorten(text: str) -> str:
    """One line of not too many characters."""
    line = " ".join(text[: 10 * _MAX_DETAIL_CHARS].split())
    return line if len(line) <= _MAX_DETAIL_CHARS else line[: _MAX_DETAIL_CHARS - 3] + "..."


# ---- Requests over HTTP whose answers come in pieces, as they come from the network.


KEEP_ALIVE_S = 2.0
"""Unused connections are closed after so long: before the server does it, which would break a
request that is just being sent. uvicorn, under most of the servers, waits 5 s."""


class TransportError(Exception):
    """No answer, or no further one: the connection could not be made or broke."""


class HttpAnswer(NamedTuple):
    """headers: names in lower case.
    pieces: the body; raises TransportError if it breaks off.
    """

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]


class Http(Protocol):
    """Sends requests."""

    def post(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[HttpAnswer]:
        """Entered when the head of the answer is there; leaving drops the rest of the body.

        Entering raises TransportError.
        """
        ...


class AiohttpHttp:
    """Any number of connections, kept open between requests; no timeout but to connect.

    An asynchronous context manager; usable inside it.
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
            # A gateway that compresses would hold chunks back.
            headers={"accept-encoding": "identity", "user-agent": "bros-bench"},
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        await self._session.close()

    @asynccontextmanager
    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[HttpAnswer]:
        assert self._session is not None, "not entered"
        try:
            response = await self._session.post(
                url, data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TransportError(_describe(error)) from error
        try:
            names = {name.lower(): value for name, value in response.headers.items()}
            yield HttpAnswer(response.status, names, _Pieces(response))
        finally:
            response.release()


class _Pieces:
    """The body of a response; each piece is all that has come since the one before."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            piece = await self._content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TransportError(_describe(error)) from error
        if not piece:
            raise StopAsyncIteration
        return piece


def _describe(error: Exception) -> str:
    match error:
        case aiohttp.ClientConnectorError():
            return f"cannot connect to {error.host}:{error.port}: {_reason(error.os_error)}"
        case aiohttp.ServerTimeoutError() | asyncio.TimeoutError():
            return "cannot connect: timed out"
        case aiohttp.ServerDisconnectedError():
            return "the server closed the connection without an answer"
        case aiohttp.ClientPayloadError():
            return "the connection broke in the middle of the answer"
        case aiohttp.InvalidURL():
            return f"not an address: {error}"
        case OSError():
            return f"the connection broke: {_reason(error)}"
    return f"{type(error).__name__}: {error}"


def _reason(error: OSError) -> str:
    """In the system's own words; names that are not found have numbers below 0."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


logger = logging.getLogger(__name__)

IDLE_S = 300.0
"""How long a server may be silent by default: best-effort work can wait that long for its turn."""

LINGER_S = 0.005
"""How long the end of a body is waited for after [DONE], so that the connection can be reused. It
comes with it or right after; what follows an answer must not be late for it."""

_REFUSALS = frozenset({429, 503})
_EXPLAIN_S = 5.0
_EXPLAIN_BYTES = 1 << 16

Now = Callable[[], float]
"""Seconds since the start of the run."""

Render = Callable[[Planned], tuple[Sequence[int], str]]
"""The prompt of a request as token ids and as text."""


class Prepared(NamedTuple):
    """The body of a request, or why there is none."""

    body: bytes
    problem: str | None = None


class Client:
    """One server, spoken to in one wording.

    base_url: scheme, host and port, with or without `/v1`. idle_s: a server that sends nothing
    for so long has stalled and the request has failed; None waits for ever.
    """

    def __init__(
        self,
        http: Http,
        base_url: str,
        wording: Wording,
        render: Render,
        *,
        api_key: str | None = None,
        idle_s: float | None = IDLE_S,
    ) -> None:
        self._http = http
        self._url = base_url.rstrip("/").removesuffix("/v1") + wording.path
        self._wording = wording
        self._render = render
        self._idle_s = idle_s
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def prepare(self, planned: Planned) -> Prepared:
        """What can be done before the time to send has come. Raises nothing."""
        try:
            token_ids, text = self._render(planned)
            return Prepared(self._wording.body(planned, token_ids, text))
        except Exception as error:
            logger.exception("%s cannot be written", planned.name)
            return Prepared(b"", f"the request cannot be written: {_name(error)}")

    async def send(self, record: Record, prepared: Prepared, now: Now) -> float | None:
        """Send now and fill in `record` until the answer has ended, however it ends.

        Cancelled, it leaves the record open with what has come. Returns for how many seconds a
        server that refused wants to be left alone, if it says so.
        """
        if prepared.problem is not None:
            record.end_s = now()
            record.outcome, record.detail = Outcome.FAILED, prepared.problem
            return None
        record.sent_s = now()
        try:
            async with asyncio.timeout(self._idle_s) as patience:
                async with self._http.post(self._url, prepared.body, self._headers) as answer:
                    record.status = answer.status
                    return await self._receive(record, answer, now, patience)
        except Failure as failure:
            outcome, detail = failure.outcome, failure.detail
        except (TransportError, EventTooLongError) as error:
            outcome, detail = Outcome.FAILED, str(error)
        except TimeoutError:
            outcome, detail = Outcome.FAILED, f"stalled: nothing came for {self._idle_s:g} s"
        except Exception as error:
            logger.exception("%s failed in the client", record.planned.name)
            outcome, detail = Outcome.FAILED, f"the client failed: {_name(error)}"
        if record.outcome is Outcome.OPEN:  # else it had ended before the connection did
            record.end_s = now()
            record.outcome = outcome
            record.detail = detail + _progress(record)
        return None

    async def _receive(
        self, record: Record, answer: HttpAnswer, now: Now, patience: asyncio.Timeout
    ) -> float | None:
        kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        if answer.status == 200 and kind == "text/event-stream":
            await self._read(record, answer.pieces, now, patience)
            return None
        arrived_s = now()
        patience.reschedule(None)
        what = describe_body(kind, await _beginning(answer.pieces))
        record.end_s = arrived_s
        record.outcome = Outcome.REFUSED if answer.status in _REFUSALS else Outcome.FAILED
        if answer.status == 200:
            what = f"not an event stream: {what}"
        record.detail = f"{answer.status}: {what}"
        return _retry_after_s(answer.headers)

    async def _read(
        self,
        record: Record,
        pieces: AsyncIterator[bytes],
        now: Now,
        patience: asyncio.Timeout,
    ) -> None:
        events, reader = EventReader(), AnswerReader(record)
        loop_time = asyncio.get_running_loop().time
        expected = record.planned.output_tokens if self._wording.forces(record.planned) else None
        idle_s = self._idle_s
        at_s = now()
        async for piece in pieces:
            at_s = now()
            if idle_s is not None:
                patience.reschedule(loop_time() + idle_s)
            for event in events.feed(piece):
                reader.take(event, at_s)
            if reader.done:
                break
        else:
            at_s = now()
        reader.end(at_s, expected)
        if reader.done:
            with contextlib.suppress(TransportError, TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    async for _ in pieces:
                        pass


async def _beginning(pieces: AsyncIterator[bytes]) -> bytes:
    """What explains a failure; what does not come soon is not waited for."""
    body = b""
    with contextlib.suppress(TransportError, TimeoutError):
        async with asyncio.timeout(_EXPLAIN_S):
            async for piece in pieces:
                body += piece
                if len(body) >= _EXPLAIN_BYTES:
                    break
    return body[:_EXPLAIN_BYTES]


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with contextlib.suppress(KeyError, ValueError):
            return max(0.0, float(headers[name]) * unit_s)
    return None


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _progress(record: Record) -> str:
    if record.sent_s is None or not record.chunk_times_s:
        return ""
    count = len(record.chunk_times_s)
    last_s = record.chunk_times_s[-1] - record.sent_s
    return f" (after {count} chunks, the last {last_s:.3f} s after the request)"
