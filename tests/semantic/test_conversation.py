"""Calls in the model's chat format, against the format applied to the values themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.errors import InvalidRequestError
from bros.semantic.core.submission import ANSWER, prompt_pieces
from bros.semantic.core.template import Piece, Placeholder, Text, render_template
from bros.semantic.schema import CallSpec, Message, Parameter, Role
from bros.text.chat_format import ChatFormat
from support.tiny_tokenizer import TEMPLATE, tiny_tokenizer

# As in SmolLM2-Instruct: a system message unless there is one.
SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMED = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}[assistant]"
# What the assistant thought is left out once it is past; the answer begins with thinking.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}</>{% endfor %}"
    "<assistant><think></think>"
)
KEEPING = {"tiny": TEMPLATE, "system": SYSTEM, "thinking": THINKING}
TEXTS = st.text("ab {}\\\n:0\ue000\ue001", max_size=8)


def chat_format(template: str | None = TEMPLATE) -> ChatFormat:
    return ChatFormat(tiny_tokenizer(template))


def filled(pieces: Sequence[Piece], values: Mapping[str, str]) -> str:
    return "".join(p.text if isinstance(p, Text) else values[p.name] for p in pieces)


def names(pieces: Sequence[Piece]) -> list[str]:
    return [piece.name for piece in pieces if isinstance(piece, Placeholder)]


@pytest.mark.parametrize("template", KEEPING.values(), ids=KEEPING)
@given(
    contents=st.lists(st.tuples(TEXTS, st.booleans(), TEXTS), min_size=1, max_size=4),
    values=st.lists(TEXTS, min_size=4, max_size=4),
    system=st.booleans(),
)
def test_a_call_reads_what_its_conversation_would(
    template: str, contents: list[tuple[str, bool, str]], values: list[str], system: bool
) -> None:
    """The pieces filled in are what the chat format makes of the filled in messages; texts may
    look like the marks that are used inside."""
    chat = chat_format(template)
    messages, plain = [], []
    roles = ["system", "user", "user", "user"] if system else ["user"] * 4
    given_values = {f"v{i}": value for i, value in enumerate(values)}
    for i, (before, has_input, after) in enumerate(contents):
        hole, value = (f"{{{{v{i}}}}}", values[i]) if has_input else ("", "")
        # A text before a placeholder may end with a backslash, which would be an escape.
        before = before.rstrip("\\{")
        content = render_template([Text(before)]) + hole + render_template([Text(after)])
        messages.append(Message(role=roles[i], content=content))
        plain.append({"role": roles[i], "content": before + value + after})
    pieces = prompt_pieces(CallSpec(messages=messages), chat)
    assert pieces[-1] == ANSWER
    assert filled(pieces[:-1], given_values) == chat.render_chat(plain)


@pytest.mark.parametrize("template", [TEMPLATE, SYSTEM])
def test_several_outputs_read_what_the_whole_conversation_would(template: str) -> None:
    chat = chat_format(template)
    messages = [
        Message(role="user", content="Ask {{q}} and {{q}}"),
        Message(role="assistant", content="Sure: {{output:a}}, or {{output:b}}, {{t}}!"),
        Message(role="user", content="{{r}}"),
        Message(role="assistant", content="{{output:c}} and so on"),
        Message(role="user", content="{{pruned}}"),
    ]
    pieces = prompt_pieces(CallSpec(messages=messages), chat)
    assert names(pieces) == ["q", "q", "a", "b", "t", "r", "c"]
    values = {"q": "Q", "a": "A", "b": "B", "t": "T", "r": "R"}
    plain = [
        {"role": "user", "content": "Ask Q and Q"},
        {"role": "assistant", "content": "Sure: A, or B, T!"},
        {"role": "user", "content": "R"},
    ]
    assert filled(pieces[:-1], values) == chat.render_chat(plain)
    to_first = pieces[: names(pieces).index("a") * 2 + 1]
    assert filled(to_first, values) == chat.render_chat(plain[:1]) + "Sure: "


def test_each_llm_call_begins_with_what_the_format_writes_before_an_answer() -> None:
    """Although this format writes past answers without it."""
    pieces = prompt_pieces(
        CallSpec(template="Do {{x}} {{output:a}} then {{output:b}}", chat=True),
        chat_format(THINKING),
    )
    assert filled(pieces[:-1], {"x": "X", "a": "A"}) == (
        "<user>Do X</><assistant><think></think>A</><user>then</><assistant><think></think>"
    )


def test_a_chat_template_makes_llm_calls_of_the_outputs() -> None:
    spec = CallSpec(
        template="  Write {{input:x}}.\n {{output:a}}\nShorter, {{input:x}}! {{output:b:fast}} end",
        chat=True,
    )
    messages = [
        Message(role="user", content="Write {{input:x}}."),
        Message(role="assistant", content="{{output:a}}"),
        Message(role="user", content="Shorter, {{input:x}}!"),
        Message(role="assistant", content="{{output:b:fast}}"),
    ]
    for template in (TEMPLATE, SYSTEM, TRIMMED):
        chat = chat_format(template)
        assert prompt_pieces(spec, chat) == prompt_pieces(CallSpec(messages=messages), chat)


def test_a_format_that_trims_keeps_the_placeholders() -> None:
    messages = [Message(role="user", content="\n {{x}} and\n{{y}} \n")]
    pieces = prompt_pieces(CallSpec(messages=messages), chat_format(TRIMMED))
    assert pieces[:4] == (
        Text("[user]"),
        Placeholder("x", Role.INPUT),
        Text(" and\n"),
        Placeholder("y", Role.INPUT),
    )


def test_a_template_without_chat_is_as_it_stands_up_to_its_last_output() -> None:
    spec = CallSpec(
        template=" {{x}} is {{output:y}} after {{x}}",
        parameters=[Parameter(name="x", value="1"), Parameter(name="y", role=Role.OUTPUT)],
    )
    assert prompt_pieces(spec, chat_format(None)) == (
        Text(" "),
        Placeholder("x", Role.INPUT),
        Text(" is "),
        Placeholder("y", Role.OUTPUT),
    )


USER = Message(role="user", content="Q")
ASSISTANT = Message(role="assistant", content="{{output:a}}")


@pytest.mark.parametrize(
    ("spec", "param", "message"),
    [
        (CallSpec(), "template", "either template or messages"),
        (CallSpec(template="x", messages=[USER]), "template", "either template or messages"),
        (CallSpec(template="no output {{x}}"), "template", "has no output"),
        (CallSpec(messages=[]), "messages", "at least one message"),
        (
            CallSpec(template="".join(f"a {{{{output:o{i}}}}}" for i in range(101)), chat=True),
            "template",
            "101 outputs, more than 100",
        ),
        (CallSpec(template="{{output:a}}", chat=True), "template", "There is no text before"),
        (
            CallSpec(template="a {{output:a}} \n {{output:b}}", chat=True),
            "template",
            "There is no text before the output 'b'",
        ),
        (CallSpec(messages=[USER, Message(role="user", content="{{x")]), "messages[1].content", ""),
        (
            CallSpec(messages=[USER, ASSISTANT, USER, ASSISTANT]),
            "messages",
            "'a' occurs twice",
        ),
        (
            CallSpec(messages=[Message(role="user", content="{{output:a}}")]),
            "messages[0].content",
            "Only an assistant message",
        ),
        (
            CallSpec(messages=[USER], parameters=[Parameter(name="x")]),
            "parameters[0].name",
            "no placeholder 'x'",
        ),
        (
            CallSpec(template="{{output:a}}", parameters=[Parameter(name="a")] * 2),
            "parameters[1].name",
            "is a parameter twice",
        ),
        (
            CallSpec(template="{{output:a}}", parameters=[Parameter(name="a", role=Role.INPUT)]),
            "template",
            "'a' is an output here and an input",
        ),
        (
            CallSpec(messages=[USER], parameters=[Parameter(name="output", role=Role.INPUT)]),
            "parameters[0].role",
            "not an input",
        ),
        (
            CallSpec(messages=[Message(role="user", content="{{output}}")]),
            "messages",
            "which an input has already",
        ),
    ],
)
def test_what_is_wrong_with_a_call_is_said(spec: CallSpec, param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        prompt_pieces(spec, chat_format())
    assert raised.value.param == param
    assert message in str(raised.value)


class Format(ChatFormat):
    """A chat format that is a function of the messages."""

    def __init__(self, render: Any) -> None:
        super().__init__(tiny_tokenizer())
        self._render = render

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return str(self._render([message["content"] for message in messages]))


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (Format(lambda contents: "".join(contents[1:])), "'x': it leaves it out"),
        (Format(lambda contents: "".join(contents * 2)), "'x': it writes it 2 times"),
        (Format(lambda contents: "".join(reversed(contents))), "'x': it moves it past an output"),
        (
            Format(lambda contents: "".join([*contents[1:2], *contents[:1], *contents[2:]])),
            "'a': it writes it before what precedes it",
        ),
        (Format(lambda contents: contents[-1] if len(contents) == 1 else "-".join(contents[:2])),
         "'y': it leaves it out"),
        (Format(lambda contents: "".join(contents).upper().replace("\ue001", "")), "leaves it out"),
    ],
)  # fmt: skip
def test_a_format_that_loses_placeholders_is_refused(chat: ChatFormat, message: str) -> None:
    spec = CallSpec(template="1 {{x}} {{output:a}} 2 {{y}} {{output:b}}", chat=True)
    with pytest.raises(InvalidRequestError) as raised:
        prompt_pieces(spec, chat)
    assert message in str(raised.value)
    assert raised.value.param == "template"


def test_outputs_with_nothing_between_them_are_refused() -> None:
    messages = [USER, ASSISTANT, Message(role="assistant", content="{{output:b}}")]
    with pytest.raises(InvalidRequestError, match="nothing between two of the outputs"):
        prompt_pieces(CallSpec(messages=messages), Format("".join))


def test_inputs_may_change_places_before_an_output() -> None:
    """Some formats write the system message into the last user message."""
    chat = Format(lambda contents: "|".join(reversed(contents)))
    messages = [Message(role="system", content="{{s}}"), Message(role="user", content="{{u}}")]
    assert names(prompt_pieces(CallSpec(messages=messages), chat)) == ["u", "s", "output"]


def test_a_refusal_of_the_format_goes_through() -> None:
    strict = chat_format("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        prompt_pieces(CallSpec(messages=[USER]), strict)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        prompt_pieces(CallSpec(template="x {{output:a}}", chat=True), chat_format(None))


def test_a_text_of_all_the_marks_is_not_mistaken() -> None:
    text = "".join(f"\ue000{number}:0\ue001" for number in range(3000))
    pieces = prompt_pieces(
        CallSpec(template=text + "{{x}}{{output:y}}", chat=True), Format("".join)
    )
    assert pieces[0] == Text(text) and names(pieces) == ["x", "y"]
