"""The calls of a session, the variables between them, and the labels that calls get.

```
 variable ──▶ LlmCall ──▶ variable ──▶ LlmCall ...     LlmCall 0 ──▶ LlmCall 1     of one Call
   input      of a Call    output                      they share one sequence of tokens
```

An *LLM call* is what is scheduled: the part of a call up to one output. A call with k outputs has
k LLM calls, which run one after another. A native call, a function of the client, has one with all
outputs of the function; the client runs it instead of the model.

Times with a deadline are absolute, in seconds of the session's clock; None is no deadline.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bros.core.request import SamplingParams
from bros.semantic.core.template import Text
from bros.semantic.errors import Cause
from bros.semantic.schema import CallKind, CallState, Criteria, Perf, VariableState


class Level(enum.IntEnum):
    """How urgent a request is, from the least on."""

    THROUGHPUT = 0  # some time
    GROUP = 1  # when all of its group are done is what counts
    RT = 2  # its value is waited for


def earliest(a: float | None, b: float | None) -> float | None:
    """The smaller one, where None is no bound."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What one request must achieve.

    objectives: of the values that it is for. LATENCY also means that all of it is complete, which
        is what matters about a request that other requests wait for.
    ttft_s, tpot_s: as in Criteria.
    deadline_s: when it must be complete at the latest.
    """

    level: Level = Level.THROUGHPUT
    objectives: frozenset[Perf] = frozenset()
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None

    def joined(self, other: Label) -> Label:
        """What meets both: the higher level, all objectives, the earlier times."""
        return Label(
            level=max(self.level, other.level),
            objectives=self.objectives | other.objectives,
            ttft_s=earliest(self.ttft_s, other.ttft_s),
            tpot_s=earliest(self.tpot_s, other.tpot_s),
            deadline_s=earliest(self.deadline_s, other.deadline_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """All that has been asked of one variable so far.

    label: what its producer must achieve if anything but THROUGHPUT was asked for, else None.
    batch: whether THROUGHPUT was, and batch_deadline_s until when.
    """

    label: Label | None = None
    batch: bool = False
    batch_deadline_s: float | None = None

    def joined(self, criteria: Criteria, deadline_s: float | None) -> Want:
        """With one more question. deadline_s: criteria.deadline_s as a time of the clock."""
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
        return replace(self, label=asked if self.label is None else self.label.joined(asked))


DEFAULT_SAMPLING = SamplingParams()


OPEN_STATES = frozenset({CallState.WAITING, CallState.READY, CallState.RUNNING})
STARTED_STATES = frozenset({CallState.READY, CallState.RUNNING})


@dataclass(frozen=True, slots=True)
class InputPiece:
    """The value of a variable as part of a prompt.

    name: of the placeholder.
    """

    name: str
    variable_id: str
    transforms: Callable[[str], str] | None = None


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """What the model generates here becomes the value of a variable."""

    name: str
    variable_id: str
    transforms: Callable[[str], str] | None = None
    sampling: SamplingParams = DEFAULT_SAMPLING


Piece = Text | InputPiece | OutputPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCall:
    """A call to be added to a graph. Variables that are not there come into being.

    pieces: they end with an output; of a native call just its inputs and outputs, in any order.
    values: variable id -> text of variables that are new and have their value at once.
    """

    id: str
    name: str = ""
    kind: CallKind = CallKind.LLM
    pieces: Sequence[Piece] = ()
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False, slots=True, repr=False)
class Variable:
    """A value that is set once.

    token_ids: of the text, only if they are exactly what was generated.
    cause: why it failed or was cancelled.
    producer: what sets it.
    consumers: what reads it.
    want: what was asked of it.
    depth: LLM calls on the longest path to it; native ones do not count.
    groups: task groups among the LLM calls that it needs, and stages whose deadline is watched.
    region: how many LLM calls it needed when they were labelled.
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
    groups: list[TaskGroup] = field(default_factory=list)
    region: int = 0

    @property
    def pending(self) -> bool:
        return self.state is VariableState.PENDING

    @property
    def wanted(self) -> bool:
        """Whether it was asked for, or an LLM call that is to run needs it."""
        return self.want is not None or any(t.open and t.wanted for t in self.consumers)


