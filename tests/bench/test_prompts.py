"""Made-up and written prompts: exactly the planned tokens, as ids and as text."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bros.bench.plan import Piece
from bros.bench.prompts import Prompts
from bros.core.errors import ConfigError
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.text.tokenizer import Tokenizer
from support.bench_tokenizers import joining, llama_like
from support.tier import by_tier, examples
from support.tiny_tokenizer import tiny_tokenizer

TEXT = "Größe matters: 今日は、世界! Is  it 😀 true?\n\nYes — <|im_end|> of course, naïvely. " * 3


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.load(resolve_model(None, default_cache_dir()).folder)


@pytest.fixture(scope="module", params=["smollm", "joining", "llama_like"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "smollm":
        found: Tokenizer = request.getfixturevalue("smollm")
        return found
    return joining() if request.param == "joining" else llama_like()


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> Prompts:
    return Prompts(tokenizer, seed=5)


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


some_pieces = st.lists(
    st.builds(Piece, st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 80)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(20, long=500))
@given(pieces=some_pieces)
def test_ids_and_text_have_exactly_the_planned_tokens(
    tokenizer: Tokenizer, prompts: Prompts, pieces: list[Piece]
) -> None:
    prompt = prompts.render(pieces)
    assert len(prompt.token_ids) == sum(piece.tokens for piece in pieces)
    assert encoded(tokenizer, prompt.text) == prompt.token_ids


@given(shared=some_pieces, one=some_pieces, other=some_pieces)
def test_equal_leading_pieces_are_equal_leading_ids_and_text(
    prompts: Prompts, shared: list[Piece], one: list[Piece], other: list[Piece]
) -> None:
    first, second = prompts.render([*shared, *one]), prompts.render([*shared, *other])
    start = prompts.render(shared)
    for prompt in (first, second):
        assert prompt.token_ids[: len(start.token_ids)] == start.token_ids
        assert prompt.text.startswith(start.text)


@given(key=st.text(max_size=5), tokens=st.integers(1, 60), more=st.integers(0, 60))
def test_a_shorter_piece_is_the_beginning_of_a_longer_one(
    prompts: Prompts, key: str, tokens: int, more: int
) -> None:
    longer = prompts.render([Piece(key, tokens + more)])
    assert prompts.render([Piece(key, tokens)]).token_ids == longer.token_ids[:tokens]


def test_a_prompt_survives_a_template_that_trims(tokenizer: Tokenizer, prompts: Prompts) -> None:
    prompt = prompts.render([Piece("a", 30), Piece("b", 20)])
    assert prompt.text == prompt.text.strip()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
    assert len(ids) == 50 + prompts.added_tokens(chat=True)


def test_what_a_model_adds_around_a_text_is_counted() -> None:
    tokenizer = llama_like()
    prompts = Prompts(tokenizer, seed=1)
    assert prompts.added_tokens(chat=False) == 1
    assert len(tokenizer.encode(prompts.render([Piece("a", 9)]).text)) == 10
    assert Prompts(joining(), seed=1).added_tokens(chat=False) == 0


def test_words_that_are_joined_with_the_next_one_are_not_used() -> None:
    tokenizer = joining()
    assert len(encoded(tokenizer, "green lamp green river")) < 4
    words = set(Prompts(tokenizer, seed=1).render([Piece("a", 500)]).text.split())
    assert "green" not in words
    assert len(words) == 9


def test_the_cache_is_bounded_and_changes_nothing(smollm: Tokenizer) -> None:
    pieces = [Piece(f"k{number}", 100 + number) for number in range(20)]
    forgetful, roomy = Prompts(smollm, 3, cached_tokens=150), Prompts(smollm, 3)
    assert [forgetful.render([a, b]) for a in pieces for b in pieces[:3]] == [
        roomy.render([a, b]) for a in pieces for b in pieces[:3]
    ]


def test_other_keys_and_seeds_are_other_texts(smollm: Tokenizer) -> None:
    prompts, others = Prompts(smollm, 1), Prompts(smollm, 2)
    starts = {
        tuple(made.render([Piece(f"key {number}", 40)]).token_ids[:16])
        for made in (prompts, others)
        for number in range(500)
    }
    assert len(starts) == 1000


def test_texts_are_the_same_on_every_machine(smollm: Tokenizer) -> None:
    text = Prompts(smollm, 7).render([Piece("a", 300), Piece("b", 200)]).text
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "ee81285e1a9464c3a4cf8a42e9a0ef47e52703de2d69ca6f27e5ff04337725ae"
    )


def test_a_vocabulary_without_words_is_refused() -> None:
    with pytest.raises(ConfigError, match="are words with a leading space"):
        Prompts(tiny_tokenizer(), seed=1)


def test_written_text_is_sent_as_it_is(smollm: Tokenizer) -> None:
    tokens = len(encoded(smollm, TEXT))
    prompt = Prompts(smollm, 1, {"t": TEXT}).render([Piece("t", tokens)])
    assert prompt.text == TEXT
    assert prompt.token_ids == encoded(smollm, TEXT)


@pytest.fixture(scope="module")
def written(smollm: Tokenizer) -> tuple[Prompts, dict[str, str]]:
    """Prompts, and the texts they know, to be filled by the test."""
    texts: dict[str, str] = {}
    return Prompts(smollm, 1, texts), texts


@given(text=st.text(min_size=1, max_size=60), share=st.floats(0.01, 0.99))
def test_written_text_is_cut_to_exactly_the_planned_tokens(
    smollm: Tokenizer, written: tuple[Prompts, dict[str, str]], text: str, share: float
) -> None:
    prompts, texts = written
    texts["t"] = text
    whole = encoded(smollm, text)
    assume(whole)  # this tokenizer drops some control characters
    tokens = max(1, round(len(whole) * share))
    prompt = prompts.render([Piece("t", tokens)])
    assert len(prompt.token_ids) == tokens
    assert encoded(smollm, prompt.text) == prompt.token_ids


@pytest.mark.parametrize("tokens", range(1, 100, by_tier(fast=24, long=1)))
def test_most_of_a_text_that_is_cut_stays(smollm: Tokenizer, tokens: int) -> None:
    prompt = Prompts(smollm, 1, {"t": TEXT}).render([Piece("t", tokens)])
    assert encoded(smollm, prompt.text) == prompt.token_ids
    kept = sum(a == b for a, b in zip(prompt.token_ids, encoded(smollm, TEXT), strict=False))
    assert kept >= tokens - 8


def test_written_text_that_is_too_short_or_not_alone_is_an_error(smollm: Tokenizer) -> None:
    prompts = Prompts(smollm, 1, {"t": TEXT})
    with pytest.raises(ConfigError, match="counted with another tokenizer"):
        prompts.render([Piece("t", 10_000)])
    with pytest.raises(ValueError, match="unpack"):
        prompts.render([Piece("t", 5), Piece("a", 5)])


@pytest.mark.multiprocess
def test_a_client_imports_no_torch() -> None:
    script = (
        "import sys, bros.bench.prompts, bros.bench.workloads.catalogue;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=60)
