"""Refused or given up for want of capacity: 429, and when to come back."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import openai
import pytest

from bros.core.errors import OverloadedError
from support.scripted_server import LiveServer, Server, assert_envelope, events

WAITS = pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [(7.2, "8", "7200"), (0.0, "1", "1000"), (120.5, "120", "120000"), (1e9, "120", "120000")],
)
ROUTES = pytest.mark.parametrize("route", ["chat", "complete"])
STREAM = pytest.mark.parametrize("stream", [False, True])


async def call(server: Server, route: str, **fields: Any) -> Any:
    return await getattr(server, route)(**fields)


@WAITS
@ROUTES
@STREAM
async def test_refused_on_arrival(
    server: Server, route: str, stream: bool, retry_after_s: float, seconds: str, milliseconds: str
) -> None:
    server.engine.refusal = OverloadedError("The first token would be late.", retry_after_s)
    response = await call(server, route, stream=stream)
    assert assert_envelope(response, 429) == {
        "message": "The first token would be late.",
        "type": "rate_limit_error",
        "param": None,
        "code": "overloaded",
    }
    assert response.headers["retry-after"] == seconds
    assert response.headers["retry-after-ms"] == milliseconds


@ROUTES
@STREAM
async def test_refused_for_ever(server: Server, route: str, stream: bool) -> None:
    server.engine.refusal = OverloadedError("No idle server is so fast.", math.inf)
    response = await call(server, route, stream=stream)
    assert assert_envelope(response, 429)["code"] == "overloaded"
    assert response.headers["x-should-retry"] == "false"
    assert not [name for name in response.headers if name.startswith("retry-after")]


@WAITS
@ROUTES
@STREAM
async def test_a_request_dropped_before_its_first_token(
    server: Server, route: str, stream: bool, retry_after_s: float, seconds: str, milliseconds: str
) -> None:
    server.engine.fail_after, server.engine.retry_after_s = 0, retry_after_s
    response = await call(server, route, stream=stream)
    error = assert_envelope(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert error["message"] == "The numbers overflowed."
    assert response.headers["retry-after"] == seconds
    assert response.headers["retry-after-ms"] == milliseconds
    assert response.headers["content-type"] == "application/json"


async def test_a_whole_answer_dropped_on_the_way_is_429_too(server: Server) -> None:
    server.engine.fail_after, server.engine.retry_after_s = 3, 5.0
    response = await server.chat()
    assert assert_envelope(response, 429)["code"] == "overloaded"
    assert response.headers["retry-after"] == "5"


@ROUTES
async def test_a_stream_dropped_on_the_way_ends_with_an_error_event(
    server: Server, route: str
) -> None:
    server.engine.fail_after, server.engine.retry_after_s = 2, 5.0
    response = await call(server, route, stream=True)
    assert response.status_code == 200
    *body, last = [json.loads(item) for item in events(response.text)]
    assert body
    assert last == {
        "error": {
            "message": "The numbers overflowed.",
            "type": "rate_limit_error",
            "param": None,
            "code": "overloaded",
        }
    }


@STREAM
async def test_one_dropped_choice_aborts_the_others(server: Server, stream: bool) -> None:
    server.engine.text = "x" * 90
    server.engine.fail_after, server.engine.fails, server.engine.retry_after_s = 0, "-0", 2.0
    assert_envelope(await server.complete(prompt=["a", "b"], stream=stream), 429)
    _, other = server.engine.submitted
    assert server.engine.aborted == [other.request_id]


@STREAM
async def test_a_failure_that_trying_again_does_not_help_is_500(
    server: Server, stream: bool
) -> None:
    server.engine.fail_after = 0
    response = await server.chat(stream=stream)
    assert assert_envelope(response, 500)["code"] == "engine_error"
    assert "retry-after" not in response.headers


async def test_death_before_the_first_token_of_a_stream_has_a_status(server: Server) -> None:
    server.engine.die_after = 0
    assert_envelope(await server.chat(stream=True), 503)


async def test_bug_of_ours_before_the_first_token_of_a_stream_is_500_and_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.die_after, server.engine.death = 0, ZeroDivisionError("secret detail")
    response = await server.chat(stream=True)
    assert assert_envelope(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text
    assert "ZeroDivisionError: secret detail" in caplog.text


async def test_a_server_that_stops_before_the_first_token_says_so_with_a_status(
    server: Server,
) -> None:
    server.engine.hold_after = 0
    waiting = asyncio.ensure_future(server.chat(stream=True))
    await server.engine.holding.wait()
    server.state.stopping.set()
    error = assert_envelope(await waiting, 503)
    assert error["code"] == "server_shutting_down"
    assert server.engine.aborted == [server.last().request_id]


@pytest.mark.parametrize("given_up", [False, True])
@STREAM
async def test_openai_client_sees_a_rate_limit(
    live: LiveServer, given_up: bool, stream: bool
) -> None:
    engine = live.server.engine
    if given_up:
        engine.fail_after, engine.retry_after_s = 0, 3.0
    else:
        engine.refusal = OverloadedError("Too much to do.", 3.0)
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="unused", max_retries=0
    ) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="scripted", prompt="a", stream=stream)
    assert caught.value.code == "overloaded"
    assert caught.value.response.headers["retry-after"] == "3"


async def test_openai_client_tries_again_by_itself_and_gets_its_stream(live: LiveServer) -> None:
    """The client waits as long as the server says; a hook lets the second try in at once."""
    engine = live.server.engine
    engine.fail_after, engine.retry_after_s = 0, 1.0

    async def recover(response: Any) -> None:
        if response.status_code == 429:
            engine.fail_after = None
            response.headers["retry-after-ms"] = "1"

    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1",
        api_key="unused",
        max_retries=1,
        http_client=openai.DefaultAsyncHttpxClient(event_hooks={"response": [recover]}),
    ) as client:
        stream = await client.completions.create(
            model="scripted", prompt="a", max_tokens=50, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello world"
    assert len(engine.submitted) == 2
