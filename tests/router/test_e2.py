"""Where E2 sends requests: its rule, and that the chosen replica costs least (T11)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.errors import EngineDeadError
from bros.core.interfaces import EngineReport
from bros.core.request import EngineRequest, Hints, ServiceClass, Slo
from bros.router.fleet import Fleet
from bros.router.state import ReplicaFacts
from support.routing import BLOCK, PRICES, ask, cached, fleet_of, send, serve, told
from support.tier import examples

NO_WAITING = 1e9


def decide(fleet: Fleet, request: EngineRequest, now: float = 0.0) -> tuple[int, str, int]:
    (decision,) = fleet.route([request], now)
    return decision.replica, decision.reason, decision.matched


def test_a_request_goes_where_most_of_it_is_cached() -> None:
    fleet = fleet_of(3, patience=NO_WAITING)
    prefix = list(range(10 * BLOCK))
    there = serve(fleet, ask("a", prefix + [900] * 3))
    for number in range(5):
        request = ask(f"b{number}", prefix + [1000 + number] * 3)
        assert decide(fleet, request)[:2] == (there, "exploit")


def test_what_no_request_shares_may_go_for_nothing() -> None:
    """One that was asked for once, then one that two asked for."""
    fleet = fleet_of(1, capacity=30 * BLOCK, history=0.0)
    serve(fleet, ask("lonely", [1] * (10 * BLOCK + 1)), 0.0, ())
    for number in range(2):
        serve(fleet, ask(f"shared{number}", [2] * (10 * BLOCK + 1)), 1.0, ())
    assert fleet.costs(ask("new", [9] * (20 * BLOCK)), 2.0)[0].evicted_s == 0.0
    assert fleet.costs(ask("new", [9] * (21 * BLOCK)), 2.0)[0].evicted_s == pytest.approx(
        2 * PRICES.prefill_s(10 * BLOCK, 0)
    )


def test_nested_prefixes_stay_where_all_of_them_is() -> None:
    """Both replicas have the examples, one of them the problem as well."""
    fleet = fleet_of(2, patience=NO_WAITING)
    examples, problem = [1] * (20 * BLOCK), [2] * (5 * BLOCK)
    serve(fleet, ask("a", [*examples, 3]))
    fleet.route([ask("b", [*examples, 4])], 0.0, frozenset({0}))
    there = send(fleet, ask("c", [*examples, *problem, 5]))
    for number in range(4):
        request = ask(f"d{number}", [*examples, *problem, 10 + number])
        assert decide(fleet, request)[:2] == (there, "exploit")


@pytest.mark.parametrize(("rest", "reason"), [(-1, "exploit"), (0, "explore"), (1, "explore")])
def test_half_is_not_enough(rest: int, reason: str) -> None:
    """Strictly more has to be cached than is not."""
    fleet = fleet_of(2, patience=NO_WAITING)
    prefix = list(range(8 * BLOCK))
    serve(fleet, ask("a", [*prefix, 1]))
    request = ask("b", prefix + [5000] * (8 * BLOCK + rest))
    assert decide(fleet, request)[1] == reason


PREFIX = range(10 * BLOCK)


def evicted(patience: float) -> tuple[Fleet, int]:
    """Two replicas, and the one that had a prefix of ten blocks: three of these are left. It was
    asked for four times before."""
    fleet = fleet_of(2, patience=patience, history=0.0)
    for number in range(4):
        there = serve(fleet, ask(f"a{number}", [*PREFIX, 1], max_tokens=1))
    fleet.apply_report(there, told(1, ("a0", 3 * BLOCK)), 1.0)
    return fleet, there


def test_what_was_evicted_comes_back_to_where_it_was() -> None:
    fleet, there = evicted(NO_WAITING)
    fleet.route([ask("w", [7] * 40)], 1.0, frozenset({1 - there}))
    assert decide(fleet, ask("b", [*PREFIX, 2]), 1.0) == (there, "again", 3 * BLOCK)


def test_it_does_not_where_hardly_anything_is_found_in_caches() -> None:
    fleet, there = evicted(NO_WAITING)
    fleet.route([ask("w", [7] * 400)], 1.0, frozenset({1 - there}))
    assert fleet.state.hit_rate < 0.25
    assert decide(fleet, ask("b", [*PREFIX, 2]), 1.0)[:2] == (1 - there, "explore")
    fleet.route([], 1000.0)
    assert fleet.state.hit_rate == fleet.state.window_prompt_tokens == 0


def test_what_was_evicted_goes_elsewhere_if_too_much_waits_where_it_was() -> None:
    """A quarter of 41 ms, times the patience, where 87 ms of work are waiting."""
    for patience, reason in ((6.0, "explore"), (12.0, "again")):
        fleet, there = evicted(patience)
        fleet.route([ask("w", [7] * 80, max_tokens=1)], 1.0, frozenset({1 - there}))
        request = ask("b", [*PREFIX, 2], max_tokens=1)
        assert decide(fleet, request, 1.0)[:2] == (
            there if reason == "again" else 1 - there,
            reason,
        )


def test_what_is_left_elsewhere_is_worth_as_much_as_where_it_was() -> None:
    """Of the prefix, four blocks of ten are on the other replica."""
    fleet, there = evicted(NO_WAITING)
    fleet.apply_report(there, told(2, ("a0", 0)), 1.0)
    fleet.route([ask("c", [*PREFIX[: 4 * BLOCK], 9])], 1.0, frozenset({there}))
    assert cached(fleet, ask("b", [*PREFIX, 2])) == {1 - there: 4 * BLOCK}
    fleet.route([ask("w", [7] * 30)], 1.0, frozenset({1 - there}))
    assert decide(fleet, ask("b", [*PREFIX, 2]), 1.0) == (1 - there, "again", 4 * BLOCK)


def test_what_was_moved_stays_moved_when_it_is_evicted() -> None:
    fleet, there = evicted(NO_WAITING)
    request = ask("b", [*PREFIX, 2])
    path = fleet.forest.walk(request.kv_salt, fleet.forest.pieces(request))
    path.nodes[0].homes = (1 - there,)
    assert decide(fleet, request, 1.0)[:2] == (1 - there, "moved")


def test_what_was_evicted_and_not_asked_for_lately_goes_anywhere() -> None:
    fleet, there = evicted(NO_WAITING)
    fleet.route([ask("w", [7] * 400)], 1000.0, frozenset({1 - there}))
    assert decide(fleet, ask("b", [*PREFIX, 2]), 1000.0)[:2] == (1 - there, "explore")


def test_a_template_that_all_have_in_common_is_no_reason_to_come_back() -> None:
    """Less than half of the prompt is known."""
    fleet, there = evicted(NO_WAITING)
    fleet.route([ask("w", [7] * 40)], 1.0, frozenset({1 - there}))
    assert fleet.state.hit_rate > 0.25
    other = ask("b", [*PREFIX[: 8 * BLOCK], *range(900, 900 + 9 * BLOCK)])
    assert decide(fleet, other, 1.0)[:2] == (1 - there, "explore")


def test_what_was_on_a_lost_replica_goes_anywhere() -> None:
    fleet = fleet_of(3)
    there = serve(fleet, ask("a", [*PREFIX, 1]))
    fleet.remove(there)
    assert decide(fleet, ask("b", [*PREFIX, 2]))[1] == "explore"


def test_the_replica_is_named_and_not_its_place_in_a_list() -> None:
    """Of replicas 0 to 4 only 3 has the prefix; 1 is lost."""
    fleet = fleet_of(5, "e2", patience=NO_WAITING)
    fleet.remove(1)
    for number in (0, 2, 4):
        fleet.set_draining(number, True)
    prefix = list(range(10 * BLOCK))
    assert decide(fleet, ask("a", [*prefix, 1]))[:2] == (3, "only")
    for number in (0, 2, 4):
        fleet.set_draining(number, False)
    assert decide(fleet, ask("b", [*prefix, 2]))[:2] == (3, "exploit")
    fleet.set_draining(3, True)
    assert decide(fleet, ask("c", [*prefix, 3]))[0] in (0, 2, 4)


def test_without_a_replica_there_is_nowhere_to_go() -> None:
    fleet = fleet_of(2)
    fleet.set_draining(0, True)
    with pytest.raises(EngineDeadError):
        fleet.route([ask("a", [1])], 0.0, frozenset({1}))
    assert fleet.route([ask("a", [1])], 0.0)[0].replica == 1


def test_no_request_waits_longer_than_computing_the_prefix_takes() -> None:
    """patience x 40 tokens at 1 ms each, where 100 ms of work are waiting."""
    for patience, reason in ((1.0, "explore"), (10.0, "exploit")):
        fleet = fleet_of(2, patience=patience, history=0.0)
        prefix = list(range(10 * BLOCK))
        there = serve(fleet, ask("a", [*prefix, 1], max_tokens=1))
        for number in range(2):
            fleet.route(
                [ask(f"w{number}", [number] * 50, max_tokens=1)], 0.0, frozenset({1 - there})
            )
        replica, found, _ = decide(fleet, ask("b", [*prefix, 2], max_tokens=1))
        assert (replica == there, found) == (reason == "exploit", reason)


@pytest.mark.parametrize(("asked", "reason"), [(1, "explore"), (3, "exploit")])
def test_nor_than_what_would_have_to_make_room_takes(asked: int, reason: str) -> None:
    """The same 100 ms; elsewhere a longer prefix goes, which others may have asked for, too."""
    fleet = fleet_of(2, capacity=40 * BLOCK, patience=1.0, history=0.0)
    prefix = [1] * (10 * BLOCK)
    there = serve(fleet, ask("a", [*prefix, 1], max_tokens=1))
    for number in range(asked):
        request = ask(f"hot{number}", [2] * (35 * BLOCK), max_tokens=1)
        fleet.route([request], 0.0, frozenset({there}))
        fleet.on_first_token(request.request_id, 0.0)
        fleet.on_finished(request.request_id, (1,), 0.0)
    for number in range(2):
        waits = ask(f"w{number}", [10 + number] * 50, max_tokens=1)
        fleet.route([waits], 0.0, frozenset({1 - there}))
    assert decide(fleet, ask("b", [*prefix, 2], max_tokens=1))[1] == reason


def test_best_effort_work_hardly_counts_for_real_time_requests() -> None:
    """Unless the engine does not yield."""
    for yields, expected in ((True, 0), (False, 1)):
        fleet = fleet_of(2, yields=yields)
        for number in range(3):  # 0 has much best-effort work, 1 has a little real-time work
            fleet.route([ask(f"b{number}", [number] * 400, best_effort=True)], 0.0, frozenset({1}))
        fleet.route([ask("r", [9] * 300)], 0.0, frozenset({0}))
        assert send(fleet, ask("new", [10] * 50)) == expected
        assert send(fleet, ask("new be", [11] * 50, best_effort=True)) == 1


def test_a_late_first_token_costs_more_than_the_time() -> None:
    """0 has more work but no prompt that waits; on 1 the first token would be late."""
    fleet = fleet_of(2, history=0.0)
    fleet.route(
        [ask("a", [1] * 20, max_tokens=10_000, hints=Hints(expected_tokens=200))],
        0.0,
        frozenset({1}),
    )
    fleet.on_first_token("a", 0.0)
    fleet.route([ask("b", [2] * 500, max_tokens=1)], 0.0, frozenset({0}))
    slo = Slo(ttft_s=0.3)
    free, held = (
        fleet.costs(ask("c", [3] * 100), 0.0),
        fleet.costs(ask("c", [3] * 100, slo=slo), 0.0),
    )
    assert free[0].late_s == free[1].late_s == held[0].late_s == 0.0
    assert held[1].late_s == pytest.approx(10 * (held[1].prefill_s + 0.5 + 500**2 / 2 * 1e-6 - 0.3))
    fleet.add(ReplicaFacts(capacity_tokens=10_000, prices=PRICES, ttft_s=0.04), 0.0)
    usual = fleet.costs(ask("c", [3] * 100), 0.0)
    assert usual[2].late_s == pytest.approx(10 * (usual[2].prefill_s - 0.04))
    assert fleet.costs(ask("c", [3] * 100, best_effort=True), 0.0)[2].late_s == 0.0


def test_prompts_go_where_answers_take_the_time() -> None:
    """Unless that costs more by as much as the prompt takes."""
    answer = ask("d", [1] * 5, max_tokens=10_000, hints=Hints(expected_tokens=150))
    for own, reason in ((60, "explore"), (300, "decode")):
        fleet = fleet_of(3, balance=100.0)
        fleet.route([answer], 0.0, frozenset({0, 2}))
        for other in (0, 2):
            fleet.route(
                [ask(f"p{other}", [other + 5] * 300, max_tokens=1)], 0.0, frozenset({1, 2 - other})
            )
        more = fleet.costs(ask("new", [50] * own), 0.0)
        assert (more[1].total_s - more[0].total_s < more[1].prefill_s) == (reason == "decode")
        assert decide(fleet, ask("new", [50] * own))[:2] == (reason == "decode", reason)
    calm = fleet_of(3, balance=100.0, decode_aware=False)
    calm.route(
        [ask("d", [1] * 5, max_tokens=10_000, hints=Hints(expected_tokens=2000))],
        0.0,
        frozenset({0, 2}),
    )
    assert decide(calm, ask("new", [50] * 30))[1] == "explore"


def test_a_program_comes_back_to_where_it_is_pinned() -> None:
    fleet = fleet_of(2, history=0.0)
    hints = Hints(program="p", keep_s=60.0)
    there = serve(fleet, ask("a", range(10 * BLOCK + 1), hints=hints), 0.0)
    request = ask("b", [*range(10 * BLOCK + 1), 1, 2, 3], hints=hints)
    assert decide(fleet, request, 1.0)[:2] == (there, "pinned")
    later = ask("c", [*range(10 * BLOCK + 1), 4, 5, 6], hints=Hints(program="p"))
    assert decide(fleet, later, 100.0)[:2] == (there, "exploit")


@dataclass
class Sent:
    """What a naive router remembers of a request."""

    request: EngineRequest
    replica: int
    time_s: float
    prefill_s: float
    decode_s: float
    begun: bool = False
    ended: bool = False


def _common(tokens: list[int], other: list[int]) -> int:
    """Whole blocks that can be shared."""
    blocks = min(len(other) - 1, len(tokens) - 1) // BLOCK
    while blocks and other[: blocks * BLOCK] != tokens[: blocks * BLOCK]:
        blocks -= 1
    return blocks


class NaiveLoads:
    """The load of replicas, summed over everything that was ever sent."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.sent: list[Sent] = []

    def load_s(self, replica: int, service_class: ServiceClass, now: float) -> float:
        chosen = self.fleet.state.settings
        total = 0.0
        for sent in self.sent:
            if sent.replica != replica:
                continue
            spared = (
                service_class is ServiceClass.RT and sent.request.service_class is ServiceClass.BE
            )
            weight = chosen.be_weight if spared else 1.0
            if sent.time_s > now - chosen.window_s:
                total += weight * chosen.history * (sent.prefill_s + sent.decode_s)
            if not sent.ended:
                total += weight * (sent.decode_s + (0.0 if sent.begun else sent.prefill_s))
        return total

    def cached(self, replica: int, request: EngineRequest) -> int:
        """Nothing is evicted: whatever was sent there."""
        tokens, best = list(request.prompt_token_ids), 0
        for sent in self.sent:
            if sent.replica == replica:
                best = max(best, _common(tokens, list(sent.request.prompt_token_ids)))
        return best * BLOCK

    def choices(self, request: EngineRequest, replicas: Iterable[int], now: float) -> list[int]:
        """Those among which the lowest cost decides."""
        length = len(request.prompt_token_ids)
        cached = {replica: self.cached(replica, request) for replica in replicas}
        most = max(cached.values())
        if length - most >= most:
            return list(cached)
        return [replica for replica in cached if cached[replica] >= 0.95 * most]


