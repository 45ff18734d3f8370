"""Values as they are written on the command line: numbers, and lists of them or of policies."""

from __future__ import annotations

from bros.core.config import POLICIES
from bros.core.config_sources import near_matches
from bros.core.errors import ConfigError

RANGE_VALUES = 5
"""How many rates `low:high` stands for."""

_MAX_RATES = 1000


def rates(flag: str, text: str) -> list[float]:
    """`4`, `1,2,4`, `1:15` (5 values, evenly spaced) or `1:15:2` (in steps of 2, ends included).

    Raises ConfigError.
    """
    if ":" not in text:
        return [number(flag, part, low=0) for part in text.split(",")]
    parts = [number(flag, part, low=0) for part in text.split(":")]
    if len(parts) > 3 or parts[0] >= parts[1] or (len(parts) == 3 and parts[2] == 0):
        raise ConfigError(f"{flag}: {text!r} is not a range; write 1:15 or 1:15:2")
    low, high = parts[:2]
    step = parts[2] if len(parts) == 3 else (high - low) / (RANGE_VALUES - 1)
    count = int((high - low) / step + 1e-9) + 1
    if count > _MAX_RATES:
        raise ConfigError(f"{flag}: {text!r} are {count} rates; at most {_MAX_RATES}")
    return [round(low + i * step, 9) for i in range(count)]


def doublings(flag: str, text: str, most: int) -> list[int]:
    """`4`, `1,2,8` or `1:1024` (from the first one on always twice as many).

    Raises ConfigError for what is no whole number from 1 to `most`.
    """
    parts = [whole(flag, part, low=1) for part in text.replace(":", ",").split(",")]
    if max(parts) > most:
        raise ConfigError(f"{flag}: {max(parts)} must be at most {most}")
    if ":" not in text:
        return list(dict.fromkeys(parts))
    if len(parts) != 2 or parts[0] > parts[1]:
        raise ConfigError(f"{flag}: {text!r} is not a range; write 1:1024")
    found = [parts[0]]
    while 2 * found[-1] <= parts[1]:
        found.append(2 * found[-1])
    return found


def policies(flag: str, text: str) -> tuple[str, ...]:
    """`fcfs,bros`, each once. Raises ConfigError for a name that is none."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in POLICIES:
            near = near_matches(name, POLICIES)
            raise ConfigError(f"{flag}: {name!r} is not one of {', '.join(POLICIES)}{near}")
    return names


def number(flag: str, text: str, low: float | None = None, above: float | None = None) -> float:
    """A finite number of at least `low`, or above `above`. Raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a number") from None
    if not value < float("inf"):
        raise ConfigError(f"{flag}: {text!r} is not a finite number")
    if low is not None and value < low:
        raise ConfigError(f"{flag}: {text} must be at least {low:g}")
    if above is not None and value <= above:
        raise ConfigError(f"{flag}: {text} must be more than {above:g}")
    return value


def whole(flag: str, text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a whole number") from None
    if value < low:
        raise ConfigError(f"{flag}: {value} must be at least {low}")
    return value
