"""A server with files and batches and nothing behind them: a test says what becomes of a batch."""

from __future__ import annotations

import contextlib
import email
import email.policy
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

CREATED_AT = 1_700_000_000
Fields = dict[str, Any]


class FakeBatches:
    """What /v1/files and /v1/batches answer; called with a request, it is an httpx transport.

    script: changes to the newest batch, one per time it is looked at; an exception is raised and
    a response is sent instead. expected_key: the bearer token that is asked for.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.filenames: list[str] = []
        self.batches: dict[str, Fields] = {}
        self.script: list[Fields | Exception | httpx.Response] = []
        self.before: Callable[[httpx.Request], httpx.Response | None] = lambda request: None
        self.expected_key: str | None = None
        self.requests: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.requests.append(f"{request.method} {path}")
        if self.expected_key is not None:
            if request.headers.get("authorization") != f"Bearer {self.expected_key}":
                return refusal(401, "Incorrect API key provided.")
        if (answer := self.before(request)) is not None:
            return answer
        parts = path.removeprefix("/v1/").split("/")
        return (self._file if parts[0] == "files" else self._batch)(request, parts[1:])

    def add(self, **fields: Any) -> Fields:
        """A batch that is there already."""
        batch_id = f"batch_{len(self.batches) + 1}"
        batch = {
            "id": batch_id,
            "object": "batch",
            "endpoint": "/v1/chat/completions",
            "input_file_id": "file-in",
            "completion_window": "24h",
            "status": "validating",
            "created_at": CREATED_AT,
            "expires_at": CREATED_AT + 86_400,
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
            "request_counts": counts(),
            "metadata": None,
        }
        self.batches[batch_id] = batch | fields
        return self.batches[batch_id]

    def _file(self, request: httpx.Request, parts: list[str]) -> httpx.Response:
        if not parts:
            return self._upload(request)
        if parts[0] not in self.files:
            return refusal(404, f"No such File object: {parts[0]}")
        if request.method == "DELETE":
            del self.files[parts[0]]
            return httpx.Response(200, json={"id": parts[0], "object": "file", "deleted": True})
        return httpx.Response(200, content=self.files[parts[0]])

    def _upload(self, request: httpx.Request) -> httpx.Response:
        head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
        form = email.message_from_bytes(head + request.read(), policy=email.policy.HTTP)
        parts = {part.get_param("name", header="content-disposition"): part
                 for part in form.iter_parts()}  # fmt: skip
        assert parts["purpose"].get_payload(decode=True) == b"batch"
        file_id = f"file-{len(self.files) + 1}"
        self.files[file_id] = parts["file"].get_payload(decode=True)
        self.filenames.append(parts["file"].get_filename())
        return httpx.Response(200, json={"id": file_id, "object": "file"})

    def _batch(self, request: httpx.Request, parts: list[str]) -> httpx.Response:
        if not parts:
            if request.method == "POST":
                return httpx.Response(200, json=self.add(**json.loads(request.read())))
            return self._list(request)
        batch = self.batches.get(parts[0])
        if batch is None:
            return refusal(404, f"No batch found with id '{parts[0]}'.")
        if request.method == "POST":
            return self._cancel(batch)
        if self.script:
            step = self.script.pop(0)
            if isinstance(step, Exception):
                raise step
            if isinstance(step, httpx.Response):
                return step
            batch |= step
        return httpx.Response(200, json=batch)

    def _cancel(self, batch: Fields) -> httpx.Response:
        if batch["status"] not in ("validating", "in_progress", "cancelling"):
            return refusal(400, f"Cannot cancel a batch with status '{batch['status']}'.")
        batch["status"] = "cancelling"
        return httpx.Response(200, json=batch)

    def _list(self, request: httpx.Request) -> httpx.Response:
        limit = int(request.url.params.get("limit", "20"))
        if limit > 100:
            return refusal(400, "'limit' must be at most 100.")
        ids = list(reversed(self.batches))
        after = request.url.params.get("after")
        ids = ids[ids.index(after) + 1 :] if after else ids
        data = [self.batches[batch_id] for batch_id in ids[:limit]]
        return httpx.Response(200, json={"data": data, "has_more": len(ids) > limit})


def counts(total: int = 0, completed: int = 0, failed: int = 0) -> dict[str, int]:
    return {"total": total, "completed": completed, "failed": failed}


def refusal(status: int, message: str) -> httpx.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return httpx.Response(status, json={"error": error})


@contextlib.contextmanager
def served(fake: FakeBatches, port: int = 0) -> Iterator[str]:
    """The fake behind a real port; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            host = self.headers["host"]
            request = httpx.Request(
                self.command,
                f"http://{host}{self.path}",
                headers=list(self.headers.items()),
                content=self.rfile.read(length),
            )
            answer = fake(request)
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
