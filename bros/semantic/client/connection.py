"""The backend of a session (a server, or an engine in this process), and its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from bros.core.loop_thread import LoopThread
from bros.semantic.schema import CallSpec, Criteria, SharingMode, SubmittedCall


class Backend(Protocol):
    """The operations of SessionService for one tenant; see there.

    They raise the same errors, and ServerUnreachableError.
    """

    async def create(
        self,
        criteria: Criteria | None,
        ttl_s: float | None,
        tenant: str,
        sharing: SharingMode,
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
        """The session with its calls and variables, as GET /v1/sessions/{id} returns it."""
        ...

    async def delete(self, session_id: str) -> None: ...


T = TypeVar("T")


class Connection:
    """A backend with its own event loop, opened on first use. Thread-safe; sessions can share it.

        with connect("http://localhost:8000") as connection:
            with Session(connection=connection): ...
            with Session(connection=connection): ...

    opening: creates the context manager that opens the backend.
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
        """The backend, opened on the first call. Only for the connection's own loop.

        Raises ModelError or ConfigError if an engine in this process cannot start.
        """
        if self._backend is None:
            # A separate task: cancelling one caller does not cancel it for the others.
            opening = self._exit.enter_async_context(self._opening())
            self._backend = asyncio.create_task(opening)
        return await asyncio.shield(self._backend)

    def run(self, coroutine: Coroutine[Any, Any, T], instead: str) -> T:
        """Run a coroutine on the connection's loop and wait for it.

        instead: the method to call on an event loop, for the message.
        Raises RuntimeError on a running event loop, which it would block, and if the connection is
        closed.
        """
        try:
            refuse_running_loop(instead)
        except RuntimeError:
            coroutine.close()
            raise
        return self._loop_thread(coroutine).run(coroutine)

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """`run` for coroutines; cancelling it cancels the coroutine on the connection's loop."""
        return await asyncio.wrap_future(self._loop_thread(coroutine).start(coroutine))

    def close(self) -> None:
        """Close the backend and end the loop. Idempotent."""
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

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *error: object) -> None:
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
        """Mark the connection closed, and return its thread if it has one in this process."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        return None if thread is None or thread.is_forked else thread

    async def _leave(self) -> None:
        if self._backend is not None:
            await asyncio.wait([self._backend])
        await self._exit.aclose()


def refuse_running_loop(instead: str) -> None:
    """Raise RuntimeError on a running event loop. instead: the method to call there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"This call would block the running event loop: use `{instead}` instead.")
