"""Explains a program while it runs: why each LLM call has its class, when it is predicted to end,
and which chain of calls each requested value waits for.

```
       now ──▶ a (2 s) ──▶ b (1 s) ─┐
               c (1 s) ─────────────┴▶ d (1 s) ──▶ requested value, predicted 4 s from now

    critical path   a, b, d: the value waits for these one after another
    slack of c      its latest finish time less its predicted end
```

It reads the graph and changes nothing. A forecast of a large session is made in slices: the graph
may change between them, so the forecast holds for the calls that were open when it began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from bros.core.slices import Slices
from bros.semantic.core.nodes import Call, Level, LlmCall, Promotion, Variable, earliest
from bros.semantic.schema import CallKind, Perf

_BY_STRICTNESS = (Perf.TTFT, Perf.TPOT, Perf.LATENCY)

_SLICE = 100
"""LLM calls that a forecast visits between two pauses."""


def strictest(variable: Variable) -> Perf | None:
    """The strictest criterion that clients requested the variable with; None if none did."""
    want = variable.want
    if want is None:
        return None
    objectives = () if want.label is None else want.label.objectives
    return next((perf for perf in _BY_STRICTNESS if perf in objectives), Perf.THROUGHPUT)


# ---- Why an LLM call has its label.


def explain(llm_call: LlmCall, group_id: str | None = None) -> str:
    """In a few words why the LLM call has its level.

    group_id: the task group that it was submitted in; groups forget members that have finished.
    """
    if llm_call.call.kind is CallKind.PLAIN:
        return "request of an OpenAI client, in the class that it asks for"
    if not llm_call.wanted:
        return "no requested value needs it"
    if llm_call.native:
        return "native function, which the client runs"
    if not llm_call.stages and llm_call.lowered:
        return "no requested value needs it any more"
    if not llm_call.stages:
        return "its place in the program is not deduced yet"
    own = next((variable for variable in llm_call.outputs if _urgent(variable)), None)
    if own is not None:
        return f"its value is requested with {(strictest(own) or Perf.LATENCY).name}"
    promoted = llm_call.promoted
    if promoted is not None and promoted.why is Promotion.STRAGGLER:
        return f"promoted: one of the last of its task group before {_named(promoted.sink)}"
    if promoted is not None:
        return f"promoted: the deadline of {_named(promoted.sink)} is at risk"
    sink = _deciding(llm_call)
    if llm_call.label.level is Level.THROUGHPUT:
        is_own = sink in llm_call.outputs
        whose = "its value is" if is_own else f"it is {_before(llm_call, sink)}, which is"
        return f"{whose} requested with THROUGHPUT"
    group = llm_call.group
    if group is None and group_id is not None:
        return f"member of the task group {group_id}"
    if group is not None and group.level == llm_call.label.level:
        unfinished = f"{len(group.members)} of {group.size} unfinished"
        awaited = f"; a client waits for {_named(group.sink)}" if group.level is Level.RT else ""
        return f"member of the task group {group.id}: {unfinished}{awaited}"
    return f"alone {_before(llm_call, sink)}: all after it waits for it"


def _urgent(variable: Variable) -> bool:
    """Whether it is requested with other criteria than THROUGHPUT."""
    return variable.want is not None and variable.want.label is not None


def _deciding(llm_call: LlmCall) -> Variable:
    """The requested variable that gives the LLM call its level: the nearest one that it is alone
    for, else the nearest one that it is not best-effort for, else the nearest one."""
    grouped = {group.sink for group in llm_call.groups}

    def order(sink: Variable) -> tuple[bool, bool, int]:
        return (not _urgent(sink), sink in grouped, llm_call.stages[sink])

    return min(llm_call.stages, key=order)


def _before(llm_call: LlmCall, sink: Variable) -> str:
    stage = llm_call.stages[sink]
    if not stage:
        return f"before {_named(sink)} in the same call"
    return f"{stage} call{'' if stage == 1 else 's'} before {_named(sink)}"


def _named(variable: Variable) -> str:
    return variable.name or variable.id


# ---- When the open LLM calls end.


class CriticalPath(NamedTuple):
    """The chain of open calls that a requested variable waits for longest.

    calls: in the order in which they run, without those on a path before this one.
    end_s: predicted time when the variable has its value.
    slack_s: its deadline less `end_s`; None without a deadline.
    """

    variable: Variable
    calls: Sequence[Call]
    end_s: float
    slack_s: float | None


class Forecast(NamedTuple):
    """Predicted times on the session's clock.

    end_s: predicted end of each LLM call that was open and wanted.
    critical: LLM calls on a critical path.
    paths: the critical paths, the one that ends last first. A requested variable whose producer is
        on an earlier path has none of its own.
    """

    end_s: Mapping[LlmCall, float]
    critical: Set[LlmCall]
    paths: Sequence[CriticalPath]

    def slack_s(self, llm_call: LlmCall) -> float | None:
        """Latest finish time of a call less its predicted end; None without one of them."""
        end_s, deadline_s = self.end_s.get(llm_call), llm_call.label.deadline_s
        return None if end_s is None or deadline_s is None else deadline_s - end_s


Rest = Callable[[LlmCall, float | None], float]
"""Predicts the seconds that an LLM call takes from now if it has started, else from its start.

