"""Converts a GGUF file to a Hugging Face style folder. Does not import torch.

Weights of RAW_TYPES keep their quantized bytes, under name + suffix: the folder is as small as the
GGUF file, and --weights int4 does not round them a second time. All others are stored as fp32.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from safetensors import SafetensorError
from safetensors.numpy import save_file

from bros.core.errors import ModelError

Array = npt.NDArray[Any]

RAW_TYPES = {
    GGMLQuantizationType.Q4_0: ".q4_0",
    GGMLQuantizationType.Q4_1: ".q4_1",
    GGMLQuantizationType.Q8_0: ".q8_0",
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
}
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA3_SPLITS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "tekken",
)  # fmt: skip
"""Ways to split texts, as tokenizer.ggml.pre names them, where llama.cpp begins a text with BOS
unless the file says otherwise, and takes a word that is a token as it is, without merges."""
_DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b")
"""Ways to split texts that split digits off first."""
_GPT2_SPLITS = (
    "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0",
    "mellum", "mpt", "olmo", "jais", "trillion", "granite-docling",
)  # fmt: skip
"""Ways to split texts that equal GPT-2's."""
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_ROPE_FACTORS = "rope_freqs.weight"
_ROPE_SCALING = {
    "type": None,
    "factor": None,
    "finetuned": None,
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""What a file may say of rope scaling, and its name in config.json; None: it is read otherwise."""


def convert_gguf(path: Path, folder: Path, shard_bytes: int = 2**31) -> None:
    """Write config.json, generation_config.json, tokenizer files and weights into `folder`.

    shard_bytes: a new weights file is started once the current one has this many bytes.
    Raises ModelError if the file is damaged or its architecture is not supported, and OSError if a
    file cannot be written.
    """
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    try:
        config = _config(reader)
        eos = _field(reader, "tokenizer.ggml.eos_token_id")
        _write_json(folder / "config.json", config | {"eos_token_id": eos})
        _write_json(folder / "generation_config.json", {"eos_token_id": _eos_token_ids(reader)})
        _write_weights(folder, _weights(reader, config), shard_bytes)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    has_bos = _field(reader, "tokenizer.ggml.bos_token_id") is not None
    _write_tokenizer(path, folder, _field(reader, "tokenizer.ggml.pre"), has_bos=has_bos)
    for written in folder.iterdir():
        with open(written, "rb") as file:
            os.fsync(file.fileno())


def _field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    """The config.json that a Hugging Face checkpoint of this model would have."""
    kind = _field(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"GGUF architecture {kind!r} is not supported; supported are {known}")
    parts = _field(reader, "split.count", 0)
    if parts > 1:
        raise ModelError(f"this is one of {parts} parts of a model; merge them into one file first")
    if _field(reader, f"{kind}.expert_count"):
        raise ModelError("mixture-of-experts models are not supported")

    def required(key: str) -> Any:
        value = _field(reader, f"{kind}.{key}")
        if value is None:
            raise ModelError(f"the GGUF file has no {kind}.{key}")
        return value

    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError("the GGUF file has no token_embd.weight")
    heads = required("attention.head_count")
    hidden = required("embedding_length")
    head_dim = _field(reader, f"{kind}.attention.key_length", hidden // heads)
    if _field(reader, f"{kind}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError("GGUF models with partial rotary embedding are not supported")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": int(shapes["token_embd.weight"][1]),
        "max_position_embeddings": required("context_length"),
        "rms_norm_eps": required("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in shapes,
        "rope_parameters": _rope(reader, kind, head_dim),
        "hidden_act": "silu",
    }


def _rope(reader: GGUFReader, kind: str, head_dim: int) -> dict[str, Any]:
    theta = float(_field(reader, f"{kind}.rope.freq_base", 10000.0))
    base = {"rope_theta": theta, "rope_type": "default"}
    factors = next((t.data for t in reader.tensors if t.name == _ROPE_FACTORS), None)
    if factors is not None:
        return base | _llama3_parameters(theta, head_dim, factors)
    factor = float(_field(reader, f"{kind}.rope.scaling.factor", 0.0))
    factor = factor or float(_field(reader, f"{kind}.rope.scale_linear", 0.0))  # in old files
    # llama.cpp takes a factor without a type as a linear one, and leaves out a factor of 0.
    scaling = _field(reader, f"{kind}.rope.scaling.type", "linear")
    if scaling == "none" or (scaling == "linear" and not factor):
        return base
    if scaling not in ("linear", "yarn"):
        raise ModelError(f"GGUF rope scaling {scaling!r} is not supported")
    prefix = f"{kind}.rope.scaling."
    for key in reader.fields:
        if key.startswith(prefix) and (name := key.removeprefix(prefix)) not in _ROPE_SCALING:
            raise ModelError(f"GGUF rope scaling with {name} is not supported")
    entries = {
        entry: value
        for name, entry in _ROPE_SCALING.items()
        if entry and (value := _field(reader, prefix + name)) is not None
    }
    return base | entries | {"rope_type": scaling, "factor": factor or 1.0}


def _llama3_parameters(theta: float, head_dim: int, factors: Array) -> dict[str, Any]:
    """Llama 3 GGUFs store the divisor of each frequency instead of the formula's constants.

    All released models share the constants except `factor`, which is the largest divisor.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    inverse = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    keep = np.clip((original * inverse / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / (keep + (1.0 - keep) / factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{_ROPE_FACTORS} in the GGUF file is not Llama 3's; not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _eos_token_ids(reader: GGUFReader) -> list[int]:
    """End-of-sequence tokens: those that the file names, and the end of a tool call of Llama 3.1,
    which few files name."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = {int(found) for key in keys if (found := _field(reader, key)) is not None}
    tokens = _field(reader, "tokenizer.ggml.tokens", [])
    return sorted(ids | {tokens.index(end) for end in ("<|eom_id|>",) if end in tokens})


def _weights(reader: GGUFReader, config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """(name in the folder, array) for every tensor."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        stem, _, kind = tensor.name.rpartition(".")
        block = _BLOCK.fullmatch(stem)
        local = block[2] if block else stem
        known = (_BLOCK_TENSORS if block else _TENSORS).get(local)
        if known is None:
            raise ModelError(f"the GGUF file has a tensor {tensor.name}, which is not supported")
        name = f"model.layers.{block[1]}.{known}.{kind}" if block else f"{known}.{kind}"
        suffix = RAW_TYPES.get(tensor.tensor_type)
        try:
            data = tensor.data if suffix else dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            message = f"{tensor.name} has values of type {kind}, which is not supported"
            raise ModelError(message) from None
        if config["model_type"] == "llama" and local in heads:
            data = _unpermuted(data, heads[local])
        yield name + (suffix or ""), np.ascontiguousarray(data)


def _unpermuted(rows: Array, heads: int) -> Array:
    """Undo llama.cpp's reordering of Q and K rows, which puts rows i and i + d/2 side by side."""
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _write_weights(folder: Path, weights: Iterator[tuple[str, Array]], shard_bytes: int) -> None:
    """Write several files and an index, so that at most one shard is in memory at a time."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Array] = {}

    def flush() -> None:
        file_name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        try:
            save_file(shard, folder / file_name)
        except SafetensorError as error:  # whatever it is that the system said
            raise OSError(str(error)) from error
        weight_map.update(dict.fromkeys(shard, file_name))
        shard.clear()

    for name, array in weights:
        shard[name] = array
        if sum(held.nbytes for held in shard.values()) >= shard_bytes:
            flush()
    if shard:
        flush()
    _write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


@contextlib.contextmanager
def _without_triton() -> Iterator[None]:
    """Keep transformers from importing Triton, which would print a page of leak warnings when the
    server exits. The conversion does not need Triton."""
    absent = sys.modules.setdefault("triton", cast(ModuleType, None)) is None
    try:
        yield
    finally:
        if absent:
            del sys.modules["triton"]


def _write_tokenizer(path: Path, folder: Path, split: str | None, *, has_bos: bool) -> None:
    """split: how texts are split before they are tokenized, as the file names it."""
    with _without_triton():
        # Imported late: transformers takes seconds, and only valid GGUF files reach this point.
        from tokenizers import models, pre_tokenizers
        from transformers import AutoTokenizer

        # What the file says takes precedence.
        options = {"add_bos_token": True} if split in _LLAMA3_SPLITS and has_bos else {}
        try:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **options)
        except Exception as error:  # tokenizers raises nothing more specific
            raise ModelError(f"{path} has no usable tokenizer: {error!r}") from error
    backend = tokenizer.backend_tokenizer
    if split in _DIGIT_SPLITS:
        # transformers leaves this out and would split the line breaks in "\n\n1." in two.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and split not in _GPT2_SPLITS:
        # transformers does not know the split, and falls back to that of GPT-2. llama.cpp reads
        # files without one, too, and warns that the model will then write worse or nonsense.
        if split in (None, "default"):
            raise ModelError(
                f"{path} does not say how its tokenizer splits texts (tokenizer.ggml.pre), like "
                "files of llama.cpp before May 2024; take a newer file of the model, or add it: "
                "gguf-new-metadata --pre-tokenizer llama-bpe OLD NEW, where llama-bpe is that of "
                "Llama 3"
            )
        raise ModelError(
            f"{path} has a tokenizer that splits texts in a way that is not supported "
            f"(tokenizer.ggml.pre is {split!r})"
        )
    if split in _LLAMA3_SPLITS and isinstance(backend.model, models.BPE):
        backend.model.ignore_merges = True
    tokenizer.save_pretrained(folder)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), "utf-8")
