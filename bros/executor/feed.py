"""Brings the inputs of a step to where the decoder runs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bros.executor.grouping import group_shared
from bros.executor.inputs import StepInputs
from bros.executor.staging import Staging
from bros.kernels.interface import HeadLayout, Kernels

_ALIGNMENT = 4  # int32; kernels are compiled for the alignment of what they are given


class InputFeed:
    """One per runner.

    block_size: group rows that begin with the same blocks of so many slots; None: do not, the
    kernels would gain nothing.
    """

    def __init__(
        self,
        kernels: Kernels,
        layout: HeadLayout,
        device: torch.device,
        block_size: int | None = None,
    ) -> None:
        self._kernels = kernels
        self._layout = layout
        self._device = device
        self._block_size = block_size
        self._staging = None if device.type == "cpu" else Staging(device)

    def grouped(self, inputs: StepInputs) -> StepInputs:
        """The same with shared prefixes found."""
        if self._block_size is None:
            return inputs
        attention = group_shared(inputs.attention, self._block_size)
        if attention is inputs.attention:
            return inputs
        return dataclasses.replace(inputs, attention=attention)

    def __call__(self, inputs: StepInputs) -> StepInputs:
        """What the decoder takes. The host does not wait for the device."""
        attention = self._kernels.prepare(inputs.attention, self._layout, self._device)
        if self._staging is None:
            if attention is inputs.attention:
                return inputs
            return dataclasses.replace(inputs, attention=attention)
        tensors = (inputs.token_ids, inputs.positions, inputs.slots, inputs.sample_rows)
        token_ids, positions, slots, sample_rows = upload(tensors, self._staging, self._device)
        return StepInputs(token_ids, positions, slots, attention, sample_rows, inputs.samples)


def upload(tensors: tuple[Tensor, ...], staging: Staging, device: torch.device) -> list[Tensor]:
    """int32 vectors on the host as vectors on the device, all in one copy."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-len(tensor) // _ALIGNMENT) * _ALIGNMENT)
    host = staging.take(starts[-1])
    for tensor, start in zip(tensors, starts, strict=False):
        host[start : start + len(tensor)] = tensor
    there = torch.empty(starts[-1], dtype=torch.int32, device=device)
    there.copy_(host, non_blocking=True)
    staging.sent()
    return [
        there[start : start + len(tensor)] for tensor, start in zip(tensors, starts, strict=False)
    ]
