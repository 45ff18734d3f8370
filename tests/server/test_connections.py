"""Limits of connections: clients that send nothing, too little or too slowly, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bros.server.connections import Connection
from bros.server.turns import SpreadCalls
from support.loops import hasty
from support.scripted_server import LiveServer, chunks, live_server

CHAT = "/v1/chat/completions"
VERSION = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
MESSAGES = [{"role": "user", "content": "Hi"}]
SLOW: dict[str, Any] = {"header_timeout": 0.1, "body_timeout": 0.1}
"""Time limits of tests on a HastyLoop, where time passes only while nothing else happens."""


class Client:
    """A bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        """All bytes until the server closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            return await asyncio.wait_for(self.reader.read(), timeout=5)
        return b""

    async def head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), timeout=5)

    async def response(self) -> bytes:
        """The head of a response whose body is read as well."""
        head = await self.head()
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        await self.reader.readexactly(int(length[1]))
        return head


@contextlib.asynccontextmanager
async def connected(live: LiveServer) -> AsyncIterator[Client]:
    url = httpx.URL(live.url)
    client = Client(*await asyncio.open_connection(url.host, url.port))
    try:
        yield client
    finally:
        client.writer.close()
        with contextlib.suppress(ConnectionError):
            await client.writer.wait_closed()


def post(body: bytes, *headers: str, path: str = CHAT) -> bytes:
    """A request with these headers and no others but Host and Content-Type."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def chat_body(**fields: object) -> bytes:
    return json.dumps({"messages": MESSAGES, **fields}).encode()


def error_of(response: bytes) -> tuple[int, str]:
    """Status and code of an error response."""
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@hasty
async def test_a_silent_connection_is_closed() -> None:
    async with live_server(**SLOW) as live, connected(live) as client:
        assert await client.rest() == b""


@pytest.mark.parametrize("begin", [b"G", b"GET /health HTTP/1.1\r\nHost: a\r\nX-", b"\r\n"])
@hasty
async def test_headers_that_do_not_end_are_a_408(begin: bytes) -> None:
    async with live_server(**SLOW) as live, connected(live) as client:
        await client.send(begin)
        assert error_of(await client.rest()) == (408, "request_timeout")


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "max_tokens": 0}])
async def test_http_1_0_has_no_chunks(fields: dict[str, Any]) -> None:
    body = chat_body(**fields)
    asked = post(body, f"Content-Length: {len(body)}").replace(b"HTTP/1.1", b"HTTP/1.0")
    async with live_server() as live:
        async with connected(live) as client:
            await client.send(asked)
            head, _, found = (await client.rest()).partition(b"\r\n\r\n")
        async with live.client() as http:
            newer = await http.post(
                CHAT, content=body, headers={"content-type": "application/json"}
            )
    assert b"connection: close" in head and b"transfer-encoding" not in head
    assert found.count(b"data: ") == newer.text.count("data: ")
    if newer.status_code != 200:
        assert json.loads(found) == newer.json()
    elif fields:
        assert found.endswith(b"data: [DONE]\n\n") and chunks(found.decode())
    else:
        assert json.loads(found)["choices"] == newer.json()["choices"]


async def test_a_head_request_of_http_1_0_has_no_body() -> None:
    async with live_server() as live, connected(live) as client:
        await client.send(VERSION.replace(b"GET", b"HEAD").replace(b"1.1", b"1.0"))
        assert (await client.rest()).endswith(b"\r\n\r\n")


@hasty
async def test_headers_that_trickle_are_a_408() -> None:
    async with live_server(**SLOW) as live, connected(live) as client:
        await client.send(b"GET /health HTTP/1.1\r\nHost: a\r\n")
        reading = asyncio.ensure_future(client.rest())
        while not reading.done():
            await client.send(b"X: 1\r\n")
            await asyncio.sleep(0.02)
        assert error_of(reading.result()) == (408, "request_timeout")


@hasty
async def test_a_slow_second_request_is_a_408_too() -> None:
    async with live_server(**SLOW) as live, connected(live) as client:
        await client.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await client.response()).startswith(b"HTTP/1.1 200")
        await client.send(b"GET /version HTT")
        assert error_of(await client.rest()) == (408, "request_timeout")


