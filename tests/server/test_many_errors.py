"""However many parts of a body are wrong, few errors are collected, and the first one is named."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import bros.server.app  # noqa: F401  (defines all models)
from bros.core.errors import InvalidRequestError
from bros.server.http import validate
from bros.server.openai.schema import (
    ChatCompletionRequest,
    ClosedModel,
    DrainRequest,
    WireModel,
)

USER = {"role": "user", "content": "Hello"}
MANY = 1000
FEW = 80
"""One error per field that is missing, and some for each form of a field that has several."""


def subclasses(kind: type[WireModel]) -> list[type[WireModel]]:
    found = [kind]
    for child in kind.__subclasses__():
        found += subclasses(child)
    return sorted(set(found), key=lambda model: (model.__module__, model.__name__))


FIELDS = [
    pytest.param(model, field.alias or name, id=f"{model.__name__}.{name}")
    for model in subclasses(WireModel)
    for name, field in model.model_fields.items()
]


def errors(model: type[WireModel], fields: dict[str, object]) -> int:
    try:
        model.model_validate(fields)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(("model", "name"), FIELDS)
def test_errors_of_many_parts_are_not_all_collected(model: type[WireModel], name: str) -> None:
    for part in (1.5, "x", [], {}, None):
        assert errors(model, {name: [part] * MANY}) < FEW
        assert errors(model, {name: {str(i): part for i in range(MANY)}}) < FEW
        assert errors(model, {name: [{str(i): part for i in range(MANY)}]}) < FEW


@pytest.mark.parametrize("model", subclasses(ClosedModel), ids=lambda model: model.__name__)
def test_unknown_fields_are_not_all_collected(model: type[WireModel]) -> None:
    assert 0 < errors(model, {f"x{i}": 1 for i in range(MANY)}) < FEW


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [USER, USER, 5]}, "messages[2]"),
        ({"messages": [USER, {"role": "user", "content": [1]}]}, "messages[1].content"),
        ({"messages": [USER], "stop_token_ids": [1, 2, "x"]}, "stop_token_ids[2]"),
        ({"messages": [USER], "logit_bias": {"5": 1, "6": "x"}}, "logit_bias.6"),
        (
            {
                "messages": [USER],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": 5},
                },
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_the_wrong_part_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        validate(ChatCompletionRequest, fields)
    assert raised.value.param == param


def test_a_body_of_too_many_fields_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="Invalid value of the body: it has 1000 fields"):
        validate(DrainRequest, {f"x{i}": 1 for i in range(MANY)})
