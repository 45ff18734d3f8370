"""Hypothesis strategies from JSON schemas as pydantic writes them, and mutations of values."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Schema = Mapping[str, Any]
Draw = Callable[[SearchStrategy[Any]], Any]

MOST_OPTIONAL = 4
"""Optional fields of an object at a time: with half of forty, few bodies would be valid."""


def mostly(good: SearchStrategy[Any], *others: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """Hypothesis prefers the first and the last of what it chooses from: both are `good`."""
    goods = [good] * (2 + len(others))
    return st.sampled_from([*goods, *others, *goods]).flatmap(lambda chosen: chosen)


class SchemaValues:
    """Strategies for the values of schemas.

    document: has the schemas that `$ref`s point to.
    words: strings that mean something to the server; two of three strings are such.
    named: name of a field -> values of its own. Objects mostly have such a field.
    """

    def __init__(
        self, document: Schema, words: Sequence[str], named: Mapping[str, Sequence[Any]]
    ) -> None:
        self._document = document
        self._words = st.sampled_from(words)
        self._named = named
        self._referred: dict[str, SearchStrategy[Any]] = {}
        self._kinds: dict[str, Callable[[Schema], SearchStrategy[Any]]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": lambda schema: st.one_of(_integers(schema, 9), _integers(schema, 2**60)),
            "number": _numbers,
            "boolean": lambda schema: st.booleans(),
            "null": lambda schema: st.none(),
        }

    def of(self, schema: Schema) -> SearchStrategy[Any]:
        """Raises ValueError for a schema that it cannot read, so that none is left out silently."""
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return st.one_of(*(self.of(each) for each in schema[key]))
        kind = schema.get("type")
        if kind in self._kinds:
            return self._kinds[kind](schema)
        if not schema.keys() - {"title", "description", "default"}:
            return st.sampled_from([None, True, 0, "", [], {}])
        raise ValueError(f"no strategy for the schema {schema}")

    def _array(self, schema: Schema) -> SearchStrategy[list[Any]]:
        least = schema.get("minItems", 0)
        items = self.of(schema.get("items", {}))
        return st.lists(items, min_size=least, max_size=max(least, 3))

    def _reference(self, reference: str) -> SearchStrategy[Any]:
        if reference not in self._referred:
            found: Any = self._document
            for part in reference.removeprefix("#/").split("/"):
                found = found[part]
            self._referred[reference] = st.deferred(lambda: self.of(found))
        return self._referred[reference]

    def _string(self, schema: Schema) -> SearchStrategy[str]:
        least, most = schema.get("minLength", 0), schema.get("maxLength", 10**9)
        if "pattern" in schema:
            found = st.from_regex(schema["pattern"], fullmatch=True)
        else:
            text = st.text(st.characters(codec="utf-8"), min_size=least, max_size=max(least, 12))
            found = st.one_of(self._words, self._words, text)
        return found.filter(lambda text: least <= len(text) <= most)

    def _field(self, name: str, schema: Schema) -> SearchStrategy[Any]:
        if name not in self._named:
            return self.of(schema)
        return mostly(st.sampled_from(self._named[name]), self.of(schema))

    def _object(self, schema: Schema) -> SearchStrategy[dict[str, Any]]:
        properties = schema.get("properties", {})
        fields = {name: self._field(name, each) for name, each in properties.items()}
        required = schema.get("required", ())
        optional = sorted(fields.keys() - set(required))
        sizes = [min(size, len(optional)) for size in (1, 0, 2, MOST_OPTIONAL, 1)]
        known = [name for name in optional if name in self._named]
        some = st.sampled_from(optional or [""])
        name = st.one_of(st.sampled_from(known), some) if known else some
        names = st.sampled_from(sizes).flatmap(
            lambda size: st.lists(name, min_size=size, max_size=size, unique=True)
        )
        more = [
            st.dictionaries(st.from_regex(pattern, fullmatch=True), self.of(each), max_size=2)
            for pattern, each in schema.get("patternProperties", {}).items()
        ]
        if isinstance(additional := schema.get("additionalProperties"), dict):
            more.append(st.dictionaries(self._words, self.of(additional), max_size=2))

        @st.composite
        def draw_object(draw: Draw) -> dict[str, Any]:
            value = {name: draw(fields[name]) for name in (*required, *draw(names))}
            for each in more:
                value |= draw(each)
            return value

        return draw_object()


def _integers(schema: Schema, size: int) -> SearchStrategy[int]:
    """Those with an absolute value up to `size`, if the bounds allow them."""
    low = schema.get("minimum", schema.get("exclusiveMinimum", -size - 1) + 1)
    high = schema.get("maximum", schema.get("exclusiveMaximum", size + 1) - 1)
    return st.integers(low, max(low, min(high, low + size)))


def _numbers(schema: Schema) -> SearchStrategy[float]:
    return st.floats(
        schema.get("minimum", schema.get("exclusiveMinimum")),
        schema.get("maximum", schema.get("exclusiveMaximum")),
        exclude_min="exclusiveMinimum" in schema,
        exclude_max="exclusiveMaximum" in schema,
        allow_nan=False,
        allow_infinity=False,
    )


# ---- Mutations.


WRONG: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63, 10**400, -1e300, 1e-320, "", "x" * 70_000, "\x00", "../.."),
    *("{{", "{{output:y}} {{output:y}}", "{{input:x}}", "\ud800", "\u2028", "0", "-1", "1e999"),
    *([], [None], [[]], [1.5, "two", None], {}, {"a": {"b": "c"}}, {"": None}),
)
SPLIT = "\x01"
"""Stands where mutations of the JSON text put something that json.dumps cannot write."""

RAW: tuple[bytes, ...] = (
    *(b"NaN", b"Infinity", b"-1e999", b"01", b'"\xff"', b'"\\ud800"', b'{"a":1,"a":2}'),
    *(b"[" * 3000 + b"]" * 3000, b"9" * 5000, b"\x00", b""),
)


KINDS = ("valid", "valid", "without", "extra", "raw", "wrong", "wrong", "cut", "valid", "valid")
"""Of mutations. Hypothesis prefers the first and the last."""


@st.composite
def json_bodies(draw: Draw, values: SearchStrategy[Any]) -> bytes:
    """Mostly a valid body, else one with a mutation."""
    value = copy.deepcopy(draw(values))
    kind, found = draw(st.sampled_from(KINDS)), places(value)
    if kind == "valid":
        return json.dumps(value).encode()
    if kind == "cut" or not found:
        text = json.dumps(value).encode()
        end = draw(st.integers(0, len(text)))
        return draw(st.sampled_from([text[:end], text + text, b"[]", b"", b"\xff", b"null"]))
    holder, key = draw(st.sampled_from(found))
    if kind == "raw":
        holder[key] = SPLIT
        mark = json.dumps(SPLIT).encode()
        return json.dumps(value).encode().replace(mark, draw(st.sampled_from(RAW)))
    if kind == "without":
        del holder[key]
    elif kind == "extra" and isinstance(holder, dict):
        extra = draw(st.sampled_from(["extra", "", "__proto__", "model", "stream", "x" * 300]))
        holder[extra] = draw(st.sampled_from(WRONG))
    else:
        holder[key] = draw(st.sampled_from(WRONG))
    return json.dumps(value).encode()


def places(value: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of every value within a value, the holder being a dict or a list."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    found = [(value, key) for key, _ in items]
    for _, inner in items:
        found += places(inner)
    return found
