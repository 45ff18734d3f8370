"""Programs of calls for tests of semantic/, and what should come of them, worked out naively."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from bros.semantic.core.nodes import InputPiece, Label, Level, NewCall, OutputPiece, Piece, Turn
from bros.semantic.core.session import SessionStateMachine
from bros.semantic.core.template import Text
from bros.semantic.schema import CallKind, Criteria, Perf

TurnId = tuple[str, int]
"""Id of the call, and which of its turns."""


def llm(call_id: str, *segments: tuple[str, str], name: str = "") -> NewCall:
    """segments: (inputs with spaces between, output) of each turn."""
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


def turn_id(turn: Turn) -> TurnId:
    return turn.call.id, turn.index


def turns(core: SessionStateMachine) -> dict[TurnId, Turn]:
    return {turn_id(t): t for call in core.graph.calls.values() for t in call.turns}


@dataclass(frozen=True)
class PlainTurn:
    """A turn as one reads it off the call."""

    id: TurnId
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    native: bool


def plain_turns(call: NewCall) -> list[PlainTurn]:
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
            turn = PlainTurn((call.id, len(made)), tuple(segment), (piece.variable_id,), False)
            made.append(turn)
            segment = []
    return made


class NaiveGraph:
    """All edges of a program, found anew at every question."""

    def __init__(self, calls: Iterable[NewCall], without: Container[TurnId] = ()) -> None:
        found = [turn for call in calls for turn in plain_turns(call)]
        self.turns = {turn.id: turn for turn in found if turn.id not in without}
        self.producer = {v: t for t in self.turns.values() for v in t.outputs}
        self._depths: dict[PlainTurn, int] = {}  # there may be very many ways

    def before(self, turn: PlainTurn) -> list[tuple[PlainTurn, bool]]:
        """What a turn waits for; True for the turn before it in its call."""
        found = [(self.producer[v], False) for v in turn.inputs if v in self.producer]
        call, index = turn.id
        previous = self.turns.get((call, index - 1))
        return found if previous is None else [*found, (previous, True)]

    def after(self, turn: PlainTurn) -> list[tuple[PlainTurn, bool]]:
        return [(t, same) for t in self.turns.values() for b, same in self.before(t) if b is turn]

    def ancestors(self, variable: str) -> set[PlainTurn]:
        """The producer of the variable and everything that it waits for."""
        found: set[PlainTurn] = set()
        todo = [self.producer[variable]] if variable in self.producer else []
        while todo:
            turn = todo.pop()
            if turn not in found:
                found.add(turn)
                todo += [before for before, _ in self.before(turn)]
        return found

    def cyclic(self) -> bool:
        return any(turn in self._reachable(turn) for turn in self.turns.values())

    def _reachable(self, turn: PlainTurn) -> set[PlainTurn]:
        found: set[PlainTurn] = set()
        todo = [turn]
        while todo:
            for before, _ in self.before(todo.pop()):
                if before not in found:
                    found.add(before)
                    todo.append(before)
        return found

    def depth(self, turn: PlainTurn) -> int:
        """Turns of the model on the longest way here."""
        if turn not in self._depths:
            ways = [self.depth(before) + (not before.native) for before, _ in self.before(turn)]
            self._depths[turn] = max(ways, default=0)
        return self._depths[turn]


@dataclass
class NaiveObjectives:
    """The algorithm of the specification, from scratch for each want that there ever was.

    labels: joined with those of before, because labels only rise. groups, stages: as of now.
    """

    estimates: Mapping[str, float]
    calls: list[NewCall] = field(default_factory=list)
    wants: list[tuple[str, Criteria]] = field(default_factory=list)
    labels: dict[TurnId, Label] = field(default_factory=dict)
    groups: dict[tuple[str, int], tuple[frozenset[TurnId], float | None]] = field(
        default_factory=dict
    )
    stages: dict[TurnId, dict[str, int]] = field(default_factory=dict)

    def update(self) -> None:
        graph = NaiveGraph(self.calls)
        self.labels = {turn: self.labels.get(turn, Label()) for turn in graph.turns}
        self.stages = {turn: {} for turn in graph.turns}
        self.groups = {}
        for sink, criteria in self.wants:
            self._deduce(graph, sink, criteria)

    def _deduce(self, graph: NaiveGraph, sink: str, criteria: Criteria) -> None:
        region = graph.ancestors(sink)
        requests = [turn for turn in region if not turn.native]
        for turn in requests:
            self.stages[turn.id][sink] = self._stage(graph, turn, sink, region)
        latest = {turn.id: self._latest(graph, turn, sink, criteria, region) for turn in requests}
        if criteria.perf is Perf.THROUGHPUT:
            for turn in requests:
                objectives = frozenset({Perf.THROUGHPUT})
                self._raise(turn.id, Label(objectives=objectives, deadline_s=latest[turn.id]))
            return
        for stage in {self.stages[turn.id][sink] for turn in requests}:
            at_stage = {turn.id for turn in requests if self.stages[turn.id][sink] == stage}
            self._label(sink, stage, at_stage, latest, criteria)

    def _label(
        self,
        sink: str,
        stage: int,
        at_stage: set[TurnId],
        latest: Mapping[TurnId, float | None],
        criteria: Criteria,
    ) -> None:
        if stage == 0:
            for turn in at_stage:
                asked = Label(
                    level=Level.RT,
                    objectives=frozenset({criteria.perf}),
                    ttft_s=criteria.ttft_s,
                    tpot_s=criteria.tpot_s,
                    deadline_s=latest[turn],
                )
                self._raise(turn, asked)
        elif len({call for call, _ in at_stage}) == 1:
            for turn in at_stage:
                objectives = frozenset({Perf.LATENCY})
                between = Label(level=Level.RT, objectives=objectives, deadline_s=latest[turn])
                self._raise(turn, between)
        else:
            times = [s for turn in at_stage if (s := latest[turn]) is not None]
            deadline_s = min(times, default=None)
            before = self.groups.get((sink, stage), (None, None))[1]
            known = [s for s in (before, deadline_s) if s is not None]
            self.groups[sink, stage] = frozenset(at_stage), min(known, default=None)
            for turn in at_stage:
                self._raise(turn, Label(level=Level.GROUP, deadline_s=deadline_s))

    def _raise(self, turn: TurnId, label: Label) -> None:
        self.labels[turn] = self.labels[turn].joined(label)

    def _stage(self, graph: NaiveGraph, turn: PlainTurn, sink: str, region: set[PlainTurn]) -> int:
        """Requests that come after it on the longest way to the producer of the sink, which
        counts also if it is native."""
        end = graph.producer[sink]
        ways = [0] if turn is end else []
        for after, same_call in graph.after(turn):
            if after in region:
                counts = after is end or not after.native
                rest = self._stage(graph, after, sink, region)
                ways.append(rest + (counts and not same_call))
        return max(ways)

    def _latest(
        self,
        graph: NaiveGraph,
        turn: PlainTurn,
        sink: str,
        criteria: Criteria,
        region: set[PlainTurn],
    ) -> float | None:
        if criteria.deadline_s is None:
            return None
        times = [criteria.deadline_s] if turn is graph.producer[sink] else []
        for after, _ in graph.after(turn):
            if after in region:
                then_s = self._latest(graph, after, sink, criteria, region)
                assert then_s is not None
                times.append(then_s - (0.0 if after.native else self.estimates[after.id[0]]))
        return min(times)


@st.composite
def programs(draw: st.DrawFn, max_calls: int = 8) -> list[NewCall]:
    """Calls without cycles: each reads what calls before it make, or variables nobody makes."""
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
