"""Sessions on the wire: what clients get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from bros.semantic.errors import Cause
from bros.semantic.schema import CallView, Criteria, SessionView, TurnView, VariableView


class CauseObject(BaseModel):
    """What failed first."""

    request_id: str
    stage: Literal["fill", "generate", "engine", "transform", "native", "cancelled"]
    message: str
    variable: str | None
    name: str = Field(description="What the request is called")

    @classmethod
    def of(cls, cause: Cause | None) -> CauseObject | None:
        if cause is None:
            return None
        return cls(
            request_id=cause.request_id,
            stage=cause.stage.value,
            message=cause.message,
            variable=cause.variable,
            name=cause.name,
        )


class CriteriaObject(BaseModel):
    perf: Literal["latency", "ttft", "tpot", "throughput"]
    ttft_ms: float | None
    tpot_ms: float | None
    deadline_ms: float | None

    @classmethod
    def of(cls, criteria: Criteria) -> CriteriaObject:
        return cls(
            perf=criteria.perf.value,
            ttft_ms=_ms(criteria.ttft_s),
            tpot_ms=_ms(criteria.tpot_s),
            deadline_ms=_ms(criteria.deadline_s),
        )


class VariableObject(BaseModel):
    """A semantic variable."""

    id: str
    object: Literal["variable"] = "variable"
    name: str
    state: Literal["pending", "ready", "failed", "cancelled"]
    value: str | None = Field(description="With state ready")
    producer: str | None = Field(description="The request it comes from")
    consumers: list[str] = Field(description="The requests that read it")
    perf: str | None = Field(description="The strictest criterion it was asked for with")
    error: CauseObject | None = Field(description="With states failed and cancelled")

    @classmethod
    def of(cls, view: VariableView) -> VariableObject:
        return cls(
            id=view.id,
            name=view.name,
            state=view.state.value,
            value=view.value,
            producer=view.producer,
            consumers=list(view.consumers),
            perf=view.perf,
            error=CauseObject.of(view.error),
        )


class VariableList(BaseModel):
    object: Literal["list"] = "list"
    data: list[VariableObject]


class _Progress(BaseModel):
    """Times are seconds after the session was created."""

    state: str
    inputs: list[str]
    outputs: list[str]
    level: str | None = Field(description="rt, group or throughput; null while nobody wants it")
    service_class: str | None = Field(description="What the engine serves it as")
    stage: int | None = Field(description="Requests between it and the end of the program")
    depth: int = Field(description="Requests before it")
    group: str | None = Field(description="Those that a later request waits for together")
    deadline_s: float | None
    queued_s: float | None = Field(description="When all that it needs was there")
    first_token_s: float | None
    end_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class TurnObject(_Progress):
    """One output of a request, and the inputs that are new in it."""

    @classmethod
    def of(cls, view: TurnView) -> TurnObject:
        return cls(**_shared(view))


class PrefixObject(BaseModel):
    """A place where prompts may part: what all of it before that token hashes to."""

    offset: int
    hash: str
    after: str | None = Field(description="Id of the variable that ends there; null: a text")


class CallObject(_Progress):
    """A request of a session."""

    id: str
    object: Literal["session.request"] = "session.request"
    name: str
    kind: Literal["llm", "native", "plain"]
    submitted_s: float
    error: CauseObject | None
    turns: list[TurnObject] = Field(description="One for each output, if there are several")
    prefixes: list[PrefixObject]

    @classmethod
    def of(cls, view: CallView) -> CallObject:
        return cls(
            **_shared(view),
            id=view.id,
            name=view.name,
            kind=view.kind.value,
            submitted_s=round(view.submitted_s, 6),
            error=CauseObject.of(view.error),
            turns=[TurnObject.of(turn) for turn in view.turns] if len(view.turns) > 1 else [],
            prefixes=[
                PrefixObject(offset=prefix.offset, hash=prefix.hash, after=prefix.after)
                for prefix in view.prefixes
            ],
        )


class SessionSummary(BaseModel):
    """A session without its graph."""

    id: str
    object: Literal["session"] = "session"
    state: Literal["open", "closed"]
    created_at: int = Field(description="Unix seconds")
    ttl_s: float
    expires_in_s: float | None = Field(description="null while something runs or somebody waits")
    criteria: CriteriaObject
    tenant: str
    metadata: dict[str, str]

    @classmethod
    def of(cls, view: SessionView) -> SessionSummary:
        return cls(**_summary(view))


class SessionObject(SessionSummary):
    """A session with its graph."""

    requests: list[CallObject]
    variables: list[VariableObject]

    @classmethod
    def of(cls, view: SessionView) -> SessionObject:
        return cls(
            **_summary(view),
            requests=[CallObject.of(call) for call in view.calls],
            variables=[VariableObject.of(variable) for variable in view.variables],
        )


class SessionList(BaseModel):
    object: Literal["list"] = "list"
    data: list[SessionSummary]


class DeletedSession(BaseModel):
    id: str
    object: Literal["session"] = "session"
    deleted: Literal[True] = True


class SubmittedRequest(BaseModel):
    id: str
    variables: dict[str, str] = Field(description="placeholder -> id of its variable")
    values: dict[str, str] | None = Field(
        None, description="With wait: placeholder -> value, of the outputs that were waited for"
    )


class SubmittedRequests(BaseModel):
    requests: list[SubmittedRequest]


class CancelledRequest(BaseModel):
    """It has been cancelled, unless it had ended before."""

    id: str
    object: Literal["session.request"] = "session.request"
    cancelled: Literal[True] = True


class FailedRequest(BaseModel):
    """It has failed, as the client said."""

    id: str
    object: Literal["session.request"] = "session.request"
    failed: Literal[True] = True


class PaperSubmitted(BaseModel):
    """Answer to POST /v1/submit"""

    request_id: str


class PaperValue(BaseModel):
    """Answer to POST /v1/get"""

    semantic_var_id: str
    content: str


class UpstreamErrorDetail(BaseModel):
    """The error of status 424."""

    message: str
    type: str
    param: str | None
    code: Literal["upstream_failed"]
    cause: CauseObject


class UpstreamErrorEnvelope(BaseModel):
    error: UpstreamErrorDetail


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


_SAME: Sequence[str] = (
    *("stage", "depth", "group", "level"),
    *("prompt_tokens", "cached_tokens", "output_tokens"),
)
_TIMES: Sequence[str] = ("deadline_s", "queued_s", "first_token_s", "end_s")


def _shared(view: TurnView | CallView) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(view, name) for name in _SAME}
    for name in _TIMES:
        seconds = getattr(view, name)
        fields[name] = None if seconds is None else round(seconds, 6)
    service_class = view.service_class
    return fields | {
        "state": view.state.value,
        "service_class": None if service_class is None else service_class.value,
        "inputs": list(view.inputs),
        "outputs": list(view.outputs),
    }


def _summary(view: SessionView) -> dict[str, Any]:
    expires_in_s = view.expires_in_s
    return {
        "id": view.id,
        "state": view.state,
        "created_at": int(view.created_s),
        "ttl_s": view.ttl_s,
        "expires_in_s": None if expires_in_s is None else round(expires_in_s, 3),
        "criteria": CriteriaObject.of(view.criteria),
        "tenant": view.scope,
        "metadata": dict(view.metadata),
    }
