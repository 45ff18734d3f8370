"""Log-probabilities of prompts on the wire: vLLM's `prompt_logprobs`, and OpenAI's `echo`."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pydantic_core import to_json

from bros.core.errors import InvalidRequestError
from bros.core.request import PromptLogprobs, PromptTokenLogprobs
from bros.server.openai.schema import PromptLogprob
from bros.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have, as in OpenAI's API."""

MAX_NUMBERS = 1_000_000
"""Most log-probabilities of all prompts of a request: they take 8 bytes each in the server, and
about 80 in the response."""

NUMBER_CHARS = 100
"""Rendering a log-probability takes as long as so many characters of text."""


def check_size(prompts: Sequence[Sequence[int]], top: int, n: int) -> None:
    """Raises InvalidRequestError if the log-probabilities of these prompts are too many.

    top: most likely tokens per position. n: choices per prompt.
    """
    numbers = sum(map(len, prompts)) * (1 + top) * n
    if numbers > MAX_NUMBERS:
        raise InvalidRequestError(
            f"The prompts would have {numbers} log-probabilities, more than {MAX_NUMBERS}: send "
            "fewer prompts, or ask for fewer per token.",
            param="prompt_logprobs",
            code="invalid_value",
        )


def num_numbers(pieces: Iterable[PromptLogprobs]) -> int:
    """How many log-probabilities they have."""
    return sum(len(piece) * (1 + piece.top) for piece in pieces)


class PromptLogprobsWriter:
    """vLLM's `prompt_logprobs` of one choice, written piece by piece.

    A list with one element per prompt token: null for the first, for the others an object with the
    token and the `top` most likely ones, by token id.
    """

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._begun = False

    def write(self, pieces: Iterable[PromptLogprobs]) -> list[dict[str, PromptLogprob] | None]:
        """The elements for the next tokens."""
        elements: list[dict[str, PromptLogprob] | None] = [] if self._begun else [None]
        self._begun = True
        elements += map(self._element, itertools.chain.from_iterable(pieces))
        return elements

    def json(self, pieces: Iterable[PromptLogprobs]) -> Iterator[bytes]:
        """The list of a choice whose pieces these are, as JSON."""
        yield b"[null"
        for entry in itertools.chain.from_iterable(pieces):
            element = self._element(entry)
            yield b"," + to_json({name: each.model_dump() for name, each in element.items()})
        yield b"]"

    def _element(self, entry: PromptTokenLogprobs) -> dict[str, PromptLogprob]:
        ranked = enumerate(entry.top[: self._top], start=1)
        found = {str(token): self._of(token, value, rank) for rank, (token, value) in ranked}
        name = str(entry.token_id)
        if name not in found:
            found = {name: self._of(entry.token_id, entry.logprob, entry.rank), **found}
        return found

    def _of(self, token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(
            logprob=max(logprob, LOWEST_LOGPROB),
            rank=rank,
            decoded_token=self._tokenizer.token_text(token_id),
        )


class CharacterCounter:
    """Counts the characters of a text whose UTF-8 comes in tokens, which may end within one."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> tuple[int, int]:
        """(characters that end before this token, characters that end before or in it)

        data: the token's bytes. What ends before it is a character that was begun and does not go
        on with the first byte: one U+FFFD.
        """
        begun, chars = self._utf8.getstate()[0], self._utf8.decode(data[:1])
        broken = begun + data[:1] != _REPLACEMENT and begun != b"" and chars[:1] == "\ufffd"
        return int(broken), len(chars) + len(self._utf8.decode(data[1:]))


_REPLACEMENT = "\ufffd".encode()


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that comes before the text of a choice.

    text: as the client sent it, or the text of its tokens.
    token_ids: all its tokens.
    shows_special: whether the text may have the names of special tokens.
    """

    text: str
    token_ids: Sequence[int]
    shows_special: bool


def token_offsets(tokenizer: Tokenizer, echo: Echo) -> list[int]:
    """Where each token of the prompt begins in its text. Special tokens that the text does not
    have, such as BOS before a string, take no room; tokens within one character have the same
    offset."""
    detokenizer, counter, text, offset = tokenizer.detokenizer(), CharacterCounter(), echo.text, 0
    offsets = []
    for token_id in echo.token_ids:
        if tokenizer.is_special(token_id):
            offsets.append(min(offset, len(text)))
            name = tokenizer.token_text(token_id)
            if echo.shows_special and text.startswith(name, offset):
                offset += len(name)
            continue
        before, _ = counter.push(tokenizer.token_bytes(token_id))
        offsets.append(min(offset + before, len(text)))
        offset += len(detokenizer.push_token(token_id))
    return offsets
