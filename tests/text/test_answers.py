"""Answers become the same parts however their text is cut, and calls come out as they went in."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.text.answers import (
    AnswerParser,
    AnswerPart,
    CallArguments,
    CallBegin,
    CallEnd,
    CallReader,
    HermesCalls,
    JsonScanner,
    LlamaCalls,
    MistralCalls,
    ParsedAnswer,
    PythonicCalls,
    ReasoningPart,
    ReasoningReader,
    TextPart,
    ToolCall,
)
from bros.text.tokenizer import CONTROL
from support.answer_parts import joined_parts
from support.machine_speed import slowdown
from support.tier import examples

NAMES = frozenset({"f", "get_weather", "search-all"})
MARKERS = {
    HermesCalls: ("<tool_call>", "</tool_call>"),
    MistralCalls: ("[TOOL_CALLS]", ""),
    LlamaCalls: ("<|python_tag|>", ""),
    PythonicCalls: ("<|python_start|>", "<|python_end|>"),
}
READERS = tuple(MARKERS)


def parser_of(
    reader: type[CallReader],
    *,
    max_calls: int | None = None,
    opened: bool = False,
    mark: str = "",
    only_calls: bool = False,
) -> AnswerParser:
    """mark: CONTROL, if the markers are tokens."""
    begin, end = MARKERS[reader]
    return AnswerParser(
        ReasoningReader(f"{mark}<think>", f"{mark}</think>", opened=opened),
        reader(mark + begin, mark + end if end else "", NAMES, max_calls, only_calls),
    )


def parts_of(parser: AnswerParser, deltas: Sequence[str]) -> list[AnswerPart]:
    """The parts, neighbors of one kind joined."""
    parts = [part for delta in deltas for part in parser.push(delta)]
    return joined_parts(parts + parser.finish())


def parsed(reader: type[CallReader], text: str, **options: Any) -> ParsedAnswer:
    answer = ParsedAnswer()
    answer.add(parts_of(parser_of(reader, **options), [text]))
    return answer


def calls_of(reader: type[CallReader], text: str, **options: Any) -> list[tuple[str, Any]]:
    answer = parsed(reader, text, **options)
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


# ---- Properties.


SNIPPETS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"),
    *("<|python_start|>", "<|python_end|>", "[ARGS]", "[CALL_ID]a1", "<tool_", "[TOOL", "</thi"),
    *('{"name": "f", "arguments": {"a": [1, "x"]}}', '{"name": "f", ', '"arguments": {"a": 1}}'),
    *('{"parameters": {"k": null}, "name": "get_weather"}', '"arguments": "{}"}', "f(a=1, b='x')"),
    *('f{"a": {}}', "[f(a=[True, {'k': None}])", "]", ", ", ";", ")", "}", "{", '"', "'", "\\"),
    *("\n", "  ", "text", "é", CONTROL, f"{CONTROL}<tool_call>", f"{CONTROL}</tool_call>"),
)
TEXTS = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=3)), max_size=12).map(
    "".join
)


def cut(text: str, borders: Sequence[int]) -> list[str]:
    places = sorted({min(border, len(text)) for border in borders} | {0, len(text)})
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=examples(40, long=4000), deadline=None)
@given(
    text=TEXTS,
    borders=st.lists(st.integers(0, 200), max_size=30),
    mark=st.sampled_from(["", CONTROL]),
    opened=st.booleans(),
)
def test_parts_do_not_depend_on_how_the_text_is_cut(
    reader: type[CallReader], text: str, borders: list[int], mark: str, opened: bool
) -> None:
    whole = parts_of(parser_of(reader, mark=mark, opened=opened), [text])
    for deltas in (cut(text, borders), list(text)):
        assert parts_of(parser_of(reader, mark=mark, opened=opened), deltas) == whole
    open_call = None
    for part in whole:  # calls are numbered, and each one ends before the next part
        match part:
            case CallBegin(number, _):
                assert open_call is None
                open_call = number
            case CallArguments(number, _):
                assert open_call == number
            case CallEnd(number):
                assert open_call == number
                open_call = None
            case _:
                assert open_call is None
    assert open_call is None
    numbers = [part.number for part in whole if isinstance(part, CallBegin)]
    assert numbers == list(range(len(numbers)))


JSON_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_characters=CONTROL, codec="utf-8"), max_size=12),
        st.sampled_from(["</tool_call>", "<tool_call>", '"', "\\", "[TOOL_CALLS]", "a'b", "\n"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(
    st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), JSON_VALUES, max_size=3
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)


def written(reader: type[CallReader], calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The calls as a model writes them."""
    if reader is HermesCalls:
        return "\n".join(
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in calls
        )
    if reader is MistralCalls:
        listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return "[TOOL_CALLS]" + json.dumps(listed, ensure_ascii=False)
    if reader is LlamaCalls:
        return "; ".join(
            json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls
        )
    listed_calls = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(listed_calls)}]"


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=examples(30, long=4000), deadline=None)
@given(calls=CALLS)
def test_calls_come_out_as_they_went_in(
    reader: type[CallReader], calls: list[tuple[str, dict[str, Any]]]
) -> None:
    text = written(reader, calls)
    assert calls_of(reader, text) == calls
    assert parsed(reader, text).text == ""


