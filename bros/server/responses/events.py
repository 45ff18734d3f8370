"""The events of a response as it is generated, and the items that they add up to.

```
 created, queued (of a background response), in_progress
   for each item of the output:      item_id, output_index
     output_item.added
       content_part.added            message and reasoning; content_index is always 0
       output_text.delta ...         or reasoning_text.delta, function_call_arguments.delta
       output_text.done              or ...
       content_part.done
     output_item.done
 completed, incomplete or failed     with the whole response
```

Every event has a sequence_number, from 0. An item opens when its first text comes, and closes when
the next one opens.

Events of a background response can be read at any time, from any of them on, while it runs or
later. They are not kept but made of the output as it is, so their numbers depend on the output
alone: a delta has the number of its last character, and each character takes one.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import BaseModel

from bros.core.clock import Clock
from bros.core.request import FinishReason
from bros.server.errors import ApiError
from bros.server.http import json_pieces, json_size
from bros.server.openai.prompt_logprobs import CharacterCounter
from bros.server.openai.schema import Usage
from bros.server.openai.stream import ChatLogprobsWriter, ascii_json, visible_logprobs
from bros.server.responses.items import Item, output_item_id, output_text
from bros.server.responses.schema import (
    IncompleteDetails,
    ResponseError,
    ResponseInputDetails,
    ResponseOutputDetails,
    ResponseUsage,
    Status,
)
from bros.text.answers import (
    AnswerPart,
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningPart,
    TextPart,
)
from bros.text.generation import TextDelta
from bros.text.json_text import WrittenJson
from bros.text.tokenizer import Tokenizer

# Non-ASCII stays escaped: some clients split lines at U+0085 and U+2028, which JSON allows.
to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_quoted = json.encoder.encode_basestring_ascii


class LogprobTexts(WrittenJson):
    """The log-probabilities of the tokens of an item's text, each written as JSON once: several
    events have all of them.

    starts: characters of the text before each token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starts = array("I")
        self._counter, self._chars = CharacterCounter(), 0

    def add(self, text: str, token: bytes) -> None:
        """text: JSON of the next token's entry."""
        self.append(text)
        self.starts.append(self._chars)
        self._chars += self._counter.push(token)[1]

    def behind(self, known: int) -> WrittenJson:
        """Those of the tokens that begin behind so many characters."""
        return WrittenJson(self[bisect.bisect_left(self.starts, known) :])

    def snapshot(self) -> LogprobTexts:
        """A copy that does not grow. Nothing can be added to it."""
        copy = LogprobTexts()
        copy.extend(self)
        copy.starts = self.starts[:]
        return copy

    @classmethod
    def of(cls, texts: Iterable[str]) -> LogprobTexts:
        found = cls()
        for text in texts:
            begin = text.index(_BYTES) + len(_BYTES)  # no string in JSON has such quotes
            codes = text[begin : text.index("]", begin)]
            found.add(text, bytes(map(int, codes.split(","))) if codes else b"")
        return found


_BYTES = '"bytes":['


@dataclass(slots=True, kw_only=True)
class LiveResponse:
    """A response object that changes.

    echo: the fields that repeat the request, as a JSON object. They may be large, and are written
        often.
    """

    id: str
    created_at: int
    model: str
    service_tier: str
    background: bool
    store: bool
    echo: str
    status: Status = "in_progress"
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[Item] = field(default_factory=list)
    usage: ResponseUsage | None = None
    system_fingerprint: str | None = None

    def pieces(self) -> Iterator[bytes]:
        """A ResponseObject as JSON in ASCII, in pieces."""
        own: dict[str, object] = {"id": self.id, "object": "response"}
        for name in _OWN:
            value = getattr(self, name)
            own[name] = value.model_dump() if isinstance(value, BaseModel) else value
        yield from _unclosed(json_pieces(own, ascii_json))
        yield f",{self.echo[1:]}".encode("ascii")

    def to_json(self) -> str:
        """The same at once."""
        return b"".join(self.pieces()).decode("ascii")

    @property
    def size(self) -> int:
        """About how many characters it has as JSON."""
        return len(self.echo) + json_size(self.output)

    def snapshot(self) -> LiveResponse:
        """It as it is now."""
        return dataclasses.replace(self, output=list(self.output))

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> LiveResponse:
        """An ended one. Its log-probabilities are WrittenJson."""
        own = {name: body[name] for name in ("id", *_OWN)}
        own["output"] = [_read_item(item) for item in own["output"]]
        echo = {name: value for name, value in body.items() if name not in (*own, "object")}
        own["error"] = ResponseError(**body["error"]) if body["error"] else None
        details = body["incomplete_details"]
        own["incomplete_details"] = IncompleteDetails(**details) if details else None
        own["usage"] = ResponseUsage(**body["usage"]) if body["usage"] else None
        return cls(**own, echo=to_json(echo))


