"""What a session looks like from outside. Snapshots: they do not change when the session does.

Times are seconds after the session was created, unless their name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bros.core.request import ServiceClass
from bros.semantic.errors import Cause
from bros.semantic.nodes import CallKind, TurnState, VariableState
from bros.semantic.program import Criteria


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
