"""Transforms that read JSON or YAML, and paths into such values.

A path is written $.name, $['any name'], $[0], $[-1], $[1:3], $[*], $.*. A path without [*], .* and
[a:b] is about one value, which must be there; one with them is about a list of all that exist.
"""

from __future__ import annotations

import itertools
import json as json_library
import re
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any, NoReturn

import yaml

from bros.semantic.transforms.steps import (
    MAX_CHARS,
    ArgumentError,
    Function,
    TransformError,
    at_place,
    check_parts,
    find_code_block,
    json_text,
    shown,
    to_text,
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


# The one in C is ten times as fast, but not everywhere.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_YAML_CHARS = 32 * 1024
"""The loader in Python takes 40 s per MB."""
_OPENING = re.compile(r"[{\[]")
_MAX_YAML_DEPTH = 50  # deeper ones take it time in the square of that
_MAX_STARTS = 100  # places in a text where JSON may begin
_MAX_READ_CHARS = 2 * MAX_CHARS  # from all of them to the end


def json() -> Function:
    """The JSON value in a text: all of it, in a block of code, or between other words."""
    return lambda text: json_text(_json_value(text))


def json_path(path: str) -> Function:
    """What is at a path of the JSON value in a text."""
    steps = parse_path(path)
    return lambda text: to_text(select(_json_value(text), steps))


def yaml_path(path: str) -> Function:
    """What is at a path of the YAML document in a text: all of it, or in a block of code."""
    steps = parse_path(path)
    return lambda text: to_text(select(_yaml_value(text), steps))


def _json_value(text: str) -> Any:
    decoder = json_library.JSONDecoder(parse_constant=_refuse_constant)
    problem: Exception | None = None
    for candidate in _whole_texts(text, ("json", "")):
        try:
            return decoder.decode(candidate)
        except (ValueError, RecursionError) as error:
            problem = problem or error
    for start in _starts(text):
        try:
            return decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue
    raise TransformError(f"there is no JSON in {shown(text)}: {problem}") from problem


def _yaml_value(text: str) -> Any:
    problem: Exception | None = None
    block = find_code_block(text, ("yaml", "yml", ""))
    candidate = text if block is None else block
    if len(candidate) > MAX_YAML_CHARS:
        raise TransformError(f"the YAML has more than {MAX_YAML_CHARS} characters")
    try:
        _check_yaml(candidate)
        return _with_text_keys(yaml.load(candidate, Loader=_LOADER))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = error
    reason = " ".join(str(problem).split())
    raise TransformError(f"{shown(candidate)} is not YAML: {reason}") from problem


def _check_yaml(text: str) -> None:
    """Raises TransformError for what takes few characters and much time or memory, and
    yaml.YAMLError."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        # An alias stands for a copy of what it names: a few lines can stand for gigabytes.
        if isinstance(event, yaml.AliasEvent):
            raise TransformError("the YAML has an alias (*name), which is not supported")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_YAML_DEPTH:
            raise TransformError(f"the YAML is nested more than {_MAX_YAML_DEPTH} levels deep")


def _with_text_keys(value: Any) -> Any:
    """The same as JSON knows it: keys and dates are text."""
    if isinstance(value, dict):
        return {_key(key): _with_text_keys(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(inner) for inner in value]
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, date):
        return value.isoformat()
    raise TransformError(f"the YAML has a {type(value).__name__}, of which JSON has none")


def _key(key: Any) -> str:
    return key if isinstance(key, str) else to_text(_with_text_keys(key))


def _whole_texts(text: str, languages: tuple[str, ...]) -> Iterator[str]:
    yield text.strip()
    if (block := find_code_block(text, languages)) is not None:
        yield block.strip()


def _starts(text: str) -> Iterator[int]:
    """Where an object or a list may begin, from the front."""
    budget = _MAX_READ_CHARS
    for start in itertools.islice(_OPENING.finditer(text), _MAX_STARTS):
        budget -= len(text) - start.start()
        if budget < 0:
            return
        yield start.start()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
