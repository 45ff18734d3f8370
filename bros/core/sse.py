"""Parses server-sent events from a stream of bytes that arrives in arbitrary chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

MAX_EVENT_BYTES = 1 << 20


class EventTooLongError(ValueError):
    """An event is longer than MAX_EVENT_BYTES."""


class Event(NamedTuple):
    """One server-sent event.

    kind: the `event` field, empty if there is none.
    data: the `data` lines, joined by line feeds.
    """

    kind: str
    data: bytes


class EventReader:
    """An incremental parser of server-sent events.

    As in the standard, lines end in LF, CRLF or CR, data may span lines, and the parser skips
    comments, unknown fields and an incomplete event at the end of the stream.
    """

    def __init__(self) -> None:
        self._rest = b""  # an incomplete line
        self._after_cr = False  # the last chunk ended in CR: an LF right after it ends no line
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0  # bytes of _data

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that this chunk completes. Raises EventTooLongError."""
        if not chunk:
            return []
        if self._after_cr and chunk[0] == 0x0A:
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r")
        lines = (self._rest + chunk).splitlines(keepends=True)
        self._rest = b""
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            self._rest = lines.pop()
        events = []
        for line in lines:
            event = self._line(line.rstrip(b"\r\n"))
            if event is not None:
                events.append(event)
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._complete()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value)
        elif name == b"event":
            self._kind = value.decode("utf-8", "replace")
        return None

    def _complete(self) -> Event | None:
        event = Event(self._kind, b"\n".join(self._data)) if self._data else None
        self._kind, self._size = "", 0
        self._data.clear()
        return event


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event of a response body. Raises EventTooLongError."""
    reader = EventReader()
    async for chunk in chunks:
        for event in reader.feed(chunk):
            yield event.data
