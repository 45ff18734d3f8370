"""POST /v1/submit and /v1/get: the two bodies of the Parrot paper (section 7), as printed"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.core.errors import InvalidRequestError, NotFoundError
from bros.semantic.errors import ConflictError
from bros.semantic.program import Criteria
from bros.server.body import read_object, validate
from bros.server.interrupts import run_interruptible
from bros.server.session_access import DEFAULT_WAIT_S, json_reply, sessions_of
from bros.server.session_messages import PaperGet, PaperSubmit
from bros.server.session_replies import PaperSubmitted, PaperValue
from bros.server.state import ServerState

# What is called otherwise in the paper's body.
_NAMES = (
    ("requests[0].", ""),
    ("template", "prompt"),
    ("parameters[", "placeholders["),
    ("].variable", "].semantic_var_id"),
    ("].role", "].in_out"),
)


async def submit(request: Request) -> Response:
    """A prompt with placeholders; its session and its variables come into being if they are not
    there."""
    state, service = ServerState.of(request), sessions_of(request)
    body = validate(PaperSubmit, await read_object(request, state.max_body_bytes))
    tenant = state.tenant(request)
    service.ensure(tenant, body.session_id)
    try:
        (call,) = service.submit(tenant, body.session_id, [body.to_call()])
    except (InvalidRequestError, ConflictError, NotFoundError) as error:
        if error.param is not None:
            for ours, theirs in _NAMES:
                error.param = error.param.replace(ours, theirs, 1)
        raise
    return json_reply(PaperSubmitted(request_id=call.request_id))


async def get(request: Request) -> Response:
    """The value of a variable, once it is there."""
    state, service = ServerState.of(request), sessions_of(request)
    body = validate(PaperGet, await read_object(request, state.max_body_bytes))
    criteria = None if body.criteria is None else Criteria(perf=body.criteria)
    waiting = service.get(
        state.tenant(request),
        body.session_id,
        body.semantic_var_id,
        criteria,
        body.timeout_s or DEFAULT_WAIT_S,
    )
    view = await run_interruptible(waiting, request.receive, state.stopping)
    return json_reply(PaperValue(semantic_var_id=view.id, content=view.value or ""))


ROUTES = (
    Route("/v1/submit", submit, methods=["POST"]),
    Route("/v1/get", get, methods=["POST"]),
)
