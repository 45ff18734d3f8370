"""Limits of a session, and which ended calls and unreferenced variables it drops to keep them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from bros.semantic.core.graph import Graph
from bros.semantic.core.nodes import Call, InputPiece, LlmCall, NewCall, OutputPiece, Variable
from bros.semantic.errors import SessionLimitError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one session.

    max_calls: open calls.
    kept_calls: ended calls that are kept. The oldest are forgotten first; all may be forgotten to
        make room for values.
    max_variables: variables. The oldest unreferenced ones are dropped to keep the limit.
    max_value_chars: characters of all values. Unreferenced variables are dropped likewise.
    max_labels: see Labeler.
    label_steps: `max_steps` of Labeler.
    slice_calls: calls that are added or ended at a time, see `submitting` and `closing`. 100 take
        1 to 2 ms.
    slice_consumers: LLM calls that learn at a time that a value which they read is set, see
        `SessionStateMachine.inform`. 1,000 take 3 to 6 ms, 10,000 took 34 to 54 ms.
    """

    max_calls: int = 10_000
    kept_calls: int = 2_000
    max_variables: int = 50_000
    max_value_chars: int = 64_000_000
    max_labels: int = 100_000
    label_steps: int = 1_500
    slice_calls: int = 100
    slice_consumers: int = 1000


@dataclass(frozen=True, slots=True)
class Demand:
    """What new calls need of a session. Added up once, since it takes 10 ms for 10,000 calls.

    calls: their number.
    names: ids of all variables that they name.
    chars: of their values.
    """

    calls: int
    names: Set[str]
    chars: int

    @classmethod
    def of(cls, new: Sequence[NewCall]) -> Demand:
        names = {
            piece.variable_id
            for call in new
            for piece in call.pieces
            if isinstance(piece, InputPiece | OutputPiece)
        }
        names.update(name for call in new for name in call.values)
        return cls(len(new), names, sum(len(text) for call in new for text in call.values.values()))


