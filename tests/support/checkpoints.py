"""Random checkpoints of every supported family, and plans that run them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from bros.core.plan import Chunk, SampleSpec
from bros.core.request import SamplingParams
from bros.executor.models.spec import ModelSpec

VOCAB = 96
BLOCK = 16
GREEDY = SampleSpec(SamplingParams(temperature=0.0), seed=0)

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_SMALL_OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
}
_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}


def family_configs() -> dict[str, PreTrainedConfig]:
    """One small configuration per family and variant."""
    return {
        "llama": LlamaConfig(**_SMALL),
        "llama-tied": LlamaConfig(**_SMALL, tie_word_embeddings=True),
        "llama-biases": LlamaConfig(**_SMALL, attention_bias=True, mlp_bias=True),
        "llama-wide-heads": LlamaConfig(**_SMALL, head_dim=32),
        "llama-linear-rope": LlamaConfig(
            **_SMALL,
            rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        "llama-llama3-rope": LlamaConfig(**_SMALL, rope_parameters=_LLAMA3_ROPE),
        "llama-yarn-rope": LlamaConfig(**_SMALL, rope_parameters=_YARN_ROPE),
        "mistral": MistralConfig(**_SMALL, sliding_window=None),
        "qwen2": Qwen2Config(**_SMALL),
        "qwen3": Qwen3Config(**_SMALL, head_dim=32, tie_word_embeddings=True),
        "phi3": Phi3Config(**_SMALL, pad_token_id=0),
        "phi3-longrope": Phi3Config(
            **_SMALL | {"max_position_embeddings": 128},
            head_dim=16,
            pad_token_id=0,
            tie_word_embeddings=True,
            original_max_position_embeddings=32,
            rope_parameters=_LONGROPE,
        ),
        "granite": GraniteConfig(**_SMALL, **_MULTIPLIERS, tie_word_embeddings=True),
        "granite-biases": GraniteConfig(
            **_SMALL, **_MULTIPLIERS, attention_bias=True, mlp_bias=True
        ),
        "smollm3": SmolLM3Config(**_SMALL, no_rope_layers=[1, 0, 1], pad_token_id=0),
        "opt": OPTConfig(**_SMALL_OPT),
        "opt-post-norm": OPTConfig(**_SMALL_OPT, do_layer_norm_before=False),
        "opt-plain": OPTConfig(
            **_SMALL_OPT, enable_bias=False, layer_norm_elementwise_affine=False
        ),
    }


def family_specs() -> dict[str, ModelSpec]:
    """What the loader makes of them."""
    specs = {}
    for name, config in family_configs().items():
        architecture = type(config).__name__.replace("Config", "ForCausalLM")
        specs[name] = ModelSpec.from_config(config.to_dict() | {"architectures": [architecture]})
    return specs


def save_checkpoint(folder: Path, config: PreTrainedConfig, **saving: Any) -> torch.nn.Module:
    """Write a model with random weights to `folder` and return it, in eval mode.

    All parameters, biases and norms too, are far enough from their initial values that leaving
    one out would show.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
            else:
                parameter.uniform_(0.6, 1.4)
    model.save_pretrained(folder, **saving)
    return model


@torch.inference_mode()
def all_logits(model: torch.nn.Module, token_ids: Sequence[int]) -> Tensor:
    """transformers' logits [tokens, vocab] after every prefix."""
    return model(torch.tensor([list(token_ids)])).logits[0]


class ScatteredRequest:
    """A sequence whose KV lies in the given blocks, cut into chunks on demand."""

    def __init__(self, name: str, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        assert len(blocks) * BLOCK >= len(token_ids)
        self.name = name
        self.token_ids = token_ids
        self.computed = 0
        self._blocks = blocks

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.computed

    def next_chunk(self, size: int, rng: random.Random) -> Chunk:
        """The next `size` tokens, over segments in random order, some of them in two halves."""
        start, end = self.computed, self.computed + size
        self.computed = end
        slots = [self._blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, end)]
        segments: list[tuple[int, int, int]] = []
        for index in range(-(-start // BLOCK)):
            filled = min(BLOCK, start - index * BLOCK)
            cut = rng.randrange(filled + 1)
            halves = [(self._blocks[index], 0, cut), (self._blocks[index], cut, filled)]
            segments += [half for half in halves if half[1] < half[2]]
        rng.shuffle(segments)
        return Chunk(
            request_id=self.name,
            start=start,
            token_ids=tuple(self.token_ids[start:end]),
            segments=array("i", [value for segment in segments for value in segment]),
            slots=array("i", slots),
            sample=GREEDY,
        )
