"""Transforms that search: by a regular expression, for an XML tag, for a block of code.

Apart from `regex`, which has a time limit, all of them read the text once.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import regex as regex_library

from bros.semantic.transforms.values import ArgumentError, Function, TransformError, shown

REGEX_TIMEOUT_S = 0.25
_MAX_PATTERN_CHARS = 1000
_MAX_PATTERN_SIZE = 50_000
_COUNTED = re.compile(r"\{[^{}]*\}")  # a{2,5}, and some that mean other things
_RECURSION = re.compile(r"\(\?(?:R|[+-]?[0-9]|&|P>)")
_TAG_NAME = re.compile(r"[A-Za-z_][\w.:-]*")


def regex(pattern: str, group: str = "0") -> Function:
    """The first match of a pattern, or one group of it by number or name."""
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise ArgumentError(f"the pattern has more than {_MAX_PATTERN_CHARS} characters")
    if _RECURSION.search(pattern):
        raise ArgumentError("patterns that contain themselves are not supported")
    if _expanded_size(pattern) > _MAX_PATTERN_SIZE:
        raise ArgumentError(f"{shown(pattern)} has too large numbers of repetitions")
    try:
        compiled = regex_library.compile(pattern)
    except Exception as error:  # the library lets errors of its own code through, too
        raise ArgumentError(f"{shown(pattern)} is not a regular expression: {error}") from error
    key: str | int = int(group) if group.isascii() and group.isdigit() else group
    if key not in compiled.groupindex and key not in range(compiled.groups + 1):
        raise ArgumentError(f"the pattern has no group {shown(group)}")

    def search(text: str) -> str:
        try:
            match = compiled.search(text, timeout=REGEX_TIMEOUT_S, concurrent=True)
        except TimeoutError as error:
            raise TransformError(
                f"{shown(pattern)} took longer than {REGEX_TIMEOUT_S:g} s"
            ) from error
        except MemoryError as error:
            raise TransformError(f"{shown(pattern)} took too much memory") from error
        found: str | None = None if match is None else match[key]
        if found is None:
            what = shown(pattern) if match is None else f"group {shown(group)}"
            raise TransformError(f"{what} does not match {shown(text)}")
        return found

    return search


def _expanded_size(pattern: str) -> int:
    """Not less than the atoms of a pattern once the library has written out all a{n}, which it
    does before it matches anything: at most everything so far is repeated."""
    size, at = 0, 0
    for counted in _COUNTED.finditer(pattern):
        times = [int(digits[:9]) for digits in re.findall(r"[0-9]+", counted[0])]
        size = (size + counted.end() - at) * max([1, *times])
        at = counted.end()
    return size + len(pattern) - at


def xml_tag(name: str) -> Function:
    """What stands between the first <name> and the </name> that closes it."""
    if not _TAG_NAME.fullmatch(name):
        raise ArgumentError(f"{shown(name)} is not the name of a tag")
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
        raise TransformError(f"there is no {missing} in {shown(text)}")

    return inside


def code_block(language: str = "") -> Function:
    """The first block between fences (``` or ~~~), of a language if one is given."""

    def inside(text: str) -> str:
        found = find_code_block(text, (language.lower(),) if language else ())
        if found is None:
            kind = f" of {language}" if language else ""
            raise TransformError(f"there is no block of code{kind} in {shown(text)}")
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
    """The first fenced block in one of these languages, () for any; one may end with the text."""
    opened: _Fence | None = None
    block: list[str] = []
    for line in text.split("\n"):
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
    """A line as CommonMark's fences are: three marks or more, and the language after them."""
    rest = line.strip()
    if not rest.startswith(("```", "~~~")):
        return None
    after = rest.lstrip(rest[0])
    if rest[0] == "`" and "`" in after:
        return None
    language = after.split(maxsplit=1)[0].lower() if after else ""
    return _Fence(rest[0], len(rest) - len(after), language)
