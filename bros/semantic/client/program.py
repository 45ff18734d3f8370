"""A program as it is written: semantic variables, and the calls between them.

```
 SemanticVariable ──input──▶ Call ──output──▶ SemanticVariable        a Program holds Calls that
                                                                       are not sent yet
```

Variables and calls refer to each other, so they are one module. What they need of a session is
`SessionInterface`; bros.semantic.client.session implements it and imports this module.
"""

from __future__ import annotations

import threading
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
from typing import Any, Protocol, TypeVar

from bros.semantic.core.template import Piece, Placeholder, Text, render_template
from bros.semantic.errors import ConflictError
from bros.semantic.schema import CallSpec, Criteria, Message, Parameter, Perf, Role

T = TypeVar("T")

_SHOWN_CHARS = 40


class AsyncSessionInterface(Protocol):
    """What a session does for variables, on the event loop of its connection."""

    async def fetch(
        self, variable: SemanticVariable, criteria: Criteria, timeout_s: float | None
    ) -> str: ...

    async def fetch_all(
        self, variables: Sequence[SemanticVariable], criteria: Criteria, timeout_s: float | None
    ) -> list[str]: ...

    async def want(self, variable: SemanticVariable, criteria: Criteria) -> None: ...

    def stream(self, variable: SemanticVariable, criteria: Criteria) -> Pieces: ...

    async def send_value(self, variable: SemanticVariable, text: str) -> None: ...

    async def cancel(self, call: ProgramCall) -> None: ...


