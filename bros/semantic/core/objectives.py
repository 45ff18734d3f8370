"""From what is asked of a value to what each request behind it must achieve (Parrot, section 5.2).

```
 stage 2        stage 1       stage 0
 map 1 ─┐
 map 2 ─┼─▶  merge (RT)  ─▶  answer (RT, as asked)  ─▶  the variable that is wanted
 map 3 ─┘
 a task group
```

A stage is the longest distance in requests to the one that makes the variable. A request alone at
its stage gates all behind it, and is real-time; of several only the time until all are done counts,
so they are a task group and run as a large batch. Native functions and further LLM calls of one
call add no distance. The latest finish time of a request is the latest start of what follows it.

`deduce` labels the requests behind one value. `Labeller` does that for all values of a session, a
bounded number of requests at a time, so that a long chain of which every value is asked for does
not block the event loop. `DeadlineWatch` finds groups whose deadlines are at risk. `Estimates`
learns how long calls take.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bros.core.request import ServiceClass, Slo
from bros.semantic.core.nodes import (
    Label,
    Level,
    LlmCall,
    TaskGroup,
    Variable,
    earliest,
    open_ancestors,
)
from bros.semantic.schema import Perf

Estimate = Callable[[LlmCall], float]
"""Seconds that an LLM call will take."""

RT_BETWEEN = Label(level=Level.RT, objectives=frozenset({Perf.LATENCY}))
"""Of a request that other requests wait for, and no client."""

STRAGGLERS = 0.1
"""Share of a task group that is left when the rest is no longer worth a large batch."""

LAXITY_MARGIN_S = 0.25
"""A deadline is at risk when there is so little time left beyond what the work takes."""

SLOWEST, FASTEST = 2.0, 0.5
"""Objectives that follow from a deadline stay between so many times the defaults."""


class Deduced(NamedTuple):
    """What `deduce` found.

    changed: LLM calls with a new label.
    watched: groups whose deadline is to be watched.
    steps: cost, in LLM calls and inputs that were visited.
    """

    changed: list[LlmCall]
    watched: list[TaskGroup]
    steps: int = 1


def deduce(sink: Variable, estimate: Estimate) -> Deduced:
    """Labels all that the variable still needs, for what has been asked of it (sink.want).

    To be called again whenever more is asked, or calls are added that it needs. Labels only rise;
    the groups of the variable are made anew.
    """
    drop_groups(sink)
    want = sink.want
    order = open_ancestors(sink)
    sink.region = len(order)
    if want is None or not order:
        return Deduced([], [])
    stages = _stages(order)
    for llm_call, stage in stages.items():
        llm_call.stages[sink] = stage
    by_stage: dict[int, list[LlmCall]] = {}
    for llm_call, stage in stages.items():
        by_stage.setdefault(stage, []).append(llm_call)
    deduced = Deduced([], [], sum(1 + len(llm_call.inputs) for llm_call in order))
    if want.label is not None:
        latest = _latest_finish(order, want.label.deadline_s, estimate)
        for stage, members in by_stage.items():
            _label_stage(sink, stage, members, latest, deduced)
    if want.batch:
        latest = _latest_finish(order, want.batch_deadline_s, estimate)
        for stage, members in by_stage.items():
            _label_batch(sink, stage, members, latest, deduced)
    deduced.changed[:] = dict.fromkeys(deduced.changed)
    return deduced


def label_producer(sink: Variable) -> Sequence[LlmCall]:
    """Labels only what makes the variable, which costs next to nothing: what `deduce` would give
    it. Returns it if its label has changed."""
    want, llm_call = sink.want, sink.producer
    if (
        want is None
        or want.label is None
        or llm_call is None
        or llm_call.native
        or not llm_call.open
    ):
        return ()
    llm_call.stages[sink] = 0
    deduced = Deduced([], [])
    _raise(llm_call, want.label, deduced)
    return deduced.changed


def wanted_behind(llm_calls: Sequence[LlmCall]) -> list[Variable]:
    """Wanted variables that need these LLM calls."""
    seen = set(llm_calls)
    stack = list(llm_calls)
    found: dict[Variable, None] = {}
    while stack:
        llm_call = stack.pop()
        needed_by = [] if llm_call.next is None else [llm_call.next]
        for variable in llm_call.outputs:
            if variable.pending and variable.want is not None:
                found[variable] = None
            needed_by.extend(variable.consumers)
        for later in needed_by:
            if later.open and later not in seen:
                seen.add(later)
                stack.append(later)
    return list(found)


def drop_groups(sink: Variable) -> None:
    """The groups before this variable are none any more; labels stay."""
    for group in sink.groups:
        group.active = False
        for llm_call in group.members:
            llm_call.groups.pop(group, None)
    sink.groups.clear()


def _stages(order: Sequence[LlmCall]) -> dict[LlmCall, int]:
    """Stages of the LLM calls of the model among these, of which the first one makes the sink.

    behind[t]: stage of what feeds t. A native function has no stage of its own and passes on what
    is behind it, unless it makes the sink itself, where it stands at stage 0.
    """
    stages: dict[LlmCall, int] = dict.fromkeys(order, 0)
    for llm_call in order:
        at_sink = llm_call is order[0]
        behind = stages[llm_call] + (at_sink or not llm_call.native)
        previous = llm_call.previous
        if previous is not None and previous.open:
            stages[previous] = max(stages[previous], stages[llm_call])
        for variable in llm_call.inputs:
            producer = variable.producer
            if variable.pending and producer is not None:
                stages[producer] = max(stages[producer], behind)
    return {llm_call: stage for llm_call, stage in stages.items() if not llm_call.native}


def _latest_finish(
    order: Sequence[LlmCall], deadline_s: float | None, estimate: Estimate
) -> Mapping[LlmCall, float]:
    """When each has to be over; empty without a deadline."""
    if deadline_s is None:
        return {}
    latest = {order[0]: deadline_s}
    for llm_call in order:
        start_s = latest[llm_call] - (0.0 if llm_call.native else estimate(llm_call))
        for before in llm_call.open_predecessors():
            latest[before] = min(latest.get(before, start_s), start_s)
    return latest


def _label_stage(
    sink: Variable,
    stage: int,
    members: Sequence[LlmCall],
    latest: Mapping[LlmCall, float],
    deduced: Deduced,
) -> None:
    assert sink.want is not None and sink.want.label is not None
    alone = len({llm_call.call for llm_call in members}) == 1
    if stage and not alone:
        deadline_s = (
            min((latest[llm_call] for llm_call in members), default=None) if latest else None
        )
        group = TaskGroup(sink, stage, tuple(members), deadline_s, left=len(members))
        sink.groups.append(group)
        if deadline_s is not None:
            deduced.watched.append(group)
        for llm_call in members:
            llm_call.groups[group] = None
            _raise(llm_call, Label(level=Level.GROUP, deadline_s=deadline_s), deduced)
        return
    base = RT_BETWEEN if stage else sink.want.label
    for llm_call in members:
        _raise(llm_call, base.joined(Label(deadline_s=latest.get(llm_call))), deduced)


def _label_batch(
    sink: Variable,
    stage: int,
    members: Sequence[LlmCall],
    latest: Mapping[LlmCall, float],
    deduced: Deduced,
) -> None:
    """THROUGHPUT. A stage with a deadline is watched like a group, but is no group."""
    for llm_call in members:
        label = Label(objectives=frozenset({Perf.THROUGHPUT}), deadline_s=latest.get(llm_call))
        _raise(llm_call, label, deduced)
    if latest:
        deadline_s = min(latest[llm_call] for llm_call in members)
        watched = TaskGroup(sink, stage, tuple(members), deadline_s, left=len(members))
        sink.groups.append(watched)
        deduced.watched.append(watched)


def _raise(llm_call: LlmCall, label: Label, deduced: Deduced) -> None:
    risen = llm_call.label.joined(label)
    if risen != llm_call.label:
        llm_call.label = risen
        deduced.changed.append(llm_call)


def stragglers(group: TaskGroup) -> Sequence[LlmCall]:
    """Members that are not over, once they are so few that everything behind waits for them alone.

    They are told once. A group of two or three is down to its stragglers when one is left: that
    one gates everything behind it, as a request alone at its stage does. A group is never smaller
    than that, so at least one of it has finished in any case.
    """
    few = 0 < group.left <= max(1, int(STRAGGLERS * len(group.members)))
    if not few or group.down_to_stragglers or not group.active:
        return ()
    group.down_to_stragglers = True
    return [llm_call for llm_call in group.members if llm_call.open]


def at_risk_s(group: TaskGroup, estimate: Estimate) -> float:
    """When its deadline is at risk: not earlier than its longest member takes, and a margin."""
    assert group.deadline_s is not None
    longest_s = max(
        (estimate(llm_call) for llm_call in group.members if llm_call.open), default=0.0
    )
    return group.deadline_s - longest_s - LAXITY_MARGIN_S


class EngineTerms(NamedTuple):
    """What a label means for the engine.

    grouped: see Hints.
    """

    service_class: ServiceClass
    slo: Slo
    grouped: bool


def terms(llm_call: LlmCall, now: float, expected_tokens: float, default_slo: Slo) -> EngineTerms:
    """On which terms an LLM call is handed to the engine at `now`. None in the result: the default.

    A deadline that has passed is dropped: there is nothing left to gain from it.
    """
    label = llm_call.label
    left_s = None if label.deadline_s is None else label.deadline_s - now
    deadline_s = left_s if left_s is not None and left_s > 0.0 else None
    if label.level is not Level.RT:
        grouped = label.level is Level.GROUP
        return EngineTerms(ServiceClass.BE, Slo(deadline_s=deadline_s), grouped)
    if llm_call.stage == 0:
        return EngineTerms(ServiceClass.RT, Slo(label.ttft_s, label.tpot_s, deadline_s), False)
    return EngineTerms(
        ServiceClass.RT, _paced(left_s, deadline_s, expected_tokens, default_slo), False
    )


def _paced(
    left_s: float | None, deadline_s: float | None, expected_tokens: float, default_slo: Slo
) -> Slo:
    """Objectives that just meet the latest finish: no client reads the text while it grows."""
    if left_s is None or default_slo.tpot_s is None or default_slo.ttft_s is None:
        return Slo(deadline_s=deadline_s)
    tpot_s = _clamp(left_s / max(1.0, expected_tokens), default_slo.tpot_s)
    ttft_s = _clamp(left_s - expected_tokens * tpot_s, default_slo.ttft_s)
    return Slo(ttft_s, tpot_s, deadline_s)


def _clamp(value_s: float, default_s: float) -> float:
    return min(max(value_s, FASTEST * default_s), SLOWEST * default_s)


COMPACT_FROM = 64


class DeadlineWatch:
    """A heap whose entries are skipped once their group is not active any more."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TaskGroup]] = []
        self._added = 0
        self._compact_at = COMPACT_FROM

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, group: TaskGroup, at_risk_s: float) -> None:
        heapq.heappush(self._heap, (at_risk_s, self._added, group))
        self._added += 1
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if entry[2].active]
            heapq.heapify(self._heap)
            self._compact_at = max(COMPACT_FROM, 2 * len(self._heap))

    def next_s(self) -> float | None:
        """When the first deadline is at risk; None if none will be."""
        while self._heap and not self._heap[0][2].active:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> Iterator[TaskGroup]:
        """Groups at risk by now; they are not watched any more."""
        while (at_s := self.next_s()) is not None and at_s <= now:
            yield heapq.heappop(self._heap)[2]


