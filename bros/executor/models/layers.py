"""Linear layers, embeddings and norms: packed weights on a CPU, plain matrices on a GPU.

A linear layer maps activations [tokens, in_features] to [tokens, out_features]. On a CPU both are
fp32, whatever the precision of the weights; on a GPU they have the weights' dtype. On a CPU our own
kernels multiply packed weights (PanelLinear); where `has_products` finds none, torch multiplies
plain matrices in fp32 (PlainLinear).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bros.executor.target import Target
from bros.executor.weights import Int4Groups, Weights
from bros.kernels.interface import Kernels, Product, Products, RowProducts
from bros.kernels.panels import GROUP, Panels, int8_groups


class Linear(Protocol):
    """y = x @ weight.T + bias."""

    def __call__(self, x: Tensor) -> Tensor: ...


class NativeLinear:
    """A product in the weights' dtype; activations of another dtype are converted first."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, row_products: RowProducts | None = None
    ) -> None:
        """row_products: see Kernels."""
        self._weight = weight
        self._bias = bias
        self._row_products = row_products if bias is None else None

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._weight.dtype)
        if self._row_products is not None:
            out = self._row_products(x, self._weight)
            if out is not None:
                return out
        return F.linear(x, self._weight, self._bias)

    def gated(self, x: Tensor) -> Tensor | None:
        """See RowProducts.gated. None as well if there are no such products."""
        if self._row_products is None:
            return None
        return self._row_products.gated(x.to(self._weight.dtype), self._weight)


class PlainLinear:
    """F.linear with fp32 results: for logits on a GPU, and for all layers on a CPU without
    products."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        out = fp32_product(x.to(self._weight.dtype), self._weight)
        return out if self._bias is None else out.add_(self._bias)


def fp32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in fp32, for two matrices of one dtype.

    On CUDA the fp32 sums of 16-bit products are returned unrounded. A CPU rounds them to 16 bits:
    bf16 logits above 8 are then multiples of 1/16, and many of the best are equal.
    """
    if x.is_cuda and weight.dtype != torch.float32 and len(x):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight).float()


