"""Brings the inputs of a step to where the decoder runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bros.executor.inputs import StepInputs
from bros.kernels.interface import HeadLayout, Kernels
from bros.kernels.staging import Staging

_ALIGNMENT = 4  # int32; kernels are compiled for the alignment of what they are given


@dataclass(frozen=True, slots=True)
class Pending:
    """Tokens of a step that only the device knows yet.

    tokens: int32, on the device, what the step before chose.
    sources: int32 [tokens of this step], on the host, the place of each in `tokens`, or -1 where
        token_ids has it.
    """

    tokens: Tensor
    sources: Tensor


class InputFeed:
    """One per runner.

    staging: None where the decoder reads host memory.
    """

    def __init__(
        self,
        kernels: Kernels,
        layout: HeadLayout,
        device: torch.device,
        staging: Staging | None = None,
    ) -> None:
        self._kernels = kernels
        self._layout = layout
        self._device = device
        self._staging = staging

    def __call__(self, inputs: StepInputs, pending: Pending | None = None) -> StepInputs:
        """What the decoder takes. The host does not wait for the device."""
        attention = self._kernels.prepare(inputs.attention, self._layout, self._device)
        if self._staging is None:
            assert pending is None, "on the host all tokens are known"
            if attention is inputs.attention:
                return inputs
            return dataclasses.replace(inputs, attention=attention)
        there = upload(
            [inputs.token_ids, inputs.positions, inputs.slots, inputs.sample_rows]
            + ([] if pending is None else [pending.sources]),
            self._staging,
            self._device,
        )
        if pending is not None:
            fill_in(there[0], pending.tokens, there.pop())
        token_ids, positions, slots, sample_rows = there
        return StepInputs(token_ids, positions, slots, attention, sample_rows, inputs.samples)


def upload(tensors: Sequence[Tensor], staging: Staging, device: torch.device) -> list[Tensor]:
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


def fill_in(token_ids: Tensor, tokens: Tensor, sources: Tensor) -> None:
    """token_ids[i] = tokens[sources[i]] where that is not -1. All on the device."""
    found = tokens.index_select(0, sources.clamp(min=0))
    token_ids.copy_(torch.where(sources < 0, token_ids, found))
