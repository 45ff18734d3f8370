"""Each transform against a naive oracle, and what it says when a text is not what it takes."""

from __future__ import annotations

import json
import re
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from bros.semantic.transforms import REGISTRY, TransformError, parse_transforms

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
WORDS = st.text("abcXYZé .-", min_size=1, max_size=8).map(str.strip).filter(bool)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9) | st.text("ab {\"'é\n"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab '", max_size=3), inner),
    max_leaves=10,
)


def run(source: str, text: str) -> str:
    transforms = parse_transforms(source)
    assert transforms is not None
    return transforms(text)


def quoted(argument: str) -> str:
    """As an argument, whatever is in it."""
    escaped = re.sub(r"""([\\"])""", r"\\\1", argument).replace("\n", "\\n")
    return f'"{escaped}"'


def fails(source: str, text: str) -> str:
    with pytest.raises(TransformError) as raised:
        run(source, text)
    return str(raised.value)


@given(TEXTS)
def test_plain_texts(text: str) -> None:
    assert run("strip", text) == text.strip()
    assert run("lower", text) == text.lower()
    assert run("upper", text) == text.upper()


@given(TEXTS, st.integers(0, 50))
def test_truncate_keeps_the_beginning(text: str, count: int) -> None:
    short = run(f"truncate({count})", text)
    assert text.startswith(short) and len(short) == min(count, len(text))


@given(TEXTS, TEXTS, TEXTS)
def test_template_puts_the_text_into_the_holes(before: str, after: str, text: str) -> None:
    assume("{}" not in before + after)
    form = quoted(before + "{}" + after + "{}")
    assume((before + "{}" + after + "{}").count("{}") == 2)
    assert run(f"template({form})", text) == before + text + after + text


@given(TEXTS, st.text("ab,)(\n\\\"' |", min_size=1, max_size=3))
def test_join_undoes_split(text: str, separator: str) -> None:
    sep = quoted(separator)
    assert json.loads(run(f"split({sep})", text)) == text.split(separator)
    assert run(f"split({sep}) | join({sep})", text) == text


@given(st.lists(WORDS), st.integers(-6, 6))
def test_one_part_of_a_list(words: list[str], place: int) -> None:
    text = "\n\n ".join(words)
    assert json.loads(run("lines", text)) == words
    try:
        part = words[place]
    except IndexError:
        assert f"no part [{place}] in a list of {len(words)}" in fails(f"lines[{place}]", text)
    else:
        assert run(f"lines[{place}]", text) == part


@given(st.lists(WORDS), st.none() | st.integers(-5, 5), st.none() | st.integers(-5, 5))
def test_some_parts_of_a_list(words: list[str], low: int | None, high: int | None) -> None:
    place = f"{'' if low is None else low}:{'' if high is None else high}"
    assert json.loads(run(f"comma_list[{place}]", " ,, ".join(words))) == words[low:high]


@given(st.lists(WORDS, min_size=1), st.sampled_from(["{}. ", "{}) ", "  ({}) ", "{}:\t"]))
def test_numbered_list_finds_its_items(words: list[str], form: str) -> None:
    items = [form.format(number) + word for number, word in enumerate(words, 1)]
    text = "\n".join(["Here you are:", "", *items, "", "That is it."])
    assert json.loads(run("numbered_list", text)) == words


@given(st.lists(WORDS, min_size=1), st.sampled_from(["- ", "* ", "  + ", "• "]))
def test_markdown_list_finds_its_items(words: list[str], mark: str) -> None:
    text = "\n".join(["Here you are:", *(mark + word for word in words), "That is it."])
    assert json.loads(run("markdown_list", text)) == words


def test_lists_without_an_item_fail() -> None:
    assert "no numbered item" in fails("numbered_list", "1.5 m\nnothing")
    assert "no item" in fails("markdown_list", "-5 degrees")


def test_join_needs_a_list_and_writes_what_is_no_text_as_json() -> None:
    assert run("join(-)", '["a", 1, {"b": null}]') == 'a-1-{"b": null}'
    assert "is not a list" in fails("join(-)", "a, b")
    assert "is not a list" in fails("join(-)", '{"a": 1}')


@given(st.text("ab1 \n", max_size=20))
def test_regex_gives_what_re_does(text: str) -> None:
    pattern = r"([ab]+)(?P<digits>1{1,3})?"
    match = re.search(pattern, text)
    for group in ("", ", 0", ", 1", ", digits"):
        key: Any = group.removeprefix(", ") or "0"
        found = None if match is None else match[int(key) if key.isdigit() else key]
        if found is None:
            assert "does not match" in fails(f"regex({pattern}{group})", text)
        else:
            assert run(f"regex({pattern}{group})", text) == found


