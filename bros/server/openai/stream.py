"""The answer to one request: its deltas, its log-probabilities, and its server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bros.core.errors import BrosError, EngineDeadError, InvalidRequestError
from bros.core.request import (
    FinishReason,
    PackedLogprobs,
    PromptLogprobs,
    ServiceClass,
    TokenLogprobs,
)
from bros.server.errors import ApiError, GenerationFailedError, describe, rename_fields
from bros.server.http import CancelOnDisconnect, ChunkedBody, chunked, json_pieces, spliced
from bros.server.openai.prompt_logprobs import (
    LOWEST_LOGPROB,
    NUMBER_CHARS,
    CharacterCounter,
    Echo,
    PromptLogprobsWriter,
    num_numbers,
    token_offsets,
)
from bros.server.openai.schema import (
    CompletionLogprobs,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from bros.server.replies import PIECE_BYTES, send_large
from bros.server.state import ServerState, StopSignal
from bros.text.answers import (
    AnswerPart,
    CallArguments,
    CallBegin,
    ParsedAnswer,
    ReasoningPart,
    TextPart,
)
from bros.text.generation import DeltaSink, Generation, HeldOutput, TextDelta, failure_of
from bros.text.tokenizer import Tokenizer

T = TypeVar("T")


class Observer(Protocol):
    """Observes the progress of a request; see RequestObserver."""

    def on_delta(self, delta: TextDelta) -> None: ...

    def on_text(self, index: int, text: str, num_tokens: int) -> None:
        """A delta of an unfinished choice: `num_tokens` new tokens, one or more."""
        ...

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

    answer: its parts; empty if it is not parsed.
    logprobs: of the tokens of the text, without the stop token.
    prompt_logprobs: of the prompt.
    """

    index: int
    text: str = ""
    answer: ParsedAnswer = field(default_factory=ParsedAnswer)
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None


class Answer:
    """The deltas of a request. Choice c of prompt p has index p * n + c.

    Use either `deltas` or `collect`, and always `aclose`.

    best_effort: whether any choice is served as best-effort, as requested or relegated.
    observer: sees all deltas. Of forwarded ones the sink has to inform it.
    """

    def __init__(
        self,
        generation: Generation,
        observe: Observe,
        field_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """observe: creates the observer, given the service class of each choice.
        field_names: as in Call; errors name them."""
        self._generation = generation
        self._field_names = field_names
        self.best_effort = ServiceClass.BE in generation.service_classes
        self.observer = observe(generation.service_classes)
        self._failure: BrosError | None = None
        self._closed = False

    @property
    def held_output(self) -> HeldOutput:
        """Counts what is held of its log-probabilities until `aclose`."""
        return self._generation.output

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = self._generation.prompt_tokens
        completion = self._generation.num_output_tokens
        cached = self._generation.cached_tokens
        details = None
        if self._generation.is_parsed:
            details = CompletionTokensDetails(reasoning_tokens=self._generation.reasoning_tokens)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=details,
        )

    async def deltas(self) -> Sequence[TextDelta]:
        """Wait for output; returns one delta for each choice with output since the last call.
        Empty after the end.

        Raises OverloadedError if a choice was dropped for lack of capacity, InvalidRequestError if
        one ended because of what the request asks for, GenerationFailedError if one ended
        incomplete for another reason, and EngineDeadError if the engine dies.
        """
        if self._failure is not None:
            raise self._failure
        try:
            found = await self._generation.ready()
        except EngineDeadError as error:
            self.observer.on_error(str(error))
            raise
        for position, delta in enumerate(found):
            self.observer.on_delta(delta)
            if delta.finish_reason is not None and not delta.finish_reason.complete:
                self._failure = self._failure_of(delta)
                if not position:
                    raise self._failure
                return found[:position]  # the next call raises
        return found

    def _failure_of(self, delta: TextDelta) -> BrosError:
        failure = failure_of(delta, GenerationFailedError)
        if isinstance(failure, InvalidRequestError):
            rename_fields(failure, self._field_names)
        return failure

    async def forward(self, sink: DeltaSink) -> None:
        """See Generation.forward. Call `deltas` for what follows."""
        if self._failure is None:
            await self._generation.forward(sink)

    async def collect(self) -> list[FinishedChoice]:
        """Wait for the end; returns all choices by index. Raises what `deltas` raises."""
        choices = [FinishedChoice(i) for i in range(len(self._generation.service_classes))]
        sink = _CollectingSink(self.observer, choices, self._add)
        while deltas := await self.deltas():
            for delta in deltas:
                self._add(choices[delta.index], delta)
            await self.forward(sink)
        return choices

    def _add(self, choice: FinishedChoice, delta: TextDelta) -> None:
        """Raises TenantLimitError."""
        choice.text += delta.text
        choice.answer.add(delta.parts)
        self._keep(choice, visible_logprobs(delta))
        choice.prompt_logprobs += delta.prompt_logprobs
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason.value
            choice.stop_reason = delta.stop_reason

    def _keep(self, choice: FinishedChoice, logprobs: Sequence[TokenLogprobs]) -> None:
        """Raises TenantLimitError."""
        if logprobs:
            before = choice.logprobs.num_bytes
            choice.logprobs.extend(logprobs)
            self.held_output.add(choice.logprobs.num_bytes - before)

    async def aclose(self) -> None:
        """Abort unfinished choices. Continues in the background if the caller is cancelled."""
        if self._closed:
            return
        self._closed = True
        self.observer.close()
        await self._generation.aclose()


