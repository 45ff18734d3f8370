"""The work list of attention, read back and compared with what every query has to see."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.kernels.interface import GraphLimits, HeadLayout
from bros.kernels.triton.buffers import GraphWork, ListSizes, WorkTensors, shared_segments
from bros.kernels.triton.plan import (
    LISTED,
    OWN,
    OWN_END,
    PARTIAL,
    QUERIES,
    QUERY,
    SEGMENT,
    SEGMENT_END,
    PlanRules,
    PrecomputedChunks,
    Split,
    WorkList,
    plan_work,
)
from support.kernel_cases import ANY_PARTS, ROWS, AttentionCase, make_any_case, make_case
from support.shared_parts import without_shared

SPLITS = st.builds(
    Split,
    programs=st.integers(1, 500),
    grain=st.sampled_from([1, 4, 8]),
    least=st.integers(1, 3),
    long=st.integers(1, 9),
    waves=st.integers(1, 5),
)
RULES = st.builds(
    PlanRules,
    one=SPLITS,
    tile=SPLITS,
    tile_tokens=st.sampled_from([1, 3, 8, 32]),
    programs_per_one=st.integers(1, 8),
    programs_per_tile=st.integers(1, 8),
)
CASES = st.builds(
    make_any_case,
    rows=st.one_of(ROWS, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 500)), max_size=5)),
    parts=ANY_PARTS,
    kv_heads=st.just(1),
    group=st.just(1),
    head_dim=st.just(8),
    seed=st.integers(0, 2**32 - 1),
)

Seen = tuple[Counter[tuple[int, ...]], list[tuple[int, int]]]
"""Segments with how often a query reads each, and ranges of the step's own tokens."""


def items_of(work: WorkList) -> list[list[int]]:
    items: list[list[int]] = np.concatenate([work.one_items, work.tile_items]).tolist()
    return items


def queries_of(item: list[int], work: WorkList) -> list[int]:
    numbers = range(item[QUERY], item[QUERY] + item[QUERIES])
    return [int(work.listed[n]) for n in numbers] if item[LISTED] else list(numbers)


def what_is_read(work: WorkList) -> dict[int, Seen]:
    """Per query token."""
    seen: dict[int, Seen] = {}
    for item in items_of(work):
        segments = work.segments[item[SEGMENT] : item[SEGMENT_END]].tolist()
        for query in queries_of(item, work):
            read, own = seen.setdefault(query, (Counter(), []))
            read.update(map(tuple, segments))
            if item[OWN_END] > item[OWN]:
                own.append((item[OWN], min(item[OWN_END], query + 1)))
    return seen


def what_should_be(case: AttentionCase) -> dict[int, Seen]:
    batch = without_shared(case.batch)
    query_start = batch.query_start.tolist()
    segment_start = batch.segment_start.tolist()
    expected = {}
    for row in range(batch.num_rows):
        segments = batch.segments[segment_start[row] : segment_start[row + 1]].tolist()
        for query in range(query_start[row], query_start[row + 1]):
            own = [(query_start[row], query + 1)]
            expected[query] = (Counter(map(tuple, segments)), own)
    return expected


@given(case=CASES, rules=RULES)
def test_every_query_reads_what_it_should_once(case: AttentionCase, rules: PlanRules) -> None:
    work = plan_work(case.batch, rules)
    assert what_is_read(work) == what_should_be(case)
    assert (work.one_items[:, QUERIES] == 1).all()
    assert (work.tile_items[:, QUERIES] <= rules.tile_tokens).all()


