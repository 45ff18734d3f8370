"""Parameters in the query of a URL."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import QueryParams

from bros.core.errors import InvalidRequestError


def query_int(query: QueryParams, name: str, default: int, *, low: int, high: int) -> int:
    """Raises InvalidRequestError for anything but a whole number in the range."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        message = f"'{name}' must be a whole number from {low} to {high}."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return int(text)


def query_choice(query: QueryParams, name: str, choices: Sequence[str]) -> str:
    """The first choice if there is none. Raises InvalidRequestError for any other."""
    text = query.get(name, choices[0])
    if text not in choices:
        message = f"'{name}' must be one of {', '.join(choices)}."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return text
