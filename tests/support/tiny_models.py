"""Random models small enough to run anywhere.

They are written without transformers, which takes a worker of the tests seconds to import.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 32, 64, 2, 4, 2


def save_tiny_llama(folder: Path, *, vocab_size: int = 128, seed: int = 0) -> None:
    """Write a two-layer Llama with grouped heads as safetensors, without a tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    kv_size = HIDDEN // HEADS * KV_HEADS
    matrices = {"model.embed_tokens": (vocab_size, HIDDEN), "lm_head": (vocab_size, HIDDEN)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        norms += [f"{block}.input_layernorm", f"{block}.post_attention_layernorm"]
        matrices |= {
            f"{block}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{block}.self_attn.k_proj": (kv_size, HIDDEN),
            f"{block}.self_attn.v_proj": (kv_size, HIDDEN),
            f"{block}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"{block}.mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            f"{block}.mlp.up_proj": (INTERMEDIATE, HIDDEN),
            f"{block}.mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.02
        for name, shape in matrices.items()
    }
    weights |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