@hasty
async def test_a_body_that_does_not_come_is_a_408_and_reaches_no_engine() -> None:
    async with live_server(**SLOW) as live, connected(live) as client:
        await client.send(post(b'{"mess', "Content-Length: 200"))
        assert error_of(await client.rest()) == (408, "request_timeout")
        assert live.server.engine.submitted == []


@hasty
async def test_a_body_that_trickles_is_a_408() -> None:
    async with live_server(**SLOW) as live, connected(live) as client:
        await client.send(post(b"", "Transfer-Encoding: chunked"))
        reading = asyncio.ensure_future(client.rest())
        while not reading.done():
            await client.send(b"1\r\n \r\n")
            await asyncio.sleep(0.02)
        assert error_of(reading.result()) == (408, "request_timeout")


@hasty
async def test_a_body_that_takes_longer_than_the_limit_but_moves_is_read() -> None:
    async with live_server(**SLOW) as live, connected(live) as client:
        body = chat_body() + b" " * 4000
        await client.send(post(b"", f"Content-Length: {len(body)}"))
        for start in range(0, len(body), 400):  # ten pieces in 0.3 s
            await client.send(body[start : start + 400])
            await asyncio.sleep(0.03)
        assert (await client.head()).startswith(b"HTTP/1.1 200")


@hasty
async def test_a_refused_body_must_still_end() -> None:
    async with live_server(**SLOW) as live, connected(live) as client:
        await client.send(post(b" " * 1000, "Content-Length: 99999999"))
        response = asyncio.ensure_future(client.rest())
        while not response.done():
            await client.send(b" " * 1000)
            await asyncio.sleep(0.01)
        answers = response.result()
        assert answers.startswith(b"HTTP/1.1 413")


@hasty
async def test_an_idle_connection_is_closed() -> None:
    async with live_server(idle_timeout=0.1) as live, connected(live) as client:
        await client.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 200")


@hasty
async def test_a_stream_may_take_longer_than_every_limit() -> None:
    limits: dict[str, Any] = {**SLOW, "idle_timeout": 0.1}
    async with live_server(**limits) as live, live.client() as client:
        engine = live.server.engine
        engine.hold_after = 2
        request = asyncio.ensure_future(
            client.post(CHAT, json={"messages": MESSAGES, "stream": True})
        )
        await engine.holding.wait()
        await asyncio.sleep(0.5)
        engine.go_on.set()
        assert len(chunks((await request).text)) > 2


@hasty
async def test_half_of_a_second_request_does_not_cut_the_stream_before_it() -> None:
    async with live_server(**SLOW) as live, connected(live) as client:
        engine = live.server.engine
        engine.hold_after = 2
        body = chat_body(stream=True)
        await client.send(post(body, f"Content-Length: {len(body)}") + b"GET /vers")
        await engine.holding.wait()
        await asyncio.sleep(0.4)
        engine.go_on.set()
        text = await asyncio.wait_for(client.reader.readuntil(b"[DONE]"), timeout=5)
        assert text.startswith(b"HTTP/1.1 200")


# ---- Too many connections.


async def open_silent(live: LiveServer, count: int, stack: contextlib.AsyncExitStack) -> None:
    for _ in range(count):
        await stack.enter_async_context(connected(live))


async def test_a_new_connection_takes_the_place_of_the_longest_silent_one() -> None:
    async with live_server(max_connections=4) as live, contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(connected(live))
        await open_silent(live, 20, stack)
        async with live.client() as client:
            assert (await client.get("/health")).status_code == 200
        assert await first.rest() == b""
        text = live.server.state.metrics.render(None, None, None, None).decode()
        assert 'bros_http_connections_closed_total{reason="replaced"} 18.0' in text


