"""What load_executor derives from a configuration, and what it refuses."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bros.core.config import EngineConfig
from bros.core.errors import ConfigError, ModelError
from bros.core.interfaces import EmbeddingInfo, EngineInfo
from bros.core.plan import Chunk, StepPlan, StepResult, SuspendedStep
from bros.core.request import Pooling
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles
from support.checkpoints import VOCAB, ScatteredRequest, all_logits, family_configs, save_checkpoint
from support.kernel_cases import reference_and_cpu

KV_BYTES_PER_BLOCK = 3 * 2 * 2 * 16 * 16 * 4
"""Layers, K and V, KV heads, slots, head_dim, bytes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, family_configs()["llama"])
    return tmp_path


def info_of(folder: Path, **options: Any) -> EngineInfo:
    runner, info = load_executor(EngineConfig(threads=1, **options), ModelFiles(folder, "tiny"))
    runner.close()
    return info


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def test_info_tells_what_was_resolved(folder: Path) -> None:
    info = info_of(
        folder,
        weights="fp32",
        kv_blocks=100,
        host_kv_blocks=9,
        kernels="reference",
        policy="fcfs",
        max_queue=7,
    )
    assert info == EngineInfo(
        model="tiny",
        weights="fp32",
        kernels="reference",
        kv_dtype="fp32",
        device="cpu",
        max_model_len=128,
        vocab_size=VOCAB,
        block_size=16,
        num_kv_blocks=100,
        num_host_kv_blocks=9,
        policy="fcfs",
        max_queue=7,
        eos_token_ids=(2,),
        embedding=EmbeddingInfo(pooling=Pooling.LAST, normalized=True, size=64),
    )


def test_end_tokens_outside_the_vocabulary_are_left_out(folder: Path) -> None:
    """A checkpoint may carry them; forbidding one would be an error in every step."""
    eos = json.dumps({"eos_token_id": [-1, 3, VOCAB, 10**6]})
    (folder / "generation_config.json").write_text(eos)
    assert info_of(folder, kv_blocks=100, kernels="reference").eos_token_ids == (3,)


@pytest.mark.parametrize(("kv_dtype", "shrink"), [("fp32", 1), ("bf16", 2), ("fp16", 2)])
def test_kv_memory_is_turned_into_blocks(folder: Path, kv_dtype: str, shrink: int) -> None:
    memory = 10 * KV_BYTES_PER_BLOCK + 5
    info = info_of(folder, kv_memory=f"{memory}B", kv_dtype=kv_dtype)
    assert info.num_kv_blocks == memory // (KV_BYTES_PER_BLOCK // shrink)


def test_kv_memory_too_small_for_a_block_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-memory: 1000 bytes are too few for one block"):
        info_of(folder, kv_memory="1000B")


@pytest.mark.parametrize("options", [{"kv_memory": "99999999TiB"}, {"kv_blocks": 10**12}])
def test_more_kv_memory_than_there_is_names_the_options(
    folder: Path, options: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="--kv-memory, --kv-blocks: this machine cannot allocate"):
        info_of(folder, **options)


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"host_kv_memory": f"{3 * KV_BYTES_PER_BLOCK + 5}B"}, 3),
        ({"host_kv_memory": f"{3 * KV_BYTES_PER_BLOCK}B", "kv_dtype": "bf16"}, 6),
        ({"host_kv_memory": "0"}, 0),
        ({"host_kv_memory": "5B"}, 0),
        ({"host_kv_blocks": 0}, 0),
        ({"host_kv_blocks": 7, "host_kv_memory": "1GiB"}, 7),
        ({"host_kv_blocks": 7, "on_pressure": "recompute"}, 0),
    ],
)
def test_memory_on_the_host_is_turned_into_blocks_or_none(
    folder: Path, options: dict[str, object], blocks: int
) -> None:
    options = {"kv_dtype": "fp32", **options}
    assert info_of(folder, kv_blocks=10, **options).num_host_kv_blocks == blocks


def test_more_memory_on_the_host_than_there_is_names_the_options(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="--host-kv-memory, --host-kv-blocks: this machine cannot allocate"
    ):
        info_of(folder, kv_blocks=10, host_kv_blocks=10**12)


def test_max_model_len_is_the_least_of_request_model_and_cache(folder: Path) -> None:
    assert info_of(folder, kv_blocks=100).max_model_len == 128
    assert info_of(folder, kv_blocks=100, max_model_len=50).max_model_len == 50
    assert info_of(folder, kv_blocks=3).max_model_len == 48
    assert info_of(folder, kv_blocks=3, max_model_len=48).max_model_len == 48
    with pytest.raises(ConfigError, match="--max-model-len: 100 tokens do not fit the KV cache"):
        info_of(folder, kv_blocks=3, max_model_len=100)
    with pytest.raises(ConfigError, match="--max-model-len: 129 is more than the 128 tokens"):
        info_of(folder, kv_blocks=100, max_model_len=129)


