"""Wire models of the OpenAI API, with vLLM's sampling fields: requests and complete responses.

Wrong types are refused. Unknown fields are ignored, as in other OpenAI-compatible servers, unless
that would give a wrong answer (see calls.py). SamplingParams checks the ranges of sampling
parameters. `null` means not given, everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from bros.core import grammars
from bros.core.config import MAX_RT_SLOWDOWN
from bros.core.request import (
    MAX_LOGPROBS,
    MAX_OBJECTIVE_MS,
    MIN_OBJECTIVE_MS,
    FinishReason,
    Grammar,
    ServiceClass,
)

_INT32_MAX = 2**31 - 1


def _null_as(default: bool) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value)


FalseByDefault = Annotated[bool, _null_as(False)]
TrueByDefault = Annotated[bool, _null_as(True)]
Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
MaxTokens = Annotated[int, Field(ge=1, le=_INT32_MAX)]
Milliseconds = Annotated[float, Field(ge=MIN_OBJECTIVE_MS, le=MAX_OBJECTIVE_MS)]
Slowdown = Annotated[float, Field(ge=1.0, le=MAX_RT_SLOWDOWN)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def _wrong(kind: str, message: str) -> PydanticCustomError:
    # The message is passed as a value, because braces in a template are placeholders.
    return PydanticCustomError(kind, "{reason}", {"reason": message})


def _check_stop(value: object) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise _wrong("stop_type", "must be a string or a list of strings")
    return values


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= _INT32_MAX for item in value
    )


def _check_prompts(value: object) -> list[str | list[int]]:
    """One prompt or several, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if type(value[0]) is int and _is_token_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(map(_is_token_ids, value)):
            return value
    raise _wrong(
        "prompt_type",
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids, "
        "and not empty",
    )


def _check_content(value: object) -> str | None:
    """The text of a message; several parts are joined by line breaks."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong("content_type", "must be a string or a list of content parts")
    return "\n".join(_part_text(i, part) for i, part in enumerate(value))


def _part_text(index: int, part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise _wrong("content_type", f"part {index} must be an object with a type")
    kind = part["type"]
    if kind not in ("text", "refusal"):
        raise _wrong(
            "content_value", f"part {index} is {kind[:50]!r}; use parts of the type 'text'"
        )
    if not isinstance(part.get(kind), str):
        raise _wrong("content_type", f"part {index} must have a {kind!r} that is a string")
    text: str = part[kind]
    return text


_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}

Stop = Annotated[
    Any,
    PlainValidator(_check_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Prompts = Annotated[
    Any,
    PlainValidator(_check_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                _TOKEN_IDS_SCHEMA,
                {"type": "array", "items": _TOKEN_IDS_SCHEMA},
            ]
        }
    ),
]
Content = Annotated[
    Any,
    PlainValidator(_check_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": _TEXT_PART_SCHEMA},
                {"type": "null"},
            ]
        }
    ),
]


_PARTS = {"list": "items_schema", "dict": "values_schema"}
_NOT_SCHEMAS = ("metadata", "serialization", "default")


def _stop_at_first_error(schema: Any) -> None:
    """Change all lists and objects within a schema as WireModel says."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _stop_at_first_error(part)
    elif isinstance(schema, dict):
        kind = schema.get("type")
        is_schema = isinstance(kind, str)  # else the fields of a model, by name
        parts = _PARTS.get(str(kind))
        if parts in schema and not schema.get("fail_fast"):
            schema["fail_fast"] = True
            schema[parts] = core_schema.no_info_before_validator_function(
                _let_others_run, schema[parts]
            )
        for name, part in schema.items():
            if not (is_schema and name in _NOT_SCHEMAS):
                _stop_at_first_error(part)


def _let_others_run(value: object) -> object:
    """Threads that wait for the interpreter get it when a function of Python begins."""
    return value


class WireModel(BaseModel):
    """Strict: neither a string nor `true` is a number. NaN and infinity are refused.

    Lists and objects are refused at their first wrong part, and other threads can run between two
    parts. A body of 4 MB with two million wrong messages held the interpreter for 8 s before: all
    of their errors were collected, and the first one was shown.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema = handler(source)
        _stop_at_first_error(schema)
        return schema


class ClosedModel(WireModel):
    """Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_number(cls, value: object) -> object:
        """Each unknown field is an error of its own, and all of them would be collected."""
        most = len(cls.model_fields) + _MAX_UNKNOWN
        if isinstance(value, dict) and len(value) > most:
            raise _wrong("too_many_fields", f"it has {len(value)} fields, too many for this object")
        return value


