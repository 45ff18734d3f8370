"""`completion_window`: 24h as OpenAI has it, and any other length of time."""

from __future__ import annotations

import re

from bros.batch.objects import DAY_S
from bros.core.errors import InvalidRequestError

_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_UNIT_S = (("m", 60), ("h", 3600), ("d", DAY_S))
MAX_WINDOW_S = 30 * DAY_S


def parse_window(text: str) -> int:
    """Seconds in `<n>m`, `<n>h` or `<n>d`, at most 30 days; raises InvalidRequestError."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * dict(_UNIT_S)[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidRequestError(
            f"{text[:50]!r} is no completion window; write 24h, or a number of minutes, hours "
            "or days up to 30d, such as 90m.",
            param="completion_window",
            code="invalid_value",
        )
    return seconds
