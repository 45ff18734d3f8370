"""Best-effort requests: which starts first, and for how long requests are overtaken."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.request import Hints, RequestGroup
from bros.scheduler.policies.best_effort_order import BestEffortOrder, TenantOrders
from bros.scheduler.shares import TenantShares
from bros.scheduler.state import Queues, Rank, RequestState
from support.scheduling import request
from support.tier import examples
from support.virtual_time import BE, VirtualRun

WAIT_S = 8.0


@dataclass(frozen=True)
class Arrival:
    """after_s: since the one before. delay_s: how much later it is queued."""

    after_s: float
    delay_s: float
    program: str
    depth: int
    grouped: bool
    tenant: str
    family: int


arrivals = st.lists(
    st.builds(
        Arrival,
        after_s=st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0, 9.0]),
        delay_s=st.sampled_from([0.0, 0.0, 0.25]),
        program=st.sampled_from(["", "a", "b"]),
        depth=st.integers(0, 2),
        grouped=st.booleans(),
        tenant=st.sampled_from(["", "t"]),
        family=st.integers(0, 1),
    ),
    max_size=14,
)


def state_of(index: int, arrival: Arrival, at_s: float, *, precedes: bool = True) -> RequestState:
    group_id = f"{arrival.program}/{arrival.depth}"
    group = RequestGroup(group_id, precedes) if arrival.grouped else None
    hints = Hints(program=arrival.program, depth=arrival.depth, group=group)
    prompt = range(1 + 100 * arrival.family, 80 + 100 * arrival.family)
    asked = request(f"r{index}", prompt, BE, arrival_s=at_s, hints=hints)
    return RequestState(
        dataclasses.replace(asked, tenant=arrival.tenant),
        service_class=BE, slo=asked.slo, now=at_s + arrival.delay_s, arrival_index=index, seed=0,
        max_length=99, eos_token_ids=frozenset(),
    )  # fmt: skip


def placed(
    load: list[Arrival], *, precedes: bool = True, end: bool = False
) -> list[tuple[RequestState, Rank]]:
    """Every request, with its key, in the order in which they came.

    precedes: of all groups.
    end: each one ends as soon as it has its place.
    """
    order, now, found = BestEffortOrder(WAIT_S), 0.0, []
    for index, arrival in enumerate(load):
        now += arrival.after_s
        state = state_of(index, arrival, now or 1e-9, precedes=precedes)
        found.append((state, order.key(state, now + arrival.delay_s)))
        if end:
            order.ended(state, now)
    return found


same_program = st.builds(
    Arrival,
    after_s=st.sampled_from([1.0, 3.0]),
    delay_s=st.just(0.0),
    program=st.sampled_from(["a", "b"]),
    depth=st.just(0),
    grouped=st.booleans(),
    tenant=st.just(""),
    family=st.just(0),
)


@given(load=arrivals | st.lists(same_program, min_size=4, max_size=8))
@settings(max_examples=examples(150, long=3000))
def test_no_request_is_overtaken_by_one_that_comes_much_later(load: list[Arrival]) -> None:
    for (first, key), (later, later_key) in itertools.combinations(placed(load), 2):
        assert key != later_key
        if later.record.arrival_s > first.record.arrival_s + WAIT_S + 1e-6:
            assert key < later_key


@given(load=arrivals)
def test_no_request_is_overtaken_by_one_without_program_group_or_cached_prefix(
    load: list[Arrival],
) -> None:
    """Arrival is the order of all that have nothing to do with each other."""
    plain = [
        dataclasses.replace(arrival, program=f"p{index}", grouped=False)
        for index, arrival in enumerate(load)
    ]
    keys = [key for _, key in placed(plain)]
    assert keys == sorted(keys)


@given(load=arrivals)
def test_groups_before_values_for_throughput_have_the_places_of_their_programs(
    load: list[Arrival],
) -> None:
    alone = [dataclasses.replace(arrival, grouped=False) for arrival in load]
    keys = [key for _, key in placed(load, precedes=False)]
    assert keys == [key for _, key in placed(alone)]


@given(load=arrivals, data=st.data())
def test_a_preempted_request_gets_its_place_back_or_a_better_one(
    load: list[Arrival], data: st.DataObject
) -> None:
    """It started and lost its memory: it still came when it came."""
    order, now = BestEffortOrder(WAIT_S), 0.0
    states = []
    for index, arrival in enumerate(load):
        now += arrival.after_s
        states.append(state_of(index, arrival, now or 1e-9))
        order.key(states[-1], now)
    for state in states:
        again = order.key(state, now + data.draw(st.sampled_from([0.0, 1.0, 20.0])))
        assert again[0] <= state.record.arrival_s


@given(
    load=arrivals,
    size=st.integers(2, 6),
    within_s=st.sampled_from([0.0, 1.0, 3.9]),
    began=st.booleans(),
)
def test_a_group_is_next_to_each_other(
    load: list[Arrival], size: int, within_s: float, began: bool
) -> None:
    """As long as it comes within half of the time; whatever else comes meanwhile."""
    member = Arrival(within_s / size, 0.0, "map", 1, True, "", 0)
    plain = dataclasses.replace(member, grouped=False)
    others = [
        dataclasses.replace(
            arrival, after_s=0.0, program=arrival.program + "x" if arrival.grouped else "map",
            tenant="",
        )
        for arrival in load
    ]  # fmt: skip
    mixed = [plain, dataclasses.replace(member, after_s=4.05)] if began else [member]
    for index in range(size - 1):
        mixed += [*others[index::size], member]
    order = [state.request.hints for state, _ in sorted(placed(mixed), key=lambda each: each[1])]
    places = [index for index, hints in enumerate(order) if hints.program == "map" and hints.group]
    assert places == list(range(places[0], places[0] + size))


@pytest.mark.parametrize(("later_s", "first"), [(3.9, "group"), (4.1, "plain")])
def test_a_group_counts_as_half_of_the_time_older(later_s: float, first: str) -> None:
    plain = Arrival(1.0, 0.0, "plain", 0, False, "", 0)
    group = Arrival(later_s, 0.0, "group", 0, True, "", 0)
    found = sorted(placed([plain, group]), key=lambda each: each[1])
    assert found[0][0].request.hints.program == first


@given(gaps=st.lists(st.floats(0.0, 1.5 * WAIT_S), min_size=1, max_size=10), grouped=st.booleans())
def test_a_program_keeps_its_place_as_long_as_its_requests_come(
    gaps: list[float], grouped: bool
) -> None:
    """As its first request, but never more than WAIT_S before the own arrival; anew after a gap."""
    calls = [Arrival(gap, 0.0, "p", 0, grouped, "", 0) for gap in gaps]
    first = group = last = None
    for state, key in placed(calls, end=True):
        own = state.record.arrival_s
        if first is None or last is None or own - last > WAIT_S:
            first = own
        if group is None or last is None or own - last > WAIT_S / 2:
            group = own
        last = own
        expected = max(first, own - WAIT_S)
        if grouped:
            expected = min(expected, max(group, own - WAIT_S / 2) - WAIT_S / 2)
        assert key[0] == pytest.approx(expected)


@given(
    calls=st.lists(st.tuples(st.floats(0.0, 3 * WAIT_S), st.floats(0.0, 3 * WAIT_S)), max_size=6),
    grouped=st.booleans(),
)
def test_a_program_keeps_its_place_while_a_call_of_it_runs(
    calls: list[tuple[float, float]], grouped: bool
) -> None:
    """calls: (seconds after the one before has ended, seconds that it takes), one at a time. What
    other programs do meanwhile changes nothing."""
    order, now, first, ended = BestEffortOrder(WAIT_S), 1.0, None, -math.inf
    for index, (after_s, takes_s) in enumerate(calls):
        now += after_s
        state = state_of(2 * index, Arrival(0.0, 0.0, "p", 0, grouped, "", 0), now)
        key = order.key(state, now)
        if first is None or now - ended > WAIT_S:
            first = now
        if not grouped:
            assert key[0] == pytest.approx(max(first, now - WAIT_S))
        now += takes_s / 2
        other = state_of(2 * index + 1, Arrival(0.0, 0.0, "other", 0, grouped, "", 0), now)
        order.key(other, now)
        order.ended(other, now)
        now += takes_s / 2
        order.ended(state, now)
        order.ended(state, now)  # at most once
        ended = now


# On the engine's clock


def start_order(run: VirtualRun) -> list[str]:
    run.drain()
    return list(run.first_run)


def submit(run: VirtualRun, name: str, hints: Hints, **options: object) -> None:
    run.submit(name, 70, BE, salt=len(run.requests) * 90, max_tokens=1, hints=hints, **options)  # type: ignore[arg-type]


def test_what_was_begun_is_finished_before_others_begin() -> None:
    run = VirtualRun(max_num_seqs=1)
    for number in range(3):
        submit(run, f"{number}.0", Hints(program=f"p{number}"))
    run.now = 1.0
    for number in (2, 0, 1):
        submit(run, f"{number}.1", Hints(program=f"p{number}", depth=1))
    assert start_order(run) == ["0.1", "0.0", "1.1", "1.0", "2.1", "2.0"]


def test_what_a_call_waits_for_together_comes_first_and_together() -> None:
    run = VirtualRun(max_num_seqs=1)
    submit(run, "plain", Hints())
    for number in range(3):
        submit(run, f"other{number}", Hints(program=f"p{number}"))
        submit(run, f"map{number}", Hints(program="map", group=RequestGroup("map/1")))
    assert start_order(run) == ["map0", "map1", "map2", "plain", "other0", "other1", "other2"]


def test_programs_of_the_same_name_are_not_the_same_for_two_tenants() -> None:
    order = TenantOrders(lambda: BestEffortOrder(WAIT_S), TenantShares({}), lambda state: 1.0)
    first = Arrival(0.0, 0.0, "p", 0, False, "a", 0)
    order.key(state_of(0, first, 1.0), 1.0)
    same, other = (
        order.key(state_of(index, dataclasses.replace(first, tenant=tenant), 2.0), 2.0)
        for index, tenant in ((1, "a"), (2, "b"))
    )
    assert (same[:2], other[:2]) == ((0, 1.0), (1, 2.0))


@given(load=arrivals)
def test_tenants_take_turns_and_each_keeps_its_own_order(load: list[Arrival]) -> None:
    """Each prompt costs the same, so among tenants that still wait none is two ahead."""
    shares, queues, now = TenantShares({}), Queues(), 0.0
    order = TenantOrders(lambda: BestEffortOrder(WAIT_S), shares, lambda state: 1.0)
    for index, arrival in enumerate(load):
        now += arrival.after_s
        state = state_of(index, arrival, now or 1e-9)
        state.queue_key = (1.0, *order.key(state, now))
        queues.enqueue(state)
    first = list(order.first(queues, 0, len(load), now))
    own = {tenant: [s for s in first if s.request.tenant == tenant] for tenant in ("", "t")}
    assert sorted(s.request_id for s in first) == sorted(s.request_id for s in queues)
    for states in own.values():
        assert states == sorted(states, key=lambda state: state.queue_key)
    turns = 2 * min(len(states) for states in own.values())
    for count in range(turns + 1):
        some = [state.request.tenant for state in first[:count]]
        assert abs(some.count("") - some.count("t")) <= 1


def test_groups_that_never_end_starve_no_other() -> None:
    run = VirtualRun(max_num_seqs=1, be_max_wait=2.0, max_queue=10**6)
    submit(run, "other", Hints())
    began = run.now
    for number in itertools.count():
        if "other" in run.first_run:
            break
        for copy in range(2):
            submit(
                run,
                f"{number}-{copy}",
                Hints(program=f"p{number}", depth=1, group=RequestGroup(f"p{number}")),
            )
        run.step()
        assert run.now < 30.0, "starved"
    overtook = [run.requests[name].arrival_s for name in list(run.first_run)[:-1]]
    assert len(overtook) > 5, "they do go first for a while"
    assert max(overtook) <= began + 2.0


def test_a_map_over_one_long_prefix_computes_it_once() -> None:
    """All of a stage beside other programs, and requests that came before it and start after it."""
    run = VirtualRun(max_num_seqs=40, prefix_cache="class-aware", max_batch_tokens=48)

    def submit_alike(name: str, hints: Hints) -> None:
        prompt = [*range(1, 65), 500 + len(run.requests), 700]
        asked = request(name, prompt, BE, max_tokens=4, hints=hints, ignore_eos=True)
        run.requests[name], run.token_times[name] = asked, []
        run.scheduler.submit(asked, run.now)

    submit_alike("before", Hints(program="early"))
    for number in range(16):
        submit_alike(
            f"map{number}", Hints(program="map", depth=number % 3, group=RequestGroup("map"))
        )
        submit(run, f"other{number}", Hints(program=f"p{number}"))
    run.drain()
    alike = [
        chunk for plan in run.plans for chunk in plan.chunks
        if chunk.request_id.startswith(("before", "map")) and chunk.start < 66
    ]  # fmt: skip
    assert sum(len(chunk.token_ids) for chunk in alike) == 64 + 17 * 2
    order = list(run.first_run)
    members = [order.index(f"map{number}") for number in range(16)]
    rest = sorted(members)[1:]
    assert rest == list(range(rest[0], rest[0] + 15)), "one after the other, once it is there"
    assert order.index("before") > rest[-1]
