"""The backend of a session (a server, or an engine in this process), and its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Protocol, TypeVar

from bros.core.loop_thread import LoopThread
from bros.semantic.schema import CallSpec, Criteria, SubmittedCall


class Backend(Protocol):
    """The operations of SessionService, which says what they mean, for one tenant.

    All raise what it raises, and ServerUnreachableError.
    """

    async def create(
        self,
        criteria: Criteria | None,
        ttl_s: float | None,
        tenant: str,
        metadata: Mapping[str, str],
    ) -> str:
        """Returns the id of the session."""
        ...

    async def submit(
        self, session_id: str, calls: Sequence[CallSpec], key: str
    ) -> Sequence[SubmittedCall]: ...

    async def declare(
        self, session_id: str, variable_id: str, name: str, value: str | None
    ) -> None: ...

    async def set(self, session_id: str, variable_id: str, value: str) -> None: ...

    async def fail(self, session_id: str, request_id: str, message: str) -> None: ...

    async def want(self, session_id: str, variable_id: str, criteria: Criteria) -> None: ...

    async def get(
        self, session_id: str, variable_id: str, criteria: Criteria, timeout_s: float
    ) -> str: ...

    def stream(
        self, session_id: str, variable_id: str, criteria: Criteria
    ) -> AsyncGenerator[str, None]: ...

    async def cancel(self, session_id: str, request_id: str) -> None: ...

    async def inspect(self, session_id: str) -> Mapping[str, Any]:
        """The session with its calls and variables, as GET /v1/sessions/{id} answers."""
        ...

    async def delete(self, session_id: str) -> None: ...


T = TypeVar("T")


class Connection:
    """A backend, opened when it is first needed. Thread-safe; several sessions can share one.

        with connect("http://localhost:8000") as connection:
            with Session(connection=connection): ...
            with Session(connection=connection): ...

    opening: makes the context in which the backend works.
    """

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[Backend]]) -> None:
        self._opening = opening
        self._thread: LoopThread | None = None
        self._exit = contextlib.AsyncExitStack()
        self._backend: asyncio.Task[Backend] | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        return self._closed

    async def backend(self) -> Backend:
        """Open it, the first time; only on the connection's own loop.

        Raises ModelError or ConfigError of an engine in this process.
        """
        if self._backend is None:
            # A task of its own: cancelling one caller does not cancel it for the others.
            opening = self._exit.enter_async_context(self._opening())
            self._backend = asyncio.create_task(opening)
        return await asyncio.shield(self._backend)

    def run(self, coroutine: Coroutine[Any, Any, T], instead: str) -> T:
        """Run on the connection's loop and wait.

        Raises RuntimeError on a running event loop, which it would block; `instead`: what to call
        there. If the connection is closed, too.
        """
        try:
            refuse_running_loop(instead)
        except RuntimeError:
            coroutine.close()
            raise
        return self._loop_thread(coroutine).run(coroutine)

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the connection's loop; cancelling this cancels it there."""
        return await asyncio.wrap_future(self._loop_thread(coroutine).start(coroutine))

    def close(self) -> None:
        """End it. Calling it twice is fine."""
        if (thread := self._ended_thread()) is not None:
            thread.run(self._leave())
            thread.close()

    async def aclose(self) -> None:
        """`close` for coroutines."""
        if (thread := self._ended_thread()) is not None:
            await asyncio.wrap_future(thread.start(self._leave()))
            await asyncio.to_thread(thread.close)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _loop_thread(self, coroutine: Coroutine[Any, Any, Any]) -> LoopThread:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise RuntimeError("The connection is closed.")
            if self._thread is None:
                self._thread = LoopThread("bros-semantic")
            return self._thread

    def _ended_thread(self) -> LoopThread | None:
        """The thread, if there is one to be ended; no other work gets in any more."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        return thread

    async def _leave(self) -> None:
        if self._backend is not None:
            await asyncio.wait([self._backend])
        await self._exit.aclose()


def refuse_running_loop(instead: str) -> None:
    """Raise RuntimeError where waiting would block an event loop. instead: what to call there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"This would block the running event loop; here it is `{instead}` instead.")
