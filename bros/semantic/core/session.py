"""The state machine of one session: what has to run, in answer to events. No input, no output.

Nothing runs until a value is wanted that needs it. An LLM call starts as soon as it is wanted and
all its inputs are there. When it fails, all that needs it fails for the same cause; everything else
goes on. Times are arguments; `take_actions` returns what is to be done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bros.core.errors import InvalidRequestError, NotFoundError
from bros.semantic.core.graph import Graph, already_set
from bros.semantic.core.nodes import Call, Level, LlmCall, NewCall, Variable, Want
from bros.semantic.core.objectives import (
    RT_BETWEEN,
    Estimate,
    Labeller,
    stragglers,
    wanted_behind,
)
from bros.semantic.core.retention import Retention, SessionLimits
from bros.semantic.errors import (
    Cause,
    ConflictError,
    FailedStage,
    SessionGoneError,
    SessionLimitError,
)
from bros.semantic.schema import CallKind, CallState, Criteria, VariableState


@dataclass(frozen=True, slots=True)
class Start:
    """All inputs of the LLM call are there: submit it. At most once for each LLM call."""

    llm_call: LlmCall


@dataclass(frozen=True, slots=True)
class PromoteCall:
    """An LLM call that was started as best-effort is real-time from now on."""

    llm_call: LlmCall


@dataclass(frozen=True, slots=True)
class AbortCall:
    """An LLM call that was started is not wanted any more."""

    llm_call: LlmCall


@dataclass(frozen=True, slots=True)
class Prefill:
    """The first `pieces` of the call's prompt are known; what follows is being generated."""

    llm_call: LlmCall
    pieces: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The variable is READY, FAILED or CANCELLED: wake its waiters.

    call: the call that produces it; the graph may have forgotten that by now.
    """

    variable: Variable
    call: Call | None = None


Action = Start | PromoteCall | AbortCall | Prefill | Settled


def still_due(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions that later events have not made pointless: nothing is done for LLM calls that
    are over, and one that was never submitted need not be aborted."""
    untouched: set[LlmCall] = set()  # LLM calls whose Start is among these actions
    for action in actions:
        match action:
            case Start(llm_call):
                untouched.add(llm_call)
                if llm_call.started:
                    yield action
            case PromoteCall(llm_call):
                if llm_call.started and llm_call not in untouched:
                    yield action
            case AbortCall(llm_call):
                if llm_call not in untouched:
                    yield action
            case Prefill(llm_call, pieces):
                if llm_call.state is CallState.WAITING and pieces == llm_call.prefilled:
                    yield action
            case Settled():
                yield action


DEFAULT_LIMITS = SessionLimits()


