"""A client that leaves frees what was computed for it, at once."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from bros.server.errors import ServerStoppingError
from bros.server.http import CancelOnDisconnect
from bros.server.openai.exchange import Exchange
from bros.server.state import StopSignal
from support.scripted_server import LiveServer, Server
from support.turns import use_turns, used_up_turns

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SOON_S = 5.0


class Visitor:
    """Calls an app directly, and leaves when told to."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self._request = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self._left = asyncio.Event()
        self.got: list[Any] = []
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
            "scheme": "http",
            "server": ("test", 80),
        }
        self.call = asyncio.ensure_future(server.app(scope, self._receive, self._send))

    async def leave(self) -> None:
        self._left.set()
        await asyncio.wait_for(self.call, SOON_S)

    async def _receive(self) -> dict[str, Any]:
        if self._request:
            return self._request.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.got.append(message)


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], **fields}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(stream=True)),
        (CHAT, chat(n=3)),
        (COMPLETIONS, {"prompt": "Hi"}),
        (COMPLETIONS, {"prompt": ["a", "b"], "stream": True, "n": 2}),
    ],
)
@pytest.mark.parametrize("tokens_before", [0, 3])
async def test_leaving_aborts_every_choice(
    server: Server, path: str, body: dict[str, Any], tokens_before: int
) -> None:
    server.engine.hold_after = tokens_before
    visitor = Visitor(server, path, body)
    await asyncio.wait_for(server.engine.holding.wait(), SOON_S)
    assert server.engine.aborted == []
    await visitor.leave()
    submitted = {request.request_id for request in server.engine.submitted}
    assert submitted
    assert set(server.engine.aborted) == submitted


def exchanges() -> list[Exchange]:
    """Those that exist in this process."""
    # Not isinstance: some objects of other modules warn when they are asked for their class.
    return [each for each in gc.get_objects() if issubclass(type(each), Exchange)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 3])
async def test_what_a_client_left_is_freed_without_a_collection(
    server: Server, stream: bool, tokens_before: int
) -> None:
    """Many clients that leave would otherwise leave a collection that takes long."""
    server.engine.hold_after = tokens_before
    gc.collect()
    of_others = exchanges()  # of tests before

    def new() -> list[Exchange]:
        return [each for each in exchanges() if each not in of_others]

    gc.disable()
    try:
        visitor = Visitor(server, CHAT, chat(stream=stream))
        await asyncio.wait_for(server.engine.holding.wait(), SOON_S)
        assert new()
        await visitor.leave()
        del visitor
        await asyncio.sleep(0)
        assert new() == []
    finally:
        gc.enable()


async def test_clients_that_leave_at_once_are_aborted_in_several_turns(server: Server) -> None:
    use_turns(server, used_up_turns())
    server.engine.hold_after = 1
    visitors = [Visitor(server, CHAT, chat(stream=bool(i % 2))) for i in range(20)]
    while len(server.engine.submitted) < len(visitors):
        await asyncio.sleep(0)
    leaving = asyncio.gather(*(visitor.leave() for visitor in visitors))
    seen, aborted = 0, server.engine.aborted
    while not leaving.done():
        await asyncio.sleep(0)
        assert len(aborted) - seen <= 2
        seen = len(aborted)
    assert len(aborted) == len(visitors)


async def test_a_whole_answer_is_not_begun_for_a_disconnected_client(server: Server) -> None:
    server.engine.hold_after = 0
    visitor = Visitor(server, CHAT, chat())
    await asyncio.wait_for(server.engine.holding.wait(), SOON_S)
    await visitor.leave()
    assert visitor.got == []


async def test_who_stays_is_not_aborted(server: Server) -> None:
    await server.chat()
    await server.chat(stream=True)
    assert server.engine.aborted == []


async def test_abandoned_choices_are_counted(server: Server) -> None:
    server.engine.hold_after = 1
    visitor = Visitor(server, CHAT, chat(n=2))
    await asyncio.wait_for(server.engine.holding.wait(), SOON_S)
    await visitor.leave()
    text = (await server.http.get("/metrics")).text
    assert 'bros_requests_total{class="rt",finish_reason="abort"} 2.0' in text
    assert 'bros_http_requests_total{path="/v1/chat/completions",status="499"} 1.0' in text


@pytest.mark.parametrize("stream", [False, True])
async def test_closed_connection_aborts(live: LiveServer, stream: bool) -> None:
    engine = live.server.engine
    engine.hold_after = 2
    async with live.client() as client:
        request = asyncio.ensure_future(client.post(CHAT, json=chat(stream=stream)))
        await asyncio.wait_for(engine.holding.wait(), SOON_S)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await asyncio.wait_for(engine.abort_seen.wait(), SOON_S)
    assert engine.aborted == [engine.submitted[0].request_id]


async def test_a_task_that_is_cancelled_while_the_server_stops_stays_cancelled() -> None:
    async def no_disconnect() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def work() -> None:
        async with CancelOnDisconnect(no_disconnect, stopping):
            await asyncio.sleep(60)

    stopping = StopSignal()
    only_stopped, cancelled = asyncio.ensure_future(work()), asyncio.ensure_future(work())
    await asyncio.sleep(0)
    stopping.set()
    cancelled.cancel()
    with pytest.raises(ServerStoppingError):
        await only_stopped
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_a_stop_after_the_block_cancels_nothing() -> None:
    async def no_disconnect() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def work() -> str:
        async with CancelOnDisconnect(no_disconnect, stopping):
            reply = "done"
        await left.wait()
        return reply

    stopping, left = StopSignal(), asyncio.Event()
    working = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    stopping.set()
    left.set()
    assert await working == "done"


async def test_a_disconnect_in_the_turn_in_which_the_block_ends_cancels_nothing_after_it() -> None:
    """The next block of the request hears of it, by its own receive."""
    loop = asyncio.get_running_loop()
    gone, done = loop.create_future(), loop.create_future()

    async def receive() -> dict[str, Any]:
        await gone
        return {"type": "http.disconnect"}

    def both() -> None:
        gone.set_result(None)
        done.set_result(None)

    async with CancelOnDisconnect(receive, StopSignal()):
        await asyncio.sleep(0)  # the watcher has begun to wait
        loop.call_soon(both)
        await done
    for _ in range(3):
        await asyncio.sleep(0)
    with pytest.raises(ClientDisconnect):
        async with CancelOnDisconnect(receive, StopSignal()):
            await loop.create_future()