_MAX_UNKNOWN = 100


class SloFields(ClosedModel):
    """Objectives of one request in milliseconds; they take precedence over the x-slo-* headers.

    Unknown fields are refused: no other server has this object, so they are mistakes.
    """

    ttft_ms: Milliseconds | None = Field(
        default=None,
        description="Arrival to first token. Default: the server's objective, half of it for "
        "service_tier priority",
    )
    tpot_ms: Milliseconds | None = Field(
        default=None,
        description="Mean time per token after the first. Default: as for ttft_ms",
    )
    gap_ms: Milliseconds | None = Field(
        default=None,
        description="Longest time between two tokens. Default: --slo-gap with the default tpot_ms, "
        "else 1.5 times tpot_ms",
    )
    deadline_ms: Milliseconds | None = Field(
        default=None,
        description="Arrival to last token. Default: no deadline. A best-effort request starts "
        "early enough to meet it if there is time; for a real-time request, ttft_ms and tpot_ms "
        "are scaled down so that all of max_tokens would meet it",
    )
    rt_slowdown: Slowdown | None = Field(
        default=None,
        description="Of a best-effort request (service_tier flex): beside it, real-time streams "
        "may take so many times as long per token as alone, unless its deadline, --be-share or "
        "the backlog needs more. Default: rt_slowdown of the key, else --rt-slowdown",
    )


class StreamOptions(WireModel):
    include_usage: bool | None = None


class ModelRequest(WireModel):
    """The common field of all requests to a model."""

    model: str | None = None


class ServiceFields(ModelRequest):
    """Fields that say how a request is served, and for whom."""

    service_tier: ServiceTier | None = Field(
        None,
        description="flex is best-effort, all others are real-time. priority and its alias fast "
        "halve the server's objectives. The response has the tier that was used: flex also for a "
        "real-time request that was served as best-effort because of overload",
    )
    slo: SloFields | None = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    cache_salt: str | None = Field(
        None,
        max_length=512,
        description="A request shares cached prefixes only with requests of the same API key that "
        "have the same salt. Left out or empty: with those without a salt",
    )


class BaseSamplingFields(WireModel):
    """Sampling fields of completions and of outputs in sessions; see SamplingParams."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = Field(None, description="0 or -1: off")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int | None = None
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Int | None = None
    max_tokens: MaxTokens | None = None
    ignore_eos: bool | None = None


class JsonSchemaFormat(WireModel):
    """The schema of `response_format`; it is enforced whether or not it is strict. Other fields are
    kept, so that a schema in its place is seen."""

    model_config = ConfigDict(extra="allow")

    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="With json_object: what the object must match"
    )


class StructuredOutputs(ClosedModel):
    """One of these says what the output must match. Unknown fields are refused, because ignoring
    one would give another output."""

    model_config = ConfigDict(populate_by_name=True)

    json_: str | bool | dict[str, Any] | None = Field(
        None, alias="json", description="A JSON schema, or its text"
    )
    regex: str | None = Field(None, description="In Rust's syntax; for the whole output")
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="In llguidance's dialect of Lark, or in GBNF")
    json_object: bool | None = None
    whitespace_pattern: str | None = Field(
        None, description="Of JSON: a regular expression of what may be between its tokens"
    )
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None


class GrammarFields(WireModel):
    """What the output must match, see core/grammars.py. At most one of these fields asks for it."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | bool | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def grammar(self) -> Grammar | None:
        """None if the output is free. Raises InvalidRequestError. Whether the grammar compiles is
        checked later (ServerState.check_grammar)."""
        given = grammars.FIELDS.intersection(self.model_fields_set)
        if not given:
            return None
        fields = self.model_dump(include=set(given), by_alias=True, exclude_none=True)
        return grammars.from_fields(fields)


class GenerationRequest(BaseSamplingFields, GrammarFields, ServiceFields):
    """Common fields of chat and text completions."""

    n: Int | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id -> added to its logit")
    prompt_logprobs: Int | None = Field(
        None,
        description="Log-probabilities of the prompt's tokens and of so many most likely ones each",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None


# ---- Tools.


MAX_TOOLS = 128
_ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionDefinition(WireModel):
    name: _ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments. Left out: there are none"
    )
    strict: bool | None = Field(
        None, description="Whether the arguments always match the schema; false by default"
    )


