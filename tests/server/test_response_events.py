"""The events of background responses: the same whenever they are read, and from wherever."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bros.server.responses.events import Events, LiveResponse, OutputEvents, background_events
from support.tier import examples

from .test_responses import read_events

KINDS = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {"call_id": "call_1", "name": "f", "arguments": ""},
}
PIECES = st.lists(st.text(st.sampled_from('aé😀\n"\u2028'), max_size=6), max_size=4)
OUTPUTS = st.lists(st.tuples(st.sampled_from(list(KINDS)), PIECES, st.booleans()), max_size=4)


def new_response() -> LiveResponse:
    fields = {"id": "resp_1", "created_at": 1, "model": "m", "service_tier": "flex", "store": True}
    echo = {
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {},
        "instructions": None, "temperature": 1.0, "top_p": 1.0,
    }  # fmt: skip
    return LiveResponse(**fields, background=True, echo=json.dumps(echo))  # type: ignore[arg-type]


def logprobs_of(text: str) -> list[tuple[str, bytes]]:
    """One token per byte."""
    return [
        (
            f'{{"token":"{byte}","logprob":-1.0,"bytes":[{byte}],"top_logprobs":[]}}',
            bytes([byte]),
        )
        for byte in text.encode()
    ]


def sent(events: Events) -> bytes:
    return b"".join(events.large) if events.large is not None else events.data


def merged(events: list[dict[str, Any]]) -> list[Any]:
    """The events, with the deltas that follow each other as one."""
    found: list[Any] = []
    for event in events:
        number = event.pop("sequence_number")
        if found and "delta" in event and found[-1][0].get("delta") is not None:
            last = found[-1][0]
            last["delta"] += event["delta"]
            if "logprobs" in last:
                last["logprobs"] += event["logprobs"]
            found[-1][1] = number
        else:
            found.append([event, number])
    return found


@given(OUTPUTS, st.sampled_from(["completed", "incomplete"]), st.booleans(), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_events_read_in_pieces_are_those_read_at_once(
    outputs: Any, status: Any, with_logprobs: bool, data: st.DataObject
) -> None:
    written, read, after = OutputEvents(new_response()), [], -1

    def look() -> None:
        nonlocal after
        if data.draw(st.booleans()):
            so_far = dataclasses.replace(written.response, output=list(written.output()))
            found = background_events(so_far, after, runs=True)
            found_data = sent(found).decode()
            numbers = [event["sequence_number"] for event in read_events(found_data)]
            assert all(number > after for number in numbers) and numbers == sorted(set(numbers))
            assert found.last == (numbers[-1] if numbers else after)
            after = found.last
            read.extend(read_events(found_data))

    waiting = background_events(written.response, -1, runs=False)
    read += read_events(sent(waiting).decode())
    after = waiting.last
    written.begin()
    look()
    for number, (kind, pieces, closes) in enumerate(outputs):
        written.open({"id": f"it_{number}", "type": kind, "status": "in_progress", **KINDS[kind]})
        for piece in pieces:
            entries = logprobs_of(piece) if with_logprobs and kind == "message" else []
            written.add(piece, entries)
            look()
        if closes:
            written.close("completed")
            look()
    written.close(status)
    look()
    written.response.status = status
    rest = background_events(written.response, after, runs=True)
    whole = background_events(written.response, -1, runs=True)
    read += read_events(sent(rest).decode())
    assert rest.last == whole.last
    assert merged(read) == merged(read_events(sent(whole).decode()))
    assert not sent(background_events(written.response, whole.last, runs=True))
