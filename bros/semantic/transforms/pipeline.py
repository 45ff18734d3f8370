"""The registry of transforms, and the parser for pipelines: `strip | json_path($.a) | upper`.

    transforms = transform ("|" transform)*
    transform  = name ["(" argument ("," argument)* ")"] ["[" index or low:high "]"]

Arguments may be in single or double quotes. They must be quoted if they begin or end with white
space, or contain a comma or an unmatched bracket. Quoted or not, \\n, \\t, \\r, \\\\, \\" and \\'
mean the same as in Python; any other backslash is kept, so regular expressions need no escapes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from bros.core.clock import thread_cpu_s
from bros.core.errors import InvalidRequestError
from bros.semantic.transforms import documents, steps
from bros.semantic.transforms.steps import (
    REGEX_TIMEOUT_S,
    ArgumentError,
    Function,
    Search,
    TransformError,
    check_length,
    check_size,
    item_at,
    quoted,
    to_text,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A transform in the registry.

    usage: its syntax, for messages.
    make: creates the transform from its arguments; raises ArgumentError.
    min_arguments: fewest arguments.
    max_arguments: most arguments.
    gives_list: whether it returns a list, of which [i] and [i:j] take parts.
    quick: whether a text of QUICK_CHARS takes it a few milliseconds at most.
    """

    usage: str
    make: Callable[..., Function]
    min_arguments: int = 0
    max_arguments: int = 0
    gives_list: bool = False
    quick: bool = True


_MANY = 100

REGISTRY: Mapping[str, Entry] = MappingProxyType(
    {
        "strip": Entry("strip", steps.strip),
        "lower": Entry("lower", steps.lower),
        "upper": Entry("upper", steps.upper),
        "truncate": Entry("truncate(n)", steps.truncate, 1, 1),
        "template": Entry('template("..{}..")', steps.template, 1, 1),
        "lines": Entry("lines[i]", steps.lines, gives_list=True),
        "split": Entry("split(sep)[i]", steps.split, 1, 1, gives_list=True),
        "comma_list": Entry("comma_list", steps.comma_list, gives_list=True),
        "numbered_list": Entry("numbered_list", steps.numbered_list, gives_list=True),
        "markdown_list": Entry("markdown_list", steps.markdown_list, gives_list=True),
        "join": Entry("join(sep)", steps.join, 1, 1),
        "regex": Entry("regex(pattern, group)", steps.regex, 1, 2, quick=False),
        "xml_tag": Entry("xml_tag(name)", steps.xml_tag, 1, 1),
        "code_block": Entry("code_block(language)", steps.code_block, 0, 1),
        "json": Entry("json", documents.json),
        "json_path": Entry("json_path(path)", documents.json_path, 1, 1),
        "yaml_path": Entry("yaml_path(path)", documents.yaml_path, 1, 1, quick=False),
        "bool": Entry("bool", steps.boolean),
        "int": Entry("int", steps.integer),
        "float": Entry("float", steps.number),
        "enum": Entry("enum(a|b)", steps.enum, 1, _MANY),
        "datetime": Entry("datetime(format)", steps.date_and_time, 0, 1, quick=False),
    }
)


MAX_SOURCE_CHARS = 4096
MAX_STEPS = 16
PIPELINE_S = 1.0
"""Most CPU time of a pipeline: 16 regular expressions, each with its own timeout, took 4 s."""
QUICK_CHARS = 4_000
"""Longest text that is transformed on the event loop."""

_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*")
_INDEX = re.compile(
    r"\[\s*(?:(?P<index>-?[0-9]{1,9})|(?P<low>-?[0-9]{1,9})?\s*(?P<range>:)\s*(?P<high>-?[0-9]{1,9})?)\s*\]"
)
_QUOTED = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')\s*(?=[,)])""", re.DOTALL)
_ESCAPE = re.compile(r"""\\([ntr\\"'])""")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class _TransformStep:
    written: str
    function: Function
    index: int | slice | None
    quick: bool

    def __call__(self, text: str, left_s: float) -> str:
        """left_s: CPU time that is left to the pipeline."""
        value: str | list[Any]
        if isinstance(self.function, Search):
            value = self.function(text, min(left_s, REGEX_TIMEOUT_S))
        else:
            value = self.function(text)
        if isinstance(value, list):
            check_length(len(value))
            if isinstance(self.index, int):
                value = item_at(value, self.index)
            elif self.index is not None:
                value = value[self.index]
        result = to_text(value)
        check_size(result)
        return result


@dataclass(frozen=True, slots=True)
class Transforms:
    """A pipeline of transforms. It is pure, and equal to another one with the same source.

    Its texts are bounded by MAX_CHARS, its lists by MAX_PARTS, and its CPU time by PIPELINE_S and
    the last transform, which is a pass over such a text.
    """

    source: str
    _steps: tuple[_TransformStep, ...] = field(repr=False, compare=False)

    def quickly(self, text: str) -> str | None:
        """The result, if it takes a few milliseconds at most; None if it may take longer.

        Raises TransformError.
        """
        if len(text) > QUICK_CHARS or not all(step.quick for step in self._steps):
            return None
        self._check(text)
        for step in self._steps:
            if len(text) > QUICK_CHARS:  # a template or a join has made it longer
                return None
            text = self._apply(step, text, PIPELINE_S)
        return text

    def __call__(self, text: str, cpu_s: Callable[[], float] = thread_cpu_s) -> str:
        """Apply all transforms; a list becomes JSON. Raises TransformError that names the
        transform that failed. cpu_s: CPU time that this thread has used."""
        self._check(text)
        end_s = cpu_s() + PIPELINE_S
        for step in self._steps:
            left_s = end_s - cpu_s()
            if left_s <= 0:
                raise TransformError(f"{step.written}: the transforms before it took too long")
            text = self._apply(step, text, left_s)
        return text

    def _check(self, text: str) -> None:
        try:
            check_size(text)
        except TransformError as error:
            raise TransformError(f"{self.source}: {error}") from error

    @staticmethod
    def _apply(step: _TransformStep, text: str, left_s: float) -> str:
        try:
            return step(text, left_s)
        except TransformError as error:
            raise TransformError(f"{step.written}: {error}") from error


