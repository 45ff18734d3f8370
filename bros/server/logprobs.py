"""Log-probabilities in the two forms OpenAI has for them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from bros.core.request import TokenLogprobs
from bros.engine.tokenizer import Tokenizer
from bros.server.replies import CompletionLogprobs, TokenLogprob, TopLogprob

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express, as it does at OpenAI."""


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> list[TokenLogprob]:
    """The `content` list of chat logprobs."""
    return [
        TokenLogprob(
            token=tokenizer.token_text(entry.token_id),
            logprob=_finite(entry.logprob),
            bytes=list(tokenizer.token_bytes(entry.token_id)),
            top_logprobs=[
                TopLogprob(
                    token=tokenizer.token_text(token_id),
                    logprob=_finite(logprob),
                    bytes=list(tokenizer.token_bytes(token_id)),
                )
                for token_id, logprob in entry.top
            ],
        )
        for entry in entries
    ]


class CompletionLogprobsWriter:
    """The four parallel lists of text completions; one writer per choice, in token order.

    text_offset counts characters from the start of the text to
    where a token begins; tokens inside one character share its offset.
    """

    def __init__(self, tokenizer: Tokenizer, with_top: bool) -> None:
        self._tokenizer = tokenizer
        self._with_top = with_top
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, entries: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """The lists for the next tokens."""
        lists = CompletionLogprobs(
            tokens=[],
            token_logprobs=[],
            top_logprobs=[] if self._with_top else None,
            text_offset=[],
        )
        for entry in entries:
            lists.tokens.append(self._name(entry.token_id))
            lists.token_logprobs.append(_finite(entry.logprob))
            lists.text_offset.append(self._offset)
            if lists.top_logprobs is not None:
                lists.top_logprobs.append(
                    {self._name(token_id): _finite(logprob) for token_id, logprob in entry.top}
                )
            self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(entry.token_id)))
        return lists

    def _name(self, token_id: int) -> str:
        """The token's text; parts of characters as `bytes:\\xe2\\x80`, so that names differ."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
