"""Deduces the objective of each LLM call from the criteria of values (Parrot, section 5.2).

```
 stage 2        stage 1       stage 0
 map 1 ─┐
 map 2 ─┼─▶  merge (RT)  ─▶  answer (RT, requested criteria)  ─▶  requested variable (sink)
 map 3 ─┘
 task group (RT, one batch)
```

The stage of an LLM call is its longest distance in calls to the producer of the sink. An LLM call
that is alone at its stage delays everything after it, so it is real-time. Of several at one stage
only the completion of the last one counts, so they form a task group and run as a large batch: as
real-time requests if a client waits for the sink, as best-effort requests before a deadline. Before
a sink that is requested for THROUGHPUT all calls are best-effort, and task groups only say which of
them a router places together.
Native functions and further LLM calls of one call add no distance. The latest finish time of an
LLM call is the latest start time of its consumers; members of a task group share the earliest one
among them, so that deadlines never fall from a call to one that waits for it.

`deduce` labels the ancestors of one variable. `Labeler` does that for all variables of a session,
a bounded number of LLM calls at a time, so that a long chain whose values are all requested does
not block the event loop, and again when predictions have changed. `DeadlineWatch` finds groups
whose deadlines are at risk.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from bros.core.request import ServiceClass, Slo
from bros.semantic.core.nodes import (
    Label,
    Level,
    LlmCall,
    Promoted,
    Promotion,
    TaskGroup,
    Variable,
    earliest,
    open_ancestors,
)
from bros.semantic.schema import Perf

Estimate = Callable[[LlmCall], float]
"""Predicts the seconds that an LLM call takes."""

RT_INTERMEDIATE = Label(level=Level.RT, objectives=frozenset({Perf.LATENCY}))
"""Label of an LLM call that other calls wait for, but no client."""

_PLAIN = Label(objectives=frozenset({Perf.THROUGHPUT}))
"""Label of an LLM call that is needed for THROUGHPUT only."""

_UNNEEDED = Label()

STRAGGLERS = 0.1
"""Unfinished share of a task group below which its members are promoted to real-time."""

LAXITY_MARGIN_S = 0.25
"""A deadline is at risk when its slack is at most this."""

SLOWEST, FASTEST = 2.0, 0.5
"""Bounds of objectives deduced from a deadline, as multiples of the default objectives."""


class Deduced(NamedTuple):
    """Result of `deduce`.

    changed: LLM calls with a new label, and members of task groups that something waits for alone.
    watched: groups whose deadlines are to be watched.
    ancestors: LLM calls visited, consumers before producers.
    steps: number of LLM calls and inputs visited.
    """

    changed: list[LlmCall]
    watched: list[TaskGroup]
    ancestors: Sequence[LlmCall] = ()
    steps: int = 1


def deduce(sink: Variable, estimate: Estimate) -> Deduced:
    """Label all open ancestors of the variable for the criteria requested for it (`sink.want`).

    The caller repeats this whenever `sink.want` changes or calls are added that the variable
    depends on. Labels only rise here, see `lower`. Task groups of the variable remain the same
    objects while their stages have several calls, finished ones included.
    """
    want = sink.want
    order = open_ancestors(sink)
    sink.num_labels = len(order)
    if want is None or not order:
        drop_groups(sink)
        return Deduced([], [])
    stages = _stages(order)
    by_stage: dict[int, list[LlmCall]] = {}
    for llm_call, stage in stages.items():
        if not llm_call.native:
            llm_call.stages[sink] = stage
            by_stage.setdefault(stage, []).append(llm_call)
    deduced = Deduced([], [], order, sum(1 + len(llm_call.inputs) for llm_call in order))
    _keep_groups(sink, by_stage)
    if want.label is not None:
        groups = {stage for stage in by_stage if _is_group(sink, stage, by_stage[stage])}
        latest = _latest_finish(stages, want.label.deadline_s, estimate, groups)
        for stage, members in by_stage.items():
            _label_stage(sink, stage, members, latest, deduced)
    if want.batch:
        if want.label is None:
            for stage, members in by_stage.items():
                _join_group(sink, stage, members, Level.THROUGHPUT)
        latest = _latest_finish(stages, want.batch_deadline_s, estimate)
        for stage, members in by_stage.items():
            _label_batch(sink, stage, members, latest, deduced)
    deduced.changed[:] = dict.fromkeys(deduced.changed)
    return deduced


def hasten(sink: Variable) -> Deduced:
    """Make all open ancestors of a variable that a client waits for real-time, as `deduce` would,
    but in no task groups. Nothing is remembered of it but their labels."""
    order = open_ancestors(sink)
    deduced = Deduced([], [], order, sum(1 + len(llm_call.inputs) for llm_call in order))
    for llm_call in order:
        if not llm_call.native:
            _raise_label(llm_call, RT_INTERMEDIATE, deduced)
    return deduced


def label_producer(sink: Variable) -> Sequence[LlmCall]:
    """Label only the producer of the variable, in constant time, as `deduce` would.

    Returns the producer: a client that waits for it changes its needs, if not its label.
    """
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
    _raise_label(llm_call, want.label, deduced)
    return [llm_call]


def wanted_dependents(llm_calls: Sequence[LlmCall]) -> list[Variable]:
    """Requested pending variables that depend on these LLM calls."""
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


def lower(llm_calls: Iterable[LlmCall]) -> list[LlmCall]:
    """Make these open LLM calls and their open ancestors best-effort, apart from those that a
    pending variable depends on which is requested with more than THROUGHPUT.

    Returns those whose labels have fallen.
    """
    awaited: dict[LlmCall, bool] = {}
    fallen: list[LlmCall] = []
    seen: set[LlmCall] = set()
    stack = list(llm_calls)
    while stack:
        llm_call = stack.pop()
        # What an awaited one waits for is awaited, too.
        if llm_call in seen or _is_awaited(llm_call, awaited):
            continue
        seen.add(llm_call)
        stack += llm_call.open_predecessors()
        if not llm_call.native and _lower_label(llm_call):
            fallen.append(llm_call)
    return fallen


def _is_awaited(llm_call: LlmCall, known: dict[LlmCall, bool]) -> bool:
    """Whether a pending variable that is requested with more than THROUGHPUT depends on this open
    LLM call. known: what has been found so far, which is added to."""
    if llm_call in known:
        return known[llm_call]
    path = [(llm_call, llm_call.open_followers())]
    found = _makes_awaited(llm_call)
    while path and not found:
        visited, followers = path[-1]
        later = next((each for each in followers if known.get(each, True)), None)
        if later is None:
            known[visited] = False
            path.pop()
        else:
            path.append((later, later.open_followers()))
            found = known.get(later, False) or _makes_awaited(later)
    known.update((each, True) for each, _ in path)
    return found


def _makes_awaited(llm_call: LlmCall) -> bool:
    return any(
        output.pending and output.want is not None and not output.want.plain
        for output in llm_call.outputs
    )


def _lower_label(llm_call: LlmCall) -> bool:
    """Give it the label of an LLM call that is needed for THROUGHPUT at most. Returns whether that
    is a lower one."""
    llm_call.stages = {
        sink: stage
        for sink, stage in llm_call.stages.items()
        if sink.pending and sink.want is not None and sink.want.plain
    }
    for group in [group for group in llm_call.groups if group.level > Level.THROUGHPUT]:
        # Its sink does not depend on it any more: a client has set a value between the two.
        del group.members[llm_call]
        del llm_call.groups[group]
    label = _PLAIN if llm_call.stages else _UNNEEDED
    if llm_call.label == label:
        return False
    llm_call.label, llm_call.promoted, llm_call.lowered = label, None, True
    return True


def drop_groups(sink: Variable) -> None:
    """End the task groups of this variable; labels stay."""
    for group in (*sink.groups.values(), *sink.watched.values()):
        _set_members(group, ())
        group.active = False
    sink.groups.clear()
    sink.watched.clear()


def _keep_groups(sink: Variable, by_stage: Mapping[int, Sequence[LlmCall]]) -> None:
    """Update the members of the existing task groups, and end those that are no groups any more:
    none has finished, and no two calls are left."""
    for stage, group in list(sink.groups.items()):
        members = by_stage.get(stage, ())
        _set_members(group, members)
        if not group.num_finished and _alone(members):
            _set_members(group, ())
            group.active = False
            del sink.groups[stage]
    for stage in [stage for stage in sink.watched if stage not in by_stage]:
        sink.watched.pop(stage).active = False


def _set_members(group: TaskGroup, members: Sequence[LlmCall]) -> None:
    for llm_call in group.members:
        llm_call.groups.pop(group, None)
    group.set_members(members)


def _alone(members: Sequence[LlmCall]) -> bool:
    """Whether these LLM calls are of one call, which then delays everything after it."""
    return len({llm_call.call for llm_call in members}) < 2


def _stages(order: Sequence[LlmCall]) -> dict[LlmCall, int]:
    """Stages of these LLM calls, in their order. order[0] produces the sink.

    A native call adds no distance: its producers get its stage. Only a native call that produces
    the sink counts, as stage 0.
    """
    stages: dict[LlmCall, int] = dict.fromkeys(order, 0)
    for llm_call in order:
        at_sink = llm_call is order[0]
        producer_stage = stages[llm_call] + (at_sink or not llm_call.native)
        previous = llm_call.previous
        if previous is not None and previous.open:
            stages[previous] = max(stages[previous], stages[llm_call])
        for variable in llm_call.inputs:
            producer = variable.producer
            if variable.pending and producer is not None:
                stages[producer] = max(stages[producer], producer_stage)
    return stages


def _latest_finish(
    stages: Mapping[LlmCall, int],
    deadline_s: float | None,
    estimate: Estimate,
    groups: Container[int] = (),
) -> Mapping[LlmCall, float]:
    """Latest finish time of each LLM call in seconds; empty without a deadline.

    stages: consumers before producers; the first call produces the sink.
    groups: stages whose calls form a task group, which has one latest finish time.
    """
    if deadline_s is None:
        return {}
    latest = {next(iter(stages)): deadline_s}
    in_order = sorted(stages, key=stages.__getitem__)  # stable: still consumers before producers
    for stage, at_stage in itertools.groupby(in_order, stages.__getitem__):
        llm_calls = list(at_stage)
        for llm_call in llm_calls:
            start_s = latest[llm_call] - (0.0 if llm_call.native else estimate(llm_call))
            for before in llm_call.open_predecessors():
                latest[before] = min(latest.get(before, start_s), start_s)
        if stage in groups:
            members = [llm_call for llm_call in llm_calls if not llm_call.native]
            shared_s = min(latest[member] for member in members)
            for member in members:
                latest[member] = shared_s
                start_s = shared_s - estimate(member)
                for before in member.open_predecessors():
                    if stages[before] > stage:  # else it is a member, too
                        latest[before] = min(latest[before], start_s)
    return latest


def _is_group(sink: Variable, stage: int, members: Sequence[LlmCall]) -> bool:
    """Whether the calls of a stage form a task group: they are of several calls, or were."""
    return stage > 0 and (stage in sink.groups or not _alone(members))


def _join_group(
    sink: Variable, stage: int, members: Sequence[LlmCall], level: Level
) -> TaskGroup | None:
    """The task group of a stage with these members; None if it has none."""
    if not _is_group(sink, stage, members):
        return None
    group = sink.groups.setdefault(stage, TaskGroup(sink, stage))
    group.set_members(members)
    group.level = level
    for llm_call in members:
        llm_call.groups[group] = None
    return group


def _label_stage(
    sink: Variable,
    stage: int,
    members: Sequence[LlmCall],
    latest: Mapping[LlmCall, float],
    deduced: Deduced,
) -> None:
    assert sink.want is not None and sink.want.label is not None
    level = Level.RT if sink.want.urgent else Level.GROUP
    group = _join_group(sink, stage, members, level)
    if group is not None:
        group.deadline_s = min((latest[t] for t in members), default=None) if latest else None
        label = RT_INTERMEDIATE if level is Level.RT else Label(level=Level.GROUP)
        if group.deadline_s is not None and level is Level.GROUP:
            deduced.watched.append(group)
        for llm_call in members:
            _raise_label(llm_call, label.merged(Label(deadline_s=group.deadline_s)), deduced)
        for llm_call in stragglers(group):  # others of them may be at another stage by now
            if llm_call.label.level < Level.RT:
                llm_call.promoted = Promoted(Promotion.STRAGGLER, sink)
            _raise_label(llm_call, RT_INTERMEDIATE, deduced)
        return
    for llm_call in members:
        # An earlier output of the call that makes the sink is at stage 0, too: no client reads it.
        base = sink.want.label if sink in llm_call.outputs else RT_INTERMEDIATE
        _raise_label(llm_call, base.merged(Label(deadline_s=latest.get(llm_call))), deduced)
        if llm_call.groups:
            deduced.changed.append(llm_call)


def _label_batch(
    sink: Variable,
    stage: int,
    members: Sequence[LlmCall],
    latest: Mapping[LlmCall, float],
    deduced: Deduced,
) -> None:
    """Label a stage for THROUGHPUT. With a deadline it is watched."""
    for llm_call in members:
        label = Label(objectives=frozenset({Perf.THROUGHPUT}), deadline_s=latest.get(llm_call))
        _raise_label(llm_call, label, deduced)
    if latest:
        watched = sink.watched.setdefault(stage, TaskGroup(sink, stage))
        watched.set_members(members)
        watched.deadline_s = min(latest[llm_call] for llm_call in members)
        deduced.watched.append(watched)


def _raise_label(llm_call: LlmCall, label: Label, deduced: Deduced) -> None:
    risen = llm_call.label.merged(label)
    if risen != llm_call.label:
        llm_call.label, llm_call.lowered = risen, False
        deduced.changed.append(llm_call)


def stragglers(group: TaskGroup) -> Sequence[LlmCall]:
    """The open members of a group when at most a share of STRAGGLERS, or one, is unfinished.

    They are returned once, and again after others have joined; otherwise the result is empty.
    Everything after the group waits for them, as for an LLM call that is alone at its stage. Before
    a sink that is requested for THROUGHPUT nothing becomes real-time for that.
    """
    if group.level is Level.THROUGHPUT:
        return ()
    few = len(group.members) <= max(1, int(STRAGGLERS * group.size))
    if not few or not group.num_finished or group.stragglers_reported or not group.active:
        return ()
    group.stragglers_reported = True
    return [llm_call for llm_call in group.members if llm_call.open]


def at_risk_s(group: TaskGroup, estimate: Estimate) -> float:
    """Time when its deadline is at risk: the deadline less its longest open member and a margin."""
    assert group.deadline_s is not None
    longest_s = max(
        (estimate(llm_call) for llm_call in group.members if llm_call.open), default=0.0
    )
    return group.deadline_s - longest_s - LAXITY_MARGIN_S


class EngineTerms(NamedTuple):
    """A label as parameters of an engine request."""

    service_class: ServiceClass
    slo: Slo


def terms(llm_call: LlmCall, now: float, expected_tokens: float, default_slo: Slo) -> EngineTerms:
    """The engine parameters of an LLM call submitted at `now`; None in them means the default.

    expected_tokens: predicted output tokens. A deadline that has passed is dropped, because it
    can no longer be met.
    """
    label = llm_call.label
    left_s = None if label.deadline_s is None else label.deadline_s - now
    deadline_s = left_s if left_s is not None and left_s > 0.0 else None
    if label.level is not Level.RT:
        return EngineTerms(ServiceClass.BE, Slo(deadline_s=deadline_s))
    if _watched_by_client(llm_call):
        return EngineTerms(ServiceClass.RT, Slo(label.ttft_s, label.tpot_s, deadline_s))
    return EngineTerms(
        ServiceClass.RT, _deadline_slo(left_s, deadline_s, expected_tokens, default_slo)
    )


def _watched_by_client(llm_call: LlmCall) -> bool:
    """Whether a client waits for this very output with criteria other than THROUGHPUT, rather than
    for a later call that needs it."""
    return any(
        sink in llm_call.stages and sink.want is not None and sink.want.label is not None
        for sink in llm_call.outputs
    )


class Needs(NamedTuple):
    """What decides the parameters of an LLM call's engine request, apart from the time.

    label: without objectives.
    read: whether a client waits for this very output.
    awaited: see `awaited_alone`.
    """

    label: Label
    read: bool
    awaited: bool

    @property
    def undated(self) -> Needs:
        """These needs without the deadline, which follows predictions."""
        return self._replace(label=replace(self.label, deadline_s=None))


def needs(llm_call: LlmCall) -> Needs:
    """The present needs of a call. As long as a requested value needs it, they only become
    stricter."""
    label = replace(llm_call.label, objectives=frozenset())
    return Needs(label, _watched_by_client(llm_call), awaited_alone(llm_call))


def awaited_alone(llm_call: LlmCall) -> bool:
    """Whether a value that is requested with criteria other than THROUGHPUT is this LLM call's
    output, or waits for it alone and not for a task group that it is a member of. The rest waits
    for the last ones of a task group, too."""
    if llm_call.promoted is not None and llm_call.promoted.why is Promotion.STRAGGLER:
        return True
    grouped = {group.sink for group in llm_call.groups}
    return any(
        sink.pending
        and sink not in grouped
        and sink.want is not None
        and sink.want.label is not None
        for sink in llm_call.stages
    )


def _deadline_slo(
    left_s: float | None,
    deadline_s: float | None,
    expected_tokens: float,
    default_slo: Slo,
) -> Slo:
    """TTFT and TPOT that just meet the latest finish time: no client streams this text."""
    if left_s is None or default_slo.tpot_s is None or default_slo.ttft_s is None:
        return Slo(deadline_s=deadline_s)
    tpot_s = _clamp(left_s / max(1.0, expected_tokens), default_slo.tpot_s)
    ttft_s = _clamp(left_s - expected_tokens * tpot_s, default_slo.ttft_s)
    return Slo(ttft_s, tpot_s, deadline_s)


def _clamp(value_s: float, default_s: float) -> float:
    return min(max(value_s, FASTEST * default_s), SLOWEST * default_s)


COMPACT_FROM = 64


class DeadlineWatch:
    """A heap of watched groups by the time when they are at risk. Inactive groups are skipped, and
    so is the entry of a group that was added again with another time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TaskGroup]] = []
        self._added = 0
        self._compact_at = COMPACT_FROM

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, group: TaskGroup, at_risk_s: float) -> None:
        if group.at_risk_s == at_risk_s:
            return
        group.at_risk_s = at_risk_s
        heapq.heappush(self._heap, (at_risk_s, self._added, group))
        self._added += 1
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if _counts(entry)]
            heapq.heapify(self._heap)
            self._compact_at = max(COMPACT_FROM, 2 * len(self._heap))

    def next_s(self) -> float | None:
        """Time when the first deadline is at risk; None without a watched group."""
        while self._heap and not _counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> Iterator[TaskGroup]:
        """Remove the groups that are at risk by now, and yield them."""
        while (at_s := self.next_s()) is not None and at_s <= now:
            group = heapq.heappop(self._heap)[2]
            group.at_risk_s = None
            yield group


