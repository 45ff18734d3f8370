"""Files and batches of a server, over HTTP. Any server that has OpenAI's batch API will do."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx

from bros.batch.objects import BatchStatus
from bros.core.errors import BrosError, ConfigError

_CONNECT_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 30.0
_UPLOAD_TIMEOUT_S = 600.0
"""For what the server does with a file once it has all of it."""

_PAGE = 100
"""Most batches that a server lists at once."""

_FINAL = frozenset(status.value for status in BatchStatus if status.is_final)
_BUSY = frozenset({429, 503})
_TRY_AGAIN = frozenset({408, 425, *range(500, 600)}) - {501, 505, 507}


class RefusedError(BrosError):
    """The server answered, but not with what was asked for; the message is in its words."""


class NoAnswerError(BrosError):
    """The server cannot be reached or cannot answer now. It may later."""


class BusyError(NoAnswerError):
    """The server has done nothing of what was asked for, for the time being."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteError:
    """What is wrong with an input file. line: counted from 1; None if it is about the whole."""

    line: int | None
    code: str | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBatch:
    """A batch as the server last described it.

    Times are in Unix seconds. expected_at and at_risk: None if the server does not say.
    fields: the whole description, as it came.
    """

    id: str
    status: str
    total: int
    completed: int
    failed: int
    created_at: int | None
    expires_at: int | None
    expected_at: int | None
    at_risk: bool | None
    output_file_id: str | None
    error_file_id: str | None
    errors: tuple[RemoteError, ...]
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> RemoteBatch:
        """Raises KeyError, TypeError, ValueError or AttributeError if this is no batch."""
        counts = fields.get("request_counts") or {}
        extra = fields.get("bros") or {}
        errors = (fields.get("errors") or {}).get("data") or ()
        return cls(
            id=str(fields["id"]),
            status=str(fields["status"]),
            total=int(counts.get("total") or 0),
            completed=int(counts.get("completed") or 0),
            failed=int(counts.get("failed") or 0),
            created_at=_seconds(fields.get("created_at")),
            expires_at=_seconds(fields.get("expires_at")),
            expected_at=_seconds(extra.get("expected_at")),
            at_risk=extra.get("at_risk"),
            output_file_id=fields.get("output_file_id"),
            error_file_id=fields.get("error_file_id"),
            errors=tuple(
                RemoteError(
                    line=_seconds(error.get("line")),
                    code=error.get("code"),
                    message=str(error.get("message") or ""),
                )
                for error in errors
            ),
            fields=fields,
        )

    @property
    def done(self) -> int:
        """Rows that have an outcome, whatever it is."""
        return self.completed + self.failed

    @property
    def has_ended(self) -> bool:
        return self.status in _FINAL


