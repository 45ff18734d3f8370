"""Answers into records, on a clock that stands still but where the script moves it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.bench.client import LINGER_S, Client, Outcome, Record
from bros.bench.dialects import Endpoint, RequestFormat, dialect_of
from bros.bench.plan import Planned
from bros.simulator.virtual_loop import LoopClock, run_virtual
from support.bench_server import (
    EVENT_STREAM,
    FakeHttp,
    Script,
    answer,
    event,
    planned,
    render,
    text,
    usage,
)
from support.tier import examples

DONE = event("[DONE]")
JSON = {"content-type": "application/json"}


def ask(
    script: Script,
    *,
    request: Planned | None = None,
    dialect: str = "bros",
    endpoint: Endpoint = Endpoint.COMPLETIONS,
    **options: Any,
) -> tuple[Record, float | None]:
    """The record of one request that is sent a second after the start, and what `send` returns."""

    async def main() -> tuple[Record, float | None]:
        request_format = RequestFormat(dialect=dialect_of(dialect), model="m", endpoint=endpoint)
        client = Client(FakeHttp(lambda _: script), "http://x", request_format, render, **options)
        clock = LoopClock()
        start_s = clock.now()
        await asyncio.sleep(1.0)
        record = Record(planned=request or planned(), due_s=1.0)
        prepared = client.prepare(record.planned)
        wait_s = await client.send(record, prepared, lambda: clock.now() - start_s)
        return record, wait_s

    return run_virtual(main)


def stream(*pieces: bytes, **options: Any) -> Script:
    """Pieces that come a second after each other."""
    return Script(pieces=[(1.0, piece) for piece in pieces], **options)


def micros(seconds: float) -> int:
    whole = round(seconds * 1e6)
    assert seconds == pytest.approx(whole / 1e6, abs=1e-8)
    return whole


def test_whole_answer() -> None:
    record, _ = ask(
        stream(
            event(text("")),  # no text, so not the first token
            event(text("a")),
            event(text("b") | {"service_tier": "flex"}) + event(text("c")),
            event(text("", "length")),
            event(usage(4, 3, 2)) + DONE,
        )
    )
    assert record.sent_s == 1.0
    assert list(record.chunk_times_s) == [3.0, 4.0, 4.0]
    assert record.end_s == 6.0
    assert record.outcome is Outcome.COMPLETED
    assert (record.status, record.finish_reason, record.tier) == (200, "length", "flex")
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (4, 3, 2)
    assert record.detail is None


@pytest.mark.parametrize(
    ("delta", "speaks"),
    [
        ({"role": "assistant", "content": ""}, False),
        ({}, False),
        (None, False),
        ({"content": None}, False),
        ({"content": "a"}, True),
        ({"content": " "}, True),
        ({"reasoning_content": "a"}, True),
        ({"reasoning": "a", "content": None}, True),
        ({"tool_calls": [{"index": 0}]}, True),
        ({"tool_calls": []}, False),
    ],
)
def test_first_token_of_a_chat_is_the_first_that_says_something(delta: Any, speaks: bool) -> None:
    first = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    last = {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]}
    record, _ = ask(
        stream(event(first), event(last), DONE),
        endpoint=Endpoint.CHAT,
        request=planned(forced=False),
    )
    assert list(record.chunk_times_s) == ([2.0, 3.0] if speaks else [3.0])
    assert (record.outcome, record.end_s) == (Outcome.COMPLETED, 4.0)


def test_tokens_without_text_count() -> None:
    chunk = {"choices": [{"text": "", "token_ids": [7], "finish_reason": None}]}
    record, _ = ask(stream(event(chunk), event(text("", "stop")), DONE))
    assert list(record.chunk_times_s) == [2.0]


def test_an_error_that_is_null_is_none() -> None:
    parts = (text("a"), text("", "stop"), usage(4, 1))
    record, _ = ask(
        stream(*(event(part | {"error": None}) for part in parts), DONE),
        request=planned(forced=False),
    )
    assert (record.outcome, record.detail, record.output_tokens) == (Outcome.COMPLETED, None, 1)


def test_end_is_done_and_not_when_the_connection_closes() -> None:
    record, _ = ask(stream(event(text("a", "stop")), DONE, end_s=100.0))
    assert (record.outcome, record.end_s) == (Outcome.COMPLETED, 3.0)


def test_a_connection_that_breaks_after_done_spoils_nothing() -> None:
    record, _ = ask(stream(event(text("a", "stop")), DONE, breaks="reset"))
    assert (record.outcome, record.detail) == (Outcome.COMPLETED, None)


def test_what_comes_after_done_is_not_read() -> None:
    record, _ = ask(stream(event(text("a", "stop")), DONE + event(text("b")) + event("{"), b"x"))
    assert (record.outcome, list(record.chunk_times_s)) == (Outcome.COMPLETED, [2.0])


def test_a_stall_after_done_spoils_nothing() -> None:
    script = Script(pieces=[(0.0, event(text("a", "stop")) + DONE)], hang=True)
    record, _ = ask(script, idle_s=LINGER_S / 2)
    assert (record.outcome, record.end_s, record.detail) == (Outcome.COMPLETED, 1.0, None)


def test_a_connection_that_stays_open_after_done_is_soon_closed() -> None:
    async def main() -> float:
        http = FakeHttp(lambda _: stream(event(text("a", "stop")), DONE, hang=True))
        client = Client(
            http, "http://x", RequestFormat(dialect=dialect_of("bros"), model="m"), render
        )
        clock = LoopClock()
        start_s = clock.now()
        record = Record(planned=planned(), due_s=0.0)
        await client.send(record, client.prepare(record.planned), clock.now)
        assert http.open_now == 0
        return clock.now() - start_s

    assert run_virtual(main) == pytest.approx(2.0 + LINGER_S)


def test_without_done_a_finish_reason_is_enough() -> None:
    """transformers' server sends no [DONE]."""
    record, _ = ask(stream(event(text("a", "stop")), end_s=0.5))
    assert (record.outcome, record.end_s) == (Outcome.COMPLETED, 2.5)


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        (stream(event(text("a"))), "the stream ended without a finish reason"),
        (stream(event(text("a")), DONE), "the stream ended without a finish reason"),
        (stream(event(text("a")), b'data: {"choi'), "the stream ended without a finish reason"),
        (
            stream(event(text("a", "length")), event(usage(4, 2)), DONE),
            "2 of 3 tokens, finish reason 'length'",
        ),
        (stream(event(text("a", "abort")), DONE), "finish reason 'abort'"),
    ],
)
def test_cut(script: Script, detail: str) -> None:
    record, _ = ask(script)
    assert record.outcome is Outcome.CUT
    assert record.end_s == 1.0 + len(script.pieces)
    assert list(record.chunk_times_s) == [2.0]
    assert record.detail == f"{detail} (after 1 chunks, the last 1.000 s after the request)"


