"""Converts calls as clients submit them to calls of the graph, in the model's chat format.

The chat template is rendered with a sentinel in place of each placeholder, and the rendered text is
split at the sentinels. So the text between placeholders does not depend on their values: it is
tokenized piece by piece, and calls that differ in a value share all tokens before it.

                    rendered text, up to the beginning of the assistant's answer
    user  Q {{input:q}}      ─▶  <user> Q ⟨0⟩ <end> <assistant>          0 = q
    assistant {{output:a}}       ⟨1⟩                                     1 = a
    user  and {{input:r}}    ─▶  ... ⟨1⟩ <end> <user> and ⟨2⟩ <end> <assistant>
    assistant {{output:b}}           └─ text after the previous output ─┘

For each output the template is rendered with the messages before it, and only the text after the
previous output is used. So the prompt is append-only, even if a template renders past answers
differently from the latest one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bros.core.errors import InvalidRequestError
from bros.core.grammars import FIELDS, from_fields
from bros.core.request import SamplingParams
from bros.core.slices import Slices, whole
from bros.semantic.core.nodes import InputPiece, NewCall, OutputPiece
from bros.semantic.core.nodes import Piece as GraphPiece
from bros.semantic.core.template import (
    MAX_OPENINGS,
    Piece,
    Placeholder,
    Text,
    is_output,
    join_texts,
    parse_template,
    too_many_openings,
    with_roles,
)
from bros.semantic.schema import (
    MAX_MESSAGES,
    MAX_PARAMETERS,
    CallKind,
    CallSpec,
    Criteria,
    Parameter,
    Role,
)
from bros.semantic.transforms import Transforms, parse_transforms
from bros.text.chat_format import SAY_NO_MARKERS, ChatFormat, ReasoningStart
from bros.text.tools import NO_TOOLS

ANSWER = Placeholder("output", Role.OUTPUT)
"""The output that is added to a conversation without one."""

MAX_OUTPUTS = 100
"""Outputs of a conversation: for each, the chat template is rendered for all earlier messages."""

MAX_CALL_OUTPUTS = 1_000
"""Outputs of any call: each is an LLM call of the graph, which takes 0.02 ms of the event loop."""

MAX_RENDERED_CHARS = 20_000_000
"""Characters and messages (100 each) that the chat template is rendered with for one call, those of
all outputs together: about 0.2 s on a thread."""

_USER = "user"
_ASSISTANT = "assistant"
_MARK, _END_OF_MARK = "\ue000", "\ue001"  # private use area: no template or model uses them


class _Message(NamedTuple):
    role: str
    pieces: tuple[Piece, ...]


def prompt_pieces(spec: CallSpec, chat: ChatFormat) -> tuple[Piece, ...]:
    """The prompt pieces of a call that is not native; the last one is an output.

    All placeholders have a role. Text after the last output of a template is dropped, as nothing
    depends on it. With `chat`, white space around user messages is dropped too. A conversation
    without an output gets ANSWER as its last piece.

    Raises InvalidRequestError if the call has not exactly one of template and messages, a template
    is invalid, parameters do not match it, there is no output, or the model's chat template rejects
    the conversation or does not keep its placeholders.
    """
    assert not spec.native, "a native call has no template"
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
    """Check that each parameter has its own placeholder."""
    named = {piece.name for piece in pieces if isinstance(piece, Placeholder)}
    names = set(named)
    if (spec.chat or spec.messages is not None) and not any(map(is_output, pieces)):
        names.add(ANSWER.name)
    for index, parameter in enumerate(spec.parameters):
        if parameter.name not in names:
            message = f"There is no placeholder {parameter.name!r}, or it is a parameter twice."
            raise InvalidRequestError(message, param=f"parameters[{index}].name")
        if parameter.role is Role.INPUT and parameter.name not in named:
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
    """A template as a conversation: pieces before an output are a user message, and the output is
    an assistant message."""
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
    """A user message without leading and trailing white space; it must not be empty."""
    pieces = list(said)
    if pieces and isinstance(pieces[0], Text):
        pieces[0] = Text(pieces[0].text.lstrip())
    if pieces and isinstance(pieces[-1], Text):
        pieces[-1] = Text(pieces[-1].text.rstrip())
    kept = tuple(piece for piece in pieces if piece != Text(""))
    if not kept:
        assert isinstance(output, Placeholder)
        message = f"There is no text before the output {output.name!r} for the model to answer."
        raise InvalidRequestError(message, param="template")
    return kept


def _with_contents(spec: CallSpec) -> list[_Message]:
    """The messages of a call, with contents parsed and checked as one template."""
    assert spec.messages is not None
    if not spec.messages:
        raise InvalidRequestError("There must be at least one message.", param="messages")
    if len(spec.messages) > MAX_MESSAGES:
        reason = f"A call has at most {MAX_MESSAGES} messages."
        raise InvalidRequestError(reason, param="messages")
    if sum(message.content.count("{{") for message in spec.messages) > MAX_OPENINGS:
        raise too_many_openings("messages")
    contents = [
        parse_template(message.content, param=f"messages[{index}].content")
        for index, message in enumerate(spec.messages)
    ]
    # The chat template writes text between two messages, so outputs at the border are not
    # adjacent.
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
    """The conversation in the model's chat format, up to its last output.

    The pieces of an assistant message up to its last output are used verbatim after the rendered
    beginning of an answer. Its pieces after that are rendered with the next messages.
    """
    messages = [
        _Message(role, tuple(_escaped(piece, role, chat) for piece in pieces))
        for role, pieces in messages
    ]
    every = [piece for message in messages for piece in message.pieces]
    if (num_outputs := sum(map(is_output, every))) > MAX_OUTPUTS:
        reason = f"The conversation has {num_outputs} outputs, more than {MAX_OUTPUTS}."
        raise InvalidRequestError(reason, param=param)
    if _rendered_chars(messages) > MAX_RENDERED_CHARS:
        reason = (
            f"The conversation is too long for {num_outputs} outputs: the chat template would be "
            f"rendered with more than {MAX_RENDERED_CHARS} characters."
        )
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
                begins = index == 0 and is_output(piece)
                laid_out.append(_beginning_answer(piece) if begins else piece)
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
        laid_out.append(_beginning_answer(ANSWER))
    joined = join_texts(laid_out)
    if any(is_output(before) and is_output(piece) for before, piece in itertools.pairwise(joined)):
        reason = "The model's chat template writes nothing between two of the outputs."
        raise InvalidRequestError(reason, param=param)
    return joined


def _rendered_chars(messages: Sequence[_Message]) -> int:
    """With how many characters the chat template is rendered: for each output with what is before
    it, or once."""
    rendered = so_far = 0
    for message in messages:
        if any(map(is_output, message.pieces)):
            rendered += so_far
        texts = (len(piece.text) for piece in message.pieces if isinstance(piece, Text))
        so_far += _PER_MESSAGE + sum(texts)
    return max(rendered, so_far)


def _beginning_answer(piece: Piece) -> Placeholder:
    assert isinstance(piece, Placeholder)
    return dataclasses.replace(piece, begins_answer=True)


def _escaped(piece: Piece, role: str, chat: ChatFormat) -> Piece:
    if not isinstance(piece, Text):
        return piece
    return Text(chat.escape(piece.text, markers=role in SAY_NO_MARKERS))


class _Sentinels:
    """The sentinels for the placeholders of one conversation, numbered in order."""

    def __init__(self, pieces: Sequence[Piece], param: str) -> None:
        """pieces: all pieces of the conversation; the sentinels do not occur in their texts."""
        texts = "\n".join(piece.text for piece in pieces if isinstance(piece, Text))
        taken = {int(number) for number in re.findall(f"{_MARK}([0-9]{{1,9}}):", texts)}
        number = next(number for number in itertools.count() if number not in taken)
        self._prefix = f"{_MARK}{number}:"
        self._pattern = re.compile(f"{self._prefix}([0-9]+){_END_OF_MARK}")
        self._param = param
        self._placed: list[Placeholder] = []
        self._num_past = 0  # placeholders before the part that `cut` returns next

    def put(self, piece: Piece) -> str:
        """The text of a piece in a message's content: itself, or a new sentinel."""
        if isinstance(piece, Text):
            return piece.text
        self._placed.append(piece)
        return f"{self._prefix}{len(self._placed) - 1}{_END_OF_MARK}"

    def pass_over(self) -> None:
        """The last placeholder is a finished output: `cut` returns only the text after it."""
        self._num_past = len(self._placed)

    def cut(self, text: str) -> list[Piece]:
        """The pieces of a rendered text after the last output passed over.

        Raises InvalidRequestError unless each placeholder occurs once, and on its side of that
        output.
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


_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams)) | FIELDS
_GRAMMAR = FIELDS | {"grammar"}
_UNSUPPORTED = ("n", "logprobs")
"""Sampling parameters that are rejected: a variable has one value, without log probabilities."""

_INTEGERS = ("max_tokens", "min_tokens", "seed", "top_k")


_PER_MESSAGE = 100
"""What a message costs besides its text, in characters."""

_SLICE = 100
"""Calls that are read between two pauses; they take 1 to 2 ms. One with many pieces counts as
several."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated call for the graph.

    is_text: whether its prompt is plain text rather than a conversation.
    variables: placeholder -> variable id.
    wanted: variable id -> criteria, for outputs that are requested with the call.
    text_chars: characters of its constant texts.
    """

    call: NewCall
    is_text: bool
    variables: Mapping[str, str]
    wanted: Mapping[str, Criteria]
    text_chars: int


LONG_CHARS = 10_000
"""A call that is longer, see `size_of`, takes longer than some milliseconds to read."""

_CHARS_PER_PARAMETER = 20


def size_of(spec: CallSpec) -> int:
    """How long it takes to read a call, in characters of a template with nothing but
    placeholders."""
    messages = spec.messages or ()
    return (
        len(spec.template or "")
        + sum(len(message.content) + _PER_MESSAGE for message in messages)
        + _CHARS_PER_PARAMETER * len(spec.parameters)
    )


class SubmissionReader:
    """Validates submitted calls and converts them for the graph."""

    def __init__(
        self, chat: ChatFormat, new_id: Callable[[str], str], max_tokens: int, vocab_size: int
    ) -> None:
        """new_id: makes an id with the given prefix. max_tokens: default of outputs. vocab_size:
        of the model."""
        self._chat = chat
        self._vocab_size = vocab_size
        self._new_id = new_id
        self._max_tokens = max_tokens

    def read(self, specs: Sequence[CallSpec], sampling: Mapping[str, Any]) -> list[Submission]:
        """Convert the calls of one program. sampling: the session's defaults.

        Raises InvalidRequestError with a param such as "requests[2].parameters[0].name".
        """
        return whole(self.reading(specs, sampling))

    def reading(
        self, specs: Sequence[CallSpec], sampling: Mapping[str, Any]
    ) -> Slices[list[Submission]]:
        """`read` in slices: it pauses where the caller may let other work run."""
        cache = _ProgramCache(self._chat, self._vocab_size)
        found: list[Submission] = []
        since_pause = 0
        for index, spec in enumerate(specs):
            try:
                found.append(self._one(spec, sampling, cache))
            except InvalidRequestError as error:
                raise _with_place(f"requests[{index}]", error) from None
            since_pause += found[-1].call.weight
            if since_pause >= _SLICE:
                since_pause = 0
                yield
        return found

    def _one(self, spec: CallSpec, sampling: Mapping[str, Any], cache: _ProgramCache) -> Submission:
        readers = {
            parameter.name: _ParameterReader(i, parameter)
            for i, parameter in enumerate(spec.parameters)
        }
        pieces = _native_pieces(spec) if spec.native else cache.pieces(spec)
        if sum(map(is_output, pieces)) > MAX_CALL_OUTPUTS:
            message = f"A call has at most {MAX_CALL_OUTPUTS} outputs."
            raise InvalidRequestError(message, "parameters" if spec.native else "template")
        defaults = {"max_tokens": self._max_tokens, **_without_none(sampling)}
        _check_names("sampling", spec.sampling)
        defaults = _overridden(defaults, spec.sampling)
        values: dict[str, str] = {}
        names: dict[str, str] = {}
        wanted: dict[str, Criteria] = {}
        made: list[GraphPiece] = []
        text_before = ""
        for piece in pieces:
            if isinstance(piece, Text):
                made.append(piece)
                text_before = piece.text
                continue
            reader = readers.get(piece.name) or _ParameterReader(None, Parameter(name=piece.name))
            transforms = reader.transforms(cache)
            reader.check(piece, native=spec.native)
            parameter = reader.parameter
            variable_id = names.get(piece.name) or parameter.variable or self._new_id("var")
            names[piece.name] = variable_id
            if piece.role is Role.INPUT:
                if parameter.value is not None:
                    values[variable_id] = parameter.value
                made.append(InputPiece(piece.name, variable_id, transforms))
                continue
            params = reader.sampling(defaults, cache.sampling)
            output = OutputPiece(piece.name, variable_id, transforms, params, params.grammar)
            if piece.begins_answer:
                start = self._chat.reasoning_start(text_before)
                output = dataclasses.replace(
                    output,
                    sampling=reader.with_reasoning(params, start, cache),
                    parsing=cache.parsing(start),
                )
            made.append(output)
            if parameter.criteria is not None:
                wanted[variable_id] = parameter.criteria
        kind = CallKind.NATIVE if spec.native else CallKind.LLM
        call = NewCall(
            id=self._new_id("req"), name=spec.name, kind=kind, pieces=tuple(made), values=values
        )
        is_text = spec.messages is None and not spec.chat
        text_chars = sum(len(piece.text) for piece in made if isinstance(piece, Text))
        return Submission(call, is_text, names, wanted, text_chars)


def counted_chars(submissions: Sequence[Submission]) -> Slices[list[int]]:
    """What the texts and sampling parameters of each call of a program take, in characters, in
    slices. Parameters that several calls have in common count for the first one."""
    found: list[int] = []
    counted: set[int] = set()
    for submission in submissions:
        chars = submission.text_chars
        for piece in submission.call.pieces:
            if isinstance(piece, OutputPiece) and id(piece.sampling) not in counted:
                counted.add(id(piece.sampling))
                chars += piece.sampling.num_bytes
        found.append(chars)
        if not len(found) % _SLICE:
            yield
    return found


class _ProgramCache:
    """Caches what the calls of one program have in common: pieces, transforms and sampling."""

    def __init__(self, chat: ChatFormat, vocab_size: int) -> None:
        self._chat = chat
        self._vocab_size = vocab_size
        self.parsing = functools.cache(functools.partial(chat.parsing, NO_TOOLS))
        """(ReasoningStart) -> how to tell the reasoning from the answer."""
        self._with_reasoning: dict[tuple[int, ReasoningStart], SamplingParams] = {}
        self._pieces: dict[Hashable, Sequence[Piece]] = {}
        self._transforms: dict[str, Transforms | None] = {}
        self._sampling: dict[str, SamplingParams] = {}

    def pieces(self, spec: CallSpec) -> Sequence[Piece]:
        """`prompt_pieces`, which depends only on the fields in the key."""
        messages = None if spec.messages is None else tuple(spec.messages)
        roles = tuple((parameter.name, parameter.role) for parameter in spec.parameters)
        key = (spec.template, spec.chat, messages, roles)
        if key not in self._pieces:
            self._pieces[key] = prompt_pieces(spec, self._chat)
        return self._pieces[key]

    def transforms(self, source: str, place: str) -> Transforms | None:
        if source not in self._transforms:
            self._transforms[source] = parse_transforms(source, place)
        return self._transforms[source]

    def sampling(self, **fields: Any) -> SamplingParams:
        key = repr(fields)  # 1 is not True here, and lists can be in it
        if key not in self._sampling:
            self._sampling[key] = _sampling(self._vocab_size, **fields)
        return self._sampling[key]

    def with_reasoning(self, sampling: SamplingParams, start: ReasoningStart) -> SamplingParams:
        """As ChatFormat.with_reasoning. sampling: one of this cache."""
        key = (id(sampling), start)
        if key not in self._with_reasoning:
            self._with_reasoning[key] = self._chat.with_reasoning(sampling, start)
        return self._with_reasoning[key]


class _ParameterReader:
    """Validates one parameter.

    index: its position; None for a placeholder without a parameter.
    """

    def __init__(self, index: int | None, parameter: Parameter) -> None:
        self.parameter = parameter
        self._place = "template" if index is None else f"parameters[{index}]"

    def check(self, piece: Placeholder, *, native: bool) -> None:
        """Raises InvalidRequestError if the parameter does not fit its placeholder."""
        parameter = self.parameter
        if piece.role is Role.OUTPUT:
            if parameter.value is not None:
                self._refuse("value", f"The output {piece.name!r} cannot have a value.")
            if piece.sampling is not None and parameter.sampling is None:
                message = (
                    f"The output {piece.name!r} refers to the sampling parameters "
                    f"{piece.sampling!r}, but its parameter has no sampling."
                )
                self._refuse("sampling", message)
        else:
            if parameter.value is not None and parameter.variable is not None:
                message = f"The input {piece.name!r} has both a variable and a value."
                self._refuse("value", message)
            if parameter.criteria is not None:
                self._refuse("criteria", f"The input {piece.name!r} cannot have criteria.")
        if parameter.sampling is not None and (native or piece.role is Role.INPUT):
            message = f"{piece.name!r} is not generated, so it has no sampling parameters."
            self._refuse("sampling", message)
        if parameter.transforms is not None and native:
            self._refuse("transforms", "Values of native functions are transformed by the client.")

    def transforms(self, cache: _ProgramCache) -> Transforms | None:
        source = self.parameter.transforms
        return cache.transforms(source, f"{self._place}.transforms") if source else None

    def sampling(
        self, defaults: Mapping[str, Any], make: Callable[..., SamplingParams]
    ) -> SamplingParams:
        """The sampling parameters of an output, with the call's as defaults. make: makes them of
        their fields."""
        place = f"{self._place}.sampling"
        own = self.parameter.sampling or {}
        _check_names(place, own)
        fields = _overridden(defaults, own)
        try:
            asked = {name: fields.pop(name) for name in FIELDS.intersection(fields)}
            if asked:
                fields["grammar"] = from_fields(asked)
            return make(**fields)
        except InvalidRequestError as error:
            raise self._placed(error) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(
                f"The sampling parameters are wrong: {error}", place
            ) from None

    def with_reasoning(
        self, sampling: SamplingParams, start: ReasoningStart, cache: _ProgramCache
    ) -> SamplingParams:
        """As `_ProgramCache.with_reasoning`."""
        try:
            return cache.with_reasoning(sampling, start)
        except InvalidRequestError as error:
            raise self._placed(error) from None

    def _placed(self, error: InvalidRequestError) -> InvalidRequestError:
        """The error about a sampling parameter, with its place in the call."""
        own = self.parameter.sampling or {}
        if error.param is None:
            return InvalidRequestError(error.message)
        name = error.param.split(".")[0]
        is_own = not own.keys().isdisjoint(_GRAMMAR) if name in _GRAMMAR else name in own
        where = f"{self._place}.sampling" if is_own else "sampling"
        return InvalidRequestError(error.message, f"{where}.{error.param}")

    def _refuse(self, field: str, message: str) -> None:
        raise InvalidRequestError(message, f"{self._place}.{field}")


def check_sampling(sampling: Mapping[str, Any], vocab_size: int) -> int:
    """Returns their memory in bytes. Raises InvalidRequestError (param "sampling.…") for invalid
    sampling parameters."""
    _check_names("sampling", sampling)
    reader = _ParameterReader(None, Parameter(name=""))
    make = functools.partial(_sampling, vocab_size)
    return reader.sampling(_without_none(sampling), make).num_bytes


def _sampling(vocab_size: int, **fields: Any) -> SamplingParams:
    made = SamplingParams(**fields)
    made.check_vocabulary(vocab_size)
    return made


def _overridden(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters, those of `own` first. As an output has one grammar, one in `own`
    replaces that in `defaults`, also if another field asks for it."""
    own = _without_none(own)
    if not own.keys().isdisjoint(_GRAMMAR):
        defaults = {name: value for name, value in defaults.items() if name not in _GRAMMAR}
    return {**defaults, **own}


