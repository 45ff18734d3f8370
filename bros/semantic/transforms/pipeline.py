"""All transforms by name, and several of them one after another: `strip | json_path($.a) | upper`.

    transforms = transform ("|" transform)*
    transform  = name ["(" argument ("," argument)* ")"] ["[" place or low:high "]"]

Arguments may be in single or double quotes, and must be if they have white space at an end, or a
comma or bracket without its counterpart. In both forms \\n, \\t, \\r, \\\\, \\" and \\' mean what
they mean in Python; every other backslash stays, so that regular expressions need no more of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NoReturn

from bros.core.errors import InvalidRequestError
from bros.semantic.transforms import documents, steps
from bros.semantic.transforms.steps import (
    ArgumentError,
    Function,
    TransformError,
    at_place,
    check_parts,
    check_size,
    shown,
    to_text,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """make: of the arguments, raises ArgumentError.
    usage: how it is written. Between `least` and `most` arguments are taken.
    gives_list: one part can be taken with [i], some with [i:j].
    """

    usage: str
    make: Callable[..., Function]
    least: int = 0
    most: int = 0
    gives_list: bool = False


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
        "regex": Entry("regex(pattern, group)", steps.regex, 1, 2),
        "xml_tag": Entry("xml_tag(name)", steps.xml_tag, 1, 1),
        "code_block": Entry("code_block(language)", steps.code_block, 0, 1),
        "json": Entry("json", documents.json),
        "json_path": Entry("json_path(path)", documents.json_path, 1, 1),
        "yaml_path": Entry("yaml_path(path)", documents.yaml_path, 1, 1),
        "bool": Entry("bool", steps.boolean),
        "int": Entry("int", steps.integer),
        "float": Entry("float", steps.number),
        "enum": Entry("enum(a|b)", steps.enum, 1, _MANY),
        "datetime": Entry("datetime(format)", steps.date_and_time, 0, 1),
    }
)


MAX_SOURCE_CHARS = 4096
MAX_STEPS = 16

_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*")
_PLACE = re.compile(
    r"\[\s*(?:(?P<index>-?[0-9]{1,9})|(?P<low>-?[0-9]{1,9})?\s*(?P<range>:)\s*(?P<high>-?[0-9]{1,9})?)\s*\]"
)
_QUOTED = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')\s*(?=[,)])""", re.DOTALL)
_ESCAPE = re.compile(r"""\\([ntr\\"'])""")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class _Step:
    written: str
    function: Function
    place: int | slice | None

    def __call__(self, text: str) -> str:
        value = self.function(text)
        if isinstance(value, list):
            check_parts(len(value))
            if isinstance(self.place, int):
                value = at_place(value, self.place)
            elif self.place is not None:
                value = value[self.place]
        result = to_text(value)
        check_size(result)
        return result


@dataclass(frozen=True, slots=True)
class Transforms:
    """Some transforms as one, pure and bounded: in text (MAX_CHARS), in parts of lists (MAX_PARTS)
    and in time, which is that of reading such a text MAX_STEPS times; a regular expression is
    stopped. Two of the same source are equal."""

    source: str
    _steps: tuple[_Step, ...] = field(repr=False, compare=False)

    def __call__(self, text: str) -> str:
        """The text after the last of them; a list is JSON. Raises TransformError, which names
        the transform that failed."""
        try:
            check_size(text)
        except TransformError as error:
            raise TransformError(f"{self.source}: {error}") from error
        for step in self._steps:
            try:
                text = step(text)
            except TransformError as error:
                raise TransformError(f"{step.written}: {error}") from error
        return text


def parse_transforms(source: str, param: str = "transforms") -> Transforms | None:
    """The transforms that a text names; None if it is blank.

    Raises InvalidRequestError (`param`) if it is not written as in the grammar, names a transform
    that there is not, or gives one arguments that it does not take.
    """
    if not source.strip():
        return None
    if len(source) > MAX_SOURCE_CHARS:
        message = f"The transforms have more than {MAX_SOURCE_CHARS} characters."
        raise InvalidRequestError(message, param=param)
    return Transforms(source.strip(), _Parser(source, param).steps())


class _Parser:
    """Reads one source from left to right."""

    def __init__(self, source: str, param: str) -> None:
        self._source = source
        self._param = param
        self._at = 0

    def steps(self) -> tuple[_Step, ...]:
        steps = [self._step()]
        while self._at < len(self._source):
            if self._source[self._at] != "|":
                self._refuse("Here a | is expected, or the end")
            self._at += 1
            steps.append(self._step())
        if len(steps) > MAX_STEPS:
            self._refuse(f"There are more than {MAX_STEPS} transforms")
        return tuple(steps)

    def _step(self) -> _Step:
        start = self._at
        name = _NAME.match(self._source, start)
        if name is None:
            self._refuse("Here the name of a transform is expected")
        entry = REGISTRY.get(name[1])
        if entry is None:
            self._refuse(_unknown(name[1]))
        self._at = name.end()
        arguments = self._arguments() if self._next() == "(" else []
        function = self._made(entry, arguments, start)
        place = self._place(entry) if self._next() == "[" else None
        return _Step(self._source[start : self._at].strip(), function, place)

    def _made(self, entry: Entry, arguments: Sequence[str], start: int) -> Function:
        after = self._at
        self._at = start  # of which an error is about
        if not entry.least <= len(arguments) <= entry.most:
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
        """From the opening bracket to behind the closing one."""
        opened = self._at
        arguments: list[str] = []
        if self._source[opened:].removeprefix("(").lstrip().startswith(")"):
            self._at = self._source.index(")", opened) + 1
            self._skip_space()
            return arguments
        while self._next() != ")" or not arguments:
            self._at += 1  # behind the bracket or a comma
            arguments.append(self._argument(opened))
        self._at += 1
        self._skip_space()
        return arguments

    def _argument(self, opened: int) -> str:
        quoted = _QUOTED.match(self._source, self._at)
        if quoted is not None:
            self._at = quoted.end()
            text: str = quoted[1] if quoted[1] is not None else quoted[2]
        else:
            start = self._at
            self._skip_bare(opened)
            text = self._source[start : self._at].strip()
        meaning = {"n": "\n", "t": "\t", "r": "\r"}
        return _ESCAPE.sub(lambda escape: meaning.get(escape[1], escape[1]), text)

    def _skip_bare(self, opened: int) -> None:
        """To the comma or bracket that ends an argument, over pairs of brackets."""
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

    def _place(self, entry: Entry) -> int | slice:
        found = _PLACE.match(self._source, self._at)
        if found is None:
            self._refuse("Here a place such as [0], [-1] or [1:3] is expected")
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
        place = f"at {shown(rest)}" if rest else "at the end"
        raise InvalidRequestError(f"Transforms, {place}: {reason}.", param=self._param)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, REGISTRY, n=1)
    hint = f"perhaps {close[0]} is meant" if close else "there are " + ", ".join(REGISTRY)
    return f"There is no transform {shown(name)}; {hint}"
