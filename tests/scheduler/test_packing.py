"""Packing one step against brute force over everything it may choose from."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.scheduler.packing import Bounds, Packing, Rules, pack
from support.packing import (
    FIRST_TOKEN_SHARE,
    MODEL,
    SAFETY,
    Blocks,
    Held,
    Item,
    best_effort_part,
    blocks_for,
    check_deadlines,
    check_resources,
    names,
    predictor,
    replaced_rows,
    rest_seconds,
    row,
    seconds,
    urgent_part,
)

NOW = 100.0
LOOSE = Bounds(rows=100, tokens=1000)
FEW = Rules(min_chunk=2)
FLOOR = 0.9
"""Least share of the best-effort tokens possible beside the same urgent part, over many steps."""


def run(
    urgent: Sequence[Item],
    best_effort: Sequence[Item] = (),
    bounds: Bounds = LOOSE,
    memory: Blocks | None = None,
) -> Packing:
    """One step with predictions. Deadlines of the items are seconds from NOW."""

    def absolute(items: Sequence[Item]) -> list[Item]:
        return [replace(item, deadline_s=NOW + item.deadline_s) for item in items]

    urgent, best_effort = absolute(urgent), absolute(best_effort)
    return pack(urgent, best_effort, bounds, memory or Blocks(), predictor(), NOW)


@st.composite
def items(draw: st.DrawFn, prefix: str, most: int, *, urgent: bool) -> list[Item]:
    """Decode rows and prompts, some with a context; urgent ones sorted by deadline."""
    found = []
    for number in range(draw(st.integers(0, most))):
        remaining = draw(st.sampled_from([1, 1, 2, 3, 5, 40]))
        cached = draw(st.integers(1 if remaining == 1 else 0, 12))
        due_s = draw(st.sampled_from([-0.1, 0.01, 0.025, 0.03, 0.04, 0.08, 0.4]))
        late = urgent and draw(st.integers(0, 5)) == 0
        patient = urgent and draw(st.integers(0, 3)) == 0
        due_s = due_s if urgent else math.inf
        name = f"{prefix}{number}"
        found.append(Item(name, remaining, cached, due_s, late, patient=patient))
    return sorted(found, key=lambda item: item.deadline_s)


RULES = st.sampled_from(
    [Rules(), FEW, Rules.paper(), Rules(strict_rows=True), Rules(replace=False, min_chunk=2)]
)


@st.composite
def all_bounds(draw: st.DrawFn, *, credit: bool = False) -> Bounds:
    return Bounds(
        rows=draw(st.integers(1, 6)),
        tokens=draw(st.sampled_from([1, 2, 4, 8, 100])),
        best_effort_s=draw(st.sampled_from([0.01, 0.03, 0.05, math.inf])),
        best_effort_share=draw(st.sampled_from([0.6, 1.0])),
        short_of_s=draw(st.sampled_from([0.04, math.inf])),
        best_effort_credit_s=draw(st.sampled_from([0.0, 0.004, 0.1])) if credit else 0.0,
        tbar_s=draw(st.sampled_from([0.0, 0.02, 0.05])),
        rules=draw(RULES),
    )


# What holds for every step


@given(items("u", 5, urgent=True), items("f", 4, urgent=False), all_bounds(credit=True), st.data())
def test_rows_tokens_and_memory_are_never_exceeded(
    urgent: list[Item], best_effort: list[Item], bounds: Bounds, data: st.DataObject
) -> None:
    free = data.draw(st.integers(0, 12))
    sticky = data.draw(st.frozensets(st.sampled_from([item.name for item in urgent] or ["-"])))
    memory = Blocks(free, sticky)
    packing = run(urgent, best_effort, bounds, memory)
    check_resources(packing, bounds, free)
    assert memory.reserved.keys() == set(names(packing.selected)), "left behind, or not reserved"
    assert packing.urgent_s == pytest.approx(seconds(urgent_part(packing)), rel=1e-12)
    order = [item.name for item in urgent]
    assert names(urgent_part(packing)) == [n for n in order if n in names(urgent_part(packing))]
    if bounds.best_effort_credit_s == 0.0:
        check_deadlines(packing, bounds, NOW)
        without_s = seconds([*urgent_part(packing), *replaced_rows(packing)])
        most_s = max(bounds.best_effort_share * bounds.best_effort_s, without_s)
        assert not best_effort_part(packing) or (
            packing.seconds <= most_s + 1e-9 or len(packing.selected) == 1  # alone it must run
        )


@given(items("u", 4, urgent=True), items("f", 4, urgent=False), all_bounds(credit=True))
def test_a_step_is_never_empty_if_something_fits(
    urgent: list[Item], best_effort: list[Item], bounds: Bounds
) -> None:
    """I12; late, slow and long as it may be."""
    free = 3
    fits = [item for item in urgent + best_effort if blocks_for(item, item.remaining) <= free]
    packing = run(urgent, best_effort, bounds, Blocks(free))
    assert bool(packing.selected) >= bool(fits)


@given(items("u", 4, urgent=True), items("f", 4, urgent=False), all_bounds(credit=True))
def test_the_same_input_gives_the_same_step(
    urgent: list[Item], best_effort: list[Item], bounds: Bounds
) -> None:
    before = copy.deepcopy((urgent, best_effort))
    results = [run(urgent, best_effort, bounds, Blocks(8)) for _ in range(2)]
    assert (urgent, best_effort) == before
    for field in ("selected", "num_urgent", "seconds", "violated", "full", "passed_over"):
        assert getattr(results[0], field) == getattr(results[1], field)


class OneByOne(Blocks):
    """Has every decode row decided on its own."""

    def reserve_rows(self, items: Sequence[Item]) -> int:
        return 0


@st.composite
def rows(draw: st.DrawFn, prefix: str, *, urgent: bool) -> list[Item]:
    """A run of decode rows, perhaps with a prompt in it."""
    dues = [-0.1, 0.024, 0.03, 0.036, 0.04, 0.4] if urgent else [math.inf]
    found = [
        row(f"{prefix}{number}", draw(st.sampled_from(dues)), draw(st.integers(1, 900)))
        for number in range(draw(st.integers(0, 12)))
    ]
    if draw(st.booleans()):
        found.append(Item(f"{prefix} prompt", 5, 0, draw(st.sampled_from(dues))))
    return sorted(found, key=lambda item: item.deadline_s)


@given(rows("u", urgent=True), rows("f", urgent=False), all_bounds(credit=True), st.data())
def test_a_run_of_rows_is_taken_as_if_each_was_decided_on_its_own(
    urgent: list[Item], best_effort: list[Item], bounds: Bounds, data: st.DataObject
) -> None:
    bounds = replace(bounds, rows=data.draw(st.integers(1, 30)))
    free = data.draw(st.sampled_from([2, 6, 1000]))
    at_once, one_by_one = Blocks(free), OneByOne(free)
    packings = [run(urgent, best_effort, bounds, memory) for memory in (at_once, one_by_one)]
    for field in ("selected", "num_urgent", "violated", "full", "passed_over"):
        assert getattr(packings[0], field) == getattr(packings[1], field), field
    assert packings[0].seconds == pytest.approx(packings[1].seconds, rel=1e-12)
    assert packings[0].urgent_stop == packings[1].urgent_stop
    assert packings[0].best_effort_stop == packings[1].best_effort_stop
    assert at_once.reserved == one_by_one.reserved


# Against brute force


def best_beside(
    urgent: Sequence[Item],
    best_effort: Sequence[Item],
    bounds: Bounds,
    free: int,
    fixed: dict[str, int] | None = None,
) -> int | None:
    """Most best-effort tokens of all choices of chunks that satisfy (6), (7) and (8).

    None if no choice does. Constraint (6) is for every urgent item, run or not (n = 1 step for
    a row that is left out). fixed: urgent tokens by name, if they are not to be chosen.
    """

    def choices(item: Item) -> Sequence[int]:
        if fixed is not None and item in urgent:
            return (fixed.get(item.name, 0),)
        return range(item.remaining + 1)

    best: int | None = None
    for counts in itertools.product(*(choices(item) for item in (*urgent, *best_effort))):
        chosen = [(i, n) for i, n in zip((*urgent, *best_effort), counts, strict=True) if n]
        tokens = sum(counts[len(urgent) :])
        if best is not None and tokens <= best:
            continue
        if len(chosen) > bounds.rows or sum(counts) > bounds.tokens:
            continue
        if sum(blocks_for(item, n) for item, n in chosen) > free:
            continue
        if within_deadlines(urgent, dict(zip(urgent, counts, strict=False)), chosen, bounds):
            best = tokens
    return best


def within_deadlines(
    urgent: Sequence[Item],
    counts: dict[Item, int],
    chosen: Sequence[tuple[Item, int]],
    bounds: Bounds,
) -> bool:
    took_s = seconds(chosen)
    for item in urgent:
        count = counts[item]
        later_s = rest_seconds(item, count) if count else bounds.tbar_s
        if took_s + later_s > item.deadline_s + 1e-12:
            return False
    return took_s <= bounds.best_effort_s or all(item in counts for item, _ in chosen)


def small_step(rng: random.Random) -> tuple[list[Item], list[Item], Bounds, int]:
    """At most six items of at most four tokens, mostly with enough time; and free blocks."""
    dues = [0.024, 0.026, 0.03, 0.06]
    urgent = [
        Item(f"u{i}", 1, rng.randint(1, 9), rng.choice(dues)) for i in range(rng.randint(0, 3))
    ]
    best_effort = []
    for i in range(rng.randint(1, 6 - max(len(urgent), 2))):
        remaining = rng.randint(1, 4)
        best_effort.append(Item(f"f{i}", remaining, rng.randint(remaining == 1, 6)))
    bounds = Bounds(
        rows=rng.randint(1, 5),
        tokens=rng.randint(1, 10),
        best_effort_s=rng.choice([0.026, 0.028, math.inf]),
        tbar_s=0.022,
        rules=Rules(min_chunk=1),
    )
    return sorted(urgent, key=lambda item: item.deadline_s), best_effort, bounds, rng.randint(1, 6)


def test_best_effort_is_at_most_the_optimum_and_rarely_much_less() -> None:
    rng = random.Random(7)
    compared, given, possible = 0, 0, 0
    for _ in range(1000):
        urgent, best_effort, bounds, free = small_step(rng)
        packing = run(urgent, best_effort, bounds, Blocks(free))
        check_resources(packing, bounds, free)
        chosen = dict(zip(names(packing.selected), (n for _, n in packing.selected), strict=True))
        known = {item: chosen.get(item.name, 0) for item in urgent}
        if len(chosen) == 1 or len(chosen) > bounds.rows:
            continue  # alone a request runs in any case; rows that are due exceed the batch size
        if not within_deadlines(urgent, known, packing.selected, bounds):
            continue  # a row that was left out may be late
        tokens = sum(count for _, count in best_effort_part(packing))
        best = best_beside(urgent, best_effort, bounds, free)
        assert best is not None and tokens <= best
        beside = best_beside(urgent, best_effort, bounds, free, chosen)
        assert beside is not None and tokens <= beside <= best
        compared, given, possible = compared + 1, given + tokens, possible + beside
    assert compared > 400
    assert given / possible > FLOOR


# Chunks


@given(st.integers(17, 200), st.integers(0, 50), st.sampled_from([0.03, 0.04, 0.07, 0.1, 0.2]))
def test_a_prompt_is_cut_to_the_largest_chunk_that_fits(
    length: int, cached: int, due_s: float
) -> None:
    head, prompt = row("head", due_s), Item("prompt", length, cached, 9.0)
    packing = run([head, prompt])
    fits = [
        n for n in range(16, length + 1) if seconds([(head, 1), (prompt, n)]) <= due_s
    ]  # linear search
    got = dict(zip(names(packing.selected), (n for _, n in packing.selected), strict=True))
    assert got.get("prompt", 0) == max(fits, default=0)


@given(st.lists(st.floats(0.03, 0.3), min_size=2, max_size=8))
def test_more_time_never_means_a_smaller_chunk(dues: list[float]) -> None:
    found = []
    for due_s in sorted(dues):
        packing = run([row("head", due_s), Item("prompt", 300, 4, 9.0)])
        found.append(sum(count for _, count in packing.selected[1:]))
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("urgent", "ends_s"),
    [(Item("first", 40, 0, 0.2), 0.2 * FIRST_TOKEN_SHARE), (row("row", 0.2), 0.2)],
)
def test_a_step_is_filled_less_if_a_first_token_comes_from_it(urgent: Item, ends_s: float) -> None:
    packing = run([urgent], [Item("be", 400)], Bounds(rows=9, tokens=999))
    assert names(packing.selected) == [urgent.name, "be"]
    assert ends_s - 0.002 < packing.seconds <= ends_s


def test_a_first_token_that_just_makes_it_is_in_the_step() -> None:
    alone_s = seconds([(Item("first", 40), 40)])
    first = Item("first", 40, 0, 1.01 * alone_s)
    packing = run([first], [Item("be", 400)], Bounds(rows=9, tokens=999))
    assert [(item.name, count) for item, count in packing.selected] == [("first", 40)]
    assert not packing.violated


def test_a_row_that_is_on_time_unless_the_step_is_slow_ends_it_and_is_no_violation() -> None:
    head = Item("head", 3, 0, -0.1, late=True)
    due_s = 0.96 * seconds([(head, 3), (row("row"), 1)])
    packing = run([head, row("row", due_s), row("other", 9.0)], [row("be")])
    assert (names(packing.selected), packing.violated) == (["head", "row"], False)


@pytest.mark.parametrize(
    ("share", "late", "violated"), [(0.99, False, True), (0.99, True, False), (0.5, False, False)]
)
def test_a_row_that_will_be_late_ends_nothing_and_is_a_violation_if_the_others_make_it_so(
    share: float, late: bool, violated: bool
) -> None:
    """Not if its token was late before the step, nor if it would be late alone."""
    head = Item("head", 3, 0, -0.1, late=True)
    due_s = share * seconds([(head, 3), (row("row"), 1)]) / SAFETY
    packing = run([head, replace(row("row", due_s), late=late), row("other", 9.0)])
    assert (names(packing.selected), packing.violated) == (["head", "row", "other"], violated)


def test_a_piece_smaller_than_the_least_is_not_worth_a_place() -> None:
    head, prompt = row("head", 0.033), Item("prompt", 100, 0, 9.0)
    assert seconds([(head, 1), (prompt, 8)]) < 0.033 < seconds([(head, 1), (prompt, 16)])
    packing = run([head, prompt])
    assert names(packing.selected) == ["head"]
    assert [(i.name, why) for i, why in packing.passed_over] == [("prompt", "time")]
    short = run([head, Item("short", 8, 0, 9.0)])
    assert names(short.selected) == ["head", "short"], "all of a short one is worth it"


def test_a_late_prompt_does_not_make_others_late() -> None:
    """It is cut to the length of a step with best-effort work; others keep their deadlines."""
    late = Item("late", 500, 0, 0.1)
    packing = run([late, row("other", 0.2)], bounds=Bounds(rows=9, tokens=999, best_effort_s=0.08))
    assert names(packing.selected) == ["late", "other"]
    assert packing.seconds <= 0.2
    assert seconds([(late, packing.selected[0][1])]) <= 0.08


def test_prompts_of_a_task_group_make_no_step_longer_than_best_effort_work_may() -> None:
    """Only the end of the last member counts, and a chat may arrive during the step."""
    bounds = Bounds(rows=9, tokens=999, best_effort_s=0.2)
    alone = [Item(f"p{number}", 100, 0, 0.4) for number in range(3)]
    together = [replace(item, patient=True) for item in alone]
    assert 0.2 < run([row("chat", 9.0), *alone], bounds=bounds).seconds <= 0.4
    packing = run([row("chat", 9.0), *together], [Item("be", 400)], bounds)
    *most, last = packing.selected
    assert 0.19 < seconds(most) <= 0.2
    assert (last[0].name, last[1]) == ("p2", 16), "the smallest chunk, so that each gets on"


# Rules of the paper

PAPER = Bounds(rows=8, tokens=1000, rules=Rules.paper())


def test_paper_prompts_are_taken_whole_or_not_at_all() -> None:
    packing = run([row("head", 0.05), Item("prompt", 100, 0, 9.0)], bounds=PAPER)
    assert names(packing.selected) == ["head"]
    packing = run([row("head", 0.5), Item("prompt", 100, 0, 9.0)], bounds=PAPER)
    assert [n for _, n in packing.selected] == [1, 100]


def test_paper_early_return_leaves_out_best_effort_and_says_so() -> None:
    rows = [row("head", 0.033), Item("prompt", 100, 0, 9.0), row("cheap", 9.0)]
    packing = run(rows, [row("be")], PAPER)
    assert names(packing.selected) == ["head"]
    assert packing.violated
    ours = run(rows, [row("be")])
    assert names(ours.selected) == ["head", "cheap", "be"]
    assert not ours.violated


def test_paper_runs_the_head_at_least() -> None:
    """A1: taken literally, a head that is late whatever happens would stop everything."""
    packing = run([Item("head", 200, 0, 0.01), row("next", 0.02), row("last", 9.0)], bounds=PAPER)
    assert names(packing.selected) == ["head", "next", "last"]
    assert packing.selected[0][1] == 200
    assert packing.seconds <= 1.1 * seconds([(Item("head", 200), 200)])
    second = Item("second", 60, 0, 0.02)
    packing = run([Item("head", 200, 0, 0.01), second, row("last", 9.0)], bounds=PAPER)
    assert names(packing.selected) == ["head"], "it does not carry on with those that cost time"
    packing = run([row("head", 0.001), Item("prompt", 100, 0, 9.0)], bounds=PAPER)
    assert names(packing.selected) == ["head"] and packing.violated


# Rows


def test_rows_that_would_be_late_in_the_next_step_may_exceed_the_batch_size() -> None:
    bounds = Bounds(rows=1, tokens=99, tbar_s=0.03)
    urgent = [row("a", 0.04), row("b", 0.05), row("c", 0.06)]
    packing = run(urgent, bounds=bounds)
    assert names(packing.selected) == ["a", "b"]
    assert packing.full and packing.urgent_stop == "rows"
    strict = replace(bounds, rules=Rules(strict_rows=True))
    assert names(run(urgent, bounds=strict).selected) == ["a"]
    prompt = [row("a", 0.04), Item("b", 20, 0, 0.05), row("c", 0.05)]
    assert names(run(prompt, bounds=bounds).selected) == ["a", "c"], "rows only"


def test_a_request_that_cannot_start_is_asked_for_no_time() -> None:
    class Taken(Blocks):
        """Only requests that hold memory get more."""

        def may_start(self, item: Item) -> bool:
            return item.running

    due_s = 0.03  # not enough for the smallest chunk of a prompt beside the row
    waiting, rest = Item("waiting", 40), Item("rest of a prompt", 2, 8)
    packing = run([row("a", due_s)], [waiting, rest], memory=Taken())
    assert names(packing.selected) == ["a", "rest of a prompt"]
    assert [(item.name, why) for item, why in packing.passed_over] == [("waiting", "memory")]
    late, waits = Item("late", 40, 0, -1.0), Item("waits", 40, 0, 0.08)
    packing = run([row("a", due_s), late, waits], memory=Taken())
    assert {(item.name, why) for item, why in packing.passed_over} == {
        ("late", "memory"),
        ("waits", "memory"),
    }


def test_best_effort_takes_the_row_of_the_last_that_can_wait() -> None:
    bounds = Bounds(rows=3, tokens=99, tbar_s=0.03)
    urgent = [row("a", 0.2), row("b", 0.2), row("c", 0.2)]
    memory = Blocks(100)
    packing = run(urgent, [Item("f", 30, 4), row("g"), row("h")], bounds, memory)
    assert names(packing.selected) == ["a", "f", "g"], "never the head"
    assert memory.reserved.keys() == {"a", "f", "g"}
    assert {(item.name, why) for item, why in packing.passed_over} == {("b", "rows"), ("c", "rows")}
    assert packing.best_effort_stop == "rows"
    few_tokens = replace(bounds, tokens=4)
    assert names(run(urgent, [row("f"), row("g")], few_tokens).selected) == ["a", "f", "g"]
    no_replace = replace(bounds, rules=Rules(replace=False))
    assert names(run(urgent, [row("f")], no_replace).selected) == ["a", "b", "c"]


def test_best_effort_replaces_a_row_if_the_step_is_no_longer_than_its_urgent_part_was() -> None:
    bounds = Bounds(rows=2, tokens=99, best_effort_s=0.01)
    urgent = [row("a", 0.2), row("b", 0.2)]
    packing = run(urgent, [row("f")], bounds)
    assert names(packing.selected) == ["a", "f"]
    assert packing.seconds > max(bounds.best_effort_s, packing.urgent_s)
    assert math.isclose(packing.seconds, seconds([(item, 1) for item in urgent]))
    assert names(run(urgent, [row("f", context=9)], bounds).selected) == ["a", "b"], "it is longer"


@pytest.mark.parametrize(
    ("last", "best_effort", "sticky", "why"),
    [
        (row("last", 0.07), row("f"), "", "it would be late in the next step"),
        (row("last", 0.3), Item("f", 20, 0), "", "a new request would bring more into memory"),
        (row("last", 0.3), row("f"), "last", "others lost their memory for it"),
        (Item("last", 20, 4, 0.3), row("f"), "", "a prompt"),
        (row("last", 0.3), Item("f", 20, 4), "", "the step would be too long"),
    ],
)
def test_who_keeps_its_row(last: Item, best_effort: Item, sticky: str, why: str) -> None:
    head = row("head", 0.06 if last.remaining == 1 else 0.3)
    if why == "the step would be too long":
        head = row("head", 0.03)
    bounds = Bounds(rows=2, tokens=99, tbar_s=0.05)
    memory = Blocks(100, frozenset([sticky]))
    packing = run([head, last], [best_effort], bounds, memory)
    assert names(packing.selected) == ["head", "last"], why
    assert memory.reserved.keys() == {"head", "last"}
    assert math.isclose(packing.seconds, seconds(packing.selected))
    assert math.isclose(predictor().safe_seconds(packing.load), packing.seconds)


def test_best_effort_alone_runs_however_little_time_there_is() -> None:
    bounds = Bounds(rows=9, tokens=99, best_effort_s=0.001)
    best_effort_items = [Item("f", 60, 0), row("g")]
    packing = run([], best_effort_items, bounds)
    assert [(item.name, n) for item, n in packing.selected] == [("f", 16)], "a smallest chunk"
    assert [
        n for _, n in run([], best_effort_items, replace(PAPER, best_effort_s=0.001)).selected
    ] == [60]
    assert names(run([], best_effort_items[1:], bounds).selected) == ["g"]


def test_best_effort_work_leaves_a_part_of_its_time_to_streams_without_a_reserve() -> None:
    stream = row("stream", 0.2)
    longest = Bounds(rows=9, tokens=500, best_effort_s=0.2)

    def step_s(bounds: Bounds, *urgent: Item) -> float:
        packing = run(urgent, [Item("f", 400)], bounds)
        assert best_effort_part(packing)
        return packing.seconds

    token_s = SAFETY * 0.0015  # and its pairs
    full_s = step_s(longest, stream)
    assert full_s > 0.2 - token_s
    short_s = step_s(replace(longest, short_of_s=0.2), stream)
    left_s = 0.05 * (0.2 - seconds([(stream, 1)])) ** 2 / 0.2
    assert 0.2 - left_s - token_s < short_s <= 0.2 - left_s
    assert step_s(replace(longest, short_of_s=0.3), stream) == full_s, "it gains enough"
    prompt = Item("prompt", 90, 0, 0.4)
    left_s = 0.05 * (0.2 - seconds([(stream, 1), (prompt, 90)])) ** 2 / 0.2
    short_s = step_s(replace(longest, short_of_s=0.2), stream, prompt)
    assert 0.2 - left_s - token_s < short_s <= 0.2 - left_s, "and less of a small part"
    impossible = replace(longest, short_of_s=0.001)
    assert step_s(impossible, stream) == full_s, "or a request could stop all best-effort work"


# Time owed to best-effort work


def test_credit_gives_best_effort_work_in_a_step_that_has_no_time_row_or_token_left() -> None:
    urgent = [row("a", 0.024), row("b", 0.024)]
    best_effort = [Item("f", 200, 0), row("g")]
    full = Bounds(rows=2, tokens=2, best_effort_s=0.02)
    assert not best_effort_part(run(urgent, best_effort, full))
    owed = replace(full, best_effort_credit_s=0.02, tokens=20)
    packing = run(urgent, best_effort, owed)
    assert names(urgent_part(packing)) == ["a", "b"]
    assert names(best_effort_part(packing)) == ["f"]
    assert packing.seconds <= packing.urgent_s + 0.02
    assert packing.seconds > packing.urgent_s


@pytest.mark.parametrize(
    ("share", "best_effort"), [(0.98, ["a"]), (1.01, ["a"]), (2.0, ["a", "b"])]
)
def test_only_credit_is_left_beside_a_chunk_if_slow_steps_would_make_its_first_token_late(
    share: float, best_effort: list[str]
) -> None:
    """share: of the safe time of its prompt, which takes two steps, until the token is due."""
    prompt = Item("prompt", 100)
    due_s = share * (seconds([(prompt, 48)]) + rest_seconds(prompt, 48))
    bounds = Bounds(rows=9, tokens=64, best_effort_s=9.0, best_effort_credit_s=0.001)
    packing = run([replace(prompt, deadline_s=due_s)], [row("a"), row("b")], bounds)
    assert packing.selected[0][1] == 48
    assert names(best_effort_part(packing)) == best_effort
    assert not packing.violated


def test_credit_keeps_the_tokens_of_a_smallest_chunk() -> None:
    bounds = Bounds(rows=9, tokens=64, best_effort_credit_s=0.05)
    packing = run([Item("u", 500, 0, 9.0)], [Item("f", 500, 0)], bounds)
    assert [count for _, count in packing.selected] == [48, 16]


# Without predictions


@given(items("u", 5, urgent=True), items("f", 4, urgent=False), st.booleans(), st.data())
def test_without_predictions_all_are_taken_in_order(
    urgent: list[Item], best_effort: list[Item], exclusive: bool, data: st.DataObject
) -> None:
    rows, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 50))
    free = data.draw(st.integers(0, 20))
    bounds = Bounds(rows=rows, tokens=tokens)
    packing = pack(urgent, best_effort, bounds, Blocks(free), None, NOW, exclusive=exclusive)
    expected: list[tuple[str, int]] = []
    blocks, left = free, tokens
    for item in [*urgent, *best_effort]:
        if exclusive and item in best_effort and any(n[0] == "u" for n, _ in expected):
            break
        if left == 0 or len(expected) == rows:
            break
        count = min(item.remaining, left)
        if blocks_for(item, count) <= blocks:
            blocks, left = blocks - blocks_for(item, count), left - count
            expected.append((item.name, count))
    assert [(item.name, count) for item, count in packing.selected] == expected
    assert packing.num_urgent == sum(name[0] == "u" for name, _ in expected)


# Suspended tokens


def held(name: str, remaining: int, tokens: int, done: float, context: int = 8) -> Item:
    return Item(name, remaining, context, suspended=Held(tokens, done))


def test_suspended_tokens_are_a_chunk_of_their_own() -> None:
    """Even if there is time for more of the prompt."""
    packing = run([], [held("a", 500, 120, 0.5), row("b")])
    assert [(item.name, count) for item, count in packing.selected] == [("a", 120), ("b", 1)]


def test_the_rest_of_suspended_tokens_takes_the_rest_of_their_time() -> None:
    whole_s = run([], [Item("a", 120, 8)], LOOSE).seconds
    half_s = run([], [held("a", 120, 120, 0.5)], LOOSE).seconds
    # The constant part of the step, and the sample, cost as much as ever.
    apart_s = SAFETY * (MODEL.constant_s + MODEL.sample_s)
    assert half_s - apart_s == pytest.approx((whole_s - apart_s) / 2)


def test_where_there_is_little_time_the_first_of_them_continue() -> None:
    bounds = Bounds(rows=100, tokens=1000, best_effort_s=0.1)
    packing = run([row("rt", 0.3)], [held("a", 500, 300, 0.5)], bounds)
    ((_, one), (_, count)) = packing.selected
    assert one == 1 and 100 < count < 200 and packing.seconds <= 0.1
    load = packing.load
    assert load.tokens == 1 + count / 2


def test_a_suspended_row_fits_where_a_whole_one_does_not() -> None:
    bounds = Bounds(rows=100, tokens=1000, best_effort_s=SAFETY * 0.0219)
    for done, taken in ((0.0, False), (0.75, True)):
        packing = run([row("rt", 0.3)], [held("be", 1, 1, done)], bounds)
        assert ("be" in names(packing.selected)) == taken
    packing = run([row("rt", 0.3), held("urgent", 1, 1, 0.5)], [])
    assert names(packing.selected) == ["rt", "urgent"]


def test_a_suspended_row_takes_no_one_s_place_and_nobody_takes_its() -> None:
    bounds = Bounds(rows=2, tokens=1000)
    urgent = [row("a", 0.3), replace(row("b", 9.0), suspended=Held(1, 0.5))]
    packing = run(urgent, [row("be")], bounds)
    assert names(packing.selected) == ["a", "b"]
    packing = run([row("a", 0.3), row("b", 9.0)], [held("be", 1, 1, 0.5)], bounds)
    assert names(packing.selected) == ["a", "b"]
