"""When sessions begin: sorted, within the time, with the rate and the burstiness asked for."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.bench.workloads.contents import (
    Arrivals,
    OpenLoop,
    RandomArrivals,
    RecordedArrivals,
    rt_content,
)
from bros.core.errors import ConfigError
from bros.workload.arrivals import PoissonLoad

arrivals = st.one_of(
    st.builds(RandomArrivals, st.floats(0, 50), st.sampled_from([1.0, 0.2, 0.7, 5.0])),
    st.builds(
        RecordedArrivals,
        st.lists(st.floats(0, 100), max_size=50).map(lambda times: tuple(sorted(times))),
        st.floats(0.01, 100),
    ),
)


@given(arrivals=arrivals, duration_s=st.floats(0, 20), seed=st.integers())
def test_times_are_sorted_and_within_the_duration(
    arrivals: Arrivals, duration_s: float, seed: int
) -> None:
    times = arrivals.times(duration_s, seed)
    assert times == sorted(times)
    assert all(0 <= time_s < duration_s for time_s in times)
    assert times == arrivals.times(duration_s, seed)


@given(arrivals=arrivals, duration_s=st.floats(0, 20), longer_s=st.floats(0, 20))
def test_a_longer_run_begins_like_a_shorter_one(
    arrivals: Arrivals, duration_s: float, longer_s: float
) -> None:
    times = arrivals.times(duration_s + longer_s, 3)
    assert [time_s for time_s in times if time_s < duration_s] == arrivals.times(duration_s, 3)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.5, 8.0])
def test_gaps_have_the_mean_and_the_burstiness_of_a_gamma_distribution(
    rate: float, burstiness: float
) -> None:
    count = 20_000
    times = RandomArrivals(rate, burstiness).times(count / rate, 11)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert statistics.fmean(gaps) == pytest.approx(1 / rate, rel=0.04)
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.04)


def test_poisson_gaps_are_memoryless() -> None:
    times = RandomArrivals(2.0).times(10_000, 4)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    longer = [gap for gap in gaps if gap > 0.5]
    assert len(longer) / len(gaps) == pytest.approx(0.3679, abs=0.015)  # exp(-1)
    assert sum(gap > 1.0 for gap in longer) / len(longer) == pytest.approx(0.3679, abs=0.02)


@given(seed=st.integers(0, 1000), slower=st.floats(1.0, 10.0), burstiness=st.floats(0.3, 3.0))
def test_another_rate_stretches_the_same_gaps(seed: int, slower: float, burstiness: float) -> None:
    fast = RandomArrivals(4.0, burstiness).times(20.0, seed)
    slow = RandomArrivals(4.0 / slower, burstiness).times(20.0, seed)
    assert len(slow) <= len(fast)
    for k, time_s in enumerate(slow):
        assert time_s == pytest.approx(fast[k] * slower, abs=2e-6 * slower)


@pytest.mark.parametrize("name", ["lmsys", "sharegpt"])
def test_requests_are_those_of_the_simulator(name: str) -> None:
    sessions = OpenLoop(rt_content(name), RandomArrivals(3.0)).sessions(100.0, 9)
    simulated = PoissonLoad(3.0, name).arrivals(100.0, 9)
    assert [session.at_s for session in sessions] == pytest.approx(
        [arrival.time_s for arrival in simulated], abs=1e-6
    )
    requests = [session.turns[0].request for session in sessions]
    assert [(request.prompt_tokens, request.output_tokens) for request in requests] == [
        tuple(arrival.size) for arrival in simulated
    ]


def test_a_trace_is_played_faster_or_slower() -> None:
    recorded = (0.0, 1.0, 4.0, 4.0, 9.0)
    assert RecordedArrivals(recorded).times(9.0, 0) == [0.0, 1.0, 4.0, 4.0]
    assert RecordedArrivals(recorded, speed=2.0).times(9.0, 0) == [0.0, 0.5, 2.0, 2.0, 4.5]
    assert RecordedArrivals(recorded, speed=0.5).times(9.0, 0) == [0.0, 2.0, 8.0, 8.0]


def test_labels_say_what_is_not_usual() -> None:
    assert RandomArrivals(0.25).label == "0.25 req/s"
    assert RandomArrivals(2, 0.5).label == "2 req/s, burstiness 0.5"
    assert RecordedArrivals(()).label == "as recorded"
    assert RecordedArrivals((), 10).label == "x10"


@pytest.mark.parametrize(("rate", "burstiness"), [(-1, 1), (float("nan"), 1), (1, 0), (1, -2)])
def test_impossible_processes_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError):
        RandomArrivals(rate, burstiness)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_speeds_are_refused(speed: float) -> None:
    with pytest.raises(ConfigError, match="cannot be played"):
        RecordedArrivals((0.0,), speed)
