"""Pieces of a plan as text and as token ids, with exactly the planned number of tokens.

Made-up text is a row of words, each of which is one token of the model at hand:

    piece "a", 3     piece "b", 2              text   "river stone green| light open"
    | w0 | w1 | w2 | | w3 | w4 |               ids    one per word

The words of a piece depend on the seed and the piece's key alone, and a shorter piece is the
beginning of a longer one with the same key. The words are chosen such that no token of the
vocabulary reaches from one into the next, so texts can be put together without their tokens
changing; and each is one token with and without a space before it, so a prompt does not begin
with a space, which chat templates may take away.
"""

from __future__ import annotations

import copy
import random
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bros.bench.plan import Piece
from bros.core.errors import ConfigError
from bros.text.tokenizer import Tokenizer
from bros.workload.arrivals import generator

_MOST_WORDS = 4096
_FEWEST_WORDS = 8
"""With so many, sixteen tokens (a block of the KV cache) are the same by chance once in 10^14."""

_WORD = re.compile(rb" [a-z]{3,}")
_BRIDGE = re.compile(rb" ?([a-z]+) [a-z ]*")
"""A token that reaches from a word into the next one, and the end of the word it begins in."""


class PlannedPrompt(NamedTuple):
    """One prompt in the two forms it can be sent in.

    text has exactly the tokens token_ids if nothing is added around it (Prompts.added_tokens).
    """

    token_ids: list[int]
    text: str


class _Word(NamedTuple):
    """text: with a space before it.
    first_id: of the word where a text begins.
    """

    text: str
    token_id: int
    first_id: int


class _Row(NamedTuple):
    token_ids: list[int]
    text: str
    first_id: int


