"""One open session on the server: its settings, its records of calls, and its snapshots."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bros.core.request import ServiceClass
from bros.semantic.core.nodes import Call, Level, Turn, Variable
from bros.semantic.core.prompt import Begun, Prompt, Sharing
from bros.semantic.core.retention import SessionLimits
from bros.semantic.core.session import SessionStateMachine
from bros.semantic.schema import (
    CallKind,
    CallSpec,
    CallView,
    Criteria,
    Perf,
    PrefixView,
    SessionSummary,
    SessionView,
    SubmittedCall,
    TurnState,
    TurnView,
    VariableView,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Limits and times, all in seconds.

    ttl_s: how long an idle session lives; max_ttl_s: the most that a client may ask for.
    max_sessions: of the service. max_calls: of a session that are not over; kept_calls: that are,
    and are remembered. max_variables and max_chars: of a session, the latter of all values, and of
    all templates.
    max_labels: of a session, see SessionLimits; that many take a second or two of the processor,
    in slices.
    max_waiting: gets and streams that wait, of the service. max_wait_s: after which a get without
    a timeout of its own gives up.
    criteria: of sessions that do not say. max_tokens: of outputs without a limit of their own; a
    program does not look at what it gets, so it should not go on to the end of the context.
    park_s: how long KV is kept for a later turn of a call, or for a value that is on its way.
    retries: how often a turn is begun anew after the engine died, if it gives the same again;
    recovery_s: how long the engine may take to come back. patience_s: how long a turn waits
    for room in an engine that refuses it.
    max_gone: ids of past sessions that are remembered.
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
    park_s: float = 60.0
    retries: int = 2
    recovery_s: float = 60.0
    patience_s: float = 600.0
    max_gone: int = 10_000

    def limits(self) -> SessionLimits:
        """Those of one session."""
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
class TurnRecord:
    """What came of a turn on the engine.

    service_class: as which it is served, None before it is accepted. text: so far, while it is
    being generated. request_id: of the engine's request that runs it. group: the one that it was
    in when it was handed to the engine.
    """

    service_class: ServiceClass | None = None
    request_id: str | None = None
    group: str | None = None
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefilled_tokens: int = 0
    attempts: int = 0


@dataclass(eq=False, slots=True)
class CallRecord:
    """What a call has with the engine.

    prompt: None once the call is over, and of calls that the engine does not run. prefixes: of the
    whole prompt, then. text_chars: of its template. counted: its
    end is in the figures. kept: requests of the engine whose KV it keeps for what comes next. fill:
    the task that computes what is known of a prompt. growing: whoever adds to the prompt holds
    it, because long texts are encoded on a thread.
    """

    prompt: Prompt | None = None
    prefixes: tuple[PrefixView, ...] = ()
    text_chars: int = 0
    counted: bool = False
    turns: dict[int, TurnRecord] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    fill: asyncio.Task[None] | None = None
    growing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def turn(self, index: int) -> TurnRecord:
        return self.turns.setdefault(index, TurnRecord())


class Readers:
    """Who waits for news of variables: each has an event of its own, and takes it away again."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}

    def __len__(self) -> int:
        return sum(len(events) for events in self._events.values())

    @contextlib.contextmanager
    def reading(self, variable: Variable) -> Iterator[asyncio.Event]:
        """An event that is set on every `tell` while the block lasts."""
        event = asyncio.Event()
        self._events.setdefault(variable.id, set()).add(event)
        try:
            yield event
        finally:
            events = self._events[variable.id]
            events.remove(event)
            if not events:
                del self._events[variable.id]

    def tell(self, variable: Variable) -> None:
        """There is something new about the variable."""
        for event in self._events.get(variable.id, ()):
            event.set()


