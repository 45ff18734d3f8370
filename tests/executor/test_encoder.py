"""Encoders equal transformers', whatever texts are computed together."""

from __future__ import annotations

import json
import math
import random
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bros.core.config import EngineConfig
from bros.core.errors import ConfigError, ModelError
from bros.core.plan import Chunk, Readout, StepPlan, StepResult
from bros.core.request import Pooling
from bros.executor.encoder_runner import EncoderRunner, load_encoder
from bros.executor.loader import is_encoder, model_settings
from bros.executor.model_store import ModelFiles
from bros.executor.models.encoder import EncoderSpec, text_groups
from bros.executor.models.layers import has_products
from bros.executor.parallel.ranks import SingleRank
from bros.kernels.dispatch import compiled_kernels
from support.encoders import hidden_states, save_encoder, save_modules
from support.tier import examples

TOLERANCE = 1e-5


def load(folder: Path, **options: object) -> tuple[EncoderRunner, object]:
    config = EngineConfig(**{"threads": 1, "weights": "fp32", **options})  # type: ignore[arg-type]
    files = ModelFiles(folder, "tiny")
    assert is_encoder(files)
    return load_encoder(config, files)


def text(name: str, tokens: Sequence[int], pooling: Pooling, second: int | None = None) -> Chunk:
    ends = {Pooling.MEAN: (0, len(tokens)), Pooling.LAST: (len(tokens) - 1, len(tokens))}
    first, end = ends.get(pooling, (0, 1))
    readout = Readout(first, end, pooling=pooling, second_from=second)
    return Chunk(name, 0, list(tokens), array("i"), array("i", [0] * len(tokens)), None, readout)


def vectors(result: StepResult | None) -> dict[str, np.ndarray]:
    assert result is not None
    found = {}
    for read in result.readouts:
        assert read.pooled is not None and read.error is None
        values = np.frombuffer(read.pooled.values, np.float32)
        found[read.request_id] = values / read.pooled.count
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp("bert")
    return save_encoder(folder), folder


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@settings(max_examples=examples(25), deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=12), seed=st.integers(0, 2**16))
def test_any_texts_together_match_transformers(
    saved: tuple[torch.nn.Module, Path], kernels: str, lengths: list[int], seed: int
) -> None:
    model, folder = saved
    rng = random.Random(seed)
    runner, _ = load(folder, kernels=kernels)
    texts = [[rng.randrange(27) for _ in range(length)] for length in lengths]
    kinds = [rng.choice([Pooling.MEAN, Pooling.LAST, Pooling.FIRST]) for _ in texts]
    seconds = [rng.choice([None, rng.randrange(length)]) for length in lengths]
    chunks = [text(str(i), *each) for i, each in enumerate(zip(texts, kinds, seconds, strict=True))]
    found = vectors(runner.execute(StepPlan(1, tuple(chunks))))
    assert found.keys() == {str(i) for i in range(len(texts))}
    for index, tokens in enumerate(texts):
        states = hidden_states(model, tokens, seconds[index])  # type: ignore[arg-type]
        expected = {
            Pooling.MEAN: states.mean(0),
            Pooling.LAST: states[-1],
            Pooling.FIRST: states[0],
        }[kinds[index]]
        np.testing.assert_allclose(found[str(index)], expected.numpy(), atol=TOLERANCE, rtol=1e-5)