_OWN = (
    "created_at",
    "model",
    "service_tier",
    "background",
    "store",
    "status",
    "completed_at",
    "error",
    "incomplete_details",
    "output",
    "usage",
    "system_fingerprint",
)


def _unclosed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """JSON of an object without the brace at its end."""
    last = b""
    for piece in pieces:
        yield last
        last = piece
    yield last[:-1]


def _read_item(item: Item) -> Item:
    """An item of a stored response."""
    if item["type"] != "message" or not item["content"]:
        return item
    part = item["content"][0]
    return {**item, "content": [{**part, "logprobs": LogprobTexts.of(part["logprobs"])}]}


_LARGE = 50_000
"""Characters from which an event is written in pieces, when it is sent."""


class EventLog:
    """Writes events and numbers them.

    number: of the next event.
    after: events up to this number are left out.
    """

    def __init__(self, after: int = -1) -> None:
        self.number = 0
        self.after = after
        self._events: list[bytes | Iterator[bytes]] = []
        self._num_large = 0

    @property
    def shows(self) -> bool:
        """Whether the next event is not left out."""
        return self.number > self.after

    @property
    def is_large(self) -> bool:
        """Whether `take` would write too much at once."""
        return self._num_large > 0

    def add(self, kind: str, **fields: object) -> None:
        """kind: `type` of the event. fields: they must stay as they are."""
        if self.shows:
            event = {"type": kind, **fields}
            pieces = _unclosed(json_pieces(event, ascii_json))
            self.add_pieces(kind, pieces, json_size(event))
        else:
            self.number += 1

    def add_pieces(self, kind: str, head: Iterable[bytes], size: int) -> None:
        """head: the event as JSON, without the sequence number and the brace at the end. size: its
        characters."""
        if self.shows:
            pieces = itertools.chain(
                [f"event: {kind}\ndata: ".encode()],
                head,
                [b',"sequence_number":%d}\n\n' % self.number],
            )
            self._num_large += size > _LARGE
            self._events.append(pieces if size > _LARGE else b"".join(pieces))
        self.number += 1

    def take(self) -> bytes:
        """The events since the last call."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The same in pieces, which are made as they are read."""
        events, self._events, self._num_large = self._events, [], 0
        return itertools.chain.from_iterable(
            [each] if isinstance(each, bytes) else each for each in events
        )


@dataclass(frozen=True, slots=True)
class _Kind:
    """How the items of a type are streamed.

    part: `type` of their content part; empty if they have none.
    text: name of the events with their text, and of its field in the last one.
    """

    part: str
    text: str
    field: str

    def empty_part(self) -> Item:
        return output_text("") if self.part == "output_text" else {"type": self.part, "text": ""}


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "message": _Kind("output_text", "output_text", "text"),
        "reasoning": _Kind("reasoning_text", "reasoning_text", "text"),
        "function_call": _Kind("", "function_call_arguments", "arguments"),
    }
)


