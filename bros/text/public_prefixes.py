"""Which first tokens of a prompt all tenants share, because the operator says so.

prompt of ann   [ system prompt that the operator has named ][ her question ]
prompt of bob   [ the same, cached once for both            ][ his question ]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from bros.core.errors import InvalidRequestError
from bros.text.tokenizer import Tokenizer

_ALL = 2**31 - 1


class PublicPrefixes:
    """Counts public tokens.

    all_tokens: all tokens of all prompts and outputs are public.
    prefixes: token ids; what a prompt has in common with the beginning of one of them is public.
    """

    def __init__(self, *, all_tokens: bool = False, prefixes: Sequence[Sequence[int]] = ()) -> None:
        self._all_tokens = all_tokens
        self._prefixes = tuple(list(prefix) for prefix in prefixes)

    @classmethod
    def of(cls, tokenizer: Tokenizer, texts: Iterable[str]) -> Self:
        """Prompts that begin with one of the texts, and chats whose system message is one."""
        prefixes: list[Sequence[int]] = []
        for text in texts:
            prefixes.append(tokenizer.encode(text))
            if tokenizer.has_chat_template:
                prefixes += _of_chat(tokenizer, text)
        return cls(prefixes=prefixes)

    def count(self, token_ids: Sequence[int], cache_salt: str = "") -> int:
        """Number of first tokens of a request that all tenants share.

        A request with a salt shares none: its client wants less sharing than usual.
        """
        if cache_salt:
            return 0
        if self._all_tokens:
            return _ALL
        return max((_common(prefix, token_ids) for prefix in self._prefixes), default=0)


def _of_chat(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """What all chats with this system message begin with; [] if the template knows none."""
    system = {"role": "system", "content": text}
    try:
        one, other = (
            tokenizer.apply_chat_template([system, {"role": "user", "content": content}])
            for content in ("a", "b")
        )
    except InvalidRequestError:
        return []
    return [one[: _common(one, other)]]


def _common(prefix: Sequence[int], token_ids: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(prefix), len(token_ids))
    if list(prefix[:length]) == list(token_ids[:length]):
        return length
    return next(i for i in range(length) if prefix[i] != token_ids[i])
