"""The order of rows: common prefixes together, none overtaken too often."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from bros.batch.rows import MAX_OVERTAKEN, prompt_path, run_order
from bros.batch.rows import PromptPath as Path

UNBOUNDED = 10**9


def nodes(name: tuple[int, ...]) -> Path:
    """A path whose numbers stand for all that comes before them, as those of prompts do."""
    return tuple(hash(name[: depth + 1]) for depth in range(len(name)))


# Few branches, so that many rows have something in common.
branches = st.lists(st.integers(0, 2), max_size=4).map(tuple)
trees = st.lists(branches.map(nodes), max_size=40)


def overtaken(order: Sequence[int]) -> list[int]:
    """For each row, how many younger ones run before it."""
    place = {row: i for i, row in enumerate(order)}
    rows = range(len(order))
    return [sum(place[later] < place[row] for later in rows if later > row) for row in rows]


@given(paths=trees, limit=st.integers(0, 50))
def test_every_row_runs_once_and_none_is_overtaken_more_often_than_allowed(
    paths: list[Path], limit: int
) -> None:
    order = run_order(paths, limit)
    assert sorted(order) == list(range(len(paths)))
    assert all(times <= limit for times in overtaken(order))


@given(paths=trees)
def test_without_a_limit_rows_that_begin_alike_are_next_to_each_other(paths: list[Path]) -> None:
    order = run_order(paths, UNBOUNDED)
    for node in {node for path in paths for node in path}:
        places = [i for i, row in enumerate(order) if node in paths[row]]
        assert places == list(range(places[0], places[0] + len(places)))


@given(paths=trees)
def test_without_a_limit_branches_are_taken_by_their_first_row(paths: list[Path]) -> None:
    order = run_order(paths, UNBOUNDED)
    heads = [paths[row][:1] for row in order if paths[row]]
    firsts = list(dict.fromkeys(heads))
    assert firsts == list(dict.fromkeys(path[:1] for path in paths if path))
    for path in set(paths):
        alike = [row for row in order if paths[row] == path]
        assert alike == sorted(alike)


@given(count=st.integers(0, 60), limit=st.integers(0, 60), depth=st.integers(0, 3))
def test_rows_that_have_nothing_in_common_stay_in_the_order_of_the_file(
    count: int, limit: int, depth: int
) -> None:
    paths = [nodes((row, *range(depth))) if depth else () for row in range(count)]
    assert run_order(paths, limit) == list(range(count))


def test_a_limit_interrupts_a_run_of_prefixes_only_when_a_row_is_overdue() -> None:
    a, b = nodes((1,)), nodes((2,))
    paths = [a, b, a, a, b, a, a, b]
    assert run_order(paths, UNBOUNDED) == [0, 2, 3, 5, 6, 1, 4, 7]
    assert run_order(paths, 2) == [0, 2, 3, 1, 4, 7, 5, 6]
    assert run_order(paths, 0) == list(range(8))


def test_unless_told_otherwise_no_row_waits_for_more_than_two_thousand_younger_ones() -> None:
    paths = [nodes((row % 2,)) for row in range(3 * MAX_OVERTAKEN)]
    place = {row: i for i, row in enumerate(run_order(paths))}
    assert place[1] == MAX_OVERTAKEN + 1


prompts = st.lists(st.sampled_from("ab"), max_size=6).map(
    lambda pieces: "".join(letter * 150 for letter in pieces)
)


def piece_ends(prompt: str) -> list[int]:
    """Where a prompt is cut: after 128 characters, and then half as many more each time."""
    ends, size, end = [], 128.0, 0
    while (end := end + int(size)) <= len(prompt):
        ends.append(end)
        size *= 1.5
    return ends


@given(left=prompts, right=prompts)
def test_paths_have_in_common_what_the_prompts_have(left: str, right: str) -> None:
    paths = prompt_path(left), prompt_path(right)
    assert [len(path) for path in paths] == [len(piece_ends(left)), len(piece_ends(right))]
    for depth, end in enumerate(piece_ends(left), start=1):
        same = left[:end] == right[:end]
        assert (paths[0][:depth] == paths[1][:depth]) == same
        # A number stands for everything before it, too.
        assert (depth <= len(paths[1]) and paths[0][depth - 1] == paths[1][depth - 1]) == same


def test_a_short_prompt_has_no_path_and_a_long_one_a_short_path() -> None:
    assert prompt_path("x" * 127) == ()
    assert len(prompt_path("x" * 128)) == 1
    assert len(prompt_path("x" * 5_000_000)) == 24


def test_half_characters_in_a_prompt_do_no_harm() -> None:
    prompt = "\ud800" * 128
    assert len(prompt_path(prompt)) == 1
    assert prompt_path(prompt) != prompt_path("\ud801" * 128)
