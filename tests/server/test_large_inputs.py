"""Large inputs: what is refused, what runs off the event loop, and that answers stay the same."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from bros.core.errors import InvalidRequestError
from bros.server import http
from bros.server.http import _parse, json_list, json_pieces
from bros.server.openai import calls
from bros.server.openai.calls import MAX_ENCODED_BYTES, MAX_MESSAGES
from bros.server.openai.schema import TokenizeReply
from bros.server.openai.stream import CompletionChunkWriter
from support.scripted_server import Server, assert_envelope
from support.session_server import SessionClient, keeping, ok, stream_events

TEXT_PART = {"type": "text", "text": ""}


@given(st.lists(st.one_of(st.integers(), st.text(), st.none())))
def test_list_in_slices_is_the_list(values: list[Any]) -> None:
    assert json_list(values) == to_json(values)


def test_list_longer_than_a_slice_is_the_list() -> None:
    values = list(range(25_000))
    assert from_json(json_list(values)) == values


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
)


@given(JSON_VALUES)
def test_pieces_of_a_value_are_the_value(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http, "_PIECE_SIZE", 4)
        assert b"".join(json_pieces(value)) == to_json(value)


def test_no_piece_holds_the_interpreter_for_long() -> None:
    shown = [{"id": f"v{i}", "value": "x" * 100} for i in range(5000)]
    value = {"data": [*shown, {"id": "long", "value": '"' * 4_000_000}]}
    pieces = list(json_pieces(value))
    assert max(map(len, pieces)) < 300_000  # escapes, keys and brackets included
    assert from_json(b"".join(pieces)) == value


async def test_long_values_are_written_on_a_thread_and_sent_in_chunks(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[int]()

    def watched(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return json_pieces(*given)

    monkeypatch.setattr(http, "json_pieces", watched)
    async with keeping(server):
        session = await SessionClient.open(server.http)
        body = {"id": "v", "name": "v", "value": "ä\n" * 500_000}
        replies = [await session.ask("POST", "/variables", json=body), await session.look("v")]
        listed = await session.ask("GET", "/variables")
        replies += [await session.look("v", wait="true"), listed, await session.ask("GET")]
        stream = await session.look("v", stream="true")
    assert [ok(reply)["value"] for reply in replies[:3]] == [body["value"]] * 3
    assert ok(listed)["data"] == [ok(replies[0])] == ok(replies[4])["variables"]
    assert threads and threading.get_ident() not in threads
    assert "content-length" not in listed.headers
    assert stream_events(stream.text)[-2] == {"value": body["value"], "state": "ready"}


async def test_a_program_that_waits_leaves_turns_to_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many calls it has."""
    wanted, viewed, turn = Counter[int](), Counter[int](), 0

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async with keeping(server) as service:
        want, variable = service._want, service.variable

        def watched_want(*given: Any) -> Any:
            wanted[turn] += 1
            return want(*given)

        def watched_variable(*given: Any) -> Any:
            viewed[turn] += 1
            return variable(*given)

        monkeypatch.setattr(service, "_want", watched_want)
        monkeypatch.setattr(service, "variable", watched_variable)
        session = await SessionClient.open(server.http)
        counting = asyncio.create_task(count_turns())
        call = {"template": "Say {{output:o}}", "sampling": {"max_tokens": 1}}
        reply = await session.submit(requests=[call] * 100, wait=True)
        counting.cancel()
    assert [each["values"] for each in ok(reply)["requests"]] == [{"o": "H"}] * 100
    assert wanted.total() == viewed.total() == 100
    assert max(wanted.values()) <= 20 and max(viewed.values()) <= 20


def chat_with(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **more}


def tool_call(arguments: str) -> list[dict[str, Any]]:
    """A chat with a call of a tool."""
    function = {"name": "f", "arguments": arguments}
    called = {"id": "c", "type": "function", "function": function}
    return [{"role": "assistant", "tool_calls": [called]}, {"role": "user", "content": "x"}]