@settings(max_examples=examples(30, long=4000), deadline=None)
@given(calls=CALLS)
def test_newer_mistral_calls_come_out_as_they_went_in(
    calls: list[tuple[str, dict[str, Any]]],
) -> None:
    for between in ("", "[ARGS]", "[CALL_ID]abc123456[ARGS]"):
        text = "".join(f"[TOOL_CALLS]{name}{between}{json.dumps(a)}" for name, a in calls)
        assert calls_of(MistralCalls, text) == calls


def scans(text: str) -> bool:
    scanner = JsonScanner()
    return all(scanner.feed(char) for char in text) and scanner.state == "complete"


@settings(max_examples=examples(30, long=10_000), deadline=None)
@given(
    st.one_of(
        st.one_of(st.lists(JSON_VALUES), ARGUMENTS).map(json.dumps),
        st.lists(
            st.sampled_from([*'{}[]:,"\\ ', '"a"', "1", "-0.5e3", "01", "true", "nul", "\\u00e9"]),
            max_size=10,
        ).map(lambda pieces: "[" + "".join(pieces)),
    )
)
def test_the_scanner_accepts_what_json_accepts(text: str) -> None:
    text = text.rstrip()
    try:
        json.loads(text)
        valid = True
    except ValueError:
        valid = False
    assert scans(text) == valid


# ---- Text and reasoning around calls.


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_reasoning_text_and_calls_in_one_answer() -> None:
    text = f"<think>\nLet me see.\n</think>\n\nI will look.\n{CALL}\n{CALL}\n"
    assert parts_of(parser_of(HermesCalls), [text]) == [
        ReasoningPart("Let me see."),
        TextPart("I will look."),
        *(CallBegin(0, "f"), CallArguments(0, '{"a": 1}'), CallEnd(0)),
        *(CallBegin(1, "f"), CallArguments(1, '{"a": 1}'), CallEnd(1)),
    ]


@pytest.mark.parametrize("begin", ["", "<think>", "\n<think>\n"])
def test_reasoning_that_the_prompt_has_begun(begin: str) -> None:
    answer = parsed(HermesCalls, f"{begin}Hm.</think>Yes.", opened=True)
    assert (answer.reasoning, answer.text) == ("Hm.", "Yes.")


def test_reasoning_without_an_end_is_reasoning() -> None:
    answer = parsed(HermesCalls, "<think>Hm, <tool_call>", opened=False)
    assert (answer.reasoning, answer.text) == ("Hm, <tool_call>", "")


def test_markers_of_reasoning_within_the_answer_are_text() -> None:
    assert parsed(HermesCalls, "Use <think> and </think>.").text == "Use <think> and </think>."


def test_arguments_are_passed_on_while_they_arrive() -> None:
    parser = parser_of(HermesCalls)
    assert parser.push('<tool_call>{"name": "f", "argum') == []
    assert parser.push('ents": {"city": "Pa') == [
        CallBegin(0, "f"),
        CallArguments(0, '{"city": "Pa'),
    ]
    assert parser.push('ris"}') == [CallArguments(0, 'ris"}')]
    assert parser.push("}") == [CallEnd(0)]


def test_python_arguments_are_passed_on_while_they_arrive() -> None:
    parser = parser_of(PythonicCalls)
    assert parser.push("[f(city=") == [CallBegin(0, "f"), CallArguments(0, '{"city": ')]
    assert parser.push("'Pa") == [CallArguments(0, '"Pa')]
    assert parser.push("ris'") == [CallArguments(0, 'ris"')]
    assert parser.push(")]") == [CallArguments(0, "}"), CallEnd(0)]


