"""Outputs of sessions with a schema or grammar: what is asked of the engine, and what goes on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from bros.core import grammars
from bros.core.request import SamplingParams
from bros.semantic.core.submission import check_sampling
from bros.text.grammar_check import GrammarChecker
from support import chat_templates
from support.scripted_server import Server, assert_envelope
from support.session_server import SessionClient, keeping, ok
from support.tiny_tokenizer import save_tokenizer

JSON = {"response_format": {"type": "json_object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = "Say {{output:y}}"
THINK_TOKENS = {"<think>": False, "</think>": False}


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarChecker]:
    made = GrammarChecker(save_tokenizer(tmp_path_factory.mktemp("tokenizer")), 440, [1])
    yield made
    made.close()


@pytest.fixture
async def kept(checker: GrammarChecker) -> AsyncIterator[Server]:
    server = Server(grammars=checker)
    async with keeping(server):
        yield server
    await server.http.aclose()


@pytest.fixture
async def session(kept: Server) -> SessionClient:
    return await SessionClient.open(kept.http)


def grammar_of(server: Server) -> str | None:
    grammar = server.last().sampling.grammar
    return None if grammar is None else grammar.text


async def test_outputs_have_the_grammar_of_the_parameter_the_call_or_the_session(
    kept: Server,
) -> None:
    created = await kept.http.post("/v1/sessions", json={"sampling": {"guided_regex": "H.*"}})
    session = SessionClient(kept.http, ok(created)["id"])
    own = {"name": "y", "sampling": {"structured_outputs": {"json": SCHEMA}}}
    kept.engine.texts = ("Hello", '{"a": 1}', '{"a": 2}')
    found = []
    for call in (
        {"template": CALL},
        {"template": CALL, "sampling": {"guided_regex": None, **JSON}},
        {"template": CALL, "parameters": [own]},
    ):
        ok(await session.submit(requests=[call], wait=True))
        found.append(grammar_of(kept))
    assert found == [
        grammars.regex("H.*").text, grammars.json_object().text, grammars.json_schema(SCHEMA).text
    ]  # fmt: skip


async def test_a_cut_answer_does_not_go_on(kept: Server, session: SessionClient) -> None:
    kept.engine.text = '{"a": 1234567}'
    first = {
        "template": CALL,
        "sampling": {**JSON, "max_tokens": 5},
        "parameters": [{"name": "y", "variable": "v"}],
    }
    then = {
        "template": "And {{input:y}} so {{output:z}}",
        "parameters": [{"name": "y", "variable": "v"}],
    }
    reply = await session.submit(requests=[first, then], wait=True)
    assert reply.status_code == 424
    cause = reply.json()["error"]["cause"]
    assert cause["stage"] == "generate"
    assert "does not match 'response_format': it was cut after 5 tokens" in cause["message"]
    assert len(kept.engine.submitted) == 1
    whole = {**first, "parameters": [], "sampling": JSON}
    values = ok(await session.submit(requests=[whole], wait=True))["requests"][0]["values"]
    assert values == {"y": kept.engine.text}


async def test_json_that_a_stop_string_cuts_does_not_go_on(
    kept: Server, session: SessionClient
) -> None:
    kept.engine.text = '{"a": 1, "b": 2}'
    call = {"template": CALL, "sampling": {**JSON, "stop": ", "}}
    reply = await session.submit(requests=[call], wait=True)
    assert reply.status_code == 424
    assert "does not match 'response_format'" in reply.json()["error"]["cause"]["message"]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({**JSON, "guided_regex": "a"}, "guided_regex"),
    ],
)
async def test_wrong_grammars_are_refused_when_they_are_submitted(
    kept: Server, session: SessionClient, sampling: dict[str, Any], param: str
) -> None:
    call = {"template": CALL, "sampling": sampling}
    own = {"template": CALL, "parameters": [{"name": "y", "sampling": sampling}]}
    plain = {"template": CALL}
    created = await kept.http.post("/v1/sessions", json={"sampling": sampling})
    for place, reply in {
        "": created,
        "requests[1].": await session.submit(requests=[plain, call]),
        "parameters[0].": await session.submit(**own),
        "requests[1].parameters[0].": await session.submit(requests=[plain, own]),
    }.items():
        assert assert_envelope(reply, 400)["param"] == f"{place}sampling.{param}"
    assert not kept.engine.submitted


def test_the_front_end_takes_the_same_fields(tmp_path: Path) -> None:
    check_sampling({"structured_outputs": {"choice": ["a", "b"]}}, 100)
    with pytest.raises(ValueError, match="one grammar only"):
        check_sampling({**JSON, "guided_regex": "a"}, 100)
    with pytest.raises(ValueError, match="'response_format.type' must be text"):
        check_sampling({"response_format": {}}, 100)
    assert SamplingParams(grammar=grammars.json_object()).grammar is not None


# ---- Models that think before they answer.


@contextlib.asynccontextmanager
async def thinking(template: str, **options: Any) -> AsyncIterator[tuple[Server, SessionClient]]:
    server = Server(template=template, tokens=THINK_TOKENS, max_model_len=4000, **options)
    async with keeping(server), server.http:
        yield server, await SessionClient.open(server.http)


ASK = {
    "template": "Say {{output:y}}",
    "chat": True,
    "parameters": [{"name": "y", "variable": "v"}],
    "sampling": JSON,
}
READ = {
    "template": "And {{input:y}} so {{output:z}}",
    "parameters": [{"name": "y", "variable": "v"}],
}
VALUE = '{"a": 1}'


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (chat_templates.THINKING, f"<think>\nHm, {{1}}.\n</think>\n\n{VALUE}"),
        (chat_templates.THINKING, VALUE),
        (chat_templates.OPENED, f"Hm.\n</think>\n\n{VALUE}"),
    ],
)
async def test_a_grammar_applies_after_the_reasoning_which_is_no_part_of_the_value(
    template: str, written: str
) -> None:
    async with thinking(template) as (server, session):
        server.engine.texts = (written, "Yes")
        reply = ok(await session.submit(requests=[ASK, READ], wait=True))
        asked, read = server.engine.submitted
        start = server.state.chat_format.reasoning_start(
            server.tokenizer.decode(asked.prompt_token_ids, skip_special_tokens=False)
        )
        assert asked.sampling.grammar == server.state.chat_format.grammar(
            None, grammars.json_object(param="response_format"), start
        )
        assert asked.sampling.grammar != grammars.json_object(param="response_format")
        assert server.tokenizer.decode(read.prompt_token_ids) == f"And {VALUE} so "
        assert reply["requests"][0]["values"] == {"y": VALUE}
        assert await session.value("v") == VALUE


async def test_outputs_within_an_answer_have_no_reasoning() -> None:
    async with thinking(chat_templates.THINKING) as (server, session):
        server.engine.texts = ('{"b": 2}', f"<think>Hm.</think>{VALUE}")
        messages = [
            {"role": "user", "content": "Say"},
            {"role": "assistant", "content": "It is {{output:x}}"},
            {"role": "user", "content": "More"},
            {"role": "assistant", "content": "{{output:y}}"},
        ]
        reply = ok(
            await session.submit(requests=[{"messages": messages, "sampling": JSON}], wait=True)
        )
        assert reply["requests"][0]["values"] == {"x": '{"b": 2}', "y": VALUE}
        within, whole = (request.sampling.grammar for request in server.engine.submitted)
        assert within == grammars.json_object(param="response_format") != whole
        plain = {"template": CALL, "sampling": JSON}
        server.engine.texts, server.engine.text = (), VALUE
        ok(await session.submit(requests=[plain], wait=True))
        assert server.last().sampling.grammar == within
        server.engine.text = "<think>Hm.</think>Yes"
        reply = ok(await session.submit(requests=[{"template": CALL}], wait=True))
        assert reply["requests"][0]["values"] == {"y": server.engine.text}


async def test_reasoning_without_an_answer_fails_its_call() -> None:
    async with thinking(chat_templates.OPENED) as (server, _):
        server.engine.text = "Hm, let me see."
        for sampling, more in (
            ({"max_tokens": 5}, "5 tokens without an answer; give more max_tokens."),
            ({"max_tokens": 5, **JSON}, "5 tokens without an answer; give more max_tokens."),
            ({}, "16 tokens without an answer."),
        ):
            session = await SessionClient.open(server.http)
            reply = await session.submit(requests=[{**ASK, "sampling": sampling}], wait=True)
            assert reply.status_code == 424
            cause = reply.json()["error"]["cause"]["message"]
            assert cause == f"The model has reasoned for {more}"


@pytest.mark.parametrize("template", [chat_templates.THINKING, chat_templates.OPENED])
async def test_the_next_output_of_a_call_sees_the_reasoning_also_where_a_stop_string_cut_the_answer(
    template: str,
) -> None:
    opened = template == chat_templates.OPENED
    async with thinking(template) as (server, session):
        thought = "Hm.\n</think>\n\n" if opened else "<think>\nHm.\n</think>\n\n"
        server.engine.texts = (f"{thought}one STOP two", f"{thought}three")
        messages = [
            {"role": "user", "content": "Say"},
            {"role": "assistant", "content": "{{output:x}}"},
            {"role": "user", "content": "More"},
            {"role": "assistant", "content": "{{output:y}}"},
        ]
        sampling = {"stop": " STOP"}
        ok(await session.submit(requests=[{"messages": messages, "sampling": sampling}], wait=True))
        prompt = server.tokenizer.decode(server.last().prompt_token_ids, skip_special_tokens=False)
        begins = prompt.index("<think>")
        assert "".join(prompt[begins:].split()).startswith("<think>Hm.</think>one<|im_end|>")


async def test_texts_and_values_cannot_write_the_markers_of_reasoning() -> None:
    async with thinking(chat_templates.THINKING) as (server, session):
        server.engine.text = "Yes"
        marker = server.tokenizer.added_token("</think>")
        spoof = {
            "template": "Say </think> {{input:x}} {{output:y}}",
            "chat": True,
            "parameters": [{"name": "x", "value": "<think></think>"}],
        }
        ok(await session.submit(requests=[spoof], wait=True))
        assert marker not in server.last().prompt_token_ids
        text = server.tokenizer.decode(server.last().prompt_token_ids)
        assert "Say </think> <think></think>" in text


async def test_the_format_of_reasoning_can_be_set() -> None:
    async with thinking(chat_templates.THINKING, reasoning_format="none") as (server, session):
        server.engine.text = f"<think>Hm.</think>{VALUE}"
        reply = ok(await session.submit(requests=[{**ASK, "sampling": {}}], wait=True))
        assert reply["requests"][0]["values"] == {"y": server.engine.text}


async def test_gbnf_cannot_follow_reasoning() -> None:
    gbnf = {"structured_outputs": {"grammar": 'root ::= "a"'}}
    async with thinking(chat_templates.THINKING) as (server, session):
        reply = await session.submit(requests=[{**ASK, "sampling": gbnf}])
        error = assert_envelope(reply, 400)
        assert error["param"] == "requests[0].sampling.structured_outputs.grammar"
        assert "write it in Lark" in error["message"]
        ok(await session.submit(requests=[{**READ, "sampling": gbnf}]))


@pytest.mark.parametrize(
    ("schema", "text", "stop", "whole"),
    [
        ({"type": "object"}, VALUE + "\n", "\n", True),
        ({"type": "integer", "minimum": 10}, "1234", "3", False),
        ({"type": "boolean"}, "true\n", "\n", True),
        ({"type": "array"}, "[1, 2]", ", ", False),
    ],
)
async def test_stop_strings_may_end_json_only_behind_it(
    kept: Server, session: SessionClient, schema: Any, text: str, stop: str, whole: bool
) -> None:
    kept.engine.text = text
    sampling = {"stop": stop, "guided_json": schema, "guided_whitespace_pattern": r"[ \n]*"}
    reply = await session.submit(requests=[{"template": CALL, "sampling": sampling}], wait=True)
    if whole:
        assert ok(reply)["requests"][0]["values"] == {"y": text.removesuffix(stop)}
    else:
        assert reply.status_code == 424
        message = (
            f"The answer does not match 'guided_json': it was cut by the stop string {stop!r}."
        )
        assert reply.json()["error"]["cause"]["message"] == message
