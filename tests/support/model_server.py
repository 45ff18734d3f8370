"""A server around a real engine with a small model, on a real socket of this event loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from bros.batch.store import open_store
from bros.core.clock import SystemClock
from bros.core.config import EngineConfig, ServerConfig
from bros.core.fair import FairThreads
from bros.core.request import IdGenerator
from bros.server.app import create_app
from bros.server.build import with_jobs, with_sessions
from bros.server.operations.metrics import ServerMetrics
from bros.server.serve import HttpServer, bind
from bros.server.state import ServerState
from bros.server.tenants import load_tenants
from bros.text.chat_format import ChatFormat
from bros.text.generation import TextGenerator
from bros.transport.local import LocalEngine, open_local


@dataclass(frozen=True, slots=True)
class ModelServer:
    """client: OpenAI's. http: for what that cannot say; has the server's URL."""

    state: ServerState
    engine: LocalEngine
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    url: str

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body, timeout=60)


@contextlib.asynccontextmanager
async def model_server(
    folder: Path, data_dir: Path, *, name: str = "tiny", server: Any = None, **engine: Any
) -> AsyncIterator[ModelServer]:
    """Serve the model in `folder`. server: options of ServerConfig; engine: of EngineConfig."""
    options = {"policy": "fcfs", "threads": 1, "kv_blocks": 64, "weights": "fp32", **engine}
    config = EngineConfig(model=str(folder), **options)
    settings = ServerConfig(drain_timeout=0.1, **(server or {}))
    async with contextlib.AsyncExitStack() as stack:
        local = await stack.enter_async_context(open_local(config, data_dir / "cache"))
        store = stack.enter_context(contextlib.closing(open_store(data_dir / "store")))
        clock, ids = SystemClock(), IdGenerator(random.Random(0))
        tenants = load_tenants(settings)
        accounts = tenants.accounts(settings, max_queue=local.client.info.max_queue)
        state = ServerState(
            engine=local.client,
            tokenizer=local.tokenizer,
            generator=TextGenerator(local.client, local.tokenizer, clock, ids, accounts),
            model_name=name,
            created=1_700_000_000,
            config=settings,
            clock=clock,
            ids=ids,
            metrics=ServerMetrics(clock),
            chat_format=ChatFormat(
                local.tokenizer, settings.tool_format, settings.reasoning_format
            ),
            threads=FairThreads(accounts),
            accounts=accounts,
        )
        state = with_jobs(with_sessions(state), store)
        assert state.jobs is not None
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        http = HttpServer(
            create_app(state, tenants), bind("127.0.0.1", 0), on_listening=listening.set_result
        )
        tasks = [asyncio.create_task(http.run()), asyncio.create_task(state.jobs.run())]
        try:
            url = await listening
            async with (
                httpx.AsyncClient(base_url=url, timeout=60) as plain,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            ):
                yield ModelServer(state, local, client, plain, url)
        finally:
            http.stop()
            await tasks[0]
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
