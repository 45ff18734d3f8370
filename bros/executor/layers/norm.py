"""Normalisation layers, alone and fused with the residual sum before them."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from bros.kernels.interface import Kernels


class Norm(Protocol):
    """Normalises the last axis of [tokens, hidden]."""

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised x, in a new tensor."""
        ...

    def add_(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x in place; returns the normalised residual in a new tensor."""
        ...


class RmsNorm:
    """weight: fp32 [hidden]."""

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float) -> None:
        self._kernels = kernels
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add_(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._kernels.add_rms_norm_(residual, x, self._weight, self._eps)


class LayerNorm:
    """weight, bias: [hidden] in the dtype of activations, or None both."""

    def __init__(self, size: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self._shape = (size,)
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)

    def add_(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(residual.add_(x))
