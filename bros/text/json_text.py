"""JSON of clients without holding the interpreter: parts are counted before it is parsed, and large
values are written piece by piece.

The parser and the writer of C hold the interpreter for all of a text: 52 ms for 200,000 lists, 25
ms for 100,000 numbers. On a thread that delays the event loop as much as on the loop itself.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import regex

MAX_TOOL_PARTS = 20_000
"""Most objects, lists, keys and values of all tools of a request, of the variables of a chat
template, and of each kind of the arguments of a call. Templates write them as JSON."""

_SMALL_PARTS = 5_000
"""What is written at once: 1 ms."""

_CONTAINER_BYTES, _VALUE_BYTES = 200, 40

STRING = regex.compile(rb'"(?:[^"\\]+|\\.)*+(?:"|\\?\Z)', regex.DOTALL)
"""A JSON string; to the end of the text if it is not closed, so that each byte is read once."""


class WrittenJson(list[str]):
    """A list whose values are JSON texts in ASCII already, so that it can be written in pieces, any
    number of times, in the time that copying takes."""


class JsonParts(NamedTuple):
    """How many parts a JSON text has.

    containers: objects and lists.
    keys: of objects.
    values: all others count as well, but empty lists and objects.
    """

    containers: int
    keys: int
    values: int

    def exceeds(self, most: JsonParts) -> bool:
        """Whether there are more of any than in `most`."""
        return any(count > limit for count, limit in zip(self, most, strict=True))

    @property
    def num_bytes(self) -> int:
        """Memory of the parsed objects, lists and values. `{"a":1}` takes 184 bytes."""
        return _CONTAINER_BYTES * self.containers + _VALUE_BYTES * self.values

    @property
    def limits(self) -> str:
        """The numbers, in the order of `__str__`."""
        return f"{self.containers}, {self.keys} and {self.values}"

    def __str__(self) -> str:
        return f"{self.containers} objects and lists, {self.keys} keys and {self.values} values"


def excess_of(text: bytes, most: JsonParts) -> JsonParts | None:
    """The parts of a JSON text, if they exceed `most`; it need not be valid."""
    if not _counts(text).exceeds(most):  # those in strings count, too, but it takes 5 ms
        return None
    found = _counts(STRING.sub(b"", text, concurrent=True))
    return found if found.exceeds(most) else None


def parsed_bytes(text: bytes) -> int:
    """About the memory of a JSON text and of what it is when it is parsed."""
    rough = _counts(text).num_bytes  # what looks like JSON in strings counts, too
    if rough > len(text):
        rough = _counts(STRING.sub(b"", text, concurrent=True)).num_bytes
    return len(text) + rough


def _counts(text: bytes) -> JsonParts:
    """Of JSON without strings."""
    containers = text.count(b"{") + text.count(b"[")
    return JsonParts(containers, text.count(b":"), text.count(b",") + 1)


def has_more_parts(value: Any, most: int) -> bool:
    """Whether parsed JSON has more than `most` keys and values, lists and objects included."""
    count, inner = 0, [value]
    while inner:
        each = inner.pop()
        count += 1
        if isinstance(each, dict):
            count += len(each)
            inner += each.values()
        elif isinstance(each, list | tuple):
            inner += each
        if count + len(inner) > most:
            return True
    return False


def is_text(value: Any) -> bool:
    """Whether no string in parsed JSON has a lone surrogate."""
    inner: list[Any] = [value]
    while inner:
        each = inner.pop()
        if isinstance(each, dict):
            inner += each
            inner += each.values()
        elif isinstance(each, list):
            inner += each
        elif isinstance(each, str):
            try:
                each.encode()
            except UnicodeEncodeError:
                return False
    return True


def write_json(value: Any, **options: Any) -> str:
    """As json.dumps; a large value is written by Python, so that other threads can run."""
    if not has_more_parts(value, _SMALL_PARTS):
        return json.dumps(value, **options)
    return "".join(json.JSONEncoder(**options).iterencode(value))