@given(case=CASES, rules=RULES)
def test_every_query_is_written_once_or_merged_of_all_its_parts(
    case: AttentionCase, rules: PlanRules
) -> None:
    work = plan_work(case.batch, rules)
    direct, parts = [], {}
    for item in items_of(work):
        for i, query in enumerate(queries_of(item, work)):
            if item[PARTIAL] < 0:
                direct.append(query)
            else:
                parts.setdefault(query, []).append(item[PARTIAL] + i)
    slots = [slot for numbers in parts.values() for slot in numbers]
    assert sorted(slots) == list(range(work.partials))
    starts = work.merge_start.tolist()
    merged = {
        token: sorted(work.merge_slots[starts[i] : starts[i + 1]].tolist())
        for i, token in enumerate(work.merge_tokens.tolist())
    }
    assert merged == {query: sorted(numbers) for query, numbers in parts.items()}
    assert sorted([*direct, *merged]) == list(range(int(case.batch.query_start[-1])))


@given(case=CASES, rules=RULES, which=st.lists(st.booleans(), min_size=5, max_size=5))
def test_rows_whose_own_part_is_done_only_read_their_context(
    case: AttentionCase, rules: PlanRules, which: list[bool]
) -> None:
    lengths = case.batch.query_start.diff().numpy()
    done = np.array(which[: len(lengths)], np.bool_)
    tokens = np.flatnonzero(np.repeat(done, lengths)).tolist()
    first = tokens[0] if tokens else 0
    work = plan_work(case.batch, rules, PrecomputedChunks(done, first))
    read = what_is_read(work)
    # A row without context reads nothing, and then nothing is expected of it, either.
    expected = {
        query: (segments, [] if query in tokens else own)
        for query, (segments, own) in what_should_be(case).items()
        if segments or query not in tokens
    }
    assert {query: seen for query, seen in read.items() if seen != (Counter(), [])} == expected
    slots = dict(zip(work.merge_tokens.tolist(), slots_of(work), strict=True))
    for query in read:
        numbers = slots.get(query, [])
        assert [n for n in numbers if n < 0] == ([-1 - query + first] if query in tokens else [])
    assert sorted(n for own in slots.values() for n in own if n >= 0) == list(range(work.partials))


def slots_of(work: WorkList) -> list[list[int]]:
    """Of every merged token."""
    return [part.tolist() for part in np.split(work.merge_slots, work.merge_start[1:-1])] * bool(
        len(work.merge_tokens)
    )


@given(
    rows=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(0, 90)), st.integers(0, 700)), max_size=6
    ),
    parts=ANY_PARTS,
    rules=RULES,
    seed=st.integers(0, 1000),
)
def test_lists_within_the_limits_of_a_graph_fit(
    rows: list[tuple[int, int]], parts: list[tuple[list[int], int]], rules: PlanRules, seed: int
) -> None:
    batch = make_any_case(rows, parts, kv_heads=1, group=1, head_dim=8, seed=seed).batch
    shared, single = batch.shared, np.array([tokens == 1 for tokens, _ in rows], np.bool_)
    in_chunks = [tokens for tokens, _ in rows if tokens > 1]
    one_each = all(tokens == 1 for tokens, _ in rows)
    limits = GraphLimits(
        rows=len(rows),
        segments=len(batch.segments) + (0 if shared is None else shared_segments(shared, single)),
        shared_rows=0 if shared is None else len(shared.rows),
        chunks=0 if one_each else max(1, len(in_chunks)),
        tokens=0 if one_each else sum(tokens for tokens, _ in rows),
    )
    capacity = ListSizes.for_limits(limits, rules)
    layout = HeadLayout(1, 1, 8)
    tensors = WorkTensors.allocate(capacity, layout, torch.device("cpu"))
    assert GraphWork(limits, tensors, 16).fits(batch)
    assert capacity.holds(plan_work(batch, rules))


def test_recordings_launch_few_more_programs_than_their_steps_can_use() -> None:
    """Programs past the end of a list cost time in every replay, however little they do."""
    one = Split(132 * 4, grain=8, least=1, long=4, waves=4)
    tile = Split(132, grain=8, least=1, long=4, waves=1)
    rules = PlanRules(one, tile, tile_tokens=32, programs_per_one=8, programs_per_tile=8)
    segments = 8192 // 16 * 5 // 4 + 16
    alone = ListSizes.for_limits(GraphLimits(1, segments), rules)
    assert alone.one_items <= 1 + 132 * 4 // 8 and alone.tile_items == 0
    assert ListSizes.for_limits(GraphLimits(1, 15), rules).one_items == 2
    shared = ListSizes.for_limits(GraphLimits(256, 20_000, shared_rows=512), rules)
    assert shared.tile_items <= 512 // 2 + 132 // 8