async def test_without_descriptors_the_longest_silent_connections_end_and_one_line_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [errno.EMFILE, errno.ENFILE, errno.ENOMEM]

    async def fail_first(bound: socket.socket) -> Any:
        if failures:
            raise OSError(failures.pop(), "none left")
        return await accept(bound)

    async with live_server() as live, connected(live) as first, connected(live) as second:
        monkeypatch.setattr(loop, "sock_accept", fail_first)
        async with connected(live):  # the server's next call of sock_accept is patched
            assert (await first.rest(), await second.rest()) == (b"", b"")
            async with asyncio.timeout(5):
                while failures:
                    await asyncio.sleep(0.01)
            async with connected(live) as last:
                await last.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await last.head()).startswith(b"HTTP/1.1 200")
    lines = [line for line in caplog.messages if "not accepted" in line]
    assert len(lines) == 1 and "none left" in lines[0]


async def test_connections_in_use_are_kept_and_a_new_one_gets_503_with_retry_after() -> None:
    async with live_server(max_connections=2) as live, contextlib.AsyncExitStack() as stack:
        engine = live.server.engine
        engine.hold_after = 2
        client = await stack.enter_async_context(live.client())
        requests = [
            asyncio.ensure_future(client.post(CHAT, json={"messages": MESSAGES, "stream": True}))
            for _ in range(2)
        ]
        while len(engine.submitted) < 2:
            await asyncio.sleep(0.01)
        refused = await client.get("/health")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "2"
        assert refused.json()["error"]["code"] == "too_many_connections"
        engine.go_on.set()
        for request in requests:
            assert len(chunks((await request).text)) > 2
        assert (await client.get("/health")).status_code == 200


async def test_one_address_has_a_limit_of_its_own() -> None:
    limits: dict[str, Any] = {"max_connections": 100, "max_connections_per_address": 1}
    async with live_server(**limits) as live, live.client() as client:
        engine = live.server.engine
        engine.hold_after = 2
        request = asyncio.ensure_future(client.post(CHAT, json={"messages": MESSAGES}))
        await engine.holding.wait()
        refused = await client.get("/health")
        assert refused.status_code == 503 and "your address" in refused.text
        engine.go_on.set()
        assert (await request).status_code == 200


async def test_connections_are_counted_until_they_end() -> None:
    def count() -> int:
        text = live.server.state.metrics.render(None, None, None, None).decode()
        found = re.search(r"^bros_http_connections (\d+)", text, re.MULTILINE)
        assert found
        return int(found[1])

    async with live_server() as live:
        for _ in range(3):
            async with live.client() as client:
                assert (await client.get("/health")).status_code == 200
                assert count() == 1
        while count():
            await asyncio.sleep(0.01)


# ---- Requests that another server could read in another way.


CHUNKED = "Transfer-Encoding: chunked"
AMBIGUOUS = {
    "length and chunked": post(b"0\r\n\r\n", "Content-Length: 5", CHUNKED),
    "chunked and length": post(b"0\r\n\r\n", CHUNKED, "Content-Length: 5"),
    "two lengths": post(b"abcd", "Content-Length: 4", "Content-Length: 5"),
    "the same length twice": post(b"abcd", "Content-Length: 4", "Content-Length: 4"),
    "a list of lengths": post(b"abcd", "Content-Length: 4, 4"),
    "a signed length": post(b"abcd", "Content-Length: +4"),
    "a negative length": post(b"abcd", "Content-Length: -4"),
    "an empty length": post(b"abcd", "Content-Length: "),
    "a huge length": post(b"abcd", "Content-Length: " + "9" * 30),
    "an unknown coding": post(b"0\r\n\r\n", "Transfer-Encoding: xchunked"),
    "two codings": post(b"0\r\n\r\n", "Transfer-Encoding: gzip, chunked"),
    "chunked twice": post(b"0\r\n\r\n", CHUNKED, CHUNKED),
    "a space before the colon": post(b"0\r\n\r\n", "Transfer-Encoding : chunked"),
    "a folded line": post(b"0\r\n\r\n", "Transfer-Encoding:\r\n chunked"),
    "a chunk size that is none": post(b"zz\r\n\r\n", CHUNKED),
    "a chunk size with 0x": post(b"0x4\r\nabcd\r\n0\r\n\r\n", CHUNKED),
    "a huge chunk size": post(b"f" * 20 + b"\r\nabcd\r\n0\r\n\r\n", CHUNKED),
    "a chunk longer than its size": post(b"4\r\nabcdef\r\n0\r\n\r\n", CHUNKED),
    "chunks without CR": post(b"4\nabcd\n0\n\n", CHUNKED),
    "a length in the trailer": post(b"0\r\nContent-Length: 5\r\n\r\n", CHUNKED),
    "lines without CR": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "a NUL": post(b"", "X: a\0b"),
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "another host in the target": b"GET http://b/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


async def test_an_ambiguous_request_is_a_400_and_ends_the_connection(live: LiveServer) -> None:
    answers = {}
    for name, sent in AMBIGUOUS.items():
        async with connected(live) as client:
            await client.send(sent)
            answers[name] = error_of(await client.rest())
    assert answers == dict.fromkeys(AMBIGUOUS, (400, "invalid_http_request"))
    assert live.server.engine.submitted == []


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 300_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 300_000, 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 200 + b"\r\n", 400),
    ],
)
async def test_headers_that_are_too_large_are_refused(
    live: LiveServer, request_bytes: bytes, status: int
) -> None:
    async with connected(live) as client:
        client.writer.write(request_bytes)
        answer = await client.rest()
        assert not answer or error_of(answer)[0] == status  # a reset can overtake the answer


