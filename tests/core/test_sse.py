"""Events out of bytes that are cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.sse import MAX_EVENT_BYTES, Event, EventReader, EventTooLongError


def read(*pieces: bytes) -> list[Event]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def data(value: bytes, kind: str = "") -> Event:
    return Event(kind, value)


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [data(b"a"), data(b"b")]),
        (b"data:a\n\n", [data(b"a")]),
        (b"data:  a\n\n", [data(b" a")]),
        (b"data\n\n", [data(b"")]),
        (b"data: a\ndata: b\n\n", [data(b"a\nb")]),
        (b": ping\n\ndata: a\n\n", [data(b"a")]),
        (b"event: error\ndata: a\n\ndata: b\n\n", [data(b"a", "error"), data(b"b")]),
        (b"event: lonely\n\ndata: b\n\n", [data(b"b")]),
        (b"id: 1\nretry: 5\nother: x\ndata: a\n\n", [data(b"a")]),
        (b"data: a\r\rdata: b\r\r", [data(b"a"), data(b"b")]),
        (b"data: a\r\n\r\n", [data(b"a")]),
        (b"data: cut", []),
        (b"data: cut\n", []),
        (b"\n\n\n", []),
        ("data: \u2028\u0085é\n\n".encode(), [data("\u2028\u0085é".encode())]),
    ],
)
def test_what_the_standard_says(stream: bytes, events: list[Event]) -> None:
    assert read(stream) == events


LINES = st.binary(max_size=12).filter(lambda b: not set(b) & set(b"\r\n"))


@given(
    events=st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=6),
    newline=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    comments=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=20),
)
def test_cuts_change_nothing(
    events: list[list[bytes]], newline: bytes, comments: bool, cuts: list[int]
) -> None:
    stream = b""
    for lines in events:
        if comments:
            stream += b": ping" + newline
        stream += b"".join(b"data: " + line + newline for line in lines) + newline
    bounds = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert read(*pieces) == [data(b"\n".join(lines)) for lines in events]
    assert read(*(bytes([byte]) for byte in stream)) == read(*pieces)


def test_event_is_there_with_the_piece_that_ends_it() -> None:
    reader = EventReader()
    assert reader.feed(b"data: a\r\n") == []
    assert reader.feed(b"\r") == [data(b"a")]
    assert reader.feed(b"\n") == []
    assert reader.feed(b"data: b\n\nda") == [data(b"b")]
    assert reader.feed(b"ta: c\n\n") == [data(b"c")]


def test_endless_event_is_refused() -> None:
    reader = EventReader()
    line = b"data: " + b"x" * (MAX_EVENT_BYTES // 4) + b"\n"
    for _ in range(3):
        reader.feed(line)
    with pytest.raises(EventTooLongError):
        reader.feed(line * 2)
    with pytest.raises(EventTooLongError):
        EventReader().feed(b"x" * (MAX_EVENT_BYTES + 1))


def test_only_the_size_of_one_event_is_limited() -> None:
    reader = EventReader()
    whole = b"data: " + b"x" * (MAX_EVENT_BYTES // 2) + b"\n\n"
    assert sum(len(reader.feed(whole)) for _ in range(5)) == 5
