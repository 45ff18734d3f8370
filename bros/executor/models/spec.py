"""What a decoder looks like, read from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bros.core.errors import ModelError
from bros.executor.models.rope import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of one decoder-only model; everything the decoder branches on when it is built.

    family: "llama" (RMSNorm, rotary, gated MLP) or "opt" (LayerNorm, learned positions, MLP).
    qkv_bias, out_bias, mlp_bias: which linears have a bias. qk_norm: RMSNorm per head on Q and K.
    pre_norm: normalise before attention and MLP (else after the residual sum).
    rope: None means positions are learned embeddings, `position_offset` rows into their table.
    sliding_window: tokens a query may look back, None if all; contexts up to it are exact.
    """

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: str
    tied: bool
    rope: RopeSpec | None = None
    position_offset: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    pre_norm: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    sliding_window: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Raises ModelError if the architecture or one of its variants is not supported."""
        names = config.get("architectures") or []
        architecture = names[0] if names else str(config.get("model_type"))
        if architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise ModelError(f"architecture {architecture!r} is not supported; supported: {known}")
        if config.get("quantization_config"):
            raise ModelError("checkpoints with a quantization_config are not supported")
        try:
            return ARCHITECTURES[architecture](architecture, config)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"the model's config.json is not usable: {error!r}") from error


def _llama_like(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    num_heads = int(config["num_attention_heads"])
    hidden_size = int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    max_positions = int(config["max_position_embeddings"])
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"activation {activation!r} is not supported for {architecture}")
    qwen2 = architecture == "Qwen2ForCausalLM"
    bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        family="llama",
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=activation,
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=RopeSpec.from_config(config, head_dim, max_positions),
        qkv_bias=bias or qwen2,
        out_bias=bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(architecture, config),
    )


def _sliding_window(architecture: str, config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window")
    if window is None or architecture == "LlamaForCausalLM":
        return None
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        return None
    return int(window)


def _opt(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    hidden_size = int(config["hidden_size"])
    num_heads = int(config["num_attention_heads"])
    if int(config.get("word_embed_proj_dim") or hidden_size) != hidden_size:
        raise ModelError("OPT with word_embed_proj_dim different from hidden_size is not supported")
    activation = config.get("activation_function", "relu")
    if activation not in ("relu", "gelu"):
        raise ModelError(f"activation {activation!r} is not supported for {architecture}")
    pre_norm = bool(config.get("do_layer_norm_before", True))
    bias = bool(config.get("enable_bias", True))
    return ModelSpec(
        architecture=architecture,
        family="opt",
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(config["ffn_dim"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_positions=int(config["max_position_embeddings"]),
        norm_eps=1e-5,
        activation=activation,
        tied=bool(config.get("tie_word_embeddings", True)),
        position_offset=2,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        pre_norm=pre_norm,
        final_norm=pre_norm and not config.get("_remove_final_layer_norm", False),
        norm_affine=bool(config.get("layer_norm_elementwise_affine", True)),
    )


ARCHITECTURES: Mapping[str, Callable[[str, Mapping[str, Any]], ModelSpec]] = {
    "LlamaForCausalLM": _llama_like,
    "MistralForCausalLM": _llama_like,
    "Qwen2ForCausalLM": _llama_like,
    "Qwen3ForCausalLM": _llama_like,
    "OPTForCausalLM": _opt,
}
