"""Whether a new request may queue, and as what."""

from __future__ import annotations

from collections.abc import Mapping

from bros.core.errors import OverloadedError, QueueFullError
from bros.core.request import ServiceClass, Slo
from bros.scheduler.counters import ClassCounters
from bros.scheduler.limits import objectives
from bros.scheduler.policies import Policy
from bros.scheduler.queues import Queues
from bros.scheduler.state import RequestState


class Admission:
    """max_queue: most waiting requests of a class. default_slo: see `objectives`."""

    def __init__(
        self,
        policy: Policy,
        queues: Queues,
        counters: Mapping[ServiceClass, ClassCounters],
        max_queue: int,
        default_slo: Slo,
    ) -> None:
        self._policy = policy
        self._queues = queues
        self._counters = counters
        self._max_queue = max_queue
        self._default_slo = default_slo

    def check_queue(self, service_class: ServiceClass, now: float) -> None:
        """Raise QueueFullError if there is no place for one more of a class."""
        waiting = len(self._queues.waiting[service_class])
        if waiting >= self._max_queue:
            raise QueueFullError(waiting, self._counters[service_class].retry_after_s(now))

    def classify(self, state: RequestState, begins_s: float, now: float) -> None:
        """Ask the policy under load whether a real-time request is served as one.

        begins_s: when the next step can begin. Raises OverloadedError or QueueFullError.
        """
        asked = state.service_class
        try:
            used = self._policy.classify(state, self._queues, begins_s)
        except OverloadedError:
            self._counters[asked].rejected += 1
            raise
        if used is not asked:
            try:
                self.check_queue(used, now)
            except QueueFullError:
                self._counters[asked].rejected += 1
                raise
            self._counters[used].relegated += 1
            state.relegate(used, objectives(state.request, used, self._default_slo, now))
