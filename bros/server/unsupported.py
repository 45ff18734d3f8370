"""Fields that change what a correct answer is, and that this server cannot honour.

Ignoring them would return a wrong answer without a word, so they are refused, unless they have
a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bros.core.errors import InvalidRequestError

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
