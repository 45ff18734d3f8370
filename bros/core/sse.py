"""Server-sent events out of pieces of bytes that are cut anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

MAX_EVENT_BYTES = 1 << 20


class EventTooLongError(ValueError):
    """More than MAX_EVENT_BYTES without the end of an event."""


class Event(NamedTuple):
    """One server-sent event.

    kind: the server's name for it, empty if it gives none.
    data: its data lines, joined by line feeds.
    """

    kind: str
    data: bytes


class EventReader:
    """Returns each event with the piece of bytes that completes it (its blank line).

    As the standard says: lines end in LF, CRLF or CR, data may span lines, comments and unknown
    fields are skipped, and so is an event that the end of the stream cuts.
    """

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a line
        self._after_cr = False  # so a line feed that comes next ends no further line
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0  # bytes of _data

    def feed(self, piece: bytes) -> list[Event]:
        """Raises EventTooLongError."""
        if not piece:
            return []
        if self._after_cr and piece[0] == 0x0A:
            piece = piece[1:]
        self._after_cr = piece.endswith(b"\r")
        lines = (self._rest + piece).splitlines(keepends=True)
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


async def read_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event of a response body. Raises EventTooLongError."""
    reader = EventReader()
    async for piece in pieces:
        for event in reader.feed(piece):
            yield event.data
