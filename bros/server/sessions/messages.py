"""Sessions on the wire: what clients send, as the dataclasses of bros.semantic.program.

These messages are ours alone, so a field that is not known is a mistake and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError

from bros.core.errors import InvalidRequestError
from bros.core.request import SamplingParams
from bros.semantic.schema import CallSpec, Criteria, Message, Parameter, Perf, Role
from bros.server.batches.schema import Metadata
from bros.server.openai.schema import Milliseconds, SamplingWords, WireModel

MAX_WAIT_S = 600.0
MAX_NAME_CHARS = 128
_MAX_SCOPE_CHARS = 512

Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:@~-]{0,127}$")]
"""What stands in a path as it is."""

Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Seconds = Annotated[float, Field(gt=0, le=MAX_WAIT_S)]
Lifetime = Annotated[float, Field(ge=1, le=86_400)]


_PERFS = tuple(perf.value for perf in Perf)


def _check_perf(value: object) -> Perf:
    """The name of a criterion in any case, as the paper has LATENCY."""
    if isinstance(value, str) and value.lower() in _PERFS:
        return Perf(value.lower())
    kind = "perf_value" if isinstance(value, str) else "perf_type"
    raise PydanticCustomError(kind, "{reason}", {"reason": f"must be one of {', '.join(_PERFS)}"})


def _widen_criteria(value: object) -> object:
    """A name is criteria with nothing else."""
    if isinstance(value, Mapping | CriteriaFields):
        return value
    return {"perf": _check_perf(value)}


def _check_paper_criteria(value: object) -> Perf | None:
    return None if value == "" else _check_perf(value)


PerfName = Annotated[Perf, BeforeValidator(_check_perf), WithJsonSchema({"enum": list(_PERFS)})]


class _Strict(WireModel):
    model_config = ConfigDict(extra="forbid")


class CriteriaFields(_Strict):
    """How soon a value is wanted: the name of a criterion, or an object with these fields."""

    perf: PerfName = Perf.LATENCY
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = Field(
        None, description="Until the value is complete, from now on"
    )

    def to_criteria(self) -> Criteria:
        return Criteria(
            perf=self.perf,
            ttft_s=_seconds(self.ttft_ms),
            tpot_s=_seconds(self.tpot_ms),
            deadline_s=_seconds(self.deadline_ms),
        )


class _OrName:
    """Shows that the name of a criterion will do."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "enum": list(_PERFS)}, handler(schema)]}


AnyCriteria = Annotated[CriteriaFields, BeforeValidator(_widen_criteria), _OrName()]


