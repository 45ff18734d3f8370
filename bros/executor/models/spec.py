"""The architecture parameters of a decoder, read from a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bros.core.errors import ModelError

# ---- Rotary position embedding: its parameters from a config, and the table of cosines and sines.
#
#     angle(position, i) = position * inverse_frequency[i],   i < rotary_dim / 2
#
# Scaling variants change only the inverse frequencies (and, for yarn, the amplitude), so one table
# indexed by position serves all of them.


ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Parameters of one rotary embedding. Only scaled types use `factor` and the fields after it.

    original_max_positions: the context length before scaling, in tokens.
    attention_factor: factor of yarn and longrope on cosines and sines; None derives it from
        `factor`.
    short_factors, long_factors: divisors of longrope for each frequency, in tables for contexts of
        at most original_max_positions and in longer ones.
    """

    theta: float
    rotary_dim: int
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeSpec:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises ModelError for a type that is not one of ROPE_TYPES or lacks a parameter, and if
        both forms are there and `rope_scaling` says something else.
        """
        rope = _rope_entries(config)
        rope_type = rope.get("rope_type", "default")
        if rope_type == "su":  # its name in the first checkpoints of Phi-3
            rope_type = "longrope"
        if rope_type not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise ModelError(f"rope type {rope_type!r} is not supported; supported are {known}")
        original = rope.get("original_max_position_embeddings")
        factor = rope.get("factor")
        factors: dict[str, tuple[float, ...]] = {}
        if rope_type == "longrope":
            original = original or config.get("original_max_position_embeddings")
            for name in ("short_factor", "long_factor"):
                factors[f"{name}s"] = tuple(map(float, rope[name]))
        if factor is None and rope_type in ("yarn", "longrope") and original:
            factor = max_positions / original  # as transformers has it
        if rope_type != "default" and not factor:
            raise ModelError(f"rope type {rope_type!r} needs a factor in the model's config.json")
        if rope.get("mscale") or rope.get("truncate") is False:
            raise ModelError("yarn with mscale or without truncate is not supported")
        partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        attention_factor = rope.get("attention_factor")
        rotary_dim = int(head_dim * partial)
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise ModelError(
                f"rotary embedding of {rotary_dim} numbers of a head of {head_dim} is not supported"
            )
        if any(len(each) != rotary_dim // 2 for each in factors.values()):
            raise ModelError(f"longrope needs {rotary_dim // 2} factors, one for each frequency")
        return cls(
            theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rotary_dim=rotary_dim,
            rope_type=rope_type,
            factor=float(factor or 1.0),
            low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
            high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
            original_max_positions=int(original or max_positions),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            attention_factor=None if attention_factor is None else float(attention_factor),
            **factors,
        )

    def table(self, max_positions: int) -> Tensor:
        """fp32 [max_positions, rotary_dim]: cosines, then sines, rotary_dim / 2 of each."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        inverse = 1.0 / (self.theta**exponents)
        amplitude = 1.0
        if self.rope_type == "linear":
            inverse = inverse / self.factor
        elif self.rope_type == "llama3":
            inverse = self._llama3(inverse)
        elif self.rope_type == "yarn":
            inverse = self._yarn(inverse)
            amplitude = self._yarn_amplitude()
        elif self.rope_type == "longrope":
            is_long = max_positions > self.original_max_positions
            inverse = inverse / torch.tensor(self.long_factors if is_long else self.short_factors)
            amplitude = self._longrope_amplitude()
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse)
        return torch.cat((angles.cos(), angles.sin()), dim=1) * amplitude

    def _llama3(self, inverse: Tensor) -> Tensor:
        """Divide low frequencies by `factor`, keep high ones, interpolate linearly in between."""
        turns = self.original_max_positions * inverse / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return inverse * (keep + (1.0 - keep) / self.factor)

    def _yarn(self, inverse: Tensor) -> Tensor:
        """Keep dimensions that rotate often within the original context, divide the slow ones."""

        def dimension(turns: float) -> float:
            wavelength = self.original_max_positions / (turns * 2 * math.pi)
            return self.rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low = max(math.floor(dimension(self.beta_fast)), 0)
        high = min(math.ceil(dimension(self.beta_slow)), self.rotary_dim - 1)
        index = torch.arange(self.rotary_dim // 2, dtype=torch.float32)
        divided = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
        return inverse * (1.0 - divided + divided / self.factor)

    def _yarn_amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1.0 else 0.1 * math.log(self.factor) + 1.0

    def _longrope_amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_max_positions))


