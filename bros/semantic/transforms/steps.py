"""The transforms for text, lists, numbers and patterns, and helpers of all transforms."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import regex as regex_library

from bros.core.errors import BrosError

MAX_CHARS = 4 * 1024 * 1024
"""Longest text before and after each transform."""
MAX_PARTS = 100_000
"""Longest list."""
_SHOWN_CHARS = 60

Function = Callable[[str], str | list[Any]]
"""One transform with its arguments. Raises TransformError."""


class TransformError(BrosError):
    """A transform cannot process a text; the message says what it expected and found."""


class ArgumentError(ValueError):
    """The arguments of a transform are invalid."""


def quoted(text: str) -> str:
    """A text as quoted in an error message: shortened, on one line."""
    if len(text) > _SHOWN_CHARS:
        text = text[:_SHOWN_CHARS] + "..."
    return repr(text)


def to_text(value: Any) -> str:
    """A string unchanged, other values as JSON. Raises TransformError if JSON cannot express it."""
    return value if isinstance(value, str) else json_text(value)


def json_text(value: Any) -> str:
    """A value as JSON, strings too. Raises TransformError if JSON cannot express it."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TransformError(f"the value cannot be written as JSON: {error}") from error


def whole_number(argument: str, minimum: int | None = None) -> int:
    """Parse an argument as an integer of at most 9 digits. Raises ArgumentError."""
    digits = argument.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
        raise ArgumentError(f"{quoted(argument)} is not a whole number")
    number = int(argument)
    if minimum is not None and number < minimum:
        raise ArgumentError(f"{argument} is less than {minimum}")
    return number


def check_size(text: str) -> None:
    """Raises TransformError for a text that is too long or cannot be encoded as UTF-8."""
    if len(text) > MAX_CHARS:
        raise TransformError(f"the text has {len(text)} characters, more than {MAX_CHARS}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TransformError("the text holds half a character (a lone surrogate)") from error


def check_chars(count: int) -> None:
    """Raises TransformError if a text that is about to be built is too long."""
    if count > MAX_CHARS:
        raise TransformError(f"the text would have {count} characters, more than {MAX_CHARS}")


def check_length(count: int) -> None:
    """Raises TransformError for a list that is too long."""
    if count > MAX_PARTS:
        raise TransformError(f"the list has {count} parts, more than {MAX_PARTS}")


def item_at(parts: Sequence[Any], index: int) -> Any:
    """The part at an index, which may be negative. Raises TransformError if it is out of range."""
    if not -len(parts) <= index < len(parts):
        raise TransformError(f"there is no part [{index}] in a list of {len(parts)}")
    return parts[index]


_HOLE = "{}"


def strip() -> Function:
    return str.strip


def lower() -> Function:
    return str.lower


def upper() -> Function:
    return str.upper


def truncate(length: str) -> Function:
    """The first `length` characters."""
    kept = whole_number(length, minimum=0)
    return lambda text: text[:kept]


def template(form: str) -> Function:
    """The form with the text in place of each {}."""
    holes = form.count(_HOLE)
    if not holes:
        raise ArgumentError("the template needs a {} for the value")

    def fill(text: str) -> str:
        check_chars(len(form) + holes * (len(text) - len(_HOLE)))
        return form.replace(_HOLE, text)

    return fill


_NUMBERED = re.compile(r"\s*\(?[0-9]{1,9}[.):]\s+(\S.*)")
_BULLET = re.compile(r"\s*[-*+•]\s+(\S.*)")


def lines() -> Function:
    """The non-blank lines, stripped."""
    return lambda text: _not_empty(_pieces(text, "\n"))


def split(separator: str) -> Function:
    """The parts between separators, unchanged."""
    if not separator:
        raise ArgumentError("the separator is empty")

    def parts(text: str) -> list[str]:
        check_length(text.count(separator) + 1)
        return text.split(separator)

    return parts


def comma_list() -> Function:
    """The non-empty parts between commas, stripped."""
    return lambda text: _not_empty(_pieces(text, ","))


def numbered_list() -> Function:
    """The items of lines such as "1. ..." or "1) ..."; other lines are ignored."""
    return lambda text: _items(text, _NUMBERED, "numbered item such as '1. ...'")


def markdown_list() -> Function:
    """The items of lines such as "- ...", with any Markdown bullet; other lines are ignored."""
    return lambda text: _items(text, _BULLET, "item such as '- ...'")


def join(separator: str) -> Function:
    """The parts of a list with the separator between them."""

    def joined(text: str) -> str:
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, list):
            raise TransformError(f"{quoted(text)} is not a list")
        check_length(len(value))
        parts = list(map(to_text, value))
        check_chars(sum(map(len, parts)) + len(separator) * max(len(parts) - 1, 0))
        return separator.join(parts)

    return joined


