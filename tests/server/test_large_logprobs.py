"""Answers with log-probabilities, which are a hundred times as large as their text: no step of
writing them holds the event loop or the interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from bros.batch.store import open_store
from bros.core.request import EngineRequest, RequestOutput, TokenLogprobs
from bros.core.tenants import Resource
from support.batch_server import RowEngine, until
from support.loops import MeasuredLoop, check_turns
from support.scripted_server import Server
from support.tier import by_tier

from .test_responses import read_events

TOKENS = by_tier(fast=1_000, long=4_000)
SHORT = 100
TOP = tuple((64 + k, -1.512345 - k) for k in range(20))
RESPONSE: dict[str, Any] = {
    "input": "x",
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 20,
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "logprobs": True,
    "top_logprobs": 20,
}
ENTRY = {
    "token": "a",
    "logprob": -0.51234,
    "bytes": [97],
    "top_logprobs": [
        {"token": chr(token_id + 33), "logprob": logprob, "bytes": [token_id + 33]}
        for token_id, logprob in TOP
    ],
}


class _Engine(RowEngine):
    """Says `a`, with 20 alternatives for each token."""

    def _output(
        self, request: EngineRequest, count: int, token_id: int, limit: int
    ) -> RequestOutput:
        output = super()._output(request, count, token_id, limit)
        if request.sampling.logprobs is None:
            return output
        shown = TOP[: request.sampling.logprobs]
        logprobs = (TokenLogprobs(token_id, -0.51234, shown),)
        return dataclasses.replace(output, logprobs=logprobs)


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Server]:
    store = open_store(folder)
    server = Server(engine=_Engine, jobs_in=store, max_model_len=20_000)
    server.engine.text = "a" * TOKENS
    assert server.state.jobs is not None
    running = asyncio.create_task(server.state.jobs.run())
    try:
        async with server.http:
            yield server
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        store.close()


async def ask(server: Server, path: str, body: object = None, query: bytes = b"") -> list[bytes]:
    """The parts of a reply; the client of other tests would join them on the loop."""
    content = b"" if body is None else json.dumps(body).encode()
    scope = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": path,
        "query_string": query,
        "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
    }
    scope["headers"] = [*scope["headers"], (b"content-length", b"%d" % len(content))]  # type: ignore[misc]
    parts: list[bytes] = []
    statuses = []
    unread = [{"type": "http.request", "body": content}]

    async def receive() -> dict[str, Any]:
        return unread.pop() if unread else await asyncio.get_running_loop().create_future()

    async def sent(message: MutableMapping[str, Any]) -> None:
        statuses.append(message.get("status"))
        parts.append(message.get("body", b""))

    await server.app(scope, receive, sent)
    assert statuses[0] == 200
    return parts


async def whole_response(server: Server) -> None:
    await ask(server, "/v1/responses", RESPONSE)


async def streamed_response(server: Server) -> None:
    await ask(server, "/v1/responses", RESPONSE | {"stream": True})


async def whole_chat(server: Server) -> None:
    await ask(server, "/v1/chat/completions", CHAT)


async def whole_completion(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": TOKENS, "logprobs": 20}
    await ask(server, "/v1/completions", body)


async def background_response(server: Server) -> None:
    """While it runs, and when it has ended; it is followed by many."""
    made = json.loads(b"".join(await ask(server, "/v1/responses", RESPONSE | {"background": True})))
    path = f"/v1/responses/{made['id']}"
    await asyncio.gather(*(ask(server, path, query=b"stream=true") for _ in range(5)))
    await ask(server, path, query=b"stream=true")
    await ask(server, path)
    await ask(server, "/v1/responses", {"input": "y", "previous_response_id": made["id"]})


@pytest.mark.parametrize(
    "attack",
    [whole_response, streamed_response, whole_chat, whole_completion, background_response],
    ids=lambda attack: attack.__name__,
)
def test_no_turn_of_the_loop_is_long(attack: Any, tmp_path: Path) -> None:
    tries = itertools.count()

    async def main(loop: MeasuredLoop) -> None:
        async with serving(tmp_path / str(next(tries))) as server:
            await server.chat(max_tokens=1)
            with loop.measuring():
                await attack(server)

    check_turns(main)


async def test_replies_have_all_log_probabilities(tmp_path: Path) -> None:
    """However they are read, and they count for their tenant as long as they are held."""
    async with serving(tmp_path) as server:
        logprobs = [ENTRY] * TOKENS
        chat = json.loads(b"".join(await ask(server, "/v1/chat/completions", CHAT)))
        assert chat["choices"][0]["logprobs"] == {"content": logprobs, "refusal": None}
        made = json.loads(b"".join(await ask(server, "/v1/responses", RESPONSE)))
        (item,) = made["output"]
        assert item["content"][0]["logprobs"] == logprobs
        stored = json.loads(b"".join(await ask(server, f"/v1/responses/{made['id']}")))
        assert stored == made
        events = read_events(
            b"".join(await ask(server, "/v1/responses", RESPONSE | {"stream": True})).decode()
        )
        done = {event["type"]: event for event in events}
        assert done["response.output_text.done"]["logprobs"] == logprobs
        assert done["response.completed"]["response"]["output"][0]["content"] == item["content"]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [entry for event in deltas for entry in event["logprobs"]] == logprobs
        going_on = {"input": "y", "previous_response_id": made["id"]}
        later = json.loads(b"".join(await ask(server, "/v1/responses", going_on)))
        items = await ask(server, f"/v1/responses/{later['id']}/input_items")
        shown = json.loads(b"".join(items))["data"]
        assert [each["content"] for each in shown if each["role"] == "assistant"] == [
            item["content"]
        ]
        accounts = server.state.accounts
        # The client has the last byte before the server's task has ended.
        await until(lambda: accounts.used("", Resource.OUTPUT_BYTES) == 0)


async def test_followers_of_a_background_response_are_read_for_together(tmp_path: Path) -> None:
    """And see all of its events, wherever they begin."""
    async with serving(tmp_path) as server:
        engine, jobs = server.engine, server.state.jobs
        assert isinstance(engine, RowEngine) and jobs is not None
        engine.held, engine.text = "x", "a" * SHORT
        body = RESPONSE | {"background": True}
        made = json.loads(b"".join(await ask(server, "/v1/responses", body)))
        path, reads = f"/v1/responses/{made['id']}", 0
        get = jobs.responses.get

        def counted(*given: Any) -> Any:
            nonlocal reads
            reads += 1
            return get(*given)

        jobs.responses.get = counted  # type: ignore[method-assign]
        queries = [b"stream=true"] * 4 + [b"stream=true&starting_after=3"] * 4
        followers = [asyncio.create_task(ask(server, path, query=query)) for query in queries]
        await until(lambda: server.state.accounts.used("", Resource.WAITS) == len(queries))
        engine.go_on.set()
        read = [read_events(b"".join(parts).decode()) for parts in await asyncio.gather(*followers)]
    assert reads < 2.5 * len(queries), "each once to find it, and then for all together"
    logprobs = [ENTRY] * SHORT
    for events in read:
        shown = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [entry for event in shown for entry in event["logprobs"]] == logprobs
        assert events[-1]["type"] == "response.completed"
        assert events[0]["sequence_number"] in (0, 4)
