"""The answer to one request: its deltas, its log-probabilities, and its server-sent events."""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bros.core.errors import BrosError, EngineDeadError, OverloadedError
from bros.core.request import FinishReason, ServiceClass, TokenLogprobs
from bros.server.errors import ApiError, GenerationFailedError, describe
from bros.server.http import CancelOnDisconnect, ChunkedBody
from bros.server.openai.schema import (
    CompletionLogprobs,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from bros.server.state import StopSignal
from bros.text.generation import DeltaSink, Generation, TextDelta
from bros.text.tokenizer import Tokenizer


class Observer(Protocol):
    """Observes the progress of a request; see RequestObserver."""

    def on_delta(self, delta: TextDelta) -> None: ...

    def on_error(self, message: str) -> None:
        """The engine died."""
        ...

    def close(self) -> None:
        """The request has ended; unfinished choices were aborted."""
        ...


Observe = Callable[[Sequence[ServiceClass]], Observer]


@dataclass(slots=True)
class FinishedChoice:
    """One complete choice.

    logprobs: of the tokens of the text, without the stop token.
    """

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None


class Answer:
    """The deltas of a request. Choice c of prompt p has index p * n + c.

    Use either `deltas` or `collect`, and always `aclose`.

    best_effort: whether any choice is served as best-effort, as requested or relegated.
    """

    def __init__(self, generation: Generation, observe: Observe) -> None:
        """observe: creates the observer, given the service class of each choice."""
        self._generation = generation
        self.best_effort = ServiceClass.BE in generation.service_classes
        self._observer = observe(generation.service_classes)
        self._failure: BrosError | None = None
        self._closed = False

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = self._generation.prompt_tokens
        completion = self._generation.num_output_tokens
        cached = self._generation.cached_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    async def deltas(self) -> Sequence[TextDelta]:
        """Wait for output; returns one delta for each choice with output since the last call.
        Empty after the end.

        Raises OverloadedError if a choice was dropped for lack of capacity, GenerationFailedError
        if one ended incomplete for another reason, and EngineDeadError if the engine dies.
        """
        if self._failure is not None:
            raise self._failure
        try:
            found = await self._generation.ready()
        except EngineDeadError as error:
            self._observer.on_error(str(error))
            raise
        for position, delta in enumerate(found):
            self._observer.on_delta(delta)
            if delta.finish_reason is not None and not delta.finish_reason.complete:
                self._failure = _failure_of(delta)
                if not position:
                    raise self._failure
                return found[:position]  # the next call raises
        return found

    async def forward(self, sink: DeltaSink) -> None:
        """See Generation.forward. Call `deltas` for what follows."""
        if self._failure is None:
            await self._generation.forward(_ObservedSink(sink, self._observer))

    async def collect(self) -> list[FinishedChoice]:
        """Wait for the end; returns all choices by index. Raises what `deltas` raises."""
        choices = [FinishedChoice(i) for i in range(len(self._generation.service_classes))]
        while deltas := await self.deltas():
            for delta in deltas:
                choice = choices[delta.index]
                choice.text += delta.text
                choice.logprobs += visible_logprobs(delta)
                if delta.finish_reason is not None:
                    choice.finish_reason = delta.finish_reason.value
                    choice.stop_reason = delta.stop_reason
        return choices

    async def aclose(self) -> None:
        """Abort unfinished choices. Continues in the background if the caller is cancelled."""
        if self._closed:
            return
        self._closed = True
        self._observer.close()
        await self._generation.aclose()


class _ObservedSink:
    """A DeltaSink whose deltas an observer sees first."""

    def __init__(self, sink: DeltaSink, observer: Observer) -> None:
        self.ready = sink.ready
        self._put = sink.put
        self._on_delta = observer.on_delta

    def put(self, deltas: Sequence[TextDelta]) -> None:
        for delta in deltas:
            self._on_delta(delta)
        self._put(deltas)


def _failure_of(delta: TextDelta) -> BrosError:
    message = delta.error or "The engine ended the request before it was complete."
    if delta.retry_after_s is not None:
        return OverloadedError(message, delta.retry_after_s)
    return GenerationFailedError(message)


def visible_logprobs(delta: TextDelta) -> tuple[TokenLogprobs, ...]:
    """The logprobs of a delta without the stop token, which is not part of the text."""
    if delta.finish_reason is FinishReason.STOP and not isinstance(delta.stop_reason, str):
        return delta.logprobs[:-1]
    return delta.logprobs


# ---- Log-probabilities in OpenAI's two formats, for chat and for text completions.


_LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have, as in OpenAI's API."""


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> list[TokenLogprob]:
    """The `content` list of chat logprobs."""
    return [
        TokenLogprob(
            token=tokenizer.token_text(entry.token_id),
            logprob=_finite(entry.logprob),
            bytes=list(tokenizer.token_bytes(entry.token_id)),
            top_logprobs=[
                TopLogprob(
                    token=tokenizer.token_text(token_id),
                    logprob=_finite(logprob),
                    bytes=list(tokenizer.token_bytes(token_id)),
                )
                for token_id, logprob in entry.top
            ],
        )
        for entry in entries
    ]


class CompletionLogprobsWriter:
    """The four parallel lists of text completions. One writer per choice, called in token order.

    text_offset: characters before a token. Tokens within one character have the same offset.
    """

    def __init__(self, tokenizer: Tokenizer, with_top: bool) -> None:
        self._tokenizer = tokenizer
        self._with_top = with_top
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, entries: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """The lists for the next tokens."""
        lists = CompletionLogprobs(
            tokens=[],
            token_logprobs=[],
            top_logprobs=[] if self._with_top else None,
            text_offset=[],
        )
        for entry in entries:
            lists.tokens.append(self._name(entry.token_id))
            lists.token_logprobs.append(_finite(entry.logprob))
            lists.text_offset.append(self._offset)
            if lists.top_logprobs is not None:
                lists.top_logprobs.append(
                    {self._name(token_id): _finite(logprob) for token_id, logprob in entry.top}
                )
            self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(entry.token_id)))
        return lists

    def _name(self, token_id: int) -> str:
        """The token's text; parts of characters as `bytes:\\xe2\\x80`, so that names differ."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


# ---- Stream chunks as bytes. This runs once per token, so constant parts are built only once.


# Non-ASCII stays escaped: some clients split lines at U+0085 and U+2028, which JSON allows.
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_quoted = json.encoder.encode_basestring_ascii  # the same for a string, but faster

DONE = b"data: [DONE]\n\n"


class ChunkFrame:
    """The parts of a chunk that are the same for the whole stream."""

    def __init__(self, kind: str, header: Mapping[str, object], *, include_usage: bool) -> None:
        """kind: the chunk's `object`. header: the fields shared with complete responses."""
        fields = {"id": header["id"], "object": kind, **header}
        self._head = f'data: {_to_json(fields)[:-1]},"choices":['
        self._tail = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self.include_usage = include_usage

    def chunk(self, choice: str) -> str:
        """One event with one choice, given as JSON."""
        return f"{self._head}{choice}{self._tail}"

    def around_text(self, index: int, before: str, after: str) -> tuple[str, str]:
        """The parts of a chunk before and after its quoted text, for chunks with text only.

        before, after: the parts within the choice object.
        """
        return f'{self._head}{{"index":{index},{before}', f"{after}}}{self._tail}"

    def usage(self, usage: Usage) -> str:
        """The event that ends a stream with include_usage."""
        return f'{self._head}],"usage":{usage.model_dump_json()}}}\n\n'


