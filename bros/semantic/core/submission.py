"""From calls as clients describe them to calls of the graph, in the model's chat format.

A chat template is run with a sentinel in place of each placeholder, and its text is cut there.
So what stands between placeholders never depends on their values: it can be tokenized piece by
piece, and calls that differ in a value share all tokens up to it.

                    what the template writes, up to where the assistant's answer begins
    user  Q {{input:q}}      ─▶  <user> Q ⟨0⟩ <end> <assistant>          0 = q
    assistant {{output:a}}       ⟨1⟩                                     1 = a
    user  and {{input:r}}    ─▶  ... ⟨1⟩ <end> <user> and ⟨2⟩ <end> <assistant>
    assistant {{output:b}}           └─ what follows the output before ─┘

Before each output the template is run for the messages up to there, and only what follows the
output before is taken, so that a sequence only ever grows, even if a template writes earlier
answers differently once they are past.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from bros.core.errors import InvalidRequestError
from bros.core.request import SamplingParams
from bros.semantic.core.nodes import InputPiece, NewCall, OutputPiece
from bros.semantic.core.nodes import Piece as GraphPiece
from bros.semantic.core.template import (
    Piece,
    Placeholder,
    Text,
    is_output,
    parse_template,
    with_roles,
)
from bros.semantic.schema import CallKind, CallSpec, Criteria, Parameter, Role
from bros.semantic.transforms import Transforms, parse_transforms

ANSWER = Placeholder("output", Role.OUTPUT)
"""What the model says to a conversation that has no output of its own."""

MAX_OUTPUTS = 100
"""Of a conversation: the chat template runs once for each, over all that is before it."""

_USER = "user"
_ASSISTANT = "assistant"
_MARK, _END_OF_MARK = "\ue000", "\ue001"  # private use: no template or model knows them


class ChatFormat(Protocol):
    """How a model writes conversations; engine.tokenizer.Tokenizer is one."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> str:
        """The text up to where the assistant's answer begins. Raises InvalidRequestError if the
        model does not take these messages."""
        ...


class _Message(NamedTuple):
    role: str
    pieces: tuple[Piece, ...]


def lay_out(spec: CallSpec, chat: ChatFormat) -> tuple[Piece, ...]:
    """The pieces of a call that is not native, as the model reads them; the last is an output.

    All roles are known. What follows the last output of a template is left out, as nothing
    depends on it. With `chat` the white space around what the user says is left out too; a
    template may do that to any message. A conversation without an output ends with ANSWER.

    Raises InvalidRequestError if the call has not exactly one of template and messages, a
    template is wrong, parameters do not fit it, there is nothing to generate, or the model's
    chat template does not take the conversation or does not keep its placeholders.
    """
    assert not spec.native, "a native call has no text"
    if (spec.template is None) == (spec.messages is None):
        raise InvalidRequestError("A call takes either template or messages.", param="template")
    if spec.messages is None:
        assert spec.template is not None
        pieces = with_roles(parse_template(spec.template), _given_roles(spec))
        _check_parameters(spec, pieces)
        if not spec.chat:
            return _up_to_last_output(pieces)
        return _render(_dialogue(pieces), chat, param="template")
    messages = _with_contents(spec)
    _check_parameters(spec, [piece for message in messages for piece in message.pieces])
    return _render(messages, chat, param="messages")


def _given_roles(spec: CallSpec) -> dict[str, Role | None]:
    return {parameter.name: parameter.role for parameter in spec.parameters}


def _check_parameters(spec: CallSpec, pieces: Sequence[Piece]) -> None:
    """Each parameter belongs to a placeholder of its own."""
    names = {piece.name for piece in pieces if isinstance(piece, Placeholder)}
    if (spec.chat or spec.messages is not None) and not any(map(is_output, pieces)):
        names.add(ANSWER.name)
    for index, parameter in enumerate(spec.parameters):
        if parameter.name not in names:
            message = f"There is no placeholder {parameter.name!r}, or another parameter is for it."
            raise InvalidRequestError(message, param=f"parameters[{index}].name")
        if parameter.role is Role.INPUT and not _is_named(parameter.name, pieces):
            message = f"{parameter.name!r} is the model's answer, not an input."
            raise InvalidRequestError(message, param=f"parameters[{index}].role")
        names.remove(parameter.name)