@dataclass(eq=False, slots=True, kw_only=True)
class ServedSession:
    """An open session.

    id: as its tenant calls it. uid: never used again for another, even if the id is.
    settled: who waits for values; streamed: who wants to see them grow as well.
    touched_s: when somebody last had to do with it. text_chars: of all templates that are
    remembered. num_plain: requests of plain clients that are under way; last_plain: by name of
    their calls, the engine's requests that keep KV for the next one. only_plain: one of these has
    opened it, and nobody else has done anything in it.
    answers: to the latest programs that have come with a key, by that.
    starting: held by a turn that begins, so that of a thousand that start together one after the
    other makes its prompt. gone: why it is no longer there.
    """

    id: str
    uid: str
    tenant: str
    scope: str
    criteria: Criteria
    sampling: Mapping[str, Any]
    metadata: Mapping[str, str]
    created_s: float
    created_unix_s: float
    ttl_s: float
    touched_s: float
    machine: SessionStateMachine
    sharing: Sharing
    begun: Begun
    records: dict[str, CallRecord] = field(default_factory=dict)
    tasks: dict[Turn, asyncio.Task[None]] = field(default_factory=dict)
    settled: Readers = field(default_factory=Readers)
    streamed: Readers = field(default_factory=Readers)
    timer: asyncio.TimerHandle | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    text_chars: int = 0
    num_plain: int = 0
    only_plain: bool = False
    last_plain: dict[str, tuple[str, ...]] = field(default_factory=dict)
    answers: dict[str, tuple[Sequence[CallSpec], Sequence[SubmittedCall]]] = field(
        default_factory=dict
    )
    gone: str | None = None

    @property
    def busy(self) -> bool:
        """Whether something runs in it, or somebody waits."""
        return bool(self.tasks or self.num_plain or len(self.settled) or len(self.streamed))

    def expires_s(self) -> float | None:
        """When it has been idle for too long; None while it is not idle."""
        return None if self.busy else self.touched_s + self.ttl_s

    def record(self, call_id: str) -> CallRecord:
        return self.records.setdefault(call_id, CallRecord())

    def remember_answer(
        self, key: str, calls: Sequence[CallSpec], answer: Sequence[SubmittedCall]
    ) -> None:
        """A client that does not get it may ask again."""
        self.answers[key] = calls, answer
        if len(self.answers) > _KEPT_ANSWERS:
            del self.answers[next(iter(self.answers))]

    def forget_records(self) -> None:
        """Those of calls that the graph has forgotten and the engine is done with, once there
        are many."""
        known = self.machine.graph.calls
        if len(self.records) > 2 * len(known) + _FORGET_FROM:
            self.records = {
                key: record
                for key, record in self.records.items()
                if key in known or record.prompt is not None or record.kept
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
        "metadata": dict(session.metadata),
    }


def view_variable(variable: Variable) -> VariableView:
    """One variable with what it is connected to."""
    return VariableView(
        id=variable.id,
        name=variable.name,
        state=variable.state,
        value=variable.text,
        producer=None if variable.producer is None else variable.producer.call.id,
        consumers=tuple(dict.fromkeys(turn.call.id for turn in variable.consumers)),
        perf=_perf(variable),
        error=variable.cause,
    )


def view_call(session: ServedSession, call: Call) -> CallView:
    """One call with its turns."""
    record = session.records.get(call.id) or CallRecord()
    turns = tuple(_view_turn(session, turn, record) for turn in call.turns)
    at = next((index for index, turn in enumerate(call.turns) if turn.open), len(turns) - 1)
    if at and not call.turns[at].wanted:
        at -= 1  # nobody has asked for more so far
    current = turns[at]
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
        inputs=tuple(dict.fromkeys(name for turn in turns for name in turn.inputs)),
        outputs=tuple(name for turn in turns for name in turn.outputs),
        submitted_s=round(call.created_s - session.created_s, _DIGITS),
        queued_s=_first(turn.queued_s for turn in turns),
        first_token_s=_first(turn.first_token_s for turn in turns),
        end_s=None if call.open else current.end_s,
        prompt_tokens=_last(turn.prompt_tokens for turn in turns),
        cached_tokens=sum(turn.cached_tokens for turn in turns),
        output_tokens=sum(turn.output_tokens for turn in turns),
        error=call.cause,
        turns=turns,
        prefixes=prefixes,
    )


def class_name(session: ServedSession, call: Call) -> str:
    """As what the engine served a call in the end; empty if it never did."""
    record = session.records.get(call.id) or CallRecord()
    classes = [turn.service_class for turn in record.turns.values() if turn.service_class]
    return classes[-1].value if classes else ""


def _view_turn(session: ServedSession, turn: Turn, call_record: CallRecord) -> TurnView:
    record = call_record.turns.get(turn.index, TurnRecord())
    labelled = turn.wanted and turn.call.kind is CallKind.LLM
    group = next(iter(turn.groups)).id if turn.groups else record.group
    return TurnView(
        state=turn.state,
        inputs=tuple(variable.id for variable in turn.inputs),
        outputs=tuple(variable.id for variable in turn.outputs),
        level=turn.label.level.name.lower() if labelled else None,
        service_class=record.service_class or (_planned_class(turn) if labelled else None),
        stage=turn.stage,
        depth=turn.depth,
        group=group,
        deadline_s=_after(session, turn.label.deadline_s),
        queued_s=_after(session, turn.ready_s),
        first_token_s=_after(session, turn.first_token_s),
        end_s=_after(session, turn.end_s),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        prefilled_tokens=record.prefilled_tokens,
        attempts=record.attempts,
    )


def _planned_class(turn: Turn) -> ServiceClass:
    return ServiceClass.RT if turn.label.level is Level.RT else ServiceClass.BE


def call_state(call: Call) -> TurnState:
    """Of the turn that it is at: the first one that is not over, or the first that went wrong."""
    for turn in call.turns:
        if turn.state is not TurnState.FINISHED:
            return turn.state
    return TurnState.FINISHED


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


def _last(counts: Iterable[int]) -> int:
    return max(counts, default=0)
