"""Comparisons as JSON, whatever is in them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from bros.bench.metrics import ATTAINMENTS, confidence_interval
from bros.bench.results import (
    BenchResult,
    CapacityResult,
    CapacityTrial,
    Command,
    Environment,
    ScenarioResult,
    ServerSample,
)
from bros.core.request import Slo
from bros.workload.attainment import Attainment
from support.bench_records import typical_bench

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=8)
SHARES = st.integers(0, 9).flatmap(lambda n: st.builds(Attainment, st.integers(0, n), st.just(n)))
COMMANDS = st.builds(
    Command,
    environment=st.builds(Environment, packages=st.dictionaries(TEXT, TEXT, max_size=3)),
    settings=st.dictionaries(
        TEXT, st.none() | st.booleans() | st.integers() | FINITE | TEXT, max_size=4
    ),
    slo=st.builds(Slo, st.none() | st.floats(0.01, 9.0), st.none() | st.floats(0.01, 9.0)),
)


@functools.cache
def typical_runs() -> Sequence[ScenarioResult]:
    """It takes a second, and every worker of the tests imports this."""
    return typical_bench((0.3,)).results


@st.composite
def runs(draw: st.DrawFn) -> ScenarioResult:
    samples = st.builds(ServerSample, FINITE, st.dictionaries(TEXT, FINITE, max_size=2))
    return dataclasses.replace(
        draw(st.sampled_from(typical_runs())),
        command=draw(COMMANDS),
        target=draw(TEXT),
        policy=draw(st.none() | TEXT),
        rt_rate=draw(st.none() | FINITE),
        rt_digest=draw(TEXT),
        server_version=draw(st.none() | TEXT),
        timeline=tuple(draw(st.lists(samples, max_size=2))),
    )


CAPACITIES = st.builds(
    CapacityResult,
    command=COMMANDS,
    asked=FINITE,
    rate=st.none() | FINITE,
    tried=st.lists(st.builds(CapacityTrial, rate=FINITE, both_met=SHARES), max_size=3).map(tuple),
)
BENCHES = st.builds(
    BenchResult,
    results=st.lists(runs(), max_size=3).map(tuple),
    capacities=st.lists(CAPACITIES, max_size=2).map(tuple),
    files=st.lists(TEXT, max_size=3).map(tuple),
)


@given(BENCHES)
def test_json_comes_back_as_it_was(bench: BenchResult) -> None:
    assert BenchResult.from_json(bench.to_json()) == bench


@given(BENCHES)
def test_shares_of_requests_have_their_interval_and_those_of_tokens_have_none(
    bench: BenchResult,
) -> None:
    tree = json.loads(bench.to_json())
    pairs = [
        (shown["by_class"][kind][name], getattr(part, name))
        for shown, run in zip(tree["results"], bench.results, strict=True)
        for kind, part in run.metrics.by_class.items()
        for name in (*ATTAINMENTS, "tokens_on_time")
        if name in ATTAINMENTS or "low" in shown["by_class"][kind][name]
    ]
    for shown_search, search in zip(tree["capacities"], bench.capacities, strict=True):
        for shown, tried in zip(shown_search["tried"], search.tried, strict=True):
            pairs.append((shown["both_met"], tried.both_met))
    assert len(pairs) == 8 * len(bench.results) + sum(len(c.tried) for c in bench.capacities)
    for shown, share in pairs:
        interval = confidence_interval(share)
        assert (shown["low"], shown["high"]) == (interval or (None, None))


@given(st.lists(runs(), max_size=4))
def test_commands_are_those_of_the_runs_each_once(found: list[ScenarioResult]) -> None:
    bench = BenchResult(results=tuple(found))
    assert all(run.command in bench.commands for run in found)
    assert all(bench.commands.count(command) == 1 for command in bench.commands)
    assert set(bench.objectives) == {run.command.slo for run in found}


def test_the_slowdown_is_a_mean_over_the_streams_of_the_measured_time() -> None:
    run = typical_runs()[1]
    samples = [(10.0, 9.0, 90.0), (100.0, 3.0, 4.0), (120.0, 0.0, 0.0), (200.0, 1.0, 3.0)]
    timeline = tuple(
        ServerSample(at_s, {"streams": streams, "slowdown_sum": total})
        for at_s, streams, total in samples
    )
    assert dataclasses.replace(run, timeline=timeline).slowdown == 1.75
    assert dataclasses.replace(run, timeline=()).slowdown is None
