"""An open session on the server: its settings, its records of calls, and its views."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bros.core.request import RequestGroup, ServiceClass
from bros.semantic.core.nodes import Call, Level, LlmCall, Variable
from bros.semantic.core.prompt import Prompt, PromptSharing, RequestedPrefixes
from bros.semantic.core.retention import SessionLimits
from bros.semantic.core.session import SessionStateMachine
from bros.semantic.schema import (
    CallKind,
    CallSpec,
    CallState,
    CallView,
    Criteria,
    LlmCallView,
    Perf,
    PrefixView,
    SessionSummary,
    SessionView,
    Sharing,
    SubmittedCall,
    VariableView,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Limits and times of the session service.

    ttl_s: time after which an idle session expires.
    max_ttl_s: longest TTL that a client can request.
    max_sessions: open sessions of the service.
    max_calls: open calls of a session.
    kept_calls: ended calls of a session that are kept.
    max_variables: variables of a session.
    max_chars: characters of all values of a session, and likewise of all its templates.
    max_labels: labels of a session, see SessionLimits. This many take 1 to 2 s of CPU time, in
        slices.
    max_waiting: waiting gets and streams of the service.
    max_wait_s: longest wait of a get, and its default timeout.
    criteria: default criteria of sessions.
    max_tokens: default of outputs. Without it, an output that no stop condition ends would be
        generated up to the context length.
    pin_s: how long KV stays pinned for the next LLM call of a call, or after a prefill ahead.
    retries: restarts of a reproducible LLM call after engine deaths.
    recovery_s: how long LLM calls wait for a dead engine to recover.
    patience_s: how long an LLM call retries while the engine is overloaded.
    max_gone: ids of ended sessions that are remembered.
    """

    ttl_s: float = 600.0
    max_ttl_s: float = 86_400.0
    max_sessions: int = 1000
    max_calls: int = 10_000
    kept_calls: int = 2_000
    max_variables: int = 50_000
    max_chars: int = 50_000_000
    max_labels: int = 100_000
    max_waiting: int = 10_000
    max_wait_s: float = 3600.0
    criteria: Criteria = Criteria()
    max_tokens: int = 256
    pin_s: float = 60.0
    retries: int = 2
    recovery_s: float = 60.0
    patience_s: float = 600.0
    max_gone: int = 10_000

    def limits(self) -> SessionLimits:
        """The limits of one session."""
        return SessionLimits(
            max_calls=self.max_calls,
            kept_calls=self.kept_calls,
            max_variables=self.max_variables,
            max_value_chars=self.max_chars,
            max_labels=self.max_labels,
        )


_FORGET_FROM = 100
_KEPT_ANSWERS = 8


@dataclass(eq=False, slots=True)
class LlmCallRecord:
    """State of an LLM call on the engine.

    service_class: its current service class; None until the engine accepts it.
    request_id: id of its latest engine request.
    group: id of its task group when it was submitted.
    text: text generated so far; empty after its end.
    prompt_tokens: length of its prompt.
    requested_tokens: prompt tokens that the session had submitted to the engine before.
    cached_tokens: prompt tokens that were cached.
    output_tokens: tokens generated so far.
    prefilled_tokens: prompt tokens prefilled ahead.
    attempts: number of submissions.
    promoted: whether it was submitted as best-effort and has become real-time since.
    """

    service_class: ServiceClass | None = None
    request_id: str | None = None
    group: str | None = None
    text: str = ""
    prompt_tokens: int = 0
    requested_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefilled_tokens: int = 0
    attempts: int = 0
    promoted: bool = False


@dataclass(eq=False, slots=True)
class CallRecord:
    """State of a call on the engine.

    prompt: its tokens; None after its end, and for calls that the session does not run.
    prefixes: prefixes of the whole prompt, after its end.
    text_chars: characters of its template.
    counted: whether its end is counted in the figures.
    llm_calls: records of its LLM calls by index.
    pinned: ids of engine requests whose KV is pinned for the next LLM call.
    prefill: the task that prefills the known prefix of the prompt.
    lock: held while the prompt is extended, because long texts are encoded on a thread.
    """

    prompt: Prompt | None = None
    prefixes: tuple[PrefixView, ...] = ()
    text_chars: int = 0
    counted: bool = False
    llm_calls: dict[int, LlmCallRecord] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    prefill: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def llm_call(self, index: int) -> LlmCallRecord:
        return self.llm_calls.setdefault(index, LlmCallRecord())


