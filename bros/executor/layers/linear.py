"""Linear layers in the formats a CPU runs fast: packed fp32 (MKL), bf16, and int4.

A layer is called with fp32 activations [tokens, in_features] and returns fp32
[tokens, out_features], whatever precision its weights have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bros.executor.quantized import GROUP, Int4Groups
from bros.executor.weights import WeightSource

INT4_MAX_ROWS = 12
"""Above so many rows packed fp32 beats int4."""


class Linear(Protocol):
    """y = x @ weight.T + bias."""

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """Plain torch; weights of any floating type, bf16 computes in bf16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias).float()


class PackedLinear:
    """fp32 weights in MKL's packed layout, 1.3 to 4 times as fast as F.linear above one row.

    The packed copy replaces the weight: `_mkl_linear` reads the original only if its last
    argument differs from the row count, so a shape without memory stands in for it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), 512)
        self._shape = torch.zeros(1).expand(weight.shape)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkl._mkl_linear(
            x, self._packed, self._shape, self._bias, x.shape[0]
        )
        return out


class Int4Linear:
    """int4 weights for few rows, where reading weights is the cost; `wide` for more.

    Groups of 32 along the input share a scale and a zero point (bf16), activations are bf16.
    """

    def __init__(self, weight: Int4Groups, wide: Linear, bias: Tensor | None = None) -> None:
        codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        self._codes = codes
        # The kernel computes (code - 8) * scale + zero.
        zeros = weight.minimum + 8 * weight.scale
        self._scales_and_zeros = (
            torch.stack((weight.scale, zeros), dim=2).transpose(0, 1).contiguous().bfloat16()
        )
        self._wide = wide
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > INT4_MAX_ROWS:
            return self._wide(x)
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16(), self._codes, GROUP, self._scales_and_zeros
        ).float()
        return out if self._bias is None else out.add_(self._bias)


def make_linear(
    source: WeightSource,
    parts: Sequence[tuple[str, int]],
    columns: int,
    bias: Sequence[Tensor] | None,
    weights: str,
) -> Linear:
    """One layer from matrices stacked on top of each other.

    parts: (tensor name, rows) in order; columns: input features of all of them.
    weights: "fp32", "bf16" or "int4"; a shape that int4 cannot hold is kept in fp32.
    """
    stacked_bias = None if bias is None else torch.cat(list(bias))
    if weights == "int4" and columns % GROUP == 0 and sum(n for _, n in parts) % 16 == 0:
        groups = Int4Groups.concatenate([source.int4(name, (n, columns)) for name, n in parts])
        return Int4Linear(groups, _fp32(groups.dequantize(), stacked_bias), stacked_bias)
    weight = torch.cat([source.dense(name, (n, columns)) for name, n in parts])
    if weights == "bf16":
        return DenseLinear(weight.bfloat16(), stacked_bias)
    return _fp32(weight, stacked_bias)


def _fp32(weight: Tensor, bias: Tensor | None) -> Linear:
    """MKL's packed layout where this build of torch has MKL, plain fp32 elsewhere."""
    if torch._C.has_mkl:
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)
