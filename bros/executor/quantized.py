"""Weights in groups of 32 along the input: what GGUF's Q4_0, Q4_1 and Q8_0 hold.

A converted GGUF model keeps such a tensor as its raw rows, uint8 [rows, bytes], under its name
plus a suffix of SUFFIXES. One group of 32 values is

    q4_0   d f16 | 16 bytes: value j in the low half of byte j, value j + 16 in the high half
    q4_1   d f16 | m f16 | 16 bytes as above
    q8_0   d f16 | 32 x int8

and value = code * d + m, where q4_0 has m = -8 * d and q8_0 has m = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
SUFFIXES = (".q4_0", ".q4_1", ".q8_0")
GROUP_BYTES = {".q4_0": 18, ".q4_1": 20, ".q8_0": 34}


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """value[n, k] = codes[n, k] * scale[n, k // 32] + minimum[n, k // 32].

    codes: uint8 [rows, columns] in 0..15; scale, minimum: fp32 [rows, columns / 32].
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor

    def dequantize(self) -> Tensor:
        """fp32 [rows, columns]."""
        rows, columns = self.codes.shape
        values = self.codes.view(rows, columns // GROUP, GROUP).float()
        return values.mul_(self.scale[..., None]).add_(self.minimum[..., None]).view(rows, columns)

    @classmethod
    def from_dense(cls, weight: Tensor) -> Int4Groups:
        """Round to the nearest of 16 even steps between a group's smallest and largest value.

        weight: fp32 [rows, columns], columns a multiple of 32.
        """
        rows, columns = weight.shape
        grouped = weight.view(rows, columns // GROUP, GROUP)
        low, high = torch.aminmax(grouped, dim=2)
        scale = (high - low) / 15
        steps = (grouped - low[..., None]) / scale.clamp(min=1e-12)[..., None]
        return cls(steps.round_().to(torch.uint8).view(rows, columns), scale, low)

    @classmethod
    def from_raw(cls, raw: Tensor, suffix: str) -> Int4Groups:
        """raw: uint8 [rows, bytes] of kind q4_0 or q4_1."""
        rows = raw.shape[0]
        groups = raw.view(rows, -1, GROUP_BYTES[suffix])
        scale = _halves(groups[..., 0:2])
        minimum = scale * -8 if suffix == ".q4_0" else _halves(groups[..., 2:4])
        pairs = groups[..., -GROUP // 2 :]
        codes = torch.cat((pairs & 15, pairs >> 4), dim=2)
        return cls(codes.view(rows, -1), scale, minimum)

    @classmethod
    def concatenate(cls, parts: list[Int4Groups]) -> Int4Groups:
        """Stack the rows of several matrices."""
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat([part.minimum for part in parts]),
        )


def dequantize_raw(raw: Tensor, suffix: str) -> Tensor:
    """raw: uint8 [rows, bytes] of the kind `suffix` names. Returns fp32 [rows, columns]."""
    if suffix != ".q8_0":
        return Int4Groups.from_raw(raw, suffix).dequantize()
    groups = raw.view(raw.shape[0], -1, GROUP_BYTES[suffix])
    values = groups[..., 2:].view(torch.int8).float()
    return values.mul_(_halves(groups[..., 0:2])[..., None]).view(raw.shape[0], -1)


def _halves(two_bytes: Tensor) -> Tensor:
    """uint8 [..., 2] holding an f16 each -> fp32 [...]."""
    return two_bytes.contiguous().view(torch.float16).squeeze(-1).float()
