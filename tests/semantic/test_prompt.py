"""Prompts that are made of pieces: tokens, borders, hashes, and what was asked for before."""

from __future__ import annotations

import contextlib
import itertools
import os
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bros.core.clock import ManualClock
from bros.semantic.core.nodes import InputPiece, Piece, Variable
from bros.semantic.core.prompt import (
    PieceEncoder,
    PlannedPieces,
    Prompt,
    PromptSharing,
    RequestedPrefixes,
    SharedBeginning,
    SubmittedPieces,
    piece_keys,
)
from bros.semantic.core.template import Text
from bros.text.tokenizer import ChatTemplates, Tokenizer
from support.tiny_tokenizer import byte_level_backend, sentencepiece_backend, tiny_tokenizer

SHARING = PromptSharing(model="m", tenant="tenant", private_salt="session")

Part = tuple[tuple[int, ...], str | None]
tokens = st.lists(st.integers(0, 5), max_size=4).map(tuple)
parts = st.lists(st.tuples(tokens, st.sampled_from([None, "a", "b"])), max_size=6)
tenants = st.sampled_from(["", "x"])
private_salts = st.sampled_from([None, "", "x"])


blocks = st.lists(st.integers(0, 1), max_size=4)


def make_prompt(
    pieces: Sequence[Part],
    tenant: str = "",
    private_salt: str | None = "",
    beginning: Sequence[int] = (),
) -> Prompt:
    prompt = Prompt(PromptSharing("m", tenant, private_salt), beginning)
    for token_ids, variable in pieces:
        prompt.add(token_ids, variable)
    return prompt


def encoder_of(tokenizer: Tokenizer) -> PieceEncoder:
    return PieceEncoder(tokenizer, tokenizer.escape)


def sentencepiece_tokenizer() -> Tokenizer:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    templates = ChatTemplates({}, special, ManualClock())
    return Tokenizer(sentencepiece_backend(), special, templates)


@given(pieces=parts, beginning=tokens)
def test_a_prompt_is_its_pieces_and_each_has_a_border(
    pieces: list[Part], beginning: tuple[int, ...]
) -> None:
    prompt = make_prompt(pieces, beginning=beginning)

    joined = list(beginning)
    for (token_ids, variable), border in zip(pieces, prompt.prefixes, strict=True):
        joined += token_ids
        assert (border.offset, border.after) == (len(joined), variable)
    assert prompt.token_ids() == tuple(joined)
    assert prompt.num_tokens == len(joined)
    assert prompt.num_pieces == len(pieces)


@given(pieces=parts, beginning=tokens)
def test_everything_up_to_the_first_variable_is_shared(
    pieces: list[Part], beginning: tuple[int, ...]
) -> None:
    constant = len(beginning)
    for token_ids, variable in pieces:
        if variable is not None:
            break
        constant += len(token_ids)

    assert make_prompt(pieces, beginning=beginning).private_from == constant
    assert make_prompt(pieces, "", None, beginning).private_from is None


salts = st.tuples(tenants, private_salts)


@given(a=parts, b=parts, salts_a=salts, salts_b=salts)
def test_hashes_are_equal_where_the_same_may_be_shared(
    a: list[Part], b: list[Part], salts_a: tuple[str, str | None], salts_b: tuple[str, str | None]
) -> None:
    """Until the first variable only the tenant counts, after that the private salt does too."""
    one, other = make_prompt(a, *salts_a), make_prompt(b, *salts_b)

    for count, (border_a, border_b) in enumerate(
        zip(one.prefixes, other.prefixes, strict=False), 1
    ):
        pieces_a, pieces_b = a[:count], b[:count]
        inputs_a = [variable is not None for _, variable in pieces_a]
        inputs_b = [variable is not None for _, variable in pieces_b]
        same = [ids for ids, _ in pieces_a] == [ids for ids, _ in pieces_b]
        same &= salts_a[0] == salts_b[0]
        # A variable first at the same place, or nowhere.
        first_a = inputs_a.index(True) if any(inputs_a) else None
        first_b = inputs_b.index(True) if any(inputs_b) else None
        private_a = first_a is not None and salts_a[1] is not None
        private_b = first_b is not None and salts_b[1] is not None
        same &= private_a == private_b
        if private_a and private_b:
            same &= first_a == first_b and salts_a[1] == salts_b[1]
        assert (border_a.hash == border_b.hash) == same


