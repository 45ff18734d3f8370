"""A request to /v1/responses as a chat completion, and its answer as a response.

    CreateResponse ─▶ items ─▶ messages ─▶ ChatCall ─▶ prompt, SamplingParams ─▶ engine
                                                                                   │
    ResponseObject ◀── ResponseWriter ◀────────────── deltas ◀─────────────────────┘

What a field means is what it means in a chat completion: the ChatCall checks it, and its errors
name the field of the response.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from bros.batch.responses import Turn
from bros.core.errors import InvalidRequestError, PromptTooLongError
from bros.core.request import FinishReason
from bros.server.errors import renaming_fields
from bros.server.http import validate
from bros.server.openai.calls import (
    OTHER_GRAMMARS,
    CallAsChat,
    ChatCall,
    check_count,
    refuse_unsupported,
)
from bros.server.openai.schema import ChatMessage
from bros.server.openai.stream import Answer, ChunkFrame, FinishedChoice
from bros.server.responses.events import LiveResponse, ResponseWriter
from bros.server.responses.items import RESPONSE_PREFIX, Item, read_input, to_messages
from bros.server.responses.schema import (
    CreateResponse,
    FunctionTool,
    ResponseToolChoice,
    TextFormat,
)
from bros.server.state import ServerState
from bros.text.generation import TextDelta
from bros.text.json_text import write_json

NO_EFFECT: tuple[Any, ...] = (None, False, [], {}, "")

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **OTHER_GRAMMARS,
        "access_programs": NO_EFFECT,
        "context_management": NO_EFFECT,
        "conversation": NO_EFFECT,
        "image": NO_EFFECT,
        "max_tokens": (None,),
        "moderation": NO_EFFECT,
        "n": (None, 1),
        "prompt": NO_EFFECT,
        "response_format": NO_EFFECT,
    }
)
"""Field -> values without an effect."""

_SAME_NAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "logit_bias",
    "chat_template_kwargs",
    "allow_special_tokens",
    "cache_salt",
    "slo",
    "service_tier",
    "user",
    "safety_identifier",
    "parallel_tool_calls",
)
"""Fields that a chat completion has, too."""

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
        ".function": "",
    }
)
"""Field of a chat completion -> field of a response."""

_KEPT = ("store", "background", "previous_response_id")
"""Fields that are read after the engine has the prompt."""

LOGPROBS = "message.output_text.logprobs"


class ResponseCall(CallAsChat):
    """A Call of POST /v1/responses.

    given: the request; without what only the prompt needed, once that is made.
    input_json: its own input items, as JSON, until the prompt is made if it is not stored later.
    request: its fields as JSON, without `input`, if it is to run in the background.
    body: the chat completion that is generated.
    ended: the response object, once it is complete.
    """

    id_prefix, param, chunk_kind = RESPONSE_PREFIX, "input", "response"
    field_names = _NAMES

    def __init__(
        self,
        state: ServerState,
        fields: Mapping[str, Any],
        items: Sequence[Item] | None = None,
        *,
        referenced: Mapping[str, Item] = MappingProxyType({}),
        stored: bool = True,
    ) -> None:
        """items: the input items, if they were read before.
        referenced: id -> item, of the items that the input refers to.
        stored: whether it can be stored.

        Raises InvalidRequestError or NotFoundError naming the wrong field.
        """
        self._state = state
        self.stored = stored
        self.given = validate(CreateResponse, fields)
        state.check_model(self.given.model)
        refuse_unsupported(fields, _UNSUPPORTED)
        self._check()
        if items is None:
            _check_counts(self.given.input)
            items = read_input(self.given.input, state.ids, referenced)
        with renaming_fields(_NAMES):
            self._chat = ChatCall(state, self._chat_fields(items))
        self._echo = self._echoed()
        self.input_json = write_json(items)
        self.request = None
        if self.given.background:
            known = {name: fields[name] for name in CreateResponse.model_fields if name in fields}
            self.request = write_json({**known, "input": []})
        self.ended: LiveResponse | None = None

    def continue_from(self, turns: Sequence[Turn]) -> None:
        """Put the turns of a conversation before the messages of this request."""
        earlier = to_messages(item for turn in turns for item in (*turn.input, *turn.output))
        with renaming_fields(_NAMES):
            check_count(len(earlier) + len(self.body.messages), "messages")
        first = int(bool(self.given.instructions))
        messages = list(self.body.messages)
        messages[first:first] = [ChatMessage.model_validate(message) for message in earlier]
        self._chat.body = self.body.model_copy(update={"messages": messages})

    async def prompts(self, tenant: str) -> list[list[int]]:
        limit = self._state.engine.info.max_model_len
        try:
            prompts = await super().prompts(tenant)
        except PromptTooLongError:
            if self.given.truncation != "auto":
                raise
        else:
            if self.given.truncation != "auto" or len(prompts[0]) < limit:
                return prompts  # the engine refuses one that is too long
        return await self._truncated(tenant)

    @property
    def _is_stored_later(self) -> bool:
        """Whether it is stored when it has ended, rather than before it runs or never."""
        return self.stored and self.given.store is not False and not self.given.background

    def shrink_body(self) -> int:
        kept = {name: getattr(self.given, name) for name in _KEPT}
        self.given = CreateResponse.model_construct(**kept, input=[])
        if not self._is_stored_later:
            self.input_json = ""
        return super().shrink_body() + len(self.input_json) + len(self._echo)

    def reply(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> Iterator[bytes]:
        yield from self.end(header, choices, answer).pieces()

    def end(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> LiveResponse:
        """The response object; `ended` from now on."""
        writer = self.silent_writer(header)
        for choice in choices:
            writer.write(
                TextDelta(
                    choice.index,
                    choice.text,
                    logprobs=choice.logprobs,
                    finish_reason=FinishReason(choice.finish_reason),
                    stop_reason=choice.stop_reason or "",  # the stop token was left out
                    parts=choice.answer.parts(),
                )
            )
        writer.close(answer.usage())
        self.ended = writer.response
        return self.ended

    def echo_chars(self) -> int:
        return len(self._echo)

    def writer(self, frame: ChunkFrame) -> ResponseWriter:
        return self._writer(frame.header, is_silent=False)

    def silent_writer(self, header: Mapping[str, Any]) -> ResponseWriter:
        """One that makes no events."""
        return self._writer(header, is_silent=True)

    def _writer(self, header: Mapping[str, Any], *, is_silent: bool) -> ResponseWriter:
        response = self.response(
            header["id"],
            created_at=header["created"],
            service_tier=header["service_tier"],
            system_fingerprint=header["system_fingerprint"],
        )
        state = self._state
        return ResponseWriter(
            response,
            state.tokenizer,
            state.clock,
            self._chat.new_call_id,
            with_logprobs=self.sampling.logprobs is not None,
            is_silent=is_silent,
        )

    def response(self, response_id: str, **fields: Any) -> LiveResponse:
        """The response object before there is any output. fields: of LiveResponse."""
        given = self.given
        return LiveResponse(
            id=response_id,
            model=self._state.model_name,
            background=bool(given.background),
            store=given.store is not False and self.stored,
            echo=self._echo,
            **fields,
        )

    # ---- From the request to that of a chat completion.

    def _check(self) -> None:
        """Raises InvalidRequestError for what cannot be honoured."""
        given = self.given
        options = given.stream_options
        if options is not None and not given.stream:
            raise InvalidRequestError(
                "'stream_options' needs 'stream' to be true.", param="stream_options"
            )
        if options is not None and options.include_obfuscation:
            raise _unsupported("stream_options.include_obfuscation", "only false")
        if given.background and given.store is False:
            raise InvalidRequestError(
                "'background' needs 'store' not to be false.", "store", "invalid_value"
            )
        if given.background_options is not None and not given.background:
            raise InvalidRequestError(
                "'background_options' needs 'background' to be true.", "background_options"
            )

    def _chat_fields(self, items: Sequence[Item]) -> dict[str, Any]:
        given = self.given
        fields: dict[str, Any] = {name: getattr(given, name) for name in _SAME_NAME}
        messages = to_messages(items)
        if given.instructions:
            messages.insert(0, {"role": "system", "content": given.instructions})
        if not messages:
            raise InvalidRequestError("'input' has no items.", "input", "invalid_value")
        fields["messages"] = messages
        fields["max_completion_tokens"] = given.max_output_tokens
        if LOGPROBS in (given.include or ()):
            fields |= {"logprobs": True, "top_logprobs": given.top_logprobs or 0}
        if given.text is not None and given.text.format is not None:
            fields["response_format"] = _response_format(given.text.format)
        if given.reasoning is not None:
            fields["reasoning_effort"] = given.reasoning.effort
        if given.text is not None:
            fields["verbosity"] = given.text.verbosity
        fields["tools"] = [_tool(tool) for tool in given.tools or ()] or None
        fields["tool_choice"] = _tool_choice(given.tool_choice)
        if fields["slo"] is not None:
            fields["slo"] = fields["slo"].model_dump()
        return {name: value for name, value in fields.items() if value is not None}

    def _echoed(self) -> str:
        given, sampling = self.given, self.sampling
        text = given.text
        echo: dict[str, object] = {
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "max_tool_calls": given.max_tool_calls,
            "metadata": given.metadata or {},
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": given.previous_response_id,
            "prompt_cache_key": given.prompt_cache_key,
            "reasoning": {"effort": given.reasoning and given.reasoning.effort, "summary": None},
            "safety_identifier": given.safety_identifier,
            "temperature": sampling.temperature,
            "text": {
                "format": _dump(text.format) if text and text.format else {"type": "text"},
                "verbosity": (text and text.verbosity) or "medium",
            },
            "tool_choice": _dump(given.tool_choice) or "auto",
            "tools": [_dump(tool) for tool in given.tools or ()],
            "top_logprobs": given.top_logprobs or 0,
            "top_p": sampling.top_p if given.top_p is None else given.top_p,
            "truncation": given.truncation or "disabled",
            "user": given.user,
        }
        return write_json(echo, separators=(",", ":"), allow_nan=False)

    # ---- truncation: auto

    async def _truncated(self, tenant: str) -> list[list[int]]:
        """The prompt without the first messages of the conversation, as few as it takes.

        What is left begins with a message of the user or the system, so that no tool's output is
        without its call. It leaves room for the output.
        """
        body = self.body
        messages, limit = body.messages, self._state.engine.info.max_model_len
        room = limit - min(self.given.max_output_tokens or limit // 4, limit // 2)
        others = (i for i, message in enumerate(messages) if message.role not in _SYSTEM)
        head = next(others, len(messages))
        starts = [i for i in range(head + 1, len(messages)) if messages[i].role in _STARTS]

        async def prompt_from(start: int) -> list[list[int]]:
            rest = [*messages[:head], *messages[start:]]
            self._chat.body = body.model_copy(update={"messages": rest})
            with renaming_fields(_NAMES):
                return await self._chat.prompts(tenant)

        low, high, found = 0, len(starts), None
        while low < high:  # it is too long from starts[low - 1] on, and fits from starts[high] on
            middle = (low + high) // 2
            try:
                prompts = await prompt_from(starts[middle])
            except PromptTooLongError:
                low = middle + 1
                continue
            if len(prompts[0]) > room:
                low = middle + 1
            else:
                high, found = middle, prompts
        if found is None:
            found = await prompt_from(starts[-1] if starts else head)
        return found


_SYSTEM = ("system", "developer")
_STARTS = (*_SYSTEM, "user")


def _check_counts(given: object) -> None:
    """Raises InvalidRequestError for more items or content parts than a chat may have."""
    if not isinstance(given, list):
        return
    lists = (
        item.get(name)
        for item in given
        if isinstance(item, dict)
        for name in ("content", "summary", "output")
    )
    parts = sum(len(each) for each in lists if isinstance(each, list))
    with renaming_fields(_NAMES):
        check_count(len(given), "items")
        check_count(parts, "content parts")


def _response_format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type, "schema": given.schema_}
    for name in ("name", "schema"):
        if getattr(given, {"schema": "schema_"}.get(name, name)) is None:
            raise InvalidRequestError(
                f"Missing required parameter: 'text.format.{name}'.",
                f"text.format.{name}",
                "missing_required_parameter",
            )
    schema = _dump(given)
    del schema["type"]
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = _dump(tool)
    del function["type"]
    return {"type": "function", "function": function}


def _tool_choice(choice: str | ResponseToolChoice | None) -> str | dict[str, Any] | None:
    """`tool_choice` of a chat completion."""
    if not isinstance(choice, ResponseToolChoice):
        return choice
    if choice.type == "function":
        return {"type": "function", "function": {"name": choice.name or ""}}
    tools = [_reference(tool.name) for tool in choice.tools or ()]
    allowed = {"mode": choice.mode or "auto", "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _reference(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _dump(model: Any) -> Any:
    """As the client has written it."""
    if isinstance(model, BaseModel):
        return model.model_dump(by_alias=True, exclude_none=True)
    return model


def _unsupported(param: str, supported: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"'{param}': {supported} is supported by this server.", param, "unsupported_value"
    )
