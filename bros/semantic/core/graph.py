"""The graph of a session: calls are added all or none, never so that they wait for each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from bros.semantic.core.nodes import Call, InputPiece, NewCall, OutputPiece, Turn, Variable
from bros.semantic.errors import ConflictError
from bros.semantic.schema import CallKind, TurnState, VariableState


class Graph:
    """Calls and variables by their ids, in the order in which they came."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.variables: dict[str, Variable] = {}
        self.added = 0  # calls so far, also those that are forgotten

    def producer(self, variable_id: str) -> Turn | None:
        """GetProducer of the Parrot paper: who sets it; None if that is not (or no longer) known.

        Raises KeyError for an unknown variable, as `consumers` does.
        """
        return self.variables[variable_id].producer

    def consumers(self, variable_id: str) -> Sequence[Turn]:
        """GetConsumers of the Parrot paper: turns that read it."""
        return tuple(self.variables[variable_id].consumers)

    def declare(self, variable_id: str, name: str = "") -> Variable:
        """A new variable. Raises ConflictError (already_exists)."""
        if variable_id in self.variables:
            raise ConflictError(f"There is a variable {variable_id} already.", "already_exists")
        self.variables[variable_id] = variable = Variable(variable_id, name)
        return variable

    def add(self, new: Sequence[NewCall], now: float) -> list[Call]:
        """Adds all of these calls, or none of them.

        Raises ConflictError: a variable is set already (already_set) or by another call
        (already_produced), an id is taken (already_exists), or calls would wait for each other
        (cyclic, with the path in the message).
        """
        draft = _Draft(self)
        calls = [draft.call(one, now) for one in new]
        turns = [turn for call in calls for turn in call.turns]
        order = draft.producers_first(turns)
        self.variables.update(draft.variables)
        self.calls.update((call.id, call) for call in calls)
        self.added += len(calls)
        for turn in turns:
            for variable in turn.inputs:
                variable.consumers[turn] = None
            for variable in turn.outputs:
                variable.producer = turn
            turn.missing = sum(v.pending for v in turn.inputs) + (turn.index > 0)
        for turn in order:
            _set_depth(turn)
        return calls

    def forget(self, call: Call) -> None:
        """Takes out a call that is over; its variables stay."""
        del self.calls[call.id]
        for turn in call.turns:
            for variable in turn.inputs:
                del variable.consumers[turn]
            for variable in turn.outputs:
                variable.producer = None

    def check_integrity(self) -> None:
        """Asserts that both ends of every edge know each other, and that there is no cycle."""
        turns = [turn for call in self.calls.values() for turn in call.turns]
        known = set(turns)
        for variable in self.variables.values():
            assert variable.producer is None or variable in variable.producer.outputs
            assert variable.producer is None or variable.producer in known
            assert all(turn in known and variable in turn.inputs for turn in variable.consumers)
            assert (variable.text is None) == (variable.state is not VariableState.READY)
            settled_badly = variable.state in (VariableState.FAILED, VariableState.CANCELLED)
            assert settled_badly == (variable.cause is not None)
        for turn in turns:
            assert all(self.variables.get(v.id) is v for v in (*turn.inputs, *turn.outputs))
            assert all(variable.producer is turn for variable in turn.outputs)
            before = turn.previous
            if turn.open:
                waits = before is not None and before.state is not TurnState.FINISHED
                assert turn.missing == sum(v.pending for v in turn.inputs) + waits
                depth = turn.depth
                _set_depth(turn)
                assert turn.depth == depth
        assert len(_Draft(self).producers_first(turns)) == len(turns)


def already_set(variable: Variable) -> ConflictError:
    """A variable that is not pending cannot be given a value."""
    fate = {
        VariableState.READY: "has its value",
        VariableState.FAILED: "has failed",
        VariableState.CANCELLED: "was cancelled",
    }
    message = f"The variable {variable.id} {fate[variable.state]} already."
    return ConflictError(message, "already_set")


def _set_depth(turn: Turn) -> None:
    """Depth is the longest way from a source in turns of the model; native ones do not count."""
    before = turn.previous
    turn.depth = max((variable.depth for variable in turn.inputs), default=0)
    if before is not None:
        turn.depth = max(turn.depth, before.depth + 1)
    for variable in turn.outputs:
        variable.depth = turn.depth + (not turn.native)