@settings(max_examples=examples(50, long=1000), deadline=None)
@given(st.data())
def test_the_chosen_replica_costs_least(data: st.DataObject) -> None:
    """With the terms summed anew, of all requests that there were."""
    count = data.draw(st.integers(2, 4))
    fleet = fleet_of(
        count, patience=NO_WAITING, decode_aware=False, rebalancing=False, replication=False,
        history=data.draw(st.sampled_from([0.0, 0.3, 1.0])), window_s=20.0,
    )  # fmt: skip
    naive, now = NaiveLoads(fleet), 0.0
    for number in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.sampled_from([0.0, 0.5, 7.0]))
        fresh = data.draw(st.integers(0, 3))
        tokens = [data.draw(st.integers(0, 2))] * (BLOCK * data.draw(st.integers(0, 4)))
        tokens += [data.draw(st.integers(0, 2))] * (BLOCK * data.draw(st.integers(0, 3)))
        tokens += [100 + number] * (1 + fresh * BLOCK)
        request = ask(f"{number}", tokens, best_effort=data.draw(st.booleans()), max_tokens=8)
        choices = naive.choices(request, range(count), now)
        totals = {}
        for replica in range(count):
            there = naive.cached(replica, request)
            prefill_s = PRICES.prefill_s(len(tokens) - there, there)
            totals[replica] = prefill_s + naive.load_s(replica, request.service_class, now)
            cost = fleet.costs(request, now)[replica]
            assert cost.total_s == pytest.approx(totals[replica], abs=1e-9)
        (decision,) = fleet.route([request], now)
        least = min(totals[replica] for replica in choices)
        assert decision.replica in choices
        assert totals[decision.replica] == pytest.approx(least, abs=1e-9)
        work = fleet.replicas[decision.replica].works[request.request_id]
        there = naive.cached(decision.replica, request)
        assert decision.matched == there
        assert work.prefill_s == pytest.approx(PRICES.prefill_s(len(tokens) - there, there))
        sent = Sent(request, decision.replica, now, work.prefill_s, work.decode_s)
        naive.sent.append(sent)
        for other in naive.sent:
            if not other.ended and data.draw(st.booleans()):
                _go_on(fleet, other, now)
    fleet.forest.check_integrity()