def test_models_share_nothing() -> None:
    one, other = Prompt(PromptSharing("m", "", "")), Prompt(PromptSharing("n", "", ""))
    one.add((1, 2))
    other.add((1, 2))
    assert one.prefixes[0].hash != other.prefixes[0].hash


@pytest.mark.parametrize("make", [tiny_tokenizer, sentencepiece_tokenizer])
@given(
    texts=st.lists(st.text(alphabet="the st\nab.", min_size=1, max_size=8), min_size=1, max_size=5)
)
def test_pieces_together_say_what_the_texts_do(make: object, texts: list[str]) -> None:
    """In particular, no space comes in between with a tokenizer that begins texts with one."""
    tokenizer = make() if callable(make) else None
    assert isinstance(tokenizer, Tokenizer)
    encoder = encoder_of(tokenizer)
    token_ids = [
        token for i, text in enumerate(texts) for token in encoder.encode(text, first=i == 0)
    ]
    assert tokenizer.decode(token_ids) == "".join(texts)


def test_a_piece_has_the_same_tokens_everywhere_inside() -> None:
    encoder = encoder_of(sentencepiece_tokenizer())
    assert encoder.encode("the", first=False) != encoder.encode("the", first=True)


def test_texts_begin_with_bos_if_the_model_wants_one() -> None:
    backend = byte_level_backend()
    plain = encoder_of(tiny_tokenizer())
    assert plain.beginning == ()

    bos = backend.token_to_id("<|start|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", bos)]
    )
    special = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    wanted = Tokenizer(backend, special, ChatTemplates({}, special, ManualClock()))
    assert encoder_of(wanted).beginning == (bos,)
    assert bos not in encoder_of(wanted).encode("dog", first=True)


def test_remembered_texts_are_found_and_old_ones_evicted() -> None:
    encoder = encoder_of(tiny_tokenizer())
    encoder.cache("ann", "dog", (1, 2), first=True)
    assert encoder.cached("ann", "dog", first=True) == (1, 2)
    assert encoder.cached("ann", "dog", first=False) is None

    for number in range(9):
        encoder.cache("ann", str(number) * 500_000, (number,), first=False)
        encoder.cached("ann", "1" * 500_000, first=False)  # this one is in use
    assert encoder.cached("ann", "dog", first=True) is None
    assert encoder.cached("ann", "1" * 500_000, first=False) == (1,)
    assert encoder.cached("ann", "8" * 500_000, first=False) == (8,)


@given(
    asked=st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=6),
    prompt=st.lists(st.integers(0, 1), max_size=9),
    block=st.integers(1, 3),
)
def test_what_was_begun_is_the_longest_common_beginning_in_blocks(
    asked: list[list[int]], prompt: list[int], block: int
) -> None:
    requested = RequestedPrefixes(block)
    for token_ids in asked:
        requested.add(token_ids)

    longest = 0
    for token_ids in asked:
        for end in range(block, len(token_ids) + 1, block):
            if token_ids[:end] == prompt[:end]:
                longest = max(longest, end)
    assert requested.num_tokens(prompt) == longest


@given(st.lists(st.tuples(st.sampled_from(["add", "begin", "done", "failed"]), blocks)))
def test_a_prefill_that_failed_does_not_count(steps: list[tuple[str, list[int]]]) -> None:
    """What was submitted counts, and what is being prefilled."""
    requested = RequestedPrefixes(1)
    submitted: list[list[int]] = []
    ongoing: list[tuple[contextlib.ExitStack, Callable[[], None], list[int]]] = []
    for step, token_ids in steps:
        if step == "add":
            requested.add(token_ids)
            submitted.append(token_ids)
        elif step == "begin":
            prefill = contextlib.ExitStack()
            computed = prefill.enter_context(requested.prefilling(token_ids))
            ongoing.append((prefill, computed, token_ids))
        elif ongoing:
            prefill, computed, prefix = ongoing.pop(len(token_ids) % len(ongoing))
            if step == "done":
                computed()
                submitted.append(prefix)
            prefill.close()
        counting = [*submitted, *(prefix for *_, prefix in ongoing)]
        for _, asked in steps:
            longest = max(
                (len(os.path.commonprefix([asked, each])) for each in counting), default=0
            )
            assert requested.num_tokens(asked) == longest


