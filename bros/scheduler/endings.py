"""The last outputs of requests that did not get all that they asked for."""

from __future__ import annotations

from bros.core.request import FinishReason, RequestOutput
from bros.scheduler.state import RequestState


def failed(state: RequestState, error: str) -> RequestOutput:
    """Something went wrong with it in a step."""
    return RequestOutput(request_id=state.request_id, finish_reason=FinishReason.ERROR, error=error)


def given_up(state: RequestState, retry_s: float) -> RequestOutput:
    """It could not be served in time; it may come back after `retry_s`."""
    return RequestOutput(
        request_id=state.request_id,
        finish_reason=FinishReason.ERROR,
        error="The server was too busy to answer within this request's time objective.",
        retry_after_s=retry_s,
    )