class OutputEvents:
    """The events of one response, item by item. At most one item is open at a time.

    response: the response object as it is now.
    """

    def __init__(self, response: LiveResponse, after: int = -1) -> None:
        """response: without output. after: of the EventLog."""
        self.response = response
        self.log = EventLog(after)
        self._begun = False
        self._item: Item | None = None

    @property
    def open_type(self) -> str:
        """`type` of the open item; empty if none is open."""
        return "" if self._item is None else str(self._item["type"])

    def begin(self) -> None:
        """The first events; later calls have no effect."""
        if self._begun:
            return
        self._begun = True
        if self.response.background:
            self.queue()
            self.response.status = "in_progress"
        else:
            self._add_response("response.created")
        self._add_response("response.in_progress")

    def queue(self) -> None:
        """The events of a background response before it runs."""
        self.response.status = "queued"
        self._add_response("response.created")
        self._add_response("response.queued")

    def output(self) -> Sequence[Item]:
        """The items so far, the last one with the text that it has by now."""
        if self._item is None:
            return self.response.output
        return [*self.response.output, self._filled("in_progress", self._logprobs.snapshot())]

    def open(self, item: Item) -> None:
        """Close the open item, and open this one, which has no text yet."""
        self.close("completed")
        self._item = item
        self._texts: list[str] = []
        self._logprobs = LogprobTexts()
        kind = self._kind = _KINDS[item["type"]]
        index = len(self.response.output)
        self.log.add("response.output_item.added", output_index=index, item=item)
        self._where: dict[str, object] = {"item_id": item["id"], "output_index": index}
        if kind.part:
            self._where["content_index"] = 0
            part = kind.empty_part()
            self.log.add("response.content_part.added", **self._where, part=part)
        self._delta = f"response.{kind.text}.delta"
        head = to_json({"type": self._delta, **self._where, "delta": ""})
        self._delta_head = head.removesuffix('""}')
        self._delta_tail = ',"logprobs":[]' if item["type"] == "message" else ""

    def add(self, text: str, logprobs: Sequence[tuple[str, bytes]] = ()) -> None:
        """More text of the open item. logprobs: of a message, as of LogprobTexts.add."""
        self._texts.append(text)
        for entry, token in logprobs:
            self._logprobs.add(entry, token)
        self._add_delta(text, WrittenJson(entry for entry, _ in logprobs))

    def _add_delta(self, text: str, logprobs: WrittenJson) -> None:
        log = self.log
        if not log.shows:
            log.number += 1
            return
        head, size = f"{self._delta_head}{_quoted(text)}", len(text) + sum(map(len, logprobs))
        if logprobs:
            begin = f'{head},"logprobs":'.encode("ascii")
            log.add_pieces(self._delta, itertools.chain([begin], json_pieces(logprobs)), size)
        else:
            log.add_pieces(self._delta, [f"{head}{self._delta_tail}".encode("ascii")], size)

    def close(self, status: str) -> None:
        """Close the open item, if there is one. status: of the item from now on."""
        if self._item is None:
            return
        item, self._item = self._filled(status, self._logprobs), None
        kind, log = self._kind, self.log
        done: dict[str, object] = {**self._where, kind.field: "".join(self._texts)}
        if item["type"] == "message":
            done["logprobs"] = self._logprobs
        if item["type"] == "function_call":
            done["name"] = item["name"]
        log.add(f"response.{kind.text}.done", **done)
        if kind.part:
            part = item["content"][0]
            log.add("response.content_part.done", **self._where, part=part)
        index = len(self.response.output)
        self.response.output.append(item)
        log.add("response.output_item.done", output_index=index, item=item)

    def _filled(self, status: str, logprobs: LogprobTexts) -> Item:
        """The open item with its text."""
        assert self._item is not None
        kind, text = self._kind, "".join(self._texts)
        if not kind.part:
            return {**self._item, "status": status, "arguments": text}
        part = {**kind.empty_part(), "text": text}
        if logprobs:
            part["logprobs"] = logprobs
        return {**self._item, "status": status, "content": [part]}

    def end(self) -> None:
        """The last event, by the status of the response."""
        status = self.response.status
        # No event has the name of a cancelled response.
        self._add_response(f"response.{'incomplete' if status == 'cancelled' else status}")

    def _add_response(self, kind: str) -> None:
        if not self.log.shows:
            self.log.number += 1
            return
        begin = f'{{"type":"{kind}","response":'.encode()
        response = self.response.snapshot()
        self.log.add_pieces(kind, itertools.chain([begin], response.pieces()), response.size)


