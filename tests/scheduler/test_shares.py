"""Counters of tenants' device time: weights, no credit for idle time, bounded unfairness."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bros.core.request import ServiceClass
from bros.scheduler.cost_model import CostModel
from bros.scheduler.shares import StepCosts, TenantShares
from bros.scheduler.state import RequestState
from support.scheduling import request

TENANTS = "abc"
LONGEST_S = 2.0
"""Most seconds of one piece of work."""

pieces_s = st.sampled_from([0.1, 0.5, 1.0, LONGEST_S])
weights = st.fixed_dictionaries({tenant: st.sampled_from([0.5, 1.0, 3.0]) for tenant in TENANTS})


class Naive:
    """The counters of the paper's Algorithm 2, one event after the other."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.counters = dict.fromkeys(TENANTS, 0.0)
        self.waiting: set[str] = set()
        self.last = "a"

    def arrive(self, tenant: str) -> None:
        if tenant not in self.waiting:
            others = [self.counters[each] for each in self.waiting] or [self.counters[self.last]]
            self.counters[tenant] = max(self.counters[tenant], min(others))
            self.waiting.add(tenant)

    def leave(self, tenant: str) -> None:
        if tenant in self.waiting:
            self.waiting.remove(tenant)
            self.last = tenant

    def charge(self, tenant: str, seconds: float) -> None:
        self.counters[tenant] += seconds / self.weights[tenant]


events = st.lists(
    st.tuples(st.sampled_from(["arrive", "leave", "charge"]), st.sampled_from(TENANTS), pieces_s),
    max_size=30,
)


@given(events=events, of=weights)
def test_the_counters_are_those_of_the_naive_model(
    events: list[tuple[str, str, float]], of: dict[str, float]
) -> None:
    shares, naive = TenantShares(of), Naive(of)
    shares.set_waiting({"a"})  # the naive model takes it for the one that waited last
    shares.set_waiting(())
    for event, tenant, seconds in events:
        if event == "charge":
            shares.charge(tenant, seconds)
            naive.charge(tenant, seconds)
        else:
            (naive.arrive if event == "arrive" else naive.leave)(tenant)
            shares.set_waiting(set(naive.waiting))
        assert {each: shares.counter(each) for each in TENANTS} == pytest.approx(naive.counters)
        first = min(naive.waiting, key=naive.counters.get, default=None)
        if len(naive.waiting) < 2:
            assert not shares.behind(naive.waiting)
        else:
            assert first is not None
            least = naive.counters[first]
            (ahead,) = naive.waiting - shares.behind(naive.waiting)
            assert naive.counters[ahead] == pytest.approx(least)


def serve(shares: TenantShares, waiting: set[str], sizes: list[float]) -> dict[str, float]:
    """Give the pieces of work to the first tenant each time; returns what each got."""
    got = dict.fromkeys(waiting, 0.0)
    for seconds in sizes:
        shares.set_waiting(waiting)
        first = min(waiting, key=shares.place)
        shares.charge(first, seconds)
        got[first] += seconds
    return got


@given(of=weights, before=events, sizes=st.lists(pieces_s, min_size=1, max_size=60))
def test_tenants_that_always_wait_get_what_their_weights_say(
    of: dict[str, float], before: list[tuple[str, str, float]], sizes: list[float]
) -> None:
    """From when all wait on, service per weight differs by what one was ahead, and by one piece.

    That is the bound of Theorem 4.4 of the paper; brute force over every interval.
    """
    shares = TenantShares(of)
    for _, tenant, seconds in before:
        shares.charge(tenant, seconds)
    everyone = set(TENANTS)
    shares.set_waiting(everyone)
    counters = [shares.counter(tenant) for tenant in TENANTS]
    ahead = max(counters) - min(counters)
    got = {tenant: [0.0] for tenant in TENANTS}
    for size in sizes:
        served = serve(shares, everyone, [size])
        for tenant in TENANTS:
            got[tenant].append(got[tenant][-1] + served[tenant])
    piece = LONGEST_S / min(of.values())
    for start, end in itertools.combinations(range(len(sizes) + 1), 2):
        used = [(got[tenant][end] - got[tenant][start]) / of[tenant] for tenant in TENANTS]
        # An interval may begin when one was ahead and end when another is.
        assert max(used) - min(used) <= 2 * max(ahead, piece) + 1e-6


@given(of=weights, idle=st.lists(pieces_s, max_size=40), sizes=st.lists(pieces_s, max_size=40))
def test_idle_time_is_no_credit(
    of: dict[str, float], idle: list[float], sizes: list[float]
) -> None:
    """However long c was idle, it gets no more per weight than the others from then on, but for
    one piece."""
    shares = TenantShares(of)
    serve(shares, {"a", "b"}, idle)
    got = serve(shares, set(TENANTS), sizes)
    piece = LONGEST_S / min(of.values())
    per_weight = {tenant: seconds / of[tenant] for tenant, seconds in got.items()}
    assume(sizes)
    assert per_weight["c"] <= min(per_weight["a"], per_weight["b"]) + 2 * piece + 1e-6


def test_who_comes_while_none_waits_starts_where_the_last_one_was() -> None:
    shares = TenantShares({})
    shares.set_waiting({"a"})
    shares.charge("a", 5.0)
    shares.stop_waiting("a")
    shares.set_waiting({"b"})
    assert shares.counter("b") == 5.0


def test_each_arrival_after_the_last_request_has_started_is_one_after_idle_time() -> None:
    """A tenant with little work saves nothing up between its requests."""
    shares = TenantShares({})
    for _ in range(10):
        shares.set_waiting({"a", "b"})
        shares.charge("a", 1.0)
        shares.stop_waiting("b")
    shares.set_waiting({"a", "b"})
    assert shares.counter("b") == shares.counter("a")