def test_eos_comes_from_generation_config_first(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[5, 9])
    assert info_of(folder, kv_blocks=1).eos_token_ids == (5, 9)
    edit_json(folder / "generation_config.json", eos_token_id=None)
    edit_json(folder / "config.json", eos_token_id=7)
    assert info_of(folder, kv_blocks=1).eos_token_ids == (7,)
    (folder / "generation_config.json").unlink()
    assert info_of(folder, kv_blocks=1).eos_token_ids == (7,)
    edit_json(folder / "config.json", eos_token_id=None)
    assert info_of(folder, kv_blocks=1).eos_token_ids == ()


@pytest.mark.parametrize("listed", [True, False])
def test_the_end_of_the_tokenizer_and_ends_of_turns_end_a_text_too(
    folder: Path, listed: bool
) -> None:
    """Checkpoints that were tuned for chats often name them nowhere else."""
    contents = {5: "<s>", 6: "</s>", 7: "<|im_end|>", 8: "<|eot_id|>", VOCAB + 1: "<|im_end|>"}
    added = [{"id": number, "content": content} for number, content in contents.items()]
    if listed:
        decoder = {str(each["id"]): {"content": each["content"]} for each in added}
        edit_json(folder / "tokenizer_config.json", added_tokens_decoder=decoder)
    else:
        edit_json(folder / "tokenizer.json", added_tokens=added)
    edit_json(folder / "config.json", eos_token_id=2)
    assert info_of(folder, kv_blocks=1).eos_token_ids == (2,)
    edit_json(folder / "tokenizer_config.json", eos_token={"content": "</s>"})
    assert info_of(folder, kv_blocks=1).eos_token_ids == (2, 6)
    edit_json(folder / "tokenizer_config.json", chat_template="{{ x }}<|im_end|>\n")
    assert info_of(folder, kv_blocks=1).eos_token_ids == (2, 6, 7)
    (folder / "chat_template.jinja").write_text("<|start|>{{ x }}<|eot_id|>")
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    assert info_of(folder, kv_blocks=1).eos_token_ids == (2, 6, 8)
    edit_json(folder / "generation_config.json", eos_token_id=[6, 3])
    assert info_of(folder, kv_blocks=1).eos_token_ids == (6, 3, 8)


def test_the_end_of_one_message_of_several_ends_no_text(folder: Path) -> None:
    """Where answers have channels, the analysis ends with a token that ends turns elsewhere."""
    edit_json(folder / "config.json", eos_token_id=2)
    added = {"5": {"content": "<|end|>"}, "6": {"content": "<|return|>"}}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=added)
    (folder / "chat_template.jinja").write_text("<|start|>{{ x }}<|end|>")
    assert info_of(folder, kv_blocks=1).eos_token_ids == (2, 5)
    (folder / "chat_template.jinja").write_text("<|start|><|channel|>{{ x }}<|end|>")
    assert info_of(folder, kv_blocks=1).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "</s>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": ["</s>"]}),
        ("tokenizer.json", {"added_tokens": [7]}),
        ("tokenizer.json", {"added_tokens": [{"id": 6}]}),
    ],
)
def test_tokens_of_another_form_are_a_model_error(
    folder: Path, name: str, entries: dict[str, object]
) -> None:
    edit_json(folder / "tokenizer_config.json", eos_token="</s>")
    edit_json(folder / name, **entries)
    with pytest.raises(ModelError, match="cannot be read"):
        info_of(folder, kv_blocks=1)


def test_a_chat_template_that_is_no_text_is_a_model_error(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"{{ x }}\xff")
    with pytest.raises(ModelError, match="cannot be read"):
        info_of(folder, kv_blocks=1)


