"""What clients of sessions send and get."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bros.core.request import ServiceClass
from bros.semantic.errors import Cause


class Role(enum.StrEnum):
    """What a placeholder stands for."""

    INPUT = "input"
    OUTPUT = "output"


class Perf(enum.StrEnum):
    """What matters about a value: LATENCY, when it is complete; TTFT and TPOT, when it begins and
    how fast it goes on (somebody reads along); THROUGHPUT, that many are done some time."""

    LATENCY = "latency"
    TTFT = "ttft"
    TPOT = "tpot"
    THROUGHPUT = "throughput"


_MAX_S = 1e9
"""Longest time that anybody may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """How soon a value is wanted. Times are seconds; None: the server's defaults, no deadline.

    deadline_s: until the value is complete, from when this is asked for on.
    """

    perf: Perf = Perf.LATENCY
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None


def checked_seconds(name: str, value: float | None, *, zero: bool = False) -> float | None:
    """value, before it goes on its way together with what could fail with it.

    zero: whether none at all will do. Raises ValueError in terms of who gave it under that name.
    """
    if value is None:
        return None
    is_number = isinstance(value, int | float) and value <= _MAX_S
    if not is_number or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be seconds, {'0 or more' if zero else 'above 0'}: {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One placeholder of a call.

    role: None takes that of the template; it must not say another one.
    variable: id of a variable of the session, which comes into being if it is not there; None: a
    new one. value: of an input instead of that (a constant). transforms: see transforms.py.
    sampling: of an output, on top of the call's. criteria: of an output: it is wanted at once.
    """

    name: str
    role: Role | None = None
    variable: str | None = None
    value: str | None = None
    transforms: str | None = None
    sampling: Mapping[str, Any] | None = None
    criteria: Criteria | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One of a conversation whose content is a template."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """One call as a client describes it: exactly one of template and messages, or native.

    name: of the function; calls of one name are expected to be alike in length.
    template: a text with {{input:x}} and {{output:y}}. chat: make a conversation of it by the
    model's chat template: what stands before an output is what the user says, the output is the
    answer. messages: a conversation whose contents are templates; without an output placeholder
    the answer to it is an output with the name "output".
    native: no call of the model but a function that the client runs: parameters alone say what it
    reads and sets; it is there so that the graph is known.
    sampling: for all outputs, the fields of SamplingParams.
    """

    name: str = ""
    template: str | None = None
    messages: Sequence[Message] | None = None
    chat: bool = False
    native: bool = False
    parameters: Sequence[Parameter] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedCall:
    """Answer to one CallSpec. variables: placeholder -> id of its variable."""

    request_id: str
    variables: Mapping[str, str]


class VariableState(enum.StrEnum):
    """PENDING until it has its value, or until it is certain that it never will."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TurnState(enum.StrEnum):
    """How far a turn is."""

    WAITING = "waiting"  # for inputs, the turn before it, or somebody who wants its output
    READY = "ready"  # in the engine's queue; a native one: the client can run it
    RUNNING = "running"  # its first token is there
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class CallKind(enum.StrEnum):
    """Who runs a call."""

    LLM = "llm"  # the engine
    NATIVE = "native"  # the client, which sets the outputs
    PLAIN = "plain"  # the engine, asked for it outside of the session, which only watches it


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableView:
    """One variable. value: with state "ready". producer, consumers: ids of requests.

    error: what failed first, with state "failed" or "cancelled". perf: the strictest of what it
    has been asked for with; None while nobody wants it.
    """

    id: str
    name: str
    state: VariableState
    value: str | None = None
    producer: str | None = None
    consumers: tuple[str, ...] = ()
    perf: str | None = None
    error: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixView:
    """A place where prompts may part: everything before token `offset`, and the hash of that.

    Equal hashes mean equal tokens, of the same model and for those who may share them. after: the
    variable whose value ends there, by its id; None: it is a text of the template.
    """

    offset: int
    hash: str
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One output of a call, and the inputs that are new in it. The unit of scheduling.

    service_class: None until it is wanted; after that what the engine serves it as, or is going
    to. stage: distance from the end of the program, None until somebody wants it. group: it is
    one of those that a later call waits for together, with their id. deadline_s: when its value
    should be there. queued_s: when all that it needs was there. attempts: how often the engine
    was asked. prefilled_tokens: computed while an input was still being made.
    """

    state: TurnState
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    level: str | None = None
    service_class: ServiceClass | None = None
    stage: int | None = None
    depth: int = 0
    group: str | None = None
    deadline_s: float | None = None
    queued_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefilled_tokens: int = 0
    attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """One call: a request of its session. Most have one turn; see TurnView for the fields.

    state: of the turn that it is at; that of the whole call once it has ended. stage,
    service_class, level, group, deadline_s: of the turn that it is at. prompt_tokens: of the last
    turn that was begun. cached_tokens, output_tokens: sums. prefixes: known once the prompt is.
    """

    id: str
    name: str
    kind: CallKind
    state: TurnState
    service_class: ServiceClass | None
    level: str | None
    stage: int | None
    depth: int
    group: str | None
    deadline_s: float | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    submitted_s: float
    queued_s: float | None
    first_token_s: float | None
    end_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: Cause | None
    turns: tuple[TurnView, ...]
    prefixes: tuple[PrefixView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session and its graph. created_s: Unix time. state: "open", or "closed" of one that has
    just been deleted. expires_in_s: None while something runs or somebody waits in it."""

    id: str
    tenant: str
    state: str
    created_s: float
    expires_in_s: float | None
    ttl_s: float
    scope: str
    criteria: Criteria
    metadata: Mapping[str, str]
    calls: tuple[CallView, ...]
    variables: tuple[VariableView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    """Counters since the start of the service, for metrics.

    sessions: open ones now. calls: how many have ended, by (state, service class; empty for those
    without one). prefills: beginnings of prompts that were computed before the rest was known.
    """

    sessions: int = 0
    calls: Mapping[tuple[str, str], int] = field(default_factory=dict)
    prefills: int = 0
