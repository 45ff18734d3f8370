"""Functions whose bodies are prompts, and functions of the client between them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from bros.core.errors import InvalidRequestError
from bros.core.request import SamplingParams
from bros.semantic.client.program import Form, SemanticVariable, make_call
from bros.semantic.core.template import Piece, Placeholder, dedent, parse_template, with_roles
from bros.semantic.schema import Role

_SAMPLING = frozenset(spec.name for spec in dataclasses.fields(SamplingParams)) - {"n", "logprobs"}
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class SemanticCallable:
    """What `semantic_function` and `native_function` make. A call returns at once: a variable,
    or a named tuple of them if there are several outputs."""

    def __init__(
        self, function: Callable[..., Any], form: Form, read: Callable[[Any], Any]
    ) -> None:
        functools.update_wrapper(self, function)
        self._form = form
        self._signature = inspect.signature(function)
        self._read = read
        self._several = _tuple_type(form) if len(form.outputs) > 1 else None

    def __repr__(self) -> str:
        return f"<semantic function {self._form.name} -> {', '.join(self._form.outputs)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments by position or keyword; variables for outputs by keyword.

        Raises TypeError as a call of any function does, ValueError for a variable of another
        session that has no value yet.
        """
        given = {name: kwargs.pop(name) for name in self._form.outputs if name in kwargs}
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._form.name}(): {error}") from None
        bound.apply_defaults()
        arguments = {}
        for name, value in bound.arguments.items():
            try:
                arguments[name] = self._read(value)
            except TypeError as error:
                raise TypeError(f"{self._form.name}(): {name} {error}") from None
        call = make_call(self._form, arguments, given)
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
    """Make a function of a prompt, which is its docstring (the paper's section 4.1).

        @semantic_function
        def write_code(task: SemanticVariable):
            \"""Write python code of {{input:task}}. Code: {{output:code}}\"""

        code = write_code("a snake game")

    Its parameters are the inputs, its outputs are in the template alone. An argument may be a
    variable, a string, a list of these (written with `separator` between them), or anything else,
    of which str() is taken.

    chat: make a conversation of it by the model's chat template: what stands before an output is
    what the user says, the output is the answer. system: and this comes first.
    sampling: fields of SamplingParams, of all outputs; of {{output:code:precise}} it is what the
    name "precise" stands for here, on top of these: {"temperature": 1, "precise": {"seed": 3}}.
    transforms: by input or output, such as {"code": "code_block(python) | strip"}.
    name: for graphs and for expecting how long answers are; that of the function otherwise.
    dedent: without the indentation of the docstring.

    Raises ValueError with the function's name if the template does not fit it.
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
    """Make a function of the client part of programs: it runs here once its inputs are there.

        @native_function
        def clip(text: SemanticVariable) -> SemanticVariable:
            return text[:100]

    Called with variables, also in lists, it returns a variable, or a named tuple if there are
    several `outputs`. The body gets strings in their place, and everything else as it is; what it
    returns is the value, or a tuple of them. Lists and mappings become JSON, the rest str().
    It runs on a thread, or on the connection's event loop if it is a coroutine function, and only
    if one of its outputs is wanted. What it raises is why the value failed, at stage native.
    """
    if function is None:
        return lambda decorated: native_function(decorated, outputs=outputs, name=name)
    title = name or function.__name__
    if isinstance(outputs, str) or not outputs or len(set(outputs)) < len(outputs):
        raise ValueError(f"{title}: outputs are one or more different names")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (*_VARIADIC, inspect.Parameter.POSITIONAL_ONLY):
            raise ValueError(f"{title}: {parameter} must be a parameter with a name")
        if parameter.name in outputs:
            raise ValueError(f"{title}: {parameter.name} is a parameter and an output")
    form = Form(name=title, outputs=tuple(outputs), native=function)
    return SemanticCallable(function, form, lambda value: value)


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
        return SemanticCallable(function, _form(function, title, settings), _argument)
    except InvalidRequestError as error:
        raise ValueError(f"{title}: {error.message}") from None
    except ValueError as error:
        raise ValueError(f"{title}: {error}") from None


def _form(function: Callable[..., Any], title: str, settings: _Settings) -> Form:
    source = function.__doc__
    if not source or not source.strip():
        raise ValueError("its docstring is the template, and there is none")
    pieces = parse_template(dedent(source) if settings.dedent else source)
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
    _check_transforms(settings.transforms, {*inputs, *names})
    common, own = _sampling(settings.sampling, outputs)
    plain = tuple(replace(p, sampling=None) if isinstance(p, Placeholder) else p for p in pieces)
    return Form(
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
    return tuple(parts)  # no output depends on what follows the last answer


def _sampling(
    sampling: Mapping[str, Any], outputs: Sequence[Placeholder]
) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
    """What holds for all outputs, and by output what is on top of that."""
    references = {output.sampling for output in outputs} - {None}
    for name in sorted(references - sampling.keys(), key=str):
        raise ValueError(f"the template names the sampling {name!r}, which is not given")
    common = {name: value for name, value in sampling.items() if name not in references}
    own: dict[str, Mapping[str, Any]] = {}
    for output in outputs:
        if output.sampling is not None:
            own[output.name] = sampling[output.sampling]
    for fields in ({}, *own.values()):
        for name in {**common, **fields}:
            if name not in _SAMPLING:
                raise ValueError(
                    f"sampling: {name!r} is neither a parameter of sampling nor a name that the "
                    "template uses"
                )
        SamplingParams(**{**common, **fields})
    return common, own


def _check_transforms(transforms: Mapping[str, str], names: set[str]) -> None:
    for name, source in transforms.items():
        if name not in names:
            raise ValueError(f"transforms: {name!r} does not occur in the template")
        # Late: few programs use them, and they bring in parsers.
        from bros.semantic.transforms import parse_transforms

        parse_transforms(source, f"transforms of {name}")


def _argument(value: Any) -> Any:
    """What stands for an input: a variable, a text, or several of these."""
    if isinstance(value, SemanticVariable | str):
        return value
    if value is None:
        raise TypeError("is None; an input is a variable or something to be written")
    if isinstance(value, list | tuple):
        if all(isinstance(part, SemanticVariable | str) for part in value):
            return tuple(value) if value else ""
        if any(isinstance(part, SemanticVariable) for part in value):
            raise TypeError("has variables among other things than strings")
    return str(value)


def _tuple_type(form: Form) -> Callable[..., tuple[SemanticVariable, ...]]:
    """Fields are named as the outputs, but for names that fields cannot have."""
    title = form.name if form.name.isidentifier() else "Outputs"
    return collections.namedtuple(title, form.outputs, rename=True)
