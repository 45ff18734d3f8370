"""What the router believes to be cached, beside what is: reports in any order, twice, or never."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.interfaces import EngineReport
from bros.core.request import EngineRequest, Hints
from bros.router import fleet as router_fleet
from bros.router.fleet import Fleet
from support.routing import BLOCK, ask, cached, fleet_of, send, serve, told
from support.tier import examples

Blocks = tuple[object, ...]


def blocks_of(request: EngineRequest, output: tuple[int, ...] = ()) -> list[Blocks]:
    """Its prefixes of whole blocks, the shortest first, with the salts that may share them."""
    tokens = (*request.prompt_token_ids, *output)
    private = request.hints.private_from
    found: list[Blocks] = []
    key: Blocks = (request.tenant, request.cache_salt)
    for index in range((len(tokens) - 1) // BLOCK):
        if private is not None and index == private // BLOCK:
            key = (*key, request.hints.private_salt)
        key = (*key, tokens[index * BLOCK : (index + 1) * BLOCK])
        found.append(key)
    return found


@dataclass
class NaiveEngine:
    """An engine's cache as a set of prefixes. origin: the request that computed each first."""

    origin: dict[Blocks, str] = field(default_factory=dict)
    depth: dict[Blocks, int] = field(default_factory=dict)
    version: int = 0

    def serve(self, request: EngineRequest, output: tuple[int, ...]) -> None:
        for depth, block in enumerate(blocks_of(request, output), start=1):
            self.origin.setdefault(block, request.request_id)
            self.depth[block] = depth

    def leaves(self) -> list[Blocks]:
        parents = {block[:-1] for block in self.origin}
        parents |= {block[:-2] for block in self.origin}  # a private salt may be between
        return sorted((b for b in self.origin if b not in parents), key=repr)

    def evict(self, block: Blocks) -> EngineReport:
        origin = self.origin.pop(block)
        kept = (self.depth[block] - 1) * BLOCK
        self.version += 1
        return told(self.version, (origin, kept))

    def digest(self) -> EngineReport:
        kept: dict[str, int] = {}
        for block, origin in self.origin.items():
            kept[origin] = max(kept.get(origin, 0), self.depth[block] * BLOCK)
        self.version += 1
        return told(self.version, *kept.items(), full=True)

    def has(self, request: EngineRequest) -> int:
        count = 0
        for block in blocks_of(request):
            if block not in self.origin:
                break
            count += 1
        return count * BLOCK


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5).flatmap(
    lambda digits: st.integers(0, BLOCK - 1).map(
        lambda rest: tuple(d for d in digits for _ in range(BLOCK)) + (7,) * rest
    )
)
hints = st.one_of(
    st.just(Hints()),
    st.builds(
        Hints, private_from=st.integers(0, 12), private_salt=st.sampled_from(["", "mine", "yours"])
    ),
)


def agrees(fleet: Fleet, engines: list[NaiveEngine], seen: list[EngineRequest]) -> None:
    for request in seen:
        naive = {n: engine.has(request) for n, engine in enumerate(engines) if engine.has(request)}
        assert cached(fleet, request) == naive
    fleet.forest.check_integrity()


@settings(max_examples=examples(30, long=3000), deadline=None)
@given(st.data())
def test_the_router_knows_what_is_cached_once_a_digest_is_in(data: st.DataObject) -> None:
    """Whatever it believed before: it forgets what no replica has and no request asked for."""
    fleet = fleet_of(2, "rr", window_s=data.draw(st.sampled_from([180.0, 3.0])))
    engines = [NaiveEngine(), NaiveEngine()]
    seen: list[EngineRequest] = []
    late: list[tuple[int, EngineReport]] = []
    for number in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["serve", "serve", "evict", "late", "digest"]))
        engine = data.draw(st.integers(0, 1))
        if what == "serve":
            salt = data.draw(st.sampled_from(["", "a"]))
            request = ask(f"r{number}", data.draw(prompts), salt=salt, hints=data.draw(hints))
            output = tuple(data.draw(st.lists(st.integers(0, 1), max_size=6)))
            engines[serve(fleet, request, float(number), output)].serve(request, output)
            seen.append(request)
        elif what == "evict" and (leaves := engines[engine].leaves()):
            report = engines[engine].evict(data.draw(st.sampled_from(leaves)))
            fate = data.draw(st.sampled_from(["now", "late", "twice", "lost"]))
            if fate in ("now", "twice"):
                fleet.apply_report(engine, report, float(number))
            if fate in ("late", "twice"):
                late.append((engine, report))
        elif what == "late" and late:
            engine, report = late.pop(data.draw(st.integers(0, len(late) - 1)))
            fleet.apply_report(engine, report, float(number))
        elif what == "digest":
            fleet.apply_report(engine, engines[engine].digest(), float(number))
    for number, engine in enumerate(engines):
        fleet.apply_report(number, engine.digest(), 100.0)
    agrees(fleet, engines, seen)
    for engine, report in late:  # older than the digests
        fleet.apply_report(engine, report, 101.0)
    agrees(fleet, engines, seen)


