"""Programs submitted to a session, compared with clients that make every call themselves.

    python benchmarks/session_speed.py [--parts chain,map-reduce,...] [--json FILE]

`bros serve` with the embedded model on this machine, with its default weights unless int4 is named.
Run nothing else on it. Every client request has an additional latency of 250 ms, as over the
Internet; a session needs three of them for any program. All ways run the same prompts and generate
the same number of tokens; each has its own server, and they alternate within a round. Figures are
medians over the rounds, ratios are taken within a round.

chain       A document summarized part by part, with int4 weights. By calls: each waits for the
            previous one and for the network. A call takes two or three times the network latency,
            as the shortest of the Parrot paper (figure 11) does on an A100. (chain-long: half as
            many parts, twice as long.)
map-reduce  Parts summarized in parallel, then the summaries. By calls: all are latency-sensitive,
            on an engine whose batch is limited to nearly the TPOT of a single request.
coding      An architect, 8 coders, 3 rounds of reviews. By calls: best-effort ("flex"), without
            a prefix cache.
chat        16 questions at once with a system prompt of 1,500 tokens. By calls: every row reads its
            KV. (chat-alone: without a prefix cache.)
mixed       Random chats beside consecutive map-reduce programs: attainment of the chats, and the
            slowdown of the programs.
beside      Map-reduce of 8 parts requested with LATENCY, beside 16 best-effort requests in flight
            and beside random chats: as a session, and as real-time and best-effort calls of a
            client on this machine, without network latency; best-effort calls in every third round.
            All ways use one server in turn; no text is used twice.
calibration Programs of four kinds in a random order, alone, beside random chats and beside
            best-effort requests: the completion time that the session's view predicts when the
            program has been submitted, and the actual one. The first programs of each kind are
            shown apart, because nothing is known about their functions yet.
replicas    Map-reduce programs, each over a document of 800 tokens, on three replicas, three
            programs at a time: where the router places their calls and how many tokens are cached
            there, routed by prefix and by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from harness import chosen, environment
from quick import add_quick
from rich.console import Console
from rich.table import Table
from session_clients import HttpEnd

from bros.cli.bench import local_server
from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.request import Slo
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.executor.target import choose_target, find_cuda
from bros.semantic.schema import Perf
from bros.simulator.programs import (
    BE,
    RT,
    SMALL_PROGRAMS,
    ChatRecord,
    Program,
    Run,
    Texts,
    chain_summary,
    fixed_length,
    map_reduce_questions,
    map_reduce_summary,
    multi_agent_coding,
    question,
    run_by_calls,
    run_in_session,
)
from bros.text.tokenizer import Tokenizer
from bros.workload.attainment import tpot_of

DELAY_S = 0.25
SERVER = ("--max-model-len", "4096", "--log-level", "warning")
CLOCK = SystemClock()
LIMITED_ROWS = 2
SYSTEM_TOKENS, CHATS = 1500, 16
CHAT_RATE, MIXED_S = 0.25, 110.0
TTFT_S, TPOT_S = 0.4, 0.2

Ask = Callable[[HttpEnd, Program], Awaitable[Run]]
Row = dict[str, Any]


async def by_session(end: HttpEnd, program: Program) -> Run:
    return await run_in_session(end, program, CLOCK, delay_s=DELAY_S)


async def by_calls(end: HttpEnd, program: Program) -> Run:
    return await run_by_calls(end, program, CLOCK, delay_s=DELAY_S)


async def by_flex_calls(end: HttpEnd, program: Program) -> Run:
    return await run_by_calls(end, program, CLOCK, delay_s=DELAY_S, service_class=BE)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a program. asked: target of its time relative to the first way."""

    name: str
    ask: Ask
    flags: Sequence[str] = ()
    asked: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """programs: returns the concurrent programs, given the texts of a round. ways: ours first."""

    title: str
    programs: Callable[[Texts], list[Program]]
    ways: Sequence[Way]


def chats(texts: Texts) -> list[Program]:
    system = texts.words(SYSTEM_TOKENS)
    return [question(texts, system, question_tokens=20, output_tokens=64) for _ in range(CHATS)]


