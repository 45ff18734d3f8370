"""What clients get: OpenAI's responses, complete ones. Stream chunks are written in stream.py."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from bros.core.request import FinishReason, ServiceClass


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


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


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


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
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "bros"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    prompt: str


class Objectives(BaseModel):
    """Milliseconds; null is no objective."""

    ttft_ms: float | None
    tpot_ms: float | None
    deadline_ms: float | None


class TraceEvent(BaseModel):
    at_ms: float = Field(description="After the arrival of the request")
    event: str


class ChoiceTrace(BaseModel):
    """What became of one choice, and why it waited. Times are milliseconds."""

    index: int
    request_id: str = Field(description="What the engine calls it, as in the log")
    service_class: ServiceClass = Field(description="What it is served as")
    requested_class: ServiceClass = Field(description="What it came in as")
    slo: Objectives = Field(description="What it is held to")
    prompt_tokens: int
    output_tokens: int
    late_tokens: int = Field(description="Tokens that came after their deadline")
    preemptions: int = Field(description="How often it was interrupted for others")
    ttft_ms: float | None = Field(description="Arrival to first token; null until there is one")
    tpot_ms: float | None = Field(description="Mean between tokens; null before the second")
    waits_ms: dict[str, float] = Field(
        description="How long it could have run and did not, by reason: time (no time was left "
        "in the iteration), rows (the batch was full), tokens (the token budget was used up), "
        "memory (no KV blocks), turn (others went first), made way (it ran, but the iteration "
        "was given up for somebody's first token)"
    )
    events: list[TraceEvent]
    finish_reason: FinishReason | None = Field(description="null while it is not finished")


class RequestTraceReply(BaseModel):
    id: str
    object: Literal["request.trace"] = "request.trace"
    choices: list[ChoiceTrace] = Field(description="Without those the engine no longer knows")


class Health(BaseModel):
    status: Literal["ok", "engine down"]
    replicas_up: int | None = Field(default=None, description="Of several engines, those that run")
    replicas: int | None = Field(default=None, description="How many there are")


class ReplicaReply(BaseModel):
    number: int
    name: str
    state: Literal["up", "draining", "drained", "restarting", "down", "gone"]
    open: int = Field(description="Requests that are there")
    running: int
    waiting: int
    used_blocks: int = Field(description="KV blocks that requests have")
    cached_blocks: int = Field(description="Those that nobody has, but that can be found")
    total_blocks: int
    prompt_tokens: int = Field(description="Of requests that began there")
    cached_tokens: int = Field(description="Those of them that were cached")
    lost: int = Field(description="How often its engine was")
    routed: dict[str, int] = Field(description="Requests that were sent there, by reason")


class PlanReply(BaseModel):
    """Of --router-plan; seconds and loads of the requests whose prefixes were planned."""

    requests: int
    prefill_s: float = Field(description="What their prompts took to compute")
    planned_s: float = Field(description="What they would have taken by the plan")
    balance: float = Field(description="The most that a replica had to do, over the mean")
    planned_balance: float


class ReplicaList(BaseModel):
    object: Literal["list"] = "list"
    router: str
    continued: int = Field(description="Requests that went on elsewhere, as theirs was lost")
    moved: int = Field(description="Those that did so because theirs was drained, or one came up")
    plan: PlanReply | None = None
    data: list[ReplicaReply]


class Version(BaseModel):
    version: str
