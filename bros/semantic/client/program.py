"""Programs on the client: semantic variables, the calls between them, and unsent calls.

```
 SemanticVariable ──input──▶ ProgramCall ──output──▶ SemanticVariable
                             a Program holds the ProgramCalls that are not sent yet
```

Variables and calls refer to each other, so they are in one module. They use a session through
`SessionInterface`, which bros.semantic.client.session implements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from bros.semantic.core.template import Piece, Placeholder, Text, join_texts, render_template
from bros.semantic.errors import ConflictError, SessionGoneError
from bros.semantic.schema import CallSpec, Criteria, Message, Parameter, Perf, Role

T = TypeVar("T")

_SHOWN_CHARS = 40


class AsyncSessionInterface(Protocol):
    """The operations of a session for variables, on the event loop of its connection."""

    async def fetch(
        self, variable: SemanticVariable, criteria: Criteria, timeout_s: float | None
    ) -> str: ...

    async def fetch_all(
        self, variables: Sequence[SemanticVariable], criteria: Criteria, timeout_s: float | None
    ) -> list[str]: ...

    async def want(self, variable: SemanticVariable, criteria: Criteria) -> None: ...

    def stream(self, variable: SemanticVariable, criteria: Criteria) -> PieceStream: ...

    async def send_value(self, variable: SemanticVariable) -> None: ...

    async def cancel(self, call: ProgramCall) -> None: ...


class SessionInterface(Protocol):
    """The part of a session that its variables and calls use."""

    @property
    def async_session(self) -> AsyncSessionInterface: ...

    @property
    def program(self) -> Program:
        """The calls of the session that are not sent yet."""
        ...

    @property
    def closed(self) -> bool: ...

    def run(self, coroutine: Coroutine[Any, Any, T], instead: str) -> T:
        """Run on the connection's loop and wait. instead: the method to call on an event loop."""
        ...

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T: ...

    def new_id(self, name: str) -> str:
        """A new variable id, unique in the session."""
        ...

    def announce(self, variable: SemanticVariable) -> str:
        """The id of a variable; the session declares it to the server with the next calls."""
        ...

    def criteria_for(
        self,
        perf: Perf | str | None = None,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> Criteria:
        """Criteria with the session's as defaults. Raises ValueError."""
        ...


CURRENT: ContextVar[SessionInterface | None] = ContextVar("bros_semantic_session", default=None)
"""The session of the current `with` block, for each thread and task. It is the only global state:
programs request values without naming a session, as in the Parrot paper. Only `Session` sets it."""


class PieceStream:
    """A stream of text that another thread reads piece by piece."""

    def __init__(self, pieces: AsyncGenerator[str, None]) -> None:
        self._pieces = pieces
        self.ended = False

    async def next(self) -> str | None:
        """The next piece; None at the end."""
        try:
            return await anext(self._pieces)
        except StopAsyncIteration:
            self.ended = True
            return None
        except BaseException:
            self.ended = True
            raise

    async def aclose(self) -> None:
        """End the stream."""
        self.ended = True
        await self._pieces.aclose()


def _check_value(value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"the value of a variable is a string, not {type(value).__name__}")
    try:
        checked_text(value)
    except ValueError as error:
        raise ValueError(f"the value of a variable {error}") from None


def checked_text(text: str) -> str:
    """Raises ValueError for half a character, as errors="surrogateescape" leaves them: no text
    with one can be sent. The message goes on after the name of the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"has half a character (a lone surrogate) at position {error.start}"
        raise ValueError(half) from None
    return text


class SemanticVariable:
    """A text that calls read or produce: Parrot's Semantic Variable.

    value: value of a constant; None if `set` or a call sets it.
    name: name in messages and graphs.
    session: its session; None: the current session when it is first used.

    Waiting methods have a version for threads (`get`) and one for coroutines (`aget`). The former
    raises RuntimeError on a running event loop, which it would block. Both raise

    - UpstreamError if a call that the value depends on has failed,
    - GetTimeoutError, SessionGoneError, ServerUnreachableError,
    - InvalidRequestError or ConflictError if the server rejected the program,
    - RuntimeError without a session, and ValueError for invalid arguments, before anything is sent.

    Their arguments:

    perf: criterion LATENCY, THROUGHPUT, TTFT or TPOT; None: the session's, by default LATENCY.
    ttft: objective in seconds.
    tpot: objective in seconds.
    deadline: seconds from now until the value should be complete; a late value still arrives.
    timeout: seconds after which GetTimeoutError is raised. The calls go on, and the caller may
        retry. None: no limit; if inputs that the value depends on have not been set by any client
        after 50 s, the log names them once.
    """

    __slots__ = (
        "__weakref__",
        "_id",
        "_lock",
        "_name",
        "_producer",
        "_program",
        "_refusal",
        "_unsent",
        "_value",
    )

    def __init__(
        self,
        value: str | None = None,
        name: str | None = None,
        session: SessionInterface | None = None,
    ) -> None:
        if value is not None:
            _check_value(value)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"the name of a variable is a string, not {type(name).__name__}")
        self._value = value
        self._name = name or "variable"
        self._producer: ProgramCall | None = None
        self._program: Program | None = None if session is None else session.program
        self._id: str | None = None
        self._unsent = False
        self._refusal: Exception | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        if self._value is None:
            return f"<SemanticVariable {self._name}: not there yet>"
        shown = self._value[:_SHOWN_CHARS]
        more = "..." if len(self._value) > _SHOWN_CHARS else ""
        return f"<SemanticVariable {self._name}: {shown!r}{more}>"

    def __str__(self) -> str:
        """Its value; without one a description, for logs."""
        return repr(self) if self._value is None else self._value

    def __format__(self, spec: str) -> str:
        """Its value. Raises TypeError if it has none yet: a text that is built with it would
        contain a description of the variable, and no call would wait for the value."""
        if self._value is None:
            raise TypeError(
                f"the variable {self._name!r} has no value yet: pass the variable itself to a "
                "function, or wait for its value with get()"
            )
        return format(self._value, spec)

    @property
    def name(self) -> str:
        return self._name

    @property
    def value(self) -> str | None:
        """The text if the client knows it, else None. It sends no request."""
        return self._value

    @property
    def id(self) -> str:
        """Its id in its session. Raises RuntimeError without a session."""
        session = self._resolve_session()
        if self._program is None:
            self._program = session.program
        return session.announce(self)

    @property
    def session(self) -> SessionInterface | None:
        """Its session; None for a constant, and until it is first used in a session."""
        return None if self._program is None else self._program.session

    def set(self, text: str) -> None:
        """Set its value. Raises ConflictError if it has a value or a producer.

        If the server refuses the value, the variable has none after that, and may be set again. If
        the server does not answer, the variable keeps the value, and the session sends it with its
        next request; setting it to the same value again is such a request.
        """
        if self._set_locally(text):
            session = self._resolve_session()
            session.run(session.async_session.send_value(self), "aset")

    async def aset(self, text: str) -> None:
        """`set` for coroutines."""
        if self._set_locally(text):
            session = self._resolve_session()
            await session.arun(session.async_session.send_value(self))

    def get(
        self,
        perf: Perf | str | None = None,
        *,
        timeout: float | None = None,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> str:
        """Wait for the value."""
        if self._value is not None:
            return self._value
        session, criteria = self._session_and_criteria(perf, deadline, ttft, tpot)
        return session.run(session.async_session.fetch(self, criteria, timeout), "aget")

    async def aget(
        self,
        perf: Perf | str | None = None,
        *,
        timeout: float | None = None,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> str:
        """`get` for coroutines."""
        if self._value is not None:
            return self._value
        session, criteria = self._session_and_criteria(perf, deadline, ttft, tpot)
        return await session.arun(session.async_session.fetch(self, criteria, timeout))

    def want(self, perf: Perf | str | None = None, *, deadline: float | None = None) -> None:
        """Request the value without waiting for it."""
        if self._value is None:
            session, criteria = self._session_and_criteria(perf, deadline)
            session.run(session.async_session.want(self, criteria), "awant")

    async def awant(self, perf: Perf | str | None = None, *, deadline: float | None = None) -> None:
        """`want` for coroutines."""
        if self._value is None:
            session, criteria = self._session_and_criteria(perf, deadline)
            await session.arun(session.async_session.want(self, criteria))

    def stream(
        self,
        perf: Perf | str | None = None,
        *,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> Iterator[str]:
        """Stream the value in pieces. The default of perf is TTFT here."""
        if self._value is not None:
            yield self._value
            return
        session, criteria = self._session_and_criteria(perf or Perf.TTFT, deadline, ttft, tpot)
        pieces = session.async_session.stream(self, criteria)
        try:
            while (piece := session.run(pieces.next(), "astream")) is not None:
                yield piece
        finally:
            if not pieces.ended:
                with contextlib.suppress(SessionGoneError):  # which has ended the stream, too
                    session.run(pieces.aclose(), "astream")

    async def astream(
        self,
        perf: Perf | str | None = None,
        *,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> AsyncIterator[str]:
        """`stream` for coroutines."""
        if self._value is not None:
            yield self._value
            return
        session, criteria = self._session_and_criteria(perf or Perf.TTFT, deadline, ttft, tpot)
        pieces = session.async_session.stream(self, criteria)
        try:
            while (piece := await session.arun(pieces.next())) is not None:
                yield piece
        finally:
            if not pieces.ended:
                with contextlib.suppress(SessionGoneError):
                    await session.arun(pieces.aclose())

    def cancel(self) -> None:
        """Cancel the call that produces it; its dependents fail with UpstreamError."""
        if self._producer is not None:
            session = self._resolve_session()
            session.run(session.async_session.cancel(self._producer), "acancel")

    async def acancel(self) -> None:
        """`cancel` for coroutines."""
        if self._producer is not None:
            session = self._resolve_session()
            await session.arun(session.async_session.cancel(self._producer))

    @property
    def program(self) -> Program | None:
        """The program of its calls; None for a constant."""
        return self._program

    @property
    def producer(self) -> ProgramCall | None:
        return self._producer

    @property
    def is_open(self) -> bool:
        """Whether it has neither a value nor a producer."""
        return self._value is None and self._producer is None

    def belong_to(self, program: Program) -> None:
        self._program = program

    def produced_by(self, call: ProgramCall) -> None:
        self._producer = call

    def receive_value(self, value: str) -> None:
        """Store the value that the session has received."""
        self._value = value

    @property
    def unsent(self) -> bool:
        """Whether `set` has given it a value that the server may not have yet."""
        return self._unsent

    @property
    def refusal(self) -> Exception | None:
        """Why the server has refused to create it."""
        return self._refusal

    def value_sent(self) -> None:
        """The server has the value that `set` has given it."""
        self._unsent = False

    def take_back_value(self, refusal: Exception | None = None) -> None:
        """The server has refused the value: it has none until it is set again. refusal: the error,
        if the server does not know the variable."""
        with self._lock:
            self._value, self._unsent, self._refusal = None, False, refusal

    def id_in(self, session: SessionInterface) -> tuple[str, bool]:
        """Its id in its session, and whether this call has assigned it."""
        with self._lock:
            is_new = self._id is None
            if self._id is None:
                self._id = session.new_id(self._name)
            return self._id, is_new

    @property
    def constant(self) -> str | None:
        """The value of a constant that has no id yet, else None."""
        with self._lock:
            return self._value if self._id is None and self._producer is None else None

    def _set_locally(self, text: str) -> bool:
        """Store the value. Returns whether the server knows the variable and needs the value."""
        _check_value(text)
        with self._lock:
            if self._producer is not None:
                message = f"The variable {self._name!r} gets its value from a call."
                raise ConflictError(message, "already_produced")
            if self._value is not None and not (self._unsent and self._value == text):
                raise ConflictError(f"The variable {self._name!r} has a value.", "already_set")
            self._value, self._refusal = text, None
            self._unsent = self._id is not None
            return self._unsent

    def _resolve_session(self) -> SessionInterface:
        """Its session; without one it joins the current session. Raises RuntimeError."""
        session = self.session
        if session is not None:
            return session
        session = CURRENT.get()
        if session is None:
            raise RuntimeError(f"There is no session for {self._name!r}: use `with Session(...):`.")
        if self._program is None:
            self._program = session.program
        else:
            session.program.absorb(self._program)
        return session

    def _session_and_criteria(
        self,
        perf: Perf | str | None,
        deadline: float | None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> tuple[SessionInterface, Criteria]:
        session = self._resolve_session()
        return session, session.criteria_for(perf, deadline, ttft, tpot)


def gather(
    *variables: SemanticVariable, perf: Perf | str | None = None, timeout: float | None = None
) -> list[str]:
    """Request all values at once in one program, and wait for them. Raises the errors of `get`."""
    session = _common_session(variables)
    if session is None:
        return [variable.get() for variable in variables]
    criteria = session.criteria_for(perf)
    return session.run(session.async_session.fetch_all(variables, criteria, timeout), "agather")


async def agather(
    *variables: SemanticVariable, perf: Perf | str | None = None, timeout: float | None = None
) -> list[str]:
    """`gather` for coroutines."""
    session = _common_session(variables)
    if session is None:
        return [await variable.aget() for variable in variables]
    criteria = session.criteria_for(perf)
    return await session.arun(session.async_session.fetch_all(variables, criteria, timeout))


def _common_session(variables: tuple[SemanticVariable, ...]) -> SessionInterface | None:
    """The session of all variables without a value; None if there are none. Raises ValueError for
    several sessions, TypeError for what is no variable."""
    for variable in variables:
        if not isinstance(variable, SemanticVariable):
            raise TypeError(
                f"variables are arguments of their own, not a {type(variable).__name__}"
            )
    sessions = {variable._resolve_session() for variable in variables if variable.value is None}
    if len(sessions) > 1:
        raise ValueError("these variables belong to several sessions; get them one by one")
    return sessions.pop() if sessions else None


Wanted = Mapping[SemanticVariable, Criteria]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """The definition of a function, shared by all its calls.

    outputs: names of the outputs.
    parts: the template as (message role, pieces); a plain template is one part without a role.
    chat: whether a plain template becomes a conversation.
    native: the Python function of a native function, instead of a template.
    sampling: sampling parameters of all outputs.
    output_sampling: output name -> sampling parameters that override `sampling`.
    transforms: placeholder name -> transforms.
    separator: text between the parts of an argument that is a sequence.
    """

    name: str
    outputs: tuple[str, ...]
    parts: tuple[tuple[str | None, tuple[Piece, ...]], ...] = ()
    chat: bool = False
    native: Callable[..., Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    output_sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    transforms: Mapping[str, str] = field(default_factory=dict)
    separator: str = "\n\n"


class Program:
    """Unsent calls in order, of one session or of no session yet.

    Calls made outside a session form one program if they share variables: a call that reads
    variables of two programs merges these. When the first value of a program without a session is
    requested, the program of the current session absorbs it.

    An absorbed program forwards to the one that absorbed it (`find` follows the links, as in a
    union-find structure), so its variables need no update. A session's program is never absorbed.

    Thread-safe. The lock guards `_calls` and `_absorbed_by`; the latter is set at most once.
    """

    def __init__(self, session: SessionInterface | None = None) -> None:
        self._session = session
        self._calls: list[ProgramCall] = []
        self._absorbed_by: Program | None = None
        self._lock = threading.Lock()

    @property
    def session(self) -> SessionInterface | None:
        return self.find()._session

    def find(self) -> Program:
        """This program, or the one that has absorbed it."""
        program = self
        while program._absorbed_by is not None:
            program = program._absorbed_by
        return program

    def add(self, call: ProgramCall) -> None:
        """Append a call."""
        while True:
            program = self.find()
            with program._lock:
                if program._absorbed_by is None:
                    program._calls.append(call)
                    return

    def absorb(self, other: Program) -> None:
        """Append the calls of a program without a session, and link it to this one.

        It takes both locks in the order of id(), so that two threads that absorb the same programs
        in opposite directions neither deadlock nor create a cycle.
        """
        while True:
            target, source = self.find(), other.find()
            if source is target:
                return
            assert source._session is None
            first, second = sorted((target, source), key=id)
            with first._lock, second._lock:
                if target._absorbed_by is None and source._absorbed_by is None:
                    source._absorbed_by = target
                    target._calls += source._calls
                    source._calls = []
                    return

    def take(self) -> list[ProgramCall]:
        """Remove and return all calls."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls

    def put_back(self, calls: Sequence[ProgramCall]) -> None:
        """Put calls that could not be sent back in front."""
        with self._lock:
            self._calls[:0] = calls


@dataclass(eq=False)
class ProgramCall:
    """One call of a function.

    arguments: input name -> argument.
    outputs: output name -> variable.
    request_id: its id at the server; None until it is sent.
    error: why it will never be sent.
    running: whether one of its outputs was requested; a native function has been started then.
    """

    function: FunctionSpec
    arguments: Mapping[str, Any]
    outputs: Mapping[str, SemanticVariable]
    request_id: str | None = None
    error: Exception | None = None
    running: bool = False

    def inputs(self) -> Iterator[SemanticVariable]:
        """The variables that it reads."""
        for argument in self.arguments.values():
            yield from variables_in(argument)

    def constants(self, session: SessionInterface) -> dict[str, str]:
        """The texts that `to_spec` writes into the call -> the input of each."""
        return {
            text: name
            for name, argument in self.arguments.items()
            for part in self._parts_of(argument)
            if (text := _constant(part, session)) is not None
        }

    def to_spec(
        self,
        session: SessionInterface,
        wanted: Wanted,
        shared: Mapping[str, str] = MappingProxyType({}),
    ) -> CallSpec:
        """The call as sent to the server.

        wanted: criteria of variables requested with it.
        shared: ids of variables for texts that are not written into the call.
        """
        function = self.function
        parameters: list[Parameter] = []
        expanded: dict[str, tuple[str, ...]] = {}
        for name, argument in self.arguments.items():
            parts = self._parts_of(argument)
            names: Sequence[str] = [name]
            if parts is argument or len(parts) != 1:
                names = expanded[name] = self._names_within(name, len(parts))
            transforms = function.transforms.get(name)
            parameters += [
                _input(part_name, part, transforms, session, shared)
                for part_name, part in zip(names, parts, strict=True)
            ]
        for name, variable in self.outputs.items():
            parameters.append(
                Parameter(
                    name=name,
                    role=Role.OUTPUT,
                    variable=variable.id_in(session)[0],
                    transforms=function.transforms.get(name),
                    sampling=function.output_sampling.get(name),
                    criteria=wanted.get(variable),
                )
            )
        spec = CallSpec(name=function.name, parameters=parameters, sampling=function.sampling)
        if function.native is not None:
            return replace(spec, native=True)
        contents = [
            (role, render_template(_expand(pieces, expanded, function.separator)))
            for role, pieces in function.parts
        ]
        if contents[0][0] is None:
            return replace(spec, template=contents[0][1], chat=function.chat)
        messages = [Message(role=role or "user", content=content) for role, content in contents]
        return replace(spec, messages=messages)

    def _parts_of(self, argument: Any) -> Sequence[Any]:
        """The inputs that an argument consists of."""
        if isinstance(argument, SemanticVariable):
            return [argument]
        if self.function.native is not None:  # which gets all others as they are
            return list(variables_in(argument))
        return argument if isinstance(argument, list | tuple) else [argument]

    def _names_within(self, name: str, count: int) -> tuple[str, ...]:
        """Unused placeholder names for the parts of a sequence argument."""
        stem = name + "_"
        taken = {*self.arguments, *self.outputs}
        while any(other.startswith(stem) for other in taken):
            stem += "_"
        return tuple(f"{stem}{number}" for number in range(1, count + 1))


def make_call(
    function: FunctionSpec, arguments: Mapping[str, Any], given: Mapping[str, SemanticVariable]
) -> ProgramCall:
    """Add a call to the current session, or else that of its variables, or else to an unbound
    program.

    given: output name -> variable; other outputs get new variables.
    Raises TypeError if a given variable has a value or a producer, ValueError if a variable of
    another session has no value.
    """
    for name, variable in given.items():
        if not isinstance(variable, SemanticVariable):
            kind = type(variable).__name__
            raise TypeError(f"{function.name}(): the output {name} must be a variable, not {kind}")
        if not variable.is_open:
            raise TypeError(
                f"{function.name}(): the output {name} has a value or a producer already"
            )
    if len(set(given.values())) < len(given):
        raise TypeError(f"{function.name}(): one variable cannot be two outputs")
    outputs = {name: given.get(name) or SemanticVariable(name=name) for name in function.outputs}
    call = ProgramCall(function, arguments, outputs)
    program = _program_for(call, [*call.inputs(), *given.values()])
    for variable in [*call.inputs(), *outputs.values()]:
        if variable.value is None and variable.session is None:
            variable.belong_to(program)
    for variable in outputs.values():
        variable.produced_by(call)
    program.add(call)
    return call


def _program_for(call: ProgramCall, variables: Sequence[SemanticVariable]) -> Program:
    """The program for the call, after it has absorbed the unbound programs of its variables."""
    current = CURRENT.get()
    session = current
    unbound: list[Program] = []
    for variable in variables:
        if variable.program is None:
            continue
        owner = variable.session
        if owner is None:
            unbound.append(variable.program.find())
        elif session is None:
            session = owner if variable.value is None or not owner.closed else None
        elif owner is not session and variable.value is None:
            raise ValueError(
                f"{call.function.name}(): the variable {variable.name!r} belongs to another "
                "session; pass its value (get) instead"
            )
    if session is not None:
        program = session.program
    else:
        program = unbound[0] if unbound else Program()
    for program_without_session in unbound:
        program.absorb(program_without_session)
    return program


def variables_in(argument: Any) -> Iterator[SemanticVariable]:
    """The variables of an argument, also within lists, tuples and dicts."""
    if isinstance(argument, SemanticVariable):
        yield argument
    elif isinstance(argument, dict | list | tuple):
        for part in argument.values() if isinstance(argument, dict) else argument:
            yield from variables_in(part)


def hides_variables(argument: Any) -> bool:
    """Whether an object of any other kind contains variables, at any depth."""
    seen: dict[int, Any] = {}  # objects, which stay alive so that their ids stay unique
    stack = [argument]
    while stack:
        part = stack.pop()
        if isinstance(part, SemanticVariable):
            return True
        if isinstance(part, str | int | float) or id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, Mapping):
            stack += itertools.chain(part, part.values())
        elif isinstance(part, list | tuple | set | frozenset | deque):
            stack += part
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            stack += [getattr(part, spec.name, None) for spec in dataclasses.fields(part)]
    return False


