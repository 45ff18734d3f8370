"""Requests of one group, of which a client needs all answers, are placed as one."""

from __future__ import annotations

import pytest

from bros.core.request import EngineRequest, Hints, RequestGroup
from bros.router.fleet import Fleet
from support.routing import BLOCK, PRICES, ask, fleet_of, serve

COMMON = list(range(40 * BLOCK))


def members(
    count: int, own: int, output: int = 1, program: str = "p", *, best_effort: bool = True
) -> list[EngineRequest]:
    hints = Hints(program=program, depth=1, group=RequestGroup(program), expected_tokens=output)
    return [
        ask(
            f"{program}{n}",
            COMMON + [5000 + n] * own,
            best_effort=best_effort,
            hints=hints,
            max_tokens=output,
        )
        for n in range(count)
    ]


def places(fleet: Fleet, requests: list[EngineRequest]) -> list[int]:
    decisions = fleet.route(requests, 0.0)
    assert [d.request_id for d in decisions] == [r.request_id for r in requests]
    assert {d.reason for d in decisions} == {"group"}
    return [decision.replica for decision in decisions]


def test_a_group_whose_prefix_is_most_of_it_stays_together() -> None:
    """160 ms for what they have in common; 4 x 4 ms for the rest."""
    fleet = fleet_of(4)
    assert places(fleet, members(4, 4)) == [0] * 4
    matched = [w.prefill_s for w in fleet.replicas[0].works.values()]
    assert matched[0] > 10 * max(matched[1:]), "the first one computes the prefix"


def test_it_goes_where_the_prefix_is_cached() -> None:
    fleet = fleet_of(4)
    fleet.route([ask("a", [9] * 20)], 0.0)
    assert serve(fleet, ask("b", [*COMMON, 1])) == 1
    assert places(fleet, members(4, 4)) == [1] * 4


def test_a_group_with_much_of_its_own_is_shared_out() -> None:
    """160 ms in common, 8 x 0.4 s of their own: sooner on four replicas, 2 members each."""
    fleet = fleet_of(4)
    found = places(fleet, members(8, 400))
    assert sorted(found) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [len(replica.works) for replica in fleet.replicas.values()] == [2, 2, 2, 2]


def test_neighbours_go_together() -> None:
    """Members that begin alike beyond the common prefix are not torn apart."""
    hints = Hints(program="p", group=RequestGroup("p"), expected_tokens=1)
    requests = [
        ask(f"{n}", COMMON + [6000 + n % 2] * 400 + [n] * 5, best_effort=True, hints=hints)
        for n in range(6)
    ]
    fleet = fleet_of(2)
    found = places(fleet, requests)
    assert found[0] == found[2] == found[4] != found[1] == found[3] == found[5]


@pytest.mark.parametrize(("capacity", "parts"), [(400, 1), (260, 2), (250, 3)])
def test_a_group_that_does_not_fit_is_split_though_it_takes_longer(
    capacity: int, parts: int
) -> None:
    """160 + 4 x 14 tokens of KV, which may take up three quarters of a cache."""
    fleet = fleet_of(4, capacity=capacity)
    assert len(set(places(fleet, members(4, 4, output=10)))) == parts


def test_two_groups_at_once_are_not_both_split() -> None:
    """Each alone would be: 40 ms in common, 4 x 0.2 s of their own."""
    assert set(places(fleet_of(2), members(4, 200))) == {0, 1}
    found = places(fleet_of(2), members(4, 200) + members(4, 200, program="q"))
    assert sorted([set(found[:4]), set(found[4:])], key=min) == [{0}, {1}]


def test_a_large_group_is_split_over_all_replicas_also_beside_a_small_one() -> None:
    """8 x 0.4 s of its own, against 2 x 4 ms: one replica for each would leave one of them idle."""
    large, small = members(8, 400), members(2, 4, program="q")
    for count in (2, 3):
        found = places(fleet_of(count), large + small)
        assert set(found[:8]) == set(range(count))


