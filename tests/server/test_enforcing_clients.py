"""Clients of others, unmodified, get what they asked a random model for: it is enforced.

The model writes anything, so all that is valid is the grammar's work. Everything but the model's
size is as for users: real connections, and an engine.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
import pytest_asyncio

from support.model_server import ModelServer, model_server
from support.other_clients import imported
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import TEMPLATE, save_tokenizer

pytest.importorskip("llguidance")
pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "tiny"
TRIES = 3


class Person(pydantic.BaseModel):
    """A person."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=8)
    born: int = pydantic.Field(ge=1000, le=2100)
    field: Literal["physics", "music"]
    tags: list[Literal["a", "b"]] = pydantic.Field(max_length=2)


SCHEMA = Person.model_json_schema()
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "keep", "description": "Keep it.", "parameters": SCHEMA, "strict": True},
}
ASKED: Any = [{"role": "user", "content": "Write some JSON."}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ModelServer]:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder, vocab_size=440)
    config = json.loads((folder / "config.json").read_text())
    config |= {"eos_token_id": 1, "max_position_embeddings": 4000}
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder, chat_template=TEMPLATE)
    data = tmp_path_factory.mktemp("server")
    async with model_server(folder, data, kv_blocks=400, max_model_len=4000) as made:
        yield made


# ---- openai


@pytest.mark.parametrize("seed", range(TRIES))
async def test_openai_parses_what_it_asked_for(server: ModelServer, seed: int) -> None:
    chats = server.client.chat.completions
    chat = await chats.parse(model=MODEL, messages=ASKED, response_format=Person, seed=seed)
    assert isinstance(chat.choices[0].message.parsed, Person)
    tool: Any = openai.pydantic_function_tool(Person)
    called = await chats.parse(
        model=MODEL, messages=ASKED, tools=[tool], tool_choice="required", seed=seed,
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = called.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Person)
    response = await server.client.responses.parse(
        model=MODEL, input="Write some JSON.", text_format=Person, extra_body={"seed": seed}
    )
    assert isinstance(response.output_parsed, Person)


@pytest.mark.parametrize("seed", range(TRIES))
async def test_openai_streams_what_it_asked_for(server: ModelServer, seed: int) -> None:
    async with server.client.chat.completions.stream(
        model=MODEL, messages=ASKED, response_format=Person, seed=seed
    ) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)
    function: Any = {"type": "function", **TOOL["function"]}
    async with server.client.responses.stream(
        model=MODEL,
        input="Write some JSON.",
        tools=[function],
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={"seed": seed},
    ) as events:
        (item,) = (await events.get_final_response()).output
    assert item.type == "function_call"
    Person.model_validate_json(item.arguments)


# ---- anthropic


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "keep"}])
async def test_anthropic_calls_the_tool_it_has_to(server: ModelServer, choice: Any) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="none", max_retries=0
    ) as client:
        asked: Any = {
            "model": MODEL,
            "max_tokens": 1000,
            "messages": ASKED,
            "tools": [{"name": "keep", "description": "Keep it.", "input_schema": SCHEMA}],
            "tool_choice": {**choice, "disable_parallel_tool_use": True},
        }
        for _ in range(TRIES):
            message = await client.messages.create(**asked)
            assert message.stop_reason == "tool_use"
            (block,) = message.content
            assert block.type == "tool_use" and Person.model_validate(block.input)
        async with client.messages.stream(**asked) as stream:
            (block,) = (await stream.get_final_message()).content
        assert block.type == "tool_use" and Person.model_validate(block.input)


# ---- LangChain


def chat_openai(server: ModelServer, *, responses: bool) -> Any:
    """responses: by the Responses API."""
    return imported("langchain_openai").ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=MODEL, use_responses_api=responses
    )


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # as with OpenAI's server
@pytest.mark.parametrize("responses", [False, True])
async def test_langchain_gets_structured_output_by_a_schema(
    server: ModelServer, responses: bool
) -> None:
    model = chat_openai(server, responses=responses)
    structured = model.with_structured_output(Person, method="json_schema")
    for _ in range(TRIES):
        assert isinstance(await structured.ainvoke("Write some JSON."), Person)
    pieces = [piece async for piece in structured.astream("Write some JSON.")]
    assert isinstance(pieces[-1], Person)
    plain = model.with_structured_output(SCHEMA, method="json_schema", strict=True)
    assert Person.model_validate(await plain.ainvoke("Write some JSON."))


@pytest.mark.parametrize("responses", [False, True])
async def test_langchain_binds_tools_that_have_to_be_called(
    server: ModelServer, responses: bool
) -> None:
    model = chat_openai(server, responses=responses)
    for choice in ("required", "Person"):
        bound = model.bind_tools(
            [Person], tool_choice=choice, strict=True, parallel_tool_calls=False
        )
        for _ in range(TRIES):
            (call,) = (await bound.ainvoke("Write some JSON.")).tool_calls
            assert call["name"] == "Person" and Person.model_validate(call["args"])


async def test_bros_chat_gets_structured_output_and_calls(server: ModelServer) -> None:
    model = imported("bros.langchain").BrosChat(url=server.url)
    for _ in range(TRIES):
        structured = model.with_structured_output(Person)
        assert isinstance(await structured.ainvoke("Write some JSON."), Person)
        bound = model.bind_tools([Person], tool_choice="required")
        for call in (await bound.ainvoke("Write some JSON.")).tool_calls:
            assert call["name"] == "Person" and Person.model_validate(call["args"])


# ---- LiteLLM


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
async def test_litellm_gets_what_it_asked_for(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks for them online
    litellm = imported("litellm")
    options: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": ASKED,
    }
    for seed in range(TRIES):
        reply = await litellm.acompletion(response_format=Person, seed=seed, **options)
        Person.model_validate_json(reply.choices[0].message.content)
        for choice in ("required", {"type": "function", "function": {"name": "keep"}}):
            reply = await litellm.acompletion(
                tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, seed=seed, **options
            )
            (call,) = reply.choices[0].message.tool_calls
            assert call.function.name == "keep"
            Person.model_validate_json(call.function.arguments)
        chunks = [
            chunk
            async for chunk in await litellm.acompletion(
                response_format=Person, seed=seed, stream=True, **options
            )
        ]
        whole = litellm.stream_chunk_builder(chunks)
        Person.model_validate_json(whole.choices[0].message.content)


# ---- OpenAI Agents SDK


@pytest.mark.long
@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_agents_call_the_tool_they_have_to_and_end_with_their_type(
    server: ModelServer, kind: str
) -> None:
    agents = imported("agents")
    agents.set_tracing_disabled(True)
    kept: list[Person] = []

    @agents.function_tool
    def keep(person: Person) -> str:
        """Keep a person."""
        kept.append(person)
        return "kept"

    model = getattr(agents, kind)(model=MODEL, openai_client=server.client)
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False)
    asked = {"name": "Clerk", "instructions": "Be brief.", "model": model}
    agent = agents.Agent(
        **asked, tools=[keep], model_settings=settings, tool_use_behavior="stop_on_first_tool"
    )
    for _ in range(TRIES):
        assert (await agents.Runner.run(agent, "Keep somebody.")).final_output == "kept"
    assert len(kept) == TRIES
    writer = agents.Agent(**asked, output_type=Person)
    for _ in range(TRIES):
        assert isinstance((await agents.Runner.run(writer, "Write.")).final_output, Person)
    streamed = agents.Runner.run_streamed(writer, "Write.")
    async for _ in streamed.stream_events():
        pass
    assert isinstance(streamed.final_output, Person)
