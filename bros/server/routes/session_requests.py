"""/v1/sessions/{sid}/requests: calls with placeholders, one or a whole program"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.core.errors import InvalidRequestError, NotFoundError
from bros.semantic.errors import ConflictError, GetTimeoutError, UpstreamError
from bros.semantic.program import CallSpec, SubmittedCall
from bros.server.body import read_object, validate
from bros.server.errors import describe
from bros.server.interrupts import run_interruptible
from bros.server.session_access import DEFAULT_WAIT_S, Place, json_reply
from bros.server.session_messages import FailCall, SubmitCall, SubmitProgram, to_call
from bros.server.session_replies import (
    CancelledRequest,
    FailedRequest,
    SubmittedRequest,
    SubmittedRequests,
)
from bros.server.session_waiting import wait_for_outputs
from bros.server.state import ServerState

_ONE = "requests[0]."


class _Program(NamedTuple):
    calls: Sequence[CallSpec]
    wait: bool
    timeout_s: float
    key: str | None = None


async def submit(request: Request) -> Response:
    """Add calls to a session; with wait, answer when their values are there."""
    state, place = ServerState.of(request), Place.of(request)
    fields = await read_object(request, state.max_body_bytes)
    is_program = "requests" in fields
    program = _program(fields) if is_program else _one_call(fields)
    try:
        submitted = place.service.submit(place.tenant, place.session_id, program.calls, program.key)
    except (InvalidRequestError, ConflictError, NotFoundError) as error:
        if not is_program and error.param is not None:
            error.param = error.param.removeprefix(_ONE)
        raise
    values: Sequence[Mapping[str, str] | None] = [None] * len(submitted)
    if program.wait:
        waiting = wait_for_outputs(place, program.calls, submitted, program.timeout_s)
        try:
            values = await run_interruptible(waiting, request.receive, state.stopping)
        except (UpstreamError, GetTimeoutError) as error:
            # The calls are there all the same, and what does not need the failed one goes on.
            taken = [reply.model_dump(exclude_none=True) for reply in _replies(submitted, values)]
            failed = describe(error)
            return replace(failed, more={**failed.more, "requests": taken}).to_response()
    replies = _replies(submitted, values)
    text = SubmittedRequests(requests=replies).model_dump_json(exclude_none=True)
    return Response(text, media_type="application/json")


def _replies(
    submitted: Sequence[SubmittedCall], values: Sequence[Mapping[str, str] | None]
) -> list[SubmittedRequest]:
    return [
        SubmittedRequest(
            id=call.request_id,
            variables=dict(call.variables),
            values=None if found is None else dict(found),
        )
        for call, found in zip(submitted, values, strict=True)
    ]


async def cancel(request: Request) -> Response:
    """Stop a call."""
    place, request_id = Place.of(request), request.path_params["rid"]
    place.service.cancel(place.tenant, place.session_id, request_id)
    return json_reply(CancelledRequest(id=request_id))


async def fail(request: Request) -> Response:
    """A function of the client's has failed."""
    place, request_id = Place.of(request), request.path_params["rid"]
    body = await read_object(request, ServerState.of(request).max_body_bytes)
    message = validate(FailCall, body).message
    place.service.fail(place.tenant, place.session_id, request_id, message)
    return json_reply(FailedRequest(id=request_id))


def _one_call(fields: Mapping[str, Any]) -> _Program:
    body = validate(SubmitCall, fields)
    return _Program([to_call(body, "")], body.wait, body.timeout_s or DEFAULT_WAIT_S)


def _program(fields: Mapping[str, Any]) -> _Program:
    body = validate(SubmitProgram, fields)
    calls = [to_call(call, f"requests[{i}].") for i, call in enumerate(body.requests)]
    return _Program(calls, body.wait, body.timeout_s or DEFAULT_WAIT_S, body.key)


ROUTES = (
    Route("/v1/sessions/{sid}/requests", submit, methods=["POST"]),
    Route("/v1/sessions/{sid}/requests/{rid}", cancel, methods=["DELETE"]),
    Route("/v1/sessions/{sid}/requests/{rid}/fail", fail, methods=["POST"]),
)
