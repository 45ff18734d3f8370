"""/v1/files: uploads, and what batches came to"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from bros.batch.files import Page
from bros.batch.objects import FILE_LIFE_S, MAX_INPUT_BYTES, StoredFile
from bros.core.errors import InvalidRequestError
from bros.server.batch_messages import (
    DeletedFile,
    ExpiresAfter,
    FileList,
    FileObject,
    FilePurpose,
)
from bros.server.body import validate
from bros.server.jobs import Jobs
from bros.server.protocol import WireModel
from bros.server.query import query_choice, query_int
from bros.server.state import ServerState
from bros.server.uploads import Upload, read_upload

MAX_PAGE = 10_000
_ORDERS = ("desc", "asc")


class _UploadFields(WireModel):
    purpose: FilePurpose
    expires_after: ExpiresAfter | None = None


async def create_file(request: Request) -> Response:
    """Keep an upload."""
    jobs = Jobs.of(request)
    state = ServerState.of(request)
    with jobs.files.bodies.new() as body:
        upload = await read_upload(request, body)
        fields = validate(_UploadFields, _fields(upload))
        if upload.filename is None:
            raise InvalidRequestError(
                "Missing required parameter: 'file'.", "file", "missing_required_parameter"
            )
        if fields.purpose == "batch" and body.num_bytes > MAX_INPUT_BYTES:
            raise InvalidRequestError(
                f"The input of a batch has at most {MAX_INPUT_BYTES} bytes; this file has "
                f"{body.num_bytes}.",
                param="file",
                code="file_too_large",
            )
        await jobs.io(body.finish)
        created_at = int(state.clock.unix_time())
        life_s = FILE_LIFE_S if fields.purpose == "batch" else None
        if fields.expires_after is not None:
            life_s = fields.expires_after.seconds
        file = StoredFile(
            id=state.ids.new("file"),
            tenant=state.tenant(request),
            digest=body.digest,
            num_bytes=body.num_bytes,
            filename=upload.filename,
            purpose=fields.purpose,
            created_at=created_at,
            expires_at=None if life_s is None else created_at + life_s,
        )
        return _json(FileObject.of(await jobs.io(jobs.files.add, body, file)))


async def list_files(request: Request) -> Response:
    """A page of the tenant's files."""
    jobs = Jobs.of(request)
    state, query = ServerState.of(request), request.query_params
    page = Page(
        limit=query_int(query, "limit", MAX_PAGE, low=1, high=MAX_PAGE),
        after=query.get("after"),
        newest_first=query_choice(query, "order", _ORDERS) == "desc",
    )
    files, has_more = await jobs.io(
        jobs.files.page,
        state.tenant(request),
        page,
        state.clock.unix_time(),
        query.get("purpose"),
    )
    return _json(
        FileList(
            data=[FileObject.of(file) for file in files],
            first_id=files[0].id if files else None,
            last_id=files[-1].id if files else None,
            has_more=has_more,
        )
    )


async def retrieve_file(request: Request) -> Response:
    """What is known of a file."""
    return _json(FileObject.of(await _file(request)))


async def file_content(request: Request) -> Response:
    """The file itself."""
    jobs = Jobs.of(request)
    file = await _file(request)
    path = await jobs.io(jobs.files.body, file)
    return FileResponse(path, filename=file.filename, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    """Forget a file; a batch that reads it goes on."""
    jobs = Jobs.of(request)
    state, file_id = ServerState.of(request), request.path_params["id"]
    now = state.clock.unix_time()
    await jobs.io(jobs.files.delete, state.tenant(request), file_id, now)
    return _json(DeletedFile(id=file_id))


async def _file(request: Request) -> StoredFile:
    state, jobs = ServerState.of(request), Jobs.of(request)
    tenant, now = state.tenant(request), state.clock.unix_time()
    return await jobs.io(jobs.files.get, tenant, request.path_params["id"], now)


def _fields(upload: Upload) -> dict[str, object]:
    """As JSON would have them: `expires_after[seconds]` is a field of `expires_after`."""
    fields: dict[str, object] = dict(upload.fields)
    anchor = fields.pop("expires_after[anchor]", None)
    seconds = fields.pop("expires_after[seconds]", None)
    if anchor is not None or seconds is not None:
        digits = isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 10
        fields["expires_after"] = {
            "anchor": anchor,
            "seconds": int(str(seconds)) if digits else seconds,
        }
    return fields


def _json(reply: FileObject | FileList | DeletedFile) -> Response:
    return Response(reply.model_dump_json(), media_type="application/json")


ROUTES = (
    Route("/v1/files", create_file, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{id}", retrieve_file, methods=["GET"]),
    Route("/v1/files/{id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{id}/content", file_content, methods=["GET"]),
)