class ResponseWriter:
    """Writes the deltas of one response, which has one choice, as events.

    Its methods return events. If these are large, they return nothing, and what has to be sent then
    are the pieces of `large`.

    response: the response object; complete after `end` or `fail`.
    hold: told how many bytes of log-probabilities are kept for the last events.
    """

    def __init__(
        self,
        response: LiveResponse,
        tokenizer: Tokenizer,
        clock: Clock,
        new_call_id: Callable[[], str],
        *,
        with_logprobs: bool,
        is_silent: bool = False,
    ) -> None:
        """response: without output, in progress. new_call_id: makes the call_id of a call.
        is_silent: it makes no events, only the response.
        """
        self.response = response
        self._tokenizer = tokenizer
        self._clock = clock
        self._new_call_id = new_call_id
        self._with_logprobs = with_logprobs
        self._events = OutputEvents(response, after=sys.maxsize if is_silent else -1)
        self._logprobs_writer = ChatLogprobsWriter(tokenizer)
        self._finish_reason: FinishReason | None = None
        self._held_logprobs: list[tuple[str, bytes]] = []  # of tokens whose text is not there yet
        self.hold: Callable[[int], None] = _free

    def write(self, delta: TextDelta) -> bytes:
        """The events for a delta; empty if it has nothing to show."""
        self._events.begin()
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
        self._held_logprobs += self._logprobs(delta)
        for part in delta.parts:
            self._add_part(part)
        if delta.text and not delta.parts:
            self._add_text(delta.text)
        return self._taken()

    @property
    def is_large(self) -> bool:
        """Whether events wait in `large`."""
        return self._events.log.is_large

    def large(self) -> Iterator[bytes]:
        """The events that no method has returned, in pieces, which are made as they are read."""
        return self._events.log.pieces()

    def _taken(self) -> bytes:
        return b"" if self.is_large else self._events.log.take()

    def so_far(self) -> LiveResponse:
        """The response with the output of the deltas until now."""
        return dataclasses.replace(self.response, output=list(self._events.output()))

    def write_text(self, index: int, text: str) -> bytes:
        """`write` of a delta that has nothing but text."""
        self._events.begin()
        if text:
            self._add_text(text)
        return self._taken()

    def end(self, usage: Usage) -> bytes:
        """The events after the last delta: those of `close` and the last one."""
        return self.close(usage) + self.last()

    def close(self, usage: Usage) -> bytes:
        """Complete the response; returns the events up to the last one."""
        events, response = self._events, self.response
        events.begin()
        cut = self._finish_reason is FinishReason.LENGTH
        if not response.output and not events.open_type:
            self._open("message", role="assistant", content=[])
        if self._held_logprobs and events.open_type == "message":
            self._add_text("")
        events.close("incomplete" if cut else "completed")
        response.usage = _usage(usage)
        if cut:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            response.status = "completed"
            response.completed_at = int(self._clock.unix_time())
        return self._taken()

    def last(self) -> bytes:
        """The last event, which has the whole response."""
        self._events.end()
        return self._taken()

    def fail(self, error: ApiError) -> bytes:
        """The events after a failure."""
        events, response = self._events, self.response
        events.begin()
        events.close("incomplete")
        code = error.code or error.type
        events.log.add("error", code=code, message=error.message, param=error.param)
        response.status, response.error = "failed", failure(error)
        events.end()
        return self._taken()

    def _add_part(self, part: AnswerPart) -> None:
        if isinstance(part, TextPart):
            self._add_text(part.text)
            return
        self._held_logprobs.clear()
        match part:
            case ReasoningPart(text):
                if self._events.open_type != "reasoning":
                    self._open("reasoning", summary=[], content=[])
                self._events.add(text)
            case CallBegin(_, name):
                call_id = self._new_call_id()
                self._open("function_call", call_id=call_id, name=name, arguments="")
            case CallArguments(_, text):
                self._events.add(text)
            case CallEnd():
                if self._finish_reason is not FinishReason.LENGTH:  # else it may be cut off
                    self._events.close("completed")

    def _add_text(self, text: str) -> None:
        if self._events.open_type != "message":
            self._open("message", role="assistant", content=[])
        logprobs, self._held_logprobs = self._held_logprobs, []
        if logprobs:
            self.hold(sum(len(entry) for entry, _ in logprobs))
        self._events.add(text, logprobs)

    def _open(self, kind: str, **fields: object) -> None:
        self._events.close("completed")
        item_id = output_item_id(self.response.id, kind, len(self.response.output))
        self._events.open({"id": item_id, "type": kind, "status": "in_progress", **fields})

    def _logprobs(self, delta: TextDelta) -> Sequence[tuple[str, bytes]]:
        if not self._with_logprobs or not delta.logprobs:
            return ()
        entries = visible_logprobs(delta)
        tokens = (self._tokenizer.token_bytes(entry.token_id) for entry in entries)
        return list(zip(self._logprobs_writer.write(entries), tokens, strict=True))


