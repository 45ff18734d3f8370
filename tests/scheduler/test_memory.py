"""Memory of one step against a model that counts blocks the plain way."""

from __future__ import annotations

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.request import ServiceClass, Slo
from bros.kvcache.blocks import Side
from bros.kvcache.manager import KvCacheManager
from bros.scheduler.memory import StepMemory, peak_tokens
from bros.scheduler.state import RequestState
from support.scheduling import request
from support.tier import examples

RT, BE = ServiceClass.RT, ServiceClass.BE
SIZE = 4


def state(index: int, service_class: ServiceClass, length: int, cached: int = 0) -> RequestState:
    """Ranked as `bros` does it: real-time first, then by arrival."""
    made = RequestState(
        request(f"r{index}", length, service_class),
        service_class=service_class,
        slo=Slo(),
        now=0.0,
        arrival_index=index,
        seed=0,
        max_length=1000,
        eos_token_ids=frozenset(),
    )
    made.rank = (service_class is BE, index)
    made.num_computed_tokens = cached
    made.running = cached > 0
    return made


def side_of(request_state: RequestState) -> Side:
    return Side.LEFT if request_state.service_class is RT else Side.RIGHT


def memory_with(
    states: list[RequestState], blocks: int, **options: object
) -> tuple[KvCacheManager, StepMemory]:
    """Of `states`, those with cached tokens hold their blocks."""
    kv = KvCacheManager(blocks, SIZE)
    running = sorted((s for s in states if s.num_computed_tokens), key=lambda s: s.rank)
    for holder in running:
        assert kv.append(holder.request_id, holder.num_computed_tokens, side_of(holder)) is not None
    chosen = {"max_holders": 100, "new_requests_preempt": True, "drop": print, **options}
    by_id = {each.request_id: each for each in states}
    return kv, StepMemory(kv, running, by_id, 0.0, **chosen)  # type: ignore[arg-type]


# Expected growth


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12)), max_size=8))
def test_peak_tokens_is_what_a_simulation_step_by_step_finds(
    holders: list[tuple[int, int]],
) -> None:
    last = max((to_come for _, to_come in holders), default=0)
    simulated = [
        sum(held + step for held, to_come in holders if to_come >= step)
        for step in range(last + 1)
    ]  # fmt: skip
    assert peak_tokens(holders) == max(simulated)


def test_be_is_admitted_only_if_all_can_grow_as_expected() -> None:
    """Two requests of 8 tokens that grow by 16 each need 48 tokens and a spare block each."""
    for blocks, expected in ((13, False), (14, True)):
        running, new_request = state(0, BE, 8, cached=7), state(1, BE, 8)
        _, memory = memory_with([running], blocks, expected_tokens=lambda s: 16)
        assert memory.reserve(new_request, 8) is expected


def test_growth_does_not_keep_out_real_time_requests_nor_the_first_best_effort_one() -> None:
    running = state(0, BE, 8, cached=7)
    _, memory = memory_with([running], 12, expected_tokens=lambda s: 1000)
    assert memory.reserve(state(1, RT, 8), 8)
    running = state(0, RT, 8, cached=7)
    _, memory = memory_with([running], 12, expected_tokens=lambda s: 1000)
    assert memory.reserve(state(1, BE, 8), 8)


# Copies


@given(
    blocks=st.integers(8, 20),
    host=st.integers(0, 20),
    held=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    asked=st.lists(st.integers(1, 30), min_size=1, max_size=4),
)
def test_copies_are_foreseen_before_they_are_made(
    blocks: int, host: int, held: list[int], asked: list[int]
) -> None:
    """Of best-effort victims, who lose just what is wanted, and had no copies before."""
    holders = [state(100 + i, BE, n, cached=n) for i, n in enumerate(held)]
    new_requests = [state(i, RT, n) for i, n in enumerate(asked)]
    states = [*holders, *new_requests]
    kv = KvCacheManager(blocks, SIZE, num_host_blocks=host)
    if any(kv.append(s.request_id, s.num_computed_tokens, Side.RIGHT) is None for s in holders):
        return
    by_id = {each.request_id: each for each in states}
    memory = StepMemory(
        kv, holders, by_id, 0.0,
        drop=print, max_holders=100, new_requests_preempt=True,
    )  # fmt: skip
    tight, granted = memory.is_tight(len(new_requests), sum(asked)), 0
    for new_request in new_requests:
        before, free = memory.num_copied, memory.free_slots(new_request)
        if memory.reserve(new_request, new_request.remaining):
            granted += 1
            copied = memory.num_copied - before
            assert copied <= max(0, new_request.remaining - free)
            assert not copied or tight
    copies = kv.take_copies()
    assert memory.num_copied == (len(copies.out_device) if copies else 0)
    if not host:
        assert not tight and memory.num_copied == 0


# Who may come in


def test_seats_of_real_time_requests_are_not_taken_by_best_effort_ones() -> None:
    holders = [state(0, BE, 4, cached=4), state(1, BE, 4, cached=4), state(2, RT, 4, cached=4)]
    _, memory = memory_with(holders, 100, max_holders=3)
    assert not memory.reserve(state(3, BE, 4), 4)
    assert memory.reserve(state(4, RT, 4), 4)
    assert memory.reserve(state(5, RT, 4), 4)
    assert not memory.reserve(state(6, RT, 4), 4)


def test_real_time_newcomers_take_seats_of_best_effort_ones_too() -> None:
    _, memory = memory_with([], 100, max_holders=2)
    assert memory.reserve(state(0, RT, 4), 4)
    assert memory.reserve(state(1, BE, 4), 4)
    assert not memory.reserve(state(2, BE, 4), 4)


