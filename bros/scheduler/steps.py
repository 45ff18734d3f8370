"""The running steps: predicted and actual times, and which requests waited during them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bros.core.interfaces import Buckets
from bros.core.request import ServiceClass
from bros.scheduler.cost_model import StepTimePredictor
from bros.scheduler.metrics import Histogram
from bros.scheduler.packing import EARLY, Packing
from bros.scheduler.shares import SHARE
from bros.scheduler.state import Queues, RequestState

_Size = tuple[int, int]
"""(tokens, context tokens) of a step, both as numbers of binary digits."""


@dataclass(slots=True)
class Gains:
    """What the requests of a step have gained when it ends.

    tokens: of all chunks.
    context: computed tokens of all its requests then.
    prefilled: requests that generate no token, and are done then.
    in_histories: some requests need their token of this step to sample the next one, so that the
        next step has to wait for it.
    filled: (request, tokens of its chunk) of those that fill a block, or run for the first time.
    """

    tokens: int = 0
    context: int = 0
    prefilled: list[RequestState] = field(default_factory=list)
    in_histories: bool = False
    filled: list[tuple[RequestState, int]] = field(default_factory=list)

    @property
    def size(self) -> _Size:
        """For the usual time of such steps."""
        return self.tokens.bit_length(), self.context.bit_length()


_LATEST_WEIGHT = 0.1
"""Of the latest step in a usual time."""


class UsualTimes:
    """Moving averages of the times of steps, by size.

    A watchdog needs them where no cost model predicts times, and where steps take much longer than
    predicted, which the corrections of StepTimePredictor follow up to a factor of 2 only.
    """

    def __init__(self) -> None:
        self._averages: dict[_Size, float] = {}
        self._begun: set[_Size] = set()  # sizes of which one step has ended

    def is_known(self, size: _Size) -> bool:
        """Whether two steps of this size have ended; the first one may have compiled."""
        return size in self._averages

    def seconds(self, size: _Size) -> float | None:
        """The usual time; None if no size is known.

        Of an unknown size: the shortest time in proportion to the tokens, and to the context, of a
        known one. That is too long rather than too short, because parts of a step do not grow.
        """
        known = self._averages.get(size)
        if known is not None:
            return known
        tokens, context = size
        return min(
            (
                seconds * 2 ** (max(0, tokens - of_tokens) + max(0, context - of_context))
                for (of_tokens, of_context), seconds in list(self._averages.items())
            ),
            default=None,
        )

    def observe(self, size: _Size, seconds: float) -> None:
        """A step has ended."""
        if size not in self._begun:
            self._begun.add(size)
            return
        before = self._averages.get(size, seconds)
        self._averages[size] = before + _LATEST_WEIGHT * (seconds - before)


class ExpectedTime(NamedTuple):
    """How long the running steps should take together, for a watchdog.

    seconds: predicted by the cost model, or the usual time if that is longer.
    is_start: the engine has only begun, so that no usual time is known.
    has_new_size: one of them is among the first two steps of its size.
    """

    seconds: float
    is_start: bool = False
    has_new_size: bool = False


class Newcomer(NamedTuple):
    """A real-time request that has arrived while a step runs.

    due_s: when its first token is due.
    tokens: of its prompt, without those that are cached. A prefix that only newcomers share counts
        for each of them.
    """

    due_s: float
    tokens: int


@dataclass(slots=True)
class Step:
    """A committed step, with what is needed when it ends.

    began_s: when the device began it; while the device still runs the step before, when it was
        planned.
    expected_s: predicted seconds; 0 without a cost model.
    gains: what its requests have gained when it ends.
    new_request: arrival_index of the first request that was submitted after the commit.
    newcomers: real-time requests that have arrived since it began and are not submitted yet, in
        order of their deadlines.
    blocked: (class, tenant) -> reason, for each tenant with waiting requests of the class.
    idle: (request, reason) of requests that hold memory but are not in the step.
    assumed_done: the scheduler has called `assume_done` for it.
    ends_requests: whether some of its requests have nothing left to compute after it; set by
        `assume_done`.
    """

    number: int
    packing: Packing
    began_s: float
    expected_s: float
    gains: Gains
    new_request: int
    blocked: dict[tuple[ServiceClass, str], str]
    idle: list[tuple[RequestState, str]]
    newcomers: list[Newcomer] = field(default_factory=list)
    assumed_done: bool = False
    ends_requests: bool = False


_YIELD_BOUNDS_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
)


class StepLedger:
    """Up to two steps in flight, and sums in seconds over those that have ended (see EngineStats).

    alone_s: what the steps would have taken without best-effort work, by the cost model.

    planned    |1   |2       |3                  a step begins when it is planned, or when
    device     [ 1 ....... ][ 2 ....... ][ 3     the one before it has ended
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.predicted_s = 0.0
        self.error_s = 0.0
        self.be_added_s = 0.0
        self.alone_s = 0.0
        self.aborted = 0
        self.aborted_s = 0.0
        self.suspended = 0
        self.suspended_s = 0.0
        self._yields = Histogram(_YIELD_BOUNDS_S)
        self._yields_since_s: float | None = None
        self._usual = UsualTimes()
        self._running: deque[Step] = deque()

    def begin(
        self,
        packing: Packing,
        gains: Gains,
        predictor: StepTimePredictor | None,
        queues: Queues,
        behind: Mapping[ServiceClass, Collection[str]],
        new_request: int,
        now: float,
    ) -> None:
        """Record a committed step. queues: after the commit. behind: see Proposal."""
        assert len(self._running) < 2, "at most two steps are in flight"
        self.count += 1
        step = Step(
            number=self.count,
            packing=packing,
            began_s=now,
            expected_s=predictor.seconds(packing.load) if predictor else 0.0,
            gains=gains,
            new_request=new_request,
            blocked=_blocked(packing, queues, behind),
            idle=_idle(packing, queues.running),
        )
        self._running.append(step)

    @property
    def latest(self) -> Step | None:
        """The step that was committed last, if it has not ended."""
        return self._running[-1] if self._running else None

    def ends_s(self, now: float) -> float:
        """When the last running step should end, so that the next can begin; now if none runs."""
        latest = self.latest
        return now if latest is None else max(now, latest.began_s + latest.expected_s)

    def expected(self) -> ExpectedTime:
        """How long the running steps should take together. Any thread may call it."""
        steps = tuple(self._running)
        usual = [self._usual.seconds(step.gains.size) for step in steps]
        return ExpectedTime(
            seconds=sum(max(s.expected_s, u or 0.0) for s, u in zip(steps, usual, strict=True)),
            is_start=None in usual,
            has_new_size=not all(self._usual.is_known(step.gains.size) for step in steps),
        )

    def note_start(self, state: RequestState) -> None:
        """A request leaves its queue for the next step.

        Until the running step ends it still waits, for the reason that holds for its class and
        tenant.
        """
        latest = self.latest
        if latest is not None and state.arrival_index < latest.new_request:
            reason = latest.blocked.get((state.service_class, state.request.tenant))
            if reason is not None:
                latest.idle.append((state, reason))

    def note_promotion(self, state: RequestState) -> None:
        """A waiting request moves from the best-effort queue to the real-time queue.

        Until the running step ends it still waits as best-effort, unless the real-time queue is
        blocked during that step: then it waits with that queue.
        """
        latest = self.latest
        if latest is None or (ServiceClass.RT, state.request.tenant) in latest.blocked:
            return
        self.note_start(state)

    def yield_to(self, arrived_s: float) -> None:
        """The running step should yield to a request that arrived then."""
        self._yields_since_s = arrived_s

    @property
    def yielding(self) -> Buckets:
        """See EngineStats."""
        return self._yields.buckets

    def stop(self, now: float, queues: Queues, *, suspended: bool) -> tuple[Step, float]:
        """Record that the only running step was suspended or aborted; returns it and its seconds so
        far."""
        (step,) = self._running
        self._running.clear()
        seconds = now - step.began_s
        _note_waits(step, seconds, queues)
        if suspended:
            self.suspended += 1
            self.suspended_s += seconds
        else:
            self.aborted += 1
            self.aborted_s += seconds
        if self._yields_since_s is not None:
            self._yields.add([now - self._yields_since_s])
            self._yields_since_s = None
        return step, seconds

    def end(
        self, now: float, predictor: StepTimePredictor | None, queues: Queues
    ) -> tuple[Step, float, bool]:
        """Record the end of the oldest step.

        Returns (the step, the seconds it took, whether best-effort work waited during it).
        """
        step = self._running.popleft()
        seconds = now - step.began_s
        self._yields_since_s = None
        self.seconds += seconds
        self._usual.observe(step.gains.size, seconds)
        if self._running:  # the next step cannot have begun before this one ended
            self._running[0].began_s = now
        be_waits = _note_waits(step, seconds, queues)
        if predictor is not None:
            self._compare(step, seconds, predictor)
        return step, seconds, be_waits

    def _compare(self, step: Step, seconds: float, predictor: StepTimePredictor) -> None:
        packing = step.packing
        self.predicted_s += step.expected_s
        self.error_s += abs(seconds - step.expected_s)
        if packing.num_urgent and packing.seconds:
            # Best-effort rows may even save time, if more rows then share a prefix.
            added_s = max(packing.seconds - packing.urgent_s, 0.0) * seconds / packing.seconds
            self.be_added_s += added_s
            self.alone_s += seconds - added_s
        predictor.observe(packing.load, seconds)


def _note_waits(step: Step, seconds: float, queues: Queues) -> bool:
    """Add the step's time to the waits of requests and queues that were not in it.

    Returns whether best-effort work waited; early prefills do not count.
    """
    be_waits = False
    for state, reason in step.idle:
        if not state.record.left:
            state.record.wait(reason, seconds)
            be_waits |= state.service_class is ServiceClass.BE and reason != EARLY
    for (service_class, tenant), reason in step.blocked.items():
        queues.blocked.note(service_class, tenant, reason, seconds)
        be_waits |= service_class is ServiceClass.BE and reason != EARLY
    return be_waits


def _blocked(
    packing: Packing,
    queues: Queues,
    behind: Mapping[ServiceClass, Collection[str]],
) -> dict[tuple[ServiceClass, str], str]:
    """See Step: why the first candidate of each tenant was passed over, or why packing stopped
    before it. behind: those of another tenant came first."""
    found = {}
    for service_class, tenants in queues.waiting_of.items():
        reasons: dict[str, str] = {}
        for state, reason in packing.passed_over:
            if len(reasons) == len(tenants):
                break
            if state.service_class is service_class and not state.running:
                reasons.setdefault(state.request.tenant, reason)
        stopped, last = _why_stopped(packing, service_class), behind.get(service_class, ())
        for tenant in tenants:
            without = SHARE if tenant in last else stopped
            found[service_class, tenant] = reasons.get(tenant, without)
    return found


def _idle(packing: Packing, running: Sequence[RequestState]) -> list[tuple[RequestState, str]]:
    """See Step. running: after the commit, so that all selected requests are among them."""
    if len(running) == len(packing.selected):
        return []
    selected = {state for state, _ in packing.selected}
    reasons = {state: reason for state, reason in packing.passed_over if state.running}
    return [
        (state, reasons.get(state) or _why_stopped(packing, state.service_class))
        for state in running
        if state not in selected
    ]


def _why_stopped(packing: Packing, service_class: ServiceClass) -> str:
    stop = packing.urgent_stop if service_class is ServiceClass.RT else packing.best_effort_stop
    return stop or "turn"
