"""What a best-effort request is held to that becomes real-time on its way."""

from __future__ import annotations

from bros.core.request import Slo
from bros.scheduler.limits import paced
from bros.scheduler.state import RequestState


def promoted_objectives(state: RequestState, asked: Slo, default: Slo, now: float) -> Slo:
    """All of them counted from `now`, the defaults filled in as for any real-time request.

    Without a deadline for the whole, the one that it had still holds: what is left of it, which
    is negative if it is lost already.
    """
    before_s = state.slo.deadline_s
    if asked.deadline_s is None and before_s is not None:
        left_s = state.record.arrival_s + before_s - now
        asked = Slo(asked.ttft_s, asked.tpot_s, left_s)
    longest = state.request.sampling.max_tokens or 1
    return paced(asked, max(1, longest - state.num_outputs), default)
