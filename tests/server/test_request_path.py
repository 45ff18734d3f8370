"""A plain streamed chat passes few files, and docs/architecture.md names all of them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from stream_speed import CalledFiles

import bros
from bros.core.clock import ManualClock
from bros.core.request import EngineRequest, FinishReason, RequestOutput
from bros.engine.client import OutputStream
from bros.engine.messages import Accepted, Ready, Shutdown, Submit
from bros.transport.ipc import Endpoints, ZmqTransport
from bros.transport.process_client import SupervisedClient
from support.killable_engine import INFO
from support.outputs import outputs_of
from support.scripted_server import LiveServer, ScriptedEngine, chunks, live_server

PACKAGE = Path(bros.__file__).parent
MOST_FILES = 20


def serve(folder: Path) -> None:
    """The engine's end: answer every request, a token at a time, until Shutdown."""
    transport = ZmqTransport(folder)
    while True:
        for command in transport.receive(wait=True):
            if isinstance(command, Shutdown):
                transport.close()
                return
            if isinstance(command, Submit):
                request = command.request
                transport.send(Accepted(request.request_id, request.service_class))
                for output in answer(request.request_id):
                    transport.send(outputs_of([output]))


def answer(request_id: str) -> list[RequestOutput]:
    """Token ids of ScriptedEngine's tokenizer are smaller than 256."""
    last = RequestOutput(request_id=request_id, token_ids=(67,), finish_reason=FinishReason.LENGTH)
    return [RequestOutput(request_id=request_id, token_ids=(66,)) for _ in range(9)] + [last]


class ThreadClient(SupervisedClient):
    """Of an engine on a thread of this process, with the sockets of one in another process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(restart=False, on_final_death=lambda reason: None, grace_s=10.0)
        self._folder = folder

    async def _run_once(self) -> str:
        async with AsyncExitStack() as stack:
            self._listen(stack, Endpoints.of(self._folder))
            self.on_reply(Ready(INFO))
            await asyncio.to_thread(serve, self._folder)
        return "It was shut down."

    def _kill(self) -> None:
        pass


class ConnectedEngine(ScriptedEngine):
    """Submits what it is asked for to `client`."""

    client: SupervisedClient

    async def submit(self, request: EngineRequest) -> OutputStream:
        return await self.client.submit(request)


class BuiltinClock(ManualClock):
    """Its methods are no functions of bros/, as those of SystemClock, which servers have."""

    now = staticmethod(time.monotonic)
    unix_time = staticmethod(time.time)


@pytest.fixture
async def connected(tmp_path: Path) -> AsyncIterator[LiveServer]:
    client = ThreadClient(tmp_path)
    await client.start()
    try:
        async with live_server(engine=ConnectedEngine, clock=BuiltinClock()) as live:
            assert isinstance(live.server.engine, ConnectedEngine)
            live.server.engine.client = client
            yield live
    finally:
        await client.close()


async def files_of_a_chat(live: LiveServer) -> list[str]:
    """Files of bros/ whose functions the second of two streamed chats calls."""
    called = CalledFiles(PACKAGE)
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for turn in range(2):
        async with live.client() as client:
            if turn:
                gc.collect()  # what earlier tests left must not be finalized within the request
                called.begin()
            try:
                response = await client.post("/v1/chat/completions", json=body)
            finally:
                called.end()
            assert chunks(response.text)[-1]["usage"]["completion_tokens"] == 10
    return called.names


async def test_a_plain_streamed_chat_passes_few_files_all_of_which_are_documented(
    connected: LiveServer,
) -> None:
    names = await files_of_a_chat(connected)
    assert "bros/server/connections.py" in names and "bros/transport/ipc.py" in names
    assert len(names) <= MOST_FILES, names
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    life = text.partition("\n## Life of a request\n")[2].partition("\n## ")[0]
    assert [name for name in names if f"`{name.removeprefix('bros/')}`" not in life] == []
