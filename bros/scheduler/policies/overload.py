"""Whether a real-time request can be on time, asked once, when it arrives.

backlog   prompts of real-time requests that wait and are still on time
share     part of a step that decode rows of real-time requests leave to prompts
place     when enough real-time requests have ended to leave a seat and KV memory for the backlog
          and this one; best-effort requests do not count, they make way

time to first token  ~  the later of (backlog + own prompt) / share and place + own prompt
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bros.core.errors import OverloadedError
from bros.core.request import ServiceClass
from bros.scheduler.cost_model import StepLoad, StepTimePredictor
from bros.scheduler.queues import Queues
from bros.scheduler.state import RequestState

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 120.0
_MIN_SHARE = 0.05
_REFERENCE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Room:
    """What requests in progress share: seats in the batch, and tokens of KV memory.

    shared_tokens: of one request, that lie in blocks of the prefix cache; all_shared_tokens: in all
    such blocks.
    """

    seats: int
    kv_tokens: int
    shared_tokens: Callable[[RequestState], int] = lambda state: 0
    all_shared_tokens: Callable[[], int] = lambda: 0

    def held_by(self, states: Sequence[RequestState]) -> int:
        """KV tokens of these requests, where what they share counts once."""
        shared = sum(map(self.shared_tokens, states))
        own = sum(state.num_cached for state in states) - shared
        return own + min(shared, self.all_shared_tokens())


class OverloadGuard:
    """mode: late (serve it anyway), relegate (serve it as best-effort), reject (refuse it).

    expected_tokens: how many more tokens a request is likely to produce.
    """

    def __init__(
        self,
        mode: str,
        predictor: StepTimePredictor,
        room: Room,
        expected_tokens: Callable[[RequestState], int],
    ) -> None:
        self._mode = mode
        self._predictor = predictor
        self.room = room
        self._expected_tokens = expected_tokens

    def classify(
        self, state: RequestState, queues: Queues, step_s: float, now: float
    ) -> ServiceClass:
        """The class to serve a new request as. step_s: usual time of a step.

        Of one that is resumed somebody has read a part already: it goes on as what it was.
        Raises OverloadedError in mode "reject" if its objectives cannot be met.
        """
        if self._mode == "late" or state.service_class is ServiceClass.BE or state.num_outputs:
            return state.service_class
        missing_s = self._missing_s(state, queues, step_s, now)
        if missing_s <= 0.0:
            return ServiceClass.RT
        if self._mode == "relegate":
            return ServiceClass.BE
        retry_s = min(max(math.ceil(missing_s), _MIN_RETRY_S), _MAX_RETRY_S)
        raise OverloadedError(
            "The server is too busy to meet this request's time objectives; "
            f"retry in {retry_s:.0f} s, or use service_tier 'flex' to wait for a gap.",
            retry_s,
        )

    def _missing_s(self, state: RequestState, queues: Queues, step_s: float, now: float) -> float:
        """By how much the objectives would be missed; not positive if they would be met."""
        predictor, slo = self._predictor, state.slo
        decode = StepLoad()
        running = queues.running_of(ServiceClass.RT)
        for other in running:
            decode.add_row(other.num_cached)
        decode_s = predictor.safe_seconds(decode)
        if slo.tpot_s is not None:
            decode.add_row(state.prompt_len)
            if predictor.safe_seconds(decode) > slo.tpot_s:
                return predictor.safe_seconds(decode)
        if slo.ttft_s is None:
            return -math.inf
        share = max(1.0 - decode_s / (slo.tpot_s or slo.ttft_s), _MIN_SHARE)
        ahead = [
            other
            for other in queues.waiting[ServiceClass.RT]
            if not other.late and other.deadline_s <= state.deadline_s
        ]
        tokens = sum(other.remaining for other in ahead)
        tokens += sum(other.remaining for other in running if other.remaining > 1)
        own_s = predictor.prefill_seconds(state.remaining, state.num_cached)
        work_s = (self._prompts_s(tokens) + own_s) / share
        place_s = self._place_s([*ahead, state], running, max(step_s, decode_s))
        waited_s = now - state.record.arrival_s
        return waited_s + max(work_s, place_s + own_s) - slo.ttft_s

    def _place_s(
        self, newcomers: Sequence[RequestState], running: Sequence[RequestState], step_s: float
    ) -> float:
        """When the last of the newcomers has a seat and memory, if they get both in their order.

        Requests end when they have as many tokens as is usual; nobody else comes in between.
        """
        seats = self.room.seats - len(running)
        room = self.room
        tokens = room.kv_tokens - room.held_by(running) - sum(s.remaining for s in running)
        ends = [
            (self._expected_tokens(s) * step_s, len(s.token_ids) - room.shared_tokens(s))
            for s in running
        ]
        heapq.heapify(ends)
        place_s = 0.0
        for state in newcomers:
            needed = state.remaining  # what is cached of it is there already
            while ends and (seats < 1 or tokens < needed):
                place_s, freed = heapq.heappop(ends)
                seats, tokens = seats + 1, tokens + freed
            seats, tokens = seats - 1, tokens - needed
            end_s = place_s + self._expected_tokens(state) * step_s
            heapq.heappush(ends, (end_s, needed))
        return place_s

    def _prompts_s(self, tokens: int) -> float:
        """Time for prompts that are computed together with others."""
        added_s = self._predictor.added_prefill_seconds(_REFERENCE_TOKENS)
        return tokens * added_s / _REFERENCE_TOKENS
