"""Wire models of /v1/messages. `messages` and `system` are checked by call.py, which names the
block that is wrong."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from bros.server.openai.schema import Int, MaxTokens, ModelRequest, SloFields, WireModel

_TEXT = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT}]}
_THINKING = {
    "type": "object",
    "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"}},
    "required": ["type", "thinking"],
}
_REDACTED_THINKING = {
    "type": "object",
    "properties": {"type": {"const": "redacted_thinking"}, "data": {"type": "string"}},
    "required": ["type"],
    "description": "No effect",
}
_TOOL_USE = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_use"},
        "id": {"type": "string"},
        "name": {"type": "string"},
        "input": {"type": "object"},
    },
    "required": ["type", "id", "name", "input"],
}
_TOOL_RESULT = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": {"type": "string"},
        "content": _TEXTS,
        "is_error": {"type": "boolean"},
    },
    "required": ["type", "tool_use_id"],
}
_BLOCK_SCHEMAS = [_TEXT, _THINKING, _REDACTED_THINKING, _TOOL_USE, _TOOL_RESULT]
_BLOCKS = {"type": "array", "items": {"anyOf": _BLOCK_SCHEMAS}}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, _BLOCKS]},
    },
    "required": ["role", "content"],
}

Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})]
System = Annotated[Any, WithJsonSchema(_TEXTS)]


class MessageTool(WireModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessageToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With tool")
    disable_parallel_tool_use: bool | None = None


class Thinking(WireModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = Field(None, description="No effect")


class OutputFormat(WireModel):
    model_config = ConfigDict(protected_namespaces=())

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Passed to the chat template"
    )
    format: OutputFormat | None = None


class MessageMetadata(WireModel):
    user_id: str | None = Field(None, max_length=512)


class CountTokens(ModelRequest):
    """POST /v1/messages/count_tokens"""

    messages: Messages
    system: System = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class CreateMessage(CountTokens):
    """POST /v1/messages"""

    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only", "flex", "priority"] | None = Field(
        None,
        description="auto and standard_only are real-time, priority with halved objectives. flex, "
        "which Anthropic does not have, is best-effort",
    )
    # Fields that Anthropic does not have.
    seed: Int | None = None
    cache_salt: str | None = Field(None, max_length=512, description="As in chat completions")
    slo: SloFields | None = None


class MessageOutputDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    input_tokens: int = Field(description="Tokens of the prompt that were not cached")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int = Field(description="Tokens of the prompt that were cached")
    output_tokens: int
    output_tokens_details: MessageOutputDetails
    service_tier: Literal["standard", "priority", "batch"] = Field(
        description="batch: served as best-effort"
    )


class MessageObject(BaseModel):
    """The answer. `content` has blocks of the types thinking, text and tool_use."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int
