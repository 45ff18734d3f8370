"""Sampling on the device with Triton, for DeviceStepSampler.

The device samples the same tokens as the host; kernels/triton/sampling.py says how exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike
from torch import Tensor

from bros.core.plan import SampleSpec
from bros.executor.sampler import SMALLEST_TEMPERATURE, noise_starts
from bros.kernels.staging import to_device
from bros.kernels.triton.sampling import SamplingTensors, best_tokens, sample_tokens

_ALIGNMENT = 4  # rows; Triton compiles a kernel anew for pointers of other alignment


def best(logits: Tensor, out: Tensor) -> None:
    """See sampler.Best."""
    best_tokens(logits.contiguous(), out)


def draw(logits: Tensor, specs: Sequence[SampleSpec], indexes: Sequence[int]) -> Tensor:
    """Sample int32 [rows] tokens, for specs that are not greedy and do not change logits.

    logits: fp32 [rows, vocab], not changed. A row whose largest logit is not finite gets an
    arbitrary valid token. The host does not wait for the device.
    indexes: the index of each token in its output.
    """
    tokens = sample_tokens(logits.contiguous(), _parameters(specs, indexes, logits))
    return tokens.clamp_(min=0)


def _parameters(
    specs: Sequence[SampleSpec], indexes: Sequence[int], logits: Tensor
) -> SamplingTensors:
    """The parameters of all rows, uploaded in one copy."""
    vocab = logits.shape[1]
    params = [spec.params for spec in specs]
    columns: tuple[tuple[ArrayLike, DTypeLike], ...] = (
        (noise_starts(specs, indexes), np.uint64),
        ([p.top_p for p in params], np.float64),
        ([max(p.temperature, SMALLEST_TEMPERATURE) for p in params], np.float32),
        ([p.min_p for p in params], np.float32),
        ([min(p.top_k, vocab) for p in params], np.int32),
    )
    padded = -(-len(specs) // _ALIGNMENT) * _ALIGNMENT
    parts = [np.zeros(padded, kind) for _, kind in columns]
    for part, (column, _) in zip(parts, columns, strict=True):
        part[: len(specs)] = column
    whole = np.concatenate([part.view(np.uint8) for part in parts])
    on_device = to_device(torch.from_numpy(whole), logits.device)
    starts, top_p, temperature, min_p, top_k = torch.split(on_device, [p.nbytes for p in parts])

    def rows(part: Tensor, dtype: torch.dtype) -> Tensor:
        return part.view(dtype)[: len(specs)]

    return SamplingTensors(
        temperature=rows(temperature, torch.float32),
        min_p=rows(min_p, torch.float32),
        top_k=rows(top_k, torch.int32),
        top_p=rows(top_p, torch.float64),
        start=rows(starts, torch.int64),
    )
