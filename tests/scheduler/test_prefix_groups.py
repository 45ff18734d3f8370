"""Best-effort requests by how much of their prompt is cached: shares, order and waiting."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bros.core.request import Hints
from bros.scheduler.policies.best_effort_order import NUM_GROUPS, PrefixGroups, group_of
from bros.scheduler.state import RequestState
from support.prefix_run import Run
from support.scheduling import request
from support.tier import examples
from support.virtual_time import BE

WAIT_S = 30.0


def state_of(index: int, cached: int, at_s: float = 0.0, *, early: bool = False) -> RequestState:
    """cached: percent of its prompt."""
    asked = request(f"r{index}", 100, BE, arrival_s=at_s, hints=Hints(early=early))
    state = RequestState(
        asked, service_class=BE, slo=asked.slo, now=at_s, arrival_index=index, seed=0,
        max_length=200, eos_token_ids=frozenset(),
    )  # fmt: skip
    state.num_computed_tokens, state.early = cached, early
    return state


@pytest.mark.parametrize(
    ("cached", "group"), [(0, 1), (1, 1), (10, 1), (11, 2), (63, 7), (90, 9), (91, 10), (99, 10)]
)
def test_the_group_is_the_share_that_is_cached(cached: int, group: int) -> None:
    assert group_of(state_of(0, cached)) == group


@dataclass
class Naive:
    """One after the other: the highest group that has something left of the round."""

    left: dict[int, int] = field(default_factory=dict)

    def order(self, waiting: list[RequestState], count: int, now: float) -> list[RequestState]:
        left, rest, found = dict(self.left), list(waiting), []
        while rest and len(found) < count:
            state, left = self.next(rest, left, now)
            rest.remove(state)
            found.append(state)
        return found

    def next(
        self, rest: list[RequestState], left: dict[int, int], now: float
    ) -> tuple[RequestState, dict[int, int]]:
        usual = [state for state in rest if not state.early]
        by_arrival = sorted(usual or rest, key=lambda s: (s.record.arrival_s, s.arrival_index))
        if not usual or by_arrival[0].record.arrival_s <= now - WAIT_S:
            return by_arrival[0], left
        if not any(left.get(group_of(state)) for state in usual):
            left = {group: group for group in range(1, NUM_GROUPS + 1)}
        group = max(group_of(state) for state in usual if left[group_of(state)])
        left = {**left, group: left[group] - 1}
        return next(state for state in by_arrival if group_of(state) == group), left

    def started(self, state: RequestState) -> None:
        if not self.left.get(group_of(state)):
            self.left = {group: group for group in range(1, NUM_GROUPS + 1)}
        self.left[group_of(state)] -= 1


arrivals = st.lists(
    st.tuples(st.integers(0, 99), st.sampled_from([0.0, 0.0, 1.0, 20.0]), st.booleans()),
    max_size=40,
)


@settings(max_examples=examples(30, long=2000), deadline=None)
@given(arrivals=arrivals, steps=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5))))
def test_it_is_what_the_naive_model_says(
    arrivals: list[tuple[int, float, bool]], steps: list[tuple[int, int]]
) -> None:
    """Each step begins so many of the first ones, and a few more requests come meanwhile."""
    order, naive, now = PrefixGroups(WAIT_S, lambda state: None), Naive(), 0.0
    waiting: list[RequestState] = []
    coming = list(enumerate(arrivals))
    for begun, come in [(0, 10), *steps]:
        for index, (cached, after_s, early) in coming[:come]:
            now += after_s
            waiting.append(state_of(index, cached, now, early=early and index % 5 == 0))
        del coming[:come]
        waiting.sort(key=lambda state: (state.early, *order.key(state, now)))
        first = order.first(waiting, range(len(waiting)), 12, now)
        assert first == naive.order(waiting, 12, now)
        begin = [state for state in first[:begun] if not state.early]
        for state in begin:
            order.started(state)
            naive.started(state)
            waiting.remove(state)


@given(batches=st.lists(st.integers(1, 9), min_size=40, max_size=60))
@example(batches=[1] * 26 + [7] + [9] * 33)
def test_groups_that_always_have_requests_share_in_proportion(batches: list[int]) -> None:
    """Whatever fits into each step; and first come first served in each group.

    For each that begins another one with as much cached arrives, so that every group has as many
    among the first arrivals that are put in groups as a step may begin.
    """
    order = PrefixGroups(WAIT_S, lambda state: None)
    waiting = [state_of(index, index % 10 * 10 + 5) for index in range(200)]
    begun: list[RequestState] = []
    for count in batches:
        first = order.first(waiting, range(len(waiting)), 65, 0.0)[:count]
        for state in first:
            order.started(state)
            waiting.remove(state)
            waiting.append(state_of(200 + len(begun), state.num_computed_tokens))
            begun.append(state)
    one_round = [group for group in range(NUM_GROUPS, 0, -1) for _ in range(group)]
    rounds = itertools.cycle(one_round)
    assert [group_of(state) for state in begun] == list(itertools.islice(rounds, len(begun)))
    for group in range(1, NUM_GROUPS + 1):
        indexes = [state.arrival_index for state in begun if group_of(state) == group]
        assert indexes == sorted(indexes)


def test_groups_follow_what_is_cached_now() -> None:
    """A few at each step, so that all have been looked up after some."""
    cached = {f"r{index}": 0 for index in range(40)}

    def look_up(state: RequestState) -> None:
        state.num_computed_tokens = cached[state.request_id]

    order = PrefixGroups(WAIT_S, look_up)
    waiting = [state_of(index, 0) for index in range(40)]
    assert order.first(waiting, range(len(waiting)), 3, 0.0) == waiting[:3]
    cached["r33"] = 95
    for _ in range(5):
        found = order.first(waiting, range(len(waiting)), 3, 0.0)
    assert found[0] is waiting[33]
    cached["r33"] = 0  # it was evicted
    for _ in range(5):
        found = order.first(waiting, range(len(waiting)), 3, 0.0)
    assert found == waiting[:3]


def starts(be_order: str, load: list[tuple[str, list[int]]]) -> list[str]:
    """In what order a scheduler lets them begin, one at a time."""
    run = Run(be_order=be_order, max_num_seqs=1, blocks=60)
    run.submit("warm", [1] * 64, BE, max_tokens=1)
    run.drain()
    for name, prompt in load:
        run.submit(name, prompt, BE, max_tokens=2)
    began: list[str] = []
    while any(name not in run.ends for name, _ in load):
        plan = run.schedule()
        began += [c.request_id for c in plan.chunks if c.request_id not in began]
        run.finish(plan)
    return began


def test_a_scheduler_begins_with_whose_prompt_is_cached() -> None:
    load = [(f"cold {n}", [100 + n] * 66) for n in range(4)]
    load += [(f"half {n}", [*[1] * 36, *[50 + n] * 30]) for n in range(2)]
    load += [(f"warm {n}", [*[1] * 64, 30 + n]) for n in range(3)]
    names = [name for name, _ in load]
    assert starts("prefix-groups", load) == [*names[6:], *names[4:6], *names[:4]]
    assert starts("programs", load) != starts("prefix-groups", load)


class Flood:
    """Requests that have nothing cached, and ever more of those that have nearly everything."""

    def __init__(self, cold: int, max_wait_s: float) -> None:
        self.run = Run(
            be_order="prefix-groups", be_max_wait=max_wait_s, max_num_seqs=1, blocks=60,
            max_queue=10**6,
        )  # fmt: skip
        self.run.submit("before", [1] * 64, BE, max_tokens=1)
        self.run.drain()
        self.cold = [f"cold {n}" for n in range(cold)]
        for n, name in enumerate(self.cold):
            self.run.submit(name, [2 + n] * 64, BE, max_tokens=1)
        self.warm = 0
        self.began: dict[str, float] = {}

    def step(self) -> None:
        for _ in range(12):
            self.run.submit(f"warm {self.warm}", [*[1] * 64, self.warm % 900], BE, max_tokens=1)
            self.warm += 1
        plan = self.run.schedule()
        for chunk in plan.chunks:
            self.began.setdefault(chunk.request_id, self.run.now)
        self.run.finish(plan)


def test_requests_with_nothing_cached_get_a_share() -> None:
    flood = Flood(3, max_wait_s=1000.0)
    while not flood.began.keys() >= set(flood.cold):
        flood.step()
    order = list(flood.began)
    # Of the first round "before" has had the share.
    assert [order.index(name) for name in flood.cold] == [20, 31, 42]


def test_a_request_that_has_waited_long_is_not_overtaken_any_more() -> None:
    flood = Flood(12, max_wait_s=1.0)
    arrived_s = flood.run.now
    while not flood.began.keys() >= set(flood.cold):
        flood.step()
    order = list(flood.began.items())
    last = max(flood.began[name] for name in flood.cold)
    assert last < arrived_s + 12.0, "by shares alone it would be the hundredth and more"
    after = [name for name, at_s in order if arrived_s + 1.0 <= at_s <= last]
    assert len(after) > 5 and set(after) <= set(flood.cold)
