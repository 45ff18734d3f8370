"""Iteration round-robin: a step of real-time work, a step of best-effort work, and so on.

The baseline "RR" of the BROS paper (section 6.1): two first-come-first-served queues.
"""

from __future__ import annotations

import heapq

from bros.core.request import ServiceClass
from bros.scheduler.policies.base import OrderPolicy, Turn
from bros.scheduler.queues import Queues, rank_key
from bros.scheduler.selection import Bounds, Packing
from bros.scheduler.state import RequestState


class RoundRobinPolicy(OrderPolicy):
    name = "rr"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._next = ServiceClass.RT

    def place(self, state: RequestState, now: float) -> None:
        state.rank = state.queue_key = (state.arrival_index,)

    def turn(self, queues: Queues, now: float) -> Turn:
        other = _other(self._next)
        return Turn(
            urgent=self._order(queues, self._next),
            filler=self._order(queues, other),
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
