"""Wire models of sessions: pydantic models derived from the records of bros.semantic.schema.

`read(CreateSession, fields)` returns the record, or raises InvalidRequestError naming the first
wrong field; unknown fields are refused. The same models describe the API in /openapi.json:
`BODIES[CreateSession]`, `REPLIES[SessionView]`.

Pydantic cannot validate into the records directly: in strict mode, where a string is not a number,
it accepts only dataclass instances for a dataclass, and no parsed JSON objects.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    create_model,
)
from pydantic_core import CoreSchema, PydanticCustomError, to_json
from starlette.responses import Response

from bros.core.errors import InvalidRequestError
from bros.core.grammars import FIELDS
from bros.core.request import SamplingParams
from bros.semantic import schema
from bros.semantic.schema import CallSpec, Criteria, Perf, Sampling, ValueBounds, wire_form
from bros.server.batches.schema import Metadata
from bros.server.http import validate
from bros.server.openai.schema import BaseSamplingFields, ClosedModel, GrammarFields

T = TypeVar("T")

NO_FIELDS: Mapping[tuple[type, str], Any] = MappingProxyType({})
_PERFS = tuple(perf.value for perf in Perf)


def _check_perf(value: object) -> Perf:
    """The name of a criterion in any case (the Parrot paper writes LATENCY)."""
    if isinstance(value, str) and value.lower() in _PERFS:
        return Perf(value.lower())
    kind = "perf_value" if isinstance(value, str) else "perf_type"
    raise PydanticCustomError(kind, "{reason}", {"reason": f"must be one of {', '.join(_PERFS)}"})


def _widen_criteria(value: object) -> object:
    """Accept the name of a criterion in place of a Criteria object."""
    return value if isinstance(value, Mapping) else {"perf": _check_perf(value)}


def _check_paper_criteria(value: object) -> Perf | None:
    return None if value == "" else _check_perf(value)


class _OrName:
    """Adds the name of a criterion as an alternative to the JSON schema."""

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "enum": list(_PERFS)}, handler(core)]}


class SamplingFields(BaseSamplingFields, GrammarFields, ClosedModel):
    """Sampling parameters of an output, and what it must match; the fields of /v1/completions."""

    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], float] | None = Field(
        None, description="token id -> added to its logit"
    )

    def to_mapping(self) -> dict[str, Any]:
        """The given fields as keyword arguments of SamplingParams. Raises InvalidRequestError."""
        names = type(self).model_fields.keys() - FIELDS
        given = {name: getattr(self, name) for name in names}
        given["grammar"] = self.grammar()
        if self.top_k == -1:
            given["top_k"] = 0
        if self.logit_bias is not None:
            given["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        return {name: value for name, value in given.items() if value is not None}


class _Derived(ClosedModel):
    """The wire form of one record."""

    record: ClassVar[type]

    def to_record(self) -> Any:
        values = {}
        for spec in dataclasses.fields(self.record):
            name, form = wire_form(spec)
            value = None if form.hidden else _to_value(getattr(self, name), name)
            if value is not None and form.scale is not None:
                value = value / form.scale
            if value is not None or spec.default_factory is dataclasses.MISSING:
                values[spec.name] = value
        return self.record(**values)


def _to_value(value: Any, place: str) -> Any:
    """Raises InvalidRequestError whose param begins with `place`."""
    if isinstance(value, list | tuple):
        return [_to_value(part, f"{place}[{index}]") for index, part in enumerate(value)]
    if not isinstance(value, _Derived | SamplingFields):
        return value
    try:
        return value.to_record() if isinstance(value, _Derived) else value.to_mapping()
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, f"{place}.{error.param}", error.code) from None


class _Deriver:
    """Derives one model from each record.

    widened: type in a record -> type in the model, if clients can write it in several ways.
    fields: (record, field) -> type in the model, which overrides `widened`.
    """

    def __init__(
        self, widened: Mapping[Any, Any], fields: Mapping[tuple[type, str], Any] = NO_FIELDS
    ) -> None:
        self._widened = widened
        self._fields = fields
        self._models: dict[type, type[_Derived]] = {}

    def models(self, *records: type) -> Mapping[type, type[_Derived]]:
        """Record -> its model."""
        return MappingProxyType({record: self._model(record) for record in records})

    def _model(self, record: type) -> type[_Derived]:
        if record not in self._models:
            hints = typing.get_type_hints(record, include_extras=True)
            fields: dict[str, Any] = {}
            for spec in dataclasses.fields(record):
                name, form = wire_form(spec)
                if not form.hidden:
                    kind = self._fields.get((record, spec.name)) or self._type(hints[spec.name])
                    fields[name] = (kind, _field_info(spec, hints[spec.name]))
            derived = create_model(
                record.__name__, __base__=_Derived, __doc__=record.__doc__, **fields
            )
            derived.record = record
            self._models[record] = derived
        return self._models[record]

    def _type(self, kind: Any) -> Any:
        """The type in the model for the type of a field, or of a part of it."""
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if kind in self._widened:
            return self._widened[kind]
        if origin is Annotated:
            return _bounded(self._type(inner[0]), inner[1:])
        if origin in (Union, types.UnionType):
            return Union[tuple(self._type(part) for part in inner)]  # noqa: UP007
        if origin in (tuple, Sequence):
            return types.GenericAlias(list, (self._type(inner[0]),))
        if origin is Mapping:
            return types.GenericAlias(dict, tuple(self._type(part) for part in inner))
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            values = tuple(member.value for member in kind)
            return Annotated[Literal[values], AfterValidator(_to_member(kind))]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return self._model(kind)
        return kind


def _to_member(kind: type[enum.Enum]) -> Callable[[Any], enum.Enum]:
    """A validator that turns a value into a member of `kind`. Pydantic reads the signature of a
    validator, and that of an enum class is (*values) from Python 3.12 on."""

    def member(value: Any) -> enum.Enum:
        return kind(value)

    return member


def _bounded(kind: Any, metadata: Sequence[Any]) -> Any:
    for bounds in metadata:
        if isinstance(bounds, ValueBounds):
            given = {k: v for k, v in dataclasses.asdict(bounds).items() if v is not None}
            one_of = given.pop("one_of", None)
            kind = Annotated[kind, Field(**given)] if one_of is None else Literal[one_of]
    return kind


def _field_info(spec: dataclasses.Field[Any], hint: Any) -> Any:
    """The field's default, and its description: the string in the annotation."""
    texts = [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]
    info: dict[str, Any] = {"description": texts[0]} if texts else {}
    if spec.default is not dataclasses.MISSING:
        info["default"] = spec.default
    elif spec.default_factory is not dataclasses.MISSING:
        info["default_factory"] = spec.default_factory
    return Field(**info)


