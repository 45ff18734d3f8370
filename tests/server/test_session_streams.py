"""Values as server-sent events; clients that leave; servers that stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from bros.semantic.schema import VariableView
from bros.server.sessions.routes import ValueStream
from bros.server.state import StopSignal
from support.scripted_server import LiveServer, Server, assert_envelope
from support.session_server import SOON_S, SessionClient, keeping, ok, stream_events

DONE = "[DONE]"


@pytest.fixture
async def kept(server: Server) -> AsyncIterator[Server]:
    async with keeping(server):
        yield server


@pytest.fixture
async def session(kept: Server) -> SessionClient:
    return await SessionClient.open(kept.http)


async def test_pieces_make_up_the_value(session: SessionClient) -> None:
    variables = await session.call("Go {{output:y}}")
    response = await session.look(variables["y"], stream="true", criteria="ttft")
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, end, done = stream_events(response.text)
    assert len(deltas) > 1
    assert "".join(each["delta"] for each in deltas) == "Hello world"
    assert (end, done) == ({"value": "Hello world", "state": "ready"}, DONE)


async def test_what_is_there_comes_at_once(session: SessionClient) -> None:
    ok(await session.ask("POST", "/variables", json={"id": "v", "value": "a\u2028b"}))
    response = await session.look("v", stream="true")
    assert response.text.isascii()
    assert stream_events(response.text) == [
        {"delta": "a\u2028b"},
        {"value": "a\u2028b", "state": "ready"},
        DONE,
    ]


async def test_transformed_values_come_whole(session: SessionClient) -> None:
    variables = await session.call(
        "Go {{output:y}}", parameters=[{"name": "y", "transforms": "upper"}]
    )
    response = await session.look(variables["y"], stream="true")
    assert stream_events(response.text)[0] == {"delta": "HELLO WORLD"}


async def test_a_failure_before_the_first_piece_has_its_status(session: SessionClient) -> None:
    variables = await session.call(
        "Go {{output:y}}", parameters=[{"name": "y", "transforms": "int"}]
    )
    response = await session.look(variables["y"], stream="true")
    assert response.status_code == 424
    assert response.json()["error"]["cause"]["stage"] == "transform"
    assert_envelope(await session.look("nothing", stream="true"), 404)


async def test_a_failure_after_pieces_is_an_event(kept: Server, session: SessionClient) -> None:
    kept.engine.fail_after = 3
    variables = await session.call("Go {{output:y}}")
    response = await session.look(variables["y"], stream="true")
    assert response.status_code == 200
    *deltas, failure = stream_events(response.text)
    assert "".join(each["delta"] for each in deltas) == "Hel"
    assert failure["error"]["code"] == "upstream_failed"
    assert failure["error"]["cause"]["stage"] == "generate"


async def test_a_deleted_session_ends_streams(kept: Server, session: SessionClient) -> None:
    kept.engine.hold_after = 2
    variables = await session.call("Go {{output:y}}")
    streaming = asyncio.ensure_future(session.look(variables["y"], stream="true"))
    await asyncio.wait_for(kept.engine.holding.wait(), SOON_S)
    ok(await session.ask("DELETE"))
    response = await asyncio.wait_for(streaming, SOON_S)
    assert stream_events(response.text)[-1]["error"]["code"] == "session_gone"


@pytest.mark.parametrize("query", [{"wait": "true"}, {"stream": "true"}])
async def test_leaving_ends_the_waiting_and_nothing_else(
    live: LiveServer, query: dict[str, str]
) -> None:
    engine = live.server.engine
    engine.hold_after = 2
    async with keeping(live.server), live.client() as http:
        session = await SessionClient.open(http)
        variables = await session.call("Go {{output:y}}")
        async with live.client() as other:
            visitor = SessionClient(other, session.id)
            leaving = asyncio.ensure_future(visitor.look(variables["y"], **query))
            await asyncio.wait_for(engine.holding.wait(), SOON_S)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        waiting = asyncio.ensure_future(session.value(variables["y"]))
        shown = ok(await session.look(variables["y"]))
        assert shown["state"] == "pending"
        engine.go_on.set()
        assert await asyncio.wait_for(waiting, SOON_S) == "Hello world"
        assert engine.aborted == []


@pytest.mark.parametrize("query", [{"wait": "true"}, {"stream": "true"}])
async def test_a_server_that_stops_tells_waiting_clients(
    live: LiveServer, query: dict[str, str]
) -> None:
    async with keeping(live.server), live.client() as http:
        session = await SessionClient.open(http)
        ok(await session.ask("POST", "/variables", json={"id": "never"}))
        waiting = asyncio.ensure_future(session.look("never", **query))
        shown: dict[str, Any] = {"perf": None}
        while shown["perf"] is None:  # until the client has requested it
            shown = ok(await session.look("never"))
        live.http.stop()
        error = assert_envelope(await asyncio.wait_for(waiting, SOON_S), 503)
        assert error["code"] == "server_shutting_down"
        await asyncio.wait_for(live.running, SOON_S)


class Slow:
    """A value whose pieces come when a test says so, and what a client of its stream gets."""

    def __init__(self, *, timeout_s: float, heartbeat_s: float) -> None:
        self.pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self.closed = False
        self.sent: list[bytes] = []
        self.beat = asyncio.Event()
        self.stream = ValueStream(
            self._pieces(),
            self._result,
            StopSignal(),
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
        )

    async def run(self) -> str:
        await asyncio.wait_for(self.stream({}, self._receive, self._send), SOON_S)
        return b"".join(self.sent).decode()

    async def _pieces(self) -> AsyncGenerator[str, None]:
        try:
            while (piece := await self.pieces.get()) is not None:
                yield piece
        finally:
            self.closed = True

    def _result(self) -> VariableView:
        from bros.semantic.schema import VariableState

        return VariableView(id="v", name="", state=VariableState.READY, value="ab")

    async def _receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Any) -> None:
        body = message.get("body", b"")
        self.sent.append(body)
        if body.startswith(b":"):
            self.beat.set()


async def test_comments_are_sent_while_nothing_comes() -> None:
    slow = Slow(timeout_s=SOON_S, heartbeat_s=0.01)
    running = asyncio.ensure_future(slow.run())
    await asyncio.wait_for(slow.beat.wait(), SOON_S)
    for piece in ("a", "b", None):
        slow.pieces.put_nowait(piece)
    events = stream_events(await running)
    assert events == [{"delta": "a"}, {"delta": "b"}, {"value": "ab", "state": "ready"}, DONE]
    assert slow.closed


async def test_too_long_a_silence_is_a_timeout() -> None:
    slow = Slow(timeout_s=0.05, heartbeat_s=0.02)
    slow.pieces.put_nowait("a")
    first, last = stream_events(await slow.run())
    assert first == {"delta": "a"}
    assert last["error"]["code"] == "get_timeout"
    assert slow.closed
