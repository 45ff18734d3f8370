"""Parameters in the query of a URL."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import QueryParams

from bros.core.errors import InvalidRequestError


def query_names(query: QueryParams, known: Sequence[str]) -> None:
    """Raises InvalidRequestError for a parameter that is none of these."""
    for name in query:
        if name not in known:
            message = f"There is no parameter {name[:50]!r} here; there are {', '.join(known)}."
            raise InvalidRequestError(message, param=name[:50], code="invalid_value")


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


def query_flag(query: QueryParams, name: str) -> bool:
    """False if there is none. Raises InvalidRequestError for anything but true and false."""
    return query_choice(query, name, ("false", "true")) == "true"


def query_number(query: QueryParams, name: str, *, most: float) -> float | None:
    """Raises InvalidRequestError for anything but a number above 0, and at most `most`."""
    text = query.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        message = f"'{name}' must be a number above 0, at most {most:g}."
        raise InvalidRequestError(message, param=name, code="invalid_value")
    return value
