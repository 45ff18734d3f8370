"""The validators of request models are functions.

Pydantic reads their signatures to see whether they take a second argument, and the signature of a
class is not always that of its call: an enum class has (*values) from Python 3.12 on, which fails
when the server starts.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    WrapSerializer,
    WrapValidator,
    create_model,
)

import bros.server

KINDS = (
    *(AfterValidator, BeforeValidator, PlainValidator, WrapValidator),
    *(PlainSerializer, WrapSerializer),
)


def subclasses(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def functions_of(annotation: Any) -> Iterator[Any]:
    """What the validators and serializers in a type call."""
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, KINDS):
            yield mark.func
    for part in typing.get_args(annotation):
        yield from functions_of(part)


def functions(model: type[BaseModel]) -> Iterator[Any]:
    for field in model.model_fields.values():
        yield from (mark.func for mark in field.metadata if isinstance(mark, KINDS))
        yield from functions_of(field.annotation)


def test_validators_of_all_models_are_functions() -> None:
    for module in pkgutil.walk_packages(bros.server.__path__, "bros.server."):
        importlib.import_module(module.name)
    models = [kind for kind in subclasses(BaseModel) if kind.__module__.startswith("bros.")]
    found = [(model.__name__, called) for model in models for called in functions(model)]
    assert len(models) > 50 and len(found) > 10
    assert [entry for entry in found if not inspect.isfunction(entry[1])] == []


def test_a_class_is_seen_wherever_it_stands() -> None:
    plain = Annotated[str, AfterValidator(str)]
    nested = list[Annotated[str, BeforeValidator(bytes)] | None]
    model = create_model("Model", plain=(plain, ""), nested=(nested, []))
    assert list(functions(model)) == [str, bytes]
