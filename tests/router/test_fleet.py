"""The fleet as a whole: its counts beside naive ones, and how much it remembers."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bros.core.errors import ConfigError
from bros.core.request import Hints, SamplingParams
from bros.router.fleet import make_fleet
from bros.router.forest import PrefixNode
from bros.router.state import ROUTERS, ReplicaFacts, ReplicaWork
from support.routing import BLOCK, PRICES, ask, fleet_of, send, serve, told
from support.tier import by_tier, examples

WINDOW_S = 10.0


class Bookkeeping(RuleBasedStateMachine):
    """Anything may happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = fleet_of(2, window_s=WINDOW_S, warm_up=1, capacity=12 * BLOCK, plan="shadow")
        self.up = {0, 1}
        self.next = 2
        self.now = 0.0
        self.count = 0
        self.sent: dict[str, tuple[float, int]] = {}  # (time, replica) of all that may be computed
        self.open: dict[str, int] = {}
        self.begun: set[str] = set()
        self.version = 0

    @precondition(lambda self: self.up)
    @rule(
        parts=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        rest=st.integers(0, 5),
        best_effort=st.booleans(),
    )
    def request(self, parts: list[int], rest: int, best_effort: bool) -> None:
        tokens = [part for part in parts for _ in range(BLOCK)] + [50 + self.count] * rest or [1]
        request_id = f"{self.count}"
        replica = send(self.fleet, ask(request_id, tokens, best_effort=best_effort), self.now)
        assert replica in self.up
        self.count += 1
        self.sent[request_id] = self.now, replica
        self.open[request_id] = replica

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.fleet.on_first_token(request_id, self.now)
        self.begun.add(request_id)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), output=st.lists(st.integers(0, 2), max_size=9), cached=st.booleans())
    def end(self, data: st.DataObject, output: list[int], cached: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.fleet.on_finished(request_id, output, self.now, cached=cached)
        del self.open[request_id]
        if not (cached or request_id in self.begun):
            del self.sent[request_id]

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def one_more(self) -> None:
        facts = ReplicaFacts(capacity_tokens=12 * BLOCK, prices=PRICES)
        assert self.fleet.add(facts, self.now) == self.next
        self.up.add(self.next)
        self.next += 1

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.up)))
        lost = self.fleet.remove(replica)
        assert sorted(lost) == sorted(r for r, where in self.open.items() if where == replica)
        self.up.remove(replica)
        for request_id in lost:
            del self.open[request_id]

    @precondition(lambda self: self.up and self.count)
    @rule(data=st.data(), kept=st.integers(0, 20), full=st.booleans())
    def report(self, data: st.DataObject, kept: int, full: bool) -> None:
        """Whether it can be true or not."""
        replica = data.draw(st.sampled_from(sorted(self.up)))
        request_id = f"{data.draw(st.integers(0, self.count - 1))}"
        version = data.draw(st.integers(1, 30))
        self.fleet.apply_report(replica, told(version, (request_id, kept), full=full), self.now)

    @invariant()
    def counts_agree(self) -> None:
        fleet, state = self.fleet, self.fleet.state
        fleet.costs(ask("q", [1]), self.now)  # what is older than the window is forgotten
        fleet.forest.check_integrity()
        assert set(fleet.replicas) == self.up
        for number, replica in fleet.replicas.items():
            mine = {r for r, where in self.open.items() if where == number}
            assert set(replica.works) == mine and replica.open_work.num_requests == len(mine)
            recent = [
                t for t, where in self.sent.values() if where == number and t > self.now - WINDOW_S
            ]
            assert replica.window_work.num_requests == len(recent)
            assert sum(replica.keys.values()) <= len(recent)
            works = replica.works.values()
            waiting = sum(work.prefill_s for work in works if not work.prefilled)
            assert sum(replica.open_work.prefill_s.values()) == pytest.approx(waiting, abs=1e-9)
            decode = sum(work.decode_s for work in works)
            assert sum(replica.open_work.decode_s.values()) == pytest.approx(decode, abs=1e-9)
            for work in works:
                assert work.key is None or work.key in _paths([work])
                assert work.request is not None
            held = sum({n: n.cached.get(number, 0) for n in _paths(works)}.values())
            assert state.forest.caches[number].num_tokens <= max(12 * BLOCK, held)
            assert all(key.load[number] > -1e-9 for key in replica.keys)
        active = Counter(n for r in fleet.replicas.values() for n in _paths(r.works.values()))
        for node in fleet.forest:
            assert node.active == active[node]


def _paths(works: Iterable[ReplicaWork]) -> Iterator[PrefixNode]:
    for work in works:
        node = work.leaf
        while node.parent is not None:
            yield node
            node = node.parent


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(
    max_examples=examples(20, long=400), stateful_step_count=30, deadline=None
)


@pytest.mark.parametrize("told_of", [True, False])
def test_memory_is_bounded_however_many_requests_come(told_of: bool) -> None:
    """A tenth of the requests has a prefix of others; benchmarks/router_speed.py has a million
    requests. Nodes: what the caches have, and what was asked for within the window."""
    capacity, rate, window_s = 200 * BLOCK, 50, 20.0
    fleet = fleet_of(2, capacity=capacity, window_s=window_s)
    rng, most = random.Random(1), 0
    for number in range(by_tier(fast=8_000, long=30_000)):
        now = number / rate
        prefix = [rng.randrange(40)] * (4 * BLOCK) if number % 10 == 0 else []
        serve(fleet, ask(f"{number}", prefix + [100 + number] * (2 * BLOCK)), now)
        if told_of and number % 1000 == 999:
            for replica in fleet.replicas:
                fleet.apply_report(replica, told(number, (f"{number}", BLOCK), full=True), now)
        if number % 100 == 0:
            most = max(most, fleet.forest.num_tokens)
            assert all(len(r.origins) <= 201 for r in fleet.replicas.values())
    assert most <= 2 * capacity + rate * (window_s + 1) * 6 * BLOCK
    fleet.forest.check_integrity()
    fleet.route([ask("last", [1])], 1e6)
    for replica in list(fleet.replicas):
        fleet.remove(replica)
    assert fleet.forest.num_nodes == 0 and fleet.forest.num_tokens == 0


def test_prompts_are_freed_when_their_requests_end() -> None:
    fleet = fleet_of(1)
    prompt = Tokens(range(100))
    gone = weakref.ref(prompt)
    send(fleet, replace(ask("a", []), prompt_token_ids=prompt))
    fleet.on_first_token("a", 0.0)
    fleet.on_finished("a", (1,), 0.0)
    del prompt
    gc.collect()
    assert gone() is None and fleet.replicas[0].window_work.num_requests == 1


class Tokens(list[int]):
    """A list of which one can tell whether it is still there."""


def test_a_full_forest_forgets_what_is_oldest() -> None:
    """And has room for all caches in any case."""
    fleet = fleet_of(1, capacity=400 * BLOCK, max_tokens=1)
    for number in range(2000):
        serve(fleet, ask(f"{number}", [number] * (2 * BLOCK + 1)), 0.0, ())
        assert fleet.forest.num_tokens <= 400 * BLOCK
    assert fleet.forest.num_tokens == 400 * BLOCK
    fleet.forest.check_integrity()


def test_there_is_no_other_policy() -> None:
    for name in ROUTERS:
        make_fleet(name, oracle=lambda request: 0)
    with pytest.raises(ConfigError, match="--router: 'e3' is not one of e2, rr, least, oracle"):
        make_fleet("e3")


def test_those_that_e2_is_compared_with() -> None:
    turns = fleet_of(3, "rr")
    assert [send(turns, ask(f"{n}", [n])) for n in range(4)] == [0, 1, 2, 0]
    turns.remove(1)
    assert [send(turns, ask(f"m{n}", [n])) for n in range(3)] == [2, 0, 2]
    least = fleet_of(2, "least")
    sizes = enumerate((50, 20, 10, 50))
    assert [send(least, ask(f"{n}", [n] * size)) for n, size in sizes] == [0, 1, 1, 0]
    oracle = make_fleet("oracle", None, BLOCK, oracle=lambda request: request.prompt_token_ids[0])
    for replica in fleet_of(3).replicas.values():
        oracle.add(replica.facts, 0.0)
    assert [send(oracle, ask(f"{n}", [n, 5])) for n in (0, 4, 2)] == [0, 1, 2]


def test_answers_are_guessed_by_those_before_them() -> None:
    fleet = fleet_of(1)
    replica = fleet.replicas[0]
    request = ask("a", [1] * 5)
    assert replica.expected_output(request) == 8  # no more than it may have
    for number in range(200):
        serve(fleet, ask(f"{number}", [number], max_tokens=1000), 0.0, (1,) * 300)
    assert replica.mean_output == pytest.approx(300, rel=0.01)
    endless = replace(request, sampling=SamplingParams(max_tokens=None))
    assert replica.expected_output(endless) == pytest.approx(300, rel=0.01)
    known = replace(endless, hints=Hints(expected_tokens=20))
    assert replica.expected_output(known) == 20
    assert replica.expected_output(replace(endless, prefill_only=True)) == 0
