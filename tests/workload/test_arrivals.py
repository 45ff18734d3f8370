"""Arrivals and lengths: the statistics they should have, and that they can be repeated."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.cli.flags import RT_LENGTHS
from bros.core.errors import ConfigError
from bros.workload.arrivals import (
    BE_SIZES,
    RT_SIZES,
    Arrival,
    PoissonLoad,
    Size,
    TraceLoad,
    read_azure_trace,
)
from bros.workload.lengths import ClippedLogNormal, Uniform

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def sizes_of(name: str, count: int) -> list[Size]:
    stream = RT_SIZES[name].stream(random.Random(7))
    return list(itertools.islice(stream, count))


@pytest.mark.parametrize(
    ("name", "prompt_mean", "prompt_std", "output_mean", "output_std"),
    [("sharegpt", 222.76, 256.36, 234.51, 268.50), ("lmsys", 90.50, 148.52, 237.04, 228.21)],
)
def test_lengths_have_the_published_moments(
    name: str, prompt_mean: float, prompt_std: float, output_mean: float, output_std: float
) -> None:
    count = 100_000
    sizes = sizes_of(name, count)
    for values, mean, std in (
        ([size.prompt_tokens for size in sizes], prompt_mean, prompt_std),
        ([size.output_tokens for size in sizes], output_mean, output_std),
    ):
        assert abs(statistics.fmean(values) - mean) < 4 * std / math.sqrt(count) + 0.5
        assert statistics.pstdev(values) == pytest.approx(std, rel=0.02)
        assert 1 <= min(values) and max(values) <= 1024
    assert min(size.prompt_tokens for size in sizes) >= 4


def test_names_of_lengths_are_the_flag_s() -> None:
    assert set(RT_LENGTHS) == set(RT_SIZES)


def test_best_effort_lengths_are_uniform_with_both_ends() -> None:
    sizes = list(itertools.islice(BE_SIZES.stream(random.Random(1)), 50_000))
    assert {size.prompt_tokens for size in sizes} == set(range(512, 1025))
    assert {size.output_tokens for size in sizes} == set(range(32, 129))
    assert BE_SIZES.longest == 1024 + 128


@given(
    mean=st.floats(20, 300), spread=st.floats(0.1, 1.2), low=st.integers(1, 8), seed=st.integers()
)
def test_fitted_distribution_has_the_moments_after_clipping(
    mean: float, spread: float, low: int, seed: int
) -> None:
    lengths = ClippedLogNormal(mean, mean * spread, low, 4096)
    rng = random.Random(seed)
    values = [lengths.draw(rng) for _ in range(4000)]
    assert all(low <= value <= 4096 for value in values)
    # Five standard errors, and the heavy tail makes the sample's own error larger.
    assert abs(statistics.fmean(values) - mean) < 5 * mean * spread / math.sqrt(4000) + 0.5


def test_impossible_moments_are_refused() -> None:
    with pytest.raises(ValueError, match="no log-normal"):
        ClippedLogNormal(500, 600, 1, 600)


def test_poisson_arrivals_have_their_rate_and_independent_gaps() -> None:
    rate, duration_s = 10.0, 5000.0
    times = [a.time_s for a in PoissonLoad(rate, "lmsys").arrivals(duration_s, seed=3)]
    expected = rate * duration_s
    assert abs(len(times) - expected) < 4 * math.sqrt(expected)
    assert times == sorted(times) and 0 < times[0] and times[-1] < duration_s
    per_second = [0] * int(duration_s)
    for time_s in times:
        per_second[int(time_s)] += 1
    # In a Poisson process the variance of counts is their mean: a test of the gaps.
    error = math.sqrt(2 / duration_s) * 4
    assert statistics.pvariance(per_second) / statistics.fmean(per_second) == pytest.approx(
        1.0, abs=error
    )


def test_another_rate_brings_the_same_requests_closer_together() -> None:
    slow = PoissonLoad(2.0, "lmsys").arrivals(100.0, seed=5)
    fast = PoissonLoad(4.0, "lmsys").arrivals(50.0, seed=5)
    assert [a.size for a in slow] == [a.size for a in fast]
    assert [a.time_s for a in slow] == pytest.approx([2 * a.time_s for a in fast])
    assert PoissonLoad(2.0, "lmsys").arrivals(100.0, seed=6) != slow


def test_no_rate_is_no_arrivals() -> None:
    assert PoissonLoad(0.0, "lmsys").arrivals(100.0, seed=5) == []


def test_uniform_of_one_value() -> None:
    assert Uniform(9, 9).draw(random.Random(0)) == 9


def test_trace_is_read_with_times_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        HEADER
        + "2023-11-16 23:59:59.5000000,374,44\n"
        + "2023-11-17 00:00:01.7500001,396,109\n"
        + "\n"
        + "2023-11-17 00:00:00,1,1\n"
    )
    arrivals = read_azure_trace(path)
    assert [arrival.size for arrival in arrivals] == [Size(374, 44), Size(1, 1), Size(396, 109)]
    assert [a.time_s for a in arrivals] == pytest.approx([0.0, 0.5, 2.2500001], abs=1e-9)


def test_trace_can_be_played_faster_and_ends_with_the_duration() -> None:
    recorded = tuple(Arrival(float(t), Size(t + 1, 1)) for t in range(10))
    load = TraceLoad("t.csv", recorded, speed=2.0)
    assert load.arrivals(3.0, seed=0) == [Arrival(t / 2, Size(t + 1, 1)) for t in range(6)]
    assert load.label == "t.csv x2"
    assert TraceLoad("t.csv", recorded).label == "t.csv"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: the first line must be TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("a,b\n", ":1: the first line must be"),
        (HEADER, "has no requests"),
        (HEADER + "2023-11-16 18:15:46,5,5\nyesterday,5,5\n", ":3: 'yesterday,5,5' is not"),
        (HEADER + "2023-11-16 18:15:46,5\n", ":2: "),
        (HEADER + "2023-11-16 18:15:46,5,5,5\n", ":2: "),
        (HEADER + "2023-11-16 18:15:46,5,many\n", ":2: "),
        (HEADER + "2023-11-16 18:15:46.1e5,5,5\n", ":2: "),
        (HEADER + "2023-11-16 18:15:46,0,5\n", ":2: token counts must be at least 1"),
        (HEADER + "2023-11-16 18:15:46,5,-1\n", ":2: token counts must be at least 1"),
    ],
)
def test_wrong_traces_are_refused_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_azure_trace(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_unreadable_traces_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_azure_trace(path)