def test_a_newcomer_must_fit_with_its_whole_prompt_and_keeps_the_others_out() -> None:
    _, memory = memory_with([state(0, RT, 4, cached=4)], 10)
    assert not memory.reserve(state(1, RT, 40), 4), "10 blocks in all, of 9 that are free"
    assert not memory.reserve(state(2, RT, 4), 4), "no request overtakes one that waits for memory"


def test_a_late_newcomer_takes_nothing_from_requests_that_are_on_time() -> None:
    for late, victim_class, expected in (
        (False, RT, True),
        (True, RT, False),
        (True, BE, True),
    ):
        new_request = state(0, RT, 8)
        new_request.late = late
        holder = state(1, victim_class, 16, cached=16)
        _, memory = memory_with([holder], 5)
        assert memory.reserve(new_request, 8) is expected
        assert list(memory.losses) == (["r1"] if expected else [])


def test_newcomers_preempt_only_if_the_policy_lets_them() -> None:
    for preempt in (False, True):
        holder = state(0, BE, 16, cached=16)
        _, memory = memory_with([holder], 4, new_requests_preempt=preempt)
        assert memory.reserve(state(1, RT, 8), 8) is preempt
        assert list(memory.losses) == (["r0"] if preempt else [])


def test_a_running_request_preempts_to_continue_whatever_the_policy_does_with_newcomers() -> None:
    first, last = state(0, RT, 9, cached=8), state(1, BE, 8, cached=8)
    _, memory = memory_with([first, last], 4, new_requests_preempt=False)
    assert memory.reserve(first, 1)
    assert list(memory.losses) == ["r1"]
    assert not memory.reserve(last, 1), "it lost its memory in this very step"


def test_what_others_lost_memory_for_cannot_be_given_back() -> None:
    first, last = state(0, RT, 9, cached=8), state(1, BE, 8, cached=8)
    _, memory = memory_with([first, last], 4)
    assert memory.reserve(first, 1)
    assert not memory.may_cancel(first)


# Any sequence


@st.composite
def populations(draw: st.DrawFn) -> tuple[list[RequestState], int]:
    states = []
    for index in range(draw(st.integers(1, 7))):
        length = draw(st.integers(1, 20))
        cached = draw(st.integers(0, length - 1))
        states.append(state(index, draw(st.sampled_from([RT, BE])), length, cached))
    held = sum(-(-s.num_computed_tokens // SIZE) for s in states)
    return states, max(1, held + draw(st.integers(0, 6)))


@given(populations(), st.booleans(), st.data())
def test_any_sequence_keeps_the_books(
    population: tuple[list[RequestState], int], preempt: bool, data: st.DataObject
) -> None:
    """Who is granted gets all it asked for, from higher ranks that are not in the step."""
    states, total = population
    kv, memory = memory_with(states, total, new_requests_preempt=preempt)
    by_name = {s.request_id: s for s in states}
    untouched = list(states)
    while untouched:
        if memory.granted and data.draw(st.integers(0, 3)) == 0:
            name = data.draw(st.sampled_from(sorted(memory.granted)))
            losses = copy.deepcopy(memory.losses)
            if memory.may_cancel(by_name[name]):
                memory.cancel(by_name[name])
                assert name not in memory.granted
                assert kv.num_tokens(name) == by_name[name].num_computed_tokens
            assert memory.losses == losses
        asking = untouched.pop(data.draw(st.integers(0, len(untouched) - 1)))
        tokens = data.draw(st.integers(1, asking.remaining))
        before, granted = set(memory.losses), set(memory.granted)
        if memory.reserve(asking, tokens):
            assert asking.request_id not in before
            assert len(memory.granted[asking.request_id][1]) == tokens
            for name in memory.losses.keys() - before:
                assert by_name[name].rank > asking.rank, "only from those of higher rank"
                assert name not in granted, "never from one in the step"
                assert asking.num_computed_tokens or preempt
        else:
            assert set(memory.losses) == before, "no victim is preempted in vain"
        assert not memory.granted.keys() & memory.losses.keys()
        kv.check_integrity()
    cuts = kv.take_cuts()
    assert cuts.keys() == memory.losses.keys(), "without host memory, what is taken is lost"
    for name, left in cuts.items():
        assert left < by_name[name].num_computed_tokens and kv.num_tokens(name) == left
    kv.check_integrity()


@settings(max_examples=examples(200, long=2000))
@given(populations())
def test_a_request_that_fits_beside_those_of_lower_rank_gets_memory(
    population: tuple[list[RequestState], int],
) -> None:
    """First in the step: the free blocks, and all that those of higher rank hold, are its own."""
    states, total = population
    for asking in states:
        kv, memory = memory_with(states, total)
        holders = [s for s in states if s.num_computed_tokens and s is not asking]
        above = [s for s in holders if s.rank > asking.rank]
        blocks = kv.num_available_blocks(Side.LEFT) + sum(kv.blocks_of(s.request_id) for s in above)
        if asking.num_computed_tokens == 0:
            expected = -(-asking.remaining // SIZE) <= blocks
        else:
            others = (s for s in holders if s not in above and side_of(s) is not side_of(asking))
            beside = sum(-s.num_computed_tokens % SIZE for s in others)
            room = -asking.num_computed_tokens % SIZE + SIZE * blocks + beside
            expected = asking.remaining <= room
        assert memory.reserve(asking, asking.remaining) is expected
