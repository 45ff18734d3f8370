"""From lines of an input file to rows, and from what became of a row to a line of output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bros.batch.objects import TokenUsage, is_storable

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
"""Those that rows may be sent to."""

KNOWN_ENDPOINTS = (
    *ENDPOINTS,
    "/v1/responses",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/videos",
)
"""Those that OpenAI has."""

_MAX_ID_CHARS = 512

_NO_LINE_BREAKS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""JSON need not escape these, but many readers of lines, such as OpenAI's client, break there."""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What a row's body says.

    prompt: what it begins with, as text; rows that begin alike are run next to each other.
    chars: length of all its prompts; None if that is all.
    """

    model: str
    prompt: str
    chars: int | None = None


@dataclass(frozen=True, slots=True)
class RowReply:
    """The answer to one row: the body is JSON, an error object from a status of 400 on."""

    status_code: int
    body: str
    usage: TokenUsage = TokenUsage()


class RowHandler(Protocol):
    """Answers rows. Implementations: the server's, and scripted ones in tests."""

    def check(self, endpoint: str, body: dict[str, Any]) -> RowFacts:
        """Raises InvalidRequestError or NotFoundError, naming the field. From any thread."""
        ...

    async def answer(
        self, endpoint: str, body: dict[str, Any], *, request_id: str, tenant: str, due_in_s: float
    ) -> RowReply:
        """Run a row as best-effort work that should be done within `due_in_s`.

        What the client did wrong is a reply. Raises RowPostponedError or RowInterruptedError
        if it is to be tried again; cancelling the call ends the row.
        """
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the right form."""

    custom_id: str
    body: dict[str, Any]


class BadRowError(Exception):
    """A line that is no row."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def parse_row(line: bytes, endpoint: str) -> Row:
    """Check the frame of a row, not its body. Raises BadRowError."""
    try:
        # Decoded here, for json.loads would take other encodings and half characters, too.
        value = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise BadRowError("invalid_json_line", "This line is not valid JSON.") from None
    if not isinstance(value, dict):
        raise BadRowError("invalid_json_line", "This line is not a JSON object.")
    for name in ("custom_id", "method", "url", "body"):
        if value.get(name) is None:
            raise BadRowError(
                "missing_required_parameter", f"Missing required parameter: '{name}'.", name
            )
    custom_id, method, url, body = (value[name] for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        message = f"'custom_id' must be a string of 1 to {_MAX_ID_CHARS} characters."
        raise BadRowError("invalid_value", message, "custom_id")
    if not is_storable(custom_id):
        message = "'custom_id' has characters that no text has."
        raise BadRowError("invalid_value", message, "custom_id")
    if method != "POST":
        raise BadRowError("invalid_method", "'method' must be POST.", "method")
    if url != endpoint:
        raise BadRowError("invalid_url", f"'url' must be the batch's endpoint, {endpoint}.", "url")
    if not isinstance(body, dict):
        raise BadRowError("invalid_type", "'body' must be an object.", "body")
    if body.get("stream"):
        raise BadRowError(
            "unsupported_parameter", "'stream' cannot be used in a batch.", "body.stream"
        )
    if b"\\u" in line and not _is_text(body):
        raise BadRowError("invalid_value", "'body' has half characters, which no text has.", "body")
    return Row(custom_id, body)


def reply_line(row_id: str, custom_id: str, request_id: str, reply: RowReply) -> str:
    """A line with a response, of the output file or, from a status of 400 on, the error file."""
    head = json.dumps({"id": row_id, "custom_id": custom_id})[:-1]
    response = json.dumps({"status_code": reply.status_code, "request_id": request_id})[:-1]
    body = reply.body.translate(_NO_LINE_BREAKS)
    return f'{head}, "response": {response}, "body": {body}}}, "error": null}}'


def error_line(row_id: str, custom_id: str, code: str, message: str) -> str:
    """A line of the error file for a row that never came to a response."""
    error: Mapping[str, Any] = {"code": code, "message": message}
    line = {"id": row_id, "custom_id": custom_id, "response": None, "error": error}
    return json.dumps(line)


def _is_text(value: dict[str, Any]) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
