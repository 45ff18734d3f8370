"""/v1/messages as Anthropic's own client sees it."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from bros.core.errors import QueueFullError
from bros.core.request import ServiceClass
from support.batch_server import BatchServer, batch_server
from support.scripted_server import LiveServer, live_server

if TYPE_CHECKING:
    import anthropic
    from anthropic.types import Message

HI: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "name": "weather",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def sdk() -> Any:
    """Anthropic's package. All workers collect this file, and it takes a second to import."""
    return importlib.import_module("anthropic")


@functools.cache
def stream_events() -> TypeAdapter[Any]:
    return TypeAdapter(sdk().types.RawMessageStreamEvent)


@pytest.fixture
async def live() -> AsyncIterator[LiveServer]:
    async with live_server(max_model_len=4000, api_key="secret", reasoning_format="think") as made:
        yield made


@pytest.fixture
async def client(live: LiveServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    http = sdk().DefaultAsyncHttpxClient(verify=False)
    async with sdk().AsyncAnthropic(
        base_url=live.url, api_key="secret", max_retries=0, http_client=http
    ) as made:
        yield made


async def test_models(client: anthropic.AsyncAnthropic) -> None:
    (model,) = [each async for each in client.models.list()]
    assert (model.type, model.id, model.display_name) == ("model", "scripted", "scripted")
    assert int(model.created_at.timestamp()) == 1_700_000_000
    assert (await client.models.retrieve("scripted")).id == "scripted"
    assert type(model).model_validate(model.to_dict(mode="json")) == model  # nothing is missing


async def create(client: anthropic.AsyncAnthropic, **fields: Any) -> Message:
    fields = {"model": "scripted", "max_tokens": 200, "messages": HI, **fields}
    found: Message = await client.messages.create(**fields)
    assert found.type == "message"
    return found


def prompt(live: LiveServer) -> str:
    return live.server.tokenizer.decode(live.server.last().prompt_token_ids)


async def test_a_message(live: LiveServer, client: anthropic.AsyncAnthropic) -> None:
    live.server.engine.cached_tokens = 3
    message = await create(
        client, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9}
    )
    (block,) = message.content
    assert block.type == "text" and block.text == "Hello world"
    assert (message.role, message.model, message.type) == ("assistant", "scripted", "message")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    request = live.server.last()
    usage = message.usage
    assert usage.input_tokens == len(request.prompt_token_ids) - 3
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (3, 12)
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == 0
    assert usage.service_tier == "standard"
    assert "Be brief." in prompt(live) and message.id.startswith("msg_")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 5, 0.9)
    assert sampling.max_tokens == 200 and request.service_class is ServiceClass.RT
    type(message).model_validate(message.model_dump(), strict=True)