class _CollectingSink:
    """A DeltaSink that adds to choices, without a task switch and a delta per token."""

    def __init__(
        self,
        observer: Observer,
        choices: Sequence[FinishedChoice],
        add: Callable[[FinishedChoice, TextDelta], None],
    ) -> None:
        self._observer = observer
        self._choices = choices
        self._add = add

    def ready(self) -> bool:
        return True

    def put_text(self, index: int, text: str, num_tokens: int) -> None:
        self._observer.on_text(index, text, num_tokens)
        self._choices[index].text += text

    def put(self, delta: TextDelta) -> None:
        self._observer.on_delta(delta)
        self._add(self._choices[delta.index], delta)


def finish_reason(reason: str, *, called: bool) -> str:
    """The finish_reason of a chat. called: the answer has tool calls."""
    return "tool_calls" if called and reason == FinishReason.STOP else reason


def visible_logprobs(delta: TextDelta) -> Sequence[TokenLogprobs]:
    """The logprobs of a delta without the stop token, which is not part of the text."""
    if delta.finish_reason is FinishReason.STOP and not isinstance(delta.stop_reason, str):
        return delta.logprobs[:-1]
    return delta.logprobs


# ---- Log-probabilities in OpenAI's two formats, for chat and for text completions.


class ChatLogprobsWriter:
    """Writes the elements of the `content` list of chat logprobs, each as JSON in ASCII. Building
    them as objects first takes nine times as long and holds the interpreter."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._around: dict[int, tuple[str, str]] = {}
        """Token -> what surrounds its log-probability."""

    def write(self, entries: Iterable[TokenLogprobs]) -> list[str]:
        return [self._written(entry) for entry in entries]

    def _written(self, entry: TokenLogprobs) -> str:
        top = ",".join([f"{self._of(token_id, logprob)}}}" for token_id, logprob in entry.top])
        return f'{self._of(entry.token_id, entry.logprob)},"top_logprobs":[{top}]}}'

    def _of(self, token_id: int, logprob: float) -> str:
        """An object, but for its end."""
        around = self._around.get(token_id)
        if around is None:
            text = _quoted(self._tokenizer.token_text(token_id))
            codes = ",".join(map(str, self._tokenizer.token_bytes(token_id)))
            around = f'{{"token":{text},"logprob":', f',"bytes":[{codes}]'
            self._around[token_id] = around
        return f"{around[0]}{_finite(logprob)!r}{around[1]}"


class CompletionLogprobsWriter:
    """The four parallel lists of text completions. One writer per choice, called in token order.

    text_offset: characters before a token. Tokens within one character have the same offset.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, echo: Echo | None = None) -> None:
        """top: alternatives per token; 0: no list of them. echo: the lists begin with its tokens,
        of which the first has null for its log-probabilities."""
        self._tokenizer = tokenizer
        self._top = top
        self._echo = echo
        self._offsets = [] if echo is None else token_offsets(tokenizer, echo)
        self._offset = 0 if echo is None else len(echo.text)
        self._echo_begun = False
        self._counter = CharacterCounter()

    def write(
        self, entries: Iterable[TokenLogprobs], prompt: Iterable[PromptLogprobs] = ()
    ) -> CompletionLogprobs:
        """The lists for the next tokens. prompt: of the next tokens of the echo, before them."""
        lists = CompletionLogprobs(
            tokens=[],
            token_logprobs=[],
            top_logprobs=[] if self._top else None,
            text_offset=[],
        )
        if self._echo is not None:
            self._write_echo(lists, self._echo, prompt)
        for entry in entries:
            before, count = self._counter.push(self._tokenizer.token_bytes(entry.token_id))
            self._add(lists, entry.token_id, entry, self._offset + before)
            self._offset += count
        return lists

    def _write_echo(
        self, lists: CompletionLogprobs, echo: Echo, prompt: Iterable[PromptLogprobs]
    ) -> None:
        if not self._echo_begun:
            self._echo_begun = True
            self._add(lists, echo.token_ids[0], None, self._offsets[0])
        for piece in prompt:
            for position, entry in enumerate(piece, start=piece.first):
                self._add(lists, entry.token_id, entry, self._offsets[position])

    def _add(
        self, lists: CompletionLogprobs, token_id: int, entry: TokenLogprobs | None, offset: int
    ) -> None:
        """entry: None for the first token of a prompt."""
        lists.tokens.append(self._name(token_id))
        lists.token_logprobs.append(None if entry is None else _finite(entry.logprob))
        lists.text_offset.append(offset)
        if lists.top_logprobs is not None:
            best = None
            if entry is not None:
                best = {self._name(i): _finite(logprob) for i, logprob in entry.top[: self._top]}
            lists.top_logprobs.append(best)

    def _name(self, token_id: int) -> str:
        """The token's text; parts of characters as `bytes:\\xe2\\x80`, so that names differ."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(LOWEST_LOGPROB, logprob)  # of NaN, too


# ---- Stream chunks as bytes. This runs once per token, so constant parts are built only once.


# Non-ASCII stays escaped: some clients split lines at U+0085 and U+2028, which JSON allows.
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_quoted = json.encoder.encode_basestring_ascii  # the same for a string, but faster


def ascii_json(value: object) -> bytes:
    """As one of the pieces of `json_pieces` for events."""
    return _to_json(value).encode("ascii")


DONE = b"data: [DONE]\n\n"


class ChunkFrame:
    """The parts of a chunk that are the same for the whole stream."""

    def __init__(self, kind: str, header: Mapping[str, object], *, include_usage: bool) -> None:
        """kind: the chunk's `object`. header: the fields shared with complete responses."""
        self.header = header
        fields = {"id": header["id"], "object": kind, **header}
        self._head = f'data: {_to_json(fields)[:-1]},"choices":['
        self._tail = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self.include_usage = include_usage

    def chunk(self, choice: str) -> str:
        """One event with one choice, given as JSON."""
        return f"{self._head}{choice}{self._tail}"

    def usage(self, usage: Usage) -> str:
        """The event that ends a stream with include_usage."""
        return f'{self._head}],"usage":{usage.model_dump_json()}}}\n\n'


