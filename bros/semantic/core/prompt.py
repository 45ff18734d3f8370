"""From the pieces of a call to tokens, piece by piece, so that prefixes end where variables do.

    pieces    "Review "       {{code}}             " as "        {{role}}       ": " {{output:r}}
    tokens    BOS 71 902     | ids as generated   | 33          | encoded      | 8
    prefixes             h1 ─┘                h2 ─┘          h3 ─┘          h4 ─┘
              shared by all ─┘ └─ shared within the session, or its scope

A text has the same tokens whatever stands around it, so calls that begin with the same pieces
begin with the same tokens. h1, h2, ... are Parrot's PrefixHash: each is made of the one before and
the tokens of a piece.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bros.semantic.schema import PrefixView

_CACHED_CHARS = 4_000_000
_ANCHOR = "\n"
_HASH_BYTES = 16


class TextEncoder(Protocol):
    """engine.tokenizer.Tokenizer is one."""

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]: ...


class PieceEncoder:
    """Token ids of pieces of text. Remembers those of constant texts, the latest ones.

    `encode` may be called from several threads, the others may not.
    """

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self._constants: OrderedDict[tuple[str, bool], tuple[int, ...]] = OrderedDict()
        self._num_chars = 0
        bos, empty = encoder.bos_token_id, encoder.encode("")
        self._beginning = (bos,) if bos is not None and empty[:1] == [bos] else ()
        self._anchor = encoder.encode(_ANCHOR, add_special_tokens=False)
        # Some tokenizers write a space before any text. Inside a prompt there is none.
        self._adds_space = self._after_anchor("x") != encoder.encode("x", add_special_tokens=False)

    @property
    def beginning(self) -> tuple[int, ...]:
        """What a text begins with if it is not a conversation: BOS if the model wants one."""
        return self._beginning

    def encode(self, text: str, *, first: bool) -> tuple[int, ...]:
        """first: nothing stands before it in its prompt."""
        if self._adds_space and not first:
            inside = self._after_anchor(text)
            if inside is not None:
                return tuple(inside)
        return tuple(self._encoder.encode(text, add_special_tokens=False))

    def known(self, text: str, *, first: bool) -> tuple[int, ...] | None:
        """The tokens of a text that is remembered."""
        token_ids = self._constants.get((text, first))
        if token_ids is not None:
            self._constants.move_to_end((text, first))
        return token_ids

    def remember(self, text: str, token_ids: tuple[int, ...], *, first: bool) -> None:
        """The text is likely to come again."""
        if (text, first) not in self._constants:
            self._num_chars += len(text)
        self._constants[text, first] = token_ids
        while self._num_chars > _CACHED_CHARS:
            (oldest, _), _ = self._constants.popitem(last=False)
            self._num_chars -= len(oldest)

    def _after_anchor(self, text: str) -> list[int] | None:
        """The tokens of `text` when something stands before it; None if they cannot be told."""
        both = self._encoder.encode(_ANCHOR + text, add_special_tokens=False)
        size = len(self._anchor)
        return both[size:] if both[:size] == self._anchor else None


@dataclass(frozen=True, slots=True)
class PromptSharing:
    """Who may share what is computed of prompts.

    model: of whose tokens these are.
    cache_salt: of everything.
    private_salt: of everything that comes after the constant beginning.
    """

    model: str
    cache_salt: str
    private_salt: str


class Prompt:
    """The tokens of one call so far. It only ever grows, LLM call by LLM call."""

    def __init__(self, sharing: PromptSharing, beginning: Sequence[int] = ()) -> None:
        """beginning: what stands before the first piece."""
        self._token_ids = list(beginning)
        self._salt = sharing.private_salt
        self._hash = _digest(repr((sharing.model, sharing.cache_salt)).encode(), beginning)
        self._private_from: int | None = None
        self._prefixes: list[PrefixView] = []
        self.num_pieces = 0

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def private_from(self) -> int:
        """Where its constant beginning ends: the texts before the first variable."""
        return len(self._token_ids) if self._private_from is None else self._private_from

    @property
    def prefixes(self) -> tuple[PrefixView, ...]:
        """One for each piece so far, Parrot's PrefixHash."""
        return tuple(self._prefixes)

    def token_ids(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(self._token_ids)

    def add(self, token_ids: Sequence[int], variable: str | None = None) -> None:
        """The next piece. variable: id of the one whose value it is; None: a constant text."""
        if variable is not None and self._private_from is None:
            self._private_from = len(self._token_ids)
            self._hash = _digest(self._hash + self._salt.encode(), ())
        self._token_ids += token_ids
        self._hash = _digest(self._hash, token_ids)
        place = PrefixView(offset=len(self._token_ids), hash=self._hash.hex(), after=variable)
        self._prefixes.append(place)
        self.num_pieces += 1


class Begun:
    """Which beginnings of prompts the engine has been asked for, in whole blocks.

    The latest ones: what was computed long ago is no longer there anyway.
    """

    def __init__(self, block_size: int, max_blocks: int = 50_000) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, token_ids: Sequence[int]) -> None:
        """The engine computes all of these."""
        for key in self._keys(token_ids):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def num_tokens(self, token_ids: Sequence[int]) -> int:
        """How many tokens from the start on it has been asked for."""
        count = 0
        for key in self._keys(token_ids):
            if key not in self._blocks:
                break
            count += self._block_size
        return count

    def _keys(self, token_ids: Sequence[int]) -> list[int]:
        """One for each whole block, of it and all blocks before."""
        keys, key = [], 0
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            key = hash((key, *token_ids[end - self._block_size : end]))
            keys.append(key)
        return keys


def _digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    data = before + array("q", token_ids).tobytes()
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