@given(VALUES, TEXTS, TEXTS)
def test_json_is_found_in_its_surroundings(value: Any, before: str, after: str) -> None:
    written = json.dumps(value, ensure_ascii=False)
    assert json.loads(run("json", f"\n {written} ")) == value
    assert json.loads(run("json", f"Yes:\n```json\n{written}\n```\nBye")) == value
    if isinstance(value, dict | list) and not set("[{`~") & set(before):
        assume(_is_no_json(before + written + after))
        assert json.loads(run("json", before + written + after)) == value


def _is_no_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return True
    return False


@st.composite
def paths(draw: st.DrawFn) -> tuple[Any, str, Any]:
    """A value, a path to one place in it, and what is there."""
    value = found = draw(VALUES)
    path = draw(st.sampled_from(["$", "$"]))
    while isinstance(found, dict | list) and found and draw(st.booleans()):
        if isinstance(found, list):
            place = draw(st.integers(-len(found), len(found) - 1))
            path, found = f"{path}[{place}]", found[place]
            continue
        name = draw(st.sampled_from(sorted(found)))
        plain = re.fullmatch(r"[a-z]+", name) and draw(st.booleans())
        path += f".{name}" if plain else f'["{name}"]'
        found = found[name]
    return value, path, found


@given(paths())
def test_json_path_leads_to_its_place(drawn: tuple[Any, str, Any]) -> None:
    value, path, found = drawn
    result = run(f"json_path({quoted(path)})", json.dumps(value))
    assert result == (found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))


@given(paths())
def test_yaml_path_leads_to_its_place(drawn: tuple[Any, str, Any]) -> None:
    value, path, found = drawn
    document = yaml.safe_dump(value, allow_unicode=True, default_flow_style=False, sort_keys=False)
    result = run(f"yaml_path({quoted(path)})", document)
    assert result == (found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))
    result_in_block = run(f"yaml_path({quoted(path)})", f"Yes:\n```yaml\n{document}\n```\n")
    assert result_in_block == result


def test_paths_to_several_places() -> None:
    text = '{"a": [{"b": 1}, {"c": 2}, {"b": [3, 4]}], "d": {"x": 5, "y": 6}}'
    for path, expected in {
        "$.a[*].b": [1, [3, 4]],
        "a[1:].b": [[3, 4]],
        "$.a[:1]": [{"b": 1}],
        "$.d.*": [5, 6],
        "$.a[*].b[*]": [3, 4],
        "$.a[*].*": [1, 2, [3, 4]],
    }.items():
        assert json.loads(run(f"json_path({path})", text)) == expected


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("$.b", "there is no 'b' in an object with 'a'"),
        ("$.a[5]", "there is no part [5] in a list of 2"),
        ("$.a.b", "'b' of a list, which is not an object"),
        ("$[0]", "[0] of a dict, which is not a list"),
        ("$.a[0].*", "null has no parts"),
    ],
)
def test_a_path_to_nowhere_says_where_it_ends(path: str, message: str) -> None:
    assert message in fails(f"json_path({path})", '{"a": [null, 1]}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1]\nb: *x", "alias"),
        ("{" * 60, "levels deep"),
        ("[" * 60, "levels deep"),
        ("- " * 60, "levels deep"),
        ("a: b: c", "is not YAML"),
        ("!!python/object/apply:os.system [ls]", "is not YAML"),
        ("!!binary aGk=", "has a bytes"),
        ("!!set {a, b}", "has a set"),
        (".inf", "cannot be written as JSON"),
        ("9" * 5000, "is not YAML"),
        ("2020-99-99", "is not YAML"),
        ("a" * 40_000, "more than 32768 characters"),
    ],
)
def test_yaml_that_is_refused(text: str, message: str) -> None:
    assert message in fails("yaml_path($)", text)


def test_yaml_has_dates_and_keys_that_are_no_texts() -> None:
    assert json.loads(run("yaml_path($)", "{2: 2020-01-02, true: x}")) == {
        "2": "2020-01-02",
        "true": "x",
    }


@pytest.mark.parametrize("text", ["{'a': 1}", "[1, 2", "NaN", '{"a": Infinity}', "none", ""])
def test_what_is_no_json_fails(text: str) -> None:
    assert "there is no JSON in" in fails("json", text)


def test_half_a_character_does_not_come_out() -> None:
    assert "half a character" in fails("json_path($)", r'"\ud800"')
    assert "half a character" in fails("strip", "\ud800")


@given(st.recursive(TEXTS.map(lambda text: re.sub("[<>]", "", text)), lambda inner: st.tuples(
    inner, inner).map(lambda pair: f"{pair[0]}<a x='1'>{pair[1]}</a><b>")))  # fmt: skip
