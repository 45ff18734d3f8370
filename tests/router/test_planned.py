"""Plans for hot prefixes: what they say, that they are followed, and their shadow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bros.router.balance import plan
from bros.router.fleet import Fleet
from bros.router.state import ReplicaFacts
from support.routing import BLOCK, PRICES, ask, fleet_of, send, serve

PREFIX = 20 * BLOCK


def ran(counts: list[int], replicas: int, **chosen: object) -> Fleet:
    """Prefix k was asked for counts[k] times, one after the other."""
    fleet = fleet_of(replicas, patience=1e9, window_s=1000.0, warm_up=10**9, **chosen)
    number = 0
    for round_ in range(max(counts)):
        for prefix, count in enumerate(counts):
            if round_ < count:
                number += 1
                tokens = [prefix] * PREFIX + [10_000 + number] * 3
                send(fleet, ask(f"{number}", tokens, max_tokens=1), number * 0.01)
                fleet.on_first_token(f"{number}", number * 0.01)
                fleet.on_finished(f"{number}", (1,), number * 0.01)
    return fleet


@given(st.lists(st.integers(2, 30), min_size=1, max_size=8), st.integers(1, 4))
def test_longest_first_to_the_one_with_least(counts: list[int], replicas: int) -> None:
    """No replica is planned for more than 4/3 of the best there is (Graham 1969)."""
    fleet = ran(counts, replicas)
    found = plan(fleet.state, list(fleet.replicas.values()), 1.0)
    seconds = {key: sum(key.load.values()) for key in found}
    planned = dict.fromkeys(fleet.replicas, 0.0)
    for key, homes in found.items():
        assert len(homes) == 1, "none of them fills a replica"
        planned[homes[0]] += seconds[key]
    if seconds:
        bound = max(max(seconds.values()), sum(seconds.values()) / replicas)
        order = sorted(seconds.values(), reverse=True)
        if len(order) > replicas:
            bound = max(bound, order[replicas - 1] + order[replicas])
        assert max(planned.values()) <= 4 / 3 * bound + 1e-9


def test_a_prefix_that_one_replica_cannot_serve_gets_more() -> None:
    fleet = ran([40, 4], 3, plan="shadow")
    hot = max(
        fleet.replicas[0].keys | fleet.replicas[1].keys | fleet.replicas[2].keys,
        key=lambda k: k.num_requests,
    )
    hot.load[next(iter(hot.load))] += 1700.0  # as if they had long answers: 2.1 x 0.8 windows
    found = plan(fleet.state, list(fleet.replicas.values()), 1.0)
    assert len(found[hot]) == 3 and {len(homes) for homes in found.values()} == {1, 3}


def test_requests_follow_a_plan_that_applies() -> None:
    fleet = ran([12, 8, 4, 2], 2, plan="on")
    send(fleet, ask("x", [77] * 2), 50.0)
    wanted = plan(fleet.state, list(fleet.replicas.values()), 50.0)
    for key, homes in wanted.items():
        prefix = int.from_bytes(key.tokens[:4], "little")
        (decision,) = fleet.route([ask(f"n{prefix}", [prefix] * PREFIX + [1] * 3)], 50.0)
        assert decision.replica in homes and decision.reason == "planned"


def test_a_shadow_says_what_it_would_gain_and_changes_nothing() -> None:
    """Round about the same, as E2 without any load does what the plan does."""
    shadow, plain = ran([9, 9, 9], 3, plan="shadow"), ran([9, 9, 9], 3)
    for number in range(30):
        request = [number % 3] * PREFIX + [20_000 + number] * 3
        both = [serve(f, ask(f"s{number}", request), 20.0 + number) for f in (shadow, plain)]
        assert both[0] == both[1]
    report = shadow.plan_report
    assert report is not None and report.requests == 30 and plain.plan_report is None
    assert 0.0 < report.prefill_s <= report.planned_s, "it computes each prefix once more"
    assert 1.0 <= report.planned_balance <= 1.1


def test_what_a_replica_refused_counts_for_no_plan() -> None:
    fleet = ran([12, 8], 2, plan="shadow")
    serve(fleet, ask("x", [77] * 2), 30.0)
    before = fleet.plan_report
    request = ask("again", [0] * PREFIX + [1] * 3)
    refused_by = send(fleet, request, 31.0)
    fleet.on_finished("again", (), 31.0, cached=False)
    assert fleet.plan_report == before
    fleet.route([request], 31.0, frozenset({refused_by}))
    fleet.on_first_token("again", 31.0)
    after = fleet.plan_report
    assert before is not None and after is not None and after.requests == before.requests + 1


def test_what_is_split_off_a_planned_prefix_has_no_home_once_the_plan_is_over() -> None:
    fleet = ran([12, 8], 2, plan="on")
    send(fleet, ask("x", [77] * 2), 30.0)
    assert any(node.homes for node in fleet.forest)
    send(fleet, ask("half", [0] * (PREFIX // 2) + [1] * 3), 31.0)
    halves = [node for node in fleet.forest if node.homes]
    assert any(node.children and node.num_tokens == PREFIX // 2 for node in halves)
    send(fleet, ask("later", [78] * 2), 2000.0)
    assert not any(node.homes for node in fleet.forest)


def homes(fleet: Fleet) -> dict[int, tuple[int, ...]]:
    """First token of a planned prefix -> its homes."""
    return {
        int.from_bytes(node.tokens[:4], "little"): node.homes
        for node in fleet.forest
        if node.homes is not None
    }


def test_the_next_plan_leaves_prefixes_where_they_are() -> None:
    """Their loads have changed a little, so the longest first would go elsewhere."""
    fleet = ran([12, 11, 10, 9, 8, 7, 6, 5], 2, plan="on")
    send(fleet, ask("x", [77] * 2), 20.0)
    before = homes(fleet)
    assert len(before) == 8
    for prefix, count in enumerate(range(8)):
        for number in range(count):
            tokens = [prefix] * PREFIX + [20_000 + 10 * prefix + number] * 3
            serve(fleet, ask(f"{prefix}-{number}", tokens, max_tokens=1), 21.0)
    send(fleet, ask("y", [78] * 2), 31.0)
    assert homes(fleet) == before


def test_a_prefix_gets_more_replicas_before_the_window_is_full() -> None:
    fleet = ran([40, 4], 3, plan="shadow")
    hot = max(fleet.replicas[0].keys | fleet.replicas[1].keys, key=lambda k: k.num_requests)
    hot.load[next(iter(hot.load))] += 40.0  # within 20 s
    assert len(plan(fleet.state, list(fleet.replicas.values()), 20.0)[hot]) == 3


def test_the_replicas_of_a_plan_take_turns_among_requests_that_wait_together() -> None:
    fleet = ran([40, 4], 3, plan="shadow")
    hot = max(fleet.replicas[0].keys | fleet.replicas[1].keys, key=lambda k: k.num_requests)
    hot.load[next(iter(hot.load))] += 22.0
    homes = plan(fleet.state, list(fleet.replicas.values()), 20.0)[hot]
    assert len(homes) == 2
    serve(fleet, ask("x", [77] * 2), 20.0)  # makes that plan
    requests = [ask(f"n{number}", [0] * PREFIX + [number] * 3) for number in range(10)]
    fleet.route(requests, 21.0, frozenset(homes))
    for request in requests:
        fleet.on_first_token(request.request_id, 22.0)
    report = fleet.plan_report
    assert report is not None and report.balance > 2.9, "all went to the third replica"
    assert report.planned_balance < 2.5, "the plan does not have all on one of its two"


def test_a_plan_counts_all_that_is_cached() -> None:
    """Each prompt of a conversation begins with the one before it, most of it behind the prefix
    that places it."""
    fleet = fleet_of(2, plan="shadow")
    for number in range(40):
        for talk in range(2):
            tokens = [talk] * PREFIX + list(range(1000 * talk, 1000 * talk + BLOCK * number)) + [9]
            serve(fleet, ask(f"{talk}-{number}", tokens, max_tokens=1), float(number))
    report = fleet.plan_report
    assert report is not None and report.requests > 40
    assert report.planned_s <= 1.01 * report.prefill_s, "each stays where it is"


def test_the_balance_is_that_of_the_present_replicas() -> None:
    fleet = ran([9, 9], 2, plan="shadow")
    for round_ in range(3):
        now = 20.0 + 20 * round_
        for number in range(8):
            tokens = [number % 2] * PREFIX + [20_000 + number] * 3
            serve(fleet, ask(f"{round_}-{number}", tokens), now + number)
        report = fleet.plan_report
        assert report is not None and report.balance >= 1.0 and report.planned_balance >= 1.0
        fleet.remove(min(fleet.replicas))  # its engine is restarted
        fleet.add(ReplicaFacts(capacity_tokens=10_000, prices=PRICES), now + 10)
