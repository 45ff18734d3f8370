"""Tensor parallelism: how tensors are sharded over ranks, and the layers that combine the results.

    split by rows      Q, K, V (by KV head); gate and up, fc1 (by intermediate feature); embedding
                       and lm_head (by token): a rank computes some of the outputs
    split by columns   attention output (by query head); down, fc2 (by intermediate feature): a
                       rank computes a partial sum of all outputs
    replicated         norms, learned positions

as in Megatron-LM (Shoeybi et al. 2019, section 3), with two additions. Sizes need not be divisible
by the number of ranks: the first ranks then get one unit more. With more ranks than KV heads,
several ranks have the same KV head and split its query heads:

    3 KV heads, 9 query heads
    2 ranks    kv 0 1, q 0-5    kv 2, q 6-8
    4 ranks    kv 0, q 0 1      kv 0, q 2      kv 1, q 3-5    kv 2, q 6-8
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bros.core.errors import ConfigError
from bros.executor.models.layers import Linear, TokenLookup
from bros.executor.models.spec import ModelSpec
from bros.executor.parallel.ranks import Ranks
from bros.executor.weights import LAYER, Int4Groups, Part, Weights
from bros.kernels.panels import GROUP

_UNIT = GROUP
"""Large sizes are split at multiples of this: int4 groups stay whole, matrix sizes stay fast."""


class _Split(NamedTuple):
    """How a tensor is split along one axis: this rank has `part` of [0, total)."""

    part: range
    total: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model: ranges of heads, intermediate features and tokens.

    spec: of the whole model.
    heads: its query heads.
    kv_heads: the KV heads of these.
    intermediate: its features of the MLP's hidden layer.
    vocab: its tokens of the embedding and of the lm_head.
    """

    spec: ModelSpec
    rank: int
    heads: range
    kv_heads: range
    intermediate: range
    vocab: range

    @property
    def local(self) -> ModelSpec:
        """The spec of a model that is as large as this shard."""
        return replace(
            self.spec,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.intermediate),
            vocab_size=len(self.vocab),
        )

    def locate(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Part | None]:
        """The whole shape of a tensor whose shard has `shape`, and the part that the shard is.

        The part is None if the tensor is replicated.
        """
        found = LAYER.search(name)
        axis, split = self._split(*found.groups()) if found else (0, None)
        if split is None or len(split.part) == split.total:
            return shape, None
        part = [range(size) for size in shape]
        part[axis] = split.part
        return (*shape[:axis], split.total, *shape[axis + 1 :]), tuple(part)

    def is_partial_sum(self, name: str) -> bool:
        """Whether the layer of this tensor computes a partial sum on every rank."""
        found = LAYER.search(name)
        return found is not None and self._split(found[1], "weight")[0] == 1

    def _split(self, layer: str, kind: str) -> tuple[int, _Split | None]:
        """The axis along which a tensor is split, and how; None if it is replicated."""
        spec = self.spec
        match layer:
            case "q_proj":
                return 0, self._features(self.heads, spec.num_heads)
            case "k_proj" | "v_proj":
                return 0, self._features(self.kv_heads, spec.num_kv_heads)
            case "gate_proj" | "up_proj" | "fc1":
                return 0, _Split(self.intermediate, spec.intermediate_size)
            case "embed_tokens" | "lm_head":
                return 0, _Split(self.vocab, spec.vocab_size)
            case "o_proj" | "out_proj" if kind == "weight":
                return 1, self._features(self.heads, spec.num_heads)
            case "down_proj" | "fc2" if kind == "weight":
                return 1, _Split(self.intermediate, spec.intermediate_size)
        return 0, None

    def _features(self, heads: range, total: int) -> _Split:
        size = self.spec.head_dim
        return _Split(range(heads.start * size, heads.stop * size), total * size)


def shards_of(spec: ModelSpec, size: int) -> tuple[Shard, ...]:
    """The shards of `size` ranks. Raises ConfigError if the model is too small for so many."""
    most = min(spec.num_heads, spec.intermediate_size, spec.vocab_size)
    if size > most:
        raise ConfigError(
            f"--tp: {size} ranks cannot share this model: each rank needs an attention head, and "
            f"there are {spec.num_heads} (and {spec.num_kv_heads} KV heads); give at most "
            f"--tp {most}"
        )
    parts = zip(
        _heads(spec, size),
        partition(spec.intermediate_size, size, _UNIT),
        partition(spec.vocab_size, size, _UNIT),
        strict=True,
    )
    return tuple(
        Shard(spec, rank, heads, kv_heads, intermediate, vocab)
        for rank, ((heads, kv_heads), intermediate, vocab) in enumerate(parts)
    )


