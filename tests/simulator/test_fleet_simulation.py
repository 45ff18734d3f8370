"""Several engines on one virtual clock: nothing is lost, and nothing is known too early."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.errors import ConfigError
from bros.core.interfaces import EngineReport
from bros.core.request import EngineRequest, ServiceClass
from bros.router.fleet import Fleet
from bros.router.state import ROUTERS, Decision
from bros.simulator import fleet as fleet_build
from bros.simulator.fleet import FleetResult, FleetScenario, build_fleet_simulation
from bros.simulator.prefix_workloads import published
from bros.simulator.simulation import build_simulation
from bros.workload.arrivals import Arrival, BeLoad, Size, TraceLoad
from support.fleets import GivenLoad, fleet_scenario, request
from support.scenarios import scenario
from support.tier import by_tier, examples


def run(scenario: FleetScenario) -> FleetResult:
    return build_fleet_simulation(scenario).run()


def check_conserved(scenario: FleetScenario, result: FleetResult) -> None:
    """Every request ended once, with as many tokens as it asked for, after it had come."""
    requests = scenario.load.requests(scenario.seed)
    assert [record.request for record in result.records] == list(requests)
    for record in result.records:
        assert record.finished
        assert record.tokens == record.request.output_tokens
        assert 0 <= record.cached < record.prompt_tokens
        assert 0 <= record.replica < scenario.replicas
        assert record.first_s is not None and record.last_s is not None
        assert record.request.time_s <= record.arrival_s < record.first_s <= record.last_s
        assert record.last_s <= result.end_s
    assert all(busy <= result.end_s + 1e-9 for busy in result.busy_s)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("name", by_tier(fast=["toolbench"], long=["toolbench", "embodied"]))
def test_every_request_ends_once_with_all_its_tokens(router: str, name: str) -> None:
    load = published(name, 3, rate=30.0, count=90, families=9)
    case = fleet_scenario(router, load, replicas=3)
    check_conserved(case, run(case))


@pytest.mark.parametrize("router", by_tier(fast=["e2"], long=ROUTERS))
def test_the_same_seed_gives_the_same_run_to_the_bit(router: str) -> None:
    case = fleet_scenario(router)
    digest = run(case).digest()
    assert run(case).digest() == digest
    assert run(dataclasses.replace(case, seed=2)).digest() != digest


def test_one_replica_does_what_one_engine_does() -> None:
    """Whatever the router, and although the steps are begun by events here and in a loop there."""
    sizes = [Size(300, 20), Size(1500, 3), Size(40, 60), Size(700, 1), Size(90, 33)]
    arrivals = tuple(
        Arrival(0.05 * i if i < 30 else 5.0 + i, sizes[i % len(sizes)]) for i in range(40)
    )
    alone = build_simulation(
        scenario("fcfs", rt=TraceLoad("given", arrivals), be=BeLoad(0), duration_s=100.0)
    ).run()
    load = GivenLoad(
        tuple(
            request(a.time_s, own=a.size.prompt_tokens, output=a.size.output_tokens, name=str(i))
            for i, a in enumerate(arrivals)
        )
    )
    for router in ROUTERS:
        bounds = {"max_num_seqs": 64, "max_batch_tokens": 256, "kv_blocks": 4000}
        fleet = run(fleet_scenario(router, load, replicas=1, **bounds))
        assert sum(fleet.steps) == alone.steps
        assert sum(fleet.busy_s) == pytest.approx(alone.busy_s)
        for ours, theirs in zip(fleet.records, alone.records, strict=True):
            assert ours.first_s == pytest.approx(theirs.token_times_s[0], abs=1e-9)
            assert ours.last_s == pytest.approx(theirs.token_times_s[-1], abs=1e-9)


class Watched:
    """A fleet that writes down when it is told what."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.calls: list[tuple[float, str, Any]] = []

    def add(self, *args: Any) -> int:
        return self._fleet.add(*args)

    def route(
        self, requests: Sequence[EngineRequest], now: float, avoid: frozenset[int]
    ) -> list[Decision]:
        self.calls += [(now, "route", request.request_id) for request in requests]
        return self._fleet.route(requests, now, avoid)

    def on_first_token(self, request_id: str, now: float) -> None:
        self.calls.append((now, "begun", request_id))
        self._fleet.on_first_token(request_id, now)

    def on_finished(
        self, request_id: str, output_ids: Sequence[int], now: float, *, cached: bool
    ) -> None:
        self.calls.append((now, "ended", request_id))
        self._fleet.on_finished(request_id, output_ids, now, cached=cached)

    def apply_report(self, replica: int, report: EngineReport, now: float) -> None:
        self.calls.append((now, "take", report))
        self._fleet.apply_report(replica, report, now)


