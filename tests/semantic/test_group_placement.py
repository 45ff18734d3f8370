"""Task groups of sessions behind a router: decided on as one, and placed where it is cheapest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

import pytest

from bros.core.config import EngineConfig
from bros.core.request import EngineRequest
from bros.router.client import RouterClient
from bros.router.fleet import make_fleet
from bros.router.state import Decision, RouterSettings
from bros.scheduler.cost_model import CostModel
from bros.semantic.core.nodes import LlmCall
from bros.semantic.core.session import SessionStateMachine
from bros.semantic.schema import CallSpec, Criteria, Perf
from bros.semantic.service.live import GROUP_WAIT_S, MAX_TOGETHER, GroupStart
from bros.semantic.transforms import Transforms
from bros.simulator.fleet import fleet_config
from bros.simulator.program_simulation import Answers, byte_tokenizer, program_server
from bros.simulator.programs import (
    Run,
    ServiceEnd,
    Texts,
    map_reduce_questions,
    run_in_session,
)
from bros.simulator.simulation import BLOCK_SIZE, Device
from bros.simulator.virtual_loop import LoopClock, run_virtual, virtual_engine
from support.naive_programs import llm, llm_calls
from support.program_engine import TOKENIZER, ProgramEngine, byte_ids
from support.programs import LATENCY, TENANT, Desk, call, virtually

STEPS = CostModel(constant_s=0.005, token_s=2e-4, sample_s=0.0, pair_s=0.0, context_s=1e-7)
DEVICE = Device(name="d", model="m", weights="w", steps=STEPS, kv_blocks=4096)
CONFIG = fleet_config(EngineConfig(policy="bros", max_batch_tokens=2048))
WORDS = ["fox", "dog", "code", "review", "others", "careful", "written", "brown", "lazy", "jumps"]


class Router:
    """A desk on a router over simulated engines, and the decisions of the router.

    turns: ids of the requests that the router placed together.
    places: request id -> decision.
    """

    def __init__(self, replicas: int = 3, policy: str = "e2") -> None:
        self.turns: list[list[str]] = []
        self.places: dict[str, Decision] = {}
        fleet = make_fleet(policy, RouterSettings(), block_size=BLOCK_SIZE)
        route = fleet.route

        def recorded(
            requests: Sequence[EngineRequest], now: float, avoid: frozenset[int] = frozenset()
        ) -> list[Decision]:
            decisions = route(requests, now, avoid)
            self.turns.append([request.request_id for request in requests])
            self.places |= {decision.request_id: decision for decision in decisions}
            return decisions

        fleet.route = recorded  # type: ignore[method-assign]
        self.client = RouterClient(fleet, LoopClock(), random.Random(0))
        token = byte_ids("x")[0]
        for _ in range(replicas):
            self.client.add(
                virtual_engine(
                    CONFIG, DEVICE, vocab_size=TOKENIZER.vocab_size, choose=lambda chunk: token
                )
            )
        self.desk = Desk(self.client, router=self.client)

    async def close(self) -> None:
        await self.desk.close()
        await self.client.close()


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def maps(prefix: str, own: int, numbers: Iterator[int] | range = range(8)) -> list[CallSpec]:
    """Maps over one prefix, each with so many words of its own."""
    return [
        call(
            f"{prefix} {words(own, 100 + n)} {{{{output:m{n}}}}}",
            name="map",
            sampling={"max_tokens": 8},
        )
        for n in numbers
    ]


def reduce(count: int = 8) -> CallSpec:
    inputs = " ".join(f"{{{{m{n}}}}}" for n in range(count))
    return call(f"{inputs} {{{{output:all}}}}", name="reduce", sampling={"max_tokens": 4})


@pytest.mark.parametrize("perf", [Perf.TTFT, Perf.THROUGHPUT], ids=["real-time", "best-effort"])
@virtually
async def test_maps_over_one_long_prefix_are_one_decision_and_stay_together(perf: Perf) -> None:
    router = Router()
    *mapped, _ = router.desk.submit(*maps(words(800, 0), 4), reduce())
    await router.desk.value("all", Criteria(perf=perf))
    assert router.turns[0] == mapped
    assert {router.places[request].reason for request in mapped} == {"group"}
    assert len({router.places[request].replica for request in mapped}) == 1
    views = [router.desk.view(request) for request in mapped]
    shared = min(view.prompt_tokens for view in views) // BLOCK_SIZE * BLOCK_SIZE
    assert sum(view.cached_tokens for view in views) >= 7 * (shared - 10 * BLOCK_SIZE)
    await router.close()


@virtually
async def test_maps_with_much_of_their_own_are_shared_out_in_one_decision() -> None:
    router = Router()
    *mapped, _ = router.desk.submit(*maps(words(40, 0), 800), reduce())
    await router.desk.value("all", LATENCY)
    assert router.turns[0] == mapped
    replicas = [router.places[request].replica for request in mapped]
    assert sorted(replicas.count(n) for n in range(3)) == [2, 3, 3]
    await router.close()


@pytest.mark.parametrize(
    "pause_s",
    [
        pytest.param(0.0, id="from the start"),
        pytest.param(600.0, id="after a pause", marks=pytest.mark.long),
    ],
)
def test_programs_beside_each_other_do_not_compute_the_prefixes_of_all_everywhere(
    pause_s: float,
) -> None:
    """Programs of 6 maps over 800 tokens, three at once on three replicas: each that is split
    delays the others, and then these would be split as well. Figures of a session's calls."""

    async def run(router: str) -> tuple[int, float]:
        """Cached tokens, and mean seconds of a program."""
        tokenizer = byte_tokenizer()
        texts, slots = Texts(tokenizer, seed=1), asyncio.Semaphore(3)
        sizes = {"document_tokens": 800, "questions": 6, "output_tokens": 32}

        async def one(end: ServiceEnd) -> Run:
            async with slots:
                program = map_reduce_questions(texts, **sizes)
                return await run_in_session(end, program, LoopClock(), delay_s=0.0)

        async with program_server(
            CONFIG, DEVICE, tokenizer, Answers(tokenizer), replicas=3, router=router
        ) as server:
            await one(server.end)
            await asyncio.sleep(pause_s)
            runs = await asyncio.gather(*(one(server.end) for _ in range(9)))
        cached = sum(made["cached_tokens"] for run in runs for made in run.calls)
        return cached, sum(run.seconds for run in runs) / len(runs)

    (ours, ours_s), (by_turns, by_turns_s) = (
        run_virtual(lambda router=router: run(router)) for router in ("e2", "rr")
    )
    assert ours >= 1.5 * by_turns and ours_s <= 0.7 * by_turns_s


