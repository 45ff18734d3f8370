"""Which runs make a comparison, and the search for the highest rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.bench.planning import Case, Range, cases_of_policy, cases_of_target, find_capacity
from bros.bench.results import Scenario
from bros.workload.attainment import Attainment

S0, S1, S2, S3 = Scenario
ALL = frozenset(Scenario)


def test_every_run_is_made_once_over_all_policies() -> None:
    policies = ("fcfs", "priority", "rr", "bros")
    made = {policy: cases_of_policy(policy, policies, (0.1, 0.2), ALL) for policy in policies}
    assert made["fcfs"] == [Case(S2, None), Case(S1, 0.1), Case(S1, 0.2)]
    assert made["priority"] == made["rr"] == [Case(S3, 0.1), Case(S3, 0.2)]
    assert made["bros"] == [Case(S0, 0.1), Case(S0, 0.2), Case(S3, 0.1), Case(S3, 0.2)]


@pytest.mark.parametrize("policies", [("bros",), ("rr", "edf"), ("fcfs",), ("priority", "fcfs")])
def test_bounds_are_measured_whatever_is_compared(policies: tuple[str, ...]) -> None:
    made = [case for policy in policies for case in cases_of_policy(policy, policies, (1.0,), ALL)]
    assert made.count(Case(S0, 1.0)) == 1 and made.count(Case(S2, None)) == 1


def test_a_target_is_asked_with_and_without_classes_if_it_knows_any() -> None:
    with_classes = cases_of_target((1.0,), ALL, has_classes=True)
    assert with_classes == [Case(S0, 1.0), Case(S2, None), Case(S1, 1.0), Case(S3, 1.0)]
    assert [case.sends_classes for case in with_classes] == [True, True, False, True]
    assert Case(S3, 1.0) not in cases_of_target((1.0,), ALL, has_classes=False)


def test_only_the_scenarios_asked_for() -> None:
    assert cases_of_target((1.0, 2.0), {S0}, has_classes=True) == [Case(S0, 1.0), Case(S0, 2.0)]
    assert cases_of_policy("fcfs", ("fcfs",), (1.0,), {S3}) == []


@given(
    st.integers(0, 40), st.integers(1, 40), st.floats(0.5, 1.0),
    st.sampled_from([(0.1, 0.1), (1.0, 0.5), (3.0, 2.0)]),
)  # fmt: skip
async def test_the_highest_good_rate_is_found_in_few_runs(
    good: int, count: int, asked: float, grid: tuple[float, float]
) -> None:
    """`good` of `count` rates are good, the lowest ones."""
    low, step = grid
    rates = Range(low, low + (count - 1) * step, step)
    assert rates.count == count
    limit = rates.rate(min(good, count) - 1) if good else -1.0

    async def attempt(rate: float) -> Attainment:
        met = math.ceil(asked * 1000)
        if rate <= limit:
            return Attainment(met, 1000)
        return Attainment(0, 0) if rate > limit + 5 else Attainment(met - 1, 1000)

    found = await find_capacity(attempt, rates, asked)
    assert found.rate == (limit if good else None)
    tried = [one.rate for one in found.tried]
    assert len(tried) == len(set(tried)) <= 2 + count.bit_length()
