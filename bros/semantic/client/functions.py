"""The decorators for semantic functions, whose docstrings are prompts, and native functions."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from bros.core import grammars
from bros.core.request import SamplingParams
from bros.semantic.client.program import (
    FunctionSpec,
    SemanticVariable,
    checked_text,
    hides_variables,
    make_call,
)
from bros.semantic.core.template import Piece, Placeholder, parse_template, with_roles
from bros.semantic.schema import Role

_NOT_OF_OUTPUTS = frozenset({"n", "logprobs", "prompt_logprobs", "grammar"})
"""An output is one text without log-probabilities. Fields such as response_format say what it must
match."""

_SAMPLING = grammars.FIELDS.union(
    spec.name for spec in dataclasses.fields(SamplingParams) if spec.name not in _NOT_OF_OUTPUTS
)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class SemanticCallable:
    """A semantic or native function. A call returns at once: a variable, or a named tuple of
    variables if there are several outputs.

    read: converts an argument for the call; raises TypeError or ValueError.
    """

    def __init__(
        self, function: Callable[..., Any], spec: FunctionSpec, read: Callable[[Any], Any]
    ) -> None:
        functools.update_wrapper(self, function)
        self._spec = spec
        self._signature = inspect.signature(function)
        self._read = read
        self._several = _tuple_type(spec) if len(spec.outputs) > 1 else None

    def __repr__(self) -> str:
        return f"<semantic function {self._spec.name} -> {', '.join(self._spec.outputs)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a call. Keyword arguments with the name of an output give its variable.

        Raises TypeError for wrong arguments, ValueError for a text that cannot be sent and for a
        variable of another session that has no value yet.
        """
        given = {name: kwargs.pop(name) for name in self._spec.outputs if name in kwargs}
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._spec.name}(): {error}") from None
        bound.apply_defaults()
        arguments = {}
        for name, value in bound.arguments.items():
            with naming_argument(f"{self._spec.name}(): {name}"):
                arguments[name] = self._read(value)
        call = make_call(self._spec, arguments, given)
        outputs = list(call.outputs.values())
        return outputs[0] if self._several is None else self._several(*outputs)


@overload
def semantic_function(function: Callable[..., Any], /) -> SemanticCallable: ...


@overload
def semantic_function(
    *,
    chat: bool = False,
    system: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    transforms: Mapping[str, str] | None = None,
    separator: str = "\n\n",
    name: str | None = None,
    dedent: bool = True,
) -> Callable[[Callable[..., Any]], SemanticCallable]: ...


def semantic_function(
    function: Callable[..., Any] | None = None,
    /,
    *,
    chat: bool = False,
    system: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    transforms: Mapping[str, str] | None = None,
    separator: str = "\n\n",
    name: str | None = None,
    dedent: bool = True,
) -> Any:
    """Decorate a function whose docstring is a prompt template (Parrot, section 4.1).

        @semantic_function
        def write_code(task: SemanticVariable):
            \"""Write python code of {{input:task}}. Code: {{output:code}}\"""

        code = write_code("a snake game")

    The parameters of the function are the inputs; only the template declares the outputs. An
    argument is a variable, a string, a list of these (joined with `separator`), or any other
    object, which is converted with str(). None, bytes, iterators, functions, and containers with
    variables deeper within raise TypeError.

    chat: format the template with the model's chat template: text before an output is a user
        message, the output is the assistant message.
    system: system message of the conversation; requires chat.
    sampling: fields of SamplingParams for all outputs; `response_format`, `structured_outputs` or
        `guided_*` say what they must match. {{output:code:precise}} overrides them with the fields
        of the name "precise": {"temperature": 1, "precise": {"seed": 3}}.
    transforms: input or output name -> transforms: {"code": "code_block(python) | strip"}.
    name: name in graphs, and for predicting output lengths; default: the function's name.
    dedent: remove the indentation of the docstring.

    Raises ValueError with the function's name if the template does not match the function.
    """
    settings = _Settings(chat, system, sampling or {}, transforms or {}, separator, name, dedent)
    if function is None:
        return lambda decorated: _make(decorated, settings)
    return _make(function, settings)


