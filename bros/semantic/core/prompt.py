"""Encodes a call piece by piece, so that prefixes end at the boundaries of variables.

    pieces    "Review "       {{code}}             " as "        {{role}}       ": " {{output:r}}
    tokens    BOS 71 902     | ids as generated   | 33          | encoded      | 8
    prefixes             h1 ─┘                h2 ─┘          h3 ─┘          h4 ─┘
      shared by the tenant ─┘ └─ likewise, or private to the session or its scope

The tokens of a piece do not depend on its neighbors, so calls with the same leading pieces have
the same leading tokens. h1, h2, ... are Parrot's PrefixHash: each one hashes the previous one and
the tokens of a piece.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bros.semantic.core.nodes import Piece, Variable
from bros.semantic.core.template import Text
from bros.semantic.schema import PrefixView
from bros.text.tokenizer import InnerTexts, Tokenizer

_CACHED_CHARS = 4_000_000
_HASH_BYTES = 16
_PRIVATE = b"private"


class PieceEncoder:
    """Encodes pieces of text, with an LRU cache for constant texts.

    Only `encode` may be called from several threads.
    """

    def __init__(self, tokenizer: Tokenizer, escape: Callable[[str], str]) -> None:
        """escape: of values, as ChatFormat.escape."""
        self._tokenizer = tokenizer
        self._escape = escape
        self._cached: OrderedDict[tuple[str, str, bool], tuple[int, ...]] = OrderedDict()
        self._num_chars = 0
        bos, empty = tokenizer.bos_token_id, tokenizer.encode("")
        self._beginning = (bos,) if bos is not None and empty[:1] == [bos] else ()
        self._inner = InnerTexts(tokenizer)

    @property
    def beginning(self) -> tuple[int, ...]:
        """The tokens before the first piece of a plain-text prompt: BOS if the model wants one."""
        return self._beginning

    def encode(
        self, text: str, *, first: bool, limit: int | None = None, value: bool = False
    ) -> tuple[int, ...]:
        """Encode a piece. first: whether it is the first one of its prompt. value: whether it is
        the value of a variable, in which special tokens are ordinary text.

        Raises PromptTooLongError if a long text certainly has more than `limit` tokens.
        """
        if value:
            text = self._escape(text)
        if not first:
            return tuple(self._inner.encode(text, limit=limit, escaped=True))
        return tuple(
            self._tokenizer.encode(text, add_special_tokens=False, limit=limit, escaped=True)
        )

    def cached(self, tenant: str, text: str, *, first: bool) -> tuple[int, ...] | None:
        """The cached tokens of a text of this tenant; None if it is not cached. What another tenant
        has cached would tell by its time that the other one has sent the text."""
        key = tenant, text, first
        token_ids = self._cached.get(key)
        if token_ids is not None:
            self._cached.move_to_end(key)
        return token_ids

    def cache(self, tenant: str, text: str, token_ids: tuple[int, ...], *, first: bool) -> None:
        """Cache the tokens of a text that is likely to recur."""
        key = tenant, text, first
        if key not in self._cached:
            self._num_chars += len(text)
        self._cached[key] = token_ids
        while self._num_chars > _CACHED_CHARS:
            (_, oldest, _), _ = self._cached.popitem(last=False)
            self._num_chars -= len(oldest)


@dataclass(frozen=True, slots=True)
class PromptSharing:
    """Determines which requests may share the KV of a prompt.

    model: name of the model.
    tenant: only requests of this tenant share it, see EngineRequest.kv_salt.
    private_salt: only requests with the same one share what comes after the constant prefix. None:
        all requests of the tenant do.
    """

    model: str
    tenant: str
    private_salt: str | None


class Prompt:
    """The tokens of one call so far: append-only, across all LLM calls of the call."""

    def __init__(self, sharing: PromptSharing, beginning: Sequence[int] = ()) -> None:
        """beginning: the tokens before the first piece."""
        self._token_ids = array("i", beginning)  # 4 bytes each: thousands of calls may wait
        self._salt = sharing.private_salt
        self._hash = _digest(repr((sharing.model, sharing.tenant)).encode(), beginning)
        self._constant: int | None = None
        self._prefixes: list[PrefixView] = []
        self.num_pieces = 0

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def private_from(self) -> int | None:
        """Number of tokens in the constant prefix, the texts before the first variable, if what
        follows it is private. None: all is shared."""
        if self._salt is None:
            return None
        return len(self._token_ids) if self._constant is None else self._constant

    @property
    def prefixes(self) -> tuple[PrefixView, ...]:
        """Parrot's PrefixHash at the end of each piece so far."""
        return tuple(self._prefixes)

    def token_ids(self) -> tuple[int, ...]:
        """A copy, which takes ten times as much memory; for as long as it is needed."""
        return tuple(self._token_ids)

    def add(self, token_ids: Sequence[int], variable: str | None = None) -> None:
        """Append a piece. variable: id of the variable whose value it is; None: constant text."""
        if variable is not None and self._constant is None:
            self._constant = len(self._token_ids)
            if self._salt is not None:
                self._hash = _digest(self._hash + self._salt.encode(), (), _PRIVATE)
        self._token_ids.extend(token_ids)
        self._hash = _digest(self._hash, token_ids)
        prefix = PrefixView(offset=len(self._token_ids), hash=self._hash.hex(), after=variable)
        self._prefixes.append(prefix)
        self.num_pieces += 1


