"""Transforms that check a text to be one value, and write it in one way."""

from __future__ import annotations

import math
import re
from datetime import datetime

from bros.semantic.transforms.values import ArgumentError, Function, TransformError, shown

_TRUE = frozenset({"true", "yes", "y", "1", "on"})
_FALSE = frozenset({"false", "no", "n", "0", "off"})
_AROUND = " \t\r\n\"'`*.,!"  # what models like to put around a word
_INTEGER = re.compile(r"([+-]?)([0-9]{1,1000}|[0-9]{1,3}(?:,[0-9]{3}){1,300})\.?")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MAX_CHARS = 2000  # of a number or a date; nobody means longer ones


def boolean() -> Function:
    """true or false, for yes, no, 1, 0, on, off and the like."""

    def checked(text: str) -> str:
        word = _bare(text).lower()
        if word not in _TRUE | _FALSE:
            raise TransformError(f"{shown(text)} is neither true nor false")
        return "true" if word in _TRUE else "false"

    return checked


def integer() -> Function:
    """A whole number in decimal digits; commas between thousands and a full stop are dropped."""

    def checked(text: str) -> str:
        match = _INTEGER.fullmatch(text.strip())
        if match is None:
            raise TransformError(f"{shown(text)} is not a whole number")
        digits = match[2].replace(",", "").lstrip("0") or "0"
        return "-" + digits if match[1] == "-" and digits != "0" else digits

    return checked


def number() -> Function:
    """A number in decimal digits, as the double next to it is written."""

    def checked(text: str) -> str:
        word = text.strip()
        if len(word) > _MAX_CHARS or not _NUMBER.fullmatch(word):
            raise TransformError(f"{shown(text)} is not a number")
        value = float(word)
        if not math.isfinite(value):
            raise TransformError(f"{shown(text)} is too large a number")
        return repr(value)

    return checked


def enum(*options: str) -> Function:
    """One of the options, as it is written there; case, quotes and full stops do not matter."""
    names = [name.strip() for option in options for name in option.split("|")]
    if not all(names):
        raise ArgumentError("an option is empty")
    known = {name.casefold(): name for name in names}
    if len(known) < len(names):
        raise ArgumentError("two options are the same")

    def checked(text: str) -> str:
        for word in (text.strip(), _bare(text)):
            if word.casefold() in known:
                return known[word.casefold()]
        raise TransformError(f"{shown(text)} is none of {', '.join(names)}")

    return checked


def date_and_time(form: str = "") -> Function:
    """A date in a format of strftime (or ISO 8601), as ISO 8601."""
    if form:
        _check_format(form)

    def checked(text: str) -> str:
        word = text.strip()
        try:
            if len(word) > _MAX_CHARS:
                raise ValueError("too long")
            moment = datetime.strptime(word, form) if form else datetime.fromisoformat(word)
        except ValueError as error:
            expected = f"in the format {form}" if form else "as in 2001-02-03T04:05:06"
            raise TransformError(f"{shown(text)} is not a date {expected}") from error
        return moment.isoformat()

    return checked


def _check_format(form: str) -> None:
    """Raises ArgumentError if strptime does not know it."""
    if len(form) > _MAX_CHARS:
        raise ArgumentError("the format is too long")
    try:
        datetime.strptime("", form)
    except ValueError as error:
        if "does not match" not in str(error):
            raise ArgumentError(f"{shown(form)} is not a format of dates: {error}") from error
    except (re.error, IndexError) as error:
        raise ArgumentError(f"{shown(form)} has a directive twice") from error


def _bare(text: str) -> str:
    """Without what models like to put around an answer of one word."""
    return text.strip(_AROUND)
