"""Answers of a session within later prompts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.semantic.core.matching import (
    MAX_INPUTS,
    MAX_SCANNED_CHARS,
    MIN_CHARS,
    PlainPrompt,
    find_inputs,
)
from bros.semantic.core.nodes import InputPiece, NewCall, OutputPiece
from bros.semantic.core.session import SessionStateMachine
from bros.semantic.core.template import Text
from bros.semantic.schema import CallKind, Criteria
from support.machine_speed import slowdown
from support.tier import examples

SEALS = "Two seals live beside the harbour."
WHALES = "Nine whales pass it every summer."
assert min(len(SEALS), len(WHALES)) > MIN_CHARS


class Asked:
    """A session whose plain calls c0, c1, ... have these answers."""

    def __init__(self, *answers: str) -> None:
        self.machine = SessionStateMachine("s", estimate=lambda llm_call: 1.0)
        self._numbers = itertools.count()
        for answer in answers:
            self.answer(answer)

    def answer(self, text: str | None, *, quotation: bool = False) -> None:
        number = next(self._numbers)
        pieces = (OutputPiece("answer", f"v{number}"),)
        new = NewCall(id=f"c{number}", kind=CallKind.PLAIN, pieces=pieces)
        ((llm_call,),) = (call.llm_calls for call in self.machine.submit([new], 0.0))
        llm_call.output.quotation = quotation
        if text is not None:
            self.machine.finished(llm_call, text, None, 1.0)
        self.machine.check_integrity()

    def found(
        self, *texts: str, replies: Sequence[str] = (), inputs: Sequence[str] = ()
    ) -> list[str]:
        prompt = PlainPrompt(texts=texts, replies=replies, inputs=inputs)
        return [variable.id for variable in find_inputs(self.machine.graph, prompt)]


def test_an_answer_within_a_text_is_an_input() -> None:
    asked = Asked(f" {SEALS}\n", WHALES)
    assert asked.found(f"Shorten: {SEALS}") == ["v0"]
    assert asked.found("Be brief.", f"{WHALES} {SEALS}") == ["v0", "v1"]
    assert asked.found("How many seals live beside the harbour?") == []
    assert asked.found() == []


def test_no_answer_is_found_across_two_messages() -> None:
    assert Asked(SEALS).found(SEALS[:15], SEALS[15:]) == []


def test_short_answers_are_inputs_only_as_messages_of_the_assistant() -> None:
    asked = Asked("Yes.", "Two")
    assert asked.found("Yes.", "Two") == []
    assert asked.found("Why?", replies=[" Yes."]) == ["v0"]


def test_named_answers_are_cut_from_no_more_than_the_searched_characters() -> None:
    """These take 14 ms each to be cut: 14 s for the outputs of one native call."""
    asked = Asked(*["a" * 500 + "b" + "a" * 500 + str(number) for number in range(3)])
    variables = [f"o{number}" for number in range(1000)]
    outputs = tuple(OutputPiece(name, name) for name in variables)
    asked.machine.submit([NewCall(id="native", kind=CallKind.NATIVE, pieces=outputs)], 0.0)
    for number, name in enumerate(variables):
        asked.machine.set(name, "a" * 500 + "b" + "a" * (500 + number), 0.0)
    begun_s = time.thread_time()
    found = asked.found("a" * 4_000_000, inputs=["native"])
    assert time.thread_time() - begun_s < 1.0 * slowdown()
    assert len(found) == MAX_INPUTS


def test_calls_that_the_client_names_are_inputs() -> None:
    asked = Asked("Yes.", "No.", SEALS)
    asked.answer(None)
    assert asked.found("Well?", inputs=["c1", "unknown", "c3"]) == ["v1"]
    assert asked.found(SEALS, inputs=["c2", "c0"]) == ["v0", "v2"]


def test_of_equal_answers_the_latest_is_the_input() -> None:
    asked = Asked(SEALS, SEALS)
    assert asked.found(SEALS) == ["v1"]
    assert asked.found(replies=[SEALS, SEALS]) == ["v1"]


def test_an_answer_within_another_one_came_with_it() -> None:
    asked = Asked(SEALS, f"{SEALS} {WHALES}")
    assert asked.found(f"Shorten: {SEALS} {WHALES}") == ["v1"]
    assert asked.found(f"Compare {SEALS} with {SEALS} {WHALES}") == ["v0", "v1"]


def test_quotations_are_inputs_only_if_the_client_says_so() -> None:
    asked = Asked()
    asked.answer(SEALS, quotation=True)
    assert asked.found(f"The whole text again: {SEALS} {WHALES}") == []
    assert asked.found(replies=[SEALS]) == asked.found(inputs=["c0"]) == ["v0"]


@pytest.mark.parametrize("quoted", [True, False])
def test_answers_of_programs_are_inputs_unless_they_are_quotations(quoted: bool) -> None:
    machine = SessionStateMachine("s", estimate=lambda llm_call: 1.0)
    source = f"{SEALS} {WHALES}" if quoted else WHALES
    for number, pieces in enumerate(
        [
            (Text("Sum up: "), InputPiece("text", "source"), OutputPiece("answer", "v0")),
            (Text(f"Sum up: {source}"), OutputPiece("answer", "v1")),
        ]
    ):
        new = NewCall(
            id=f"c{number}", pieces=pieces, values={"source": source} if not number else {}
        )
        ((llm_call,),) = (call.llm_calls for call in machine.submit([new], 0.0))
        machine.want(f"v{number}", Criteria(), 0.0)
        machine.finished(llm_call, SEALS, None, 1.0)
        found = find_inputs(machine.graph, PlainPrompt(texts=[f"Shorten: {SEALS}"]))
        assert [variable.id for variable in found] == ([] if quoted else [f"v{number}"])


def test_the_latest_answers_are_inputs_and_not_too_many() -> None:
    answers = [f"This is the answer with number {number:04}." for number in range(MAX_INPUTS + 10)]
    expected = [f"v{number}" for number in range(10, MAX_INPUTS + 10)]
    asked = Asked(*answers)
    assert asked.found(" ".join(answers)) == asked.found(replies=answers) == expected


def test_the_work_is_bounded() -> None:
    asked = Asked(*(f"This is the answer with number {number:04}." for number in range(10)))
    filler = "x" * (MAX_SCANNED_CHARS // 3)
    first, last = (f"This is the answer with number {number:04}." for number in (0, 9))
    assert asked.found(filler + first + last) == ["v9"]
    assert asked.found(filler * 4 + last) == []
    long = PlainPrompt(texts=[filler * 4])
    assert long.contains(last), "it is too long to be searched"
    assert not PlainPrompt(texts=[filler]).contains(last)
    assert PlainPrompt(texts=[filler], replies=[f"Well. {last}"]).contains(f" {last}")


@given(data=st.data())
@settings(max_examples=examples(30, long=600))
def test_what_a_prompt_is_put_together_from_is_found(data: st.DataObject) -> None:
    """Answers that begin and end differently from all others, between texts of other characters."""
    body = st.text("abc \n", min_size=MIN_CHARS, max_size=MIN_CHARS + 10)
    answers = [
        f"[{number}:{text}]" for number, text in enumerate(data.draw(st.lists(body, max_size=8)))
    ]
    used = data.draw(st.sets(st.sampled_from(range(len(answers))))) if answers else set()
    texts, replies = [], []
    for number in data.draw(st.permutations(sorted(used))):
        before, after = data.draw(st.tuples(st.text("xyz", max_size=5), st.text("xyz", max_size=5)))
        kind = data.draw(st.sampled_from(["text", "same text", "reply"]))
        if kind == "reply":
            replies.append(answers[number])
        elif kind == "same text" and texts:
            texts[-1] += before + answers[number] + after
        else:
            texts.append(before + answers[number] + after)
    expected = [f"v{number}" for number in sorted(used)]
    assert Asked(*answers).found(*texts, replies=replies) == expected