Its second argument is how many LLM calls of the session run meanwhile on average, itself included;
None if that is not known yet.
"""


def forecast(calls: Iterable[Call], rest_s: Rest, now: float) -> Slices[Forecast]:
    """Predict when the open, wanted LLM calls of these calls end.

    Each runs when its predecessors have ended; client functions, and values that clients set, are
    assumed to take 0 s. Calls that run at the same time slow each other down, whether they are a
    task group or not: the first pass tells which do, the second one has the times.
    """
    found = [t for call in calls for t in call.llm_calls if t.wanted and t.open]
    before: dict[LlmCall, Sequence[LlmCall]] = dict.fromkeys(found, ())
    after: dict[LlmCall, list[LlmCall]] = {}
    for number, llm_call in enumerate(found, start=1):
        before[llm_call] = [t for t in llm_call.open_predecessors() if t in before]
        for earlier in before[llm_call]:
            after.setdefault(earlier, []).append(llm_call)
        if not number % _SLICE:
            yield
    waiting_for = {llm_call: len(earlier) for llm_call, earlier in before.items()}
    order = [llm_call for llm_call in found if not waiting_for[llm_call]]
    for number, llm_call in enumerate(order, start=1):  # the loop appends to `order`
        for later in after.get(llm_call, ()):
            waiting_for[later] -= 1
            if not waiting_for[later]:
                order.append(later)
        if not number % _SLICE:
            yield
    spans = yield from _spans(order, before, rest_s, now, {})
    beside = yield from _concurrency(spans)
    spans = yield from _spans(order, before, rest_s, now, beside)
    end_s = {llm_call: span.end_s for llm_call, span in spans.items()}
    critical: dict[LlmCall, None] = {}
    paths = []
    sinks = [
        (variable, llm_call)
        for llm_call in order
        for variable in llm_call.outputs
        if variable.pending and variable.want is not None
    ]
    for variable, producer in sorted(sinks, key=lambda sink: -end_s[sink[1]]):
        chain: list[LlmCall] = []
        last: LlmCall | None = producer
        while last is not None and last not in critical:
            critical[last] = None
            chain.append(last)
            last = max(before[last], key=end_s.__getitem__, default=None)
        if chain:
            deadline_s = _deadline_s(variable)
            slack_s = None if deadline_s is None else deadline_s - end_s[producer]
            in_order = tuple(dict.fromkeys(llm_call.call for llm_call in reversed(chain)))
            paths.append(CriticalPath(variable, in_order, end_s[producer], slack_s))
    return Forecast(end_s, critical.keys(), paths)


class _Span(NamedTuple):
    """When an LLM call is predicted to run."""

    start_s: float
    end_s: float


def _concurrency(
    spans: Mapping[LlmCall, _Span],
) -> Slices[Mapping[LlmCall, float]]:
    """How many LLM calls run while each of these does, itself included: the mean over its span."""
    changes: dict[float, int] = {}
    for number, (llm_call, (start_s, end_s)) in enumerate(spans.items(), start=1):
        if not llm_call.native:
            changes[start_s] = changes.get(start_s, 0) + 1
            changes[end_s] = changes.get(end_s, 0) - 1
        if not number % _SLICE:
            yield
    sums: dict[float, float] = {}  # time -> integral of the number of running calls up to it
    running, total, last_s = 0, 0.0, 0.0
    for number, time_s in enumerate(sorted(changes), start=1):
        total += running * (time_s - last_s)
        sums[time_s] = total
        running, last_s = running + changes[time_s], time_s
        if not number % _SLICE:
            yield
    found: dict[LlmCall, float] = {}
    for number, (llm_call, (start_s, end_s)) in enumerate(spans.items(), start=1):
        if end_s > start_s:
            found[llm_call] = (sums[end_s] - sums[start_s]) / (end_s - start_s)
        if not number % _SLICE:
            yield
    return found


def _spans(
    order: Sequence[LlmCall],
    before: Mapping[LlmCall, Sequence[LlmCall]],
    rest_s: Rest,
    now: float,
    beside: Mapping[LlmCall, float],
) -> Slices[Mapping[LlmCall, _Span]]:
    """When each LLM call runs. `order` has those that it waits for, `before`, before it.

    beside: see `Rest`, as far as it is known.
    """
    spans: dict[LlmCall, _Span] = {}
    for number, llm_call in enumerate(order, start=1):
        start_s = max((spans[earlier].end_s for earlier in before[llm_call]), default=now)
        seconds = 0.0
        if not llm_call.native:
            seconds = max(0.0, rest_s(llm_call, beside.get(llm_call)))
        spans[llm_call] = _Span(start_s, start_s + seconds)
        if not number % _SLICE:
            yield
    return spans


def _deadline_s(variable: Variable) -> float | None:
    want = variable.want
    if want is None:
        return None
    return earliest(None if want.label is None else want.label.deadline_s, want.batch_deadline_s)