def _constant(part: Any, session: SessionInterface) -> str | None:
    """The text of an input that is sent without a variable, else None."""
    if isinstance(part, str):
        return part
    if not isinstance(part, SemanticVariable):
        return None
    if part.session is not session or part.program is None:
        # A constant, or a variable of another session whose value is known.
        return part.value
    return part.constant


def _input(
    name: str,
    part: Any,
    transforms: str | None,
    session: SessionInterface,
    shared: Mapping[str, str],
) -> Parameter:
    parameter = Parameter(name=name, role=Role.INPUT, transforms=transforms)
    text = _constant(part, session)
    if text is None:
        assert part.session is session
        return replace(parameter, variable=part.id_in(session)[0])
    if text in shared:
        return replace(parameter, variable=shared[text])
    return replace(parameter, value=text)


def _expand(
    pieces: Sequence[Piece], expanded: Mapping[str, tuple[str, ...]], separator: str
) -> tuple[Piece, ...]:
    """The pieces with one placeholder for each part of a sequence argument."""
    result: list[Piece] = []
    for piece in pieces:
        names = expanded.get(piece.name) if isinstance(piece, Placeholder) else None
        if names is None:
            result.append(piece)
            continue
        for number, name in enumerate(names):
            if number and separator:
                result.append(Text(separator))
            result.append(Placeholder(name, Role.INPUT))
    return join_texts(result)