@settings(max_examples=examples(30, long=3000), deadline=None)
@given(st.data())
def test_requests_may_come_and_end_while_a_digest_is_applied(data: st.DataObject) -> None:
    """What is newer than the digest stays, and what it does not list goes."""
    fleet, engine = fleet_of(1, "rr"), NaiveEngine()
    seen: list[EngineRequest] = []
    opened: list[EngineRequest] = []

    def end(request: EngineRequest, output: tuple[int, ...], now: float) -> None:
        fleet.on_first_token(request.request_id, now)
        fleet.on_finished(request.request_id, output, now)
        engine.serve(request, output)
        seen.append(request)

    def one_event(number: int) -> None:
        if not opened or data.draw(st.booleans()):
            opened.append(ask(f"r{number}", data.draw(prompts), hints=data.draw(hints)))
            send(fleet, opened[-1], float(number))
        else:
            request = opened.pop(data.draw(st.integers(0, len(opened) - 1)))
            output = data.draw(st.lists(st.integers(0, 1), max_size=6))
            end(request, tuple(output), float(number))

    numbers = itertools.count()
    for _ in range(data.draw(st.integers(1, 12))):
        one_event(next(numbers))
    for _ in range(data.draw(st.integers(0, 4))):
        if leaves := engine.leaves():
            engine.evict(data.draw(st.sampled_from(leaves)))  # the notice is lost
    with mock.patch.object(router_fleet, "_SLICE", 1):
        for _ in fleet.applying_report(0, engine.digest(), 50.0):
            if data.draw(st.booleans()):
                one_event(next(numbers))
            fleet.check_integrity()
    for request in opened:
        end(request, (), 60.0)
    agrees(fleet, [engine], seen)


def test_a_digest_brings_back_what_the_router_thought_evicted() -> None:
    """It evicts the least recently used, and engines may not."""
    fleet = fleet_of(1, capacity=8 * BLOCK, window_s=5.0)
    old = ask("old", range(4 * BLOCK + 1))
    serve(fleet, old, 0.0, ())
    for number in range(3):
        serve(fleet, ask(f"{number}", [50 + number] * (2 * BLOCK + 1)), 10.0 + number, ())
    assert cached(fleet, old) == {} and fleet.forest.num_tokens == 6 * BLOCK
    kept = [("old", 4 * BLOCK), ("1", 2 * BLOCK)]
    fleet.apply_report(0, told(1, *kept, full=True), 20.0)
    assert cached(fleet, old) == {0: 4 * BLOCK}
    assert cached(fleet, ask("x", [50] * 9)) == {} and cached(fleet, ask("y", [51] * 9)) == {0: 8}
    fleet.apply_report(0, told(2, ("old", BLOCK)), 20.0)
    assert cached(fleet, old) == {0: BLOCK}
    fleet.forest.check_integrity()


def test_a_digest_that_comes_late_changes_nothing() -> None:
    fleet = fleet_of(1)
    request = ask("a", range(5 * BLOCK + 1))
    serve(fleet, request)
    fleet.apply_report(0, told(7, ("a", 3 * BLOCK), full=True), 0.0)
    for late in (told(5, full=True), told(6, ("a", 5 * BLOCK), full=True), told(4, ("a", BLOCK))):
        fleet.apply_report(0, late, 0.0)
        assert cached(fleet, request) == {0: 3 * BLOCK}


@settings(max_examples=examples(25, long=2000), deadline=None)
@given(st.data())
def test_notices_that_all_come_in_order_need_no_digest(data: st.DataObject) -> None:
    fleet, engines = fleet_of(2, "rr"), [NaiveEngine(), NaiveEngine()]
    seen: list[EngineRequest] = []
    for number in range(data.draw(st.integers(1, 25))):
        engine = data.draw(st.integers(0, 1))
        leaves = engines[engine].leaves()
        if leaves and data.draw(st.booleans()):
            report = engines[engine].evict(data.draw(st.sampled_from(leaves)))
            for _ in range(data.draw(st.integers(1, 2))):
                fleet.apply_report(engine, report, float(number))
        else:
            request = ask(f"r{number}", data.draw(prompts), hints=data.draw(hints))
            engines[serve(fleet, request, float(number), ())].serve(request, ())
            seen.append(request)
        agrees(fleet, engines, seen)


def test_an_older_notice_about_a_request_changes_nothing() -> None:
    fleet = fleet_of(1)
    request = ask("r", range(5 * BLOCK + 1))
    serve(fleet, request)
    fleet.apply_report(0, told(1), 0.0)
    fleet.apply_report(0, told(3, ("r", 4 * BLOCK)), 0.0)
    fleet.apply_report(0, told(2, ("r", 1 * BLOCK)), 0.0)
    assert cached(fleet, request) == {0: 4 * BLOCK}