@pytest.mark.parametrize(
    ("rows", "limits", "fits"),
    [
        ([(1, 100), (1, 0)], GraphLimits(2, 100), True),
        ([(1, 100), (1, 0)], GraphLimits(1, 100), False),
        ([(1, 100), (1, 0)], GraphLimits(2, 3), False),
        ([(2, 10)], GraphLimits(2, 100), False),
        ([(0, 10), (2, 0)], GraphLimits(2, 100), False),
        ([(1, 10), (5, 20)], GraphLimits(2, 100, chunks=1, tokens=6), True),
        ([(1, 10), (5, 20)], GraphLimits(2, 100, chunks=1, tokens=5), False),
        ([(2, 10), (5, 20)], GraphLimits(2, 100, chunks=1, tokens=9), False),
        ([], GraphLimits(2, 100), True),
    ],
)
def test_only_steps_within_the_limits_fit(
    rows: list[tuple[int, int]], limits: GraphLimits, fits: bool
) -> None:
    capacity = ListSizes(1, 1, 1, 1, 1, 1, 1)
    tensors = WorkTensors.allocate(capacity, HeadLayout(1, 1, 8), torch.device("cpu"))
    assert GraphWork(limits, tensors, 16).fits(make_case(rows).batch) is fits


def test_shared_parts_count_against_the_limits() -> None:
    batch = make_case([(1, 0), (1, 0)], parts=[((0, 1), 16)]).batch
    tensors = WorkTensors.allocate(
        ListSizes(1, 1, 1, 1, 1, 1, 1), HeadLayout(1, 1, 8), torch.device("cpu")
    )
    assert GraphWork(GraphLimits(2, 100, shared_rows=2), tensors, 16).fits(batch)
    assert not GraphWork(GraphLimits(2, 100, shared_rows=1), tensors, 16).fits(batch)
    assert not GraphWork(GraphLimits(2, 0, shared_rows=2), tensors, 16).fits(batch)


def test_a_prefix_is_read_once_for_all_rows_that_share_it() -> None:
    case = make_case([(1, 5)] * 20, kv_heads=1, parts=[(range(20), 160)])
    split = Split(programs=1, grain=4)
    work = plan_work(case.batch, PlanRules(split, split, 32, 1, 1))
    [item] = work.tile_items.tolist()
    assert item[QUERIES] == 20 and item[LISTED] == 1
    assert len(work.one_items) == len(work.merge_tokens) == 20


def test_long_contexts_fill_the_device_and_short_items_do_not_flood_it() -> None:
    split = Split(programs=64, grain=1, least=2, long=4, waves=2)
    assert split.item_length(10, 8) == 2  # few grains: no program has fewer than two
    assert split.item_length(24, 8) == 3  # one wave of even programs
    assert split.item_length(80, 8) == 5  # long ones: up to two waves
    assert split.item_length(800, 8) == 50


def test_items_of_a_unit_are_even() -> None:
    case = make_case([(1, 0), (1, 0)], kv_heads=1)
    segments = torch.tensor([[i, 0, 16] for i in range(10)], dtype=torch.int32)
    batch = type(case.batch)(
        case.batch.query_start, torch.tensor([0, 10, 10], dtype=torch.int32), segments
    )
    split = Split(programs=3, grain=1, least=1, long=1)
    work = plan_work(batch, PlanRules(split, split, 1, 1, 1))
    lengths = work.one_items[:, SEGMENT_END] - work.one_items[:, SEGMENT]
    assert lengths.tolist() == [3, 3, 4, 0]