def parse_transforms(source: str, param: str = "transforms") -> Transforms | None:
    """Parse a pipeline; None if the source is blank.

    Raises InvalidRequestError (`param`) for a syntax error, an unknown transform, or wrong
    arguments.
    """
    if not source.strip():
        return None
    if len(source) > MAX_SOURCE_CHARS:
        message = f"The transforms have more than {MAX_SOURCE_CHARS} characters."
        raise InvalidRequestError(message, param=param)
    return Transforms(source.strip(), _Parser(source, param).steps())


class _Parser:
    """A recursive-descent parser for one source."""

    def __init__(self, source: str, param: str) -> None:
        self._source = source
        self._param = param
        self._at = 0

    def steps(self) -> tuple[_TransformStep, ...]:
        steps = [self._step()]
        while self._at < len(self._source):
            if self._source[self._at] != "|":
                self._refuse("Here a | is expected, or the end")
            self._at += 1
            steps.append(self._step())
        if len(steps) > MAX_STEPS:
            self._refuse(f"There are more than {MAX_STEPS} transforms")
        return tuple(steps)

    def _step(self) -> _TransformStep:
        start = self._at
        name = _NAME.match(self._source, start)
        if name is None:
            self._refuse("Here the name of a transform is expected")
        entry = REGISTRY.get(name[1])
        if entry is None:
            self._refuse(_unknown(name[1]))
        self._at = name.end()
        arguments = self._arguments() if self._next() == "(" else []
        function = self._build(entry, arguments, start)
        index = self._index(entry) if self._next() == "[" else None
        return _TransformStep(self._source[start : self._at].strip(), function, index, entry.quick)

    def _build(self, entry: Entry, arguments: Sequence[str], start: int) -> Function:
        after = self._at
        self._at = start  # errors refer to the start of the transform
        if not entry.min_arguments <= len(arguments) <= entry.max_arguments:
            self._refuse(
                f"It is written {entry.usage}, and here {len(arguments)} arguments are found (one "
                "with a comma must be in quotes)"
            )
        try:
            function = entry.make(*arguments)
        except ArgumentError as error:
            self._refuse(f"{entry.usage}: {error}")
        self._at = after
        return function

    def _arguments(self) -> list[str]:
        """Parse from the opening parenthesis to after the closing one."""
        opened = self._at
        arguments: list[str] = []
        if self._source[opened:].removeprefix("(").lstrip().startswith(")"):
            self._at = self._source.index(")", opened) + 1
            self._skip_space()
            return arguments
        while self._next() != ")" or not arguments:
            self._at += 1  # skip the parenthesis or a comma
            arguments.append(self._argument(opened))
        self._at += 1
        self._skip_space()
        return arguments

    def _argument(self, opened: int) -> str:
        match = _QUOTED.match(self._source, self._at)
        if match is not None:
            self._at = match.end()
            text: str = match[1] if match[1] is not None else match[2]
        else:
            start = self._at
            self._skip_bare(opened)
            text = self._source[start : self._at].strip()
        meaning = {"n": "\n", "t": "\t", "r": "\r"}
        return _ESCAPE.sub(lambda escape: meaning.get(escape[1], escape[1]), text)

    def _skip_bare(self, opened: int) -> None:
        """Skip an unquoted argument, up to a comma or parenthesis outside of inner brackets."""
        expected: list[str] = []
        while self._at < len(self._source):
            mark = self._source[self._at]
            if mark == "\\":
                self._at += 1
            elif expected and mark == expected[-1]:
                expected.pop()
            elif not expected and mark in ",)":
                return
            elif mark in _CLOSING:
                expected.append(_CLOSING[mark])
            self._at += 1
        self._at = opened
        self._refuse("A bracket or quote is not closed; text with such marks must be in quotes")

    def _index(self, entry: Entry) -> int | slice:
        found = _INDEX.match(self._source, self._at)
        if found is None:
            self._refuse("Here an index such as [0], [-1] or [1:3] is expected")
        if not entry.gives_list:
            self._refuse(f"{entry.usage} does not give a list of which to take a part")
        self._at = found.end()
        self._skip_space()
        if found["range"] is None:
            return int(found["index"])
        low, high = found["low"], found["high"]
        return slice(None if low is None else int(low), None if high is None else int(high))

    def _next(self) -> str:
        return self._source[self._at : self._at + 1]

    def _skip_space(self) -> None:
        while self._next().isspace():
            self._at += 1

    def _refuse(self, reason: str) -> NoReturn:
        rest = self._source[self._at :].strip()
        position = f"at {quoted(rest)}" if rest else "at the end"
        raise InvalidRequestError(f"Transforms, {position}: {reason}.", param=self._param)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, REGISTRY, n=1)
    hint = f"perhaps {close[0]} is meant" if close else "there are " + ", ".join(REGISTRY)
    return f"There is no transform {quoted(name)}; {hint}"
