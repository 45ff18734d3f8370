"""What steps took, what they were expected to take, and who waited meanwhile."""

from __future__ import annotations

from bros.core.request import ServiceClass
from bros.scheduler.cost_model import StepTimePredictor
from bros.scheduler.queues import Queues
from bros.scheduler.selection import Packing
from bros.scheduler.state import RequestState


class StepLedger:
    """Sums over steps, in seconds; fields as in EngineStats."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.predicted_s = 0.0
        self.error_s = 0.0
        self.be_tax_s = 0.0
        self.abandoned = 0
        self.abandoned_s = 0.0
        self._began_s = 0.0
        self._expected_s = 0.0
        self._packing: Packing[RequestState] = Packing()
        self._blocked: list[tuple[ServiceClass, str]] = []
        self._idle: list[tuple[RequestState, str]] = []

    def begin(
        self,
        packing: Packing[RequestState],
        predictor: StepTimePredictor | None,
        queues: Queues,
        now: float,
    ) -> None:
        """A step was committed. Called with the queues as they are while it runs."""
        self.count += 1
        self._began_s = now
        self._packing = packing
        self._expected_s = predictor.seconds(packing.load) if predictor else 0.0
        self._blocked = [
            (service_class, _why_waiting(packing, service_class))
            for service_class, waiting in queues.waiting.items()
            if waiting
        ]
        taken = {state.request_id for state, _ in packing.selected}
        reasons = {state.request_id: reason for state, reason in packing.passed_over}
        self._idle = [
            (state, reasons.get(state.request_id) or _why_stopped(packing, state.service_class))
            for state in queues.running
            if state.request_id not in taken
        ]

    @property
    def packing(self) -> Packing[RequestState]:
        """What the running step holds."""
        return self._packing

    @property
    def began_s(self) -> float:
        """When the running step began."""
        return self._began_s

    def abandon(self, now: float, queues: Queues) -> float:
        """The running step was given up; returns the time that went into it."""
        seconds = now - self._began_s
        self.abandoned += 1
        self.abandoned_s += seconds
        self._note_waits(seconds, queues)
        return seconds

    def end(
        self, now: float, predictor: StepTimePredictor | None, queues: Queues
    ) -> tuple[float, Packing[RequestState], bool]:
        """The step is done: (seconds it took, what it was, best-effort work waited)."""
        seconds, packing = now - self._began_s, self._packing
        self.seconds += seconds
        be_waits = self._note_waits(seconds, queues)
        if predictor is not None:
            self._compare(seconds, predictor)
        return seconds, packing, be_waits

    def _note_waits(self, seconds: float, queues: Queues) -> bool:
        """Whether best-effort work was among those who waited."""
        be_waits = any(service_class is ServiceClass.BE for service_class, _ in self._blocked)
        for state, reason in self._idle:
            if not state.record.left:
                state.record.wait(reason, seconds)
                be_waits |= state.service_class is ServiceClass.BE
        for service_class, reason in self._blocked:
            queues.blocked.note(service_class, reason, seconds)
        return be_waits

    def _compare(self, seconds: float, predictor: StepTimePredictor) -> None:
        packing, expected = self._packing, self._expected_s
        self.predicted_s += expected
        self.error_s += abs(seconds - expected)
        if packing.num_urgent and packing.seconds:
            self.be_tax_s += seconds * (packing.seconds - packing.urgent_s) / packing.seconds
        predictor.observe(packing.load, seconds)


def _why_waiting(packing: Packing[RequestState], service_class: ServiceClass) -> str:
    """Why those who still wait in a class do: what kept the first one out, or ended its turn."""
    for state, reason in packing.passed_over:
        if state.service_class is service_class and not state.running:
            return reason
    return _why_stopped(packing, service_class)


def _why_stopped(packing: Packing[RequestState], service_class: ServiceClass) -> str:
    stop = packing.urgent_stop if service_class is ServiceClass.RT else packing.filler_stop
    return stop or "turn"