@pytest.mark.parametrize("dialect", ["bros", "plain"])
def test_natural_and_unforced_answers_may_be_short(dialect: str) -> None:
    request = planned(forced=dialect == "plain")  # which has no means to force it
    script = stream(event(text("a", "stop")), event(usage(4, 1)), DONE)
    assert ask(script, request=request, dialect=dialect)[0].outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("bad", "detail"),
    [
        (event({"error": {"message": "out of memory", "code": 500}}), "error event: out of memory"),
        (event({"error": "boom"}), "error event: boom"),
        (event({"object": "error", "message": "old"}), "error event: old"),
        (b'event: error\ndata: {"detail": "x"}\n\n', "error event: x"),
        (event({"error": {"code": 3}}), 'error event: {"code": 3}'),
        (event("{nothing"), "not a chunk: {nothing"),
        (event("[1]"), "not a chunk: [1]"),
        (event('{"choices": 3}'), 'not a chunk: {"choices": 3}'),
        (event('{"choices": ["x"]}'), 'not a chunk: {"choices": ["x"]}'),
        (b"data: \xff\n\n", "not a chunk: \ufffd"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "not a chunk: " + "[" * 297 + "..."),
        (b"x" * 2_000_000, "an event of more than 1048576 bytes"),
    ],
)
def test_error_in_the_middle(bad: bytes, detail: str) -> None:
    record, _ = ask(stream(event(text("a")), bad, event(text("b", "stop")) + DONE))
    assert record.outcome is Outcome.FAILED
    assert (record.end_s, list(record.chunk_times_s)) == (3.0, [2.0])
    assert record.detail is not None and record.detail.startswith(detail)
    assert record.status == 200


