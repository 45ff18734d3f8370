"""LangChain's prompt templates as semantic functions."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig

from bros.semantic.client.functions import (
    as_argument,
    check_mapping,
    check_sampling,
    check_transforms,
    naming_argument,
)
from bros.semantic.client.program import FunctionSpec, SemanticVariable, agather, gather, make_call
from bros.semantic.core.template import Piece, Placeholder, Text
from bros.semantic.schema import Perf, Role

# {{name}}, or without escapes, which the value gets in neither case, {{{name}}} and {{&name}}.
_MUSTACHE = re.compile(
    r"\{\{\{\s*(?P<triple>[^\W\d]\w*)\s*\}\}\}|\{\{&?\s*(?P<name>[^\W\d]\w*)\s*\}\}"
)

Part = tuple[str | None, tuple[Piece, ...]]
"""A message role and its pieces; a plain-text prompt has no role."""


class SemanticPrompt(Runnable[Any, SemanticVariable]):
    """A prompt template as a semantic function of the current session (`with Session(...)`).

    Invoked with its variables, strings or SemanticVariables, it returns the SemanticVariable of the
    answer at once. It does not render the template, and nothing runs until a value is requested
    (`Value`). A template with one variable also accepts its bare value, so prompts compose with
    `|`.

    prompt: a ChatPromptTemplate, or a PromptTemplate whose text the model continues.
    name: as of `semantic_function`.
    output: name of the answer.
    sampling: as of `semantic_function`.
    transforms: as of `semantic_function`.
    Raises ValueError for templates that cannot be sent unrendered: jinja2, formats such as {x:>3},
    examples of a FewShotPromptTemplate; and for invalid sampling or transforms.
    """

    def __init__(
        self,
        prompt: PromptTemplate | ChatPromptTemplate,
        *,
        name: str | None = None,
        output: str = "output",
        sampling: Mapping[str, Any] | None = None,
        transforms: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(prompt, PromptTemplate | ChatPromptTemplate):
            raise ValueError(f"{type(prompt).__name__} cannot be sent unrendered")
        self.name = name or "prompt"
        self._prompt = prompt
        self._output = output
        self._inputs = tuple(prompt.input_variables)
        if output in self._inputs or output in prompt.partial_variables:
            raise ValueError(f"{output!r} is a variable of the prompt; name the output otherwise")
        check_mapping("sampling", sampling or {})
        check_mapping("transforms", transforms or {})
        self._sampling = dict(sampling or {})
        self._transforms = dict(transforms or {})
        check_sampling(self._sampling, {})
        check_transforms(self._transforms, {*self._inputs, *prompt.partial_variables, output})
        if isinstance(prompt, PromptTemplate):
            self._parts: list[Part | MessagesPlaceholder] = [(None, _pieces(prompt))]
        else:
            self._parts = [_part(message) for message in prompt.messages]

    def invoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> SemanticVariable:
        return self._call_with_config(self._call, input, config)

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> SemanticVariable:
        return self.invoke(input, config)

    def _call(self, given: Any) -> SemanticVariable:
        arguments = self._arguments(given)
        parts: list[Part] = []
        for part in self._parts:
            if isinstance(part, MessagesPlaceholder):
                parts += _history_parts(arguments.pop(part.variable_name, None) or [], part)
            else:
                parts.append(part)
        if not parts:
            raise ValueError(f"{self.name}: the conversation has no messages")
        function = FunctionSpec(
            name=self.name or "prompt",
            outputs=(self._output,),
            parts=_with_answer(parts, self._output),
            sampling=self._sampling,
            transforms=self._transforms,
        )
        return make_call(function, arguments, {}).outputs[self._output]

    def _arguments(self, given: Any) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            if len(self._inputs) != 1:
                names = ", ".join(self._inputs) or "no variables"
                raise TypeError(f"{self.name}: a mapping with {names} is needed")
            given = {self._inputs[0]: given}
        missing = [name for name in self._inputs if name not in given]
        if missing:
            raise KeyError(f"{self.name}: {', '.join(missing)} is missing")
        partial = {
            name: value() if callable(value) else value
            for name, value in self._prompt.partial_variables.items()
        }
        used = {
            piece.name
            for part in self._parts
            if isinstance(part, tuple)
            for piece in part[1]
            if isinstance(piece, Placeholder)
        }
        histories = {p.variable_name for p in self._parts if isinstance(p, MessagesPlaceholder)}
        arguments = {}
        for name, value in {**partial, **given}.items():
            if name in histories:
                arguments[name] = value
            elif name in used:
                with naming_argument(f"{self.name}: {name}"):
                    arguments[name] = as_argument("None" if value is None else value)
        return arguments


class Value(Runnable[Any, Any]):
    """Waits for a SemanticVariable, or for all in a list or mapping, whose other values stay; can
    stream a single one.

    perf: as of SemanticVariable.get.
    timeout: as of SemanticVariable.get.
    """

    def __init__(self, perf: Perf | str | None = None, *, timeout: float | None = None) -> None:
        self._perf = perf
        self._timeout_s = timeout

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return self._call_with_config(self._get, input, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return await self._acall_with_config(self._aget, input, config)

    def stream(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[Any]:
        if isinstance(input, SemanticVariable):
            yield from input.stream(self._perf)
        else:
            yield self.invoke(input, config)

    async def astream(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        if isinstance(input, SemanticVariable):
            async for piece in input.astream(self._perf):
                yield piece
        else:
            yield await self.ainvoke(input, config)

    def _get(self, given: Any) -> Any:
        variables, shape = _flatten(given)
        if not variables:
            return shape([])
        return shape(gather(*variables, perf=self._perf, timeout=self._timeout_s))

    async def _aget(self, given: Any) -> Any:
        variables, shape = _flatten(given)
        if not variables:
            return shape([])
        return shape(await agather(*variables, perf=self._perf, timeout=self._timeout_s))


def _flatten(given: Any) -> tuple[list[SemanticVariable], Callable[[list[str]], Any]]:
    """The variables in an input, and a function that puts their values into the same structure."""
    if isinstance(given, SemanticVariable):
        return [given], lambda values: values[0]
    if isinstance(given, Mapping):
        variables, shape = _flatten(list(given.values()))
        return variables, lambda values: dict(zip(given, shape(values), strict=True))
    if isinstance(given, list | tuple):
        places = [n for n, value in enumerate(given) if isinstance(value, SemanticVariable)]

        def fill(values: list[str]) -> list[Any]:
            filled = list(given)
            for place, value in zip(places, values, strict=True):
                filled[place] = value
            return filled

        return [given[place] for place in places], fill
    raise TypeError(f"Value needs variables, not {type(given).__name__}")


def _part(message: Any) -> Part | MessagesPlaceholder:
    """One message of a chat template."""
    if isinstance(message, MessagesPlaceholder):
        return message
    if isinstance(message, BaseMessage):
        return _role_of(message), (Text(_content(message)),)
    prompt = getattr(message, "prompt", None)
    if not isinstance(prompt, PromptTemplate):
        raise ValueError(f"{type(message).__name__} cannot be sent unrendered; only text can")
    # Formatting an example message is the only way to get the role of every message template.
    example = message.format(**dict.fromkeys(prompt.input_variables, ""))
    return _role_of(example), _pieces(prompt)


def _history_parts(messages: Sequence[Any], place: MessagesPlaceholder) -> list[Part]:
    if not all(isinstance(message, BaseMessage) for message in messages):
        raise TypeError(f"{place.variable_name} is a list of messages")
    latest = messages if place.n_messages is None else messages[-place.n_messages :]
    return [(_role_of(message), (Text(_content(message)),)) for message in latest]


def _with_answer(parts: Sequence[Part], output: str) -> tuple[Part, ...]:
    """Append the answer: to a last assistant message or a plain text, else as a new message."""
    answer = Placeholder(output, Role.OUTPUT)
    role, pieces = parts[-1]
    if role is None or role == "assistant":
        return (*parts[:-1], (role, (*pieces, answer)))
    return (*parts, ("assistant", (answer,)))


def _role_of(message: BaseMessage) -> str:
    return str(convert_to_openai_messages([message])[0]["role"])


def _content(message: BaseMessage) -> str:
    if not isinstance(message.content, str):
        raise ValueError("messages with other contents than text cannot be sent")
    return message.content


def _pieces(prompt: PromptTemplate) -> tuple[Piece, ...]:
    if prompt.template_format == "f-string":
        return tuple(_format_pieces(prompt.template))
    if prompt.template_format == "mustache":
        return tuple(_mustache_pieces(prompt.template))
    raise ValueError(f"{prompt.template_format} templates cannot be sent unrendered")


def _format_pieces(source: str) -> Iterator[Piece]:
    text = ""
    for literal, name, spec, conversion in Formatter().parse(source):
        text += literal
        if name is None:
            continue
        if not name.isidentifier() or spec or conversion:
            raise ValueError(f"{{{name}}}: only plain names can be sent unrendered")
        if text:
            yield Text(text)
        yield Placeholder(name, Role.INPUT)
        text = ""
    if text:
        yield Text(text)


def _mustache_pieces(source: str) -> Sequence[Piece]:
    pieces: list[Piece] = []
    at = 0
    for found in _MUSTACHE.finditer(source):
        pieces += [Text(source[at : found.start()])] if found.start() > at else []
        pieces.append(Placeholder(found["triple"] or found["name"], Role.INPUT))
        at = found.end()
    pieces += [Text(source[at:])] if at < len(source) else []
    if any("{{" in piece.text for piece in pieces if isinstance(piece, Text)):
        raise ValueError("of mustache, only plain names can be sent unrendered")
    return pieces
