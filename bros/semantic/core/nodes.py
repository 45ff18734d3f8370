"""The nodes of a session's graph (calls, LLM calls, variables) and their labels.

```
 variable ──▶ LlmCall ──▶ variable ──▶ LlmCall ...     LlmCall 0 ──▶ LlmCall 1     of one Call
   input      of a Call    output                      they share one token sequence
```

An *LLM call* is the unit of scheduling: the part of a call up to one output. A call with k outputs
has k LLM calls, which run one after another. A native call (a function that the client runs) has
one LLM call with all outputs of the function; the engine does not run it.

Deadlines are absolute times in seconds on the session's clock; None means no deadline.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bros.core.request import Grammar, SamplingParams
from bros.semantic.core.template import Text
from bros.semantic.errors import Cause
from bros.semantic.schema import CallKind, CallState, Criteria, Perf, VariableState
from bros.semantic.transforms import Transforms
from bros.text.answers import AnswerParsing


class Level(enum.IntEnum):
    """Urgency of an LLM call, in ascending order."""

    THROUGHPUT = 0  # best-effort
    GROUP = 1  # best-effort; only the completion time of its whole task group counts
    RT = 2  # real-time: a client or a single later call waits for it, or its group is urgent


class Promotion(enum.Enum):
    """Why an LLM call has become real-time.

    STRAGGLER: it is one of the last ones of its task group, see `stragglers`.
    DEADLINE: the deadline of its group, or of its stage before a value that is requested for
        THROUGHPUT, is at risk.
    """

    STRAGGLER = enum.auto()
    DEADLINE = enum.auto()


class Promoted(NamedTuple):
    """Why an LLM call has become real-time, and before which requested variable."""

    why: Promotion
    sink: Variable


def earliest(a: float | None, b: float | None) -> float | None:
    """The smaller time; None means no bound."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The scheduling objective of one LLM call.

    objectives: criteria of the values that depend on it. LATENCY is also the objective of a call
        that only other calls wait for.
    ttft_s: as in Criteria.
    tpot_s: as in Criteria.
    deadline_s: latest finish time.
    """

    level: Level = Level.THROUGHPUT
    objectives: frozenset[Perf] = frozenset()
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None

    def merged(self, other: Label) -> Label:
        """The label that satisfies both: higher level, all objectives, earlier times."""
        return Label(
            level=max(self.level, other.level),
            objectives=self.objectives | other.objectives,
            ttft_s=earliest(self.ttft_s, other.ttft_s),
            tpot_s=earliest(self.tpot_s, other.tpot_s),
            deadline_s=earliest(self.deadline_s, other.deadline_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """All criteria that clients have requested for one variable so far.

    label: label of its producer from all criteria except THROUGHPUT; None if there are none.
    urgent: whether a client waits for it, or for its first token, without naming a deadline: as
        soon as possible.
    batch: whether a client requested THROUGHPUT.
    batch_deadline_s: earliest deadline among the THROUGHPUT criteria.
    """

    label: Label | None = None
    urgent: bool = False
    batch: bool = False
    batch_deadline_s: float | None = None

    def with_criteria(self, criteria: Criteria, deadline_s: float | None) -> Want:
        """Add one client's criteria. deadline_s: `criteria.deadline_s` as an absolute time."""
        if criteria.perf is Perf.THROUGHPUT:
            deadline_s = earliest(self.batch_deadline_s, deadline_s)
            return replace(self, batch=True, batch_deadline_s=deadline_s)
        asked = Label(
            level=Level.RT,
            objectives=frozenset({criteria.perf}),
            ttft_s=criteria.ttft_s,
            tpot_s=criteria.tpot_s,
            deadline_s=deadline_s,
        )
        return replace(
            self,
            label=asked if self.label is None else self.label.merged(asked),
            urgent=self.urgent or deadline_s is None,
        )

    @property
    def undated(self) -> bool:
        """Whether all criteria come without a deadline."""
        dated = self.label is not None and self.label.deadline_s is not None
        return not dated and self.batch_deadline_s is None

    @property
    def plain(self) -> bool:
        """Whether it is requested for THROUGHPUT only, without a deadline: its labels change no
        class."""
        return self.label is None and self.batch_deadline_s is None


DEFAULT_SAMPLING = SamplingParams()


OPEN_STATES = frozenset({CallState.WAITING, CallState.READY, CallState.RUNNING})
STARTED_STATES = frozenset({CallState.READY, CallState.RUNNING})


@dataclass(frozen=True, slots=True)
class InputPiece:
    """The value of a variable as part of a prompt.

    name: placeholder name.
    """

    name: str
    variable_id: str
    transforms: Transforms | None = None


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """What the model answers here becomes the value of a variable, without its reasoning.

    sampling: its grammar allows the reasoning before the answer too.
    grammar: what the answer must match.
    parsing: as for TextGenerator.start.
    """

    name: str
    variable_id: str
    transforms: Transforms | None = None
    sampling: SamplingParams = DEFAULT_SAMPLING
    grammar: Grammar | None = None
    parsing: AnswerParsing | None = None


