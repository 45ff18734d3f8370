"""The attention of a token has the same bits, however its prompt is cut into chunks, whatever else
is in the batch, wherever its keys lie, and no matter how many rows read a part of its context."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bros.core.plan import SharedPrefix
from bros.executor.inputs import with_shared_parts
from bros.kernels.interface import TILE_KEYS, AttentionBatch, HeadLayout
from support.kernel_cases import (
    BLOCK_SIZE,
    HEAD_DIMS,
    KV_DTYPES,
    cpu_kernels,
    each_level,
    offsets,
    torch_threads,
)
from support.tier import examples


class Texts:
    """Sequences of tokens with random Q, K and V, all of them in the cache: each from the left to
    the right of its blocks, or from the right to the left.

    prefix: tokens that all sequences begin with, in the same blocks.
    """

    def __init__(
        self, layout: HeadLayout, lengths: Sequence[int], prefix: int, dtype: torch.dtype, seed: int
    ) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.layout, self.lengths, self.prefix = layout, lengths, prefix
        common = torch.randn(prefix, layout.qkv_size, generator=generator)
        self.qkv = [
            torch.cat([common, torch.randn(n - prefix, layout.qkv_size, generator=generator)])
            for n in lengths
        ]
        sizes = [-(-n // BLOCK_SIZE) for n in lengths]
        numbers = iter(rng.sample(range(sum(sizes) + 1), sum(sizes) + 1))
        shared = [next(numbers) for _ in range(prefix // BLOCK_SIZE)]
        self.blocks = [
            [*shared, *(next(numbers) for _ in range(size - len(shared)))] for size in sizes
        ]
        shape = (sum(sizes) + 1, layout.num_kv_heads, BLOCK_SIZE, layout.head_dim)
        self.caches = [torch.full(shape, float("nan")).to(dtype) for _ in range(2)]
        self.positions = torch.full((shape[0], BLOCK_SIZE), -1, dtype=torch.int32)
        self.downwards = [rng.random() < 0.5 for _ in range(shape[0])]
        self.mixed = rng
        for qkv, blocks in zip(self.qkv, self.blocks, strict=True):
            for cache, columns in zip(
                self.caches, qkv[:, layout.q_size :].chunk(2, dim=1), strict=True
            ):
                heads = columns.reshape(len(qkv), layout.num_kv_heads, layout.head_dim)
                for token in range(len(qkv)):
                    block = blocks[token // BLOCK_SIZE]
                    offset = self._offset(block, token)
                    cache[block, :, offset] = heads[token].to(dtype)
                    self.positions[block, offset] = token

    def attend(
        self, level: str, chunks: Sequence[Chunk], shared: Sequence[SharedPrefix] = ()
    ) -> list[Tensor]:
        """The attention of each chunk, computed in one step."""
        in_front = max((piece.end for piece in shared), default=0)
        segments = [self._segments(chunk, in_front) for chunk in chunks]
        batch = AttentionBatch(
            offsets([chunk.end - chunk.first for chunk in chunks]),
            offsets([len(each) for each in segments]),
            torch.tensor([s for each in segments for s in each], dtype=torch.int32).reshape(-1, 3),
        )
        kernels = cpu_kernels(level)
        batch = kernels.prepare(
            with_shared_parts(batch, shared),
            self.layout,
            torch.device("cpu"),
            slot_positions=self.positions,
        )
        qkv = torch.cat([self.qkv[c.text][c.first : c.end] for c in chunks])
        out = kernels.attention(qkv, self.layout, *self.caches, batch, self.layout.head_dim**-0.5)
        return list(out.split([chunk.end - chunk.first for chunk in chunks]))

    def _offset(self, block: int, token: int) -> int:
        offset = token % BLOCK_SIZE
        return BLOCK_SIZE - 1 - offset if self.downwards[block] else offset

    def _segments(self, chunk: Chunk, in_front: int) -> list[tuple[int, int, int]]:
        """In the order of the cache: only the first `in_front` blocks are in that of positions."""
        blocks = self.blocks[chunk.text]
        segments = []
        for at in range(0, chunk.first, BLOCK_SIZE):
            block, size = blocks[at // BLOCK_SIZE], min(BLOCK_SIZE, chunk.first - at)
            low = BLOCK_SIZE - size if self.downwards[block] else 0
            segments.append((block, low, low + size))
        rest = segments[in_front:]
        self.mixed.shuffle(rest)
        return segments[:in_front] + rest


@dataclass(frozen=True)
class Chunk:
    """Tokens [first, end) of a text."""

    text: int
    first: int
    end: int


def cuts(rng: random.Random, text: int, length: int) -> list[Chunk]:
    """The text in chunks of random lengths, many of them of one token."""
    ends = [0]
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + rng.choice([1, 1, 2, 7, 40, 64, 100, 700])))
    return [Chunk(text, *pair) for pair in zip(ends, ends[1:], strict=False)]


@each_level
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    group=st.sampled_from([1, 3, 4, 9]),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(KV_DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(15, long=300))
def test_the_cut_of_a_prompt_changes_no_bit(
    level: str, lengths: list[int], group: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    check_cuts(level, Texts(HeadLayout(2 * group, 2, head_dim), lengths, 0, dtype, seed), seed)


@each_level
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 32])  # tile registers take 32
def test_the_cut_of_a_long_prompt_changes_no_bit(
    level: str, dtype: torch.dtype, head_dim: int
) -> None:
    check_cuts(level, Texts(HeadLayout(3, 1, head_dim), [2500, 1100, 1024], 0, dtype, 1), 1)


def check_cuts(level: str, texts: Texts, seed: int) -> None:
    rng = random.Random(seed)
    whole = [
        texts.attend(level, [Chunk(text, 0, length)])[0]
        for text, length in enumerate(texts.lengths)
    ]
    chunks = [c for text, length in enumerate(texts.lengths) for c in cuts(rng, text, length)]
    rng.shuffle(chunks)
    with torch_threads(2):
        found = texts.attend(level, chunks)
    for chunk, bits in zip(chunks, found, strict=True):
        assert torch.equal(bits, whole[chunk.text][chunk.first : chunk.end]), chunk


@each_level
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("prefix", [4, 15, 16, 20, 37])
@pytest.mark.parametrize("head_dim", [16, 32])  # tile registers take 32
def test_reading_a_prefix_together_changes_no_bit(
    level: str, dtype: torch.dtype, prefix: int, head_dim: int
) -> None:
    """prefix: tiles of it. Some rows read all of it, some also read more together."""
    step = TILE_KEYS // BLOCK_SIZE
    tokens = prefix * TILE_KEYS
    lengths = [tokens + extra for extra in (1, 2, 65, 300, 64, 100, 1100, 33, 7)]
    texts = Texts(HeadLayout(3, 1, head_dim), lengths, tokens, dtype, prefix)
    last = [Chunk(text, length - 1, length) for text, length in enumerate(lengths)]
    last[2] = Chunk(2, lengths[2] - 20, lengths[2])
    inner = prefix // 2 * step
    readers = [row for row in range(len(last)) if row not in (4, 6)]
    shared = [
        SharedPrefix(array("i", range(len(last))), 0, inner),
        SharedPrefix(array("i", readers), inner, prefix * step),
    ]
    alone = [texts.attend(level, [chunk])[0] for chunk in last]
    with torch_threads(2):
        together = texts.attend(level, last, shared)
    pair = texts.attend(level, last[:2], [SharedPrefix(array("i", [0, 1]), 0, prefix * step)])
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.cat(pair), torch.cat(alone[:2]))
