"""However many parts of a body are wrong, one is reported, and validating holds nobody up."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import bros.server.app  # noqa: F401  (defines all models)
from bros.server.openai.schema import ClosedModel, WireModel

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
def test_one_wrong_part_of_many_is_reported(model: type[WireModel], name: str) -> None:
    for part in (1.5, "x", [], {}, None):
        assert errors(model, {name: [part] * MANY}) < FEW
        assert errors(model, {name: {str(i): part for i in range(MANY)}}) < FEW
        assert errors(model, {name: [{str(i): part for i in range(MANY)}]}) < FEW


@pytest.mark.parametrize("model", subclasses(ClosedModel), ids=lambda model: model.__name__)
def test_unknown_fields_are_not_all_reported(model: type[WireModel]) -> None:
    assert 0 < errors(model, {f"x{i}": 1 for i in range(MANY)}) < FEW