class PanelLinear:
    """Weights of any format in panels; a row of the result does not depend on the other rows."""

    def __init__(self, products: Products, weight: Panels, bias: Tensor | None = None) -> None:
        self._products = products
        self.product = Product(weight, None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        return self._products.linear(x, *self.product)


def make_linear(
    source: Weights,
    parts: Sequence[tuple[str, int]],
    columns: int,
    bias: Sequence[Tensor] | None,
    target: Target,
    products: Products | None = None,
    row_products: RowProducts | None = None,
) -> Linear:
    """One layer from matrices concatenated along their rows.

    parts: (tensor name, rows) in order; columns: input features of all of them.
    products, row_products: see Kernels.
    With int8 weights, a layer whose matrices are all stored in 4 bits keeps these: 8 bits would
    round them again.
    With int8 or int4 weights, a shape that these do not support is kept in bf16. Without products,
    a CPU holds the same values in fp32, which takes the memory of fp32.
    """
    stacked_bias = None if bias is None else torch.cat(list(bias))
    if not target.packed:
        weight = load_matrix(source, parts, columns, target)
        return NativeLinear(weight, stacked_bias, row_products)
    in_4_bits = target.weights == "int4" or (
        target.weights == "int8" and all(source.is_stored_in_4_bits(name) for name, _ in parts)
    )
    if in_4_bits and columns % GROUP == 0:
        groups = Int4Groups.concatenate([source.int4(name, (n, columns)) for name, n in parts])
        if products is None:
            return dense_linear(groups.dequantize(), stacked_bias)
        layout = products.panel_layout
        panels = Panels.int4(groups.codes, groups.scale, groups.minimum, layout)
        return PanelLinear(products, panels, stacked_bias)
    weight = torch.cat([source.dense(name, (n, columns)) for name, n in parts])
    if target.weights == "int8" and columns % GROUP == 0:
        return _int8_linear(weight, stacked_bias, products)
    weight = weight if target.weights == "fp32" else weight.bfloat16()
    return dense_linear(weight, stacked_bias, products)


def vocabulary_panels(weight: Tensor, target: Target, products: Products) -> Panels:
    """The lm_head on a CPU, or a tied embedding. weight: fp32 [vocab, hidden].

    Never int4: rounding the lm_head changes logits more than rounding any other layer. With int8 or
    int4 weights it has int8 groups.
    """
    layout = products.panel_layout
    if target.weights == "fp32":
        return Panels.fp32(weight, layout)
    if target.weights == "bf16" or weight.shape[1] % GROUP:
        return Panels.bf16(weight, layout)
    return Panels.int8(weight, layout)


def make_lm_head(weight: Tensor, target: Target) -> Linear:
    """The layer of logits on a CPU without products. weight: fp32 [vocab, hidden].

    Weights are rounded to bf16 with int4, and else as `vocabulary_panels` does. Logits are not
    rounded: in bf16 many of the best would be equal.
    """
    if target.weights == "int8" and weight.shape[1] % GROUP == 0:
        return _int8_linear(weight, None, None)
    return dense_linear(weight if target.weights == "fp32" else weight.bfloat16())


def _int8_linear(weight: Tensor, bias: Tensor | None, products: Products | None) -> Linear:
    if products is not None:
        return PanelLinear(products, Panels.int8(weight, products.panel_layout), bias)
    codes, scale = int8_groups(weight)
    return dense_linear((codes * scale[..., None]).flatten(1), bias)


def load_matrix(
    source: Weights, parts: Sequence[tuple[str, int]], columns: int, target: Target
) -> Tensor:
    """Matrices concatenated along their rows, each read directly into the result on the device."""
    rows = sum(count for _, count in parts)
    weight = torch.empty(rows, columns, dtype=target.dtype, device=target.device)
    at = 0
    for name, count in parts:
        source.copy_into(weight[at : at + count], name, (count, columns))
        at += count
    return weight


def has_products(kernels: str) -> bool:
    """Whether linear layers use the products of these kernels (Kernels.name) or those of torch.

    The portable kernels ("cpu-generic") have products as well, but only tests use them.
    """
    return kernels.startswith("cpu-avx")


def dense_linear(
    weight: Tensor, bias: Tensor | None = None, products: Products | None = None
) -> Linear:
    """A layer of fp32 or bf16 weights [rows, columns] on a CPU.

    products: see Kernels. Without them, bf16 weights are held in fp32: torch would round the
    results of products of bf16 to bf16, and a CPU that does not multiply bf16 natively would take
    minutes for a prompt.
    """
    if products is None:
        return PlainLinear(weight.float(), bias)
    panels = Panels.fp32 if weight.dtype is torch.float32 else Panels.bf16
    return PanelLinear(products, panels(weight, products.panel_layout), bias)


# ---- Embeddings of tokens.


class TokenLookup(Protocol):
    def __call__(self, token_ids: Tensor) -> Tensor:
        """The embeddings of the tokens, [tokens, hidden], in a new tensor."""
        ...


@dataclass(frozen=True, slots=True)
class TokenEmbedding:
    """weight: [vocab, hidden]."""

    weight: Tensor

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


@dataclass(frozen=True, slots=True)
class PanelEmbedding:
    """weight: [vocab, hidden], perhaps that of the lm_head, which is then in memory once."""

    products: Products
    weight: Panels

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.products.embed(token_ids, self.weight)


# ---- Normalization layers, alone and fused with the residual sum before them.


class Norm(Protocol):
    """Normalizes the last axis of [tokens, hidden]."""

    def __call__(self, x: Tensor) -> Tensor:
        """The normalized x, in a new tensor."""
        ...

    def add_(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x in place; returns the normalized residual in a new tensor."""
        ...


class RmsNorm:
    """weight: fp32 [hidden]."""

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float) -> None:
        self._kernels = kernels
        self.weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self._eps)

    def add_(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._kernels.add_rms_norm_(residual, x, self.weight, self._eps)


class LayerNorm:
    """weight, bias: [hidden] in the dtype of activations, or both None."""

    def __init__(self, size: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self._shape = (size,)
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)

    def add_(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(residual.add_(x))
