"""Items of responses: from what clients send to what is stored, and to messages of a chat.

{"type": "message", "role": "user", ...}         user, system, developer or assistant
{"type": "reasoning", ...}                  ┐
{"type": "message", "role": "assistant"}    ├─  one message of the assistant: reasoning_content,
{"type": "function_call", ...}              │   content, tool_calls
{"type": "function_call", ...}              ┘
{"type": "function_call_output", ...}            tool
{"type": "item_reference", "id": ...}            an item of the output of a stored response

An item of an output has the id `<type>_<response>_<index>`, such as msg_4fT9..._0, from which a
reference to it leads to its response.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from bros.core.errors import InvalidRequestError
from bros.core.request import IdGenerator

Item = dict[str, Any]

_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
_NOTHING: Mapping[str, Item] = MappingProxyType({})
_ROLES = ("user", "system", "developer", "assistant")
_TEXT_TYPES = ("input_text", "output_text", "text")
_MAX_ID_CHARS = 128


RESPONSE_PREFIX = "resp_"
"""Beginning of the id of a response."""

_REFERENCE = "item_reference"


def output_item_id(response_id: str, kind: str, index: int) -> str:
    """The id of the item of an output that has this index. kind: its `type`."""
    return f"{_ID_PREFIXES[kind]}_{response_id.removeprefix(RESPONSE_PREFIX)}_{index}"


def response_id_of(item_id: str) -> str:
    """The id of the response whose output has the item, if any has."""
    name, _, _ = item_id.partition("_")[2].rpartition("_")
    return f"{RESPONSE_PREFIX}{name}"


def references(value: object) -> Mapping[str, str]:
    """Where `input` refers to items: field -> id. Raises InvalidRequestError naming the item."""
    items = value if isinstance(value, list) else ()
    return {
        f"input[{i}].id": _string(item, "id", f"input[{i}]")
        for i, item in enumerate(items)
        if isinstance(item, dict) and item.get("type") == _REFERENCE
    }


def read_input(
    value: object, ids: IdGenerator, referenced: Mapping[str, Item] = _NOTHING
) -> list[Item]:
    """The items of `input`, complete and with ids. Raises InvalidRequestError naming the item.

    referenced: id -> item, for references.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        code = "missing_required_parameter" if value is None else "invalid_type"
        raise InvalidRequestError("'input' must be a string or a list of items.", "input", code)
    return [_item(_followed(each, referenced), f"input[{i}]", ids) for i, each in enumerate(value)]


def _followed(value: object, referenced: Mapping[str, Item]) -> object:
    """The item that a reference leads to; else the value."""
    if isinstance(value, dict) and value.get("type") == _REFERENCE:
        item_id = value.get("id")
        return referenced.get(item_id, value) if isinstance(item_id, str) else value
    return value


def _item(value: object, param: str, ids: IdGenerator) -> Item:
    if not isinstance(value, dict):
        raise _wrong(f"'{param}' must be an object.", param, "invalid_type")
    kind = value.get("type", "message")
    match kind:
        case "message":
            item = _message(value, param)
        case "reasoning":
            item = _reasoning(value, param)
        case "function_call":
            item = {
                "type": kind,
                **{name: _string(value, name, param) for name in ("call_id", "name", "arguments")},
            }
        case "function_call_output":
            output = value.get("output")
            if not isinstance(output, str):
                output = _joined(output, f"{param}.output")
            item = {"type": kind, "call_id": _string(value, "call_id", param), "output": output}
        case _:
            raise _wrong(
                f"'{param}': items of the type {str(kind)[:50]!r} are not supported by this "
                f"server; supported are {', '.join(_ID_PREFIXES)}.",
                f"{param}.type",
                "unsupported_value",
            )
    given = value.get("id")
    has_id = isinstance(given, str) and 0 < len(given) <= _MAX_ID_CHARS
    item_id = given if has_id else ids.new(_ID_PREFIXES[kind], "_")
    return {"id": item_id, "status": "completed", **item}