def test_only_the_latest_beginnings_are_remembered() -> None:
    requested = RequestedPrefixes(2, max_blocks=3)
    requested.add([1, 2, 3, 4])
    requested.add([5, 6])
    assert requested.num_tokens([1, 2, 3, 4]) == 4
    requested.add([7, 8])
    assert requested.num_tokens([1, 2, 3, 4]) == 0
    assert requested.num_tokens([7, 8]) == 2


def pieces_of(text: str) -> list[Piece]:
    """A piece for each letter; capital ones are variables of these names."""
    return [InputPiece(c, c) if c.isupper() else Text(c) for c in text]


@given(
    asked=st.lists(st.text("ab", max_size=6), max_size=6),
    prompt=st.text("abX", max_size=6),
    lengths=st.lists(st.integers(0, 9), min_size=6, max_size=6),
)
def test_what_was_submitted_is_the_longest_common_beginning_in_pieces(
    asked: list[str], prompt: str, lengths: list[int]
) -> None:
    sharing, submitted = PromptSharing("m", "ann", None), SubmittedPieces()
    for text in asked:
        ends = list(itertools.accumulate(lengths[: len(text)]))
        submitted.add(piece_keys(sharing, pieces_of(text), {}), ends, capacity=1000)
    known = prompt.split("X")[0]  # its value is not known
    common = max((len(os.path.commonprefix([known, text])) for text in asked), default=0)
    keys = list(piece_keys(sharing, pieces_of(prompt), {"X": Variable("X", "")}))
    assert len(keys) == len(known)
    assert submitted.num_tokens(keys) == sum(lengths[:common])


def test_only_as_much_is_remembered_as_the_engines_can_cache() -> None:
    sharing, submitted = PromptSharing("m", "ann", None), SubmittedPieces()

    def keys(text: str) -> list[int]:
        return list(piece_keys(sharing, pieces_of(text), {}))

    submitted.add(keys("ab"), [6, 9], capacity=12)
    submitted.add(keys("ac"), [6, 9], capacity=12)
    assert submitted.num_tokens(keys("ab")) == submitted.num_tokens(keys("ac")) == 9
    submitted.add(keys("d"), [3], capacity=12)
    assert [submitted.num_tokens(keys(text)) for text in ("ab", "ac", "d")] == [6, 9, 3]
    submitted.add(keys("e"), [12], capacity=12)
    assert [submitted.num_tokens(keys(text)) for text in ("ab", "d", "e")] == [0, 0, 12]


def test_keys_tell_who_shares_the_kv() -> None:
    """All of a tenant share what comes before the first variable, also if the rest is private."""
    variable = Variable("X", "", text="x")

    def keys(tenant: str, salt: str | None) -> list[int]:
        sharing = PromptSharing("m", tenant, salt)
        return list(piece_keys(sharing, pieces_of("aXb"), {"X": variable}))

    open_ones, private, other = keys("ann", None), keys("ann", "s"), keys("bob", None)
    assert private[0] == open_ones[0] and not set(private[1:]) & set(open_ones)
    assert not set(other) & {*open_ones, *private}
    assert keys("ann", "s") == private


def test_calls_of_a_session_know_how_far_others_begin_like_them() -> None:
    """By what is known: the texts of values, and else which variable it is."""
    planned = PlannedPieces()
    first = planned.add(pieces_of("aXbYc"), {"X": "x"})
    assert first == SharedBeginning(earlier=0, any=0)
    same_value = planned.add(pieces_of("aZbYd"), {"Z": "x"})
    assert (same_value.earlier, same_value.any, first.any) == (4, 4, 4)
    other_value = planned.add(pieces_of("aXbYc"), {"X": "y"})
    assert (other_value.earlier, other_value.any, first.any) == (1, 1, 4)
    later = planned.add(pieces_of("aXbYcd"), {"X": "y"})
    assert (later.earlier, other_value.earlier, other_value.any) == (5, 1, 5)
    few = PlannedPieces(max_prefixes=2)
    few.add(pieces_of("ab"), {})
    few.add(pieces_of("cd"), {})
    assert few.add(pieces_of("ab"), {}).earlier == 0


def test_a_prompt_that_waits_takes_a_few_bytes_per_token() -> None:
    token_ids = tuple(range(100_000, 200_000))
    tracemalloc.start()
    try:
        prompt = Prompt(SHARING, [1])
        prompt.add(token_ids)
        prompt.add(token_ids, "v")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 6 * prompt.num_tokens
    assert prompt.token_ids() == (1, *token_ids, *token_ids)
