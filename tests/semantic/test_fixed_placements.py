"""The router's placement of small programs against every fixed placement, by brute force."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import string
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bros.core.config import EngineConfig
from bros.core.plan import Chunk
from bros.core.request import EngineRequest, SamplingParams, ServiceClass
from bros.router.client import RouterClient
from bros.router.fleet import Fleet, make_fleet
from bros.router.state import Decision, RouterSettings
from bros.scheduler.cost_model import CostModel
from bros.semantic.schema import CallSpec, Criteria
from bros.simulator.fleet import fleet_config
from bros.simulator.programs import fixed_length
from bros.simulator.simulation import BLOCK_SIZE, Device, device_of, read_profile
from bros.simulator.virtual_loop import LoopClock, run_virtual, virtual_engine
from support.program_engine import TOKENIZER, byte_ids, make_service
from support.programs import DUE_LATER, LATENCY, TENANT, THROUGHPUT, call
from support.tier import by_tier, seed

PROFILES = [Path(__file__).resolve().parents[2] / "profiles"]
A6000 = device_of(read_profile("1x-a6000/llama-7b-fp16", PROFILES), None)
A100 = device_of(read_profile("1x-a100-80g/llama-13b-fp16", PROFILES), None)
FAST = Device(
    name="fast", model="m", weights="w", kv_blocks=4096,
    steps=CostModel(constant_s=0.005, token_s=2e-4, sample_s=0.0, pair_s=0.0, context_s=1e-7),
)  # fmt: skip
"""Steps whose time is nearly proportional to their tokens."""

CONFIG = fleet_config(EngineConfig(policy="bros", max_batch_tokens=2048))
LETTERS = [byte_ids(letter)[0] for letter in string.ascii_lowercase]
RT, BE = ServiceClass.RT, ServiceClass.BE

OTHERS_S = 0.3
"""Other requests have run for so long when the program comes. Engines on a virtual loop
abort no step, so a real-time request that meets a long best-effort prefill waits for it."""

TOLERANCE = 1.05
"""The router may be so much later than the best fixed placement: a split that saves less than
a share of the time to compute the common prefix again is left out, because other requests may come
meanwhile, and it does not know before which of two equal replicas a step ends first."""


@dataclass(frozen=True)
class Maps:
    """Maps over one prefix, and a reduce over them. Lengths are in letters, nearly a token each."""

    count: int
    own: int
    prefix: int = 800
    output: int = 20


@dataclass(frozen=True)
class Other:
    """A request that is on a replica when the program comes. output: 0 if it has ended by then, and
    its prompt is the prefix of the first maps."""

    replica: int
    prompt: int
    output: int
    kind: ServiceClass = RT


@dataclass(frozen=True)
class Case:
    """apart_s: the maps of a group become ready one after another, so many seconds apart."""

    replicas: int
    groups: tuple[Maps, ...]
    others: tuple[Other, ...] = ()
    criteria: Criteria = LATENCY
    device: Device = A6000
    apart_s: float = 0.0

    def specs(self) -> list[CallSpec]:
        found = []
        for g, maps in enumerate(self.groups):
            names = [f"m{g}x{n}" for n in range(maps.count)]
            found += [
                call(
                    f"{letters(maps.prefix, g)} {self._own(maps, name)} {{{{output:{name}}}}}",
                    name="map",
                    sampling=fixed_length(maps.output),
                )
                for name in names
            ]
            inputs = " ".join(f"{{{{{name}}}}}" for name in names)
            found.append(
                call(f"{inputs} {{{{output:all{g}}}}}", name="reduce", sampling=fixed_length(20))
            )
        return found

    def _own(self, maps: Maps, name: str) -> str:
        return f"{{{{of_{name}}}}}" if self.apart_s else letters(maps.own, name)

    async def make_ready(self, give: Callable[[str, str], object]) -> None:
        """Give each map its own text when it is time. give: sets a variable."""
        for n in range(max(maps.count for maps in self.groups) if self.apart_s else 0):
            for g, maps in enumerate(self.groups):
                if n < maps.count:
                    give(f"of_m{g}x{n}", letters(maps.own, f"m{g}x{n}"))
            await asyncio.sleep(self.apart_s)

    def placements(self) -> Iterator[tuple[int, ...]]:
        """Replicas of all calls, but for those that differ in nothing but names: maps of a group
        are alike, and so are replicas without other requests."""
        sizes = [maps.count for maps in self.groups]
        maps = [
            itertools.combinations_with_replacement(range(self.replicas), size) for size in sizes
        ]
        reduces = itertools.product(range(self.replicas), repeat=len(sizes))
        used = {other.replica for other in self.others}
        seen = set()
        for places, ends in itertools.product(itertools.product(*maps), reduces):
            names: dict[int, int] = {}
            for replica in itertools.chain(*places, ends):
                if replica not in used:
                    names.setdefault(replica, len(names))
            named = (
                tuple(
                    tuple(sorted((r in used, names.get(r, r)) for r in group)) for group in places
                ),
                tuple((r in used, names.get(r, r)) for r in ends),
            )
            if named not in seen:
                seen.add(named)
                yield tuple(
                    r for group, end in zip(places, ends, strict=True) for r in (*group, end)
                )


def letters(count: int, key: object) -> str:
    """Text of so many tokens, which shares no block with the text of another key."""
    return "".join(random.Random(repr(key)).choices(string.ascii_lowercase, k=count))


def choose(chunk: Chunk) -> int:
    return LETTERS[zlib.crc32(f"{chunk.request_id} {chunk.start}".encode()) % len(LETTERS)]


class Simulation:
    """A run of a case. placement: replicas of the calls; None for those that the router chooses.

    seconds: from the submission of the program to its last value. places: of its calls.
    """

    def __init__(self, case: Case, placement: Sequence[int] | None = None) -> None:
        self.case = case
        self.placement = placement
        self.seconds = 0.0
        self.places: dict[str, Decision] = {}
        self._fixed: dict[str, int] = {}
        run_virtual(self._run)

    async def _run(self) -> None:
        case = self.case
        fleet = make_fleet("e2", RouterSettings(), block_size=BLOCK_SIZE)
        self._fix(fleet)
        self.client = RouterClient(fleet, LoopClock(), random.Random(0))
        for _ in range(case.replicas):
            self.client.add(
                virtual_engine(CONFIG, case.device, vocab_size=TOKENIZER.vocab_size, choose=choose)
            )
        others = [asyncio.create_task(self._ask(n, o)) for n, o in enumerate(case.others)]
        await asyncio.sleep(OTHERS_S)
        await asyncio.gather(*(o for o, c in zip(others, case.others, strict=True) if not c.output))
        service = make_service(self.client)
        session = service.create(TENANT).id
        requests = [found.request_id for found in service.submit(TENANT, session, case.specs())]
        if self.placement is not None:
            self._fixed |= zip(requests, self.placement, strict=True)
        began = LoopClock().now()
        ends = [f"all{g}" for g in range(len(case.groups))]
        criteria = case.criteria
        await asyncio.gather(
            *(service.get(TENANT, session, end, criteria) for end in ends),
            case.make_ready(lambda name, value: service.set(TENANT, session, name, value)),
        )
        self.seconds = LoopClock().now() - began
        self.places = {request: self.places[request] for request in requests}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await service.delete(TENANT, session)
        await self.client.close()

    def _fix(self, fleet: Fleet) -> None:
        """Let the fleet decide only about requests without a fixed place."""
        route = fleet.route

        def routed(
            requests: Sequence[EngineRequest], now: float, avoid: frozenset[int] = frozenset()
        ) -> list[Decision]:
            free = [request for request in requests if request.request_id not in self._fixed]
            found = route(free, now, avoid) if free else []
            for request in requests:
                if request.request_id in self._fixed:
                    others = frozenset(fleet.replicas) - {self._fixed[request.request_id]}
                    found += route([request], now, others)
            decisions = {decision.request_id: decision for decision in found}
            self.places |= decisions
            return [decisions[request.request_id] for request in requests]

        fleet.route = routed  # type: ignore[method-assign]

    async def _ask(self, number: int, other: Other) -> None:
        self._fixed[f"other{number}"] = other.replica
        text = letters(other.prompt, f"other{number}" if other.output else 0)
        request = EngineRequest(
            request_id=f"other{number}",
            prompt_token_ids=TOKENIZER.encode(text),
            sampling=SamplingParams(**fixed_length(max(1, other.output))),
            service_class=other.kind,
            tenant=TENANT,
            arrival_s=LoopClock().now(),
        )
        async for _ in await self.client.submit(request):
            pass


def lateness(case: Case) -> tuple[float, str]:
    """Completion time by the router relative to the best fixed placement, and what they were."""
    own = Simulation(case)
    fixed = [(Simulation(case, places).seconds, places) for places in case.placements()]
    seconds, places = min(fixed)
    chosen = [(decision.replica, decision.reason) for decision in own.places.values()]
    return (
        own.seconds / seconds,
        f"{own.seconds:.3f} s {chosen}, best of {len(fixed)}: {seconds:.3f} s {places}",
    )


CASES = {
    "one group": Case(2, (Maps(4, own=40),)),
    "much of its own": Case(3, (Maps(5, own=800),), criteria=DUE_LATER),
    "six maps": Case(3, (Maps(6, own=40),), device=A100),
    "two groups": Case(2, (Maps(3, own=40), Maps(3, own=40)), device=FAST),
    "beside a real-time request": Case(3, (Maps(4, own=100),), (Other(0, 1000, 100),)),
    "beside a best-effort request": Case(
        2, (Maps(4, own=300),), (Other(1, 200, 100, BE),), criteria=DUE_LATER
    ),
    "throughput": Case(3, (Maps(5, own=800),), criteria=THROUGHPUT),
    "throughput, two groups": Case(
        2, (Maps(3, own=40), Maps(3, own=40)), criteria=THROUGHPUT, device=FAST
    ),
    "throughput beside a best-effort request": Case(
        2, (Maps(4, own=300),), (Other(1, 200, 100, BE),), criteria=THROUGHPUT
    ),
    "a cached prefix": Case(3, (Maps(3, own=40),), (Other(2, 800, 0),), device=A100),
    "a cached prefix at a busy replica": Case(
        2, (Maps(3, own=40),), (Other(0, 800, 0), Other(0, 1000, 100)), device=FAST
    ),
    "a cached prefix where best-effort prompts wait": Case(
        3,
        (Maps(4, own=20, output=5),),
        (Other(2, 1000, 100, BE), Other(2, 200, 100), Other(2, 800, 0)),
        DUE_LATER,
        FAST,
    ),
    "answers that wait for prompts of another group": Case(
        2,
        (Maps(3, own=100, prefix=400), Maps(4, own=300, output=5)),
        criteria=DUE_LATER,
    ),
    "one of two groups beside real-time requests": Case(
        2,
        (Maps(3, own=40, output=60), Maps(3, own=20)),
        (Other(1, 1000, 20), Other(1, 1000, 100)),
        device=FAST,
    ),
    "one of two groups is split, the one that is placed first": Case(
        2,
        (Maps(3, own=40), Maps(3, own=800, prefix=400, output=5)),
        (Other(0, 800, 0),),
        DUE_LATER,
        FAST,
    ),
}


IN_FAST_TIER = ("one group", "much of its own", "throughput", "a cached prefix at a busy replica")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in IN_FAST_TIER else pytest.mark.long)
        for name, case in CASES.items()
    ],
)
def test_the_router_is_as_early_as_the_best_fixed_placement(case: Case) -> None:
    ratio, what = lateness(case)
    assert ratio <= TOLERANCE, what


def test_every_placement_is_tried_but_those_that_differ_only_in_names() -> None:
    maps = (Maps(2, own=40),)
    assert list(Case(2, maps).placements()) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert len(list(Case(2, maps, (Other(0, 200, 20),)).placements())) == 6


def random_case(rng: random.Random) -> Case:
    replicas, num_groups = rng.choice([2, 3]), rng.choice([1, 1, 2])
    busy = rng.random() < 0.6
    most = 6 if num_groups == 1 and not busy else 4 if replicas == 2 or num_groups == 1 else 3
    groups = [
        Maps(
            rng.randint(3, most),
            own=rng.choice([20, 40, 100, 300, 800]),
            prefix=rng.choice([400, 800]),
            output=rng.choice([5, 20, 60]),
        )
        for _ in range(num_groups)
    ]
    others = []
    if busy:
        if num_groups == 2:
            groups = [replace(maps, count=3) for maps in groups][: 4 - replicas]
        for _ in range(rng.randint(0, 2)):
            where = rng.randrange(replicas)
            others.append(Other(where, rng.choice([200, 1000]), rng.choice([20, 100]),
                                rng.choice([RT, BE])))  # fmt: skip
        if rng.random() < 0.5:
            others.append(Other(rng.randrange(replicas), groups[0].prefix, 0))
    device, criteria = rng.choice([A6000, A100, FAST]), rng.choice([LATENCY, DUE_LATER])
    return Case(replicas, tuple(groups), tuple(others), criteria, device)


def test_it_is_nearly_so_for_programs_of_any_shape() -> None:
    """1.010 on average of 1,000, and 1.18 in the worst; 37 are above 1.05: splits are left out
    where other requests would wait for the common prefix, and best-effort prompts beside real-time
    answers are predicted less well."""
    rng = random.Random(seed(1))
    cases = [random_case(rng) for _ in range(by_tier(fast=3, long=40))]
    found = [(*lateness(case), repr(case)) for case in cases]
    assert statistics.mean(ratio for ratio, _, _ in found) <= TOLERANCE
    worst, what, case = max(found)
    assert worst <= 1.2, (what, case)


def test_members_that_become_ready_one_after_another_need_not_wait_for_each_other() -> None:
    """A member is placed when it is ready. Whatever members that wait for others could gain, a
    fixed placement has without waiting: 1.02 on average of 800, 1.36 in the worst of them."""
    rng = random.Random(seed(2))
    found = []
    for _ in range(by_tier(fast=2, long=40)):
        maps = Maps(
            rng.randint(3, 4),
            own=rng.choice([40, 300, 800]),
            prefix=rng.choice([400, 800]),
            output=rng.choice([5, 20, 60]),
        )
        device, criteria = rng.choice([A6000, A100, FAST]), rng.choice([LATENCY, DUE_LATER])
        apart_s = rng.choice([0.01, 0.05, 0.2, 0.5])
        case = Case(rng.choice([2, 3]), (maps,), (), criteria, device, apart_s)
        found.append(lateness(case))
    assert statistics.mean(ratio for ratio, _ in found) <= TOLERANCE
    worst, what = max(found)
    assert worst <= 1.5, what
