"""Every field of a request that the official clients know, one by one: what becomes of it.

The lists of fields are those of the `openai` and `anthropic` packages. A field that has no line
here fails with the versions that this file was written for, and with others is named as skipped.

    EFFECT    it changes what the engine is asked for, or the reply
    ECHOED    it changes nothing in the reply but the field that repeats it
    ACCEPTED  it is taken and changes neither, as there is nothing here that it could change
    REFUSED   400, naming it: what it asks for would silently be missing
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.metadata
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from support import chat_templates
from support.batch_server import BatchServer, batch_server
from support.scripted_server import assert_envelope

WRITTEN_FOR = {"openai": "3.57.0", "anthropic": "2.14.0"}


class Fate(enum.Enum):
    EFFECT = enum.auto()
    ECHOED = enum.auto()
    ACCEPTED = enum.auto()
    REFUSED = enum.auto()


EFFECT, ECHOED, ACCEPTED, REFUSED = Fate
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
HI = [{"role": "user", "content": "Hi"}]
MESSAGES_TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}


class Field(NamedTuple):
    """value: of the field. also: fields that it needs."""

    fate: Fate
    value: Any
    also: Mapping[str, Any] = {}


class Reference(NamedTuple):
    """An endpoint.

    source: package, module and class of its fields in the client.
    base: a request with the required fields.
    fields: those that are not required.
    """

    path: str
    source: tuple[str, str, str]
    base: Mapping[str, Any]
    fields: Mapping[str, Field]


CHAT = Reference(
    "/v1/chat/completions",
    ("openai", "openai.types.chat.completion_create_params", "CompletionCreateParamsBase"),
    {"model": "scripted", "messages": HI, "max_tokens": 20},
    {
        "audio": Field(REFUSED, {"voice": "alloy", "format": "mp3"}),
        "frequency_penalty": Field(EFFECT, 0.5),
        "function_call": Field(REFUSED, {"name": "f"}),
        "functions": Field(REFUSED, [FUNCTION]),
        "logit_bias": Field(EFFECT, {"5": 1}),
        "logprobs": Field(EFFECT, True),
        "max_completion_tokens": Field(EFFECT, 5),
        "max_tokens": Field(EFFECT, 5),
        "metadata": Field(ACCEPTED, {"a": "b"}),
        "modalities": Field(REFUSED, ["text", "audio"]),
        "moderation": Field(REFUSED, {"model": "omni-moderation-latest"}),
        "n": Field(EFFECT, 2),
        "parallel_tool_calls": Field(EFFECT, False, {"tools": [TOOL], "tool_choice": "required"}),
        "prediction": Field(ACCEPTED, {"type": "content", "content": "Hello"}),
        "presence_penalty": Field(EFFECT, 0.5),
        "prompt_cache_key": Field(ACCEPTED, "a"),
        "prompt_cache_options": Field(ACCEPTED, {"ttl": "30m"}),
        "prompt_cache_retention": Field(ACCEPTED, "24h"),
        "reasoning_effort": Field(EFFECT, "none"),
        "response_format": Field(
            EFFECT,
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        ),
        "safety_identifier": Field(EFFECT, "user-1"),
        "seed": Field(EFFECT, 7),
        "service_tier": Field(EFFECT, "flex"),
        "stop": Field(EFFECT, ["wor"]),
        "store": Field(ACCEPTED, True),
        "stream_options": Field(EFFECT, {"include_usage": True}, {"stream": True}),
        "temperature": Field(EFFECT, 0.3),
        "tool_choice": Field(EFFECT, "required", {"tools": [TOOL]}),
        "tools": Field(EFFECT, [TOOL]),
        "top_logprobs": Field(EFFECT, 2, {"logprobs": True}),
        "top_p": Field(EFFECT, 0.5),
        "user": Field(EFFECT, "user-1"),
        "verbosity": Field(ACCEPTED, "low"),
        "web_search_options": Field(REFUSED, {}),
    },
)
COMPLETIONS = Reference(
    "/v1/completions",
    ("openai", "openai.types.completion_create_params", "CompletionCreateParamsBase"),
    {"model": "scripted", "prompt": "Hi", "max_tokens": 20},
    {
        "best_of": Field(REFUSED, 3),
        "echo": Field(EFFECT, True),
        "frequency_penalty": Field(EFFECT, 0.5),
        "logit_bias": Field(EFFECT, {"5": 1}),
        "logprobs": Field(EFFECT, 2),
        "max_tokens": Field(EFFECT, 5),
        "n": Field(EFFECT, 2),
        "presence_penalty": Field(EFFECT, 0.5),
        "seed": Field(EFFECT, 7),
        "stop": Field(EFFECT, "wor"),
        "stream_options": Field(EFFECT, {"include_usage": True}, {"stream": True}),
        "suffix": Field(REFUSED, "the end"),
        "temperature": Field(EFFECT, 0.3),
        "top_p": Field(EFFECT, 0.5),
        "user": Field(EFFECT, "user-1"),
    },
)
EMBEDDINGS = Reference(
    "/v1/embeddings",
    ("openai", "openai.types.embedding_create_params", "EmbeddingCreateParams"),
    {"model": "scripted", "input": "Hi"},
    {
        "dimensions": Field(REFUSED, 4),  # the model was not trained for it
        "encoding_format": Field(EFFECT, "base64"),
        "user": Field(EFFECT, "user-1"),
    },
)
RESPONSES = Reference(
    "/v1/responses",
    ("openai", "openai.types.responses.response_create_params", "ResponseCreateParamsBase"),
    {"model": "scripted", "input": "Hi"},
    {
        "access_programs": Field(REFUSED, ["a"]),
        "background": Field(EFFECT, True),
        "background_options": Field(REFUSED, {}),  # without background
        "context_management": Field(REFUSED, [{"type": "compaction"}]),
        "conversation": Field(REFUSED, "conv_1"),
        "image": Field(REFUSED, {"a": 1}),
        "include": Field(EFFECT, ["message.output_text.logprobs"]),
        "instructions": Field(EFFECT, "Be brief."),
        "max_output_tokens": Field(EFFECT, 16),
        "max_tool_calls": Field(ECHOED, 3),  # of built-in tools, which there are none of
        "metadata": Field(ECHOED, {"a": "b"}),
        "moderation": Field(REFUSED, {"model": "omni-moderation-latest"}),
        "parallel_tool_calls": Field(
            EFFECT,
            False,
            {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        ),
        "previous_response_id": Field(REFUSED, "resp_0"),  # there is none
        "prompt": Field(REFUSED, {"id": "pmpt_1"}),
        "prompt_cache_key": Field(ECHOED, "a"),
        "prompt_cache_options": Field(ACCEPTED, {"ttl": "30m"}),
        "prompt_cache_retention": Field(ACCEPTED, "24h"),
        "reasoning": Field(EFFECT, {"effort": "none"}),
        "safety_identifier": Field(EFFECT, "user-1"),
        "service_tier": Field(EFFECT, "flex"),
        "store": Field(ECHOED, False),  # and it cannot be retrieved
        "stream_options": Field(ACCEPTED, {"include_obfuscation": False}, {"stream": True}),
        "temperature": Field(EFFECT, 0.3),
        "text": Field(EFFECT, {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}),
        "tool_choice": Field(EFFECT, "required", {"tools": [{"type": "function", **FUNCTION}]}),
        "tools": Field(EFFECT, [{"type": "function", **FUNCTION}]),
        "top_logprobs": Field(EFFECT, 2, {"include": ["message.output_text.logprobs"]}),
        "top_p": Field(EFFECT, 0.5),
        "truncation": Field(ECHOED, "auto"),  # an effect on inputs that are too long
        "user": Field(EFFECT, "user-1"),
    },
)
MESSAGES = Reference(
    "/v1/messages",
    ("anthropic", "anthropic.types.message_create_params", "MessageCreateParamsBase"),
    {"model": "scripted", "messages": HI, "max_tokens": 20},
    {
        "cache_control": Field(ACCEPTED, {"type": "ephemeral"}),
        "container": Field(REFUSED, "c"),
        "diagnostics": Field(REFUSED, {"a": 1}),
        "inference_geo": Field(ACCEPTED, "eu"),
        "metadata": Field(EFFECT, {"user_id": "user-1"}),
        "output_config": Field(EFFECT, {"format": {"type": "json_schema", "schema": SCHEMA}}),
        "service_tier": Field(ACCEPTED, "standard_only"),
        "speed": Field(ACCEPTED, "fast"),
        "stop_sequences": Field(EFFECT, ["wor"]),
        "system": Field(EFFECT, "Be brief."),
        "thinking": Field(EFFECT, {"type": "disabled"}),
        "tool_choice": Field(EFFECT, {"type": "any"}, {"tools": [MESSAGES_TOOL]}),
        "tools": Field(EFFECT, [MESSAGES_TOOL]),
        "user_profile_id": Field(ACCEPTED, "a"),
        "workspace_id": Field(ACCEPTED, "a"),
    },
)
ALL = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES)
ITEMS = [
    pytest.param(reference, name, id=f"{reference.path}-{name}")
    for reference in ALL
    for name in reference.fields
]
OF_ONE_REQUEST = frozenset(
    {"id", "created", "created_at", "completed_at", "request_id", "item_id", "sequence_number"}
)
"""Fields of replies that differ between equal requests."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BatchServer]:
    folder, tokens = tmp_path_factory.mktemp("server"), {"<think>": False, "</think>": False}
    async with batch_server(
        folder, max_model_len=4000, template=chat_templates.THINKING, tokens=tokens
    ) as made:
        yield made


