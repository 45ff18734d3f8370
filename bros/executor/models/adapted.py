"""Checkpoints of other architectures as those of a Llama: the same tensors in other places, or with
factors that the architecture has in its code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from bros.executor.models.spec import ModelSpec
from bros.executor.weights import LAYER, Int4Groups, Part, Weights


class Rows(NamedTuple):
    """Rows of a stored tensor.

    layer: that it belongs to.
    first: of the rows.
    total: rows of the tensor.
    """

    layer: str
    first: int
    total: int


class _Origin(NamedTuple):
    """The stored tensor behind a name, its whole shape, and the part of it that is wanted."""

    name: str
    shape: tuple[int, ...]
    part: Part | None


class AdaptedWeights:
    """Tensors with the names and values of a Llama. Implements Weights.

    model.layers.0.self_attn.k_proj.weight   rows of      model.layers.0.self_attn.qkv_proj.weight
    model.layers.0.self_attn.o_proj.weight   factor times the stored tensor
    """

    def __init__(
        self, source: Weights, rows: Mapping[str, Rows], factors: Mapping[str, float]
    ) -> None:
        """rows: layer -> where its tensors are; else they are stored as they are.
        factors: layer -> factor of its tensors.
        """
        self._source = source
        self._rows = rows
        self._factors = factors

    @property
    def unread(self) -> frozenset[str]:
        """See Weights. The names of stored tensors."""
        return self._source.unread

    def dense(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """See Weights."""
        values = self._source.dense(*self._origin(name, shape, part))
        factor = self._factor(name)
        return values if factor == 1.0 else values * factor  # the file's own memory stays

    def int4(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Int4Groups:
        """See Weights."""
        origin, factor = self._origin(name, shape, part), self._factor(name)
        rows, columns = origin.shape
        groups = self._source.int4(origin.name, (rows, columns), origin.part)
        return Int4Groups(groups.codes, groups.scale * factor, groups.minimum * factor)

    def is_stored_in_4_bits(self, name: str) -> bool:
        """See Weights."""
        return self._source.is_stored_in_4_bits(self._origin(name, (), None).name)

    def copy_into(
        self, out: Tensor, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> None:
        """See Weights."""
        if self._factor(name) == 1.0:
            self._source.copy_into(out, *self._origin(name, shape, part))
        else:
            out.copy_(self.dense(name, shape, part))  # rounded once

    def _factor(self, name: str) -> float:
        found = LAYER.search(name)
        return self._factors.get(found[1], 1.0) if found else 1.0

    def _origin(self, name: str, shape: tuple[int, ...], part: Part | None) -> _Origin:
        found = LAYER.search(name)
        rows = self._rows.get(found[1]) if found else None
        if found is None or rows is None:
            return _Origin(name, shape, part)
        stored = f"{name[: found.start(1)]}{rows.layer}{name[found.end(1) :]}"
        if not shape:
            return _Origin(stored, shape, part)
        first, *others = part or [range(size) for size in shape]
        first = range(rows.first + first.start, rows.first + first.stop)
        return _Origin(stored, (rows.total, *shape[1:]), (first, *others))


def adapted(spec: ModelSpec, source: Weights) -> Weights:
    """The tensors of a checkpoint under the names, and with the values, that a Decoder takes.

    spec: of the whole model.
    """
    rows: dict[str, Rows] = {}
    if spec.stacked:
        q_size, kv_size = (heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads))
        inner, width = spec.intermediate_size, q_size + 2 * kv_size
        rows = {
            "q_proj": Rows("qkv_proj", 0, width),
            "k_proj": Rows("qkv_proj", q_size, width),
            "v_proj": Rows("qkv_proj", q_size + kv_size, width),
            "gate_proj": Rows("gate_up_proj", 0, 2 * inner),
            "up_proj": Rows("gate_up_proj", inner, 2 * inner),
        }
    if not rows and not spec.factors:
        return source
    return AdaptedWeights(source, rows, spec.factors)
