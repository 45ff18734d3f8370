"""Logits of every model family equal those of transformers, however the work is cut."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bros.core.config import EngineConfig
from bros.core.errors import ModelError
from bros.core.plan import StepPlan
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles
from bros.executor.runner import ModelRunner
from bros.executor.weights import Int4Groups
from support.checkpoints import (
    VOCAB,
    ScatteredRequest,
    all_logits,
    family_configs,
    save_checkpoint,
)
from support.tier import examples

FAMILIES = sorted(family_configs())
KV_BLOCKS = 32
TOLERANCE = 1e-4

Model = tuple[torch.nn.Module, Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Writes each family once per run."""
    models: dict[str, Model] = {}

    def save(family: str) -> Model:
        if family not in models:
            folder = tmp_path_factory.mktemp(family)
            models[family] = save_checkpoint(folder, family_configs()[family]), folder
        return models[family]

    return save


def load(
    folder: Path, weights: str = "fp32", kv_dtype: str = "fp32", max_model_len: int | None = None
) -> ModelRunner:
    config = EngineConfig(
        kv_blocks=KV_BLOCKS,
        weights=weights,
        kv_dtype=kv_dtype,
        threads=1,
        max_model_len=max_model_len,
    )
    return load_executor(config, ModelFiles(folder, "tiny"))[0]


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def largest_error(
    runner: ModelRunner, model: torch.nn.Module, lengths: Sequence[int], rng: random.Random
) -> float:
    """Run requests of these lengths in random chunks, packed at random; the worst logit error."""
    blocks = rng.sample(range(KV_BLOCKS), KV_BLOCKS)
    requests, expected = [], {}
    for index, length in enumerate(lengths):
        tokens = random_tokens(length, seed=index)
        own = [blocks.pop() for _ in range(-(-length // 16))]
        requests.append(ScatteredRequest(str(index), tokens, own))
        expected[str(index)] = all_logits(model, tokens)
    worst, step = 0.0, 0
    while open_requests := [request for request in requests if request.remaining]:
        packed = rng.sample(open_requests, rng.randint(1, len(open_requests)))
        # Decodes (one token) are as likely as longer chunks.
        sizes = [1 if rng.random() < 0.5 else rng.randint(1, r.remaining) for r in packed]
        chunks = [r.next_chunk(size, rng) for r, size in zip(packed, sizes, strict=True)]
        logits = runner.logits(StepPlan(step, tuple(chunks)))
        reference = torch.stack([expected[r.name][r.computed - 1] for r in packed])
        worst = max(worst, (logits - reference).abs().max().item())
        step += 1
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_one_chunk_matches_transformers(
    family: str, saved: Callable[[str], Model]
) -> None:
    model, folder = saved(family)
    tokens = random_tokens(60, seed=1)
    request = ScatteredRequest("a", tokens, [5, 2, 9, 0])
    logits = load(folder).logits(StepPlan(0, (request.next_chunk(60, random.Random(0)),)))
    torch.testing.assert_close(logits, all_logits(model, tokens)[-1:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_over_scattered_blocks_match_transformers(
    family: str, saved: Callable[[str], Model]
) -> None:
    model, folder = saved(family)
    # In longrope the reference takes other frequencies for short requests, see below.
    lengths = [40, 35, 33, 50] if family == "phi3-longrope" else [40, 17, 33, 5]
    assert largest_error(load(folder), model, lengths, random.Random(2)) < TOLERANCE


def test_a_server_of_short_contexts_takes_the_short_factors_of_longrope(
    saved: Callable[[str], Model],
) -> None:
    """transformers decides by the longest request of a batch, with keys of both kinds in the cache
    of one that grows; a server decides once, so that the same request gives the same tokens."""
    model, folder = saved("phi3-longrope")
    runner = load(folder, max_model_len=32)
    assert largest_error(runner, model, [30, 17, 5], random.Random(2)) < TOLERANCE
    assert largest_error(load(folder), model, [30], random.Random(2)) > TOLERANCE


@settings(max_examples=examples(15), deadline=None)
@given(
    family=st.sampled_from(["llama", "opt-post-norm", "qwen3", "granite", "smollm3"]),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_any_cut_into_chunks_matches_transformers(
    saved: Callable[[str], Model], family: str, lengths: list[int], seed: int
) -> None:
    model, folder = saved(family)
    assert largest_error(load(folder), model, lengths, random.Random(seed)) < TOLERANCE


@pytest.mark.parametrize(
    ("weights", "kv_dtype", "tolerance"),
    [("bf16", "fp32", 0.15), ("fp32", "bf16", 0.1), ("fp32", "fp16", 0.02)],
)
def test_less_precise_weights_and_caches_stay_close(
    saved: Callable[[str], Model], weights: str, kv_dtype: str, tolerance: float
) -> None:
    """Logits of these models have a standard deviation of about 1."""
    model, folder = saved("llama")
    runner = load(folder, weights, kv_dtype)
    error = largest_error(runner, model, [40, 17, 33], random.Random(3))
    assert TOLERANCE < error < tolerance


def test_int4_matches_a_model_with_its_linears_rounded_to_sixteen_steps(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, family_configs()["llama"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.copy_(Int4Groups.from_dense(parameter).dequantize())
    error = largest_error(load(tmp_path, "int4"), model, [40, 17, 33], random.Random(3))
    assert error < 0.15


def test_int4_few_and_many_rows_agree(saved: Callable[[str], Model]) -> None:
    """Attention sums a chunk in another order, and rounding activations can make more of it."""
    runner = load(saved("llama")[1], "int4")
    rng = random.Random(0)
    one = ScatteredRequest("one", random_tokens(20, seed=4), [0, 1])
    many = ScatteredRequest("many", one.token_ids, [2, 3])
    for step in range(20):
        stepwise = runner.logits(StepPlan(step, (one.next_chunk(1, rng),)))
    at_once = runner.logits(StepPlan(20, (many.next_chunk(20, rng),)))
    torch.testing.assert_close(stepwise, at_once, atol=0.05, rtol=0)


@pytest.mark.parametrize("family", ["phi3", "granite", "smollm3"])
def test_int4_of_adapted_weights(family: str, saved: Callable[[str], Model]) -> None:
    model, folder = saved(family)
    with torch.no_grad():
        rounded = {
            name: Int4Groups.from_dense(each).dequantize() if "proj" in name else each.clone()
            for name, each in model.named_parameters()
        }
    reference = copy.deepcopy(model)
    reference.load_state_dict(rounded, strict=False)
    error = largest_error(load(folder, "int4"), reference, [40, 17, 33], random.Random(3))
    assert error < 0.15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_checkpoints_in_half_precision_load(tmp_path: Path, dtype: torch.dtype) -> None:
    model = save_checkpoint(tmp_path / "fp32", family_configs()["llama"])
    model.to(dtype).save_pretrained(tmp_path / "half")  # type: ignore[operator]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32).eval()
    error = largest_error(load(tmp_path / "half"), expected, [30], random.Random(0))
    assert error < TOLERANCE


def test_sharded_checkpoint_matches(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, family_configs()["llama"], max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert largest_error(load(tmp_path), model, [30], random.Random(0)) < TOLERANCE


@pytest.mark.parametrize("differ", [False, True])
def test_a_head_of_its_own_counts_whatever_the_config_says(tmp_path: Path, differ: bool) -> None:
    """transformers decides it so since version 5."""
    config = family_configs()["llama"]
    config.tie_word_embeddings = False
    model = save_checkpoint(tmp_path, config)
    if not differ:
        model.lm_head.weight = model.model.embed_tokens.weight  # type: ignore[union-attr]
        weights = load_file(tmp_path / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change_config(tmp_path, tie_word_embeddings=True)
    assert largest_error(load(tmp_path), model, [30], random.Random(0)) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_checkpoint_of_the_model_without_its_head_loads(tmp_path: Path, family: str) -> None:
    config = family_configs()[family]
    config.tie_word_embeddings = True
    model = save_checkpoint(tmp_path / "whole", config)
    model.model.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    change_config(tmp_path, architectures=[type(model).__name__])
    assert largest_error(load(tmp_path), model, [30], random.Random(0)) < TOLERANCE


def change_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": null}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    save_checkpoint(tmp_path, family_configs()["llama"])
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="is not a safetensors index"):
        load(tmp_path)


@pytest.mark.parametrize("eos", ["x", [0, None], {}, True])
def test_an_end_token_that_is_none_is_refused(tmp_path: Path, eos: object) -> None:
    save_checkpoint(tmp_path, family_configs()["llama"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelError, match="eos_token_id"):
        load(tmp_path)
