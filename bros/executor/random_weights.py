"""Weights of a model that was never trained: for measuring and testing without a download."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from bros.executor.quantized import Int4Groups
from bros.executor.weights import Part, part_shape, slices

_BIAS_STD = 0.02


class RandomWeights:
    """Any tensor of any shape. A name, a shape, a device and a seed always give the same numbers.

    Matrices are normal with a variance of 1 / columns, so that activations neither vanish nor
    blow up; biases are normal and small, the other vectors near 1.
    """

    def __init__(self, seed: int = 0, drawn_on: torch.device | None = None) -> None:
        """drawn_on: whose generator is used; by default that of the device a tensor is for.

        Devices draw different numbers: to have the same ones everywhere, draw on the CPU.
        """
        self._seed = seed
        self._drawn_on = drawn_on

    @property
    def unread(self) -> frozenset[str]:
        return frozenset()

    def dense(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """fp32, on the CPU."""
        out = torch.empty(part_shape(shape, part))
        self.copy_into(out, name, shape, part)
        return out

    def int4(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Int4Groups:
        return Int4Groups.from_dense(self.dense(name, shape, part))

    def copy_into(
        self, out: Tensor, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> None:
        """All of it is drawn for a moment, so that its parts fit together."""
        device = self._drawn_on or out.device
        generator = torch.Generator(device)
        # Of a longer seed, some generators take 32 bits only.
        generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        # Drawn in fp32: what is drawn in a shorter precision are other numbers, not rounded ones.
        values = torch.empty(shape, device=device)
        if values.dim() > 1:
            values.normal_(std=values.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            values.normal_(std=_BIAS_STD, generator=generator)
        else:
            values.uniform_(0.8, 1.2, generator=generator)
        out.copy_(values if part is None else values[slices(part)])
