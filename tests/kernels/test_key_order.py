"""Segments in the order of the cache become pieces in the order of positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.kernels.interface import AttentionBatch, SharedParts
from support.kernel_cases import compiled_levels, int32

pytestmark = pytest.mark.skipif(not compiled_levels(), reason="the CPU kernels were not built")

BLOCKS, SIZE = 6, 8


def slots_of(pieces: list[list[int]]) -> list[int]:
    found: list[int] = []
    for block, low, high in pieces:
        steps = range(low, high) if low <= high else range(low - 1, high - 1, -1)
        found += [block * SIZE + slot for slot in steps]
    return found


@given(
    order=st.permutations(range(BLOCKS * SIZE)),
    cuts=st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), min_size=3, max_size=9),
    rows=st.integers(1, 3),
    mostly_stacks=st.booleans(),
)
def test_keys_come_in_the_order_of_their_positions(
    order: list[int], cuts: list[tuple[int, int]], rows: int, mostly_stacks: bool
) -> None:
    from bros.kernels.cpu_ops import in_order

    positions = torch.tensor(order, dtype=torch.int32).view(BLOCKS, SIZE)
    if mostly_stacks:
        positions = positions.sort(dim=1, descending=order[0] % 2 == 0).values.contiguous()
    segments = [[i % BLOCKS, min(cut), max(cut)] for i, cut in enumerate(cuts)][:BLOCKS]
    start = [len(segments) * row // rows for row in range(rows + 1)]
    batch = AttentionBatch(
        int32(range(rows + 1)),
        int32(start),
        torch.tensor(segments, dtype=torch.int32),
        SharedParts(int32([0, 1]), int32([0]), int32([0, 2]), int32(segments[:2])),
    )
    found = in_order(batch, positions)
    assert found.shared is not None
    cases = [
        (segments[start[row] : start[row + 1]], found.segment_start[row : row + 2], found.segments)
        for row in range(rows)
    ]
    cases.append((segments[:2], found.shared.segment_start, found.shared.segments))
    for before, bounds, pieces in cases:
        slots = slots_of(pieces[bounds[0] : bounds[1]].tolist())
        where = positions.view(-1)[slots].tolist()
        assert where == sorted(where)
        assert sorted(slots) == sorted(slots_of(before))


def test_unknown_positions_stay_where_they_are() -> None:
    from bros.kernels.cpu_ops import in_order

    positions = torch.full((2, SIZE), -1, dtype=torch.int32)
    positions[1] = torch.arange(SIZE).flip(0)
    segments = [[0, 0, SIZE], [1, 2, 6]]
    batch = AttentionBatch(int32([0, 1]), int32([0, 2]), torch.tensor(segments).int())
    assert in_order(batch, positions).segments.tolist() == [[0, 0, SIZE], [1, 6, 2]]


@pytest.mark.parametrize("segment", [[-1, 0, 1], [2, 0, 1], [0, -1, 2], [0, 0, SIZE + 1]])
def test_segments_outside_the_cache_are_refused(segment: list[int]) -> None:
    from bros.kernels.cpu_ops import in_order

    batch = AttentionBatch(int32([0, 1]), int32([0, 1]), torch.tensor([segment]).int())
    with pytest.raises(IndexError, match="segment outside"):
        in_order(batch, torch.full((2, SIZE), 0, dtype=torch.int32))
