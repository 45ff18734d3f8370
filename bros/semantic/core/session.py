"""The state machine of one session: what has to run, in answer to events. No input, no output.

Nothing runs until a value is wanted that needs it. A turn starts the moment it is wanted and all
its inputs are there. What fails takes with it all that needs it, with the cause; everything else
goes on. Times are arguments; `take_actions` returns what is to be done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bros.core.errors import InvalidRequestError, NotFoundError
from bros.semantic.core.graph import Graph, already_set
from bros.semantic.core.nodes import Call, Level, NewCall, Turn, Variable, Want
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
from bros.semantic.schema import CallKind, Criteria, TurnState, VariableState


@dataclass(frozen=True, slots=True)
class Start:
    """All that the turn needs is there: it goes to the engine. Once for each turn at most."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Promote:
    """A turn that was started as best-effort is real-time from now on."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Abort:
    """A turn that was started is not wanted any more."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Prefill:
    """The first `pieces` of the turn's call are known while what follows is being generated."""

    turn: Turn
    pieces: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The variable is READY, FAILED or CANCELLED: who waits for it can be told.

    call: which makes it; the graph may have forgotten that by now.
    """

    variable: Variable
    call: Call | None = None


Action = Start | Promote | Abort | Prefill | Settled


def still_due(actions: Iterable[Action]) -> Iterator[Action]:
    """Without what events since then have made pointless: nothing is done for turns that are over,
    and who was never started need not be aborted."""
    untouched: set[Turn] = set()  # turns whose Start is among these actions
    for action in actions:
        match action:
            case Start(turn):
                untouched.add(turn)
                if turn.started:
                    yield action
            case Promote(turn):
                if turn.started and turn not in untouched:
                    yield action
            case Abort(turn):
                if turn not in untouched:
                    yield action
            case Prefill(turn, pieces):
                if turn.state is TurnState.WAITING and pieces == turn.prefilled:
                    yield action
            case Settled():
                yield action


DEFAULT_LIMITS = SessionLimits()


class SessionStateMachine:
    """The graph of a session and what is going on in it.

    Unknown variables and calls raise NotFoundError; after `close` everything that would change
    something raises SessionGoneError. estimate: seconds that a turn of the model will take.
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
        turns = [turn for call in added for turn in call.turns]
        for turn in turns:
            bad = next((v.cause for v in turn.inputs if v.cause is not None), None)
            if bad is not None:
                self._end([turn], bad, now)
            elif turn.call.kind is CallKind.PLAIN:
                turn.wanted = True
                turn.state = TurnState.READY
                turn.ready_s = now
        awaited = [turn for turn in turns if any(v.pending and v.wanted for v in turn.outputs)]
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
        """Somebody asks for a value: all that it needs may run, and as soon as it has to.

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

        Raises InvalidRequestError for a PLAIN one: only whoever makes it can end it.
        """
        call = self.call(call_id)
        if call.kind is CallKind.PLAIN and call.open:
            raise InvalidRequestError(
                f"The request {call_id} is not run by the session, which only watches it: it ends "
                "when the client that makes it closes its connection."
            )
        cause = Cause(call_id, FailedStage.CANCELLED, "A client asked for that.", name=call.name)
        self._end(call.turns, cause, now)
        return call

    def close(self, reason: str, now: float) -> None:
        """Ends everything that is not over; `reason` is told to whoever waits."""
        self.closed = True
        for call in list(self.graph.calls.values()):
            cause = Cause(call.id, FailedStage.CANCELLED, reason, name=call.name)
            self._end(call.turns, cause, now)
        for variable in self.graph.variables.values():
            if variable.pending:
                cause = Cause("", FailedStage.CANCELLED, reason, variable.id)
                self._settle_badly(variable, cause)

    # What becomes of turns; said of one that is over already, it is ignored.

    def first_token(self, turn: Turn, now: float) -> None:
        """The turn has begun to generate."""
        if turn.state is TurnState.READY:
            turn.state = TurnState.RUNNING
            turn.first_token_s = now
            for consumer in turn.output.consumers:
                self._consider(consumer, now)

    def finished(
        self, turn: Turn, text: str, token_ids: tuple[int, ...] | None, now: float
    ) -> None:
        """The turn has generated this value. token_ids: of the text if nothing changed it."""
        if not turn.started:
            return
        try:
            self._retention.check_value(text)
        except SessionLimitError as error:
            call, output = turn.call, turn.output
            cause = Cause(call.id, FailedStage.GENERATE, str(error), output.id, call.name)
            self._end([turn], cause, now, gone=turn)
            return
        turn.state = TurnState.FINISHED
        self._ready(turn.output, text, token_ids, now)
        following = turn.next
        if following is not None:
            following.missing -= 1
            self._consider(following, now)
        self._finish(turn, now)

    def failed(self, turn: Turn, cause: Cause, now: float) -> None:
        """The turn will not have a value."""
        if turn.started:
            self._end([turn], cause, now, gone=turn)

    def native_failed(self, call_id: str, message: str, now: float) -> Call:
        """A function of the client could not set its outputs. Raises InvalidRequestError if that is
        no native call, ConflictError (already_set) if it is over."""
        call = self.call(call_id)
        if call.kind is not CallKind.NATIVE:
            raise InvalidRequestError(f"The request {call_id} does not run on the client.")
        if not call.open:
            raise ConflictError(f"The request {call_id} is over.", "already_set")
        self._end(call.turns, Cause(call_id, FailedStage.NATIVE, message, name=call.name), now)
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

    def _promote(self, turns: Iterable[Turn]) -> None:
        raised = [turn for turn in turns if turn.open and turn.label.level < Level.RT]
        for turn in raised:
            turn.label = turn.label.joined(RT_BETWEEN)
        self._tell_promoted(raised)

    def _tell_promoted(self, changed: Iterable[Turn]) -> None:
        for turn in changed:
            if turn.started and turn.label.level is Level.RT and turn.call.kind is CallKind.LLM:
                self._actions.append(Promote(turn))

    def _activate(self, turns: Iterable[Turn], now: float) -> None:
        """These and all that they need may run."""
        stack: list[Turn | None] = list(turns)
        woken = []
        while stack:
            turn = stack.pop()
            if turn is None or turn.wanted or not turn.open:
                continue
            turn.wanted = True
            woken.append(turn)
            stack.append(turn.previous)
            for variable in turn.inputs:
                if variable.pending:
                    stack.append(variable.producer)
        woken.sort(key=lambda turn: (turn.call.number, turn.index))
        for turn in woken:
            self._consider(turn, now)

    def _consider(self, turn: Turn, now: float) -> None:
        """Starts the turn if it can run, else what is known of it if the rest is under way."""
        if not turn.wanted or turn.state is not TurnState.WAITING:
            return
        if not turn.missing:
            turn.state = TurnState.READY
            turn.ready_s = now
            if not turn.native:
                self._actions.append(Start(turn))
        elif not turn.native:
            known = turn.known_ahead(self.graph.variables)
            if known > turn.prefilled:
                turn.prefilled = known
                self._actions.append(Prefill(turn, known))

    def _ready(
        self, variable: Variable, text: str, token_ids: tuple[int, ...] | None, now: float
    ) -> None:
        variable.state = VariableState.READY
        variable.text = text
        variable.token_ids = token_ids
        self._settled(variable)
        self._retention.valued(variable)
        for turn in variable.consumers:
            turn.missing -= 1
            self._consider(turn, now)

    def _settle_badly(self, variable: Variable, cause: Cause) -> None:
        cancelled = cause.stage is FailedStage.CANCELLED
        variable.state = VariableState.CANCELLED if cancelled else VariableState.FAILED
        variable.cause = cause
        self._settled(variable)

    def _settled(self, variable: Variable) -> None:
        self._labeller.settled(variable)
        producer = variable.producer
        self._actions.append(Settled(variable, None if producer is None else producer.call))

    def _finish(self, turn: Turn, now: float) -> None:
        """All outputs of the turn are there."""
        turn.state = TurnState.FINISHED
        turn.end_s = now
        for group in turn.groups:
            group.left -= 1
            self._promote(stragglers(group))
        if not turn.call.open:
            self._retention.over(turn.call)

    def _end(
        self, turns: Iterable[Turn], cause: Cause, now: float, gone: Turn | None = None
    ) -> None:
        """Ends these badly, and all that needs what they will not make.

        gone: one that the engine has ended itself.
        """
        cancelled = cause.stage is FailedStage.CANCELLED
        stack = list(turns)
        while stack:
            turn = stack.pop()
            if not turn.open:
                continue
            if turn.started and not turn.native and turn is not gone:
                self._actions.append(Abort(turn))
            turn.state = TurnState.CANCELLED if cancelled else TurnState.FAILED
            turn.end_s = now
            turn.call.cause = turn.call.cause or cause
            for variable in turn.outputs:
                if variable.pending:
                    self._settle_badly(variable, cause)
                    stack.extend(variable.consumers)
            if turn.next is not None:
                stack.append(turn.next)
            if not turn.call.open:
                self._retention.over(turn.call)

    def check_integrity(self) -> None:
        """Asserts what always holds between events."""
        self.graph.check_integrity()
        self._retention.check_integrity()
        regions = sum(variable.region for variable in self.graph.variables.values())
        assert self._labeller.labels == regions
        for call in self.graph.calls.values():
            for turn in call.turns:
                self._check_turn(turn)
        for variable in self.graph.variables.values():
            producer = variable.producer
            if variable.pending and variable.wanted and producer is not None:
                assert producer.wanted or not producer.open
            if self.closed:
                assert not variable.pending

    def _check_turn(self, turn: Turn) -> None:
        assert not turn.started or (turn.wanted and not turn.missing)
        if turn.state is TurnState.WAITING and turn.wanted:
            assert turn.missing
            assert turn.previous is None or turn.previous.wanted
        assert turn.open == any(variable.pending for variable in turn.outputs)
        assert not (self.closed and turn.open)
        for group in turn.groups:
            unfinished = [t for t in group.members if t.state is not TurnState.FINISHED]
            assert group.active and turn in group.members and group.left == len(unfinished)
            assert turn.label.level >= Level.GROUP
