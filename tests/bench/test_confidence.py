"""Wilson's interval against its definition and published values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.bench.metrics import confidence_interval
from bros.bench.report.words import interval_percent
from bros.workload.attainment import Attainment


@pytest.mark.parametrize(
    ("met", "decided", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), Table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_published_intervals(met: int, decided: int, low: float, high: float) -> None:
    assert confidence_interval(Attainment(met, decided)) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_shares_that_are_not_too_far_away(sample: tuple[int, int]) -> None:
    """The definition, tried on a grid: |met/n - p| <= 1.95996 sqrt(p (1 - p) / n)."""
    met, decided = sample
    grid = np.linspace(0.0, 1.0, 20_001)
    near = np.abs(met / decided - grid) <= 1.959964 * np.sqrt(grid * (1 - grid) / decided) + 1e-12
    found = confidence_interval(Attainment(met, decided))
    assert found is not None
    assert found == pytest.approx((grid[near].min(), grid[near].max()), abs=1.1e-4)
    mirrored = confidence_interval(Attainment(decided - met, decided))
    assert mirrored is not None
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_it_holds_the_truth_about_as_often_as_it_says(share: float) -> None:
    """Over all outcomes of 150 requests, by their binomial probabilities."""
    held = 0.0
    for met in range(151):
        found = confidence_interval(Attainment(met, 150))
        assert found is not None
        if found.low <= share <= found.high:
            held += math.comb(150, met) * share**met * (1 - share) ** (150 - met)
    assert 0.93 <= held <= 0.99


def test_as_many_requests_are_needed_as_the_documentation_says() -> None:
    def above(low: float, met: int, decided: int) -> bool:
        found = confidence_interval(Attainment(met, decided))
        return found is not None and found.low >= low

    assert [above(0.95, n - 1, n) for n in (109, 110)] == [False, True]
    assert [above(0.99, n, n) for n in (380, 381)] == [False, True]


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (Attainment(0, 0), "-"),
        (Attainment(11, 12), "64-99"),
        (Attainment(20, 20), "83-100"),
        (Attainment(0, 20), "0-17"),
        (Attainment(2999, 3000), "99.8-100"),
        (Attainment(2970, 3000), "98.5-99.3"),
    ],
)
def test_percents_are_rounded_away_from_the_share(share: Attainment, text: str) -> None:
    assert interval_percent(share) == text
