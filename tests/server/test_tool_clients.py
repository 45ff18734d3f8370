"""Clients of others, unmodified, call tools and read reasoning over real connections."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest

from support import chat_templates
from support.other_clients import imported
from support.scripted_server import LiveServer, live_server
from support.tool_cases import HERMES_TOKENS, NOW, PARIS, TOOLS

ANSWER = "It is sunny in Paris."
THINKING = "<think>\nI have to look.\n</think>\n\n"


@pytest.fixture
async def live() -> AsyncIterator[LiveServer]:
    async with live_server(
        template=chat_templates.THINKING, tokens=HERMES_TOKENS, max_model_len=4000
    ) as made:
        made.server.engine.texts = [THINKING + PARIS, ANSWER]
        yield made


@pytest.fixture
async def client(live: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="unused", max_retries=0
    ) as made:
        yield made


def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Paris"
    return "Sunny"


def prompt_of(live: LiveServer) -> str:
    ids = live.server.last().prompt_token_ids
    return live.server.tokenizer.decode(ids, skip_special_tokens=False)


def assert_the_result_was_seen(live: LiveServer) -> None:
    prompt = prompt_of(live)
    assert PARIS in prompt
    assert "<tool_response>\nSunny\n</tool_response>" in prompt


# ---- openai


async def test_two_turns_of_a_tool_loop(live: LiveServer, client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    first = await client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.reasoning_content == "I have to look."
    assert first.usage is not None and first.usage.completion_tokens_details is not None
    assert first.usage.completion_tokens_details.reasoning_tokens == 19
    messages.append(choice.message)
    for call in choice.message.tool_calls or ():
        assert call.type == "function" and call.function.name == "get_weather"
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    second = await client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == ANSWER
    assert second.choices[0].message.tool_calls is None
    assert_the_result_was_seen(live)


async def test_stream_helper_joins_calls(live: LiveServer, client: openai.AsyncOpenAI) -> None:
    live.server.engine.texts = [f"I look.\n{PARIS}\n{NOW}"]
    done = []
    async with client.chat.completions.stream(
        model="scripted", messages=[{"role": "user", "content": "Hi"}], tools=TOOLS
    ) as stream:
        async for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.name, json.loads(event.arguments)))
        final = await stream.get_final_completion()
    assert done == [("get_weather", {"city": "Paris"}), ("get_time", {})]
    message = final.choices[0].message
    assert message.content == "I look." and final.choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in message.tool_calls or ()] == ["get_weather", "get_time"]
    assert len({call.id for call in message.tool_calls or ()}) == 2


async def test_raw_stream_with_reasoning(live: LiveServer, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "Hi"}], tools=TOOLS, stream=True
    )
    reasoning, arguments = "", ""
    async for chunk in stream:
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        arguments += "".join(
            call.function.arguments or "" for call in delta.tool_calls or () if call.function
        )
    assert (reasoning, json.loads(arguments)) == ("I have to look.", {"city": "Paris"})


# ---- LangChain


class Weather(pydantic.BaseModel):
    """What the weather is."""

    city: str


async def test_langchain_binds_tools(live: LiveServer) -> None:
    langchain = imported("langchain_openai")
    model = langchain.ChatOpenAI(base_url=f"{live.url}/v1", api_key="unused", model="scripted")
    bound = model.bind_tools(TOOLS)
    asked = [("user", "Weather in Paris?")]
    reply = await bound.ainvoke(asked)
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    messages = imported("langchain_core.messages")
    result = messages.ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    assert (await bound.ainvoke([*asked, reply, result])).content == ANSWER
    assert_the_result_was_seen(live)
    joined = None
    async for chunk in bound.astream(asked):
        joined = chunk if joined is None else joined + chunk
    assert joined is not None
    assert [(each["name"], each["args"]) for each in joined.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]


async def test_langchain_gets_structured_output_by_a_call(live: LiveServer) -> None:
    langchain = imported("langchain_openai")
    live.server.engine.texts = [PARIS.replace("get_weather", "Weather")]
    model = langchain.ChatOpenAI(base_url=f"{live.url}/v1", api_key="unused", model="scripted")
    structured = model.with_structured_output(Weather, method="function_calling")
    assert await structured.ainvoke("Weather in Paris?") == Weather(city="Paris")
    grammar = live.server.last().sampling.grammar  # it names the function
    assert grammar is not None and "Weather" in grammar.text


async def test_bros_chat_binds_tools(live: LiveServer) -> None:
    messages = imported("langchain_core.messages")
    model = imported("bros.langchain").BrosChat(url=live.url)
    bound = model.bind_tools([get_weather])
    reply = await bound.ainvoke("Weather in Paris?")
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    assert reply.additional_kwargs["reasoning_content"] == "I have to look."
    assert reply.usage_metadata["input_token_details"] == {"cache_read": 0}
    assert reply.usage_metadata["output_token_details"] == {"reasoning": 19}
    result = messages.ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    asked = messages.HumanMessage("Weather in Paris?")
    assert (await bound.ainvoke([asked, reply, result])).content == ANSWER
    assert_the_result_was_seen(live)
    joined = None
    async for chunk in bound.astream("Weather in Paris?"):
        joined = chunk if joined is None else joined + chunk
    assert joined is not None
    assert [(each["name"], each["args"]) for each in joined.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    assert joined.additional_kwargs["reasoning_content"] == "I have to look."
    assert joined.usage_metadata["output_token_details"] == {"reasoning": 19}


async def test_bros_chat_has_log_probabilities(live: LiveServer) -> None:
    live.server.engine.texts = [ANSWER]
    model = imported("bros.langchain").BrosChat(url=live.url).bind(logprobs=True)
    whole = (await model.ainvoke("Hi")).response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in whole) == ANSWER
    first, *others = [chunk async for chunk in model.astream("Hi")]
    assert sum(others, start=first).response_metadata["logprobs"]["content"] == whole


async def test_bros_chat_gives_structured_output(live: LiveServer) -> None:
    model = imported("bros.langchain").BrosChat(url=live.url)
    live.server.engine.texts = [PARIS.replace("get_weather", "Weather"), PARIS[:-20]]
    structured = model.with_structured_output(Weather)
    assert await structured.ainvoke("Weather in Paris?") == Weather(city="Paris")
    reply = await model.bind_tools([get_weather], tool_choice="get_weather").ainvoke("Hi")
    assert not reply.tool_calls and reply.invalid_tool_calls[0]["name"] == "get_weather"


# ---- OpenAI Agents SDK


@pytest.mark.long
async def test_agents_run_tools(live: LiveServer, client: openai.AsyncOpenAI) -> None:
    agents = imported("agents")
    agents.set_tracing_disabled(True)
    agent = agents.Agent(
        name="Weather agent",
        instructions="Be nice.",
        model=agents.OpenAIChatCompletionsModel(model="scripted", openai_client=client),
        tools=[agents.function_tool(get_weather, strict_mode=False)],
    )
    result = await agents.Runner.run(agent, "Weather in Paris?")
    assert result.final_output == ANSWER
    assert_the_result_was_seen(live)
    live.server.engine.submitted.clear()  # from the first text on
    streamed = agents.Runner.run_streamed(agent, "Weather in Paris?")
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == ANSWER


# ---- LiteLLM


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
async def test_litellm_calls_tools(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks for them online
    litellm = imported("litellm")
    options: dict[str, Any] = {
        "model": "openai/scripted",
        "api_base": f"{live.url}/v1",
        "api_key": "unused",
        "tools": TOOLS,
    }
    messages: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    reply = await litellm.acompletion(messages=messages, **options)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    assert message.reasoning_content == "I have to look."
    (call,) = message.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    reply = await litellm.acompletion(messages=messages, **options)
    assert reply.choices[0].message.content == ANSWER
    assert_the_result_was_seen(live)
    chunks = [
        chunk
        async for chunk in await litellm.acompletion(messages=messages, stream=True, **options)
    ]
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.tool_calls[0].function.arguments == '{"city": "Paris"}'
