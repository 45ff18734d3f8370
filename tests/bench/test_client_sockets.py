"""The client against real sockets: what servers and networks do when they misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from bros.bench.client import AiohttpTransport, Client, Outcome, Record
from bros.bench.dialects import RequestFormat, dialect_of
from bros.bench.load import PREPARE_AHEAD_S, LoadResult, OfferedLoad, drive
from bros.bench.plan import Session, SessionRequest
from bros.core.clock import SystemClock
from support.bench_server import event, planned, render, text, usage

FORMAT = RequestFormat(dialect=dialect_of("bros"), model="m")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
WHOLE = event(text("", "length")) + event(usage(4, 3)) + event("[DONE]")

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def reply(status: str, headers: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


async def read_request(reader: asyncio.StreamReader) -> dict[str, object] | None:
    """The body of the next request; None when the client has gone."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    fields = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:-2])
    body: dict[str, object] = json.loads(await reader.readexactly(int(fields["content-length"])))
    return body


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    """The address of a server that calls `serve` for each connection."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
            writer.close()
        except ConnectionError:
            pass

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.close()
        await server.wait_closed()


async def ask(url: str, *, idle_s: float | None = 30.0) -> tuple[Record, float | None]:
    async with AiohttpTransport() as http:
        client = Client(http, url, FORMAT, render, idle_s=idle_s)
        record = Record(planned=planned(), due_s=0.0)
        wait_s = await client.send(record, client.prepare(record.planned), SystemClock().now)
        return record, wait_s


async def answer_with(data: bytes) -> tuple[Record, float | None]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(data)
        await writer.drain()

    async with serving(serve) as url:
        return await ask(url)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close without the usual goodbye."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def test_no_server_listens() -> None:
    port = free_port()
    record, _ = await ask(f"http://127.0.0.1:{port}")
    assert record.outcome is Outcome.FAILED
    assert record.detail == f"cannot connect to 127.0.0.1:{port}: Connection refused"
    assert record.end_s is not None and record.status is None


async def test_address_that_is_none() -> None:
    record, _ = await ask("nonsense")
    assert record.outcome is Outcome.FAILED
    assert record.detail is not None and "not an address" in record.detail


async def test_closed_before_an_answer() -> None:
    record, _ = await answer_with(b"")
    assert record.outcome is Outcome.FAILED
    assert record.detail == "the server closed the connection without a response"


async def test_something_that_is_not_http() -> None:
    record, _ = await answer_with(b"SSH-2.0-OpenSSH\r\n\r\n")
    assert record.outcome is Outcome.FAILED
    assert record.detail


async def test_reset_in_the_middle() -> None:
    """The client has the first chunk before the connection breaks."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunked(event(text("a"))))
        await writer.drain()
        await got_first.wait()
        reset(writer)

    got_first = asyncio.Event()
    async with serving(serve) as url, AiohttpTransport() as http:
        client = Client(http, url, FORMAT, render)
        record = Record(planned=planned(), due_s=0.0)

        def now() -> float:
            if record.status is not None:
                asyncio.get_running_loop().call_soon(got_first.set)
            return 0.0

        await client.send(record, client.prepare(record.planned), now)
    assert record.outcome is Outcome.FAILED
    assert len(record.chunk_times_s) == 1
    assert record.detail is not None
    assert record.detail.startswith("the connection broke")


async def test_closed_in_the_middle_of_a_chunked_body() -> None:
    record, _ = await answer_with(HEAD + chunked(event(text("a"))))
    assert record.outcome is Outcome.FAILED
    assert record.detail is not None
    assert record.detail.startswith("the connection broke in the middle of the response (after 1")


async def test_stream_that_ends_early() -> None:
    record, _ = await answer_with(HEAD + chunked(event(text("a"))) + LAST)
    assert record.outcome is Outcome.CUT


async def test_old_http_without_a_length() -> None:
    head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    record, _ = await answer_with(head + event(text("a")) + WHOLE)
    assert (record.outcome, record.output_tokens) == (Outcome.COMPLETED, 3)


