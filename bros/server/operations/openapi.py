"""Routes with a description, and the OpenAPI document at /openapi.json built from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.server.openai.schema import ErrorEnvelope

Model = type[BaseModel]
Schemas = Mapping[str, Mapping[str, Any]]
"""Parameter name -> JSON schema with a description."""

_REF = "#/components/schemas/{model}"


class _NumberConvertor(IntegerConvertor):
    """`{name:number}` in a path. `int` also has those with thousands of digits, on which Python's
    int fails."""

    regex = "[0-9]{1,9}"


register_url_convertor("number", _NumberConvertor())

_PATH_PARAMETERS: Mapping[str, str] = MappingProxyType(
    {
        "id": "The id from the response that created it, such as file-…, batch_… or chatcmpl-…",
        "model": "The id of the model in /v1/models",
        "number": "The number of the replica, from 0",
        "sid": "The id of the session",
        "rid": "The id of the request",
        "vid": "The id of the variable",
    }
)

_TRY_AGAIN: Mapping[str, Any] = MappingProxyType(
    {
        "description": (
            "Code rate_limit_exceeded: too many requests are waiting. Code overloaded: the "
            "objectives of a real-time request cannot be met now. Code tenant_limit_exceeded: the "
            "API key has reached one of its limits, which the message names"
        ),
        "headers": {
            "Retry-After": {
                "description": "Seconds to wait before a retry",
                "schema": {"type": "integer", "minimum": 1},
            }
        },
    }
)


class ApiRoute(Route):
    """A route of one method. Its summary is the first paragraph of the handler's docstring.

    reply: a model, or a media type.
    body: the models that a JSON body can have.
    query, headers: optional parameters.
    form: the JSON schema of a body that is multipart/form-data.
    streams: whether it can reply with server-sent events, and with status 429.
    errors: status -> model of the body, if that is not ErrorEnvelope.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Callable[[Request], Awaitable[Response]],
        reply: Model | str,
        *body: Model,
        query: Schemas = MappingProxyType({}),
        headers: Schemas = MappingProxyType({}),
        form: Mapping[str, Any] = MappingProxyType({}),
        streams: bool = False,
        errors: Mapping[int, Model] = MappingProxyType({}),
    ) -> None:
        super().__init__(path, handler, methods=[method])
        self.method = method.lower()
        paragraph = (handler.__doc__ or "").split("\n\n")[0]
        self.summary = " ".join(paragraph.split()).removesuffix(".")
        self.reply = reply
        self.bodies = body
        self.query = query
        self.headers = headers
        self.form = form
        self.streams = streams
        self.errors = errors

    def describe(self) -> dict[str, Any]:
        """An OpenAPI operation."""
        described: dict[str, Any] = {"summary": self.summary, "responses": self._responses()}
        if parameters := self._parameters():
            described["parameters"] = parameters
        if self.bodies:
            schemas = [_reference(body) for body in self.bodies]
            schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            described["requestBody"] = {"required": True, "content": _json_content(schema)}
        if self.form:
            content = {"multipart/form-data": {"schema": dict(self.form)}}
            described["requestBody"] = {"required": True, "content": content}
        return described

    def _responses(self) -> dict[str, Any]:
        if isinstance(self.reply, str):
            content: dict[str, Any] = {self.reply: {"schema": {}}}
        else:
            content = _json_content(_reference(self.reply))
        failure = _json_content(_reference(ErrorEnvelope))
        responses: dict[str, Any] = {
            "200": {"description": "Success", "content": content},
            "default": {"description": "Error", "content": failure},
        }
        if self.streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
            responses["429"] = {**_TRY_AGAIN, "content": failure}
        for status, model in self.errors.items():
            content = _json_content(_reference(model))
            responses[str(status)] = {"description": "Error", "content": content}
        return responses

    def _parameters(self) -> list[dict[str, Any]]:
        parameters: list[dict[str, Any]] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": _PATH_PARAMETERS[name],
                "schema": {
                    "type": "integer" if isinstance(convertor, IntegerConvertor) else "string"
                },
            }
            for name, convertor in self.param_convertors.items()
        ]
        for where, schemas in (("query", self.query), ("header", self.headers)):
            for name, schema in schemas.items():
                rest = {key: value for key, value in schema.items() if key != "description"}
                description = schema["description"]
                parameters.append(
                    {"name": name, "in": where, "description": description, "schema": rest}
                )
        return parameters


def describe_api(version: str, routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path_format, {})[route.method] = route.describe()
    return {
        "openapi": "3.1.0",
        "info": {"title": "bros", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": _schemas(routes),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}, {}],
    }


def _schemas(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    bodies = dict.fromkeys(body for route in routes for body in route.bodies)
    replies: list[Model] = [ErrorEnvelope]
    for route in routes:
        replies += [route.reply] if isinstance(route.reply, type) else []
        replies += route.errors.values()
    _, document = models_json_schema(
        [(model, "validation") for model in bodies]
        + [(model, "serialization") for model in dict.fromkeys(replies)],
        ref_template=_REF,
    )
    schemas: dict[str, Any] = document["$defs"]
    return schemas


def _json_content(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(model: Model) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
