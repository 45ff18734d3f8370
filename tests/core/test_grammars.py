"""From schemas, patterns and choices to texts of grammars, and what is refused on the way."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

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
        ({"propertyNames": {"type": "string", "maxLength": 3}}, "propertyNames: the keyword"),
        ({"propertyNames": {"type": "integer"}}, "propertyNames: the keyword"),
        ({"propertyNames": False}, "propertyNames: the keyword"),
        ({"additionalProperties": {"format": "regex"}}, r"additionalProperties\.format: the form"),
        ({"$ref": "http://elsewhere/schema"}, r"\$ref: '\$ref' must name a part of the same"),
        ({"properties": []}, "properties: must be an object of schemas"),
        ({"anyOf": {}}, "anyOf: must be a list of schemas"),
        ({"items": 3}, "items: must be an object, or true or false"),
        ({"properties": {"a": {"type": "any"}}}, r"properties\.a\.type: must be one of null, bool"),
        ({"items": {"type": ["null", []]}}, r"items\.type: must be one of"),
        ({"type": []}, "type: must be one of"),
        (False, "no value is valid"),
        (nested(100), "nested more than 60 levels"),
        ("text", "must be a JSON schema"),
        (
            type("Point", (), {"model_json_schema": None}),
            "pydantic model is its model_json_schema",
        ),
    ],
)
def test_what_a_schema_asks_for_in_vain_is_named_with_its_path(schema: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        grammars.json_schema(schema, param="response_format")
    assert caught.value.param == "response_format"


def test_the_schema_of_a_format_is_next_to_its_type_or_in_json_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    forms: list[dict[str, Any]] = [
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    ]
    for form in forms:
        found = grammars.from_fields({"response_format": form})
        assert found == grammars.json_schema(schema, param="response_format")
    for form in (
        {"type": "json_object"},
        {"type": "json_object", "schema": {}},
        {"type": "json_schema", "json_schema": {"name": "type"}},
    ):
        found = grammars.from_fields({"response_format": form})
        assert found == grammars.json_object(param="response_format")
    for inner in (schema, {"name": "n", "$defs": {}}):
        with pytest.raises(InvalidRequestError, match="into 'response_format.json_schema.schema'"):
            grammars.from_fields({"response_format": {"type": "json_schema", "json_schema": inner}})


def test_keywords_are_not_looked_for_where_names_and_values_are() -> None:
    schema = {
        "properties": {"not": {"const": {"not": 1, "format": "x"}}, "format": {"enum": [["if"]]}},
        "default": {"uniqueItems": True},
        "uniqueItems": False,
    }
    expected = {key: value for key, value in schema.items() if key != "uniqueItems"}
    assert compiled(schema) == expected
    assert compiled(True) == {}


def test_names_that_may_be_any_string_are_no_limit() -> None:
    """zod writes that for each record, and Vercel's AI SDK sends it."""
    record = {"type": "object", "additionalProperties": {"type": "number"}}
    for names in ({"type": "string"}, {"type": "string", "description": "d"}, {}, True):
        assert compiled({**record, "propertyNames": names}) == record


def test_formats_that_say_nothing_to_the_standard_are_remarks() -> None:
    fields = {"a": {"format": "int32"}, "b": {"format": "uuid"}, "c": {"format": "password"}}
    assert compiled({"properties": fields}) == {
        "properties": {"a": {}, "b": {"format": "uuid"}, "c": {}}
    }
    assert compiled({"$schema": "https://example.com/mine", "type": "null"}) == {"type": "null"}