class ChunkWriter(Protocol):
    """Writes the deltas of one request as events."""

    def write(self, delta: TextDelta) -> bytes:
        """The events for a delta; empty if it has nothing to show."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The events after the last delta, without [DONE]."""
        ...


class ChatChunkWriter:
    """chat.completion.chunk: first the role, then text, then the finish reason by itself."""

    def __init__(self, frame: ChunkFrame, tokenizer: Tokenizer, with_logprobs: bool) -> None:
        self._frame = frame
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._around: dict[int, tuple[str, str]] = {}

    def write(self, delta: TextDelta) -> bytes:
        frame, index = self._frame, delta.index
        events = ""
        around = self._around.get(index)
        if around is not None:
            if delta.finish_reason is None and not self._with_logprobs:
                if not delta.text:
                    return b""
                return (around[0] + _quoted(delta.text) + around[1]).encode("ascii")
        else:
            after = '},"logprobs":null,"finish_reason":null'
            self._around[index] = frame.around_text(index, '"delta":{"content":', after)
            events = frame.chunk(
                f'{{"index":{index},"delta":{{"role":"assistant","content":"","refusal":null}},'
                '"logprobs":null,"finish_reason":null}'
            )
        logprobs = self._logprobs(delta) if self._with_logprobs else "null"
        if delta.text or logprobs != "null":
            events += frame.chunk(
                f'{{"index":{index},"delta":{{"content":{_to_json(delta.text)}}},'
                f'"logprobs":{logprobs},"finish_reason":null}}'
            )
        if delta.finish_reason is not None:
            events += frame.chunk(
                f'{{"index":{index},"delta":{{}},"logprobs":null,'
                f'"finish_reason":"{delta.finish_reason.value}",'
                f'"stop_reason":{_to_json(delta.stop_reason)}}}'
            )
        return events.encode("ascii")

    def end(self, usage: Usage) -> bytes:
        return self._frame.usage(usage).encode() if self._frame.include_usage else b""

    def _logprobs(self, delta: TextDelta) -> str:
        entries = chat_logprobs(self._tokenizer, visible_logprobs(delta))
        if not entries:
            return "null"
        return _to_json({"content": [entry.model_dump() for entry in entries], "refusal": None})


