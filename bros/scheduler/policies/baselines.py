"""Baseline policies: fcfs, priority, edf and rr."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from bros.core.request import ServiceClass
from bros.scheduler.packing import Bounds, Packing
from bros.scheduler.policies.base import Policy, Proposal
from bros.scheduler.state import Queues, RequestState, deadline_key, rank_key


class OrderPolicy(Policy):
    """Base of the baselines, which only order requests."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    @property
    def batch_size(self) -> tuple[int, int]:
        return self._bounds.rows, 0

    def assign_rank(self, state: RequestState, now: float) -> None:
        """By arrival, whatever the class."""
        state.rank = state.queue_key = (state.arrival_index,)

    def _first_waiting(self, queues: Queues, service_class: ServiceClass) -> list[RequestState]:
        """The first waiting requests of a class: one more than fit, so that it has a reason to
        wait."""
        return queues.waiting[service_class][: self._bounds.rows + 1]

    def _all(self, queues: Queues) -> Iterable[RequestState]:
        """The running requests, and the first waiting ones of both classes."""
        waiting = [self._first_waiting(queues, cls) for cls in ServiceClass]
        return itertools.chain(queues.running, *waiting)


class FcfsPolicy(OrderPolicy):
    """First come, first served, whatever the class."""

    name = "fcfs"

    def propose(self, queues: Queues, now: float) -> Proposal:
        return Proposal(urgent=sorted(self._all(queues), key=rank_key), bounds=self._bounds)


class PriorityPolicy(OrderPolicy):
    """Priority scheduling as in vLLM: the class orders the waiting queue and the victims.

    Running requests are scheduled before new ones, whatever their class. A new real-time request is
    first in the queue, but waits until running requests leave rows, tokens and memory.
    """

    name = "priority"
    new_requests_preempt = False

    def assign_rank(self, state: RequestState, now: float) -> None:
        best_effort = state.service_class is ServiceClass.BE
        state.rank = state.queue_key = (best_effort, state.arrival_index)

    def propose(self, queues: Queues, now: float) -> Proposal:
        order = queues.running[:]
        for service_class in (ServiceClass.RT, ServiceClass.BE):
            order += self._first_waiting(queues, service_class)
        return Proposal(urgent=order, bounds=self._bounds)


class EdfPolicy(OrderPolicy):
    """Earliest deadline first over both classes, whatever the time of a step.

    Requests without a deadline come last, in order of arrival. Late requests come first, since
    their deadlines are the earliest: under overload all requests become late.
    """

    name = "edf"

    def assign_rank(self, state: RequestState, now: float) -> None:
        if state.service_class is ServiceClass.BE and state.slo.deadline_s is not None:
            state.deadline_s = state.record.arrival_s + state.slo.deadline_s
        state.rank = (state.service_class is ServiceClass.BE, state.arrival_index)
        state.queue_key = (state.deadline_s, *state.rank)

    def propose(self, queues: Queues, now: float) -> Proposal:
        return Proposal(urgent=sorted(self._all(queues), key=deadline_key), bounds=self._bounds)


class RoundRobinPolicy(OrderPolicy):
    """Alternates between real-time and best-effort steps, each class first come, first served.

    The baseline "RR" of the BROS paper (section 6.1).
    """

    name = "rr"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._next = ServiceClass.RT

    def propose(self, queues: Queues, now: float) -> Proposal:
        other = _other(self._next)
        return Proposal(
            urgent=self._order(queues, self._next),
            best_effort=self._order(queues, other),
            bounds=self._bounds,
            exclusive=True,
        )

    def on_step_committed(self, packing: Packing, queues: Queues) -> None:
        if packing.num_urgent:  # else the other class was served, so this one is still next
            self._next = _other(self._next)

    def _order(self, queues: Queues, service_class: ServiceClass) -> list[RequestState]:
        running = queues.running_of[service_class]
        waiting = self._first_waiting(queues, service_class)
        return sorted(running + waiting, key=rank_key)


def _other(service_class: ServiceClass) -> ServiceClass:
    return ServiceClass.BE if service_class is ServiceClass.RT else ServiceClass.RT