@dataclass(eq=False, slots=True, repr=False)
class Call:
    """One function call.

    number: how many calls came before it.
    cause: what failed first, of a call that failed or was cancelled.
    created_s: when it was submitted.
    """

    id: str
    number: int
    name: str
    kind: CallKind
    pieces: tuple[Piece, ...]
    llm_calls: tuple[LlmCall, ...] = ()
    cause: Cause | None = None
    created_s: float = 0.0

    @property
    def open(self) -> bool:
        return any(llm_call.open for llm_call in self.llm_calls)

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.name} ({self.id})" if self.name else self.id


@dataclass(eq=False, slots=True, repr=False)
class LlmCall:
    """Part of a call up to an output.

    prompt_end: its prompt is call.pieces[:prompt_end], its output is the piece after that.
    inputs: variables of the prompt that no earlier LLM call of the same call reads.
    missing: inputs that are pending, plus one if the previous LLM call of the call is not over.
    depth: LLM calls on the longest path to it.
    label: what it must achieve.
    stages: wanted variable that needs it -> number of requests from here to that variable.
    groups: task groups that it is a member of.
    known: leading pieces of the prompt whose values were set at the last look.
    prefilled: leading pieces that were sent to be prefilled.
    ready_s, first_token_s, end_s: on the session's clock; None before.
    """

    call: Call
    index: int
    prompt_end: int
    inputs: tuple[Variable, ...]
    outputs: tuple[Variable, ...]
    state: CallState = CallState.WAITING
    wanted: bool = False
    missing: int = 0
    depth: int = 0
    label: Label = Label()
    stages: dict[Variable, int] = field(default_factory=dict)
    groups: dict[TaskGroup, None] = field(default_factory=dict)
    known: int = 0
    prefilled: int = 0
    ready_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None

    @property
    def output(self) -> Variable:
        """What it generates, of an LLM call of the model."""
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
    def stage(self) -> int | None:
        """Requests between here and the nearest wanted variable; None if it is for none."""
        return min(self.stages.values(), default=None)

    @property
    def previous(self) -> LlmCall | None:
        return self.call.llm_calls[self.index - 1] if self.index else None

    @property
    def next(self) -> LlmCall | None:
        llm_calls = self.call.llm_calls
        return llm_calls[self.index + 1] if self.index + 1 < len(llm_calls) else None

    def open_predecessors(self) -> Iterator[LlmCall]:
        """LLM calls that this one waits for; one that produces k of its inputs comes k times."""
        previous = self.previous
        if previous is not None and previous.open:
            yield previous
        for variable in self.inputs:
            producer = variable.producer
            if variable.pending and producer is not None and producer.open:
                yield producer

    def known_ahead(self, variables: Mapping[str, Variable]) -> int:
        """Leading pieces of the call that are known, if what follows them is being generated;
        0 if not, or if the LLM call before this one is not over."""
        if self.previous is not None and self.previous.open:
            return 0
        while self.known < self.prompt_end:
            piece = self.call.pieces[self.known]
            if not isinstance(piece, Text):
                variable = variables[piece.variable_id]
                if variable.pending:
                    producer = variable.producer
                    running = producer is not None and producer.state is CallState.RUNNING
                    return self.known if running else 0
            self.known += 1
        return 0


@dataclass(eq=False, slots=True, repr=False)
class TaskGroup:
    """LLM calls at one stage before a wanted variable, of which only the last one's end counts.

    left: how many members have not finished.
    deadline_s: when all members must have finished.
    active: False once the variable is settled or the group has been replaced.
    down_to_stragglers: the remaining members are all that the next stage waits for.
    """

    sink: Variable
    stage: int
    members: tuple[LlmCall, ...]
    deadline_s: float | None
    left: int
    active: bool = True
    down_to_stragglers: bool = False

    @property
    def id(self) -> str:
        return f"{self.sink.id}:{self.stage}"


def open_ancestors(variable: Variable) -> list[LlmCall]:
    """LLM calls that are not over and that the variable needs, each one before those that it needs.

    LLM calls that are over need nothing, so the work does not grow with the history of a session.
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
