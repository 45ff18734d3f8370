"""Wire models of /v1/responses: requests, and the response object with its items.

`input` is checked by items.py, which names the item that is wrong.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from bros.core.request import MAX_LOGPROBS
from bros.server.openai.schema import (
    FalseByDefault,
    Int,
    MaxTokens,
    ModelRequest,
    ServiceTier,
    SloFields,
    Stop,
    TokenId,
    Verbosity,
    WireModel,
)

# ---- Requests.


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]


class FunctionTool(WireModel):
    """A function that the client runs when the model calls it."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(WireModel):
    type: Literal["function"]
    name: str


class ResponseToolChoice(WireModel):
    """One function that the model has to call, or the functions that it may call."""

    type: Literal["function", "allowed_tools"]
    name: str | None = Field(None, description="With function")
    mode: Literal["auto", "required"] | None = Field(None, description="With allowed_tools")
    tools: list[AllowedTool] | None = Field(None, description="With allowed_tools")


class TextFormat(WireModel):
    """What the text has to be. json_schema needs name and schema."""

    model_config = ConfigDict(protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(WireModel):
    format: TextFormat | None = None
    verbosity: Verbosity | None = Field(None, description="Passed to the chat template")


class Reasoning(WireModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Passed to the chat template"
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="No effect: the reasoning itself is in the output"
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The old name of summary"
    )


class BackgroundOptions(WireModel):
    completion_window: Literal["soonest", "2h", "8h"] | None = Field(
        None,
        description="A background response that has not ended by then fails. soonest, the default: "
        "24 h",
    )


class ResponseStreamOptions(WireModel):
    include_obfuscation: bool | None = Field(None, description="true is not supported")


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]

_TEXT_PART = {
    "type": "object",
    "properties": {
        "type": {"enum": ["input_text", "output_text"]},
        "text": {"type": "string"},
    },
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["user", "system", "developer", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
    },
    "required": ["role", "content"],
}
_FUNCTION_CALL = {
    "type": "object",
    "properties": {
        "type": {"const": "function_call"},
        "call_id": {"type": "string"},
        "name": {"type": "string"},
        "arguments": {"type": "string"},
    },
    "required": ["type", "call_id", "name", "arguments"],
}
_FUNCTION_CALL_OUTPUT = {
    "type": "object",
    "properties": {
        "type": {"const": "function_call_output"},
        "call_id": {"type": "string"},
        "output": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
    },
    "required": ["type", "call_id", "output"],
}
_REASONING = {
    "type": "object",
    "properties": {
        "type": {"const": "reasoning"},
        "summary": {"type": "array", "items": {"type": "object"}},
        "content": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "reasoning_text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    },
    "required": ["type"],
}
_ITEM_REFERENCE = {
    "type": "object",
    "properties": {"type": {"const": "item_reference"}, "id": {"type": "string"}},
    "required": ["type", "id"],
    "description": "An item of the output of a stored response",
}

Input = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "anyOf": [
                            _MESSAGE,
                            _FUNCTION_CALL,
                            _FUNCTION_CALL_OUTPUT,
                            _REASONING,
                            _ITEM_REFERENCE,
                        ]
                    },
                },
            ]
        }
    ),
]


class CreateResponse(ModelRequest):
    """POST /v1/responses"""

    input: Input
    instructions: str | None = None
    previous_response_id: str | None = Field(
        None,
        description="The stored response whose conversation goes on. Its instructions do not apply "
        "again",
    )
    store: bool | None = Field(
        None, description="Whether to keep the response, which is the default"
    )
    background: bool | None = Field(
        None,
        description="Reply at once, and run as a best-effort request that survives a restart of "
        "the server; retrieve it by its id",
    )
    background_options: BackgroundOptions | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Includable] | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int | None = Field(
        None,
        description="No effect: it limits tools that run on the server; there are none",
    )
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description="auto: if the conversation does not fit into the context, leave out its first "
        "messages, but not the system messages at its beginning",
    )
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = Field(None, description="As in chat completions")
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(
        None, max_length=512, description="No effect: common prefixes are always found"
    )
    # Fields that OpenAI does not have.
    top_k: Int | None = Field(None, description="0 or -1: off")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int | None = None
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id -> added to its logit")
    chat_template_kwargs: dict[str, Any] | None = None
    allow_special_tokens: FalseByDefault = Field(
        default=False, description="As in chat completions"
    )
    cache_salt: str | None = Field(None, max_length=512, description="As in chat completions")
    slo: SloFields | None = None


class CountInputTokens(ModelRequest):
    """POST /v1/responses/input_tokens. The fields of CreateResponse that are part of the prompt."""

    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None


# ---- Replies.


class ResponseInputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = Field(
        description="Prompt tokens that were computed and are in the prefix cache from now on, as "
        "far as memory permits"
    )


class ResponseOutputDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(BaseModel):
    """A response. `output` has items of the types message, reasoning and function_call."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    system_fingerprint: str | None = None
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
