"""Views of a session: what its calls do, why, and how long they are predicted to take.

Building the view of a large session takes longer than an event loop may be held, so it is built in
slices. Each call is then shown as it is when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from bros.core.interfaces import GroupCosts, Placement
from bros.core.request import ServiceClass
from bros.core.slices import Slices
from bros.semantic.core.explanation import CriticalPath, Forecast, explain, forecast, strictest
from bros.semantic.core.nodes import Call, Level, LlmCall, Variable
from bros.semantic.schema import (
    CallKind,
    CallView,
    CriticalPathView,
    GroupCostsView,
    LlmCallView,
    PlacementView,
    SessionSummary,
    SessionView,
    VariableView,
)
from bros.semantic.service.live import CallRecord, LlmCallRecord, ServedSession

_DIGITS = 6

_SLICE = 50
"""Calls or variables that are viewed between two pauses."""


class Insight(Protocol):
    """What is known about LLM calls beside the session's graph and records."""

    def rest_s(self, session: ServedSession, llm_call: LlmCall, beside: float | None) -> float:
        """See explanation.Rest."""
        ...

    def prefill_s(self, record: LlmCallRecord) -> float:
        """Predicted seconds of the prefill of a submitted LLM call."""
        ...

    def placement(self, request_id: str) -> Placement | None:
        """Where an engine request is; None without a router, or if it does not know it any more."""
        ...


def view_summary(session: ServedSession, now: float) -> SessionSummary:
    """A session without its graph."""
    return SessionSummary(**_summary(session, now))


def view_session(session: ServedSession, insight: Insight, now: float) -> Slices[SessionView]:
    """A session with its graph, as it is at the time `now`."""
    graph = session.machine.graph
    calls = tuple(graph.calls.values())

    def rest_s(llm_call: LlmCall, beside: float | None) -> float:
        return insight.rest_s(session, llm_call, beside)

    outlook = yield from forecast(calls, rest_s, now)
    viewer = _Viewer(session, insight, outlook, now)
    call_views = []
    for number, call in enumerate(calls, start=1):
        if call.llm_calls:  # else the session has forgotten it since
            call_views.append(viewer.call(call))
        if not number % _SLICE:
            yield
    variable_views = yield from view_variables(graph.variables.values())
    return SessionView(
        **_summary(session, now),
        calls=tuple(call_views),
        variables=tuple(variable_views),
        now_s=round(now - session.created_s, _DIGITS),
        critical_paths=tuple(_view_path(session, path) for path in outlook.paths),
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
        "tenant": session.scope or None,
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
        perf=strictest(variable),
        error=variable.cause,
    )


def view_variables(variables: Iterable[Variable]) -> Slices[list[VariableView]]:
    """Views of the variables that there are now."""
    views = []
    for number, variable in enumerate(tuple(variables), start=1):
        views.append(view_variable(variable))
        if not number % _SLICE:
            yield
    return views


def _view_path(session: ServedSession, path: CriticalPath) -> CriticalPathView:
    return CriticalPathView(
        variable=path.variable.id,
        requests=tuple(call.id for call in path.calls),
        predicted_end_s=round(path.end_s - session.created_s, _DIGITS),
        slack_s=_rounded(path.slack_s),
    )


class _Spent(NamedTuple):
    """Seconds that an LLM call has spent so far; None for a part that it has not reached."""

    queueing_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


