"""Plain OpenAI clients whose requests are part of a session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from bros.core.errors import QueueFullError
from support.scripted_server import LiveServer, Server, assert_envelope
from support.session_server import SOON_S, SessionClient, keeping, ok

HELLO: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def kept(server: Server) -> AsyncIterator[Server]:
    async with keeping(server):
        yield server


async def chat(server: Server, headers: dict[str, str], **fields: Any) -> Any:
    body = {"messages": HELLO, **fields}
    return await server.http.post("/v1/chat/completions", json=body, headers=headers)


async def calls(server: Server, session_id: str) -> list[dict[str, Any]]:
    requests = (await SessionClient(server.http, session_id).graph())["requests"]
    assert all(each["kind"] == "plain" for each in requests)
    return list(requests)


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-bros-session": "app", "x-bros-node": "plan"}, {}),
        ({"x-bros-session": "app", "x-bros-node": "plan"}, {"stream": True}),
        ({"X-Dynamo-Session-ID": "app", "x-bros-node": "plan"}, {}),
        ({}, {"metadata": {"bros_session": "app", "bros_node": "plan"}}),
        ({"x-bros-session": "app"}, {"metadata": {"bros_session": "other", "bros_node": "plan"}}),
    ],
)
async def test_a_request_joins(
    kept: Server, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    kept.engine.cached_tokens = 3
    response = await chat(kept, headers, **fields)
    assert response.status_code == 200
    (call,) = await calls(kept, "app")
    assert (call["name"], call["state"], call["output_tokens"]) == ("plan", "finished", 12)
    assert (call["prompt_tokens"], call["cached_tokens"]) == (
        len(kept.last().prompt_token_ids),
        3,
    )
    assert call["service_class"] == "rt"
    assert None not in (call["first_token_s"], call["end_s"])
    assert kept.last().hints.program != ""
    (variable,) = ok(await kept.http.get("/v1/sessions/app/variables"))["data"]
    assert variable["value"] == "Hello world"


@pytest.mark.parametrize(
    ("headers", "fields", "deadline_s"),
    [
        ({"x-bros-session": "app"}, {"metadata": {"bros_deadline_ms": "5000"}}, 5.0),
        ({}, {"metadata": {"bros_session": "app", "bros_deadline_ms": "1.5e3"}}, 1.5),
        (
            {"x-bros-session": "app", "x-slo-deadline-ms": "700"},
            {"metadata": {"bros_deadline_ms": "5000"}},
            0.7,
        ),
        ({}, {"metadata": {"bros_deadline_ms": "5000"}}, None),
    ],
)
async def test_deadlines(
    kept: Server, headers: dict[str, str], fields: dict[str, Any], deadline_s: float | None
) -> None:
    ok(await chat(kept, headers, **fields))
    assert kept.last().slo.deadline_s == deadline_s


async def test_calls_in_a_private_session_are_private_as_a_whole(kept: Server) -> None:
    for fields, private_from in (({}, None), ({"sharing": "session"}, 0), ({"tenant": "t"}, 0)):
        made = await SessionClient.open(kept.http, **fields)
        ok(await chat(kept, {"x-bros-session": made.id}))
        hints = kept.last().hints
        assert (hints.private_from, hints.private_salt != "") == (private_from, bool(fields))


async def test_without_a_session_nothing_changes(kept: Server) -> None:
    await chat(kept, {"x-bros-node": "plan"}, metadata={"bros_node": "plan", "a": 1})
    assert ok(await kept.http.get("/v1/sessions"))["data"] == []
    assert kept.last().hints.program == ""


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-bros-inputs": "unknown, {id}"}, {}),
        ({}, {"metadata": {"bros_inputs": "{id}"}}),
        ({}, {"messages": [*HELLO, {"role": "assistant", "content": "Hello world"}, *HELLO]}),
        (
            {},
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [{"type": "text", "text": "Hello world"}]},
                ]
            },
        ),
    ],
)
async def test_answers_of_earlier_requests_are_inputs(
    kept: Server, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    first = ok(await chat(kept, {"x-bros-session": "app", "x-bros-node": "first"}))
    named = {name: value.format(id=first["id"]) for name, value in headers.items()}
    filled = json.loads(json.dumps(fields).replace("{id}", first["id"]))
    ok(await chat(kept, {"x-bros-session": "app", **named}, **filled))
    ok(await chat(kept, {"x-bros-session": "app"}))
    shown = await calls(kept, "app")
    assert shown[0]["id"] == first["id"], "the graph and the response have the same id"
    assert [each["inputs"] for each in shown] == [[], shown[0]["outputs"], []]


async def test_answers_within_texts_are_inputs(kept: Server) -> None:
    headers = {"x-bros-session": "app"}
    kept.engine.text = "A long answer, which is a text of its own."
    ok(await chat(kept, headers))
    for prompt in ("Shorten: {}", ["Nothing", "Shorten: {}"], "Shorten it", [1, 2]):
        filled = json.loads(json.dumps(prompt).replace("{}", kept.engine.text))
        ok(await kept.http.post("/v1/completions", json={"prompt": filled}, headers=headers))
    shown = await calls(kept, "app")
    outputs = shown[0]["outputs"]
    assert [each["inputs"] for each in shown] == [[], outputs, outputs, [], []]


async def test_choices_are_one_call(kept: Server) -> None:
    body = {"prompt": ["a", "bc"], "n": 2, "max_tokens": 4, "service_tier": "flex"}
    headers = {"x-bros-session": "app"}
    ok(await kept.http.post("/v1/completions", json=body, headers=headers))
    (call,) = await calls(kept, "app")
    assert (call["prompt_tokens"], call["output_tokens"]) == (3, 16)
    assert call["service_class"] == "be"


async def test_which_session(kept: Server) -> None:
    made = await SessionClient.open(kept.http)
    ok(await chat(kept, {"x-bros-session": made.id}))
    assert len(await calls(kept, made.id)) == 1
    response = await chat(kept, {"x-bros-session": "sess-unknown"})
    error = assert_envelope(response, 404)
    assert (error["code"], error["param"]) == ("session_not_found", "x-bros-session")
    ok(await made.ask("DELETE"))
    assert_envelope(await chat(kept, {"x-bros-session": made.id}), 410)


@pytest.mark.parametrize(
    ("headers", "metadata", "param"),
    [
        ({"x-bros-session": "a b"}, {}, "x-bros-session"),
        ({"x-bros-session": ""}, {}, "x-bros-session"),
        ({"x-dynamo-session-id": "x" * 129}, {}, "x-dynamo-session-id"),
        ({"x-bros-session": "a", "x-bros-node": "n" * 129}, {}, "x-bros-node"),
        ({}, {"bros_session": 5}, "metadata.bros_session"),
        ({}, {"bros_session": "a/b"}, "metadata.bros_session"),
        ({"x-bros-session": "a"}, {"bros_node": []}, "metadata.bros_node"),
        ({"x-bros-session": "a", "x-bros-inputs": "a b"}, {}, "x-bros-inputs"),
        ({"x-bros-session": "a", "x-bros-inputs": "a," * 65}, {}, "x-bros-inputs"),
        ({"x-bros-session": "a"}, {"bros_inputs": ["a"]}, "metadata.bros_inputs"),
        ({"x-bros-session": "a"}, {"bros_deadline_ms": 5}, "metadata.bros_deadline_ms"),
        ({"x-bros-session": "a"}, {"bros_deadline_ms": "-5"}, "metadata.bros_deadline_ms"),
        ({"x-bros-session": "a"}, {"bros_deadline_ms": "soon"}, "metadata.bros_deadline_ms"),
    ],
)
async def test_what_cannot_be(
    kept: Server, headers: dict[str, str], metadata: dict[str, Any], param: str
) -> None:
    response = await chat(kept, headers, metadata=metadata)
    assert assert_envelope(response, 400)["param"] == param
    assert ok(await kept.http.get("/v1/sessions"))["data"] == []


async def test_refused_and_failed_requests_are_shown(kept: Server) -> None:
    headers = {"x-bros-session": "app"}
    kept.engine.refusal = QueueFullError(8, 3.0)
    assert_envelope(await chat(kept, headers), 429)
    kept.engine.refusal = None
    kept.engine.fail_after = 2
    assert_envelope(await chat(kept, headers), 500)
    kept.engine.fail_after = None
    kept.engine.die_after = 2
    assert_envelope(await chat(kept, headers), 503)
    shown = await calls(kept, "app")
    assert [each["state"] for each in shown] == ["failed"] * 3
    assert "overflowed" in shown[1]["error"]["message"]
    assert "died" in shown[2]["error"]["message"]


async def test_a_wrong_request_is_no_call(kept: Server) -> None:
    assert_envelope(await chat(kept, {"x-bros-session": "app"}, temperature=-1), 400)
    assert ok(await kept.http.get("/v1/sessions"))["data"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_joins(live: LiveServer, stream: bool) -> None:
    async with (
        keeping(live.server),
        openai.AsyncOpenAI(
            base_url=f"{live.url}/v1",
            api_key="unused",
            max_retries=0,
            default_headers={"x-bros-session": "app"},
        ) as client,
    ):
        reply = await client.chat.completions.create(
            model="scripted",
            messages=HELLO,
            stream=stream,
            extra_headers={"x-bros-node": "first"},
            metadata={"anything": "else"},
        )
        if isinstance(reply, openai.AsyncStream):
            async for _ in reply:
                pass
        live.server.engine.hold_after = 1
        leaving = asyncio.ensure_future(
            client.chat.completions.create(
                model="scripted", messages=HELLO, metadata={"bros_node": "second"}
            )
        )
        await asyncio.wait_for(live.server.engine.holding.wait(), SOON_S)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.wait_for(live.server.engine.abort_seen.wait(), SOON_S)
        shown = await calls(live.server, "app")
        assert [(each["name"], each["state"]) for each in shown] == [
            ("first", "finished"),
            ("second", "cancelled"),
        ]


async def test_the_value_of_a_plain_request_is_its_first_choice(kept: Server) -> None:
    ok(await chat(kept, {"x-bros-session": "app"}, n=2))
    (variable,) = ok(await kept.http.get("/v1/sessions/app/variables"))["data"]
    assert variable["value"] == "Hello world"
