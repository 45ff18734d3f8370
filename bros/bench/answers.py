"""What an answer of an OpenAI-compatible server says, read into a record."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from bros.bench.records import Outcome, Record
from bros.bench.sse import Event

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
