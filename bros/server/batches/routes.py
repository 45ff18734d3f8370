"""/v1/batches and /v1/files"""

from __future__ import annotations

import asyncio
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import anyio.to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from bros.batch.files import BodyWriter, Page
from bros.batch.objects import (
    FILE_LIFE_S,
    MAX_INPUT_BYTES,
    Batch,
    BatchStatus,
    StoredFile,
    parse_window,
)
from bros.batch.rows import check_endpoint
from bros.core.clock import thread_cpu_s
from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.tenants import Resource
from bros.server.batches.schema import (
    MAX_LIFE_S,
    MIN_LIFE_S,
    BatchList,
    BatchObject,
    CreateBatch,
    DeletedFile,
    ExpiresAfter,
    FileList,
    FileObject,
    FilePurpose,
)
from bros.server.errors import BodyTooLargeError
from bros.server.http import (
    ITEM_CHARS,
    check_coding,
    json_response,
    list_pieces,
    pieces_response,
    query_choice,
    query_int,
    read_object,
    validate,
)
from bros.server.openai.schema import WireModel
from bros.server.operations.openapi import ApiRoute, Schemas
from bros.server.state import Jobs, ServerState

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


_BATCH_PAGE, _MAX_BATCH_PAGE = 20, 100


async def create_batch(request: Request) -> Response:
    """Create a batch from an uploaded file. Its lines are validated asynchronously."""
    jobs = Jobs.of(request)
    state = ServerState.of(request)
    wanted = validate(CreateBatch, await read_object(request, state.max_body_bytes))
    check_endpoint(wanted.endpoint)
    window_s = parse_window(wanted.completion_window)
    now, tenant = state.clock.unix_time(), state.tenant(request)
    try:
        file = await jobs.read(tenant, jobs.files.get, tenant, wanted.input_file_id, now)
    except NotFoundError as error:
        raise NotFoundError(str(error), "input_file_id", error.code) from None
    if file.purpose != "batch":
        raise InvalidRequestError(
            f"The file {file.id!r} has the purpose {file.purpose!r}; upload it with the purpose "
            "'batch'.",
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
        rt_slowdown=wanted.rt_slowdown,
    )
    await jobs.io(tenant, jobs.batches.create, batch, state.accounts.limits(tenant))
    jobs.runner.wake()
    return json_response(BatchObject.of(batch))


async def list_batches(request: Request) -> Response:
    """A page of your batches, the newest first."""
    jobs = Jobs.of(request)
    state, query = ServerState.of(request), request.query_params
    limit = query_int(query, "limit", _BATCH_PAGE, low=1, high=_MAX_BATCH_PAGE)
    page = Page(limit=limit, after=query.get("after"))
    tenant = state.tenant(request)
    batches, has_more = await jobs.read(tenant, jobs.batches.page, tenant, page)
    reply = BatchList(
        data=[],
        first_id=batches[0].id if batches else None,
        last_id=batches[-1].id if batches else None,
        has_more=has_more,
    )
    return await pieces_response(
        state,
        tenant,
        lambda: list_pieces(reply, map(BatchObject.of, batches)),
        ITEM_CHARS * sum(1 + len(batch.errors) for batch in batches),
    )


async def retrieve_batch(request: Request) -> Response:
    """The state and progress of a batch."""
    jobs = Jobs.of(request)
    tenant = ServerState.of(request).tenant(request)
    batch = await jobs.read(tenant, jobs.batches.get, tenant, request.path_params["id"])
    return json_response(BatchObject.of(batch))


async def cancel_batch(request: Request) -> Response:
    """Cancel a batch. Its output file has the rows that were answered by then."""
    jobs = Jobs.of(request)
    state = ServerState.of(request)
    tenant, now = state.tenant(request), state.clock.unix_time()
    batch = await jobs.io(tenant, jobs.batches.cancel, tenant, request.path_params["id"], now)
    jobs.runner.wake()
    return json_response(BatchObject.of(batch))


