"""A session as a program sees it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import re
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextvars import Token
from types import TracebackType
from typing import Any, TypeVar

from bros.semantic.calls import Program
from bros.semantic.connection import Connection, connect, refuse_running_loop
from bros.semantic.current import CURRENT
from bros.semantic.errors import SessionGoneError
from bros.semantic.program import Criteria, Perf, checked_seconds
from bros.semantic.session_work import SessionWork
from bros.semantic.variables import SemanticVariable

T = TypeVar("T")

_NOT_OF_IDS = re.compile(r"[^A-Za-z0-9_]")
_NAME_CHARS = 80


class Session:
    """Where calls are made: what is called inside its `with` block belongs to it.

    url: of a server; without one a model is run in this process, and `model`, `data_dir` and
    `options` say which and how, as those of `connect`. connection: instead of all these, one that
    is there already. criteria: for values that are asked for without. ttl: seconds without any
    activity after which the server ends it. tenant: whose it is; sessions of one tenant share what
    is computed of their prompts. metadata: shown by the server.

    Calls are collected, and sent as one program when a value is asked for. The session ends with
    the block, and what still runs in it is stopped; `use` makes it current without that, in
    threads for example, which do not take over the current session of who starts them.
    On a running event loop it is `async with`.

    Raises, on entry, what opening it raises: ServerUnreachableError, AuthenticationError,
    SessionLimitError, ModelError, ConfigError.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        connection: Connection | None = None,
        criteria: Criteria | Perf | str | None = None,
        ttl: float | None = None,
        tenant: str = "",
        metadata: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        if connection is not None and (url is not None or options):
            raise TypeError("a connection has its own url and options")
        self._criteria = _criteria(criteria)
        self._owns_connection = connection is None
        self._connection = connect(url, **options) if connection is None else connection
        self._program = Program(self)
        self._work = SessionWork(
            self, self._connection, self._criteria, ttl, tenant, metadata or {}
        )
        self._numbers = itertools.count(1)
        self._tokens: list[Token[Session | None]] = []
        self._closed = False
        self._lock = threading.Lock()

    @property
    def id(self) -> str:
        """Its id at the server. Opens it if it is not open yet."""
        return self.run(self._work.open(), "async with")

    @property
    def work(self) -> SessionWork:
        """What it does on its connection's loop."""
        return self._work

    @property
    def program(self) -> Program:
        """Calls that have not been sent yet."""
        return self._program

    @property
    def closed(self) -> bool:
        return self._closed

    def flush(self) -> None:
        """Send what has been called so far, without asking for any value.

        Raises what the server says if it refuses it.
        """
        self.run(self._work.send({}), "aflush")

    async def aflush(self) -> None:
        """`flush` for coroutines."""
        await self.arun(self._work.send({}))

    def inspect(self) -> Mapping[str, Any]:
        """The session with its calls and variables as the server sees them now."""
        return self.run(self._work.inspect(), "ainspect")

    async def ainspect(self) -> Mapping[str, Any]:
        """`inspect` for coroutines."""
        return await self.arun(self._work.inspect())

    @contextlib.contextmanager
    def use(self) -> Iterator[Session]:
        """Make it the current session for a block, at whose end it goes on."""
        token = CURRENT.set(self)
        try:
            yield self
        finally:
            CURRENT.reset(token)

    def close(self) -> None:
        """End it; functions of the client that wait or run are given up. Twice is fine."""
        refuse_running_loop("aclose")
        if self._end():
            self._connection.run(self._work.close(), "aclose")
            if self._owns_connection:
                self._connection.close()

    async def aclose(self) -> None:
        """`close` for coroutines."""
        if self._end():
            await self._connection.arun(self._work.close())
            if self._owns_connection:
                await self._connection.aclose()

    def __enter__(self) -> Session:
        try:
            self.run(self._work.open(), "async with")
        except BaseException:
            self._abandon()
            raise
        self._tokens.append(CURRENT.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        CURRENT.reset(self._tokens.pop())
        self.close()

    async def __aenter__(self) -> Session:
        try:
            await self.arun(self._work.open())
        except BaseException:
            await asyncio.to_thread(self._abandon)
            raise
        self._tokens.append(CURRENT.set(self))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        CURRENT.reset(self._tokens.pop())
        await self.aclose()

    def run(self, coroutine: Coroutine[Any, Any, T], instead: str) -> T:
        """Run on the connection's loop and wait; see `Connection.run`.

        Raises SessionGoneError if the session is closed, also while this waits.
        """
        self._check_open(coroutine)
        try:
            return self._connection.run(coroutine, instead)
        except concurrent.futures.CancelledError:
            self._raise_if_closed()
            raise

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """`run` for coroutines."""
        self._check_open(coroutine)
        try:
            return await self._connection.arun(coroutine)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                self._raise_if_closed()
            raise

    def new_id(self, name: str) -> str:
        """An id for a variable, which nothing else in this session has."""
        return f"{_NOT_OF_IDS.sub('_', name)[:_NAME_CHARS]}-{next(self._numbers)}"

    def announce(self, variable: SemanticVariable) -> str:
        """The id of a variable, of which the server will hear with the next calls."""
        variable_id, is_new = variable.name_in(self)
        if is_new and variable.producer is None:
            self._work.announce(variable)
        return variable_id

    def criteria_for(
        self,
        perf: Perf | str | None = None,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> Criteria:
        """What is asked for, on top of the session's own. Raises ValueError."""
        asked = {
            "perf": None if perf is None else _perf(perf),
            "deadline_s": checked_seconds("deadline", deadline),
            "ttft_s": checked_seconds("ttft", ttft),
            "tpot_s": checked_seconds("tpot", tpot),
        }
        given = {name: value for name, value in asked.items() if value is not None}
        return dataclasses.replace(self._criteria or Criteria(), **given)  # type: ignore[arg-type]

    def _end(self) -> bool:
        """Whether it was open until now."""
        with self._lock:
            was_open, self._closed = not self._closed, True
        return was_open

    def _abandon(self) -> None:
        """It could not be opened."""
        if self._end() and self._owns_connection:
            self._connection.close()

    def _check_open(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if self._closed:
            coroutine.close()
            self._raise_if_closed()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise SessionGoneError("The session has been closed.")


def _perf(value: Perf | str) -> Perf:
    """In any case, as the paper has LATENCY."""
    try:
        return Perf(value.lower())
    except (ValueError, AttributeError):
        names = ", ".join(perf.name for perf in Perf)
        raise ValueError(f"perf must be one of {names}, not {value!r}") from None


def _criteria(value: Criteria | Perf | str | None) -> Criteria | None:
    if value is None or isinstance(value, Criteria):
        return value
    return Criteria(perf=_perf(value))
