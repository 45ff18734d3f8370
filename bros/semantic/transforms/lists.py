"""Transforms from text to a list, and back."""

from __future__ import annotations

import json
import re
from typing import Any

from bros.semantic.transforms.values import (
    ArgumentError,
    Function,
    TransformError,
    check_parts,
    shown,
    to_text,
)

_NUMBERED = re.compile(r"\s*\(?[0-9]{1,9}[.):]\s+(\S.*)")
_BULLET = re.compile(r"\s*[-*+•]\s+(\S.*)")


def lines() -> Function:
    """The lines that are not blank, without the white space around them."""
    return lambda text: _not_empty(text.split("\n"))


def split(separator: str) -> Function:
    """What stands between separators, as it is."""
    if not separator:
        raise ArgumentError("the separator is empty")

    def parts(text: str) -> list[str]:
        check_parts(text.count(separator) + 1)
        return text.split(separator)

    return parts


def comma_list() -> Function:
    """What stands between commas, without the white space around it and without empty parts."""
    return lambda text: _not_empty(text.split(","))


def numbered_list() -> Function:
    """The items of "1. ..." or "1) ...", a line each; other lines are left out."""
    return lambda text: _items(text, _NUMBERED, "numbered item such as '1. ...'")


def markdown_list() -> Function:
    """The items of "- ...", a line each, with any of Markdown's marks; other lines are left out."""
    return lambda text: _items(text, _BULLET, "item such as '- ...'")


def join(separator: str) -> Function:
    """The parts of a list with the separator between them."""

    def joined(text: str) -> str:
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, list):
            raise TransformError(f"{shown(text)} is not a list")
        return separator.join(map(to_text, value))

    return joined


def _not_empty(parts: list[str]) -> list[str]:
    return [part.strip() for part in parts if part.strip()]


def _items(text: str, pattern: re.Pattern[str], what: str) -> list[str]:
    found = [match[1].rstrip() for line in text.split("\n") if (match := pattern.match(line))]
    if not found:
        raise TransformError(f"there is no {what} in {shown(text)}")
    return found
