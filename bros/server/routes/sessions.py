"""/v1/sessions: programs of many calls, and pictures of them"""

from __future__ import annotations

import html

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.semantic.picture import draw
from bros.semantic.views import SessionView
from bros.server import offload
from bros.server.body import read_object, validate
from bros.server.session_access import Place, json_reply, sessions_of
from bros.server.session_messages import CreateSession, checked_sampling, criteria_or_none
from bros.server.session_replies import DeletedSession, SessionList, SessionObject, SessionSummary
from bros.server.state import ServerState

_CHARS_PER_CALL = 100
"""What showing a call costs, in characters of a text."""

_PICTURE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
}
_REFRESH_S = 2


async def create_session(request: Request) -> Response:
    """Open a session."""
    state = ServerState.of(request)
    wanted = validate(CreateSession, await read_object(request, state.max_body_bytes))
    sampling = checked_sampling(wanted.sampling, "sampling")
    view = sessions_of(request).create(
        state.tenant(request),
        criteria=criteria_or_none(wanted.criteria),
        ttl_s=wanted.ttl_s,
        scope=wanted.tenant,
        session_id=wanted.id,
        metadata=wanted.metadata,
        sampling=sampling or None,
    )
    return json_reply(SessionSummary.of(view))


async def list_sessions(request: Request) -> Response:
    """The tenant's sessions, the oldest first."""
    views = sessions_of(request).sessions(ServerState.tenant(request))
    return json_reply(SessionList(data=[SessionSummary.of(view) for view in views]))


async def retrieve_session(request: Request) -> Response:
    """A session with its graph."""
    view = _inspect(request)

    def render() -> str:
        return SessionObject.of(view).model_dump_json()

    text = await offload.run(ServerState.of(request), render, _size(view))
    return Response(text, media_type="application/json")


async def delete_session(request: Request) -> Response:
    """End a session, with all that runs in it."""
    service, tenant, session_id = Place.of(request)
    await service.delete(tenant, session_id)
    return json_reply(DeletedSession(id=session_id))


async def picture(request: Request) -> Response:
    """The graph as SVG."""
    return Response(await _draw(request), headers=_PICTURE_HEADERS, media_type="image/svg+xml")


async def graph_page(request: Request) -> Response:
    """The picture as a page that keeps itself up to date."""
    svg = await _draw(request)
    title = html.escape(request.path_params["sid"])
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="refresh" content="{_REFRESH_S}"></head>'
        f'<body style="margin:0">{svg}</body></html>'
    )
    return Response(page, headers=_PICTURE_HEADERS, media_type="text/html")


async def _draw(request: Request) -> str:
    view = _inspect(request)
    return await offload.run(ServerState.of(request), lambda: draw(view), _size(view))


def _inspect(request: Request) -> SessionView:
    service, tenant, session_id = Place.of(request)
    return service.inspect(tenant, session_id)


def _size(view: SessionView) -> int:
    return _CHARS_PER_CALL * (len(view.calls) + len(view.variables))


ROUTES = (
    Route("/v1/sessions", create_session, methods=["POST"]),
    Route("/v1/sessions", list_sessions, methods=["GET"]),
    Route("/v1/sessions/{sid}", retrieve_session, methods=["GET"]),
    Route("/v1/sessions/{sid}", delete_session, methods=["DELETE"]),
    Route("/v1/sessions/{sid}/graph.svg", picture, methods=["GET"]),
    Route("/v1/sessions/{sid}/graph", graph_page, methods=["GET"]),
)
