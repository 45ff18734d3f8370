"""Heartbeats: streams that wait send comments, so that proxies keep their connections open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bros.server.openai.stream import EventStream
from bros.server.state import StopSignal
from support.batch_server import BatchServer, batch_server, until

SOON_S = 10.0
COMMENT = b": waiting\n\n"
QUESTION: Any = [{"role": "user", "content": "Hi"}]
STREAMS: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 20},
    "/v1/responses": {"input": "Hi"},
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BatchServer]:
    async with batch_server(tmp_path, stream_heartbeat=0.05) as made:
        yield made


class Reader:
    """Reads a stream as it comes. comments: heartbeats so far."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._chunks = response.aiter_bytes()
        self._read = b""

    @property
    def comments(self) -> int:
        return self._read.count(COMMENT)

    @property
    def events(self) -> str:
        """Without the heartbeats, each of which has to be between two events."""
        parts = self._read.decode().split("\n\n")
        return "\n\n".join(part for part in parts if not part.startswith(":"))

    async def until_comments(self, count: int) -> None:
        async with asyncio.timeout(SOON_S):
            while self.comments < count:
                self._read += await anext(self._chunks)

    async def rest(self) -> None:
        async with asyncio.timeout(SOON_S):
            async for chunk in self._chunks:
                self._read += chunk


@asynccontextmanager
async def opened(server: BatchServer, path: str, **fields: Any) -> AsyncIterator[Reader]:
    body = {**STREAMS[path], "stream": True, **fields}
    async with (
        server.live.client() as http,
        http.stream("POST", path, json=body) as response,
    ):
        yield Reader(response)


@pytest.mark.parametrize("held_after", [0, 3])
@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_that_waits_sends_comments_between_its_events(
    server: BatchServer, path: str, held_after: int
) -> None:
    engine = server.engine
    engine.hold_after = held_after
    async with opened(server, path) as reader:
        assert reader.response.status_code == 200
        await reader.until_comments(2)
        engine.go_on.set()
        await reader.rest()
    lines = [line for line in reader.events.split("\n") if line.startswith("data: {")]
    assert "Hello world" in _text_of([json.loads(line.removeprefix("data: ")) for line in lines])


def _text_of(events: list[dict[str, Any]]) -> str:
    """The text of the deltas, of whichever API."""
    text = ""
    for event in events:
        for choice in event.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        delta = event.get("delta", "")
        text += delta if isinstance(delta, str) else delta.get("text", "")
    return text


@pytest.mark.parametrize("path", STREAMS)
async def test_an_error_after_a_comment_is_an_event(server: BatchServer, path: str) -> None:
    engine = server.engine
    engine.hold_after = engine.fail_after = 0
    async with opened(server, path) as reader:
        await reader.until_comments(1)
        engine.go_on.set()
        await reader.rest()
    assert "The numbers overflowed." in reader.events
    assert "[DONE]" not in reader.events


async def test_a_background_stream_that_waits_sends_comments(server: BatchServer) -> None:
    engine = server.engine
    engine.hold_after = 2
    async with opened(server, "/v1/responses", background=True) as reader:
        await reader.until_comments(2)
        engine.go_on.set()
        await reader.rest()
    kinds = [line for line in reader.events.split("\n") if line.startswith("event: ")]
    assert len(set(kinds[:3])) == 3, "created, queued and in_progress come once each"
    assert kinds[-1] == "event: response.completed"


async def test_a_client_that_leaves_while_it_reads_comments_ends_its_request(
    server: BatchServer,
) -> None:
    engine = server.engine
    engine.hold_after = 0
    async with opened(server, "/v1/chat/completions") as reader:
        await reader.until_comments(1)
    await asyncio.wait_for(engine.abort_seen.wait(), SOON_S)
    assert engine.aborted == [request.request_id for request in engine.submitted]


async def test_clients_of_others_skip_the_comments(server: BatchServer) -> None:
    engine = server.engine
    engine.hold_after = 3
    chat = server.client.chat.completions.create(model="scripted", messages=QUESTION, stream=True)
    response = server.client.responses.create(model="scripted", input="Hi", stream=True)

    async def text_of_chat() -> str:
        return "".join([event.choices[0].delta.content or "" async for event in await chat])

    async def text_of_response() -> str:
        events = [event async for event in await response]
        return "".join(e.delta for e in events if e.type == "response.output_text.delta")

    import anthropic  # it takes a second

    async def text_of_message() -> str:
        async with anthropic.AsyncAnthropic(base_url=server.live.url, api_key="unused") as client:
            asked = client.messages.stream(model="scripted", messages=QUESTION, max_tokens=20)
            async with asked as stream:
                return await stream.get_final_text()

    reading = asyncio.gather(text_of_chat(), text_of_response(), text_of_message())
    async with opened(server, "/v1/completions") as reader:
        await until(lambda: len(engine.submitted) == 4)
        await reader.until_comments(3)
        engine.go_on.set()
        await reader.rest()
    texts = await asyncio.wait_for(reading, SOON_S)
    assert set(texts) == {"Hello world"}


async def test_no_comments_come_while_events_do(tmp_path: Path) -> None:
    """Events come for twice the time after which a comment would, a time for which a busy machine
    holds none up."""
    async with batch_server(tmp_path, stream_heartbeat=0.5) as server:
        server.engine.text = "x" * 100
        server.engine.pause_s = 0.01
        async with opened(server, "/v1/chat/completions", max_tokens=101) as reader:
            await reader.rest()
    assert reader.comments == 0 and reader.events.count("data: ") > 100


class Blocked(EventStream):
    """A stream that waits for ever, of a client that takes nothing."""

    async def send_all(self) -> None:
        await self.with_heartbeats(asyncio.Event().wait())

    async def close(self) -> None:
        self.closed.set()

    closed: asyncio.Event


async def test_a_client_that_takes_no_comment_does_not_keep_the_stream_from_ending() -> None:
    stopping, sending = StopSignal(), asyncio.Event()
    stream = Blocked(stopping, heartbeat_s=0.02)
    stream.closed = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sending.set()
        await asyncio.Event().wait()

    serving = asyncio.ensure_future(stream({"type": "http"}, receive, send))
    await asyncio.wait_for(sending.wait(), SOON_S)
    stopping.set()
    await asyncio.wait_for(stream.closed.wait(), SOON_S)
    assert not serving.done(), "its client takes no error either"
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
