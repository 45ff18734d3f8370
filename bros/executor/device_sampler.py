"""The draws of sampler.py for many rows at once, in torch operations that need no host.

The same noise races over the same weights, so a row gets the token that it gets there, unless two
tokens are about to win at once and the device's exponential rounds the other way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bros.core.plan import SampleSpec
from bros.executor.sampler import BLOCK, BLOCK_NOISE, GOLDEN, SMALLEST_TEMPERATURE, noise_start
from bros.executor.staging import to_device

# uint64 numbers as int64, whose sums and products overflow to the same bits.
_GOLDEN = GOLDEN - 2**64
_FACTORS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_INFINITE = 0x7F800000  # the bits of infinity; bits of numbers >= 0 are ordered as the numbers


def draw(logits: Tensor, peaks: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """The tokens drawn by specs that are not greedy and change no logits; int64 [rows].

    logits: fp32 [rows, vocab]; peaks: the largest of each row. A row whose peak is not finite gets
    a number that means nothing.
    """
    rows, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    weights = F.pad(_weights(logits, peaks, specs), (0, blocks * BLOCK - vocab))
    weights = weights.view(rows, blocks, BLOCK)
    starts = [[_signed(noise_start(spec.seed, spec.output_index))] for spec in specs]
    start = to_device(torch.tensor(starts), logits.device)
    numbers = torch.arange(max(blocks, BLOCK), device=logits.device)
    masses = weights.sum(2, dtype=torch.float64)
    block = (_noise(start, numbers[:blocks] + BLOCK_NOISE) / masses).argmin(1, keepdim=True)
    inner = weights.gather(1, block[:, :, None].expand(rows, 1, BLOCK))[:, 0].double()
    first = block * BLOCK
    token = first + (_noise(start, first + numbers[:BLOCK]) / inner).argmin(1, keepdim=True)
    return token[:, 0].clamp(max=vocab - 1)


def _weights(logits: Tensor, peaks: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """exp of the scaled logits, relative to the best; 0 where a filter forbids the token."""
    params = [spec.params for spec in specs]
    vocab = logits.shape[1]
    columns = [
        [max(p.temperature, SMALLEST_TEMPERATURE), p.min_p, p.top_p, p.top_k or vocab]
        for p in params
    ]
    there = to_device(torch.tensor(columns, dtype=torch.float64), logits.device)
    temperatures, least, shares, counts = there.split(1, dim=1)  # type: ignore[no-untyped-call]
    depths: Tensor = (peaks[:, None] - logits) / temperatures.float()  # >= 0
    weights = (-depths).exp()
    if any(p.min_p > 0.0 for p in params):
        weights *= weights >= least.float()
    order = depths.view(torch.int32)
    if any(p.top_k for p in params):
        weights *= order <= _last_allowed(order, None, counts)
    if any(p.top_p < 1.0 for p in params):
        mass = weights.sum(1, keepdim=True, dtype=torch.float64)
        last = _last_allowed(order, weights, shares * mass)
        weights *= (order <= last) | (shares >= 1.0)
    return weights


def _last_allowed(order: Tensor, weights: Tensor | None, target: Tensor) -> Tensor:
    """[rows, 1]: the smallest bound with at least `target` of the weights, or of the tokens, in
    places up to it, found by bisection: 31 passes cost less than sorting the vocabulary.

    order: int32 [rows, vocab], bits of depths; so many as the target must be there.
    """
    high = torch.full_like(target, _INFINITE, dtype=torch.int32)
    low = torch.full_like(high, -1)
    for _ in range(31):
        middle = low + (high - low) // 2
        within = order <= middle
        if weights is None:
            reached = within.sum(1, keepdim=True)
        else:
            reached = (weights * within).sum(1, keepdim=True, dtype=torch.float64)
        enough = reached >= target
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle)
    return high


def _noise(start: Tensor, numbers: Tensor) -> Tensor:
    """sampler.noise of `numbers`; start: int64 [rows, 1]. Returns float64 [rows, numbers]."""
    state = (numbers + 1) * _GOLDEN + start
    for shift, factor in _FACTORS:
        state = (state ^ _shifted(state, shift)) * factor
    state = state ^ _shifted(state, 31)
    return -torch.log((_shifted(state, 11).double() + 0.5) * 2.0**-53)


def _shifted(state: Tensor, by: int) -> Tensor:
    """To the right, as if it were unsigned."""
    return torch.bitwise_and(state >> by, 2 ** (64 - by) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
