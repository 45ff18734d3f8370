"""Transforms that parse JSON or YAML, and paths into such values.

The steps of a path are $.name, $['any name'], $[0], $[-1], $[1:3], $[*] and $.*. A path without
[*], .* and [a:b] selects one value, which must exist. A path with them selects the list of all
values that exist.
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
    check_length,
    find_code_block,
    item_at,
    json_text,
    quoted,
    to_text,
)

_STEP = re.compile(
    r"""\.(?P<name>[^\W\d][\w-]*)|\[\s*(?:'(?P<single>[^']*)'|"(?P<double>[^"]*)")\s*\]"""
    r"""|\[\s*(?P<index>-?[0-9]{1,9})\s*\]"""
    r"""|\[\s*(?P<low>-?[0-9]{1,9})?\s*:\s*(?P<high>-?[0-9]{1,9})?\s*\]"""
    r"""|(?P<all>\.\*|\[\s*\*\s*\])"""
)

PathStep = str | int | slice | None
"""A name, an index, a range, or None for all items."""


def parse_path(path: str) -> tuple[PathStep, ...]:
    """Parse a path; the leading $ is optional. Raises ArgumentError."""
    rest = path.removeprefix("$")
    if rest and rest[0] not in ".[" and not path.startswith("$"):
        rest = "." + rest
    steps: list[PathStep] = []
    at = 0
    while at < len(rest):
        match = _STEP.match(rest, at)
        if match is None:
            raise ArgumentError(
                f"{quoted(path)} is not understood from {quoted(rest[at:])} on; a path is made of "
                ".name, ['name'], [0], [1:3], [*] and .*"
            )
        steps.append(_step(match))
        at = match.end()
    return tuple(steps)


def select(value: Any, steps: Sequence[PathStep]) -> Any:
    """The value at a path. Raises TransformError if a path to one value does not exist."""
    for position, step in enumerate(steps):
        if step is None or isinstance(step, slice):
            parts = _parts(value, step)
            rest = steps[position + 1 :]
            if not rest:
                return parts
            return _select_in_all(parts, rest)
        value = _child(value, step)
    return value


def _select_in_all(parts: list[Any], steps: Sequence[PathStep]) -> list[Any]:
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
        check_length(len(found))
    return found


def _step(match: re.Match[str]) -> PathStep:
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
        return item_at(value, step)
    if not isinstance(value, dict):
        raise TransformError(f"{quoted(step)} of {_kind(value)}, which is not an object")
    if step not in value:
        names = ", ".join(quoted(name) for name in list(value)[:5]) or "nothing"
        raise TransformError(f"there is no {quoted(step)} in an object with {names}")
    return value[step]


def _parts(value: Any, step: slice | None) -> list[Any]:
    if isinstance(value, list):
        return value[step] if step is not None else value
    if isinstance(value, dict) and step is None:
        return list(value.values())
    raise TransformError(f"{_kind(value)} has no parts")


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


# The loader in C is ten times as fast, but not every installation has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_YAML_CHARS = 32 * 1024
"""The loader in Python takes 40 s per MB."""
_OPENING = re.compile(r"[{\[]")
_MAX_YAML_DEPTH = 50  # the loader's time is quadratic in the depth
_MAX_JSON_STARTS = 100  # positions in a text where the parser looks for JSON
_MAX_READ_CHARS = 2 * MAX_CHARS  # characters from all these positions to the end


def json() -> Function:
    """The JSON value in a text: the whole text, a code block, or a part between other words."""
    return lambda text: json_text(_json_value(text))


def json_path(path: str) -> Function:
    """The value at a path of the JSON value in a text."""
    steps = parse_path(path)
    return lambda text: to_text(select(_json_value(text), steps))


def yaml_path(path: str) -> Function:
    """The value at a path of the YAML document in a text: the whole text or a code block."""
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
    for start in _json_starts(text):
        try:
            return decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue
    raise TransformError(f"there is no JSON in {quoted(text)}: {problem}") from problem


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
    raise TransformError(f"{quoted(candidate)} is not YAML: {reason}") from problem


def _check_yaml(text: str) -> None:
    """Raises TransformError for YAML that takes much time or memory for its size, and
    yaml.YAMLError for invalid YAML."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        # An alias expands to a copy of its anchor: a few lines can expand to gigabytes.
        if isinstance(event, yaml.AliasEvent):
            raise TransformError("the YAML has an alias (*name), which is not supported")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_YAML_DEPTH:
            raise TransformError(f"the YAML is nested more than {_MAX_YAML_DEPTH} levels deep")


def _with_text_keys(value: Any) -> Any:
    """A YAML value as a JSON value: keys and dates become text."""
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


def _json_starts(text: str) -> Iterator[int]:
    """Positions where a JSON object or list may begin, in ascending order."""
    budget = _MAX_READ_CHARS
    for start in itertools.islice(_OPENING.finditer(text), _MAX_JSON_STARTS):
        budget -= len(text) - start.start()
        if budget < 0:
            return
        yield start.start()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
