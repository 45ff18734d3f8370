"""Incremental detokenization, and matching of stop strings."""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Collection, Sequence
from typing import Any

import tokenizers

from bros.core.errors import ModelError

CONTROL = "\ufdd1"
"""Comes before the text of a control token that a detokenizer shows. A code point that is no
character; texts of clients that have it get U+FFFD instead (`Tokenizer.escape`)."""


class TokenTable:
    """Maps token ids to bytes; shared by all detokenizers of one tokenizer.

    Text is the concatenation of these bytes decoded as UTF-8, with one U+FFFD for every ill-formed
    sequence. For byte-level BPE this equals the output of the `tokenizers` library. For
    SentencePiece byte fallback the two differ on ill-formed bytes only: the library then turns a
    whole run of byte tokens into U+FFFD, valid characters included, so a detokenizer could show no
    character of the run before its end.

    Raises ModelError for a decoder that does not work token by token.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, controls: Collection[int] = ()) -> None:
        """controls: tokens that are shown as CONTROL and their text, special or not."""
        self._tokenizer = tokenizer
        self._controls = frozenset(controls)
        self._special = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token_id not in self._controls
        )
        self._alphabet: dict[str, int] | None = None
        self._replacements: list[tuple[str, str]] = []
        self._byte_fallback = False
        self._metaspace: str | None = None
        self._separator = b""
        self._continuation: str | None = None
        self.strip_char, self.strip_count = "", 0
        self._read_decoder(tokenizer)
        # A cache without a lock: racing threads compute the same values.
        self._bytes: dict[int, bytes] = {}
        self.text_of = functools.cache(self._text_of)
        """(token id) -> the text of a token inside a text, "" for a special token; None if the
        token begins or ends within a character, so that its text depends on its neighbors."""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def first_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token at the start of a text, where some decoders drop a leading space.

        None for an id outside the vocabulary: the next token is then still the first one.
        """
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return None
        if token_id in self._controls:
            return (CONTROL + piece).encode()
        if self._metaspace is not None:
            return self._encode(piece.replace(self._metaspace, ""))
        return self._encode(piece)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token inside a text. Ids outside the vocabulary are empty."""
        found = self._bytes.get(token_id)
        if found is None:
            piece, mark = self._tokenizer.id_to_token(token_id), self._continuation
            if token_id in self._controls:
                found = (CONTROL + (piece or "")).encode()
            elif piece is None:
                found = b""
            elif mark is not None and piece.startswith(mark):
                found = self._encode(piece[len(mark) :])
            else:
                found = self._separator + self._encode(piece)
            self._bytes[token_id] = found
        return found

    def _text_of(self, token_id: int) -> str | None:
        try:
            return "" if token_id in self._special else self.bytes_of(token_id).decode("utf-8")
        except UnicodeDecodeError:
            return None

    def _encode(self, piece: str) -> bytes:
        if self._alphabet is not None:
            values = [self._alphabet.get(char, -1) for char in piece]
            return piece.encode() if -1 in values else bytes(values)
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        if self._byte_fallback and len(piece) == 6 and piece[:3] == "<0x" and piece[5] == ">":
            try:
                return bytes.fromhex(piece[3:5])
            except ValueError:
                return piece.encode()
        return piece.encode()

    def _read_decoder(self, tokenizer: tokenizers.Tokenizer) -> None:
        if tokenizer.decoder is None:
            self._separator = b" "
            return
        state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        fused = False
        for step in steps:
            if not self._read_step(step, fused):
                raise ModelError(
                    f"The tokenizer's decoder has a {step['type']} step that bros cannot "
                    f"apply token by token: {json.dumps(step, ensure_ascii=False)}"
                )
            fused = fused or step["type"] in ("Fuse", "ByteLevel")

    def _read_step(self, step: dict[str, Any], fused: bool) -> bool:
        """Read one step of the decoder; False if it cannot be applied token by token."""
        match step:
            case {"type": "Fuse"}:
                return True
            case {"type": "Strip", "content": str(char), "start": int(count), "stop": 0}:
                self.strip_char, self.strip_count = char, count
                return fused
            case {"type": "WordPiece", "prefix": str(prefix)}:
                # Its cleanup, which drops spaces before punctuation, would change earlier text.
                self._continuation, self._separator = prefix, b" "
                return not fused
            case {"type": "ByteLevel"}:
                self._alphabet = _byte_alphabet()
                return not (fused or self._replacements or self._byte_fallback)
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
                return not fused
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
                return not fused and not self._byte_fallback
            case {"type": "Metaspace", "replacement": str(mark)}:
                self._replacements.append((mark, " "))
                if step.get("prepend_scheme") != "never":
                    self._metaspace = mark
                return not fused
        return False


class IncrementalDetokenizer:
    """Turns token ids into text as they arrive. Text that it has returned never changes.

    The concatenated results of `push` and `finish` are the text of all ids. The cost of a token
    does not depend on the number of tokens before it.
    """

    __slots__ = ("_first", "_mid_text", "_skip_special", "_strip", "_table", "_utf8")

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool = True) -> None:
        self._table = table
        self._skip_special = skip_special_tokens
        self._mid_text = False
        """The text has begun and no incomplete character is held: text_of(id) is a token's text."""
        self._first = True
        self._strip = table.strip_count
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push_token(self, token_id: int) -> str:
        """`push` of one token."""
        text = self._table.text_of(token_id) if self._mid_text else None
        return self.push((token_id,)) if text is None else text

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete. The bytes of an incomplete character are held."""
        table = self._table
        pieces: list[bytes] = []
        for token_id in token_ids:
            if self._skip_special and table.is_special(token_id):
                continue
            if self._first:
                opening = table.first_bytes(token_id)
                pieces.append(opening or b"")
                self._first = opening is None
            else:
                pieces.append(table.bytes_of(token_id))
        text = self._stripped(self._utf8.decode(b"".join(pieces))) if pieces else ""
        held = self._utf8.getstate()[0]
        self._mid_text = not (held or self._first or self._strip) and self._skip_special
        return text

    def finish(self) -> str:
        """U+FFFD for an incomplete character at the end, else "". Call it once."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._table.strip_char):
                self._strip = 0
                break
            text = text[len(self._table.strip_char) :]
            self._strip -= 1
        return text


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The first match is the one that ends first; of several that end there, the longest. The result
    does not depend on how the text is cut. The matcher holds text only while it may be the
    beginning of a stop string.
    """

    __slots__ = ("_held", "_patterns")

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is certainly before any match, the matched stop string or None).

        Do not call `push` or `finish` after a match.
        """
        if not text:
            return "", None
        whole = self._held + text
        offset = len(self._held)
        end, found = len(whole) + 1, ""
        for pattern in self._patterns:
            position = pattern.advance(text)
            if position is not None and (offset + position, -len(pattern.text)) < (
                end,
                -len(found),
            ):
                end, found = offset + position, pattern.text
        if found:
            return whole[: end - len(found)], found
        keep = len(whole) - max((pattern.matched for pattern in self._patterns), default=0)
        self._held = whole[keep:]
        return whole[:keep], None

    def finish(self) -> str:
        """The held text, at the end of the output."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Knuth-Morris-Pratt. matched: characters of `text` that the input so far ends with."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = [0] * len(text)  # longest proper border of text[: i + 1]
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._borders[length - 1]
            length += text[i] == text[length]
            self._borders[i] = length

    def advance(self, text: str) -> int | None:
        """Consume `text`; returns the position in it right after the first full match, or None."""
        goal, matched, position = self.text, self.matched, 0
        while position < len(text):
            if matched == 0:
                position = text.find(goal[0], position)
                if position < 0:
                    break
                matched = 1
            else:
                while matched and text[position] != goal[matched]:
                    matched = self._borders[matched - 1]
                matched += text[position] == goal[matched]
            position += 1
            if matched == len(goal):
                return position
        self.matched = matched
        return None


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: a printable Latin-1 byte is written as itself, any other
    byte as the next unused character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet
