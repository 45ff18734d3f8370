"""Prefixes that move, and those that get one more replica (T11)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.interfaces import EngineReport
from bros.router.fleet import Fleet
from bros.router.state import TtftHistory
from support.routing import BLOCK, PRICES, ask, fleet_of, send, serve
from support.tier import examples

NO_WAITING = 1e9
PREFIX = 20 * BLOCK


def prompt(prefix: int, number: int) -> list[int]:
    return [prefix] * PREFIX + [10_000 + number] * 3


def busy_fleet(per_prefix: dict[int, int], **chosen: object) -> Fleet:
    """Two replicas, all prefixes on 0, each with so many requests that have ended."""
    fleet = fleet_of(2, patience=NO_WAITING, decode_aware=False, warm_up=0, **chosen)
    now, number = 0.0, 0
    fleet.set_draining(1, True)
    for prefix, count in per_prefix.items():
        for _ in range(count):
            number += 1
            send(fleet, ask(f"{number}", prompt(prefix, number), max_tokens=100), now)
            fleet.on_first_token(f"{number}", now)
            fleet.on_finished(f"{number}", (1,) * 100, now)
    fleet.set_draining(1, False)
    return fleet


def homes(fleet: Fleet) -> dict[int, tuple[int, ...] | None]:
    """prefix -> what it was given to."""
    tokens = {node: int.from_bytes(node.tokens[:4], "little") for node in fleet.forest}
    return {tokens[node]: node.homes for node in fleet.forest if node.end == PREFIX}


def test_prefixes_move_until_no_replica_has_too_much() -> None:
    fleet = busy_fleet({1: 6, 2: 7, 3: 8, 4: 9})
    send(fleet, ask("x", [99] * 2), 2.0)  # looks at the loads
    moved = [prefix for prefix, home in homes(fleet).items() if home == (1,)]
    assert moved == [1, 2], "the cheapest first, and no more than needed"
    assert send(fleet, ask("a", prompt(1, 500)), 2.0) == 1
    assert send(fleet, ask("b", prompt(4, 501)), 2.0) == 0
    (decision,) = fleet.route([ask("c", prompt(2, 502))], 2.0)
    assert (decision.replica, decision.reason) == (1, "moved")


def test_what_has_moved_is_not_followed_until_the_window_has_passed() -> None:
    fleet = busy_fleet({1: 6, 2: 7, 3: 8, 4: 9})
    for second in range(2, 60):
        serve(fleet, ask(f"{second}x", [99] * 2), float(second))
    moved = [prefix for prefix, home in homes(fleet).items() if home is not None]
    assert moved == [1, 2], "their work counts for the new home, though it was done elsewhere"


def test_no_replica_gets_more_at_once_than_it_computes_until_the_next_check() -> None:
    """Computing a prefix takes 0.083 s."""
    fleet = busy_fleet(dict.fromkeys(range(1, 41), 3))
    moved = []
    for second in range(2, 12):
        serve(fleet, ask(f"{second}x", [99] * 2), float(second))
        moved.append(sum(home is not None for home in homes(fleet).values()))
    assert moved[0] == 13 < moved[1] <= 26 and moved[-1] <= 26


def test_a_moved_prefix_keeps_its_other_homes() -> None:
    """Prefix 1 is cached on replica 1 as well, so only the share of replica 0 moves."""
    fleet = fleet_of(3, patience=NO_WAITING, decode_aware=False, warm_up=0, replication=False)
    fleet.set_draining(2, True)
    where = [(1, 0)] * 2 + [(1, 1)] * 4 + [(2, 1)] * 20
    for number, (prefix, other) in enumerate(where):
        request = ask(f"{number}", prompt(prefix, number), max_tokens=100)
        fleet.route([request], 0.0, frozenset({other}))
        fleet.on_first_token(f"{number}", 0.0)
        fleet.on_finished(f"{number}", (1,) * 100, 0.0)
    fleet.set_draining(2, False)
    send(fleet, ask("x", [99] * 2), 2.0)
    assert homes(fleet) == {1: (1, 2), 2: None}


@settings(max_examples=examples(30, long=600), deadline=None)
@given(st.dictionaries(st.integers(1, 9), st.integers(1, 12), min_size=1), st.floats(1.1, 3.0))
def test_moving_stops_at_the_bound_and_turns_nothing_round(
    per_prefix: dict[int, int], balance: float
) -> None:
    fleet = busy_fleet(per_prefix, balance=balance, replication=False)
    loads = {number: fleet.state.assigned_s(replica) for number, replica in fleet.replicas.items()}
    again_s = PRICES.prefill_s(PREFIX)
    keys = {key: key.load[0] for key in fleet.replicas[0].keys if key.num_requests > 1}
    send(fleet, ask("x", [99] * 2), 2.0)
    moved = [key for key in keys if key.homes == (1,)]
    assert all(keys[key] > again_s for key in moved), "else it costs more than it spares"
    moved_s = sum(keys[key] for key in moved)
    heavy, light = loads[0] - moved_s, loads[1] + moved_s + len(moved) * again_s
    assert heavy >= light - 1e-9
    if moved:
        last = max(keys[key] for key in moved)
        assert heavy + last > balance * (light - last - again_s)
    stay = [seconds for key, seconds in keys.items() if key not in moved and seconds > again_s]
    if heavy > balance * light + 1e-9 and stay:
        least = min(stay)
        assert heavy - least < light + least + again_s, "the next one could have gone as well"


def test_a_prefix_stays_if_computing_it_would_make_the_other_replica_the_busier_one() -> None:
    """Of two requests, the first one was not placed by a prefix and stays: 0.48 s. The other one
    takes 0.41 s, and the prefix 0.08 s."""
    fleet = fleet_of(2, patience=NO_WAITING, decode_aware=False, warm_up=0)
    fleet.set_draining(1, True)
    for number, tokens in enumerate((95, 100)):
        serve(fleet, ask(f"{number}", prompt(1, number), max_tokens=tokens), 0.0, (1,) * tokens)
    fleet.set_draining(1, False)
    (key,) = fleet.replicas[0].keys
    rest_s = fleet.state.assigned_s(fleet.replicas[0]) - key.load[0]
    assert key.load[0] < rest_s < key.load[0] + PRICES.prefill_s(PREFIX)
    send(fleet, ask("x", [99] * 2), 2.0)
    assert homes(fleet) == {1: None}


def test_a_prefix_that_takes_longer_to_compute_than_its_requests_stays() -> None:
    """Two requests each, of one token: 4 ms each, and 83 ms for their prefix."""
    fleet = fleet_of(2, patience=NO_WAITING, decode_aware=False, warm_up=0)
    for number in range(8):
        fleet.route(
            [ask(f"{number}", prompt(number % 4, number), max_tokens=1)], 0.0, frozenset({1})
        )
        fleet.on_first_token(f"{number}", 0.0)
        fleet.on_finished(f"{number}", (1,), 0.0)
    assert fleet.state.assigned_s(fleet.replicas[0]) > 0.3
    send(fleet, ask("x", [99] * 2), 2.0)
    assert set(homes(fleet).values()) == {None}


@pytest.mark.parametrize("rate", [1.0, 50.0])
def test_waits_are_compared_at_any_rate(rate: float) -> None:
    history = TtftHistory(180.0)
    for number in range(int(180 * rate)):
        now = number / rate
        history.add(now, 0.1 if now < 90 else 0.3)
    early, early_s, later, later_s = history.halves(180.0)
    assert early == pytest.approx(90 * rate, rel=0.1) and later == pytest.approx(90 * rate, rel=0.1)
    assert early_s / early == pytest.approx(0.1) and later_s / later == pytest.approx(0.3)
    history.add(400.0, 1.0)
    assert history.halves(400.0) == (0.0, 0.0, 1.0, 1.0)


def test_nothing_moves_before_the_caches_are_warm() -> None:
    fleet = fleet_of(2, warm_up=10, patience=NO_WAITING)
    fleet.set_draining(1, True)
    for number in range(10):
        send(fleet, ask(f"{number}", prompt(number % 2, number)), 0.0)
    fleet.set_draining(1, False)
    send(fleet, ask("x", [99] * 2), 2.0)
    assert set(homes(fleet).values()) == {None}


def hot_fleet(early_s: float, later_s: float, **chosen: object) -> Fleet:
    """One prefix on replica 0; requests wait so long in the first and in the second half."""
    fleet = fleet_of(
        2, patience=NO_WAITING, decode_aware=False, warm_up=5, window_s=100.0, **chosen
    )
    for number in range(100):
        now = float(number)
        send(fleet, ask(f"{number}", prompt(1, number), max_tokens=50), now)
        waits_s = early_s if number < 50 else later_s
        fleet.on_first_token(f"{number}", now + waits_s)
        fleet.on_finished(f"{number}", (1,) * 50, now + waits_s)
    return fleet


@pytest.mark.parametrize(("later_s", "copies"), [(0.19, 1), (0.21, 2)])
def test_a_prefix_is_replicated_when_waits_double(later_s: float, copies: int) -> None:
    fleet = hot_fleet(0.1, later_s, replicate=2.0)
    send(fleet, ask("x", [99] * 2), 100.0)
    (found,) = [home for prefix, home in homes(fleet).items() if prefix == 1]
    assert found == (None if copies == 1 else (0, 1))
    if copies == 2:
        more = [ask(f"n{n}", prompt(1, 1000 + n), max_tokens=50) for n in range(150)]
        went = {serve(fleet, request, 100.0, (1,) * 50) for request in more}
        assert went == {0, 1}


def test_a_replicated_prefix_stays_where_a_part_of_it_is_evicted() -> None:
    fleet = hot_fleet(0.1, 0.19, replicate=2.0)
    assert send(fleet, ask("late", prompt(1, 100)), 99.5) == 0
    fleet.on_first_token("late", 103.0)
    fleet.on_finished("late", (1,) * 50, 103.0)
    left = (("0", PREFIX // 2),)
    fleet.apply_report(0, EngineReport(version=1, full=True, cached_prefixes=left), 103.0)
    assert homes(fleet)[1] is None
    send(fleet, ask("x", [99] * 2), 103.0)
    assert homes(fleet)[1] == (0, 1)


def test_a_prefix_that_needs_more_than_a_replica_has_is_replicated() -> None:
    """Whatever its requests wait: 100 of them, each with 1 s of answer, within 100 s."""
    tokens = round(1 / PRICES.decode_s(1, 0))
    fleet = fleet_of(2, patience=NO_WAITING, decode_aware=False, warm_up=5, window_s=100.0)
    for number in range(100):
        now = float(number)
        send(fleet, ask(f"{number}", prompt(1, number), max_tokens=tokens), now)
        fleet.on_finished(f"{number}", (1,) * tokens, now)
    send(fleet, ask("x", [99] * 2), 99.5)
    assert homes(fleet)[1] == (0, 1)
    off = hot_fleet(0.1, 9.0, replication=False)
    send(off, ask("x", [99] * 2), 100.0)
    assert homes(off)[1] is None


def test_a_home_that_is_lost_is_no_home() -> None:
    fleet = busy_fleet({1: 6, 2: 7, 3: 8, 4: 9})
    send(fleet, ask("x", [99] * 2), 2.0)
    assert homes(fleet)[1] == (1,)
    fleet.remove(1)
    assert homes(fleet)[1] is None
    assert send(fleet, ask("a", prompt(1, 500)), 2.0) == 0


def test_what_less_than_half_of_a_prompt_shares_places_no_request() -> None:
    """All prompts begin with the same system prompt, and most go on with a document that no other
    one has: copies of the system prompt would move none of these."""
    fleet = fleet_of(
        2, patience=NO_WAITING, decode_aware=False, warm_up=5, window_s=100.0, rebalancing=False
    )
    system, tokens = [7] * (5 * BLOCK), round(1 / PRICES.decode_s(1, 0))
    for number in range(100):
        now, document = float(number), [20_000 + number] * (10 * BLOCK)
        for name, rest, length in (("own", document, 2 * tokens), ("hot", [8] * PREFIX, tokens)):
            request = ask(f"{name}{number}", [*system, *rest, 10_000 + number], max_tokens=length)
            fleet.route([request], now, frozenset({1}))
            fleet.on_finished(request.request_id, (1,) * length, now)
    (key,) = fleet.replicas[0].keys
    assert (key.start, key.end) == (len(system), len(system) + PREFIX)
    send(fleet, ask("x", [99] * 2), 99.5)
    assert key.homes == (0, 1), "it takes more than half of the time of a replica"
