"""The API description at /openapi.json, from the same models that check and write messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from bros.server.batches import schema as batch_messages
from bros.server.errors import MAX_RETRY_AFTER_S
from bros.server.openai import schema as protocol
from bros.server.openai import schema as replies
from bros.server.operations.operation import (
    Operation,
    header_parameter,
    path_parameter,
    query_parameter,
    whole,
)
from bros.server.sessions.operations import OPERATIONS as SESSION_OPERATIONS

_REF = "#/components/schemas/{model}"


_GENERATION_HEADERS = (
    *(
        header_parameter(
            f"x-slo-{objective}-ms",
            f"{text}, in milliseconds; also as x-llm-d-slo-{objective}-ms. The field slo of the "
            "body wins",
            {"type": "number", "exclusiveMinimum": 0},
        )
        for objective, text in (
            ("ttft", "Arrival to first token"),
            ("tpot", "Between two tokens"),
            ("deadline", "Arrival to last token"),
        )
    ),
    header_parameter(
        "x-bros-session",
        "The session the request is part of, also as metadata.bros_session; one that does not "
        "begin with sess- comes into being",
        {"type": "string"},
    ),
    header_parameter(
        "x-bros-node",
        "What the request is called in the graph of its session, also as metadata.bros_node",
        {"type": "string"},
    ),
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


_AFTER = query_parameter("after", "Id that the page before ended with", {"type": "string"})
_FILE_ID = (path_parameter("id", "The id of the file"),)
_BATCH_ID = (path_parameter("id", "The id of the batch"),)

_JOB_OPERATIONS = (
    Operation(
        "post",
        "/v1/files",
        "Upload a file, as multipart/form-data with the fields file and purpose, and maybe "
        "expires_after[anchor] and expires_after[seconds]",
        batch_messages.FileObject,
    ),
    Operation(
        "get",
        "/v1/files",
        "A page of the files there are",
        batch_messages.FileList,
        parameters=(
            _AFTER,
            query_parameter("limit", "Most files", whole(1, 10_000, 10_000)),
            query_parameter("order", "By creation", {"enum": ["desc", "asc"]}),
            query_parameter("purpose", "Only those for this", {"type": "string"}),
        ),
    ),
    Operation("get", "/v1/files/{id}", "One file", batch_messages.FileObject, None, _FILE_ID),
    Operation(
        "delete",
        "/v1/files/{id}",
        "Delete a file; a batch that reads it goes on",
        batch_messages.DeletedFile,
        None,
        _FILE_ID,
    ),
    Operation(
        "get",
        "/v1/files/{id}/content",
        "What is in a file",
        "application/octet-stream",
        None,
        _FILE_ID,
    ),
    Operation(
        "post",
        "/v1/batches",
        "Begin a batch over an uploaded file",
        batch_messages.BatchObject,
        batch_messages.CreateBatch,
    ),
    Operation(
        "get",
        "/v1/batches",
        "A page of the batches there are, the newest first",
        batch_messages.BatchList,
        parameters=(_AFTER, query_parameter("limit", "Most batches", whole(1, 100, 20))),
    ),
    Operation("get", "/v1/batches/{id}", "One batch", batch_messages.BatchObject, None, _BATCH_ID),
    Operation(
        "post",
        "/v1/batches/{id}/cancel",
        "End a batch early; what is done by then is in its output file",
        batch_messages.BatchObject,
        None,
        _BATCH_ID,
    ),
)

_REPLICA = (path_parameter("number", "Of the replica, from 0 on"),)

_REPLICA_OPERATIONS = (
    Operation("get", "/admin/replicas", "The engines there are", replies.ReplicaList),
    Operation(
        "post",
        "/admin/replicas/{number}/drain",
        "Send nothing new to a replica. Returns at once",
        replies.ReplicaList,
        protocol.DrainRequest,
        _REPLICA,
    ),
    Operation(
        "post",
        "/admin/replicas/{number}/resume",
        "Send requests to a replica again",
        replies.ReplicaList,
        None,
        _REPLICA,
    ),
)

_OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation; with stream, as server-sent events",
        replies.ChatCompletion,
        protocol.ChatCompletionRequest,
        _GENERATION_HEADERS,
        may_stream=True,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue prompts; with stream, as server-sent events",
        replies.Completion,
        protocol.CompletionRequest,
        _GENERATION_HEADERS,
        may_stream=True,
    ),
    Operation("get", "/v1/models", "The models there are", replies.ModelList),
    Operation(
        "get",
        "/v1/models/{model}",
        "One model",
        replies.ModelCard,
        parameters=(path_parameter("model", "Its id in /v1/models"),),
    ),
    Operation(
        "get",
        "/v1/requests/{id}/trace",
        "What became of a running or recent request, and what it waited for",
        replies.RequestTraceReply,
        parameters=(path_parameter("id", "The id of its response, such as chatcmpl-..."),),
    ),
    Operation(
        "post",
        "/tokenize",
        "Token ids of a text or a conversation",
        replies.TokenizeReply,
        protocol.TokenizeRequest,
    ),
    Operation(
        "post",
        "/detokenize",
        "The text of token ids",
        replies.DetokenizeReply,
        protocol.DetokenizeRequest,
    ),
    Operation("get", "/health", "200 if the engine runs, else 503", replies.Health),
    Operation("get", "/metrics", "Metrics in Prometheus' text format", "text/plain"),
    Operation("get", "/version", "The version of the server", replies.Version),
    Operation("get", "/openapi.json", "This description", "application/json"),
    Operation("get", "/", "A page to try the server with", "text/html"),
)


def describe_api(
    version: str, *, has_jobs: bool, has_sessions: bool, has_replicas: bool = False
) -> dict[str, Any]:
    """An OpenAPI 3.1 document. has_jobs: the server has files and batches."""
    operations = (
        *_OPERATIONS,
        *(_JOB_OPERATIONS if has_jobs else ()),
        *(SESSION_OPERATIONS if has_sessions else ()),
        *(_REPLICA_OPERATIONS if has_replicas else ()),
    )
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


def _schemas(operations: Sequence[Operation]) -> dict[str, Any]:
    models: dict[type[BaseModel], None] = {replies.ErrorEnvelope: None}
    for operation in operations:
        failures = (model for _, model in operation.failures)
        for model in (*operation.bodies, operation.reply, *failures):
            if isinstance(model, type):
                models[model] = None
    inputs = {body for operation in operations for body in operation.bodies}
    _, document = models_json_schema(
        [(model, "validation" if model in inputs else "serialization") for model in models],
        ref_template=_REF,
    )
    schemas: dict[str, Any] = document["$defs"]
    return schemas


def _describe(operation: Operation) -> dict[str, Any]:
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
    if operation.may_stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
        responses["429"] = {**_TRY_AGAIN, "content": failure}
    for status, model in operation.failures:
        schema = _reference(model)
        responses[str(status)] = {
            "description": "What went wrong",
            "content": {"application/json": {"schema": schema}},
        }
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.bodies:
        bodies = [_reference(body) for body in operation.bodies]
        described["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {"schema": bodies[0] if len(bodies) == 1 else {"anyOf": bodies}}
            },
        }
    return described


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