class ToolDefinition(WireModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(WireModel):
    name: str


class ToolReference(WireModel):
    type: Literal["function"]
    function: FunctionReference


class AllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(WireModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _check_tool_choice(value: object, validated: ValidatorFunctionWrapHandler) -> object:
    try:
        return validated(value)
    except ValidationError:
        raise _wrong(
            "tool_choice_value",
            'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} '
            'or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
        ) from None


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ToolReference | AllowedToolsChoice,
    WrapValidator(_check_tool_choice),
]


class CalledFunction(WireModel):
    name: str
    arguments: str = Field(description="JSON text")


class MessageToolCall(WireModel):
    """A call of an earlier turn."""

    id: str = Field(max_length=512)
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(WireModel):
    """One message. Further fields are passed to the chat template.

    Of reasoning_content and reasoning, which mean the same, the first is used.
    """

    model_config = ConfigDict(extra="allow")

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = Field(None, max_length=1024)
    tool_call_id: str | None = Field(None, max_length=512)
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(
        None, description="auto by default. none: the tools are not shown to the model"
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether the model may call several tools at once; true by default"
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="Passed to the chat template, as is enable_thinking: false with none. "
        "chat_template_kwargs take precedence",
    )
    verbosity: Verbosity | None = Field(None, description="Passed to the chat template")
    chat_template_kwargs: dict[str, Any] | None = None
    allow_special_tokens: FalseByDefault = Field(
        default=False,
        description="Whether texts in the messages that read like special tokens of the model, "
        "such as <|im_start|>, become these tokens. By default they stay text",
    )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: Prompts
    allow_special_tokens: TrueByDefault = Field(
        default=True,
        description="Whether texts in the prompt that read like special tokens of the model become "
        "these tokens. Set it to false for a prompt that others have written",
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = Field(
        None, description="Put the prompt before the text, and its tokens before those of logprobs"
    )
    max_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = Field(
        None, description="0: only compute the prompt"
    )


class TokenizeRequest(ModelRequest):
    """POST /tokenize: either a prompt or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    allow_special_tokens: bool | None = Field(
        default=None, description="As in completions for a prompt, as in chats for messages"
    )
    return_token_strs: bool | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = Field(
        None, description="Whether the start of an answer follows the messages; true by default"
    )
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(ModelRequest):
    """POST /detokenize"""

    tokens: list[TokenId]


class DrainRequest(ClosedModel):
    """POST /admin/replicas/{number}/drain. Unknown fields are refused."""

    move: bool = Field(default=False, description="Move its open requests to other replicas now")
    restart: bool = Field(
        default=False,
        description="Once the replica is empty, restart its engine and send it requests again",
    )


# ---- Responses. The chunks of streams are written in stream.py.


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    error: ErrorDetail


class _Reply(BaseModel):
    """Fields in `_omitted` are left out if they are None, as in OpenAI's API."""

    _omitted: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_omitted(self, serialized: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialized(self)
        for name in self._omitted:
            if fields[name] is None:
                del fields[name]
        return fields


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(_Reply):
    """completion_tokens_details is left out if answers have neither reasoning nor tool calls."""

    _omitted = ("completion_tokens_details",)

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class PromptLogprob(BaseModel):
    """One token at a position of a prompt.

    rank: 1 for the most likely one.
    """

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprob] | None]
"""By position and token id; null at the first position."""


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    name: str
    arguments: str = Field(description="JSON text, as the model has written it")


class ChatToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(_Reply):
    """content is null if there are only tool calls. tool_calls, reasoning_content and its other
    name, reasoning, are left out if there are none."""

    _omitted = ("tool_calls", "reasoning_content", "reasoning")

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ChatToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    service_tier: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobList | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobList | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    service_tier: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(BaseModel):
    """The description of a model, for OpenAI's clients and, from `type` on, for Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "bros"
    root: str
    max_model_len: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    prompt: str


class Objectives(BaseModel):
    """In milliseconds; null means no objective."""

    ttft_ms: float | None
    tpot_ms: float | None
    gap_ms: float | None
    deadline_ms: float | None


class TraceEvent(BaseModel):
    at_ms: float = Field(description="Milliseconds since the arrival of the request")
    event: str


class TraceGroupCosts(BaseModel):
    """What the router expected the placement of a task group to cost, in seconds: until its last
    member is done, plus weighted time in which other requests wait because its common prefix is
    computed on more than one replica."""

    cost_s: float
    alternative_s: float | None = Field(
        description="The same of the cheapest other placement: on one replica if the group is "
        "split, else split or on another replica; null: there was none"
    )
    replicas: int = Field(description="Replicas that the members went to")


class TracePlacement(BaseModel):
    """Where the router has placed a request, and why."""

    replica: int = Field(description="Number of the replica")
    reason: str = Field(
        description="What decided: exploit (the prefix is cached there), again (it was cached "
        "there), explore (lowest cost), decode (the replica is decode-heavy), moved (a home of the "
        "prefix after rebalancing or replication), planned (a home of the prefix by the plan), "
        "pinned (the KV of the program's previous call is pinned there), group (placed with its "
        "task group), only (no other candidate), or the policy"
    )
    expected_tokens: int = Field(
        description="Prompt tokens that the router expected to be cached there"
    )
    group: TraceGroupCosts | None = Field(
        description="Of the members of its task group that were placed together; null without one"
    )


class ChoiceTrace(BaseModel):
    """The history of one choice, and why it waited. Times are in milliseconds."""

    index: int
    request_id: str = Field(description="Its id in the engine and in the log")
    service_class: ServiceClass = Field(description="The class it is served as")
    requested_class: ServiceClass = Field(description="The class it was submitted as")
    slo: Objectives = Field(description="The objectives that the scheduler uses")
    prompt_tokens: int
    output_tokens: int
    late_tokens: int = Field(description="Tokens that missed their deadline")
    preemptions: int = Field(description="How often it was preempted")
    ttft_ms: float | None = Field(description="Arrival to first token; null before it")
    tpot_ms: float | None = Field(
        description="Mean time per token after the first; null before the second"
    )
    longest_gap_ms: float | None = Field(
        description="Longest time between two tokens; null before the second"
    )
    slowdown: float | None = Field(
        description="Of a real-time stream: time since its first token over what the steps since "
        "then would have taken without best-effort work, by the cost model; null if not known"
    )
    waits_ms: dict[str, float] = Field(
        description="How long it could have run and did not, by reason: time (no time was left "
        "in the step), rows (the batch was full), tokens (the token budget was used up), "
        "memory (no KV blocks), turn (the policy served others first), grammar (its grammar or "
        "schema was checked and compiled, before it was queued), yielded (it ran, but "
        "the step was aborted for the first token of another request; of one that was suspended "
        "nothing is lost)"
    )
    events: list[TraceEvent]
    finish_reason: FinishReason | None = Field(description="null until it is finished")
    placement: TracePlacement | None = Field(description="null without a router")


class RequestTraceReply(BaseModel):
    id: str
    object: Literal["request.trace"] = "request.trace"
    choices: list[ChoiceTrace] = Field(description="Choices whose trace the engine still has")


class Health(BaseModel):
    status: Literal["ok", "engine down"]
    replicas_up: int | None = Field(default=None, description="Replicas that run, if several")
    replicas: int | None = Field(default=None, description="Replicas in all, if several")


class ReplicaReply(BaseModel):
    number: int
    name: str
    state: Literal["up", "draining", "drained", "restarting", "down", "gone"]
    open: int = Field(description="Requests sent to it that have not ended")
    running: int
    waiting: int
    used_blocks: int = Field(description="KV blocks that requests hold")
    cached_blocks: int = Field(description="Idle blocks of its prefix cache")
    total_blocks: int
    prompt_tokens: int = Field(description="Prompt tokens of requests that started on it")
    cached_tokens: int = Field(description="Prompt tokens that were in its prefix cache")
    lost: int = Field(description="How often the router lost its engine")
    routed: dict[str, int] = Field(description="Requests sent to it, by reason")


class PlanReply(BaseModel):
    """Result of --router-plan, over the requests whose prefixes were planned."""

    requests: int
    prefill_s: float = Field(description="Seconds that the prefills of their prompts took")
    planned_s: float = Field(description="Seconds that they would have taken by the plan")
    balance: float = Field(description="Load of the busiest replica divided by the mean load")
    planned_balance: float = Field(description="The same by the plan")


class ReplicaList(BaseModel):
    object: Literal["list"] = "list"
    router: str
    continued: int = Field(
        description="Requests that continued on another replica because theirs was lost"
    )
    moved: int = Field(
        description="Requests that moved to another replica because of draining or rebalancing"
    )
    plan: PlanReply | None = None
    data: list[ReplicaReply]


class TenantUse(BaseModel):
    """What a tenant holds of one resource."""

    resource: str
    used: int
    limit: int | None = Field(description="Most that it may hold; null: no limit")
    option: str = Field(description="Name of the limit in the file of --api-keys")
    refused: int = Field(description="Requests that the limit has refused since the server started")


class TenantReply(BaseModel):
    name: str = Field(description="Empty: the operator, or a server's only tenant; *: all together")
    uses: list[TenantUse]


class TenantList(BaseModel):
    object: Literal["list"] = "list"
    data: list[TenantReply]


class Version(BaseModel):
    version: str
