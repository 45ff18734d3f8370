"""First come, first served, blind to classes: the baseline."""

from __future__ import annotations

import heapq

from bros.core.request import ServiceClass
from bros.scheduler.policies.base import OrderPolicy, Turn
from bros.scheduler.queues import Queues, rank_key
from bros.scheduler.state import RequestState


class FcfsPolicy(OrderPolicy):
    name = "fcfs"

    def place(self, state: RequestState, now: float) -> None:
        state.rank = state.queue_key = (state.arrival_index,)

    def turn(self, queues: Queues, now: float) -> Turn:
        some = self._bounds.rows + 1  # one more, which then says why it waits
        waiting = [queues.waiting[cls][:some] for cls in ServiceClass]
        order = heapq.merge(queues.running[:], *waiting, key=rank_key)
        return Turn(urgent=order, bounds=self._bounds)
