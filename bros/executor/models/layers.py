"""Linear layers, embeddings and norms: packed weights on a CPU, plain matrices on a GPU.

A linear layer maps activations [tokens, in_features] to [tokens, out_features]. On a CPU both are
fp32, whatever the precision of the weights; on a GPU they have the weights' dtype. Packed weights
are multiplied by our own kernels (PanelLinear) or by oneDNN (PackedLinear); `has_products` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bros.executor.target import Target, multiplies_bf16
from bros.executor.weights import Int4Groups, Weights
from bros.kernels.interface import Kernels, Product, Products, RowProducts
from bros.kernels.panels import GROUP, Panels, int8_groups
from bros.kernels.row_padding import ROW_PADDING, with_padding


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
    """F.linear with fp32 results: for logits on a GPU, and for all layers if torch lacks oneDNN."""

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


class PackedLinear:
    """fp32 or bf16 weights in oneDNN's blocked layout. The packed copy replaces the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        # The row count is only a hint for the layout; any number of rows works.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
        self._dtype = weight.dtype
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            with_padding(x).to(self._dtype), self._packed, self._bias, "none", [], ""
        )
        return out.float()[:rows]


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
    int4 weights are held in bf16 or fp32, and int8 weights in fp32: the same values, in the memory
    of these.
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
            dtype = torch.bfloat16 if multiplies_bf16() else torch.float32
            return pack(groups.dequantize().to(dtype), stacked_bias)
        width = products.panel_width
        panels = Panels.int4(groups.codes, groups.scale, groups.minimum, width)
        return PanelLinear(products, panels, stacked_bias)
    weight = torch.cat([source.dense(name, (n, columns)) for name, n in parts])
    if target.weights == "int8" and columns % GROUP == 0:
        return _int8_linear(weight, stacked_bias, products)
    weight = weight if target.weights == "fp32" else weight.bfloat16()
    return pack(weight, stacked_bias, products)


def vocabulary_panels(weight: Tensor, target: Target, products: Products) -> Panels:
    """The lm_head on a CPU, or a tied embedding. weight: fp32 [vocab, hidden].

    Never int4: rounding the lm_head changes logits more than rounding any other layer. With int8 or
    int4 weights it has int8 groups.
    """
    width = products.panel_width
    if target.weights == "fp32":
        return Panels.fp32(weight, width)
    if target.weights == "bf16" or weight.shape[1] % GROUP:
        return Panels.bf16(weight, width)
    return Panels.int8(weight, width)


def make_lm_head(weight: Tensor, target: Target) -> Linear:
    """The layer of logits on a CPU without products. weight: fp32 [vocab, hidden].

    Logits are sums in fp32: oneDNN would round those of bf16 weights to bf16, so that many of the
    best are equal. Weights are rounded to bf16 with int4, and else as `vocabulary_panels` does.
    """
    if target.weights == "int8" and weight.shape[1] % GROUP == 0:
        return _int8_linear(weight, None, None)
    return pack(weight if target.weights == "fp32" else weight.bfloat16().float())


def _int8_linear(weight: Tensor, bias: Tensor | None, products: Products | None) -> Linear:
    if products is not None:
        return PanelLinear(products, Panels.int8(weight, products.panel_width), bias)
    codes, scale = int8_groups(weight)
    return pack((codes * scale[..., None]).flatten(1), bias)


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


def has_products(kernels: str, weights: str) -> bool:
    """Whether linear layers use the products of these kernels (Kernels.name) or those of oneDNN.

    weights: as in Target.

    All linear layers of SmolLM2-135M but the lm_head, one thread of a Zen 4 (AVX-512 BF16), ms:

        rows            1      8     32    256
        oneDNN fp32  32.7   34.5   77.6    512
        fp32         17.6   22.2   67.3    502
        oneDNN bf16  18.4   20.3   43.6    277
        bf16          9.3   11.7   36.0    259
        int4          3.6    9.4   30.5    247

    On a CPU with AMX oneDNN multiplies bf16 by it, and so do ours if they were built with it and
    the system allows it. Without AVX2, ours were not measured.
    """
    if weights == "bf16" and torch.cpu._is_amx_tile_supported():
        return kernels == "cpu-avx512-amx"
    return kernels.startswith("cpu-avx")


def token_padding(device: str, kernels: str, weights: str) -> tuple[tuple[int, int], ...]:
    """How the layers round up the tokens of a step, as `padding` of scheduler.cost_model.CostModel.

    Empty where oneDNN is not used. device, kernels, weights: as in EngineInfo.
    """
    if device != "cpu" or not _has_onednn() or has_products(kernels, weights):
        return ()
    return ROW_PADDING


def pack(weight: Tensor, bias: Tensor | None = None, products: Products | None = None) -> Linear:
    """The fastest exact layer for an fp32 or bf16 weight [rows, columns] on this machine.

    products: see Kernels.

    oneDNN has bf16 products only for CPUs with AVX-512 or newer; on other CPUs bf16 weights are
    converted to fp32, with the time and the memory of fp32.
    """
    if products is not None:
        panels = Panels.fp32 if weight.dtype is torch.float32 else Panels.bf16
        return PanelLinear(products, panels(weight, products.panel_width), bias)
    if not _has_onednn():
        return PlainLinear(weight, bias)
    return PackedLinear(weight if _has_packed(weight.dtype) else weight.float(), bias)


def _has_packed(dtype: torch.dtype) -> bool:
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


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
