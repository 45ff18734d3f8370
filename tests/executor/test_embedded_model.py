"""The model that ships with bros: real weights against transformers, in every precision."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoTokenizer
from transformers_reference import load_in_transformers

from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo
from bros.core.plan import StepPlan
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles, default_cache_dir, resolve_model
from bros.executor.models.layers import has_products
from bros.executor.runner import ModelRunner
from bros.executor.target import multiplies_bf16
from support.checkpoints import ScatteredRequest, all_logits

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France? Answer in three sentences:\n\n1."


@pytest.fixture(scope="module")
def embedded() -> ModelFiles:
    return resolve_model(None, default_cache_dir())


@pytest.fixture(scope="module")
def token_ids(embedded: ModelFiles) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(embedded.folder)
    messages = [{"role": "user", "content": QUESTION}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    return ids


@pytest.fixture(scope="module")
def expected(embedded: ModelFiles, token_ids: list[int]) -> torch.Tensor:
    return all_logits(load_in_transformers(embedded), token_ids)


def load(files: ModelFiles, weights: str) -> tuple[ModelRunner, EngineInfo]:
    return load_executor(EngineConfig(weights=weights, kv_blocks=32, threads=1), files)


def tensor_bytes(root: object) -> int:
    """Of all tensors that an object refers to, each counted once."""
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    found = [root]
    while found:
        thing = found.pop()
        if id(thing) in seen or isinstance(thing, str | bytes | type):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            sizes[thing.data_ptr()] = max(thing.nbytes, sizes.get(thing.data_ptr(), 0))
            continue
        if isinstance(thing, dict):
            found += thing.values()
        elif isinstance(thing, Sequence):
            found += thing
        found += getattr(thing, "__dict__", {}).values()
        slots = getattr(type(thing), "__slots__", ())
        found += [getattr(thing, name) for name in slots if hasattr(thing, name)]
    return sum(sizes.values())


@pytest.mark.parametrize(("weights", "most"), [("fp32", 560), ("bf16", 280), ("int4", 105)])
def test_one_copy_of_the_weights_is_in_memory(
    embedded: ModelFiles, weights: str, most: int
) -> None:
    """135 million weights with the tied embedding, and a rotary table of 0.1 MB.

    most: megabytes.
    """
    runner, info = load(embedded, weights)
    if not has_products(info.kernels):
        pytest.skip("torch multiplies weights in fp32 here")
    assert 0.9 * most < tensor_bytes(runner._decoder) / 1e6 < most


def stepwise_logits(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    """All but the last 20 tokens in one chunk, then those one by one; logits of these 21 steps."""
    rng = random.Random(0)
    request = ScatteredRequest("a", token_ids, rng.sample(range(32), 32))
    sizes = [len(token_ids) - 20] + [1] * 20
    chunks = (request.next_chunk(size, rng) for size in sizes)
    return torch.cat([runner.logits(StepPlan(i, (chunk,))) for i, chunk in enumerate(chunks)])


def test_info(embedded: ModelFiles) -> None:
    info = load(embedded, "auto")[1]
    weights = "bf16" if multiplies_bf16() else "fp32"
    assert (info.model, info.weights) == ("SmolLM2-135M-Instruct", weights)
    assert (info.vocab_size, info.eos_token_ids) == (49152, (2,))
    assert info.max_model_len == 32 * 16


@pytest.mark.parametrize(
    ("weights", "mean_error"), [("fp32", 1e-4), ("bf16", 0.2), ("int8", 0.1), ("int4", 0.3)]
)
def test_logits_match_transformers(
    embedded: ModelFiles,
    token_ids: list[int],
    expected: torch.Tensor,
    weights: str,
    mean_error: float,
) -> None:
    """Logits span about 35. Measured: fp32 2e-5, bf16 0.08, int4 0.13."""
    logits = stepwise_logits(load(embedded, weights)[0], token_ids)
    assert (logits - expected[-21:]).abs().mean() < mean_error
    agreeing = (logits.argmax(dim=1) == expected[-21:].argmax(dim=1)).sum()
    assert agreeing >= (21 if weights == "fp32" else 19)


def test_tokenizer_keeps_digits_and_line_breaks_apart(embedded: ModelFiles) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded.folder)
    ids = tokenizer("\n\n12  3<|im_end|>")["input_ids"]
    pieces = [tokenizer.decode([index]) for index in ids]
    assert pieces == ["\n\n", "1", "2", "  ", "3", "<|im_end|>"]
