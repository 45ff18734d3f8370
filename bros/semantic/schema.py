"""What clients of sessions send and get: one set of records for Python and for the wire.

The server derives the models from these records that check bodies and describe the API (see
bros/server/sessions/wire.py); the client writes bodies with `to_json` and reads answers with
`from_json`. In annotations, `ValueBounds` says what the server accepts; a string describes a field.
`wire` says where the JSON differs from the field.

Times end in _s, seconds. In views they count from the creation of the session.
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

from bros.core.request import ServiceClass
from bros.semantic.errors import Cause

T = TypeVar("T")

MAX_WAIT_S = 600.0
MAX_NAME_CHARS = 128
_MAX_S = 1e9
"""Longest time that can be asked for."""

_MS_DIGITS = 6


# How records become JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBounds:
    """What the server accepts of a value from outside; the names are those of JSON Schema's
    keywords in pydantic.

    one_of: the only strings.
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

    name: its name there; None: that of the field.
    scale: the number there is so many times the value.
    hidden: it is not there.
    shown_from: a list with fewer parts is empty there.
    """

    name: str | None = None
    scale: float | None = None
    hidden: bool = False
    shown_from: int = 0


AS_IT_IS = WireForm()


def wire(**form: Any) -> Mapping[str, WireForm]:
    """Metadata of a field; the arguments are the fields of WireForm."""
    return MappingProxyType({"wire": WireForm(**form)})


def wire_form(spec: dataclasses.Field[Any]) -> tuple[str, WireForm]:
    """The name of a field as JSON, and how it is written."""
    form: WireForm = spec.metadata.get("wire", AS_IT_IS)
    return form.name or spec.name, form


def to_json(value: Any, *, defaults: bool = True) -> Any:
    """A record, or what is in one, as JSON values.

    defaults: with fields that equal their default, and with None in mappings. Without them it is
    what a client sends.
    """
    return _Writer(defaults).write(value)


class _Writer:
    """Writes one value; looks at the fields of each kind of record once."""

    def __init__(self, defaults: bool) -> None:
        self._defaults = defaults
        self._specs: dict[type, list[tuple[str, str, WireForm | None, Any]]] = {}

    def write(self, value: Any) -> Any:
        if value is None or isinstance(value, str | int | float):
            return value.value if isinstance(value, enum.Enum) else value
        if isinstance(value, list | tuple):
            return [self.write(part) for part in value]
        if isinstance(value, Mapping):
            return {
                str(key): self.write(part)
                for key, part in value.items()
                if self._defaults or part is not None
            }
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
        """Attribute, name as JSON, form if it has a special one, and default."""
        if kind not in self._specs:
            self._specs[kind] = [
                (spec.name, name, None if form is AS_IT_IS else form, _default(spec))
                for spec in dataclasses.fields(kind)
                for name, form in [wire_form(spec)]
                if not form.hidden
            ]
        return self._specs[kind]


_WRITTEN = frozenset({str, int, float, bool, type(None)})
"""Types whose values are JSON already."""


def from_json(kind: type[T], fields: Mapping[str, Any]) -> T:
    """A record of this kind from what `to_json` makes of one; other fields are left out.

    Raises KeyError, TypeError or ValueError if it is no such record.
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
"""What stands in a path as it is."""

Name = Annotated[str, ValueBounds(max_length=MAX_NAME_CHARS)]
PlaceholderName = Annotated[str, ValueBounds(min_length=1, max_length=MAX_NAME_CHARS)]
Wait = Annotated[float, ValueBounds(gt=0, le=MAX_WAIT_S)]
Lifetime = Annotated[float, ValueBounds(ge=1, le=86_400)]
Objective = Annotated[float, ValueBounds(gt=0, le=1e12)]
"""The bounds are those of the milliseconds on the wire."""

Sampling = Mapping[str, Any]
"""Fields of SamplingParams that are given."""


# What clients send


class Role(enum.StrEnum):
    """What a placeholder stands for."""

    INPUT = "input"
    OUTPUT = "output"


class Perf(enum.StrEnum):
    """The criterion of a value: what matters about its time.

    LATENCY: when it is complete.
    TTFT: when it begins; it is read while it grows.
    TPOT: how fast it goes on; it is read while it grows.
    THROUGHPUT: how many such values are complete in a long time; it may wait.
    """

    LATENCY = "latency"
    TTFT = "ttft"
    TPOT = "tpot"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """How soon a value is wanted: the name of a criterion, or an object with these fields."""

    perf: Perf = Perf.LATENCY
    ttft_s: Annotated[Objective | None, "Until its first token; null: the server's default"] = (
        field(default=None, metadata=wire(name="ttft_ms", scale=1000))
    )
    tpot_s: Annotated[Objective | None, "Between its tokens; null: the server's default"] = field(
        default=None, metadata=wire(name="tpot_ms", scale=1000)
    )
    deadline_s: Annotated[Objective | None, "Until the value is complete, from now on"] = field(
        default=None, metadata=wire(name="deadline_ms", scale=1000)
    )