INT4 = ("--weights", "int4")
SESSION = Way("session", by_session)
PARTS: Mapping[str, Part] = {
    "chain": Part(
        "chain summary, 16 parts of 64 tokens, 10 tokens each, int4",
        lambda texts: [chain_summary(texts, chunks=16, chunk_tokens=64, output_tokens=10)],
        (Way("session", by_session, INT4), Way("by calls", by_calls, INT4, asked=1.3)),
    ),
    "chain-long": Part(
        "chain summary, 8 parts of 128 tokens, 25 tokens each, int4",
        lambda texts: [chain_summary(texts, chunks=8, chunk_tokens=128, output_tokens=25)],
        (Way("session", by_session, INT4), Way("by calls", by_calls, INT4)),
    ),
    "map-reduce": Part(
        "map-reduce summary, 16 parts of 128 tokens, 50 tokens each",
        lambda texts: [small_map_reduce(texts)],
        (
            SESSION,
            Way(
                f"by calls, at most {LIMITED_ROWS} at once",
                by_calls,
                ("--max-num-seqs", str(LIMITED_ROWS)),
                asked=1.7,
            ),
        ),
    ),
    "coding": Part(
        "multi-agent coding, 8 files, 3 rounds",
        lambda texts: [
            multi_agent_coding(texts, files=8, rounds=3, code_tokens=40, comment_tokens=20)
        ],
        (
            SESSION,
            Way("flex calls, no sharing", by_flex_calls, ("--prefix-cache", "off"), asked=2.3),
        ),
    ),
    "chat": Part(
        f"{CHATS} chats after a system prompt of {SYSTEM_TOKENS} tokens, 64 tokens each",
        chats,
        (
            SESSION,
            Way("by calls, read by every row", by_calls, ("--shared-attention", "off")),
        ),
    ),
    "chat-alone": Part(
        "the same chats",
        chats,
        (SESSION, Way("by calls, no sharing", by_calls, ("--prefix-cache", "off"), asked=1.8)),
    ),
}


async def measured(
    part: Part, rounds: int, texts_of: Callable[[int], Texts], report: Callable[[str], None]
) -> list[Row]:
    """Run every way of a part, alternating within each round, after a warm-up program."""
    found: list[Row] = [
        {"way": way.name, "flags": [*SERVER, *way.flags], "asked": way.asked, "runs": []}
        for way in part.ways
    ]
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(client())
        ends = []
        for way in part.ways:
            url = await stack.enter_async_context(local_server((*SERVER, *way.flags)))
            ends.append(HttpEnd(http, url, CLOCK))
            await way.ask(ends[-1], small_chain(texts_of(-1)))
        for turn in range(rounds):
            for way, end, row in zip(part.ways, ends, found, strict=True):
                report(f"{part.title}: {way.name}, round {turn + 1} of {rounds}")
                programs = part.programs(texts_of(turn))
                runs = await asyncio.gather(*(way.ask(end, program) for program in programs))
                row["runs"].append(summary(runs))
                report(f"  {row['runs'][-1]['seconds']:.2f} s")
    return found


def summary(runs: Sequence[Run]) -> Row:
    """The figures of concurrent programs. seconds: their mean. decode_s: mean TPOT of the calls."""
    gaps = [answer.tpot_s for run in runs for answer in run.answers]
    for run in runs:
        for made in run.calls:
            if made["first_token_s"] is not None:
                gaps.append(tpot_of(made["first_token_s"], made["end_s"], made["output_tokens"]))
    return {
        "seconds": statistics.mean(run.seconds for run in runs),
        "decode_s": statistics.mean(gap for gap in gaps if gap is not None),
        "calls": sum(len(run.calls) or len(run.answers) for run in runs),
        "cached_tokens": cached_tokens(runs),
    }


def ratios(rows: Sequence[Row], key: str) -> list[list[float]]:
    """`key` of each way relative to the first one, per round."""
    first = rows[0]["runs"]
    return [
        [run[key] / ours[key] for run, ours in zip(row["runs"], first, strict=True)] for row in rows
    ]


