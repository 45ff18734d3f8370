"""How transforms are written one after another, and that no text and no source is too much."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.errors import InvalidRequestError
from bros.semantic.transforms import REGISTRY, TransformError, parse_transforms

STEPS = st.sampled_from(
    [
        *("strip", "lower", "upper", "truncate(9)", 'template("<{}>")', "lines", "lines[0]"),
        *("split(a)[1:]", "comma_list", "numbered_list[-1]", "markdown_list", "join(' ')"),
        *("regex(a(b*)c?, 1)", "regex('(?i)(x+)+y')", "xml_tag(a)", "code_block", "code_block(c)"),
        *("json", "json_path($.a)", "json_path([*])", "yaml_path($)", "yaml_path(a[0])"),
        *("bool", "int", "float", "enum(a|b)", "datetime", "datetime(%Y-%m)"),
    ]
)
MARKS = ["<a>", "</a>", "```", "\n", "- ", "1. ", '{"a": ', "}", "[", "]", ",", ": ", "&x ", "*x"]
TEXTS = st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=8).map("".join)


def run(source: str, text: str) -> str:
    transforms = parse_transforms(source)
    assert transforms is not None
    return transforms(text)


@given(st.lists(STEPS, min_size=1, max_size=4), TEXTS)
def test_several_are_one_after_another(steps: list[str], text: str) -> None:
    together, expected = parse_transforms(" | ".join(steps)), text
    assert together is not None
    try:
        for step in steps:
            expected = run(step, expected)
    except TransformError as error:
        with pytest.raises(TransformError) as raised:
            together(text)
        assert str(raised.value) == str(error)
        assert str(error).startswith(f"{step}: ")
    else:
        assert together(text) == expected == together(text)


def test_every_transform_is_among_those_tried() -> None:
    tried = " ".join(STEPS.elements)
    assert [name for name in REGISTRY if name not in tried] == []


MARKS_OF_SOURCES = [*REGISTRY, *"|()[]{},:\\\"' \n$.*019a%", "()", "(a)", "[0]", "-1", "%Y"]
SOURCES = st.lists(st.sampled_from(MARKS_OF_SOURCES), max_size=8).map("".join)


@given(SOURCES)
def test_any_source_is_parsed_or_refused(source: str) -> None:
    try:
        transforms = parse_transforms(source, param="field")
    except InvalidRequestError as error:
        assert error.param == "field"
        assert str(error).startswith("Transforms, at ")
    else:
        assert (transforms is None) == (not source.strip())


@given(SOURCES, TEXTS)
def test_any_source_that_is_parsed_gives_a_text_or_fails(source: str, text: str) -> None:
    try:
        transforms = parse_transforms(source)
    except InvalidRequestError:
        return
    if transforms is None:
        return
    try:
        result = transforms(text)
    except TransformError as error:
        assert str(error)
    else:
        assert isinstance(result, str)


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_blank_is_no_transform(blank: str) -> None:
    assert parse_transforms(blank) is None


def test_two_of_one_source_are_equal() -> None:
    assert parse_transforms(" lines[0]|strip") == parse_transforms("lines[0]|strip ")
    assert parse_transforms("lines[0]") != parse_transforms("lines[1]")


@given(st.text(st.characters(codec="utf-8"), max_size=20), st.sampled_from("\"'"))
def test_any_text_can_be_an_argument(argument: str, quote: str) -> None:
    written = argument.replace("\\", "\\\\").replace(quote, "\\" + quote)
    assert run(f"template( {quote}{{}}{written}{quote} )", "") == argument.replace("{}", "")


@pytest.mark.parametrize(
    ("source", "text", "result"),
    [
        (r"regex((\d+)-(\d+), 2)", "12-34", "34"),
        (r"regex(\d{1,2})", "1234", "12"),
        (r'regex("\d+, (\d+)", 1)', "1, 2", "2"),
        (r"regex(a\)b)", "(a)b", "a)b"),
        (r"split(\n)[1]", "a\nb", "b"),
        (r"split(\\)[1]", "a\\b", "b"),
        ("split(', ') | join(|)", "a, b", "a|b"),
        ("join(it's)", '["a", "b"]', "ait'sb"),
        ("join('')", '["a", "b"]', "ab"),
        ("strip()|code_block()", "```\nx\n```", "x"),
        ("lines [ -1 ]|upper", "a\nb", "B"),
        ("enum( a | b )", "B", "b"),
    ],
)
def test_how_arguments_are_written(source: str, text: str, result: str) -> None:
    assert run(source, text) == result


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("strp", "at 'strp': There is no transform 'strp'; perhaps strip is meant"),
        ("zzz", "there are strip, lower"),
        ("strip |", "at the end: Here the name of a transform is expected"),
        ("strip strip", "at 'strip': Here a | is expected"),
        ("strip(1)", "at 'strip(1)': It is written strip, and here 1 arguments are found"),
        ("split(,)", "It is written split(sep)[i]"),
        ("regex((a)", "at '((a)': A bracket or quote is not closed"),
        ("strip[0]", "strip does not give a list"),
        ("lines[x]", "Here an index such as [0]"),
        ("split('')", "the separator is empty"),
        ("truncate(-1)", "-1 is less than 0"),
        ("truncate(x)", "'x' is not a whole number"),
        ("template(x)", "needs a {}"),
        ("enum(a|A)", "two options are the same"),
        ("enum(a||b)", "an option is empty"),
        ("datetime(%Q)", "is not a format of dates"),
        ("datetime(%Y %Y)", "has a directive twice"),
        ("xml_tag(a b)", "is not the name of a tag"),
        ("json_path($..a)", "'$..a' is not understood from '..a' on"),
        ("regex('[')", "is not a regular expression"),
        ("regex(a, 1)", "the pattern has no group '1'"),
        ("regex(a, b)", "the pattern has no group 'b'"),
        ("regex('(?R)')", "recursive patterns"),
        ("regex('(a)(?1)')", "recursive patterns"),
        ("regex(((a{1000}){1000}){1000})", "too large numbers of repetitions"),
        ("regex(a{1000000000})", "too large numbers of repetitions"),
        ("regex(" + "a" * 2000 + ")", "more than 1000 characters"),
        ("strip|" * 20 + "strip", "more than 16 transforms"),
        (" " * 5000 + "strip", "more than 4096 characters"),
    ],
)
def test_what_is_wrong_with_a_source_is_said(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_transforms(source)
    assert raised.value.param == "transforms"
    assert message in str(raised.value)
    assert len(str(raised.value)) < 500


def test_what_a_transform_writes_is_bounded() -> None:
    with pytest.raises(TransformError, match="more than 4194304"):
        run("|".join(["template({}{}{}{})"] * 12), "x")
    with pytest.raises(TransformError, match="template.*would have 1000000000 char.*than 4194304"):
        run(f"template({'{}' * 1000})", "x" * 1_000_000)
    with pytest.raises(TransformError, match="strip: .*more than 4194304"):
        run("strip", " " * 5_000_000)
    with pytest.raises(TransformError, match="more than 100000"):
        run("split(x)", "x" * 1_000_000)
    with pytest.raises(TransformError, match="more than 100000"):
        run("json_path([*][*])", json.dumps([[0] * 1000] * 101))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("regex((a+)+$)", "a" * 5000 + "b"),
        ("regex('(x*)*(x*)*y')", "x" * 100_000),
        ("json", "[" * 4_000_000),
        ("json", "[" * 99 + "1," * 2_000_000),
        ("json", '{"a' * 1_000_000),
        ("yaml_path($)", "[" * 30_000),
        ("yaml_path($)", "? " * 15_000),
        ("xml_tag(a)", "<a " * 1_000_000),
        ("xml_tag(a)", "<a>" * 1_000_000),
        ("code_block(c)", "```" + " " * 4_000_000 + "`"),
        ("code_block(c)", "```" + "a" * 4_000_000 + "`"),
        ("numbered_list", " " * 4_000_000),
        ("numbered_list", "1." + " " * 4_000_000),
        ("markdown_list", "- " * 2_000_000 + "\n" + " " * 90_000 + "\n" * 90_000),
        ("bool", "'" * 4_000_000),
        ("int", "1" * 4_000_000),
        ("int", "1,111" * 800_000),
        ("float", "1" * 4_000_000),
        ("datetime", "1" * 4_000_000),
    ],
)
def test_no_text_takes_long(source: str, text: str) -> None:
    """Each would run into the limit of the suite if it took time in the square of the text."""
    try:
        run(source, text)
    except TransformError as error:
        assert len(str(error)) < 600
