"""Transforms from text to text."""

from __future__ import annotations

from bros.semantic.transforms.values import (
    MAX_CHARS,
    ArgumentError,
    Function,
    TransformError,
    whole_number,
)

_HOLE = "{}"


def strip() -> Function:
    return str.strip


def lower() -> Function:
    return str.lower


def upper() -> Function:
    return str.upper


def truncate(length: str) -> Function:
    """The first so many characters."""
    kept = whole_number(length, least=0)
    return lambda text: text[:kept]


def template(form: str) -> Function:
    """The form with the text in place of each {}."""
    holes = form.count(_HOLE)
    if not holes:
        raise ArgumentError("the text around needs a {} where the value goes")

    def fill(text: str) -> str:
        if len(form) + holes * len(text) > MAX_CHARS:
            raise TransformError(f"the text would have more than {MAX_CHARS} characters")
        return form.replace(_HOLE, text)

    return fill
