"""The Parrot paper's settings in simulated time: programs in sessions or call by call.

    python benchmarks/session_paper.py [--figures 11a,14a,...] [--quick] [--json FILE]

Sessions, router, scheduler and KV memory are the real ones; step times come from the analytic
profiles of LLaMA on one A100 or on four A6000; outputs are random words of fixed length. Every
client request has an additional latency of 250 ms (the paper: 200 to 300). The paper's baseline
runs requests of at most 4,096 tokens in total on an engine for a low TPOT ("latency"), or as many
as fit ("throughput"), and does not share prefixes that are known only at run time.

Where a factor differs much from the paper's, the figure is simulated again with the assumptions
changed that make the difference (VARIATIONS).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import chosen, environment
from quick import add_quick
from rich.console import Console
from rich.table import Table

from bros.core.config import EngineConfig
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.semantic.schema import Perf
from bros.simulator.program_simulation import (
    Answers,
    ProgramServer,
    chat_at,
    program_server,
    program_times,
)
from bros.simulator.programs import (
    BE,
    RT,
    ChatRecord,
    Program,
    Run,
    ServiceEnd,
    Texts,
    chain_summary,
    map_reduce_summary,
    multi_agent_coding,
    programs_of,
    question,
    run_by_calls,
    run_in_session,
)
from bros.simulator.simulation import BLOCK_SIZE, Device, device_of, read_profile
from bros.simulator.virtual_loop import LoopClock, run_virtual
from bros.text.tokenizer import Tokenizer
from bros.workload.arrivals import PoissonLoad
from bros.workload.attainment import tpot_of

ROOT = Path(__file__).resolve().parents[1]
DELAY_S = 0.25
CAPACITY_TOKENS = 4096
DOCUMENT_TOKENS = 20_480
LLAMA_13B, LLAMA_7B = "1x-a100-80g/llama-13b-fp16", "1x-a100-80g/llama-7b-fp16"
# Figures 17 and 19 are those of four engines.
ENGINES, ENGINE = 4, "1x-a6000/llama-7b-fp16"
KV_GB_PER_BLOCK = 16 * 2 * 40 * 5120 * 2 / 1e9
"""Of LLaMA-13B in fp16."""
KV_PERIOD_S = 0.1
"""How often the KV memory in use is read, in virtual time."""
# A reader wants a token every 40 ms, as in the paper.
OURS = EngineConfig(
    max_num_seqs=256, max_batch_tokens=2048, max_queue=100_000, slo_ttft=1000, slo_tpot=40
)
THROUGHPUT = dataclasses.replace(OURS, policy="fcfs", prefix_cache="off")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """How a program is run, and on what kind of engine.

    session: the program is submitted to a session, else call by call.
    perf: what the session requests values for.
    grouped: decode rows read shared prefixes once.
    reread: with `grouped`, cost of reading a shared token again, relative to the first time.
    best_effort: class of the calls.
    kv_tokens: size of the KV memory; None: that of the device.
    router: routing policy, if there are several engines.
    extra_s: seconds that every step takes longer than on the device.
    prefill: factor on the time of matrix products of prompt tokens.
    """

    name: str
    config: EngineConfig = OURS
    session: bool = True
    perf: Perf = Perf.LATENCY
    grouped: bool = False
    reread: float = 0.0
    best_effort: bool = False
    kv_tokens: int | None = None
    router: str = "e2"
    extra_s: float = 0.0
    prefill: float = 1.0

    def device(self, profile: str) -> Device:
        """The device that engines run on. profile: its name."""
        blocks = None if self.kv_tokens is None else self.kv_tokens // BLOCK_SIZE
        device = device_of(read_profile(profile, [ROOT / "profiles"]), blocks)
        steps = dataclasses.replace(
            device.steps,
            constant_s=device.steps.constant_s + self.extra_s,
            hinges=tuple((knot, self.prefill * slope) for knot, slope in device.steps.hinges),
        )
        return dataclasses.replace(device, steps=steps)


def limited(request_tokens: int, **changes: Any) -> EngineConfig:
    """The paper's engine for latency, with requests of `request_tokens` tokens each."""
    rows = max(1, CAPACITY_TOKENS // request_tokens)
    return dataclasses.replace(THROUGHPUT, max_num_seqs=rows, **changes)


class World:
    """Shared by all simulations.

    answers: words that are one token in any context, so that calls and sessions have equal prompts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.answers = Answers(tokenizer, r" [a-z]{3,9}")

    def texts(self, seed: int) -> Texts:
        return Texts(self.tokenizer, seed)


async def asked(end: ServiceEnd, program: Program, way: Way) -> Run:
    if way.session:
        return await run_in_session(end, program, LoopClock(), delay_s=DELAY_S, perf=way.perf)
    kind = BE if way.best_effort else RT
    return await run_by_calls(end, program, LoopClock(), delay_s=DELAY_S, service_class=kind)


def simulate(
    world: World,
    way: Way,
    profile: str,
    use: Callable[[ProgramServer], Awaitable[Row]],
    replicas: int = 1,
) -> Row:
    """The result of `use` on a server with so many engines."""
    device = way.device(profile)

    async def main() -> Row:
        async with program_server(
            way.config,
            device,
            world.tokenizer,
            world.answers,
            replicas=replicas,
            router=way.router,
            grouped=way.grouped,
            reread=way.reread,
            seed=1,
        ) as server:
            return await use(server)

    return run_virtual(main)


def at_once(
    world: World, way: Way, profile: str, programs: Sequence[Program], background: float = 0.0
) -> Row:
    """All programs start together, beside background chats at a rate per second."""

    async def use(server: ProgramServer) -> Row:
        peak = PeakKv(server)
        beside = [
            asyncio.create_task(chats_at_rate(server.end, background)),
            asyncio.create_task(peak.watch()),
        ]
        runs = await asyncio.gather(*(asked(server.end, program, way) for program in programs))
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        gaps = [answer.tpot_s for run in runs for answer in run.answers] + [
            tpot_of(call["first_token_s"], call["end_s"], call["output_tokens"])
            for run in runs
            for call in run.calls
        ]
        return {
            "seconds": statistics.mean(run.seconds for run in runs),
            "each_s": [run.seconds for run in runs],
            "decode_s": statistics.mean(gap for gap in gaps if gap is not None),
            "kv_gb": peak.blocks * KV_GB_PER_BLOCK,
        }

    return simulate(world, way, profile, use)


class PeakKv:
    """The most KV blocks that requests have held at once."""

    def __init__(self, server: ProgramServer) -> None:
        self._server = server
        self.blocks = 0

    async def watch(self) -> None:
        """Read the engine's statistics until cancelled."""
        while True:
            stats = await self._server.engine.stats()
            self.blocks = max(self.blocks, stats.kv_blocks_used)
            await asyncio.sleep(KV_PERIOD_S)


async def chats_at_rate(end: ServiceEnd, rate: float) -> None:
    """Background chats with the lengths of LMSYS-Chat, until cancelled."""
    if not rate:
        return
    tasks: list[asyncio.Task[ChatRecord]] = []
    rng, clock = random.Random(2), LoopClock()
    began_s = clock.now()
    try:
        for arrival in PoissonLoad(rate, "lmsys").arrivals(3600.0, seed=3):
            prompt = [rng.randrange(1000, 30_000) for _ in range(arrival.size.prompt_tokens)]
            wait_s = max(0.0, began_s + arrival.time_s - clock.now())
            await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(chat_at(end, 0.0, prompt, arrival.size.output_tokens)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Measure:
    """What a figure compares: the field `key` of its rows, times `scale` in `unit`."""

    key: str
    unit: str
    scale: float = 1.0


SECONDS = Measure("seconds", "s")
PER_TOKEN = Measure("per_token_s", "ms per token", 1e3)
KV_MEMORY = Measure("kv_gb", "GB")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the paper.

    x: values of the varied parameter.
    ways: returns the ways to compare for a value, ours first.
    paper: way -> its value relative to the paper's system, by x; None where the paper has none.
    measure: what is compared.
    """

    title: str
    x_label: str
    x: Sequence[float]
    ways: Callable[[float], Sequence[Way]]
    run: Callable[[World, Way, float], Row]
    paper: Mapping[str, Sequence[float | None]]
    measure: Measure = SECONDS


LATENCY, MANY = "by calls, latency", "by calls, throughput"
NOT_SHARED = "session, no sharing"
# For requests of different lengths, the KV memory limits the tokens instead.
SMALL = Way(LATENCY, THROUGHPUT, session=False, kv_tokens=CAPACITY_TOKENS)


def ours_and_latency(request_tokens: int) -> Sequence[Way]:
    return (Way("session", grouped=True), Way(LATENCY, limited(request_tokens), session=False))


def chain(
    world: World, way: Way, *, chunk: int, output: int, apps: int = 1, rate: float = 0.0
) -> Row:
    programs = [
        chain_summary(
            world.texts(seed),
            chunks=DOCUMENT_TOKENS // chunk,
            chunk_tokens=chunk,
            output_tokens=output,
        )
        for seed in range(apps)
    ]
    return at_once(world, way, LLAMA_13B, programs, rate)


def map_reduce(world: World, way: Way, *, chunk: int, output: int) -> Row:
    program = map_reduce_summary(
        world.texts(0),
        chunks=DOCUMENT_TOKENS // chunk,
        chunk_tokens=chunk,
        output_tokens=output,
    )
    return at_once(world, way, LLAMA_13B, [program])


def coding(world: World, way: Way, files: float) -> Row:
    program = multi_agent_coding(
        world.texts(0), files=int(files), rounds=3, code_tokens=300, comment_tokens=100
    )
    return at_once(world, way, LLAMA_13B, [program])


def copilot(world: World, way: Way, batch: float, output: int | None = None) -> Row:
    """The paper's Bing Copilot: a system prompt of 6,000 tokens, 180 to 800 tokens each."""
    texts, rng = world.texts(0), random.Random(5)
    system = texts.words(6000)
    programs = [
        question(texts, system, question_tokens=40, output_tokens=output or rng.randint(180, 800))
        for _ in range(int(batch))
    ]
    return at_once(world, way, LLAMA_7B, programs)


def copilot_per_token(world: World, way: Way, batch: int, output: float) -> Row:
    row = copilot(world, way, batch, int(output))
    return {**row, "per_token_s": row["seconds"] / output}


def sharing_ways(_: float) -> Sequence[Way]:
    cached = dataclasses.replace(OURS, policy="fcfs")
    return (
        Way("session", grouped=True),
        Way("with sharing, read by every row", cached, session=False),
        Way("without sharing", THROUGHPUT, session=False),
    )


def coding_ways(_: float) -> Sequence[Way]:
    # A coder's or reviewer's request has about 1,500 to 6,000 tokens: two at a time.
    return (
        Way("session", grouped=True),
        Way("session, read by every row"),
        Way(NOT_SHARED, dataclasses.replace(OURS, prefix_cache="off")),
        Way(MANY, THROUGHPUT, session=False),
        Way(LATENCY, limited(2048), session=False),
    )


FIGURES: Mapping[str, Figure] = {
    "11a": Figure(
        "chain summary, chunks of 1,024",
        "output tokens",
        (25, 50, 75, 100),
        lambda x: ours_and_latency(1200),
        lambda world, way, x: chain(world, way, chunk=1024, output=int(x)),
        {LATENCY: (1.38, 1.21, 1.14, 1.11)},
    ),
    "11b": Figure(
        "chain summary, 50 tokens each",
        "tokens per chunk",
        (512, 1024, 1536, 2048),
        lambda x: ours_and_latency(int(x) + 150),
        lambda world, way, x: chain(world, way, chunk=int(x), output=50),
        {LATENCY: (1.21, 1.21, 1.20, 1.19)},
    ),
    "12a": Figure(
        "chain summary beside chats",
        "chats per second",
        (0, 0.5, 1, 1.5, 2),
        lambda x: (Way("session", grouped=True), SMALL),
        lambda world, way, x: chain(world, way, chunk=1024, output=50, rate=x),
        {LATENCY: (1.21, 1.19, 1.31, 1.79, 2.38)},
    ),
    "12b": Figure(
        "chain summaries at once",
        "programs",
        (10, 15, 20, 25),
        lambda x: ours_and_latency(1200),
        lambda world, way, x: chain(world, way, chunk=1024, output=50, apps=int(x)),
        {LATENCY: (1.38, 1.52, 1.63, 1.68)},
    ),
    "14a": Figure(
        "map-reduce summary, chunks of 1,024",
        "output tokens",
        (25, 50, 75, 100),
        lambda x: ours_and_latency(1100),
        lambda world, way, x: map_reduce(world, way, chunk=1024, output=int(x)),
        {LATENCY: (1.70, 2.04, 2.22, 2.37)},
    ),
    "14b": Figure(
        "map-reduce summary, 50 tokens each",
        "tokens per chunk",
        (512, 1024, 1536, 2048),
        lambda x: ours_and_latency(int(x) + 80),
        lambda world, way, x: map_reduce(world, way, chunk=int(x), output=50),
        {LATENCY: (1.96, 2.07, 2.07, 2.16)},
    ),
    "15": Figure(
        "copilot, system prompt of 6,000 tokens",
        "requests at once",
        (8, 16, 32, 64),
        sharing_ways,
        copilot,
        {
            "with sharing, read by every row": (1.1, 1.3, 1.4, 1.7),
            "without sharing": (1.8, 2.4, None, None),
        },
    ),
    "16a": Figure(
        "copilot, 32 requests at once",
        "output tokens",
        (200, 400, 600, 800),
        lambda x: sharing_ways(x)[:2],
        lambda world, way, x: copilot_per_token(world, way, 32, x),
        {"with sharing, read by every row": (1.44, 1.53, 1.56, 1.58)},
        PER_TOKEN,
    ),
    "16b": Figure(
        "copilot, 64 requests at once",
        "output tokens",
        (100, 200, 300, 400, 480),
        lambda x: sharing_ways(x)[:2],
        lambda world, way, x: copilot_per_token(world, way, 64, x),
        {"with sharing, read by every row": (1.44, 1.64, 1.74, 1.81, 1.84)},
        PER_TOKEN,
    ),
    "18": Figure(
        "multi-agent coding, 3 rounds",
        "files",
        (4, 8, 12, 16),
        coding_ways,
        coding,
        {
            "session, read by every row": (1.00, 1.04, 1.14, 1.16),
            NOT_SHARED: (1.22, 1.61, 1.88, 2.35),
            MANY: (1.27, 1.58, 2.03, 2.45),
            LATENCY: (3.0, 4.9, 7.19, 11.7),
        },
    ),
    "18b": Figure(
        "multi-agent coding, KV memory in use at most, of 51.3 GB",
        "files",
        (4, 8, 12, 16),
        lambda x: [way for way in coding_ways(x) if way.name in ("session", NOT_SHARED)],
        coding,
        {},
        KV_MEMORY,
    ),
}

# ---- What makes the factors that differ much from the paper's.


@dataclass(frozen=True, slots=True)
class Variation:
    """A figure with other assumptions.

    title: what is compared with the session, and the assumptions.
    ours, theirs: the session and what it is compared with; None: the figure's calls for latency.
    """

    title: str
    ours: Way
    theirs: Way | None = None


QUARTER = 0.25
"""Cost of reading a prefix again, relative to the first time. In the paper, steps of 32 rows that
each read 6,000 tokens take 1.44 to 1.58 times the 40 ms of those that read them once (figure 16a):
0.6 to 0.75 ms more for each further row, where the device's memory bandwidth makes it 2.6 ms."""

SLOWER_S = 0.012
"""Makes the simulated 28 ms per token at 32 rows the paper's 40 ms (figure 16a)."""

ROOMY_TOKENS = 1_000_000
"""KV memory for all calls of a program, shared or not."""

SESSION = Way("session", grouped=True)
LOOSE = dataclasses.replace(OURS, slo_tpot=1000)
FEW = dataclasses.replace(OURS, max_num_seqs=limited(1200).max_num_seqs)
READ_AGAIN = Way(
    "calls", dataclasses.replace(OURS, policy="fcfs"), session=False, grouped=True, reread=QUARTER
)


def elsewhere(way: Way) -> Way:
    """The same way with room for all KV, twice as fast prefill and slower steps."""
    return dataclasses.replace(way, kv_tokens=ROOMY_TOKENS, prefill=0.5, extra_s=SLOWER_S)


MAP_REDUCE_VARIATIONS = (
    Variation("by calls on the session's engine", SESSION, Way("calls", session=False)),
    Variation(
        "by calls, latency; the objective of TPOT is 1 s",
        Way("session", LOOSE, grouped=True),
    ),
    Variation(
        "by calls, latency; values requested for throughput",
        dataclasses.replace(SESSION, perf=Perf.THROUGHPUT),
    ),
)
COPILOT_VARIATIONS = (
    Variation("read by every row, again at a quarter of the cost", SESSION, READ_AGAIN),
    Variation(
        "the same, and steps are 12 ms longer",
        dataclasses.replace(SESSION, config=LOOSE, extra_s=SLOWER_S),
        dataclasses.replace(READ_AGAIN, extra_s=SLOWER_S),
    ),
)

VARIATIONS: Mapping[str, Sequence[Variation]] = {
    "12b": (
        Variation("by calls on the session's engine", SESSION, Way("calls", session=False)),
        Variation("both with at most 4,096 tokens", Way("session", FEW)),
        Variation(
            "the same, values requested for throughput",
            Way("session", FEW, perf=Perf.THROUGHPUT),
        ),
    ),
    "14a": MAP_REDUCE_VARIATIONS,
    "14b": MAP_REDUCE_VARIATIONS,
    "15": COPILOT_VARIATIONS,
    "16a": COPILOT_VARIATIONS,
    "16b": COPILOT_VARIATIONS,
    "18": (
        Variation(
            "read by every row, again at a quarter of the cost",
            SESSION,
            Way("read", grouped=True, reread=QUARTER),
        ),
        Variation(
            "the same, and the objective of TPOT is 1 s",
            Way("session", LOOSE, grouped=True),
            Way("read", LOOSE, grouped=True, reread=QUARTER),
        ),
        Variation(
            "no sharing, first come first served, KV memory for all calls",
            SESSION,
            Way("not shared", THROUGHPUT, kv_tokens=ROOMY_TOKENS),
        ),
        Variation(
            "the same, prefill takes half as long, steps are 12 ms longer",
            elsewhere(Way("session", LOOSE, grouped=True)),
            elsewhere(Way("not shared", THROUGHPUT)),
        ),
        Variation(
            "by calls, latency, one request at a time",
            SESSION,
            Way("calls", limited(CAPACITY_TOKENS), session=False),
        ),
    ),
}
"""By figure."""


# ---- Four engines: figure 17, GPTs applications, and figure 19, chats beside map-reduce programs.


SERVED_S = 30.0
"""How long requests arrive in each run of figure 17."""

OVERLOADED_S = 0.1
"""A rate is sustained if the mean latency per output token is at most this. A backlog that grows
for SERVED_S exceeds it, and higher rates are then not tried."""

RATE_STEP = 1.1
"""The highest sustained rate is found to within this factor."""

GPTS_LITTLE_KV = 12_000
"""Tokens of KV memory of an engine that has no room for all four system prompts beside its rows."""

GPTS_RATES = (0.25, 0.5, 1, 2, 4, 8, 16, 24, 32)
ALL_ROWS = "session, read by every row"
LEAST = "session, to the least loaded engine"
GPTS_WAYS = (
    SESSION,
    Way(ALL_ROWS),
    Way(f"{ALL_ROWS}, again at a quarter of the cost", grouped=True, reread=QUARTER),
    Way(LEAST, grouped=True, router="least"),
    Way(
        f"{LEAST}, read by every row, again at a quarter of the cost",
        grouped=True,
        reread=QUARTER,
        router="least",
    ),
    Way("by calls, no sharing", THROUGHPUT, session=False, router="least"),
)
LITTLE = ", little KV memory"
GPTS_WAYS += tuple(
    dataclasses.replace(GPTS_WAYS[n], name=GPTS_WAYS[n].name + LITTLE, kv_tokens=GPTS_LITTLE_KV)
    for n in (0, 3, 5)
)
GPTS_PAPER = {
    "session": 12.0,
    ALL_ROWS: 5.0,
    LEAST: 3.0,
    "by calls, no sharing": 1.0,
}
"""Sustained rate relative to the baseline; that of Parrot with PagedAttention is 12 / 2.4."""


def gpts_baseline(way: str) -> str:
    """The name of the way that the paper compares with, with as much KV memory."""
    return GPTS_WAYS[5].name + (LITTLE if way.endswith(LITTLE) else "")


def gpts(world: World, way: Way, rate: float, seconds: float) -> Row:
    """Questions to four applications on four engines, as a Poisson process."""
    count = max(4, round(rate * seconds))
    programs = programs_of("gpts", count, world.tokenizer, seed=1)
    times_s = program_times(rate, count, seed=1)

    async def use(server: ProgramServer) -> Row:
        async def one(time_s: float, program: Program) -> float:
            await asyncio.sleep(time_s)
            return (await asked(server.end, program, way)).seconds / program.num_output_tokens

        pairs = zip(times_s, programs, strict=True)
        latencies = await asyncio.gather(*(one(time_s, program) for time_s, program in pairs))
        stats = await server.engine.stats()
        classes = stats.by_class.values()
        cached = sum(each.prefix_tokens for each in classes)
        return {
            "per_token_s": statistics.mean(latencies),
            "cached": cached / sum(each.prompt_tokens for each in classes),
            "requests": count,
        }

    return simulate(world, way, ENGINE, use, ENGINES)


def sweep(world: World, way: Way, seconds: float) -> list[Row]:
    """The rows of all rates up to the first one that is not sustained, and of rates between that
    and the one before, until the highest sustained rate is known to within RATE_STEP."""
    rows: list[Row] = []

    def is_sustained(rate: float) -> bool:
        rows.append({"rate": rate, **gpts(world, way, rate, seconds)})
        return bool(rows[-1]["per_token_s"] <= OVERLOADED_S)

    low = 0.0
    for high in GPTS_RATES:
        if not is_sustained(high):
            break
        low = high
    else:
        return rows
    while low and high / low > RATE_STEP:
        middle = round(math.sqrt(low * high), 2)
        if is_sustained(middle):
            low = middle
        else:
            high = middle
    return sorted(rows, key=lambda row: row["rate"])


def sustained(rows: Sequence[Mapping[str, Any]]) -> float:
    """The highest rate that is sustained; 0 if none is."""
    return max((row["rate"] for row in rows if row["per_token_s"] <= OVERLOADED_S), default=0.0)


WAITED_FOR = "session, a user waits for the programs"
MIXED_WAYS = (
    # The paper's map-reduce programs "prioritize high throughput".
    dataclasses.replace(SESSION, perf=Perf.THROUGHPUT),
    dataclasses.replace(SESSION, name=WAITED_FOR),
    dataclasses.replace(
        SESSION,
        name=f"{WAITED_FOR}, TPOT objective of 80 ms",
        config=dataclasses.replace(OURS, slo_tpot=80),
    ),
    Way(MANY, THROUGHPUT, session=False, router="least"),
    dataclasses.replace(SMALL, router="least"),
)
CHUNKS = 20
LONG = 52
"""Chunks of the documents of figure 19: with 20, as in its figure 14, programs take 9 s here. The
paper's take 23.2 s, so the same ways are also run with documents 2.6 times as long."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A row of figure 19. chunks: of each document."""

    way: Way
    chunks: int = CHUNKS

    @property
    def name(self) -> str:
        if self.chunks == CHUNKS:
            return self.way.name
        return f"{self.way.name}, documents {self.chunks / CHUNKS:g} times as long"


_SLOWER_CHATS = dataclasses.replace(
    MIXED_WAYS[0],
    name="session, TPOT objective of 80 ms",
    config=dataclasses.replace(OURS, slo_tpot=80),
)
MIXES = (
    *map(Mix, MIXED_WAYS),
    *(Mix(way, LONG) for way in (MIXED_WAYS[0], _SLOWER_CHATS, *MIXED_WAYS[3:])),
)
MIXED_S = 60.0
"""How long chats and programs arrive in each run of figure 19."""
MIXED_SEEDS = (3, 4, 5)
"""Of the chats of each run; figures are over all chats and programs of all runs."""

MIXED_PAPER = {
    "session": (149.1, 45.1, 23.2),
    MANY: (184.6, 77.8, 24.5),
    LATENCY: (827.6, 41.4, 86.4),
}


def mixed_paper(name: str) -> tuple[float, float, float] | None:
    """The paper's row of a mix with this name; None if it has none."""
    way = next(mix.way for mix in MIXES if mix.name == name)
    return MIXED_PAPER.get(way.name)


def mixed(world: World, mix: Mix, seconds: float) -> Row:
    """Chats, one per second, beside as many consecutive map-reduce programs as engines."""
    chats: list[ChatRecord] = []
    programs: list[float] = []
    for seed in MIXED_SEEDS:
        found = simulate(world, mix.way, ENGINE, mixed_run(world, mix, seconds, seed), ENGINES)
        chats += found["chats"]
        programs += found["programs"]
    normalized = [(a.last_s - a.asked_s + DELAY_S) / a.tokens for a in chats]
    return {
        "normalized_ms": 1e3 * statistics.mean(normalized),
        "decode_ms": 1e3 * statistics.mean(a.tpot_s for a in chats if a.tpot_s is not None),
        "program_s": statistics.mean(programs),
        "both_met": sum(a.met(OURS.default_slo) is True for a in chats) / len(chats),
        "chats": len(chats),
        "programs": len(programs),
    }


def mixed_run(
    world: World, mix: Mix, seconds: float, seed: int
) -> Callable[[ProgramServer], Awaitable[Row]]:
    """A run that returns the records of the chats, and the seconds of each program."""

    async def use(server: ProgramServer) -> Row:
        end, clock = server.end, LoopClock()
        began_s, chats = clock.now(), []
        programs: list[float] = []
        rng = random.Random(seed)
        for arrival in PoissonLoad(1.0, "lmsys").arrivals(seconds, seed=seed):
            prompt = [rng.randrange(1000, 30_000) for _ in range(arrival.size.prompt_tokens)]
            time_s = arrival.time_s + DELAY_S
            chats.append(chat_at(end, time_s, prompt, arrival.size.output_tokens))

        async def consecutive(user: int) -> None:
            texts = world.texts(user)
            while clock.now() < began_s + seconds:
                program = map_reduce_summary(
                    texts, chunks=mix.chunks, chunk_tokens=1024, output_tokens=50
                )
                programs.append((await asked(end, program, mix.way)).seconds)

        answers, _ = await asyncio.gather(
            asyncio.gather(*chats), asyncio.gather(*map(consecutive, range(ENGINES)))
        )
        return {"chats": answers, "programs": programs}

    return use


def run(names: Sequence[str], console: Console, path: Path | None, seconds: float | None) -> None:
    """Simulate these figures; other figures in the file are kept."""
    files = resolve_model(None, default_cache_dir(), console.print)
    world = World(Tokenizer.load(files.folder))
    found: Row = json.loads(path.read_text()) if path and path.exists() else {"figures": {}}
    found |= {"environment": environment(), "delay_s": DELAY_S}
    for name in names:
        if name == "17":
            rows = {way.name: sweep(world, way, seconds or SERVED_S) for way in GPTS_WAYS}
            found["figures"][name] = rows
            show_gpts(console, rows)
        elif name == "19":
            mixes = {mix.name: mixed(world, mix, seconds or MIXED_S) for mix in MIXES}
            found["figures"][name] = mixes
            show_mixed(console, mixes)
        else:
            found["figures"][name] = simulated(world, FIGURES[name], VARIATIONS.get(name, ()))
            show(console, name, found["figures"][name])
        if path:
            ordered = sorted(found["figures"].items())
            path.write_text(json.dumps({**found, "figures": dict(ordered)}, indent=1) + "\n")


def simulated(world: World, figure: Figure, variations: Sequence[Variation]) -> Row:
    """All rows of a figure and of its variations, as written to the file."""
    rows: dict[str, list[Row]] = {}
    for x in figure.x:
        for way in figure.ways(x):
            rows.setdefault(way.name, []).append(figure.run(world, way, x))
    return {
        "title": figure.title,
        "x_label": figure.x_label,
        "x": list(figure.x),
        "measure": dataclasses.asdict(figure.measure),
        "ways": rows,
        "paper": {way: list(ratios) for way, ratios in figure.paper.items()},
        "variations": [varied(world, figure, variation) for variation in variations],
    }


def varied(world: World, figure: Figure, variation: Variation) -> Row:
    """What the figure compares, of both ways of a variation."""

    def value(way: Way, x: float) -> float:
        found: float = figure.run(world, way, x)[figure.measure.key]
        return found

    def theirs(x: float) -> Way:
        (calls,) = (way for way in figure.ways(x) if way.name == LATENCY)
        return calls

    return {
        "title": variation.title,
        "ours": [value(variation.ours, x) for x in figure.x],
        "theirs": [value(variation.theirs or theirs(x), x) for x in figure.x],
    }


def ratios_of(variation: Mapping[str, Any]) -> list[float]:
    """How many times the session's value the other one is, in a variation of the file."""
    return [a / b for a, b in zip(variation["theirs"], variation["ours"], strict=True)]


def values_of(figure: Mapping[str, Any], way: str) -> list[float]:
    """What a figure of the file shows of a way, in the unit of its measure."""
    measure = Measure(**figure["measure"])
    return [measure.scale * row[measure.key] for row in figure["ways"][way]]


def show(console: Console, name: str, figure: Row) -> None:
    table = Table(f"figure {name}", *(f"{x:g} {figure['x_label']}" for x in figure["x"]))
    ours = values_of(figure, "session")
    for way in figure["ways"]:
        values = values_of(figure, way)
        table.add_row(f"{way}, {figure['measure']['unit']}", *(f"{value:.1f}" for value in values))
        if way == "session":
            continue
        table.add_row("  times ours", *(f"{a / b:.2f}" for a, b in zip(values, ours, strict=True)))
        paper = figure["paper"].get(way)
        if paper:
            table.add_row("  in the paper", *("" if r is None else f"{r:.2f}" for r in paper))
    for variation in figure["variations"]:
        table.add_row(variation["title"], *(f"{ratio:.2f}" for ratio in ratios_of(variation)))
    console.print(table)


def show_gpts(console: Console, figure: Mapping[str, Sequence[Row]]) -> None:
    table = Table("figure 17", "sustained, 1/s", "times baseline", "paper")
    for way, rows in figure.items():
        rate = sustained(rows)
        ratio = rate / sustained(figure[gpts_baseline(way)])
        table.add_row(way, f"{rate:g}", f"{ratio:.1f}", f"{GPTS_PAPER.get(way, '')}")
    console.print(table)


def show_mixed(console: Console, figure: Row) -> None:
    table = Table("figure 19", "chat ms/token", "paper", "decode ms", "paper", "program s", "paper")
    for way, row in figure.items():
        normalized, decode, program = mixed_paper(way) or ("", "", "")
        table.add_row(
            way,
            *(f"{row['normalized_ms']:.0f}", f"{normalized}"),
            *(f"{row['decode_ms']:.1f}", f"{decode}"),
            *(f"{row['program_s']:.1f}", f"{program}"),
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    figures = sorted([*FIGURES, "17", "19"])
    parser.add_argument("--figures", default=",".join(figures))
    parser.add_argument("--json", type=Path, help="output file; its other figures are kept")
    parser.add_argument("--seconds", type=float, help="virtual time of each run of 17 and 19")
    add_quick(parser, figures="11a,19", seconds=5.0)
    arguments = parser.parse_args()
    names = chosen(parser, "--figures", arguments.figures, figures)
    run(names, Console(), arguments.json, arguments.seconds)


if __name__ == "__main__":
    main()
