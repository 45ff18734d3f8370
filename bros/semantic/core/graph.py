"""The graph of a session: calls are added all or none, never so that they wait for each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from bros.semantic.core.nodes import Call, InputPiece, LlmCall, NewCall, OutputPiece, Variable
from bros.semantic.errors import ConflictError
from bros.semantic.schema import CallKind, CallState, VariableState


class Graph:
    """Calls and variables by their ids, in the order in which they came."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.variables: dict[str, Variable] = {}
        self.added = 0  # calls so far, also those that are forgotten

    def producer(self, variable_id: str) -> LlmCall | None:
        """GetProducer of the Parrot paper: who sets it; None if that is not (or no longer) known.

        Raises KeyError for an unknown variable, as `consumers` does.
        """
        return self.variables[variable_id].producer

    def consumers(self, variable_id: str) -> Sequence[LlmCall]:
        """GetConsumers of the Parrot paper: LLM calls that read it."""
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
        llm_calls = [llm_call for call in calls for llm_call in call.llm_calls]
        order = draft.producers_first(llm_calls)
        self.variables.update(draft.variables)
        self.calls.update((call.id, call) for call in calls)
        self.added += len(calls)
        for llm_call in llm_calls:
            for variable in llm_call.inputs:
                variable.consumers[llm_call] = None
            for variable in llm_call.outputs:
                variable.producer = llm_call
            llm_call.missing = sum(v.pending for v in llm_call.inputs) + (llm_call.index > 0)
        for llm_call in order:
            _set_depth(llm_call)
        return calls

    def forget(self, call: Call) -> None:
        """Takes out a call that is over; its variables stay."""
        del self.calls[call.id]
        for llm_call in call.llm_calls:
            for variable in llm_call.inputs:
                del variable.consumers[llm_call]
            for variable in llm_call.outputs:
                variable.producer = None

    def check_integrity(self) -> None:
        """Asserts that both ends of every edge know each other, and that there is no cycle."""
        llm_calls = [llm_call for call in self.calls.values() for llm_call in call.llm_calls]
        known = set(llm_calls)
        for variable in self.variables.values():
            assert variable.producer is None or variable in variable.producer.outputs
            assert variable.producer is None or variable.producer in known
            assert all(
                llm_call in known and variable in llm_call.inputs for llm_call in variable.consumers
            )
            assert (variable.text is None) == (variable.state is not VariableState.READY)
            settled_badly = variable.state in (VariableState.FAILED, VariableState.CANCELLED)
            assert settled_badly == (variable.cause is not None)
        for llm_call in llm_calls:
            assert all(self.variables.get(v.id) is v for v in (*llm_call.inputs, *llm_call.outputs))
            assert all(variable.producer is llm_call for variable in llm_call.outputs)
            before = llm_call.previous
            if llm_call.open:
                waits = before is not None and before.state is not CallState.FINISHED
                assert llm_call.missing == sum(v.pending for v in llm_call.inputs) + waits
                depth = llm_call.depth
                _set_depth(llm_call)
                assert llm_call.depth == depth
        assert len(_Draft(self).producers_first(llm_calls)) == len(llm_calls)


def already_set(variable: Variable) -> ConflictError:
    """A variable that is not pending cannot be given a value."""
    fate = {
        VariableState.READY: "has its value",
        VariableState.FAILED: "has failed",
        VariableState.CANCELLED: "was cancelled",
    }
    message = f"The variable {variable.id} {fate[variable.state]} already."
    return ConflictError(message, "already_set")


def _set_depth(llm_call: LlmCall) -> None:
    """Set the depth: LLM calls on the longest path from a source; native ones do not count."""
    before = llm_call.previous
    llm_call.depth = max((variable.depth for variable in llm_call.inputs), default=0)
    if before is not None:
        llm_call.depth = max(llm_call.depth, before.depth + 1)
    for variable in llm_call.outputs:
        variable.depth = llm_call.depth + (not llm_call.native)


