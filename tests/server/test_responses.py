"""/v1/responses as OpenAI's own client sees it: objects, events in order, conversations, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from support.batch_server import BatchServer, batch_server, openai_client, until
from support.scripted_server import MAX_MODEL_LEN

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BatchServer]:
    async with batch_server(tmp_path) as made:
        yield made


@pytest.fixture
async def roomy(tmp_path: Path) -> AsyncIterator[BatchServer]:
    """With a context that descriptions of tools fit into."""
    async with batch_server(tmp_path, max_model_len=4000) as made:
        yield made


async def create(server: BatchServer, **fields: Any) -> Response:
    found = await server.client.responses.create(**{"model": "scripted", "input": "Hi", **fields})
    assert isinstance(found, Response)
    return found


async def events_of(server: BatchServer, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed response; each conforms to the client's models."""
    body = {"input": "Hi", "stream": True, **fields}
    reply = await server.http.post("/v1/responses", json=body)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith(
        "text/event-stream"
    )
    return read_events(reply.text)


def read_events(text: str) -> list[dict[str, Any]]:
    found = []
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event, strict=True)
        found.append(event)
    return found


async def test_a_response(server: BatchServer) -> None:
    server.engine.cached_tokens = 3
    response = await create(server, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    assert response.output_text == "Hello world"
    assert (response.status, response.object, response.model) == (
        "completed",
        "response",
        "scripted",
    )
    assert response.error is None and response.incomplete_details is None
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert (response.temperature, response.top_p) == (0.5, 1.0)
    assert (response.service_tier, response.background) == ("default", False)
    usage = response.usage
    assert usage is not None
    assert usage.output_tokens == 12 and usage.total_tokens == usage.input_tokens + 12
    assert usage.input_tokens_details.cached_tokens == 3
    (message,) = response.output
    assert message.type == "message" and message.status == "completed"
    assert message.id.startswith("msg_") and response.id.startswith("resp_")
    Response.model_validate(response.model_dump(), strict=True)


async def test_events_come_in_order_and_add_up(server: BatchServer) -> None:
    events = await events_of(server)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event["delta"] for event in events if "delta" in event]
    assert "".join(deltas) == "Hello world" and len(deltas) > 1
    about = [event for event in events if "item_id" in event]
    assert {(e["item_id"], e["output_index"], e["content_index"]) for e in about} == {
        (events[2]["item"]["id"], 0, 0)
    }
    assert [events[0]["response"][name] for name in ("status", "output", "usage")] == [
        "in_progress",
        [],
        None,
    ]
    final = events[-1]["response"]
    assert final["output"] == [events[-2]["item"]]
    assert final["output"][0]["content"] == [events[-3]["part"]]
    assert final == (await server.http.get(f"/v1/responses/{final['id']}")).json()


async def test_logprobs_are_included_when_asked_for(server: BatchServer) -> None:
    events = await events_of(server, include=["message.output_text.logprobs"], top_logprobs=2)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert all(len(delta["logprobs"]) == 1 for delta in deltas)
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert part["logprobs"] == [entry for delta in deltas for entry in delta["logprobs"]]
    assert [top["logprob"] for top in part["logprobs"][0]["top_logprobs"]] == [-0.5, -1.5]


async def test_what_is_cut_off_says_so(server: BatchServer) -> None:
    events = await events_of(server, max_output_tokens=4)
    assert events[-1]["type"] == "response.incomplete"
    response = Response.model_validate(events[-1]["response"])
    assert response.status == "incomplete" and response.output_text == "Hell"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


async def test_an_empty_answer_is_an_empty_message(server: BatchServer) -> None:
    server.engine.text = ""
    events = await events_of(server)
    assert [event["type"] for event in events[2:]] == [
        f"response.{name}"
        for name in (
            "output_item.added",
            "content_part.added",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        )
    ]
    assert (await create(server)).output_text == ""


async def test_the_stream_helper_of_the_client(server: BatchServer) -> None:
    async with server.client.responses.stream(model="scripted", input="Hi") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text == "Hello world"


