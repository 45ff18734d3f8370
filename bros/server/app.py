"""The ASGI application: routes, middleware and error handlers around a ServerState."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from bros.core.errors import BrosError
from bros.server.errors import handle_expected, handle_http
from bros.server.middleware import BearerAuth, ErrorBarrier, RequestLog
from bros.server.routes import (
    admin,
    batches,
    files,
    generation,
    models,
    paper,
    service,
    session_requests,
    session_variables,
    sessions,
    tokens,
    traces,
)
from bros.server.state import ServerState
from bros.server.tenants import Tenants


def create_app(state: ServerState, tenants: Tenants) -> Starlette:
    """The app for one server. Whoever builds the state closes the engine afterwards."""
    routes = [
        *(generation.ROUTES + models.ROUTES + tokens.ROUTES + traces.ROUTES),
        *service.routes(
            has_jobs=state.jobs is not None,
            has_sessions=state.sessions is not None,
            has_replicas=state.replicas is not None,
        ),
    ]
    if state.jobs is not None:
        routes += files.ROUTES + batches.ROUTES
    if state.sessions is not None:
        routes += sessions.ROUTES + session_requests.ROUTES + session_variables.ROUTES
        routes += paper.ROUTES
    if state.replicas is not None:
        routes += admin.ROUTES
    middleware = [
        Middleware(RequestLog, state=state, routes=routes),
        Middleware(ErrorBarrier),
    ]
    if tenants.keys:
        middleware.append(Middleware(BearerAuth, tenants=tenants))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={BrosError: handle_expected, HTTPException: handle_http},
    )
    app.router.redirect_slashes = False  # /v1/models/ is a mistake, not another address
    app.state.server = state
    return app