@pytest.mark.parametrize(
    ("status", "headers", "body", "outcome", "detail"),
    [
        (429, JSON, {"error": {"message": "busy"}}, Outcome.REFUSED, "429: busy"),
        (503, JSON, {"error": {"message": "stopping"}}, Outcome.REFUSED, "503: stopping"),
        (500, JSON, {"error": {"message": "oops"}}, Outcome.FAILED, "500: oops"),
        (422, JSON, {"detail": "Unexpected: slo"}, Outcome.FAILED, "422: Unexpected: slo"),
        (400, JSON, {"detail": [{"loc": 1}]}, Outcome.FAILED, '400: [{"loc": 1}]'),
        (404, {}, "not  here\n", Outcome.FAILED, "404: not here"),
        (500, {}, "", Outcome.FAILED, "500: nothing"),
        (307, {"location": "/"}, "", Outcome.FAILED, "307: nothing"),
        (
            502,
            {"content-type": "text/html"},
            "<html><title>Bad\nGateway</title>",
            Outcome.FAILED,
            "502: a web page, 'Bad Gateway'",
        ),
        (
            200,
            {"content-type": "text/html"},
            "<p>",
            Outcome.FAILED,
            "200: not an event stream: a web page",
        ),
        (
            200,
            JSON,
            {"error": {"message": "late"}},
            Outcome.FAILED,
            "200: not an event stream: late",
        ),
    ],
)
def test_no_stream(
    status: int, headers: dict[str, str], body: object, outcome: Outcome, detail: str
) -> None:
    said = body if isinstance(body, str) else json.dumps(body)
    half = len(said) // 2
    record, _ = ask(
        Script(
            status=status,
            headers=headers,
            head_s=0.25,
            pieces=[(1.0, said[:half].encode()), (1.0, said[half:].encode())],
        )
    )
    assert (record.outcome, record.detail, record.status) == (outcome, detail, status)
    assert record.end_s == 1.25  # the head; its explanation is not the server's time
    assert not record.chunk_times_s


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "3", "retry-after-ms": "2500"}, 2.5),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], wait_s: float | None) -> None:
    assert ask(Script(status=429, headers=JSON | headers))[1] == wait_s


def test_explanation_that_does_not_come_is_not_waited_for() -> None:
    record, _ = ask(
        Script(status=503, headers=JSON, pieces=[(1.0, b"half an expl")], hang=True), idle_s=2.0
    )
    assert (record.outcome, record.detail) == (Outcome.REFUSED, "503: half an expl")


def test_refused_connection() -> None:
    record, _ = ask(Script(head_s=0.5, refuse="cannot connect"))
    assert (record.outcome, record.detail) == (Outcome.FAILED, "cannot connect")
    assert (record.status, record.end_s) == (None, 1.5)


def test_broken_connection_keeps_what_came() -> None:
    record, _ = ask(stream(event(text("a")), breaks="reset"))
    assert record.outcome is Outcome.FAILED
    assert record.detail == "reset (after 1 chunks, the last 1.000 s after the request)"
    assert list(record.chunk_times_s) == [2.0]


def test_stall_is_recorded_where_it_happens() -> None:
    """Before the head, before the first chunk, between chunks; each piece starts the wait anew."""
    slow = stream(*[event(text("a"))] * 4, hang=True)
    for script, begins_s in ((Script(head_s=99.0), 1.0), (Script(hang=True), 1.0), (slow, 5.0)):
        record, _ = ask(script, idle_s=1.5)
        assert record.outcome is Outcome.FAILED
        assert record.end_s == pytest.approx(begins_s + 1.5)
        assert record.detail is not None
        assert record.detail.startswith("stalled: nothing came for 1.5 s")


def test_without_idle_time_a_day_is_waited() -> None:
    slow = Script(pieces=[(86_400.0, event(text("a", "stop")) + DONE)])
    assert ask(slow, idle_s=None)[0].outcome is Outcome.COMPLETED


def test_pings_keep_a_waiting_request_alive() -> None:
    record, _ = ask(stream(*[b": ping\n\n"] * 9, event(text("a", "stop")) + DONE), idle_s=1.5)
    assert (record.outcome, list(record.chunk_times_s)) == (Outcome.COMPLETED, [11.0])