@virtually
async def test_who_joins_a_group_later_goes_where_its_prefix_is() -> None:
    router = Router()
    prefix = words(800, 0)
    router.desk.submit(reduce(9), *maps(prefix, 4))
    router.desk.want("all", LATENCY)
    await asyncio.sleep(0.3)
    (late,) = router.desk.submit(*maps(prefix, 4, range(8, 9)))
    await router.desk.value("all", LATENCY)
    homes = {router.places[request].replica for request in router.turns[0]}
    assert len(router.turns[0]) == 8 and homes == {router.places[late].replica}
    await router.close()


@virtually
async def test_members_that_fail_or_are_cancelled_do_not_delay_the_others() -> None:
    """One input does not pass its transform; another call is cancelled before it is submitted."""
    router = Router()
    odd = call(
        "{{doc}} {{output:m0}}",
        name="map",
        values={"doc": "no number"},
        transforms={"doc": "int"},
    )
    _, cancelled, *rest = router.desk.submit(odd, *maps(words(80, 0), 4, range(1, 8)))
    for n in range(8):
        router.desk.want(f"m{n}", LATENCY)
    router.desk.submit(reduce())
    router.desk.want("all", LATENCY)
    router.desk.service.cancel(TENANT, router.desk.session, cancelled)
    for n in range(2, 8):
        assert await router.desk.value(f"m{n}")
    assert {each for turn in router.turns for each in turn} == set(rest)
    await router.close()


def start_of(count: int) -> tuple[GroupStart, list[LlmCall]]:
    core = SessionStateMachine("s", estimate=lambda llm_call: 1.0)
    core.submit([llm(f"c{n}", ("", f"v{n}")) for n in range(count)], 0.0)
    members = list(llm_calls(core).values())
    return GroupStart(members), members


@virtually
async def test_a_start_waits_for_all_that_are_soon_ready_and_goes_in_bounded_turns() -> None:
    count = 2 * MAX_TOGETHER + 5
    (start, members), turn, released = start_of(count), 0, []

    async def member(number: int) -> None:
        await start.ready(members[number])
        released.append((turn, number))

    tasks = [asyncio.create_task(member(number)) for number in range(1, count)]
    await asyncio.sleep(GROUP_WAIT_S / 2)
    assert released == []
    start.leave(members[0])
    start.leave(members[0])
    while not all(task.done() for task in tasks):
        turn += 1
        await asyncio.sleep(0)
    assert [number for _, number in released] == list(range(1, count)), "in their order"
    turns = [at for at, _ in released]
    assert max(turns.count(at) for at in set(turns)) <= MAX_TOGETHER


@virtually
async def test_a_member_waits_for_slow_ones_for_a_short_time_only() -> None:
    """Members that are ready every 20 ms, until all are."""
    start, members = start_of(7)
    loop = asyncio.get_running_loop()
    began_s, released_s = loop.time(), {}

    async def member(number: int) -> None:
        await asyncio.sleep(0.02 * number)
        await start.ready(members[number])
        released_s[number] = loop.time() - began_s

    await asyncio.gather(*(member(number) for number in range(7)))
    expected_s = [0.05, 0.05, 0.05, 0.11, 0.11, 0.11, 0.12]
    assert [released_s[number] for number in range(7)] == pytest.approx(expected_s, abs=0.001)


@pytest.mark.parametrize(
    ("replicas", "policy", "held"),
    [
        pytest.param(0, "", False, id="no router"),
        (3, "e2", True),
        (3, "rr", False),
        (3, "least", False),
        (1, "e2", False),
    ],
)
@virtually
async def test_a_slow_prompt_does_not_hold_up_its_group(
    replicas: int, policy: str, held: bool
) -> None:
    """One of 8 maps has an input with a transform that takes a second. The others are held for a
    moment where they are placed as one."""
    engine = ProgramEngine()
    router = Router(replicas, policy) if replicas else None
    desk = Desk(engine) if router is None else router.desk
    desk.service._runner._prompter._transforms = SlowTransforms()
    slow = call(
        "{{doc}} {{output:m0}}", name="map", values={"doc": "a"}, transforms={"doc": "regex(a)"}
    )
    desk.submit(slow, *maps(words(80, 0), 4, range(1, 8)), reduce())
    desk.want("all", LATENCY)
    await asyncio.sleep(GROUP_WAIT_S + 0.01 if held else 0.001)
    submitted = len(engine.submitted) if router is None else sum(map(len, router.turns))
    assert submitted == 7
    await desk.value("all", LATENCY)
    if router is not None:
        assert not held or len(router.turns[0]) == 7, "in one decision"
        await router.close()
    else:
        await desk.close()


class SlowTransforms:
    """Takes a second for each."""

    async def apply(self, tenant: str, transforms: Transforms, text: str) -> str:
        await asyncio.sleep(1.0)
        return text

    def close(self) -> None:
        pass