VALUES = {"enum": list(range(60_000))}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat_with(tools=[{"type": "function", "function": {"parameters": VALUES}}]), "tools"),
        (chat_with(chat_template_kwargs={"documents": VALUES}), "chat_template_kwargs"),
        (chat_with(messages=tool_call(json.dumps(VALUES))), "messages"),
        (chat_with(messages=tool_call("[" * 30_000)), "messages"),
        (
            chat_with(
                response_format={
                    "type": "json_schema", "json_schema": {"name": "s", "schema": VALUES},
                }
            ),
            "response_format",
        ),
    ],
    ids=["tools", "variables", "arguments", "lists", "schema"],
)  # fmt: skip
async def test_what_templates_and_grammars_write_as_json_is_bounded(
    server: Server, body: dict[str, Any], param: str
) -> None:
    reply = await server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_are_echoed_on_a_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """They are decoded there, too, and each choice of a response is written by itself."""
    threads = set[int]()

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(*given: Any, **more: Any) -> Any:
            threads.add(threading.get_ident())
            return function(*given, **more)

        monkeypatch.setattr(owner, name, watched)

    watch(server.tokenizer, "decode")
    watch(calls, "choices_json")
    watch(CompletionChunkWriter, "_events")
    prompt = server.tokenizer.encode("x" * 400)
    body = {"prompt": [prompt] * 10, "n": 2, "echo": True, "max_tokens": 1, "stream": stream}
    reply = await server.http.post("/v1/completions", json=body)
    if stream:
        events = stream_events(reply.text)[:-1]
        choices = [each for event in events for each in event["choices"]]
        shown = {i: "".join(c["text"] for c in choices if c["index"] == i) for i in range(20)}
    else:
        shown = {choice["index"]: choice["text"] for choice in ok(reply)["choices"]}
    assert shown == dict.fromkeys(range(20), "x" * 400 + "H")
    others = threads - {threading.get_ident()}
    assert others and (stream or threads == others), "the last chunks are small"