class _Viewer:
    """Views the calls of one session at one time."""

    def __init__(
        self, session: ServedSession, insight: Insight, outlook: Forecast, now: float
    ) -> None:
        self._session = session
        self._insight = insight
        self._outlook = outlook
        self._now = now

    def call(self, call: Call) -> CallView:
        """One call with its LLM calls."""
        record = self._session.records.get(call.id) or CallRecord()
        llm_calls = tuple(self._llm_call(llm_call, record) for llm_call in call.llm_calls)
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
            state=call.state,
            service_class=current.service_class,
            level=current.level,
            stage=current.stage,
            depth=current.depth,
            group=current.group,
            deadline_s=current.deadline_s,
            inputs=tuple(dict.fromkeys(name for llm_call in llm_calls for name in llm_call.inputs)),
            outputs=tuple(name for llm_call in llm_calls for name in llm_call.outputs),
            submitted_s=round(call.created_s - self._session.created_s, _DIGITS),
            queued_s=_first(llm_call.queued_s for llm_call in llm_calls),
            first_token_s=_first(llm_call.first_token_s for llm_call in llm_calls),
            end_s=None if call.open else current.end_s,
            prompt_tokens=max(llm_call.prompt_tokens for llm_call in llm_calls),
            cached_tokens=sum(llm_call.cached_tokens for llm_call in llm_calls),
            output_tokens=sum(llm_call.output_tokens for llm_call in llm_calls),
            error=call.cause,
            llm_calls=llm_calls,
            prefixes=prefixes,
            why=current.why,
            predicted_end_s=current.predicted_end_s,
            slack_s=current.slack_s,
            critical=current.critical,
            queueing_s=_sum(llm_call.queueing_s for llm_call in llm_calls),
            prefill_s=_sum(llm_call.prefill_s for llm_call in llm_calls),
            decode_s=_sum(llm_call.decode_s for llm_call in llm_calls),
            placement=current.placement,
        )

    def _llm_call(self, llm_call: LlmCall, call_record: CallRecord) -> LlmCallView:
        record = call_record.llm_calls.get(llm_call.index) or LlmCallRecord()
        labeled = llm_call.wanted and llm_call.call.kind is CallKind.LLM
        group = record.group if llm_call.group is None else llm_call.group.id
        spent = self._spent(llm_call, record)
        return LlmCallView(
            state=llm_call.state,
            inputs=tuple(variable.id for variable in llm_call.inputs),
            outputs=tuple(variable.id for variable in llm_call.outputs),
            level=llm_call.label.level.name.lower() if labeled else None,
            service_class=record.service_class or (_planned_class(llm_call) if labeled else None),
            stage=llm_call.stage,
            depth=llm_call.depth,
            group=group,
            deadline_s=self._after(llm_call.label.deadline_s),
            queued_s=self._after(llm_call.ready_s),
            first_token_s=self._after(llm_call.first_token_s),
            end_s=self._after(llm_call.end_s),
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            why=_why(llm_call, record),
            predicted_end_s=self._after(self._outlook.end_s.get(llm_call)),
            slack_s=_rounded(self._outlook.slack_s(llm_call)),
            critical=llm_call in self._outlook.critical,
            queueing_s=_rounded(spent.queueing_s),
            prefill_s=_rounded(spent.prefill_s),
            decode_s=_rounded(spent.decode_s),
            placement=self._placement(record),
            prefilled_tokens=record.prefilled_tokens,
            attempts=record.attempts,
        )

    def _spent(self, llm_call: LlmCall, record: LlmCallRecord) -> _Spent:
        if llm_call.ready_s is None or llm_call.native:
            return _Spent()
        until_s = self._now if llm_call.end_s is None else llm_call.end_s
        if llm_call.first_token_s is None:
            return _Spent(max(0.0, until_s - llm_call.ready_s))
        ttft_s = llm_call.first_token_s - llm_call.ready_s
        prefill_s = min(ttft_s, self._insight.prefill_s(record))
        return _Spent(ttft_s - prefill_s, prefill_s, max(0.0, until_s - llm_call.first_token_s))

    def _placement(self, record: LlmCallRecord) -> PlacementView | None:
        found = record.placement
        if found is None and record.request_id is not None:
            found = self._insight.placement(record.request_id)
        if found is None:
            return None
        return PlacementView(
            replica=found.replica,
            reason=found.reason,
            expected_tokens=found.expected_tokens,
            group=_group_costs(found.group),
        )

    def _after(self, time_s: float | None) -> float | None:
        return None if time_s is None else round(time_s - self._session.created_s, _DIGITS)


def _group_costs(costs: GroupCosts | None) -> GroupCostsView | None:
    if costs is None:
        return None
    return GroupCostsView(
        cost_s=round(costs.cost_s, _DIGITS),
        alternative_s=_rounded(costs.alternative_s),
        replicas=costs.replicas,
    )


def _why(llm_call: LlmCall, record: LlmCallRecord) -> str:
    why = explain(llm_call, record.group)
    if llm_call.label.level is Level.RT and record.service_class is ServiceClass.BE:
        return f"{why}; the engine serves it as best-effort, because it is overloaded"
    return why


def _planned_class(llm_call: LlmCall) -> ServiceClass:
    return ServiceClass.RT if llm_call.label.level is Level.RT else ServiceClass.BE


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)


def _first(times: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times if time_s is not None), default=None)


def _sum(times: Iterable[float | None]) -> float | None:
    known = [seconds for seconds in times if seconds is not None]
    return round(sum(known), _DIGITS) if known else None