_QUERY: Schemas = {
    "after": {"type": "string", "description": "The last id of the previous page"},
    "limit": {
        "type": "integer",
        "minimum": 1,
        "maximum": _MAX_BATCH_PAGE,
        "default": _BATCH_PAGE,
        "description": "Most batches on the page",
    },
}

_BATCHES = (
    ApiRoute("POST", "/v1/batches", create_batch, BatchObject, CreateBatch),
    ApiRoute("GET", "/v1/batches", list_batches, BatchList, query=_QUERY),
    ApiRoute("GET", "/v1/batches/{id}", retrieve_batch, BatchObject),
    ApiRoute("POST", "/v1/batches/{id}/cancel", cancel_batch, BatchObject),
)


# ---- Uploads as multipart/form-data: the file is written to disk chunk by chunk.


MAX_UPLOAD_BYTES = 512 * 2**20
_WRITE_BYTES = 2**20
_PARSED_AT_ONCE = 2**14
"""Bytes of a form that are parsed in one turn of the event loop: 12 ms if all of them look like the
beginnings of boundaries."""

_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_NAME_CHARS = 50
_OVERHEAD_BYTES = 2**16
"""Allowance for the parts of an upload other than the file."""


@dataclass(slots=True)
class Upload:
    """The form fields of an upload.

    filename: None if there was no file.
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def read_upload(
    request: Request,
    body: BodyWriter,
    count: Callable[[int], None] = lambda num_bytes: None,
    spend: Callable[[float], None] = lambda cpu_s: None,
) -> Upload:
    """Write the part `file` to `body` (the caller finishes it) and return the other fields.

    count: is told the bytes of the file so far, before they are on disk; may raise.
    spend: is told the CPU seconds of parsing.
    Raises BodyTooLargeError, StoreFullError, InvalidRequestError for an invalid form, and what
    `count` raises.
    """
    check_coding(request)
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidRequestError(
            "Send the file as multipart/form-data, with the fields 'file' and 'purpose'.",
            code="invalid_content_type",
        )
    parts = _Parts()
    too_large = BodyTooLargeError(f"A file has at most {MAX_UPLOAD_BYTES} bytes.")
    total = 0
    try:
        parser = MultipartParser(options[b"boundary"], parts.callbacks())
        async for chunk in request.stream():
            total += len(chunk)
            if total > MAX_UPLOAD_BYTES + _OVERHEAD_BYTES:
                raise too_large
            for begin in range(0, len(chunk), _PARSED_AT_ONCE):
                if begin:
                    await asyncio.sleep(0)
                begun_s = thread_cpu_s()
                try:
                    parser.write(chunk[begin : begin + _PARSED_AT_ONCE])
                finally:
                    spend(thread_cpu_s() - begun_s)
            count(body.num_bytes + len(parts.content))
            if len(parts.content) >= _WRITE_BYTES:
                await _write(body, parts)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequestError(f"The form is malformed: {error}.", code="invalid_form") from None
    await _write(body, parts)
    if body.num_bytes > MAX_UPLOAD_BYTES:
        raise too_large
    if not parts.ended:
        raise InvalidRequestError("The form is incomplete.", code="invalid_form")
    return parts.upload


async def _write(body: BodyWriter, parts: _Parts) -> None:
    content, parts.content = bytes(parts.content), bytearray()
    if content:
        await anyio.to_thread.run_sync(body.write, content)


class _Parts:
    """Callbacks of the form parser, and what they have read so far.

    content: bytes of the file that are not written to disk yet.
    """

    def __init__(self) -> None:
        self.upload = Upload()
        self.content = bytearray()
        self.ended = False
        self._header, self._value = b"", b""
        self._disposition = b""
        self._name: str | None = None
        self._is_file = False
        self._text = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        self._disposition, self._name, self._is_file = b"", None, False
        self._text.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")[:_MAX_NAME_CHARS]
        filename = options.get(b"filename")
        if name == "file":
            if filename is None or self.upload.filename is not None:
                _refuse("Send one part called 'file', with a file name.", "file")
            self._is_file = True
            self.upload.filename = filename.decode("utf-8", "replace").replace("\0", "")[:255]
        elif name in self.upload.fields or len(self.upload.fields) >= _MAX_FIELDS:
            _refuse(f"The field {name!r} is given twice, or there are too many fields.", name)
        else:
            self._name = name

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.content += data[start:end]
            return
        self._text += data[start:end]
        if len(self._text) > _MAX_FIELD_BYTES:
            _refuse(f"The field {self._name!r} is too long.", self._name)

    def _on_part_end(self) -> None:
        if self._name is not None:
            self.upload.fields[self._name] = self._text.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self.ended = True


def _refuse(message: str, param: str | None) -> NoReturn:
    raise InvalidRequestError(message, param=param, code="invalid_form")


# ---- /v1/files: uploads, and the results of batches


_MAX_FILE_PAGE = 10_000
_ORDERS = ("desc", "asc")


class _UploadFields(WireModel):
    purpose: FilePurpose
    expires_after: ExpiresAfter | None = None


async def create_file(request: Request) -> Response:
    """Upload a file, as multipart/form-data with the fields file and purpose, and optionally
    expires_after[anchor] and expires_after[seconds]."""
    jobs = Jobs.of(request)
    state = ServerState.of(request)
    tenant = state.tenant(request)
    limits, server_limits = state.accounts.limits(tenant), state.accounts.server_limits
    now, stored = state.clock.unix_time(), jobs.stored_bytes
    stored.read(
        tenant, await jobs.read(tenant, jobs.files.check_room, tenant, now, limits, server_limits)
    )
    with (
        state.accounts.count(tenant, Resource.FILE_BYTES, 0) as held,
        jobs.files.bodies.new() as body,
    ):

        def count(num_bytes: int) -> None:
            state.accounts.check_growth(held, num_bytes, stored.elsewhere(tenant))
            held.resize(num_bytes)

        state.accounts.check_growth(held, _least_bytes(request), stored.elsewhere(tenant))
        spend = partial(state.accounts.spend, tenant)
        upload = await read_upload(request, body, count, spend)
        fields = validate(_UploadFields, _fields(upload))
        if upload.filename is None:
            raise InvalidRequestError(
                "Missing required parameter: 'file'.", "file", "missing_required_parameter"
            )
        if fields.purpose == "batch" and body.num_bytes > MAX_INPUT_BYTES:
            raise InvalidRequestError(
                f"An input file of a batch has at most {MAX_INPUT_BYTES} bytes; this file has "
                f"{body.num_bytes}.",
                param="file",
                code="file_too_large",
            )
        await jobs.io(tenant, body.finish)
        created_at = int(state.clock.unix_time())
        life_s = FILE_LIFE_S if fields.purpose == "batch" else None
        if fields.expires_after is not None:
            life_s = fields.expires_after.seconds
        file = StoredFile(
            id=state.ids.new("file"),
            tenant=tenant,
            digest=body.digest,
            num_bytes=body.num_bytes,
            filename=upload.filename,
            purpose=fields.purpose,
            created_at=created_at,
            expires_at=None if life_s is None else created_at + life_s,
        )
        file = await jobs.io(tenant, jobs.files.add, body, file, limits, server_limits)
        stored.add(tenant, file.num_bytes)
        return json_response(FileObject.of(file))


def _least_bytes(request: Request) -> int:
    """Bytes that the file of an upload has at least, as far as its headers tell; of one that is too
    large, the most that a file may have."""
    declared = request.headers.get("content-length", "")
    num_bytes = int(declared[:20]) if declared.isdecimal() else 0
    return min(max(0, num_bytes - _OVERHEAD_BYTES), MAX_UPLOAD_BYTES)


async def list_files(request: Request) -> Response:
    """A page of your files."""
    jobs = Jobs.of(request)
    state, query = ServerState.of(request), request.query_params
    page = Page(
        limit=query_int(query, "limit", _MAX_FILE_PAGE, low=1, high=_MAX_FILE_PAGE),
        after=query.get("after"),
        newest_first=query_choice(query, "order", _ORDERS) == "desc",
    )
    tenant = state.tenant(request)
    files, has_more = await jobs.read(
        tenant,
        jobs.files.page,
        tenant,
        page,
        state.clock.unix_time(),
        query.get("purpose"),
    )
    reply = FileList(
        data=[],
        first_id=files[0].id if files else None,
        last_id=files[-1].id if files else None,
        has_more=has_more,
    )
    return await pieces_response(
        state,
        tenant,
        lambda: list_pieces(reply, map(FileObject.of, files)),
        ITEM_CHARS * len(files),
    )


async def retrieve_file(request: Request) -> Response:
    """The description of a file."""
    return json_response(FileObject.of(await _file(request)))


_RANGE = re.compile(r"(\d+)-(\d*)|-\d+", re.ASCII)
_MAX_RANGE_CHARS = 1000


def _is_range(text: str) -> bool:
    """Whether a Range header is well-formed (RFC 9110, 14.1), and not longer than it has to be."""
    unit, _, listed = text.partition("=")
    if len(text) > _MAX_RANGE_CHARS or unit.lower() != "bytes":
        return False
    # Commas with nothing between them are allowed in a list (RFC 9110, 5.6.1.2).
    ranges = [part.strip() for part in listed.split(",") if part.strip()]
    return bool(ranges) and all(map(_is_byte_range, ranges))


def _is_byte_range(text: str) -> bool:
    match = _RANGE.fullmatch(text)
    return match is not None and not (match[2] and int(match[1]) > int(match[2]))


async def file_content(request: Request) -> Response:
    """The content of a file."""
    jobs = Jobs.of(request)
    file = await _file(request)
    path = await jobs.read(file.tenant, jobs.files.body, file)
    if not _is_range(request.headers.get("range", "")):
        # RFC 9110, 14.2: one that is malformed may be ignored. FileResponse would refuse it.
        headers: list[tuple[bytes, bytes]] = request.scope["headers"]
        request.scope["headers"] = [pair for pair in headers if pair[0] != b"range"]
    return FileResponse(path, filename=file.filename, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    """Delete a file. A batch that uses it continues."""
    jobs = Jobs.of(request)
    state, file_id = ServerState.of(request), request.path_params["id"]
    tenant, now = state.tenant(request), state.clock.unix_time()
    await jobs.io(tenant, jobs.files.delete, tenant, file_id, now)
    return json_response(DeletedFile(id=file_id))


async def _file(request: Request) -> StoredFile:
    state, jobs = ServerState.of(request), Jobs.of(request)
    tenant, now = state.tenant(request), state.clock.unix_time()
    return await jobs.read(tenant, jobs.files.get, tenant, request.path_params["id"], now)


def _fields(upload: Upload) -> dict[str, object]:
    """The form fields as nested JSON: expires_after[seconds] becomes a field of expires_after."""
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


_FILE_QUERY: Schemas = {
    "after": {"type": "string", "description": "The last id of the previous page"},
    "limit": {
        "type": "integer",
        "minimum": 1,
        "maximum": _MAX_FILE_PAGE,
        "default": _MAX_FILE_PAGE,
        "description": "Most files on the page",
    },
    "order": {"enum": list(_ORDERS), "description": "Order by time of creation"},
    "purpose": {"type": "string", "description": "Only files with this purpose"},
}

_UPLOAD_FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "With a file name"},
        "purpose": {"enum": list(typing.get_args(FilePurpose))},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_LIFE_S, "maximum": MAX_LIFE_S},
    },
    "required": ["file", "purpose"],
}

_FILES = (
    ApiRoute("POST", "/v1/files", create_file, FileObject, form=_UPLOAD_FORM),
    ApiRoute("GET", "/v1/files", list_files, FileList, query=_FILE_QUERY),
    ApiRoute("GET", "/v1/files/{id}", retrieve_file, FileObject),
    ApiRoute("DELETE", "/v1/files/{id}", delete_file, DeletedFile),
    ApiRoute("GET", "/v1/files/{id}/content", file_content, "application/octet-stream"),
)


ROUTES = (*_FILES, *_BATCHES)
