"""Numbers in JSON of clients that are too long or too large. Long ones hold the interpreter when
they are read or written, and large ones become infinite, which is not JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import regex

from bros.core.grammars import MAX_DIGITS
from bros.text.json_text import STRING

SHORT_TEXT = 1024
SUSPECT = regex.compile(rb"[0-9]{%d}|[eE+][0-9]{3}" % (MAX_DIGITS + 1))
"""What a short text has if `wrong_number` finds anything."""

_SEARCHED_AT_ONCE = 2**18
_LONG_NUMBER = regex.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_LARGE_NUMBER = regex.compile(rb"(?<![0-9.])[0-9]++(?:\.[0-9]++)?[eE]\+?[0-9]{3,}")


def wrong_number(text: bytes) -> str | None:
    """A phrase for a number of a JSON text that is too long or too large; None if there is none.
    The text need not be valid."""
    if not _may_have_wrong_number(text):  # numbers in strings count, too, but it takes 2 ms
        return None
    bare = STRING.sub(b"", text, concurrent=True)
    if _LONG_NUMBER.search(bare, concurrent=True):
        return f"a number of more than {MAX_DIGITS} digits"
    if any(math.isinf(float(found[0])) for found in _LARGE_NUMBER.finditer(bare)):
        return "a number that is too large for a floating point number"
    return None


def _may_have_wrong_number(text: bytes) -> bool:
    """Whether there are more than MAX_DIGITS digits in a row, or three that may be an exponent."""
    if len(text) <= SHORT_TEXT:
        return SUSPECT.search(text) is not None
    codes = np.frombuffer(text, np.uint8)
    step = _SEARCHED_AT_ONCE - MAX_DIGITS
    return any(
        _finds_digits(codes[begin : begin + _SEARCHED_AT_ONCE])
        for begin in range(0, len(codes), step)
    )


def _finds_digits(codes: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    """_may_have_wrong_number of a piece. Other threads can run, whatever is in it."""
    digits = codes - 48 < 10
    runs = digits[1:] & digits[:-1]  # where two begin
    marks = ((codes | 32) == ord("e")) | (codes == ord("+"))
    if (marks[:-3] & runs[1:-1] & digits[3:]).any():
        return True
    length = 2
    while length <= MAX_DIGITS and runs.any():
        more = min(length, MAX_DIGITS + 1 - length)
        runs = runs[more:] & runs[:-more]
        length += more
    return bool(runs.any())
