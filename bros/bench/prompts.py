"""Renders the pieces of a plan as text and token ids with exactly the planned number of tokens.

Synthetic text is a sequence of words, each of which is one token of the model:

    piece "a", 3     piece "b", 2              text   "river stone green| light open"
    | w0 | w1 | w2 | | w3 | w4 |               ids    one per word

The words of a piece depend only on the seed and the piece's key, and a shorter piece is a prefix of
a longer one with the same key. No token of the vocabulary spans two of the words, so concatenating
texts does not change their tokens. Each word is one token with and without a leading space, so a
prompt need not begin with a space, which chat templates may strip.
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

_MAX_WORDS = 4096
_MIN_WORDS = 8
"""With this many words, a KV block (16 tokens) repeats by chance once in 10^14."""

_WORD = re.compile(rb" [a-z]{3,}")
_SPANNING_TOKEN = re.compile(rb" ?([a-z]+) [a-z ]*")
"""A token that spans two words; the group is the end of the first word."""


class PlannedPrompt(NamedTuple):
    """One prompt in both forms.

    text: encodes to exactly token_ids, without the tokens of Prompts.added_tokens.
    """

    token_ids: list[int]
    text: str


class _Word(NamedTuple):
    """text: with a leading space.
    token_id: of the text.
    first_id: of the word without the space, at the start of a prompt.
    """

    text: str
    token_id: int
    first_id: int


class _RenderedPiece(NamedTuple):
    token_ids: list[int]
    text: str
    first_id: int


class Prompts:
    """Renders prompts for one tokenizer, deterministically for a seed.

    texts: key -> text, for pieces of real text (workloads.contents.texts_of).
    cached_tokens: size of the LRU cache of rendered pieces.
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
        self._cache: OrderedDict[Piece, _RenderedPiece] = OrderedDict()
        self._free_cache_tokens = cached_tokens

    def reseeded(self, seed: int, texts: Mapping[str, str]) -> Prompts:
        """A copy with another seed and other texts that reuses the words of the vocabulary:
        reading 49,152 tokens takes 0.8 s."""
        others = copy.copy(self)
        others._seed, others._texts, others._cache = seed, texts, OrderedDict()
        others._free_cache_tokens += sum(piece.tokens for piece in self._cache)
        return others

    def render(self, pieces: Sequence[Piece]) -> PlannedPrompt:
        """A prompt with the tokens of all pieces.

        A piece of real text must be the only one of its prompt (ValueError otherwise). Its text is
        cut to the planned tokens. Raises ConfigError if the text has fewer tokens than planned.
        """
        if any(piece.key in self._texts for piece in pieces):
            [piece] = pieces
            return self._render_text(piece)
        rendered_pieces = [self._generate(piece) for piece in pieces if piece.tokens]
        if not rendered_pieces:
            return PlannedPrompt([], "")
        token_ids = [token_id for rendered in rendered_pieces for token_id in rendered.token_ids]
        token_ids[0] = rendered_pieces[0].first_id
        return PlannedPrompt(token_ids, "".join(rendered.text for rendered in rendered_pieces)[1:])

    def added_tokens(self, *, chat: bool) -> int:
        """Tokens that the server adds to a prompt: BOS and EOS, or the chat template.

        chat: for a conversation of one message; 0 without a chat template.
        """
        text = self._words[0].text[1:]
        if not chat:
            return len(self._tokenizer.encode(text)) - 1
        if not self._tokenizer.has_chat_template:
            return 0
        return len(self._tokenizer.apply_chat_template([{"role": "user", "content": text}])) - 1

    def _generate(self, piece: Piece) -> _RenderedPiece:
        rendered = self._cache.get(piece)
        if rendered is not None:
            self._cache.move_to_end(piece)
            return rendered
        rng = generator(self._seed, f"text {piece.key}")
        # One random number per word, which makes shorter pieces beginnings of longer ones.
        words = rng.choices(self._words, k=piece.tokens)
        rendered = _RenderedPiece(
            [word.token_id for word in words],
            "".join([word.text for word in words]),
            words[0].first_id,
        )
        self._cache[piece] = rendered
        self._free_cache_tokens -= piece.tokens
        while self._free_cache_tokens < 0:
            oldest, _ = self._cache.popitem(last=False)
            self._free_cache_tokens += oldest.tokens
        return rendered

    def _render_text(self, piece: Piece) -> PlannedPrompt:
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
        """The text cut such that it encodes to exactly `piece.tokens` tokens.

        A cut may split a character or word, and its parts may encode differently: then the text is
        cut shorter and padded with words.
        """
        filler = self._generate(Piece(f"{piece.key}/filler", piece.tokens))
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
    """Words that are one token each in any context, at most _MAX_WORDS.

    Raises ConfigError if there are fewer than _MIN_WORDS.
    """
    vocabulary = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    ends = tuple({found[1] for token in vocabulary if (found := _SPANNING_TOKEN.fullmatch(token))})
    words: list[_Word] = []
    for token_id, token in enumerate(vocabulary):
        if len(words) == _MAX_WORDS:
            break
        if _WORD.fullmatch(token) and not token.endswith(ends):
            words.extend(_single_token_word(tokenizer, token.decode(), token_id))
    if len(words) < _MIN_WORDS:
        raise ConfigError(
            f"cannot generate prompts: of the vocabulary's {len(vocabulary)} tokens only "
            f"{len(words)} are words with a leading space"
        )
    _check_sequence(tokenizer, words)
    return words


def _single_token_word(tokenizer: Tokenizer, text: str, token_id: int) -> Iterator[_Word]:
    """The word, if it is one token both at the start of a text and after another word."""
    ids = tokenizer.encode(text[1:] + text, add_special_tokens=False)
    if len(ids) == 2 and ids[1] == token_id:
        yield _Word(text, token_id, ids[0])


def _check_sequence(tokenizer: Tokenizer, words: list[_Word]) -> None:
    """Raises ConfigError unless a sequence of all words encodes to one token each."""
    mixed = list(words)
    random.Random(len(words)).shuffle(mixed)
    ids = tokenizer.encode("".join(word.text for word in mixed)[1:], add_special_tokens=False)
    if ids != [mixed[0].first_id, *(word.token_id for word in mixed[1:])]:
        raise ConfigError("cannot generate prompts: this tokenizer merges tokens across words")