def _is_named(name: str, pieces: Sequence[Piece]) -> bool:
    return any(isinstance(piece, Placeholder) and piece.name == name for piece in pieces)


def _up_to_last_output(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    outputs = [index for index, piece in enumerate(pieces) if is_output(piece)]
    if not outputs:
        message = "The template has no output: write {{output:name}} where the model shall go on."
        raise InvalidRequestError(message, param="template")
    return tuple(pieces[: outputs[-1] + 1])


def _dialogue(pieces: Sequence[Piece]) -> list[_Message]:
    """What stands before an output is what the user says, the output is the answer."""
    messages: list[_Message] = []
    said: list[Piece] = []
    for piece in pieces:
        if is_output(piece):
            messages += _Message(_USER, _stripped(said, piece)), _Message(_ASSISTANT, (piece,))
            said = []
        else:
            said.append(piece)
    return messages or [_Message(_USER, _stripped(said, ANSWER))]


def _stripped(said: Sequence[Piece], output: Piece) -> tuple[Piece, ...]:
    """Without white space of the template at both ends; there must be something left."""
    pieces = list(said)
    if pieces and isinstance(pieces[0], Text):
        pieces[0] = Text(pieces[0].text.lstrip())
    if pieces and isinstance(pieces[-1], Text):
        pieces[-1] = Text(pieces[-1].text.rstrip())
    kept = tuple(piece for piece in pieces if piece != Text(""))
    if not kept:
        assert isinstance(output, Placeholder)
        message = f"Nothing is said before the output {output.name!r}, which is to answer it."
        raise InvalidRequestError(message, param="template")
    return kept


def _with_contents(spec: CallSpec) -> list[_Message]:
    """The messages of a call, their contents parsed and checked as one template."""
    assert spec.messages is not None
    if not spec.messages:
        raise InvalidRequestError("There must be at least one message.", param="messages")
    contents = [
        parse_template(message.content, param=f"messages[{index}].content")
        for index, message in enumerate(spec.messages)
    ]
    # Between two messages stands what the chat template writes there, so outputs at the border
    # are not neighbours.
    border = Text("\n")
    joined = [piece for content in contents for piece in (*content, border)]
    resolved = iter(with_roles(joined, _given_roles(spec), param="messages"))
    messages = []
    for index, (message, content) in enumerate(zip(spec.messages, contents, strict=True)):
        pieces = tuple(next(resolved) for _ in content)
        next(resolved)  # the border
        if message.role != _ASSISTANT and any(map(is_output, pieces)):
            text = f"Only an {_ASSISTANT} message can hold an output, not one of {message.role!r}."
            raise InvalidRequestError(text, param=f"messages[{index}].content")
        messages.append(_Message(message.role, pieces))
    return messages


def _render(messages: Sequence[_Message], chat: ChatFormat, param: str) -> tuple[Piece, ...]:
    """The conversation in the format of the model, up to its last output.

    What an assistant message holds before its last output stands after the beginning of an answer
    as it is; what it holds after that comes with the next messages.
    """
    every = [piece for message in messages for piece in message.pieces]
    if (num_outputs := sum(map(is_output, every))) > MAX_OUTPUTS:
        reason = f"The conversation has {num_outputs} outputs, more than {MAX_OUTPUTS}."
        raise InvalidRequestError(reason, param=param)
    sentinels = _Sentinels(every, param)
    laid_out: list[Piece] = []
    history: list[dict[str, str]] = []
    for message in messages:
        end = max((i + 1 for i, piece in enumerate(message.pieces) if is_output(piece)), default=0)
        if end:
            laid_out += sentinels.cut(chat.render_chat(history))
        content = ""
        for index, piece in enumerate(message.pieces):
            content += sentinels.put(piece)
            if index < end:
                laid_out.append(piece)
            if index == end - 1:
                sentinels.pass_over()
        history.append({"role": message.role, "content": content})
    if not any(map(is_output, laid_out)):
        laid_out += sentinels.cut(chat.render_chat(history))
        if _is_named(ANSWER.name, laid_out):
            reason = (
                f"The answer would have the name {ANSWER.name!r}, which an input has already: "
                "rename it, or write an assistant message with an output."
            )
            raise InvalidRequestError(reason, param=param)
        laid_out.append(ANSWER)
    return _merged(laid_out, param)


class _Sentinels:
    """Stand-ins for the placeholders of one conversation, numbered in order."""

    def __init__(self, pieces: Sequence[Piece], param: str) -> None:
        """pieces: all there are, none of whose texts may look like a sentinel."""
        texts = "\n".join(piece.text for piece in pieces if isinstance(piece, Text))
        taken = {int(number) for number in re.findall(f"{_MARK}([0-9]{{1,9}}):", texts)}
        number = next(number for number in itertools.count() if number not in taken)
        self._prefix = f"{_MARK}{number}:"
        self._pattern = re.compile(f"{self._prefix}([0-9]+){_END_OF_MARK}")
        self._param = param
        self._placed: list[Placeholder] = []
        self._num_past = 0  # how many come before what is cut next

    def put(self, piece: Piece) -> str:
        """What stands for a piece in the content of a message."""
        if isinstance(piece, Text):
            return piece.text
        self._placed.append(piece)
        return f"{self._prefix}{len(self._placed) - 1}{_END_OF_MARK}"

    def pass_over(self) -> None:
        """The last placeholder is an output whose text before is settled: cut after it."""
        self._num_past = len(self._placed)

    def cut(self, text: str) -> list[Piece]:
        """The pieces of what a chat template wrote, after the last output passed over.

        Raises InvalidRequestError unless each placeholder is there once, in that part if it
        belongs there.
        """
        parts = self._pattern.split(text)  # text, number, text, number, ..., text
        numbers = [int(number) for number in parts[1::2]]
        past = numbers[: self._num_past]
        self._check(numbers, past)
        pieces: list[Piece] = [Text(parts[2 * len(past)])]
        for number, following in zip(
            numbers[len(past) :], parts[2 * len(past) + 2 :: 2], strict=True
        ):
            pieces += self._placed[number], Text(following)
        return [piece for piece in pieces if piece != Text("")]

    def _check(self, numbers: Sequence[int], past: Sequence[int]) -> None:
        counts, are_past = Counter(numbers), set(past)
        for number, placeholder in enumerate(self._placed):
            count = counts[number]
            if count != 1:
                found = "leaves it out" if count == 0 else f"writes it {count} times"
                self._refuse(placeholder, found)
            if (number < self._num_past) != (number in are_past):
                self._refuse(placeholder, "moves it past an output")
        if past and past[-1] != self._num_past - 1:
            self._refuse(self._placed[self._num_past - 1], "writes it before what precedes it")

    def _refuse(self, placeholder: Placeholder, found: str) -> None:
        raise InvalidRequestError(
            f"The model's chat template does not keep the placeholder {placeholder.name!r}: it "
            f"{found}.",
            param=self._param,
        )


def _merged(pieces: Sequence[Piece], param: str) -> tuple[Piece, ...]:
    """Texts that follow each other as one; outputs that do are refused."""
    merged: list[Piece] = []
    for piece in pieces:
        before = merged[-1] if merged else None
        if isinstance(piece, Text) and isinstance(before, Text):
            merged[-1] = Text(before.text + piece.text)
        elif is_output(piece) and is_output(before):
            message = "The model's chat template writes nothing between two of the outputs."
            raise InvalidRequestError(message, param=param)
        else:
            merged.append(piece)
    return tuple(merged)


_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_ONE_TEXT = ("n", "logprobs")
"""A variable has one value, and no client sees anything else that was generated."""

_INTEGERS = ("max_tokens", "min_tokens", "seed", "top_k")


@dataclass(frozen=True, slots=True)
class Submission:
    """A call that is ready for the graph.

    is_text: its prompt is a text of its own and no conversation in the model's format.
    variables: placeholder -> id.
    wanted: variable -> how soon.
    text_chars: of the template alone.
    """

    call: NewCall
    is_text: bool
    variables: Mapping[str, str]
    wanted: Mapping[str, Criteria]
    text_chars: int


class Submitter:
    """Reads calls; changes nothing."""

    def __init__(self, chat: ChatFormat, new_id: Callable[[str], str], max_tokens: int) -> None:
        """new_id: an id that begins like this. max_tokens: of outputs that do not say."""
        self._chat = chat
        self._new_id = new_id
        self._max_tokens = max_tokens

    def read(self, specs: Sequence[CallSpec], sampling: Mapping[str, Any]) -> list[Submission]:
        """sampling: the session's. Raises InvalidRequestError, param such as
        "requests[2].parameters[0].name"."""
        common = _Common(self._chat)
        found = []
        for index, spec in enumerate(specs):
            try:
                found.append(self._one(spec, sampling, common))
            except InvalidRequestError as error:
                raise _within(f"requests[{index}]", error) from None
        return found

    def _one(self, spec: CallSpec, sampling: Mapping[str, Any], common: _Common) -> Submission:
        drafts = {
            parameter.name: _Draft(i, parameter) for i, parameter in enumerate(spec.parameters)
        }
        pieces = _native_pieces(spec) if spec.native else common.pieces(spec)
        defaults = {"max_tokens": self._max_tokens, **_given(sampling)}
        _check_names("sampling", spec.sampling)
        defaults |= _given(spec.sampling)
        values: dict[str, str] = {}
        names: dict[str, str] = {}
        wanted: dict[str, Criteria] = {}
        made: list[GraphPiece] = []
        for piece in pieces:
            if isinstance(piece, Text):
                made.append(piece)
                continue
            draft = drafts.get(piece.name) or _Draft(None, Parameter(name=piece.name))
            transforms = draft.transforms(common)
            draft.check(piece, native=spec.native)
            parameter = draft.parameter
            variable_id = names.get(piece.name) or parameter.variable or self._new_id("var")
            names[piece.name] = variable_id
            if piece.role is Role.INPUT:
                if parameter.value is not None:
                    values[variable_id] = parameter.value
                made.append(InputPiece(piece.name, variable_id, transforms))
                continue
            params = draft.sampling(defaults, common.sampling)
            made.append(OutputPiece(piece.name, variable_id, transforms, params))
            if parameter.criteria is not None:
                wanted[variable_id] = parameter.criteria
        kind = CallKind.NATIVE if spec.native else CallKind.LLM
        call = NewCall(
            id=self._new_id("req"), name=spec.name, kind=kind, pieces=tuple(made), values=values
        )
        is_text = spec.messages is None and not spec.chat
        text_chars = sum(len(piece.text) for piece in made if isinstance(piece, Text))
        return Submission(call, is_text, names, wanted, text_chars)


class _Common:
    """What calls of one program have in common, worked out once; what is wrong raises each time."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._pieces: dict[Hashable, Sequence[Piece]] = {}
        self._transforms: dict[str, Transforms | None] = {}
        self._sampling: dict[str, SamplingParams] = {}

    def pieces(self, spec: CallSpec) -> Sequence[Piece]:
        """`lay_out`, which looks at nothing else of a call than is in the key."""
        messages = None if spec.messages is None else tuple(spec.messages)
        roles = tuple((parameter.name, parameter.role) for parameter in spec.parameters)
        key = (spec.template, spec.chat, messages, roles)
        if key not in self._pieces:
            self._pieces[key] = lay_out(spec, self._chat)
        return self._pieces[key]

    def transforms(self, source: str, place: str) -> Transforms | None:
        if source not in self._transforms:
            self._transforms[source] = parse_transforms(source, place)
        return self._transforms[source]

    def sampling(self, **fields: Any) -> SamplingParams:
        key = repr(fields)  # 1 is not True here, and lists can be in it
        if key not in self._sampling:
            self._sampling[key] = SamplingParams(**fields)
        return self._sampling[key]


class _Draft:
    """One parameter. index: which one of its call; None: nothing is said of the placeholder."""

    def __init__(self, index: int | None, parameter: Parameter) -> None:
        self.parameter = parameter
        self._place = "template" if index is None else f"parameters[{index}]"

    def check(self, piece: Placeholder, *, native: bool) -> None:
        """Raises InvalidRequestError if the parameter does not fit what it is for."""
        parameter = self.parameter
        if piece.role is Role.OUTPUT:
            if parameter.value is not None:
                self._refuse("value", f"The output {piece.name!r} cannot have a value.")
            if piece.sampling is not None and parameter.sampling is None:
                message = (
                    f"The output {piece.name!r} refers to the sampling parameters "
                    f"{piece.sampling!r}, which are not there: give them with its parameter."
                )
                self._refuse("sampling", message)
        else:
            if parameter.value is not None and parameter.variable is not None:
                message = f"The input {piece.name!r} has a variable and a value; one must do."
                self._refuse("value", message)
            if parameter.criteria is not None:
                self._refuse("criteria", f"The input {piece.name!r} cannot have criteria.")
        if parameter.sampling is not None and (native or piece.role is Role.INPUT):
            message = f"{piece.name!r} is not generated, so it has no sampling parameters."
            self._refuse("sampling", message)
        if parameter.transforms is not None and native:
            self._refuse("transforms", "Values of native functions are transformed by the client.")

    def transforms(self, common: _Common) -> Transforms | None:
        source = self.parameter.transforms
        return common.transforms(source, f"{self._place}.transforms") if source else None

    def sampling(
        self, defaults: Mapping[str, Any], make: Callable[..., SamplingParams] = SamplingParams
    ) -> SamplingParams:
        """Of an output, on top of its call's."""
        place = f"{self._place}.sampling"
        own = self.parameter.sampling or {}
        _check_names(place, own)
        fields = {**defaults, **_given(own)}
        try:
            return make(**fields)
        except InvalidRequestError as error:
            where = place if error.param in own else "sampling"
            raise InvalidRequestError(
                error.message, None if error.param is None else f"{where}.{error.param}"
            ) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(
                f"The sampling parameters are wrong: {error}", place
            ) from None

    def _refuse(self, field: str, message: str) -> None:
        raise InvalidRequestError(message, f"{self._place}.{field}")


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError (param "sampling.…") if these are no sampling parameters."""
    _check_names("sampling", sampling)
    _Draft(None, Parameter(name="")).sampling(_given(sampling))


def _given(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sampling.items() if value is not None}


def _check_names(place: str, sampling: Mapping[str, Any]) -> None:
    for name, value in sampling.items():
        if name not in _SAMPLING:
            known = ", ".join(sorted(_SAMPLING.difference(_ONE_TEXT)))
            raise InvalidRequestError(
                f"There is no sampling parameter {name[:50]!r}; there are {known}.",
                f"{place}.{name}",
            )
        if name in _ONE_TEXT and value not in (None, 1 if name == "n" else None):
            message = f"An output is one text, so {name} cannot be asked for."
            raise InvalidRequestError(message, f"{place}.{name}")
        if name in _INTEGERS and value is not None and type(value) is not int:
            message = f"{name} must be an integer, got {value!r}."
            raise InvalidRequestError(message, f"{place}.{name}")


def _native_pieces(spec: CallSpec) -> Sequence[Piece]:
    """One placeholder for each parameter."""
    if spec.template is not None or spec.messages is not None:
        raise InvalidRequestError("A native call has parameters only.", "native")
    pieces: list[Piece] = []
    names: set[str] = set()
    for index, parameter in enumerate(spec.parameters):
        if parameter.name in names:
            message = f"There are two parameters {parameter.name!r}."
            raise InvalidRequestError(message, f"parameters[{index}].name")
        names.add(parameter.name)
        pieces.append(Placeholder(parameter.name, parameter.role or Role.INPUT))
    if not any(isinstance(p, Placeholder) and p.role is Role.OUTPUT for p in pieces):
        raise InvalidRequestError("A native call must set at least one output.", "parameters")
    return pieces


def _within(place: str, error: InvalidRequestError) -> InvalidRequestError:
    """The same error, of a part of a larger whole."""
    param = place if error.param is None else f"{place}.{error.param}"
    return InvalidRequestError(error.message, param, error.code)
