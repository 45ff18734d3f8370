"""What operators and browsers ask for: health, metrics, version, API description, a page."""

from __future__ import annotations

import asyncio
import importlib.resources
import json
from collections.abc import Mapping

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import bros
from bros.core.errors import BrosError, EngineDeadError
from bros.core.interfaces import EngineStats
from bros.router.member import RUNNING
from bros.server.batch_metrics import BatchFigures
from bros.server.openapi import describe_api
from bros.server.replies import Health, Version
from bros.server.state import ServerState

_STATS_TIMEOUT_S = 5.0
"""A scrape must not hang because a step takes long, or the database of batches does."""

_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
}


async def health(request: Request) -> Response:
    """200 if the engine runs and takes requests, else 503."""
    state = ServerState.of(request)
    alive = state.engine.alive if state.replicas is None else state.replicas.takes
    reply = Health(status="ok" if alive else "engine down")
    if state.replicas is not None:
        replicas = state.replicas.replicas()
        reply.replicas = len(replicas)
        reply.replicas_up = sum(replica.state in RUNNING for replica in replicas)
    body = reply.model_dump_json(exclude_none=True)
    return Response(body, 200 if alive else 503, media_type="application/json")


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    state = ServerState.of(request)
    return Response(
        state.metrics.render(
            await _stats(state),
            await _batches(state),
            None if state.sessions is None else state.sessions.figures(),
            state.replicas,
        ),
        headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4},
    )


async def version(request: Request) -> Response:
    """The version of bros."""
    reply = Version(version=bros.__version__)
    return Response(reply.model_dump_json(), media_type="application/json")


async def _stats(state: ServerState) -> EngineStats | None:
    try:
        return await asyncio.wait_for(state.engine.stats(), _STATS_TIMEOUT_S)
    except (EngineDeadError, TimeoutError):
        return None


async def _batches(state: ServerState) -> BatchFigures | None:
    jobs = state.jobs
    if jobs is None:
        return None
    try:
        asking = jobs.counts.by_status(jobs.batches)
        by_status: Mapping[str, int] | None = await asyncio.wait_for(asking, _STATS_TIMEOUT_S)
    except (BrosError, TimeoutError):
        by_status = None
    return BatchFigures(by_status, jobs.runner.counts, jobs.runner.rows_in_flight)


def routes(*, has_jobs: bool, has_sessions: bool, has_replicas: bool = False) -> tuple[Route, ...]:
    """The page and the API description are made once, here."""
    page = importlib.resources.files("bros.server").joinpath("static/index.html").read_bytes()
    api = json.dumps(
        describe_api(
            bros.__version__,
            has_jobs=has_jobs,
            has_sessions=has_sessions,
            has_replicas=has_replicas,
        )
    )

    async def index(request: Request) -> Response:
        return Response(page, headers=_PAGE_HEADERS, media_type="text/html")

    async def openapi(request: Request) -> Response:
        return Response(api, media_type="application/json")

    return (
        Route("/", index, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
    )