_PERF = Annotated[Perf, BeforeValidator(_check_perf), WithJsonSchema({"enum": list(_PERFS)})]
_CRITERIA = _Deriver({Perf: _PERF}).models(Criteria)[Criteria]

BODIES = _Deriver(
    {
        Criteria: Annotated[_CRITERIA, BeforeValidator(_widen_criteria), _OrName()],
        Sampling: SamplingFields | None,
    },
    {
        (schema.CreateSession, "metadata"): Metadata | None,
        (schema.PaperGet, "criteria"): Annotated[
            Perf | None,
            BeforeValidator(_check_paper_criteria),
            WithJsonSchema({"type": "string"}),
        ],
    },
).models(
    schema.CreateSession,
    schema.SubmitCall,
    schema.SubmitProgram,
    schema.FailCall,
    schema.CreateVariable,
    schema.SetVariable,
    schema.WantVariable,
    schema.PaperSubmit,
    schema.PaperGet,
)
"""Record -> model, of request bodies."""

REPLIES = _Deriver({}).models(
    schema.SessionSummary,
    schema.SessionView,
    schema.SessionList,
    schema.DeletedSession,
    schema.SubmittedProgram,
    schema.CancelledRequest,
    schema.FailedRequest,
    schema.VariableView,
    schema.VariableList,
    schema.PaperSubmitted,
    schema.PaperValue,
    schema.UpstreamErrorEnvelope,
)
"""Record -> model, of responses. The models only describe them; `reply` writes them."""


def read(record: type[T], fields: Mapping[str, Any]) -> T:
    """The body of a request as a record. Raises InvalidRequestError."""
    found: T = validate(BODIES[record], fields).to_record()
    return found


def reply(record: Any, *, defaults: bool = True) -> Response:
    """A JSON response with a record. defaults: include fields that equal their default."""
    content = to_json(schema.to_json(record, defaults=defaults))
    return Response(content, media_type="application/json")


def check_call(call: CallSpec, prefix: str) -> None:
    """Check what the models cannot: exactly one kind of call, and ranges of sampling parameters.

    prefix: path of the call in its body, such as `requests[2].`, or empty.

    Raises InvalidRequestError.
    """
    kinds = {
        "template": call.template is not None,
        "messages": call.messages is not None,
        "native": call.native,
    }
    given = [name for name, is_given in kinds.items() if is_given]
    if len(given) != 1:
        found = "none of them" if not given else " and ".join(given)
        raise InvalidRequestError(
            f"A request needs exactly one of template, messages and native; this one has {found}.",
            param=f"{prefix}{given[1] if given else 'template'}",
            code="invalid_value" if given else "missing_required_parameter",
        )
    check_sampling(call.sampling, f"{prefix}sampling")
    for i, parameter in enumerate(call.parameters):
        if parameter.sampling is not None:
            own = f"{prefix}parameters[{i}].sampling"
            check_sampling(parameter.sampling, own, base=call.sampling)


def check_sampling(
    given: Mapping[str, Any], param: str, base: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Raises InvalidRequestError if SamplingParams refuses the values.

    base: values that `given` overrides.
    """
    try:
        SamplingParams(**{**base, **given})
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, f"{param}.{error.param}", error.code) from None


def parse_perf(name: str, param: str) -> Perf:
    """The criterion with a name, in any case. Raises InvalidRequestError."""
    if name.lower() in _PERFS:
        return Perf(name.lower())
    message = f"'{param}' must be one of {', '.join(_PERFS)}."
    raise InvalidRequestError(message, param=param, code="invalid_value")