@given(st.integers(0, 9999), st.integers(0, 13), st.integers(0, 32))
@settings(max_examples=examples(300))
def test_dates_are_those_of_the_calendar(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    try:
        datetime.date(year, month, day)
        exists = True
    except ValueError:
        exists = False
    found = compiled({"format": "date"})
    assert bool(re.search(found["pattern"], text)) is exists
    at = compiled({"type": "string", "format": "date-time", "pattern": "^2"})
    assert at["pattern"] == "^2"
    assert bool(re.search(at["allOf"][0]["pattern"], f"{text}T10:20:59.5+02:00")) is exists


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("23:59:59Z", True),
        ("00:00:00.123-23:59", True),
        ("23:59:60Z", False),
        ("24:00:00Z", False),
        ("10:00:00", False),
        ("10:00:00+24:00", False),
    ],
)
def test_times_are_those_of_a_clock(text: str, valid: bool) -> None:
    assert bool(re.search(compiled({"format": "time"})["pattern"], text)) is valid


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"const": 2**53 + 1}, "const"),
        ({"items": {"enum": ["a", {"ids": [3, -(2**60) - 1]}]}}, r"items\.enum"),
        ({"multipleOf": 10**40 + 1}, "multipleOf"),
    ],
)
def test_numbers_that_would_come_out_as_others_are_refused(schema: Any, path: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"at {path}: the number -?\d+ is not one"):
        grammars.json_schema(schema)


def test_bounds_that_no_double_can_be_are_moved_inward() -> None:
    most = 2**63 - 1
    schema = {"type": "integer", "minimum": -most, "maximum": most}
    assert compiled(schema) == {"type": "integer", "minimum": 1024 - 2**63, "maximum": 2**63 - 1024}
    exact = {"type": "integer", "minimum": -(2**63), "maximum": 2**60, "enum": [2**60, 5]}
    assert compiled(exact) == exact


@pytest.mark.parametrize(
    ("least", "more", "kept"),
    [
        (1, {}, 1),
        (2, {"required": ["a", "b", "b"]}, None),
        (2, {"additionalProperties": False}, 2),
        (2, {}, "refused"),
        (3, {"required": ["a", "b", "b"]}, "refused"),
        (2, {"additionalProperties": False, "patternProperties": {"^x": {}}}, "refused"),
    ],
)
def test_members_are_counted_only_where_no_name_can_come_twice(
    least: int, more: dict[str, Any], kept: object
) -> None:
    schema = {"type": "object", "minProperties": least, **more}
    if kept == "refused":
        with pytest.raises(InvalidRequestError, match="at minProperties: may be more than 1"):
            grammars.json_schema(schema)
    else:
        assert compiled(schema).get("minProperties") == kept


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


def tagged(*values: object) -> dict[str, Any]:
    kind = {"const": values[0]} if len(values) == 1 else {"enum": list(values)}
    return {"type": "object", "properties": {"kind": kind}, "required": ["kind"]}


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
        ([tagged("a", "b"), tagged("c", 1)], True),
        ([tagged("a", "b"), tagged("c", "b")], False),
        ([tagged(1), tagged(1.0)], False),
        ([tagged(1), tagged(True)], True),
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


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"


class Wolf(BaseModel):
    kind: Literal["dog", "wolf"] = "dog"
    howls: Literal["yes"] = "yes"


class Dog(BaseModel):
    kind: Literal["hound"] = "hound"
    howls: Literal["no"] = "no"


Hound = Annotated[Wolf | Dog, Field(discriminator="howls")]


class Owner(BaseModel):
    pet: Annotated[Cat | Hound, Field(discriminator="kind")]


def test_a_discriminator_tells_options_apart_of_which_none_is_required() -> None:
    found = compiled(Owner.model_json_schema())["properties"]["pet"]
    cat, dogs = found["anyOf"]
    assert cat == {"$ref": "#/$defs/Cat", "required": ["kind"]}
    assert dogs["required"] == ["kind"]
    assert [each["required"] for each in dogs["anyOf"]] == [["howls"], ["howls"]]


def test_a_discriminator_whose_values_overlap_tells_nothing_apart() -> None:
    options = [{**tagged("a", "b"), "required": []}, {**tagged("b"), "required": []}]
    for tag in ("kind", "other", 3):
        found = compiled({"oneOf": options, "discriminator": {"propertyName": tag}})
        assert "oneOf" in found and "anyOf" not in found