class DeltaWriter(Protocol):
    """Writes the deltas of one request as events."""

    def write(self, delta: TextDelta) -> bytes:
        """The events for a delta; empty if it has nothing to show."""
        ...

    def write_text(self, index: int, text: str) -> bytes:
        """`write` of a delta that has nothing but text."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The events after the last delta."""
        ...


class ChunkWriter(ABC):
    """A DeltaWriter of chunks."""

    def __init__(
        self, frame: ChunkFrame, tokenizer: Tokenizer, prompt_top: int | None = None
    ) -> None:
        """prompt_top: alternatives per token of the prompt in `prompt_logprobs`; None: none asked
        for."""
        self._frame = frame
        self._tokenizer = tokenizer
        self._prompt_top = prompt_top
        self._prompt_writers: dict[int, PromptLogprobsWriter] = {}
        self._around: dict[int, list[str]] = {}
        """Index of a choice that has begun -> what surrounds the quoted text in its chunks."""

    def write(self, delta: TextDelta) -> bytes:
        """The events for a delta; empty if it has nothing to show."""
        index = delta.index
        begins = index not in self._around
        if begins and self._prompt_top is not None:
            self._prompt_writers[index] = PromptLogprobsWriter(self._tokenizer, self._prompt_top)
        if begins:
            # The mark cannot be in a chunk, because JSON escapes it.
            self._around[index] = self._frame.chunk(self._choice(index, "\0", "null")).split("\0")
        elif delta.finish_reason is None and not (
            delta.logprobs or delta.parts or delta.prompt_logprobs
        ):
            return self.write_text(index, delta.text)
        return self._events(delta, begins).encode("ascii")

    def write_text(self, index: int, text: str) -> bytes:
        """`write` of a delta that has nothing but text."""
        around = self._around.get(index)
        if around is None:
            return self.write(TextDelta(index, text))
        return f"{around[0]}{_quoted(text)}{around[1]}".encode("ascii") if text else b""

    def end(self, usage: Usage) -> bytes:
        """The events after the last delta, without [DONE]."""
        return self._frame.usage(usage).encode() if self._frame.include_usage else b""

    def _prompt_events(self, delta: TextDelta, begins: bool) -> str:
        """The event with `prompt_logprobs` of a delta; the lists of all events of a choice, joined,
        are that of the whole response."""
        writer = self._prompt_writers.get(delta.index)
        if writer is None or not (begins or delta.prompt_logprobs):
            return ""
        elements = [
            {name: entry.model_dump() for name, entry in element.items()} if element else None
            for element in writer.write(delta.prompt_logprobs)
        ]
        head = self._choice(delta.index, '""', "null")[:-1]
        return self._frame.chunk(f'{head},"prompt_logprobs":{_to_json(elements)}}}')

    @abstractmethod
    def _choice(self, index: int, text: str, logprobs: str) -> str:
        """The JSON of an unfinished choice.

        text, logprobs: JSON.
        """

    @abstractmethod
    def _events(self, delta: TextDelta, begins: bool) -> str:
        """The events for any delta. begins: it is the first one of its choice."""