def test_cancelled_request_stays_open_with_what_it_has() -> None:
    async def main() -> Record:
        http = FakeHttp(lambda _: stream(*[event(text("a"))] * 9))
        client = Client(
            http, "http://x", RequestFormat(dialect=dialect_of("bros"), model="m"), render
        )
        clock = LoopClock()
        start_s = clock.now()
        record = Record(planned=planned(), due_s=0.0)
        prepared = client.prepare(record.planned)
        task = asyncio.create_task(client.send(record, prepared, lambda: clock.now() - start_s))
        await asyncio.sleep(2.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert http.open_now == 0
        return record

    record = run_virtual(main)
    assert (record.outcome, record.end_s, record.detail) == (Outcome.OPEN, None, None)
    assert list(record.chunk_times_s) == [1.0, 2.0]


def test_prompt_that_cannot_be_written_is_a_failure_of_its_request() -> None:
    async def main() -> tuple[Record, int]:
        def broken(request: Planned) -> tuple[list[int], str]:
            raise ValueError("no such piece")

        http = FakeHttp(lambda _: answer(1, 1.0))
        client = Client(
            http, "http://x", RequestFormat(dialect=dialect_of("bros"), model="m"), broken
        )
        record = Record(planned=planned(), due_s=0.0)
        await client.send(record, client.prepare(record.planned), lambda: 4.0)
        return record, len(http.seen)

    record, sent = run_virtual(main)
    assert (record.outcome, record.sent_s, record.end_s, sent) == (Outcome.FAILED, None, 4.0, 0)
    assert record.detail == "the request cannot be built: ValueError: no such piece"


@pytest.mark.parametrize("base", ["http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/"])
@pytest.mark.parametrize(
    ("endpoint", "path"),
    [
        (Endpoint.COMPLETIONS, "/v1/completions"),
        (Endpoint.CHAT, "/v1/chat/completions"),
    ],
)
def test_address_and_key(base: str, endpoint: Endpoint, path: str) -> None:
    async def main() -> None:
        http = FakeHttp(lambda _: answer(3, 1.0))
        request_format = RequestFormat(dialect=dialect_of("bros"), model="m", endpoint=endpoint)
        client = Client(http, base, request_format, render, api_key="k")
        record = Record(planned=planned(), due_s=0.0)
        await client.send(record, client.prepare(record.planned), lambda: 0.0)
        [seen] = http.seen
        assert seen.url == "http://x:1" + path
        assert seen.headers["authorization"] == "Bearer k"
        assert seen.headers["content-type"] == "application/json"

    run_virtual(main)


NAMES = st.sampled_from(
    ["choices", "text", "delta", "content", "finish_reason", "usage", "completion_tokens"]
    + ["prompt_tokens_details", "error", "message", "service_tier", "object", "detail"]
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(50, long=1000))
@given(
    bodies=st.lists(JSON_VALUES.map(event) | st.binary(max_size=40), max_size=4),
    status=st.sampled_from([200, 200, 200, 204, 400, 429, 500]),
    kind=st.sampled_from(["text/event-stream", "application/json", "text/html", "", ";;"]),
)
def test_nothing_that_a_server_says_is_an_error_of_the_client(
    bodies: list[bytes], status: int, kind: str
) -> None:
    record, _ = ask(stream(*bodies, status=status, headers={"content-type": kind}))
    assert record.outcome is not Outcome.OPEN
    assert record.end_s is not None and record.end_s >= 1.0
    assert list(record.chunk_times_s) == sorted(record.chunk_times_s)
    if record.outcome is Outcome.COMPLETED:
        assert record.finish_reason is not None and record.detail is None
    else:
        assert record.detail and "the client failed" not in record.detail


STEPS = st.integers(0, 3_000_000)  # microseconds
KINDS = st.sampled_from(["text", "empty", "ping", "two"])


@given(
    kinds=st.lists(KINDS, max_size=12),
    cuts=st.lists(st.integers(0, 2000), max_size=15),
    delays=st.lists(STEPS, min_size=30, max_size=30),
    head=STEPS,
    newline=st.sampled_from([b"\n", b"\r\n"]),
    ending=st.sampled_from(["done", "eof", "cut", "error"]),
)
def test_times_are_those_of_the_schedule_to_the_microsecond(
    kinds: list[str], cuts: list[int], delays: list[int], head: int, newline: bytes, ending: str
) -> None:
    """Oracle: a chunk comes with the network piece that has the last byte it needs."""
    said = {
        "text": event(text("a"), newline),
        "empty": event(text(""), newline),
        "ping": b": ping" + 2 * newline,
        "two": b"data: " + newline.join([b'{"choices":', b'data: [{"text":"b"}]}']) + 2 * newline,
    }
    final = {
        "done": event(text("", "length"), newline) + event("[DONE]", newline),
        "eof": event(text("", "length"), newline),
        "cut": b"",
        "error": event({"error": {"message": "e"}}, newline),
    }[ending]
    body, needed = b"", []
    for kind in kinds:
        body += said[kind]
        if kind in ("text", "two"):
            needed.append(len(body) - len(newline))  # the first byte of the last line end
    body += final
    bounds = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    spans = list(zip(bounds, bounds[1:], strict=False))
    arrivals, at = [], 1_000_000 + head
    for (_, stop), delay in zip(spans, delays, strict=False):
        at += delay
        arrivals.append((stop, at))
    script = Script(
        head_s=head / 1e6,
        pieces=[(d / 1e6, body[a:b]) for (a, b), d in zip(spans, delays, strict=False)],
        headers=EVENT_STREAM,
    )
    record, _ = ask(script, idle_s=None)
    assert [micros(s) for s in record.chunk_times_s] == [
        next(at for stop, at in arrivals if stop > offset) for offset in needed
    ]
    ended = len(body) - len(newline) if ending in ("done", "error") else -1
    expected_end = next((at for stop, at in arrivals if stop > ended >= 0), at)
    assert record.end_s is not None and micros(record.end_s) == expected_end
    outcomes = {"cut": Outcome.CUT, "error": Outcome.FAILED}
    assert record.outcome is outcomes.get(ending, Outcome.COMPLETED)
