"""Conversion of GGUF files: the same logits as the model that was written, and the tokenizer."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoTokenizer, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from bros.core.config import EngineConfig
from bros.core.errors import ModelError
from bros.core.plan import StepPlan
from bros.executor.gguf import convert_gguf
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles
from bros.executor.runner import ModelRunner
from bros.text.tokenizer import Tokenizer
from support.checkpoints import ScatteredRequest, all_logits, save_checkpoint
from support.gguf_files import NEWLINE, SPACE, TOKENS, write_gguf
from support.kernel_cases import TILE_LEVELS, compiled_levels

SHAPE = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
TOKENS_IN = list(range(3, 50))


def written(tmp_path: Path, config: PreTrainedConfig, kind: str, **options: object) -> Path:
    """The GGUF file of a random model; transformers' logits are saved beside it."""
    model = save_checkpoint(tmp_path / "random", config)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, config, kind, **options)  # type: ignore[arg-type]
    torch.save(all_logits(model, TOKENS_IN), tmp_path / "logits.pt")
    return path


def converted(path: Path) -> Path:
    folder = path.parent / "converted"
    folder.mkdir()
    convert_gguf(path, folder)
    return folder


def load(folder: Path, weights: str = "fp32") -> ModelRunner:
    config = EngineConfig(kv_blocks=16, weights=weights, kv_dtype="fp32", threads=1)
    return load_executor(config, ModelFiles(folder, "tiny"))[0]


def last_logits(runner: ModelRunner) -> torch.Tensor:
    request = ScatteredRequest("a", TOKENS_IN, [3, 1, 7])
    plan = StepPlan(0, (request.next_chunk(len(TOKENS_IN), random.Random(0)),))
    return runner.logits(plan)[0]


def expected_logits(path: Path) -> torch.Tensor:
    logits: torch.Tensor = torch.load(path.parent / "logits.pt")
    return logits[-1]


@pytest.mark.parametrize("stored", [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q8_0])
def test_every_quantisation_gives_the_logits_of_its_own_values(
    tmp_path: Path, stored: Type
) -> None:
    path = written(tmp_path, LlamaConfig(**SHAPE), "llama", quantized=stored)
    logits = last_logits(load(converted(path)))
    torch.testing.assert_close(logits, expected_logits(path), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", LlamaConfig(**SHAPE, tie_word_embeddings=True)),
        ("llama", LlamaConfig(**SHAPE, attention_bias=True)),
        ("qwen2", Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"})),
        ("qwen3", Qwen3Config(**SHAPE | {"head_dim": 32}, tie_word_embeddings=True)),
    ],
    ids=["llama-tied", "llama-biases", "qwen2", "qwen3"],
)
def test_every_architecture_matches(tmp_path: Path, kind: str, config: PreTrainedConfig) -> None:
    if kind == "qwen2":
        config.head_dim = 16  # what the writer reads; Qwen2 derives it
    path = written(tmp_path, config, kind, quantized=Type.Q8_0)
    logits = last_logits(load(converted(path)))
    torch.testing.assert_close(logits, expected_logits(path), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tiles", [False, True], ids=["vectors", "tiles"])
@pytest.mark.parametrize(
    ("weights", "stored", "tolerance"),
    [("int4", Type.Q4_0, 0.1), ("int4", Type.Q4_1, 0.1), ("int8", Type.Q8_0, 1e-3)],
)
def test_stored_groups_are_not_rounded_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: str,
    stored: Type,
    tolerance: float,
    tiles: bool,
) -> None:
    """Rounding the groups again would give errors of about 1 with int4 and 0.05 with int8. Vectors
    multiply codes; tiles round all weights to bf16, which hides that of int8."""
    found = [level for level in compiled_levels() if (level in TILE_LEVELS) == tiles]
    if tiles and not found:
        pytest.skip("this CPU has no tiles")
    if found:
        from bros.kernels import cpu_ops

        monkeypatch.setattr(cpu_ops, "levels", lambda: found)
    if tiles:
        tolerance = 0.1
    path = written(tmp_path, LlamaConfig(**SHAPE), "llama", quantized=stored)
    error = last_logits(load(converted(path), weights)) - expected_logits(path)
    assert error.abs().max() < tolerance


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_divisors() -> np.ndarray:
    """rope_freqs.weight of a file with LLAMA3_ROPE and heads of 16."""
    inverse = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    keep = np.clip((8192 * inverse / (2 * np.pi) - 1) / 3, 0, 1)
    return (1 / (keep + (1 - keep) / 32)).astype(np.float32)