def _message(value: Mapping[str, Any], param: str) -> Item:
    role = value.get("role")
    if role not in _ROLES:
        message = f"'{param}.role' must be one of {', '.join(_ROLES)}."
        raise _wrong(message, f"{param}.role", "invalid_value")
    content = value.get("content")
    if isinstance(content, str):
        texts = [content]
    else:
        texts = list(_texts(content, f"{param}.content"))
    if role == "assistant":
        parts = [output_text(text) for text in texts]
    else:
        parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "content": parts}


def output_text(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning(value: Mapping[str, Any], param: str) -> Item:
    """Its text may be in `content` or, if it comes from another server, in `summary`."""
    if value.get("encrypted_content") and not value.get("content"):
        raise _wrong(
            f"'{param}.encrypted_content' cannot be read by this server.",
            f"{param}.encrypted_content",
            "unsupported_parameter",
        )
    item: Item = {"type": "reasoning", "summary": [], "content": []}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = value.get(name)
        if parts is None:
            continue
        texts = _texts(parts, f"{param}.{name}", (kind,))
        item[name] = [{"type": kind, "text": text} for text in texts]
    return item


def _joined(value: object, param: str) -> str:
    return "\n".join(_texts(value, param))


def _texts(value: object, param: str, types: tuple[str, ...] = _TEXT_TYPES) -> Iterable[str]:
    """The texts of content parts."""
    if not isinstance(value, list):
        raise _wrong(
            f"'{param}' must be a string or a list of content parts.", param, "invalid_type"
        )
    for i, part in enumerate(value):
        where = f"{param}[{i}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _wrong(f"'{where}' must be an object with a type.", where, "invalid_type")
        name = "refusal" if part["type"] == "refusal" and "output_text" in types else "text"
        if part["type"] not in types and name == "text":
            raise _wrong(
                f"'{where}' is {part['type'][:50]!r}; this model accepts text only.",
                where,
                "invalid_value",
            )
        yield _string(part, name, where)


def _string(value: Mapping[str, Any], name: str, param: str) -> str:
    found = value.get(name)
    if not isinstance(found, str):
        code = "missing_required_parameter" if found is None else "invalid_type"
        raise _wrong(f"'{param}.{name}' must be a string.", f"{param}.{name}", code)
    return found


def _wrong(message: str, param: str, code: str) -> InvalidRequestError:
    return InvalidRequestError(message, param[:200], code)


def to_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The items as messages of a chat completion."""
    messages: list[dict[str, Any]] = []
    reply: dict[str, Any] | None = None  # the assistant's message that further items belong to
    for item in items:
        kind, role = item["type"], item.get("role")
        if kind == "function_call_output":
            output, call_id = item["output"], item["call_id"]
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            reply = None
        elif kind == "message" and role != "assistant":
            messages.append({"role": role, "content": _text_of(item["content"])})
            reply = None
        else:
            reply = _add_to_reply(messages, reply, item)
    return messages


def _add_to_reply(
    messages: list[dict[str, Any]], reply: dict[str, Any] | None, item: Item
) -> dict[str, Any]:
    """Add an item of the assistant to its message, or to a new one if it does not fit in."""
    kind = item["type"]
    begins = reply is None or (
        # In a message the reasoning comes before the text, and the text before the calls.
        kind == "reasoning" or (kind == "message" and (reply["content"] or "tool_calls" in reply))
    )
    if begins or reply is None:
        reply = {"role": "assistant", "content": ""}
        messages.append(reply)
    if kind == "reasoning":
        reply["reasoning_content"] = _text_of(item["content"] or item["summary"])
    elif kind == "message":
        reply["content"] = _text_of(item["content"])
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        reply.setdefault("tool_calls", []).append(call)
    return reply


def _text_of(parts: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in parts)