class ChatChunkWriter(ChunkWriter):
    """chat.completion.chunk: first the role, then what the answer has, then the finish reason by
    itself. A call begins with its id and name; the arguments follow in pieces.

    With the role the content is "", or null if the answer may have calls and does not begin with
    text: the AI SDK takes any content that is not null as the beginning of a text.

    new_id: makes the id of a call.
    may_call: the answer may have calls.
    """

    def __init__(
        self,
        frame: ChunkFrame,
        tokenizer: Tokenizer,
        new_id: Callable[[], str],
        prompt_top: int | None = None,
        *,
        may_call: bool = False,
    ) -> None:
        super().__init__(frame, tokenizer, prompt_top)
        self._new_id = new_id
        self._may_call = may_call
        self._logprobs_writer = ChatLogprobsWriter(tokenizer)
        self._callers: set[int] = set()
        """Choices with calls."""
        self._textless: set[int] = set()
        """Choices of which the content is null so far."""

    def _choice(self, index: int, text: str, logprobs: str) -> str:
        return self._delta(index, f'"content":{text}', logprobs)

    def _delta(self, index: int, fields: str, logprobs: str) -> str:
        return (
            f'{{"index":{index},"delta":{{{fields}}},"logprobs":{logprobs},"finish_reason":null}}'
        )

    def _events(self, delta: TextDelta, begins: bool) -> str:
        index, events = delta.index, ""
        no_text = self._may_call and not delta.text
        if begins:
            if no_text:
                self._textless.add(index)
            content = "null" if no_text else '""'
            events = self._frame.chunk(
                f'{{"index":{index},"delta":{{"role":"assistant","content":{content},'
                '"refusal":null},"logprobs":null,"finish_reason":null}'
            )
        events += self._prompt_events(delta, begins)
        logprobs = self._logprobs(delta)
        shown = [fields for part in delta.parts if (fields := self._fields(index, part))]
        if not shown and (delta.text or logprobs != "null"):
            shown = ['"content":null' if no_text else f'"content":{_quoted(delta.text)}']
        if delta.text or index in self._callers:
            self._textless.discard(index)
        for fields in shown:
            events += self._frame.chunk(self._delta(index, fields, logprobs))
            logprobs = "null"
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason.value, called=index in self._callers)
            rest = '"content":""' if index in self._textless else ""  # an answer without anything
            events += self._frame.chunk(
                f'{{"index":{index},"delta":{{{rest}}},"logprobs":null,'
                f'"finish_reason":"{reason}",'
                f'"stop_reason":{_to_json(delta.stop_reason)}}}'
            )
        return events

    def _fields(self, index: int, part: AnswerPart) -> str:
        """The JSON of a part within a delta; empty if it is not shown."""
        match part:
            case TextPart(text):
                return f'"content":{_quoted(text)}'
            case ReasoningPart(text):
                quoted = _quoted(text)
                return f'"reasoning_content":{quoted},"reasoning":{quoted}'
            case CallBegin(call, name):
                self._callers.add(index)
                return (
                    f'"tool_calls":[{{"index":{call},"id":"{self._new_id()}","type":"function",'
                    f'"function":{{"name":{_quoted(name)},"arguments":""}}}}]'
                )
            case CallArguments(call, text):
                return (
                    f'"tool_calls":[{{"index":{call},"function":{{"arguments":{_quoted(text)}}}}}]'
                )
        return ""

    def _logprobs(self, delta: TextDelta) -> str:
        entries = self._logprobs_writer.write(visible_logprobs(delta))
        return f'{{"content":[{",".join(entries)}],"refusal":null}}' if entries else "null"


