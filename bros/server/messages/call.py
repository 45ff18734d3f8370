"""A request to /v1/messages as a chat completion, and its answer as a message.

{"role": "user", content: [tool_result, ..., text]}  ─▶ tool, ..., user
{"role": "assistant", content: [thinking, text, tool_use]} ─▶ assistant
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bros.core.errors import InvalidRequestError
from bros.core.request import FinishReason
from bros.server.errors import renaming_fields
from bros.server.http import validate
from bros.server.messages.events import MessageWriter
from bros.server.messages.schema import CreateMessage, MessageTool, MessageToolChoice
from bros.server.openai.calls import OTHER_GRAMMARS, CallAsChat, ChatCall, refuse_unsupported
from bros.server.openai.stream import Answer, ChunkFrame, FinishedChoice
from bros.server.state import ServerState
from bros.text.generation import TextDelta
from bros.text.json_text import MAX_TOOL_PARTS, has_more_parts, write_json

_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **OTHER_GRAMMARS,
        **dict.fromkeys(("container", "diagnostics", "mcp_servers", "prefill"), (None, [], {})),
        "context_management": (None, {}, {"edits": []}, _KEEPS_ALL),
        "output_format": (None, {}),
        "stop": (None, []),
    }
)
"""Field -> values without an effect."""

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        ".function.parameters": ".input_schema",
        ".function": "",
    }
)
"""Field of a chat completion -> field of a message."""

_CHOICES: Mapping[str, str] = MappingProxyType({"auto": "auto", "any": "required", "none": "none"})
_TIERS: Mapping[str, str] = MappingProxyType({"flex": "flex", "priority": "priority"})


class MessageCall(CallAsChat):
    """A Call of POST /v1/messages.

    body: the chat completion that is generated.
    """

    id_prefix, param, chunk_kind = "msg_", "messages", "message"
    field_names = _NAMES

    def __init__(self, state: ServerState, fields: Mapping[str, Any]) -> None:
        """Raises InvalidRequestError or NotFoundError naming the wrong field."""
        given = validate(CreateMessage, fields)
        state.check_model(given.model)
        refuse_unsupported(fields, _UNSUPPORTED)
        with renaming_fields(_NAMES):
            self._chat = ChatCall(state, _chat_fields(given))

    def reply(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> Iterator[bytes]:
        writer = self._writer(header)
        for choice in choices:
            writer.write(
                TextDelta(
                    choice.index,
                    choice.text,
                    finish_reason=FinishReason(choice.finish_reason),
                    stop_reason=choice.stop_reason,
                    parts=choice.answer.parts(),
                )
            )
        writer.end(answer.usage())
        yield writer.message(answer.usage()).model_dump_json().encode()

    def writer(self, frame: ChunkFrame) -> MessageWriter:
        return self._writer(frame.header)

    def _writer(self, header: Mapping[str, Any]) -> MessageWriter:
        tier = {"flex": "batch", "priority": "priority"}.get(header["service_tier"], "standard")
        return MessageWriter(header["id"], header["model"], tier, self._chat.new_call_id)


# ---- From the request to that of a chat completion.


def _chat_fields(given: CreateMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": given.model,
        "messages": _messages(given.system, given.messages),
        "max_completion_tokens": given.max_tokens,
        "stop": given.stop_sequences,
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "stream": given.stream,
        "user": None if given.metadata is None else given.metadata.user_id,
        "service_tier": _TIERS.get(given.service_tier or ""),
        "seed": given.seed,
        "cache_salt": given.cache_salt,
        "slo": None if given.slo is None else given.slo.model_dump(),
        **_tools(given.tools, given.tool_choice),
    }
    output = given.output_config
    if output is not None:
        fields["reasoning_effort"] = output.effort
        if output.format is not None:
            schema = {"name": "output", "schema": output.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if given.thinking is not None:
        thinks = given.thinking.type != "disabled"
        fields["chat_template_kwargs"] = {"enable_thinking": thinks}
    return {name: value for name, value in fields.items() if value is not None}


def _tools(tools: Sequence[MessageTool] | None, choice: MessageToolChoice | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in tools
        ]
    if choice is not None:
        fields["tool_choice"] = _CHOICES.get(choice.type) or {
            "type": "function",
            "function": {"name": choice.name or ""},
        }
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


# ---- Messages and their blocks.


def _messages(system: object, messages: object) -> list[dict[str, Any]]:
    """Raises InvalidRequestError naming the block that is wrong."""
    found: list[dict[str, Any]] = []
    text = "" if system is None else "\n".join(_texts(system, "system"))
    if text:  # an empty one would replace that of the chat template
        found.append({"role": "system", "content": text})
    if not isinstance(messages, list) or not messages:
        raise _wrong("must be a list of messages, and not empty", "messages")
    for i, message in enumerate(messages):
        param = f"messages[{i}]"
        if not isinstance(message, dict):
            raise _wrong("must be an object", param)
        content, where = message.get("content"), f"{param}.content"
        match message.get("role"):
            case "user":
                found += _user(content, where)
            case "assistant":
                found.append(_assistant(content, where))
            case "system":
                found.append({"role": "system", "content": "\n".join(_texts(content, where))})
            case _:
                raise _wrong("must be user or assistant", f"{param}.role")
    if found[-1]["role"] == "assistant":
        raise InvalidRequestError(
            "The last of 'messages' must be of the user; this server does not continue a message "
            "of the assistant.",
            "messages",
            "unsupported_value",
        )
    return found


def _user(content: object, param: str) -> Iterator[dict[str, Any]]:
    """Results of tools come first in a message; each becomes a message of its own."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    texts = []
    for block, where in _blocks(content, param):
        match block["type"]:
            case "text":
                texts.append(_string(block, "text", where))
            case "tool_result":
                result = block.get("content")
                output = "\n".join(_texts("" if result is None else result, f"{where}.content"))
                call_id = _string(block, "tool_use_id", where)
                if block.get("is_error"):
                    output = f"Error: {output}"
                yield {"role": "tool", "tool_call_id": call_id, "content": output}
            case kind:
                raise _refused(kind, where)
    if texts or not content:
        yield {"role": "user", "content": "\n".join(texts)}