class _Draft:
    """Calls that may yet turn out to be wrong: nothing that is in the graph is changed."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.variables: dict[str, Variable] = {}
        self._calls: set[str] = set()
        self._makers: dict[Variable, Call] = {}
        self._consumers: dict[Variable, list[Turn]] = {}

    def call(self, new: NewCall, now: float) -> Call:
        if new.id in self._graph.calls or new.id in self._calls:
            raise ConflictError(f"There is a request {new.id} already.", "already_exists")
        number = self._graph.added + len(self._calls)
        self._calls.add(new.id)
        names = {p.variable_id: p.name for p in new.pieces if isinstance(p, InputPiece)}
        for variable_id, text in new.values.items():
            self._constant(variable_id, names.get(variable_id, ""), text)
        call = Call(new.id, number, new.name, new.kind, tuple(new.pieces), created_s=now)
        call.turns = tuple(self._native(call) if new.kind is CallKind.NATIVE else self._turns(call))
        for turn in call.turns:
            for variable in turn.inputs:
                self._consumers.setdefault(variable, []).append(turn)
        return call

    def _constant(self, variable_id: str, name: str, text: str) -> None:
        if variable_id in self._graph.variables or variable_id in self.variables:
            raise ConflictError(f"There is a variable {variable_id} already.", "already_exists")
        constant = Variable(variable_id, name, state=VariableState.READY, text=text)
        self.variables[variable_id] = constant

    def _turns(self, call: Call) -> Iterator[Turn]:
        assert call.pieces and isinstance(call.pieces[-1], OutputPiece)
        seen: set[Variable] = set()
        inputs: dict[Variable, None] = {}
        index = 0
        for position, piece in enumerate(call.pieces):
            if isinstance(piece, InputPiece):
                variable = self._variable(piece)
                if variable not in seen:
                    inputs[variable] = None
            elif isinstance(piece, OutputPiece):
                output = self._output(piece, call)
                yield Turn(call, index, position, tuple(inputs), (output,))
                seen.update(inputs)
                inputs = {}
                index += 1

    def _native(self, call: Call) -> Iterator[Turn]:
        inputs = {self._variable(p): None for p in call.pieces if isinstance(p, InputPiece)}
        outputs = [self._output(p, call) for p in call.pieces if isinstance(p, OutputPiece)]
        assert outputs
        yield Turn(call, 0, len(call.pieces), tuple(inputs), tuple(outputs))

    def _variable(self, piece: InputPiece | OutputPiece) -> Variable:
        for known in (self._graph.variables, self.variables):
            if piece.variable_id in known:
                return known[piece.variable_id]
        self.variables[piece.variable_id] = new = Variable(piece.variable_id, piece.name)
        return new

    def _output(self, piece: OutputPiece, call: Call) -> Variable:
        variable = self._variable(piece)
        maker = self._makers.get(variable)
        if variable.producer is not None:
            maker = variable.producer.call
        if maker is not None:
            message = f"The variable {variable.id} is an output of {self._title(maker)} already."
            raise ConflictError(message, "already_produced")
        if not variable.pending:
            raise already_set(variable)
        self._makers[variable] = call
        return variable

    def producers_first(self, turns: Iterable[Turn]) -> list[Turn]:
        """The turns and all that wait for them, topologically. Raises ConflictError (cyclic)."""
        waiting_for: dict[Turn, int] = dict.fromkeys(turns, 0)
        stack = list(waiting_for)
        while stack:
            for follower in self._followers(stack.pop()):
                if follower not in waiting_for:
                    waiting_for[follower] = 0
                    stack.append(follower)
                waiting_for[follower] += 1
        order = [turn for turn, count in waiting_for.items() if not count]
        for turn in order:  # it grows on the way
            for follower in self._followers(turn):
                waiting_for[follower] -= 1
                if not waiting_for[follower]:
                    order.append(follower)
        if len(order) < len(waiting_for):
            raise ConflictError(self._cycle([t for t, n in waiting_for.items() if n]), "cyclic")
        return order

    def _followers(self, turn: Turn) -> Iterator[Turn]:
        """Turns that wait for this one; those that are over do not wait any more."""
        if turn.next is not None and turn.next.open:
            yield turn.next
        for variable in turn.outputs:
            yield from (consumer for consumer in variable.consumers if consumer.open)
            yield from self._consumers.get(variable, ())

    def _cycle(self, stuck: Sequence[Turn]) -> str:
        """Who waits for whom. Each of `stuck` waits for another one of them."""
        waits_for = {later: turn for turn in stuck for later in self._followers(turn)}
        turn = stuck[0]
        path: dict[Turn, None] = {}
        while turn not in path:
            path[turn] = None
            turn = waits_for[turn]
        circle = [*list(path)[list(path).index(turn) :], turn]
        steps = [
            f"{self._title(later.call)} needs {passed[0].id} of {self._title(earlier.call)}"
            for later, earlier in itertools.pairwise(circle)
            if (passed := [v for v in later.inputs if v in earlier.outputs])
        ]
        return f"Requests wait for each other: {', '.join(steps)}."

    def _title(self, call: Call) -> str:
        """In words of the client's own, which has not been told the ids of calls to be refused."""
        if call.id in self._graph.calls:
            return call.title
        return call.name or f"requests[{call.number - self._graph.added}]"