LABEL_EVERY_S = 0.1
"""Period after which `max_steps` more steps may be made."""


class Labeller:
    """Labels what wanted values need: a bounded part at once, the rest later.

    max_steps: LLM calls and inputs that are visited every LABEL_EVERY_S; the value that reaches the
    bound is finished.
    max_labels: most labels at a time; further values are labelled when some of these are settled.
    labels: how many there are, summed over the values: the LLM calls that each of them needs.
    """

    def __init__(self, estimate: Estimate, max_steps: int, max_labels: int) -> None:
        self._estimate = estimate
        self._max_steps = max_steps
        self._max_labels = max_labels
        self._steps = max_steps
        self._more_s = -math.inf
        self._waiting: dict[Variable, None] = {}
        self._watch = DeadlineWatch()
        self.labels = 0

    def add(self, sinks: Iterable[Variable]) -> list[LlmCall]:
        """More is asked of these, or they need more. Returns LLM calls with a new label: only those
        that make them; see `run` for what is behind."""
        changed: list[LlmCall] = []
        for sink in sinks:
            self._waiting[sink] = None
            changed += label_producer(sink)
        return changed

    def run(self, now: float) -> list[LlmCall]:
        """Label as much as may be done by now. Returns LLM calls with a new label."""
        if now >= self._more_s:
            self._steps = self._max_steps
            self._more_s = now + LABEL_EVERY_S
        changed: list[LlmCall] = []
        while self._can_go_on and self._steps > 0:
            sink = next(iter(self._waiting))
            del self._waiting[sink]
            self.labels -= sink.region
            deduced = deduce(sink, self._estimate)
            self.labels += sink.region
            self._steps -= deduced.steps
            for group in deduced.watched:
                self._watch.add(group, at_risk_s(group, self._estimate))
            changed += deduced.changed
        return changed

    def at_risk(self, now: float) -> Iterator[TaskGroup]:
        """Whose deadline would be missed otherwise. Each is told once."""
        return self._watch.take(now)

    def due(self) -> float | None:
        """When there is something to do for `run`, or `at_risk` of something."""
        return earliest(self._watch.next_s(), self._more_s if self._can_go_on else None)

    def settled(self, variable: Variable) -> None:
        """The variable is settled, so nothing is labelled for it any more."""
        self._waiting.pop(variable, None)
        drop_groups(variable)
        self.labels -= variable.region
        variable.region = 0

    @property
    def _can_go_on(self) -> bool:
        return bool(self._waiting) and self.labels < self._max_labels