def test_what_a_request_is_going_to_compute_counts_as_cached() -> None:
    fleet = fleet_of(1)
    request = ask("r", range(5 * BLOCK + 1))
    send(fleet, request)
    fleet.apply_report(0, told(1, full=True), 0.0)
    fleet.apply_report(0, told(2, ("r", 1 * BLOCK)), 0.0)  # so far
    assert cached(fleet, request) == {0: 5 * BLOCK}
    fleet.on_first_token("r", 0.0)
    fleet.apply_report(0, told(3, ("r", 2 * BLOCK)), 0.0)
    assert cached(fleet, request) == {0: 2 * BLOCK}


def test_an_aborted_request_takes_nothing_along_that_was_there_before() -> None:
    fleet = fleet_of(1, window_s=10.0)
    serve(fleet, ask("a", range(5 * BLOCK + 1)))
    send(fleet, ask("b", [*range(5 * BLOCK), 1, 2, 3, 4, 5]), 50.0)
    fleet.on_finished("b", (), 50.0, cached=False)
    assert cached(fleet, ask("c", [*range(5 * BLOCK), 1, 2, 3, 4, 5])) == {0: 5 * BLOCK}


def test_a_request_that_was_not_served_is_no_load() -> None:
    fleet = fleet_of(1)
    for number in range(50):
        send(fleet, ask(f"{number}", [number] * 100), 0.0)
        fleet.on_finished(f"{number}", (), 0.0, cached=False)
    assert fleet.state.assigned_s(fleet.replicas[0]) == pytest.approx(0.0, abs=1e-9)


def test_an_aborted_answer_is_cached_and_counts() -> None:
    fleet = fleet_of(1)
    request = ask("a", range(2 * BLOCK), max_tokens=500)
    send(fleet, request)
    fleet.on_first_token("a", 0.0)
    fleet.on_finished("a", tuple(range(100, 100 + 2 * BLOCK)), 0.0, cached=False)
    again = ask("b", [*range(2 * BLOCK), *range(100, 100 + 2 * BLOCK), 5])
    assert cached(fleet, again) == {0: 3 * BLOCK}
    assert fleet.replicas[0].mean_output < 64


def test_all_of_a_prefill_only_request_is_cached() -> None:
    fleet = fleet_of(1)
    fill = replace(ask("a", range(4 * BLOCK)), prefill_only=True)
    serve(fleet, fill, 0.0, ())
    assert cached(fleet, ask("b", range(4 * BLOCK + 1))) == {0: 4 * BLOCK}


def test_the_load_is_that_of_the_latest_notice() -> None:
    fleet = fleet_of(1)
    fleet.apply_report(0, EngineReport(version=5, running=7, slowdown=1.5), 0.0)
    fleet.apply_report(0, EngineReport(version=4, running=9, slowdown=3.0), 0.0)
    assert (fleet.replicas[0].running, fleet.replicas[0].slowdown) == (7, 1.5)


def test_a_request_that_was_aborted_before_it_began_leaves_nothing() -> None:
    fleet = fleet_of(1)
    other, request = ask("a", [1] * 9), ask("b", [1] * 4 + [2] * 9)
    serve(fleet, other)
    send(fleet, request)
    fleet.on_finished("b", (), 0.0, cached=False)
    assert cached(fleet, request) == {0: BLOCK} and cached(fleet, other) == {0: 2 * BLOCK}


def test_what_a_lost_replica_had_is_nowhere() -> None:
    fleet = fleet_of(2, "rr")
    first, second = ask("a", range(40)), ask("b", range(40))
    assert (serve(fleet, first), send(fleet, second)) == (0, 1)
    assert fleet.remove(1) == ["b"]
    assert cached(fleet, first) == {0: 36}
    assert fleet.remove(0) == []
    assert cached(fleet, first) == {}
    fleet.apply_report(0, told(9, ("a", 8)), 0.0)  # it came too late
    fleet.on_first_token("b", 0.0)
    fleet.on_finished("b", (), 0.0)


def test_what_no_replica_has_accepted_is_cached_nowhere() -> None:
    """However often its client tries again."""
    fleet, prompt = fleet_of(2), [1] * (20 * BLOCK + 1)
    for attempt in range(3):
        first = send(fleet, ask("a", prompt), float(attempt))
        fleet.on_finished("a", (), float(attempt), cached=False)
        fleet.route([ask("a", prompt)], float(attempt), frozenset({first}))
        fleet.on_finished("a", (), float(attempt), cached=False)
        assert not cached(fleet, ask("b", prompt)) and fleet.state.hit_rate == 0.0
        fleet.check_integrity()
    assert fleet.forest.num_nodes == 0