def _free(num_bytes: int) -> None:
    """Nothing counts them."""


def _usage(usage: Usage) -> ResponseUsage:
    cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    reasoning_tokens = 0 if details is None else details.reasoning_tokens
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=ResponseInputDetails(
            cached_tokens=cached, cache_write_tokens=usage.prompt_tokens - cached
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ResponseOutputDetails(reasoning_tokens=reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def failure(error: ApiError) -> ResponseError:
    """`error` of a failed response, which has few codes."""
    if error.status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if error.status < 500 else "server_error"
    return ResponseError(code=code, message=error.message)


# ---- Events of a background response.


class Events(NamedTuple):
    """Events of a background response.

    data: empty if they are large.
    large: then they are these pieces, which are made as they are read.
    last: number of the last one there is, or what `after` was.
    """

    data: bytes
    large: Iterator[bytes] | None
    last: int


_ENDED = ("completed", "incomplete", "failed", "cancelled")


def background_events(response: LiveResponse, after: int, *, runs: bool) -> Events:
    """The events of a background response that there are by now, from the one after `after` on.

    runs: whether it runs, as far as is known, or has ended; else it waits.
    """
    events = _Repeated(_fresh(response), after)
    if runs:
        events.begin()
    else:
        events.queue()
    for item in response.output:
        hidden: dict[str, Any] = {"status": "in_progress"}
        if item["type"] == "function_call":
            hidden["arguments"], text, logprobs = "", item["arguments"], _NO_LOGPROBS
        else:
            hidden["content"], part = [], item["content"][0]
            text, logprobs = part["text"], part.get("logprobs") or _NO_LOGPROBS
        events.open(item | hidden)
        if text:
            events.repeat(text, logprobs)
        if item["status"] != "in_progress":
            events.close(item["status"])
    if response.status in _ENDED:
        if response.status in ("failed", "cancelled"):  # after events of output that was dropped
            events.log.number = max(events.log.number, after + 1)
        events.response = response
        events.end()
    log = events.log
    last = max(after, log.number - 1)
    if log.is_large:
        return Events(b"", log.pieces(), last)
    return Events(log.take(), None, last)


_NO_LOGPROBS = LogprobTexts()


class _Repeated(OutputEvents):
    """Events of which a client may have the first; deltas are numbered by their characters."""

    def repeat(self, text: str, logprobs: LogprobTexts) -> None:
        """All text that the open item has."""
        log = self.log
        known = min(max(0, log.after + 1 - log.number), len(text))  # characters
        log.number += len(text) - 1
        self._add_delta(text[known:], logprobs.behind(known))
        self._texts, self._logprobs = [text], logprobs


def _fresh(response: LiveResponse) -> LiveResponse:
    """As it was before it ran."""
    return dataclasses.replace(
        response,
        status="in_progress",
        completed_at=None,
        error=None,
        incomplete_details=None,
        output=[],
        usage=None,
    )
