"""The completion time that is predicted for a program when it is submitted, and the actual one.

Programs of four kinds run in sessions on a simulated engine in virtual time, in a random order,
alone and beside requests of others.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest

from bros.core.config import EngineConfig
from bros.core.request import SamplingParams
from bros.scheduler.cost_model import CostModel
from bros.semantic.schema import Perf
from bros.simulator.fleet import fleet_config
from bros.simulator.program_simulation import (
    Answers,
    byte_tokenizer,
    program_server,
    random_prompt,
)
from bros.simulator.programs import (
    BE,
    RT,
    SMALL_PROGRAMS,
    Program,
    ServiceEnd,
    Texts,
    fixed_length,
)
from bros.simulator.simulation import Device, Disturbance
from bros.simulator.virtual_loop import LoopClock, run_virtual

# A small model on two cores: computing a prompt token takes as long as 1/30 of a decode step.
STRAIGHT = CostModel(constant_s=0.029, token_s=1e-3, sample_s=1e-4, pair_s=4e-7, context_s=2.5e-6)
# The first rows of a step cost three times as much as later ones, as measured with AVX2.
BENT = CostModel(
    constant_s=0.0234, token_s=0.0033, sample_s=8e-4, pair_s=9e-7, context_s=6e-8,
    unique_context_s=4.5e-6, hinges=((4, -0.00205),),
)  # fmt: skip
CONFIG = fleet_config(EngineConfig(policy="bros"))
TOKENIZER = byte_tokenizer()

FIRST = 2
"""Programs of each kind that are not judged: nothing is known about their functions yet."""
JUDGED = 8


async def nothing(end: ServiceEnd, rng: random.Random) -> None:
    """No load of others."""


async def chats(end: ServiceEnd, rng: random.Random) -> None:
    """Short real-time requests, two in flight on average."""
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(rng.expovariate(0.5))
            prompt = random_prompt(rng, TOKENIZER, rng.randrange(20, 120))
            sampling = SamplingParams(**fixed_length(rng.randrange(20, 100)))
            group.create_task(end.complete(prompt, sampling, RT))


async def flood(end: ServiceEnd, rng: random.Random) -> None:
    """16 best-effort requests in flight."""

    async def one() -> None:
        while True:
            prompt = random_prompt(rng, TOKENIZER, rng.randrange(512, 1024))
            await end.complete(prompt, SamplingParams(**fixed_length(rng.randrange(32, 128))), BE)

    await asyncio.gather(*(one() for _ in range(16)))


Load = Callable[[ServiceEnd, random.Random], Awaitable[None]]


async def predicted_and_actual(end: ServiceEnd, program: Program) -> tuple[float, float]:
    """Seconds from the submission of a program to its last value."""
    clock = LoopClock()
    session, began_s = await end.open(), clock.now()
    await end.submit(session, program.calls)
    values = asyncio.gather(*(end.get(session, name, Perf.LATENCY) for name in program.results))
    while not (view := end.view(session)).critical_paths:
        await asyncio.sleep(0)
    predicted_s = max(path.predicted_end_s for path in view.critical_paths) - view.now_s
    await values
    actual_s = clock.now() - began_s
    await end.close(session)
    return predicted_s, actual_s


async def errors(
    load: Load, disturbance: Disturbance, steps: CostModel
) -> Mapping[str, Sequence[float]]:
    """Kind of program -> predicted / actual - 1 of each judged program."""
    found: dict[str, list[float]] = {kind: [] for kind in SMALL_PROGRAMS}
    device = Device(name="d", model="m", weights="w", steps=steps, kv_blocks=4096)
    async with program_server(
        CONFIG, device, TOKENIZER, Answers(TOKENIZER), disturbance=disturbance
    ) as server:
        others = asyncio.ensure_future(load(server.end, random.Random(1)))
        await asyncio.sleep(5.0)
        rng = random.Random(2)
        for number in range(FIRST + JUDGED):
            for kind in rng.sample(list(SMALL_PROGRAMS), len(SMALL_PROGRAMS)):
                texts = Texts(TOKENIZER, seed=rng.randrange(2**32))
                predicted_s, actual_s = await predicted_and_actual(
                    server.end, SMALL_PROGRAMS[kind](texts)
                )
                if number >= FIRST:
                    found[kind].append(predicted_s / actual_s - 1.0)
        others.cancel()
        await asyncio.gather(others, return_exceptions=True)
    return found


@pytest.mark.parametrize(
    ("load", "steps", "slowdown"),
    [
        (nothing, BENT, 1.0),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (nothing, BENT, 1.5),
                (nothing, STRAIGHT, 1.0),
                (nothing, STRAIGHT, 2.0),
                (nothing, STRAIGHT, 0.5),
                (chats, BENT, 1.0),
                (chats, BENT, 0.7),
                (chats, STRAIGHT, 1.0),
                (chats, STRAIGHT, 2.0),
                (flood, BENT, 1.0),
                (flood, BENT, 0.7),
                (flood, STRAIGHT, 1.0),
            )
        ),
    ],
)
def test_completion_is_predicted(load: Load, steps: CostModel, slowdown: float) -> None:
    """Also where steps take twice as long as the engine's cost model says, or half as long."""
    disturbance = Disturbance(noise=0.05, slowdown=slowdown)
    found = run_virtual(lambda: errors(load, disturbance, steps))
    every = [abs(error) for of_kind in found.values() for error in of_kind]
    # Where others take most of the device, the completion depends on what they will send. Where
    # steps take longer than predicted, they are also cut differently.
    most = 0.1 if load is nothing and slowdown == 1.0 else 0.15
    assert statistics.median(every) <= most, found
