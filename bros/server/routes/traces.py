"""GET /v1/requests/{id}/trace: what became of a request, and what it waited for"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.core.errors import NotFoundError
from bros.core.interfaces import RequestTrace
from bros.core.request import Slo
from bros.server.replies import ChoiceTrace, Objectives, RequestTraceReply, TraceEvent
from bros.server.state import ServerState


async def retrieve_trace(request: Request) -> Response:
    """All choices of a running or recent request, under the id its response has."""
    state = ServerState.of(request)
    request_id = request.path_params["id"]
    parts = state.recent.parts(request_id)
    # All at once: the engine answers between two steps, so one by one would cost a step each.
    traces = await asyncio.gather(*(state.engine.trace(part) for part in parts))
    choices = [_choice(i, trace) for i, trace in enumerate(traces) if trace is not None]
    if not choices:
        raise NotFoundError(
            f"Nothing is known of a request {request_id[:200]!r}; only running and recent ones "
            "are remembered.",
            param="id",
            code="request_not_found",
        )
    reply = RequestTraceReply(id=request_id, choices=choices)
    return Response(reply.model_dump_json(), media_type="application/json")


def _choice(index: int, trace: RequestTrace) -> ChoiceTrace:
    return ChoiceTrace(
        index=index,
        request_id=trace.request_id,
        service_class=trace.service_class,
        requested_class=trace.requested_class,
        slo=_objectives(trace.slo),
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        late_tokens=trace.late_tokens,
        preemptions=trace.preemptions,
        ttft_ms=_ms_or_none(trace.ttft_s),
        tpot_ms=_ms_or_none(trace.tpot_s),
        waits_ms={reason: _ms(seconds) for reason, seconds in trace.waits.items()},
        events=[TraceEvent(at_ms=_ms(at_s), event=event) for at_s, event in trace.events],
        finish_reason=trace.finish_reason,
    )


def _objectives(slo: Slo) -> Objectives:
    return Objectives(
        ttft_ms=_ms_or_none(slo.ttft_s),
        tpot_ms=_ms_or_none(slo.tpot_s),
        deadline_ms=_ms_or_none(slo.deadline_s),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _ms_or_none(seconds: float | None) -> float | None:
    return None if seconds is None else _ms(seconds)


ROUTES = (Route("/v1/requests/{id}/trace", retrieve_trace, methods=["GET"]),)