@pytest.fixture
def shown_values(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """What is called for each value of a tag that is looked at."""
    counting = mock.Mock(side_effect=grammars._shown_value)
    monkeypatch.setattr(grammars, "_shown_value", counting)
    return counting


def test_options_that_occur_many_times_are_compared_a_bounded_number_of_times(
    shown_values: mock.Mock,
) -> None:
    """Each of 4,000 choices has the same two options, of 90 values each."""
    defs = {name: tagged(*(f"{name}{n}" for n in range(90))) for name in "ab"}
    choice = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    compiled({"$defs": defs, "prefixItems": [choice] * 4000})
    assert shown_values.call_count == 2 * 90


def test_nested_choices_are_looked_into_a_bounded_number_of_times(
    shown_values: mock.Mock,
) -> None:
    """4 levels of choices, each 40 times the next one: 2.5 million paths in 2 KB."""
    defs = {"0": {**tagged(*(f"a{n}" for n in range(50))), "required": []}}
    for level in range(1, 4):
        defs[f"{level}"] = {"anyOf": [{"$ref": f"#/$defs/{level - 1}"}] * 40}
    options = [{"$ref": "#/$defs/3"}, {**tagged("b"), "required": []}]
    found = compiled({"$defs": defs, "oneOf": options, "discriminator": {"propertyName": "kind"}})
    assert [each["required"] for each in found["anyOf"]] == [["kind"], ["kind"]]
    assert shown_values.call_count == 50 + 1


def test_a_place_of_thousands_of_digits_is_no_place() -> None:
    schema = {"oneOf": [{"$ref": "#/oneOf/" + "1" * 5000}, {"$ref": "#/oneOf/7"}]}
    assert "oneOf" in compiled(schema)


LOOSE = [
    ({"not": {}, "type": "object"}, {"type": "object"}),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1]}}, None),
    ({"pattern": r"^(?!x)[(?=]\d"}, {}),
    ({"pattern": r"^[(?=]\\1"}, {"pattern": r"^[(?=]\\1"}),
    ({"patternProperties": {"(?<=a)b": {}}, "additionalProperties": False}, {}),
    ({"required": None}, {}),
    ({"type": "any", "properties": {"a": {"type": ["STRING"]}}}, {"properties": {"a": {}}}),
    (
        {"properties": {"a": {}}, "required": ["a", "b"], "additionalProperties": False},
        {"properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
    ),
    ({"$ref": "#/$defs/none", "$defs": {"x": 3}}, {"$defs": {"x": {}}}),
    ({"$ref": "http://elsewhere"}, {}),
    ({"const": 2**53 + 1, "type": "integer"}, {"type": "integer"}),
    ({"oneOf": [{"minLength": 1}, {}]}, {"anyOf": [{"minLength": 1}, {}]}),
    ({"oneOf": [{}], "anyOf": [{"type": "null"}]}, {"anyOf": [{"type": "null"}]}),
    ({"minProperties": 2, "properties": []}, {}),
    ({"format": "regex"}, {}),
    (
        {"minProperties": 2, "patternProperties": {"(?=x)": {}}, "additionalProperties": False},
        {},
    ),
]


def test_what_is_loose_does_not_change_any_more() -> None:
    for schema, _ in LOOSE:
        loose = grammars.loosened(schema)
        assert grammars.loosened(loose) == compiled(loose) == loose
    dates = {"properties": {"a": {"format": "date"}, "b": {"format": "time", "pattern": "^1"}}}
    assert grammars.loosened(grammars.loosened(dates)) == grammars.loosened(dates)


@pytest.mark.parametrize(("schema", "loose"), LOOSE)
def test_of_a_loosened_schema_only_keywords_are_left_out(
    schema: dict[str, Any], loose: dict[str, Any] | None
) -> None:
    if loose is None:
        loose = {name: value for name, value in schema.items() if name != "uniqueItems"}
    assert grammars.loosened(schema) == loose
    if "$ref" not in schema:
        assert grammars.loosened({"items": schema}) == {"items": loose}


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
