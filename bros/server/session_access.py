"""What the routes of sessions have in common."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from bros.semantic.service import SessionService
from bros.server.state import ServerState

DEFAULT_WAIT_S = 60.0


class Place(NamedTuple):
    """Where a request is about: the session in its path, as its tenant's."""

    service: SessionService
    tenant: str
    session_id: str

    @classmethod
    def of(cls, request: Request) -> Place:
        return cls(sessions_of(request), ServerState.tenant(request), request.path_params["sid"])


def sessions_of(request: Request) -> SessionService:
    """The sessions of the app that serves `request`."""
    sessions = ServerState.of(request).sessions
    assert sessions is not None
    return sessions


def json_reply(reply: BaseModel) -> Response:
    return Response(reply.model_dump_json(), media_type="application/json")
