"""Uploads as multipart/form-data: the file goes to the disk as it comes, fields are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import anyio.to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from bros.batch.bodies import BodyWriter
from bros.core.errors import InvalidRequestError
from bros.server.errors import BodyTooLargeError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_UPLOAD_BYTES = 512 * 2**20
_WRITTEN_AT_ONCE = 2**20
_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_NAME_CHARS = 50
_FRAME_BYTES = 2**16
"""Room for everything in an upload that is not the file."""


@dataclass(slots=True)
class Upload:
    """filename: None if there was no file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def read_upload(request: Request, body: BodyWriter) -> Upload:
    """Write the part called `file` to `body`, which is not finished here, and collect the others.

    Raises BodyTooLargeError, StoreFullError, or InvalidRequestError for what is no such form.
    """
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
            if total > MAX_UPLOAD_BYTES + _FRAME_BYTES:
                raise too_large
            parser.write(chunk)
            if len(parts.content) >= _WRITTEN_AT_ONCE:
                await _write(body, parts)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequestError(f"The form is broken: {error}.", code="invalid_form") from None
    await _write(body, parts)
    if body.num_bytes > MAX_UPLOAD_BYTES:
        raise too_large
    if not parts.ended:
        raise InvalidRequestError("The form ends too early.", code="invalid_form")
    return parts.upload


async def _write(body: BodyWriter, parts: _Parts) -> None:
    content, parts.content = bytes(parts.content), bytearray()
    if content:
        await anyio.to_thread.run_sync(body.write, content)


class _Parts:
    """What the parser has found so far. content: of the file, not written yet."""

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
            _refuse(f"The field {name!r} is one too many.", name)
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