async def mixed(texts_of: Callable[[int], Texts], report: Callable[[str], None]) -> Row:
    """Chats alone, programs alone, and both on one engine, MIXED_S seconds each."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(client())
        url = await stack.enter_async_context(local_server(SERVER))
        end = HttpEnd(http, url, CLOCK)
        await by_session(end, small_map_reduce(texts_of(-1)))
        found: Row = {}
        for name, with_chats, with_programs in (
            ("chats alone", True, False),
            ("programs alone", False, True),
            ("both", True, True),
        ):
            report(f"mixed: {name}, {MIXED_S:.0f} s")
            busy_s, began = await step_seconds(http, url), CLOCK.now()
            chat_task = asyncio.ensure_future(random_chats(end, texts_of(1000), with_chats))
            seconds = await programs_in_turn(end, texts_of, with_programs)
            answers = await chat_task
            found[name] = {
                "seconds": CLOCK.now() - began,
                "engine_busy_s": await step_seconds(http, url) - busy_s,
                "programs_s": seconds,
                "chats": len(answers),
                "ttft_s": [answer.ttft_s for answer in answers],
                "tpot_s": [answer.tpot_s for answer in answers],
                "both_met": sum(map(met, answers)),
            }
        return found


def small_chain(texts: Texts) -> Program:
    return chain_summary(texts, chunks=2, chunk_tokens=64, output_tokens=8)


def small_map_reduce(texts: Texts) -> Program:
    return map_reduce_summary(texts, chunks=16, chunk_tokens=128, output_tokens=50)


async def programs_in_turn(
    end: HttpEnd, texts_of: Callable[[int], Texts], wanted: bool
) -> list[float]:
    """Run programs one after another for MIXED_S; returns their seconds."""
    found: list[float] = []
    until_s = CLOCK.now() + MIXED_S
    while wanted and CLOCK.now() < until_s:
        program = small_map_reduce(texts_of(len(found)))
        found.append((await run_in_session(end, program, CLOCK, delay_s=0.0)).seconds)
    return found


async def random_chats(end: HttpEnd, texts: Texts, wanted: bool) -> list[ChatRecord]:
    """A Poisson process of short questions, the same for every call."""
    rng = random.Random(1)
    tasks: list[asyncio.Task[ChatRecord]] = []
    until_s = CLOCK.now() + MIXED_S
    while wanted:
        await asyncio.sleep(rng.expovariate(CHAT_RATE))
        if CLOCK.now() >= until_s:
            break
        asked = texts.words(rng.randrange(20, 120))
        sampling = fixed_length(rng.randrange(20, 100))
        tasks.append(asyncio.create_task(end.chat(asked, sampling, RT)))
    return list(await asyncio.gather(*tasks))


# ---- Programs beside load of others


FLOOD = 16
CHAT_RATES = (0.5, 2.0)
"""Chats per second: some, and so many that a step nearly always has rows of theirs."""


async def by_nearby_session(end: HttpEnd, program: Program) -> Run:
    return await run_in_session(end, program, CLOCK, delay_s=0.0)


async def by_nearby_calls(end: HttpEnd, program: Program) -> Run:
    return await run_by_calls(end, program, CLOCK, delay_s=0.0)


async def by_nearby_flex_calls(end: HttpEnd, program: Program) -> Run:
    return await run_by_calls(end, program, CLOCK, delay_s=0.0, service_class=BE)


BESIDE: Mapping[str, Ask] = {
    "session": by_nearby_session,
    "real-time calls": by_nearby_calls,
    "best-effort calls": by_nearby_flex_calls,
}


@asynccontextmanager
async def served_end(*flags: str) -> AsyncIterator[HttpEnd]:
    """A new server with these flags beside SERVER."""
    async with client() as http, local_server((*SERVER, *flags)) as url:
        yield HttpEnd(http, url, CLOCK)


async def beside(
    rounds: int, texts_of: Callable[[int], Texts], report: Callable[[str], None]
) -> Row:
    """Load of others -> seconds of the program by way, and how many chats met their objectives."""
    found: Row = {}
    async with served_end() as end:
        await by_nearby_session(end, small_chain(texts_of(-1)))
        for load in BESIDE_LOADS:
            chats: dict[str, list[ChatRecord]] = {name: [] for name in BESIDE}
            seconds: dict[str, list[float]] = {name: [] for name in BESIDE}
            for turn in range(rounds):
                for way, (name, ask) in enumerate(BESIDE.items()):
                    if ask is by_nearby_flex_calls and turn % FLEX_EVERY:
                        continue
                    # Texts of its own: what an earlier way has sent is cached.
                    seed = (turn * len(BESIDE) + way) * len(BESIDE_LOADS)
                    seed += BESIDE_LOADS.index(load)
                    program = map_reduce_summary(
                        texts_of(seed), chunks=8, chunk_tokens=128, output_tokens=50
                    )
                    others = asyncio.ensure_future(load(end, texts_of(1000 + seed), chats[name]))
                    await asyncio.sleep(WARM_UP_S)
                    seconds[name].append((await ask(end, program)).seconds)
                    others.cancel()
                    await asyncio.gather(others, return_exceptions=True)
                    report(f"beside {load.__name__}: {name}, {seconds[name][-1]:.2f} s")
            found[load.__name__] = {
                name: {
                    "seconds": seconds[name],
                    "chats": len(chats[name]),
                    "both_met": sum(map(met, chats[name])),
                }
                for name in BESIDE
            }
    return found


WARM_UP_S = 5.0
FLEX_EVERY = 3
"""Best-effort calls take several times as long as the other ways, and part from them by more: they
run in every so many rounds."""


def met(chat: ChatRecord) -> bool:
    return chat.met(Slo(TTFT_S, TPOT_S)) is True


async def flood(end: HttpEnd, texts: Texts, chats: list[ChatRecord]) -> None:
    """FLOOD best-effort requests in flight until cancelled."""
    rng = random.Random(2)

    async def one() -> None:
        while True:
            asked, sampling = texts.words(rng.randrange(512, 1024)), rng.randrange(32, 128)
            await end.chat(asked, fixed_length(sampling), BE)

    await asyncio.gather(*(one() for _ in range(FLOOD)))


async def steady_chats(
    end: HttpEnd, texts: Texts, chats: list[ChatRecord], rate: float = CHAT_RATES[0]
) -> None:
    """A Poisson process of short questions until cancelled; `chats` gets the complete ones."""
    rng = random.Random(f"{texts.words(4)} {rate}")

    async def one() -> None:
        asked, sampling = texts.words(rng.randrange(20, 120)), rng.randrange(20, 100)
        chats.append(await end.chat(asked, fixed_length(sampling), RT))

    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(rng.expovariate(rate))
            group.create_task(one())


async def busy_chats(end: HttpEnd, texts: Texts, chats: list[ChatRecord]) -> None:
    await steady_chats(end, texts, chats, CHAT_RATES[1])


async def flood_and_chats(end: HttpEnd, texts: Texts, chats: list[ChatRecord]) -> None:
    await asyncio.gather(flood(end, texts, chats), steady_chats(end, texts, chats, CHAT_RATES[1]))


LOADS = (flood, steady_chats)
BESIDE_LOADS = (*LOADS, busy_chats, flood_and_chats)


# ---- Predicted and actual completion of programs


KNOWN_AFTER = 2
"""Programs of a kind whose functions are not known well yet."""


async def calibration(
    rounds: int, texts_of: Callable[[int], Texts], report: Callable[[str], None]
) -> Row:
    """Load of others -> kind of program -> [predicted, actual] seconds of each program."""
    found: Row = {}
    async with served_end() as end:
        rng, seed = random.Random(4), 0
        for load in (nothing, *LOADS):
            times: dict[str, list[list[float]]] = {kind: [] for kind in SMALL_PROGRAMS}
            others = asyncio.ensure_future(load(end, texts_of(2000 + seed), []))
            await asyncio.sleep(WARM_UP_S)
            for _ in range(KNOWN_AFTER + rounds):
                for kind in rng.sample(list(SMALL_PROGRAMS), len(SMALL_PROGRAMS)):
                    seed += 1
                    predicted_s, actual_s = await predicted(
                        end, SMALL_PROGRAMS[kind](texts_of(seed))
                    )
                    times[kind].append([predicted_s, actual_s])
                    report(f"{load.__name__}: {kind}, {predicted_s:.2f} s, was {actual_s:.2f} s")
            others.cancel()
            await asyncio.gather(others, return_exceptions=True)
            found[load.__name__] = times
    return found


async def nothing(end: HttpEnd, texts: Texts, chats: list[ChatRecord]) -> None:
    """No load of others."""


async def predicted(end: HttpEnd, program: Program) -> tuple[float, float]:
    """Seconds of a program from its submission: predicted right after it, and actual."""
    session = await end.open()
    await end.submit(session, program.calls)
    began_s = CLOCK.now()
    values = asyncio.gather(*(end.get(session, name, Perf.LATENCY) for name in program.results))
    while True:
        view = await end.view(session)
        if view["critical_paths"]:
            break
    seen_s = CLOCK.now() - began_s
    left_s = max(path["predicted_end_s"] for path in view["critical_paths"]) - view["now_s"]
    await values
    actual_s = CLOCK.now() - began_s
    await end.close(session)
    return seen_s + left_s, actual_s


def errors(times: Sequence[Sequence[float]]) -> list[float]:
    """Relative errors of [predicted, actual] seconds."""
    return [abs(predicted_s - actual_s) / actual_s for predicted_s, actual_s in times]


# ---- Programs on several replicas


REPLICAS = 3
ROUTERS = {"by prefix": "e2", "by turns": "rr"}
PROGRAMS, DOCUMENT_TOKENS, MAPS = 12, 800, 6


async def replicas(
    rounds: int, texts_of: Callable[[int], Texts], report: Callable[[str], None]
) -> Row:
    """Router -> seconds and cached tokens of each round, the placements of each program, and what
    the router expected them to cost."""
    found: Row = {}
    for name, router in ROUTERS.items():
        flags = ("--replicas", str(REPLICAS), "--router", router, "--threads", "1")
        async with served_end(*flags) as end:
            found[name] = {"seconds": [], "cached_tokens": [], "placements": [], "costs": []}
            for turn in range(rounds):
                texts = texts_of(turn)
                programs = [
                    map_reduce_questions(
                        texts, document_tokens=DOCUMENT_TOKENS, questions=MAPS, output_tokens=32
                    )
                    for _ in range(PROGRAMS)
                ]
                slots = asyncio.Semaphore(REPLICAS)
                runs = await asyncio.gather(*(in_slot(slots, end, p) for p in programs))
                row = found[name]
                row["seconds"].append(statistics.mean(run.seconds for run in runs))
                row["cached_tokens"].append(cached_tokens(runs))
                row["placements"] += [placements(run) for run in runs]
                row["costs"] += [found for found in map(group_costs, runs) if found]
                report(
                    f"{name}: {row['seconds'][-1]:.2f} s per program, "
                    f"{row['cached_tokens'][-1]} tokens cached"
                )
    return found


async def in_slot(slots: asyncio.Semaphore, end: HttpEnd, program: Program) -> Run:
    async with slots:
        return await by_nearby_session(end, program)


def cached_tokens(runs: Sequence[Run]) -> int:
    return sum(made["cached_tokens"] for run in runs for made in run.calls)


def placements(run: Run) -> list[tuple[int, str]]:
    """(replica, reason of the router) of each map."""
    return [
        (made["placement"]["replica"], made["placement"]["reason"])
        for made in run.calls
        if made["name"] == "ask"
    ]


def group_costs(run: Run) -> Row | None:
    """See GroupCostsView; None if the router places calls one by one."""
    found = [made["placement"]["group"] for made in run.calls if made["name"] == "ask"]
    return next((costs for costs in found if costs), None)


def split_ratios(row: Row) -> list[float]:
    """Of each program whose maps were split: its expected cost relative to the cheapest other."""
    return [
        costs["cost_s"] / costs["alternative_s"] for costs in row["costs"] if costs["replicas"] > 1
    ]


def show_replicas(console: Console, found: Row) -> None:
    for name, row in found.items():
        together = sum(len({replica for replica, _ in maps}) == 1 for maps in row["placements"])
        console.print(
            f"{name}: {statistics.median(row['seconds']):.1f} s per program, "
            f"{statistics.median(row['cached_tokens']):.0f} tokens cached per round, all maps on "
            f"one replica in {together} of {len(row['placements'])} programs"
        )
        if ratios_of_split := split_ratios(row):
            console.print(f"expected cost of splits: {max(ratios_of_split):.2f} of others at most")
    ours, theirs = (statistics.median(found[name]["cached_tokens"]) for name in ROUTERS)
    console.print(f"cached tokens: {ours / max(1, theirs):.2f} of those by turns (target: 1.5)")


async def step_seconds(http: aiohttp.ClientSession, url: str) -> float:
    """The total step time of the engine so far."""
    async with http.get(f"{url}/metrics") as reply:
        found = re.search(r"^bros_engine_step_seconds_total (\S+)", await reply.text(), re.M)
    assert found, "the server has no metric of steps"
    return float(found[1])


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=1200), connector=aiohttp.TCPConnector(limit=0)
    )


def slowdown(found: Mapping[str, Row]) -> float:
    """Time of a program beside chats, relative to its time alone plus the engine time of the chats
    meanwhile."""
    alone = statistics.mean(found["programs alone"]["programs_s"])
    beside = statistics.mean(found["both"]["programs_s"])
    chats = found["chats alone"]
    return beside / (alone + beside * chats["engine_busy_s"] / chats["seconds"])


def times_ours(ways: Mapping[str, Row], name: str) -> float:
    """Median of the time of a way relative to a session of the same round."""
    ours, theirs = ways["session"]["seconds"], ways[name]["seconds"]
    if len(theirs) < len(ours):
        ours = ours[::FLEX_EVERY]
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def show(console: Console, results: Mapping[str, Any]) -> None:
    table = Table("program", "way", "seconds", "times ours", "TPOT", "times ours", "target")
    for name, rows in results["parts"].items():
        for row, total, pace in zip(
            rows, ratios(rows, "seconds"), ratios(rows, "decode_s"), strict=True
        ):
            table.add_row(
                PARTS[name].title if row is rows[0] else "",
                row["way"],
                f"{median(row['runs'], 'seconds'):.1f}",
                f"{statistics.median(total):.2f}",
                f"{1e3 * median(row['runs'], 'decode_s'):.0f} ms",
                f"{statistics.median(pace):.2f}",
                f"{row['asked']:.1f}" if row["asked"] else "",
            )
    if results["parts"]:
        console.print(table)
    if "mixed" in results:
        found = results["mixed"]
        for name, row in found.items():
            took = (
                f", programs {statistics.mean(row['programs_s']):.1f} s"
                if row["programs_s"]
                else ""
            )
            console.print(f"{name}: {row['both_met']} of {row['chats']} chats met both{took}")
        console.print(
            f"programs beside chats: {slowdown(found):.2f} of alone and the chats' share "
            "(target: at most 1.15; chats: at least 97 %)"
        )

    for load, ways in results.get("beside", {}).items():
        for name, row in ways.items():
            took, times = statistics.median(row["seconds"]), times_ours(ways, name)
            met = f", {row['both_met']} of {row['chats']} chats met both" if row["chats"] else ""
            console.print(f"beside {load}: {name} {took:.1f} s, {times:.2f} times ours{met}")

    if "calibration" in results:
        show_calibration(console, results["calibration"])
    if "replicas" in results:
        show_replicas(console, results["replicas"])


def show_calibration(console: Console, found: Mapping[str, Row]) -> None:
    table = Table("load", "program", "seconds", "predicted", "error", "error of the first ones")
    known: list[float] = []
    for load, kinds in found.items():
        for kind, times in kinds.items():
            first, later = times[:KNOWN_AFTER], times[KNOWN_AFTER:]
            known += errors(later)
            table.add_row(
                load,
                kind,
                f"{statistics.median(actual for _, actual in later):.1f}",
                f"{statistics.median(predicted for predicted, _ in later):.1f}",
                f"{statistics.median(errors(later)):.0%}",
                f"{statistics.median(errors(first)):.0%}",
            )
    console.print(table)
    console.print(f"median error: {statistics.median(known):.1%} (target: at most 15 %)")


def median(runs: Sequence[Row], key: str) -> float:
    return statistics.median(run[key] for run in runs)


async def run(names: Sequence[str], arguments: argparse.Namespace, console: Console) -> None:
    files = resolve_model(None, default_cache_dir(), console.print)
    tokenizer = Tokenizer.load(files.folder)

    def texts_of(turn: int) -> Texts:
        return Texts(tokenizer, seed=turn)

    for name in names:
        results: Row = {"parts": {}}
        if name == "mixed":
            results["mixed"] = await mixed(texts_of, console.print)
        elif name == "beside":
            results["beside"] = await beside(arguments.rounds, texts_of, console.print)
        elif name == "calibration":
            results["calibration"] = await calibration(arguments.rounds, texts_of, console.print)
        elif name == "replicas":
            results["replicas"] = await replicas(arguments.rounds, texts_of, console.print)
        else:
            part = PARTS[name]
            results["parts"][name] = await measured(part, arguments.rounds, texts_of, console.print)
        show(console, results)
        if arguments.json:
            keep(arguments.json, results, arguments.rounds)


def keep(path: Path, results: Row, rounds: int) -> None:
    """Store the results; other parts in the file are kept."""
    found = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    found["parts"] |= results.pop("parts")
    weights = choose_target(EngineConfig(), find_cuda()).weights
    found |= {"environment": environment(), "weights": weights}
    found |= {"delay_s": DELAY_S, "rounds": rounds, **results}
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = [*PARTS, "mixed", "beside", "calibration", "replicas"]
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="output file; its other parts are kept")
    add_quick(parser, parts="chain", rounds=1)
    arguments = parser.parse_args()
    names = chosen(parser, "--parts", arguments.parts, parts)
    asyncio.run(run(names, arguments, Console()))


if __name__ == "__main__":
    main()
