"""Writes a transformers model as a GGUF file, the way llama.cpp's converter lays it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedConfig

SPACE, NEWLINE = "\u0120", "\u010a"
TOKENS = ["<|end|>", "<|start|>", SPACE, NEWLINE, 2 * SPACE, 2 * NEWLINE]
TOKENS += [chr(ord("!") + i) for i in range(90)]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, index, local = stem.split(".", 3)
    return f"blk.{index}.{BLOCK_NAMES[local]}.{kind}"


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Row order of Q and K in llama-type files: (i, i + d/2) side by side."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: Path,
    model: torch.nn.Module,
    config: PreTrainedConfig,
    kind: str,
    quantized: Type = Type.F32,
    extra: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    tokens: Sequence[str] = TOKENS,
    split: str | None = "smollm",
) -> None:
    """Write `model`; matrices are stored as `quantized`, and its own are rounded alike.

    extra: more fields, texts, flags or integers, tensors: more fp32 tensors.
    split: tokenizer.ggml.pre; None: the file has none.
    """
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges([f"{SPACE} {SPACE}", f"{NEWLINE} {NEWLINE}"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool}.get(type(value), writer.add_uint32)
        add(key, value)
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if kind == "llama" and ".q_proj." in name:
            array = permuted(array, config.num_attention_heads)
        if kind == "llama" and ".k_proj." in name:
            array = permuted(array, config.num_key_value_heads)
        stored = quantized if array.ndim == 2 else Type.F32
        raw = gguf.quantize(array, stored)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=stored)
        round_alike(parameter, name, stored)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def round_alike(parameter: torch.nn.Parameter, name: str, stored: Type) -> None:
    """Give the model the values the file holds; groups lie along rows, whatever their order."""
    rounded = gguf.dequantize(gguf.quantize(parameter.detach().numpy(), stored), stored)
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(rounded.copy()).view(parameter.shape))
