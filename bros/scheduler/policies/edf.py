"""Earliest deadline first, over both classes and without regard to what a step takes.

A best-effort request without a deadline comes after everything that has one, in order of
arrival. What is late comes first, as it is the earliest: under overload everything is late.
"""

from __future__ import annotations

import heapq

from bros.core.request import ServiceClass
from bros.scheduler.policies.base import OrderPolicy, Turn
from bros.scheduler.queues import Queues, by_deadline, deadline_key
from bros.scheduler.state import RequestState


class EdfPolicy(OrderPolicy):
    name = "edf"

    def place(self, state: RequestState, now: float) -> None:
        if state.service_class is ServiceClass.BE and state.slo.deadline_s is not None:
            state.deadline_s = state.record.arrival_s + state.slo.deadline_s
        state.rank = (state.service_class is ServiceClass.BE, state.arrival_index)
        state.queue_key = (state.deadline_s, *state.rank)

    def turn(self, queues: Queues, now: float) -> Turn:
        some = self._bounds.rows + 1  # one more, which then says why it waits
        waiting = [queues.waiting[cls][:some] for cls in ServiceClass]
        order = heapq.merge(by_deadline(queues.running), *waiting, key=deadline_key)
        return Turn(urgent=order, bounds=self._bounds)