MAX_NAMES = 10_000
"""Functions that are remembered; those unheard of for the longest are forgotten."""

FIRST_GUESS_TOKENS = 128.0
"""Tokens that a call generates that may generate more, as long as nothing is known."""


class Estimates:
    """Moving averages: of output tokens for every function, of seconds for each token.

    weight: how much the latest observation counts. The first one of a kind counts fully, so that
    the guesses given here are soon forgotten.
    """

    def __init__(
        self,
        *,
        prompt_token_s: float = 0.001,
        output_token_s: float = 0.03,
        weight: float = 0.2,
    ) -> None:
        self._weight = weight
        self._tokens: OrderedDict[str, float] = OrderedDict()
        self._prompt_token_s = prompt_token_s
        self._output_token_s = output_token_s
        self._prompts = 0
        self._outputs = 0

    def expected_tokens(self, name: str, max_tokens: int | None) -> float:
        """Tokens that a call of this function generates; at least 1, at most max_tokens."""
        expected = self._tokens.get(name, FIRST_GUESS_TOKENS)
        return max(1.0, expected if max_tokens is None else min(expected, float(max_tokens)))

    def seconds(self, prompt_tokens: float, output_tokens: float) -> float:
        """From the start of a call to its end. prompt_tokens: those that are not cached."""
        return prompt_tokens * self._prompt_token_s + output_tokens * self._output_token_s

    def observe_tokens(self, name: str, output_tokens: int) -> None:
        """A call of this function was run to its end."""
        known = self._tokens.get(name, float(output_tokens))
        self._tokens[name] = known + self._weight * (output_tokens - known)
        self._tokens.move_to_end(name)
        if len(self._tokens) > MAX_NAMES:
            self._tokens.popitem(last=False)

    def observe_prompt(self, tokens: int, seconds: float) -> None:
        """So many tokens that were not cached took so long, waiting included."""
        if tokens > 0:
            weight = self._weight if self._prompts else 1.0
            self._prompt_token_s += weight * (seconds / tokens - self._prompt_token_s)
            self._prompts += 1

    def observe_output(self, tokens: int, seconds: float) -> None:
        """So many tokens after the first took so long."""
        if tokens > 0:
            weight = self._weight if self._outputs else 1.0
            self._output_token_s += weight * (seconds / tokens - self._output_token_s)
            self._outputs += 1
