"""/v1/batches: jobs of many requests, done in the time that is left"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.batch.files import Page
from bros.batch.objects import Batch, BatchStatus
from bros.batch.rows import ENDPOINTS, KNOWN_ENDPOINTS
from bros.batch.window import parse_window
from bros.core.errors import InvalidRequestError, NotFoundError
from bros.server.batch_messages import BatchList, BatchObject, CreateBatch
from bros.server.body import read_object, validate
from bros.server.jobs import Jobs
from bros.server.query import query_int
from bros.server.state import ServerState

_PAGE, _MAX_PAGE = 20, 100


async def create_batch(request: Request) -> Response:
    """Begin a job; its input is checked later."""
    jobs = Jobs.of(request)
    state = ServerState.of(request)
    wanted = validate(CreateBatch, await read_object(request, state.max_body_bytes))
    _check_endpoint(wanted.endpoint)
    window_s = parse_window(wanted.completion_window)
    now, tenant = state.clock.unix_time(), state.tenant(request)
    try:
        file = await jobs.io(jobs.files.get, tenant, wanted.input_file_id, now)
    except NotFoundError as error:
        raise NotFoundError(str(error), "input_file_id", error.code) from None
    if file.purpose != "batch":
        raise InvalidRequestError(
            f"The file {file.id!r} was uploaded for {file.purpose!r}; upload it with the "
            "purpose 'batch'.",
            param="input_file_id",
            code="invalid_file_purpose",
        )
    expires = wanted.output_expires_after
    batch = Batch(
        id=state.ids.new("batch", "_"),
        tenant=tenant,
        served_model=state.model_name,
        endpoint=wanted.endpoint,
        input_file_id=file.id,
        input_digest=file.digest,
        window=wanted.completion_window,
        status=BatchStatus.VALIDATING,
        created_at=int(now),
        expires_at=int(now) + window_s,
        metadata=wanted.metadata,
        output_life_s=None if expires is None else expires.seconds,
    )
    await jobs.io(jobs.batches.create, batch, jobs.max_open)
    jobs.runner.wake()
    return _json(BatchObject.of(batch))


async def list_batches(request: Request) -> Response:
    """A page of the tenant's batches, the newest first."""
    jobs = Jobs.of(request)
    query = request.query_params
    limit = query_int(query, "limit", _PAGE, low=1, high=_MAX_PAGE)
    page = Page(limit=limit, after=query.get("after"))
    tenant = ServerState.of(request).tenant(request)
    batches, has_more = await jobs.io(jobs.batches.page, tenant, page)
    return _json(
        BatchList(
            data=[BatchObject.of(batch) for batch in batches],
            first_id=batches[0].id if batches else None,
            last_id=batches[-1].id if batches else None,
            has_more=has_more,
        )
    )


async def retrieve_batch(request: Request) -> Response:
    """How far a job is."""
    jobs = Jobs.of(request)
    tenant = ServerState.of(request).tenant(request)
    batch = await jobs.io(jobs.batches.get, tenant, request.path_params["id"])
    return _json(BatchObject.of(batch))


async def cancel_batch(request: Request) -> Response:
    """End a job early; what is done by then is in its output file."""
    jobs = Jobs.of(request)
    state = ServerState.of(request)
    tenant, now = state.tenant(request), state.clock.unix_time()
    batch = await jobs.io(jobs.batches.cancel, tenant, request.path_params["id"], now)
    jobs.runner.wake()
    return _json(BatchObject.of(batch))


def _check_endpoint(endpoint: str) -> None:
    if endpoint in ENDPOINTS:
        return
    served = " and ".join(ENDPOINTS)
    known = endpoint in KNOWN_ENDPOINTS
    reason = "is not served here" if known else "does not exist"
    raise InvalidRequestError(
        f"The endpoint {endpoint[:100]!r} {reason}; batches can use {served}.",
        param="endpoint",
        code="unsupported_endpoint" if known else "invalid_value",
    )


def _json(reply: BatchObject | BatchList) -> Response:
    return Response(reply.model_dump_json(), media_type="application/json")


ROUTES = (
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{id}", retrieve_batch, methods=["GET"]),
    Route("/v1/batches/{id}/cancel", cancel_batch, methods=["POST"]),
)