def native_function(
    function: Callable[..., Any] | None = None,
    /,
    *,
    outputs: Sequence[str] = ("output",),
    name: str | None = None,
) -> Any:
    """Decorate a Python function that the client runs as a call of a program.

        @native_function
        def clip(text: SemanticVariable) -> SemanticVariable:
            return text[:100]

    A call with variables, also in lists, returns a variable, or a named tuple if there are several
    `outputs`. The function runs once its inputs are set and one of its outputs is requested: on a
    thread of its own, or on the connection's event loop if it is a coroutine function. It gets the
    values in place of the variables, and other arguments unchanged. It returns the value of its
    output, or a tuple of values. Lists and dicts are converted to JSON, other objects with str().
    An exception fails its outputs at stage native.
    """
    if function is None:
        return lambda decorated: native_function(decorated, outputs=outputs, name=name)
    title = name or function.__name__
    if isinstance(outputs, str) or not outputs or len(set(outputs)) < len(outputs):
        raise ValueError(f"{title}: outputs are one or more different names")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (*_VARIADIC, inspect.Parameter.POSITIONAL_ONLY):
            raise ValueError(f"{title}: {parameter} must be an ordinary named parameter")
        if parameter.name in outputs:
            raise ValueError(f"{title}: {parameter.name} is a parameter and an output")
    spec = FunctionSpec(name=title, outputs=tuple(outputs), native=function)
    return SemanticCallable(function, spec, lambda value: value)


@dataclasses.dataclass(frozen=True, slots=True)
class _Settings:
    """The arguments of `semantic_function`."""

    chat: bool
    system: str | None
    sampling: Mapping[str, Any]
    transforms: Mapping[str, str]
    separator: str
    name: str | None
    dedent: bool


def _make(function: Callable[..., Any], settings: _Settings) -> SemanticCallable:
    title = settings.name or function.__name__
    try:
        return SemanticCallable(function, _spec(function, title, settings), as_argument)
    except ValueError as error:
        raise ValueError(f"{title}: {error}") from None


def _spec(function: Callable[..., Any], title: str, settings: _Settings) -> FunctionSpec:
    check_mapping("sampling", settings.sampling)
    check_mapping("transforms", settings.transforms)
    source = function.__doc__
    if not source or not source.strip():
        raise ValueError("its docstring is the template, and there is none")
    pieces = parse_template(inspect.cleandoc(source) if settings.dedent else source)
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind in _VARIADIC:
            raise ValueError(f"{parameter} has no place in a template")
    pieces = with_roles(pieces, dict.fromkeys(parameters, Role.INPUT))
    outputs = [p for p in pieces if isinstance(p, Placeholder) and p.role is Role.OUTPUT]
    inputs = {p.name for p in pieces if isinstance(p, Placeholder) and p.role is Role.INPUT}
    if not outputs:
        raise ValueError("the template has no {{output:...}}")
    for name in sorted(inputs - parameters.keys()):
        raise ValueError(f"{{{{input:{name}}}}} is none of its parameters")
    for name in sorted(parameters.keys() - inputs):
        raise ValueError(f"the parameter {name} does not occur in the template")
    names = tuple(output.name for output in outputs)
    check_transforms(settings.transforms, {*inputs, *names})
    common, own = _sampling(settings.sampling, outputs)
    plain = tuple(replace(p, sampling=None) if isinstance(p, Placeholder) else p for p in pieces)
    return FunctionSpec(
        name=title,
        outputs=names,
        parts=_parts(plain, settings),
        chat=settings.chat,
        sampling=common,
        output_sampling=own,
        transforms=settings.transforms,
        separator=settings.separator,
    )


def _parts(
    pieces: Sequence[Piece], settings: _Settings
) -> tuple[tuple[str | None, tuple[Piece, ...]], ...]:
    if settings.system is None:
        return ((None, tuple(pieces)),)
    if not settings.chat:
        raise ValueError("system is for chat=True")
    system = parse_template(settings.system, "system")
    if any(isinstance(piece, Placeholder) for piece in system):
        raise ValueError("system is the same for all calls; placeholders go into the docstring")
    parts: list[tuple[str | None, tuple[Piece, ...]]] = [("system", system)]
    said: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Placeholder) and piece.role is Role.OUTPUT:
            if said:
                parts.append(("user", tuple(said)))
            parts.append(("assistant", (piece,)))
            said = []
        else:
            said.append(piece)
    return tuple(parts)  # text after the last output is dropped: no output depends on it