def run_watched(
    case: FleetScenario, monkeypatch: pytest.MonkeyPatch
) -> tuple[FleetResult, list[tuple[float, str, Any]]]:
    fleets: list[Watched] = []
    make = fleet_build.make_fleet

    def made(*args: Any, **options: Any) -> Watched:
        fleets.append(Watched(make(*args, **options)))
        return fleets[-1]

    monkeypatch.setattr(fleet_build, "make_fleet", made)
    return run(case), fleets[0].calls


@pytest.mark.parametrize("report_delay_s", [0.0, 0.3])
def test_the_router_is_told_everything_in_the_order_in_which_it_happens(
    report_delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, calls = run_watched(fleet_scenario(report_delay_s=report_delay_s), monkeypatch)
    times = [now for now, _, _ in calls]
    assert times == sorted(times)
    told: dict[str, set[str]] = {"route": set(), "begun": set(), "ended": set()}
    for now, what, about in calls:
        if what == "take":
            # A report was written so long ago: nothing that has come since can be in it.
            records = [result.records[int(request_id)] for request_id, _ in about.cached_prefixes]
            assert all(
                r.first_s is not None and r.arrival_s <= now - report_delay_s for r in records
            )
            continue
        if what == "route":
            before = {str(n) for n, r in enumerate(result.records) if (r.last_s or now) < now}
            assert before <= told["ended"]
        told[what].add(about)
    assert [len(names) for names in told.values()] == [len(result.records)] * 3
    assert any(what == "take" for _, what, _ in calls)


def test_nothing_is_told_before_the_step_ends_that_it_is_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, calls = run_watched(fleet_scenario(), monkeypatch)
    for now, what, about in calls:
        if what in ("begun", "ended"):
            record = result.records[int(about)]
            assert now == (record.first_s if what == "begun" else record.last_s)


def test_the_next_turn_comes_when_the_one_before_has_ended() -> None:
    result = run(fleet_scenario("rr", published("embodied", 2, rate=200.0, count=60, families=4)))
    waited = 0
    for record in result.records:
        if record.request.follows is not None:
            ended_s = result.records[record.request.follows].last_s
            assert ended_s is not None
            assert record.arrival_s == max(ended_s, record.request.time_s)
            waited += record.arrival_s > record.request.time_s
    assert waited > 10


def test_a_slow_router_decides_one_after_the_other() -> None:
    load = GivenLoad(tuple(request(1.0, name=str(i)) for i in range(4)))
    quick, slow = run(fleet_scenario(load=load)), run(fleet_scenario(load=load, decision_s=0.5))
    for number, (ours, theirs) in enumerate(zip(slow.records, quick.records, strict=True), 1):
        assert ours.arrival_s == theirs.arrival_s == 1.0
        assert ours.first_s is not None and theirs.first_s is not None
        assert 1.0 + 0.5 * number < ours.first_s < 1.0 + 0.5 * number + 0.1
        assert theirs.first_s < 1.1


def test_round_robin_takes_turns_and_the_oracle_keeps_families_together() -> None:
    case = fleet_scenario("rr", replicas=3)
    assert [r.replica for r in run(case).records][:5] == [0, 1, 2, 0, 1]
    result = run(dataclasses.replace(case, router="oracle"))
    homes = {(record.request.family, record.replica) for record in result.records}
    assert len(homes) == len({family for family, _ in homes}) == 10
    assert len({replica for _, replica in homes}) == 3


def test_prefixes_are_found_where_e2_puts_them() -> None:
    """Ten tools do not fit one replica, and half of them do."""
    hits = {
        router: sum(record.cached for record in run(fleet_scenario(router)).records)
        for router in ("e2", "rr")
    }
    assert hits["e2"] > 1.2 * hits["rr"]


def test_what_is_too_long_for_a_replica_is_refused_at_once() -> None:
    case = fleet_scenario(load=GivenLoad((request(0.0, own=20_000),)))
    with pytest.raises(ConfigError, match="20004 tokens, the longest that can be served is 16000"):
        run(case)


def test_a_router_needs_a_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="--prefix-cache"):
        run(fleet_scenario(prefix_cache="off"))


