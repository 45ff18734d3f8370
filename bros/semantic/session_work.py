"""What a session of the front end does on its connection's loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bros.core.errors import BrosError, OverloadedError, QueueFullError
from bros.semantic.backend import Backend
from bros.semantic.calls import Call, Wanted
from bros.semantic.connection import Connection
from bros.semantic.errors import (
    Cause,
    ConflictError,
    FailedStage,
    GetTimeoutError,
    ServerUnreachableError,
    SessionLimitError,
    UpstreamError,
)
from bros.semantic.natives import run_native
from bros.semantic.program import CallSpec, Criteria, Perf, checked_seconds
from bros.semantic.variables import SemanticVariable

if TYPE_CHECKING:
    from bros.semantic.client_session import Session

logger = logging.getLogger(__name__)

_POLL_S = 50.0
"""Longest single wait. What lies between client and server may cut longer ones."""

_REFUSED = (QueueFullError, OverloadedError, SessionLimitError)
_TRY_AGAIN = (*_REFUSED, ServerUnreachableError)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Calls that are sent together. key: by which the server knows them if they come again."""

    key: str
    calls: Sequence[Call]
    specs: Sequence[CallSpec]


class SessionWork:
    """Sends calls, waits for values, runs functions of the client.

    Only on the connection's loop, but for `announce`. criteria: for what the session makes
    without being told; the other arguments of `Backend.create` likewise.
    """

    def __init__(
        self,
        session: Session,
        connection: Connection,
        criteria: Criteria | None,
        ttl_s: float | None,
        tenant: str,
        metadata: Mapping[str, str],
    ) -> None:
        self._session = session
        self._connection = connection
        self._create_arguments = (criteria, ttl_s, tenant, dict(metadata))
        self._created: asyncio.Task[str] | None = None
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._undeclared: deque[SemanticVariable] = deque()
        self._unanswered: _Batch | None = None

    def announce(self, variable: SemanticVariable) -> None:
        """It has an id that the server has not heard of. From any thread."""
        self._undeclared.append(variable)

    async def open(self) -> str:
        """Returns the session's id at the server, where it is made the first time."""
        task = self._created
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._created = self._start(self._create())
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Give up functions of the client, and delete the session if there is a server."""
        for task in self._tasks:
            if task is not self._created:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._created is None or self._created.cancelled() or self._created.exception():
            return
        try:
            backend = await self._connection.backend()
            await backend.delete(self._created.result())
        except BrosError as error:  # it has ended already, or will when nobody asks for it
            logger.info("the session cannot be deleted: %s", error)

    async def send(self, wanted: Wanted) -> None:
        """Send all calls that have been collected, as one program, in their order.

        Raises what the server says. If it may take them later they are kept; otherwise every one
        of them has failed with that error.
        """
        # A task of its own: who is interrupted here does not interrupt it for others.
        await asyncio.shield(self._start(self._send(wanted)))

    async def fetch(
        self, variable: SemanticVariable, criteria: Criteria, timeout_s: float | None
    ) -> str:
        """Send what is not sent and wait for a value."""
        checked_seconds("timeout", timeout_s, zero=True)
        await self._prepare([variable], criteria)
        return await self._wait(variable, criteria, timeout_s)

    async def fetch_all(
        self, variables: Sequence[SemanticVariable], criteria: Criteria, timeout_s: float | None
    ) -> list[str]:
        """The same for several, all wanted before the first is waited for."""
        checked_seconds("timeout", timeout_s, zero=True)
        await self._prepare(variables, criteria)
        try:
            async with asyncio.TaskGroup() as group:
                waits = [
                    group.create_task(self._wait(variable, criteria, timeout_s))
                    for variable in variables
                ]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [wait.result() for wait in waits]

    async def want(self, variable: SemanticVariable, criteria: Criteria) -> None:
        """Send what is not sent and have it made, without waiting."""
        await self._prepare([variable], criteria)
        session_id, backend = await self._there()
        await backend.want(session_id, await self._declared(variable), criteria)

    def stream(self, variable: SemanticVariable, criteria: Criteria) -> Pieces:
        """The value as it comes."""
        return Pieces(self._pieces(variable, criteria))

    async def send_value(self, variable: SemanticVariable, text: str) -> None:
        """Tell the server a value that has been set here."""
        async with self._sending:
            if variable in self._undeclared:
                return  # it goes along with the declaration
            await self._send_again()
            session_id, backend = await self._there()
            await backend.set(session_id, variable.name_in(self._session)[0], text)

    async def cancel(self, call: Call) -> None:
        """Stop a call, or never send it."""
        async with self._sending:
            await self._send_again()
            if call.request_id is None:
                message = f"{call.form.name}() was cancelled before it was sent."
                call.error = UpstreamError(Cause("(not sent)", FailedStage.CANCELLED, message))
                return
            session_id, backend = await self._there()
            await backend.cancel(session_id, call.request_id)

    async def inspect(self) -> Mapping[str, Any]:
        await self.send({})
        session_id, backend = await self._there()
        return await backend.inspect(session_id)

    async def _create(self) -> str:
        backend = await self._connection.backend()
        return await backend.create(*self._create_arguments)

    async def _there(self) -> tuple[str, Backend]:
        return await self.open(), await self._connection.backend()

    async def _send(self, wanted: Wanted) -> None:
        async with self._sending:
            await self._declare()
            await self._send_again()
            calls = _sound(self._session.program.take())
            if calls:
                with _failing(calls):
                    specs = [call.to_spec(self._session, wanted) for call in calls]
                await self._submit(_Batch(self._session.new_id("program"), calls, specs))

    async def _send_again(self) -> None:
        """What may have got lost on the way, or only the answer to it, just as it was."""
        if self._unanswered is not None:
            await self._submit(self._unanswered)

    async def _submit(self, batch: _Batch) -> None:
        self._unanswered = batch
        try:
            session_id, backend = await self._there()
            with _failing(batch.calls):
                answers = await backend.submit(session_id, batch.specs, batch.key)
        except ServerUnreachableError:
            raise  # nobody knows whether the server has taken them
        except _REFUSED:
            self._unanswered = None
            self._session.program.put_back(batch.calls)
            raise
        except Exception:
            self._unanswered = None
            raise
        self._unanswered = None
        for call, answer in zip(batch.calls, answers, strict=True):
            call.request_id = answer.request_id

    async def _declare(self) -> None:
        """Tell the server of all variables that it has not heard of."""
        session_id, backend = await self._there()
        while self._undeclared:
            variable = self._undeclared[0]
            variable_id, _ = variable.name_in(self._session)
            value = variable.value
            try:
                try:
                    await backend.declare(session_id, variable_id, variable.name, value)
                except ConflictError as error:
                    # Ids are made up here, so it has come the time before, without the answer.
                    if error.code != "already_exists":
                        raise
                    if value is not None:
                        await _set_once(backend, session_id, variable_id, value)
            except _TRY_AGAIN:
                raise
            except Exception:
                self._undeclared.popleft()
                raise
            self._undeclared.popleft()

    async def _prepare(self, variables: Sequence[SemanticVariable], criteria: Criteria) -> None:
        """Send what these need, and begin the functions of the client among that."""
        try:
            await self.send(dict.fromkeys(variables, criteria))
        except Exception:
            # Something else has been refused if they had been sent before.
            if any(_is_unsent(variable) for variable in variables):
                raise
        for variable in variables:
            if variable.producer is not None and variable.producer.error is not None:
                raise variable.producer.error
        for variable in variables:
            self._begin_natives(variable)

    def _begin_natives(self, sink: SemanticVariable) -> None:
        """All functions of the client that the value of `sink` needs; not twice."""
        waiting = [sink]
        while waiting:
            variable = waiting.pop()
            call = variable.producer
            if call is None or call.running or variable.session is not self._session:
                continue
            call.running = True
            waiting.extend(call.inputs())
            if call.form.native is not None:
                self._start(self._run_native(call))

    async def _run_native(self, call: Call) -> None:
        session_id, backend = await self._there()

        async def fetch(variable: SemanticVariable) -> str:
            # What needs it has been asked for with its criteria already; these raise nothing.
            if variable.value is not None:
                return variable.value
            return await self._wait(variable, Criteria(perf=Perf.THROUGHPUT), None)

        await run_native(call, fetch, backend, session_id)

    async def _wait(
        self, variable: SemanticVariable, criteria: Criteria, timeout_s: float | None
    ) -> str:
        if variable.value is not None:
            return variable.value
        session_id, backend = await self._there()
        variable_id = await self._declared(variable)
        now = asyncio.get_running_loop().time
        end_s = None if timeout_s is None else now() + timeout_s
        while True:
            wait_s = _POLL_S if end_s is None else min(_POLL_S, max(end_s - now(), 0.001))
            try:
                value = await backend.get(session_id, variable_id, criteria, wait_s)
            except GetTimeoutError as error:
                if end_s is not None and now() >= end_s:
                    message = f"{variable.name!r} was not there within {timeout_s:g} s."
                    raise GetTimeoutError(message) from error  # which says what is missing
            else:
                variable.arrive(value)
                return value

    async def _declared(self, variable: SemanticVariable) -> str:
        """Its id, which the server has heard of."""
        variable_id = self._session.announce(variable)
        if variable in self._undeclared:
            async with self._sending:
                await self._declare()
        return variable_id

    async def _pieces(
        self, variable: SemanticVariable, criteria: Criteria
    ) -> AsyncGenerator[str, None]:
        await self._prepare([variable], criteria)
        session_id, backend = await self._there()
        variable_id = await self._declared(variable)
        whole: list[str] = []
        stream = backend.stream(session_id, variable_id, criteria)
        async with contextlib.aclosing(stream) as pieces:
            async for piece in pieces:
                whole.append(piece)
                yield piece
        variable.arrive("".join(whole))

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Pieces:
    """A stream that is read from another thread, one piece at a time."""

    def __init__(self, pieces: AsyncGenerator[str, None]) -> None:
        self._pieces = pieces
        self.ended = False

    async def next(self) -> str | None:
        """None at the end."""
        try:
            return await anext(self._pieces)
        except StopAsyncIteration:
            self.ended = True
            return None
        except BaseException:
            self.ended = True
            raise

    async def aclose(self) -> None:
        self.ended = True
        await self._pieces.aclose()


@contextlib.contextmanager
def _failing(calls: Sequence[Call]) -> Iterator[None]:
    """What is raised here is why these calls never will be sent, unless they may be later."""
    try:
        yield
    except _TRY_AGAIN:
        raise
    except Exception as error:
        for call in calls:
            call.error = error
        raise


async def _set_once(backend: Backend, session_id: str, variable_id: str, value: str) -> None:
    """Set it if it is not; nobody else gives it another value."""
    try:
        await backend.set(session_id, variable_id, value)
    except ConflictError as error:
        if error.code != "already_set":
            raise


def _sound(calls: Sequence[Call]) -> list[Call]:
    """Those that can be sent: not cancelled, and all they read has been or will be."""
    sound: list[Call] = []
    for call in calls:
        for variable in call.inputs():
            if variable.value is None and variable.producer is not None and call.error is None:
                call.error = variable.producer.error
        if call.error is None:
            sound.append(call)
    return sound


def _is_unsent(variable: SemanticVariable) -> bool:
    call = variable.producer
    return call is not None and call.request_id is None and call.error is None