class CompletionChunkWriter(ChunkWriter):
    """text_completion chunks.

    top: alternatives per token of logprobs; None: no logprobs.
    echoes: index of a choice -> the echoed prompt, which comes before its text.
    """

    def __init__(
        self,
        frame: ChunkFrame,
        tokenizer: Tokenizer,
        top: int | None,
        echoes: Mapping[int, Echo],
        prompt_top: int | None = None,
    ) -> None:
        super().__init__(frame, tokenizer, prompt_top)
        self._top = top
        self._echoes = echoes
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    def _choice(self, index: int, text: str, logprobs: str, ending: str = "null") -> str:
        return f'{{"index":{index},"text":{text},"logprobs":{logprobs},"finish_reason":{ending}}}'

    def _events(self, delta: TextDelta, begins: bool) -> str:
        index, text, logprobs, ending = delta.index, delta.text, self._logprobs(delta), "null"
        prompt_events = self._prompt_events(delta, begins)
        if begins and index in self._echoes:
            text = self._echoes[index].text + text
        if delta.finish_reason is not None:
            stop_reason = _to_json(delta.stop_reason)
            ending = f'"{delta.finish_reason.value}","stop_reason":{stop_reason}'
        elif not text and logprobs == "null":
            return prompt_events
        chunk = self._frame.chunk(self._choice(index, _quoted(text), logprobs, ending))
        return prompt_events + chunk

    def _logprobs(self, delta: TextDelta) -> str:
        if self._top is None:
            return "null"
        writer = self._writers.get(delta.index)
        if writer is None:
            echo = self._echoes.get(delta.index)
            writer = CompletionLogprobsWriter(self._tokenizer, self._top, echo)
            self._writers[delta.index] = writer
        lists = writer.write(visible_logprobs(delta), delta.prompt_logprobs)
        if not lists.tokens:
            return "null"
        return b"".join(json_pieces(dict(lists), ascii_json)).decode("ascii")


# ---- Answers as server-sent events.


logger = logging.getLogger(__name__)

DIRECT_SEND = "bros.send"
"""Key in the ASGI scope of the `send` that bypasses all middleware."""

_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx must forward every chunk at once
}


_HEARTBEAT = b": waiting\n\n"
"""A comment, which clients skip."""