@settings(max_examples=examples(50, long=1000), deadline=None)
@given(st.data())
def test_of_those_that_may_serve_it_the_cheapest_does(data: st.DataObject) -> None:
    """Where caches are full, prices differ and first tokens may be late; the terms are tested one
    by one above and below."""
    fleet = fleet_of(0, patience=NO_WAITING, decode_aware=False, rebalancing=False)
    for _ in range(data.draw(st.integers(2, 4))):
        slow = data.draw(st.sampled_from([1, 4]))
        prices = replace(PRICES, token_s=PRICES.token_s * slow)
        capacity = data.draw(st.sampled_from([8 * BLOCK, 20 * BLOCK]))
        facts = ReplicaFacts(capacity_tokens=capacity, prices=prices, ttft_s=0.02)
        fleet.add(facts, 0.0)
    sent: list[tuple[list[int], int]] = []
    asked = matched = 0
    for number in range(data.draw(st.integers(5, 40))):
        now = float(number)
        tokens = [data.draw(st.integers(0, 5))] * (BLOCK * data.draw(st.integers(0, 4)))
        tokens += [data.draw(st.integers(0, 5))] * (BLOCK * data.draw(st.integers(0, 3)) + 1)
        request = ask(f"{number}", tokens, best_effort=data.draw(st.booleans()), max_tokens=8)
        costs, there = fleet.costs(request, now), cached(fleet, request)
        most = max(there.values(), default=0)
        common = [(_common(tokens, other), replica) for other, replica in sent]
        known = max((blocks for blocks, _ in common), default=0) * BLOCK
        may = set(costs)
        if len(tokens) - most < most:
            may = {replica for replica in costs if there.get(replica, 0) >= 0.95 * most}
        elif len(tokens) - known < known and matched >= 0.25 * asked:
            may = {replica for blocks, replica in common if blocks * BLOCK >= 0.95 * known}
            may |= {replica for replica in there if there[replica] >= 0.95 * most}
        (decision,) = fleet.route([request], now)
        assert decision.replica in may
        cheapest = min(costs[replica].total_s for replica in may)
        assert costs[decision.replica].total_s == pytest.approx(cheapest, abs=1e-9)
        sent.append((tokens, decision.replica))
        asked, matched = asked + (len(tokens) - 1) // BLOCK * BLOCK, matched + decision.matched
        if data.draw(st.booleans()):
            fleet.on_first_token(f"{number}", now)
            fleet.on_finished(f"{number}", (1, 2), now)


