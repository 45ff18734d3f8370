"""Random JSON schemas of the kinds that programs ask for, and that small models can fill in."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

_WORDS = ("name", "age", "tags", "size", "kind", "at", "list", "a b", "ключ", 'q"uote', "x/y", "id")


def schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` different schemas of objects, arrays and scalars."""
    rng = random.Random(seed)
    return [_with_reference(rng, _schema(rng, depth=3)) for _ in range(count)]


def _with_reference(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """In some cases the schema as a definition, to which an object and a list refer."""
    if rng.random() < 0.8:
        return schema
    one = {"$ref": "#/$defs/it"}
    return {
        "$defs": {"it": schema},
        "type": "object",
        "properties": {"one": one, "more": {"type": "array", "items": one, "maxItems": 1}},
        "required": ["one"],
        "additionalProperties": False,
    }


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[Callable[[random.Random, int], dict[str, Any]]] = [_object, _object, _array]
    if depth < 3:
        kinds += [_string, _string, _integer, _number, _enum, _scalar, _formatted]
    if depth == 0:
        kinds = [_string, _integer, _number, _enum, _scalar, _formatted]
    elif rng.random() < 0.2:
        kinds = [_any_of, _one_of, _all_of]
    return rng.choice(kinds)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    schema = {
        "type": "object",
        "properties": {name: _schema(rng, max(0, depth)) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
        "title": "remark",
    }
    if rng.random() < 0.1:
        schema["additionalProperties"] = {"type": "boolean"}
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.2:
        items = [_schema(rng, max(0, depth)) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(rng, max(0, depth)),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.2:
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^(a|bc)+$", "[0-9]$"])}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if rng.random() < 0.2:
        return {"type": "integer", "multipleOf": rng.choice([2, 5, 10]), "minimum": 0}
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-20, 20)
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randint(1, 9)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values = ["red", "green", "dark green", 1, 2.5, None, True, ["x"], {"a": 1}, 'q"\n/', "ü"]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _scalar(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.sample(["boolean", "null"], rng.randint(1, 2))}


def _formatted(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4", "int32"])}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, max(0, depth - 1)) for _ in range(rng.randint(1, 3))]}


def _one_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"oneOf": [_integer(rng, 0), _string(rng, 0), {"type": "null"}][: rng.randint(1, 3)]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    schema = _object(rng, max(0, depth - 1))
    return {"allOf": [schema, {"type": "object", "required": sorted(schema["properties"])[:1]}]}