def _sampling(
    sampling: Mapping[str, Any], outputs: Sequence[Placeholder]
) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
    """The sampling fields of all outputs, and by output those that override them."""
    references = {output.sampling for output in outputs} - {None}
    for name in sorted(references - sampling.keys(), key=str):
        raise ValueError(f"the template names the sampling {name!r}, which is not given")
    common = {name: value for name, value in sampling.items() if name not in references}
    own: dict[str, Mapping[str, Any]] = {}
    for output in outputs:
        if output.sampling is not None:
            own[output.name] = sampling[output.sampling]
            check_mapping(f"sampling: {output.sampling}", own[output.name])
    for fields in ({}, *own.values()):
        check_sampling(common, fields)
    return common, own


# ---- What a template is given.


def check_mapping(name: str, value: Mapping[str, Any]) -> None:
    """Raises ValueError for anything else."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping, got {value!r}"[:200])


def check_sampling(common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises ValueError for invalid sampling fields of an output. own: they replace common ones."""
    fields = {**common, **own}
    for name in fields:
        if name not in _SAMPLING:
            raise ValueError(
                f"sampling: {name!r} is neither a parameter of sampling nor a name that the "
                "template uses"
            )
    grammars.from_fields(own or common)  # the grammar of an output replaces the common one
    of_sampling = {name: value for name, value in fields.items() if name not in grammars.FIELDS}
    SamplingParams(**of_sampling)


def check_transforms(transforms: Mapping[str, str], names: set[str]) -> None:
    """Raises ValueError for invalid transforms, and for those of other names than these."""
    for name, source in transforms.items():
        if name not in names:
            raise ValueError(f"transforms: {name!r} does not occur in the template")
        if not isinstance(source, str):
            raise ValueError(f"transforms of {name} must be a string, got {source!r}"[:200])
        # A late import: few programs use transforms, which import parsers.
        from bros.semantic.transforms import parse_transforms

        parse_transforms(source, f"transforms of {name}")


@contextlib.contextmanager
def naming_argument(name: str) -> Iterator[None]:
    """Puts the name of an argument before what `as_argument` raises."""
    try:
        yield
    except (TypeError, ValueError) as error:
        # Not type(error): the text of an object may raise a kind that takes other arguments.
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} {error}") from error


def as_argument(value: Any) -> Any:
    """An argument as an input: a variable, a text, or a tuple of these.

    Raises TypeError for what has no text, ValueError for a text that cannot be sent.
    """
    if isinstance(value, SemanticVariable):
        return value
    if isinstance(value, str):
        return checked_text(value)
    if value is None:
        raise TypeError("is None; an input is a variable or an object with a text")
    if isinstance(value, list | tuple):
        if all(isinstance(part, SemanticVariable | str) for part in value):
            return tuple(map(as_argument, value)) if value else ""
        if any(isinstance(part, SemanticVariable) for part in value):
            raise TypeError("has variables among other things than strings; call str() on those")
    _check_has_text(value)
    return checked_text(str(value))


_CALLABLES = (type, functools.partial, SemanticCallable)


def _check_has_text(value: Any) -> None:
    """Raises TypeError if str() gives a description of the object instead of its text."""
    kind = type(value).__name__
    if isinstance(value, Iterator | AsyncIterator):
        raise TypeError(f"is an iterator ({kind}); pass a list")
    if isinstance(value, Awaitable):
        raise TypeError(f"is a {kind}; pass what it returns")
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"is {kind}; decode it")
    # Other objects that can be called, such as symbols of SymPy, have a text of their own.
    if inspect.isroutine(value) or isinstance(value, _CALLABLES):
        raise TypeError(f"is a {kind}, which can be called; pass what it returns")
    if hides_variables(value):
        raise TypeError(f"is a {kind} with variables in it; pass these as a flat list")


def _tuple_type(spec: FunctionSpec) -> Callable[..., tuple[SemanticVariable, ...]]:
    """A named tuple type with the outputs as fields; invalid field names are replaced."""
    title = spec.name if spec.name.isidentifier() else "Outputs"
    return collections.namedtuple(title, spec.outputs, rename=True)
