"""How long calls take, learnt; and deadlines, watched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.semantic.core.nodes import TaskGroup, Variable
from bros.semantic.core.objectives import (
    COMPACT_FROM,
    FIRST_GUESS_TOKENS,
    MAX_NAMES,
    DeadlineWatch,
    Estimates,
)


def test_nothing_known_is_a_guess_within_max_tokens() -> None:
    estimates = Estimates()
    assert estimates.expected_tokens("f", None) == FIRST_GUESS_TOKENS
    assert estimates.expected_tokens("f", 10) == 10.0


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_tokens_are_a_moving_average_by_name(seen: list[int]) -> None:
    estimates = Estimates(weight=0.25)
    average = float(seen[0])
    for tokens in seen:
        average = 0.75 * average + 0.25 * tokens
        estimates.observe_tokens("f", tokens)
    assert estimates.expected_tokens("f", None) == pytest.approx(max(1.0, average))
    assert estimates.expected_tokens("g", None) == FIRST_GUESS_TOKENS
    assert 1.0 <= estimates.expected_tokens("f", 5) <= 5.0


def test_the_first_observation_replaces_the_guess_and_later_ones_count_by_weight() -> None:
    estimates = Estimates(prompt_token_s=9.0, output_token_s=9.0, weight=0.5)
    estimates.observe_prompt(100, 1.0)
    estimates.observe_output(10, 2.0)
    assert estimates.seconds(100, 10) == pytest.approx(1.0 + 2.0)
    estimates.observe_prompt(100, 2.0)
    estimates.observe_output(10, 4.0)
    assert estimates.seconds(100, 10) == pytest.approx(1.5 + 3.0)
    estimates.observe_prompt(0, 5.0)
    estimates.observe_output(0, 5.0)
    assert estimates.seconds(100, 10) == pytest.approx(1.5 + 3.0), "nothing to learn from"


def test_functions_unheard_of_for_long_are_forgotten() -> None:
    estimates = Estimates()
    estimates.observe_tokens("often", 7)
    for i in range(2 * MAX_NAMES):
        estimates.observe_tokens(f"once {i}", 3)
        estimates.observe_tokens("often", 7)
    assert estimates.expected_tokens("often", None) == 7.0
    assert estimates.expected_tokens("once 0", None) == FIRST_GUESS_TOKENS


def group() -> TaskGroup:
    return TaskGroup(Variable("v", ""), 1, (), None, num_unfinished=1)


@given(
    st.lists(st.tuples(st.sampled_from(["add", "drop", "take"]), st.integers(0, 50)), max_size=60)
)
def test_watch_gives_each_active_group_once_when_it_is_time(
    steps: list[tuple[str, int]],
) -> None:
    watch = DeadlineWatch()
    naive: list[tuple[float, int, TaskGroup]] = []
    now = 0.0
    for number, (step, value) in enumerate(steps):
        if step == "add":
            entry = (now + value, number, group())
            naive.append(entry)
            watch.add(entry[2], entry[0])
        elif step == "drop" and naive:
            dropped = naive.pop(value % len(naive))
            dropped[2].active = False
        elif step == "take":
            now += value / 5
            due = sorted((e for e in naive if e[0] <= now), key=lambda e: e[:2])
            assert list(watch.take(now)) == [e[2] for e in due]
            naive = [e for e in naive if e[0] > now]
        assert watch.next_s() == min((e[0] for e in naive), default=None)


def test_groups_made_anew_again_and_again_do_not_pile_up() -> None:
    watch = DeadlineWatch()
    kept = [group() for _ in range(10)]
    for one in kept:
        watch.add(one, 1.0)
    for _ in range(1000):
        dropped = group()
        watch.add(dropped, 2.0)
        dropped.active = False
    assert len(watch) <= 2 * COMPACT_FROM
    assert list(watch.take(1.0)) == kept
