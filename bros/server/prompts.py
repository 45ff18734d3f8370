"""Prompts as token ids, without holding up the event loop."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from bros.core.errors import InvalidRequestError, PromptTooLongError
from bros.server import offload
from bros.server.protocol import ChatMessage
from bros.server.state import ServerState

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
