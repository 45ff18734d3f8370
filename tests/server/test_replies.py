"""Large replies: written as their client reads them, counted until then, and at a least rate."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from bros.core.clock import SystemClock
from bros.core.tenants import Resource, TenantAccounts, TenantLimits
from bros.server.app import PacedReplies
from bros.server.connections import Connection, ConnectionLimits, Connections
from bros.server.replies import PIECE_BYTES
from bros.server.tenants import TENANT

LARGE = 10 * PIECE_BYTES + 1
KIB = 2**10


async def _reply(request: Request) -> Response:
    return Response(b"x" * int(request.query_params["size"]))


async def _stream(request: Request) -> Response:
    async def parts() -> Any:
        yield b"x" * LARGE
        yield b"y"

    return StreamingResponse(parts())


class _State:
    """What the middleware needs of a ServerState."""

    def __init__(self, accounts: TenantAccounts) -> None:
        self.accounts = accounts

    def tenant(self, request: Request) -> str:
        tenant: str = request.scope[TENANT]
        return tenant


class Desk:
    """An app behind the middleware, with tenants that may hold so many bytes of replies."""

    def __init__(self, most: int) -> None:
        limits = TenantLimits(output_bytes=most)
        self.accounts = TenantAccounts({"ann": limits, "bob": limits})
        self.app = Starlette(routes=[Route("/reply", _reply), Route("/stream", _stream)])
        self.app.state.server = _State(self.accounts)
        self._replies = PacedReplies(self.app, self.accounts)

    def held(self, tenant: str = "ann") -> int:
        return self.accounts.used(tenant, Resource.OUTPUT_BYTES)

    def ask(self, path: str, tenant: str = "ann") -> Reader:
        path, _, query = path.partition("?")
        scope: Scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "query_string": query.encode(),
            "headers": [],
            "app": self.app,
            TENANT: tenant,
        }
        reader = Reader()
        reader.task = asyncio.create_task(self._replies(scope, reader.receive, reader.send))
        return reader


class Reader:
    """A client that reads one message after `go_on` was set, and then all."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.go_on = asyncio.Event()

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        if message["type"] == "http.response.body":
            await self.go_on.wait()

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    async def body(self) -> bytes:
        self.go_on.set()
        await self.task
        assert [each.get("more_body", False) for each in self.messages[1:]][-1] is False
        return b"".join(message["body"] for message in self.messages[1:])


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_large_reply_is_written_as_it_is_read_and_counts_until_then() -> None:
    desk = Desk(most=2 * LARGE)
    reader = desk.ask(f"/reply?size={LARGE}")
    await _settled()
    assert [len(each.get("body", b"")) for each in reader.messages] == [0, PIECE_BYTES]
    assert (desk.held(), desk.held("bob")) == (LARGE, 0)
    assert len(await reader.body()) == LARGE
    assert max(len(each.get("body", b"")) for each in reader.messages) == PIECE_BYTES
    assert desk.held() == 0


async def test_a_tenant_that_does_not_read_gets_no_more_large_replies_but_others_do() -> None:
    desk = Desk(most=2 * LARGE)
    unread = [desk.ask(f"/reply?size={LARGE}") for _ in range(2)]
    await _settled()
    refused = desk.ask(f"/reply?size={LARGE}")
    answer = httpx.Response(429, content=await refused.body()).json()
    assert refused.status == 429
    assert "max_output_bytes" in answer["error"]["message"]
    assert (b"retry-after", b"1") in refused.messages[0]["headers"]
    assert desk.accounts.refused("ann", Resource.OUTPUT_BYTES) == 1
    for other in (desk.ask(f"/reply?size={LARGE}", "bob"), desk.ask("/reply?size=10")):
        await other.body()
        assert other.status == 200
    for reader in unread:
        await reader.body()
    assert len(await desk.ask(f"/reply?size={LARGE}").body()) == LARGE
    assert desk.held() == 0


async def test_a_reply_that_is_larger_than_the_limit_may_be_the_only_one() -> None:
    desk = Desk(most=LARGE // 2)
    reader = desk.ask(f"/reply?size={LARGE}")
    await _settled()
    second = desk.ask(f"/reply?size={LARGE}")
    await second.body()
    assert (reader.status, second.status) == (200, 429)
    assert len(await reader.body()) == LARGE


async def test_streamed_bodies_are_written_in_pieces_and_never_refused() -> None:
    desk = Desk(most=1)
    reader = desk.ask("/stream")
    await _settled()
    assert (reader.status, desk.held()) == (200, LARGE)
    assert len(await reader.body()) == LARGE + 1
    assert desk.held() == 0


class _Transport:
    """A transport whose client reads when the test says so."""

    def __init__(self) -> None:
        self.unsent = 0
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


class SlowClient:
    """A connection whose client always has something to read."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        config, state = uvicorn.Config(Starlette()), ServerState()
        config.load()
        limits = ConnectionLimits(header_s=1e9)
        connections = Connections(limits, config, state, SystemClock(), self.closed.append)
        self._connection = Connection(config, state, connections, "address")
        self._transport = _Transport()
        self._connection.transport = self._transport  # type: ignore[assignment]
        self._connection.flow = FlowControl(self._transport)  # type: ignore[arg-type]

    def reads(self, rate: int, seconds: int) -> None:
        """It reads so many bytes per second, and the server writes whenever it may."""
        for _ in range(seconds):
            self._transport.unsent = max(0, self._transport.unsent - rate)
            if self._transport.unsent <= 16 * KIB:
                self._connection.resume_writing()
                self._transport.unsent += PIECE_BYTES
                self._connection.pause_writing()
            self._connection.check(1.0)
            if self._transport.aborted:
                return


@pytest.mark.parametrize("rate", [2 * KIB, 10 * KIB, 500 * KIB])
async def test_a_client_that_reads_slowly_is_served(rate: int) -> None:
    client = SlowClient()
    client.reads(rate, 2_000)
    assert client.closed == []


@pytest.mark.parametrize("rate", [0, 1, 900])
async def test_a_client_that_reads_a_trickle_is_cut_after_five_minutes(rate: int) -> None:
    client = SlowClient()
    client.reads(rate, 299)
    assert client.closed == []
    client.reads(rate, 10)
    assert client.closed == ["read_timeout"]