def test_a_tenant_alone_is_never_over_its_share() -> None:
    shares = TenantShares({})
    for _ in range(100):
        shares.charge("a", 1.0)
    assert not shares.over_share()
    shares.charge("b", 1.0)
    assert shares.over_share() == {"a"}
    for _ in range(100):
        shares.charge("b", 1.0)
    assert not shares.over_share()  # a has used nearly nothing lately
    shares.set_waiting({"c"})
    assert shares.over_share() == {"b"}  # c has used nothing, but would


@given(
    charges=st.lists(st.tuples(st.sampled_from(TENANTS), pieces_s), max_size=60),
    waiting=st.sets(st.sampled_from(TENANTS)),
    of=weights,
)
def test_who_is_over_its_share_is_what_brute_force_finds(
    charges: list[tuple[str, float]], waiting: set[str], of: dict[str, float]
) -> None:
    """Each charge counts with what was used after it."""
    shares = TenantShares(of)
    for tenant, seconds in charges:
        shares.charge(tenant, seconds)
    shares.set_waiting(waiting)
    lately = dict.fromkeys(TENANTS, 0.0)
    for index, (tenant, seconds) in enumerate(charges):
        after_s = sum(later for _, later in charges[index + 1 :])
        lately[tenant] += seconds * math.exp(-after_s / 10)
    total_s = sum(lately.values())
    active = {t for t in TENANTS if t in waiting or lately[t] > total_s / 100}
    ratios = {t: lately[t] / of[t] / (total_s or 1) * sum(of[a] for a in active) for t in active}
    assume(all(abs(ratio - 1.1) > 1e-9 for ratio in ratios.values()))
    expected = {t for t, ratio in ratios.items() if ratio > 1.1} if len(active) > 1 else set()
    assert shares.over_share() == expected


@given(idle=st.lists(pieces_s, max_size=40), use=st.lists(pieces_s, min_size=1, max_size=80))
def test_a_tenant_that_was_idle_is_soon_over_its_share(idle: list[float], use: list[float]) -> None:
    """However long it was idle: after ten device seconds of its own at the latest."""
    shares = TenantShares({})
    shares.set_waiting({"a"})
    serve(shares, {"a"}, idle)
    shares.set_waiting({"a", "b"})
    for count, seconds in enumerate(use, start=1):
        shares.charge("b", seconds)
        if sum(use[:count]) >= 10.0:
            assert shares.over_share() == {"b"}


def test_weights_move_the_share() -> None:
    shares = TenantShares({"a": 3.0})
    for _ in range(50):
        shares.charge("a", 0.3)
        shares.charge("b", 0.1)
    assert not shares.over_share()
    for _ in range(50):
        shares.charge("a", 0.2)
        shares.charge("b", 0.2)
    assert shares.over_share() == {"b"}


@given(
    lists=st.fixed_dictionaries({tenant: st.lists(pieces_s, max_size=6) for tenant in TENANTS}),
    of=weights,
)
def test_merged_requests_are_in_the_order_of_serving_one_after_the_other(
    lists: dict[str, list[float]], of: dict[str, float]
) -> None:
    shares, alike = TenantShares(of), TenantShares(of)
    asked = {tenant: [(tenant, n, s) for n, s in enumerate(own)] for tenant, own in lists.items()}
    merged = list(shares.merge(asked, lambda request: request[2]))
    found = []
    rest = {tenant: list(own) for tenant, own in asked.items()}
    while any(rest.values()):
        first = min((t for t in rest if rest[t]), key=lambda t: (alike.counter(t), t))
        taken = rest[first].pop(0)
        alike.charge(first, taken[2])
        found.append(taken)
    assert merged == found


# The parts of a step


MODEL = CostModel(constant_s=0.01, token_s=1e-4, sample_s=1e-5, pair_s=1e-8, context_s=1e-7)


def state_of(tenant: str, computed: int, remaining: int) -> RequestState:
    asked = dataclasses.replace(request("r", computed + remaining, ServiceClass.BE), tenant=tenant)
    state = RequestState(
        asked, service_class=ServiceClass.BE, slo=asked.slo, now=0.0, arrival_index=0, seed=0,
        max_length=10_000, eos_token_ids=frozenset(),
    )  # fmt: skip
    state.num_computed_tokens = computed
    return state


@given(
    st.lists(
        st.tuples(st.sampled_from(TENANTS), st.integers(0, 500), st.integers(1, 200)), min_size=1
    )
)
def test_the_parts_of_a_step_are_all_of_it(chunks: list[tuple[str, int, int]]) -> None:
    costs = StepCosts(MODEL, 256)
    selected = [(state_of(t, computed, n), n) for t, computed, n in chunks]
    parts = costs.divided(selected, 0.5)
    assert sum(parts.values()) == pytest.approx(0.5)
    assert set(parts) == {tenant for tenant, _, _ in chunks}


def test_what_costs_nothing_by_the_model_is_divided_by_tokens() -> None:
    """As fits have it whose coefficients are exactly zero."""
    free = CostModel(constant_s=0.01, token_s=0.0, sample_s=0.0, pair_s=0.0, context_s=0.0)
    costs = StepCosts(free, 256)
    chunks = [(state_of("a", 0, 1), 1), (state_of("b", 0, 1), 1), (state_of("b", 0, 2), 2)]
    assert costs.divided(chunks, 0.4) == pytest.approx({"a": 0.1, "b": 0.3})


def test_a_cached_prefix_costs_what_reading_it_costs() -> None:
    costs = StepCosts(MODEL, 256)
    whole, rest = costs.prefill_s(state_of("a", 0, 400)), costs.prefill_s(state_of("a", 300, 100))
    assert 0.25 * whole < rest < 0.35 * whole
