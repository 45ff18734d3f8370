"""Sampling on the device: greedy, temperature, min-p, top-k and top-p, without sorting.

executor/sampler.py defines the results. The device agrees with it as follows:

    greedy      same token always: the first of equal logits; -1 if the largest logit is not finite
                or any is NaN
    top_k       same set of allowed tokens always: it depends only on subtraction and IEEE division
    min_p       same set, except for tokens whose weight is within a few roundings (1e-7) of the
                bound, because the exponential of the device differs from that of the host
    top_p       same set, unless a sum of weights is within 1e-7 of top_p
    the draw    same noise and same race: the same token, unless two tokens tie within 1e-7
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bros.kernels.triton.sampling_kernels import best_of_parts, best_of_rows, choose
from bros.kernels.triton.settings import power_of_two

_GROUP = 256  # tokens per group: the race picks a group, then a token within it
_TILE, _WARPS = 32, 8  # groups that a program reads at once: 32 tokens per thread
_PART = 4096  # tokens of a row per program: one program for a row takes 30 us


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """One entry per row, on the device of the logits.

    temperature: fp32, 0 for greedy.
    min_p: fp32, 0 for off.
    top_k: int32, 0 for off.
    top_p: fp64, 1 for off.
    start: int64, the bits of the uint64 at which the row's noise starts.
    """

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    start: Tensor


def best_tokens(logits: Tensor, out: Tensor) -> None:
    """Write the best token of each row, the first of equal ones, and the bits of its logit, which
    is NaN if any logit of the row is NaN.

    logits: fp32 [rows, vocab], not changed. The host does not wait for the device.
    out: int32 [2, rows].
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert out.dtype == torch.int32 and out.shape == (2, rows) and out.is_contiguous()
    parts = -(-vocab // _PART)
    if rows:
        peaks = logits.new_empty(rows, parts)
        tokens = logits.new_empty(rows, parts, dtype=torch.int32)
        best_of_parts[(rows, parts)](
            peaks, tokens, logits, vocab, PARTS=parts, PART=_PART, num_warps=_WARPS
        )
        best_of_rows[(rows,)](
            out, peaks, tokens, rows, PARTS=parts, BLOCK=power_of_two(parts), num_warps=1
        )


def sample_tokens(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Sample int32 [rows] tokens; -1 if the largest logit of a row is not finite or any is NaN.

    logits: fp32 [rows, vocab], not changed. The host does not wait for the device.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert params.top_p.dtype == torch.float64 and params.start.dtype == torch.int64
    assert all(x.shape == (rows,) for x in (params.temperature, params.min_p, params.top_k))
    num_groups = -(-vocab // _GROUP)
    groups = power_of_two(num_groups)
    tokens = num_groups * _GROUP
    out = logits.new_empty(rows, dtype=torch.int32)
    if rows:
        choose[(rows,)](
            out,
            logits,
            params.temperature,
            params.min_p,
            params.top_k,
            params.top_p,
            params.start,
            logits.new_empty(rows, tokens, dtype=torch.int32),
            logits.new_empty(rows, tokens),
            logits.new_empty(rows, groups),
            logits.new_empty(rows, groups, dtype=torch.int32),
            logits.new_empty(rows, groups, dtype=torch.float64),
            vocab,
            NUM_GROUPS=num_groups,
            GROUPS=groups,
            GROUP=_GROUP,
            TILE=min(_TILE, groups),
            num_warps=_WARPS,
        )
    return out
