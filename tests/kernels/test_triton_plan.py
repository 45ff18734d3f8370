"""The work list of attention, read back and compared with what every query has to see.

There are two ways to make it, by NumPy and by one compiled call; tests of what a list has to be run
on both, and the compiled one has to be equal to NumPy's.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.kernels.interface import AttentionBatch, GraphLimits, HeadLayout, SharedParts
from bros.kernels.offsets import offsets
from bros.kernels.staging import Staging
from bros.kernels.triton.buffers import GraphWork, ListSizes, WorkTensors
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
from bros.kernels.triton.work_list import (
    COMPILED,
    batch_counts,
    list_sizes,
    pack_rules,
    reference_batch_counts,
    write_list,
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

Make = Callable[[AttentionBatch, PlanRules], WorkList]

needs_compiled = pytest.mark.skipif(not COMPILED, reason="the kernels were not built")
UNWRITTEN = -12345


def capacity_room(capacity: ListSizes) -> array[int]:
    return array("q", [*astuple(capacity), *capacity.section_starts()])


def compiled_work(
    batch: AttentionBatch, rules: PlanRules, capacity: ListSizes | None = None
) -> WorkList:
    """The list that the compiled function writes, read back. Nothing else may be written.

    capacity: as much as the list needs if None.
    """
    packed = pack_rules(rules)
    need = ListSizes(*list_sizes(batch, packed))
    capacity = capacity or need
    starts = capacity.section_starts()
    out = torch.full((starts[-1] + 8,), UNWRITTEN, dtype=torch.int32)
    used, partials = write_list(batch, packed, out, capacity_room(capacity))
    lengths = need.section_lengths()
    sections = [
        out[start : start + n].numpy() for start, n in zip(starts[:-1], lengths, strict=True)
    ]
    assert used == starts[-2] + lengths[-1] and partials == need.partials
    counts, ones, tiles, listed, tokens, merge_start, slots, segments = sections
    assert counts.tolist() == [need.one_items, need.tile_items, need.merge_tokens, 0]
    rest = out.clone()
    for start, n in zip(starts[:-1], lengths, strict=True):
        rest[start : start + n] = UNWRITTEN
    assert (rest == UNWRITTEN).all()
    return WorkList(
        ones.reshape(-1, 8),
        tiles.reshape(-1, 8),
        listed,
        tokens,
        merge_start,
        slots,
        segments.reshape(-1, 3),
        partials,
    )


both_ways = pytest.mark.parametrize(
    "make",
    [plan_work, pytest.param(compiled_work, marks=needs_compiled)],
    ids=["numpy", "compiled"],
)


def same_lists(one: WorkList, other: WorkList) -> bool:
    return one.partials == other.partials and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in WorkList.__dataclass_fields__
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


@both_ways
@given(case=CASES, rules=RULES)
def test_every_query_reads_what_it_should_once(
    make: Make, case: AttentionCase, rules: PlanRules
) -> None:
    work = make(case.batch, rules)
    assert what_is_read(work) == what_should_be(case)
    assert (work.one_items[:, QUERIES] == 1).all()
    assert (work.tile_items[:, QUERIES] <= rules.tile_tokens).all()


@both_ways
@given(case=CASES, rules=RULES)
def test_every_query_is_written_once_or_merged_of_all_its_parts(
    make: Make, case: AttentionCase, rules: PlanRules
) -> None:
    work = make(case.batch, rules)
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
    shared = batch.shared
    in_chunks = [tokens for tokens, _ in rows if tokens > 1]
    one_each = all(tokens == 1 for tokens, _ in rows)
    limits = GraphLimits(
        rows=len(rows),
        segments=reference_batch_counts(batch).segments,
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


@both_ways
def test_a_prefix_is_read_once_for_all_rows_that_share_it(make: Make) -> None:
    case = make_case([(1, 5)] * 20, kv_heads=1, parts=[(range(20), 160)])
    split = Split(programs=1, grain=4)
    work = make(case.batch, PlanRules(split, split, 32, 1, 1))
    [item] = work.tile_items.tolist()
    assert item[QUERIES] == 20 and item[LISTED] == 1
    assert len(work.one_items) == len(work.merge_tokens) == 20


def test_long_contexts_fill_the_device_and_short_items_do_not_flood_it() -> None:
    split = Split(programs=64, grain=1, least=2, long=4, waves=2)
    assert split.item_length(10, 8) == 2  # few grains: no program has fewer than two
    assert split.item_length(24, 8) == 3  # one wave of even programs
    assert split.item_length(80, 8) == 5  # long ones: up to two waves
    assert split.item_length(800, 8) == 50


@both_ways
def test_items_of_a_unit_are_even(make: Make) -> None:
    case = make_case([(1, 0), (1, 0)], kv_heads=1)
    segments = torch.tensor([[i, 0, 16] for i in range(10)], dtype=torch.int32)
    batch = type(case.batch)(
        case.batch.query_start, torch.tensor([0, 10, 10], dtype=torch.int32), segments
    )
    split = Split(programs=3, grain=1, least=1, long=1)
    work = make(batch, PlanRules(split, split, 1, 1, 1))
    lengths = work.one_items[:, SEGMENT_END] - work.one_items[:, SEGMENT]
    assert lengths.tolist() == [3, 3, 4, 0]


# ---- The compiled list.


@st.composite
def mixed_batches(draw: st.DrawFn) -> AttentionBatch:
    """Up to 40 rows: of one token, of none and of several, with parts that any of them read."""
    lengths = draw(st.lists(st.sampled_from([1, 1, 1, 1, 0, 2, 7, 40]), max_size=40))
    widths = draw(st.lists(st.integers(0, 60), min_size=len(lengths), max_size=len(lengths)))
    rows = st.lists(st.integers(0, max(0, len(lengths) - 1)), max_size=12, unique=True)
    parts = draw(st.lists(st.tuples(rows, st.integers(0, 90)), max_size=4)) if lengths else []
    readers = [row for found, _ in parts for row in found]
    number = iter(range(100_000))

    def segments(count: int) -> torch.Tensor:
        return torch.tensor([next(number) for _ in range(3 * count)], dtype=torch.int32).view(-1, 3)

    def starts(sizes: list[int]) -> torch.Tensor:
        return torch.from_numpy(offsets(np.array(sizes, np.int32)))

    shared = SharedParts(
        starts([len(found) for found, _ in parts]),
        torch.tensor(readers, dtype=torch.int32),
        starts([count for _, count in parts]),
        segments(sum(count for _, count in parts)),
    )
    return AttentionBatch(
        starts(lengths),
        starts(widths),
        segments(sum(widths)),
        shared if parts or draw(st.booleans()) else None,
    )


@needs_compiled
@given(batch=st.one_of(mixed_batches(), CASES.map(lambda case: case.batch)), rules=RULES)
def test_the_compiled_list_is_that_of_numpy(batch: AttentionBatch, rules: PlanRules) -> None:
    expected = plan_work(batch, rules)
    assert ListSizes(*list_sizes(batch, pack_rules(rules))) == ListSizes.of(expected)
    assert same_lists(compiled_work(batch, rules), expected)
    roomy = ListSizes(*(size + 5 for size in astuple(ListSizes.of(expected))))
    assert same_lists(compiled_work(batch, rules, roomy), expected)
    assert batch_counts(batch) == reference_batch_counts(batch)


@given(batch=mixed_batches(), rules=RULES)
def test_both_ways_upload_the_same_numbers(batch: AttentionBatch, rules: PlanRules) -> None:
    work = plan_work(batch, rules)
    cpu = torch.device("cpu")
    tensors = WorkTensors.allocate(ListSizes.of(work), HeadLayout(1, 1, 8), cpu)
    filled, written = (replace(tensors, buffer=torch.zeros_like(tensors.buffer)) for _ in range(2))
    staging = Staging(cpu)
    staging.take(len(tensors.buffer)).zero_()  # gaps between sections are copied, too
    staging.take(len(tensors.buffer)).zero_()
    filled.fill(work, staging)
    if COMPILED:
        written.write(batch, pack_rules(rules), staging)
        assert torch.equal(filled.buffer, written.buffer)


@given(
    batch=mixed_batches(),
    rules=RULES,
    field=st.sampled_from([*ListSizes.__dataclass_fields__]),
)
def test_a_list_that_exceeds_its_capacity_is_refused(
    batch: AttentionBatch, rules: PlanRules, field: str
) -> None:
    work = plan_work(batch, rules)
    need = ListSizes.of(work)
    if not getattr(need, field):
        return
    less = replace(need, **{field: getattr(need, field) - 1})
    cpu = torch.device("cpu")
    tensors = WorkTensors.allocate(less, HeadLayout(1, 1, 8), cpu)
    tensors.buffer.fill_(UNWRITTEN)
    with pytest.raises(ValueError, match="exceeds its capacity"):
        tensors.fill(work, Staging(cpu))
    if COMPILED:
        with pytest.raises(ValueError, match="exceeds its capacity"):
            tensors.write(batch, pack_rules(rules), Staging(cpu))
        out = torch.full((less.section_starts()[-1],), UNWRITTEN, dtype=torch.int32)
        with pytest.raises(ValueError, match="exceeds its capacity"):
            write_list(batch, pack_rules(rules), out, capacity_room(less))
        assert (out == UNWRITTEN).all()
    assert (tensors.buffer == UNWRITTEN).all()


RULE = Split(programs=4)
SIMPLE = PlanRules(RULE, RULE, 8, 1, 1)


def small_batch(**changes: list[int]) -> AttentionBatch:
    """Three rows of one token with a segment each; two of them read a part of two segments."""
    numbers = {
        "query_start": [0, 1, 2, 3],
        "segment_start": [0, 1, 2, 3],
        "row_start": [0, 2],
        "rows": [0, 2],
        "part_segment_start": [0, 2],
    }
    found = {
        name: torch.tensor(values, dtype=torch.int32)
        for name, values in {**numbers, **changes}.items()
    }
    segments = torch.arange(9, dtype=torch.int32).view(3, 3)
    shared = SharedParts(
        found["row_start"], found["rows"], found["part_segment_start"], segments[:2]
    )
    return AttentionBatch(found["query_start"], found["segment_start"], segments, shared)


@needs_compiled
@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("query_start", [1, 2, 3, 4], "begin with 0"),
        ("query_start", [0, 2, 1, 3], "query_start decreases"),
        ("query_start", [0, 1, 2, 2**31 - 1], "more than 2 \\*\\* 27"),
        ("segment_start", [0, 2, 1, 3], "segment_start decreases"),
        ("segment_start", [-1, 1, 2, 3], "outside segments"),
        ("segment_start", [0, 1, 2, 4], "outside segments"),
        ("segment_start", [0, 2**31 - 1, 2, 3], "decreases"),
        ("row_start", [1, 2], "from 0 to the number"),
        ("row_start", [0, 3], "from 0 to the number"),
        ("rows", [0, 3], "outside the batch"),
        ("rows", [-1, 2], "outside the batch"),
        ("part_segment_start", [-1, 2], "outside their segments"),
        ("part_segment_start", [0, 3], "outside their segments"),
        ("part_segment_start", [2, 1], "decreases"),
    ],
)
def test_wrong_batches_are_refused(name: str, numbers: list[int], message: str) -> None:
    compiled_work(small_batch(), SIMPLE)
    batch = small_batch(**{name: numbers})
    with pytest.raises(ValueError, match=message):
        list_sizes(batch, pack_rules(SIMPLE))
    with pytest.raises(ValueError, match=message):
        sizes = ListSizes(9, 9, 9, 9, 9, 9, 9)
        out = torch.zeros(sizes.section_starts()[-1], dtype=torch.int32)
        write_list(batch, pack_rules(SIMPLE), out, capacity_room(sizes))
    if "2 " not in message:
        with pytest.raises(ValueError, match=message):
            batch_counts(batch)


@needs_compiled
def test_wrong_rules_and_sections_are_refused() -> None:
    batch, sizes = small_batch(), ListSizes(9, 9, 9, 9, 9, 9, 9)
    for index in range(13):
        for wrong in (-1, 2**20, 2**62):
            rules = pack_rules(SIMPLE)
            rules[index] = wrong
            with pytest.raises(ValueError, match="rules"):
                list_sizes(batch, rules)
    with pytest.raises(ValueError, match="wrong number"):
        list_sizes(batch, pack_rules(SIMPLE)[:-1])
    out = torch.zeros(sizes.section_starts()[-1], dtype=torch.int32)
    room = capacity_room(sizes)
    for index, wrong in [(0, -1), (0, 2**62), (7, -1), (8, 0), (8, 10**6), (14, 2**62), (15, 200)]:
        changed = array("q", room)
        changed[index] = wrong
        with pytest.raises(ValueError):
            write_list(batch, pack_rules(SIMPLE), out, changed)
    with pytest.raises(ValueError, match="sections end"):
        write_list(batch, pack_rules(SIMPLE), out[:-1], room)
