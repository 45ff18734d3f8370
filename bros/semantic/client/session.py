"""A session of the front end, and its part that runs on the connection's event loop.

```
 Session           used from any thread, or from coroutines of any event loop
    │ run, arun
 AsyncSession      on the loop of the Connection: sends calls, waits for values, and runs native
    │              functions once their inputs are set
 Backend           a server over HTTP, or an engine in this process
```
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import logging
import re
import threading
import weakref
from collections import Counter, deque
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
from typing import Any, TypeVar

from bros.core.errors import (
    BrosError,
    EngineDeadError,
    NotFoundError,
    OverloadedError,
    QueueFullError,
)
from bros.core.loop_thread import run_on_thread
from bros.semantic.client.connection import Backend, Connection, refuse_running_loop
from bros.semantic.client.program import (
    CURRENT,
    PieceStream,
    Program,
    ProgramCall,
    SemanticVariable,
    SessionInterface,
    Wanted,
    checked_text,
    variables_in,
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
from bros.semantic.schema import CallSpec, Criteria, Perf, SharingMode, checked_seconds

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NOT_OF_IDS = re.compile(r"[^A-Za-z0-9_]")
_NAME_CHARS = 80
_MESSAGE_CHARS = 2000
_POLL_S = 50.0
"""Longest single request. Proxies between client and server may cut longer ones."""

_KNOWN_WITHIN_S = 1.0
"""Timeout for a value that the server has."""

MAX_NATIVE_THREADS = 256
"""Native functions of a session that run at the same time, without coroutine functions."""

MAX_GETS = 256
"""Values that a `gather` waits for at the same time: each holds a connection, and a server takes
1,024 from another machine."""

_ANSWER_WITHIN_S = 2.0
"""How long a client that has a timeout waits after it for the answer that the time is over."""

_SHARED_CHARS = 1_000
_SAVED_CHARS = 16_384
"""A text of at least _SHARED_CHARS is sent once for all calls of a program, if its repetitions have
at least _SAVED_CHARS: fewer cost less than the additional request."""

_REFUSED = (QueueFullError, OverloadedError, SessionLimitError)
_UNANSWERED = (ServerUnreachableError, EngineDeadError)
"""The server, or a proxy before it, cannot answer now (503); it may have received the request."""

_TRY_AGAIN = (*_REFUSED, *_UNANSWERED)

_RETRY_AFTER_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before requests of a native function are repeated, which no caller waits for: a connection
that is lost once would otherwise cost its result and all that depends on it."""