def checked_seconds(name: str, value: float | None, *, zero: bool = False) -> float | None:
    """Return `value` if it is a time that can be asked for.

    zero: 0 is one, too. Raises ValueError that names the argument `name`.
    """
    if value is None:
        return None
    is_number = isinstance(value, int | float) and value <= _MAX_S
    if not is_number or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be seconds, {'0 or more' if zero else 'above 0'}: {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSession:
    """POST /v1/sessions"""

    criteria: Annotated[
        Criteria | None, "How soon its values are wanted where nothing else is said"
    ] = None
    ttl_s: Annotated[Lifetime | None, "Seconds without any activity after which it ends"] = None
    tenant: Annotated[
        str,
        ValueBounds(max_length=512),
        "Whose it is among those who use one key: only sessions of one tenant share what has been "
        "computed of their prompts",
    ] = ""
    sampling: Annotated[Sampling | None, "Of outputs, where nothing else is said"] = None
    id: Annotated[Id | None, "Not one that begins with sess-; left out: the server makes one"] = (
        None
    )
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One placeholder of a call."""

    name: PlaceholderName
    role: Annotated[Role | None, "Left out: as the template says"] = None
    variable: Annotated[
        Id | None, "Id of its variable, made if it is not there. Left out: a new one"
    ] = None
    value: Annotated[str | None, "Of an input, instead of a variable"] = None
    transforms: Annotated[str | None, "Such as: strip | lower"] = None
    sampling: Annotated[Sampling | None, "Of an output: what differs from the call's"] = None
    criteria: Annotated[Criteria | None, "Of an output: it is wanted at once"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message whose content is a template."""

    role: Annotated[str, ValueBounds(one_of=("developer", "system", "user", "assistant", "tool"))]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """One call: a template, or messages, or a function of the client's own (native)."""

    name: Annotated[Name, "Of the function; calls of one are expected to be alike in length"] = ""
    template: Annotated[str | None, "A text with {{input:x}} and {{output:y}} in it"] = None
    messages: Annotated[
        Annotated[Sequence[Message], ValueBounds(min_length=1)] | None,
        "A conversation whose contents are templates; without an output the answer to it is an "
        "output with the name output",
    ] = None
    chat: Annotated[bool, "Make a conversation of the template: each output is an answer"] = False
    native: Annotated[
        bool, "The client runs it; the parameters alone say what it reads and sets"
    ] = False
    parameters: Sequence[Parameter] = ()
    sampling: Annotated[Sampling, "Of all outputs"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCall(CallSpec):
    """POST /v1/sessions/{sid}/requests with one call"""

    wait: Annotated[bool, "Answer when the values of the outputs are there"] = False
    timeout_s: Annotated[Wait | None, "With wait, for how long"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitProgram:
    """POST /v1/sessions/{sid}/requests with a whole program: all of it is taken, or nothing"""

    requests: Annotated[Sequence[CallSpec], ValueBounds(min_length=1)]
    key: Annotated[Id | None, "Sent again with the same one, the program is not taken again"] = None
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
    """in_out: true is an output."""

    name: PlaceholderName
    in_out: bool
    semantic_var_id: Id
    transforms: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSubmit:
    """POST /v1/submit, the body of the Parrot paper"""

    prompt: str
    placeholders: Sequence[PaperPlaceholder]
    session_id: Id

    def to_call(self) -> CallSpec:
        """The same call in our fields."""
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
    criteria: Annotated[Perf | None, "Its name in any case; empty: as the session has it"] = None
    session_id: Id
    timeout_s: Annotated[Wait | None, "Not in the paper"] = None


# What clients get


class VariableState(enum.StrEnum):
    """PENDING until it has its value, or until it is certain that it never will."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"


class CallState(enum.StrEnum):
    """How far an LLM call is."""

    WAITING = "waiting"  # for inputs, for the LLM call before it, or until its output is wanted
    READY = "ready"  # in the engine's queue; a native one: the client can run it
    RUNNING = "running"  # its first token is there
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class CallKind(enum.StrEnum):
    """Who runs a call."""

    LLM = "llm"  # the engine
    NATIVE = "native"  # the client, which sets the outputs
    PLAIN = "plain"  # the engine, for a plain OpenAI client; the session only records it


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedCall:
    """Answer to one CallSpec."""

    request_id: str = field(metadata=wire(name="id"))
    variables: Annotated[Mapping[str, str], "placeholder -> id of its variable"]
    values: Annotated[
        Mapping[str, str] | None,
        "With wait: placeholder -> value, of the outputs that were waited for",
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedProgram:
    """Answer to POST /v1/sessions/{sid}/requests"""

    requests: Sequence[SubmittedCall]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableView:
    """A semantic variable."""

    id: str
    object: Literal["variable"] = "variable"
    name: str
    state: VariableState
    value: Annotated[str | None, "With state ready"] = None
    producer: Annotated[str | None, "The request it comes from"] = None
    consumers: Annotated[tuple[str, ...], "The requests that read it"] = ()
    perf: Annotated[str | None, "The strictest criterion it was asked for with"] = None
    error: Annotated[Cause | None, "With states failed and cancelled: what failed first"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableList:
    """Answer to GET /v1/sessions/{sid}/variables"""

    object: Literal["list"] = "list"
    data: Sequence[VariableView]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixView:
    """A place where prompts may part. Equal hashes mean equal tokens before it, of the same model
    and for those who may share them."""

    offset: Annotated[int, "Tokens before it"]
    hash: Annotated[str, "Of these tokens"]
    after: Annotated[str | None, "Id of the variable that ends there; null: a text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmCallView:
    """One output of a call, and the inputs that are new in it: what is scheduled.

    attempts: how often it was submitted to the engine.
    prefilled_tokens: computed while an input was still being generated.
    """

    state: CallState
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    level: Annotated[str | None, "rt, group or throughput; null while it is not wanted"] = None
    service_class: Annotated[
        ServiceClass | None, "What the engine serves it as; null while it is not wanted"
    ] = None
    stage: Annotated[int | None, "Requests between it and the end of the program"] = None
    depth: Annotated[int, "Requests before it"] = 0
    group: Annotated[str | None, "Those that a later request waits for together"] = None
    deadline_s: float | None = None
    queued_s: Annotated[float | None, "When all that it needs was there"] = None
    first_token_s: float | None = None
    end_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefilled_tokens: int = field(default=0, metadata=wire(hidden=True))
    attempts: int = field(default=0, metadata=wire(hidden=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """A request of a session: one call.

    state, level, service_class, stage, group and deadline_s are those of its current LLM call;
    prompt_tokens is that of the last LLM call that was started; cached_tokens and output_tokens are
    sums.
    """

    id: str
    object: Literal["session.request"] = "session.request"
    name: str
    kind: CallKind
    state: CallState
    service_class: Annotated[ServiceClass | None, "What the engine serves it as"]
    level: Annotated[str | None, "rt, group or throughput; null while it is not wanted"]
    stage: Annotated[int | None, "Requests between it and the end of the program"]
    depth: Annotated[int, "Requests before it"]
    group: Annotated[str | None, "Those that a later request waits for together"]
    deadline_s: float | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    submitted_s: float
    queued_s: Annotated[float | None, "When all that it needs was there"]
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
    tenant: str
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView(SessionSummary):
    """A session with its graph."""

    calls: tuple[CallView, ...] = field(metadata=wire(name="requests"))
    variables: tuple[VariableView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionList:
    """Answer to GET /v1/sessions"""

    object: Literal["list"] = "list"
    data: Sequence[SessionSummary]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedSession:
    """Answer to DELETE /v1/sessions/{sid}"""

    id: str
    object: Literal["session"] = "session"
    deleted: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledRequest:
    """It has been cancelled, unless it had ended before."""

    id: str
    object: Literal["session.request"] = "session.request"
    cancelled: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """It has failed, as the client said."""

    id: str
    object: Literal["session.request"] = "session.request"
    failed: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSubmitted:
    """Answer to POST /v1/submit"""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperValue:
    """Answer to POST /v1/get"""

    semantic_var_id: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamErrorDetail:
    """The error of status 424."""

    message: str
    type: str
    param: str | None
    code: Literal["upstream_failed"] = "upstream_failed"
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamErrorEnvelope:
    """The body of an answer with status 424."""

    error: UpstreamErrorDetail


# Not on the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    """Counters since the start of the service, for metrics.

    sessions: those that are open now.
    calls: how many have ended, by (state, service class; empty for those without one).
    prefills: beginnings of prompts that were computed before the rest was known.
    """

    sessions: int = 0
    calls: Mapping[tuple[str, str], int] = field(default_factory=dict)
    prefills: int = 0