async def test_what_a_response_repeats_is_bounded(server: Server) -> None:
    body = {"prompt": "x" * 100_000, "n": 128, "echo": True}
    reply = await server.http.post("/v1/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "echo"


@pytest.mark.parametrize("names", [False, True])
async def test_tokenize_replies_what_its_model_says(server: Server, names: bool) -> None:
    body = {"prompt": 'some "text" \n é', "return_token_strs": names}
    response = await server.http.post("/tokenize", json=body)
    assert TokenizeReply.model_validate_json(response.text).model_dump_json() == response.text


async def test_tokenize_refuses_texts_beyond_a_megabyte(server: Server) -> None:
    fits = "ä" * (MAX_ENCODED_BYTES // 2)
    assert ok(await server.http.post("/tokenize", json={"prompt": fits}))["count"] > 0
    for body in (
        {"prompt": fits + "x"},
        {"messages": [{"role": "user", "content": fits}]},
    ):
        error = assert_envelope(await server.http.post("/tokenize", json=body), 400)
        assert error["code"] == "string_above_max_length"
        assert error["param"] == next(iter(body))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1),
        [{"role": "user", "content": [TEXT_PART] * (MAX_MESSAGES // 2)}] * 2
        + [{"role": "user", "content": [TEXT_PART]}],
    ],
    ids=["messages", "parts"],
)
async def test_chats_of_too_many_parts_are_refused(
    server: Server, path: str, messages: list[Any]
) -> None:
    response = await server.http.post(path, json={"messages": messages})
    error = assert_envelope(response, 400)
    assert (error["param"], error["code"]) == ("messages", "array_above_max_length")
    assert f"{MAX_MESSAGES + 1} " in error["message"]
    response = await server.http.post(path, json={"messages": messages[:-1]})
    assert response.status_code == 200 or "context length" in response.text


async def test_messages_that_are_none_get_the_usual_error(server: Server) -> None:
    for messages in ([1], "x", None, [{"content": 5}]):
        error = assert_envelope(await server.chat(messages=messages), 400)
        assert error["param"].startswith("messages")


@pytest.mark.parametrize(
    "part",
    ["[]", "{}", '{"a":1}', '{"a":1,"b":2,"c":3,"d":4}', "1"],
    ids=["[]", "{}", "a", "abcd", "numbers"],
)
def test_bodies_of_very_many_parts_are_refused(part: str) -> None:
    body = f'{{"prompt":[{",".join([part] * (2_000_000 // len(part)))}]}}'.encode()
    with pytest.raises(InvalidRequestError, match="objects and lists, .* keys and .* values"):
        _parse(body)


def test_as_many_token_ids_as_openai_embeds_at_once_are_accepted_and_more_are_not() -> None:
    """A million held the interpreter for 50 ms, twice: parsed, and then validated."""
    body = [{"tokens": [7] * count} for count in (300_000, 300_001)]
    assert _parse(json.dumps(body[0]).encode()) == body[0]
    with pytest.raises(InvalidRequestError, match="300001 values; at most 150000, 200000 and"):
        _parse(json.dumps(body[1]).encode())


async def test_the_largest_token_id_is_looked_for_on_the_thread_that_decodes(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    detokenizer, threads = server.tokenizer.detokenizer, set[int]()

    def watched(*args: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return detokenizer(*args, **options)

    monkeypatch.setattr(server.tokenizer, "detokenizer", watched)
    vocab_size = server.engine.info.vocab_size
    good = await server.http.post("/detokenize", json={"tokens": [7] * 10_000})
    assert good.status_code == 200
    assert len(threads) == 1 and threading.get_ident() not in threads
    bad = await server.http.post("/detokenize", json={"tokens": [7] * 10_000 + [vocab_size]})
    error = assert_envelope(bad, 400)
    assert error["param"] == "tokens" and len(threads) == 1


LONG = "9" * 41
TOOL_FIELDS = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": @}}}]'
UNWRITABLE = [r'{"a": "\ud800"}', r'{"\uDFFF": 1}', f'{{"a": [{LONG}]}}']


@pytest.mark.parametrize("number", [LONG, "1e400"])
@pytest.mark.parametrize("padding", [0, 100_000])
async def test_numbers_that_are_too_long_or_infinite_are_refused(
    server: Server, padding: int, number: str
) -> None:
    """One of 4,300 digits holds the interpreter for a millisecond."""
    fields = '"messages": [{"role": "user", "content": "x"}], ' + TOOL_FIELDS.replace("@", number)
    response = await server.http.post(
        "/v1/chat/completions",
        content="{" + fields + " " * padding + "}",
        headers={"content-type": "application/json"},
    )
    error = assert_envelope(response, 400)
    assert error["code"] == "invalid_value" and error["message"].startswith("The body has a number")


@pytest.mark.parametrize("arguments", UNWRITABLE)
async def test_arguments_that_cannot_be_written_stay_text(server: Server, arguments: str) -> None:
    """A model may have written them."""
    reply = await server.chat(messages=tool_call(arguments))
    assert reply.status_code == 200, reply.text
    rendered = await server.http.post("/tokenize", json={"messages": tool_call(arguments)})
    assert rendered.status_code == 200, rendered.text


async def test_a_schema_in_a_string_has_no_long_numbers(server: Server) -> None:
    error = assert_envelope(await server.chat(guided_json=f'{{"maximum": {LONG}}}'), 400)
    assert error["param"] == "guided_json" and "more than 40 digits" in error["message"]


def test_brackets_in_strings_are_no_parts() -> None:
    text = 'if (a[0]) { b["k"] = {c: 1}; } // "\\" ' * 20_000 + ", " * 1_100_000
    body = {"prompt": text, "list": list(range(100_000))}
    assert _parse(json.dumps(body).encode()) == body


@given(st.text('ab"\\{[:', max_size=12))
def test_large_bodies_that_are_no_json_are_refused_like_small_ones(text: str) -> None:
    """Half strings and stray backslashes too."""
    body = b'{"a":"' + b"[" * 150_001 + b'",' + text.encode() + b"}"
    with pytest.raises(InvalidRequestError):
        _parse(body)


async def test_large_bodies_are_read_on_a_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripted tokenizer renders on the thread that asks it."""
    threads = []
    render = server.tokenizer.render_chat

    def watched(*args: Any, **kwargs: Any) -> str:
        threads.append(threading.get_ident())
        return render(*args, **kwargs)

    monkeypatch.setattr(server.tokenizer, "render_chat", watched)
    for number in (1, 1000):
        await server.chat(messages=[{"role": "user", "content": ""}] * number)
    assert threads[0] == threading.get_ident() != threads[1]


async def test_prompts_of_one_request_are_encoded_together(server: Server) -> None:
    """1,000 prompts, each short enough for the event loop."""
    threads = set()
    encode = server.tokenizer.encode

    def watched(text: str, **kwargs: Any) -> list[int]:
        if text.startswith("word "):
            threads.add(threading.get_ident())
        return encode(text, **kwargs)

    server.tokenizer.encode = watched  # type: ignore[method-assign]
    response = await server.complete(prompt=["word " * 10] * 100, max_tokens=1)
    assert response.status_code == 200
    assert threads and threading.get_ident() not in threads


def failed_call(response: httpx.Response) -> dict[str, Any]:
    """Why a value failed."""
    assert response.status_code == 424, response.text
    cause: dict[str, Any] = response.json()["error"]["cause"]
    return cause


async def test_value_longer_than_the_context_fails_its_call_alone(server: Server) -> None:
    async with keeping(server):
        session = await SessionClient.open(server.http)
        limit = server.state.engine.info.max_model_len
        variables = await session.call(
            "{{input:text}}{{output:answer}}",
            parameters=[{"name": "text", "value": "word " * 100_000}],
        )
        response = await session.look(variables["answer"], wait="true", timeout=30)
        cause = failed_call(response)
        assert cause["stage"] == "fill"
        assert f"maximum context length is {limit} tokens" in cause["message"]


async def test_values_that_are_too_long_together_are_not_all_encoded(server: Server) -> None:
    limit = server.state.engine.info.max_model_len
    encoded = 0
    encode = server.tokenizer.encode

    def watched(text: str, **kwargs: Any) -> list[int]:
        nonlocal encoded
        encoded += len(text)
        return encode(text, **kwargs)

    names = [f"v{i}" for i in range(50)]
    async with keeping(server):
        session = await SessionClient.open(server.http)
        server.tokenizer.encode = watched  # type: ignore[method-assign]
        variables = await session.call(
            "".join(f"{{{{input:{name}}}}}" for name in names) + "{{output:answer}}",
            parameters=[{"name": name, "value": "z" * limit} for name in names],
        )
        response = await session.look(variables["answer"], wait="true", timeout=30)
        assert failed_call(response)["stage"] == "fill"
        assert encoded <= 4 * limit


async def test_transforms_of_a_session_that_are_slow_run_in_a_process(server: Server) -> None:
    async with keeping(server):
        session = await SessionClient.open(server.http)
        variables = await session.call(
            "{{input:text}}{{output:answer}}",
            parameters=[
                {"name": "text", "value": "a" * 1500 + "b", "transforms": 'regex("(a|aa)+$")'}
            ],
        )
        asking = asyncio.create_task(session.look(variables["answer"], wait="true", timeout=60))
        while not asking.done():  # the server answers others meanwhile
            assert (await server.http.get("/health")).status_code == 200
            await asyncio.sleep(0.001)
        assert "took longer than 0.25 s" in failed_call(await asking)["message"]


async def test_detokenize_refuses_texts_beyond_a_megabyte() -> None:
    """However few tokens they have."""
    made = Server(tokens={"\n" * 128: False})
    token_id = made.tokenizer.added_token("\n" * 128)
    async with made.http:
        fits = await made.http.post("/detokenize", json={"tokens": [token_id] * 8192})
        assert ok(fits) == {"prompt": "\n" * 2**20}
        reply = await made.http.post("/detokenize", json={"tokens": [token_id] * 8193})
    error = assert_envelope(reply, 400)
    assert (error["param"], error["code"]) == ("tokens", "array_above_max_length")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("count", [1, 2])
async def test_further_fields_of_messages_are_counted_together(
    server: Server, path: str, count: int
) -> None:
    names = {str(i): 0 for i in range(16_000 // count)}
    messages = [{"role": "user", "content": "x", "more": names}] * count
    good = await server.http.post(path, json={"messages": messages[:1] if count == 2 else []})
    assert good.status_code == (200 if count == 2 else 400), good.text
    response = await server.http.post(path, json={"messages": messages})
    error = assert_envelope(response, 400)
    assert error["param"] == "messages" and "further fields" in error["message"]
