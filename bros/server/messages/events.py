"""The events of a message as it is generated, and the blocks that they add up to.

```
 message_start                 with the tokens of the prompt
   content_block_start         index; the first one is followed by a ping
     content_block_delta ...   text_delta, thinking_delta or input_json_delta
   content_block_stop
 message_delta                 why it ended, and the tokens of the output
 message_stop
```
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from pydantic_core import from_json

from bros.core.request import FinishReason
from bros.server.messages.schema import MessageObject, MessageUsage
from bros.server.openai.schema import Usage
from bros.text.answers import (
    AnswerPart,
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningPart,
    TextPart,
)
from bros.text.generation import TextDelta

# Non-ASCII stays escaped: some clients split lines at U+0085 and U+2028, which JSON allows.
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_quoted = json.encoder.encode_basestring_ascii

SIGNATURE = "unsigned"
"""Clients send it back with the thinking; it is not checked."""

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block -> type of its deltas, and the field of their text."""


def event(kind: str, **fields: object) -> str:
    return f"event: {kind}\ndata: {_to_json({'type': kind, **fields})}\n\n"


class MessageWriter:
    """Writes the deltas of one message, which has one choice, as events.

    usage: the tokens so far; set it before the first delta is written.
    """

    def __init__(
        self,
        message_id: str,
        model: str,
        tier: str,
        new_call_id: Callable[[], str],
    ) -> None:
        """tier: `service_tier` of the usage."""
        self.usage: Callable[[], Usage] | None = None
        self._id = message_id
        self._model = model
        self._tier = tier
        self._new_call_id = new_call_id
        self._content: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._around = ("", "")  # of the text in a delta of the open block
        self._open: dict[str, Any] | None = None
        self._begun = False
        self._stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
        self._stop_reason = None
        self._stop_sequence: str | None = None

    def message(self, usage: Usage) -> MessageObject:
        """The message so far."""
        return MessageObject(
            id=self._id,
            model=self._model,
            content=self._content,
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=self._usage(usage),
        )

    def write(self, delta: TextDelta) -> bytes:
        """The events for a delta; empty if it has nothing to show."""
        events = self._begin()
        for part in delta.parts:
            events += self._part(part)
        if delta.text and not delta.parts:
            events += self._text("text", delta.text)
        if delta.finish_reason is not None:
            self._finish(delta)
        return events.encode("ascii")

    def write_text(self, index: int, text: str) -> bytes:
        """`write` of a delta that has nothing but text."""
        events = self._begin()
        if text:
            events += self._text("text", text)
        return events.encode("ascii")

    def end(self, usage: Usage) -> bytes:
        """The events after the last delta."""
        events = self._begin()
        if not self._content and self._open is None:
            events += self._start({"type": "text", "text": ""})
        events += self._stop()
        stop = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        tokens = self._usage(usage).model_dump(exclude={"service_tier"})
        events += event("message_delta", delta=stop, usage=tokens)
        events += event("message_stop")
        return events.encode("ascii")

    def _begin(self) -> str:
        if self._begun:
            return ""
        self._begun = True
        if self.usage is None:
            return ""  # these events have no reader
        return event("message_start", message=self.message(self.usage()).model_dump())

    def _part(self, part: AnswerPart) -> str:
        match part:
            case TextPart(text):
                return self._text("text", text)
            case ReasoningPart(text):
                return self._text("thinking", text)
            case CallBegin(_, name):
                block = {"type": "tool_use", "id": self._new_call_id(), "name": name, "input": {}}
                return self._start(block)
            case CallArguments(_, text):
                return self._delta(text)
            case CallEnd():
                return self._stop()

    def _text(self, kind: str, text: str) -> str:
        events = ""
        if self._open is None or self._open["type"] != kind:
            block = {"type": kind, kind: ""}
            if kind == "thinking":
                block["signature"] = ""
            events = self._start(block)
        return events + self._delta(text)

    def _start(self, block: dict[str, Any]) -> str:
        events = self._stop()
        index, first = len(self._content), not self._content
        self._open, self._texts = block, []
        kind, field = _DELTAS[block["type"]]
        delta = event("content_block_delta", index=index, delta={"type": kind, field: "\0"})
        head, tail = delta.split('"\\u0000"')
        self._around = head, tail
        events += event("content_block_start", index=index, content_block=block)
        return events + (event("ping") if first else "")

    def _delta(self, text: str) -> str:
        self._texts.append(text)
        return f"{self._around[0]}{_quoted(text)}{self._around[1]}"

    def _stop(self) -> str:
        """Close the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return ""
        text, index, events = "".join(self._texts), len(self._content), ""
        if block["type"] == "tool_use":
            block = {**block, "input": _arguments(text)}
        else:
            block = {**block, block["type"]: text}
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            events = event("content_block_delta", index=index, delta=signature)
        self._content.append(block)
        return events + event("content_block_stop", index=index)

    def _finish(self, delta: TextDelta) -> None:
        blocks = [*self._content, *([self._open] if self._open else ())]
        if delta.finish_reason is FinishReason.LENGTH:
            self._stop_reason = "max_tokens"
        elif isinstance(delta.stop_reason, str) and delta.stop_reason:
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
        elif any(block["type"] == "tool_use" for block in blocks):
            self._stop_reason = "tool_use"
        else:
            self._stop_reason = "end_turn"

    def _usage(self, usage: Usage) -> MessageUsage:
        cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
        thinking = 0 if details is None else details.reasoning_tokens
        return MessageUsage.model_validate(
            {
                "input_tokens": usage.prompt_tokens - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"thinking_tokens": thinking},
                "service_tier": self._tier,
            }
        )


_NOT_JSON = "INVALID_JSON"
"""The only member of an input that is no JSON object, as Anthropic suggests to send such a text
back. With {} a tool whose arguments are all optional would run as if the model had given none."""


def _arguments(text: str) -> dict[str, Any]:
    """The input of a call; as much as there is if it was cut off."""
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    return {_NOT_JSON: text} if text.strip() else {}
