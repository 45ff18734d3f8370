"""/v1/sessions/{sid}/variables: what calls read and write"""

from __future__ import annotations

from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.core.errors import InvalidRequestError
from bros.semantic.program import Criteria, Perf
from bros.server.body import read_object, validate
from bros.server.interrupts import run_interruptible
from bros.server.query import query_flag, query_names, query_number
from bros.server.session_access import DEFAULT_WAIT_S, Place, json_reply
from bros.server.session_messages import (
    MAX_WAIT_S,
    CreateVariable,
    CriteriaFields,
    SetVariable,
    WantVariable,
    parse_perf,
)
from bros.server.session_replies import VariableList, VariableObject
from bros.server.state import ServerState
from bros.server.value_stream import ValueStream

_TIMES_MS = ("ttft_ms", "tpot_ms", "deadline_ms")
_CRITERIA = ("criteria", *_TIMES_MS)
_WAITING = ("wait", "stream", "timeout", *_CRITERIA)
_MAX_MS = 1e12


async def create_variable(request: Request) -> Response:
    """A new variable, with a value or to be set later."""
    place = Place.of(request)
    body = validate(CreateVariable, await _body(request))
    view = place.service.declare(place.tenant, place.session_id, body.name, body.value, body.id)
    return json_reply(VariableObject.of(view))


async def list_variables(request: Request) -> Response:
    """All variables of a session."""
    service, tenant, session_id = Place.of(request)
    views = service.variables(tenant, session_id)
    return json_reply(VariableList(data=[VariableObject.of(view) for view in views]))


async def retrieve_variable(request: Request) -> Response:
    """A variable as it is; with wait, once its value is there; with stream, as it comes."""
    state, place, query = ServerState.of(request), Place.of(request), request.query_params
    query_names(query, _WAITING)
    wait, stream = query_flag(query, "wait"), query_flag(query, "stream")
    criteria, timeout_s = _criteria(query), query_number(query, "timeout", most=MAX_WAIT_S)
    service, variable = place.service, (*place[1:], request.path_params["vid"])
    if stream:
        pieces = service.stream(*variable, criteria)
        return ValueStream(
            pieces,
            lambda: service.variable(*variable),
            state.stopping,
            timeout_s=timeout_s or MAX_WAIT_S,
        )
    if wait:
        waiting = service.get(*variable, criteria, timeout_s or DEFAULT_WAIT_S)
        view = await run_interruptible(waiting, request.receive, state.stopping)
        return json_reply(VariableObject.of(view))
    for name in (*_CRITERIA, "timeout"):
        if name in query:
            message = f"'{name}' needs wait=true or stream=true."
            raise InvalidRequestError(message, param=name, code="invalid_value")
    return json_reply(VariableObject.of(service.variable(*variable)))


async def set_variable(request: Request) -> Response:
    """Give a variable its value, once."""
    place = Place.of(request)
    value = validate(SetVariable, await _body(request)).value
    view = place.service.set(place.tenant, place.session_id, request.path_params["vid"], value)
    return json_reply(VariableObject.of(view))


async def want_variable(request: Request) -> Response:
    """Begin what a variable needs, or hurry it up."""
    place = Place.of(request)
    criteria = validate(WantVariable, await _body(request)).criteria.to_criteria()
    view = place.service.want(place.tenant, place.session_id, request.path_params["vid"], criteria)
    return json_reply(VariableObject.of(view))


def _criteria(query: QueryParams) -> Criteria | None:
    ttft_ms, tpot_ms, deadline_ms = (query_number(query, name, most=_MAX_MS) for name in _TIMES_MS)
    if "criteria" not in query and ttft_ms is tpot_ms is deadline_ms is None:
        return None
    perf = parse_perf(query.get("criteria", Perf.LATENCY.value), "criteria")
    return CriteriaFields(
        perf=perf, ttft_ms=ttft_ms, tpot_ms=tpot_ms, deadline_ms=deadline_ms
    ).to_criteria()


async def _body(request: Request) -> dict[str, Any]:
    return await read_object(request, ServerState.of(request).max_body_bytes)


ROUTES = (
    Route("/v1/sessions/{sid}/variables", create_variable, methods=["POST"]),
    Route("/v1/sessions/{sid}/variables", list_variables, methods=["GET"]),
    Route("/v1/sessions/{sid}/variables/{vid}", retrieve_variable, methods=["GET"]),
    Route("/v1/sessions/{sid}/variables/{vid}", set_variable, methods=["PUT"]),
    Route("/v1/sessions/{sid}/variables/{vid}", want_variable, methods=["PATCH"]),
)