def test_xml_tag_gives_what_its_pair_holds(inside: str) -> None:
    assert run("xml_tag(a)", f"<b><ab>x</ab><a>{inside}</a></a><a>y</a>") == inside


def test_xml_tags_that_are_missing() -> None:
    assert run("xml_tag(a)", "x <a/> y") == ""
    assert "there is no <a>" in fails("xml_tag(a)", "</a> <ab> a")
    assert "there is no </a>" in fails("xml_tag(a)", "<a><a></a>")


LINE = st.text("ab `~#", max_size=8) | st.sampled_from(["```", "~~~", "```c"])
LINES = st.lists(LINE, max_size=5).map("\n".join)


@given(LINES, st.sampled_from(["`", "~"]), st.sampled_from(["", "python", "Python title=x"]))
def test_code_block_gives_what_its_fences_hold(code: str, mark: str, language: str) -> None:
    fence = mark * 9
    text = f"So:\n```c\nother\n```\n{fence}{language}\n{code}\n{fence}\nBye\n"
    assert run("code_block", text) == "other"
    if language:
        assert run("code_block(python)", text) == code
        assert run("code_block(python)", f"{fence}{language}\n{code}") == code  # never closed
    else:
        assert "no block of code of python" in fails("code_block(python)", text)


@given(TEXTS)
def test_bool_knows_few_words(text: str) -> None:
    for word, value in {"Yes.": "true", "**no**": "false", " TRUE\n": "true", "0": "false"}.items():
        assert run("bool", word) == value
    assume(text.strip(" \t\r\n\"'`*.,!").lower() not in "true yes y 1 on false no n 0 off".split())
    assert "neither true nor false" in fails("bool", text)


@given(st.integers(), st.sampled_from(["{}", " {}\n", "{}.", "{:+}", "{:,}", "00{}"]))
def test_int_writes_the_number(value: int, form: str) -> None:
    if form == "00{}" and value < 0:
        assert "is not a whole number" in fails("int", form.format(value))
    else:
        assert int(run("int", form.format(value))) == value
        assert run("int", form.format(value)) == str(value)


@given(
    st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["{!r}", "{:e}", "{:.2f}"])
)
def test_float_writes_the_number(value: float, form: str) -> None:
    written = form.format(value)
    assert float(run("float", written)) == float(Fraction(written)) == float(written)
    assert run("float", written) == repr(float(written))


@pytest.mark.parametrize("text", ["", "one", "1 2", "1,23", "0x1", "1_000", "٣", "--1", "1e3"])
def test_what_is_no_whole_number_fails(text: str) -> None:
    assert "is not a whole number" in fails("int", text)


@pytest.mark.parametrize("text", ["", "nan", "inf", "1_0.0", "1,5", ".", "1e", "٣", "1e999"])
def test_what_is_no_number_fails(text: str) -> None:
    assert "number" in fails("float", text)


@given(st.lists(st.text("abcXY ", min_size=1).map(str.strip).filter(bool), min_size=1), st.data())
def test_enum_gives_the_option_as_it_is_written(options: list[str], data: st.DataObject) -> None:
    assume(len({option.casefold() for option in options}) == len(options))
    chosen = data.draw(st.sampled_from(options))
    said = data.draw(st.sampled_from([chosen.upper(), f" {chosen}\n", f'"{chosen}".']))
    for source in (f"enum({'|'.join(options)})", f"enum({', '.join(options)})"):
        assert run(source, said) == chosen
        assert "is none of" in fails(source, f"not {chosen}!")


@given(st.datetimes(min_value=datetime(1000, 1, 1)))
def test_datetime_reads_its_format_and_iso(moment: datetime) -> None:
    form = "%d.%m.%Y, %H:%M:%S.%f"
    assert run(f'datetime("{form}")', f" {moment.strftime(form)}\n") == moment.isoformat()
    assert run("datetime", moment.isoformat(" ")) == moment.isoformat()
    assert "is not a date in the format %Y" in fails("datetime(%Y)", moment.isoformat())
    assert "is not a date as in" in fails("datetime", "soon")


def test_the_table_in_the_manual_has_them_all() -> None:
    manual = Path(__file__).resolve().parents[2] / "docs" / "semantic.md"
    rows = [line for line in manual.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    first_cells = [re.split(r"(?<!\\)\|", row)[1].replace("\\|", "|") for row in rows]
    written = [usage for cell in first_cells for usage in re.findall(r"`([^`]+)`", cell)]
    usages = [entry.usage for entry in REGISTRY.values()]
    assert [usage for usage in usages if usage not in written] == []