def _counts(entry: tuple[float, int, TaskGroup]) -> bool:
    """Whether an entry of the heap is the latest one of an active group."""
    at_s, _, group = entry
    return group.active and group.at_risk_s == at_s


LABEL_EVERY_S = 0.1
"""Period after which the step budget of a Labeler is refilled."""

PLAIN_SHARE = 0.5
"""Share of the labels of a session beyond which values that are requested for THROUGHPUT, without a
deadline, get none: their labels change no class, and others need theirs."""

CHECK_EVERY_S = 1.0
"""Period after which a Labeler compares predictions with those that latest finish times are made
of; longer by CHECK_EACH_S for each variable with a deadline."""

CHECK_EACH_S = 0.01

CHECKED_CALLS = 8
"""LLM calls before a variable whose predictions are compared. A prediction takes about 0.02 ms."""

CHANGED = 0.1
"""Latest finish times are deduced again if a prediction has changed by more than this share."""


class Labeler:
    """Labels the ancestors of requested variables with a bounded rate, in this order:

        urgent   a client waits for the variable, and names no deadline
        dated    it has a deadline
        plain    it is requested for THROUGHPUT: its labels change no class

    and deduces latest finish times again when predictions have changed.

    max_steps: step budget (LLM calls and inputs visited) per LABEL_EVERY_S. The variable that
        exceeds it is completed.
    max_labels: bound on `labels`. Further variables are labeled when labeled ones are settled; all
        that an urgent one needs becomes real-time at once, see `hasten`. Plain ones leave room for
        others (PLAIN_SHARE).
    labels: sum of `num_labels` over all variables.
    """

    def __init__(self, estimate: Estimate, max_steps: int, max_labels: int) -> None:
        self._estimate = estimate
        self._max_steps = max_steps
        self._max_labels = max_labels
        self._budget = max_steps
        self._refill_s = -math.inf
        self._urgent: dict[Variable, None] = {}
        self._dated: dict[Variable, None] = {}  # and urgent ones that wait for room
        self._plain: dict[Variable, None] = {}
        self._watch = DeadlineWatch()
        # Variable before which groups are watched -> predictions for some of its ancestors.
        self._predicted: dict[Variable, Mapping[LlmCall, float]] = {}
        self._unchecked: dict[Variable, None] = {}
        self._check_s = -math.inf
        self.labels = 0

    def add(self, sinks: Iterable[Variable]) -> list[LlmCall]:
        """Queue variables with new criteria or new ancestors, and label their producers at once.

        Returns the producers that clients wait for; `run` labels the other ancestors.
        """
        changed: list[LlmCall] = []
        for sink in sinks:
            self._remove(sink)
            self._queue_of(sink)[sink] = None
            changed += label_producer(sink)
        return changed

    def run(self, now: float) -> list[LlmCall]:
        """Label as much as the budget allows. Returns LLM calls with a new label."""
        if now >= self._refill_s:
            self._budget = self._max_steps
            self._refill_s = now + LABEL_EVERY_S
        changed: list[LlmCall] = []
        while self._budget > 0 and (queue := self._next_queue()) is not None:
            sink = next(iter(queue))
            del queue[sink]
            if queue is self._urgent and not self._has_room(1.0):
                deduced = hasten(sink)
                self._budget -= deduced.steps
                self._dated[sink] = None
                changed += deduced.changed
            else:
                changed += self._label(sink)
        if now >= self._check_s and not self._unchecked:
            self._unchecked = dict.fromkeys(self._predicted)
            self._check_s = now + CHECK_EVERY_S + CHECK_EACH_S * len(self._predicted)
        while self._unchecked and self._budget > 0:
            sink, _ = self._unchecked.popitem()
            if self._has_changed(sink):
                changed += self._label(sink)
        return changed

    def at_risk(self, now: float) -> Iterator[TaskGroup]:
        """Groups that would miss their deadline as best-effort, by the present predictions. Each is
        yielded once, unless it is labeled again."""
        for group in self._watch.take(now):
            at_s = at_risk_s(group, self._estimate)
            if at_s > now:
                self._watch.add(group, at_s)
            else:
                yield group

    def due(self) -> float | None:
        """Next time when `run` or `at_risk` has work; None without any."""
        watched_s = self._watch.next_s()
        if self._next_queue() is not None or self._unchecked:
            return earliest(watched_s, self._refill_s)
        return None if watched_s is None else min(watched_s, self._check_s)

    def settled(self, variable: Variable) -> None:
        """The variable is settled: stop labeling for it."""
        self._remove(variable)
        self._predicted.pop(variable, None)
        self._unchecked.pop(variable, None)
        drop_groups(variable)
        self.labels -= variable.num_labels
        variable.num_labels = 0

    def _label(self, sink: Variable) -> list[LlmCall]:
        self.labels -= sink.num_labels
        deduced = deduce(sink, self._estimate)
        self.labels += sink.num_labels
        self._budget -= deduced.steps
        self._predicted.pop(sink, None)
        self._unchecked.pop(sink, None)
        if deduced.watched:
            calls = [llm_call for llm_call in deduced.ancestors if not llm_call.native]
            every = -(-len(calls) // CHECKED_CALLS)
            self._predicted[sink] = {t: self._estimate(t) for t in calls[::every]}
        for group in deduced.watched:
            if any(llm_call.label.level < Level.RT for llm_call in group.members):
                self._watch.add(group, at_risk_s(group, self._estimate))
        return deduced.changed

    def _has_changed(self, sink: Variable) -> bool:
        """Whether predictions for its ancestors have changed, or the ancestors whose predictions
        are known have all ended."""
        known = self._predicted[sink]
        self._budget -= len(known)
        still = [(t, before_s) for t, before_s in known.items() if t.open]
        return not still or any(
            abs(self._estimate(t) - before_s) > CHANGED * before_s for t, before_s in still
        )

    def _queue_of(self, sink: Variable) -> dict[Variable, None]:
        want = sink.want
        if want is None or want.plain:
            return self._plain
        return self._urgent if want.urgent else self._dated

    def _next_queue(self) -> dict[Variable, None] | None:
        """The queue whose first variable is labeled next."""
        if self._urgent:
            return self._urgent
        if self._dated and self._has_room(1.0):
            return self._dated
        return self._plain if self._plain and self._has_room(PLAIN_SHARE) else None

    def _has_room(self, share: float) -> bool:
        return self.labels < share * self._max_labels

    def _remove(self, sink: Variable) -> None:
        for queue in (self._urgent, self._dated, self._plain):
            queue.pop(sink, None)