class Retention:
    """Enforces the limits: forgets ended calls and drops unreferenced variables.

    A variable becomes *unreferenced* when the graph has forgotten all calls that read or produce
    it and no client waits for it. A variable that no call has used yet is not unreferenced: its
    client is about to use it. Clients can read, set and use an unreferenced variable until it is
    dropped.
    """

    def __init__(self, graph: Graph, limits: SessionLimits) -> None:
        self._graph = graph
        self._limits = limits
        self.open_calls = 0
        self._chars = 0
        self._ended: deque[Call] = deque()
        self._unreferenced: dict[Variable, None] = {}
        self._unreferenced_chars = 0

    @property
    def chars(self) -> int:
        """Characters of all values."""
        return self._chars

    def check_calls(self, demand: Demand) -> None:
        """Raises SessionLimitError if these do not fit. Like all checks, it may forget calls."""
        if self.open_calls + demand.calls > self._limits.max_calls:
            raise SessionLimitError(
                f"The session has {self.open_calls} requests that are not done; with "
                f"{demand.calls} more it would have more than {self._limits.max_calls}."
            )
        variables = self._graph.variables
        known = {variables[name] for name in demand.names if name in variables}
        self._check(len(demand.names) - len(known), demand.chars, known)

    def check_variable(self, chars: int) -> None:
        """Raises SessionLimitError if a variable with a value of that length does not fit."""
        self._check(1, chars)

    def check_value(self, text: str) -> None:
        """Raises SessionLimitError if this value does not fit."""
        self._check(0, len(text))

    def _check(self, variables: int, chars: int, used: Set[Variable] = frozenset()) -> None:
        """Check that these numbers of variables and characters fit beside the referenced ones.

        used: variables that count as referenced. Ended calls are forgotten, the oldest first,
        before the check fails.
        """
        limits = self._limits
        in_use = [variable for variable in used if variable in self._unreferenced]
        variables += len(self._graph.variables) - len(self._unreferenced) + len(in_use)
        chars += self._chars - self._unreferenced_chars + sum(map(_chars, in_use))
        while self._ended and (variables > limits.max_variables or chars > limits.max_value_chars):
            freed = [v for v in self._forget(self._ended.popleft()) if v not in used]
            variables -= len(freed)
            chars -= sum(map(_chars, freed))
        if variables > limits.max_variables:
            message = f"The session would have more than {limits.max_variables} variables in use."
            raise SessionLimitError(message)
        if chars > limits.max_value_chars:
            raise SessionLimitError(
                f"The values of the session would have more than {limits.max_value_chars} "
                "characters."
            )

    def calls_added(self, demand: Demand, touching: Sequence[LlmCall]) -> None:
        """Record that the graph has added these calls. touching: see AddedCalls."""
        self.open_calls += demand.calls
        self._chars += demand.chars
        for llm_call in touching:
            for variable in (*llm_call.inputs, *llm_call.outputs):
                self._mark_used(variable)
        self.drop_unreferenced()

    def awaited(self, variable: Variable) -> None:
        """Record that a client waits for the variable."""
        self._mark_used(variable)

    def _mark_used(self, variable: Variable) -> None:
        if variable in self._unreferenced:
            del self._unreferenced[variable]
            self._unreferenced_chars -= _chars(variable)

    def value_set(self, variable: Variable) -> None:
        """Record that the variable has got its value."""
        self._chars += _chars(variable)
        if variable in self._unreferenced:
            self._unreferenced_chars += _chars(variable)
        self.drop_unreferenced()

    def call_ended(self, call: Call) -> None:
        """Record that the last LLM call of the call has ended."""
        self.open_calls -= 1
        self._ended.append(call)
        while len(self._ended) > self._limits.kept_calls:
            self._forget(self._ended.popleft())

    def dismantling(self, count: int) -> Iterator[None]:
        """Forget all calls, which have ended, and drop all variables; it pauses after each `count`
        LLM calls and variables."""
        variables = self._graph.variables
        while self._ended or variables:
            forgotten = 0
            while self._ended and forgotten < count:
                call = self._ended.popleft()
                forgotten += len(call.llm_calls)
                self._forget(call)
            if not self._ended:
                for _ in range(min(count, len(variables))):
                    variable = next(reversed(variables.values()))
                    self._unreferenced.pop(variable, None)
                    self._graph.drop(variable)
            yield
        self._chars = self._unreferenced_chars = 0

    def _forget(self, call: Call) -> list[Variable]:
        """Forget the call. Returns the variables that become unreferenced."""
        llm_calls = call.llm_calls
        self._graph.forget(call)
        freed = []
        for llm_call in llm_calls:
            for variable in (*llm_call.inputs, *llm_call.outputs):
                if _is_unreferenced(variable) and variable not in self._unreferenced:
                    self._unreferenced[variable] = None
                    self._unreferenced_chars += _chars(variable)
                    freed.append(variable)
        return freed

    def drop_unreferenced(self) -> None:
        """Drop unreferenced variables, the oldest first, until the limits are kept."""
        limits = self._limits
        while self._unreferenced and (
            len(self._graph.variables) > limits.max_variables
            or self._chars > limits.max_value_chars
        ):
            variable = next(iter(self._unreferenced))
            del self._unreferenced[variable]
            self._graph.drop(variable)
            self._chars -= _chars(variable)
            self._unreferenced_chars -= _chars(variable)

    def check_integrity(self) -> None:
        variables = self._graph.variables.values()
        assert self.open_calls == sum(call.open for call in self._graph.calls.values())
        assert self.open_calls + len(self._ended) == len(self._graph.calls)
        assert len(self._ended) <= self._limits.kept_calls
        assert self._chars == sum(map(_chars, variables)) <= self._limits.max_value_chars
        assert len(variables) <= self._limits.max_variables
        assert self._unreferenced_chars == sum(map(_chars, self._unreferenced))
        assert all(
            _is_unreferenced(v) and self._graph.variables[v.id] is v for v in self._unreferenced
        )


def _chars(variable: Variable) -> int:
    return len(variable.text) if variable.text is not None else 0


def _is_unreferenced(variable: Variable) -> bool:
    awaited = variable.pending and variable.want is not None
    return not awaited and variable.producer is None and not variable.consumers