def connect(
    url: str | None = None,
    *,
    api_key: str | None = None,
    model: str | None = None,
    data_dir: str | Path | None = None,
    **options: Any,
) -> Connection:
    """Connect to a server at `url` (with or without /v1), or to an engine in this process.

    api_key: API key of the server.
    model: model of an engine in this process.
    data_dir: cache directory of that engine.
    options: further fields of EngineConfig (the flags of `bros serve` with underscores).
    Raises ConfigError for an invalid URL or invalid options, TypeError for options with a URL.
    """
    # Late imports: an HTTP client, or torch and the model code.
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
    """A session: calls inside its `with` block (`async with` on an event loop) belong to it.

    url: URL of a server; None: an engine in this process.
    connection: an open connection to share, instead of `url` and `options`.
    criteria: default criteria of requested values.
    ttl: seconds of inactivity after which the session expires.
    tenant: if not empty, only sessions of the same one share the KV of what comes after the first
        placeholder of a prompt.
    sharing: who else shares it: "tenant": all requests with the same API key; "session": none.
    metadata: labels that the server shows with the session.
    options: further arguments of `connect`.

    Calls are collected, and sent as one program when a value is requested. The session ends with
    the block, which cancels running calls. `use` makes the session current without ending it, for
    example in threads, which do not inherit the current session.

    Entering the block raises ServerUnreachableError, AuthenticationError, SessionLimitError,
    ModelError, ConfigError.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        connection: Connection | None = None,
        criteria: Criteria | Perf | str | None = None,
        ttl: float | None = None,
        tenant: str = "",
        sharing: SharingMode | str = SharingMode.TENANT,
        metadata: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        if connection is not None and (url is not None or options):
            raise TypeError("a connection has its own url and options")
        self._criteria = _criteria(criteria)
        shared_with = _sharing(sharing)
        self._owns_connection = connection is None
        self._connection = connect(url, **options) if connection is None else connection
        self._program = Program(self)
        self._async_session = AsyncSession(
            self, self._connection, self._criteria, ttl, tenant, shared_with, metadata or {}
        )
        self._numbers = itertools.count(1)
        self._tokens: list[Token[SessionInterface | None]] = []
        self._closed = False
        self._lock = threading.Lock()

    @property
    def id(self) -> str:
        """Its id at the server. Opens the session if it is not open yet."""
        return self.run(self._async_session.open(), "async with")

    @property
    def async_session(self) -> AsyncSession:
        """The part of the session on the connection's event loop."""
        return self._async_session

    @property
    def program(self) -> Program:
        """The unsent calls."""
        return self._program

    @property
    def closed(self) -> bool:
        return self._closed

    def flush(self) -> None:
        """Send the collected calls without requesting a value.

        Raises the error of the server if it rejects them.
        """
        self.run(self._async_session.send({}), "aflush")

    async def aflush(self) -> None:
        """`flush` for coroutines."""
        await self.arun(self._async_session.send({}))

    def inspect(self) -> Mapping[str, Any]:
        """The session with its calls and variables, as GET /v1/sessions/{id} returns it."""
        return self.run(self._async_session.inspect(), "ainspect")

    async def ainspect(self) -> Mapping[str, Any]:
        """`inspect` for coroutines."""
        return await self.arun(self._async_session.inspect())

    @contextlib.contextmanager
    def use(self) -> Iterator[Session]:
        """Make it the current session for a block, without ending it."""
        token = CURRENT.set(self)
        try:
            yield self
        finally:
            _reset_current(token)

    def close(self) -> None:
        """End the session and cancel its native functions. Idempotent."""
        refuse_running_loop("aclose")
        if self._mark_closed():
            self._connection.run(self._async_session.close(), "aclose")
            if self._owns_connection:
                self._connection.close()

    async def aclose(self) -> None:
        """`close` for coroutines."""
        if self._mark_closed():
            await self._connection.arun(self._async_session.close())
            if self._owns_connection:
                await self._connection.aclose()

    def __enter__(self) -> Session:
        try:
            self.run(self._async_session.open(), "async with")
        except BaseException:
            self._close_unopened()
            raise
        self._tokens.append(CURRENT.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _reset_current(self._tokens.pop())
        self.close()

    async def __aenter__(self) -> Session:
        try:
            await self.arun(self._async_session.open())
        except BaseException:
            await asyncio.to_thread(self._close_unopened)
            raise
        self._tokens.append(CURRENT.set(self))
        return self

    async def __aexit__(self, *error: object) -> None:
        _reset_current(self._tokens.pop())
        await self.aclose()

    def run(self, coroutine: Coroutine[Any, Any, T], instead: str) -> T:
        """Run a coroutine on the connection's loop and wait; see `Connection.run`.

        Raises SessionGoneError if the session is closed, also while it waits, and if the server has
        forgotten it.
        """
        self._check_open(coroutine)
        try:
            with _noticing_restarts():
                return self._connection.run(coroutine, instead)
        except concurrent.futures.CancelledError:
            self._raise_if_closed()
            raise

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """`run` for coroutines."""
        self._check_open(coroutine)
        try:
            with _noticing_restarts():
                return await self._connection.arun(coroutine)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                self._raise_if_closed()
            raise

    def new_id(self, name: str) -> str:
        """A new variable id, unique in this session."""
        return f"{_NOT_OF_IDS.sub('_', name)[:_NAME_CHARS]}-{next(self._numbers)}"

    def announce(self, variable: SemanticVariable) -> str:
        """The id of a variable; the session declares it to the server with the next calls."""
        variable_id, is_new = variable.id_in(self)
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
        """Criteria with the session's as defaults. Raises ValueError."""
        asked = {
            "perf": None if perf is None else _perf(perf),
            "deadline_s": checked_seconds("deadline", deadline),
            "ttft_s": checked_seconds("ttft", ttft),
            "tpot_s": checked_seconds("tpot", tpot),
        }
        given = {name: value for name, value in asked.items() if value is not None}
        return dataclasses.replace(self._criteria or Criteria(), **given)  # type: ignore[arg-type]

    def _mark_closed(self) -> bool:
        """Mark the session closed. Returns whether it was open."""
        with self._lock:
            was_open, self._closed = not self._closed, True
        return was_open

    def _close_unopened(self) -> None:
        """Close the session after opening it has failed."""
        if self._mark_closed() and self._owns_connection:
            self._connection.close()

    def _check_open(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if self._closed:
            coroutine.close()
            self._raise_if_closed()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise SessionGoneError("The session has been closed.")


@contextlib.contextmanager
def _noticing_restarts() -> Iterator[None]:
    """Raises SessionGoneError for a session, which was open, if the server does not know it."""
    try:
        yield
    except NotFoundError as error:
        if error.code != "session_not_found":
            raise
        message = "The server has forgotten the session, for example because it was restarted."
        raise SessionGoneError(message) from error


def _reset_current(token: Token[SessionInterface | None]) -> None:
    """Make the session current that was so before the block."""
    # A block may be left in another context than it was entered in, for example by the fixtures and
    # dependencies of web frameworks. The session is not current there.
    with contextlib.suppress(ValueError):
        CURRENT.reset(token)


def _perf(value: Perf | str) -> Perf:
    """The criterion of that name, in upper or lower case. Raises ValueError."""
    try:
        return Perf(value.lower())
    except (ValueError, AttributeError):
        names = ", ".join(perf.name for perf in Perf)
        raise ValueError(f"perf must be one of {names}, not {value!r}") from None


def _criteria(value: Criteria | Perf | str | None) -> Criteria | None:
    """Criteria with the criterion of that name, or with checked fields. Raises ValueError."""
    if value is None:
        return None
    if not isinstance(value, Criteria):
        return Criteria(perf=_perf(value))
    names = "ttft_s", "tpot_s", "deadline_s"
    times = {name: checked_seconds(name, getattr(value, name)) for name in names}
    return dataclasses.replace(value, perf=_perf(value.perf), **times)


def _sharing(value: SharingMode | str) -> SharingMode:
    try:
        return SharingMode(value)
    except ValueError:
        names = ", ".join(SharingMode)
        raise ValueError(f"sharing must be one of {names}, not {value!r}") from None


@dataclass(frozen=True, slots=True)
class _ProgramRequest:
    """Calls that are sent together.

    key: idempotency key.
    """

    key: str
    calls: Sequence[ProgramCall]
    specs: Sequence[CallSpec]


class _Deadline:
    """The time until which a client waits for values, as a block: whatever it does in the block
    ends then with GetTimeoutError.

    The server is asked to answer in time, because it names the inputs that are not set; the block
    ends a little later, in case it does not answer. Raises ValueError if `timeout_s` is no time.
    """

    def __init__(self, timeout_s: float | None, variables: Sequence[SemanticVariable]) -> None:
        self._timeout_s = checked_seconds("timeout", timeout_s, zero=True)
        self._variables = variables
        self._now = asyncio.get_running_loop().time
        self._end_s = None if timeout_s is None else self._now() + timeout_s
        answer_by_s = None if self._end_s is None else self._end_s + _ANSWER_WITHIN_S
        self._block = asyncio.timeout_at(answer_by_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until then; None: it waits for ever."""
        return None if self._end_s is None else self._end_s - self._now()

    @property
    def has_passed(self) -> bool:
        left_s = self.left_s
        return left_s is not None and left_s <= 0

    def error(self, variables: Sequence[SemanticVariable], unset: str = "") -> GetTimeoutError:
        """What is raised after it. unset: the sentence of the server about unset inputs."""
        missing = next((each for each in variables if each.value is None), variables[0])
        message = f"{missing.name!r} was not there within {self._timeout_s:g} s. {unset}"
        return GetTimeoutError(message.rstrip())

    async def __aenter__(self) -> _Deadline:
        await self._block.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self._block.__aexit__(*raised)
        except TimeoutError as error:
            raise self.error(self._variables) from error


class AsyncSession:
    """Sends calls, waits for values, runs native functions.

    All methods except `announce` run on the connection's loop. criteria, ttl_s, tenant, sharing and
    metadata are the arguments of `Backend.create`.
    """

    def __init__(
        self,
        session: SessionInterface,
        connection: Connection,
        criteria: Criteria | None,
        ttl_s: float | None,
        tenant: str,
        sharing: SharingMode,
        metadata: Mapping[str, str],
    ) -> None:
        self._session = session
        self._connection = connection
        self._create_arguments = (criteria, ttl_s, tenant, sharing, dict(metadata))
        self._created: asyncio.Task[str] | None = None
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._natives: dict[ProgramCall, asyncio.Task[None]] = {}
        self._undeclared: deque[SemanticVariable] = deque()
        self._unset: deque[SemanticVariable] = deque()  # with values for the server
        self._shared: dict[str, SemanticVariable] = {}  # by their values
        self._threads = asyncio.Semaphore(MAX_NATIVE_THREADS)
        self._unanswered: _ProgramRequest | None = None
        self._warned: set[str] = set()
        # Requested ones, see _start_natives.
        self._without_call: weakref.WeakSet[SemanticVariable] = weakref.WeakSet()

    def announce(self, variable: SemanticVariable) -> None:
        """Declare the variable to the server with the next calls. From any thread."""
        self._undeclared.append(variable)

    async def open(self) -> str:
        """The session's id at the server; the first call creates the session there."""
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
        except BrosError as error:  # the session has ended already, or will expire
            logger.info("the session cannot be deleted: %s", error)

    async def send(self, wanted: Wanted) -> None:
        """Send all collected calls as one program, in order.

        wanted: criteria of variables that are requested with them.
        Raises the error of the server. If a retry may succeed, the calls are kept; otherwise all
        of them fail with that error. Raises the error of a call that cannot be sent, after the
        others were.
        """
        # A separate task: cancelling one caller does not cancel it for the others.
        await asyncio.shield(self._start(self._send(wanted)))

    async def fetch(
        self, variable: SemanticVariable, criteria: Criteria, timeout_s: float | None
    ) -> str:
        """Send the collected calls and wait for a value."""
        async with _Deadline(timeout_s, [variable]) as deadline:
            await self._prepare([variable], criteria)
            return await self._wait(variable, criteria, deadline)

    async def fetch_all(
        self, variables: Sequence[SemanticVariable], criteria: Criteria, timeout_s: float | None
    ) -> list[str]:
        """`fetch` for several values: all are requested before the first wait."""
        # Their gets would request them too late; unsent ones are requested as they are sent.
        later = [v for v in variables[MAX_GETS:] if v.value is None and not _is_unsent(v)]
        gets = asyncio.Semaphore(MAX_GETS)
        async with _Deadline(timeout_s, variables) as deadline:

            async def wait(variable: SemanticVariable) -> str:
                async with gets:
                    return await self._wait(variable, criteria, deadline)

            async def request(variable: SemanticVariable) -> None:
                async with gets:
                    session_id, backend = await self._opened()
                    await backend.want(session_id, await self._declared(variable), criteria)

            await self._prepare(variables, criteria)
            try:
                async with asyncio.TaskGroup() as group:
                    for variable in later:
                        group.create_task(request(variable))
                async with asyncio.TaskGroup() as group:
                    waits = [group.create_task(wait(variable)) for variable in variables]
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
            return [wait.result() for wait in waits]

    async def want(self, variable: SemanticVariable, criteria: Criteria) -> None:
        """Send the collected calls and request a value without waiting."""
        await self._prepare([variable], criteria)
        session_id, backend = await self._opened()
        await backend.want(session_id, await self._declared(variable), criteria)

    def stream(self, variable: SemanticVariable, criteria: Criteria) -> PieceStream:
        """Stream a value."""
        return PieceStream(self._pieces(variable, criteria))

    async def send_value(self, variable: SemanticVariable) -> None:
        """Send the server a value that the client has set.

        If the server does not answer, it is sent with the next request. After any other error the
        variable has no value.
        """
        self._without_call.discard(variable)
        self._unset.append(variable)
        # A separate task, as in `send`.
        await asyncio.shield(self._start(self._send_value(variable)))

    async def cancel(self, call: ProgramCall) -> None:
        """Cancel a call; an unsent one will not be sent. A native function that has not begun will
        not run, and a coroutine function is cancelled; a thread cannot be."""
        async with self._sending:
            await self._send_again()
            if call.request_id is None:
                message = f"{call.function.name}() was cancelled before it was sent."
                call.error = UpstreamError(Cause("(not sent)", FailedStage.CANCELLED, message))
                return
            session_id, backend = await self._opened()
            await backend.cancel(session_id, call.request_id)
            if (task := self._natives.get(call)) is not None:
                task.cancel()

    async def inspect(self) -> Mapping[str, Any]:
        await self.send({})
        session_id, backend = await self._opened()
        return await backend.inspect(session_id)

    async def _create(self) -> str:
        backend = await self._connection.backend()
        return await backend.create(*self._create_arguments)

    async def _opened(self) -> tuple[str, Backend]:
        return await self.open(), await self._connection.backend()

    async def _send(self, wanted: Wanted) -> None:
        async with self._sending:
            await self._declare()
            await self._send_again()
            await self._set_values()
            calls, specs, failed = self._session.program.take(), {}, None
            shared = await self._share_constants(calls)
            for call in _sendable(calls):
                try:
                    specs[call] = call.to_spec(self._session, wanted, shared)
                except Exception as error:  # of this call, whatever the others are
                    call.error, failed = error, error
            calls = _sendable(calls)
            if calls:
                key = self._session.new_id("program")
                await self._submit(_ProgramRequest(key, calls, [specs[call] for call in calls]))
            if failed is not None:
                raise failed

    async def _send_value(self, variable: SemanticVariable) -> None:
        async with self._sending:
            if variable in self._undeclared:
                return  # the declaration will include the value
            try:
                await self._send_again()
                await self._set_values(variable)
            except _UNANSWERED:
                raise
            except Exception:
                if variable.unsent:
                    variable.take_back_value()
                raise

    async def _set_values(self, asked: SemanticVariable | None = None) -> None:
        """Send the values that the client has set since the last request.

        asked: what the caller sets now, whose refusal it gets. That of another one, which had no
            answer before, is what a get of it raises.
        """
        while self._unset:
            variable = self._unset[0]
            # A declaration may include it, or `set` may have taken it back.
            if variable.unsent and variable not in self._undeclared:
                try:
                    await self._set_value(variable)
                except _TRY_AGAIN:
                    raise
                except Exception as error:
                    self._unset.popleft()
                    if variable is asked:
                        variable.take_back_value()
                        raise
                    variable.take_back_value(error)
                    logger.warning("The value of %s is refused: %s", variable.name, error)
                    continue
                variable.value_sent()
            self._unset.popleft()

    async def _set_value(self, variable: SemanticVariable) -> None:
        """Send the value of a variable. Raises ConflictError if it has another one."""
        session_id, backend = await self._opened()
        variable_id, value = variable.id_in(self._session)[0], variable.value
        assert value is not None
        try:
            await backend.set(session_id, variable_id, value)
        except NotFoundError as error:
            if error.code == "session_not_found":
                raise
            # The calls that read it, which would have created it, have not been accepted.
            await backend.declare(session_id, variable_id, variable.name, value)
        except ConflictError:
            # An earlier request may have set it, whose response was lost.
            criteria = Criteria(perf=Perf.THROUGHPUT)
            if await backend.get(session_id, variable_id, criteria, _KNOWN_WITHIN_S) != value:
                raise

    async def _share_constants(self, calls: Sequence[ProgramCall]) -> dict[str, str]:
        """Declare the long texts that several of these calls have in common. Returns text -> id.

        They would be in the body of the program once for each call, and the server would keep them
        as often. Only this program uses the variables: the server may drop them when it forgets
        its calls.
        """
        uses = Counter[str]()
        names: dict[str, str] = {}
        for call in _sendable(calls):
            constants = call.constants(self._session)
            uses.update(constants.keys())
            names.update(constants)
        for text, count in uses.items():
            if len(text) < _SHARED_CHARS or len(text) * (count - 1) < _SAVED_CHARS:
                continue
            if text not in self._shared:
                variable = SemanticVariable(text, names[text], self._session)
                self._session.announce(variable)
                self._shared[text] = variable
        while self._undeclared:
            try:
                await self._declare()
            except _TRY_AGAIN:
                self._session.program.put_back(calls)
                raise
            except Exception as error:  # the server will refuse the text within the calls, too
                logger.info("a variable is not declared: %s", error)
        return {
            text: variable.id_in(self._session)[0]
            for text, variable in self._shared.items()
            if variable.refusal is None
        }

    async def _send_again(self) -> None:
        """Send calls again whose response was lost; the key makes that idempotent."""
        if self._unanswered is not None:
            await self._submit(self._unanswered)

    async def _submit(self, request: _ProgramRequest) -> None:
        self._unanswered = request
        try:
            session_id, backend = await self._opened()
            with _recording_errors(request.calls):
                answers = await backend.submit(session_id, request.specs, request.key)
        except _UNANSWERED:
            raise  # the server may have received them: `_send_again` will send the same request
        except _REFUSED:
            self._unanswered = None
            self._session.program.put_back(request.calls)
            raise
        except Exception:
            self._unanswered = None
            raise
        self._unanswered = None
        self._shared.clear()
        for call, answer in zip(request.calls, answers, strict=True):
            call.request_id = answer.request_id
        for call in request.calls:
            for output in call.outputs.values():
                if output in self._without_call:
                    self._without_call.discard(output)
                    self._start_natives(output)

    async def _declare(self) -> None:
        """Declare all variables to the server that it does not know."""
        session_id, backend = await self._opened()
        while self._undeclared:
            variable = self._undeclared[0]
            variable_id, _ = variable.id_in(self._session)
            value = variable.value
            try:
                try:
                    await backend.declare(session_id, variable_id, variable.name, value)
                except ConflictError as error:
                    # The client generates the ids, so an earlier attempt lost only its response.
                    if error.code != "already_exists":
                        raise
                    if value is not None:
                        await _set_once(backend, session_id, variable_id, value)
            except _TRY_AGAIN:
                raise
            except Exception as error:
                self._undeclared.popleft()
                variable.take_back_value(error)
                raise
            if value is not None:
                variable.value_sent()
            self._undeclared.popleft()

    async def _prepare(self, variables: Sequence[SemanticVariable], criteria: Criteria) -> None:
        """Send the collected calls, and start the native functions that these depend on."""
        try:
            await self.send(dict.fromkeys(variables, criteria))
        except Exception:
            # If these variables were sent before, the server has rejected other calls.
            if any(_is_unsent(variable) for variable in variables):
                raise
        for variable in variables:
            if (known := _error_of(variable)) is not None:
                raise known
        for variable in variables:
            self._start_natives(variable)

    def _start_natives(self, sink: SemanticVariable) -> None:
        """Start all native functions that `sink` depends on, each once; those behind variables that
        no sent call produces yet when such a call is sent."""
        waiting = [sink]
        while waiting:
            variable = waiting.pop()
            call = variable.producer
            if variable.value is not None or variable.session is not self._session:
                continue
            if call is None or call.request_id is None:
                self._without_call.add(variable)
                continue
            if call.running:
                continue
            call.running = True
            waiting.extend(call.inputs())
            if call.function.native is not None:
                task = self._natives[call] = self._start(self._run_native(call))
                task.add_done_callback(functools.partial(self._native_ended, call))

    def _native_ended(self, call: ProgramCall, task: asyncio.Task[None]) -> None:
        del self._natives[call]

    async def _run_native(self, call: ProgramCall) -> None:
        """Wait for the inputs, run the function, and set its outputs or report its failure. It
        raises no error."""
        try:
            texts = await self._native_inputs(call)
        except (UpstreamError, SessionGoneError):
            return  # the server knows, and has failed the call
        except Exception as error:
            await self._report_failure(call, error)
            return
        try:
            await self._set_outputs(call, await _native_outputs(call, texts, self._threads))
        except Exception as error:  # also those above, which here are errors of the function
            await self._report_failure(call, error)

    async def _native_inputs(self, call: ProgramCall) -> dict[SemanticVariable, str]:
        """Wait for the variables that a native call reads."""
        variables = list(call.inputs())
        # A client requested the outputs with the real criteria; THROUGHPUT raises no level.
        criteria = Criteria(perf=Perf.THROUGHPUT)
        waiting = (_repeatedly(self._wait, variable, criteria, None) for variable in variables)
        values = await asyncio.gather(*waiting)
        return dict(zip(variables, values, strict=True))

    async def _set_outputs(self, call: ProgramCall, values: Mapping[str, str]) -> None:
        session_id, backend = await self._opened()
        for name, value in values.items():
            arguments = backend, session_id, call.outputs[name].id, value
            # A session that has no room for the value has none after a pause either.
            await _repeatedly(_set_once, *arguments, final=SessionLimitError)

    async def _report_failure(self, call: ProgramCall, error: Exception) -> None:
        """Report that a native call has failed of this error. It raises no error."""
        name, message = call.function.name, _describe(error)
        assert call.request_id is not None
        try:
            session_id, backend = await self._opened()
            await _repeatedly(backend.fail, session_id, call.request_id, message)
        except (SessionGoneError, NotFoundError, ConflictError) as ended:  # it was cancelled
            logger.info("%s() failed (%s) after its call had ended: %s", name, message, ended)
        except Exception as lost:
            logger.warning("%s() failed (%s), which cannot be reported: %s", name, message, lost)

    async def _wait(
        self, variable: SemanticVariable, criteria: Criteria, deadline: _Deadline | None
    ) -> str:
        if variable.value is not None:
            return variable.value
        session_id, backend = await self._opened()
        variable_id = await self._declared(variable)
        while True:
            left_s = None if deadline is None else deadline.left_s
            wait_s = _POLL_S if left_s is None else min(_POLL_S, max(left_s, 0.001))
            try:
                value = await backend.get(session_id, variable_id, criteria, wait_s)
            except GetTimeoutError as error:
                if deadline is not None and deadline.has_passed:
                    raise deadline.error([variable], error.unset) from error
                if left_s is None and error.unset:
                    self._warn(f"{variable.name!r} is waited for without a timeout. {error.unset}")
            else:
                variable.receive_value(value)
                return value

    def _warn(self, line: str) -> None:
        """Log a warning, once per session."""
        if line not in self._warned:
            self._warned.add(line)
            logger.warning("%s", line)

    async def _declared(self, variable: SemanticVariable) -> str:
        """Its id at the server, after declaring the variable if necessary."""
        variable_id = self._session.announce(variable)
        if variable in self._undeclared:
            async with self._sending:
                await self._declare()
        return variable_id

    async def _pieces(
        self, variable: SemanticVariable, criteria: Criteria
    ) -> AsyncGenerator[str, None]:
        await self._prepare([variable], criteria)
        session_id, backend = await self._opened()
        variable_id = await self._declared(variable)
        whole = ""
        while True:
            known = len(whole)  # what a stream that has timed out gave already
            try:
                stream = backend.stream(session_id, variable_id, criteria)
                async with contextlib.aclosing(stream) as pieces:
                    async for piece in pieces:
                        new, known = piece[known:], max(0, known - len(piece))
                        whole += new
                        if new:
                            yield new
                break
            except GetTimeoutError as error:  # after minutes without a piece
                if error.unset:
                    self._warn(f"{variable.name!r} is waited for without a timeout. {error.unset}")
        variable.receive_value(whole)

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@contextlib.contextmanager
def _recording_errors(calls: Sequence[ProgramCall]) -> Iterator[None]:
    """Record an error in the block as the calls' final error, unless a retry may succeed."""
    try:
        yield
    except _TRY_AGAIN:
        raise
    except Exception as error:
        for call in calls:
            call.error = error
        raise


async def _repeatedly(
    request: Callable[..., Awaitable[T]],
    *arguments: Any,
    final: type[BrosError] | tuple[()] = (),
) -> T:
    """Send a request, and send it again after each pause as long as a retry may succeed.

    final: an error after which no retry of this request succeeds.
    """
    for pause_s in _RETRY_AFTER_S:
        try:
            return await request(*arguments)
        except final:
            raise
        except _TRY_AGAIN as error:
            logger.info("repeated in %g s: %s", pause_s, error)
        await asyncio.sleep(pause_s)
    return await request(*arguments)


async def _set_once(backend: Backend, session_id: str, variable_id: str, value: str) -> None:
    """Set a variable unless it is set: no other client sets it to another value."""
    try:
        await backend.set(session_id, variable_id, value)
    except ConflictError as error:
        if error.code != "already_set":
            raise


def _sendable(calls: Sequence[ProgramCall]) -> list[ProgramCall]:
    """The calls without an error. A call inherits the error of a call whose output it reads, which
    may come after it."""
    changed = True
    while changed:
        changed = False
        for call in calls:
            if call.error is None:
                call.error = next(filter(None, map(_error_of, call.inputs())), None)
                changed |= call.error is not None
    return [call for call in calls if call.error is None]


def _error_of(variable: SemanticVariable) -> Exception | None:
    """Why it will have no value, if that is known."""
    if variable.value is not None or variable.producer is None:
        return variable.refusal
    return variable.producer.error


def _is_unsent(variable: SemanticVariable) -> bool:
    call = variable.producer
    return call is not None and call.request_id is None and call.error is None


async def _native_outputs(
    call: ProgramCall, texts: Mapping[SemanticVariable, str], threads: asyncio.Semaphore
) -> Mapping[str, str]:
    """Run a native function, on a thread of its own unless it is a coroutine function.

    texts: the values of its variables. threads: how many more may be started. Returns output name
    -> text. Raises an Exception for whatever the function raises, and CancelledError only if this
    task is cancelled.
    """
    arguments = {name: _substitute(value, texts) for name, value in call.arguments.items()}
    function = call.function.native
    assert function is not None
    try:
        if inspect.iscoroutinefunction(function):
            returned = await function(**arguments)
        else:
            work = functools.partial(function, **arguments)
            async with threads:
                returned = await run_on_thread(work, f"native {call.function.name}")
    except Exception:
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        # SystemExit and KeyboardInterrupt would end the event loop, on which all calls wait; no
        # handler of errors catches the others.
        raise RuntimeError(f"the function raised {_describe(error)}") from error
    return _outputs(call, returned)


def _substitute(argument: Any, texts: Mapping[SemanticVariable, str]) -> Any:
    """The argument with the texts in place of its variables; the same object if it has none."""
    if isinstance(argument, SemanticVariable):
        return texts[argument]
    if next(variables_in(argument), None) is None:
        return argument
    if isinstance(argument, dict):
        return {name: _substitute(part, texts) for name, part in argument.items()}
    parts = [_substitute(part, texts) for part in argument]
    return parts if isinstance(argument, list) else tuple(parts)


def _outputs(call: ProgramCall, returned: Any) -> dict[str, str]:
    names = call.function.outputs
    if len(names) == 1:
        return {names[0]: _text(returned)}
    if not isinstance(returned, list | tuple) or len(returned) != len(names):
        raise TypeError(f"it must return {len(names)} values ({', '.join(names)})")
    return {name: _text(value) for name, value in zip(names, returned, strict=True)}


def _text(value: Any) -> str:
    """A returned object as text: lists, tuples and dicts as JSON.

    Raises TypeError for None, ValueError for what is no text or no JSON.
    """
    if value is None:
        raise TypeError("it returned None; it must return the value of its output")
    if isinstance(value, list | tuple | dict):
        value = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        return checked_text(str(value))
    except ValueError as error:
        raise ValueError(f"its result {error}") from None


def _describe(error: BaseException) -> str:
    """The error in words that can be sent, whatever its own text is."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return kind
    message = f"{kind}: {text}" if text else kind
    return message.encode("utf-8", "backslashreplace").decode()[:_MESSAGE_CHARS]
