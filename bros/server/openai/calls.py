"""What requests for text mean, wherever they come from: over HTTP or as rows of a batch."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.datastructures import Headers

from bros.core.errors import InvalidRequestError, PromptTooLongError
from bros.core.request import SamplingParams, ServiceClass, Slo
from bros.server import http as offload
from bros.server.http import validate
from bros.server.openai.schema import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionRequest,
    GenerationRequest,
    SloFields,
)
from bros.server.openai.stream import (
    Answer,
    ChatChunkWriter,
    ChunkFrame,
    ChunkWriter,
    CompletionChunkWriter,
    CompletionLogprobsWriter,
    FinishedChoice,
    chat_logprobs,
)
from bros.server.state import ServerState

# ---- Fields that change what a correct answer is, and that this server cannot honour.
#
# Ignoring them would return a wrong answer without a word, so they are refused, unless they have
# a value that asks for nothing.


_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")

_COMMON: Mapping[str, tuple[Any, ...]] = {
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "include_stop_str_in_output": _NOTHING,
    "prompt_logprobs": _NOTHING,
    "response_format": (*_NOTHING, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "structured_outputs": _NOTHING,
    "use_beam_search": _NOTHING,
}

CHAT = {
    **_COMMON,
    "audio": _NOTHING,
    "continue_final_message": _NOTHING,
    "function_call": (*_NOTHING, "none"),
    "functions": _NOTHING,
    "modalities": (None, [], ["text"]),
    "tool_choice": (None, "none", "auto"),
    "tools": _NOTHING,
    "web_search_options": (None,),
}
"""Field of a chat request -> values that ask for nothing."""

COMPLETION = {**_COMMON, "suffix": _NOTHING}


def refuse_unsupported(body: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise InvalidRequestError naming the first field with a value that cannot be honoured."""
    for name, harmless_values in fields.items():
        if name not in body or (name == "tools" and body.get("tool_choice") == "none"):
            continue
        if not any(_same(body[name], harmless) for harmless in harmless_values):
            raise InvalidRequestError(
                f"'{name}' is not supported by this server; leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    _check_best_of(body)


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other  # 0 is not False


def _check_best_of(body: Mapping[str, Any]) -> None:
    best_of = body.get("best_of")
    if best_of is not None and best_of != (body.get("n") or 1):
        raise InvalidRequestError(
            "'best_of' is only supported if it equals n.",
            param="best_of",
            code="unsupported_parameter",
        )


# ---- From what a client sent to the engine's terms: sampling, service class, objectives.


_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat has none."""

_MAX_SLO_MS = 1e12

_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True)
class Tier:
    """What a `service_tier` means here.

    name: what the response calls it.
    slo_scale: times the server's objectives gives those of the tier; None leaves them to the
        engine.
    """

    service_class: ServiceClass
    name: str
    slo_scale: float | None = None


_DEFAULT = Tier(ServiceClass.RT, "default")
_PRIORITY = Tier(ServiceClass.RT, "priority", slo_scale=0.5)
BEST_EFFORT = Tier(ServiceClass.BE, "flex")
_TIERS: Mapping[str | None, Tier] = MappingProxyType(
    {"priority": _PRIORITY, "fast": _PRIORITY, "flex": BEST_EFFORT}
)


def tier_of(request: GenerationRequest) -> Tier:
    """flex is best-effort; everything else, and nothing, is real-time."""
    return _TIERS.get(request.service_tier, _DEFAULT)


def tier_used(asked: Tier, *, best_effort: bool) -> str:
    """What the response says. best_effort: what the engine serves any part of the request as."""
    return BEST_EFFORT.name if best_effort else asked.name


def chat_sampling(request: ChatCompletionRequest) -> SamplingParams:
    """Raises InvalidRequestError naming the field as the client calls it."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError(
            "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs"
        )
    max_tokens = request.max_completion_tokens or request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _sampling(request, max_tokens, logprobs)


def completion_sampling(request: CompletionRequest) -> SamplingParams:
    """Raises InvalidRequestError naming the field as the client calls it."""
    if request.echo and request.logprobs is not None:
        raise InvalidRequestError(
            "'echo' together with 'logprobs' is not supported.",
            param="echo",
            code="unsupported_parameter",
        )
    return _sampling(request, request.max_tokens or _COMPLETION_MAX_TOKENS, request.logprobs)


def slo_of(
    request: GenerationRequest, headers: Headers, default: Slo, deadline_ms: float | None = None
) -> Slo:
    """Field by field: the body's `slo`, else the header, else its llm-d alias, else the tier's.

    default: the server's objectives, of which a tier may take a fraction. deadline_ms: if neither
    the body nor a header has one. None where nothing
    was asked: then they are the engine's to apply. Raises InvalidRequestError naming a header
    that is not a positive number.
    """
    body = request.slo or SloFields()
    scale = tier_of(request).slo_scale
    asked = Slo(
        _seconds(body.ttft_ms or _header_ms(headers, "ttft")),
        _seconds(body.tpot_ms or _header_ms(headers, "tpot")),
        _seconds(body.deadline_ms or _header_ms(headers, "deadline") or deadline_ms),
    )
    return Slo(
        _first(asked.ttft_s, _scaled(default.ttft_s, scale)),
        _first(asked.tpot_s, _scaled(default.tpot_s, scale)),
        _first(asked.deadline_s, _scaled(default.deadline_s, scale)),
    )