class SessionStateMachine:
    """The graph of a session and what is going on in it.

    Unknown variables and calls raise NotFoundError; after `close` everything that would change
    something raises SessionGoneError. estimate: seconds that an LLM call of the model will take.
    """

    def __init__(
        self, session_id: str, *, estimate: Estimate, limits: SessionLimits = DEFAULT_LIMITS
    ) -> None:
        self.id = session_id
        self.graph = Graph()
        self.closed = False
        self._retention = Retention(self.graph, limits)
        self._labeller = Labeller(estimate, limits.label_steps, limits.max_labels)
        self._actions: list[Action] = []

    # What clients do

    def submit(self, calls: Sequence[NewCall], now: float) -> Sequence[Call]:
        """Adds all of these or, if it raises, nothing. Those that are wanted already start.

        Raises ConflictError (see Graph.add) and SessionLimitError. Calls that need a value that
        will never be there are added, and have failed for the same cause.
        """
        self._check_alive()
        self._retention.check_calls(calls)
        added = self.graph.add(calls, now)
        self._retention.added(added, calls)
        llm_calls = [llm_call for call in added for llm_call in call.llm_calls]
        for llm_call in llm_calls:
            bad = next((v.cause for v in llm_call.inputs if v.cause is not None), None)
            if bad is not None:
                self._end([llm_call], bad, now)
            elif llm_call.call.kind is CallKind.PLAIN:
                llm_call.wanted = True
                llm_call.state = CallState.READY
                llm_call.ready_s = now
        awaited = [
            llm_call
            for llm_call in llm_calls
            if any(v.pending and v.wanted for v in llm_call.outputs)
        ]
        if awaited:
            self._label(wanted_behind(awaited), now)
            self._activate(awaited, now)
        return added

    def declare(self, variable_id: str, name: str = "", chars: int = 0) -> Variable:
        """A variable that is to be set, or that calls to come will set.

        chars: of the value that it is about to get. Raises ConflictError (already_exists), and
        SessionLimitError if there is no room for it or its value.
        """
        self._check_alive()
        self._retention.check_variable(chars)
        variable = self.graph.declare(variable_id, name)
        self._retention.make_room()
        return variable

    def set(self, variable_id: str, text: str, now: float) -> Variable:
        """Gives a variable its value: one without a producer, or the output of a native call.

        Raises ConflictError: it has one or never will (already_set), or a call of the model makes
        it (already_produced). Raises SessionLimitError.
        """
        self._check_alive()
        variable = self.variable(variable_id)
        if not variable.pending:
            raise already_set(variable)
        producer = variable.producer
        if producer is not None and not producer.native:
            raise ConflictError(
                f"The request {producer.call.title} makes the variable {variable_id}.",
                "already_produced",
            )
        self._retention.check_value(text)
        self._ready(variable, text, None, now)
        if producer is not None and not any(output.pending for output in producer.outputs):
            self._finish(producer, now)
        return variable

    def want(self, variable_id: str, criteria: Criteria, now: float) -> Variable:
        """A client asks for a value: all that it needs may run, as soon as the criteria require.

        Asked again, the stricter of everything that was asked holds.
        """
        self._check_alive()
        variable = self.variable(variable_id)
        if variable.pending:
            deadline_s = None if criteria.deadline_s is None else now + criteria.deadline_s
            want = (variable.want or Want()).joined(criteria, deadline_s)
            if want != variable.want:
                variable.want = want
                self._label([variable], now)
            self._retention.wanted(variable)
            if variable.producer is not None:
                self._activate([variable.producer], now)
        return variable

    def cancel(self, call_id: str, now: float) -> Call:
        """Ends what is not over of a call, and all that needs it.

        Raises InvalidRequestError for a PLAIN one: only the client that runs it can end it.
        """
        call = self.call(call_id)
        if call.kind is CallKind.PLAIN and call.open:
            raise InvalidRequestError(
                f"The request {call_id} is not run by the session, which only watches it: it ends "
                "when the client that makes it closes its connection."
            )
        cause = Cause(call_id, FailedStage.CANCELLED, "A client asked for that.", name=call.name)
        self._end(call.llm_calls, cause, now)
        return call

    def close(self, reason: str, now: float) -> None:
        """Ends everything that is not over; `reason` is told to clients that wait."""
        self.closed = True
        for call in list(self.graph.calls.values()):
            cause = Cause(call.id, FailedStage.CANCELLED, reason, name=call.name)
            self._end(call.llm_calls, cause, now)
        for variable in self.graph.variables.values():
            if variable.pending:
                cause = Cause("", FailedStage.CANCELLED, reason, variable.id)
                self._settle_badly(variable, cause)

    # What becomes of LLM calls; said of one that is over already, it is ignored.

    def first_token(self, llm_call: LlmCall, now: float) -> None:
        """The LLM call has begun to generate."""
        if llm_call.state is CallState.READY:
            llm_call.state = CallState.RUNNING
            llm_call.first_token_s = now
            for consumer in llm_call.output.consumers:
                self._consider(consumer, now)

    def finished(
        self, llm_call: LlmCall, text: str, token_ids: tuple[int, ...] | None, now: float
    ) -> None:
        """The LLM call has generated this value. token_ids: of the text if nothing changed it."""
        if not llm_call.started:
            return
        try:
            self._retention.check_value(text)
        except SessionLimitError as error:
            call, output = llm_call.call, llm_call.output
            cause = Cause(call.id, FailedStage.GENERATE, str(error), output.id, call.name)
            self._end([llm_call], cause, now, gone=llm_call)
            return
        llm_call.state = CallState.FINISHED
        self._ready(llm_call.output, text, token_ids, now)
        following = llm_call.next
        if following is not None:
            following.missing -= 1
            self._consider(following, now)
        self._finish(llm_call, now)

    def failed(self, llm_call: LlmCall, cause: Cause, now: float) -> None:
        """The LLM call will not have a value."""
        if llm_call.started:
            self._end([llm_call], cause, now, gone=llm_call)

    def native_failed(self, call_id: str, message: str, now: float) -> Call:
        """A function of the client could not set its outputs. Raises InvalidRequestError if that is
        no native call, ConflictError (already_set) if it is over."""
        call = self.call(call_id)
        if call.kind is not CallKind.NATIVE:
            raise InvalidRequestError(f"The request {call_id} does not run on the client.")
        if not call.open:
            raise ConflictError(f"The request {call_id} is over.", "already_set")
        self._end(call.llm_calls, Cause(call_id, FailedStage.NATIVE, message, name=call.name), now)
        return call

    # What is to be done

    def take_actions(self) -> list[Action]:
        """What is to be done since the last time, in this order."""
        actions, self._actions = self._actions, []
        return list(still_due(actions))

    def due(self) -> float | None:
        """When `tick` has something to do; None if nothing will ever be late."""
        return self._labeller.due()

    def tick(self, now: float) -> None:
        """Goes on with labels; makes those real-time whose deadline would be missed otherwise."""
        self._tell_promoted(self._labeller.run(now))
        for group in self._labeller.at_risk(now):
            self._promote(group.members)

    # What there is

    def variable(self, variable_id: str) -> Variable:
        """Raises NotFoundError."""
        variable = self.graph.variables.get(variable_id)
        if variable is None:
            message = f"The session has no variable {variable_id[:200]!r}."
            raise NotFoundError(message, code="variable_not_found")
        return variable

    def call(self, call_id: str) -> Call:
        """Raises NotFoundError, also for calls that were over long ago."""
        call = self.graph.calls.get(call_id)
        if call is None:
            message = f"The session has no request {call_id[:200]!r}."
            raise NotFoundError(message, code="request_not_found")
        return call

    @property
    def open_calls(self) -> int:
        """Calls that are not over."""
        return self._retention.open_calls

    def _check_alive(self) -> None:
        if self.closed:
            raise SessionGoneError(f"The session {self.id} has ended.")

    # How it goes on

    def _label(self, sinks: Iterable[Variable], now: float) -> None:
        self._tell_promoted(self._labeller.add(sinks))
        self.tick(now)

    def _promote(self, llm_calls: Iterable[LlmCall]) -> None:
        raised = [
            llm_call for llm_call in llm_calls if llm_call.open and llm_call.label.level < Level.RT
        ]
        for llm_call in raised:
            llm_call.label = llm_call.label.joined(RT_BETWEEN)
        self._tell_promoted(raised)

    def _tell_promoted(self, changed: Iterable[LlmCall]) -> None:
        for llm_call in changed:
            if (
                llm_call.started
                and llm_call.label.level is Level.RT
                and llm_call.call.kind is CallKind.LLM
            ):
                self._actions.append(PromoteCall(llm_call))

    def _activate(self, llm_calls: Iterable[LlmCall], now: float) -> None:
        """These and all that they need may run."""
        stack: list[LlmCall | None] = list(llm_calls)
        woken = []
        while stack:
            llm_call = stack.pop()
            if llm_call is None or llm_call.wanted or not llm_call.open:
                continue
            llm_call.wanted = True
            woken.append(llm_call)
            stack.append(llm_call.previous)
            for variable in llm_call.inputs:
                if variable.pending:
                    stack.append(variable.producer)
        woken.sort(key=lambda llm_call: (llm_call.call.number, llm_call.index))
        for llm_call in woken:
            self._consider(llm_call, now)

    def _consider(self, llm_call: LlmCall, now: float) -> None:
        """Starts the LLM call if it can run, else what is known of it if the rest is under way."""
        if not llm_call.wanted or llm_call.state is not CallState.WAITING:
            return
        if not llm_call.missing:
            llm_call.state = CallState.READY
            llm_call.ready_s = now
            if not llm_call.native:
                self._actions.append(Start(llm_call))
        elif not llm_call.native:
            known = llm_call.known_ahead(self.graph.variables)
            if known > llm_call.prefilled:
                llm_call.prefilled = known
                self._actions.append(Prefill(llm_call, known))

    def _ready(
        self, variable: Variable, text: str, token_ids: tuple[int, ...] | None, now: float
    ) -> None:
        variable.state = VariableState.READY
        variable.text = text
        variable.token_ids = token_ids
        self._settled(variable)
        self._retention.valued(variable)
        for llm_call in variable.consumers:
            llm_call.missing -= 1
            self._consider(llm_call, now)

    def _settle_badly(self, variable: Variable, cause: Cause) -> None:
        cancelled = cause.stage is FailedStage.CANCELLED
        variable.state = VariableState.CANCELLED if cancelled else VariableState.FAILED
        variable.cause = cause
        self._settled(variable)

    def _settled(self, variable: Variable) -> None:
        self._labeller.settled(variable)
        producer = variable.producer
        self._actions.append(Settled(variable, None if producer is None else producer.call))

    def _finish(self, llm_call: LlmCall, now: float) -> None:
        """All outputs of the LLM call are there."""
        llm_call.state = CallState.FINISHED
        llm_call.end_s = now
        for group in llm_call.groups:
            group.left -= 1
            self._promote(stragglers(group))
        if not llm_call.call.open:
            self._retention.over(llm_call.call)

    def _end(
        self, llm_calls: Iterable[LlmCall], cause: Cause, now: float, gone: LlmCall | None = None
    ) -> None:
        """Ends these badly, and all that needs what they will not make.

        gone: one that the engine has ended itself.
        """
        cancelled = cause.stage is FailedStage.CANCELLED
        stack = list(llm_calls)
        while stack:
            llm_call = stack.pop()
            if not llm_call.open:
                continue
            if llm_call.started and not llm_call.native and llm_call is not gone:
                self._actions.append(AbortCall(llm_call))
            llm_call.state = CallState.CANCELLED if cancelled else CallState.FAILED
            llm_call.end_s = now
            llm_call.call.cause = llm_call.call.cause or cause
            for variable in llm_call.outputs:
                if variable.pending:
                    self._settle_badly(variable, cause)
                    stack.extend(variable.consumers)
            if llm_call.next is not None:
                stack.append(llm_call.next)
            if not llm_call.call.open:
                self._retention.over(llm_call.call)

    def check_integrity(self) -> None:
        """Asserts what always holds between events."""
        self.graph.check_integrity()
        self._retention.check_integrity()
        regions = sum(variable.region for variable in self.graph.variables.values())
        assert self._labeller.labels == regions
        for call in self.graph.calls.values():
            for llm_call in call.llm_calls:
                self._check_llm_call(llm_call)
        for variable in self.graph.variables.values():
            producer = variable.producer
            if variable.pending and variable.wanted and producer is not None:
                assert producer.wanted or not producer.open
            if self.closed:
                assert not variable.pending

    def _check_llm_call(self, llm_call: LlmCall) -> None:
        assert not llm_call.started or (llm_call.wanted and not llm_call.missing)
        if llm_call.state is CallState.WAITING and llm_call.wanted:
            assert llm_call.missing
            assert llm_call.previous is None or llm_call.previous.wanted
        assert llm_call.open == any(variable.pending for variable in llm_call.outputs)
        assert not (self.closed and llm_call.open)
        for group in llm_call.groups:
            unfinished = [t for t in group.members if t.state is not CallState.FINISHED]
            assert group.active and llm_call in group.members and group.left == len(unfinished)
            assert llm_call.label.level >= Level.GROUP