def _without_none(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sampling.items() if value is not None}


def _check_names(place: str, sampling: Mapping[str, Any]) -> None:
    for name, value in sampling.items():
        if name not in _SAMPLING:
            known = ", ".join(sorted(_SAMPLING.difference(_UNSUPPORTED)))
            raise InvalidRequestError(
                f"There is no sampling parameter {name[:50]!r}; the parameters are {known}.",
                f"{place}.{name}",
            )
        if name in _UNSUPPORTED and value not in (None, 1 if name == "n" else None):
            message = f"An output is one text, so {name} is not supported."
            raise InvalidRequestError(message, f"{place}.{name}")
        if name in _INTEGERS and value is not None and type(value) is not int:
            message = f"{name} must be an integer, got {value!r}."
            raise InvalidRequestError(message, f"{place}.{name}")


def _native_pieces(spec: CallSpec) -> Sequence[Piece]:
    """A placeholder for each parameter of a native call."""
    if spec.template is not None or spec.messages is not None:
        raise InvalidRequestError("A native call has parameters only.", "native")
    if len(spec.parameters) > MAX_PARAMETERS:
        message = f"A call has at most {MAX_PARAMETERS} parameters."
        raise InvalidRequestError(message, "parameters")
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


def _with_place(place: str, error: InvalidRequestError) -> InvalidRequestError:
    """The same error with `place` in front of its param."""
    param = place if error.param is None else f"{place}.{error.param}"
    return InvalidRequestError(error.message, param, error.code)
