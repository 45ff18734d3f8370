"""How sizes are split, which rank has which heads, and that all parts form the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bros.core.errors import ConfigError
from bros.executor.models.build import build_decoder
from bros.executor.models.spec import ModelSpec
from bros.executor.parallel.ranks import SingleRank
from bros.executor.parallel.sharding import ShardedWeights, partition, shards_of
from bros.executor.target import CPU, Target
from bros.executor.weights import Int4Groups, Part, RandomWeights, part_shape
from bros.kernels.reference import ReferenceKernels
from support.checkpoints import family_specs

SPECS = family_specs()
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}


@given(total=st.integers(1, 5000), parts=st.integers(1, 40), unit=st.sampled_from([1, 16, 32]))
def test_a_cut_covers_everything_once_and_evenly(total: int, parts: int, unit: int) -> None:
    ranges = partition(total, parts, unit)
    assert len(ranges) == parts
    assert [index for part in ranges for index in part] == list(range(total))
    if total >= unit * parts:
        assert all(part.start % unit == 0 for part in ranges)
    else:
        unit = 1
    units = [math.ceil(len(part) / unit) for part in ranges]
    assert max(units) - min(units) <= 1 and units == sorted(units, reverse=True)
    assert all(units) or total < parts


@given(kv=st.integers(1, 12), group=st.integers(1, 8), data=st.data())
def test_every_rank_has_the_kv_heads_of_its_queries(
    kv: int, group: int, data: st.DataObject
) -> None:
    spec = ModelSpec.from_config(
        SMOLLM2 | {"num_attention_heads": kv * group, "num_key_value_heads": kv, "head_dim": 64}
    )
    size = data.draw(st.integers(1, kv * group))
    shards = shards_of(spec, size)
    assert [head for shard in shards for head in shard.heads] == list(range(kv * group))
    holders = Counter(head for shard in shards for head in shard.kv_heads)
    assert sorted(holders) == list(range(kv))
    assert max(holders.values()) == 1 or size > kv
    for shard in shards:
        queries_of = Counter(head // group for head in shard.heads)
        assert sorted(queries_of) == list(shard.kv_heads)
        assert len(set(queries_of.values())) == 1, "as many for each, as kernels take for granted"
        local = shard.local
        assert (local.num_heads, local.num_kv_heads) == (len(shard.heads), len(shard.kv_heads))
    most, least = (choose(len(shard.kv_heads) for shard in shards) for choose in (max, min))
    assert most - least <= 1


def test_heads_that_come_out_uneven_are_shared_out_all_the_same() -> None:
    spec = ModelSpec.from_config(SMOLLM2)

    def heads(size: int) -> list[tuple[list[int], list[int]]]:
        return [(list(s.heads), list(s.kv_heads)) for s in shards_of(spec, size)]

    assert heads(2) == [([0, 1, 2, 3, 4, 5], [0, 1]), ([6, 7, 8], [2])]
    assert heads(3) == [([0, 1, 2], [0]), ([3, 4, 5], [1]), ([6, 7, 8], [2])]
    assert heads(4) == [([0, 1], [0]), ([2], [0]), ([3, 4, 5], [1]), ([6, 7, 8], [2])]


def test_more_ranks_than_heads_are_refused_with_the_most_there_may_be() -> None:
    spec = ModelSpec.from_config(SMOLLM2)
    with pytest.raises(ConfigError, match=r"--tp: 10 ranks.* 9 .*3 KV heads.* at most --tp 9"):
        shards_of(spec, 10)


class Watched(RandomWeights):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, tuple[int, ...], Part | None]] = []

    def dense(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        self.asked.append((name, shape, part))
        return torch.ones(part_shape(shape, part))

    def int4(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Int4Groups:
        return Int4Groups.from_dense(self.dense(name, shape, part))

    def copy_into(
        self, out: Tensor, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> None:
        out.copy_(self.dense(name, shape, part))


class Silent(SingleRank):
    """A rank that is built, and never asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank  # type: ignore[misc]
        self.size = size  # type: ignore[misc]


def parts_of(spec: ModelSpec, target: Target, size: int) -> Iterator[Watched]:
    for rank in range(size):
        source = Watched()
        build_decoder(spec, source, ReferenceKernels(), target, 8, Silent(rank, size))
        yield source


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize(
    "target", [Target(CPU, "fp32", packed=True), Target(CPU, "bf16", packed=False)], ids=str
)
def test_the_matrices_of_all_ranks_are_those_of_the_model_and_no_more(
    family: str, target: Target, size: int
) -> None:
    """Only what is small, or has fewer heads than there are ranks, is there more than once."""
    spec = SPECS[family]
    (whole,) = parts_of(spec, target, 1)
    counts = {name: torch.zeros(shape) for name, shape, _ in whole.asked}
    stacked = [name for name, _, part in whole.asked if part is not None]
    assert all("qkv_proj" in name or "gate_up_proj" in name for name in stacked)
    assert bool(stacked) == spec.stacked
    for rank in parts_of(spec, target, size):
        assert [(name, shape) for name, shape, _ in rank.asked] == [
            (name, shape) for name, shape, _ in whole.asked
        ]
        for name, shape, part in rank.asked:
            index = part or tuple(range(length) for length in shape)
            counts[name][tuple(slice(axis.start, axis.stop) for axis in index)] += 1
    shared_kv = math.ceil(size / spec.num_kv_heads)
    for name, count in counts.items():
        assert count.min() >= 1, f"some of {name} is nowhere"
        if "k_proj" in name or "v_proj" in name:  # or of both, with the queries
            assert count.max() == shared_kv
        elif count.dim() == 2 and "embed_positions" not in name:
            assert count.max() == 1, f"some of {name} is on two ranks"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("layer", ["o_proj", "down_proj"])
def test_the_bias_of_a_sum_is_on_one_rank(size: int, layer: str) -> None:
    shards = shards_of(SPECS["llama-biases"], size)
    name = f"model.layers.0.{layer}.bias"
    parts = [ShardedWeights(RandomWeights(), shard).dense(name, (64,)) for shard in shards]
    assert torch.equal(sum(parts), RandomWeights().dense(name, (64,)))
    assert [bool(part.any()) for part in parts] == [True] + [False] * (size - 1)
