"""Reading config.json: both spellings of rotary parameters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bros.core.errors import ModelError
from bros.executor.models.spec import ModelSpec, RopeSpec
from support.checkpoints import family_configs

LLAMA = family_configs()["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]}
OPT = family_configs()["opt"].to_dict() | {"architectures": ["OPTForCausalLM"]}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("rope_type", "parameters"),
    [
        ("linear", {"factor": 3.0}),
        ("llama3", LLAMA3),
        ("yarn", YARN),
        ("yarn", YARN | {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0}),
        ("yarn", YARN | {"factor": None}),
    ],
)
def test_rope_table_matches_transformers(rope_type: str, parameters: dict[str, Any]) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 500000.0} | parameters
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope
    )
    inverse, amplitude = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu")
    angles = torch.outer(torch.arange(3000.0), inverse)
    expected = torch.cat((angles.cos(), angles.sin()), dim=1) * amplitude
    table = RopeSpec.from_config(config.to_dict(), 128, 131072).table(3000)
    torch.testing.assert_close(table, expected, atol=1e-3, rtol=0)


def test_older_spelling_of_rope_parameters_means_the_same() -> None:
    new = RopeSpec.from_config(
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3}, 64, 131072
    )
    old = RopeSpec.from_config(
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, 64, 131072
    )
    oldest = RopeSpec.from_config(
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3}, 64, 131072
    )
    assert new == old == oldest
    assert RopeSpec.from_config({"rope_theta": 1e6, "rope_scaling": None}, 64, 128).theta == 1e6
    assert RopeSpec.from_config({}, 64, 128).theta == 10000.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        (LLAMA | {"architectures": []} | {"model_type": "mamba"}, "'mamba' is not supported"),
        (LLAMA | {"hidden_act": "gelu"}, "activation 'gelu'"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (LLAMA | {"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        (LLAMA | {"rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
        (
            LLAMA
            | {
                "rope_parameters": {
                    "rope_type": "su",
                    "factor": 2.0,
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                }
            },
            "longrope needs .* factors",
        ),
        (LLAMA | {"rope_parameters": {"rope_type": "linear"}}, "needs a factor"),
        (LLAMA | {"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "needs a factor"),
        (LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": None}}, "needs a factor"),
        (LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 3}, "4 heads cannot share 3"),
        (LLAMA | {"num_attention_heads": 0}, "config.json is not usable"),
        (
            LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            "config.json is not usable",
        ),
        (LLAMA | {"num_hidden_layers": 0}, "num_layers is 0"),
        (LLAMA | {"head_dim": 15}, "15 numbers of a head of 15"),
        (LLAMA | {"partial_rotary_factor": 1.5}, "24 numbers of a head of 16"),
        (LLAMA | {"vocab_size": -1}, "vocab_size is -1"),
        (LLAMA | {"hidden_size": None}, "config.json is not usable"),
        ({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, "num_hidden_layers"),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_parameters and a rope_scaling that differs",
        ),
        (
            LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "for types of layers",
        ),
        (OPT | {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        (OPT | {"activation_function": "tanh"}, "activation 'tanh'"),
    ],
)
def test_unsupported_configs_are_refused_in_clear_words(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_config(config)


def test_both_spellings_may_say_the_same() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3
    both = {"rope_parameters": rope, "rope_scaling": {"type": "llama3"} | LLAMA3}
    assert RopeSpec.from_config(both, 64, 131072) == RopeSpec.from_config(
        {"rope_parameters": rope}, 64, 131072
    )


@pytest.mark.parametrize(
    ("architecture", "config_class"),
    [
        ("LlamaForCausalLM", LlamaConfig),
        ("MistralForCausalLM", MistralConfig),
        ("Qwen2ForCausalLM", Qwen2Config),
        ("Qwen3ForCausalLM", Qwen3Config),
        ("Phi3ForCausalLM", Phi3Config),
        ("SmolLM3ForCausalLM", SmolLM3Config),
        ("GraniteForCausalLM", GraniteConfig),
    ],
)
def test_entries_that_are_left_out_mean_what_they_mean_in_transformers(
    architecture: str, config_class: type[PreTrainedConfig]
) -> None:
    required = (
        *("architectures", "vocab_size", "hidden_size", "intermediate_size"),
        *("num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    )
    complete = config_class().to_dict() | {"architectures": [architecture]}
    short = {name: complete[name] for name in required}
    assert ModelSpec.from_config(short) == ModelSpec.from_config(complete)


@pytest.mark.parametrize(("stated", "longest"), [(32768, 131072), (200_000, 200_000)])
def test_yarn_allows_what_it_is_for(stated: int, longest: int) -> None:
    """Qwen's models state the length before scaling."""
    scaled = {"rope_type": "yarn", "rope_theta": 1e6} | YARN
    config = LLAMA | {"max_position_embeddings": stated, "rope_parameters": scaled}
    assert ModelSpec.from_config(config).max_positions == longest


def test_sliding_window_counts_only_where_it_is_used() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    qwen2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    assert ModelSpec.from_config(mistral).sliding_window == 64
    assert ModelSpec.from_config(mistral | {"sliding_window": None}).sliding_window is None
    assert ModelSpec.from_config(qwen2 | {"use_sliding_window": False}).sliding_window is None
    assert ModelSpec.from_config(qwen2 | {"use_sliding_window": True}).sliding_window == 64