def _assistant(content: object, param: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    message: dict[str, Any] = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for block, where in _blocks(content, param):
        match block["type"]:
            case "text":
                texts.append(_string(block, "text", where))
            case "thinking":
                thoughts.append(_string(block, "thinking", where))
            case "redacted_thinking":
                pass  # only Anthropic's servers can read it
            case "tool_use":
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    raise _wrong("must be an object", f"{where}.input")
                if has_more_parts(arguments, MAX_TOOL_PARTS):
                    reason = f"must have at most {MAX_TOOL_PARTS} keys and values"
                    raise _wrong(reason, f"{where}.input")
                function = {
                    "name": _string(block, "name", where),
                    "arguments": write_json(arguments),
                }
                call_id = _string(block, "id", where)
                calls.append({"id": call_id, "type": "function", "function": function})
            case kind:
                raise _refused(kind, where)
    message["content"] = "\n".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(content: object, param: str) -> list[str]:
    """A text, or the texts of text blocks."""
    if isinstance(content, str):
        return [content]
    texts = []
    for block, where in _blocks(content, param):
        if block["type"] != "text":
            raise _refused(block["type"], where)
        texts.append(_string(block, "text", where))
    return texts


def _blocks(content: object, param: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    if not isinstance(content, list):
        raise _wrong("must be a string or a list of content blocks", param)
    for i, block in enumerate(content):
        where = f"{param}[{i}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise _wrong("must be an object with a type", where)
        yield block, where


def _string(block: Mapping[str, Any], name: str, param: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        raise _wrong("must be a string", f"{param}.{name}")
    return found


def _refused(kind: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"'{param}': blocks of the type {kind[:50]!r} are not supported here by this server.",
        param,
        "unsupported_value",
    )


def _wrong(rule: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{param}' {rule}.", param, "invalid_value")
