"""Paths into values of JSON: $.name, $['any name'], $[0], $[-1], $[1:3], $[*], $.*

A path without [*], .* and [a:b] is about one value, which must be there; one with them is about
the list of all that are there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from bros.semantic.transforms.values import (
    ArgumentError,
    TransformError,
    at_place,
    check_parts,
    shown,
)

_STEP = re.compile(
    r"""\.(?P<name>[^\W\d][\w-]*)|\[\s*(?:'(?P<single>[^']*)'|"(?P<double>[^"]*)")\s*\]"""
    r"""|\[\s*(?P<index>-?[0-9]{1,9})\s*\]"""
    r"""|\[\s*(?P<low>-?[0-9]{1,9})?\s*:\s*(?P<high>-?[0-9]{1,9})?\s*\]"""
    r"""|(?P<all>\.\*|\[\s*\*\s*\])"""
)

Step = str | int | slice | None
"""A name, a place, a range, or None for everything."""


def parse_path(path: str) -> tuple[Step, ...]:
    """Raises ArgumentError if it is not a path; the $ in front may be left out."""
    rest = path.removeprefix("$")
    if rest and rest[0] not in ".[" and not path.startswith("$"):
        rest = "." + rest
    steps: list[Step] = []
    at = 0
    while at < len(rest):
        match = _STEP.match(rest, at)
        if match is None:
            raise ArgumentError(
                f"{shown(path)} is not understood from {shown(rest[at:])} on; a path is made of "
                ".name, ['name'], [0], [1:3], [*] and .*"
            )
        steps.append(_step(match))
        at = match.end()
    return tuple(steps)


def select(value: Any, steps: Sequence[Step]) -> Any:
    """What is there. Raises TransformError if a path to one value leads nowhere."""
    for position, step in enumerate(steps):
        if step is None or isinstance(step, slice):
            parts = _parts(value, step)
            rest = steps[position + 1 :]
            if not rest:
                return parts
            return _select_in_all(parts, rest)
        value = _child(value, step)
    return value


def _select_in_all(parts: list[Any], steps: Sequence[Step]) -> list[Any]:
    found: list[Any] = []
    several = any(step is None or isinstance(step, slice) for step in steps)
    for part in parts:
        try:
            inner = select(part, steps)
        except TransformError:
            continue
        if several:
            found += inner
        else:
            found.append(inner)
        check_parts(len(found))
    return found


def _step(match: re.Match[str]) -> Step:
    if match["all"]:
        return None
    if match["index"]:
        return int(match["index"])
    for name in ("name", "single", "double"):
        if match[name] is not None:
            return match[name]
    low, high = match["low"], match["high"]
    return slice(None if low is None else int(low), None if high is None else int(high))


def _child(value: Any, step: str | int) -> Any:
    if isinstance(step, int):
        if not isinstance(value, list):
            raise TransformError(f"[{step}] of {_kind(value)}, which is not a list")
        return at_place(value, step)
    if not isinstance(value, dict):
        raise TransformError(f"{shown(step)} of {_kind(value)}, which is not an object")
    if step not in value:
        names = ", ".join(shown(name) for name in list(value)[:5]) or "nothing"
        raise TransformError(f"there is no {shown(step)} in an object with {names}")
    return value[step]


def _parts(value: Any, step: slice | None) -> list[Any]:
    if isinstance(value, list):
        return value[step] if step is not None else value
    if isinstance(value, dict) and step is None:
        return list(value.values())
    raise TransformError(f"{_kind(value)} has no parts")


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
