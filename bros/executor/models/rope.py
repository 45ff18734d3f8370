"""Rotary position embedding: its parameters from a config, and the table of cosines and sines.

    angle(position, i) = position * inverse_frequency[i],   i < rotary_dim / 2

Scaling variants change only the inverse frequencies (and, for yarn, the amplitude), so all of
them end in one table indexed by position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bros.core.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Parameters of one rotary embedding. `factor` and what follows matter to scaled types only.

    original_max_positions: the context length before scaling, in tokens.
    attention_factor: yarn multiplies cosines and sines by it; None derives it from `factor`.
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

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeSpec:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises ModelError for a type that is not one of ROPE_TYPES or lacks a parameter.
        """
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise ModelError(f"rope type {rope_type!r} is not supported; supported are {known}")
        if rope_type != "default" and "factor" not in rope:
            raise ModelError(f"rope type {rope_type!r} needs a factor in the model's config.json")
        if rope.get("mscale") or rope.get("truncate") is False:
            raise ModelError("yarn with mscale or without truncate is not supported")
        partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        original = rope.get("original_max_position_embeddings") or max_positions
        attention_factor = rope.get("attention_factor")
        return cls(
            theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rotary_dim=int(head_dim * partial),
            rope_type=rope_type,
            factor=float(rope.get("factor") or 1.0),
            low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
            high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
            original_max_positions=int(original),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            attention_factor=None if attention_factor is None else float(attention_factor),
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
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse)
        return torch.cat((angles.cos(), angles.sin()), dim=1) * amplitude

    def _llama3(self, inverse: Tensor) -> Tensor:
        """Long wavelengths are divided by `factor`, short ones kept, a linear blend between."""
        turns = self.original_max_positions * inverse / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return inverse * (keep + (1.0 - keep) / self.factor)

    def _yarn(self, inverse: Tensor) -> Tensor:
        """Dimensions that turn often in the original context are kept, slow ones divided."""

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
