"""First come, first served, blind to classes: the baseline."""

from __future__ import annotations

import heapq

from bros.core.request import ServiceClass
from bros.scheduler.packing import Bounds, Packing
from bros.scheduler.policies.base import OrderPolicy, Proposal
from bros.scheduler.state import Queues, RequestState, by_deadline, deadline_key, rank_key


class FcfsPolicy(OrderPolicy):
    name = "fcfs"

    def place(self, state: RequestState, now: float) -> None:
        state.rank = state.queue_key = (state.arrival_index,)

    def propose(self, queues: Queues, now: float) -> Proposal:
        some = self._bounds.rows + 1  # one more, which then says why it waits
        waiting = [queues.waiting[cls][:some] for cls in ServiceClass]
        order = heapq.merge(queues.running[:], *waiting, key=rank_key)
        return Proposal(urgent=order, bounds=self._bounds)


# ---- Priority as vLLM has it: it orders the queue, and the victims when memory runs out.


class PriorityPolicy(OrderPolicy):
    """Requests that run go on before any new one is admitted, whatever its class.

    A new real-time request is first in the queue, but has to wait until rows, tokens and memory are
    left over.
    """

    name = "priority"
    new_requests_preempt = False

    def place(self, state: RequestState, now: float) -> None:
        best_effort = state.service_class is ServiceClass.BE
        state.rank = state.queue_key = (best_effort, state.arrival_index)

    def propose(self, queues: Queues, now: float) -> Proposal:
        some = self._bounds.rows + 1  # one more, which then says why it waits
        order = queues.running[:]
        for service_class in (ServiceClass.RT, ServiceClass.BE):
            order += queues.waiting[service_class][:some]
        return Proposal(urgent=order, bounds=self._bounds)


# ---- Earliest deadline first, over both classes and without regard to what a step takes.
#
# A best-effort request without a deadline comes after everything that has one, in order of
# arrival. What is late comes first, as it is the earliest: under overload everything is late.


class EdfPolicy(OrderPolicy):
    name = "edf"

    def place(self, state: RequestState, now: float) -> None:
        if state.service_class is ServiceClass.BE and state.slo.deadline_s is not None:
            state.deadline_s = state.record.arrival_s + state.slo.deadline_s
        state.rank = (state.service_class is ServiceClass.BE, state.arrival_index)
        state.queue_key = (state.deadline_s, *state.rank)

    def propose(self, queues: Queues, now: float) -> Proposal:
        some = self._bounds.rows + 1  # one more, which then says why it waits
        waiting = [queues.waiting[cls][:some] for cls in ServiceClass]
        order = heapq.merge(by_deadline(queues.running), *waiting, key=deadline_key)
        return Proposal(urgent=order, bounds=self._bounds)


# ---- Iteration round-robin: a step of real-time work, a step of best-effort work, and so on.
#
# The baseline "RR" of the BROS paper (section 6.1): two first-come-first-served queues.


class RoundRobinPolicy(OrderPolicy):
    name = "rr"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._next = ServiceClass.RT

    def place(self, state: RequestState, now: float) -> None:
        state.rank = state.queue_key = (state.arrival_index,)

    def propose(self, queues: Queues, now: float) -> Proposal:
        other = _other(self._next)
        return Proposal(
            urgent=self._order(queues, self._next),
            best_effort=self._order(queues, other),
            bounds=self._bounds,
            exclusive=True,
        )

    def chosen(self, packing: Packing[RequestState]) -> None:
        served = self._next if packing.num_urgent else _other(self._next)
        self._next = _other(served)

    def _order(self, queues: Queues, service_class: ServiceClass) -> list[RequestState]:
        running = queues.running_of(service_class)
        waiting = queues.waiting[service_class][: self._bounds.rows + 1]
        return list(heapq.merge(running, waiting, key=rank_key))


def _other(service_class: ServiceClass) -> ServiceClass:
    return ServiceClass.BE if service_class is ServiceClass.RT else ServiceClass.RT