def _pieces(text: str, separator: str) -> Iterator[str]:
    """What text.split(separator) returns, piece by piece: the list can be ten times as large as
    the text."""
    start = 0
    while (end := text.find(separator, start)) >= 0:
        yield text[start:end]
        start = end + len(separator)
    yield text[start:]


def _bounded(parts: Iterable[str]) -> list[str]:
    """A list of the parts. Raises TransformError as soon as there are too many."""
    found: list[str] = []
    for part in parts:
        if len(found) == MAX_PARTS:
            raise TransformError(f"the list has more than {MAX_PARTS} parts")
        found.append(part)
    return found


def _not_empty(parts: Iterable[str]) -> list[str]:
    return _bounded(stripped for part in parts if (stripped := part.strip()))


def _items(text: str, pattern: re.Pattern[str], what: str) -> list[str]:
    matches = map(pattern.match, _pieces(text, "\n"))
    found = _bounded(match[1].rstrip() for match in matches if match)
    if not found:
        raise TransformError(f"there is no {what} in {quoted(text)}")
    return found


_TRUE = frozenset({"true", "yes", "y", "1", "on"})
_FALSE = frozenset({"false", "no", "n", "0", "off"})
_DECORATION = " \t\r\n\"'`*.,!"  # characters that models like to put around a word
_INTEGER = re.compile(r"([+-]?)([0-9]{1,1000}|[0-9]{1,3}(?:,[0-9]{3}){1,300})\.?")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MAX_CHARS = 2000  # longest number, date or format


def boolean() -> Function:
    """true or false, from yes, no, 1, 0, on, off and the like."""

    def checked(text: str) -> str:
        word = _undecorated(text).lower()
        if word not in _TRUE | _FALSE:
            raise TransformError(f"{quoted(text)} is neither true nor false")
        return "true" if word in _TRUE else "false"

    return checked


def integer() -> Function:
    """An integer in decimal digits; thousands separators and a final period are dropped."""

    def checked(text: str) -> str:
        match = _INTEGER.fullmatch(text.strip())
        if match is None:
            raise TransformError(f"{quoted(text)} is not a whole number")
        digits = match[2].replace(",", "").lstrip("0") or "0"
        return "-" + digits if match[1] == "-" and digits != "0" else digits

    return checked


def number() -> Function:
    """A number as the repr of the nearest double."""

    def checked(text: str) -> str:
        word = text.strip()
        if len(word) > _MAX_CHARS or not _NUMBER.fullmatch(word):
            raise TransformError(f"{quoted(text)} is not a number")
        value = float(word)
        if not math.isfinite(value):
            raise TransformError(f"{quoted(text)} is too large a number")
        return repr(value)

    return checked


def enum(*options: str) -> Function:
    """The matching option; case and surrounding quotes and punctuation are ignored."""
    names = [name.strip() for option in options for name in option.split("|")]
    if not all(names):
        raise ArgumentError("an option is empty")
    known = {name.casefold(): name for name in names}
    if len(known) < len(names):
        raise ArgumentError("two options are the same")

    def checked(text: str) -> str:
        for word in (text.strip(), _undecorated(text)):
            if word.casefold() in known:
                return known[word.casefold()]
        raise TransformError(f"{quoted(text)} is none of {', '.join(names)}")

    return checked


def date_and_time(form: str = "") -> Function:
    """A date in a strptime format (by default ISO 8601), as ISO 8601."""
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
            raise TransformError(f"{quoted(text)} is not a date {expected}") from error
        return moment.isoformat()

    return checked


def _check_format(form: str) -> None:
    """Raises ArgumentError if strptime does not accept the format."""
    if len(form) > _MAX_CHARS:
        raise ArgumentError("the format is too long")
    try:
        datetime.strptime("", form)
    except ValueError as error:
        if "does not match" not in str(error):
            raise ArgumentError(f"{quoted(form)} is not a format of dates: {error}") from error
    except (re.error, IndexError) as error:
        raise ArgumentError(f"{quoted(form)} has a directive twice") from error


def _undecorated(text: str) -> str:
    """A one-word answer without the decoration that models put around it."""
    return text.strip(_DECORATION)


REGEX_TIMEOUT_S = 0.25
_MAX_PATTERN_CHARS = 1000
_MAX_PATTERN_SIZE = 50_000
_COUNTED = re.compile(r"\{[^{}]*\}")  # a{2,5}, and some that mean other things
_RECURSION = re.compile(r"\(\?(?:R|[+-]?[0-9]|&|P>)")
_TAG_NAME = re.compile(r"[A-Za-z_][\w.:-]*")


