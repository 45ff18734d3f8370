"""Fields of a chat that ask for outputs whose grammar is meant to harm: it compiles for long, its
masks take long, or it is refused only for what it is made of."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]


def _schema(schema: object) -> Fields:
    asked = {"name": "it", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": asked}}


def _structured(**asked: object) -> Fields:
    return {"structured_outputs": asked}


def _options(number: int) -> dict[str, object]:
    return {"anyOf": [{"properties": {f"a{number}_{i}": {}}} for i in range(4)]}


def _nested(depth: int) -> dict[str, object]:
    return functools.reduce(
        lambda inner, _: {"type": "array", "items": inner}, range(depth), {"type": "integer"}
    )


_MUTUAL = {
    name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in "abc"], "title": name}
    for name in "abc"
}
_TREE = {
    "type": "object",
    "properties": {side: {"$ref": "#"} for side in ("left", "right")},
    "required": ["left", "right"],
}

HOSTILE: Mapping[str, Fields] = {
    "many properties": _schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
    ),
    "product of choices": _schema({"type": "object", "allOf": [_options(n) for n in range(8)]}),
    "larger product": _schema({"type": "object", "allOf": [_options(n) for n in range(12)]}),
    "large enum": _schema({"enum": [f"value {i}" for i in range(10_000)]}),
    "deep": _schema(_nested(60)),
    "endless tree": _schema(_TREE),
    "circle": _schema({"$ref": "#/$defs/a", "$defs": _MUTUAL}),
    "slow pattern": _schema({"type": "string", "pattern": "^(a|aa)+$"}),
    "exponential pattern": _schema({"type": "string", "pattern": "^(.*a){20}.{20}$"}),
    "counted pattern": _schema({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}),
    "long string": _schema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "long array": _schema({"type": "array", "items": {}, "minItems": 10**6}),
    "large prime": _schema({"type": "integer", "multipleOf": 9_999_991}),
    "nested regex": _structured(regex="(" * 50_000 + "a" + ")" * 50_000),
    "counted regex": _structured(regex="(a{1,1000}){1,1000}"),
    "exponential regex": _structured(regex="(.*a.*b){12}"),
    "alternatives": _structured(grammar="start: " + " | ".join(f'"w{i}"' for i in range(25_000))),
    "long name": _structured(grammar="start: " + "x" * 1_000_000),
    "just small enough": _structured(
        grammar="start: " + " | ".join(f'"{i:05}"' for i in range(23_000))
    ),
    "choices": _structured(choice=[f"choice {i}" for i in range(10_000)]),
}
