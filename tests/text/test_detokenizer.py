"""Incremental text is the text of all ids, wherever the cuts are."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from bros.core.errors import ModelError
from bros.text.tokenizer import IncrementalDetokenizer, TokenTable
from support.encoders import wordpiece
from support.tiny_tokenizer import byte_level_backend, sentencepiece_backend

REPLACEMENT = "\ufffd"


def word_backend() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "hello": 1, "there": 2, "wörld": 3}
    return tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    steps = [decoders.Metaspace("▁", scheme), decoders.ByteFallback(), decoders.Fuse()]
    return sentencepiece_backend(decoders.Sequence(steps))


BACKENDS = {
    "byte level": byte_level_backend,
    "byte level in a sequence": lambda: _with_decoder(
        byte_level_backend(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    ),
    "llama": sentencepiece_backend,
    "gemma": lambda: sentencepiece_backend(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "strip two": lambda: sentencepiece_backend(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    ),
    "metaspace": lambda: metaspace("always"),
    "metaspace, first only": lambda: metaspace("first"),
    "metaspace, no prefix": lambda: metaspace("never"),
    "words": word_backend,
}


def _with_decoder(backend: tokenizers.Tokenizer, decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    backend.decoder = decoder
    return backend


@functools.cache
def backend_and_table(kind: str) -> tuple[tokenizers.Tokenizer, TokenTable]:
    backend = BACKENDS[kind]()
    return backend, TokenTable(backend)


def pushed(
    detokenizer: IncrementalDetokenizer, token_ids: Sequence[int], sizes: Sequence[int]
) -> str:
    """All the text, with the ids given in groups of these sizes and then one by one."""
    text, position = "", 0
    for size in [*sizes, *[1] * len(token_ids)]:
        text += detokenizer.push(token_ids[position : position + size])
        position += size
    return text + detokenizer.finish()


ids = st.lists(st.integers(0, 430), max_size=40)


@pytest.mark.parametrize("kind", BACKENDS)
@given(token_ids=ids, sizes=st.lists(st.integers(0, 7), max_size=8), skip=st.booleans())
def test_pieces_add_up_to_what_the_library_decodes(
    kind: str, token_ids: list[int], sizes: list[int], skip: bool
) -> None:
    backend, table = backend_and_table(kind)
    expected = backend.decode(token_ids, skip_special_tokens=skip)
    text = pushed(IncrementalDetokenizer(table, skip_special_tokens=skip), token_ids, sizes)
    if "byte level" in kind or REPLACEMENT not in expected:
        assert text == expected
    # Else the library replaced whole runs of byte tokens; what we do is tested below.
    assert text == pushed(IncrementalDetokenizer(table, skip_special_tokens=skip), token_ids, [])
    by_token = IncrementalDetokenizer(table, skip_special_tokens=skip)
    assert text == "".join(map(by_token.push_token, token_ids)) + by_token.finish()


@pytest.mark.parametrize("count", range(4))
def test_spaces_that_are_dropped_may_come_in_several_tokens(count: int) -> None:
    backend, table = backend_and_table("strip two")
    token_ids = [backend.token_to_id("▁")] * count + backend.encode("x").ids[-1:]
    detokenizer = IncrementalDetokenizer(table)
    assert "".join(map(detokenizer.push_token, token_ids)) == backend.decode(token_ids)


@pytest.mark.parametrize(("kind", "dropped"), [("byte level", ""), ("llama", " ")])
@given(text=st.text(alphabet=st.sampled_from("the st.é世😀👩\u200d\n~"), max_size=20))
def test_characters_appear_with_their_last_byte(kind: str, dropped: str, text: str) -> None:
    backend, table = backend_and_table(kind)
    detokenizer = IncrementalDetokenizer(table)
    token_ids = backend.encode(text).ids
    shown, data = "", b""
    for token_id in token_ids:
        shown += detokenizer.push([token_id])
        data += table.bytes_of(token_id)
        assert shown == data.decode("utf-8", "ignore").removeprefix(dropped)
    assert shown == text
    assert detokenizer.finish() == ""


def llama_bytes(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


def test_ill_formed_byte_tokens_do_not_spoil_their_neighbours() -> None:
    backend, table = backend_and_table("llama")
    token_ids = llama_bytes("é".encode() + b"\xe4\xb8" + "世".encode() + b"\xff!\xe4")
    detokenizer = IncrementalDetokenizer(table)
    assert [detokenizer.push([i]) for i in token_ids] == [
        *("", "é"),
        *("", ""),
        *(REPLACEMENT, "", "世"),  # E4 shows that the two bytes before it stay incomplete
        *(REPLACEMENT, "!", ""),
    ]
    assert detokenizer.finish() == REPLACEMENT
    assert backend.decode(token_ids) == REPLACEMENT * len(token_ids)


def test_ids_outside_the_vocabulary_are_nothing() -> None:
    _, table = backend_and_table("byte level")
    detokenizer = IncrementalDetokenizer(table)
    assert detokenizer.push([100_000, 10**9]) + detokenizer.finish() == ""


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteLevel()]),
        decoders.Replace(tokenizers.Regex("a+"), "b"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder: decoders.Decoder) -> None:
    with pytest.raises(ModelError, match="BPEDecoder|CTC|Strip|Replace|ByteLevel"):
        TokenTable(sentencepiece_backend(decoder))


def test_pieces_of_words_are_joined() -> None:
    """A WordPiece decoder also drops spaces before punctuation, which comes too late here."""
    backend = wordpiece()
    table = TokenTable(backend)
    ids = backend.encode("The river flows.", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(table)
    assert detokenizer.push(ids) + detokenizer.finish() == "the river flows ."
