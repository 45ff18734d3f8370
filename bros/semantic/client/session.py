"""A session as a program sees it, and its part that works on the connection's event loop.

```
 Session           called from any thread, or from coroutines of any event loop
    │ run, arun
 AsyncSession      on the loop of the Connection: sends calls, waits for values, and runs native
    │              functions once their inputs are there
 Backend           a server over HTTP, or an engine in this process
```
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import itertools
import json
import logging
import re
import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextvars import Token
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from bros.core.errors import BrosError, OverloadedError, QueueFullError
from bros.semantic.client.connection import Backend, Connection, refuse_running_loop
from bros.semantic.client.program import (
    CURRENT,
    Pieces,
    Program,
    ProgramCall,
    SemanticVariable,
    SessionInterface,
    Wanted,
)
from bros.semantic.errors import (
    Cause,
    ConflictError,
    FailedStage,
    GetTimeoutError,
    ServerUnreachableError,
    SessionGoneError,
    SessionLimitError,
    UpstreamError,
)
from bros.semantic.schema import CallSpec, Criteria, Perf, checked_seconds

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NOT_OF_IDS = re.compile(r"[^A-Za-z0-9_]")
_NAME_CHARS = 80
_MESSAGE_CHARS = 2000
_POLL_S = 50.0
"""Longest single wait. Proxies between client and server may cut longer ones."""

_REFUSED = (QueueFullError, OverloadedError, SessionLimitError)
_TRY_AGAIN = (*_REFUSED, ServerUnreachableError)


def connect(
    url: str | None = None,
    *,
    api_key: str | None = None,
    model: str | None = None,
    data_dir: str | Path | None = None,
    **options: Any,
) -> Connection:
    """A server at `url` (with or without /v1), or an engine in this process without one.

    api_key: of the server. model, data_dir, options: of the engine, the fields of EngineConfig
    (the flags of `bros serve` with underscores).
    Raises ConfigError for something that is no URL, and for options that are wrong.
    """
    # Late: these bring in an HTTP client, or torch and the model's code.
    if url is not None:
        if model is not None or data_dir is not None or options:
            given = ["model"] * (model is not None) + ["data_dir"] * (data_dir is not None)
            names = ", ".join([*given, *options])
            raise TypeError(f"{names}: options of an engine, but the server at {url} has its own")
        from bros.semantic.client.http_backend import open_http

        return Connection(open_http(url, api_key))
    from bros.semantic.client.local import open_engine

    return Connection(open_engine(model, data_dir, options))


class Session:
    """Where calls are made: what is called inside its `with` block belongs to it.

    url: of a server; without one a model is run in this process, and `model`, `data_dir` and
    `options` say which and how, as those of `connect`.
    connection: an open one, instead of all these.
    criteria: for values that are asked for without criteria.
    ttl: seconds without any activity after which the server ends it.
    tenant: sessions of one tenant share what is computed of their prompts.
    metadata: shown by the server.

    Calls are collected, and sent as one program when a value is asked for. The session ends with
    the block, and what still runs in it is stopped; `use` makes it current without that, in
    threads for example, which do not inherit the current session.
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
        self._async_session = AsyncSession(
            self, self._connection, self._criteria, ttl, tenant, metadata or {}
        )
        self._numbers = itertools.count(1)
        self._tokens: list[Token[SessionInterface | None]] = []
        self._closed = False
        self._lock = threading.Lock()

    @property
    def id(self) -> str:
        """Its id at the server. Opens it if it is not open yet."""
        return self.run(self._async_session.open(), "async with")

    @property
    def async_session(self) -> AsyncSession:
        """The part that runs on the event loop of its connection."""
        return self._async_session

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
        self.run(self._async_session.send({}), "aflush")

    async def aflush(self) -> None:
        """`flush` for coroutines."""
        await self.arun(self._async_session.send({}))

    def inspect(self) -> Mapping[str, Any]:
        """The session with its calls and variables as the server sees them now."""
        return self.run(self._async_session.inspect(), "ainspect")

    async def ainspect(self) -> Mapping[str, Any]:
        """`inspect` for coroutines."""
        return await self.arun(self._async_session.inspect())

    @contextlib.contextmanager
    def use(self) -> Iterator[Session]:
        """Make it the current session for a block, at whose end it goes on."""
        token = CURRENT.set(self)
        try:
            yield self
        finally:
            CURRENT.reset(token)

    def close(self) -> None:
        """End it; native functions that wait or run are cancelled. Calling it twice is fine."""
        refuse_running_loop("aclose")
        if self._end():
            self._connection.run(self._async_session.close(), "aclose")
            if self._owns_connection:
                self._connection.close()

    async def aclose(self) -> None:
        """`close` for coroutines."""
        if self._end():
            await self._connection.arun(self._async_session.close())
            if self._owns_connection:
                await self._connection.aclose()

    def __enter__(self) -> Session:
        try:
            self.run(self._async_session.open(), "async with")
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
            await self.arun(self._async_session.open())
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
            self._async_session.announce(variable)
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


@dataclass(frozen=True, slots=True)
class _Batch:
    """Calls that are sent together.

    key: makes sending them again idempotent.
    """

    key: str
    calls: Sequence[ProgramCall]
    specs: Sequence[CallSpec]


class AsyncSession:
    """Sends calls, waits for values, runs functions of the client.

    All methods but `announce` run on the connection's loop. criteria, ttl_s, tenant, metadata: the
    arguments of `Backend.create`.
    """

    def __init__(
        self,
        session: SessionInterface,
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
        """Cancel native functions, and delete the session if it was opened."""
        for task in self._tasks:
            if task is not self._created:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._created is None or self._created.cancelled() or self._created.exception():
            return
        try:
            backend = await self._connection.backend()
            await backend.delete(self._created.result())
        except BrosError as error:  # it has ended already, or will expire
            logger.info("the session cannot be deleted: %s", error)

    async def send(self, wanted: Wanted) -> None:
        """Send all calls that have been collected, as one program, in their order.

        Raises what the server says. If it may take them later they are kept; otherwise every one
        of them has failed with that error.
        """
        # A task of its own: cancelling one caller does not cancel it for the others.
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

    async def cancel(self, call: ProgramCall) -> None:
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
            raise  # it is unknown whether the server has taken them
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

    async def _run_native(self, call: ProgramCall) -> None:
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


@contextlib.contextmanager
def _failing(calls: Sequence[ProgramCall]) -> Iterator[None]:
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
    """Set it if it is not set; no other client gives it another value."""
    try:
        await backend.set(session_id, variable_id, value)
    except ConflictError as error:
        if error.code != "already_set":
            raise


def _sound(calls: Sequence[ProgramCall]) -> list[ProgramCall]:
    """Those that can be sent: not cancelled, and all they read has been or will be."""
    sound: list[ProgramCall] = []
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


async def run_native(
    call: ProgramCall,
    fetch: Callable[[SemanticVariable], Awaitable[str]],
    backend: Backend,
    session_id: str,
) -> None:
    """Wait for the inputs, run the function on a thread (or here if it is a coroutine function),
    and set its outputs; or say that it failed. Raises nothing."""
    assert call.request_id is not None
    try:
        try:
            values = await _result(call, fetch)
        except (UpstreamError, SessionGoneError):
            return  # the server knows that, and what follows from it
        except Exception as error:
            await backend.fail(session_id, call.request_id, _describe(error))
            return
        for name, value in values.items():
            await backend.set(session_id, call.outputs[name].id, value)
    except BrosError as error:
        # Its outputs were cancelled meanwhile, or there is no session or server any more.
        logger.info("what %s() has to say is not wanted: %s", call.form.name, error)


async def _result(
    call: ProgramCall, fetch: Callable[[SemanticVariable], Awaitable[str]]
) -> Mapping[str, str]:
    """Output -> its text."""
    variables = list(call.inputs())
    values = await asyncio.gather(*(fetch(variable) for variable in variables))
    texts = dict(zip(variables, values, strict=True))
    arguments = {name: _filled(argument, texts) for name, argument in call.arguments.items()}
    function = call.form.native
    assert function is not None
    if inspect.iscoroutinefunction(function):
        returned = await function(**arguments)
    else:
        returned = await asyncio.to_thread(function, **arguments)
    return _outputs(call, returned)


def _filled(argument: Any, texts: Mapping[SemanticVariable, str]) -> Any:
    """The argument with texts in place of variables."""
    if isinstance(argument, SemanticVariable):
        return texts[argument]
    if isinstance(argument, list | tuple):
        parts = [_filled(part, texts) for part in argument]
        return parts if isinstance(argument, list) else tuple(parts)
    return argument


def _outputs(call: ProgramCall, returned: Any) -> dict[str, str]:
    names = call.form.outputs
    if len(names) == 1:
        return {names[0]: _text(returned)}
    if not isinstance(returned, list | tuple) or len(returned) != len(names):
        raise TypeError(f"it must return {len(names)} values ({', '.join(names)})")
    return {name: _text(value) for name, value in zip(names, returned, strict=True)}


def _text(value: Any) -> str:
    """Lists and mappings as JSON, like the results of transforms; None is no value."""
    if isinstance(value, str):
        return value
    if value is None:
        raise TypeError("it returned None; what it makes must be returned")
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _describe(error: Exception) -> str:
    text = str(error)
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return message[:_MESSAGE_CHARS]
