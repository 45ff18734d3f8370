"""Tokens of a text that comes after other text."""

from __future__ import annotations

from typing import Protocol

_ANCHOR = "\n"


class TextEncoder(Protocol):
    """The part of bros.text.tokenizer.Tokenizer that encodes texts."""

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        limit: int | None = None,
        escaped: bool = False,
    ) -> list[int]: ...


class InnerTexts:
    """Encodes texts inside a prompt. Some tokenizers write a space before any text, which is there
    only at the beginning. Several threads may encode."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self._anchor = encoder.encode(_ANCHOR, add_special_tokens=False)
        self._adds_space = self._after_anchor("x") != encoder.encode("x", add_special_tokens=False)

    def encode(self, text: str, *, limit: int | None = None, escaped: bool = False) -> list[int]:
        """limit, escaped: as for Tokenizer.encode, and it raises what that raises."""
        found = self._after_anchor(text, limit, escaped=escaped) if self._adds_space else None
        if found is not None:
            return found
        return self._encoder.encode(text, add_special_tokens=False, limit=limit, escaped=escaped)

    def _after_anchor(
        self, text: str, limit: int | None = None, *, escaped: bool = False
    ) -> list[int] | None:
        """The tokens of `text` after the anchor; None if the anchor merges with it."""
        both = self._encoder.encode(
            _ANCHOR + text, add_special_tokens=False, limit=limit, escaped=escaped
        )
        size = len(self._anchor)
        return both[size:] if both[:size] == self._anchor else None
