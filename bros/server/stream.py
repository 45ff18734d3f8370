"""Stream chunks as bytes. One delta per token passes here, so constant parts are written once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

from bros.engine.generation import TextDelta
from bros.engine.tokenizer import Tokenizer
from bros.server.answer import visible_logprobs
from bros.server.logprobs import CompletionLogprobsWriter, chat_logprobs
from bros.server.replies import Usage

# Non-ASCII stays escaped: some clients split lines at U+0085 and U+2028, which JSON allows.
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

DONE = b"data: [DONE]\n\n"


class ChunkFrame:
    """The parts of a chunk that are the same for the whole stream."""

    def __init__(self, kind: str, header: Mapping[str, object], *, include_usage: bool) -> None:
        """kind: the chunk's `object`. header: the fields it shares with whole responses."""
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


class ChunkWriter(Protocol):
    """Writes the deltas of one request as events."""

    def write(self, delta: TextDelta) -> bytes:
        """The events for a delta; empty if there is nothing to tell yet."""
        ...

    def end(self, usage: Usage) -> bytes:
        """What follows the last delta."""
        ...


class ChatChunkWriter:
    """chat.completion.chunk: the role first, then text, then the finish reason on its own."""

    def __init__(self, frame: ChunkFrame, tokenizer: Tokenizer, with_logprobs: bool) -> None:
        self._frame = frame
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._begun: set[int] = set()

    def write(self, delta: TextDelta) -> bytes:
        frame, index = self._frame, delta.index
        events = ""
        if index not in self._begun:
            self._begun.add(index)
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
    """text_completion chunks. echoes: what goes before the text of each choice, by index."""

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
        self._echoed: set[int] = set()
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    def write(self, delta: TextDelta) -> bytes:
        index = delta.index
        text = delta.text
        if index not in self._echoed:
            self._echoed.add(index)
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
