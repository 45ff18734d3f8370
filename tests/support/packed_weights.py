"""Random weights in panels, and activations for them."""

from __future__ import annotations

import torch
from torch import Tensor

from bros.executor.weights import Int4Groups
from bros.kernels.panels import GROUP, PanelLayout, Panels


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def activations(seed: int, rows: int, inputs: int) -> Tensor:
    """Some groups of each row are outliers."""
    x = normal(seed, rows, inputs)
    factors = normal(seed + 1, rows, inputs // GROUP).abs().clamp(min=0.5)
    return x * factors.repeat_interleave(GROUP, dim=1)


def packed(form: str, weight: Tensor, layout: PanelLayout) -> tuple[Panels, Tensor]:
    """The panels of a weight, and the values that they hold."""
    if form == "fp32":
        return Panels.fp32(weight, layout), weight
    if form == "bf16":
        return Panels.bf16(weight, layout), weight.bfloat16()
    if form == "int8":
        groups = weight.unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(2, keepdim=True) / 127
        codes = (groups / scale.clamp(min=1e-30)).round()
        return Panels.int8(weight, layout), (codes.double() * scale).flatten(1)
    four = Int4Groups.from_dense(weight)
    scale, minimum = (each.half().double()[..., None] for each in (four.scale, four.minimum))
    values = four.codes.unflatten(1, (-1, GROUP)) * scale + minimum
    return Panels.int4(four.codes, four.scale, four.minimum, layout), values.flatten(1)


def widened(form: str, values: Tensor) -> Tensor:
    """The values of panels as tiles multiply them, in bf16: Int4Codes and Int8Codes of
    csrc/linear_tiles.h."""
    values = values.float()
    if form == "int4":  # halves away from zero
        values = ((values.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return values.bfloat16() if form in ("int8", "int4") else values