class Prompts:
    """Makes prompts for one tokenizer; the same for a seed on every machine.

    texts: key -> text of the pieces that people wrote (workloads.content.texts_of).
    cached_tokens: pieces are kept for the next prompt that has them, up to so many tokens in all.
    Raises ConfigError if the vocabulary has too few words.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        texts: Mapping[str, str] | None = None,
        *,
        cached_tokens: int = 4_000_000,
    ) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._texts = {} if texts is None else texts
        self._words = _words(tokenizer)
        self._rows: OrderedDict[Piece, _Row] = OrderedDict()
        self._room_tokens = cached_tokens

    def reseeded(self, seed: int, texts: Mapping[str, str]) -> Prompts:
        """Others with the same tokenizer, whose vocabulary is not read again: of 49,152 tokens
        that takes 0.8 s."""
        others = copy.copy(self)
        others._seed, others._texts, others._rows = seed, texts, OrderedDict()
        others._room_tokens += sum(piece.tokens for piece in self._rows)
        return others

    def render(self, pieces: Sequence[Piece]) -> PlannedPrompt:
        """A prompt with the tokens of all pieces.

        A piece that people wrote must be alone in its prompt, which raises ValueError otherwise.
        If it is to have fewer tokens than its text, the end of the text is cut off. Raises
        ConfigError if the text has fewer tokens than planned.
        """
        if any(piece.key in self._texts for piece in pieces):
            [piece] = pieces
            return self._written(piece)
        rows = [self._row(piece) for piece in pieces if piece.tokens]
        if not rows:
            return PlannedPrompt([], "")
        token_ids = [token_id for row in rows for token_id in row.token_ids]
        token_ids[0] = rows[0].first_id
        return PlannedPrompt(token_ids, "".join(row.text for row in rows)[1:])

    def added_tokens(self, *, chat: bool) -> int:
        """Tokens that the model puts around a prompt: BOS and EOS, or its chat template.

        chat: for a conversation of one message. Without a template that is 0 here.
        """
        text = self._words[0].text[1:]
        if not chat:
            return len(self._tokenizer.encode(text)) - 1
        if not self._tokenizer.has_chat_template:
            return 0
        return len(self._tokenizer.apply_chat_template([{"role": "user", "content": text}])) - 1

    def _row(self, piece: Piece) -> _Row:
        row = self._rows.get(piece)
        if row is not None:
            self._rows.move_to_end(piece)
            return row
        rng = generator(self._seed, f"text {piece.key}")
        # One random number per word, which makes shorter pieces beginnings of longer ones.
        words = rng.choices(self._words, k=piece.tokens)
        row = _Row(
            [word.token_id for word in words],
            "".join([word.text for word in words]),
            words[0].first_id,
        )
        self._rows[piece] = row
        self._room_tokens -= piece.tokens
        while self._room_tokens < 0:
            oldest, _ = self._rows.popitem(last=False)
            self._room_tokens += oldest.tokens
        return row

    def _written(self, piece: Piece) -> PlannedPrompt:
        text = self._texts[piece.key]
        token_ids = self._encode(text)
        if len(token_ids) < piece.tokens:
            raise ConfigError(
                f"a text has {len(token_ids)} tokens where {piece.tokens} are planned: it was "
                "counted with another tokenizer"
            )
        if len(token_ids) == piece.tokens:
            return PlannedPrompt(token_ids, text)
        return self._cut(piece, token_ids)

    def _cut(self, piece: Piece, token_ids: list[int]) -> PlannedPrompt:
        """The text cut such that it is encoded as exactly so many tokens again.

        A cut may split a character or a word whose parts are other tokens on their own: then the
        text is cut shorter, and words fill it up.
        """
        filler = self._row(Piece(f"{piece.key}/filler", piece.tokens))
        for kept in range(piece.tokens, 0, -1):
            text = self._tokenizer.decode(token_ids[:kept], skip_special_tokens=False)
            text = text.rstrip("\N{REPLACEMENT CHARACTER} ")
            missing = piece.tokens - len(self._encode(text))
            if missing < 0:
                continue
            text += "".join(f" {word}" for word in filler.text.split()[:missing])
            ids = self._encode(text)
            if len(ids) == piece.tokens:
                return PlannedPrompt(ids, text)
        return PlannedPrompt([filler.first_id, *filler.token_ids[1:]], filler.text[1:])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _words(tokenizer: Tokenizer) -> list[_Word]:
    """Words that stay one token each whatever stands around them, at most _MOST_WORDS.

    Raises ConfigError if there are fewer than _FEWEST_WORDS.
    """
    vocabulary = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    ends = tuple({found[1] for token in vocabulary if (found := _BRIDGE.fullmatch(token))})
    words: list[_Word] = []
    for token_id, token in enumerate(vocabulary):
        if len(words) == _MOST_WORDS:
            break
        if _WORD.fullmatch(token) and not token.endswith(ends):
            words.extend(_checked(tokenizer, token.decode(), token_id))
    if len(words) < _FEWEST_WORDS:
        raise ConfigError(
            f"prompts cannot be made up: of the vocabulary's {len(vocabulary)} tokens only "
            f"{len(words)} are words with a space before them"
        )
    _check(tokenizer, words)
    return words


def _checked(tokenizer: Tokenizer, text: str, token_id: int) -> Iterator[_Word]:
    """The word, if it is one token both at the start of a text and after another word."""
    ids = tokenizer.encode(text[1:] + text, add_special_tokens=False)
    if len(ids) == 2 and ids[1] == token_id:
        yield _Word(text, token_id, ids[0])


def _check(tokenizer: Tokenizer, words: list[_Word]) -> None:
    """That all words in a row are what they are alone; raises ConfigError if they are not."""
    mixed = list(words)
    random.Random(len(words)).shuffle(mixed)
    ids = tokenizer.encode("".join(word.text for word in mixed)[1:], add_special_tokens=False)
    if ids != [mixed[0].first_id, *(word.token_id for word in mixed[1:])]:
        raise ConfigError(
            "prompts cannot be made up: this tokenizer joins words in ways of its own"
        )
