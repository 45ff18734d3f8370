"""Random inputs for kernels, and the instruction sets to try them on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase
from hypothesis import strategies as st
from torch import Tensor

from bros.kernels.interface import AttentionBatch, HeadLayout, Kernels, SharedParts
from bros.kernels.reference import ReferenceKernels
from support.tier import examples

BLOCK_SIZE = 16
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (8, 16, 64, 80, 96, 128, 256, 5, 12, 72)
"""The usual ones, multiples of 8 that are no multiple of a vector, and odd ones."""

PAIR_LEVELS = ("avx512-amx", "amx-emulated", "avx512-bf16")
"""Levels that multiply pairs of bf16, with bf16 weights and a KV cache in bf16."""

TILE_LEVELS = ("avx512-amx", "amx-emulated")
"""Levels that multiply tiles: int8 and int4 weights, too, are widened to bf16 there."""


def compiled_levels() -> list[str]:
    """Instruction sets that CpuKernels can be tried on here; none if it was not built."""
    try:
        from bros.kernels import cpu_ops
    except ImportError:
        return []
    return cpu_ops.levels()


def tested_levels() -> list[str]:
    """Those of this machine, and emulated ones, which run the kernels of other machines."""
    try:
        from bros.kernels import cpu_ops
    except ImportError:
        return []
    return cpu_ops.levels() + cpu_ops.emulated_levels()


@dataclass(frozen=True)
class Backend:
    """Kernels to test, and where they run."""

    name: str
    device: torch.device = torch.device("cpu")

    @property
    def is_triton(self) -> bool:
        return self.name == "triton"

    @property
    def is_interpreted(self) -> bool:
        return self.is_triton and self.device.type == "cpu"

    @property
    def examples(self) -> int:
        """Of hypothesis. An interpreter takes about a second for one."""
        return examples(3, long=20) if self.is_interpreted else examples(20, long=600)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Of hypothesis. Making a failing example smaller would take an interpreter ages."""
        return (Phase.explicit, Phase.generate) if self.is_interpreted else tuple(Phase)

    def kernels(self) -> Kernels:
        if not self.is_triton:
            return cpu_kernels(self.name)
        # Late, because Triton need not be installed.
        from bros.kernels.triton.ops import TritonKernels

        return TritonKernels(self.device)

    def attention_cases(self) -> st.SearchStrategy[AttentionCase]:
        return SMALL_ATTENTION_CASES if self.is_interpreted else ATTENTION_CASES


