"""How long calls take, learnt; and deadlines, watched."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.interfaces import Prices
from bros.core.request import ServiceClass
from bros.semantic.core.estimates import (
    FIRST_GUESS_CHARS,
    FIRST_GUESS_TOKENS,
    MAX_NAMES,
    Average,
    CallWork,
    Estimates,
    ObservedCall,
    model_prefill_s,
)
from bros.semantic.core.nodes import TaskGroup, Variable
from bros.semantic.core.objectives import COMPACT_FROM, DeadlineWatch

F = ("tenant", "f")
PRICES = Prices(token_s=0.0015, row_s=0.01)
WORK = CallWork(prompt_tokens=1000, cached_tokens=0, output_tokens=100)
RT, BE = ServiceClass.RT, ServiceClass.BE


def test_nothing_known_is_a_guess_within_max_tokens() -> None:
    estimates = Estimates()
    assert estimates.expected_tokens(F, None) == FIRST_GUESS_TOKENS
    assert estimates.expected_tokens(F, 10) == 10.0
    assert estimates.longest_tokens(F, None, 9) == FIRST_GUESS_TOKENS
    estimates.observe_prompt(F, 400.0, 100)
    assert estimates.expected_tokens(F, None) == FIRST_GUESS_TOKENS, "a prompt is no answer"


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_an_average_is_exact_at_first_and_weighted_by_age_later(seen: list[int]) -> None:
    average = Average()
    for value in seen:
        average.add(value, weight=1 / 20)
    assert average.mean == pytest.approx(statistics.fmean(seen))
    assert average.variance == pytest.approx(statistics.pvariance(seen), abs=1e-6)
    before = average.mean
    average.add(500, weight=0.5)
    assert average.mean == pytest.approx((before + 500) / 2)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.integers(1, 50))
def test_the_longest_of_many_calls_is_longer_by_their_spread(seen: list[int], calls: int) -> None:
    estimates = Estimates()
    for tokens in seen:
        estimates.observe_tokens(F, tokens)
    expected = estimates.expected_tokens(F, None)
    longest = estimates.longest_tokens(F, None, calls)
    assert 1.0 <= expected <= longest <= estimates.longest_tokens(F, None, calls + 1)
    if len(set(seen)) == 1 or calls == 1:
        assert longest == pytest.approx(expected)
    assert estimates.expected_tokens(("other", "f"), None) == FIRST_GUESS_TOKENS
    assert 1.0 <= estimates.longest_tokens(F, 5, calls) <= 5.0


def test_functions_unheard_of_for_long_are_forgotten() -> None:
    estimates = Estimates()
    often, once = ("", "often"), ("", "once 0")
    estimates.observe_tokens(often, 7)
    for i in range(2 * MAX_NAMES):
        estimates.observe_tokens(("", f"once {i}"), 3)
        estimates.observe_tokens(often, 7)
    assert estimates.expected_tokens(often, None) == pytest.approx(7.0)
    assert estimates.expected_tokens(once, None) == FIRST_GUESS_TOKENS


def observed(
    *,
    service_class: ServiceClass | None = RT,
    cached: int = 0,
    queued_s: float = 0.0,
    preempted_s: float = 0.0,
    slower: float = 1.0,
) -> ObservedCall:
    """A call of 1,000 and 100 tokens on an engine whose decode takes `slower` times PRICES."""
    decode_s = slower * PRICES.decode_s(99, 1050)
    return ObservedCall(
        service_class=service_class,
        prompt_tokens=1000,
        cached_tokens=cached,
        output_tokens=100,
        ttft_s=queued_s + PRICES.prefill_s(1000 - cached, cached),
        decode_s=decode_s + preempted_s,
    )


def decoded(seconds: float, *, rows: float = 1.0, others: float = 0.0) -> ObservedCall:
    """A call of 10 and 100 tokens that took so long from its first token on."""
    return ObservedCall(
        service_class=RT,
        prompt_tokens=10,
        cached_tokens=0,
        output_tokens=100,
        ttft_s=0.02,
        decode_s=seconds,
        rows=rows,
        others=others,
    )


def test_a_call_takes_its_queueing_its_prefill_and_its_decode() -> None:
    estimates = Estimates(weight=0.5)
    assert estimates.seconds(WORK, PRICES, 0.0) == pytest.approx(1.5 + 1.0)
    for _ in range(3):
        estimates.observe(F, observed(slower=2.0), PRICES, 0.0)
    assert estimates.seconds(WORK, PRICES, 0.0) == pytest.approx(1.5 + 2.0)
    half = dataclasses.replace(WORK, cached_tokens=500)
    assert estimates.seconds(half, PRICES, 0.0) == pytest.approx(0.75 + 2.0)
    estimates.observe(F, observed(queued_s=4.0), PRICES, 10.0)
    assert estimates.queueing_s(RT, 10.0) == pytest.approx(2.0)
    assert estimates.queueing_s(BE, 10.0) == 0.0
    assert 0.0 < estimates.queueing_s(RT, 40.0) < 1.0, "it fades"
    assert estimates.seconds(WORK, PRICES, 10.0) == pytest.approx(2.0 + 1.5 + 2.0)


@pytest.mark.parametrize("prices", [PRICES, None])
@pytest.mark.parametrize(
    "odd",
    [
        observed(cached=990),
        observed(cached=1000),
        observed(service_class=BE, queued_s=15.0),
        observed(service_class=BE, queued_s=15.0, cached=990),
        observed(preempted_s=15.0),
        observed(service_class=None, queued_s=15.0, preempted_s=15.0),
    ],
    ids=["cached", "all cached", "queued", "queued and cached", "preempted", "promoted"],
)
@pytest.mark.parametrize("usual", [2, 3])
def test_an_odd_call_does_not_move_the_estimate(
    prices: Prices | None, odd: ObservedCall, usual: int
) -> None:
    estimates = Estimates()
    for _ in range(usual):
        estimates.observe(F, observed(), prices, 0.0)
    before_s = estimates.seconds(WORK, prices, 0.0)
    assert before_s == pytest.approx(2.5, rel=0.05)
    estimates.observe(F, odd, prices, 0.0)
    assert estimates.seconds(WORK, prices, 0.0) == pytest.approx(before_s, rel=0.2)


odd_calls = st.builds(
    observed,
    service_class=st.just(BE),
    cached=st.integers(0, 1000),
    queued_s=st.floats(0.0, 100.0),
    preempted_s=st.floats(0.0, 100.0),
) | st.builds(observed, cached=st.integers(0, 1000))


@given(st.lists(odd_calls, max_size=30), st.lists(st.floats(0.0, 100.0), max_size=5))
def test_mixed_histories_do_not_move_the_estimate(
    history: list[ObservedCall], preempted: list[float]
) -> None:
    """Calls of both classes, cached and queued, of which few real-time ones were preempted."""
    estimates = Estimates()
    for _ in range(len(preempted) + 1):
        estimates.observe(F, observed(), PRICES, 0.0)
    for seconds in preempted:
        estimates.observe(F, observed(preempted_s=seconds), PRICES, 0.0)
    for call in history:
        estimates.observe(F, call, PRICES, 0.0)
    assert estimates.seconds(WORK, PRICES, 0.0) == pytest.approx(2.5, rel=0.01)


@given(
    history=st.lists(st.sampled_from([0, 500, 990, 1000]), min_size=1, max_size=10),
    cached=st.sampled_from([0, 500, 990, 1000]),
)
def test_the_prefill_is_that_of_the_tokens_of_this_prompt_that_are_not_cached(
    history: list[int], cached: int
) -> None:
    """However much was cached of earlier prompts of the function."""
    estimates = Estimates()
    for tokens in history:
        estimates.observe(F, observed(cached=tokens), PRICES, 0.0)
    work = dataclasses.replace(WORK, cached_tokens=cached)
    expected_s = PRICES.prefill_s(1000 - cached, cached) + 1.0
    assert estimates.seconds(work, PRICES, 0.0) == pytest.approx(expected_s, rel=0.01)


def test_calls_that_run_together_compute_what_they_share_once() -> None:
    estimates, prices = Estimates(), Prices(token_s=0.0015)
    alone_s = estimates.seconds(WORK, prices, 0.0)
    assert estimates.prefill_s(1000, 0, prices, members=4, cached_beside=800) == pytest.approx(2.4)
    assert estimates.prefill_s(1000, 800, prices, members=4) == pytest.approx(1.2)
    first = dataclasses.replace(WORK, cached_beside=800)
    assert estimates.seconds(first, prices, 0.0) == alone_s


@pytest.mark.parametrize("prices", [PRICES, None])
@given(rows=st.integers(2, 8), slower=st.sampled_from([1.0, 2.0]))
def test_members_of_a_group_do_not_count_as_load_of_others(
    prices: Prices | None, rows: int, slower: float
) -> None:
    """A group of equal calls is predicted from what it took, and so is one such call alone."""
    own_s = PRICES.prefill_s(1000)
    step_s = rows * PRICES.decode_s(1, 1050, rows)
    estimates = Estimates()
    for _ in range(6):
        for number in range(rows):
            after_s = (rows - 1 - number) * own_s
            member = ObservedCall(
                service_class=RT,
                prompt_tokens=1000,
                cached_tokens=0,
                output_tokens=100,
                ttft_s=slower * (number + 1) * own_s,
                decode_s=slower * (99 * step_s + after_s),
                rows=rows,
                prefilled_before_s=number * model_prefill_s(1000, 0, prices),
                prefilled_after_s=(rows - 1 - number) * model_prefill_s(1000, 0, prices),
            )
            estimates.observe(F, member, prices, 0.0)
    together = dataclasses.replace(WORK, members=rows)
    expected_s = slower * (rows * own_s + 100 * step_s)
    assert estimates.seconds(together, prices, 0.0) == pytest.approx(expected_s, rel=0.1)
    if slower == 1.0 and prices is not None:
        alone_s = own_s + PRICES.decode_s(100, 1050)
        assert estimates.seconds(WORK, prices, 0.0) == pytest.approx(alone_s, rel=0.1)


@given(
    rows=st.lists(st.integers(1, 8), min_size=40, max_size=40).filter(lambda r: len(set(r)) > 3),
    slower=st.floats(0.5, 2.0),
    others_s=st.floats(0.0, 0.1),
)
def test_decode_steps_of_any_size_are_predicted_from_steps_of_some(
    rows: list[int], slower: float, others_s: float
) -> None:
    """A slower machine and rows of others are told apart."""
    prices = Prices(constant_s=0.02, row_s=0.003, hinges=((4, -0.002),))
    estimates = Estimates()

    def step_s(count: int) -> float:
        return slower * count * prices.decode_s(1, 60, count) + others_s

    for count in rows:
        estimates.observe(F, decoded(99 * step_s(count), rows=count), prices, 0.0)
    for count in (1, 3, 8):
        found_s = estimates.decode_s(50, 60, prices, RT, count)
        assert found_s == pytest.approx(50 * step_s(count), rel=0.05)


def test_requests_of_others_that_are_open_now_count_beside_the_usual_number() -> None:
    prices, estimates = Prices(constant_s=0.02, row_s=0.003), Estimates()

    def step_s(rows: float) -> float:
        return rows * prices.decode_s(1, 60, rows)

    for others in (2.0, 4.0) * 20:
        estimates.observe(F, decoded(99 * step_s(1.0 + others), others=others), prices, 0.0)
    for now in (0, 3, 8):
        expected_s = 50 * step_s(1.0 + (now + 3.0) / 2)
        found_s = estimates.decode_s(50, 60, prices, RT, 1.0, now)
        assert found_s == pytest.approx(expected_s, rel=0.05)


def test_random_queueing_hardly_ever_moves_the_prefill() -> None:
    """Calls that did not wait agree on what a prompt token takes, those that waited do not."""
    moved = 0
    for seed in range(200):
        rng, estimates = random.Random(seed), Estimates()
        for number in range(60):
            tokens = rng.randrange(10, 4000)
            call = ObservedCall(
                service_class=RT,
                prompt_tokens=tokens,
                cached_tokens=0,
                output_tokens=1,
                ttft_s=(number >= 15) * rng.uniform(0.0, 20.0) + 2.0 * PRICES.prefill_s(tokens),
                decode_s=0.0,
            )
            estimates.observe(F, call, PRICES, 0.0)
        slope = estimates.prefill_s(1000, 0, PRICES) / PRICES.prefill_s(1000)
        moved += not 1.0 < slope < 4.0
    assert moved <= 10, "of 200"


@given(
    slower=st.floats(1.5, 8.0),
    tokens=st.integers(10, 4000),
    actual=st.floats(0.5, 1.5),
    seed=st.integers(0, 10**6),
)
def test_a_slope_that_was_too_large_is_corrected_by_calls_of_one_length(
    slower: float, tokens: int, actual: float, seed: int
) -> None:
    """Groups of 8 beside equal load of others take `slower` times as long for all prompts. Then
    calls with prompts of one length come alone, which tell no slope."""
    estimates, rng = Estimates(), random.Random(seed)
    own_s = PRICES.prefill_s(1000)
    for number in range(32):
        before_s = number % 8 * own_s
        member = ObservedCall(
            service_class=RT,
            prompt_tokens=1000,
            cached_tokens=0,
            output_tokens=1,
            ttft_s=slower * (before_s + own_s),
            decode_s=0.0,
            prefilled_before_s=before_s,
        )
        estimates.observe(F, member, PRICES, 0.0)
    assert estimates.prefill_s(1000, 0, PRICES) == pytest.approx(slower * own_s)
    took_s = actual * PRICES.prefill_s(tokens)
    for _ in range(80):
        call = ObservedCall(
            service_class=RT,
            prompt_tokens=tokens,
            cached_tokens=0,
            output_tokens=1,
            ttft_s=took_s * rng.uniform(0.98, 1.02),
            decode_s=0.0,
        )
        estimates.observe(F, call, PRICES, 0.0)
    assert estimates.prefill_s(tokens, 0, PRICES) == pytest.approx(took_s, rel=0.03)


@given(st.floats(1.0, 8.0), st.integers(1, 2000))
def test_prompts_have_as_many_tokens_as_those_of_the_function(chars: float, tokens: int) -> None:
    estimates = Estimates()
    assert estimates.prompt_tokens(F, 400.0) == 400.0 / FIRST_GUESS_CHARS
    estimates.observe_prompt(F, chars * tokens, tokens)
    assert estimates.prompt_tokens(F, chars * 50) == pytest.approx(50)
    tenant, _ = F
    assert estimates.prompt_tokens((tenant, "g"), chars * 50) == pytest.approx(50), "best guess"
    unknown = chars * 50 / FIRST_GUESS_CHARS
    assert estimates.prompt_tokens(("other", "f"), chars * 50) == pytest.approx(unknown)
    estimates.observe_prompt(("other", "f"), 9 * chars * tokens, tokens)
    assert estimates.prompt_tokens(F, chars * 50) == pytest.approx(50)


def test_an_engine_without_a_cost_model_is_measured() -> None:
    estimates = Estimates()
    for _ in range(3):
        estimates.observe(F, observed(slower=2.0), None, 0.0)
    assert estimates.prefill_s(1000, 0, None) == pytest.approx(1.5)
    assert estimates.seconds(WORK, None, 1000.0) == pytest.approx(1.5 + 2.0, rel=0.01)


def group() -> TaskGroup:
    return TaskGroup(Variable("v", ""), 1)


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