async def test_why_it_stopped(live: LiveServer, client: anthropic.AsyncAnthropic) -> None:
    cut = await create(client, max_tokens=4)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 4)
    stopped = await create(client, stop_sequences=["wor"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wor")
    assert stopped.content[0].text == "Hello "  # type: ignore[union-attr]


async def events_of(live: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    """Each conforms to the client's models."""
    body = {"max_tokens": 200, "messages": HI, "stream": True, **fields}
    async with live.client(verify=False) as http:
        reply = await http.post("/v1/messages", json=body, headers={"x-api-key": "secret"})
    assert reply.status_code == 200, reply.text
    found = []
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            stream_events().validate_python(event, strict=True)
        found.append(event)
    return found


async def test_events_come_in_order(live: LiveServer) -> None:
    live.server.engine.text = f"<think>Hm.</think>Let me see.{CALL}"
    events = await events_of(live, tools=[WEATHER])
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("ping") == 1
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == len(live.server.last().prompt_token_ids)
    shown = [(e["index"], e["type"]) for e in events if "index" in e]
    assert [index for index, _ in shown] == sorted(index for index, _ in shown)
    for index in range(3):
        of_block = [kind for i, kind in shown if i == index]
        assert of_block[0] == "content_block_start" and of_block[-1] == "content_block_stop"
        assert set(of_block[1:-1]) == {"content_block_delta"}
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    found = {kind: "" for kind in ("thinking", "text", "partial_json")}
    for delta in deltas:
        for kind in found:
            found[kind] += delta.get(kind, "")
    assert found == {
        "thinking": "Hm.",
        "text": "Let me see.",
        "partial_json": '{"city": "Paris"}',
    }
    assert deltas[[d["type"] for d in deltas].index("signature_delta")]["signature"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(live.server.engine.text) + 1


async def test_the_stream_helper_of_the_client(
    live: LiveServer, client: anthropic.AsyncAnthropic
) -> None:
    async with client.messages.stream(model="scripted", max_tokens=50, messages=HI) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(texts) == "Hello world" and len(texts) > 1
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == 12


async def test_a_tool_is_used_and_its_result_answered(
    live: LiveServer, client: anthropic.AsyncAnthropic
) -> None:
    """The loop that agents run, streamed and not."""
    for streams in (False, True):
        live.server.engine.text = f"<think>Hm.</think>Let me see.{CALL}"
        asked: dict[str, Any] = {"tools": [WEATHER], "messages": HI}
        if streams:
            async with client.messages.stream(model="scripted", max_tokens=200, **asked) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await create(client, **asked)
        assert message.stop_reason == "tool_use"
        thinking, text, use = message.content
        assert (thinking.thinking, text.text) == ("Hm.", "Let me see.")
        assert message.usage.output_tokens_details is not None
        assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
        assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Paris"})
        live.server.engine.text = "Sunny."
        redacted: Any = {"type": "redacted_thinking", "data": "c2VjcmV0"}
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sun"}
        answer = await create(
            client,
            tools=[WEATHER],
            messages=[
                *HI,
                {"role": "assistant", "content": [redacted, *message.content]},
                {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
            ],
        )
        assert answer.content[0].text == "Sunny."  # type: ignore[union-attr]
        said = prompt(live)
        assert said.index("Let me see.") < said.index("Paris") < said.index("sun")
        assert said.index("sun") < said.index("And?")


async def test_stop_sequences_end_the_text_and_no_use_of_a_tool(
    live: LiveServer, client: anthropic.AsyncAnthropic
) -> None:
    live.server.engine.text = f"One.{CALL} Two. Three."
    message = await create(client, tools=[WEATHER], stop_sequences=["name", "}}", "Three"])
    text, use = message.content
    assert use.type == "tool_use" and use.input == {"city": "Paris"}
    assert text.type == "text" and text.text == "One.Two. "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Three")
    live.server.engine.text = CALL
    message = await create(client, tools=[WEATHER], stop_sequences=["name", "}}"])
    assert message.stop_reason == "tool_use"


async def test_input_of_a_tool_that_was_cut_off(
    live: LiveServer, client: anthropic.AsyncAnthropic
) -> None:
    live.server.engine.text = CALL
    message = await create(client, tools=[WEATHER], max_tokens=len(CALL) - 20)
    assert message.stop_reason == "max_tokens"
    (block,) = message.content
    assert block.type == "tool_use" and block.input in ({}, {"city": "P"})


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('"Paris"', "Paris"), ('["Paris"]', '["Paris"]'), ("{city: Paris}", "{city: Paris}}")],
)
async def test_input_of_a_tool_that_is_no_json_object_is_passed_on(
    live: LiveServer, client: anthropic.AsyncAnthropic, arguments: str, shown: str
) -> None:
    """A tool whose arguments are all optional must not run as if the model had given none."""
    live.server.engine.text = CALL.replace('{"city": "Paris"}', arguments)
    message = await create(client, tools=[WEATHER])
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert block.type == "tool_use" and block.input == {"INVALID_JSON": shown}


async def test_tokens_are_counted(live: LiveServer, client: anthropic.AsyncAnthropic) -> None:
    fields: Any = {"model": "scripted", "messages": HI, "system": "S", "tools": [WEATHER]}
    counted = await client.messages.count_tokens(**fields)
    message = await create(client, **fields)
    assert counted.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize(
    ("tier", "service_class", "shown"),
    [
        ("auto", ServiceClass.RT, "standard"),
        ("standard_only", ServiceClass.RT, "standard"),
        ("priority", ServiceClass.RT, "priority"),
        ("flex", ServiceClass.BE, "batch"),
    ],
)
async def test_tiers(
    live: LiveServer,
    client: anthropic.AsyncAnthropic,
    tier: str,
    service_class: ServiceClass,
    shown: str,
) -> None:
    message = await create(client, extra_body={"service_tier": tier})
    assert live.server.last().service_class is service_class
    assert message.usage.service_tier == shown


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "assistant", "content": "The"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "'tools[0].name'"),
        (
            {"tools": [WEATHER, {"name": "f", "input_schema": {"not": {}}, "strict": True}]},
            "'tools[1].input_schema' at not",
        ),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
        ({"container": "c"}, "container"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    client: anthropic.AsyncAnthropic, fields: dict[str, Any], named: str
) -> None:
    extra = {name: fields[name] for name in ("container", "temperature") if name in fields}
    fields = {name: value for name, value in fields.items() if name not in extra}
    with pytest.raises(sdk().BadRequestError) as refused:
        await create(client, **fields, extra_body=extra)
    assert refused.value.type == "invalid_request_error"
    body: Any = refused.value.body
    assert body["type"] == "error" and named in body["error"]["message"]


async def test_a_wrong_method_or_media_type_is_no_error_of_the_server(live: LiveServer) -> None:
    async with live.client(headers={"x-api-key": "secret"}) as http:
        for response in (
            await http.get("/v1/messages"),
            await http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"}),
        ):
            assert response.status_code in (405, 415)
            assert response.json()["error"]["type"] == "invalid_request_error"


async def test_errors_have_the_envelope_of_the_client(
    live: LiveServer, client: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(sdk().NotFoundError) as missing:
        await create(client, model="claude")
    assert missing.value.type == "not_found_error"
    with pytest.raises(sdk().AuthenticationError) as locked:
        await client.with_options(api_key="wrong").messages.create(
            model="scripted", max_tokens=9, messages=HI
        )
    assert locked.value.type == "authentication_error"
    live.server.engine.refusal = QueueFullError(8, 3.0)
    with pytest.raises(sdk().RateLimitError) as busy:
        await create(client)
    assert busy.value.type == "rate_limit_error"
    assert busy.value.response.headers["retry-after"] == "3"
    live.server.engine.refusal = None
    live.server.engine.fail_after = 3
    with pytest.raises(sdk().APIStatusError, match="overflowed"):
        async with client.messages.stream(model="scripted", max_tokens=50, messages=HI) as stream:
            await stream.get_final_message()


async def test_rows_of_batches(tmp_path: Path) -> None:
    async with batch_server(tmp_path) as server:
        await _rows(server)


async def _rows(server: BatchServer) -> None:
    def line(number: int, **fields: Any) -> dict[str, Any]:
        body = {"max_tokens": 50, "messages": HI, **fields}
        name = f"row-{number}"
        return {"custom_id": name, "method": "POST", "url": "/v1/messages", "body": body}

    done = await server.wait(await server.submit(line(1), endpoint="/v1/messages"))
    (result,) = (await server.results(done.output_file_id)).values()
    message = sdk().types.Message.model_validate(result["response"]["body"])
    assert message.content[0].text == "Hello world"
    assert message.usage.service_tier == "batch"
    assert message.id.startswith("msg_")
    bad = await server.wait(await server.submit(line(1, messages=[]), endpoint="/v1/messages"))
    assert bad.errors is not None and bad.errors.data is not None
    assert [error.param for error in bad.errors.data] == ["body.messages"]