class CompletionChunkWriter:
    """text_completion chunks.

    logprobs: alternatives per token; None for no logprobs.
    echoes: index of a choice -> the echoed prompt, which comes before its text.
    """

    def __init__(
        self,
        frame: ChunkFrame,
        tokenizer: Tokenizer,
        logprobs: int | None,
        echoes: Mapping[int, str],
    ) -> None:
        self._frame = frame
        self._tokenizer = tokenizer
        self._top = logprobs
        self._echoes = echoes
        self._around: dict[int, tuple[str, str]] = {}
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    def write(self, delta: TextDelta) -> bytes:
        index = delta.index
        text = delta.text
        around = self._around.get(index)
        if around is not None:
            if delta.finish_reason is None and self._top is None:
                if not text:
                    return b""
                return (around[0] + _quoted(text) + around[1]).encode("ascii")
        else:
            after = ',"logprobs":null,"finish_reason":null'
            self._around[index] = self._frame.around_text(index, '"text":', after)
            text = self._echoes.get(index, "") + text
        logprobs = self._logprobs(delta)
        reason, stop = "null", ""
        if delta.finish_reason is not None:
            reason = f'"{delta.finish_reason.value}"'
            stop = f',"stop_reason":{_to_json(delta.stop_reason)}'
        elif not text and logprobs == "null":
            return b""
        choice = (
            f'{{"index":{index},"text":{_to_json(text)},"logprobs":{logprobs},'
            f'"finish_reason":{reason}{stop}}}'
        )
        return self._frame.chunk(choice).encode("ascii")

    def end(self, usage: Usage) -> bytes:
        return self._frame.usage(usage).encode() if self._frame.include_usage else b""

    def _logprobs(self, delta: TextDelta) -> str:
        if self._top is None:
            return "null"
        entries = visible_logprobs(delta)
        if not entries:
            return "null"
        writer = self._writers.get(delta.index)
        if writer is None:
            writer = CompletionLogprobsWriter(self._tokenizer, self._top > 0)
            self._writers[delta.index] = writer
        return _to_json(writer.write(entries).model_dump())


# ---- Answers as server-sent events.


logger = logging.getLogger(__name__)

DIRECT_SEND = "bros.send"
"""Key in the ASGI scope of the `send` that bypasses all middleware."""

_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx must forward every chunk at once
}


class EventStream(Response):
    """A response of server-sent events.

    The status line is sent with the first event, so an error before it has its own status. A later
    error is sent as an event with the error envelope, without [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, stopping: StopSignal) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._stopping = stopping
        self._begun = False

    async def send_all(self) -> None:
        """Call `send_events` for all events but those of `ending`."""
        raise NotImplementedError

    def ending(self) -> bytes:
        """The last events, before [DONE]."""
        return b""

    async def close(self) -> None:
        """Release the source of the events. Always called, after `send_all` and before the last
        events are sent."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._send_body = send, scope.get(DIRECT_SEND, send)
        failure: ApiError | None = None
        try:
            async with CancelOnDisconnect(receive, self._stopping):
                await self.send_all()
        except (ClientDisconnect, OSError):
            raise ClientDisconnect() from None
        except Exception as error:
            if not isinstance(error, BrosError):
                logger.exception("a stream failed")
            failure = describe(error)
        finally:
            await self.close()
        if failure is None:
            await self.send_events(self.ending() + DONE, more=False)
        elif self._begun:
            await self.send_events(failure.to_event(), more=False)
        else:
            await failure.to_response()(scope, receive, send)

    async def send_events(self, events: bytes, *, more: bool = True) -> None:
        """Send events, and the status line before the first ones. more: False for the last."""
        if not self._begun:
            self._begun = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
        await self._send_body({"type": "http.response.body", "body": events, "more_body": more})


class AnswerStream(EventStream):
    """The deltas of an answer.

    A DeltaSink: after the first event, deltas are written as soon as they arrive, as long as the
    client reads fast enough. Otherwise they wait in their slots until `send` returns.
    """

    def __init__(self, answer: Answer, writer: ChunkWriter, stopping: StopSignal) -> None:
        super().__init__(stopping)
        self._answer = answer
        self._writer = writer
        self._body: ChunkedBody | None = None

    async def send_all(self) -> None:
        self._body = ChunkedBody.behind(self._send_body)
        while deltas := await self._answer.deltas():
            if events := self._events(deltas):
                await self.send_events(events)
            if self._begun and self._body is not None:
                await self._answer.forward(self)

    def ready(self) -> bool:
        assert self._body is not None
        return self._body.ready()

    def put(self, deltas: Sequence[TextDelta]) -> None:
        assert self._body is not None
        if events := self._events(deltas):
            self._body.write(events)

    def _events(self, deltas: Sequence[TextDelta]) -> bytes:
        """The events of all deltas, as one chunk of the body."""
        write = self._writer.write
        return write(deltas[0]) if len(deltas) == 1 else b"".join(map(write, deltas))

    def ending(self) -> bytes:
        return self._writer.end(self._answer.usage())

    async def close(self) -> None:
        await self._answer.aclose()
