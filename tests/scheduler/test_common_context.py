"""What a step's decode rows have in common: as the kernels find it, and as packing counts it."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bros.core.interfaces import Grouping
from bros.core.plan import SharedPrefix
from bros.scheduler.cost_model import CostModel, StepTimePredictor
from bros.scheduler.packing import (
    Bounds,
    CommonContext,
    Packing,
    Rules,
    load_of,
    pack,
    shared_prefixes,
)
from support.packing import BLOCK_SIZE, Blocks, Item

NOW = 100.0
READING = CostModel(
    constant_s=0.010, token_s=0.001, sample_s=0.0, pair_s=0.0, context_s=0.0, unique_context_s=5e-4
)  # fmt: skip
Path = tuple[str, ...]


class Tree(Blocks):
    """Blocks that requests hold in common.

    paths: of each request its full blocks, whether it holds them yet or not; "ab" and "ac" begin
    with the same one. holding: requests that hold theirs. A newcomer does when it gets memory.
    """

    def __init__(self, paths: dict[str, Path], holding: set[str], free: int = 10**6) -> None:
        super().__init__(free)
        self.paths, self.holding = paths, holding
        self.sharing_changes = 0

    @property
    def has_common_parts(self) -> bool:  # type: ignore[override]
        return any(count > 1 for count in self._holders().values())

    def _holders(self) -> Counter[Path]:
        return Counter(
            self.paths[name][: depth + 1]
            for name in self.holding
            for depth in range(len(self.paths[name]))
        )

    def common_parts(self, item: Item) -> Sequence[tuple[Hashable, int]]:
        if item.name not in self.holding:
            return ()
        path, holders = self.paths[item.name], self._holders()
        parts: dict[int, tuple[Path, int]] = {}
        for depth in range(len(path)):
            count = holders[path[: depth + 1]]
            if count > 1:
                tokens = parts[count][1] if count in parts else 0
                parts[count] = path[: depth + 1], tokens + BLOCK_SIZE
        return list(parts.values())

    def reserve(self, item: Item, num_tokens: int) -> bool:
        if not super().reserve(item, num_tokens):
            return False
        if item.name not in self.holding:
            self.holding.add(item.name)
            self.sharing_changes += 1
        return True


def saved(rows: Sequence[Path], grouping: Grouping) -> int:
    """Tokens that rows need not read, counted block by block; for min_blocks = 1."""
    counts = Counter(path[: depth + 1] for path in rows for depth in range(len(path)))
    return BLOCK_SIZE * sum(n - 1 for n in counts.values() if n >= grouping.min_rows)


def planned(
    memory: Tree, rows: Sequence[Item], grouping: Grouping
) -> tuple[list[array[int]], tuple[SharedPrefix, ...]]:
    """Segments of rows, and what a plan with these rows says they read together."""
    numbers: dict[Path, int] = {}
    listed = []
    for row in rows:
        path = memory.paths[row.name]
        segments = array("i")
        for depth in range(len(path)):
            block = numbers.setdefault(path[: depth + 1], len(numbers))
            segments.extend((block, 0, BLOCK_SIZE))
        listed.append(segments)
    parts = [
        (place, memory.common_parts(row), segments)
        for place, (row, segments) in enumerate(zip(rows, listed, strict=True))
    ]
    return listed, shared_prefixes(parts, grouping)


paths = st.lists(st.sampled_from("ab"), min_size=1, max_size=9).map(tuple)
populations = st.lists(paths, min_size=1, max_size=10)


def predicting(grouping: Grouping) -> StepTimePredictor:
    return StepTimePredictor(READING, grouping=grouping)


@given(populations, st.integers(1, 4), st.integers(2, 4), st.integers(1, 3), st.data())
def test_what_is_counted_is_what_the_plan_says(
    population: list[Path],
    min_blocks: int,
    min_rows: int,
    step_blocks: int,
    data: st.DataObject,
) -> None:
    """Also beside requests that are not in the step, and if rows leave it again."""
    rule = Grouping(BLOCK_SIZE, min_blocks, min_rows, step_blocks)
    items = [Item(str(i), 1, BLOCK_SIZE * len(p) + 1) for i, p in enumerate(population)]
    memory = Tree({str(i): path for i, path in enumerate(population)}, {i.name for i in items})
    common: CommonContext = CommonContext(memory, predicting(rule))
    rows: list[Item] = []
    total = 0
    for item in data.draw(st.permutations(items)):
        total += common.join(item)
        rows.append(item)
        if data.draw(st.integers(0, 3)) == 0:
            total -= common.leave(rows.pop(data.draw(st.integers(0, len(rows) - 1))))
        found = [memory.paths[row.name] for row in rows]
        listed, shared = planned(memory, rows, rule)
        assert total == sum(
            (len(piece.rows) - 1) * (piece.end - piece.first) * BLOCK_SIZE for piece in shared
        )
        for piece in shared:
            assert len(piece.rows) >= min_rows and piece.end - piece.first >= min_blocks
            same = {listed[row][3 * piece.first : 3 * piece.end].tobytes() for row in piece.rows}
            assert len(same) == 1
        for row in range(len(rows)):  # what a row reads with others is all that it begins with
            mine = [(piece.first, piece.end) for piece in shared if row in piece.rows]
            assert [first for first, _ in mine] == [0, *(end for _, end in mine)][: len(mine)]
            assert all(end % step_blocks == 0 for _, end in mine)
        if min_blocks == step_blocks == 1:
            assert total == saved(found, rule)


def test_a_row_that_lists_its_blocks_in_another_order_reads_for_itself() -> None:
    parts = [("piece", 2 * BLOCK_SIZE)]
    here, there = array("i", [1, 0, 16, 2, 0, 16]), array("i", [2, 0, 16, 1, 0, 16])
    rows = [(0, parts, here), (1, parts, there), (2, parts, here)]
    (piece,) = shared_prefixes(rows, Grouping(BLOCK_SIZE, 2))
    assert piece == SharedPrefix(array("i", [0, 2]), 0, 2)
    assert shared_prefixes(rows, Grouping(BLOCK_SIZE, 2, min_rows=3)) == ()


def test_a_row_with_other_blocks_reads_what_follows_them_for_itself() -> None:
    parts = [("outer", BLOCK_SIZE), ("inner", BLOCK_SIZE)]
    here, there = array("i", [1, 0, 16, 2, 0, 16]), array("i", [3, 0, 16, 2, 0, 16])
    rows = [(0, parts, here), (1, parts, there), (2, parts, here)]
    found = shared_prefixes(rows, Grouping(BLOCK_SIZE, 1))
    both = array("i", [0, 2])
    assert found == (SharedPrefix(both, 0, 1), SharedPrefix(both, 1, 2))


def test_pieces_are_cut_at_steps_and_short_ones_go_to_the_next() -> None:
    parts = [("a", 5 * BLOCK_SIZE), ("b", 2 * BLOCK_SIZE), ("c", 10 * BLOCK_SIZE)]
    assert Grouping(BLOCK_SIZE, 4, step_blocks=4).cut(parts) == [("a", 0, 4), ("c", 4, 16)]
    assert Grouping(BLOCK_SIZE, 1).cut(parts) == [("a", 0, 5), ("b", 5, 7), ("c", 7, 17)]
    assert Grouping(BLOCK_SIZE, 8).cut(parts) == [("c", 0, 17)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Item], list[Item], dict[str, Path]]:
    """Urgent and best-effort items, most of them rows, and what they hold or will find."""
    known: dict[str, Path] = {}
    sides: list[list[Item]] = []
    for side in "uf":
        items = []
        for number in range(draw(st.integers(0, 7))):
            name = f"{side}{number}"
            known[name] = draw(paths)
            # Those with room in their last block go on where there is no memory.
            context = BLOCK_SIZE * len(known[name]) + draw(st.integers(0, 3))
            remaining = draw(st.sampled_from([1, 1, 1, 1, 6]))
            due_s = draw(st.sampled_from([-0.1, 0.02, 0.04, 0.08, math.inf]))
            context *= draw(st.integers(0, 3)) > 0  # else it is a newcomer
            items.append(Item(name, remaining, context, NOW + due_s))
        sides.append(sorted(items, key=lambda item: item.deadline_s))
    return sides[0], [replace(item, deadline_s=math.inf) for item in sides[1]], known


@given(
    steps(),
    st.integers(2, 4),
    st.builds(
        Bounds,
        rows=st.integers(1, 8),
        tokens=st.sampled_from([4, 100]),
        best_effort_s=st.sampled_from([0.03, 0.08, math.inf]),
        tbar_s=st.sampled_from([0.0, 0.02]),
        rules=st.sampled_from([Rules(), Rules(min_chunk=1), Rules.paper()]),
    ),
    st.integers(0, 8),
)
def test_the_load_of_a_step_is_that_of_its_rows(
    step: tuple[list[Item], list[Item], dict[str, Path]], min_rows: int, bounds: Bounds, free: int
) -> None:
    """Requests that were refused or have just come."""
    check_load(*step, Grouping(BLOCK_SIZE, 1, min_rows), bounds, free)


@given(st.lists(paths, min_size=2, max_size=6), paths, st.integers(2, 4))
def test_a_row_that_gives_way_does_not_count_any_more(
    population: list[Path], last: Path, min_rows: int
) -> None:
    """The last urgent row can wait, and the step is full without best-effort items."""
    known = {str(number): path for number, path in enumerate([*population, last])}
    items = [Item(name, 1, BLOCK_SIZE * len(path), NOW + 10.0) for name, path in known.items()]
    urgent, best_effort = items[:-1], [replace(items[-1], deadline_s=math.inf)]
    bounds = Bounds(rows=len(urgent), tokens=100)
    packing = check_load(urgent, best_effort, known, Grouping(BLOCK_SIZE, 1, min_rows), bounds, 100)
    assert [item for item, _ in packing.selected] == [*urgent[:-1], *best_effort]


def check_load(
    urgent: list[Item],
    best_effort: list[Item],
    known: dict[str, Path],
    rule: Grouping,
    bounds: Bounds,
    free: int,
) -> Packing:
    """Pack a step, and count again what is in it."""
    memory = Tree(known, {item.name for item in (*urgent, *best_effort) if item.running}, free)
    predictor = predicting(rule)
    packing = pack(urgent, best_effort, bounds, memory, predictor, NOW)
    rows = [item for item, count in packing.selected if count == 1]
    load = packing.load
    assert load.decode_rows == len(rows)
    assert load.context == sum(row.num_computed_tokens + 1 for row in rows)
    assert load.context - load.unique_context == saved([known[r.name] for r in rows], rule)
    assert math.isclose(packing.seconds, predictor.safe_seconds(load))
    fresh = load_of(packing.selected, CommonContext(memory, predictor))
    assert fresh.unique_context == load.unique_context
    assert fresh.pairs == load.pairs and fresh.tokens == load.tokens
    return packing


def alike(rows: int, grouping: Grouping | None, due_s: float) -> Packing:
    """Of rows with ten blocks in common."""
    path = tuple("abababababab"[:10])
    items = [Item(str(i), 1, 10 * BLOCK_SIZE, NOW + due_s) for i in range(rows)]
    memory = Tree({item.name: path for item in items}, {item.name for item in items})
    predictor = StepTimePredictor(READING, grouping=grouping)
    return pack(items, [], Bounds(rows=100, tokens=100), memory, predictor, NOW)


def test_more_rows_fit_if_they_read_a_prefix_together() -> None:
    """Forty tokens of it take 20 ms, one row beside 1.5 ms."""
    together = alike(8, Grouping(BLOCK_SIZE, 1), due_s=0.060)
    assert len(together.selected) == 8
    assert together.load.unique_context == 8 * 41 - 7 * 40
    for rule in (None, Grouping(BLOCK_SIZE, min_blocks=11), Grouping(BLOCK_SIZE, 1, min_rows=9)):
        apart = alike(8, rule, due_s=0.060)
        assert len(apart.selected) == 2 and apart.load.unique_context == apart.load.context
