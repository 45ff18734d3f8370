"""The grammar of templates: every text is parsed or refused with a place, and nothing is lost."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bros.core.errors import InvalidRequestError
from bros.semantic.core.template import (
    Piece,
    Placeholder,
    Text,
    parse_template,
    render_template,
    with_roles,
)
from bros.semantic.schema import Role
from support.tier import examples

NAMES = st.from_regex(r"[a-zA-Z_é][a-zA-Z0-9_é]{0,5}", fullmatch=True)
# Mostly the marks of the grammar, so that they meet in all ways.
TEXTS = st.text(st.sampled_from("{}\\ax: \n\"'é") | st.characters(codec="utf-8"), max_size=30)
INPUT, OUTPUT = Role.INPUT, Role.OUTPUT


@st.composite
def placeholders(draw: st.DrawFn) -> Placeholder:
    role = draw(st.sampled_from([None, INPUT, OUTPUT]))
    name = draw(NAMES)
    sampling = None if role is INPUT else draw(st.none() | NAMES)
    if role is None and name in ("input", "output"):
        sampling = None  # {{input:x}} is an input x, not a name with sampling
    return Placeholder(name, role, sampling)


@st.composite
def piece_lists(draw: st.DrawFn) -> tuple[Piece, ...]:
    """Pieces as the parser gives them: texts are not empty and not neighbours."""
    found: list[Piece] = []
    for piece in draw(st.lists(TEXTS.map(Text) | placeholders(), max_size=8)):
        if isinstance(piece, Text) and (not piece.text or isinstance(_last(found), Text)):
            continue
        found.append(piece)
    return tuple(found)


def _last(pieces: list[Piece]) -> Piece | None:
    return pieces[-1] if pieces else None


@given(piece_lists())
@example((Text("\\"), Placeholder("x")))
@example((Text("{{{"), Placeholder("x"), Text("}\\{{\\")))
@example((Text("\\{"), Placeholder("x")))
def test_what_is_rendered_is_parsed_to_the_same(pieces: tuple[Piece, ...]) -> None:
    assert parse_template(render_template(pieces)) == pieces


@given(TEXTS)
def test_an_escaped_text_is_that_text(text: str) -> None:
    assert parse_template(render_template([Text(text)])) == ((Text(text),) if text else ())


@given(TEXTS | st.lists(TEXTS | st.sampled_from(["{{x}}", "{{input:", "{{"])).map("".join))
def test_any_text_is_parsed_or_refused_with_a_place(source: str) -> None:
    try:
        pieces = parse_template(source, param="field")
    except InvalidRequestError as error:
        assert error.param == "field"
        found = re.match(r"Line (\d+), column (\d+): ", str(error))
        assert found, str(error)
        line = source.split("\n")[int(found[1]) - 1]
        assert line[int(found[2]) - 1 :].startswith("{{")
        return
    assert all(piece.text for piece in pieces if isinstance(piece, Text))
    assert not any(
        isinstance(one, Text) and isinstance(other, Text)
        for one, other in zip(pieces, pieces[1:], strict=False)
    )
    assert parse_template(render_template(pieces)) == pieces


JSON = st.recursive(
    st.integers(0, 9) | st.text("ab\\{}", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)


@given(JSON.map(json.dumps).filter(lambda text: "{{" not in text))
def test_json_is_text_as_it_stands(text: str) -> None:
    around = parse_template(f"Like {text}: {{{{output:x}}}}{text}")
    assert around == (Text(f"Like {text}: "), Placeholder("x", OUTPUT), Text(text))


@pytest.mark.parametrize(
    ("source", "pieces"),
    [
        ("", ()),
        ("{{x}}", (Placeholder("x"),)),
        ("{{ input : x }}", (Placeholder("x", INPUT),)),
        ("{{\n output:y:fast }}", (Placeholder("y", OUTPUT, "fast"),)),
        ("{{y:fast}}", (Placeholder("y", None, "fast"),)),
        ("{{output}}", (Placeholder("output"),)),
        ("{{größe}}", (Placeholder("größe"),)),
        ("{{x}}{{x}}", (Placeholder("x"), Placeholder("x"))),
        ('{"a": {{{x}}}}', (Text('{"a": {'), Placeholder("x"), Text("}}"))),
        (r"\{{x}}", (Text("{{x}}"),)),
        (r"C:\\{{x}}", (Text("C:\\"), Placeholder("x"))),
        (r"a \ b \\ c \n }} \}", (Text(r"a \ b \\ c \n }} \}"),)),
    ],
)
def test_what_templates_mean(source: str, pieces: tuple[Piece, ...]) -> None:
    assert parse_template(source) == pieces


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\nbc {{x", "Line 2, column 4: {{ is not closed"),
        ("{{x {{y}}", "Line 1, column 1: {{ is not closed"),
        ("{{1x}}", "Line 1, column 1: '1x' is not a placeholder"),
        ("{{}}", "Line 1, column 1: '' is not a placeholder"),
        ("{{x.y}}", "'x.y' is not a placeholder"),
        ("{{inout:x:y}}", "'inout:x:y' is not a placeholder"),
        ("{{input:x:y}}", "Line 1, column 1: an input cannot have sampling"),
        ("{{" + "x y" * 1000 + "}}", "..."),
    ],
)
def test_what_is_wrong_is_said(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_template(source)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 400


@settings(max_examples=examples(8))
@given(st.sampled_from(["{", "\\", "{{x}}", "\\{{", "{{x", " ", "{ {"]), st.integers(0, 200_000))
def test_long_templates_are_read_in_one_pass(part: str, count: int) -> None:
    """A parser that starts over at each mark would run into the limit of the suite."""
    try:
        pieces = parse_template(part * count)
    except InvalidRequestError:
        return
    assert parse_template(render_template(pieces)) == pieces


ROLES = st.none() | st.sampled_from([INPUT, OUTPUT])


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), ROLES, st.booleans()).map(
            lambda drawn: (Placeholder(drawn[0], drawn[1]), drawn[2])
        ),
        max_size=5,
    ),
    st.dictionaries(st.sampled_from("abcd"), ROLES),
)
def test_roles_are_agreed_or_refused(drawn: list[Any], given_roles: dict[str, Role | None]) -> None:
    pieces: list[Piece] = []
    for placeholder, then_text in drawn:
        pieces += [placeholder, *([Text("-")] if then_text else [])]
    said = {
        name: {given_roles.get(name)} | {p.role for p, _ in drawn if p.name == name} - {None}
        for name in "abc"
    }
    said = {name: roles - {None} for name, roles in said.items()}
    used = {placeholder.name for placeholder, _ in drawn}
    role = {name: next(iter(roles), INPUT) for name, roles in said.items()}
    outputs = [p.name for p, _ in drawn if role[p.name] is OUTPUT]
    adjacent = any(
        not then_text and role[one.name] is role[other.name] is OUTPUT
        for (one, then_text), (other, _) in zip(drawn, drawn[1:], strict=False)
    )
    conflict = any(len(said[name]) > 1 for name in used)
    try:
        resolved = with_roles(pieces, given_roles)
    except InvalidRequestError:
        assert conflict or adjacent or len(outputs) > len(set(outputs))
        return
    assert not (conflict or adjacent) and len(outputs) == len(set(outputs))
    assert [(p.name, p.role) for p in resolved if isinstance(p, Placeholder)] == [
        (p.name, role[p.name]) for p, _ in drawn
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{output:a}}{{output:b}}", "'b' follows another output directly"),
        ("{{output:a}}{{b}}", "'b' follows another output directly"),
        ("{{output:a}} {{a}}", "'a' occurs twice"),
        ("{{output:a}} {{input:a}}", "'a' is an input here and an output"),
        ("{{input:b}}", "'b' is an input here and an output"),
    ],
)
def test_outputs_that_cannot_be_are_refused(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        with_roles(parse_template(source), {"b": OUTPUT}, param="field")
    assert message in str(raised.value)
    assert raised.value.param == "field"


def test_sampling_of_an_input_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'x' cannot have sampling"):
        with_roles(parse_template("{{x:fast}}"), {})
    [output] = with_roles(parse_template("{{x:fast}}"), {"x": OUTPUT})
    assert output == Placeholder("x", OUTPUT, "fast")