def partition(total: int, parts: int, unit: int = 1) -> list[range]:
    """Split [0, total) into `parts` ranges that start at multiples of `unit`.

    With fewer units than parts, ranges may start anywhere. No range is empty if total >= parts. If
    the units cannot be divided evenly, the first ranges have one unit more; the last unit may be
    incomplete.
    """
    if total < unit * parts:
        unit = 1
    units = -(-total // unit)
    each, more = divmod(units, parts)
    ends = [min(total, unit * (each * part + min(part, more))) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def _heads(spec: ModelSpec, size: int) -> Iterator[tuple[range, range]]:
    """Query and KV heads of every rank."""
    per_kv = spec.num_heads // spec.num_kv_heads
    if size <= spec.num_kv_heads:
        for kv in partition(spec.num_kv_heads, size):
            yield range(kv.start * per_kv, kv.stop * per_kv), kv
        return
    for head, sharers in enumerate(partition(size, spec.num_kv_heads)):
        for queries in partition(per_kv, len(sharers)):
            first = head * per_kv
            yield range(first + queries.start, first + queries.stop), range(head, head + 1)


class ShardedWeights:
    """One rank's part of every tensor of a model. Implements Weights.

    If a layer computes partial sums, only rank 0 has its bias; the others get zeros.
    """

    def __init__(self, source: Weights, shard: Shard) -> None:
        self._source = source
        self._shard = shard

    @property
    def unread(self) -> frozenset[str]:
        return self._source.unread

    def dense(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        whole, part = self._place(name, shape, part)
        values = self._source.dense(name, whole, part)
        return torch.zeros_like(values) if self._has_no_bias(name) else values

    def int4(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Int4Groups:
        (rows, columns), part = self._place(name, shape, part)
        return self._source.int4(name, (rows, columns), part)

    def is_stored_in_4_bits(self, name: str) -> bool:
        return self._source.is_stored_in_4_bits(name)

    def copy_into(
        self, out: Tensor, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> None:
        whole, part = self._place(name, shape, part)
        self._source.copy_into(out, name, whole, part)

    def _place(
        self, name: str, shape: tuple[int, ...], part: Part | None
    ) -> tuple[tuple[int, ...], Part | None]:
        assert part is None, "layers never request a part of a shard"
        return self._shard.locate(name, shape)

    def _has_no_bias(self, name: str) -> bool:
        return self._shard.rank > 0 and name.endswith(".bias") and self._shard.is_partial_sum(name)


# ---- Parallel layers: each combines the results of the ranks' shards.
#
#     embedding    rows of this rank's tokens, zeros for others          ─▶ all-reduce
#     attention    heads of this rank ─▶ columns of the output           ─▶ all-reduce
#     MLP          features of this rank ─▶ columns of down              ─▶ all-reduce
#     lm_head      logits of this rank's tokens                          ─▶ gather on rank 0
#
# Between these layers all ranks have the same activations and compute the same.


def row_parallel(linear: Linear, ranks: Ranks) -> Linear:
    """A layer whose input features are split over the ranks; `linear` is this rank's shard."""
    return linear if ranks.size == 1 else RowParallelLinear(linear, ranks)


def parallel_lm_head(linear: Linear, widths: Sequence[int], ranks: Ranks) -> Linear:
    """An lm_head whose tokens are split over the ranks; `linear` is this rank's shard.

    widths: output features of every rank.
    """
    return linear if ranks.size == 1 else ParallelLmHead(linear, widths, ranks)


def vocab_parallel_embedding(tokens: TokenLookup, vocab: range, ranks: Ranks) -> TokenLookup:
    """tokens: the embeddings of this rank's tokens `vocab`, by their place in it."""
    return tokens if ranks.size == 1 else VocabParallelEmbedding(tokens, vocab, ranks)


class RowParallelLinear:
    """The sum of the ranks' outputs, on all ranks."""

    def __init__(self, linear: Linear, ranks: Ranks) -> None:
        self._linear = linear
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.all_reduce_(self._linear(x))


class ParallelLmHead:
    """The ranks' outputs concatenated on rank 0, [0, features] on the others."""

    def __init__(self, linear: Linear, widths: Sequence[int], ranks: Ranks) -> None:
        self._linear = linear
        self._widths = widths
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.gather(self._linear(x), self._widths)


class VocabParallelEmbedding:
    """The embeddings of all tokens, on all ranks."""

    def __init__(self, tokens: TokenLookup, vocab: range, ranks: Ranks) -> None:
        """See vocab_parallel_embedding."""
        self._tokens = tokens
        self._vocab = vocab
        self._ranks = ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = token_ids - self._vocab.start
        foreign = (rows < 0) | (rows >= len(self._vocab))
        x = self._tokens(rows.masked_fill_(foreign, 0))
        return self._ranks.all_reduce_(x.masked_fill_(foreign[:, None], 0))