@pytest.mark.parametrize("lines", [1, 100])
@pytest.mark.parametrize(("size", "refused"), [(66_000, True), (65_000, False)])
async def test_headers_that_arrive_in_one_read_have_the_same_limit(
    live: LiveServer, size: int, refused: bool, lines: int
) -> None:
    line = b"X: " + b"a" * (size // lines - 5) + b"\r\n"
    parts = b"GET /version HTTP/1.1\r\nHost: a\r\n", line * lines, b"Connection: close\r\n\r\n"
    sent = b"".join(parts)
    async with connected(live) as client:
        await client.send(sent)
        answer = await client.rest()
    if refused:
        assert error_of(answer) == (431, "headers_too_large")
    else:
        assert answer.startswith(b"HTTP/1.1 200")


async def test_two_requests_in_one_packet_are_answered_in_order(live: LiveServer) -> None:
    async with connected(live) as client:
        second = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        body = chat_body()
        await client.send(post(body, f"Content-Length: {len(body)}") + second)
        text = await client.rest()
        assert text.count(b"HTTP/1.1 200") == 2 and text.rindex(b'"version"') > text.index(b"chat")


async def test_requests_that_are_pipelined_without_end_do_not_pile_up(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait are answered, the last one with the end of the connection."""
    begun = 0
    on_headers_complete = HttpToolsProtocol.on_headers_complete

    def counted(self: HttpToolsProtocol) -> None:
        nonlocal begun
        begun += 1
        on_headers_complete(self)

    monkeypatch.setattr(HttpToolsProtocol, "on_headers_complete", counted)
    async with connected(live) as client:
        request = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
        client.writer.write(request * 3000)
        answers = [await client.response() for _ in range(9)]
        assert await client.rest() == b""
    assert begun == 9
    assert all(head.startswith(b"HTTP/1.1 200") for head in answers)
    assert [b"connection: close" in head for head in answers] == [False] * 8 + [True]


async def test_as_many_requests_as_may_wait_are_answered_again_and_again(live: LiveServer) -> None:
    async with connected(live) as client:
        for _ in range(3):
            request = post(b"{}", "Content-Length: 2", path="/tokenize")
            await client.send(request * 9)
            answers = [await client.response() for _ in range(9)]
            assert all(b"connection: close" not in head for head in answers)


class CountedTurns:
    """Counts, during the block, what happens in each turn of the event loop."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self._turn = 0

    async def __aenter__(self) -> CountedTurns:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    def count(self, method: Callable[..., None]) -> Callable[..., None]:
        """The method, whose calls are counted."""

        def counted(*arguments: object) -> None:
            self.counts[self._turn] += 1
            method(*arguments)

        return counted

    async def _run(self) -> None:
        while True:
            self._turn += 1
            await asyncio.sleep(0)


async def test_what_arrives_at_once_is_parsed_in_several_turns(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a turn of the event loop has time for one read of one connection."""
    monkeypatch.setattr("bros.server.turns.MAX_CALLS_S", 0.0)
    body = json.dumps({"prompt": "word " * 100_000}).encode()  # several reads
    large = post(body, f"Content-Length: {len(body)}", path="/tokenize")
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(live)) for _ in range(40)]
        turns = await stack.enter_async_context(CountedTurns())
        monkeypatch.setattr(Connection, "_parse", turns.count(Connection._parse))
        for client in clients:
            client.writer.write(large if client is clients[0] else VERSION)
        for client in clients:
            assert (await client.response()).startswith(b"HTTP/1.1 200")
    assert turns.counts.total() > 40 and max(turns.counts.values()) <= 2


async def test_connections_that_clients_close_at_once_end_in_several_turns(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bros.server.turns.MAX_CALLS_S", 0.0)
    lost = Connection.connection_lost
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(live)) for _ in range(40)]
        turns = await stack.enter_async_context(CountedTurns())
        monkeypatch.setattr(Connection, "connection_lost", turns.count(lost))
        for client in clients:
            client.writer.write_eof()
        for client in clients:
            assert await client.rest() == b""
    assert turns.counts.total() == 40 and max(turns.counts.values()) <= 2


class LateTurns:
    """From `begin` on, what arrives or ends on connections waits until `come`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._make = SpreadCalls.make
        self._calls: list[Callable[[], None]] = []

    def begin(self) -> None:
        self._monkeypatch.setattr(
            SpreadCalls, "make", lambda _, owner, call: self._calls.append(call)
        )

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self._calls) < count:
                await asyncio.sleep(0.001)

    def come(self) -> None:
        self._monkeypatch.setattr(SpreadCalls, "make", self._make)
        for call in self._calls:
            call()


@pytest.mark.parametrize("before", ["nothing", "a request", "a part of it", "a part of its body"])
@hasty
async def test_a_request_that_waits_for_its_turn_is_in_time(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = LateTurns(monkeypatch)
    async with live_server(**SLOW, idle_timeout=0.2) as live, connected(live) as client:
        request = VERSION
        if before == "a request":
            await client.send(VERSION)
            await client.response()
        elif before != "nothing":
            body = chat_body()
            at = -3 if before == "a part of its body" else 10
            request = post(body, f"Content-Length: {len(body)}")
            await client.send(request[:at])
            await asyncio.sleep(0.05)  # parsed, and in time
            request = request[at:]
        turns.begin()
        await client.send(request)
        await turns.until(1)
        await asyncio.sleep(0.4)
        turns.come()
        assert (await client.response()).startswith(b"HTTP/1.1 200")


async def test_a_connection_whose_request_waits_for_its_turn_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that only sends a header now and then does not."""
    turns = LateTurns(monkeypatch)
    async with live_server(max_connections=4) as live, contextlib.AsyncExitStack() as stack:
        client, slow = [await stack.enter_async_context(connected(live)) for _ in range(2)]
        await client.send(VERSION)
        await client.response()
        await slow.send(VERSION[:-2])
        await asyncio.sleep(0.1)
        turns.begin()
        await client.send(VERSION)
        await slow.send(b"X: 1\r\n")
        await turns.until(2)
        await open_silent(live, 20, stack)
        assert await slow.rest() == b""
        turns.come()
        assert (await client.response()).startswith(b"HTTP/1.1 200")


async def test_a_connection_is_closed_if_what_it_sent_cannot_be_read_in_its_turn(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(connection: Connection, data: bytes) -> None:
        raise ValueError("unknown")

    turns = LateTurns(monkeypatch)
    async with connected(live) as client:
        turns.begin()
        await client.send(VERSION)
        await turns.until(1)
        monkeypatch.undo()
        monkeypatch.setattr(Connection, "_parse", fail)
        with pytest.raises(ValueError, match="unknown"):
            turns.come()
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(b"GET /version HTTP/1.1\r\nHost: a\r\nX: ", id="header"),
        pytest.param(post(b"1;x=", "Transfer-Encoding: chunked"), id="chunk"),
        pytest.param(post(b"1\r\n \r\n0\r\nX: ", "Transfer-Encoding: chunked"), id="trailer"),
    ],
)
async def test_what_never_ends_behind_a_request_in_progress_is_not_kept(
    live: LiveServer, begin: bytes
) -> None:
    async with connected(live) as client:
        engine = live.server.engine
        engine.hold_after = 2
        body = chat_body(stream=True)
        await client.send(post(body, f"Content-Length: {len(body)}") + begin)
        await engine.holding.wait()
        with contextlib.suppress(ConnectionError):
            for _ in range(400):
                await client.send(b"a" * 10_000)
        assert b"[DONE]" not in await client.rest()
        engine.go_on.set()


def chunked(body: bytes, size: int) -> bytes:
    parts = (body[i : i + size] for i in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("spaces", "size", "status"), [(2_000, 1, 200), (100_000, 16, 200), (100_000, 8, 400)]
)
async def test_a_body_may_not_have_many_tiny_chunks(
    live: LiveServer, spaces: int, size: int, status: int
) -> None:
    body = chat_body() + b" " * spaces
    async with connected(live) as client:
        head = post(b"", "Transfer-Encoding: chunked", "Connection: close")
        client.writer.write(head + chunked(body, size))
        answer = await client.rest()
    if status == 200:
        assert answer.startswith(b"HTTP/1.1 200")
    else:
        assert not answer or error_of(answer) == (400, "invalid_http_request")


async def test_chunks_of_one_read_reach_the_application_at_once(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    on_body = HttpToolsProtocol.on_body

    def noted(self: HttpToolsProtocol, body: bytes) -> None:
        given.append(len(body))
        on_body(self, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", noted)
    async with connected(live) as client:
        head = post(b"", "Transfer-Encoding: chunked", "Connection: close")
        client.writer.write(head + chunked(chat_body() + b" " * 1000, 1))
        assert (await client.rest()).startswith(b"HTTP/1.1 200")
    assert sum(given) == len(chat_body()) + 1000 and len(given) < 5


async def test_an_upgrade_with_a_body_is_ignored(live: LiveServer) -> None:
    """Java's client asks for HTTP/2 in this way."""
    body = chat_body()
    asks = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAA")
    length = f"Content-Length: {len(body)}"
    for headers, sent in (
        ((length, *asks), body),
        ((length, "Connection: keep-alive", "Upgrade: h2c"), body),
        ((CHUNKED, *asks), b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)),
    ):
        async with connected(live) as client:
            request = post(sent, *headers) + post(body, "Connection: close", length)
            cut = request.index(sent) + 3
            for part in (request[:50], request[50:cut], request[cut:]):
                await client.send(part)
            response = await client.rest()
        assert response.count(b"HTTP/1.1 200") == 2, response
    assert len(live.server.engine.submitted) == 6


async def test_an_upgrade_is_ignored(live: LiveServer) -> None:
    async with connected(live) as client:
        upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        await client.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"GET /")
        assert (await client.rest()).count(b"HTTP/1.1 200") == 1


# ---- A process that may have few descriptors.


SERVE = """
import asyncio, sys
sys.path[:0] = sys.argv[1:3]
from bros.server.connections import raise_descriptor_limit
from support.loops import hasty
from support.scripted_server import live_server

async def main():
    raise_descriptor_limit()
    async with live_server() as live:
        print(live.url, flush=True)
        await live.running

import logging
logging.basicConfig()
asyncio.run(main())
"""


@contextlib.contextmanager
def server_with_descriptors(most: int, log: Path) -> Iterator[str]:
    """The URL of a server in a process of its own, which may have `most` descriptors."""
    tests = Path(__file__).resolve().parent.parent

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most // 2, most))

    with log.open("wb") as errors:
        command = [sys.executable, "-c", SERVE, str(tests), str(tests.parent)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, preexec_fn=limit, env=dict(os.environ)
        )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_silent_connections_do_not_stop_a_server_with_few_descriptors(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with server_with_descriptors(128, log) as url:
        where = httpx.URL(url)
        connections = [await asyncio.open_connection(where.host, where.port) for _ in range(200)]
        async with httpx.AsyncClient(base_url=url, timeout=2) as client:
            for _ in range(20):
                response = await client.post(CHAT, json={"messages": MESSAGES})
                assert response.status_code == 200
        for _, writer in connections:
            writer.close()
    text = log.read_text()
    assert "instead of --max-connections 2048" in text and len(text) < 2000
