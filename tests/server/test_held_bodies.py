"""What the server keeps of the bodies of open requests: little, and what is more counts."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bros.batch.store import open_store
from bros.core.tenants import Resource
from support.batch_server import until
from support.scripted_server import Server, assert_envelope

PARTS = [{"a": []}] * 30_000
"""Of a body: 270 KB, and over 6 MB when it is parsed."""

FEW_PARTS = PARTS[:5_000]
"""As many as tools and variables of a chat template may have."""

MESSAGE = {"role": "user", "content": "Hi"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {}, "x": FEW_PARTS, "description": "y" * 100_000}

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "an unknown field": (CHAT, {"messages": [MESSAGE], "ignored": PARTS}),
    "an unknown field, streamed": (CHAT, {"messages": [MESSAGE], "x": PARTS, "stream": True}),
    "metadata": (CHAT, {"messages": [MESSAGE], "metadata": {"bros_node": PARTS, "x": PARTS}}),
    "a field of a message": (CHAT, {"messages": [{**MESSAGE, "x": FEW_PARTS}]}),
    "variables": (CHAT, {"messages": [MESSAGE], "chat_template_kwargs": {"x": FEW_PARTS}}),
    "a tool": (
        CHAT,
        {
            "messages": [MESSAGE],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
            "tool_choice": "none",
        },
    ),
    "text": (TEXT, {"prompt": "Hi", "ignored": PARTS}),
    "a message": ("/v1/messages", {"messages": [MESSAGE], "max_tokens": 5, "x": PARTS}),
    "a tool of a message": (
        "/v1/messages",
        {
            "messages": [MESSAGE],
            "max_tokens": 5,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "none"},
        },
    ),
    "a response": ("/v1/responses", {"input": "Hi", "x": PARTS}),
    "a tool of a response": (
        "/v1/responses",
        {
            "input": "Hi",
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "tool_choice": "none",
        },
    ),
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    store = open_store(tmp_path)
    made = Server(jobs_in=store)
    try:
        yield made
    finally:
        await made.http.aclose()
        store.close()


def num_parts() -> int:
    """Objects of bodies that are alive, but those of this module."""
    gc.collect()
    return sum(type(each) is dict and list(each) == ["a"] for each in gc.get_objects())


def held(server: Server) -> int:
    return server.accounts.used("", Resource.INPUT_BYTES)


@pytest.mark.parametrize("name", CALLS)
async def test_nothing_of_a_body_stays_parsed_while_its_request_is_open(
    server: Server, name: str
) -> None:
    path, body = CALLS[name]
    before = num_parts()
    server.engine.hold_after = 0
    asked = asyncio.create_task(server.http.post(path, json=body))
    await asyncio.wait_for(server.engine.holding.wait(), timeout=10.0)
    await until(lambda: num_parts() - before < 10)  # the thread that read it may let go later
    echoed = 100_000 + 9 * len(FEW_PARTS) if name == "a tool of a response" else 0
    assert held(server) in range(echoed, echoed + 1_000)
    server.engine.go_on.set()
    assert (await asked).status_code == 200
    assert held(server) == 0


async def test_a_body_counts_as_what_it_takes_when_parsed_until_its_prompt_is_made(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    start = server.state.generator.start

    async def started(*arguments: Any, **options: Any) -> Any:
        seen.append(held(server))
        return await start(*arguments, **options)

    monkeypatch.setattr(server.state.generator, "start", started)
    for body in ({"x": PARTS}, {"x": "{[,]}" * 20_000}, {}):
        await server.http.post(CHAT, json={"messages": [MESSAGE], **body})
    with_parts, with_text, short = seen
    assert with_parts > 10_000_000
    assert 100_000 < with_text < 110_000, "text that looks like JSON is only text"
    assert short < 200
    assert held(server) == 0


async def test_bodies_that_take_too_much_together_are_refused_for_now(tmp_path: Path) -> None:
    server = Server(max_input_bytes="20MiB")
    reached, go_on = asyncio.Event(), asyncio.Event()
    start = server.state.generator.start

    async def started(*arguments: Any, **options: Any) -> Any:
        reached.set()
        await go_on.wait()
        return await start(*arguments, **options)

    server.state.generator.start = started  # type: ignore[method-assign]
    body = {"messages": [MESSAGE], "x": PARTS}
    first = asyncio.create_task(server.http.post(CHAT, json=body))
    await asyncio.wait_for(reached.wait(), timeout=10.0)
    refused = await server.http.post(CHAT, json=body)
    assert assert_envelope(refused, 429)["code"] == "server_limit_exceeded"
    assert 10_000_000 < held(server) < 20_000_000
    go_on.set()
    assert (await first).status_code == 200
    assert (await server.http.post(CHAT, json=body)).status_code == 200
    assert held(server) == 0


async def test_what_a_response_repeats_is_kept_and_counts(server: Server) -> None:
    server.engine.hold_after = 0
    body = {"prompt": "x" * 400, "echo": True, "logit_bias": {str(i): 1 for i in range(200)}}
    asked = asyncio.create_task(server.http.post(TEXT, json={**body, "stop": ["y" * 100] * 4}))
    await asyncio.wait_for(server.engine.holding.wait(), timeout=10.0)
    assert held(server) == 0, "so little does not count"
    server.engine.go_on.set()
    assert (await asked).json()["choices"][0]["text"].startswith("x" * 400)
