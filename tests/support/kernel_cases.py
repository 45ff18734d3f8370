"""Random inputs for kernels, and the instruction sets to try them on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from bros.kernels.interface import AttentionBatch, HeadLayout, Kernels

BLOCK_SIZE = 16
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (8, 16, 64, 80, 96, 128, 256, 5, 12, 72)
"""The usual ones, multiples of 8 that are no multiple of a vector, and odd ones."""


def compiled_levels() -> list[str]:
    """Instruction sets that CpuKernels can be tried on here; none if it was not built."""
    try:
        from bros.kernels import cpu_ops
    except ImportError:
        return []
    return cpu_ops.levels()


def cpu_kernels(level: str) -> Kernels:
    # Late, because this module also serves where the compiled kernels were not built.
    from bros.kernels.cpu_ops import CpuKernels

    return CpuKernels(level)


# With no level at all pytest skips the test.
each_level = pytest.mark.parametrize("level", compiled_levels())


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of Kernels.attention."""

    qkv: Tensor
    layout: HeadLayout
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch
    scale: float

    def clone(self) -> AttentionCase:
        return AttentionCase(
            self.qkv.clone(),
            self.layout,
            self.k_cache.clone(),
            self.v_cache.clone(),
            self.batch,
            self.scale,
        )

    def row(self, index: int) -> AttentionCase:
        """The same with only one row in the batch."""
        queries = slice(*self.batch.query_start[index : index + 2].tolist())
        segments = slice(*self.batch.segment_start[index : index + 2].tolist())
        qkv = self.qkv[queries].clone()
        batch = AttentionBatch(
            int32([0, len(qkv)]),
            int32([0, segments.stop - segments.start]),
            self.batch.segments[segments].clone(),
        )
        return AttentionCase(qkv, self.layout, self.k_cache, self.v_cache, batch, self.scale)


def split_context(rng: random.Random, length: int) -> list[tuple[int, int]]:
    """(lo, hi) stretches of blocks that hold `length` tokens, some of them empty."""
    parts = []
    while length > 0:
        lo = rng.choice([0, 0, 0, rng.randrange(BLOCK_SIZE)])
        hi = min(BLOCK_SIZE, lo + length, rng.choice([BLOCK_SIZE, BLOCK_SIZE, lo + 1, lo]))
        parts.append((lo, max(lo, hi)))
        length -= max(lo, hi) - lo
    return parts


def make_case(
    rows: Sequence[tuple[int, int]],
    kv_heads: int = 3,
    group: int = 3,
    head_dim: int = 64,
    kv_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> AttentionCase:
    """rows: (tokens in the chunk, tokens cached) of each; segments lie anywhere in any order."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    per_row = [split_context(rng, context) for _, context in rows]
    num_blocks = sum(map(len, per_row)) + 2
    free = rng.sample(range(num_blocks), num_blocks)
    query_start, segment_start, segments = [0], [0], []
    for (tokens, _), parts in zip(rows, per_row, strict=True):
        query_start.append(query_start[-1] + tokens)
        segments += [(free.pop(), lo, hi) for lo, hi in parts]
        segment_start.append(len(segments))
    layout = HeadLayout(kv_heads * group, kv_heads, head_dim)
    cache_shape = (num_blocks, kv_heads, BLOCK_SIZE, head_dim)
    return AttentionCase(
        qkv=torch.randn(query_start[-1], layout.qkv_size, generator=generator),
        layout=layout,
        k_cache=torch.randn(cache_shape, generator=generator).to(kv_dtype),
        v_cache=torch.randn(cache_shape, generator=generator).to(kv_dtype),
        batch=AttentionBatch(
            int32(query_start),
            int32(segment_start),
            torch.tensor(segments, dtype=torch.int32).reshape(-1, 3),
        ),
        scale=head_dim**-0.5,
    )


ROWS = st.lists(
    st.tuples(
        st.one_of(st.just(1), st.integers(1, 12), st.sampled_from([17, 64, 65, 130])),
        st.one_of(st.just(0), st.integers(1, 40), st.integers(200, 700)),
    ),
    min_size=1,
    max_size=5,
)

ATTENTION_CASES = st.builds(
    make_case,
    rows=ROWS,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16]),
    head_dim=st.sampled_from(HEAD_DIMS),
    kv_dtype=st.sampled_from(KV_DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