def prompts(server: BatchServer) -> list[str]:
    return [server.engine.prompt(request) for request in server.engine.submitted]


async def test_items_become_messages_of_the_chat(server: BatchServer) -> None:
    await create(
        server,
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "D"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
            {
                "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": "A", "annotations": []}],
            },
            {"role": "user", "content": "V"},
        ],
    )  # fmt: skip
    turns = [("system", "Be brief."), ("system", "D"), ("user", "U"), ("assistant", "A")]
    said = "".join(f"{role}\n{text}\n" for role, text in [*turns, ("user", "V")])
    assert prompts(server)[-1].replace("<|im_start|>", "").replace("<|im_end|>", "") == (
        said + "assistant\n"
    )


async def test_a_conversation_goes_on_from_any_of_its_responses(server: BatchServer) -> None:
    first = await create(server, input="One", instructions="Not again")
    second = await create(server, input="Two", previous_response_id=first.id)
    await create(server, input="Three", previous_response_id=second.id, instructions="New")
    branch = await create(server, input="Other", previous_response_id=first.id, stream=False)
    assert branch.previous_response_id == first.id
    heads = [prompt.replace("Hello world", "A") for prompt in prompts(server)]
    for prompt, words in zip(
        heads[1:], ["One A Two", "New One A Two A Three", "One A Other"], strict=True
    ):
        place = 0
        for word in words.split():
            place = prompt.index(word, place) + 1
        assert "Not again" not in prompt
    assert server.engine.submitted[1].hints.keep_s > 0
    items = await server.client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in items.data] == ["message", "message"]
    assert [item async for item in items][-1].content[0].text == "Two"  # type: ignore[union-attr]
    latest = await server.client.responses.input_items.list(second.id)
    assert len(latest.data) == 3 and not latest.has_more


async def test_items_that_are_sent_back_are_listed_once_each(server: BatchServer) -> None:
    first = await create(server, input="One")
    sent = [*(item.model_dump() for item in first.output), {"role": "user", "content": "Two"}]
    second = await create(server, input=sent, previous_response_id=first.id)
    pages = server.client.responses.input_items.list(second.id, order="asc", limit=1)
    found = [item async for item in pages]
    assert len(found) == 4 and len({item.id for item in found}) == 4


async def test_items_are_referred_to_by_their_ids(roomy: BatchServer) -> None:
    """As the AI SDK does, instead of sending them back or the id of the response."""
    roomy.engine.texts = [CALL, "It is sunny.", "Nice."]
    asked: list[Any] = [{"role": "user", "content": "Hi"}]
    first = await create(roomy, input=asked, tools=[WEATHER])
    (call,) = first.output
    assert call.type == "function_call" and call.id is not None
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    asked += [{"type": "item_reference", "id": call.id}, output]
    second = await create(
        roomy,
        input=asked,
        tools=[WEATHER],
        include=["message.output_text.logprobs"],
        top_logprobs=1,
    )
    await roomy.client.responses.delete(first.id)  # the second has a copy of the call
    asked = [
        {"type": "item_reference", "id": second.output[0].id},
        {"role": "user", "content": "Thanks"},
    ]
    third = await create(roomy, input=asked, previous_response_id=None)
    items = await roomy.client.responses.input_items.list(second.id, order="asc")
    assert items.data[1].model_dump()["arguments"] == call.arguments
    listed = await roomy.client.responses.input_items.list(third.id, order="asc")
    assert listed.data[0].content[0].text == "It is sunny."  # type: ignore[union-attr]
    whole = [{**asked[0], "type": "message", "role": "assistant", "content": "It is sunny."}]
    await create(roomy, input=[*whole, asked[1]])
    _, with_call, by_id, by_text = prompts(roomy)
    assert '"city": "Paris"' in with_call
    assert by_id == by_text


