"""A server with files and batches, over real HTTP, and OpenAI's client for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
from openai.types import Batch, BatchRequestCounts, FileObject

from bros.batch.runner import BatchRunner
from bros.batch.store import Store, open_store
from bros.core.clock import ManualClock
from bros.core.errors import EngineDeadError
from bros.core.interfaces import EngineClient, EngineStats
from bros.core.request import EngineRequest, RequestOutput
from bros.text.tokenizer import Tokenizer
from support.scripted_server import LiveServer, ScriptedEngine, live_server

T = TypeVar("T")

NOW = 1_700_000_000
"""When tests begin, in Unix seconds."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ANSWER = "Hello world"
ANSWER_TOKENS = len(ANSWER) + 1
FINAL = ("completed", "failed", "expired", "cancelled")

_PATIENCE_S = 20.0
_LOOK_EVERY_S = 0.002


class RowEngine(ScriptedEngine):
    """Dies of some prompts, is back at once, and lets some prompts wait.

    Tests set: `poison`, what a prompt has in it that the engine dies of, with everything that
    runs; `held`, the same for prompts that wait until `release` is set; `bug`, raised instead of
    figures.
    """

    def __init__(self, tokenizer: Tokenizer, clock: ManualClock) -> None:
        super().__init__(tokenizer, clock)
        self.poison: str | None = None
        self.held: str | None = None
        self.bug: Exception | None = None
        self.deaths = 0
        self.waiting = 0

    @property
    def prompts(self) -> Counter[str]:
        """How often each prompt was submitted."""
        return Counter(map(self.prompt, self.submitted))

    def die(self) -> None:
        """All that runs is lost; requests that come later find a new engine."""
        self.deaths += 1

    async def stats(self) -> EngineStats:
        if self.bug is not None:
            raise self.bug
        return await super().stats()

    async def _run(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        prompt, life = self.prompt(request), self.deaths
        if self.poison is not None and self.poison in prompt:
            self.die()
        if self.held is not None and self.held in prompt:
            await self._wait(life)
        async for output in super()._run(request):
            if self.deaths > life:
                raise EngineDeadError("The engine died.")
            yield output

    async def _wait(self, life: int) -> None:
        self.waiting += 1
        try:
            await until(lambda: self.go_on.is_set() or self.deaths > life, patience_s=60)
        finally:
            self.waiting -= 1

    def prompt(self, request: EngineRequest) -> str:
        """What was asked, as text."""
        return self.tokenizer.decode(request.prompt_token_ids)


@dataclass(frozen=True)
class BatchServer:
    """A running server. client: OpenAI's. http: for what that cannot say."""

    live: LiveServer
    store: Store
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def engine(self) -> RowEngine:
        engine: EngineClient = self.live.server.engine
        assert isinstance(engine, RowEngine)
        return engine

    @property
    def clock(self) -> ManualClock:
        return self.live.server.clock

    @property
    def runner(self) -> BatchRunner:
        assert self.live.server.state.jobs is not None
        return self.live.server.state.jobs.runner

    def wake(self) -> None:
        """Let it look at once for what others have done."""
        self.runner.wake()

    async def upload(self, content: bytes, **fields: Any) -> FileObject:
        fields = {"purpose": "batch", "file": ("rows.jsonl", content), **fields}
        return await self.client.files.create(**fields)

    async def submit(self, *rows: Any, endpoint: str = COMPLETIONS, **fields: Any) -> Batch:
        """Upload rows and begin a batch of them."""
        file = await self.upload(jsonl(*rows))
        return await self.create(file.id, endpoint=endpoint, **fields)

    async def create(self, file_id: str, **fields: Any) -> Batch:
        """Begin a batch of a file."""
        fields = {"endpoint": COMPLETIONS, "completion_window": "24h", **fields}
        return await self.client.batches.create(input_file_id=file_id, **fields)

    async def wait(self, batch: Batch | str, *statuses: str) -> Batch:
        """The batch, once it has one of the statuses; else, once it has a final one."""
        batch_id = batch if isinstance(batch, str) else batch.id
        wanted = statuses or FINAL

        async def look() -> Batch | None:
            found = await self.client.batches.retrieve(batch_id)
            assert found.status in wanted or found.status not in FINAL, found
            return found if found.status in wanted else None

        return await eventually(look)

    async def wait_done(self, batch: Batch, rows: int) -> Batch:
        """The batch, once so many rows have an outcome."""

        async def look() -> Batch | None:
            found = await self.client.batches.retrieve(batch.id)
            counts = found.request_counts
            assert counts is not None
            return found if counts.completed + counts.failed >= rows else None

        return await eventually(look)

    async def results(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """The lines of an output or error file by custom_id; none without a file."""
        if file_id is None:
            return {}
        lines = (await self.client.files.content(file_id)).content.split(b"\n")
        assert lines.pop() == b""
        found = [json.loads(line) for line in lines]
        assert len({line["custom_id"] for line in found}) == len(found)
        return {line["custom_id"]: line for line in found}

    @contextlib.contextmanager
    def full(self, table: str = "files") -> Iterator[None]:
        """There is no room for anything in this table while the block lasts."""
        with self.store.database.write() as connection:
            connection.exec_driver_sql(
                f"CREATE TRIGGER no_{table} BEFORE INSERT ON {table} "
                "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
            )
        try:
            yield
        finally:
            with self.store.database.write() as connection:
                connection.exec_driver_sql(f"DROP TRIGGER no_{table}")

    def bodies(self) -> set[str]:
        """Digests of all file bodies on disk."""
        return {path.name for path in self._folder().glob("??/*")}

    def unplaced(self) -> list[Path]:
        """Temporary files on disk."""
        return sorted((self._folder() / "tmp").iterdir())

    def _folder(self) -> Path:
        return self.store.files.bodies.path("00").parent.parent


@contextlib.asynccontextmanager
async def batch_server(
    folder: Path, *, key: str = "unused", idle: bool = False, **options: Any
) -> AsyncIterator[BatchServer]:
    """A server with its store in `folder`, which others may use at the same time.

    key: what the client sends. idle: no runner works on batches. options: of `live_server`.
    """
    store = open_store(folder)
    try:
        async with live_server(jobs_in=store, **{"engine": RowEngine, **options}) as live:
            async with (
                openai_client(live.url, key) as client,
                live.client(headers={"authorization": f"Bearer {key}"}, verify=False) as http,
                working(live, idle=idle),
            ):
                yield BatchServer(live, store, client, http)
    finally:
        store.close()


def openai_client(url: str, key: str) -> openai.AsyncOpenAI:
    """OpenAI's client for a server. No certificates are loaded, which takes longer than a test."""
    connections = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=connections
    )


@contextlib.asynccontextmanager
async def working(live: LiveServer, *, idle: bool = False) -> AsyncIterator[None]:
    """Work on batches for as long as the block lasts, as a server does."""
    assert live.server.state.jobs is not None
    running = None if idle else asyncio.create_task(live.server.state.jobs.run())
    try:
        yield
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def eventually(look: Callable[[], Awaitable[T | None]]) -> T:
    """What `look` finds in the end; fails if that takes too long."""
    async with asyncio.timeout(_PATIENCE_S):
        while (found := await look()) is None:
            await asyncio.sleep(_LOOK_EVERY_S)
        return found


async def until(condition: Callable[[], bool], patience_s: float = _PATIENCE_S) -> None:
    """Wait for a condition; fails if that takes too long."""
    async with asyncio.timeout(patience_s):
        while not condition():
            await asyncio.sleep(_LOOK_EVERY_S)


def counts(total: int, completed: int, failed: int) -> BatchRequestCounts:
    """What a batch shows of its rows."""
    return BatchRequestCounts(total=total, completed=completed, failed=failed)


def row(number: int, prompt: str | None = None, **fields: Any) -> dict[str, Any]:
    """A row for completions, called `row-<number>`; its prompt is its name unless given."""
    name = f"row-{number}"
    body = {"model": "scripted", "prompt": prompt or name, "max_tokens": 100, **fields}
    return {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": body}


def chat_row(number: int, content: str = "Hi", **fields: Any) -> dict[str, Any]:
    """The same for chats."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": content}], **fields}
    return {"custom_id": f"row-{number}", "method": "POST", "url": CHAT, "body": body}


def jsonl(*rows: Any) -> bytes:
    """An input file. Rows that are bytes go in as they are."""
    lines: Sequence[bytes] = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
    return b"".join(line + b"\n" for line in lines)
