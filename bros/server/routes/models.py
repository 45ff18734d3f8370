"""GET /v1/models and /v1/models/{model}"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.server.replies import ModelCard, ModelList
from bros.server.state import ServerState


async def list_models(request: Request) -> Response:
    """The one model there is."""
    reply = ModelList(data=[_card(ServerState.of(request))])
    return Response(reply.model_dump_json(), media_type="application/json")


async def retrieve_model(request: Request) -> Response:
    """The model under the name it was asked for."""
    state = ServerState.of(request)
    state.check_model(request.path_params["model"])
    return Response(_card(state).model_dump_json(), media_type="application/json")


def _card(state: ServerState) -> ModelCard:
    info = state.engine.info
    return ModelCard(
        id=state.model_name,
        created=state.created,
        root=info.model,
        max_model_len=info.max_model_len,
    )


ROUTES = (
    Route("/v1/models", list_models, methods=["GET"]),
    # A path, because model ids of hubs contain a slash.
    Route("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
)