def test_llama3_rope_is_recognised_from_its_divisors(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)
    divisors = {"rope_freqs.weight": llama3_divisors()}
    folder = converted(written(tmp_path, config, "llama", tensors=divisors))
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == LLAMA3_ROPE
    torch.testing.assert_close(
        last_logits(load(folder)), expected_logits(tmp_path / "tiny.gguf"), atol=1e-4, rtol=0
    )


def test_unknown_rope_divisors_are_refused(tmp_path: Path) -> None:
    divisors = {"rope_freqs.weight": llama3_divisors()[::-1].copy()}
    path = written(tmp_path, LlamaConfig(**SHAPE), "llama", tensors=divisors)
    with pytest.raises(ModelError, match="not Llama 3's"):
        converted(path)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            {"scaling.type": "linear", "scaling.factor": 4, "scaling.original_context_length": 32},
            {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {
                **{"scaling.type": "yarn", "scaling.factor": 4, "scaling.yarn_beta_fast": 16},
                **{"scaling.original_context_length": 32, "scaling.finetuned": True},
            },
            {
                **{"rope_type": "yarn", "factor": 4.0, "beta_fast": 16},
                "original_max_position_embeddings": 32,
            },
        ),
        ({"scaling.factor": 4}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 2}, {"rope_type": "linear", "factor": 2.0}),
        ({"scaling.type": "none", "scaling.factor": 4}, {"rope_type": "default"}),
        ({"scaling.type": "linear"}, {"rope_type": "default"}),
    ],
)
def test_rope_scaling_is_that_of_llama_cpp(
    tmp_path: Path, extra: dict[str, str | int], expected: dict[str, str | float]
) -> None:
    fields = {f"llama.rope.{name}": value for name, value in extra.items()}
    folder = converted(written(tmp_path, LlamaConfig(**SHAPE), "llama", extra=fields))
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_theta": 10000.0} | expected


def test_tokenizer_template_and_eos_survive(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 5}
    folder = converted(written(tmp_path, LlamaConfig(**SHAPE), "llama", extra=extra))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|start|>ab\n\n12  3<|end|>"
    ids = tokenizer(text)["input_ids"]
    assert [TOKENS[index] for index in ids] == [
        *("<|start|>", "a", "b", 2 * NEWLINE, "1", "2", 2 * SPACE, "3", "<|end|>")
    ]
    assert tokenizer.decode(ids) == text
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [0, 5]}


@pytest.mark.parametrize(
    ("split", "extra", "tokens"),
    [
        ("llama-bpe", {}, ["<|start|>", "ab"]),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, ["ab"]),
        ("tekken", {}, ["<|start|>", "ab"]),
        ("gpt-2", {}, ["a", "b"]),
        ("mellum", {}, ["a", "b"]),  # one of the other names of the same split
        ("gpt-2", {"tokenizer.ggml.add_bos_token": True}, ["<|start|>", "a", "b"]),
    ],
)
def test_bos_and_words_that_no_merge_makes_are_those_of_llama_cpp(
    tmp_path: Path, split: str, extra: dict[str, bool], tokens: list[str]
) -> None:
    vocabulary = ["ab" if place == 9 else token for place, token in enumerate(TOKENS)]
    options = {"split": split, "extra": extra, "tokens": vocabulary}
    path = written(tmp_path, LlamaConfig(**SHAPE), "llama", **options)
    ids = Tokenizer.load(converted(path)).encode("ab")
    assert [vocabulary[index] for index in ids] == tokens


