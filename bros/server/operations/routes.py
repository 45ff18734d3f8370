"""Routes of operators and browsers: health, metrics, version, API description, the web page,
replicas and request traces."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import bros
from bros.core.errors import BrosError, EngineDeadError, NotFoundError
from bros.core.interfaces import EngineStats, RequestTrace
from bros.core.request import Slo
from bros.core.tenants import Resource, TenantFigure
from bros.router.client import RouterClient
from bros.router.replica_set import RUNNING
from bros.server.browsers import is_loopback
from bros.server.http import (
    ITEM_CHARS,
    has_body,
    json_response,
    pieces_response,
    read_object,
    validate,
)
from bros.server.openai.schema import (
    ChoiceTrace,
    DrainRequest,
    Health,
    Objectives,
    PlanReply,
    ReplicaList,
    ReplicaReply,
    RequestTraceReply,
    TenantList,
    TenantReply,
    TenantUse,
    TraceEvent,
    TracePlacement,
    Version,
)
from bros.server.openai.stream import choices_json
from bros.server.operations.metrics import BatchFigures, sum_of_tenants
from bros.server.operations.openapi import ApiRoute, describe_api
from bros.server.state import ServerState, StoredFigures
from bros.server.tenants import OPERATOR

_STATS_TIMEOUT_S = 5.0
"""So that a scrape does not hang on a long step or a slow database."""

_JSON = "application/json"

_PROXIED = frozenset({"forwarded", "x-forwarded-for", "x-real-ip"})
"""Headers with which proxies name their client."""

_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
}


async def health(request: Request) -> Response:
    """Status 200 if the engine accepts requests, else 503."""
    state = ServerState.of(request)
    alive = state.engine.alive if state.replicas is None else state.replicas.available
    reply = Health(status="ok" if alive else "engine down")
    if state.replicas is not None:
        replicas = state.replicas.replicas()
        reply.replicas = len(replicas)
        reply.replicas_up = sum(replica.state in RUNNING for replica in replicas)
    body = reply.model_dump_json(exclude_none=True)
    if alive:
        return Response(body, media_type=_JSON)
    return Response(body, 503, {"retry-after": "5"}, _JSON)


async def live(request: Request) -> Response:
    """Status 200 while the server process answers, also while its engine is being restarted."""
    return Response(Health(status="ok").model_dump_json(exclude_none=True), media_type=_JSON)


async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    state = ServerState.of(request)
    _check_operator(request, "Metrics need")  # without --metrics-access key there is no tenant
    stats, stored = await asyncio.gather(_stats(state), _stored(state))
    return Response(
        state.metrics.render(
            stats,
            _batches(state, stored),
            None if state.sessions is None else state.sessions.figures(),
            state.replicas,
            len(asyncio.all_tasks()),
            state.engine.num_lost,
            state.engine.num_hung,
            _shown_tenants(state, stats, stored),
            state.accounts.server_figures(_held_elsewhere(state, stats, stored)),
        ),
        headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4},
    )


def _check_operator(request: Request, what: str) -> None:
    """Raises HTTPException if the caller is a tenant."""
    if ServerState.tenant(request):
        raise HTTPException(403, f"{what} the operator's key, that of --api-key.")


def _check_admin(request: Request, what: str) -> None:
    """Raises HTTPException if the caller is a tenant, or if it needs no key and is on another
    machine."""
    _check_operator(request, what)
    if not ServerState.of(request).config.api_key and not _is_local(request):
        raise HTTPException(
            403,
            f"{what} a key for requests from other machines: start the server with --api-key.",
        )


def _is_local(request: Request) -> bool:
    """Whether a request is from this machine, and is not passed on by a proxy that says so."""
    if not _PROXIED.isdisjoint(request.headers):
        return False
    return request.client is None or is_loopback(request.client.host)


async def version(request: Request) -> Response:
    """The version of the server."""
    return json_response(Version(version=bros.__version__))


async def _stats(state: ServerState) -> EngineStats | None:
    try:
        return await asyncio.wait_for(state.engine.stats(), _STATS_TIMEOUT_S)
    except (EngineDeadError, TimeoutError):
        return None


async def _stored(state: ServerState) -> StoredFigures | None:
    """None if there is no store, or if it does not answer."""
    jobs = state.jobs
    if jobs is None:
        return None
    try:
        return await asyncio.wait_for(
            jobs.query.figures(jobs.batches, jobs.responses), _STATS_TIMEOUT_S
        )
    except (BrosError, TimeoutError):
        return None


def _batches(state: ServerState, stored: StoredFigures | None) -> BatchFigures | None:
    jobs = state.jobs
    if jobs is None:
        return None
    by_status = None if stored is None else stored.by_status
    is_full = stored is not None and stored.is_full
    return BatchFigures(by_status, is_full, jobs.runner.counts, jobs.runner.rows_in_flight)


def _tenants(
    state: ServerState, stats: EngineStats | None, stored: StoredFigures | None
) -> list[TenantFigure]:
    return state.accounts.figures(_held_elsewhere(state, stats, stored))


def _held_elsewhere(
    state: ServerState, stats: EngineStats | None, stored: StoredFigures | None
) -> dict[tuple[str, Resource], int]:
    """What accounts do not count themselves: (tenant, resource) -> amount."""
    elsewhere = {} if stored is None else dict(stored.usage)
    traces = {} if stats is None else stats.traces
    grammars = {} if state.grammars is None else state.grammars.counts()
    for resource, counts in ((Resource.TRACES, traces), (Resource.CACHED_GRAMMARS, grammars)):
        elsewhere.update({(tenant, resource): count for tenant, count in counts.items()})
    return elsewhere


def _shown_tenants(
    state: ServerState, stats: EngineStats | None, stored: StoredFigures | None
) -> Sequence[TenantFigure]:
    """Where everybody may read the metrics, they do not say what a tenant does."""
    figures = _tenants(state, stats, stored)
    if state.config.metrics_access == "key" or {figure.tenant for figure in figures} == {OPERATOR}:
        return figures
    return sum_of_tenants(figures)


def service_routes(others: Sequence[ApiRoute], *, with_metrics: bool) -> list[ApiRoute]:
    """`others` and the routes of this module that every server has: all routes of the server."""
    page = importlib.resources.files("bros.server").joinpath("static/index.html").read_bytes()

    async def index(request: Request) -> Response:
        """A web page for trying the server."""
        return Response(page, headers=_PAGE_HEADERS, media_type="text/html")

    @functools.cache
    def description() -> str:
        """Made for the first request: it takes 0.15 s, which would delay the start."""
        return json.dumps(describe_api(bros.__version__, every))

    async def openapi(request: Request) -> Response:
        """This description."""
        text = await asyncio.to_thread(description)
        return Response(text, media_type="application/json")

    every = [
        *others,
        ApiRoute("GET", "/", index, "text/html"),
        ApiRoute("GET", "/health", health, Health),
        ApiRoute("GET", "/health/live", live, Health),
        ApiRoute("GET", "/health/ready", health, Health),
        *([ApiRoute("GET", "/metrics", metrics, "text/plain")] if with_metrics else []),
        ApiRoute("GET", "/version", version, Version),
        ApiRoute("GET", "/openapi.json", openapi, "application/json"),
    ]
    return every


# ---- /admin/replicas: list, drain and resume replicas.


_MAX_BODY_BYTES = 4096


async def list_replicas(request: Request) -> Response:
    """List the replicas."""
    return _reply(request, _replicas(request))


async def drain_replica(request: Request) -> Response:
    """Send no new requests to a replica. Replies at once; the replica is `drained` when its last
    request has ended."""
    replicas = _replicas(request)
    body = DrainRequest()
    if has_body(request):
        body = validate(DrainRequest, await read_object(request, _MAX_BODY_BYTES))
    replicas.drain(request.path_params["number"], move=body.move, restart=body.restart)
    return _reply(request, replicas)


async def resume_replica(request: Request) -> Response:
    """Send requests to a replica again."""
    replicas = _replicas(request)
    replicas.resume(request.path_params["number"])
    return _reply(request, replicas)


def _replicas(request: Request) -> RouterClient:
    """Raises HTTPException if the caller is not the operator."""
    _check_admin(request, "Replicas need")
    replicas = ServerState.of(request).replicas
    assert replicas is not None, "these routes exist only with a router"
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
    return json_response(reply)


ADMIN_ROUTES = (
    ApiRoute("GET", "/admin/replicas", list_replicas, ReplicaList),
    ApiRoute(
        "POST", "/admin/replicas/{number:number}/drain", drain_replica, ReplicaList, DrainRequest
    ),
    ApiRoute("POST", "/admin/replicas/{number:number}/resume", resume_replica, ReplicaList),
)


# ---- GET /admin/tenants


async def list_tenants(request: Request) -> Response:
    """List what the server holds for each tenant, its limits, and how often they refused more; and
    the same for all of them together, under the name *, where this has a limit.
    Figures of files and batches are 0 while the store does not answer, and those of traces while no
    engine does."""
    _check_admin(request, "Figures of tenants need")
    state = ServerState.of(request)
    uses: dict[str, list[TenantUse]] = {}
    stats, stored = await asyncio.gather(_stats(state), _stored(state))
    of_server = state.accounts.server_figures(_held_elsewhere(state, stats, stored))
    for figure in (*_tenants(state, stats, stored), *of_server):
        uses.setdefault(figure.tenant, []).append(
            TenantUse(
                resource=figure.resource.value,
                used=figure.used,
                limit=figure.limit,
                option=figure.option,
                refused=figure.refused,
            )
        )
    data = [TenantReply(name=name, uses=found) for name, found in uses.items()]
    return json_response(TenantList(data=data))


TENANT_ROUTES = (ApiRoute("GET", "/admin/tenants", list_tenants, TenantList),)


# ---- GET /v1/requests/{id}/trace


async def retrieve_trace(request: Request) -> Response:
    """The history of your running or recent request, and what each of its choices waited for."""
    state = ServerState.of(request)
    request_id, tenant = request.path_params["id"], state.tenant(request)
    parts = state.recent.parts(request_id)
    # Concurrently: the engine answers between two steps, so in sequence each would take a step. But
    # not all in one turn of the event loop, which may take 0.2 ms for each.
    traces: list[RequestTrace | None] = []
    for begin in range(0, len(parts), _TRACES_AT_ONCE):
        some = parts[begin : begin + _TRACES_AT_ONCE]
        traces += await asyncio.gather(*(state.engine.trace(part) for part in some))
    choices = [
        (i, trace) for i, trace in enumerate(traces) if trace is not None and trace.tenant == tenant
    ]
    if not choices:  # the same answer for unknown requests and those of other tenants
        raise NotFoundError(
            f"The request {request_id[:200]!r} is unknown; the server keeps traces of running and "
            "recent requests only.",
            param="id",
            code="request_not_found",
        )
    reply = RequestTraceReply(id=request_id, choices=[])
    return await pieces_response(
        state,
        tenant,
        lambda: choices_json(
            reply, ([_choice(*each).model_dump_json().encode()] for each in choices)
        ),
        ITEM_CHARS * len(choices),
    )


_TRACES_AT_ONCE = 50


def _choice(index: int, trace: RequestTrace) -> ChoiceTrace:
    return ChoiceTrace(
        index=index,
        request_id=trace.request_id,
        service_class=trace.service_class,
        requested_class=trace.requested_class,
        slo=_objectives(trace.slo),
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        late_tokens=trace.late_tokens,
        preemptions=trace.preemptions,
        ttft_ms=_ms_or_none(trace.ttft_s),
        tpot_ms=_ms_or_none(trace.tpot_s),
        longest_gap_ms=_ms_or_none(trace.longest_gap_s),
        slowdown=None if trace.slowdown is None else round(trace.slowdown, 3),
        waits_ms={reason: _ms(seconds) for reason, seconds in trace.waits.items()},
        events=[TraceEvent(at_ms=_ms(at_s), event=event) for at_s, event in trace.events],
        finish_reason=trace.finish_reason,
        placement=(
            None
            if trace.placement is None
            else TracePlacement(**dataclasses.asdict(trace.placement))
        ),
    )


def _objectives(slo: Slo) -> Objectives:
    return Objectives(
        ttft_ms=_ms_or_none(slo.ttft_s),
        tpot_ms=_ms_or_none(slo.tpot_s),
        gap_ms=_ms_or_none(slo.gap_s),
        deadline_ms=_ms_or_none(slo.deadline_s),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _ms_or_none(seconds: float | None) -> float | None:
    return None if seconds is None else _ms(seconds)


TRACE_ROUTES = (ApiRoute("GET", "/v1/requests/{id}/trace", retrieve_trace, RequestTraceReply),)
