"""The state machine of one session: turns events into actions. It does no I/O.

An LLM call runs only if a requested value depends on it (it is *wanted*). It starts as soon as all
its inputs are set. When it fails, its dependents fail with the same cause; other calls go on.
Times are arguments; `take_actions` returns the actions to perform.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.slices import Slices, whole
from bros.semantic.core.graph import Graph, already_set
from bros.semantic.core.nodes import (
    Call,
    Level,
    LlmCall,
    NewCall,
    Promoted,
    Promotion,
    TaskGroup,
    Variable,
    Want,
)
from bros.semantic.core.objectives import (
    RT_INTERMEDIATE,
    Estimate,
    Labeler,
    lower,
    stragglers,
    wanted_dependents,
)
from bros.semantic.core.retention import Demand, Retention, SessionLimits
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
    """All inputs of the LLM call are set: submit it. At most once per LLM call."""

    llm_call: LlmCall


@dataclass(frozen=True, slots=True)
class PromoteCall:
    """Promote an LLM call that was started as best-effort to real-time, or tell the engine that its
    terms may have become stricter."""

    llm_call: LlmCall


@dataclass(frozen=True, slots=True)
class DemoteCall:
    """An LLM call that was started is best-effort from now on: submit it as that, also if it waits
    in the engine already."""

    llm_call: LlmCall


@dataclass(frozen=True, slots=True)
class AbortCall:
    """Abort an LLM call that was started."""

    llm_call: LlmCall


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill the first `pieces` of the call's prompt; the next piece is being generated."""

    llm_call: LlmCall
    pieces: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The variable is READY, FAILED or CANCELLED: wake its waiters.

    call: its producer, which the graph may have forgotten by now; None without one.
    """

    variable: Variable
    call: Call | None = None


Action = Start | PromoteCall | DemoteCall | AbortCall | Prefill | Settled


def drop_stale(actions: Iterable[Action]) -> Iterator[Action]:
    """Filter out actions that later events have made obsolete: those for ended LLM calls, and the
    abort, promotion or demotion of an LLM call that has not been submitted yet."""
    unsubmitted: set[LlmCall] = set()  # LLM calls whose Start is among these actions
    for action in actions:
        match action:
            case Start(llm_call):
                unsubmitted.add(llm_call)
                if llm_call.started:
                    yield action
            case PromoteCall(llm_call) | DemoteCall(llm_call):
                if llm_call.started and llm_call not in unsubmitted:
                    yield action
            case AbortCall(llm_call):
                if llm_call not in unsubmitted:
                    yield action
            case Prefill(llm_call, pieces):
                if llm_call.state is CallState.WAITING and pieces == llm_call.num_prefilled_pieces:
                    yield action
            case Settled():
                yield action


def _submission_order(llm_call: LlmCall) -> tuple[int, int]:
    return llm_call.call.number, llm_call.index


DEFAULT_LIMITS = SessionLimits()

_ABANDONED = Want(batch=True)


class SessionStateMachine:
    """The graph of a session and the states of its calls and variables.

    Methods raise NotFoundError for unknown variables and calls. After `close`, methods that change
    the session on behalf of clients raise SessionGoneError.
    """

    def __init__(
        self, session_id: str, *, estimate: Estimate, limits: SessionLimits = DEFAULT_LIMITS
    ) -> None:
        self.id = session_id
        self.graph = Graph()
        self.closed = False
        self._retention = Retention(self.graph, limits)
        self._slice = limits.slice_calls
        self._slice_consumers = limits.slice_consumers
        self._uninformed: deque[LlmCall] = deque()
        """Consumers of set values that do not know it yet; an LLM call is in it once per value."""
        self._labeler = Labeler(estimate, limits.label_steps, limits.max_labels)
        self._actions: list[Action] = []

    # ---- Operations of clients

    def submit(self, calls: Sequence[NewCall], now: float) -> Sequence[Call]:
        """Add all of these calls, or none if it raises. Calls that are already wanted start.

        A call whose input has failed or was cancelled is added, and fails with the same cause.
        Raises ConflictError (see Graph.add), SessionLimitError, SessionGoneError.
        """
        return whole(self.submitting(calls, now))

    def submitting(self, calls: Sequence[NewCall], now: float) -> Slices[Sequence[Call]]:
        """`submit` in slices: it pauses where the caller may let other work run. Clients see
        nothing of the calls before the last slice, which adds all of them."""
        self._check_alive()
        demand = Demand.of(calls)
        self._retention.check_calls(demand)
        draft = yield from self.graph.drafting(calls, now, self._slice)
        self._check_alive()  # again: it may have paused
        self._retention.check_calls(demand)
        added, touching = self.graph.commit(draft)
        self._retention.calls_added(demand, touching)
        for llm_call in touching:
            bad = next((v.cause for v in llm_call.inputs if v.cause is not None), None)
            if bad is not None:
                self._end_unfinished([llm_call], bad, now)
        for call in added:
            if call.kind is CallKind.PLAIN:
                (llm_call,) = call.llm_calls
                if llm_call.open:
                    llm_call.wanted = True
                    llm_call.state = CallState.READY
                    llm_call.ready_s = now
        awaited = [
            llm_call
            for llm_call in touching  # no client has requested a new variable yet
            if any(v.pending and v.wanted for v in llm_call.outputs)
        ]
        if awaited:
            self._label(wanted_dependents(awaited), now)
            self._activate(awaited, now)
        return added

    def declare(self, variable_id: str, name: str = "", chars: int = 0) -> Variable:
        """Create a variable, which a client or a later call will set.

        chars: length of the value that the caller is about to set. Raises ConflictError
        (already_exists), SessionLimitError if it or its value does not fit, SessionGoneError.
        """
        self._check_alive()
        self._retention.check_variable(chars)
        variable = self.graph.declare(variable_id, name)
        self._retention.drop_unreferenced()
        return variable

    def set(self, variable_id: str, text: str, now: float) -> Variable:
        """Set a variable that has no producer, or that a native call produces.

        Raises ConflictError: it is not pending (already_set), or the engine generates it
        (already_produced). Raises SessionLimitError, SessionGoneError.
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
        """A client requests a value: activate all calls that it depends on.

        The criteria of repeated requests are combined; the stricter ones hold.
        """
        self._check_alive()
        variable = self.variable(variable_id)
        if variable.pending:
            deadline_s = None if criteria.deadline_s is None else now + criteria.deadline_s
            want = (variable.want or Want()).with_criteria(criteria, deadline_s)
            if want != variable.want:
                variable.want = want
                self._label([variable], now)
            self._retention.awaited(variable)
            if variable.producer is not None:
                self._activate([variable.producer], now)
        return variable

    def abandon(self, variables: Iterable[Variable], now: float) -> None:
        """The clients that waited for these variables have gone: until one asks again, the values
        are requested for THROUGHPUT only. Those with a deadline stay as they are."""
        abandoned = [
            variable
            for variable in variables
            if variable.pending
            and variable.want is not None
            and variable.want.undated
            and not variable.want.plain
        ]
        if self.closed or not abandoned:
            return
        for variable in abandoned:
            variable.want = _ABANDONED
        self._lower(v.producer for v in abandoned if v.producer is not None)
        self._label(abandoned, now)

    def cancel(self, call_id: str, now: float) -> Call:
        """Cancel the open LLM calls of a call, and all their dependents.

        Raises InvalidRequestError for an open PLAIN call: only its own client can end it.
        """
        call = self.call(call_id)
        if call.kind is CallKind.PLAIN and call.open:
            raise InvalidRequestError(
                f"The session does not run the request {call_id}, it only records it. The request "
                "ends when the client that sent it closes its connection."
            )
        cause = Cause(call_id, FailedStage.CANCELLED, "A client cancelled it.", name=call.name)
        self._end_unfinished(call.llm_calls, cause, now)
        return call

    def close(self, reason: str, now: float) -> None:
        """Cancel all open calls and pending variables; waiting clients get `reason`."""
        for _ in self.closing(reason, now):
            pass

    def closing(self, reason: str, now: float) -> Iterator[None]:
        """`close` in slices: it pauses where the caller may let other work run.

        The session is closed from the first slice on, so that no call starts any more.
        """
        self.closed = True
        since_pause = 0
        for call in list(self.graph.calls.values()):
            cause = Cause(call.id, FailedStage.CANCELLED, reason, name=call.name)
            since_pause += len(call.llm_calls)
            # Without its dependents: their turn comes, and thousands may depend on one call.
            self._end_unfinished(call.llm_calls, cause, now, with_dependents=False)
            if since_pause >= self._slice:
                since_pause = 0
                yield
        for number, variable in enumerate(list(self.graph.variables.values()), start=1):
            if variable.pending:
                cause = Cause("", FailedStage.CANCELLED, reason, variable.id)
                self._fail_variable(variable, cause)
            if not number % self._slice:
                yield

    def dismantling(self) -> Iterator[None]:
        """Drop all calls and variables of a closed session in slices. So they are freed without the
        garbage collector, and not all at once. Call it when no LLM call runs any more."""
        assert self.closed
        self._uninformed.clear()
        yield from self._retention.dismantling(self._slice)

    # ---- Events of LLM calls. Events of an ended LLM call are ignored.

    def first_token(self, llm_call: LlmCall, now: float) -> None:
        """The engine has generated the first token."""
        if llm_call.state is CallState.READY:
            llm_call.state = CallState.RUNNING
            llm_call.first_token_s = now
            for consumer in llm_call.output.consumers:
                self._start_if_ready(consumer, now)

    def finished(
        self, llm_call: LlmCall, text: str, token_ids: tuple[int, ...] | None, now: float
    ) -> None:
        """The LLM call has finished with this value.

        token_ids: the generated tokens, if they encode exactly this text.
        """
        if not llm_call.started:
            return
        try:
            self._retention.check_value(text)
        except SessionLimitError as error:
            call, output = llm_call.call, llm_call.output
            cause = Cause(call.id, FailedStage.GENERATE, str(error), output.id, call.name)
            self._end_unfinished([llm_call], cause, now, ended_by_engine=llm_call)
            return
        llm_call.state = CallState.FINISHED
        self._ready(llm_call.output, text, token_ids, now)
        following = llm_call.next
        if following is not None:
            following.num_missing -= 1
            self._start_if_ready(following, now)
        self._finish(llm_call, now)

    def failed(self, llm_call: LlmCall, cause: Cause, now: float) -> None:
        """The LLM call has failed."""
        if llm_call.started:
            self._end_unfinished([llm_call], cause, now, ended_by_engine=llm_call)

    def native_failed(self, call_id: str, message: str, now: float) -> Call:
        """A native function has failed on the client.

        Raises InvalidRequestError if the call is not native, ConflictError (already_set) if it has
        ended.
        """
        call = self.call(call_id)
        if call.kind is not CallKind.NATIVE:
            raise InvalidRequestError(f"The request {call_id} does not run on the client.")
        if not call.open:
            raise ConflictError(f"The request {call_id} has ended.", "already_set")
        self._end_unfinished(
            call.llm_calls, Cause(call_id, FailedStage.NATIVE, message, name=call.name), now
        )
        return call

    # ---- Actions and timers

    @property
    def value_chars(self) -> int:
        """Characters of all values."""
        return self._retention.chars

    def take_actions(self) -> list[Action]:
        """The actions since the last call, in the order in which they must be performed."""
        actions, self._actions = self._actions, []
        return list(drop_stale(actions))

    @property
    def informs(self) -> bool:
        """Whether consumers of set values are left for `inform`."""
        return bool(self._uninformed)

    def inform(self, now: float) -> None:
        """Let the next consumers of set values know it, and start those that have all they read:
        at most `SessionLimits.slice_consumers`, so that one value which thousands of LLM calls read
        does not take long. Whatever sets a value does this once; the caller does the rest."""
        for _ in range(min(self._slice_consumers, len(self._uninformed))):
            llm_call = self._uninformed.popleft()
            llm_call.num_missing -= 1
            self._start_if_ready(llm_call, now)

    def due(self) -> float | None:
        """Next time when `tick` has work; None without any."""
        return self._labeler.due()

    def tick(self, now: float) -> None:
        """Continue labeling, and promote groups whose deadlines are at risk."""
        self._emit_promotions(self._labeler.run(now))
        for group in self._labeler.at_risk(now):
            self._promote(group.members, Promotion.DEADLINE, group)

    # ---- Queries

    def variable(self, variable_id: str) -> Variable:
        """Raises NotFoundError."""
        variable = self.graph.variables.get(variable_id)
        if variable is None:
            message = f"The session has no variable {variable_id[:200]!r}."
            raise NotFoundError(message, code="variable_not_found")
        return variable

    def call(self, call_id: str) -> Call:
        """Raises NotFoundError, also for ended calls that the graph has forgotten."""
        call = self.graph.calls.get(call_id)
        if call is None:
            message = f"The session has no request {call_id[:200]!r}."
            raise NotFoundError(message, code="request_not_found")
        return call

    def _check_alive(self) -> None:
        if self.closed:
            raise SessionGoneError(f"The session {self.id} has ended.")

    # ---- State transitions

    def _label(self, sinks: Iterable[Variable], now: float) -> None:
        self._emit_promotions(self._labeler.add(sinks))
        self.tick(now)

    def _promote(self, llm_calls: Iterable[LlmCall], why: Promotion, group: TaskGroup) -> None:
        raised = [
            llm_call for llm_call in llm_calls if llm_call.open and llm_call.label.level < Level.RT
        ]
        for llm_call in raised:
            llm_call.label = llm_call.label.merged(RT_INTERMEDIATE)
            llm_call.promoted = Promoted(why, group.sink)
        self._emit_promotions(raised)

    def _emit_promotions(self, changed: Iterable[LlmCall]) -> None:
        for llm_call in changed:
            if (
                llm_call.started
                and llm_call.label.level is Level.RT
                and llm_call.call.kind is CallKind.LLM
            ):
                self._actions.append(PromoteCall(llm_call))

    def _lower(self, llm_calls: Iterable[LlmCall]) -> None:
        """Reconsider open LLM calls and their ancestors, which may be needed less urgently now."""
        for llm_call in sorted(lower(llm_calls), key=_submission_order):
            if llm_call.started and llm_call.call.kind is CallKind.LLM:
                self._actions.append(DemoteCall(llm_call))

    def _activate(self, llm_calls: Iterable[LlmCall], now: float) -> None:
        """Mark these and all their open ancestors as wanted, and start those that are ready."""
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
        woken.sort(key=_submission_order)
        for llm_call in woken:
            self._start_if_ready(llm_call, now)

    def _start_if_ready(self, llm_call: LlmCall, now: float) -> None:
        """Start a wanted LLM call if its inputs are set, else prefill the known part of its prompt
        if the next piece is being generated."""
        if self.closed or not llm_call.wanted or llm_call.state is not CallState.WAITING:
            return
        if not llm_call.num_missing:
            llm_call.state = CallState.READY
            llm_call.ready_s = now
            if not llm_call.native:
                self._actions.append(Start(llm_call))
        elif not llm_call.native:
            known = llm_call.num_prefillable_pieces(self.graph.variables)
            if known > llm_call.num_prefilled_pieces:
                llm_call.num_prefilled_pieces = known
                self._actions.append(Prefill(llm_call, known))

    def _ready(
        self, variable: Variable, text: str, token_ids: tuple[int, ...] | None, now: float
    ) -> None:
        variable.state = VariableState.READY
        variable.text = text
        variable.token_ids = token_ids
        self._settled(variable)
        self._retention.value_set(variable)
        self._uninformed += variable.consumers
        self.inform(now)

    def _fail_variable(self, variable: Variable, cause: Cause) -> None:
        cancelled = cause.stage is FailedStage.CANCELLED
        variable.state = VariableState.CANCELLED if cancelled else VariableState.FAILED
        variable.cause = cause
        self._settled(variable)

    def _settled(self, variable: Variable) -> None:
        self._labeler.settled(variable)
        producer = variable.producer
        self._actions.append(Settled(variable, None if producer is None else producer.call))

    def _finish(self, llm_call: LlmCall, now: float) -> None:
        """All outputs of the LLM call are set."""
        llm_call.state = CallState.FINISHED
        llm_call.end_s = now
        for group in llm_call.groups:
            group.finished(llm_call)
            self._promote(stragglers(group), Promotion.STRAGGLER, group)
        llm_call.groups.clear()
        if not llm_call.call.open:
            self._retention.call_ended(llm_call.call)

    def _end_unfinished(
        self,
        llm_calls: Iterable[LlmCall],
        cause: Cause,
        now: float,
        ended_by_engine: LlmCall | None = None,
        with_dependents: bool = True,
    ) -> None:
        """End these open LLM calls and all their dependents as CANCELLED or FAILED, by `cause`.
        What only they needed goes on as best-effort.

        ended_by_engine: an LLM call that the engine has ended already; it needs no AbortCall.
        with_dependents: False if the caller ends them itself.
        """
        cancelled = cause.stage is FailedStage.CANCELLED
        ended: list[LlmCall] = []
        requested = False  # else no label is due to them
        stack = list(llm_calls)
        while stack:
            llm_call = stack.pop()
            if not llm_call.open:
                continue
            ended.append(llm_call)
            if llm_call.started and not llm_call.native and llm_call is not ended_by_engine:
                self._actions.append(AbortCall(llm_call))
            llm_call.state = CallState.CANCELLED if cancelled else CallState.FAILED
            llm_call.end_s = now
            llm_call.call.cause = llm_call.call.cause or cause
            for variable in llm_call.outputs:
                if variable.pending:
                    want = variable.want
                    requested = requested or (want is not None and not want.plain)
                    self._fail_variable(variable, cause)
                    if with_dependents:
                        stack.extend(variable.consumers)
            if with_dependents and llm_call.next is not None:
                stack.append(llm_call.next)
            if not llm_call.call.open:
                self._retention.call_ended(llm_call.call)
        if requested and not self.closed:
            self._lower(before for llm_call in ended for before in llm_call.open_predecessors())

    def check_integrity(self) -> None:
        """Assert the invariants that hold between events."""
        self.graph.check_integrity(Counter(self._uninformed))
        self._retention.check_integrity()
        num_labels = sum(variable.num_labels for variable in self.graph.variables.values())
        assert self._labeler.labels == num_labels
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
        assert not llm_call.started or (llm_call.wanted and not llm_call.num_missing)
        if llm_call.state is CallState.WAITING and llm_call.wanted:
            assert llm_call.num_missing
            assert llm_call.previous is None or llm_call.previous.wanted
        assert llm_call.open == any(variable.pending for variable in llm_call.outputs)
        assert not (self.closed and llm_call.open)
        for group in llm_call.groups:
            assert group.active and llm_call in group.members
            assert group.sink.groups[group.stage] is group
            assert not any(t.state is CallState.FINISHED for t in group.members)
            assert llm_call.label.level >= group.level
