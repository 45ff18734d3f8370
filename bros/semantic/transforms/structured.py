"""Transforms that read JSON or YAML."""

from __future__ import annotations

import itertools
import json as json_library
import re
from collections.abc import Iterator
from datetime import date
from typing import Any, NoReturn

import yaml

from bros.semantic.transforms.paths import parse_path, select
from bros.semantic.transforms.patterns import find_code_block
from bros.semantic.transforms.values import (
    MAX_CHARS,
    Function,
    TransformError,
    json_text,
    shown,
    to_text,
)

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