class _Draft:
    """Calls that may yet LLM call out to be wrong: nothing that is in the graph is changed."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.variables: dict[str, Variable] = {}
        self._calls: set[str] = set()
        self._makers: dict[Variable, Call] = {}
        self._consumers: dict[Variable, list[LlmCall]] = {}

    def call(self, new: NewCall, now: float) -> Call:
        if new.id in self._graph.calls or new.id in self._calls:
            raise ConflictError(f"There is a request {new.id} already.", "already_exists")
        number = self._graph.added + len(self._calls)
        self._calls.add(new.id)
        names = {p.variable_id: p.name for p in new.pieces if isinstance(p, InputPiece)}
        for variable_id, text in new.values.items():
            self._constant(variable_id, names.get(variable_id, ""), text)
        call = Call(new.id, number, new.name, new.kind, tuple(new.pieces), created_s=now)
        call.llm_calls = tuple(
            self._native(call) if new.kind is CallKind.NATIVE else self._llm_calls(call)
        )
        for llm_call in call.llm_calls:
            for variable in llm_call.inputs:
                self._consumers.setdefault(variable, []).append(llm_call)
        return call

    def _constant(self, variable_id: str, name: str, text: str) -> None:
        if variable_id in self._graph.variables or variable_id in self.variables:
            raise ConflictError(f"There is a variable {variable_id} already.", "already_exists")
        constant = Variable(variable_id, name, state=VariableState.READY, text=text)
        self.variables[variable_id] = constant

    def _llm_calls(self, call: Call) -> Iterator[LlmCall]:
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
                yield LlmCall(call, index, position, tuple(inputs), (output,))
                seen.update(inputs)
                inputs = {}
                index += 1

    def _native(self, call: Call) -> Iterator[LlmCall]:
        inputs = {self._variable(p): None for p in call.pieces if isinstance(p, InputPiece)}
        outputs = [self._output(p, call) for p in call.pieces if isinstance(p, OutputPiece)]
        assert outputs
        yield LlmCall(call, 0, len(call.pieces), tuple(inputs), tuple(outputs))

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

    def producers_first(self, llm_calls: Iterable[LlmCall]) -> list[LlmCall]:
        """These and all that wait for them, topologically. Raises ConflictError (cyclic)."""
        waiting_for: dict[LlmCall, int] = dict.fromkeys(llm_calls, 0)
        stack = list(waiting_for)
        while stack:
            for follower in self._followers(stack.pop()):
                if follower not in waiting_for:
                    waiting_for[follower] = 0
                    stack.append(follower)
                waiting_for[follower] += 1
        order = [llm_call for llm_call, count in waiting_for.items() if not count]
        for llm_call in order:  # it grows on the way
            for follower in self._followers(llm_call):
                waiting_for[follower] -= 1
                if not waiting_for[follower]:
                    order.append(follower)
        if len(order) < len(waiting_for):
            raise ConflictError(self._cycle([t for t, n in waiting_for.items() if n]), "cyclic")
        return order

    def _followers(self, llm_call: LlmCall) -> Iterator[LlmCall]:
        """LLM calls that wait for this one; those that are over do not wait any more."""
        if llm_call.next is not None and llm_call.next.open:
            yield llm_call.next
        for variable in llm_call.outputs:
            yield from (consumer for consumer in variable.consumers if consumer.open)
            yield from self._consumers.get(variable, ())

    def _cycle(self, stuck: Sequence[LlmCall]) -> str:
        """The path of a cycle. Each of `stuck` waits for another one of them."""
        waits_for = {later: llm_call for llm_call in stuck for later in self._followers(llm_call)}
        llm_call = stuck[0]
        path: dict[LlmCall, None] = {}
        while llm_call not in path:
            path[llm_call] = None
            llm_call = waits_for[llm_call]
        circle = [*list(path)[list(path).index(llm_call) :], llm_call]
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