async def test_references_do_not_add_up_to_more_than_a_conversation_may_have(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a copy: a body of 4 MB could name a large item a hundred thousand times."""
    monkeypatch.setattr("bros.batch.responses.MAX_CONVERSATION_BYTES", 3_000)
    first = await create(server)
    reference = {"type": "item_reference", "id": first.output[0].id}
    await create(server, input=[reference, {"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError) as error:
        await create(server, input=[reference] * 100)
    assert error.value.code == "context_length_exceeded" and error.value.param == "input"


async def test_a_reference_to_an_item_in_the_background(server: BatchServer) -> None:
    first = await create(server)
    reference = {"type": "item_reference", "id": first.output[0].id}
    asked: list[Any] = [reference, {"role": "user", "content": "And then?"}]
    count = await server.client.responses.input_tokens.count(model="scripted", input=asked)
    second = await create(server, input=asked, background=True)
    await server.client.responses.delete(first.id)
    await until(lambda: len(server.engine.ended) == 2)
    assert "Hello world" in prompts(server)[1]
    assert count.input_tokens == len(server.engine.submitted[1].prompt_token_ids)
    with pytest.raises(openai.NotFoundError):
        await create(server, input=asked)
    assert (await server.client.responses.retrieve(second.id)).background


@pytest.mark.parametrize(
    "item_id", ["msg_unknown_0", "msg_0", "x", "", "\0", "msg_{}_7", "fc_{}_0", "msg_{}_0 "]
)
async def test_a_reference_to_no_item_is_an_error(server: BatchServer, item_id: str) -> None:
    first = await create(server)
    name = first.id.removeprefix("resp_")
    asked: Any = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": item_id}]
    asked[1]["id"] = item_id.format(name)
    with pytest.raises(openai.NotFoundError) as error:
        await create(server, input=asked)
    assert (error.value.param, error.value.code) == ("input[1].id", "item_not_found")


async def test_a_conversation_needs_all_of_its_responses(server: BatchServer) -> None:
    first = await create(server)
    second = await create(server, previous_response_id=first.id)
    await server.client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await server.client.responses.retrieve(first.id)
    assert gone.value.code == "response_not_found"
    for previous_id in (first.id, second.id, "resp_unknown", "\0"):
        with pytest.raises(openai.NotFoundError) as missing:
            await create(server, previous_response_id=previous_id)
        assert missing.value.code == "previous_response_not_found"
        assert missing.value.param == "previous_response_id"


async def test_what_is_not_to_be_stored_is_not(server: BatchServer) -> None:
    response = await create(server, store=False)
    events = await events_of(server, store=False)
    for response_id in (response.id, events[-1]["response"]["id"]):
        with pytest.raises(openai.NotFoundError):
            await server.client.responses.retrieve(response_id)
    assert server.store.responses.usage() == {}


async def test_a_client_that_leaves_has_nothing_stored(server: BatchServer) -> None:
    server.engine.hold_after = 2
    async with server.http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}):
        pass
    await server.engine.abort_seen.wait()
    assert server.store.responses.usage() == {}


async def test_responses_are_their_tenants_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann ann-key\nbob bob-key\n")
    async with (
        batch_server(tmp_path, key="ann-key", api_keys=str(keys)) as server,
        openai_client(server.live.url, "bob-key") as bob,
    ):
        stored = await create(server)
        reference: Any = {"type": "item_reference", "id": stored.output[0].id}
        response = await create(server, background=True)
        for ask in (
            bob.responses.retrieve(response.id),
            bob.responses.cancel(response.id),
            bob.responses.delete(response.id),
            bob.responses.input_items.list(response.id),
            bob.responses.create(model="scripted", input="x", previous_response_id=response.id),
            bob.responses.create(model="scripted", input=[reference]),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask
        assert (await server.client.responses.retrieve(response.id)).id == response.id


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [3]}, "input[0]", "invalid_type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "invalid_type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "invalid_value",
        ),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type", "unsupported_value"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "missing_required_parameter"),
        ({"input": [{"type": "item_reference", "id": 3}]}, "input[0].id", "invalid_type"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
            "input[0].arguments",
            "missing_required_parameter",
        ),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"input": "x" * MAX_MODEL_LEN}, "input", "context_length_exceeded"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"extra_body": {"structured_outputs": {"choice": ["a"]}}}, "structured_outputs",
         "unsupported_parameter"),
        ({"extra_body": {"regex": "a"}}, "regex", "unsupported_parameter"),
        ({"text": {"format": {"type": "json_object", "schema": {"not": {}}}}}, "text.format",
         "invalid_json_schema"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens", "unsupported_parameter"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "invalid_value"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name",
         "missing_required_parameter"),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"background": True, "store": False}, "store", "invalid_value"),
        ({"background_options": {}}, "background_options", "invalid_value"),
        ({"metadata": {"k" * 65: ""}}, None, "invalid_value"),
        ({"model": "gpt-4"}, "model", "model_not_found"),
        ({"include": ["nonsense"]}, "include[0]", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"if": 1}, "strict": True}]},
         "tools[0].parameters", "invalid_json_schema"),
    ],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_refused_by_name(
    server: BatchServer, fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        await create(server, **fields)
    assert refused.value.status_code == (404 if code == "model_not_found" else 400)
    assert refused.value.code == code, refused.value.message
    if param is not None:
        assert refused.value.param == param
    assert server.engine.submitted == []


async def test_truncation_leaves_out_the_first_messages(server: BatchServer) -> None:
    items = [{"role": "system", "content": "Rules"}]
    for number in range(20):
        items += [
            {"role": "user", "content": f"question {number} " + "q" * 20},
            {"role": "assistant", "content": f"answer {number} " + "a" * 20},
        ]
    items.append({"role": "user", "content": "the last one"})
    with pytest.raises(openai.BadRequestError) as refused:
        await create(server, input=items)
    assert refused.value.param == "input"
    await create(server, input=items, truncation="auto", max_output_tokens=50)
    (prompt,) = prompts(server)
    assert "Rules" in prompt and prompt.index("the last one") and "answer 19" in prompt
    first = prompt.index("question")
    assert prompt[:first].endswith("user\n")
    assert MAX_MODEL_LEN - 50 - 120 < len(server.engine.submitted[0].prompt_token_ids)
    assert len(server.engine.submitted[0].prompt_token_ids) <= MAX_MODEL_LEN - 50
    with pytest.raises(openai.BadRequestError) as refused:
        await create(server, input="x" * MAX_MODEL_LEN, truncation="auto")
    assert refused.value.code == "context_length_exceeded"


async def test_failures_in_the_middle_are_events(server: BatchServer) -> None:
    server.engine.fail_after = 3
    events = await events_of(server)
    error, failed = events[-2:]
    assert (error["type"], error["code"]) == ("error", "engine_error")
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {
        "code": "server_error",
        "message": "The numbers overflowed.",
    }
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert server.store.responses.usage() == {}


async def test_what_fails_before_it_begins_has_a_status(server: BatchServer) -> None:
    server.engine.fail_after = 0
    with pytest.raises(openai.InternalServerError):
        await server.client.responses.create(model="scripted", input="Hi", stream=True)


async def test_a_grammar_that_cannot_go_on_is_named_as_in_this_api(server: BatchServer) -> None:
    server.engine.fail_after, server.engine.to_blame = 2, "response_format"
    with pytest.raises(openai.BadRequestError) as refused:
        await server.client.responses.create(model="scripted", input="Hi")
    assert (refused.value.code, refused.value.param) == ("invalid_grammar", "text.format")


async def test_input_tokens_are_counted(server: BatchServer) -> None:
    body = {"input": "Hi", "instructions": "Be brief."}
    counted = await server.client.responses.input_tokens.count(model="scripted", **body)  # type: ignore[arg-type]
    await create(server, **body)
    (request,) = server.engine.submitted
    assert counted.input_tokens == len(request.prompt_token_ids)


async def test_full_disks_are_said_and_nothing_else_is_harmed(server: BatchServer) -> None:
    with server.full("responses"):
        with pytest.raises(openai.APIStatusError) as refused:
            await create(server)
        assert (refused.value.status_code, refused.value.code) == (507, "insufficient_storage")
        events = await events_of(server)
        assert events[-1]["type"] == "response.failed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (await create(server, store=False)).status == "completed"
    assert (await create(server)).status == "completed"


async def test_rows_of_batches(server: BatchServer) -> None:
    def line(number: int, **fields: Any) -> dict[str, Any]:
        body = {"model": "scripted", "input": f"Row {number}", **fields}
        name = f"row-{number}"
        return {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": body}

    rows = [line(0), line(1, max_output_tokens=4)]
    done = await server.wait(await server.submit(*rows, endpoint="/v1/responses"))
    results = await server.results(done.output_file_id)
    bodies = {name: each["response"]["body"] for name, each in results.items()}
    texts = {name: Response.model_validate(body).output_text for name, body in bodies.items()}
    assert texts == {"row-0": "Hello world", "row-1": "Hell"}
    assert {(body["service_tier"], body["store"]) for body in bodies.values()} == {("flex", False)}
    assert all(body["id"].startswith("resp_") for body in bodies.values())
    assert done.usage is not None and done.usage.output_tokens == 12 + 4
    wrong: list[dict[str, Any]] = [
        {"store": True},
        {"background": True},
        {"previous_response_id": "resp_1"},
        {"input": [{}]},
        {"input": [{"type": "item_reference", "id": "msg_1_0"}]},
        {"input": [{"type": "item_reference", "id": []}]},
    ]
    bad = [line(i, **fields) for i, fields in enumerate(wrong)]
    failed = await server.wait(await server.submit(*bad, endpoint="/v1/responses"))
    assert failed.status == "failed" and failed.errors is not None
    found = [(error.line, error.param) for error in failed.errors.data or ()]
    assert found == [
        (1, "body.store"),
        (2, "body.background"),
        (3, "body.previous_response_id"),
        (4, "body.input[0].role"),
        (5, "body.input[0].type"),
        (6, "body.input[0].type"),
    ]


WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "d",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


async def test_a_function_is_called_and_its_output_answered(roomy: BatchServer) -> None:
    roomy.engine.text = f"Let me see. {CALL}"
    events = await events_of(roomy, tools=[WEATHER])
    kinds = [event["type"].removeprefix("response.") for event in events]
    begin = kinds.index("function_call_arguments.delta") - 1
    assert kinds[begin - 4 : begin + 1] == [
        "output_text.done", "content_part.done", "output_item.done", "output_item.added",
    ] or kinds[begin] == "output_item.added"  # fmt: skip
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert events[-3]["name"] == "weather"  # openai 2 requires it
    deltas = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
    message, call = Response.model_validate(events[-1]["response"]).output
    assert message.type == "message" and call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city": "Paris"}') and call.id
    assert "".join(deltas) == call.arguments and call.status == "completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

    roomy.engine.text = "Sunny."
    answer = await create(
        roomy,
        previous_response_id=events[-1]["response"]["id"],
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}],
        tools=[WEATHER],
    )
    assert answer.output_text == "Sunny."
    prompt = prompts(roomy)[-1]
    assert prompt.index("Paris") < prompt.index("sun")
    items = await roomy.client.responses.input_items.list(answer.id, order="asc")
    assert [item.type for item in items.data] == [
        "message", "message", "function_call", "function_call_output",
    ]  # fmt: skip
    whole = await create(roomy, tools=[WEATHER], tool_choice="none")
    assert whole.output_text == "Sunny." and whole.tool_choice == "none"


async def test_a_call_that_is_cut_off_is_incomplete(roomy: BatchServer) -> None:
    roomy.engine.text = CALL
    cut = len(CALL) - 20
    events = await events_of(roomy, tools=[WEATHER], max_output_tokens=cut)
    response = Response.model_validate(events[-1]["response"])
    whole = await create(roomy, tools=[WEATHER], max_output_tokens=cut)
    for found in (response, whole):
        (call,) = found.output
        assert call.type == "function_call" and call.status == "incomplete"
        assert call.arguments == '{"city": "P'[: len(call.arguments)]
    assert events[-1]["type"] == "response.incomplete"


async def test_stop_strings_do_not_cut_calls(roomy: BatchServer) -> None:
    roomy.engine.text = CALL
    stop = ["name", "}}"]
    events = await events_of(roomy, tools=[WEATHER], stop=stop)
    response = Response.model_validate(events[-1]["response"])
    whole = await create(roomy, tools=[WEATHER], extra_body={"stop": stop})
    for found in (response, whole):
        (call,) = found.output
        assert call.type == "function_call" and call.status == found.status == "completed"
        assert call.arguments == '{"city": "Paris"}'


async def test_reasoning_is_an_item_of_its_own(tmp_path: Path) -> None:
    async with batch_server(tmp_path, reasoning_format="think") as server:
        server.engine.text = "<think>Hm, hm.</think>Yes."
        events = await events_of(server)
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds.index("reasoning_text.delta") < kinds.index("output_text.delta")
        reasoning, message = Response.model_validate(events[-1]["response"]).output
        assert reasoning.type == "reasoning" and reasoning.content is not None
        assert reasoning.content[0].text == "Hm, hm."
        assert message.type == "message"
        usage = events[-1]["response"]["usage"]
        assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
        queued = await create(server, background=True)
        while (whole := await server.client.responses.retrieve(queued.id)).status in (
            "queued",
            "in_progress",
        ):
            pass
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        reply = await server.http.get(f"/v1/responses/{queued.id}", params={"stream": "true"})
        assert read_events(reply.text)[-1]["response"]["output"] == [
            item.model_dump(exclude_unset=True) for item in whole.output
        ]


async def test_agents_of_the_openai_agents_sdk_run(roomy: BatchServer) -> None:
    agents = pytest.importorskip(
        "agents", reason="the OpenAI Agents SDK is missing: pip install 'bros[clients]'"
    )
    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        roomy.engine.text = "It is sunny."
        return "sun"

    roomy.engine.text = CALL
    model = agents.OpenAIResponsesModel(model="scripted", openai_client=roomy.client)
    agent = agents.Agent(name="A", instructions="Help.", tools=[weather], model=model)
    result = await agents.Runner.run(agent, "Paris?")
    assert (asked, result.final_output) == (["Paris"], "It is sunny.")
    roomy.engine.text = CALL
    streamed = agents.Runner.run_streamed(agent, "And again?")
    kinds = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in kinds and streamed.final_output == "It is sunny."
    assert asked == ["Paris", "Paris"]


async def test_the_format_of_the_text_becomes_a_grammar(server: BatchServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    server.engine.text = '{"a": 3}'
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    response = await create(server, text=text)
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema"
    (request,) = server.engine.submitted
    assert request.sampling.grammar is not None
    bad: Any = {"format": {**text["format"], "schema": {"type": "array", "uniqueItems": True}}}
    for background in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await create(server, text=bad, background=background)
        assert (refused.value.param or "").startswith("text.format")


@pytest.mark.parametrize(
    "fields",
    [
        '"tools": [{"type": "function", "name": "f", "parameters": {"a": 1e400}}]',
        '"text": {"format": {"type": "json_schema", "name": "a", "schema": {"maximum": 1e400}}}',
    ],
    ids=["tool", "format"],
)
@pytest.mark.parametrize("background", ["true", "false"])
async def test_infinite_numbers_are_refused(
    server: BatchServer, fields: str, background: str
) -> None:
    """The response could not repeat them."""
    reply = await server.http.post(
        "/v1/responses",
        content=f'{{"input": "Hi", "background": {background}, {fields}}}',
        headers={"content-type": "application/json"},
    )
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == "invalid_value"
    assert "too large" in error["message"]


async def test_arguments_with_half_a_character_stay_text(roomy: BatchServer) -> None:
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": r'{"a": "\ud800"}'}
    items = [called, {"role": "user", "content": "x"}]
    reply = await roomy.http.post("/v1/responses", json={"input": items})
    assert reply.status_code == 200, reply.text
