"""What transforms have in common: their errors, their bounds, and lists as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from bros.core.errors import BrosError

MAX_CHARS = 4 * 1024 * 1024
"""Of a text before and after each transform."""
MAX_PARTS = 100_000
"""Of a list."""
_SHOWN_CHARS = 60

Function = Callable[[str], str | list[Any]]
"""One transform with its arguments. Raises TransformError."""


class TransformError(BrosError):
    """A text is not what a transform takes; the message says what was expected and found."""


class ArgumentError(ValueError):
    """A transform is written with arguments that it does not take."""


def shown(text: str) -> str:
    """A text as an error message quotes it: shortened, on one line."""
    if len(text) > _SHOWN_CHARS:
        text = text[:_SHOWN_CHARS] + "..."
    return repr(text)


def to_text(value: Any) -> str:
    """A text as it is, everything else as JSON. Raises TransformError if JSON has no such value."""
    return value if isinstance(value, str) else json_text(value)


def json_text(value: Any) -> str:
    """Everything as JSON, texts too. Raises TransformError if JSON has no such value."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TransformError(f"the value cannot be written as JSON: {error}") from error


def whole_number(argument: str, least: int | None = None) -> int:
    """An argument as a number. Raises ArgumentError unless it is one of at most 9 digits."""
    digits = argument.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
        raise ArgumentError(f"{shown(argument)} is not a whole number")
    number = int(argument)
    if least is not None and number < least:
        raise ArgumentError(f"{argument} is less than {least}")
    return number


def check_size(text: str) -> None:
    """Raises TransformError for a text that is too long or cannot be written as UTF-8."""
    if len(text) > MAX_CHARS:
        raise TransformError(f"the text has {len(text)} characters, more than {MAX_CHARS}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TransformError("the text holds half a character (a lone surrogate)") from error


def check_parts(count: int) -> None:
    """Raises TransformError for a list that is too long."""
    if count > MAX_PARTS:
        raise TransformError(f"the list has {count} parts, more than {MAX_PARTS}")


def at_place(parts: Sequence[Any], place: int) -> Any:
    """One part, counted from the end if negative. Raises TransformError if there is none."""
    if not -len(parts) <= place < len(parts):
        raise TransformError(f"there is no part [{place}] in a list of {len(parts)}")
    return parts[place]