def test_further_calls_are_left_out_if_only_one_is_wanted() -> None:
    for reader in READERS:
        calls: list[tuple[str, dict[str, Any]]] = [("f", {"a": 1}), ("get_weather", {})]
        assert calls_of(reader, written(reader, calls), max_calls=1) == calls[:1]


# ---- Odd and malformed calls.


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (HermesCalls, '<tool_call>{"name": "f", "arg'),
        (HermesCalls, '<tool_call>{"arguments": {}}</tool_call>'),
        (HermesCalls, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        (HermesCalls, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        (HermesCalls, "<tool_call>f(1)</tool_call>"),
        (HermesCalls, '<tool_call>["name", "f"]</tool_call>'),
        (MistralCalls, "[TOOL_CALLS] nothing here"),
        (MistralCalls, '[TOOL_CALLS]["name"]'),
        (LlamaCalls, '{"name": "unknown", "parameters": {}}'),
        (LlamaCalls, '{"name": "f"}'),
        (LlamaCalls, '{"answer": {"name": "f", "parameters": {}}}'),
        (LlamaCalls, 'Write {"name": "f", "parameters": {}}'),
        (LlamaCalls, '<|python_tag|>brave_search.call(query="x")'),
        (PythonicCalls, "[1] See below."),
        (PythonicCalls, "[unknown(a=1)]"),
        (PythonicCalls, "[f(1)]"),
        (PythonicCalls, "See [f(a=1)]"),
    ],
)
def test_what_is_no_call_stays_text(reader: type[CallReader], text: str) -> None:
    for end in ("", "  and more"):
        answer = parsed(reader, text + end)
        assert (answer.calls, answer.text) == ([], text + end)


