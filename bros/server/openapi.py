"""The API description at /openapi.json, from the same models that check and write messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from bros.server import batch_messages, protocol, replies
from bros.server.errors import MAX_RETRY_AFTER_S

_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class _Operation:
    method: str
    path: str
    summary: str
    reply: type[BaseModel] | str
    body: type[BaseModel] | None = None
    parameters: tuple[dict[str, Any], ...] = ()


_SLO_HEADERS = tuple(
    {
        "name": f"x-slo-{objective}-ms",
        "in": "header",
        "description": (
            f"{text}, in milliseconds; also as x-llm-d-slo-{objective}-ms. "
            "The field slo of the body wins"
        ),
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }
    for objective, text in (
        ("ttft", "Arrival to first token"),
        ("tpot", "Between two tokens"),
        ("deadline", "Arrival to last token"),
    )
)

_TRY_AGAIN: Mapping[str, Any] = MappingProxyType(
    {
        "description": (
            "Code rate_limit_exceeded: too many requests wait. Code overloaded: the objectives "
            "of a real-time request cannot be met now"
        ),
        "headers": {
            "Retry-After": {
                "description": "Seconds after which trying again makes sense",
                "schema": {"type": "integer", "minimum": 1, "maximum": MAX_RETRY_AFTER_S},
            }
        },
    }
)


def _path_parameter(name: str, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string"},
    }


def _whole(low: int, high: int, default: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high, "default": default}


def _query_parameter(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": schema}


_AFTER = _query_parameter("after", "Id that the page before ended with", {"type": "string"})
_FILE_ID = (_path_parameter("id", "The id of the file"),)
_BATCH_ID = (_path_parameter("id", "The id of the batch"),)

_JOB_OPERATIONS = (
    _Operation(
        "post",
        "/v1/files",
        "Upload a file, as multipart/form-data with the fields file and purpose, and maybe "
        "expires_after[anchor] and expires_after[seconds]",
        batch_messages.FileObject,
    ),
    _Operation(
        "get",
        "/v1/files",
        "A page of the files there are",
        batch_messages.FileList,
        parameters=(
            _AFTER,
            _query_parameter("limit", "Most files", _whole(1, 10_000, 10_000)),
            _query_parameter("order", "By creation", {"enum": ["desc", "asc"]}),
            _query_parameter("purpose", "Only those for this", {"type": "string"}),
        ),
    ),
    _Operation("get", "/v1/files/{id}", "One file", batch_messages.FileObject, None, _FILE_ID),
    _Operation(
        "delete",
        "/v1/files/{id}",
        "Delete a file; a batch that reads it goes on",
        batch_messages.DeletedFile,
        None,
        _FILE_ID,
    ),
    _Operation(
        "get",
        "/v1/files/{id}/content",
        "What is in a file",
        "application/octet-stream",
        None,
        _FILE_ID,
    ),
    _Operation(
        "post",
        "/v1/batches",
        "Begin a batch over an uploaded file",
        batch_messages.BatchObject,
        batch_messages.CreateBatch,
    ),
    _Operation(
        "get",
        "/v1/batches",
        "A page of the batches there are, the newest first",
        batch_messages.BatchList,
        parameters=(_AFTER, _query_parameter("limit", "Most batches", _whole(1, 100, 20))),
    ),
    _Operation("get", "/v1/batches/{id}", "One batch", batch_messages.BatchObject, None, _BATCH_ID),
    _Operation(
        "post",
        "/v1/batches/{id}/cancel",
        "End a batch early; what is done by then is in its output file",
        batch_messages.BatchObject,
        None,
        _BATCH_ID,
    ),
)

_OPERATIONS = (
    _Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation; with stream, as server-sent events",
        replies.ChatCompletion,
        protocol.ChatCompletionRequest,
        _SLO_HEADERS,
    ),
    _Operation(
        "post",
        "/v1/completions",
        "Continue prompts; with stream, as server-sent events",
        replies.Completion,
        protocol.CompletionRequest,
        _SLO_HEADERS,
    ),
    _Operation("get", "/v1/models", "The models there are", replies.ModelList),
    _Operation(
        "get",
        "/v1/models/{model}",
        "One model",
        replies.ModelCard,
        parameters=(_path_parameter("model", "Its id in /v1/models"),),
    ),
    _Operation(
        "get",
        "/v1/requests/{id}/trace",
        "What became of a running or recent request, and what it waited for",
        replies.RequestTraceReply,
        parameters=(_path_parameter("id", "The id of its response, such as chatcmpl-..."),),
    ),
    _Operation(
        "post",
        "/tokenize",
        "Token ids of a text or a conversation",
        replies.TokenizeReply,
        protocol.TokenizeRequest,
    ),
    _Operation(
        "post",
        "/detokenize",
        "The text of token ids",
        replies.DetokenizeReply,
        protocol.DetokenizeRequest,
    ),
    _Operation("get", "/health", "200 if the engine runs, else 503", replies.Health),
    _Operation("get", "/metrics", "Metrics in Prometheus' text format", "text/plain"),
    _Operation("get", "/version", "The version of the server", replies.Version),
    _Operation("get", "/openapi.json", "This description", "application/json"),
    _Operation("get", "/", "A page to try the server with", "text/html"),
)


def describe_api(version: str, *, has_jobs: bool) -> dict[str, Any]:
    """An OpenAPI 3.1 document. has_jobs: the server has files and batches."""
    operations = _OPERATIONS + (_JOB_OPERATIONS if has_jobs else ())
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "bros", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": _schemas(operations),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}, {}],
    }


def _schemas(operations: Sequence[_Operation]) -> dict[str, Any]:
    models: dict[type[BaseModel], None] = {replies.ErrorEnvelope: None}
    for operation in operations:
        for model in (operation.body, operation.reply):
            if isinstance(model, type):
                models[model] = None
    inputs = {operation.body for operation in operations}
    _, document = models_json_schema(
        [(model, "validation" if model in inputs else "serialization") for model in models],
        ref_template=_REF,
    )
    schemas: dict[str, Any] = document["$defs"]
    return schemas


def _describe(operation: _Operation) -> dict[str, Any]:
    reply = operation.reply
    media, schema = (
        (reply, {}) if isinstance(reply, str) else ("application/json", _reference(reply))
    )
    content: dict[str, Any] = {media: {"schema": schema}}
    failure = {"application/json": {"schema": _reference(replies.ErrorEnvelope)}}
    responses: dict[str, Any] = {
        "200": {"description": "What was asked for", "content": content},
        "default": {"description": "What went wrong", "content": failure},
    }
    if operation.parameters is _SLO_HEADERS:
        content["text/event-stream"] = {"schema": {"type": "string"}}
        responses["429"] = {**_TRY_AGAIN, "content": failure}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(operation.body)}},
        }
    return described


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