def test_engines_of_a_run_share_nothing() -> None:
    """Two replicas with a family each are as fast as one of them alone."""
    both = GivenLoad(
        tuple(request(0.1 * (i // 2), shared=400, family=i % 2, name=str(i)) for i in range(20))
    )
    one = GivenLoad(tuple(r for r in both.given if r.family == 0))
    together = run(fleet_scenario("oracle", both)).records
    alone = run(fleet_scenario("oracle", one, replicas=1)).records
    mine = [record for record in together if record.request.family == 0]
    assert [r.last_s for r in mine] == [r.last_s for r in alone]


@st.composite
def loads(draw: st.DrawFn) -> GivenLoad:
    """Up to 25 requests of three families, some of which wait for others, at times that meet."""
    found = []
    times = sorted(draw(st.lists(st.integers(0, 12), min_size=1, max_size=25)))
    for number, tick in enumerate(times):
        found.append(
            request(
                tick / 8,
                shared=draw(st.sampled_from([0, 15, 160, 700])),
                own=draw(st.integers(1, 300)),
                output=draw(st.integers(1, 12)),
                family=draw(st.integers(0, 2)),
                name=str(number),
                follows=draw(st.none() | st.integers(0, number - 1)) if number else None,
                service_class=draw(st.sampled_from(ServiceClass)),
            )
        )
    return GivenLoad(tuple(found))


@settings(max_examples=examples(30, long=600), deadline=None)
@given(
    load=loads(),
    router=st.sampled_from(ROUTERS),
    policy=st.sampled_from(["fcfs", "bros"]),
    replicas=st.integers(1, 3),
    delays=st.tuples(st.sampled_from([0.0, 0.05, 1.0]), st.sampled_from([0.0, 0.01])),
)
def test_nothing_is_lost_whatever_comes(
    load: GivenLoad, router: str, policy: str, replicas: int, delays: tuple[float, float]
) -> None:
    report_delay_s, decision_s = delays
    case = fleet_scenario(
        router,
        load,
        replicas=replicas,
        policy=policy,
        report_delay_s=report_delay_s,
        decision_s=decision_s,
        classes=True,
        kv_blocks=90,
    )
    result = run(case)
    check_conserved(case, result)
    for (_, one), (_, other) in itertools.pairwise(
        sorted((r.arrival_s, n) for n, r in enumerate(result.records) if r.request.follows is None)
    ):
        assert load.given[one].time_s <= load.given[other].time_s


def test_what_a_replica_refuses_goes_to_the_others() -> None:
    """The oracle sends all of a family to one replica, which has no time for so many."""
    load = GivenLoad(tuple(request(0.01 * i, own=3000, output=2, name=str(i)) for i in range(40)))
    case = fleet_scenario(
        "oracle", load, policy="bros", overload="reject", slo_ttft=100, classes=True
    )
    result = run(case)
    elsewhere = [r for r in result.records if len(r.refused_by) == 1]
    assert elsewhere and all(r.finished and r.replica not in r.refused_by for r in elsewhere)
    refused = [r for r in result.records if r.refused]
    assert refused and all(sorted(r.refused_by) == [0, 1] for r in refused)
    assert all(r.finished or r.refused for r in result.records)