def test_linear_layers_are_our_own_products(saved: tuple[torch.nn.Module, Path]) -> None:
    compiled = compiled_kernels()
    own = compiled is not None and has_products(compiled.name)
    infos = [load(saved[1], kernels=kernels)[1] for kernels in ("auto", "reference")]
    names = [info.kernels for info in infos]  # type: ignore[attr-defined]
    assert names == [compiled.name if own else "torch", "torch"]


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_a_score_head_matches_transformers(tmp_path: Path, activation: str) -> None:
    model = save_encoder(tmp_path, scores=True, hidden_act=activation)
    runner, info = load(tmp_path)
    assert info.embedding.scores and info.poolings == {Pooling.SCORE}  # type: ignore[attr-defined]
    rng = random.Random(0)
    pairs = [([rng.randrange(27) for _ in range(n)], n // 2) for n in (5, 30, 30, 64)]
    chunks = [text(str(i), *p[:1], Pooling.SCORE, p[1]) for i, p in enumerate(pairs)]
    found = vectors(runner.execute(StepPlan(1, tuple(chunks))))
    for index, (tokens, second) in enumerate(pairs):
        types = torch.tensor([[int(i >= second) for i in range(len(tokens))]])
        with torch.inference_mode():
            expected = model(torch.tensor([tokens]), token_type_ids=types).logits[0]
        np.testing.assert_allclose(found[str(index)], expected.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_rounded_weights_stay_close(saved: tuple[torch.nn.Module, Path], weights: str) -> None:
    model, folder = saved
    tokens = list(range(20))
    found = vectors(load(folder, weights=weights)[0].execute(StepPlan(1, (
        text("a", tokens, Pooling.MEAN),
    ))))["a"]  # fmt: skip
    expected = hidden_states(model, tokens).mean(0).numpy()  # type: ignore[arg-type]
    assert 1e-6 < np.abs(found - expected).max() < 0.2


def test_a_step_can_be_aborted_before_any_layer(saved: tuple[torch.nn.Module, Path]) -> None:
    runner, _ = load(saved[1])
    plan = StepPlan(1, (text("a", [1, 2, 3], Pooling.MEAN),))
    for layer in range(3):
        asked: list[int] = []

        def stop(layer: int = layer, asked: list[int] = asked) -> bool:
            asked.append(1)
            return len(asked) > layer

        assert runner.execute(plan, stop) is None
        assert len(asked) == layer + 1
    assert runner.execute(plan, lambda: False) is not None
    runner.close()
    runner.close()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
@settings(max_examples=examples(40))
def test_every_token_is_in_one_group_once(lengths: list[int]) -> None:
    groups = text_groups(lengths, torch.device("cpu"))
    tokens = torch.cat([group.tokens for group in groups])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    for group in groups:
        texts, length = group.rows.shape
        real = texts * length if group.mask is None else int(group.mask.sum())
        assert real == len(group.tokens) and texts * length - real <= 31 * texts


@pytest.mark.parametrize(
    ("pooling", "normalize", "expected"),
    [
        ("cls_token", True, (Pooling.FIRST, True)),
        ("mean_tokens", False, (Pooling.MEAN, False)),
        ("lasttoken", True, (Pooling.LAST, True)),
    ],
)
def test_the_folder_says_how_to_pool(
    tmp_path: Path, pooling: str, normalize: bool, expected: tuple[Pooling, bool]
) -> None:
    save_encoder(tmp_path)
    save_modules(tmp_path, pooling, normalize=normalize, longest=32)
    _, info = load(tmp_path)
    found = info.embedding  # type: ignore[attr-defined]
    assert (found.pooling, found.normalized) == expected
    assert info.max_model_len == 32  # type: ignore[attr-defined]
    _, info = load(tmp_path, pooling="mean", max_model_len=64)
    assert info.embedding.pooling is Pooling.MEAN  # type: ignore[attr-defined]
    assert info.max_model_len == 64  # type: ignore[attr-defined]


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    save_modules(tmp_path, "max_tokens", normalize=True)
    with pytest.raises(ModelError, match="pooling_mode_max_tokens"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="max-model-len"):
        load(tmp_path, pooling="mean", max_model_len=65)

    class Two(SingleRank):
        size = 2

    files = ModelFiles(tmp_path, "tiny")
    with pytest.raises(ConfigError, match="--tp"):
        load_encoder(EngineConfig(), files, Two())  # type: ignore[arg-type]
    config = model_settings(files)
    for wrong in (
        {"hidden_act": "swish"},
        {"position_embedding_type": "relative_key"},
        {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}},
        {"hidden_size": None},
        {"num_attention_heads": 5},
        {"num_attention_heads": 0},
    ):
        with pytest.raises(ModelError):
            EncoderSpec.from_config({**config, **wrong})


def test_layers_that_the_configuration_leaves_out_are_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))
    with pytest.raises(ModelError, match=r"does not use, such as encoder\.layer\.2\.attention"):
        load(tmp_path)


def test_a_list_of_positions_in_the_checkpoint_is_no_layer(
    tmp_path: Path, saved: tuple[torch.nn.Module, Path]
) -> None:
    """Older versions of transformers save it."""
    shutil.copytree(saved[1], tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["embeddings.position_ids"] = torch.arange(64)[None]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path)


def test_norms_named_as_in_tensorflow_load(
    tmp_path: Path, saved: tuple[torch.nn.Module, Path]
) -> None:
    shutil.copytree(saved[1], tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): values
        for name, values in weights.items()
    }
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runs = [load(folder)[0] for folder in (saved[1], tmp_path)]
    plan = StepPlan(0, (text("a", [2, 5, 9, 3], Pooling.MEAN),))
    first, second = (vectors(run.execute(plan))["a"] for run in runs)  # type: ignore[attr-defined]
    assert np.array_equal(first, second)


def test_a_model_with_one_type_of_tokens_scores_pairs(tmp_path: Path) -> None:
    save_encoder(tmp_path, scores=True, type_vocab_size=1)
    runner, _ = load(tmp_path)
    plan = StepPlan(0, (text("a", [2, 5, 3, 9, 3], Pooling.SCORE, 3),))
    (score,) = vectors(runner.execute(plan))["a"]  # type: ignore[attr-defined]
    assert math.isfinite(score)


@pytest.mark.parametrize(
    ("name", "content"),
    [("modules.json", "{}"), ("pool", "[1]"), ("sentence_bert_config.json", "[1]")],
)
def test_steps_of_another_form_are_refused(tmp_path: Path, name: str, content: str) -> None:
    save_encoder(tmp_path)
    save_modules(tmp_path, "mean_tokens", normalize=True)
    path = tmp_path / ("1_Pooling/config.json" if name == "pool" else name)
    path.write_text(content.replace("{}", '{"a": 1}'))
    with pytest.raises(ModelError, match="list of steps|does not hold a JSON object"):
        load(tmp_path)