def _rope_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `rope_parameters`, or else of `rope_scaling`, with the newer name of the type.

    Raises ModelError if both are there and differ. Model cards say to add `rope_scaling` for long
    contexts; transformers would then ignore the other one and the theta in it.
    """
    rope, scaling = (dict(config.get(name) or {}) for name in ("rope_parameters", "rope_scaling"))
    for entries in (rope, scaling):
        if "type" in entries:
            entries.setdefault("rope_type", entries.pop("type"))
    if rope and not scaling.items() <= rope.items():
        raise ModelError(
            "the model's config.json has rope_parameters and a rope_scaling that differs; write "
            "all of it into rope_parameters"
        )
    rope = rope or scaling
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError("rope_parameters of their own for types of layers are not supported")
    return rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only model, with everything that build.py branches on.

    family: "llama" (RMSNorm, rotary, gated MLP) or "opt" (LayerNorm, learned positions, MLP).
    qkv_bias, out_bias, mlp_bias: which linears have a bias.
    qk_norm: RMSNorm per head on Q and K.
    pre_norm: normalize before attention and MLP (else after the residual sum).
    rope: None if positions are learned embeddings.
    position_offset: the row of the learned embeddings that holds position 0.
    sliding_window: how many tokens a query attends to, None if all; shorter contexts are exact.
    stacked: whether the checkpoint has Q, K and V in one tensor, and gate and up in another.
    factors: layer -> factor of its weight and bias, see AdaptedWeights.
    unrotated: layers of the decoder without rotary embedding.
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
    stacked: bool = False
    factors: Mapping[str, float] = field(default_factory=dict)
    unrotated: frozenset[int] = frozenset()

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
        config = {**_DEFAULTS.get(architecture, {}), **config}
        try:
            spec = ARCHITECTURES[architecture](architecture, config)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"the model's config.json is not usable: {error!r}") from error
        spec._check()
        return spec

    def _check(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise ModelError(f"the model's config.json is not usable: {name} is {value}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"the model's config.json is not usable: {self.num_heads} heads cannot share "
                f"{self.num_kv_heads} heads of keys and values"
            )


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "head_dim", "max_positions",
)  # fmt: skip


def _llama_like(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    num_heads = int(config["num_attention_heads"])
    hidden_size = int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    max_positions = int(config["max_position_embeddings"])
    rope = RopeSpec.from_config(config, head_dim, max_positions)
    if rope.rope_type == "yarn":
        # Some configurations, such as Qwen's, keep the length before scaling here.
        max_positions = max(max_positions, int(rope.factor * rope.original_max_positions))
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
        rope=rope,
        qkv_bias=bias or qwen2,
        out_bias=bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(architecture, config),
    )


def _phi3(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    return replace(_llama_like(architecture, config), stacked=True)


def _granite(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    """A Llama with four multipliers, which become part of its weights.

    Its residual sums are `embedding` times as large as here, where the embedding, which may be the
    lm_head as well, stays as it is. RMSNorm takes no notice but by its epsilon.
    """
    spec = _llama_like(architecture, config)
    embedding = float(config.get("embedding_multiplier", 1.0))
    residual = float(config.get("residual_multiplier", 1.0))
    attention = float(config.get("attention_multiplier", 1.0))
    logits = float(config.get("logits_scaling", 1.0))
    factors = {
        "q_proj": attention * spec.head_dim**0.5,  # attention divides by it
        "o_proj": residual / embedding,
        "down_proj": residual / embedding,
        "norm": 1.0 / logits,
    }
    return replace(spec, factors=factors, norm_eps=spec.norm_eps / embedding**2)


def _smollm3(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    spec = _llama_like(architecture, config)
    every = int(config.get("no_rope_layer_interval") or 4)
    rotated = config.get("no_rope_layers") or [
        int((layer + 1) % every != 0) for layer in range(spec.num_layers)
    ]
    unrotated = frozenset(layer for layer in range(spec.num_layers) if not rotated[layer])
    return replace(spec, unrotated=unrotated)


def _sliding_window(architecture: str, config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window")
    if window is None or architecture == "LlamaForCausalLM":
        return None
    optional = architecture.startswith(("Qwen", "SmolLM3"))
    if optional and not config.get("use_sliding_window", False):
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


_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5},
    "SmolLM3ForCausalLM": {
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
}
"""Architecture -> what entries mean that config.json leaves out, where it is not what they mean for
most architectures: the defaults of its class in transformers."""

ARCHITECTURES: Mapping[str, Callable[[str, Mapping[str, Any]], ModelSpec]] = {
    "LlamaForCausalLM": _llama_like,
    "MistralForCausalLM": _llama_like,
    "Qwen2ForCausalLM": _llama_like,
    "Qwen3ForCausalLM": _llama_like,
    "Phi3ForCausalLM": _phi3,
    "GraniteForCausalLM": _granite,
    "SmolLM3ForCausalLM": _smollm3,
    "OPTForCausalLM": _opt,
}
