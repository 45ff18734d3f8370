"""From schemas, patterns and choices to texts of grammars, and what is refused on the way."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core import grammars
from bros.core.errors import InvalidRequestError
from bros.core.request import MAX_AFTER_CHARS, MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from support.tier import examples


def compiled(schema: Any) -> dict[str, Any]:
    """The schema that the compiler gets."""
    text = grammars.json_schema(schema).text
    assert text.startswith("start: %json ")
    found: dict[str, Any] = json.loads(text.removeprefix("start: %json "))
    del found["x-guidance"]
    return found


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"a": {"not": {}}}}, r"properties\.a\.not: the keyword 'not'"),
        ({"$defs": {"x": {"uniqueItems": True}}}, r"\$defs\.x\.uniqueItems: the keyword"),
        ({"anyOf": [{}, {"if": {}}]}, r"anyOf\.1\.if: the keyword 'if'"),
        ({"items": [{"contains": {}}]}, r"items\.0\.contains"),
        ({"additionalProperties": {"format": "regex"}}, r"additionalProperties\.format: the form"),
        ({"$ref": "http://elsewhere/schema"}, r"\$ref: '\$ref' must name a part of the same"),
        ({"properties": []}, "properties: must be an object of schemas"),
        ({"anyOf": {}}, "anyOf: must be a list of schemas"),
        ({"items": 3}, "items: must be an object, or true or false"),
        (False, "no value is valid"),
        (nested(100), "nested more than 60 levels"),
        ("text", "must be a JSON schema"),
    ],
)
def test_what_a_schema_asks_for_in_vain_is_named_with_its_path(schema: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        grammars.json_schema(schema, param="response_format")
    assert caught.value.param == "response_format"


def test_keywords_are_not_looked_for_where_names_and_values_are() -> None:
    schema = {
        "properties": {"not": {"const": {"not": 1, "format": "x"}}, "format": {"enum": [["if"]]}},
        "default": {"uniqueItems": True},
        "uniqueItems": False,
    }
    expected = {key: value for key, value in schema.items() if key != "uniqueItems"}
    assert compiled(schema) == expected
    assert compiled(True) == {}


def test_formats_that_say_nothing_to_the_standard_are_remarks() -> None:
    fields = {"a": {"format": "int32"}, "b": {"format": "date"}, "c": {"format": "password"}}
    assert compiled({"properties": fields}) == {
        "properties": {"a": {}, "b": {"format": "date"}, "c": {}}
    }


def test_exclusive_bounds_hold_for_what_a_program_reads() -> None:
    """As text 2.00000000000000001 is above 2. That the compiler keeps these bounds is tested with
    it, in tests/engine."""
    found = compiled({"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 3})
    assert found.keys() == {"type", "minimum", "maximum"}
    assert 2 < found["minimum"] < 2 + 1e-14 and 3 - 1e-14 < found["maximum"] < 3
    both = compiled({"exclusiveMinimum": 2, "minimum": 5, "exclusiveMaximum": True})
    assert both == {"minimum": 5, "exclusiveMaximum": True}
    for same in (
        {"type": "integer", "exclusiveMinimum": 2},
        {"exclusiveMinimum": 1e20},
        {"minimum": math.inf, "maximum": 10**400},  # the compiler refuses them
    ):
        assert compiled(same) == same
    assert math.isnan(compiled({"maximum": math.nan})["maximum"])


def tagged(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("options", "excludes"),
    [
        ([{"type": "string"}, {"type": ["null", "boolean"]}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"type": "string"}, {}], False),
        ([tagged("a"), tagged("b")], True),
        ([tagged("a"), tagged("b"), {"type": "null"}], True),
        ([tagged("a"), tagged("a")], False),
        ([tagged("a"), {**tagged("b"), "required": []}], False),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/n"}], True),
        ([{"$ref": "#/$defs/loop"}, {"type": "null"}], False),
        ([{"type": "null"}, {"type": "null"}], False),
    ],
)
def test_one_of_becomes_any_of_only_if_no_two_options_hold_together(
    options: list[Any], excludes: bool
) -> None:
    defs = {"a": tagged("a"), "n": {"type": "null"}, "loop": {"$ref": "#/$defs/loop"}}
    found = compiled({"$defs": defs, "oneOf": options})
    assert ("anyOf" in found, "oneOf" in found) == (excludes, not excludes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: grammars.regex(""),
        lambda: grammars.lark("  "),
        lambda: grammars.choice([]),
        lambda: grammars.choice(["a", ""]),
        lambda: grammars.choice(["a"] * (grammars.MAX_CHOICES + 1)),
        lambda: Grammar("x" * (MAX_GRAMMAR_BYTES + 1)),
        lambda: Grammar("ä" * MAX_GRAMMAR_BYTES),
        lambda: Grammar("x", after="x" * (MAX_AFTER_CHARS + 1)),
    ],
)
def test_empty_and_huge_ones_are_refused(make: Callable[[], Grammar]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.param == "grammar"


@given(st.lists(st.text(min_size=1), min_size=1))
def test_a_choice_is_a_pattern_of_its_texts_without_slashes_and_line_breaks(
    options: list[str],
) -> None:
    text = grammars.choice(options).text
    pattern = text.removeprefix("start: /").removesuffix("/")
    assert "\n" not in pattern and re.search(r"(?<!\\)(\\\\)*/", pattern) is None
    for option in options:
        assert re.fullmatch(pattern, option)


KEYS = (
    *("type", "properties", "items", "anyOf", "oneOf", "allOf", "$ref", "$defs", "required"),
    *("format", "pattern", "enum", "const", "minLength", "exclusiveMinimum", "minimum", "not"),
    *("json_schema", "schema", "json", "regex", "choice", "grammar", "x-guidance", "a"),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False)
    | st.sampled_from(["object", "string", "json_schema", "#/$defs/a", "\ud800", "{}", ""]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=examples(300))
@given(st.dictionaries(st.sampled_from(sorted(grammars.FIELDS)), VALUES, max_size=2))
def test_whatever_the_fields_hold_there_is_a_grammar_or_an_error_that_names_one(
    fields: dict[str, Any],
) -> None:
    try:
        grammar = grammars.from_fields(fields)
    except InvalidRequestError as error:
        assert error.param and error.param.split(".")[0] in grammars.FIELDS
    else:
        assert grammar is None or grammar.text.encode()


def test_gbnf_is_told_from_lark() -> None:
    assert grammars.is_gbnf('root ::= "a"') and grammars.is_gbnf("# x\n a-b ::= c")
    assert not grammars.is_gbnf('start: "::="') and not grammars.is_gbnf("start: /a ::= b/")


def test_the_field_of_a_grammar_does_not_make_it_another_one() -> None:
    one, two = grammars.json_object(param="a"), grammars.json_object(param="b")
    assert one == two and hash(one) == hash(two)
    assert SamplingParams(grammar=one).with_changes(n=2).grammar is one