@dataclass(frozen=True, slots=True)
class Search:
    """The transform `regex`: the only one whose time is not linear in its text."""

    pattern: str
    group: str
    compiled: regex_library.Pattern[str]
    key: str | int

    def __call__(self, text: str, timeout_s: float = REGEX_TIMEOUT_S) -> str:
        """timeout_s: CPU time of the process, as the library measures it."""
        try:
            match = self.compiled.search(text, timeout=timeout_s, concurrent=True)
        except TimeoutError as error:
            raise TransformError(
                f"{quoted(self.pattern)} took longer than {timeout_s:.2g} s"
            ) from error
        except MemoryError as error:
            raise TransformError(f"{quoted(self.pattern)} took too much memory") from error
        found: str | None = None if match is None else match[self.key]
        if found is None:
            what = quoted(self.pattern) if match is None else f"group {quoted(self.group)}"
            raise TransformError(f"{what} does not match {quoted(text)}")
        return found


def regex(pattern: str, group: str = "0") -> Search:
    """The first match of a pattern, or one of its groups by number or name."""
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise ArgumentError(f"the pattern has more than {_MAX_PATTERN_CHARS} characters")
    if _RECURSION.search(pattern):
        raise ArgumentError("recursive patterns are not supported")
    if _expanded_size(pattern) > _MAX_PATTERN_SIZE:
        raise ArgumentError(f"{quoted(pattern)} has too large numbers of repetitions")
    try:
        compiled = regex_library.compile(pattern)
    except Exception as error:  # the library also raises its internal errors
        raise ArgumentError(f"{quoted(pattern)} is not a regular expression: {error}") from error
    key: str | int = int(group) if group.isascii() and group.isdigit() else group
    if key not in compiled.groupindex and key not in range(compiled.groups + 1):
        raise ArgumentError(f"the pattern has no group {quoted(group)}")

    return Search(pattern, group, compiled, key)


def _expanded_size(pattern: str) -> int:
    """An upper bound of the atoms of a pattern after the library has expanded all a{n}.

    The library does so before it matches. Each count repeats at most everything before it.
    """
    size, at = 0, 0
    for counted in _COUNTED.finditer(pattern):
        times = [int(digits[:9]) for digits in re.findall(r"[0-9]+", counted[0])]
        size = (size + counted.end() - at) * max([1, *times])
        at = counted.end()
    return size + len(pattern) - at


def xml_tag(name: str) -> Function:
    """The text between the first <name> and its matching </name>."""
    if not _TAG_NAME.fullmatch(name):
        raise ArgumentError(f"{quoted(name)} is not the name of a tag")
    tag = re.compile(rf"<{re.escape(name)}(?:\s[^<>]*)?>|</{re.escape(name)}\s*>|<{name}/>")

    def inside(text: str) -> str:
        depth, start = 0, 0
        for mark in tag.finditer(text):
            if mark[0].endswith("/>"):
                if not depth:
                    return ""
            elif mark[0].startswith("</"):
                depth -= depth > 0
                if not depth and start:
                    return text[start : mark.start()]
            else:
                start = start or mark.end()
                depth += 1
        missing = f"</{name}>" if start else f"<{name}>"
        raise TransformError(f"there is no {missing} in {quoted(text)}")

    return inside


def code_block(language: str = "") -> Function:
    """The first fenced code block (``` or ~~~), of a language if one is given."""

    def inside(text: str) -> str:
        found = find_code_block(text, (language.lower(),) if language else ())
        if found is None:
            kind = f" of {language}" if language else ""
            raise TransformError(f"there is no block of code{kind} in {quoted(text)}")
        return found

    return inside


class _Fence(NamedTuple):
    mark: str  # ` or ~
    length: int
    language: str

    def is_closed_by(self, other: _Fence) -> bool:
        is_long_enough = other.mark == self.mark and other.length >= self.length
        return is_long_enough and not other.language


def find_code_block(text: str, languages: tuple[str, ...]) -> str | None:
    """The first fenced block in one of these languages, () for any; it need not be closed."""
    opened: _Fence | None = None
    block: list[str] = []
    for line in _pieces(text, "\n"):
        fence = _fence(line)
        if opened is None:
            opened, block = fence, []
        elif fence is None or not opened.is_closed_by(fence):
            block.append(line)
        elif not languages or opened.language in languages:
            return "\n".join(block)
        else:
            opened = None
    if opened is not None and (not languages or opened.language in languages):
        return "\n".join(block)
    return None


def _fence(line: str) -> _Fence | None:
    """Parse a CommonMark fence: three or more marks, then the language. None for other lines."""
    rest = line.strip()
    if not rest.startswith(("```", "~~~")):
        return None
    after = rest.lstrip(rest[0])
    if rest[0] == "`" and "`" in after:
        return None
    language = after.split(maxsplit=1)[0].lower() if after else ""
    return _Fence(rest[0], len(rest) - len(after), language)
