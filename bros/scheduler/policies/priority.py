"""Real-time before best-effort, first come, first served within a class."""

from __future__ import annotations

from bros.core.request import ServiceClass
from bros.scheduler.state import Rank, RequestState


class PriorityPolicy:
    name = "priority"

    def rank(self, state: RequestState) -> Rank:
        return (state.request.service_class is ServiceClass.BE, state.arrival_index)