class EventStream(Response, ABC):
    """A response of server-sent events.

    The status line is sent with the first event or heartbeat, so an error before it has its own
    status. A later error is sent as an event with the error envelope, without [DONE].

    Heartbeats are sent while the stream waits and nothing else is sent, because proxies close
    connections that are silent: a best-effort request may wait for minutes for its first token.
    """

    media_type = "text/event-stream"
    done = DONE
    """What follows after the last event."""

    def __init__(self, stopping: StopSignal, heartbeat_s: float) -> None:
        """heartbeat_s: most seconds of silence while the stream waits."""
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._stopping = stopping
        self._heartbeat_s = heartbeat_s
        self._heartbeat: asyncio.Future[None] | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._waits = False
        self._is_silent = True
        self._body: ChunkedBody | None = None
        self._begun = False

    @abstractmethod
    async def send_all(self) -> None:
        """Call `send_events` for all events but those of `ending`. What these are made of is
        awaited by `with_heartbeats`."""

    async def with_heartbeats(self, source: Awaitable[T]) -> T:
        """The result of `source`. Heartbeats are sent until it is there; one that a slow client has
        not taken yet is waited for, so that it comes before the next event."""
        self._waits = True
        try:
            found = await source
            self._waits = False
            if self._heartbeat is not None:
                await self._heartbeat
        except BaseException:
            self._waits = False
            if self._heartbeat is not None:
                self._heartbeat.cancel()
            raise
        return found

    def _look_for_silence(self) -> None:
        """Send a heartbeat if nothing was sent since the last look; not within an event."""
        self._begin_heartbeats()
        is_silent = self._is_silent and (self._body is None or not self._body.wrote)
        self._is_silent = True
        if self._body is not None:
            self._body.wrote = False
        is_free = self._heartbeat is None or self._heartbeat.done()
        if self._waits and is_silent and is_free:
            self._heartbeat = asyncio.ensure_future(self.send_events(_HEARTBEAT))
            self._heartbeat.add_done_callback(_retrieve)

    def _begin_heartbeats(self) -> None:
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(self._heartbeat_s / 2, self._look_for_silence)

    def ending(self) -> bytes:
        """The last events, before `done`."""
        return b""

    def failed(self, failure: ApiError) -> bytes:
        """The events of a failure after others have been sent."""
        return failure.to_event()

    async def send_failed(self, failure: ApiError) -> None:
        """Send the events of a failure, and the end."""
        await self.send_events(self.failed(failure), more=False)

    def refused(self, failure: ApiError) -> Response:
        """The response of a failure before anything was sent."""
        return failure.to_response()

    @abstractmethod
    async def close(self) -> None:
        """Release the source of the events. Always called, after `send_all` and before the last
        events are sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._send_body = send, scope.get(DIRECT_SEND, send)
        self._scope = scope
        failure: ApiError | None = None
        try:
            async with CancelOnDisconnect(receive, self._stopping):
                self._begin_heartbeats()
                await self.send_all()
        except (ClientDisconnect, OSError):
            raise ClientDisconnect() from None
        except Exception as error:
            if not isinstance(error, BrosError):
                logger.exception("a stream failed")
            failure = describe(error)
        finally:
            if self._next_look is not None:
                self._next_look.cancel()
            await self.close()
        if failure is None:
            await self.send_events(self.ending() + self.done, more=False)
        elif self._begun:
            await self.send_failed(failure)
        else:
            await self.refused(failure)(scope, receive, send)

    async def send_pieces(self, state: ServerState, tenant: str, events: Iterator[bytes]) -> None:
        """Send large events. They are made on a thread, each chunk when the client has read those
        before."""
        chunks = chunked(lambda: events)
        while chunk := await state.threads.write(tenant, partial(next, chunks, b"")):
            await self.send_events(chunk)

    async def send_events(self, events: bytes, *, more: bool = True) -> None:
        """Send events, and the status line before the first ones. more: False for the last."""
        self._is_silent = False
        if not self._begun:
            self._begun = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
        if len(events) <= PIECE_BYTES:
            message = {"type": "http.response.body", "body": events, "more_body": more}
            await self._send_body(message)
        else:
            accounts = self._scope["app"].state.server.accounts
            await send_large(accounts, self._scope, self._send_body, events, more=more)


def _retrieve(heartbeat: asyncio.Future[None]) -> None:
    """A client that has left is noticed otherwise."""
    if not heartbeat.cancelled():
        heartbeat.exception()


class _BodySink:
    """A DeltaSink that writes events to the connection."""

    def __init__(
        self,
        observer: Observer,
        writer: DeltaWriter,
        body: ChunkedBody,
        may_write: Callable[[], bool],
    ) -> None:
        """may_write: False if the writer has events that must be sent otherwise."""
        self._may_write = may_write
        self._observer = observer
        self._writer = writer
        self._body = body

    def ready(self) -> bool:
        return self._body.ready() and self._may_write()

    def put_text(self, index: int, text: str, num_tokens: int) -> None:
        self._observer.on_text(index, text, num_tokens)
        if events := self._writer.write_text(index, text):
            self._body.write(events)

    def put(self, delta: TextDelta) -> None:
        self._observer.on_delta(delta)
        if events := self._writer.write(delta):
            self._body.write(events)


Offload = Callable[[Callable[[], bytes], int], Awaitable[bytes]]
"""Does work, on a thread if it is much: its second argument is the number of characters."""


_DELTA_CHARS = 10


def _size_of(delta: TextDelta) -> int:
    """How long writing a delta takes, in characters."""
    numbers = logprob_numbers(delta.logprobs)
    if delta.prompt_logprobs:
        numbers += num_numbers(delta.prompt_logprobs)
    return _DELTA_CHARS + len(delta.text) + NUMBER_CHARS * numbers


def logprob_numbers(entries: Sequence[TokenLogprobs]) -> int:
    """How many log-probabilities the tokens have; each has as many as the first one."""
    return len(entries) * (1 + len(entries[0].top)) if entries else 0


def choices_json(
    reply: BaseModel,
    choices: Iterable[Iterable[bytes]],
    others: Mapping[str, Iterable[bytes]] = MappingProxyType({}),
) -> Iterator[bytes]:
    """A reply that has no choices as JSON with these ones, in pieces: between them other threads
    can run. others: fields after the choices that are null in the reply."""
    before, _, after = reply.model_dump_json().partition('"choices":[]')  # no text has such quotes
    yield f'{before}"choices":['.encode()
    for number, choice in enumerate(choices):
        if number:
            yield b","
        yield from choice
    yield b"]"
    yield from spliced(after, others)


class AnswerStream(EventStream):
    """The deltas of an answer.

    After the first event, output is written as soon as it arrives, as long as the client reads fast
    enough. Otherwise it waits in its slots until `send` returns.
    """

    def __init__(
        self,
        answer: Answer,
        writer: DeltaWriter,
        stopping: StopSignal,
        heartbeat_s: float,
        offload: Offload | None = None,
        echo_chars: int = 0,
    ) -> None:
        """heartbeat_s: of EventStream.
        offload: None does everything on the event loop.
        echo_chars: most characters that come before the text of a choice.
        """
        super().__init__(stopping, heartbeat_s)
        self._answer = answer
        self._writer = writer
        self._offload = offload
        self._echo_chars = echo_chars
        self._seen: set[int] = set()
        """Choices with an event."""

    async def send_all(self) -> None:
        answer, writer = self._answer, self._writer
        body = self._body = ChunkedBody.behind(self._send_body)
        sink = None
        if body is not None:
            sink = _BodySink(answer.observer, writer, body, self.may_forward)
        while deltas := await self.with_heartbeats(answer.deltas()):
            if events := await self._written(deltas):
                await self.send_events(events)
            if self._begun and sink is not None:
                await self.with_heartbeats(answer.forward(sink))

    def may_forward(self) -> bool:
        """False if output has to wait for the next call of `send_all`'s loop."""
        return True

    async def _written(self, deltas: Sequence[TextDelta]) -> bytes:
        """Events of the deltas, written on a thread if they have much text or log-probabilities."""
        size = sum(map(_size_of, deltas))
        if self._echo_chars:
            new = {each.index for each in deltas} - self._seen
            self._seen |= new
            size += self._echo_chars * len(new)

        def write() -> bytes:
            return b"".join(map(self._writer.write, deltas))

        return write() if self._offload is None else await self._offload(write, size)

    def ending(self) -> bytes:
        return self._writer.end(self._answer.usage())

    async def close(self) -> None:
        await self._answer.aclose()
