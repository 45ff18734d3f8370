"""What the API description says of one operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Operation:
    """reply: a model, or the media type of what is none. may_stream: as server-sent events, if
    asked to. failures: status -> model of the error, where it is not the usual one."""

    method: str
    path: str
    summary: str
    reply: type[BaseModel] | str
    body: type[BaseModel] | tuple[type[BaseModel], ...] | None = None
    parameters: tuple[dict[str, Any], ...] = ()
    may_stream: bool = False
    failures: tuple[tuple[int, type[BaseModel]], ...] = ()

    @property
    def bodies(self) -> tuple[type[BaseModel], ...]:
        """The models a body may be, none if there is no body."""
        if self.body is None:
            return ()
        return self.body if isinstance(self.body, tuple) else (self.body,)


def path_parameter(name: str, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string"},
    }


def query_parameter(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def header_parameter(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": description, "schema": schema}


def whole(low: int, high: int, default: int) -> dict[str, Any]:
    """Schema of a whole number."""
    return {"type": "integer", "minimum": low, "maximum": high, "default": default}
