"""From the bytes of a request to a checked model, whatever the bytes are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from bros.core.errors import InvalidRequestError
from bros.server.errors import BodyTooLargeError
from bros.server.protocol import ModelRequest
from bros.server.state import ServerState

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=ModelRequest)


async def read_request(request: Request, model: type[R]) -> R:
    """The body as a `model`, meant for the model that is served here.

    Raises what read_object raises, NotFoundError for another model, and InvalidRequestError for
    a field that is wrong.
    """
    state = ServerState.of(request)
    body = validate(model, await read_object(request, state.max_body_bytes))
    state.check_model(body.model)
    return body


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body.

    Raises BodyTooLargeError, or InvalidRequestError for anything else that is wrong with it:
    not UTF-8, not JSON, NaN or Infinity, nested too deeply (200 levels), no object.
    """
    body = await _read_limited(request, max_bytes)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(
            f"The body is not valid JSON: {error}.", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.", code="invalid_type")
    return value


def validate(model: type[M], value: Mapping[str, Any]) -> M:
    """Check `value` against a model; raises InvalidRequestError naming the first wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        raise _explain(details) from None


async def _read_limited(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = BodyTooLargeError(f"The request body is larger than {max_bytes} bytes.")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def _explain(details: ErrorDetails) -> InvalidRequestError:
    param = _path(details["loc"])
    kind = details["type"]
    if kind == "missing":
        return InvalidRequestError(
            f"Missing required parameter: '{param}'.", param, "missing_required_parameter"
        )
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    reason = details["msg"][:1].lower() + details["msg"][1:]
    return InvalidRequestError(f"Invalid value for '{param}': {reason}.", param, code)


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> messages[0].content"""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")[:200]
