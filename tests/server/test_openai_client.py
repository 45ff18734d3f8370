"""OpenAI's own client, unmodified, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from bros.core.errors import QueueFullError
from support.scripted_server import LiveServer, live_server


@pytest.fixture
async def client(live: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="unused", max_retries=0
    ) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "Hi"}], seed=3, service_tier="flex"
    )
    assert reply.choices[0].message.content == "Hello world"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.service_tier == "flex"
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply._request_id is not None


async def test_chat_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "Hi"}],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usage = ["", ""], [], None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    assert texts == ["Hello world"] * 2
    assert reasons == ["stop", "stop"]
    assert usage is not None and usage.completion_tokens == 24


async def test_chat_stream_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="scripted", messages=[{"role": "user", "content": "Hi"}]
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world"


async def test_chat_logprobs_and_stop(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "Hi"}],
        logprobs=True,
        top_logprobs=2,
        stop=["wor"],
    )
    choice = reply.choices[0]
    assert choice.message.content == "Hello "
    assert choice.logprobs is not None and choice.logprobs.content is not None
    first = choice.logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("H", -0.5, [72])
    assert [top.logprob for top in first.top_logprobs] == [-0.5, -1.5]


async def test_completions(client: openai.AsyncOpenAI) -> None:
    reply = await client.completions.create(
        model="scripted", prompt=["a", "b"], n=2, max_tokens=4, logprobs=1, seed=1
    )
    assert [choice.text for choice in reply.choices] == ["Hell"] * 4
    assert {choice.finish_reason for choice in reply.choices} == {"length"}
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens == list("Hell")
    assert logprobs.text_offset == [0, 1, 2, 3]


async def test_completions_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="scripted", prompt=[64, 65], max_tokens=50, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello world"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["scripted"]
    assert (await client.models.retrieve("scripted")).owned_by == "bros"


async def test_blocking_client(live: LiveServer) -> None:
    def ask() -> str | None:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused") as client:
            reply = client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "Hi"}]
            )
            return reply.choices[0].message.content

    assert await asyncio.to_thread(ask) == "Hello world"


async def test_errors_become_the_exceptions_users_know(
    live: LiveServer, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(
            model="gpt-4", messages=[{"role": "user", "content": "Hi"}]
        )
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="scripted", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    live.server.engine.refusal = QueueFullError(8, 3.0)
    with pytest.raises(openai.RateLimitError) as busy:
        await client.completions.create(model="scripted", prompt="a")
    assert busy.value.response.headers["retry-after"] == "3"


async def test_death_in_a_stream_is_an_api_error(
    live: LiveServer, client: openai.AsyncOpenAI
) -> None:
    live.server.engine.die_after = 3
    stream = await client.completions.create(
        model="scripted", prompt="a", max_tokens=50, stream=True
    )
    with pytest.raises(openai.APIError, match="The engine died"):
        async for _ in stream:
            pass


async def test_key_is_checked() -> None:
    async with live_server(api_key="secret") as live:
        for key, works in (("secret", True), ("wrong", False)):
            async with openai.AsyncOpenAI(
                base_url=f"{live.url}/v1", api_key=key, max_retries=0
            ) as client:
                if works:
                    assert (await client.models.list()).data
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()
