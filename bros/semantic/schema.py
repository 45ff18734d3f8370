"""Requests and responses of the session API: one set of records for Python and for the wire.

The server derives the models that validate bodies and generate OpenAPI from these records (see
bros/server/sessions/wire.py). The client writes bodies with `to_json` and reads responses with
`from_json`. In annotations, `ValueBounds` restricts the values that the server accepts, and a
string is the field's description. `wire` declares how the JSON differs from the field.

Times are in seconds and end in _s. In views they count from the creation of the session.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from bros.core.request import MIN_OBJECTIVE_MS, ServiceClass
from bros.semantic.errors import Cause

T = TypeVar("T")

MAX_WAIT_S = 600.0
MAX_NAME_CHARS = 128
MAX_PARAMETERS = 5_000
MAX_MESSAGES = 10_000
"""Of one call."""
_MAX_S = 1e9
"""Longest time that a client can request."""

_MS_DIGITS = 6


# ---- Conversion between records and JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBounds:
    """Bounds of a value that the server accepts. The fields except one_of are pydantic's.

    one_of: the accepted strings.
    """

    pattern: str | None = None
    min_length: int | None = None
    max_length: int | None = None
    gt: float | None = None
    ge: float | None = None
    le: float | None = None
    one_of: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WireForm:
    """How a field is written as JSON.

    name: its JSON name; None: the field's name.
    scale: factor from the value to the JSON number.
    hidden: whether JSON omits the field.
    shown_from: a list with fewer items is written as an empty list.
    """

    name: str | None = None
    scale: float | None = None
    hidden: bool = False
    shown_from: int = 0


DEFAULT_FORM = WireForm()


def wire(**form: Any) -> Mapping[str, WireForm]:
    """Metadata for a field; the arguments are the fields of WireForm."""
    return MappingProxyType({"wire": WireForm(**form)})


def wire_form(spec: dataclasses.Field[Any]) -> tuple[str, WireForm]:
    """The JSON name of a field, and its form."""
    form: WireForm = spec.metadata.get("wire", DEFAULT_FORM)
    return form.name or spec.name, form


def to_json(value: Any, *, defaults: bool = True) -> Any:
    """A record, or a value in one, as JSON values.

    defaults: whether to include fields that equal their default. Clients send bodies without them.
    """
    return _Writer(defaults).write(value)


class _Writer:
    """Writes one value; inspects the fields of each record type once."""

    def __init__(self, defaults: bool) -> None:
        self._defaults = defaults
        self._specs: dict[type, list[tuple[str, str, WireForm | None, Any]]] = {}

    def write(self, value: Any) -> Any:
        if value is None or isinstance(value, str | int | float):
            return value.value if isinstance(value, enum.Enum) else value
        if isinstance(value, list | tuple):
            return [self.write(part) for part in value]
        if isinstance(value, Mapping):
            return {str(key): self.write(part) for key, part in value.items()}
        found = {}
        for attribute, name, form, default in self._specs_of(type(value)):
            part = getattr(value, attribute)
            if not self._defaults and part == default:
                continue
            if form is not None and form.scale is not None and part is not None:
                part = round(part * form.scale, _MS_DIGITS)
            if form is not None and form.shown_from and len(part) < form.shown_from:
                part = ()
            found[name] = part if type(part) in _WRITTEN else self.write(part)
        return found

    def _specs_of(self, kind: type) -> list[tuple[str, str, WireForm | None, Any]]:
        """Attribute, JSON name, form if it is not the default, and default value of each field."""
        if kind not in self._specs:
            self._specs[kind] = [
                (spec.name, name, None if form is DEFAULT_FORM else form, _default(spec))
                for spec in dataclasses.fields(kind)
                for name, form in [wire_form(spec)]
                if not form.hidden
            ]
        return self._specs[kind]


_WRITTEN = frozenset({str, int, float, bool, type(None)})
"""Types whose values are JSON values."""


def from_json(kind: type[T], fields: Mapping[str, Any]) -> T:
    """The inverse of `to_json` for a record of this type; unknown fields are ignored.

    Raises KeyError, TypeError or ValueError if the JSON does not match the type.
    """
    hints = typing.get_type_hints(kind)
    values = {}
    for spec in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, form = wire_form(spec)
        if name in fields and not form.hidden:
            part = fields[name]
            if form.scale is not None and part is not None:
                part = part / form.scale
            values[spec.name] = _from_json(hints[spec.name], part)
        elif not form.hidden and _default(spec) is dataclasses.MISSING:
            raise KeyError(name)
    return kind(**values)


def _from_json(hint: Any, value: Any) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if value is None or hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _from_json(next(part for part in inner if part is not type(None)), value)
    if origin in (tuple, Sequence):
        return tuple(_from_json(inner[0], part) for part in value)
    if isinstance(hint, type):
        if dataclasses.is_dataclass(hint):
            return from_json(hint, value)
        if issubclass(hint, enum.Enum):
            return hint(value)
    return value


def _default(spec: dataclasses.Field[Any]) -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return spec.default


Id = Annotated[str, ValueBounds(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:@~-]{0,127}$")]
"""An id that needs no escapes in a URL path."""

Name = Annotated[str, ValueBounds(max_length=MAX_NAME_CHARS)]
PlaceholderName = Annotated[str, ValueBounds(min_length=1, max_length=MAX_NAME_CHARS)]
Wait = Annotated[float, ValueBounds(gt=0, le=MAX_WAIT_S)]
Lifetime = Annotated[float, ValueBounds(ge=1, le=86_400)]
Objective = Annotated[float, ValueBounds(ge=MIN_OBJECTIVE_MS, le=1e12)]
"""The bounds are those of the milliseconds on the wire."""

Sampling = Mapping[str, Any]
"""Some fields of SamplingParams by name."""


# ---- Requests


class Role(enum.StrEnum):
    """Role of a placeholder."""

    INPUT = "input"
    OUTPUT = "output"


class Perf(enum.StrEnum):
    """Performance criterion of a value.

    LATENCY: time until it is complete.
    TTFT: time to first token of a streamed value.
    TPOT: time per output token of a streamed value.
    THROUGHPUT: completed values per time; the value may wait.
    """

    LATENCY = "latency"
    TTFT = "ttft"
    TPOT = "tpot"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """Performance criteria of a value: the name of a criterion, or an object with these fields."""

    perf: Perf = Perf.LATENCY
    ttft_s: Annotated[Objective | None, "Time to first token; null: the server's default"] = field(
        default=None, metadata=wire(name="ttft_ms", scale=1000)
    )
    tpot_s: Annotated[Objective | None, "Time per output token; null: the server's default"] = (
        field(default=None, metadata=wire(name="tpot_ms", scale=1000))
    )
    deadline_s: Annotated[Objective | None, "Time from now until the value is complete"] = field(
        default=None, metadata=wire(name="deadline_ms", scale=1000)
    )


def checked_seconds(name: str, value: float | None, *, zero: bool = False) -> float | None:
    """Return `value` if it is a valid time in seconds, or None.

    zero: whether 0 is valid. Raises ValueError that names the argument `name`.
    """
    if value is None:
        return None
    is_number = isinstance(value, int | float) and value <= _MAX_S
    if not is_number or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be seconds, {'0 or more' if zero else 'above 0'}: {value!r}")
    return value


class SharingMode(enum.StrEnum):
    """Who shares the KV of what comes after the first placeholder of a session's templates.

    TENANT: all requests of the API key.
    SESSION: the session's own requests.
    """

    TENANT = "tenant"
    SESSION = "session"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSession:
    """POST /v1/sessions"""

    criteria: Annotated[Criteria | None, "Default criteria of requested values"] = None
    ttl_s: Annotated[Lifetime | None, "Seconds of inactivity after which the session expires"] = (
        None
    )
    tenant: Annotated[
        str,
        ValueBounds(max_length=512),
        "Subdivides the users of one API key: only sessions with the same tenant share the KV of "
        "what comes after the first placeholder of a template",
    ] = ""
    sharing: Annotated[
        SharingMode,
        "tenant: all requests of the API key share the KV of this session's prompts, or those "
        "sessions that have the same tenant field. session: what comes after the first placeholder "
        "of a template is shared within this session only",
    ] = SharingMode.TENANT
    sampling: Annotated[Sampling | None, "Default sampling parameters of outputs"] = None
    id: Annotated[
        Id | None, "Must not begin with sess-; if omitted, the server generates an id"
    ] = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One placeholder of a call."""

    name: PlaceholderName
    role: Annotated[Role | None, "If omitted: as in the template"] = None
    variable: Annotated[
        Id | None, "Id of its variable, which is created if unknown; if omitted: a new variable"
    ] = None
    value: Annotated[str | None, "Value of an input, instead of a variable"] = None
    transforms: Annotated[str | None, "Transforms such as: strip | lower"] = None
    sampling: Annotated[
        Sampling | None, "For an output: sampling parameters that override the call's"
    ] = None
    criteria: Annotated[
        Criteria | None, "For an output: request its value at once with these criteria"
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A chat message whose content is a template."""

    role: Annotated[str, ValueBounds(one_of=("developer", "system", "user", "assistant", "tool"))]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """One call: a template, or messages, or a native function of the client."""

    name: Annotated[
        Name, "Function name; the server predicts output lengths from earlier calls of that name"
    ] = ""
    template: Annotated[str | None, "Text with placeholders {{input:x}} and {{output:y}}"] = None
    messages: Annotated[
        Annotated[Sequence[Message], ValueBounds(min_length=1, max_length=MAX_MESSAGES)] | None,
        "A conversation whose contents are templates; without an output, its answer is an output "
        "named output",
    ] = None
    chat: Annotated[
        bool, "Convert the template to a conversation in which each output is an assistant message"
    ] = False
    native: Annotated[
        bool, "The client runs the call; only parameters declare its inputs and outputs"
    ] = False
    parameters: Annotated[Sequence[Parameter], ValueBounds(max_length=MAX_PARAMETERS)] = ()
    sampling: Annotated[Sampling, "Sampling parameters of all outputs"] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCall(CallSpec):
    """POST /v1/sessions/{sid}/requests with one call"""

    wait: Annotated[bool, "Respond when the outputs have their values"] = False
    timeout_s: Annotated[Wait | None, "With wait: longest wait"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitProgram:
    """POST /v1/sessions/{sid}/requests with a program, which is added whole or not at all"""

    requests: Annotated[Sequence[CallSpec], ValueBounds(min_length=1)]
    key: Annotated[
        Id | None, "Idempotency key: a program sent again with the same key is not added again"
    ] = None
    wait: bool = False
    timeout_s: Wait | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailCall:
    """POST /v1/sessions/{sid}/requests/{rid}/fail"""

    message: Annotated[str, ValueBounds(max_length=2000)] = "The function failed."


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateVariable:
    """POST /v1/sessions/{sid}/variables"""

    name: Name = ""
    id: Id | None = None
    value: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetVariable:
    """PUT /v1/sessions/{sid}/variables/{vid}"""

    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WantVariable:
    """PATCH /v1/sessions/{sid}/variables/{vid}"""

    criteria: Criteria


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPlaceholder:
    """in_out: true for an output."""

    name: PlaceholderName
    in_out: bool
    semantic_var_id: Id
    transforms: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSubmit:
    """POST /v1/submit, the body of the Parrot paper"""

    prompt: str
    placeholders: Annotated[Sequence[PaperPlaceholder], ValueBounds(max_length=MAX_PARAMETERS)]
    session_id: Id

    def to_call(self) -> CallSpec:
        """The same call as a CallSpec."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperGet:
    """POST /v1/get, the body of the Parrot paper"""

    semantic_var_id: Id
    criteria: Annotated[
        Perf | None, "Name of a criterion in any case; empty: the session's criteria"
    ] = None
    session_id: Id
    timeout_s: Annotated[Wait | None, "Not in the paper"] = None


# ---- Responses


class VariableState(enum.StrEnum):
    """PENDING until it has its value, has failed or was cancelled."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"


class CallState(enum.StrEnum):
    """State of an LLM call, or of a call."""

    WAITING = "waiting"  # for inputs, for the previous LLM call, or for a request of its output
    READY = "ready"  # submitted to the engine; for a native call: the client can run it
    RUNNING = "running"  # the engine has generated its first token
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class CallKind(enum.StrEnum):
    """How a call is run."""

    LLM = "llm"  # the session runs it on the engine
    NATIVE = "native"  # the client runs it and sets the outputs
    PLAIN = "plain"  # an OpenAI client runs it on the engine; the session only records it


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedCall:
    """Response to one CallSpec."""

    request_id: str = field(metadata=wire(name="id"))
    variables: Annotated[Mapping[str, str], "placeholder -> variable id"]
    values: Annotated[
        Mapping[str, str] | None,
        "With wait: placeholder -> value of each output",
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedProgram:
    """Response to POST /v1/sessions/{sid}/requests"""

    requests: Sequence[SubmittedCall]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableView:
    """A semantic variable."""

    id: str
    object: Literal["variable"] = "variable"
    name: str
    state: VariableState
    value: Annotated[str | None, "With state ready"] = None
    producer: Annotated[str | None, "Id of the request that sets it"] = None
    consumers: Annotated[tuple[str, ...], "Ids of the requests that read it"] = ()
    perf: Annotated[str | None, "The strictest criterion that clients requested it with"] = None
    error: Annotated[Cause | None, "With states failed and cancelled: the root failure"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableList:
    """Response to GET /v1/sessions/{sid}/variables"""

    object: Literal["list"] = "list"
    data: Sequence[VariableView]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixView:
    """Parrot's PrefixHash: a prefix of a prompt up to the end of a piece.

    Equal hashes mean equal tokens of the same model, whose KV may be shared.
    """

    offset: Annotated[int, "Length of the prefix in tokens"]
    hash: Annotated[str, "Hash of the prefix"]
    after: Annotated[str | None, "Id of the variable that ends there; null: constant text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCostsView:
    """What the router expected the placement of a task group to cost, in seconds: until its last
    member is done, plus weighted time in which other requests wait because its common prefix is
    computed on more than one replica."""

    cost_s: float
    alternative_s: Annotated[
        float | None,
        "The same of the cheapest other placement: on one replica if the group is split, else "
        "split or on another replica; null: there was none",
    ]
    replicas: Annotated[int, "Replicas that the members went to"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementView:
    """Where the router has placed a call, and why."""

    replica: Annotated[int, "Number of the replica"]
    reason: Annotated[str, "What decided, as in the request's trace: exploit, explore, group, ..."]
    expected_tokens: Annotated[int, "Prompt tokens that the router expected to be cached there"]
    group: Annotated[
        GroupCostsView | None,
        "Of the members of its task group that were placed together; null without one",
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmCallView:
    """The part of a call up to one output: the unit of scheduling.

    attempts: number of submissions to the engine.
    prefilled_tokens: prompt tokens prefilled while an input was still being generated.
    """

    state: CallState
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    level: Annotated[str | None, "rt, group or throughput; null until it is wanted"] = None
    service_class: Annotated[
        ServiceClass | None, "Service class in the engine; null until it is wanted"
    ] = None
    stage: Annotated[int | None, "Distance in requests to the nearest requested variable"] = None
    depth: Annotated[int, "Number of requests on the longest path to it"] = 0
    group: Annotated[str | None, "Id of its task group"] = None
    deadline_s: float | None = None
    queued_s: Annotated[float | None, "When its last input was set"] = None
    first_token_s: float | None = None
    end_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    why: Annotated[str, "Why it has its level and class"] = ""
    predicted_end_s: Annotated[float | None, "While it is open and wanted"] = None
    slack_s: Annotated[float | None, "Latest finish time (deadline_s) less predicted_end_s"] = None
    critical: Annotated[bool, "Whether a requested variable waits longest for it"] = False
    queueing_s: Annotated[
        float | None, "Time without a token so far, less the predicted prefill once it has one"
    ] = None
    prefill_s: Annotated[float | None, "Predicted prefill, once it has a token"] = None
    decode_s: Annotated[float | None, "Time since its first token, until its end"] = None
    placement: Annotated[PlacementView | None, "null without a router"] = None
    prefilled_tokens: int = field(default=0, metadata=wire(hidden=True))
    attempts: int = field(default=0, metadata=wire(hidden=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """A request of a session: one call.

    state, level, service_class, stage, group, deadline_s, why, critical and placement are those of
    its current LLM call; so are predicted_end_s and slack_s. prompt_tokens is that of the last LLM
    call that was started. cached_tokens, output_tokens, queueing_s, prefill_s and decode_s are
    sums over its LLM calls.
    """

    id: str
    object: Literal["session.request"] = "session.request"
    name: str
    kind: CallKind
    state: CallState
    service_class: Annotated[
        ServiceClass | None, "Service class in the engine; null until it is wanted"
    ]
    level: Annotated[str | None, "rt, group or throughput; null until it is wanted"]
    stage: Annotated[int | None, "Distance in requests to the nearest requested variable"]
    depth: Annotated[int, "Number of requests on the longest path to it"]
    group: Annotated[str | None, "Id of its task group"]
    deadline_s: float | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    submitted_s: float
    queued_s: Annotated[float | None, "When its last input was set"]
    first_token_s: float | None
    end_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: Cause | None
    llm_calls: Annotated[tuple[LlmCallView, ...], "One for each output, if there are several"] = (
        field(metadata=wire(name="turns", shown_from=2))
    )
    prefixes: tuple[PrefixView, ...] = ()
    why: Annotated[str, "Why it has its level and class"] = ""
    predicted_end_s: Annotated[float | None, "While it is open and wanted"] = None
    slack_s: Annotated[float | None, "Latest finish time (deadline_s) less predicted_end_s"] = None
    critical: Annotated[bool, "Whether a requested variable waits longest for it"] = False
    queueing_s: Annotated[
        float | None, "Time without a token so far, less the predicted prefill once it has one"
    ] = None
    prefill_s: Annotated[float | None, "Predicted prefill, once it has a token"] = None
    decode_s: Annotated[float | None, "Time since its first token, until its end"] = None
    placement: Annotated[PlacementView | None, "null without a router"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """A session without its graph."""

    id: str
    object: Literal["session"] = "session"
    state: Literal["open", "closed"]
    created_at: Annotated[int, "Unix seconds"]
    ttl_s: float
    expires_in_s: Annotated[float | None, "null while a request runs or a client waits in it"]
    criteria: Criteria
    tenant: Annotated[str | None, "As given when it was created, not the API key's; else null"]
    sharing: SharingMode
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPathView:
    """The chain of open requests that a requested variable waits for longest."""

    variable: Annotated[str, "Id of the requested variable"]
    requests: Annotated[
        tuple[str, ...],
        "Ids in the order in which they run, without those on an earlier path of the list",
    ]
    predicted_end_s: float
    slack_s: Annotated[float | None, "Deadline of the variable less predicted_end_s"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView(SessionSummary):
    """A session with its graph."""

    calls: tuple[CallView, ...] = field(metadata=wire(name="requests"))
    variables: tuple[VariableView, ...]
    now_s: Annotated[float, "Time of this view"] = 0.0
    critical_paths: Annotated[
        tuple[CriticalPathView, ...],
        "The one that ends last first; a variable whose producer is on an earlier one has none",
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionList:
    """Response to GET /v1/sessions"""

    object: Literal["list"] = "list"
    data: Sequence[SessionSummary]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedSession:
    """Response to DELETE /v1/sessions/{sid}"""

    id: str
    object: Literal["session"] = "session"
    deleted: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledRequest:
    """Response to DELETE /v1/sessions/{sid}/requests/{rid}: cancelled, unless it had ended."""

    id: str
    object: Literal["session.request"] = "session.request"
    cancelled: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """Response to POST /v1/sessions/{sid}/requests/{rid}/fail"""

    id: str
    object: Literal["session.request"] = "session.request"
    failed: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSubmitted:
    """Response to POST /v1/submit"""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperValue:
    """Response to POST /v1/get"""

    semantic_var_id: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamErrorDetail:
    """The error in a response with status 424."""

    message: str
    type: str
    param: str | None
    code: Literal["upstream_failed"] = "upstream_failed"
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamErrorEnvelope:
    """The body of a response with status 424."""

    error: UpstreamErrorDetail


# ---- Not on the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    """Figures of the service for metrics.

    sessions: open sessions.
    calls: calls ended since the start, by (state, service class or "").
    prefills: prompt prefixes prefilled ahead since the start.
    """

    sessions: int = 0
    calls: Mapping[tuple[str, str], int] = field(default_factory=dict)
    prefills: int = 0
