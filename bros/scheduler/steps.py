"""What steps took, what they were expected to take, and who waited meanwhile."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bros.core.request import ServiceClass
from bros.scheduler.cost_model import StepTimePredictor
from bros.scheduler.packing import EARLY, Packing
from bros.scheduler.state import Queues, RequestState


@dataclass(slots=True)
class Step:
    """One that was committed, and what is needed of it when it ends.

    began_s: when the device began with it; if it runs another one still, when it was planned.
    expected_s: seconds it should take. new request: arrival_index of the first request that came
        too late for it.
    filled: prefill-only requests that are done with it.
    blocked: classes that wait, and why.
    idle: requests that hold memory and are not in it.
    foreseen: its requests plan on as if it were done, see `foresee`.
    """

    number: int
    packing: Packing[RequestState]
    began_s: float
    expected_s: float
    new_request: int
    filled: list[RequestState]
    blocked: list[tuple[ServiceClass, str]]
    idle: list[tuple[RequestState, str]]
    foreseen: bool = False


class StepLedger:
    """Up to two steps that run, one after the other, and sums over those that have ended.

        planned    |1   |2       |3                  a step begins when it is planned, or when
        device     [ 1 ....... ][ 2 ....... ][ 3     the one before it has ended

    Sums are in seconds; fields as in EngineStats.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.predicted_s = 0.0
        self.error_s = 0.0
        self.be_tax_s = 0.0
        self.aborted = 0
        self.abandoned_s = 0.0
        self._running: deque[Step] = deque()

    def begin(
        self,
        packing: Packing[RequestState],
        predictor: StepTimePredictor | None,
        queues: Queues,
        new_request: int,
        now: float,
    ) -> None:
        """A step was committed. Called with the queues as they are while it runs."""
        assert len(self._running) < 2, "at most two steps run"
        self.count += 1
        taken = {state.request_id for state, _ in packing.selected}
        reasons = {state.request_id: reason for state, reason in packing.passed_over}
        step = Step(
            number=self.count,
            packing=packing,
            began_s=now,
            expected_s=predictor.seconds(packing.load) if predictor else 0.0,
            new_request=new_request,
            filled=[s for s, _ in packing.selected if not s.samples and s.remaining == 0],
            blocked=[
                (service_class, _why_waiting(packing, service_class))
                for service_class, waiting in queues.waiting.items()
                if waiting
            ],
            idle=[
                (state, reasons.get(state.request_id) or _why_stopped(packing, state.service_class))
                for state in queues.running
                if state.request_id not in taken
            ],
        )
        self._running.append(step)

    @property
    def latest(self) -> Step | None:
        """The step that was committed last, if it has not ended."""
        return self._running[-1] if self._running else None

    def ends_s(self, now: float) -> float:
        """When what runs should be over, and the next step can begin; now if nothing runs."""
        latest = self.latest
        return now if latest is None else max(now, latest.began_s + latest.expected_s)

    def note_start(self, state: RequestState) -> None:
        """A request leaves its queue for the next step: until the one that runs ends, it waits."""
        latest = self.latest
        if latest is not None and state.arrival_index < latest.new_request:
            latest.idle += [
                (state, reason)
                for service_class, reason in latest.blocked
                if service_class is state.service_class
            ]

    def note_promotion(self, state: RequestState) -> None:
        """It leaves the best-effort queue for the other one: until the step that runs ends it
        waits as before, unless those it joins do so, too, and it with them."""
        latest = self.latest
        if latest is None or any(cls is ServiceClass.RT for cls, _ in latest.blocked):
            return
        self.note_start(state)

    def abort_step(self, now: float, queues: Queues) -> tuple[Step, float]:
        """The only running step was aborted: (which one, the seconds it took)."""
        (step,) = self._running
        self._running.clear()
        seconds = now - step.began_s
        self.aborted += 1
        self.abandoned_s += seconds
        _note_waits(step, seconds, queues)
        return step, seconds

    def end(
        self, now: float, predictor: StepTimePredictor | None, queues: Queues
    ) -> tuple[Step, float, bool]:
        """The first step is done: (which one, seconds it took, best-effort work waited)."""
        step = self._running.popleft()
        seconds = now - step.began_s
        self.seconds += seconds
        if self._running:  # it can not have begun before
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
            # A row may even save time, by what others can read together with it.
            tax_s = max(packing.seconds - packing.urgent_s, 0.0)
            self.be_tax_s += seconds * tax_s / packing.seconds
        predictor.observe(packing.load, seconds)


def _note_waits(step: Step, seconds: float, queues: Queues) -> bool:
    """Whether best-effort work was among those who waited; what is early waits for nothing."""
    be_waits = False
    for state, reason in step.idle:
        if not state.record.left:
            state.record.wait(reason, seconds)
            be_waits |= state.service_class is ServiceClass.BE and reason != EARLY
    for service_class, reason in step.blocked:
        queues.blocked.note(service_class, reason, seconds)
        be_waits |= service_class is ServiceClass.BE and reason != EARLY
    return be_waits


def _why_waiting(packing: Packing[RequestState], service_class: ServiceClass) -> str:
    """Why those who still wait in a class do: what kept the first one out, or ended its turn."""
    for state, reason in packing.passed_over:
        if state.service_class is service_class and not state.running:
            return reason
    return _why_stopped(packing, service_class)


def _why_stopped(packing: Packing[RequestState], service_class: ServiceClass) -> str:
    stop = packing.urgent_stop if service_class is ServiceClass.RT else packing.best_effort_stop
    return stop or "turn"
