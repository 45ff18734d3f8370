"""Which part of every tensor a rank has, and weights that give just that part.

    rows cut       Q, K, V by KV head; gate and up (fc1) by intermediate feature; embedding and
                   head by token: a rank computes some of the outputs
    columns cut    attention's output by query head; down (fc2) by intermediate feature: ranks
                   compute terms of one sum
    whole          norms, learned positions

as in Megatron-LM (Shoeybi et al. 2019, section 3), with two additions. Sizes need not be divisible
by the number of ranks: the first ranks have one unit more then. And if there are more ranks than
KV heads, several ranks have the same KV head and share its queries:

    3 KV heads, 9 query heads
    2 ranks    kv 0 1, q 0-5    kv 2, q 6-8
    4 ranks    kv 0, q 0 1      kv 0, q 2      kv 1, q 3-5    kv 2, q 6-8
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bros.core.errors import ConfigError
from bros.executor.models.decoder import TokenEmbedding, Tokens
from bros.executor.models.layers import Linear
from bros.executor.models.spec import ModelSpec
from bros.executor.parallel.ranks import Ranks
from bros.executor.weights import GROUP, Int4Groups, Part, Weights

_UNIT = GROUP
"""Of the cuts of large sizes: int4 groups stay whole, and matrices get sizes that are fast."""

_LAYER = re.compile(r"(\w+)\.(weight|bias)$")


class _Share(NamedTuple):
    """Of one axis of a tensor."""

    part: range
    total: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank has of a model: ranges of its heads, intermediate features and tokens.

    spec: of the whole model.
    """

    spec: ModelSpec
    rank: int
    heads: range
    kv_heads: range
    intermediate: range
    vocab: range

    @property
    def local(self) -> ModelSpec:
        """The spec of a whole model that is as large as this part."""
        return replace(
            self.spec,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.intermediate),
            vocab_size=len(self.vocab),
        )

    def whole_and_part(
        self, name: str, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], Part | None]:
        """The whole shape of a tensor of which this rank has `shape`, and where in it that lies;
        None if that is all of it."""
        found = _LAYER.search(name)
        axis, share = self._share(*found.groups()) if found else (0, None)
        if share is None or len(share.part) == share.total:
            return shape, None
        part = [range(size) for size in shape]
        part[axis] = share.part
        return (*shape[:axis], share.total, *shape[axis + 1 :]), tuple(part)

    def is_term(self, name: str) -> bool:
        """Whether every rank has a term of the sum that the layer of this tensor ends in."""
        found = _LAYER.search(name)
        return found is not None and self._share(found[1], "weight")[0] == 1

    def _share(self, layer: str, kind: str) -> tuple[int, _Share | None]:
        """The axis that is cut, and how."""
        spec = self.spec
        match layer:
            case "q_proj":
                return 0, self._features(self.heads, spec.num_heads)
            case "k_proj" | "v_proj":
                return 0, self._features(self.kv_heads, spec.num_kv_heads)
            case "gate_proj" | "up_proj" | "fc1":
                return 0, _Share(self.intermediate, spec.intermediate_size)
            case "embed_tokens" | "lm_head":
                return 0, _Share(self.vocab, spec.vocab_size)
            case "o_proj" | "out_proj" if kind == "weight":
                return 1, self._features(self.heads, spec.num_heads)
            case "down_proj" | "fc2" if kind == "weight":
                return 1, _Share(self.intermediate, spec.intermediate_size)
        return 0, None

    def _features(self, heads: range, total: int) -> _Share:
        size = self.spec.head_dim
        return _Share(range(heads.start * size, heads.stop * size), total * size)


def shards_of(spec: ModelSpec, size: int) -> tuple[Shard, ...]:
    """How `size` ranks share a model. Raises ConfigError if it is too small for so many."""
    most = min(spec.num_heads, spec.intermediate_size, spec.vocab_size)
    if size > most:
        raise ConfigError(
            f"--tp: {size} ranks cannot share this model, every one of them needs an attention "
            f"head and there are {spec.num_heads} of them (and {spec.num_kv_heads} KV heads); give "
            f"at most --tp {most}"
        )
    parts = zip(
        _heads(spec, size),
        cut(spec.intermediate_size, size, _UNIT),
        cut(spec.vocab_size, size, _UNIT),
        strict=True,
    )
    return tuple(
        Shard(spec, rank, heads, kv_heads, intermediate, vocab)
        for rank, ((heads, kv_heads), intermediate, vocab) in enumerate(parts)
    )


def cut(total: int, parts: int, unit: int = 1) -> list[range]:
    """0 .. total in `parts` ranges that begin at multiples of `unit`, or anywhere if there are
    fewer units than parts.

    None is empty if total >= parts. The first ones have one unit more if it does not come out
    even, and the last one lacks what is missing of the last unit.
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
        for kv in cut(spec.num_kv_heads, size):
            yield range(kv.start * per_kv, kv.stop * per_kv), kv
        return
    for head, sharers in enumerate(cut(size, spec.num_kv_heads)):
        for queries in cut(per_kv, len(sharers)):
            first = head * per_kv
            yield range(first + queries.start, first + queries.stop), range(head, head + 1)


class ShardedWeights:
    """The tensors of one rank, of those of the whole model. Implements Weights.

    What has terms of one sum on every rank has its bias once, on rank 0; the others get zeros.
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
        return torch.zeros_like(values) if self._is_elsewhere(name) else values

    def int4(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Int4Groups:
        (rows, columns), part = self._place(name, shape, part)
        return self._source.int4(name, (rows, columns), part)

    def copy_into(
        self, out: Tensor, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> None:
        whole, part = self._place(name, shape, part)
        self._source.copy_into(out, name, whole, part)

    def _place(
        self, name: str, shape: tuple[int, ...], part: Part | None
    ) -> tuple[tuple[int, ...], Part | None]:
        assert part is None, "a part of a part is nothing that a layer asks for"
        return self._shard.whole_and_part(name, shape)

    def _is_elsewhere(self, name: str) -> bool:
        return self._shard.rank > 0 and name.endswith(".bias") and self._shard.is_term(name)


# ---- Layers of which every rank has a part, and what brings the parts together.
#
#     embedding    rows of the tokens of this rank, zeros for others     ─▶ sum
#     attention    heads of this rank ─▶ columns of the output           ─▶ sum
#     MLP          features of this rank ─▶ columns of down              ─▶ sum
#     head         logits of the tokens of this rank                     ─▶ side by side on rank 0
#
# Between them all ranks have the same numbers, and do the same with them.


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