@pytest.mark.parametrize(
    ("reader", "text", "arguments"),
    [
        (HermesCalls, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', '{"a": 1}'),
        (HermesCalls, '<tool_call>{"name": "f"}</tool_call>', "{}"),
        (HermesCalls, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "{}"),
        (HermesCalls, '<tool_call>{"id": 1, "name": "f", "arguments": {}}</tool_call>', "{}"),
        (
            HermesCalls,
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>',
            '{"a": "é"}',
        ),
        (HermesCalls, '<tool_call>{"name": "f", "arguments": {"a": 1}} ', '{"a": 1}'),
        (HermesCalls, '<tool_call>{"name": "f", "arguments": {"a": "<', '{"a": "<'),
        (HermesCalls, '<tool_call>{"name": "f", "arguments": {"a" oops</tool_call>', '{"a" oops'),
        (HermesCalls, '<tool_call>{"name": "f", "arguments": {}, oops</tool_call>', "{}"),
        (MistralCalls, '[TOOL_CALLS][{"name": "f", "arguments": {}}', "{}"),
        (LlamaCalls, '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "{}"),
        (PythonicCalls, "<|python_start|>[f(a='x')]<|python_end|>", '{"a": "x"}'),
        (
            PythonicCalls,
            "[f(a=\"it's\", b=(1, 2.50), c={3: None, 'k': [],}, d=r'x', e=Paris, g=0x10, h=.5)]",
            '{"a": "it\'s", "b": [1, 2.50], "c": {"3": null, "k": []}, "d": "x", "e": "Paris", '
            '"g": 16, "h": 0.5}',
        ),
        (PythonicCalls, r"[f(a='\x41\u00e9\n\'\q')]", r'{"a": "A\u00e9\n' + "'" + r'\\q"}'),
        (PythonicCalls, "[f(a=1,)]", '{"a": 1}'),
        (PythonicCalls, "[f(a=}", '{"a": }'),
    ],
)
def test_odd_calls(reader: type[CallReader], text: str, arguments: str) -> None:
    answer = parsed(reader, text)
    assert (answer.calls, answer.text) == ([ToolCall("f", arguments)], "")


def test_a_call_after_one_that_is_none() -> None:
    answer = parsed(HermesCalls, f"<tool_call>\n{CALL} Done.")
    assert answer.calls == [ToolCall("f", '{"a": 1}')]
    assert answer.text == "<tool_call>\nDone."


# ---- Control tokens.


def test_only_tokens_are_markers_where_markers_are_tokens() -> None:
    spelled = f"The file says: {CALL}"
    assert parsed(HermesCalls, spelled, mark=CONTROL).text == spelled
    real = CALL.replace("<", f"{CONTROL}<")
    answer = parsed(HermesCalls, f"Look:\n{real}", mark=CONTROL)
    assert (answer.text, answer.calls) == ("Look:", [ToolCall("f", '{"a": 1}')])


def test_a_token_that_ends_the_call_ends_it_within_a_string_too() -> None:
    text = f'{CONTROL}<tool_call>{{"name": "f", "arguments": {{"a": "x{CONTROL}</tool_call> Hi'
    answer = parsed(HermesCalls, text, mark=CONTROL)
    assert (answer.text, answer.calls) == ("Hi", [ToolCall("f", '{"a": "x')])


def test_tokens_out_of_place_are_text_without_the_mark() -> None:
    answer = parsed(HermesCalls, f"a {CONTROL}</tool_call> b", mark=CONTROL)
    assert (answer.text, answer.calls) == ("a </tool_call> b", [])


# ---- Answers that are cut off.


CUT: dict[type[CallReader], Sequence[str]] = {
    HermesCalls: ['<tool_call>{"name": "get_weather", "argum'],
    MistralCalls: ['[TOOL_CALLS][{"na', "[TOOL_CALLS]get_we"],
    LlamaCalls: ['<|python_tag|>{"name": "f'],
    PythonicCalls: ["<|python_start|>[get_weath"],
}


@pytest.mark.parametrize(("reader", "head"), [(r, head) for r in CUT for head in CUT[r]])
@pytest.mark.parametrize("before", ["", "I look. "])
def test_the_head_of_a_call_that_is_cut_is_not_shown(
    reader: type[CallReader], head: str, before: str
) -> None:
    for end in range(len(MARKERS[reader][0]), len(head) + 1):
        parser, answer = parser_of(reader), ParsedAnswer()
        answer.add(parser.push(before + head[:end]))
        answer.add(parser.finish(cut=True))
        assert (answer.text, answer.calls) == (before.rstrip(), [])
    assert parsed(reader, before + head).text == before + head, "it has ended by itself"


def test_of_a_call_behind_another_one_no_head_is_shown() -> None:
    answer = ParsedAnswer()
    parser = parser_of(MistralCalls)
    answer.add(parser.push('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g'))
    answer.add(parser.finish(cut=True))
    assert (answer.text, [call.name for call in answer.calls]) == ("", ["f"])


@pytest.mark.parametrize("reader", CUT)
def test_a_marker_that_is_cut_is_not_shown_where_nothing_but_a_call_can_come(
    reader: type[CallReader],
) -> None:
    begin, _ = MARKERS[reader]
    for end in range(1, len(begin)):
        for only_calls in (True, False):
            answer, parser = ParsedAnswer(), parser_of(reader, only_calls=only_calls)
            answer.add(parser.push(begin[:end]))
            answer.add(parser.finish(cut=True))
            assert answer.text == ("" if only_calls else begin[:end]), "else it may be text"
    answer, parser = ParsedAnswer(), parser_of(reader, only_calls=True)
    answer.add(parser.push(reader.bare))
    answer.add(parser.finish(cut=True))
    assert answer.text == ""


def test_a_marker_that_is_cut_is_not_shown_behind_a_call_but_behind_text_it_may_be_text() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for text, cut, shown in (("", True, ""), ("", False, "<tool_"), ("so a", True, "so a <tool_")):
        answer, parser = ParsedAnswer(), parser_of(HermesCalls)
        answer.add(parser.push(f"{call}\n{text} <tool_"))
        answer.add(parser.finish(cut=cut))
        assert (answer.text, len(answer.calls)) == (shown, 1)


def test_json_that_may_be_the_answer_is_shown_where_it_is_cut() -> None:
    answer, parser = ParsedAnswer(), parser_of(LlamaCalls)
    answer.add(parser.push('{"name": "Ada'))
    answer.add(parser.finish(cut=True))
    assert answer.text == '{"name": "Ada'


# ---- Long answers.


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "unit", [" \n", "<tool_call>", '{"a":', "[", '"', "[f(", "f(a='", "<think>"]
)
def test_long_answers_take_little_time(reader: type[CallReader], unit: str) -> None:
    text = (unit * 40_000)[:40_000]
    parser, begin_s = parser_of(reader), time.thread_time()
    for start in range(0, len(text), 4):
        parser.push(text[start : start + 4])
    parser.finish()
    took_s = time.thread_time() - begin_s
    assert took_s < 1.5 * slowdown()  # 0.2 s at most; minutes if it were quadratic
