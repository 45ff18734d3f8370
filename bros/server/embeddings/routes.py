"""POST /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from bros.server.embeddings.calls import POOLING_CALLS, PoolingExchange
from bros.server.embeddings.schema import (
    EmbeddingList,
    EmbeddingRequest,
    RerankReply,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from bros.server.http import CancelOnDisconnect, read_held
from bros.server.openai.calls import slo_of, tier_of
from bros.server.openai.routes import OBJECTIVE_HEADERS
from bros.server.operations.openapi import ApiRoute
from bros.server.state import ServerState


async def create_embeddings(request: Request) -> Response:
    """The embeddings of texts: vectors that are the closer, the more the texts say the same."""
    return await _answer(request, "/v1/embeddings")


async def score(request: Request) -> Response:
    """How relevant texts are to others: with a model's score head, or by their embeddings."""
    return await _answer(request, "/v1/score")


async def rerank(request: Request) -> Response:
    """Order documents by how relevant they are to a query."""
    return await _answer(request, "/v1/rerank")


async def _answer(request: Request, endpoint: str) -> Response:
    state, make = ServerState.of(request), POOLING_CALLS[endpoint]
    arrival_s = state.arrival_s(request)
    call, held = await read_held(request, state.max_body_bytes, lambda fields: make(state, fields))
    exchange = PoolingExchange(
        state,
        call,
        tier=tier_of(call.body),
        slo=slo_of(call.body, request.headers, state.engine.info.default_slo),
        tenant=state.tenant(request),
        arrival_s=arrival_s,
        held=held,
    )
    async with CancelOnDisconnect(request.receive, state.stopping):
        return await exchange.respond()


ROUTES = (
    ApiRoute(
        "POST",
        "/v1/embeddings",
        create_embeddings,
        EmbeddingList,
        EmbeddingRequest,
        headers=OBJECTIVE_HEADERS,
    ),
    ApiRoute("POST", "/v1/score", score, ScoreList, ScoreRequest, headers=OBJECTIVE_HEADERS),
    ApiRoute("POST", "/score", score, ScoreList, ScoreRequest, headers=OBJECTIVE_HEADERS),
    ApiRoute("POST", "/v1/rerank", rerank, RerankReply, RerankRequest, headers=OBJECTIVE_HEADERS),
    # Where clients of Jina and of Cohere look for it.
    ApiRoute("POST", "/rerank", rerank, RerankReply, RerankRequest, headers=OBJECTIVE_HEADERS),
    ApiRoute("POST", "/v2/rerank", rerank, RerankReply, RerankRequest, headers=OBJECTIVE_HEADERS),
)