def test_what_is_evicted_is_priced_where_it_lies() -> None:
    """A question after a long prefix costs more than one at the beginning."""
    fleet = fleet_of(1, capacity=30 * BLOCK, history=0.0)
    for number in range(2):
        serve(fleet, ask(f"p{number}", [1] * (20 * BLOCK) + [2] * (5 * BLOCK) + [3]), 0.0, ())
    serve(fleet, ask("other", [1] * (20 * BLOCK) + [4] * (2 * BLOCK) + [3]), 1.0, ())
    evicted_s = fleet.costs(ask("new", [9] * (4 * BLOCK)), 2.0)[0].evicted_s
    assert evicted_s == pytest.approx(2 * PRICES.prefill_s(5 * BLOCK, 20 * BLOCK))


def test_a_replica_that_has_lost_what_it_pinned_is_as_good_as_any() -> None:
    fleet = fleet_of(2, history=0.0)
    hints = Hints(program="p", keep_s=60.0)
    prompt = list(range(10 * BLOCK + 1))
    there = serve(fleet, ask("a", prompt, hints=hints), 0.0)
    fleet.route([ask("b", prompt)], 0.5, frozenset({there}))
    fleet.apply_report(there, told(1, full=True), 0.6)
    request = ask("c", [*prompt, 1, 2], hints=hints)
    assert decide(fleet, request, 1.0)[:2] == (1 - there, "exploit")


