"""Packed weights of linear layers for the products of CpuKernels; csrc/linear_formats.h has
the layouts.

A panel holds some outputs of a layer, as many as two vectors of the instruction set. Values are
fp32, bf16, or codes in groups of 32 inputs that share a scale:

    int8   value = code * scale             code -128..127, scale fp32
    int4   value = code * scale + minimum   code 0..15, scale and minimum fp16
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bros.kernels.host_memory import WeightMemory

GROUP = 32
"""Inputs that share a scale in int8 and int4, as in GGUF's Q4_0, Q4_1 and Q8_0."""

_MEMORY = WeightMemory()
"""Of all models of the process, since panels are made in many places of a model."""


class PanelFormat(enum.IntEnum):
    """WeightFormat of csrc/kernels.h."""

    FP32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3


class PanelLayout(NamedTuple):
    """How the kernels of an instruction set want weights to be packed.

    width: outputs per panel; the last panel is zero-padded.
    tiles: whether codes are in the order that products of tile registers want: 32 bytes of int8 are
        a group of one output, 16 bits of int4 are those of one input for four outputs. Else 32 bits
        are those of four or eight inputs for one output.
    """

    width: int
    tiles: bool = False


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight matrix [outputs, inputs].

    data: uint8, the panels one after the other, in huge pages.
    """

    format: PanelFormat
    data: Tensor
    outputs: int
    inputs: int
    layout: PanelLayout

    @classmethod
    def fp32(cls, weight: Tensor, layout: PanelLayout) -> Self:
        """weight: [outputs, inputs]."""
        panels = _split(weight.float(), layout.width)
        return cls._of(PanelFormat.FP32, [panels.transpose(1, 2)], weight, layout)

    @classmethod
    def bf16(cls, weight: Tensor, layout: PanelLayout) -> Self:
        """weight: [outputs, inputs], rounded to bf16. An odd number of inputs is kept as fp32."""
        if weight.shape[1] % 2:
            return cls.fp32(weight.bfloat16(), layout)
        panels = _split(weight.bfloat16(), layout.width)
        pairs = panels.view(*panels.shape[:2], -1, 2).transpose(1, 2)
        return cls._of(PanelFormat.BF16, [pairs], weight, layout)

    @classmethod
    def int8(cls, weight: Tensor, layout: PanelLayout) -> Self:
        """weight: [outputs, inputs], inputs a multiple of 32; rounded to 255 even steps of a group.

        Values that have been rounded so before, as those of GGUF's Q8_0, keep their codes.
        """
        groups, scale = int8_groups(weight)
        codes = groups.to(torch.int8).flatten(1)
        panels = _split(codes, layout.width)
        if layout.tiles:
            ordered = panels.view(*panels.shape[:2], -1, GROUP).transpose(1, 2)
        else:
            ordered = panels.view(*panels.shape[:2], -1, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        scales = _split(scale, layout.width).transpose(1, 2)
        return cls._of(PanelFormat.INT8, [scales, ordered], codes, layout)

    @classmethod
    def int4(cls, codes: Tensor, scale: Tensor, minimum: Tensor, layout: PanelLayout) -> Self:
        """codes: [outputs, inputs] in 0..15; scale, minimum: [outputs, inputs / 32]."""
        panels = _split(codes.to(torch.uint8), layout.width)
        if layout.tiles:
            # [panels, groups, quads of outputs, inputs of a group, bytes of a word, their halves]
            fours = panels.view(len(panels), layout.width // 4, 2, 2, -1, GROUP)
            nibbles = fours.permute(0, 4, 1, 5, 2, 3)
        else:
            # [panels, groups, eights of inputs, outputs, bytes, their halves]
            eights = panels.view(*panels.shape[:2], -1, GROUP // 8, 2, 4)
            nibbles = eights.permute(0, 2, 3, 1, 5, 4)
        packed = nibbles[..., 0] | nibbles[..., 1] << 4
        scales = [_split(each.half(), layout.width).transpose(1, 2) for each in (scale, minimum)]
        return cls._of(PanelFormat.INT4, [*scales, packed], codes, layout)

    @classmethod
    def _of(
        cls, form: PanelFormat, parts: list[Tensor], weight: Tensor, layout: PanelLayout
    ) -> Self:
        """parts: [panels, groups, ...] each; a panel has them in this order, group by group."""
        flat = [part.contiguous().flatten(2).view(torch.uint8) for part in parts]
        data = flat[0] if len(flat) == 1 else torch.cat(flat, dim=2)
        outputs, inputs = weight.shape
        return cls(form, _MEMORY.keep(data.flatten()), outputs, inputs, layout)


def int8_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of int8, fp32 [outputs, groups, 32], and their scales, fp32 [outputs, groups]."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scale = groups.abs().amax(dim=2) / 127
    return (groups / scale.clamp(min=1e-30)[..., None]).round_(), scale


def _split(matrix: Tensor, width: int) -> Tensor:
    """[outputs, n] -> [panels, width, n], zero-padded."""
    outputs, columns = matrix.shape
    return F.pad(matrix, (0, 0, 0, -outputs % width)).view(-1, width, columns)