class SamplingFields(SamplingWords, _Strict):
    """How the tokens of an output are chosen; the fields of /v1/completions."""

    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], float] | None = Field(
        None, description="token id -> added to its logit"
    )

    def to_mapping(self) -> dict[str, Any]:
        """What is given, as fields of SamplingParams."""
        given = {name: getattr(self, name) for name in type(self).model_fields}
        if self.top_k == -1:
            given["top_k"] = 0
        if self.logit_bias is not None:
            given["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        return {name: value for name, value in given.items() if value is not None}


class CreateSession(_Strict):
    """POST /v1/sessions"""

    criteria: AnyCriteria | None = Field(
        None, description="How soon its values are wanted where nothing else is said"
    )
    ttl_s: Lifetime | None = Field(
        None, description="Seconds without any activity after which it ends"
    )
    tenant: Annotated[str, Field(max_length=_MAX_SCOPE_CHARS)] = Field(
        "",
        description="Whose it is among those who use one key: only sessions of one tenant share "
        "what has been computed of their prompts",
    )
    sampling: SamplingFields | None = Field(
        None, description="Of outputs, where nothing else is said"
    )
    id: Id | None = Field(
        None, description="Not one that begins with sess-; left out: the server makes one"
    )
    metadata: Metadata | None = None


class ParameterFields(_Strict):
    """One placeholder of a call."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    role: Literal["input", "output"] | None = Field(
        None, description="Left out: as the template says"
    )
    variable: Id | None = Field(
        None, description="Id of its variable, made if it is not there. Left out: a new one"
    )
    value: str | None = Field(None, description="Of an input, instead of a variable")
    transforms: str | None = Field(None, description="Such as: strip | lower")
    sampling: SamplingFields | None = Field(
        None, description="Of an output: what differs from the call's"
    )
    criteria: AnyCriteria | None = Field(None, description="Of an output: it is wanted at once")


class MessageFields(_Strict):
    """A message whose content is a template."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str


class CallFields(_Strict):
    """One call: a template, or messages, or a function of the client's own (native)."""

    name: Name = Field("", description="Of the function; calls of one are expected to be alike")
    template: str | None = Field(None, description="A text with {{input:x}} and {{output:y}} in it")
    messages: Annotated[list[MessageFields], Field(min_length=1)] | None = None
    native: bool = False
    chat: bool = Field(
        False, description="Make a conversation of the template: each output is an answer"
    )
    parameters: list[ParameterFields] = Field(default_factory=list)
    sampling: SamplingFields | None = None


class SubmitCall(CallFields):
    """POST /v1/sessions/{sid}/requests with one call"""

    wait: bool = Field(False, description="Answer when the values of the outputs are there")
    timeout_s: Seconds | None = Field(None, description="With wait, for how long")


class SubmitProgram(_Strict):
    """POST /v1/sessions/{sid}/requests with a whole program: all of it is taken, or nothing"""

    requests: Annotated[list[CallFields], Field(min_length=1)]
    key: Id | None = Field(
        None, description="Sent again with the same one, the program is not taken again"
    )
    wait: bool = False
    timeout_s: Seconds | None = None


class FailCall(_Strict):
    """POST /v1/sessions/{sid}/requests/{rid}/fail"""

    message: Annotated[str, Field(max_length=2000)] = "The function failed."


class CreateVariable(_Strict):
    """POST /v1/sessions/{sid}/variables"""

    name: Name = ""
    id: Id | None = None
    value: str | None = None


class SetVariable(_Strict):
    """PUT /v1/sessions/{sid}/variables/{vid}"""

    value: str


class WantVariable(_Strict):
    """PATCH /v1/sessions/{sid}/variables/{vid}"""

    criteria: AnyCriteria


class PaperPlaceholder(_Strict):
    """in_out: true is an output."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    in_out: bool
    semantic_var_id: Id
    transforms: str = ""


class PaperSubmit(_Strict):
    """POST /v1/submit, the body of the Parrot paper"""

    prompt: str
    placeholders: list[PaperPlaceholder]
    session_id: Id

    def to_call(self) -> CallSpec:
        return CallSpec(
            template=self.prompt,
            parameters=[
                Parameter(
                    name=placeholder.name,
                    role=Role.OUTPUT if placeholder.in_out else Role.INPUT,
                    variable=placeholder.semantic_var_id,
                    transforms=placeholder.transforms or None,
                )
                for placeholder in self.placeholders
            ],
        )


class PaperGet(_Strict):
    """POST /v1/get, the body of the Parrot paper"""

    semantic_var_id: Id
    criteria: Annotated[
        Perf | None, BeforeValidator(_check_paper_criteria), WithJsonSchema({"type": "string"})
    ] = Field(None, description="Its name in any case; empty: as the session has it")
    session_id: Id
    timeout_s: Seconds | None = Field(None, description="Not in the paper")


def to_call(fields: CallFields, param: str) -> CallSpec:
    """What the fields mean. param: where they stand, as in `requests[2].`, or empty.

    Raises InvalidRequestError for sampling that cannot be, and for not exactly one kind of call.
    """
    kinds = {
        "template": fields.template is not None,
        "messages": fields.messages is not None,
        "native": fields.native,
    }
    given = [name for name, is_given in kinds.items() if is_given]
    if len(given) != 1:
        found = "none of them" if not given else " and ".join(given)
        raise InvalidRequestError(
            f"A request has either a template, or messages, or native; this one has {found}.",
            param=f"{param}{given[1] if given else 'template'}",
            code="invalid_value" if given else "missing_required_parameter",
        )
    sampling = checked_sampling(fields.sampling, f"{param}sampling")
    return CallSpec(
        name=fields.name,
        template=fields.template,
        messages=_messages(fields.messages),
        chat=fields.chat,
        native=fields.native,
        parameters=[
            _parameter(parameter, sampling, f"{param}parameters[{i}]")
            for i, parameter in enumerate(fields.parameters)
        ],
        sampling=sampling,
    )


def parse_perf(name: str, param: str) -> Perf:
    """A criterion by its name, in any case. Raises InvalidRequestError."""
    if name.lower() in _PERFS:
        return Perf(name.lower())
    message = f"'{param}' must be one of {', '.join(_PERFS)}."
    raise InvalidRequestError(message, param=param, code="invalid_value")


def criteria_or_none(fields: CriteriaFields | None) -> Criteria | None:
    return None if fields is None else fields.to_criteria()


def checked_sampling(
    fields: SamplingFields | None, param: str, base: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """What the fields say, for SamplingParams. base: what they are on top of, not in the result.

    Raises InvalidRequestError for what cannot be.
    """
    given = {} if fields is None else fields.to_mapping()
    try:
        SamplingParams(**{**base, **given})
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, f"{param}.{error.param}", error.code) from None
    return given


def _messages(messages: Sequence[MessageFields] | None) -> list[Message] | None:
    if messages is None:
        return None
    return [Message(role=message.role, content=message.content) for message in messages]


def _parameter(fields: ParameterFields, sampling: Mapping[str, Any], param: str) -> Parameter:
    own = None
    if fields.sampling is not None:
        own = checked_sampling(fields.sampling, f"{param}.sampling", sampling)
    return Parameter(
        name=fields.name,
        role=None if fields.role is None else Role(fields.role),
        variable=fields.variable,
        value=fields.value,
        transforms=fields.transforms,
        sampling=own,
        criteria=criteria_or_none(fields.criteria),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
