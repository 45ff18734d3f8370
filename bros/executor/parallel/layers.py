"""Layers of which every rank has a part, and what brings the parts together.

    embedding    rows of the tokens of this rank, zeros for others     ─▶ sum
    attention    heads of this rank ─▶ columns of the output           ─▶ sum
    MLP          features of this rank ─▶ columns of down              ─▶ sum
    head         logits of the tokens of this rank                     ─▶ side by side on rank 0

Between them all ranks have the same numbers, and do the same with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from bros.executor.layers.linear import Linear
from bros.executor.models.decoder import TokenEmbedding, Tokens
from bros.executor.parallel.ranks import Ranks


def summed(linear: Linear, ranks: Ranks) -> Linear:
    """A layer that has some of its input features on each rank."""
    return linear if ranks.size == 1 else ReducedLinear(linear, ranks)


def joined(linear: Linear, widths: Sequence[int], ranks: Ranks) -> Linear:
    """A layer that has so many of its output features on each rank; rank 0 returns them all."""
    return linear if ranks.size == 1 else GatheredLinear(linear, widths, ranks)


def embedding(weight: Tensor, vocab: range, ranks: Ranks) -> Tokens:
    """weight: [len(vocab), hidden], the rows of `vocab`."""
    if ranks.size == 1:
        return TokenEmbedding(weight)
    return VocabParallelEmbedding(weight, vocab.start, ranks)


class ReducedLinear:
    """The sum of what the ranks' layers return, on all."""

    def __init__(self, linear: Linear, ranks: Ranks) -> None:
        self._linear = linear
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.all_reduce_(self._linear(x))


class GatheredLinear:
    """What the ranks' layers return, side by side on rank 0; nothing, [0, features], elsewhere."""

    def __init__(self, linear: Linear, widths: Sequence[int], ranks: Ranks) -> None:
        """widths: output features of every rank."""
        self._linear = linear
        self._widths = widths
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.gather(self._linear(x), self._widths)


class VocabParallelEmbedding:
    """Rows of tokens that some rank has, on all."""

    def __init__(self, weight: Tensor, first: int, ranks: Ranks) -> None:
        """weight: [tokens of this rank, hidden], from token `first` on."""
        self._weight = weight
        self._first = first
        self._ranks = ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = token_ids - self._first
        elsewhere = (rows < 0) | (rows >= len(self._weight))
        x = F.embedding(rows.masked_fill_(elsewhere, 0), self._weight)
        return self._ranks.all_reduce_(x.masked_fill_(elsewhere[:, None], 0))
