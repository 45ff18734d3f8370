"""Incremental text is the text of all ids, and stop strings are found wherever the cuts are."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from bros.core.errors import ModelError
from bros.text.detokenizer import IncrementalDetokenizer, StopMatcher, TokenTable
from support.encoders import wordpiece
from support.tier import examples
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


# ---- Stop strings


def first_match(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """(text before the match, the match): the earliest end, then the longest."""
    for end in range(1, len(text) + 1):
        ending_here = [stop for stop in stops if text[:end].endswith(stop)]
        if ending_here:
            longest = max(ending_here, key=len)
            return text[: end - len(longest)], longest
    return text, None


def possible_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
    return max(n for n in range(len(text) + 1) if text[len(text) - n :] in beginnings)


letters = st.sampled_from("ab")
stop_lists = st.lists(st.text(letters, min_size=2, max_size=6), min_size=1, max_size=3)


@settings(max_examples=examples(150, long=3000))
@given(pieces=st.lists(st.text(letters, max_size=6), max_size=12), stops=stop_lists)
def test_matching_in_pieces_is_searching_the_whole(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, text, found = "", "", None
    for piece in pieces:
        text += piece
        emitted, found = matcher.push(piece)
        shown += emitted
        if found is not None:
            break
        assert shown == text[: len(text) - possible_beginning(text, stops)]
    if found is None:
        shown += matcher.finish()
    assert (shown, found) == first_match("".join(pieces), stops)


def test_of_stops_that_end_together_the_longest_is_taken_out() -> None:
    matcher = StopMatcher(["b", "aab", "ab"])
    assert matcher.push("xaa") == ("x", None)
    assert matcher.push("b tail") == ("", "aab")


def test_a_stop_that_ends_sooner_wins_over_one_that_began_sooner() -> None:
    matcher = StopMatcher(["abcdef", "cd"])
    assert matcher.push("abc") == ("", None)
    assert matcher.push("def") == ("ab", "cd")


@pytest.mark.parametrize(
    ("text", "stop", "before"),
    [("aaab", "aab", "a"), ("abababac", "ababac", "ab"), ("aabaabaaab", "aabaaa", "aab")],
)
def test_a_failed_beginning_may_contain_the_next(text: str, stop: str, before: str) -> None:
    matcher = StopMatcher([stop])
    found = [matcher.push(char) for char in text[: len(before + stop)]]
    assert "".join(emitted for emitted, _ in found) == before
    assert found[-1][1] == stop


def test_nothing_is_held_back_without_need() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("one\n") == ("one", None)
    assert matcher.push("two") == ("\ntwo", None)
    assert matcher.push("\n") == ("", None)
    assert matcher.finish() == "\n"


def test_without_stops_everything_passes() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.finish() == ""


def test_pieces_of_words_are_joined() -> None:
    """A WordPiece decoder also drops spaces before punctuation, which comes too late here."""
    backend = wordpiece()
    table = TokenTable(backend)
    ids = backend.encode("The river flows.", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(table)
    assert detokenizer.push(ids) + detokenizer.finish() == "the river flows ."
