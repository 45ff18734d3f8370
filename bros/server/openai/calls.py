"""Completion requests, from HTTP or from rows of a batch, in the engine's terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from starlette.datastructures import Headers

from bros.core.errors import InvalidRequestError, PromptTooLongError
from bros.core.fair import LONG_SIZE
from bros.core.request import (
    MAX_OBJECTIVE_MS,
    MIN_OBJECTIVE_MS,
    TOO_LONG,
    SamplingParams,
    ServiceClass,
    Slo,
)
from bros.server.errors import renaming_fields
from bros.server.http import json_pieces, offload_held, spliced, validate
from bros.server.openai.prompt_logprobs import Echo, PromptLogprobsWriter, check_size
from bros.server.openai.schema import (
    AllowedToolsChoice,
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatMessage,
    ChatToolCall,
    Completion,
    CompletionChoice,
    CompletionRequest,
    FunctionCall,
    GenerationRequest,
    ReasoningEffort,
    ServiceFields,
    SloFields,
    ToolChoice,
    ToolDefinition,
    ToolReference,
    Verbosity,
)
from bros.server.openai.stream import (
    Answer,
    ChatChunkWriter,
    ChatLogprobsWriter,
    ChunkFrame,
    CompletionChunkWriter,
    CompletionLogprobsWriter,
    DeltaWriter,
    FinishedChoice,
    choices_json,
    finish_reason,
)
from bros.server.state import ServerState
from bros.text.answers import AnswerParsing
from bros.text.chat_format import ReasoningStart
from bros.text.json_text import MAX_TOOL_PARTS, has_more_parts
from bros.text.tokenizer import Tokenizer
from bros.text.tools import NO_TOOLS, Tool, ToolUse

# ---- Unsupported fields that would change the answer.
#
# Ignoring them would silently return a wrong answer, so a request that sets one is refused, unless
# the value has no effect.


_NO_EFFECT: tuple[Any, ...] = (None, False, [], {}, "")

_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "ebnf": "'structured_outputs.grammar'",
        "grammar": "'structured_outputs.grammar'",
        "json_schema": "'response_format'",
        "regex": "'structured_outputs.regex'",
        "structural_tag": "'tools' or 'structured_outputs.grammar'",
    }
)
"""Field of llama.cpp's and SGLang's APIs -> what has the same effect here."""

_COMMON: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_INSTEAD, (None, "")),
    "allowed_token_ids": (None,),
    "bad_words": _NO_EFFECT,
    "include_stop_str_in_output": _NO_EFFECT,
    "return_token_ids": _NO_EFFECT,
    "return_tokens_as_token_ids": _NO_EFFECT,
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": _NO_EFFECT,
}

_CHAT_UNSUPPORTED = {
    **_COMMON,
    "add_generation_prompt": (None, True),
    "audio": _NO_EFFECT,
    "chat_template": _NO_EFFECT,
    "continue_final_message": _NO_EFFECT,
    "documents": _NO_EFFECT,
    "echo": _NO_EFFECT,
    "function_call": (*_NO_EFFECT, "none", "auto"),  # without `functions`, which are not taken
    "functions": _NO_EFFECT,
    "modalities": (None, [], ["text"]),
    "moderation": _NO_EFFECT,
    "web_search_options": (None,),
}
"""Field of a chat request -> values without an effect."""

_COMPLETION_UNSUPPORTED = {**_COMMON, "prompt_embeds": _NO_EFFECT, "suffix": _NO_EFFECT}

OTHER_GRAMMARS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **dict.fromkeys(_INSTEAD, (None, "")),
        "structured_outputs": _NO_EFFECT,
        **{f"guided_{kind}": _NO_EFFECT for kind in ("json", "regex", "choice", "grammar")},
    }
)
"""Fields for grammars that other APIs do not have, or by other names."""


def refuse_unsupported(
    body: Mapping[str, Any],
    fields: Mapping[str, tuple[Any, ...]],
    instead: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raises InvalidRequestError naming the first unsupported field with an effect.

    instead: unsupported field -> what has the same effect.
    """
    for name, harmless_values in fields.items():
        if name in body and not any(_same(body[name], harmless) for harmless in harmless_values):
            advice = f"use {instead[name]} instead" if name in instead else "leave it out"
            raise InvalidRequestError(
                f"'{name}' is not supported by this server; {advice}.",
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


# ---- From fields and headers to sampling parameters, service class and objectives.


_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat has none."""


_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True)
class Tier:
    """The meaning of a `service_tier`.

    name: the `service_tier` of the response.
    slo_scale: factor on the server's default objectives; None if the engine applies them.
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


def tier_of(request: ServiceFields) -> Tier:
    """flex is best-effort; any other tier, or none, is real-time."""
    return _TIERS.get(request.service_tier, _DEFAULT)


def response_tier(requested: Tier, *, best_effort: bool) -> str:
    """The `service_tier` of the response.

    best_effort: whether the engine serves any choice as best-effort.
    """
    return BEST_EFFORT.name if best_effort else requested.name


def _chat_sampling(request: ChatCompletionRequest) -> SamplingParams:
    """Raises InvalidRequestError naming the client's field."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError(
            "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs"
        )
    max_tokens = request.max_completion_tokens or request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _sampling(request, max_tokens, logprobs)


def _completion_sampling(request: CompletionRequest) -> SamplingParams:
    """Raises InvalidRequestError naming the client's field."""
    most = _COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    sampling = _sampling(request, most, request.logprobs)
    if request.echo and request.logprobs is not None:
        top = max(request.logprobs, request.prompt_logprobs or 0)
        return sampling.with_changes(prompt_logprobs=top)
    return sampling


def slo_of(
    request: ServiceFields, headers: Headers, default: Slo, deadline_ms: float | None = None
) -> Slo:
    """The objectives of a request. Each is the first of these that is given:

    1. the body's `slo` field, 2. the header, 3. its llm-d alias, 4. `deadline_ms` for the deadline,
    5. the server's objective times the tier's scale, 6. None: the engine applies its default.

    default: the server's objectives. Raises InvalidRequestError naming a header that is not a
    positive number.
    """
    body = request.slo or SloFields()
    scale = tier_of(request).slo_scale

    def objective(given_ms: float | None, default_s: float | None) -> float | None:
        if given_ms is not None:
            return given_ms / 1000
        return None if default_s is None or scale is None else default_s * scale

    return Slo(
        objective(body.ttft_ms or _header_ms(headers, "ttft"), default.ttft_s),
        objective(body.tpot_ms or _header_ms(headers, "tpot"), default.tpot_s),
        objective(
            body.deadline_ms or _header_ms(headers, "deadline") or deadline_ms, default.deadline_s
        ),
        objective(body.gap_ms or _header_ms(headers, "gap"), None),
        body.rt_slowdown,
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
    if given.get("top_p") == 0:  # OpenAI allows it: the most likely token
        given |= {"top_p": 1.0, "top_k": 1}
    return SamplingParams(
        **given, max_tokens=max_tokens, logprobs=logprobs, grammar=request.grammar()
    )


def _token_keys(biases: Mapping[str, float]) -> dict[int, float]:
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequestError(
                f"'logit_bias' maps token ids to numbers; {key[:50]!r} is not a token id.",
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
    """Milliseconds of an objective. Raises InvalidRequestError; title: begins its message."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not MIN_OBJECTIVE_MS <= value <= MAX_OBJECTIVE_MS:
        raise InvalidRequestError(
            f"{title} must be a number of milliseconds, at least {MIN_OBJECTIVE_MS:g}.",
            param=param,
        )
    return value


# ---- From prompts to token ids, without blocking the event loop.


_RESERVED = ("messages", "self")
_MESSAGE_CHARS, _UNKNOWN_CHARS = 40, 10_000  # estimates of what the template adds


MAX_ENCODED_BYTES = 2**20
"""Longest text in UTF-8 that is encoded without a limit of tokens. It takes 0.7 s and 200 MB, those
of one thread, and up to 20 ms in which no other thread runs."""


MAX_MESSAGES = 10_000
"""Most messages of a chat, and most content parts of all its messages. Templates are Python, and
took more than a second for 60,000 empty messages."""


def check_counts(fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for too many messages or content parts in a body, and for tools,
    arguments of calls, variables of the chat template and further fields of messages with too many
    parts."""
    for name in ("tools", "chat_template_kwargs"):
        if fields.get(name) and has_more_parts(fields[name], MAX_TOOL_PARTS):
            raise _too_many_parts(name)
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return
    check_count(len(messages), "messages")
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = sum(len(content) for content in contents if isinstance(content, list))
    check_count(parts, "content parts")
    known = ChatMessage.model_fields
    others = [
        value
        for message in messages
        if isinstance(message, dict)
        for name, value in message.items()
        if name not in known
    ]
    if others and has_more_parts(others, MAX_TOOL_PARTS):
        reason = f"'messages' have more than {MAX_TOOL_PARTS} keys and values in further fields."
        raise InvalidRequestError(reason, "messages", "invalid_value")


def _too_many_parts(param: str) -> InvalidRequestError:
    message = f"'{param}' has more than {MAX_TOOL_PARTS} objects, lists, keys and values."
    return InvalidRequestError(message, param, "invalid_value")


def check_count(count: int, what: str) -> None:
    if count > MAX_MESSAGES:
        raise InvalidRequestError(
            f"The chat has {count} {what}, more than {MAX_MESSAGES}.",
            param="messages",
            code="array_above_max_length",
        )


async def encode_text(
    state: ServerState,
    tenant: str,
    text: str,
    *,
    add_special_tokens: bool = True,
    allow_special_tokens: bool = True,
) -> list[int]:
    """Token ids of a text. Raises InvalidRequestError for more than MAX_ENCODED_BYTES."""
    _check_bytes(text, "prompt")

    def encode() -> list[int]:
        return encode_prompt(
            state.tokenizer,
            text,
            add_special_tokens=add_special_tokens,
            allow_special_tokens=allow_special_tokens,
        )

    return await offload_held(state, tenant, encode, len(text))


def encode_prompt(
    tokenizer: Tokenizer, text: str, *, allow_special_tokens: bool, **options: Any
) -> list[int]:
    """Tokenizer.encode; allow_special_tokens: else special tokens in the text stay text."""
    if allow_special_tokens:
        return tokenizer.encode(text, **options)
    return tokenizer.encode(tokenizer.escape(text), escaped=True, **options)


def _check_bytes(text: str, param: str) -> None:
    if len(text) > MAX_ENCODED_BYTES or len(text.encode()) > MAX_ENCODED_BYTES:
        raise InvalidRequestError(
            f"The text has more than {MAX_ENCODED_BYTES} bytes; send it in parts.",
            param=param,
            code=TOO_LONG,
        )


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """reasoning: where that of the answer begins."""

    token_ids: list[int]
    reasoning: ReasoningStart


async def encode_chat(
    state: ServerState,
    tenant: str,
    messages: Sequence[ChatMessage],
    template_kwargs: Mapping[str, Any] | None,
    limit: int | None = None,
    *,
    tools: Sequence[Tool] = (),
    allow_special_tokens: bool = False,
) -> ChatPrompt:
    """The prompt of a conversation, up to the start of the answer.

    tools: that are described to the model.
    allow_special_tokens: whether texts that read like special tokens become these tokens.

    Raises InvalidRequestError if the model's chat template refuses it, PromptTooLongError if there
    are more than `limit` tokens, and without a limit InvalidRequestError for more than
    MAX_ENCODED_BYTES.
    """
    kwargs = dict(template_kwargs or {})
    for name in _RESERVED:
        if name in kwargs:
            raise InvalidRequestError(
                f"'chat_template_kwargs' must not contain {name!r}.", param="chat_template_kwargs"
            )

    def apply() -> ChatPrompt:
        plain, of_tools = state.chat_format.conversation(
            [_plain(message) for message in messages], tools, escape=not allow_special_tokens
        )
        variables = kwargs if allow_special_tokens else state.tokenizer.escape(kwargs)
        text = state.tokenizer.render_chat(plain, **{**of_tools, **variables})
        if limit is None:
            _check_bytes(text, "messages")
        try:
            token_ids = state.tokenizer.encode(
                text,
                add_special_tokens=False,
                limit=limit,
                escaped=not allow_special_tokens,
            )
            return ChatPrompt(token_ids, state.chat_format.reasoning_start(text))
        except PromptTooLongError as error:
            raise PromptTooLongError(
                error.prompt_tokens, error.max_model_len, "messages", exact=False
            ) from None

    size = _size_of_chat(messages, unknown=bool(kwargs or tools))
    return await offload_held(state, tenant, apply, size)


def _size_of_chat(messages: Sequence[ChatMessage], *, unknown: bool) -> int:
    """Characters of the prompt, estimated; of a chat of many messages only that it is long: the
    event loop takes 20 ms to count those of 10,000.

    unknown: there are tools or variables of the template, all of which it may put into the prompt,
        as it may further fields of messages.
    """
    size = _MESSAGE_CHARS * len(messages)
    if size > LONG_SIZE:
        return size
    size += sum(map(_num_chars, messages))
    if unknown or any(message.model_extra for message in messages):
        size += _UNKNOWN_CHARS
    return size


def _num_chars(message: ChatMessage) -> int:
    texts = (message.content, message.reasoning_content, message.reasoning)
    arguments = (call.function.arguments for call in message.tool_calls or ())
    return sum(len(text) for text in (*texts, *arguments) if text)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """The message with OpenAI's fields: `developer` is the new name for `system`."""
    fields = message.model_dump()
    if fields["content"] is None and fields["role"] != "assistant":
        raise InvalidRequestError(
            f"A message of the role {fields['role']!r} needs 'content'.", param="messages"
        )
    if fields["content"] is None and not fields.get("tool_calls"):
        fields["content"] = ""  # as in stored histories; templates join texts
    if fields["role"] == "developer":
        fields["role"] = "system"
    return fields


def tool_use(definitions: Sequence[ToolDefinition] | None, choice: ToolChoice | None) -> ToolUse:
    """What a request allows the model. Raises InvalidRequestError naming the wrong field."""
    if not definitions and choice in (None, "auto"):
        return NO_TOOLS
    functions = [definition.function for definition in definitions or ()]
    names = [function.name for function in functions]
    known: set[str] = set()
    repeated = next((name for name in names if name in known or known.add(name)), None)  # type: ignore[func-returns-value]
    if repeated is not None:
        raise InvalidRequestError(f"'tools' has two functions {repeated!r}.", param="tools")
    if choice in (None, "auto"):
        allowed, required = names, False
    elif choice == "none":
        return NO_TOOLS
    elif choice == "required":
        allowed, required = names, True
    elif isinstance(choice, ToolReference):
        allowed, required = [choice.function.name], True
    else:
        assert isinstance(choice, AllowedToolsChoice)
        allowed = [reference.function.name for reference in choice.allowed_tools.tools]
        required = choice.allowed_tools.mode == "required"
    unknown = next((name for name in allowed if name not in names), None)
    if unknown is not None:
        message = (
            f"'tool_choice' names the function {unknown[:100]!r}, which 'tools' does not have."
        )
        raise InvalidRequestError(message, param="tool_choice", code="invalid_value")
    if required and not names:
        message = "'tool_choice' needs 'tools'."
        raise InvalidRequestError(message, param="tool_choice", code="invalid_value")
    return ToolUse(
        tools=tuple(
            Tool(
                each.name,
                each.description or "",
                each.parameters or {},
                each.strict is True,
                param=f"tools[{i}].function.parameters",
            )
            for i, each in enumerate(functions)
        ),
        allowed=frozenset(allowed),
        required=required,
        parallel=not isinstance(choice, ToolReference),
    )


def template_variables(
    effort: ReasoningEffort | None,
    given: Mapping[str, Any] | None,
    verbosity: Verbosity | None = None,
) -> dict[str, Any]:
    """Variables of the chat template. given: by the client; they take precedence."""
    variables: dict[str, Any] = {}
    if effort is not None:
        variables["reasoning_effort"] = effort
        if effort == "none":
            variables["enable_thinking"] = False
    if verbosity is not None:
        variables["verbosity"] = verbosity
    return variables | dict(given or {})


R = TypeVar("R", bound=GenerationRequest)

_CHARS_PER_ID = 4
_ID_BYTES = 40
"""Memory of a token id in a list."""

_MAX_CHOICES = 1024
"""Most choices (prompts times n) of one request."""

MAX_ECHOED_CHARS = 10_000_000
"""Most characters of prompts that one response repeats; a token id counts for `_CHARS_PER_ID`."""


class Call(Protocol):
    """A validated request of one endpoint.

    id_prefix: beginning of the response's id.
    param: name of the field with the prompts.
    chunk_kind: `object` of the chunks of a stream.
    field_names: field of a chat completion -> its name in this API, if it has another one.
    """

    id_prefix: str
    param: str
    chunk_kind: str
    field_names: Mapping[str, str]

    @property
    def body(self) -> GenerationRequest: ...

    @property
    def sampling(self) -> SamplingParams: ...

    async def prompts(self, tenant: str) -> list[list[int]]:
        """Token ids of each prompt. tenant: whose call it is.

        Raises InvalidRequestError, or PromptTooLongError if one exceeds the context length.
        """
        ...

    def parsing(self) -> AnswerParsing | None:
        """How to read the answers, as for TextGenerator.start. After `prompts`."""
        ...

    def reply(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> Iterable[bytes]:
        """The complete response, as pieces of JSON. They are made on a thread, between two of them
        others can run."""
        ...

    def writer(self, frame: ChunkFrame) -> DeltaWriter: ...

    def shrink_body(self) -> int:
        """Once the engine has the prompts: drop what only they needed. Returns about how many bytes
        are still kept of the body."""
        ...

    def echo_chars(self) -> int:
        """Most characters of the request that a choice of its response repeats."""
        ...

    def prompt_text(self) -> str:
        """The first prompt as text, for finding common prefixes. Before `shrink_body`."""
        ...

    def num_chars(self) -> int:
        """Length of all prompts in characters; a token id counts for `_CHARS_PER_ID`."""
        ...


_KEPT = (
    "stream", "stream_options", "user", "safety_identifier", "cache_salt", "prompt_logprobs",
    "logprobs", "echo", "allow_special_tokens",
)  # fmt: skip
"""Fields of a body that are read after the engine has the prompts."""


def _kept(body: R, **others: Any) -> R:
    """A body with these fields, and those of _KEPT that it has."""
    names = type(body).model_fields.keys()
    kept = {name: getattr(body, name) for name in _KEPT if name in names}
    return type(body).model_construct(**kept, **others)


class ChatCall:
    """POST /v1/chat/completions"""

    id_prefix, param, chunk_kind = "chatcmpl-", "messages", "chat.completion.chunk"
    field_names: Mapping[str, str] = MappingProxyType({})

    def __init__(self, state: ServerState, fields: Mapping[str, Any]) -> None:
        """Raises InvalidRequestError or NotFoundError naming the wrong field."""
        self._state = state
        self.body = _validated(state, ChatCompletionRequest, fields, _CHAT_UNSUPPORTED)
        self.sampling = _chat_sampling(self.body)
        self.tool_use = tool_use(self.body.tools, self.body.tool_choice)
        if self.body.parallel_tool_calls is False:
            self.tool_use = replace(self.tool_use, parallel=False)
        self._may_call = bool(self.tool_use.allowed)
        self._reasoning = ReasoningStart.NONE
        self._answer_grammar = self.sampling.grammar
        self._rules = state.chat_format.answer_rules(self.tool_use, self._answer_grammar)
        self._use_grammar(ReasoningStart.NONE)  # for those who check it without a prompt

    async def prompts(self, tenant: str) -> list[list[int]]:
        body, limit = self.body, self._state.engine.info.max_model_len
        prompt = await encode_chat(
            self._state,
            tenant,
            body.messages,
            template_variables(body.reasoning_effort, body.chat_template_kwargs, body.verbosity),
            limit,
            tools=self.tool_use.tools,
            allow_special_tokens=body.allow_special_tokens,
        )
        if not prompt.token_ids:
            raise InvalidRequestError("The messages result in an empty prompt.", param="messages")
        if self.sampling.prompt_logprobs is not None:
            check_size([prompt.token_ids], self.sampling.prompt_logprobs, self.sampling.n)
        self._reasoning = prompt.reasoning
        self._use_grammar(prompt.reasoning)
        return [prompt.token_ids]

    def _use_grammar(self, start: ReasoningStart) -> None:
        grammar = self._state.chat_format.grammar(self._rules, self._answer_grammar, start)
        if grammar is not self.sampling.grammar:
            self.sampling = self.sampling.with_changes(grammar=grammar)

    def parsing(self) -> AnswerParsing:
        return self._state.chat_format.parsing(self.tool_use, self._reasoning)

    def shrink_body(self) -> int:
        self.body = _kept(self.body, messages=[])
        self.tool_use, self._answer_grammar, self._rules = NO_TOOLS, None, None
        return self.sampling.num_bytes

    def reply(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> Iterator[bytes]:
        return choices_json(
            ChatCompletion(**header, choices=[], usage=answer.usage()),
            map(self._choice, choices),
            prompt_logprobs(self._state.tokenizer, self.body, choices[0]),
        )

    def writer(self, frame: ChunkFrame) -> ChatChunkWriter:
        return ChatChunkWriter(
            frame,
            self._state.tokenizer,
            self.new_call_id,
            self.body.prompt_logprobs,
            may_call=self._may_call,
        )

    def echo_chars(self) -> int:
        return 0

    def new_call_id(self) -> str:
        length = self._state.chat_format.call_id_chars
        made = self._state.ids.new("call", "_")
        return made if length is None else made[-length:]

    def prompt_text(self) -> str:
        return "".join(f"{m.role}\0{m.content or ''}\0" for m in self.body.messages)

    def num_chars(self) -> int:
        return len(self.prompt_text())

    def _choice(self, choice: FinishedChoice) -> Iterator[bytes]:
        """As JSON."""
        calls = [
            ChatToolCall(id=self.new_call_id(), function=FunctionCall(**asdict(call)))
            for call in choice.answer.calls
        ]
        reasoning = choice.answer.reasoning or None
        text = ChatChoice(
            index=choice.index,
            message=AssistantMessage(
                content=(choice.text or None) if calls else choice.text,
                tool_calls=calls or None,
                reasoning_content=reasoning,
                reasoning=reasoning,
            ),
            logprobs=None,
            finish_reason=finish_reason(choice.finish_reason, called=bool(calls)),
            stop_reason=choice.stop_reason,
        ).model_dump_json()
        wanted = self.sampling.logprobs is not None
        return spliced(text, {"logprobs": self._logprobs(choice)} if wanted else {})

    def _logprobs(self, choice: FinishedChoice) -> Iterator[bytes]:
        writer = ChatLogprobsWriter(self._state.tokenizer)
        between = b'{"content":['
        for entry in choice.logprobs:
            yield between + writer.write([entry])[0].encode("ascii")
            between = b","
        yield b'],"refusal":null}' if choice.logprobs else b'{"content":[],"refusal":null}'


class CallAsChat:
    """A Call of another API that is generated as a chat completion.

    Subclasses set `_chat`. Errors name the field of their API.
    """

    field_names: Mapping[str, str]
    _chat: ChatCall

    @property
    def body(self) -> ChatCompletionRequest:
        return self._chat.body

    @property
    def sampling(self) -> SamplingParams:
        return self._chat.sampling

    async def prompts(self, tenant: str) -> list[list[int]]:
        with renaming_fields(self.field_names):
            return await self._chat.prompts(tenant)

    def parsing(self) -> AnswerParsing | None:
        return self._chat.parsing()

    def shrink_body(self) -> int:
        return self._chat.shrink_body()

    def echo_chars(self) -> int:
        return 0

    def prompt_text(self) -> str:
        return self._chat.prompt_text()

    def num_chars(self) -> int:
        return self._chat.num_chars()


class CompletionCall:
    """POST /v1/completions"""

    id_prefix, param, chunk_kind = "cmpl-", "prompt", "text_completion"
    field_names: Mapping[str, str] = MappingProxyType({})

    def __init__(self, state: ServerState, fields: Mapping[str, Any]) -> None:
        """Raises InvalidRequestError or NotFoundError naming the wrong field."""
        self._state = state
        self.body = _validated(state, CompletionRequest, fields, _COMPLETION_UNSUPPORTED)
        self.sampling = _completion_sampling(self.body)
        self._prompt_ids: list[list[int]] = []
        self._echo_texts: list[str] = []
        most, prompts = min(_MAX_CHOICES, state.engine.info.max_queue), len(self.body.prompt)
        if prompts * self.sampling.n > most:
            raise InvalidRequestError(
                f"{prompts} prompts with n = {self.sampling.n} make more than {most} choices; "
                "send several requests.",
                param="prompt",
            )
        if self.body.echo and self.num_chars() * self.sampling.n > MAX_ECHOED_CHARS:
            raise InvalidRequestError(
                f"With 'echo' and n = {self.sampling.n} the response would repeat more than "
                f"{MAX_ECHOED_CHARS} characters; send several requests.",
                param="echo",
            )

    async def prompts(self, tenant: str) -> list[list[int]]:
        # All in one job: 1,000 short ones would take a second of the event loop.
        echo, prompts = self.body.echo, self.body.prompt
        size = self.num_chars() if echo else sum(len(p) for p in prompts if isinstance(p, str))

        def work() -> tuple[list[list[int]], list[str]]:
            return (
                [self._token_ids(prompt) for prompt in prompts],
                [self._echo_text(prompt) for prompt in prompts] if echo else [],
            )

        self._prompt_ids, self._echo_texts = await offload_held(self._state, tenant, work, size)
        if self.sampling.prompt_logprobs is not None:
            check_size(self._prompt_ids, self.sampling.prompt_logprobs, self.sampling.n)
        return self._prompt_ids

    def parsing(self) -> None:
        return None

    def shrink_body(self) -> int:
        kept = self.body.prompt if self.body.echo else []
        num_bytes = sum(
            len(prompt) if isinstance(prompt, str) else _ID_BYTES * len(prompt) for prompt in kept
        )
        if kept:
            num_bytes += _ID_BYTES * sum(map(len, self._prompt_ids))
            num_bytes += sum(map(len, self._echo_texts))
        else:
            self._prompt_ids = []
        self.body = _kept(self.body, prompt=kept)
        return num_bytes + self.sampling.num_bytes

    def reply(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> Iterator[bytes]:
        echoes = self._echoes()
        written = (self._choice(choice, echoes.get(choice.index)) for choice in choices)
        return choices_json(Completion(**header, choices=[], usage=answer.usage()), written)

    def writer(self, frame: ChunkFrame) -> CompletionChunkWriter:
        body = self.body
        return CompletionChunkWriter(
            frame, self._state.tokenizer, body.logprobs, self._echoes(), body.prompt_logprobs
        )

    def echo_chars(self) -> int:
        return max(map(len, self._echo_texts), default=0)

    def prompt_text(self) -> str:
        first = self.body.prompt[0]
        return first if isinstance(first, str) else " ".join(map(str, first))

    def num_chars(self) -> int:
        prompts = self.body.prompt
        return sum(len(p) if isinstance(p, str) else _CHARS_PER_ID * len(p) for p in prompts)

    def _token_ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        limit = self._state.engine.info.max_model_len
        return encode_prompt(
            self._state.tokenizer,
            prompt,
            limit=limit,
            allow_special_tokens=self.body.allow_special_tokens,
        )

    def _echo_text(self, prompt: str | list[int]) -> str:
        """The prompt as text; empty if the engine will refuse it."""
        if isinstance(prompt, str):
            return prompt
        info = self._state.engine.info
        known = len(prompt) <= info.max_model_len and all(0 <= i < info.vocab_size for i in prompt)
        return self._state.tokenizer.decode(prompt) if known else ""

    def _echoes(self) -> dict[int, Echo]:
        """Index of a choice -> its prompt, which comes before its text. After `prompts`."""
        special = self.body.allow_special_tokens
        echoes = [
            Echo(text, ids, shows_special=special and isinstance(prompt, str))
            for prompt, text, ids in zip(
                self.body.prompt, self._echo_texts, self._prompt_ids, strict=False
            )
        ]
        n = self.sampling.n
        return {i: echoes[i // n] for i in range(len(echoes) * n)}

    def _choice(self, choice: FinishedChoice, echo: Echo | None) -> Iterator[bytes]:
        """As JSON."""
        tokenizer = self._state.tokenizer
        text = CompletionChoice(
            index=choice.index,
            text=choice.text if echo is None else echo.text + choice.text,
            logprobs=None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        ).model_dump_json()
        values: dict[str, Iterable[bytes]] = {}
        if self.sampling.logprobs is not None:
            writer = CompletionLogprobsWriter(tokenizer, self.sampling.logprobs, echo)
            lists = writer.write(choice.logprobs, choice.prompt_logprobs)
            values["logprobs"] = json_pieces(dict(lists))
        return spliced(text, values | prompt_logprobs(tokenizer, self.body, choice))


def prompt_logprobs(
    tokenizer: Tokenizer, body: GenerationRequest, choice: FinishedChoice
) -> dict[str, Iterable[bytes]]:
    """vLLM's `prompt_logprobs` of a response, as JSON; none if they were not asked for."""
    top = body.prompt_logprobs
    if top is None:
        return {}
    writer = PromptLogprobsWriter(tokenizer, top)
    return {"prompt_logprobs": writer.json(choice.prompt_logprobs)}


CALLS: Mapping[str, Callable[[ServerState, Mapping[str, Any]], Call]] = {
    "/v1/chat/completions": ChatCall,
    "/v1/completions": CompletionCall,
}
"""Path of an endpoint -> its Call."""


def _validated(
    state: ServerState,
    model: type[R],
    fields: Mapping[str, Any],
    unsupported: Mapping[str, tuple[Any, ...]],
) -> R:
    check_counts(fields)
    body = validate(model, fields)
    state.check_model(body.model)
    state.check_generates()
    refuse_unsupported(fields, unsupported, _INSTEAD)
    return body