class SessionInterface(Protocol):
    """What variables and calls need of the session that they belong to."""

    @property
    def async_session(self) -> AsyncSessionInterface: ...

    @property
    def program(self) -> Program:
        """The calls of the session that are not sent yet."""
        ...

    @property
    def closed(self) -> bool: ...

    def run(self, coroutine: Coroutine[Any, Any, T], instead: str) -> T:
        """Run on the connection's loop and wait. instead: what to call on an event loop."""
        ...

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T: ...

    def new_id(self, name: str) -> str:
        """An id for a variable, which nothing else in the session has."""
        ...

    def announce(self, variable: SemanticVariable) -> str:
        """The id of a variable, which is declared to the server with the next calls."""
        ...

    def criteria_for(
        self,
        perf: Perf | str | None = None,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> Criteria:
        """What is asked for, on top of the session's own criteria. Raises ValueError."""
        ...


CURRENT: ContextVar[SessionInterface | None] = ContextVar("bros_semantic_session", default=None)
"""The session of the `with` block. It is the only state outside objects: values are asked for
without naming a session, as in the Parrot paper's example. Each thread and each task has its own.
Only `Session` changes it."""


class Pieces:
    """A stream that is read from another thread, one piece at a time."""

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
        """Stop reading."""
        self.ended = True
        await self._pieces.aclose()


class SemanticVariable:
    """A text that calls read or produce; its value may be there already, or come later.

    value: of a constant; None for one that `set` or a call gives its value. name: for messages and
    pictures. session: that it is for, if it is not the current one.

    What waits has a form for threads (`get`) and one for coroutines (`aget`); the former raises
    RuntimeError on a running event loop, which it would block. Both raise

    - UpstreamError if the call that produces it, or one that this needs, has failed,
    - GetTimeoutError, SessionGoneError, ServerUnreachableError,
    - InvalidRequestError or ConflictError if the server refused the program,
    - RuntimeError if there is no session, ValueError if what they are given makes no sense; then
      nothing was sent.

    perf says what matters (LATENCY, THROUGHPUT, TTFT, TPOT); None: what the session says, or else
    LATENCY. ttft, tpot: objectives in seconds. deadline: seconds from now in which it should be
    complete; it is late after that but comes all the same. timeout: seconds after which to raise
    GetTimeoutError; the work goes on, and asking again is fine.
    """

    __slots__ = ("__weakref__", "_id", "_lock", "_name", "_producer", "_program", "_value")

    def __init__(
        self,
        value: str | None = None,
        name: str | None = None,
        session: SessionInterface | None = None,
    ) -> None:
        if value is not None and not isinstance(value, str):
            raise TypeError(f"the value of a variable is a string, not {type(value).__name__}")
        self._value = value
        self._name = name or "variable"
        self._producer: ProgramCall | None = None
        self._program: Program | None = None if session is None else session.program
        self._id: str | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        if self._value is None:
            return f"<SemanticVariable {self._name}: not there yet>"
        shown = self._value[:_SHOWN_CHARS]
        more = "..." if len(self._value) > _SHOWN_CHARS else ""
        return f"<SemanticVariable {self._name}: {shown!r}{more}>"

    @property
    def name(self) -> str:
        return self._name

    @property
    def value(self) -> str | None:
        """The text, if it is known here; the server is not asked."""
        return self._value

    @property
    def id(self) -> str:
        """Its id in its session. Raises RuntimeError if it has none."""
        session = self._session_now()
        if self._program is None:
            self._program = session.program
        return session.announce(self)

    @property
    def session(self) -> SessionInterface | None:
        """Whose it is; None of a constant, and of what no session has been asked for yet."""
        return None if self._program is None else self._program.session

    def set(self, text: str) -> None:
        """Give it its value. Raises ConflictError if it has one, or a call gives it one."""
        if self._take(text):
            session = self._session_now()
            session.run(session.async_session.send_value(self, text), "aset")

    async def aset(self, text: str) -> None:
        """`set` for coroutines."""
        if self._take(text):
            session = self._session_now()
            await session.arun(session.async_session.send_value(self, text))

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
        session = self._session_now()
        criteria = session.criteria_for(perf, deadline, ttft, tpot)
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
        session = self._session_now()
        criteria = session.criteria_for(perf, deadline, ttft, tpot)
        return await session.arun(session.async_session.fetch(self, criteria, timeout))

    def want(self, perf: Perf | str | None = None, *, deadline: float | None = None) -> None:
        """Have it made, or hurry it up, without waiting for it."""
        if self._value is None:
            session = self._session_now()
            criteria = session.criteria_for(perf, deadline)
            session.run(session.async_session.want(self, criteria), "awant")

    async def awant(self, perf: Perf | str | None = None, *, deadline: float | None = None) -> None:
        """`want` for coroutines."""
        if self._value is None:
            session = self._session_now()
            criteria = session.criteria_for(perf, deadline)
            await session.arun(session.async_session.want(self, criteria))

    def stream(
        self,
        perf: Perf | str | None = None,
        *,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> Iterator[str]:
        """The value in pieces as they come: perf None is TTFT here."""
        if self._value is not None:
            yield self._value
            return
        session = self._session_now()
        pieces = session.async_session.stream(
            self, self._streaming(session, perf, deadline, ttft, tpot)
        )
        try:
            while (piece := session.run(pieces.next(), "astream")) is not None:
                yield piece
        finally:
            if not pieces.ended:
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
        session = self._session_now()
        pieces = session.async_session.stream(
            self, self._streaming(session, perf, deadline, ttft, tpot)
        )
        try:
            while (piece := await session.arun(pieces.next())) is not None:
                yield piece
        finally:
            if not pieces.ended:
                await session.arun(pieces.aclose())

    def cancel(self) -> None:
        """Stop the call that produces it; what needs its outputs fails with UpstreamError."""
        if self._producer is not None:
            session = self._session_now()
            session.run(session.async_session.cancel(self._producer), "acancel")

    async def acancel(self) -> None:
        """`cancel` for coroutines."""
        if self._producer is not None:
            session = self._session_now()
            await session.arun(session.async_session.cancel(self._producer))

    @property
    def program(self) -> Program | None:
        """Among whose calls it is; None of a constant."""
        return self._program

    @property
    def producer(self) -> ProgramCall | None:
        return self._producer

    @property
    def is_open(self) -> bool:
        """A call may still be made its producer."""
        return self._value is None and self._producer is None

    def belong_to(self, program: Program) -> None:
        self._program = program

    def produced_by(self, call: ProgramCall) -> None:
        self._producer = call

    def arrive(self, value: str) -> None:
        """The value has come from the session."""
        self._value = value

    def name_in(self, session: SessionInterface) -> tuple[str, bool]:
        """Its id in the session whose it is, and whether it has only now been given one."""
        with self._lock:
            is_new = self._id is None
            if self._id is None:
                self._id = session.new_id(self._name)
            return self._id, is_new

    def name_or_value(self, session: SessionInterface) -> tuple[str | None, str | None]:
        """The id, or the value instead if the session has never heard of the variable."""
        with self._lock:
            if self._id is None and self._producer is None and self._value is not None:
                return None, self._value
        return self.name_in(session)[0], None

    def _take(self, text: str) -> bool:
        """Take the value; whether the session has to be told."""
        if not isinstance(text, str):
            raise TypeError(f"the value of a variable is a string, not {type(text).__name__}")
        with self._lock:
            if self._producer is not None:
                message = f"The variable {self._name!r} gets its value from a call."
                raise ConflictError(message, "already_produced")
            if self._value is not None:
                raise ConflictError(f"The variable {self._name!r} has a value.", "already_set")
            self._value = text
            return self._id is not None

    def _session_now(self) -> SessionInterface:
        """Its session; if it has none, that is the current one from now on."""
        session = self.session
        if session is not None:
            return session
        session = CURRENT.get()
        if session is None:
            raise RuntimeError(
                f"There is no session to make {self._name!r} in: use `with Session(...):`."
            )
        if self._program is None:
            self._program = session.program
        else:
            session.program.absorb(self._program)
        return session

    def _streaming(
        self,
        session: SessionInterface,
        perf: Perf | str | None,
        deadline: float | None,
        ttft: float | None,
        tpot: float | None,
    ) -> Criteria:
        return session.criteria_for(perf or Perf.TTFT, deadline, ttft, tpot)


def gather(
    *variables: SemanticVariable, perf: Perf | str | None = None, timeout: float | None = None
) -> list[str]:
    """The values of all, asked for at once and in one program; raises as `get` does."""
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
    """That of all whose values are not known; None if all are. Raises ValueError for several."""
    sessions = {variable._session_now() for variable in variables if variable.value is None}
    if len(sessions) > 1:
        raise ValueError("these variables belong to several sessions; get them one by one")
    return sessions.pop() if sessions else None


Argument = str | SemanticVariable | Sequence[str | SemanticVariable]
"""What stands for an input. Several are written one after the other."""

Wanted = Mapping[SemanticVariable, Criteria]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What all calls of one function have in common.

    outputs: their names.
    parts: the template: roles of a conversation and their pieces; one part without a role is a
    plain template.
    native: a function of the client instead of a template; it gets texts in place of variables.
    sampling: of all outputs.
    output_sampling: by output, what differs from `sampling`.
    transforms: by placeholder.
    separator: between the texts of one argument that is a sequence.
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
    """Calls that are made and not sent yet, in their order: of one session, or of none so far.

    Calls made outside a session belong together if they share variables, so a call that reads
    variables of two programs merges these. A program without a session gets one when the first of
    its values is asked for: the program of that session absorbs it.

    An absorbed program forwards to the one that absorbed it, so its variables need not be told
    (`find` follows the links, as in a union-find structure). A session's program is never absorbed.

    Thread-safe. The lock guards both fields `_calls` and `_absorbed_by`; the latter is set once.
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
        """The program that this one is part of by now."""
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
        """Take over the calls of a program without a session; they come after those of this one.

        Both locks are held, in the order of id(), so that two threads that merge the same programs
        the other way round neither deadlock nor link them in a circle.
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
        """Take out all calls."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls

    def put_back(self, calls: Sequence[ProgramCall]) -> None:
        """Calls that could not be sent now are the first ones again."""
        with self._lock:
            self._calls[:0] = calls


@dataclass(eq=False)
class ProgramCall:
    """One call of a function.

    request_id: set when it has been sent.
    error: why it never will be sent.
    running: one of its outputs has been asked for; a native function has been started then.
    """

    form: Form
    arguments: Mapping[str, Any]
    outputs: Mapping[str, SemanticVariable]
    request_id: str | None = None
    error: Exception | None = None
    running: bool = False

    def inputs(self) -> Iterator[SemanticVariable]:
        """The variables that it reads."""
        for argument in self.arguments.values():
            for part in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(part, SemanticVariable):
                    yield part

    def to_spec(self, session: SessionInterface, wanted: Wanted) -> CallSpec:
        """As it is sent in `session`. wanted: criteria of outputs that are asked for already."""
        form = self.form
        parameters: list[Parameter] = []
        expanded: dict[str, tuple[str, ...]] = {}
        for name, argument in self.arguments.items():
            if isinstance(argument, list | tuple):
                expanded[name] = self._names_within(name, len(argument))
                named = list(zip(expanded[name], argument, strict=True))
            else:
                named = [(name, argument)]
            for part_name, part in named:
                if form.native is None or isinstance(part, SemanticVariable):
                    transforms = form.transforms.get(name)
                    parameters.append(_input(part_name, part, transforms, session))
        for name, variable in self.outputs.items():
            parameters.append(
                Parameter(
                    name=name,
                    role=Role.OUTPUT,
                    variable=variable.name_in(session)[0],
                    transforms=form.transforms.get(name),
                    sampling=form.output_sampling.get(name),
                    criteria=wanted.get(variable),
                )
            )
        spec = CallSpec(name=form.name, parameters=parameters, sampling=form.sampling)
        if form.native is not None:
            return replace(spec, native=True)
        contents = [
            (role, render_template(_expand(pieces, expanded, form.separator)))
            for role, pieces in form.parts
        ]
        if contents[0][0] is None:
            return replace(spec, template=contents[0][1], chat=form.chat)
        messages = [Message(role=role or "user", content=content) for role, content in contents]
        return replace(spec, messages=messages)

    def _names_within(self, name: str, count: int) -> tuple[str, ...]:
        """Names for the parts of one argument, none of which is taken."""
        stem = name + "_"
        taken = {*self.arguments, *self.outputs}
        while any(other.startswith(stem) for other in taken):
            stem += "_"
        return tuple(f"{stem}{number}" for number in range(1, count + 1))


def make_call(
    form: Form, arguments: Mapping[str, Any], given: Mapping[str, SemanticVariable]
) -> ProgramCall:
    """Make a call, in the session of its variables, or else the current one, or else none yet.

    given: variables for outputs; the others get new ones.
    Raises TypeError if one of these has a value or a producer already, ValueError for variables
    of another session whose values are not known.
    """
    for name, variable in given.items():
        if not isinstance(variable, SemanticVariable):
            kind = type(variable).__name__
            raise TypeError(f"{form.name}(): the output {name} must be a variable, not {kind}")
        if not variable.is_open:
            raise TypeError(f"{form.name}(): the output {name} has a value or a producer already")
    if len(set(given.values())) < len(given):
        raise TypeError(f"{form.name}(): one variable cannot be two outputs")
    outputs = {name: given.get(name) or SemanticVariable(name=name) for name in form.outputs}
    call = ProgramCall(form, arguments, outputs)
    program = _program_for(call, [*call.inputs(), *given.values()])
    for variable in [*call.inputs(), *outputs.values()]:
        if variable.value is None and variable.session is None:
            variable.belong_to(program)
    for variable in outputs.values():
        variable.produced_by(call)
    program.add(call)
    return call


def _program_for(call: ProgramCall, variables: Sequence[SemanticVariable]) -> Program:
    """The program that the call belongs to, with all that its variables belong to absorbed."""
    current = CURRENT.get()
    session = current
    drafts: list[Program] = []
    for variable in variables:
        if variable.program is None:
            continue
        owner = variable.session
        if owner is None:
            drafts.append(variable.program.find())
        elif session is None:
            session = owner if variable.value is None or not owner.closed else None
        elif owner is not session and variable.value is None:
            raise ValueError(
                f"{call.form.name}(): the variable {variable.name!r} belongs to another session; "
                "pass its value (get) instead"
            )
    if session is not None:
        program = session.program
    else:
        program = drafts[0] if drafts else Program()
    for draft in drafts:
        program.absorb(draft)
    return program


def _input(
    name: str, part: str | SemanticVariable, transforms: str | None, session: SessionInterface
) -> Parameter:
    parameter = Parameter(name=name, role=Role.INPUT, transforms=transforms)
    if isinstance(part, str):
        return replace(parameter, value=part)
    if part.session is not session or part.program is None:
        # A constant, or known by now from elsewhere.
        assert part.value is not None
        return replace(parameter, value=part.value)
    variable_id, value = part.name_or_value(session)
    return replace(parameter, variable=variable_id, value=value)


def _expand(
    pieces: Sequence[Piece], expanded: Mapping[str, tuple[str, ...]], separator: str
) -> list[Piece]:
    """The pieces with a placeholder for each part of arguments that are sequences."""
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
    return _merged(result)


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """The same without Texts that follow one another."""
    result: list[Piece] = []
    for piece in pieces:
        if result and isinstance(piece, Text) and isinstance(result[-1], Text):
            result[-1] = Text(result[-1].text + piece.text)
        else:
            result.append(piece)
    return result