class RequestedPrefixes:
    """The prompt prefixes that a session has submitted to the engine, in whole blocks.

    Only the latest `max_blocks` are kept: the engine evicts older prefixes anyway. A prefix that is
    being prefilled counts, so that it is not prefilled twice; if that fails, it does not count any
    more, as far as nothing else has submitted it.
    """

    def __init__(self, block_size: int, max_blocks: int = 50_000) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        # Key -> number of prefills that compute the block; None: it was submitted.
        self._blocks: OrderedDict[int, int | None] = OrderedDict()

    def add(self, token_ids: Sequence[int]) -> None:
        """Record that these tokens were submitted."""
        self._put(dict.fromkeys(self._keys(token_ids)))

    @contextlib.contextmanager
    def prefilling(self, token_ids: Sequence[int]) -> Iterator[Callable[[], None]]:
        """Record that these tokens are being prefilled during the block. What it yields must be
        called when they are computed; else they do not count any more."""
        keys = self._keys(token_ids)
        counts = {key: self._blocks.get(key, 0) for key in keys}
        self._put({key: None if n is None else n + 1 for key, n in counts.items()})
        try:
            yield lambda: self._put(dict.fromkeys(keys))
        finally:
            for key in keys:
                count = self._blocks.get(key)
                if count == 1:
                    del self._blocks[key]
                elif count is not None:
                    self._blocks[key] = count - 1

    def _put(self, blocks: Mapping[int, int | None]) -> None:
        for key, prefills in blocks.items():
            self._blocks[key] = prefills
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def num_tokens(self, token_ids: Sequence[int]) -> int:
        """Length of the longest prefix of these tokens that was submitted or is being prefilled."""
        count = 0
        for key in self._keys(token_ids):
            if key not in self._blocks:
                break
            count += self._block_size
        return count

    def _keys(self, token_ids: Sequence[int]) -> list[int]:
        """A key for each whole block, which hashes it and all blocks before it."""
        keys, key = [], 0
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            key = hash((key, *token_ids[end - self._block_size : end]))
            keys.append(key)
        return keys


class SubmittedPieces:
    """How long the prompt prefixes are that were submitted, by the texts of their pieces.

    It finds what is likely to be cached of a prompt that is not encoded yet. Prefixes that end
    inside a piece are not found. Only the latest ones are kept, as an engine keeps them.
    """

    def __init__(self, max_prefixes: int = 100_000) -> None:
        self._max_prefixes = max_prefixes
        self._own_tokens: OrderedDict[int, int] = OrderedDict()  # of the last piece, by key
        self._num_tokens = 0

    def add(self, keys: Iterable[int], lengths: Iterable[int], capacity: int) -> None:
        """A prompt was submitted.

        keys: see `piece_keys`. lengths: number of tokens up to the end of each piece.
        capacity: tokens that the engines can cache.
        """
        own = [after - before for before, after in itertools.pairwise((0, *lengths))]
        for key, tokens in reversed(list(zip(keys, own, strict=False))):
            # The end of a prompt comes first, so that it is forgotten before its beginning.
            self._num_tokens += tokens - self._own_tokens.get(key, 0)
            self._own_tokens[key] = tokens
            self._own_tokens.move_to_end(key)
        while self._num_tokens > capacity or len(self._own_tokens) > self._max_prefixes:
            self._num_tokens -= self._own_tokens.popitem(last=False)[1]

    def num_tokens(self, keys: Iterable[int]) -> int:
        """Length of the longest submitted prefix of these pieces."""
        count = 0
        for key in keys:
            tokens = self._own_tokens.get(key)
            if tokens is None:
                break
            count += tokens
        return count


@dataclass(slots=True)
class SharedBeginning:
    """How far the prompt of a call begins like those of other calls of its session, in pieces.

    earlier: calls that were submitted earlier, which compute it.
    any: any other calls.
    """

    earlier: int = 0
    any: int = 0


class PlannedPieces:
    """The prompts of a session's calls, by their pieces. Of calls that begin alike, the first one
    computes the beginning, and the others find it cached, whatever its values will be.

    Only the latest ones are kept.
    """

    def __init__(self, max_prefixes: int = 50_000) -> None:
        self._max_prefixes = max_prefixes
        self._first: OrderedDict[int, SharedBeginning] = OrderedDict()  # call, by key

    def add(self, pieces: Iterable[Piece], values: Mapping[str, str]) -> SharedBeginning:
        """A call is submitted. Later calls that begin like it change the result.

        values: variable id -> text, of values that are known.
        """
        shared, key, alike = SharedBeginning(), 0, True
        for count, piece in enumerate(pieces, 1):
            if isinstance(piece, Text):
                key = hash((key, piece.text))
            else:
                value = values.get(piece.variable_id)
                known = (piece.variable_id, None) if value is None else (None, value)
                key = hash((key, *known, piece.transforms))
            first = self._first.setdefault(key, shared)
            self._first.move_to_end(key)
            alike = alike and first is not shared
            if alike:
                shared.earlier = shared.any = count
                first.any = max(first.any, count)
        while len(self._first) > self._max_prefixes:
            self._first.popitem(last=False)
        return shared


def piece_keys(
    sharing: PromptSharing, pieces: Iterable[Piece], variables: Mapping[str, Variable]
) -> Iterator[int]:
    """A key for each piece of a prompt before the first value that is not known yet: a hash of its
    text, of all pieces before it, and of who shares their KV."""
    key, constant = hash((sharing.model, sharing.tenant)), True
    for piece in pieces:
        if isinstance(piece, Text):
            key = hash((key, piece.text))
        else:
            variable = variables.get(piece.variable_id)
            if variable is None or variable.text is None:
                return
            salt = sharing.private_salt if constant else None
            constant = False
            key = hash((key, salt, variable.text, piece.transforms))
        yield key


def _digest(before: bytes, token_ids: Sequence[int], kind: bytes = b"") -> bytes:
    """kind: what is hashed, so that a salt never has the hash of a piece."""
    data = before + array("q", token_ids).tobytes()
    return hashlib.blake2b(data, digest_size=_HASH_BYTES, person=kind).digest()
