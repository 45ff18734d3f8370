"""What operators do with replicas: look at them, empty one, use it again."""

from __future__ import annotations

import dataclasses

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.router.client import RouterClient
from bros.server.body import read_object, validate
from bros.server.protocol import DrainRequest
from bros.server.replies import PlanReply, ReplicaList, ReplicaReply
from bros.server.state import ServerState

_MAX_BODY_BYTES = 4096


async def list_replicas(request: Request) -> Response:
    """All there are and what they do."""
    return _reply(request, _replicas(request))


async def drain_replica(request: Request) -> Response:
    """Send nothing new there. Returns at once; the state is `drained` when nothing is open."""
    replicas = _replicas(request)
    body = DrainRequest()
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        body = validate(DrainRequest, await read_object(request, _MAX_BODY_BYTES))
    replicas.drain(request.path_params["number"], move=body.move, restart=body.restart)
    return _reply(request, replicas)


async def resume_replica(request: Request) -> Response:
    """Send requests there again."""
    replicas = _replicas(request)
    replicas.resume(request.path_params["number"])
    return _reply(request, replicas)


def _replicas(request: Request) -> RouterClient:
    """Raises HTTPException if they are not for whoever asks."""
    if ServerState.tenant(request):
        raise HTTPException(403, "Replicas are for the operator, whose key is that of --api-key.")
    replicas = ServerState.of(request).replicas
    assert replicas is not None, "without any there are no such routes"
    return replicas


def _reply(request: Request, replicas: RouterClient) -> Response:
    plan = replicas.plan_report
    reply = ReplicaList(
        router=ServerState.of(request).config.router,
        continued=replicas.continued,
        moved=replicas.moved,
        plan=PlanReply(**dataclasses.asdict(plan)) if plan is not None else None,
        data=[ReplicaReply(**dataclasses.asdict(status)) for status in replicas.replicas()],
    )
    return Response(reply.model_dump_json(), media_type="application/json")


ROUTES = (
    Route("/admin/replicas", list_replicas, methods=["GET"]),
    Route("/admin/replicas/{number:int}/drain", drain_replica, methods=["POST"]),
    Route("/admin/replicas/{number:int}/resume", resume_replica, methods=["POST"]),
)