def test_answers_of_others_hardly_delay_a_group() -> None:
    """They decode beside it. What counts is only what is computed before it."""
    fleet = fleet_of(2)
    other = ask("other", [9] * 4, max_tokens=1000, best_effort=True)
    fleet.route([other], 0.0)
    fleet.on_first_token("other", 0.1)
    assert set(places(fleet, members(4, 400))) == {0, 1}


def test_of_the_prompt_that_is_computed_only_the_rest_delays_a_group() -> None:
    """After 0.4 s, 0.08 s are left of one that takes 0.48 s, and 0.18 s of one that has begun after
    0.3 s."""
    fleet = fleet_of(2)
    fleet.route([ask("long", [8] * 400, best_effort=True)], 0.0, frozenset({1}))
    fleet.route([ask("late", [9] * 250, best_effort=True)], 0.3, frozenset({0}))
    found = fleet.route(members(2, 4), 0.4)
    assert [decision.replica for decision in found] == [0, 0]


def test_a_small_gain_is_not_worth_delaying_others() -> None:
    """Two members with 100 ms of their own and 160 ms in common: together 360 ms, else 260 ms."""
    assert len(set(places(fleet_of(2), members(2, 100)))) == 2
    fleet = fleet_of(2)
    for n in range(2):
        fleet.route([ask(f"x{n}", [9 + n] * 4, max_tokens=1)], 0.0)
        fleet.on_first_token(f"x{n}", 0.0)
    assert len(set(places(fleet, members(2, 100)))) == 1


def test_others_and_single_ones_are_no_group() -> None:
    fleet = fleet_of(2)
    one = members(1, 4, program="q")
    plain = [ask(f"x{n}", [n] * 10) for n in range(3)]
    assert "group" not in {d.reason for d in fleet.route(one + plain, 0.0)}
    turns = fleet_of(2, "rr").route(members(4, 4), 0.0)
    assert [d.replica for d in turns] == [0, 1, 0, 1], "round robin knows no groups"


@pytest.mark.parametrize("real_time_first", [True, False])
def test_groups_of_both_classes_at_once_wait_each_for_what_its_class_waits_for(
    real_time_first: bool,
) -> None:
    """On one replica 4 s of best-effort prompts wait, for which a real-time group hardly waits; on
    the other one 2.6 s of real-time ones."""
    fleet = fleet_of(2)
    fleet.route([ask("be", [8] * 2000, best_effort=True)], 0.0, frozenset({1}))
    fleet.route([ask("rt", [9] * 1500)], 0.0, frozenset({0}))
    open_s = [sum(w.prefill_s for w in r.works.values()) for r in fleet.replicas.values()]
    assert open_s[0] > 1.5 * open_s[1]
    urgent, other = members(2, 4, best_effort=False), members(2, 4, program="q")
    groups = [urgent, other] if real_time_first else [other, urgent]
    decisions = fleet.route([*groups[0], *groups[1]], 0.0)
    found = {decision.request_id: decision.replica for decision in decisions}
    assert {found[request.request_id] for request in urgent} == {0}
    assert {found[request.request_id] for request in other} == {1}


def test_decisions_tell_what_the_group_costs_and_what_it_would_cost_otherwise() -> None:
    common_s = PRICES.prefill_s(len(COMMON), 0)
    for own, parts in ((4, 1), (400, 2)):
        decisions = fleet_of(2).route(members(2, own), 0.0)
        costs = {decision.group for decision in decisions}
        (found,) = costs
        assert found is not None and found.alternative_s is not None
        assert found.replicas == parts == len({decision.replica for decision in decisions})
        assert common_s < found.cost_s <= found.alternative_s
    (alone,) = fleet_of(1).route(members(2, 4), 0.0)[:1]
    assert alone.group is not None and alone.group.alternative_s is None
    (single,) = fleet_of(2).route([ask("x", [1, 2])], 0.0)
    assert single.group is None