def test_threads_are_set(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        load_executor(EngineConfig(threads=2, kv_blocks=1), ModelFiles(folder, "tiny"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_model_with_a_sliding_window_is_served_up_to_the_window(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As far as it is exact."""
    config = family_configs()["mistral"]
    config.sliding_window = 48
    model = save_checkpoint(tmp_path, config)
    with pytest.raises(ConfigError, match="--max-model-len: 49 is too long: .* last 48 tokens"):
        info_of(tmp_path, kv_blocks=8, max_model_len=49)
    options = EngineConfig(weights="fp32", kv_blocks=8, threads=1)
    runner, info = load_executor(options, ModelFiles(tmp_path, "tiny"))
    assert info.max_model_len == 48
    [record] = caplog.records
    assert "last 48 tokens only" in record.getMessage()
    tokens = list(range(48))
    request = ScatteredRequest("a", tokens, [1, 0, 2])
    logits = runner.logits(StepPlan(0, (request.next_chunk(48, random.Random(0)),)))
    torch.testing.assert_close(logits, all_logits(model, tokens)[-1:], atol=1e-4, rtol=0)


def test_execute_chooses_a_token_for_each_chunk_that_asks(folder: Path) -> None:
    runner, _ = load_executor(EngineConfig(kv_blocks=8, threads=1), ModelFiles(folder, "tiny"))
    rng = random.Random(0)
    requests = [ScatteredRequest(name, [3, 1, 4, 1, 5], [i]) for i, name in enumerate("abc")]
    chunks = [request.next_chunk(5, rng) for request in requests]
    silent = Chunk("b", 0, (9, 2), chunks[1].segments, chunks[1].slots[:2], None)
    plan = StepPlan(11, (chunks[0], silent, chunks[2]))
    result = runner.execute(plan)
    assert result is not None
    best = int(runner.logits(plan)[0].argmax())
    assert result.step == 11
    assert [(s.request_id, s.token_id) for s in result.samples] == [("a", best), ("c", best)]
    nothing = runner.execute(StepPlan(12, (silent,)))
    assert nothing is not None and nothing.samples == ()


@reference_and_cpu
def test_a_step_stopped_at_any_layer_can_be_run_again(folder: Path, kernels: str) -> None:
    """Between two steps of the same request, in another plan, with the same result."""
    options = EngineConfig(kv_blocks=8, threads=1, kernels=kernels)
    runner, _ = load_executor(options, ModelFiles(folder, "tiny"))
    rng = random.Random(0)
    request = ScatteredRequest("a", [3, 1, 4, 1, 5, 9, 2, 6], [2, 0])
    other = ScatteredRequest("b", [2, 7, 1, 8], [5])
    runner.execute(StepPlan(1, (request.next_chunk(4, rng),)))
    rest, beside = request.next_chunk(4, rng), other.next_chunk(4, rng)
    undisturbed = runner.logits(StepPlan(2, (rest, beside)))
    asked = 0

    def after(count: int) -> Callable[[], bool]:
        def should_abort() -> bool:
            nonlocal asked
            asked += 1
            return asked > count

        return should_abort

    for count in itertools.count():
        asked = 0
        result = runner.execute(StepPlan(3 + count, (rest, beside)), after(count))
        assert torch.equal(runner.logits(StepPlan(99, (rest, beside))), undisturbed)
        if isinstance(result, StepResult):
            break
        assert isinstance(result, SuspendedStep) and result.layer == count
        assert asked == count + 1
    assert count == len(runner._kv.layers) > 1, "asked before every layer"


def test_closing_twice_is_fine(folder: Path) -> None:
    runner, _ = load_executor(EngineConfig(kv_blocks=1, threads=1), ModelFiles(folder, "tiny"))
    runner.close()
    runner.close()
    with pytest.raises(AssertionError, match="the executor is closed"):
        runner.execute(StepPlan(1, ()))


def test_missing_or_broken_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json is not valid JSON"):
        info_of(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="does not hold a JSON object"):
        info_of(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="config.json cannot be read"):
        info_of(folder)


def test_broken_or_missing_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        info_of(folder)
    weights.unlink()
    with pytest.raises(ModelError, match="holds no \\*.safetensors"):
        info_of(folder)
    (folder / "model.safetensors.index.json").write_text('{"weights": {}}')
    with pytest.raises(ModelError, match="not a safetensors index"):
        info_of(folder)
    edit_json(folder / "model.safetensors.index.json", weight_map={"a": "gone.safetensors"})
    with pytest.raises(ModelError, match="gone.safetensors cannot be read"):
        info_of(folder)


def test_other_weights_beside_the_model_are_not_read(folder: Path) -> None:
    """Mistral's repositories have the same weights twice, under other names."""
    save_file({"layers.0.attention.wq.weight": torch.ones(1)}, folder / "consolidated.safetensors")
    assert info_of(folder).model == "tiny"


def test_weights_that_do_not_fit_the_config_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=48)
    with pytest.raises(ModelError, match=r"gate_proj.* has shape \[96, 64\].*\[48, 64\]"):
        info_of(folder)
    edit_json(folder / "config.json", intermediate_size=96, num_hidden_layers=4)
    with pytest.raises(ModelError, match="no tensor named model.layers.3"):
        info_of(folder)
    edit_json(folder / "config.json", num_hidden_layers=2)
    with pytest.raises(ModelError, match="9 tensors that LlamaForCausalLM.*does not use"):
        info_of(folder)
