"""First come, first served, blind to classes: the baseline."""

from __future__ import annotations

from bros.scheduler.state import Rank, RequestState


class FcfsPolicy:
    name = "fcfs"

    def rank(self, state: RequestState) -> Rank:
        return (state.arrival_index,)
