"""Snapshots of sessions, for those who look at them from outside."""

from __future__ import annotations

from collections.abc import Iterable

from bros.core.request import ServiceClass
from bros.semantic.labels import Level
from bros.semantic.live import CallRecord, LiveSession, TurnRecord
from bros.semantic.nodes import Call, CallKind, Turn, TurnState, Variable
from bros.semantic.program import Perf
from bros.semantic.views import CallView, SessionView, TurnView, VariableView

_BY_STRICTNESS = (Perf.TTFT, Perf.TPOT, Perf.LATENCY)


def view_session(session: LiveSession, now: float, *, graph: bool = True) -> SessionView:
    """graph: with its calls and variables."""
    expires_s = session.expires_s()
    calls = session.core.graph.calls.values() if graph else ()
    variables = session.core.graph.variables.values() if graph else ()
    return SessionView(
        id=session.id,
        tenant=session.tenant,
        state="closed" if session.core.closed else "open",
        created_s=session.created_unix_s,
        expires_in_s=None if expires_s is None else max(0.0, expires_s - now),
        ttl_s=session.ttl_s,
        scope=session.scope,
        criteria=session.criteria,
        metadata=dict(session.metadata),
        calls=tuple(view_call(session, call) for call in calls),
        variables=tuple(view_variable(variable) for variable in variables),
    )


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


def view_call(session: LiveSession, call: Call) -> CallView:
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
        submitted_s=call.created_s - session.created_s,
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


def class_name(session: LiveSession, call: Call) -> str:
    """As what the engine served a call in the end; empty if it never did."""
    record = session.records.get(call.id) or CallRecord()
    classes = [turn.service_class for turn in record.turns.values() if turn.service_class]
    return classes[-1].value if classes else ""


def _view_turn(session: LiveSession, turn: Turn, call_record: CallRecord) -> TurnView:
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


def _after(session: LiveSession, time_s: float | None) -> float | None:
    return None if time_s is None else time_s - session.created_s


def _first(times: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times if time_s is not None), default=None)


def _last(counts: Iterable[int]) -> int:
    return max(counts, default=0)