def _go_on(fleet: Fleet, sent: Sent, now: float) -> None:
    """Its first token, or its end."""
    request_id = sent.request.request_id
    if not sent.begun:
        fleet.on_first_token(request_id, now)
        sent.begun = True
        return
    in_window = fleet.replicas[sent.replica].works[request_id].in_window
    rows = max(fleet.replicas[sent.replica].open_work.num_requests - 1, 1)
    actual_s = PRICES.decode_s(2, len(sent.request.prompt_token_ids), rows)
    fleet.on_finished(request_id, (1, 1), now)
    sent.ended = True
    if in_window:
        sent.decode_s = actual_s


def test_evicting_what_others_ask_for_costs_as_much_as_computing_it_again() -> None:
    """Least recently used first, what is in use not at all, and only as much as is needed."""
    fleet = fleet_of(1, capacity=30 * BLOCK, history=0.0)
    old, hot, running = ([n] * (8 * BLOCK + 1) for n in (1, 2, 3))
    for number in range(2):
        serve(fleet, ask(f"old{number}", old), 0.0, ())
    for number in range(3):
        serve(fleet, ask(f"hot{number}", hot), 1.0, ())
    send(fleet, ask("running", running), 2.0)
    one = PRICES.prefill_s(8 * BLOCK, 0)

    def evicted_s(blocks: int) -> float:
        return fleet.costs(ask("new", [9] * (blocks * BLOCK)), 3.0)[0].evicted_s

    assert evicted_s(6) == 0.0
    assert evicted_s(7) == evicted_s(14) == pytest.approx(2 * one)
    assert evicted_s(15) == evicted_s(22) == pytest.approx(5 * one)
    assert evicted_s(28) == pytest.approx(5 * one)  # what runs stays
    assert fleet.costs(ask("new", hot), 3.0)[0].evicted_s == 0.0
    fleet.apply_report(0, EngineReport(version=1, slowdown=2.0), 3.0)
    assert evicted_s(7) == pytest.approx(4 * one)