async def outcome(
    server: BatchServer, reference: Reference, body: Mapping[str, Any], but: str = ""
) -> str:
    """What the engine was asked for, and the reply. but: a field of the reply to leave out."""
    before = len(server.engine.submitted)
    reply = await server.http.post(reference.path, json=dict(body))
    assert reply.status_code == 200, reply.text
    asked = [
        dataclasses.replace(request, request_id="", arrival_s=0.0)
        for request in server.engine.submitted[before:]
    ]
    if reply.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
        found = [json.loads(line) for line in lines if line.startswith("{")]
    else:
        found = [reply.json()]
    return f"{asked} {json.dumps(_without(found, OF_ONE_REQUEST | {but}))}"


def _without(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(v, names) for name, v in value.items() if name not in names}
    return [_without(each, names) for each in value] if isinstance(value, list) else value


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("reference", "name"), ITEMS)
async def test_each_field_has_its_effect_or_is_refused_by_name(
    server: BatchServer, reference: Reference, name: str
) -> None:
    field = reference.fields[name]
    without = {**reference.base, **field.also}
    with_it = {**without, name: field.value}
    if field.fate is REFUSED:
        reply = await server.http.post(reference.path, json=with_it)
        assert reply.status_code in (400, 404)
        error = assert_envelope(reply, reply.status_code)
        assert name in (error["param"] or error["message"])
        return
    plain, changed = [await outcome(server, reference, b) for b in (without, with_it)]
    assert (plain != changed) is (field.fate in (EFFECT, ECHOED))
    plain, changed = [await outcome(server, reference, b, but=name) for b in (without, with_it)]
    assert (plain != changed) is (field.fate is EFFECT)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("reference", "name"), ITEMS)
async def test_null_is_as_if_the_field_was_not_given(
    server: BatchServer, reference: Reference, name: str
) -> None:
    without = {k: v for k, v in reference.base.items() if k != name}
    if reference is MESSAGES and name == "max_tokens":
        pytest.skip("it is required")
    plain, null = [await outcome(server, reference, b) for b in (without, {**without, name: None})]
    assert plain == null


@pytest.mark.parametrize("reference", ALL, ids=lambda reference: reference.path)
def test_every_field_of_the_clients_has_a_line_here(reference: Reference) -> None:
    package, module, name = reference.source
    known = getattr(importlib.import_module(module), name).__annotations__
    missing = known.keys() - reference.fields.keys() - reference.base.keys()
    installed = importlib.metadata.version(package)
    if missing and installed != WRITTEN_FOR[package]:
        pytest.skip(f"{package} {installed} has new fields: {', '.join(sorted(missing))}")
    assert not missing
