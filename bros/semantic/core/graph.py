"""The acyclic graph of a session's calls and variables. A program is added whole or not at all."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bros.core.slices import Slices, whole
from bros.semantic.core.nodes import Call, InputPiece, LlmCall, NewCall, OutputPiece, Variable
from bros.semantic.errors import ConflictError
from bros.semantic.schema import CallKind, CallState, VariableState


class AddedCalls(NamedTuple):
    """Calls that were added to a graph.

    touching: their LLM calls that read or set a variable which was there before.
    """

    calls: list[Call]
    touching: list[LlmCall]


class Graph:
    """Calls and variables by id, in order of their creation. Only the methods change them.

    added: number of calls added so far, forgotten ones included.
    version: number of changes so far to the calls, the variables and the edges between them.
    """

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.variables: dict[str, Variable] = {}
        self.added = 0
        self.version = 0

    def declare(self, variable_id: str, name: str = "") -> Variable:
        """Create a variable. Raises ConflictError (already_exists)."""
        if variable_id in self.variables:
            raise ConflictError(f"There is a variable {variable_id} already.", "already_exists")
        self.version += 1
        self.variables[variable_id] = variable = Variable(variable_id, name)
        return variable

    def drop(self, variable: Variable) -> None:
        """Remove a variable that no call reads or produces."""
        self.version += 1
        del self.variables[variable.id]

    def add(self, new: Sequence[NewCall], now: float) -> list[Call]:
        """Add all of these calls, or none of them.

        Raises ConflictError: an output has a value (already_set) or another producer
        (already_produced), an id is taken (already_exists), or the calls would form a cycle
        (cyclic, with the path in the message).
        """
        return self.commit(self._checked(new, now)).calls

    def drafting(self, new: Sequence[NewCall], now: float, slice_calls: int) -> Slices[Draft]:
        """Check these calls like `add`, in slices, without adding them.

        It pauses after every slice_calls calls, or fewer with many pieces. Only `commit` changes
        the graph. Raises as `add`. If the graph is changed between two slices, the calls are
        checked again, in one slice: what has been checked refers to calls and variables that may
        not be there any more.
        """
        draft = Draft(self, new, now)
        for _ in draft.check(slice_calls):
            yield
            if draft.stale:
                return self._checked(new, now)
        return draft

    def _checked(self, new: Sequence[NewCall], now: float) -> Draft:
        draft = Draft(self, new, now)
        for _ in draft.check(sys.maxsize):
            pass
        return draft

    def commit(self, draft: Draft) -> AddedCalls:
        """Add the calls of a draft, which are checked again if the draft does not hold any more.
        Raises as `add`."""
        if not draft.holds():
            draft = self._checked(draft.new, draft.now)
        self.version += 1
        self.variables.update(draft.variables)
        self.calls.update((call.id, call) for call in draft.calls)
        self.added += len(draft.calls)
        for llm_call in draft.touching:
            draft.link(llm_call)
            _set_num_missing(llm_call)
        for llm_call in draft.order_to_set:
            if llm_call.open:
                _set_depth(llm_call)
        return AddedCalls(draft.calls, draft.touching)

    def forget(self, call: Call) -> None:
        """Remove an ended call; its variables stay. Nothing that remains refers to it."""
        self.version += 1
        del self.calls[call.id]
        for llm_call in call.llm_calls:
            for variable in llm_call.inputs:
                del variable.consumers[llm_call]
            for variable in llm_call.outputs:
                variable.producer = None
        call.forget()

    def check_integrity(self, uninformed: Mapping[LlmCall, int]) -> None:
        """Assert that both ends of every edge refer to each other, and that there is no cycle.

        uninformed: LLM call -> set values that it still counts as missing, if there are any.
        """
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
                missing = sum(v.pending for v in llm_call.inputs) + waits
                assert llm_call.num_missing == missing + uninformed.get(llm_call, 0)
                depth = llm_call.depth
                _set_depth(llm_call)
                assert llm_call.depth == depth
        assert len(whole(Draft(self).producers_first(llm_calls, len(llm_calls) + 1))) == len(
            llm_calls
        )


def already_set(variable: Variable) -> ConflictError:
    """The error for setting a variable that is not pending."""
    fate = {
        VariableState.READY: "has its value",
        VariableState.FAILED: "has failed",
        VariableState.CANCELLED: "was cancelled",
    }
    message = f"The variable {variable.id} {fate[variable.state]} already."
    return ConflictError(message, "already_set")


def _set_num_missing(llm_call: LlmCall) -> None:
    llm_call.num_missing = sum(v.pending for v in llm_call.inputs) + (llm_call.index > 0)


def _set_depth(llm_call: LlmCall) -> None:
    """Set the depth: number of LLM calls on the longest path to it; native calls do not count."""
    before = llm_call.previous
    llm_call.depth = max((variable.depth for variable in llm_call.inputs), default=0)
    if before is not None:
        llm_call.depth = max(llm_call.depth, before.depth + 1)
    for variable in llm_call.outputs:
        variable.depth = llm_call.depth + (not llm_call.native)


class Draft:
    """New calls and variables while they are checked; the graph is not changed.

    calls, variables: to be added. Their edges to each other are there already.
    touching: LLM calls with an edge to a variable of the graph.
    order_to_set: LLM calls whose depth is set when the draft is committed, producers first.
    """

    def __init__(self, graph: Graph, new: Sequence[NewCall] = (), now: float = 0.0) -> None:
        self.new = new
        self.now = now
        self.calls: list[Call] = []
        self.variables: dict[str, Variable] = {}
        self.touching: list[LlmCall] = []
        self.order_to_set: Sequence[LlmCall] = ()
        self._graph = graph
        self._version = graph.version
        self._calls: set[str] = set()
        self._producers: dict[Variable, Call] = {}
        self._consumers: dict[Variable, list[LlmCall]] = {}
        self._produces_known = False  # whether an output is a variable of the graph

    def check(self, slice_calls: int) -> Iterator[None]:
        """Check the calls, and pause after every slice_calls of them, by their weight."""
        since_pause = 0
        for new in self.new:
            self.calls.append(self._call(new))
            since_pause += new.weight
            if since_pause >= slice_calls:
                since_pause = 0
                yield
        llm_calls = [llm_call for call in self.calls for llm_call in call.llm_calls]
        order = yield from self.producers_first(llm_calls, slice_calls)
        if self._produces_known:
            self.order_to_set = order  # variables and calls of the graph become deeper, too
            return
        for number, llm_call in enumerate(order, start=1):
            _set_depth(llm_call)
            if not number % slice_calls:
                yield

    @property
    def stale(self) -> bool:
        """Whether the graph has changed since, so that the draft may refer to what is gone."""
        return self._version != self._graph.version

    def holds(self) -> bool:
        """Whether what has been checked is still true.

        The state of a call or variable is not part of the graph's version. Calls that end only make
        the order of `order_to_set` stricter than needed.
        """
        return not self.stale and all(
            variable.pending
            for llm_call in self.touching
            for variable in llm_call.outputs
            if variable.id not in self.variables
        )

    def link(self, llm_call: LlmCall) -> None:
        """Add its edges to variables of the graph."""
        for variable in llm_call.inputs:
            variable.consumers[llm_call] = None
        for variable in llm_call.outputs:
            variable.producer = llm_call

    def _call(self, new: NewCall) -> Call:
        if new.id in self._graph.calls or new.id in self._calls:
            raise ConflictError(f"There is a request {new.id} already.", "already_exists")
        number = self._graph.added + len(self._calls)
        self._calls.add(new.id)
        names = {p.variable_id: p.name for p in new.pieces if isinstance(p, InputPiece)}
        for variable_id, text in new.values.items():
            self._constant(variable_id, names.get(variable_id, ""), text)
        call = Call(new.id, number, new.name, new.kind, tuple(new.pieces), created_s=self.now)
        call.llm_calls = tuple(
            self._native(call) if new.kind is CallKind.NATIVE else self._llm_calls(call)
        )
        for llm_call in call.llm_calls:
            touches = False
            for variable in llm_call.inputs:
                if variable.id in self.variables:
                    variable.consumers[llm_call] = None
                else:
                    self._consumers.setdefault(variable, []).append(llm_call)
                    touches = True
            for variable in llm_call.outputs:
                if variable.id in self.variables:
                    variable.producer = llm_call
                else:
                    touches = self._produces_known = True
            if touches:
                self.touching.append(llm_call)
            else:
                _set_num_missing(llm_call)
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
        producer = self._producers.get(variable)
        if variable.producer is not None:
            producer = variable.producer.call
        if producer is not None:
            message = f"The variable {variable.id} is an output of {self._title(producer)} already."
            raise ConflictError(message, "already_produced")
        if not variable.pending:
            raise already_set(variable)
        self._producers[variable] = call
        return variable

    def producers_first(
        self, llm_calls: Iterable[LlmCall], slice_calls: int
    ) -> Slices[list[LlmCall]]:
        """LLM calls and their dependents in topological order. Raises ConflictError (cyclic)."""
        waiting_for: dict[LlmCall, int] = dict.fromkeys(llm_calls, 0)
        after: dict[LlmCall, list[LlmCall]] = {}
        stack = list(waiting_for)
        while stack:
            llm_call = stack.pop()
            after[llm_call] = list(self._followers(llm_call))
            for follower in after[llm_call]:
                if follower not in waiting_for:
                    waiting_for[follower] = 0
                    stack.append(follower)
                waiting_for[follower] += 1
            if not len(after) % slice_calls:
                yield
        order = [llm_call for llm_call, count in waiting_for.items() if not count]
        for number, llm_call in enumerate(order, start=1):  # the loop appends to `order`
            for follower in after[llm_call]:
                waiting_for[follower] -= 1
                if not waiting_for[follower]:
                    order.append(follower)
            if not number % slice_calls:
                yield
        if len(order) < len(waiting_for):
            stuck = [llm_call for llm_call, count in waiting_for.items() if count]
            raise ConflictError(self._cycle(stuck, after), "cyclic")
        return order

    def _followers(self, llm_call: LlmCall) -> Iterator[LlmCall]:
        """Open LLM calls that wait for this one."""
        if llm_call.next is not None and llm_call.next.open:
            yield llm_call.next
        for variable in llm_call.outputs:
            yield from (consumer for consumer in variable.consumers if consumer.open)
            yield from self._consumers.get(variable, ())

    def _cycle(self, stuck: Sequence[LlmCall], after: Mapping[LlmCall, Sequence[LlmCall]]) -> str:
        """The message with the path of a cycle. Each of `stuck` waits for another one of them.

        after: the followers of each LLM call.
        """
        waits_for = {later: llm_call for llm_call in stuck for later in after[llm_call]}
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
        """How messages refer to a call: the client does not know the ids of rejected calls."""
        if call.id in self._graph.calls:
            return call.title
        return call.name or f"requests[{call.number - self._graph.added}]"
