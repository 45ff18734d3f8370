"""Calls of a program are read together, and mean what each of them means alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bros.core.errors import InvalidRequestError
from bros.semantic.core.submission import (
    MAX_CALL_OUTPUTS,
    MAX_RENDERED_CHARS,
    SubmissionReader,
    check_sampling,
)
from bros.semantic.core.template import MAX_OPENINGS
from bros.semantic.schema import (
    MAX_MESSAGES,
    MAX_PARAMETERS,
    CallSpec,
    Message,
    Parameter,
    Role,
)
from bros.text.chat_format import ChatFormat
from support.program_engine import TOKENIZER


class CountingChat(ChatFormat):
    """The format of a model, and how often it was asked for."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self.renders = 0

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        self.renders += 1
        return super().render_chat(messages)


def submitter(chat: CountingChat) -> SubmissionReader:
    numbers = itertools.count()
    return SubmissionReader(
        chat,
        lambda prefix: f"{prefix}-{next(numbers)}",
        max_tokens=9,
        vocab_size=TOKENIZER.vocab_size,
    )


# Alike enough to be taken for one another, and some of them are wrong.
samplings = st.dictionaries(
    st.sampled_from(["temperature", "top_p", "seed", "stop", "max_tokens"]),
    st.sampled_from([1, 1.0, True, 0.5, "1", ["1"], ["1", "2"], None]),
    max_size=2,
)
parameters = st.builds(
    Parameter,
    name=st.sampled_from(["x", "y"]),
    role=st.sampled_from([None, Role.INPUT, Role.OUTPUT]),
    variable=st.sampled_from([None, "u", "v"]),
    transforms=st.sampled_from([None, "strip", "upper", "no such thing"]),
    sampling=st.none() | samplings,
)
TEXTS = ["Say {{x}} {{output:y}}", "Say {{x}} {{y}}", "Say {{output:x}} and {{output:y}}", "Say"]
calls = st.builds(
    CallSpec,
    template=st.sampled_from([*TEXTS, None]),
    messages=st.none() | st.sampled_from(TEXTS).map(lambda t: [Message(role="user", content=t)]),
    chat=st.booleans(),
    parameters=st.lists(parameters, max_size=2),
    sampling=samplings,
)

alike = st.builds(
    CallSpec,
    template=st.just(TEXTS[0]),
    sampling=st.dictionaries(
        st.sampled_from(["temperature", "stop"]), st.sampled_from([1, "1", ["1"]]), max_size=1
    ),
)


def read_alone(specs: Sequence[CallSpec]) -> Any:
    """One by one, which is all there is to know; or the first error."""
    reader, found = submitter(CountingChat()), []
    for index, spec in enumerate(specs):
        try:
            found += reader.read([spec], {})
        except InvalidRequestError as error:
            assert error.param is not None
            return error.message, error.param.replace("requests[0]", f"requests[{index}]")
    return found


@example(specs=[CallSpec(template=TEXTS[0], sampling={"temperature": value}) for value in (1, "1")])
@example(specs=[CallSpec(template=TEXTS[0], sampling={"stop": stop}) for stop in (["1"], 1)])
@example(
    specs=[
        CallSpec(template=TEXTS[1], parameters=[Parameter(name="y", role=role)])
        for role in (Role.OUTPUT, Role.INPUT)
    ]
)
@example(specs=[CallSpec(template=TEXTS[0], chat=chat) for chat in (False, True)])
@given(specs=st.lists(alike | calls, min_size=1, max_size=6))
def test_a_program_is_read_as_its_calls_are_one_by_one(specs: list[CallSpec]) -> None:
    try:
        found: Any = submitter(CountingChat()).read(specs, {})
    except InvalidRequestError as error:
        found = error.message, error.param
    assert found == read_alone(specs)
    if isinstance(found, list):
        for together, alone in zip(found, read_alone(specs), strict=True):
            assert repr(together.call.pieces) == repr(alone.call.pieces)  # where 1 is not True


def test_what_calls_have_in_common_is_worked_out_once() -> None:
    specs = [
        CallSpec(
            template="Sum up {{chunk}}: {{output:summary}} Title: {{output:title}}",
            chat=True,
            parameters=[Parameter(name="chunk", value=f"chunk {number}")],
        )
        for number in range(50)
    ]
    one, all_of_them = CountingChat(), CountingChat()
    submitter(one).read(specs[:1], {})
    submitter(all_of_them).read(specs, {})
    assert all_of_them.renders == one.renders


def user(content: str) -> Message:
    return Message(role="user", content=content)


@pytest.mark.parametrize(
    ("spec", "place", "says"),
    [
        (CallSpec(template="{{x}}" * (MAX_OPENINGS + 1)), "template", "placeholders"),
        (CallSpec(template="\\{{" * (MAX_OPENINGS + 1)), "template", "placeholders"),
        (CallSpec(messages=[user("{{x}}" * (MAX_OPENINGS // 2 + 1))] * 2), "messages", "holders"),
        (CallSpec(messages=[user("x")] * (MAX_MESSAGES + 1)), "messages", "messages"),
        (
            CallSpec(native=True, parameters=[Parameter(name="x")] * (MAX_PARAMETERS + 1)),
            "parameters",
            "parameters",
        ),
        (
            CallSpec(
                template="".join(f"x{{{{output:o{i}}}}}" for i in range(MAX_CALL_OUTPUTS + 1))
            ),
            "template",
            "outputs",
        ),
        (
            CallSpec(
                template="x" * (MAX_RENDERED_CHARS // 10)
                + "".join(f"x{{{{output:o{i}}}}}" for i in range(10)),
                chat=True,
            ),
            "template",
            "too long for 10 outputs",
        ),
    ],
)
def test_a_call_is_bounded(spec: CallSpec, place: str, says: str) -> None:
    chat = CountingChat()
    with pytest.raises(InvalidRequestError, match=says) as raised:
        submitter(chat).read([spec], {})
    assert raised.value.param == f"requests[0].{place}" and not chat.renders


def test_calls_with_many_pieces_are_read_in_more_slices() -> None:
    for pieces, pauses in ((1, 0), (30, 1), (300, 10)):
        specs = [CallSpec(template="{{x}}" * (pieces - 1) + "{{output:y}}")] * 10
        assert len(list(submitter(CountingChat()).reading(specs, {}))) == pauses


@pytest.mark.parametrize(
    ("field", "value"), [("stop_token_ids", [1, TOKENIZER.vocab_size]), ("logit_bias", {10**6: 1})]
)
def test_tokens_outside_the_vocabulary_are_refused_where_they_are(field: str, value: Any) -> None:
    reader = submitter(CountingChat())
    sampling = {field: value}
    own = CallSpec(template="{{output:y}}", parameters=[Parameter(name="y", sampling=sampling)])
    for spec, place in (
        (CallSpec(template="{{output:y}}", sampling=sampling), "requests[0].sampling"),
        (own, "requests[0].parameters[0].sampling"),
    ):
        with pytest.raises(InvalidRequestError, match="is outside the vocabulary") as raised:
            reader.read([spec], {})
        assert raised.value.param == f"{place}.{field}"
    with pytest.raises(InvalidRequestError, match="is outside the vocabulary") as raised:
        check_sampling(sampling, TOKENIZER.vocab_size)
    assert raised.value.param == f"sampling.{field}"