def triton_backend() -> Backend:
    """On the GPU if there is one; tests/conftest.py lets Triton interpret where there is none."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Backend("triton", device)


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

each_backend = pytest.mark.parametrize(
    "backend",
    [
        *(Backend(level) for level in tested_levels()),
        pytest.param(triton_backend(), marks=needs_triton),
    ],
    ids=lambda backend: backend.name,
)


def attend(kernels: Kernels, case: AttentionCase, device: torch.device) -> Tensor:
    """The attention of a case, computed on a device, on the CPU."""
    case = case.to(device)
    batch = kernels.prepare(case.batch, case.layout, device)
    return kernels.attention(
        case.qkv, case.layout, case.k_cache, case.v_cache, batch, case.scale
    ).cpu()


def exact_attention(case: AttentionCase) -> Tensor:
    """In double precision, by the definition."""
    return ReferenceKernels().attention(
        case.qkv.double(), case.layout, case.k_cache, case.v_cache, case.batch, case.scale
    )


def cpu_kernels(level: str) -> Kernels:
    # Late, because this module also serves where the compiled kernels were not built.
    from bros.kernels.cpu_ops import CpuKernels

    return CpuKernels(level)


# With no level at all pytest skips the test.
each_level = pytest.mark.parametrize("level", tested_levels())

_if_built = pytest.mark.skipif(not compiled_levels(), reason="the CPU kernels were not built")
reference_and_cpu = pytest.mark.parametrize(
    "kernels", ["reference", pytest.param("cpu", marks=_if_built)]
)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def int32(values: Sequence[Any]) -> Tensor:
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

    def to(self, device: torch.device) -> AttentionCase:
        """Tensors on a device; the batch stays on the CPU."""
        return replace(
            self,
            qkv=self.qkv.to(device),
            k_cache=self.k_cache.to(device),
            v_cache=self.v_cache.to(device),
        )

    def with_rounded_chunks(self) -> AttentionCase:
        """The same with K and V of the chunks rounded to the type of the cache."""
        case, q_size = self.clone(), self.layout.q_size
        case.qkv[:, q_size:] = case.qkv[:, q_size:].to(self.k_cache.dtype).to(case.qkv.dtype)
        return case

    def row(self, index: int) -> AttentionCase:
        """The same with only one row in the batch, and the parts it shares as its own."""
        queries = slice(*self.batch.query_start[index : index + 2].tolist())
        own = slice(*self.batch.segment_start[index : index + 2].tolist())
        segments = torch.cat([*self.shared_segments(index), self.batch.segments[own]])
        qkv = self.qkv[queries].clone()
        batch = AttentionBatch(int32([0, len(qkv)]), int32([0, len(segments)]), segments)
        return AttentionCase(qkv, self.layout, self.k_cache, self.v_cache, batch, self.scale)

    def shared_segments(self, row: int) -> list[Tensor]:
        """Of every part that the row reads."""
        shared = self.batch.shared
        if shared is None:
            return []
        readers = pairwise(shared.row_start.tolist())
        segments = pairwise(shared.segment_start.tolist())
        return [
            shared.segments[first:end]
            for (start, stop), (first, end) in zip(readers, segments, strict=True)
            if row in shared.rows[start:stop]
        ]


def split_context(rng: random.Random, length: int) -> list[tuple[int, int]]:
    """(lo, hi) stretches of blocks that hold `length` tokens, some of them empty."""
    parts = []
    while length > 0:
        lo = rng.choice([0, 0, 0, rng.randrange(BLOCK_SIZE)])
        hi = min(BLOCK_SIZE, lo + length, rng.choice([BLOCK_SIZE, BLOCK_SIZE, lo + 1, lo]))
        parts.append((lo, max(lo, hi)))
        length -= max(lo, hi) - lo
    return parts


Parts = Sequence[tuple[Sequence[int], int]]
"""Shared parts: (rows that read it, tokens cached) of each."""


def make_case(
    rows: Sequence[tuple[int, int]],
    kv_heads: int = 3,
    group: int = 3,
    head_dim: int = 64,
    kv_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    parts: Parts = (),
) -> AttentionCase:
    """rows: (tokens in the chunk, tokens cached) of each; segments lie anywhere in any order."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    private = [split_context(rng, context) for _, context in rows]
    shared = [split_context(rng, context) for _, context in parts]
    num_blocks = sum(map(len, private + shared)) + 2
    free = rng.sample(range(num_blocks), num_blocks)
    segment_start, segments = place(private, free)
    layout = HeadLayout(kv_heads * group, kv_heads, head_dim)
    cache_shape = (num_blocks, kv_heads, BLOCK_SIZE, head_dim)
    query_start = offsets([tokens for tokens, _ in rows])
    return AttentionCase(
        qkv=torch.randn(int(query_start[-1]), layout.qkv_size, generator=generator),
        layout=layout,
        k_cache=torch.randn(cache_shape, generator=generator).to(kv_dtype),
        v_cache=torch.randn(cache_shape, generator=generator).to(kv_dtype),
        batch=AttentionBatch(
            query_start,
            segment_start,
            segments,
            SharedParts(
                offsets([len(readers) for readers, _ in parts]),
                int32([row for readers, _ in parts for row in readers]),
                *place(shared, free),
            )
            if parts
            else None,
        ),
        scale=head_dim**-0.5,
    )


def place(stretches: list[list[tuple[int, int]]], free: list[int]) -> tuple[Tensor, Tensor]:
    """segment_start and segments of (lo, hi) stretches per row or part, each in a block of its own,
    which is taken from `free`."""
    segments = [(free.pop(), lo, hi) for parts in stretches for lo, hi in parts]
    return (
        offsets([len(parts) for parts in stretches]),
        torch.tensor(segments, dtype=torch.int32).reshape(-1, 3),
    )


def offsets(lengths: Sequence[int]) -> Tensor:
    return int32([0, *accumulate(lengths)])


ROWS = st.lists(
    st.tuples(
        st.one_of(st.just(1), st.integers(1, 12), st.sampled_from([17, 64, 65, 130])),
        st.one_of(st.just(0), st.integers(1, 40), st.integers(200, 700)),
    ),
    min_size=1,
    max_size=5,
)

ANY_PARTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), max_size=5, unique=True),
        st.one_of(st.just(0), st.integers(1, 40), st.integers(200, 300)),
    ),
    max_size=3,
)


def make_any_case(rows: Sequence[tuple[int, int]], parts: Parts, **rest: object) -> AttentionCase:
    """Parts name rows up to 4; those that the batch does not have are left out."""
    existing = [([r for r in readers if r < len(rows)], tokens) for readers, tokens in parts]
    return make_case(rows, parts=existing, **rest)  # type: ignore[arg-type]


ATTENTION_CASES = st.builds(
    make_any_case,
    rows=ROWS,
    parts=ANY_PARTS,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16]),
    head_dim=st.sampled_from(HEAD_DIMS),
    kv_dtype=st.sampled_from(KV_DTYPES),
    seed=st.integers(0, 2**32 - 1),
)

SMALL_ATTENTION_CASES = st.builds(
    make_any_case,
    rows=st.lists(
        st.tuples(
            st.one_of(st.just(1), st.just(1), st.integers(0, 40)),
            st.one_of(st.just(0), st.integers(1, 40), st.integers(100, 300)),
        ),
        min_size=1,
        max_size=5,
    ),
    parts=ANY_PARTS,
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 4, 7, 8]),
    head_dim=st.sampled_from(HEAD_DIMS),
    kv_dtype=st.sampled_from(KV_DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
"""For an interpreter, which takes some milliseconds per program."""