class BatchClient:
    """What can be asked of a server about batches.

    Every method raises NoAnswerError if the server does not answer, RefusedError with its own
    words if it says no, and BrosError if it answers with something else than was asked for.
    """

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def upload(self, path: Path, on_read: Callable[[int], object]) -> str:
        """Send a file, piece by piece; returns its id. Raises OSError if it cannot be read.

        on_read is told the number of bytes of each piece.
        """
        with path.open("rb", buffering=0) as file, self._readable_errors():
            counted = _Counted(file, on_read)
            answer = self._http.post(
                "files",
                data={"purpose": "batch"},
                files={"file": (path.name, io.BufferedReader(counted), "application/jsonl")},
                timeout=httpx.Timeout(_UPLOAD_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
            )
            return str(_body(answer)["id"])

    def delete_file(self, file_id: str) -> None:
        with self._readable_errors():
            _body(self._http.delete(f"files/{quote(file_id, safe='')}"))

    def create(
        self, file_id: str, endpoint: str, window: str, metadata: Mapping[str, str]
    ) -> RemoteBatch:
        """Start a batch. window: as the API has it, such as 24h."""
        wanted = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": window,
            "metadata": dict(metadata) or None,
        }
        with self._readable_errors():
            return RemoteBatch.read(_body(self._http.post("batches", json=wanted)))

    def get(self, batch_id: str) -> RemoteBatch:
        with self._readable_errors():
            return RemoteBatch.read(_body(self._http.get(f"batches/{quote(batch_id, safe='')}")))

    def cancel(self, batch_id: str) -> RemoteBatch:
        """Returns the batch, which may take a while to be cancelled."""
        with self._readable_errors():
            answer = self._http.post(f"batches/{quote(batch_id, safe='')}/cancel")
            return RemoteBatch.read(_body(answer))

    def newest(self, limit: int) -> list[RemoteBatch]:
        """At most `limit` batches, newest first."""
        found: list[RemoteBatch] = []
        with self._readable_errors():
            while len(found) < limit:
                query = {"limit": str(min(_PAGE, limit - len(found)))}
                if found:
                    query["after"] = found[-1].id
                page = _body(self._http.get("batches", params=query))
                batches = [RemoteBatch.read(fields) for fields in page["data"]]
                found += batches
                if not batches or not page.get("has_more"):
                    break
        return found[:limit]

    @contextlib.contextmanager
    def content(self, file_id: str) -> Iterator[Iterator[bytes]]:
        """The content of a file, in pieces, which raise NoAnswerError if it breaks off."""
        url = f"files/{quote(file_id, safe='')}/content"
        with contextlib.ExitStack() as stack:
            with self._readable_errors():
                answer = stack.enter_context(self._http.stream("GET", url))
                if not answer.is_success:
                    answer.read()
                    raise _refusal(answer)
            yield self._pieces(answer)

    def _pieces(self, answer: httpx.Response) -> Iterator[bytes]:
        with self._readable_errors():
            yield from answer.iter_bytes()

    @contextlib.contextmanager
    def _readable_errors(self) -> Iterator[None]:
        server = str(self._http.base_url).removesuffix("/")
        try:
            yield
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise NoAnswerError(f"{server} does not answer: {reason}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BrosError(f"{server} cannot be asked: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrosError(f"{server} does not speak OpenAI's batch API: {error!r}") from error


@contextlib.contextmanager
def batch_client(
    url: str, api_key: str | None, transport: httpx.BaseTransport | None = None
) -> Iterator[BatchClient]:
    """A client of the server at `url`, with or without /v1.

    Raises ConfigError for something that is no http URL.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {url!r} must start with http:// or https://")
    base = url.rstrip("/").removesuffix("/v1") + "/v1/"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(_ANSWER_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    try:
        http = httpx.Client(base_url=base, headers=headers, timeout=timeout, transport=transport)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ConfigError(f"--url or --api-key: {error}") from None
    with http:
        yield BatchClient(http)


class _Counted(io.RawIOBase):
    """A file that tells how much of it is read."""

    def __init__(self, file: BinaryIO, on_read: Callable[[int], object]) -> None:
        self._file = file
        self._on_read = on_read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._on_read(len(data))
        return len(data)


def _seconds(value: Any) -> int | None:
    return None if value is None else int(value)


def _body(answer: httpx.Response) -> Mapping[str, Any]:
    """Raises RefusedError, NoAnswerError or ValueError."""
    if not answer.is_success:
        raise _refusal(answer)
    body = answer.json()
    if not isinstance(body, dict):
        raise ValueError("the answer is no JSON object")
    return body


def _refusal(answer: httpx.Response) -> BrosError:
    kind: type[BrosError] = RefusedError
    if answer.status_code in _BUSY:
        kind = BusyError
    elif answer.status_code in _TRY_AGAIN:
        kind = NoAnswerError
    try:
        error = answer.json()["error"]
        message = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        if answer.status_code in (404, 405):
            message = f"{answer.url} is nothing this server knows: has it a batch API?"
        else:
            message = answer.text.strip()[:200] or answer.reason_phrase
    return kind(f"{answer.status_code}: {message}")
