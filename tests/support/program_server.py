"""A server with sessions on a real socket, whose engine answers what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from bros.core.loop_thread import LoopThread
from bros.core.request import IdGenerator
from bros.semantic.client.connection import Backend, Connection
from bros.semantic.client.local import LocalBackend, serve_locally
from bros.semantic.errors import ServerUnreachableError
from bros.semantic.schema import CallSpec, Criteria, Perf, SubmittedCall
from bros.server.app import create_app
from bros.server.serve import HttpServer, bind
from bros.server.tenants import load_tenants
from bros.simulator.virtual_loop import LoopClock
from bros.text.chat_format import ChatFormat
from bros.text.generation import TextGenerator
from support.program_engine import TOKENIZER, ProgramEngine, make_service
from support.scripted_server import Server

T = TypeVar("T")


class ProgramServer:
    """A server on a thread of its own. config: of ServerConfig."""

    def __init__(self, engine: ProgramEngine, **config: Any) -> None:
        self.engine = engine
        self._thread = LoopThread("server")
        self._http: HttpServer | None = None
        self._running: list[asyncio.Task[None]] = []
        self.url = self._thread.run(self._start(config))

    def do(self, action: Callable[[], T]) -> T:
        """Do something to the engine, on its own loop."""

        async def act() -> T:
            return action()

        return self._thread.run(act())

    def close(self) -> None:
        self._thread.run(self._stop())
        self._thread.close()

    async def _start(self, config: dict[str, Any]) -> str:
        ids, clock = IdGenerator(random.Random(1)), LoopClock()
        service = make_service(self.engine)
        state = dataclasses.replace(
            Server(**{"drain_timeout": 0.1, **config}).state,
            engine=self.engine,
            tokenizer=TOKENIZER,
            chat_format=ChatFormat(TOKENIZER),
            generator=TextGenerator(self.engine, TOKENIZER, clock, ids),
            clock=clock,
            sessions=service,
        )
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        app = create_app(state, load_tenants(state.config))
        self._http = HttpServer(app, bind("127.0.0.1", 0), on_listening=listening.set_result)
        self._running = [asyncio.create_task(work()) for work in (self._http.run, service.run)]
        return await listening

    async def _stop(self) -> None:
        assert self._http is not None
        self._http.stop()
        http, sessions = self._running
        await http
        sessions.cancel()
        await asyncio.gather(sessions, return_exceptions=True)


@contextlib.contextmanager
def program_server(engine: ProgramEngine, **config: Any) -> Iterator[ProgramServer]:
    server = ProgramServer(engine, **config)
    try:
        yield server
    finally:
        server.close()


class LossyBackend(LocalBackend):
    """lost: an operation, and which half of its next exchange gets lost: request or answer.
    error: what the client gets then.
    """

    lost: tuple[str, str] | None = None
    error: Exception = ServerUnreachableError("The line is dead.")

    async def submit(
        self, session_id: str, calls: Sequence[CallSpec], key: str
    ) -> Sequence[SubmittedCall]:
        return await self._exchange("submit", super().submit(session_id, calls, key))

    async def declare(
        self, session_id: str, variable_id: str, name: str, value: str | None
    ) -> None:
        work = super().declare(session_id, variable_id, name, value)
        await self._exchange("declare", work)

    async def set(self, session_id: str, variable_id: str, value: str) -> None:
        await self._exchange("set", super().set(session_id, variable_id, value))

    async def fail(self, session_id: str, request_id: str, message: str) -> None:
        await self._exchange("fail", super().fail(session_id, request_id, message))

    async def get(
        self, session_id: str, variable_id: str, criteria: Criteria, timeout_s: float
    ) -> str:
        work = super().get(session_id, variable_id, criteria, timeout_s)
        # Only those of native functions, whose criteria are these.
        if criteria.perf is not Perf.THROUGHPUT:
            return await work
        return await self._exchange("get", work)

    async def _exchange(self, operation: str, work: Coroutine[Any, Any, T]) -> T:
        lost, half = self.lost or ("", "")
        if operation != lost:
            return await work
        self.lost = None
        if half == "answer":
            await work
        work.close()
        raise self.error


@contextlib.contextmanager
def lossy_connection(engine: ProgramEngine) -> Iterator[tuple[Connection, LossyBackend]]:
    """A service in this process to which the way is not safe."""
    service = make_service(engine)
    backend = LossyBackend(service)

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[Backend]:
        async with serve_locally(service):
            yield backend

    with Connection(opening) as connection:
        yield connection, backend


def local_connection(engine: ProgramEngine) -> Connection:
    """The same engine and service without a server."""

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[Backend]:
        async with serve_locally(make_service(engine)) as backend:
            yield backend

    return Connection(opening)