Piece = Text | InputPiece | OutputPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCall:
    """A call to be added to a graph. The graph creates variables that it does not know.

    pieces: the last one is an output. A native call has only inputs and outputs, in any order.
    values: variable id -> text, for new variables that are constants.
    """

    id: str
    name: str = ""
    kind: CallKind = CallKind.LLM
    pieces: Sequence[Piece] = ()
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        """As how many usual calls it counts, where work on calls is done in slices."""
        return max(1, len(self.pieces) // _USUAL_PIECES)


_USUAL_PIECES = 3


@dataclass(eq=False, slots=True, repr=False)
class Variable:
    """A semantic variable: a value that is set once.

    token_ids: the generated tokens of the text; None unless they encode exactly this text.
    cause: why it failed or was cancelled.
    producer: the LLM call that sets it (Parrot's GetProducer); None after the graph has forgotten
        that call.
    consumers: the LLM calls that read it (Parrot's GetConsumers).
    want: the criteria that clients requested for it.
    depth: number of LLM calls on the longest path to it; native calls do not count.
    groups: task groups among its open ancestors by stage.
    watched: likewise the stages before a value that is requested for THROUGHPUT with a deadline,
        which is watched. They may have a single call, and no task group.
    num_labels: number of its open ancestors when they were last labeled.
    quotation: the prompt of the plain call that produced it contains the text, so finding it in a
        later prompt does not show where it came from; see matching.py.
    """

    id: str
    name: str
    state: VariableState = VariableState.PENDING
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    cause: Cause | None = None
    producer: LlmCall | None = None
    consumers: dict[LlmCall, None] = field(default_factory=dict)
    want: Want | None = None
    depth: int = 0
    groups: dict[int, TaskGroup] = field(default_factory=dict)
    watched: dict[int, TaskGroup] = field(default_factory=dict)
    num_labels: int = 0
    quotation: bool = False

    @property
    def pending(self) -> bool:
        return self.state is VariableState.PENDING

    @property
    def wanted(self) -> bool:
        """Whether a client requested it, or an activated LLM call reads it."""
        return self.want is not None or any(t.open and t.wanted for t in self.consumers)


@dataclass(eq=False, slots=True, repr=False)
class Call:
    """One call of a semantic or native function.

    number: number of calls that were submitted before it.
    llm_calls: in order; none after `forget`.
    cause: root failure of a call that failed or was cancelled.
    created_s: time of its submission.
    """

    id: str
    number: int
    name: str
    kind: CallKind
    pieces: tuple[Piece, ...]
    llm_calls: tuple[LlmCall, ...] = ()
    cause: Cause | None = None
    created_s: float = 0.0
    _last_state: CallState = CallState.FINISHED

    @property
    def open(self) -> bool:
        return any(llm_call.open for llm_call in self.llm_calls)

    @property
    def state(self) -> CallState:
        """The state of its first LLM call that is not FINISHED; FINISHED if all are."""
        states = (llm_call.state for llm_call in self.llm_calls)
        return next((s for s in states if s is not CallState.FINISHED), self._last_state)

    def forget(self) -> None:
        """Let go of the LLM calls of an ended call. They refer to it and it to them, so that else
        only the garbage collector could free both."""
        self._last_state = self.state
        self.llm_calls = ()

    @property
    def title(self) -> str:
        """How messages refer to the call."""
        return f"{self.name} ({self.id})" if self.name else self.id


@dataclass(eq=False, slots=True, repr=False)
class LlmCall:
    """The part of a call up to one output: the unit of scheduling.

        call.pieces   [0 ............ prompt_end)  [prompt_end]
                       prompt                       output

    inputs: variables in the prompt that no earlier LLM call of the same call reads.
    wanted: whether a requested value depends on it, so that it may run.
    num_missing: number of pending inputs and of set inputs whose notification is pending (see
        `SessionStateMachine.inform`), plus one while the previous LLM call is unfinished.
    depth: number of LLM calls on the longest path to it.
    label: its scheduling objective.
    promoted: why it has become real-time although its place in the graph does not ask for it.
    lowered: whether its label has fallen and has not risen since, see `lower`.
    stages: requested variable that depends on it -> number of calls between the two.
    groups: task groups that it is a member of; `group` is the one that it is submitted in.
    num_known_pieces: leading prompt pieces whose values were set at the last check.
    num_prefilled_pieces: leading prompt pieces that a Prefill action was issued for.
    ready_s: time when its last input was set, on the session's clock; None before.
    first_token_s: time of its first token; None before.
    end_s: time of its end; None before.
    """

    call: Call
    index: int
    prompt_end: int
    inputs: tuple[Variable, ...]
    outputs: tuple[Variable, ...]
    state: CallState = CallState.WAITING
    wanted: bool = False
    num_missing: int = 0
    depth: int = 0
    label: Label = Label()
    promoted: Promoted | None = None
    lowered: bool = False
    stages: dict[Variable, int] = field(default_factory=dict)
    groups: dict[TaskGroup, None] = field(default_factory=dict)
    num_known_pieces: int = 0
    num_prefilled_pieces: int = 0
    ready_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None

    @property
    def output(self) -> Variable:
        """The only output of an LLM call that is not native."""
        return self.outputs[0]

    @property
    def native(self) -> bool:
        return self.call.kind is CallKind.NATIVE

    @property
    def open(self) -> bool:
        return self.state in OPEN_STATES

    @property
    def started(self) -> bool:
        return self.state in STARTED_STATES

    @property
    def group(self) -> TaskGroup | None:
        """The most urgent one of its task groups, then the largest one, then the one whose sink is
        oldest: engines and routers know only one, and should know members of one as that one."""
        return max(self.groups, key=lambda group: group.precedence, default=None)

    @property
    def stage(self) -> int | None:
        """Distance in calls to the nearest requested variable; None without one."""
        return min(self.stages.values(), default=None)

    @property
    def previous(self) -> LlmCall | None:
        llm_calls = self.call.llm_calls
        return llm_calls[self.index - 1] if 0 < self.index < len(llm_calls) else None

    @property
    def next(self) -> LlmCall | None:
        llm_calls = self.call.llm_calls
        return llm_calls[self.index + 1] if self.index + 1 < len(llm_calls) else None

    def open_followers(self) -> Iterator[LlmCall]:
        """LLM calls that wait for this one; a reader of k of its outputs is yielded k times."""
        following = self.next
        if following is not None and following.open:
            yield following
        for variable in self.outputs:
            if variable.pending:
                yield from (consumer for consumer in variable.consumers if consumer.open)

    def open_predecessors(self) -> Iterator[LlmCall]:
        """LLM calls that this one waits for; a producer of k of its inputs is yielded k times."""
        previous = self.previous
        if previous is not None and previous.open:
            yield previous
        for variable in self.inputs:
            producer = variable.producer
            if variable.pending and producer is not None and producer.open:
                yield producer

    def num_prefillable_pieces(self, variables: Mapping[str, Variable]) -> int:
        """Number of leading prompt pieces with known values, if the next piece is being generated.

        0 otherwise, and while the previous LLM call of the same call is open.
        """
        if self.previous is not None and self.previous.open:
            return 0
        while self.num_known_pieces < self.prompt_end:
            piece = self.call.pieces[self.num_known_pieces]
            if not isinstance(piece, Text):
                variable = variables[piece.variable_id]
                if variable.pending:
                    producer = variable.producer
                    running = producer is not None and producer.state is CallState.RUNNING
                    return self.num_known_pieces if running else 0
            self.num_known_pieces += 1
        return 0


@dataclass(eq=False, slots=True, repr=False)
class TaskGroup:
    """Parrot's task group: the LLM calls at one stage before a requested variable.

    Only the time when the last member finishes counts. A group lasts until its sink is settled, or
    until it has no members: calls that are added to the program later join it.

    sink: the requested variable.
    deadline_s: latest finish time of all members, from the deadline of the sink.
    level: what the members are, by the criteria of the sink: RT if a client waits for it with
        LATENCY, THROUGHPUT if it is requested only for that, else GROUP.
    members: the members that have not finished.
    num_finished: number of members that have finished.
    active: False once the group has ended.
    stragglers_reported: whether `stragglers` has returned the last members.
    at_risk_s: time when the deadline is at risk, while it is watched.
    """

    sink: Variable
    stage: int
    deadline_s: float | None = None
    level: Level = Level.GROUP
    members: dict[LlmCall, None] = field(default_factory=dict)
    num_finished: int = 0
    active: bool = True
    stragglers_reported: bool = False
    at_risk_s: float | None = None

    @property
    def id(self) -> str:
        return f"{self.sink.id}:{self.stage}"

    @property
    def precedence(self) -> tuple[int, int, int, int, str]:
        """Of two groups with a common member, it is submitted in the one that has more of this."""
        producer = self.sink.producer
        assert producer is not None, "the members come before it"
        age = (-producer.call.number, -producer.index)
        return (self.level, self.size, *age, self.sink.id)

    @property
    def size(self) -> int:
        """Number of members known so far, finished ones included."""
        return self.num_finished + len(self.members)

    def set_members(self, llm_calls: Sequence[LlmCall]) -> None:
        """Set the members that have not finished. Others are at another stage by now."""
        if any(llm_call not in self.members for llm_call in llm_calls):
            self.stragglers_reported = False
        self.members = dict.fromkeys(llm_calls)

    def finished(self, llm_call: LlmCall) -> None:
        """A member has finished."""
        del self.members[llm_call]
        self.num_finished += 1


def open_ancestors(variable: Variable) -> list[LlmCall]:
    """Open LLM calls that the variable depends on, consumers before producers.

    The search stops at ended LLM calls, so its cost does not grow with the session's history.
    """
    root = variable.producer
    if root is None or not root.open:
        return []
    order: list[LlmCall] = []
    seen = {root}
    stack = [(root, root.open_predecessors())]
    while stack:
        llm_call, rest = stack[-1]
        for before in rest:
            if before not in seen:
                seen.add(before)
                stack.append((before, before.open_predecessors()))
                break
        else:
            stack.pop()
            order.append(llm_call)
    order.reverse()
    return order
