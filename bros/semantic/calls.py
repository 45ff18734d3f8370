"""Calls of functions on the client, from when they are made until they are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bros.semantic.current import CURRENT
from bros.semantic.program import CallSpec, Criteria, Message, Parameter, Role
from bros.semantic.template import Piece, Placeholder, Text, render_template
from bros.semantic.variables import SemanticVariable

if TYPE_CHECKING:
    from bros.semantic.client_session import Session

Argument = str | SemanticVariable | Sequence[str | SemanticVariable]
"""What stands for an input. Several are written one after the other."""

Wanted = Mapping[SemanticVariable, Criteria]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What all calls of one function have in common.

    outputs: their names. parts: the template, as a role of a conversation and the pieces that it
    says; one part without a role is a plain template. native: a function of the client instead,
    which is given the arguments, texts in place of variables. sampling: of all outputs;
    output_sampling: what differs, by output. transforms: by placeholder. separator: between the
    texts of one argument that is a sequence.
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
    """Calls that have been made and not sent, in their order: of a session, or of none yet.

    Calls outside a session belong together if they share variables. What becomes of them is
    decided when the first of their values is asked for. Thread-safe.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = session
        self._calls: list[Call] = []
        self._absorbed_by: Program | None = None
        self._lock = threading.Lock()

    @property
    def session(self) -> Session | None:
        return self.find()._session

    def find(self) -> Program:
        """The program that this one is part of by now."""
        program = self
        while program._absorbed_by is not None:
            program = program._absorbed_by
        return program

    def add(self, call: Call) -> None:
        program = self.find()
        with program._lock:
            if program._absorbed_by is None:
                program._calls.append(call)
                return
        self.add(call)  # another thread has just absorbed it

    def absorb(self, other: Program) -> None:
        """Take the calls of a program without a session; they come after those that are here."""
        target, source = self.find(), other.find()
        if source is target:
            return
        assert source._session is None
        with source._lock:
            source._absorbed_by = target
            calls, source._calls = source._calls, []
        with target._lock:
            target._calls += calls

    def take(self) -> list[Call]:
        """All of them; none are left."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls

    def put_back(self, calls: Sequence[Call]) -> None:
        """They could not be sent now; they are again the first."""
        with self._lock:
            self._calls[:0] = calls


@dataclass(eq=False)
class Call:
    """One call. request_id: from when it has been sent. error: why it never will be.

    running: somebody has asked for one of its outputs, so if it is native it has been begun.
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

    def to_spec(self, session: Session, wanted: Wanted) -> CallSpec:
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
) -> Call:
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
    call = Call(form, arguments, outputs)
    program = _program_for(call, [*call.inputs(), *given.values()])
    for variable in [*call.inputs(), *outputs.values()]:
        if variable.value is None and variable.session is None:
            variable.belong_to(program)
    for variable in outputs.values():
        variable.produced_by(call)
    program.add(call)
    return call


def _program_for(call: Call, variables: Sequence[SemanticVariable]) -> Program:
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
    name: str, part: str | SemanticVariable, transforms: str | None, session: Session
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