async def test_busy() -> None:
    body = json.dumps({"error": {"message": "queue full"}}).encode()
    headers = "content-type: application/json\r\nretry-after: 2\r\n"
    record, wait_s = await answer_with(reply("429 Too Many Requests", headers, body))
    assert (record.outcome, record.detail, wait_s) == (Outcome.REFUSED, "429: queue full", 2.0)


async def test_server_error() -> None:
    body = json.dumps({"error": {"message": "boom"}}).encode()
    record, _ = await answer_with(reply("500 Error", "content-type: application/json\r\n", body))
    assert (record.outcome, record.detail, record.status) == (Outcome.FAILED, "500: boom", 500)


async def test_web_page() -> None:
    page = b"<html><head><title>Welcome to nginx!</title></head></html>"
    record, _ = await answer_with(reply("200 OK", "content-type: text/html\r\n", page))
    assert record.outcome is Outcome.FAILED
    assert record.detail == "200: not an event stream: a web page, 'Welcome to nginx!'"


async def test_redirect_is_not_followed() -> None:
    record, _ = await answer_with(reply("302 Found", "location: http://127.0.0.1:1/\r\n", b""))
    assert (record.outcome, record.status) == (Outcome.FAILED, 302)


async def test_stall() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunked(event(text("a"))))
        await reader.read()  # until the client closes the connection
        gone.set()

    gone = asyncio.Event()
    async with serving(serve) as url:
        record, _ = await ask(url, idle_s=0.1)
        await gone.wait()
    assert record.outcome is Outcome.FAILED
    assert record.detail is not None
    assert record.detail.startswith("stalled: nothing came for 0.1 s (after 1 chunks")


async def test_connections_are_used_again() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await read_request(reader) is not None:
            writer.write(HEAD + chunked(event(text("a"))) + chunked(WHOLE) + LAST)
            await writer.drain()

    async with serving(serve) as url, AiohttpTransport() as http:
        client = Client(http, url, FORMAT, render)
        for _ in range(5):
            record = Record(planned=planned(), due_s=0.0)
            await client.send(record, client.prepare(record.planned), SystemClock().now)
            assert record.outcome is Outcome.COMPLETED
    assert connections == 1


async def test_times_over_a_real_connection() -> None:
    """What the client writes down is when the server really wrote, and a little later."""
    clock, tokens, streams = SystemClock(), 12, 8
    written: dict[str, list[float]] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (body := await read_request(reader)) is not None:
            prompt = body["prompt"]
            assert isinstance(prompt, list)
            times = written[f"s{len(prompt)}"] = [clock.now()]
            writer.write(HEAD)
            for _ in range(tokens):
                await asyncio.sleep(0.04)
                times.append(clock.now())
                writer.write(chunked(event(text("a"))))
            writer.write(chunked(event(text("", "length")) + event(usage(1, tokens))))
            writer.write(chunked(event("[DONE]")) + LAST)

    sessions = [
        Session(0.02 * i, (SessionRequest(planned(f"s{i}", prompt=i, output=tokens)),))
        for i in range(1, streams + 1)
    ]
    asked_at: list[float] = []

    class Clock(SystemClock):
        def now(self) -> float:
            asked_at.append(super().now())
            return asked_at[-1]

    async with serving(serve) as url, AiohttpTransport() as http:
        client = Client(http, url, FORMAT, render)
        load = OfferedLoad(duration_s=0.9, drain_s=20.0, sessions=sessions)
        result: LoadResult = await drive(load, client, Clock(), cpu_s=lambda: 0.0, cores=1)
    start_s = asked_at[0]
    lags = []
    assert len(result.records) == streams
    for record in result.records:
        assert record.outcome is Outcome.COMPLETED
        sent_at, *chunks_at = [
            at - start_s - PREPARE_AHEAD_S for at in written[record.planned.name]
        ]
        assert record.sent_s is not None and record.due_s <= record.sent_s <= sent_at
        lags += [seen - at for seen, at in zip(record.chunk_times_s, chunks_at, strict=True)]
    # How late they are is up to the machine: benchmarks/bench_client_speed.py measures it.
    assert min(lags) >= 0
