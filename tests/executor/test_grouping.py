"""Grouping rows by what they begin with changes which list a block is in, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.core.interfaces import Grouping
from bros.kernels.interface import AttentionBatch, HeadLayout
from bros.kernels.reference import ReferenceKernels
from support.common_prefixes import group_shared
from support.kernel_cases import BLOCK_SIZE, int32
from support.shared_parts import without_shared

Segment = tuple[int, int, int]
Rows = Sequence[Sequence[Segment]]


def full(*blocks: int) -> list[Segment]:
    return [(block, 0, BLOCK_SIZE) for block in blocks]


def batch_of(rows: Rows, lengths: Sequence[int] | None = None) -> AttentionBatch:
    lengths = lengths or [1] * len(rows)
    query_start, segment_start, segments = [0], [0], []
    for row, length in zip(rows, lengths, strict=True):
        query_start.append(query_start[-1] + length)
        segments += row
        segment_start.append(len(segments))
    triples = torch.tensor(segments, dtype=torch.int32).reshape(-1, 3)
    return AttentionBatch(int32(query_start), int32(segment_start), triples)


def parts_of(batch: AttentionBatch) -> list[tuple[list[int], list[int]]]:
    """(rows, blocks) of each shared part."""
    shared = batch.shared
    if shared is None:
        return []
    rows, segments = shared.rows.tolist(), shared.segments.tolist()
    row_start, segment_start = shared.row_start.tolist(), shared.segment_start.tolist()
    return [
        (
            rows[row_start[p] : row_start[p + 1]],
            [block for block, _, _ in segments[segment_start[p] : segment_start[p + 1]]],
        )
        for p in range(shared.num_parts)
    ]


def own_of(batch: AttentionBatch) -> list[list[Segment]]:
    start, segments = batch.segment_start.tolist(), batch.segments.tolist()
    return [
        [tuple(segment) for segment in segments[start[row] : start[row + 1]]]
        for row in range(batch.num_rows)
    ]


def test_groups_nest() -> None:
    rows = [
        [*full(4, 8, 5, 6), (1, 0, 3)],
        [*full(7, 9), (2, 1, 9)],
        [*full(4, 8, 5, 6, 3), (10, 2, 16)],
        full(4, 8, 11, 12),
    ]
    grouped = group_shared(batch_of(rows), Grouping(BLOCK_SIZE, 2))
    assert parts_of(grouped) == [([0, 2, 3], [4, 8]), ([0, 2], [5, 6])]
    assert own_of(grouped) == [rows[0][4:], rows[1], rows[2][4:], rows[3][2:]]


def test_what_is_too_little_is_left_to_what_is_inside_it() -> None:
    rows = [full(1, 2, 3, 4), full(1, 2, 3, 5), full(1, 6, 7, 8)]
    grouped = group_shared(batch_of(rows), Grouping(BLOCK_SIZE, 2))
    assert parts_of(grouped) == [([0, 1], [1, 2, 3])]
    assert own_of(grouped) == [full(4), full(5), rows[2]]


def test_few_rows_keep_what_they_have_in_common() -> None:
    rows = [full(1, 2, 3, 7), full(1, 2, 3, 7), full(1, 2, 3), full(4, 5), full(4, 5)]
    grouped = group_shared(batch_of(rows), Grouping(BLOCK_SIZE, 1, min_rows=3))
    assert parts_of(grouped) == [([0, 1, 2], [1, 2, 3])]
    assert own_of(grouped) == [full(7), full(7), [], *rows[3:]]


def test_only_full_blocks_are_shared() -> None:
    """Two requests may have parts of one block, which are not the same tokens."""
    rows = [[(1, 0, 16), (2, 0, 7)], [(1, 0, 16), (2, 0, 7)], [(3, 0, 5)], [(3, 0, 5)]]
    grouped = group_shared(batch_of(rows), Grouping(BLOCK_SIZE, 1))
    assert parts_of(grouped) == [([0, 1], [1])]


def test_nothing_in_common_leaves_the_batch_alone() -> None:
    for rows in (
        [full(1, 2, 3)],
        [full(1, 2, 3), full(4, 2, 3)],
        [full(1, 2), full(1, 3)],
        [[], []],
        [[(1, 0, 15), *full(2, 3)]] * 2,
    ):
        batch = batch_of(rows)
        assert group_shared(batch, Grouping(BLOCK_SIZE, 2)) is batch


@st.composite
def trees(draw: st.DrawFn) -> Rows:
    """Rows along the branches of a random tree of blocks, each with something of its own."""
    rng = draw(st.randoms(use_true_random=False))
    count = draw(st.integers(1, 12))
    fresh = iter(rng.sample(range(200), 200))
    rows: list[list[Segment]] = []
    for _ in range(count):
        row: list[Segment] = []
        if rows and rng.random() < 0.8:
            parent = rng.choice(rows)
            ends = [i for i, (_, lo, hi) in enumerate(parent) if hi - lo < BLOCK_SIZE]
            most = min([*ends, len(parent)])
            row = list(parent[: rng.randint(0, most)])
        row += full(*(next(fresh) for _ in range(rng.choice([0, 1, 2, 3, 5]))))
        if rng.random() < 0.7:
            lo = rng.randrange(BLOCK_SIZE)
            row.append((next(fresh), lo, rng.randint(lo, BLOCK_SIZE)))
        rows.append(row)
    return rows


@given(trees(), st.integers(1, 4), st.integers(2, 4))
def test_every_row_keeps_its_segments(rows: Rows, min_blocks: int, min_rows: int) -> None:
    batch = batch_of(rows)
    grouped = group_shared(batch, Grouping(BLOCK_SIZE, min_blocks, min_rows))
    again = without_shared(grouped)
    assert [sorted(row) for row in own_of(again)] == [sorted(row) for row in rows]
    listed = [row for members, _ in parts_of(grouped) for row in members]
    for members, blocks in parts_of(grouped):
        assert len(blocks) >= min_blocks and len(members) >= min_rows
        assert members == sorted(set(members))
    if min_rows > 2:
        return
    # Nothing of min_blocks or more that two rows have in common is read twice.
    own = own_of(grouped)
    for one in range(len(rows)):
        for other in range(one):
            covered = len(rows[one]) - len(own[one])
            common = 0
            for left, right in zip(rows[one], rows[other], strict=False):
                if left != right or left[2] - left[1] < BLOCK_SIZE:
                    break
                common += 1
            if common >= min_blocks:
                assert one in listed and other in listed
                assert common - covered < min_blocks


@given(trees(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_attention_is_the_same(rows: Rows, min_blocks: int, rng: random.Random) -> None:
    kernels, layout = ReferenceKernels(), HeadLayout(4, 2, 8)
    lengths = [rng.choice([1, 1, 1, 5]) for _ in rows]
    batch = batch_of(rows, lengths)
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    qkv = torch.randn(sum(lengths), layout.qkv_size, generator=generator)
    k_cache, v_cache = torch.randn(2, 200, 2, BLOCK_SIZE, 8, generator=generator)
    scale = layout.head_dim**-0.5
    plain = kernels.attention(qkv, layout, k_cache, v_cache, batch, scale)
    grouped = group_shared(batch, Grouping(BLOCK_SIZE, min_blocks))
    again = kernels.attention(qkv, layout, k_cache, v_cache, grouped, scale)
    torch.testing.assert_close(again, plain, atol=1e-5, rtol=0)


def test_many_levels_do_not_overflow_anything() -> None:
    """As many nested groups as rows: each row has one block more in common with the next."""
    rows = [full(*range(row + 1), 5000 + row) for row in range(300)]
    grouped = group_shared(batch_of(rows), Grouping(BLOCK_SIZE, 1))
    assert len(parts_of(grouped)) == 299
    assert [len(own) for own in own_of(grouped)] == [1] * 299 + [2]


def test_a_row_ends_where_it_ends() -> None:
    """Also if the next one in the list goes on as another row of the group does."""
    rows = [full(1, 2), full(3, 4), full(1, 2, 3, 4, 5), full(1, 2, 3, 4, 6)]
    grouped = group_shared(batch_of(rows), Grouping(BLOCK_SIZE, 2))
    assert parts_of(grouped) == [([0, 2, 3], [1, 2]), ([2, 3], [3, 4])]
    assert own_of(grouped) == [[], full(3, 4), full(5), full(6)]
