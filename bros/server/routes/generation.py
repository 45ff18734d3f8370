"""POST /v1/chat/completions and /v1/completions"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.server.body import read_object
from bros.server.calls import CALLS
from bros.server.exchange import respond
from bros.server.joining import deadline_ms, join
from bros.server.state import ServerState


async def generate(request: Request) -> Response:
    """Answer a conversation, or continue prompts."""
    state = ServerState.of(request)
    arrival_s = state.clock.now()
    fields = await read_object(request, state.max_body_bytes)
    call = CALLS[request.url.path](state, fields)
    joined = join(request, fields)
    due_ms = None if joined is None else deadline_ms(fields)
    return await respond(request, call, arrival_s, joined, due_ms)


ROUTES = tuple(Route(path, generate, methods=["POST"]) for path in CALLS)
