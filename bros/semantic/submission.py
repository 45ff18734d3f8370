"""From calls as clients describe them to calls of the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bros.core.errors import InvalidRequestError
from bros.core.request import SamplingParams
from bros.semantic.conversation import ChatFormat, lay_out
from bros.semantic.nodes import CallKind, InputPiece, NewCall, OutputPiece
from bros.semantic.nodes import Piece as GraphPiece
from bros.semantic.program import CallSpec, Criteria, Parameter, Role
from bros.semantic.template import Piece, Placeholder, Text
from bros.semantic.transforms import Transforms, parse_transforms

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_ONE_TEXT = ("n", "logprobs")
"""A variable has one value, and nobody sees anything else of what was generated."""

_INTEGERS = ("max_tokens", "min_tokens", "seed", "top_k")


@dataclass(frozen=True, slots=True)
class Submission:
    """A call that is ready for the graph.

    is_text: its prompt is a text of its own and no conversation in the model's format.
    variables: placeholder -> id. wanted: variable -> how soon. text_chars: of the template alone.
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
