"""Whether a real-time request can be on time, asked once, when it arrives.

backlog   prompts of real-time requests that wait and are still on time
share     part of a step that decode rows of real-time requests leave to prompts

time to first token  ~  (backlog + own prompt) / share
"""

from __future__ import annotations

import math

from bros.core.errors import OverloadedError
from bros.core.request import ServiceClass
from bros.scheduler.cost_model import StepLoad, StepTimePredictor
from bros.scheduler.queues import Queues
from bros.scheduler.state import RequestState

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 120.0
_MIN_SHARE = 0.05
_REFERENCE_TOKENS = 64


class OverloadGuard:
    """mode: late (serve it anyway), relegate (serve it as best-effort), reject (refuse it)."""

    def __init__(self, mode: str, predictor: StepTimePredictor) -> None:
        self._mode = mode
        self._predictor = predictor

    def classify(self, state: RequestState, queues: Queues, now: float) -> ServiceClass:
        """The class to serve a new request as.

        Raises OverloadedError in mode "reject" if its objectives cannot be met.
        """
        if self._mode == "late" or state.service_class is ServiceClass.BE:
            return state.service_class
        missing_s = self._missing_s(state, queues, now)
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

    def _missing_s(self, state: RequestState, queues: Queues, now: float) -> float:
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
        tokens = sum(
            other.remaining
            for other in queues.waiting[ServiceClass.RT]
            if not other.late and other.deadline_s <= state.deadline_s
        )
        tokens += sum(other.remaining for other in running if other.remaining > 1)
        work_s = self._prompts_s(tokens) + predictor.prefill_seconds(state.remaining)
        waited_s = now - state.record.arrival_s
        return waited_s + work_s / share - slo.ttft_s

    def _prompts_s(self, tokens: int) -> float:
        """Time for prompts that are computed together with others."""
        added_s = self._predictor.added_prefill_seconds(_REFERENCE_TOKENS)
        return tokens * added_s / _REFERENCE_TOKENS
