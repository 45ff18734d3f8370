"""How much of its past a session remembers, and how much it holds at most."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass

from bros.semantic.core.graph import Graph
from bros.semantic.core.nodes import Call, InputPiece, NewCall, OutputPiece, Variable
from bros.semantic.errors import SessionLimitError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Most that one session holds.

    max_calls: calls that are not over.
    kept_calls: calls that are over and remembered. The oldest are forgotten first; all may be
        forgotten to make room for values.
    max_variables: in total. Beyond it the oldest loose variables are dropped.
    max_value_chars: of all values. Beyond it the oldest loose variables are dropped.
    max_labels, label_steps: see Labeller; they bound what a program costs whose values are all
        asked for.
    """

    max_calls: int = 10_000
    kept_calls: int = 2_000
    max_variables: int = 50_000
    max_value_chars: int = 64_000_000
    max_labels: int = 100_000
    label_steps: int = 2_000


class Retention:
    """Keeps count, forgets calls that are over, and says what there is no room for.

    A variable is *loose* once all calls around it are forgotten and no client waits for it. A
    variable that no call has used yet is not loose: its client is about to use it. Loose variables
    can still be read, set and used until room is needed.
    """

    def __init__(self, graph: Graph, limits: SessionLimits) -> None:
        self._graph = graph
        self._limits = limits
        self.open_calls = 0
        self._chars = 0
        self._over: deque[Call] = deque()
        self._loose: dict[Variable, None] = {}
        self._loose_chars = 0

    def check_calls(self, new: Sequence[NewCall]) -> None:
        """Raises SessionLimitError if these cannot be added. May forget calls, like all checks."""
        if self.open_calls + len(new) > self._limits.max_calls:
            raise SessionLimitError(
                f"The session has {self.open_calls} requests that are not done; with "
                f"{len(new)} more it would have more than {self._limits.max_calls}."
            )
        named = {
            piece.variable_id: None
            for call in new
            for piece in call.pieces
            if isinstance(piece, InputPiece | OutputPiece)
        }
        for call in new:
            named.update(dict.fromkeys(call.values))
        known = {self._graph.variables[name] for name in named if name in self._graph.variables}
        chars = sum(len(text) for call in new for text in call.values.values())
        self._check(len(named) - len(known), chars, known)

    def check_variable(self, chars: int) -> None:
        """Raises SessionLimitError if there is no room for one more with a value that long."""
        self._check(1, chars)

    def check_value(self, text: str) -> None:
        """Raises SessionLimitError if there is no room for this value."""
        self._check(0, len(text))

    def _check(self, variables: int, chars: int, used: Set[Variable] = frozenset()) -> None:
        """For so many more. What is in use counts, and what `used` holds; calls that are over are
        forgotten, the oldest first, before anything is refused."""
        limits = self._limits
        in_use = [variable for variable in used if variable in self._loose]
        variables += len(self._graph.variables) - len(self._loose) + len(in_use)
        chars += self._chars - self._loose_chars + sum(map(_chars, in_use))
        while self._over and (variables > limits.max_variables or chars > limits.max_value_chars):
            freed = [v for v in self._forget(self._over.popleft()) if v not in used]
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

    def added(self, calls: Sequence[Call], new: Sequence[NewCall]) -> None:
        """These calls are in the graph now."""
        self.open_calls += len(calls)
        self._chars += sum(len(text) for call in new for text in call.values.values())
        for call in calls:
            for llm_call in call.llm_calls:
                for variable in (*llm_call.inputs, *llm_call.outputs):
                    self._keep(variable)
        self.make_room()

    def wanted(self, variable: Variable) -> None:
        """A client waits for it."""
        self._keep(variable)

    def _keep(self, variable: Variable) -> None:
        if variable in self._loose:
            del self._loose[variable]
            self._loose_chars -= _chars(variable)

    def valued(self, variable: Variable) -> None:
        """The variable has its value now."""
        self._chars += _chars(variable)
        if variable in self._loose:
            self._loose_chars += _chars(variable)
        self.make_room()

    def over(self, call: Call) -> None:
        """The last LLM call of the call is over."""
        self.open_calls -= 1
        self._over.append(call)
        while len(self._over) > self._limits.kept_calls:
            self._forget(self._over.popleft())

    def _forget(self, call: Call) -> list[Variable]:
        """Returns what is loose from now on."""
        self._graph.forget(call)
        freed = []
        for llm_call in call.llm_calls:
            for variable in (*llm_call.inputs, *llm_call.outputs):
                if _unconnected(variable) and variable not in self._loose:
                    self._loose[variable] = None
                    self._loose_chars += _chars(variable)
                    freed.append(variable)
        return freed

    def make_room(self) -> None:
        """Drops loose variables, the oldest first, until the limits are kept."""
        limits = self._limits
        while self._loose and (
            len(self._graph.variables) > limits.max_variables
            or self._chars > limits.max_value_chars
        ):
            variable = next(iter(self._loose))
            del self._loose[variable]
            del self._graph.variables[variable.id]
            self._chars -= _chars(variable)
            self._loose_chars -= _chars(variable)

    def check_integrity(self) -> None:
        variables = self._graph.variables.values()
        assert self.open_calls == sum(call.open for call in self._graph.calls.values())
        assert self.open_calls + len(self._over) == len(self._graph.calls)
        assert len(self._over) <= self._limits.kept_calls
        assert self._chars == sum(map(_chars, variables)) <= self._limits.max_value_chars
        assert len(variables) <= self._limits.max_variables
        assert self._loose_chars == sum(map(_chars, self._loose))
        assert all(_unconnected(v) and self._graph.variables[v.id] is v for v in self._loose)


def _chars(variable: Variable) -> int:
    return len(variable.text) if variable.text is not None else 0


def _unconnected(variable: Variable) -> bool:
    awaited = variable.pending and variable.want is not None
    return not awaited and variable.producer is None and not variable.consumers
