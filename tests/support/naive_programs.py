"""Programs of calls for tests of semantic/, and what should come of them, worked out naively."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from bros.semantic.core.nodes import InputPiece, Label, Level, LlmCall, NewCall, OutputPiece, Piece
from bros.semantic.core.session import SessionStateMachine
from bros.semantic.core.template import Text
from bros.semantic.schema import CallKind, Criteria, Perf

TurnId = tuple[str, int]
"""Id of the call, and which of its turns."""


def llm(call_id: str, *segments: tuple[str, str], name: str = "") -> NewCall:
    """segments: (inputs with spaces between, output) of each LLM call."""
    pieces: list[Piece] = [Text(f"{call_id}:")]
    for inputs, output in segments:
        for variable in inputs.split():
            pieces += [InputPiece(variable, variable), Text(" ")]
        pieces += [Text("="), OutputPiece(output, output)]
    return NewCall(id=call_id, name=name, pieces=pieces)


def native(call_id: str, inputs: str, outputs: str) -> NewCall:
    pieces: list[Piece] = [InputPiece(v, v) for v in inputs.split()]
    pieces += [OutputPiece(v, v) for v in outputs.split()]
    return NewCall(id=call_id, kind=CallKind.NATIVE, pieces=pieces)


def llm_call_id(llm_call: LlmCall) -> TurnId:
    return llm_call.call.id, llm_call.index


def llm_calls(core: SessionStateMachine) -> dict[TurnId, LlmCall]:
    return {llm_call_id(t): t for call in core.graph.calls.values() for t in call.llm_calls}


@dataclass(frozen=True)
class PlainTurn:
    """An LLM call as one reads it off the call."""

    id: TurnId
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    native: bool


def plain_llm_calls(call: NewCall) -> list[PlainTurn]:
    inputs = [p.variable_id for p in call.pieces if isinstance(p, InputPiece)]
    outputs = [p.variable_id for p in call.pieces if isinstance(p, OutputPiece)]
    if call.kind is CallKind.NATIVE:
        return [PlainTurn((call.id, 0), tuple(inputs), tuple(outputs), True)]
    made: list[PlainTurn] = []
    segment: list[str] = []
    for piece in call.pieces:
        if isinstance(piece, InputPiece):
            segment.append(piece.variable_id)
        elif isinstance(piece, OutputPiece):
            llm_call = PlainTurn((call.id, len(made)), tuple(segment), (piece.variable_id,), False)
            made.append(llm_call)
            segment = []
    return made


class NaiveGraph:
    """All edges of a program, found anew at every question."""

    def __init__(self, calls: Iterable[NewCall], without: Container[TurnId] = ()) -> None:
        found = [llm_call for call in calls for llm_call in plain_llm_calls(call)]
        self.llm_calls = {llm_call.id: llm_call for llm_call in found if llm_call.id not in without}
        self.producer = {v: t for t in self.llm_calls.values() for v in t.outputs}
        self._depths: dict[PlainTurn, int] = {}  # there may be very many ways

    def before(self, llm_call: PlainTurn) -> list[tuple[PlainTurn, bool]]:
        """What an LLM call waits for; True for the LLM call before it in its call."""
        found = [(self.producer[v], False) for v in llm_call.inputs if v in self.producer]
        call, index = llm_call.id
        previous = self.llm_calls.get((call, index - 1))
        return found if previous is None else [*found, (previous, True)]

    def after(self, llm_call: PlainTurn) -> list[tuple[PlainTurn, bool]]:
        return [
            (t, same)
            for t in self.llm_calls.values()
            for b, same in self.before(t)
            if b is llm_call
        ]

    def ancestors(self, variable: str) -> set[PlainTurn]:
        """The producer of the variable and everything that it waits for."""
        found: set[PlainTurn] = set()
        todo = [self.producer[variable]] if variable in self.producer else []
        while todo:
            llm_call = todo.pop()
            if llm_call not in found:
                found.add(llm_call)
                todo += [before for before, _ in self.before(llm_call)]
        return found

    def cyclic(self) -> bool:
        return any(llm_call in self._reachable(llm_call) for llm_call in self.llm_calls.values())

    def _reachable(self, llm_call: PlainTurn) -> set[PlainTurn]:
        found: set[PlainTurn] = set()
        todo = [llm_call]
        while todo:
            for before, _ in self.before(todo.pop()):
                if before not in found:
                    found.add(before)
                    todo.append(before)
        return found

    def depth(self, llm_call: PlainTurn) -> int:
        """LLM calls of the model on the longest way here."""
        if llm_call not in self._depths:
            ways = [self.depth(before) + (not before.native) for before, _ in self.before(llm_call)]
            self._depths[llm_call] = max(ways, default=0)
        return self._depths[llm_call]


@dataclass
class NaiveObjectives:
    """The algorithm of the specification, from scratch for each want that there ever was.

    labels: joined with those of before, because labels only rise. groups, stages: as of now.
    levels: of groups.
    """

    estimates: Mapping[str, float]
    calls: list[NewCall] = field(default_factory=list)
    wants: list[tuple[str, Criteria]] = field(default_factory=list)
    labels: dict[TurnId, Label] = field(default_factory=dict)
    groups: dict[tuple[str, int], tuple[frozenset[TurnId], float | None]] = field(
        default_factory=dict
    )
    levels: dict[tuple[str, int], Level] = field(default_factory=dict)
    stages: dict[TurnId, dict[str, int]] = field(default_factory=dict)

    def update(self) -> None:
        graph = NaiveGraph(self.calls)
        self.labels = {llm_call: self.labels.get(llm_call, Label()) for llm_call in graph.llm_calls}
        self.stages = {llm_call: {} for llm_call in graph.llm_calls}
        self.groups, self.levels = {}, {}
        for sink, criteria in self.wants:
            self._deduce(graph, sink, criteria)

    def _deduce(self, graph: NaiveGraph, sink: str, criteria: Criteria) -> None:
        region = graph.ancestors(sink)
        requests = [llm_call for llm_call in region if not llm_call.native]
        for llm_call in requests:
            self.stages[llm_call.id][sink] = self._stage(graph, llm_call, sink, region)
        by_stage: dict[int, set[TurnId]] = {}
        for llm_call in requests:
            by_stage.setdefault(self.stages[llm_call.id][sink], set()).add(llm_call.id)
        latest = self._latest(graph, sink, criteria, region, by_stage)
        if criteria.perf is Perf.THROUGHPUT:
            for stage, at_stage in by_stage.items():
                self._group(sink, stage, at_stage, None, Level.THROUGHPUT)
            for llm_call in requests:
                objectives = frozenset({Perf.THROUGHPUT})
                self._raise(
                    llm_call.id, Label(objectives=objectives, deadline_s=latest[llm_call.id])
                )
            return
        for stage, at_stage in by_stage.items():
            self._label(sink, graph.producer[sink].id, stage, at_stage, latest, criteria)

    def _label(
        self,
        sink: str,
        end: TurnId,
        stage: int,
        at_stage: set[TurnId],
        latest: Mapping[TurnId, float | None],
        criteria: Criteria,
    ) -> None:
        """end: the LLM call that produces the sink."""
        if stage == 0:
            for llm_call in at_stage:
                label = Label(
                    level=Level.RT,
                    objectives=frozenset({Perf.LATENCY}),
                    deadline_s=latest[llm_call],
                )
                if llm_call == end:
                    label = replace(
                        label,
                        objectives=frozenset({criteria.perf}),
                        ttft_s=criteria.ttft_s,
                        tpot_s=criteria.tpot_s,
                    )
                self._raise(llm_call, label)
        elif not _several_calls(at_stage):
            for llm_call in at_stage:
                objectives = frozenset({Perf.LATENCY})
                between = Label(level=Level.RT, objectives=objectives, deadline_s=latest[llm_call])
                self._raise(llm_call, between)
        else:
            times = [s for llm_call in at_stage if (s := latest[llm_call]) is not None]
            deadline_s = min(times, default=None)
            urgent = criteria.deadline_s is None
            level = Level.RT if urgent else Level.GROUP
            self._group(sink, stage, at_stage, deadline_s, level)
            label = Label(level=Level.GROUP, deadline_s=deadline_s)
            if urgent:
                label = Label(level=Level.RT, objectives=frozenset({Perf.LATENCY}))
            for llm_call in at_stage:
                self._raise(llm_call, label)

    def _group(
        self, sink: str, stage: int, at_stage: set[TurnId], deadline_s: float | None, level: Level
    ) -> None:
        if stage and _several_calls(at_stage):
            key = sink, stage
            before = self.groups.get(key, (None, None))[1]
            times = [s for s in (before, deadline_s) if s is not None]
            self.groups[key] = frozenset(at_stage), min(times, default=None)
            self.levels[key] = max(level, self.levels.get(key, level))

    def _raise(self, llm_call: TurnId, label: Label) -> None:
        self.labels[llm_call] = self.labels[llm_call].merged(label)

    def _stage(
        self, graph: NaiveGraph, llm_call: PlainTurn, sink: str, region: set[PlainTurn]
    ) -> int:
        """Requests that come after it on the longest way to the producer of the sink, which
        counts also if it is native."""
        end = graph.producer[sink]
        ways = [0] if llm_call is end else []
        for after, same_call in graph.after(llm_call):
            if after in region:
                counts = after is end or not after.native
                rest = self._stage(graph, after, sink, region)
                ways.append(rest + (counts and not same_call))
        return max(ways)

    def _latest(
        self,
        graph: NaiveGraph,
        sink: str,
        criteria: Criteria,
        region: set[PlainTurn],
        by_stage: Mapping[int, set[TurnId]],
    ) -> Mapping[TurnId, float | None]:
        """A call ends before each call after it begins. Members of a group end when the first one
        of them has to, which moves only what is before the group."""
        deadline_s = criteria.deadline_s
        if deadline_s is None:
            return dict.fromkeys((llm_call.id for llm_call in region), None)
        group_of: dict[TurnId, set[TurnId]] = {}
        if criteria.perf is not Perf.THROUGHPUT:
            for stage, ids in by_stage.items():
                if stage and _several_calls(ids):
                    group_of.update(dict.fromkeys(ids, ids))

        def alone_s(llm_call: PlainTurn) -> float:
            times = [deadline_s] if llm_call is graph.producer[sink] else []
            for after, _ in graph.after(llm_call):
                if after in region:
                    members = group_of.get(llm_call.id, ())
                    then_s = alone_s(after) if after.id in members else finish_s(after)
                    times.append(then_s - (0.0 if after.native else self.estimates[after.id[0]]))
            return min(times)

        def finish_s(llm_call: PlainTurn) -> float:
            members = group_of.get(llm_call.id, {llm_call.id})
            return min(alone_s(graph.llm_calls[member]) for member in members)

        return {llm_call.id: finish_s(llm_call) for llm_call in region}


def _several_calls(at_stage: set[TurnId]) -> bool:
    return len({call for call, _ in at_stage}) > 1


@st.composite
def programs(draw: st.DrawFn, max_calls: int = 8) -> list[NewCall]:
    """Calls without cycles: they read outputs of earlier calls, or variables that no call makes."""
    known = ["x", "y"]
    calls: list[NewCall] = []
    for number in range(draw(st.integers(1, max_calls))):
        call_id = f"c{number}"
        is_native = draw(st.integers(0, 4)) == 0
        segments = []
        for index in range(draw(st.sampled_from([1, 1, 2]))):
            inputs = draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
            segments.append((" ".join(inputs), f"{call_id}o{index}"))
        outputs = [output for _, output in segments]
        if is_native:
            calls.append(native(call_id, segments[0][0], " ".join(outputs)))
        else:
            calls.append(llm(call_id, *segments))
        known += outputs
    return calls


@st.composite
def criteria(draw: st.DrawFn) -> Criteria:
    """Times are whole seconds, so that sums of them are exact; deadlines are far away."""
    times = st.none() | st.integers(1, 5).map(float)
    return Criteria(
        perf=draw(st.sampled_from(Perf)),
        ttft_s=draw(times),
        tpot_s=draw(times),
        deadline_s=draw(st.none() | st.integers(1000, 1050).map(float)),
    )


def variables(calls: Sequence[NewCall]) -> list[str]:
    return sorted(
        {
            piece.variable_id
            for call in calls
            for piece in call.pieces
            if isinstance(piece, InputPiece | OutputPiece)
        }
    )