@pytest.mark.parametrize("split", ["smollm", "refact"])
def test_digits_are_split_off_first(tmp_path: Path, split: str) -> None:
    folder = converted(written(tmp_path, LlamaConfig(**SHAPE), "llama", split=split))
    ids = Tokenizer.load(folder).encode("a\n\n1")
    assert [TOKENS[index] for index in ids] == ["a", 2 * NEWLINE, "1"]


def test_ways_to_split_texts_that_are_not_known_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, LlamaConfig(**SHAPE), "llama", split="deepseek-llm")
    with pytest.raises(ModelError, match="splits texts in a way .*pre is 'deepseek-llm'"):
        converted(path)


@pytest.mark.parametrize("split", ["default", None])
def test_of_a_file_without_a_way_to_split_texts_is_said_how_to_add_it(
    tmp_path: Path, split: str | None
) -> None:
    path = written(tmp_path, LlamaConfig(**SHAPE), "llama", split=split)
    with pytest.raises(ModelError, match="does not say how .*gguf-new-metadata --pre-tokenizer"):
        converted(path)
    fixed, folder = tmp_path / "fixed.gguf", tmp_path / "converted-fixed"
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata"]
    command += ["--pre-tokenizer", "llama-bpe", "--force", str(path), str(fixed)]
    subprocess.run(command, check=True, capture_output=True)
    folder.mkdir()
    convert_gguf(fixed, folder)
    assert Tokenizer.load(folder).encode("a")


def test_the_end_of_a_tool_call_of_llama_is_an_end_token(tmp_path: Path) -> None:
    tokens = ["<|eom_id|>" if place == 9 else token for place, token in enumerate(TOKENS)]
    folder = converted(written(tmp_path, LlamaConfig(**SHAPE), "llama", tokens=tokens))
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [0, 9]}


def test_large_models_are_split_into_shards(tmp_path: Path) -> None:
    path = written(tmp_path, LlamaConfig(**SHAPE), "llama", quantized=Type.Q8_0)
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(path, folder, shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    torch.testing.assert_close(last_logits(load(folder)), expected_logits(path), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "extra", "message"),
    [
        ("gemma3", {}, "'gemma3' is not supported; supported are llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, "mixture-of-experts"),
        ("llama", {"llama.rope.dimension_count": 8}, "partial rotary embedding"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        (
            "llama",
            {"llama.rope.scaling.factor": 2, "llama.rope.scaling.attn_factor": 2},
            "rope scaling with attn_factor",
        ),
        ("llama", {"tokenizer.ggml.model": "rwkv"}, "no usable tokenizer"),
        ("llama", {"split.count": 2}, "this is one of 2 parts"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, kind: str, extra: dict[str, str | int], message: str
) -> None:
    path = written(tmp_path, LlamaConfig(**SHAPE), kind, extra=extra)
    with pytest.raises(ModelError, match=message):
        converted(path)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    strange = {"blk.0.ssm_conv1d.weight": np.zeros(4, np.float32)}
    path = written(tmp_path, LlamaConfig(**SHAPE), "llama", tensors=strange)
    with pytest.raises(ModelError, match="tensor blk.0.ssm_conv1d.weight"):
        converted(path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"not a model at all, but long enough to have a header")
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        converted(path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, LlamaConfig(**SHAPE), "llama")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        converted(path)


@pytest.mark.long
def test_a_conversion_leaves_triton_alone(tmp_path: Path) -> None:
    """Which transformers loads if it can, and then says a page when the process ends."""
    path = written(tmp_path, LlamaConfig(**SHAPE), "llama")
    folder = tmp_path / "converted"
    folder.mkdir()
    code = (
        "import sys; from pathlib import Path; from bros.executor.gguf import convert_gguf\n"
        f"convert_gguf(Path({str(path)!r}), Path({str(folder)!r}))\n"
        "assert 'transformers' in sys.modules and 'triton' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, "leaked" in done.stderr) == (0, False), done.stderr