class Subscribers:
    """Subscribers to variables, each with its own event."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}

    def __len__(self) -> int:
        return sum(len(events) for events in self._events.values())

    @contextlib.contextmanager
    def subscribe(self, variable: Variable) -> Iterator[asyncio.Event]:
        """Subscribe for the duration of the block: `notify` sets the event."""
        event = asyncio.Event()
        self._events.setdefault(variable.id, set()).add(event)
        try:
            yield event
        finally:
            events = self._events[variable.id]
            events.remove(event)
            if not events:
                del self._events[variable.id]

    def notify(self, variable: Variable) -> None:
        """Wake all subscribers of the variable."""
        for event in self._events.get(variable.id, ()):
            event.set()


@dataclass(eq=False, slots=True, kw_only=True)
class ServedSession:
    """An open session.

    id: the id that its tenant uses; reusable after its end.
    uid: unique for all time.
    scope: see SessionService.create.
    shared_with: its `sharing`, see there as well.
    criteria: default criteria of requested values.
    sampling: default sampling parameters of outputs.
    created_s: creation time on the clock of the service.
    created_unix_s: creation time in Unix seconds.
    machine: its state machine with the graph.
    sharing: which requests share the KV of its prompts.
    requested_prefixes: prompt prefixes that were submitted to the engine.
    records: call id -> record.
    tasks: tasks of running LLM calls.
    settled: subscribers that wait for values.
    streamed: subscribers that stream values.
    timer: calls `tick` of the state machine when it is due.
    starting: held by one starting LLM call at a time, so that a burst of them does not block the
        event loop.
    text_chars: characters of all templates with a record.
    num_plain: running requests of plain clients.
    only_plain: whether a plain client opened it and only plain clients have used it.
    last_plain: call name -> engine requests whose KV is pinned for the plain client's next request
        of that name.
    answers: key -> calls and answer of the latest programs with a key.
    end_reason: why it has ended; None while it is open.
    """

    id: str
    uid: str
    tenant: str
    scope: str
    shared_with: Sharing
    criteria: Criteria
    sampling: Mapping[str, Any]
    metadata: Mapping[str, str]
    created_s: float
    created_unix_s: float
    ttl_s: float
    last_activity_s: float
    machine: SessionStateMachine
    sharing: PromptSharing
    requested_prefixes: RequestedPrefixes
    records: dict[str, CallRecord] = field(default_factory=dict)
    tasks: dict[LlmCall, asyncio.Task[None]] = field(default_factory=dict)
    settled: Subscribers = field(default_factory=Subscribers)
    streamed: Subscribers = field(default_factory=Subscribers)
    timer: asyncio.TimerHandle | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    text_chars: int = 0
    num_plain: int = 0
    only_plain: bool = False
    last_plain: dict[str, tuple[str, ...]] = field(default_factory=dict)
    answers: dict[str, tuple[Sequence[CallSpec], Sequence[SubmittedCall]]] = field(
        default_factory=dict
    )
    end_reason: str | None = None

    @property
    def busy(self) -> bool:
        """Whether a call runs in it, or a client waits for one of its values."""
        return bool(self.tasks or self.num_plain or len(self.settled) or len(self.streamed))

    def expires_s(self) -> float | None:
        """Time when it expires; None while it is busy."""
        return None if self.busy else self.last_activity_s + self.ttl_s

    def record(self, call_id: str) -> CallRecord:
        return self.records.setdefault(call_id, CallRecord())

    def remember_answer(
        self, key: str, calls: Sequence[CallSpec], answer: Sequence[SubmittedCall]
    ) -> None:
        """Remember an answer, because a client that did not receive it may send the key again."""
        self.answers[key] = calls, answer
        if len(self.answers) > _KEPT_ANSWERS:
            del self.answers[next(iter(self.answers))]

    def forget_records(self) -> None:
        """Drop records of calls that the graph has forgotten and that have no prompt or pinned KV.

        It does so only when there are many, so that its cost is amortized.
        """
        known = self.machine.graph.calls
        if len(self.records) > 2 * len(known) + _FORGET_FROM:
            self.records = {
                key: record
                for key, record in self.records.items()
                if key in known or record.prompt is not None or record.pinned
            }
            self.text_chars = sum(record.text_chars for record in self.records.values())


_DIGITS = 6
_BY_STRICTNESS = (Perf.TTFT, Perf.TPOT, Perf.LATENCY)


def view_summary(session: ServedSession, now: float) -> SessionSummary:
    """A session without its graph."""
    return SessionSummary(**_summary(session, now))


def view_session(session: ServedSession, now: float) -> SessionView:
    """A session with its graph."""
    graph = session.machine.graph
    return SessionView(
        **_summary(session, now),
        calls=tuple(view_call(session, call) for call in graph.calls.values()),
        variables=tuple(view_variable(variable) for variable in graph.variables.values()),
    )


def _summary(session: ServedSession, now: float) -> dict[str, Any]:
    expires_s = session.expires_s()
    return {
        "id": session.id,
        "state": "closed" if session.machine.closed else "open",
        "created_at": int(session.created_unix_s),
        "expires_in_s": None if expires_s is None else round(max(0.0, expires_s - now), 3),
        "ttl_s": session.ttl_s,
        "criteria": session.criteria,
        "tenant": session.scope,
        "sharing": session.shared_with,
        "metadata": dict(session.metadata),
    }


def view_variable(variable: Variable) -> VariableView:
    """A variable with the ids of its producer and consumers."""
    return VariableView(
        id=variable.id,
        name=variable.name,
        state=variable.state,
        value=variable.text,
        producer=None if variable.producer is None else variable.producer.call.id,
        consumers=tuple(dict.fromkeys(llm_call.call.id for llm_call in variable.consumers)),
        perf=_perf(variable),
        error=variable.cause,
    )


def view_call(session: ServedSession, call: Call) -> CallView:
    """One call with its LLM calls."""
    record = session.records.get(call.id) or CallRecord()
    llm_calls = tuple(_view_llm_call(session, llm_call, record) for llm_call in call.llm_calls)
    at = next(
        (index for index, llm_call in enumerate(call.llm_calls) if llm_call.open),
        len(llm_calls) - 1,
    )
    if at and not call.llm_calls[at].wanted:
        at -= 1  # no client has requested the next output yet
    current = llm_calls[at]
    prefixes = record.prefixes if record.prompt is None else record.prompt.prefixes
    return CallView(
        id=call.id,
        name=call.name,
        kind=call.kind,
        state=call_state(call),
        service_class=current.service_class,
        level=current.level,
        stage=current.stage,
        depth=current.depth,
        group=current.group,
        deadline_s=current.deadline_s,
        inputs=tuple(dict.fromkeys(name for llm_call in llm_calls for name in llm_call.inputs)),
        outputs=tuple(name for llm_call in llm_calls for name in llm_call.outputs),
        submitted_s=round(call.created_s - session.created_s, _DIGITS),
        queued_s=_first(llm_call.queued_s for llm_call in llm_calls),
        first_token_s=_first(llm_call.first_token_s for llm_call in llm_calls),
        end_s=None if call.open else current.end_s,
        prompt_tokens=max(llm_call.prompt_tokens for llm_call in llm_calls),
        cached_tokens=sum(llm_call.cached_tokens for llm_call in llm_calls),
        output_tokens=sum(llm_call.output_tokens for llm_call in llm_calls),
        error=call.cause,
        llm_calls=llm_calls,
        prefixes=prefixes,
    )


def class_name(session: ServedSession, call: Call) -> str:
    """The last service class of a call; empty if the engine never accepted it."""
    record = session.records.get(call.id) or CallRecord()
    classes = [
        llm_call.service_class for llm_call in record.llm_calls.values() if llm_call.service_class
    ]
    return classes[-1].value if classes else ""


def _view_llm_call(
    session: ServedSession, llm_call: LlmCall, call_record: CallRecord
) -> LlmCallView:
    record = call_record.llm_calls.get(llm_call.index, LlmCallRecord())
    labeled = llm_call.wanted and llm_call.call.kind is CallKind.LLM
    group = next(iter(llm_call.groups)).id if llm_call.groups else record.group
    return LlmCallView(
        state=llm_call.state,
        inputs=tuple(variable.id for variable in llm_call.inputs),
        outputs=tuple(variable.id for variable in llm_call.outputs),
        level=llm_call.label.level.name.lower() if labeled else None,
        service_class=record.service_class or (_planned_class(llm_call) if labeled else None),
        stage=llm_call.stage,
        depth=llm_call.depth,
        group=group,
        deadline_s=_after(session, llm_call.label.deadline_s),
        queued_s=_after(session, llm_call.ready_s),
        first_token_s=_after(session, llm_call.first_token_s),
        end_s=_after(session, llm_call.end_s),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        prefilled_tokens=record.prefilled_tokens,
        attempts=record.attempts,
    )


def request_group(session: ServedSession, llm_call: LlmCall) -> RequestGroup | None:
    """The task group of an LLM call as engines and routers know it; the first one of several."""
    group = next(iter(llm_call.groups), None)
    return None if group is None else RequestGroup(f"{session.uid}/{group.id}", group.size)


def _planned_class(llm_call: LlmCall) -> ServiceClass:
    return ServiceClass.RT if llm_call.label.level is Level.RT else ServiceClass.BE


def call_state(call: Call) -> CallState:
    """The state of its first LLM call that is not FINISHED; FINISHED if all are."""
    for llm_call in call.llm_calls:
        if llm_call.state is not CallState.FINISHED:
            return llm_call.state
    return CallState.FINISHED


def _perf(variable: Variable) -> str | None:
    want = variable.want
    if want is None:
        return None
    objectives = () if want.label is None else want.label.objectives
    return next((perf for perf in _BY_STRICTNESS if perf in objectives), Perf.THROUGHPUT)


def _after(session: ServedSession, time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s - session.created_s, _DIGITS)


def _first(times: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times if time_s is not None), default=None)