def _sampling(
    request: GenerationRequest, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "'stream_options' needs 'stream' to be true.", param="stream_options"
        )
    given = {name: getattr(request, name) for name in _SAME_NAME}
    if request.top_k is not None:
        given["top_k"] = 0 if request.top_k == -1 else request.top_k
    if request.logit_bias:
        given["logit_bias"] = _token_keys(request.logit_bias)
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs)


def _token_keys(biases: Mapping[str, float]) -> dict[int, float]:
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequestError(
                f"'logit_bias' maps token ids to numbers; {key[:50]!r} is no token id.",
                param="logit_bias",
            )
    return {int(key): bias for key, bias in biases.items()}


def _header_ms(headers: Headers, objective: str) -> float | None:
    for name in (f"x-slo-{objective}-ms", f"x-llm-d-slo-{objective}-ms"):
        text = headers.get(name)
        if text is None:
            continue
        return to_milliseconds(text, f"The header {name}", name)
    return None


def to_milliseconds(text: str, title: str, param: str) -> float:
    """Raises InvalidRequestError, with the title, for what is no positive number."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= _MAX_SLO_MS:
        raise InvalidRequestError(
            f"{title} must be a positive number of milliseconds.", param=param
        )
    return value


def _first(asked: float | None, otherwise: float | None) -> float | None:
    return otherwise if asked is None else asked


def _scaled(objective_s: float | None, scale: float | None) -> float | None:
    return None if objective_s is None or scale is None else objective_s * scale


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


# ---- Prompts as token ids, without holding up the event loop.


_RESERVED = ("messages", "self")
_MESSAGE_CHARS, _UNKNOWN_CHARS = 40, 10_000


async def encode_text(
    state: ServerState, text: str, *, add_special_tokens: bool = True, limit: int | None = None
) -> list[int]:
    """Token ids of a text; long ones on a thread. Raises PromptTooLongError beyond `limit`."""
    encode = functools.partial(
        state.tokenizer.encode, text, add_special_tokens=add_special_tokens, limit=limit
    )
    return await offload.run(state, encode, len(text))


async def encode_chat(
    state: ServerState,
    messages: Sequence[ChatMessage],
    template_kwargs: Mapping[str, Any] | None,
    limit: int | None = None,
) -> list[int]:
    """Token ids of a conversation up to where the answer begins.

    Raises InvalidRequestError if the model's chat template does not take it, and
    PromptTooLongError beyond `limit` tokens.
    """
    kwargs = dict(template_kwargs or {})
    for name in _RESERVED:
        if name in kwargs:
            raise InvalidRequestError(
                f"'chat_template_kwargs' must not contain {name!r}.", param="chat_template_kwargs"
            )

    def apply() -> list[int]:
        plain = [_plain(message) for message in messages]
        text = state.tokenizer.render_chat(plain, **kwargs)
        try:
            return state.tokenizer.encode(text, add_special_tokens=False, limit=limit)
        except PromptTooLongError as error:
            raise PromptTooLongError(
                error.prompt_tokens, error.max_model_len, "messages", exact=False
            ) from None

    size = sum(_MESSAGE_CHARS + len(message.content or "") for message in messages)
    if kwargs or any(message.model_extra for message in messages):
        size += _UNKNOWN_CHARS  # all of it may end up in the prompt
    return await offload.run(state, apply, size)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """As templates know it: `developer` is OpenAI's newer name for `system`."""
    fields = message.model_dump()
    if fields["content"] is None and fields["role"] != "assistant":
        raise InvalidRequestError(
            f"A message of the role {fields['role']!r} needs 'content'.", param="messages"
        )
    if fields["role"] == "developer":
        fields["role"] = "system"
    return fields


R = TypeVar("R", bound=GenerationRequest)

_CHARS_PER_ID = 4

MAX_CHOICES = 1024
"""Most prompts times n of one request."""


class Call(Protocol):
    """A checked request of one endpoint.

    id_prefix: of the response's id.
    param: the field with the prompts.
    chunk_kind: `object` of the chunks of a stream.
    """

    id_prefix: str
    param: str
    chunk_kind: str

    @property
    def body(self) -> GenerationRequest: ...

    @property
    def sampling(self) -> SamplingParams: ...

    async def prompts(self) -> list[list[int]]:
        """Token ids. Raises InvalidRequestError; PromptTooLongError beyond the context."""
        ...

    def reply(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> BaseModel: ...

    def writer(self, frame: ChunkFrame) -> ChunkWriter: ...

    def beginning(self) -> str:
        """What the prompt begins with, as text, for telling which begin alike."""
        ...

    def num_chars(self) -> int:
        """Length of all prompts; a token id counts as a word."""
        ...


class ChatCall:
    """POST /v1/chat/completions"""

    id_prefix, param, chunk_kind = "chatcmpl", "messages", "chat.completion.chunk"

    def __init__(self, state: ServerState, fields: Mapping[str, Any]) -> None:
        """Raises InvalidRequestError or NotFoundError for what is wrong with the fields."""
        self._state = state
        self.body = _checked(state, ChatCompletionRequest, fields, CHAT)
        self.sampling = chat_sampling(self.body)

    async def prompts(self) -> list[list[int]]:
        body, limit = self.body, self._state.engine.info.max_model_len
        prompt = await encode_chat(self._state, body.messages, body.chat_template_kwargs, limit)
        if not prompt:
            raise InvalidRequestError("The messages give an empty prompt.", param="messages")
        return [prompt]

    def reply(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> ChatCompletion:
        return ChatCompletion(
            **header, choices=[self._choice(choice) for choice in choices], usage=answer.usage()
        )

    def writer(self, frame: ChunkFrame) -> ChatChunkWriter:
        return ChatChunkWriter(frame, self._state.tokenizer, self.sampling.logprobs is not None)

    def beginning(self) -> str:
        return "".join(f"{m.role}\0{m.content or ''}\0" for m in self.body.messages)

    def num_chars(self) -> int:
        return len(self.beginning())

    def _choice(self, choice: FinishedChoice) -> ChatChoice:
        logprobs = None
        if self.sampling.logprobs is not None:
            logprobs = ChatLogprobs(content=chat_logprobs(self._state.tokenizer, choice.logprobs))
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=choice.text),
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )


class CompletionCall:
    """POST /v1/completions"""

    id_prefix, param, chunk_kind = "cmpl", "prompt", "text_completion"

    def __init__(self, state: ServerState, fields: Mapping[str, Any]) -> None:
        """Raises InvalidRequestError or NotFoundError for what is wrong with the fields."""
        self._state = state
        self.body = _checked(state, CompletionRequest, fields, COMPLETION)
        self.sampling = completion_sampling(self.body)
        most, prompts = min(MAX_CHOICES, state.engine.info.max_queue), len(self.body.prompt)
        if prompts * self.sampling.n > most:
            raise InvalidRequestError(
                f"{prompts} prompts with n = {self.sampling.n} make more than {most} choices; "
                "send several requests.",
                param="prompt",
            )

    async def prompts(self) -> list[list[int]]:
        return await asyncio.gather(*(self._token_ids(prompt) for prompt in self.body.prompt))

    def reply(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> Completion:
        echoes = self._echoes()
        for choice in choices:
            choice.text = echoes.get(choice.index, "") + choice.text
        return Completion(
            **header, choices=[self._choice(choice) for choice in choices], usage=answer.usage()
        )

    def writer(self, frame: ChunkFrame) -> CompletionChunkWriter:
        return CompletionChunkWriter(
            frame, self._state.tokenizer, self.sampling.logprobs, self._echoes()
        )

    def beginning(self) -> str:
        first = self.body.prompt[0]
        return first if isinstance(first, str) else " ".join(map(str, first))

    def num_chars(self) -> int:
        prompts = self.body.prompt
        return sum(len(p) if isinstance(p, str) else _CHARS_PER_ID * len(p) for p in prompts)

    async def _token_ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await encode_text(self._state, prompt, limit=self._state.engine.info.max_model_len)

    def _echoes(self) -> dict[int, str]:
        """Index of a choice -> the prompt that goes before its text. Only once the engine has
        accepted the prompts, so that none is longer than the context."""
        if not self.body.echo:
            return {}
        texts = [
            prompt if isinstance(prompt, str) else self._state.tokenizer.decode(prompt)
            for prompt in self.body.prompt
        ]
        n = self.sampling.n
        return {i: texts[i // n] for i in range(len(texts) * n)}

    def _choice(self, choice: FinishedChoice) -> CompletionChoice:
        logprobs = None
        if self.sampling.logprobs is not None:
            writer = CompletionLogprobsWriter(
                self._state.tokenizer, with_top=self.sampling.logprobs > 0
            )
            logprobs = writer.write(choice.logprobs)
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )


CALLS: Mapping[str, Callable[[ServerState, Mapping[str, Any]], Call]] = {
    "/v1/chat/completions": ChatCall,
    "/v1/completions": CompletionCall,
}
"""Path of an endpoint -> what its requests mean."""


def _checked(
    state: ServerState,
    model: type[R],
    fields: Mapping[str, Any],
    unsupported: Mapping[str, tuple[Any, ...]],
) -> R:
    body = validate(model, fields)
    state.check_model(body.model)
    refuse_unsupported(fields, unsupported)
    return body
