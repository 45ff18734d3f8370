"""How long sessions hold the event loop of the server: the CPU time of its longest turn.

    python benchmarks/session_scale.py [--calls 10000] [--chain 1000] [--group 1000]
        [--sessions 1000] [--only submit,chain] [--profile] [--quick] [--json FILE]

The session service runs on an event loop that measures each of its turns, over an engine that
answers every request with four tokens at once. CPU time of the thread counts, since other programs
share the machine; so it does not include what runs on other threads. The garbage collector is
measured beside it. While a turn lasts, the server answers no other request and delivers no token.

--profile: print the functions that took most of the time of each scenario.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import random
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import chosen
from quick import add_quick

from bros.core.collector import Collector
from bros.core.errors import BrosError
from bros.core.interfaces import EngineInfo, EngineStats, RequestTrace
from bros.core.request import EngineRequest, FinishReason, IdGenerator, RequestOutput, Slo
from bros.engine.client import OutputStream
from bros.semantic.schema import CallSpec, Criteria, Parameter, Perf, SessionView
from bros.semantic.service.live import SessionSettings
from bros.semantic.service.service import SessionService
from bros.server.sessions.graph import render_dot, render_mermaid, render_page
from bros.server.sessions.wire import reply
from bros.simulator.program_simulation import byte_tokenizer
from bros.simulator.virtual_loop import LoopClock
from bros.text.generation import TextGenerator

TENANT = "t"
ANSWER = "done"
LATENCY = Criteria(perf=Perf.LATENCY)
PER_TURN = 4
"""Requests that the engine answers in one turn of the loop."""

TOKENIZER = byte_tokenizer()


class MeasuredLoop(asyncio.SelectorEventLoop):
    """longest_s: CPU time of the longest turn since `reset`, without the garbage collector.
    collected_s: CPU time of the longest collection. turns: number of turns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.longest_s, self.collected_s, self.turns = 0.0, 0.0, 0
        self._collections_s = self._collecting_s = 0.0

    def on_collection(self, phase: str, info: object) -> None:
        """A callback of the garbage collector."""
        del info
        if phase == "start":
            self._collecting_s = time.thread_time()
        else:
            took_s = time.thread_time() - self._collecting_s
            self.collected_s = max(self.collected_s, took_s)
            self._collections_s += took_s

    def _run_once(self) -> None:
        begun_s, self._collections_s = time.thread_time(), 0.0
        super()._run_once()  # type: ignore[misc]
        took_s = time.thread_time() - begun_s - self._collections_s
        self.longest_s = max(self.longest_s, took_s)
        self.turns += 1


class InstantEngine:
    """An EngineClient that answers PER_TURN requests in each turn; it fails those in `failing`.

    holding: whether it keeps requests instead of answering them.
    """

    alive = True

    def __init__(self) -> None:
        self.info = EngineInfo(
            model="instant", weights="none", kernels="none", kv_dtype="none", device="none",
            max_model_len=1_000_000, vocab_size=TOKENIZER.vocab_size, block_size=16,
            num_kv_blocks=1000, policy="bros", yields=True, eos_token_ids=(),
        )  # fmt: skip
        self.holding = False
        self.failing: set[str] = set()
        self._answer = TOKENIZER.encode(ANSWER)
        self._open: dict[str, OutputStream] = {}
        self._queue: deque[str] = deque()
        self._waked = asyncio.Event()
        self._pump = asyncio.create_task(self._run())

    async def submit(self, request: EngineRequest) -> OutputStream:
        stream = OutputStream(request.service_class)
        self._open[request.request_id] = stream
        self._queue.append(request.request_id)
        self._waked.set()
        return stream

    async def _run(self) -> None:
        while True:
            await self._waked.wait()
            await asyncio.sleep(0)
            for _ in range(PER_TURN):
                if self.holding or not self._queue:
                    self._waked.clear()
                    break
                self._answer_to(self._queue.popleft())

    def _answer_to(self, request_id: str) -> None:
        stream = self._open.pop(request_id, None)
        if stream is None:
            return
        output = RequestOutput(request_id=request_id, finish_reason=FinishReason.LENGTH)
        if request_id in self.failing:
            output.finish_reason, output.error = FinishReason.ERROR, "It fails."
        else:
            output.token_ids = tuple(self._answer)
        stream.put(output)

    async def abort(self, request_id: str) -> None:
        stream = self._open.pop(request_id, None)
        if stream is not None:
            stream.put(RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT))

    async def promote(self, request_id: str, slo: Slo, awaited: bool = True) -> None: ...

    async def release(self, request_id: str) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def trace(self, request_id: str) -> RequestTrace | None:
        return None

    async def close(self) -> None:
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)


class GroupRouter:
    """Says what a router says to sessions; the engine gets the requests at once."""

    num_alive = 2

    def __init__(self) -> None:
        self.places_groups = False

    def placement(self, request_id: str) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Size:
    """calls: of a large session. chain, group: calls of these programs. sessions: with 10 calls."""

    calls: int
    chain: int
    group: int
    sessions: int


class Bench:
    """One scenario's service and engine."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.engine = InstantEngine()
        clock, ids = LoopClock(), IdGenerator(random.Random(0))
        generator = TextGenerator(self.engine, TOKENIZER, clock, ids)
        settings = SessionSettings(max_sessions=2 * size.sessions, max_waiting=2 * size.calls)
        self.router = GroupRouter()
        self.service = SessionService(
            generator, self.engine, TOKENIZER, clock, ids, settings, self.router
        )
        self._running = asyncio.create_task(self.service.run())

    def open(self) -> str:
        return self.service.create(TENANT).id

    async def submit(self, session: str, calls: Sequence[CallSpec]) -> list[str]:
        """Ids of the calls."""
        accepted = await self.service.accept(TENANT, session, calls)
        return [each.request_id for each in accepted]

    async def want(self, session: str, *names: str) -> None:
        """Request values, one per turn."""
        for name in names:
            self.service.want(TENANT, session, name, LATENCY)
            await asyncio.sleep(0)

    async def value(self, session: str, name: str) -> None:
        try:
            await self.service.get(TENANT, session, name, LATENCY)
        except BrosError:  # of scenarios with a failure
            pass

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.engine.close()


# ---- Programs.


def make_call(
    name: str, inputs: Sequence[str], output: str, criteria: Criteria | None = None
) -> CallSpec:
    placeholders = " ".join(f"{{{{input:i{n}}}}}" for n in range(len(inputs)))
    parameters = [Parameter(name=f"i{n}", variable=each) for n, each in enumerate(inputs)]
    return CallSpec(
        name=name,
        template=f"Say {placeholders} again: {{{{output:o}}}}",
        parameters=[*parameters, Parameter(name="o", variable=output, criteria=criteria)],
        sampling={"max_tokens": 4},
    )


def flat(count: int, prefix: str = "v") -> list[CallSpec]:
    """Independent calls."""
    return [make_call("flat", (), f"{prefix}{n}") for n in range(count)]


def chain(count: int) -> list[CallSpec]:
    return [make_call("chain", [f"v{n - 1}"] if n else [], f"v{n}") for n in range(count)]


def map_reduce(count: int) -> list[CallSpec]:
    reduce = make_call("reduce", [f"v{n}" for n in range(count)], "all")
    return [*(make_call("map", (), f"v{n}") for n in range(count)), reduce]


# ---- Scenarios. Each yields after its preparation, and is measured from there to its end.


async def submit_at_once(bench: Bench) -> Callable[[], Awaitable[None]]:
    session, calls = bench.open(), flat(bench.size.calls)

    async def run() -> None:
        await bench.submit(session, calls)

    return run


async def submit_in_batches(bench: Bench) -> Callable[[], Awaitable[None]]:
    session, calls = bench.open(), flat(bench.size.calls)

    async def run() -> None:
        for first in range(0, len(calls), 100):
            await bench.submit(session, calls[first : first + 100])
            await asyncio.sleep(0)

    return run


async def large_program_runs(bench: Bench) -> Callable[[], Awaitable[None]]:
    """A large program whose values are all requested with it, as by `P.gather` of new calls."""
    session, count = bench.open(), bench.size.calls
    calls = [make_call("flat", (), f"v{n}", LATENCY) for n in range(count)]

    async def run() -> None:
        await bench.submit(session, calls)
        await bench.value(session, f"v{count - 1}")

    return run


async def one_value_for_all(bench: Bench) -> Callable[[], Awaitable[None]]:
    """All calls of a large session read one value, which a client sets."""
    session, count = bench.open(), bench.size.calls
    await bench.submit(session, [make_call("reads", ["x"], f"v{n}") for n in range(count)])
    await bench.want(session, *(f"v{n}" for n in range(count)))

    async def run() -> None:
        bench.service.set(TENANT, session, "x", "text")
        await bench.value(session, f"v{count - 1}")

    return run


async def chain_end(bench: Bench) -> Callable[[], Awaitable[None]]:
    session, count = bench.open(), bench.size.chain

    async def run() -> None:
        await bench.submit(session, chain(count))
        await bench.value(session, f"v{count - 1}")

    return run


async def chain_all(bench: Bench) -> Callable[[], Awaitable[None]]:
    session, count = bench.open(), bench.size.chain

    async def run() -> None:
        await bench.submit(session, chain(count))
        await bench.want(session, *(f"v{n}" for n in range(count)))
        await bench.value(session, f"v{count - 1}")

    return run


async def chain_cancelled(bench: Bench) -> Callable[[], Awaitable[None]]:
    session, count = bench.open(), bench.size.chain
    bench.engine.holding = True
    ids = await bench.submit(session, chain(count))
    await bench.want(session, *(f"v{n}" for n in range(0, count, 10)))

    async def run() -> None:
        bench.service.cancel(TENANT, session, ids[count // 2])
        await bench.value(session, f"v{count - 1}")

    return run


async def chain_failed(bench: Bench) -> Callable[[], Awaitable[None]]:
    session, count = bench.open(), bench.size.chain
    ids = await bench.submit(session, chain(count))
    bench.engine.failing = {ids[count // 2]}

    async def run() -> None:
        await bench.want(session, *(f"v{n}" for n in range(0, count, 10)))
        await bench.value(session, f"v{count - 1}")

    return run


async def group(bench: Bench) -> Callable[[], Awaitable[None]]:
    session = bench.open()

    async def run() -> None:
        await bench.submit(session, map_reduce(bench.size.group))
        await bench.value(session, "all")

    return run


async def group_all(bench: Bench) -> Callable[[], Awaitable[None]]:
    """All values are requested with the program."""
    session, count = bench.open(), bench.size.group
    calls = [make_call("map", (), f"v{n}", LATENCY) for n in range(count)]
    calls.append(make_call("reduce", [f"v{n}" for n in range(count)], "all", LATENCY))

    async def run() -> None:
        await bench.submit(session, calls)
        await bench.value(session, "all")

    return run


async def group_cancelled(bench: Bench) -> Callable[[], Awaitable[None]]:
    session, count = bench.open(), bench.size.group
    bench.engine.holding = True
    ids = await bench.submit(session, map_reduce(count))
    await bench.want(session, "all")
    await asyncio.sleep(0.2)

    async def run() -> None:
        bench.service.cancel(TENANT, session, ids[count // 2])
        await bench.value(session, "all")

    return run


async def group_failed(bench: Bench) -> Callable[[], Awaitable[None]]:
    session, count = bench.open(), bench.size.group
    ids = await bench.submit(session, map_reduce(count))
    bench.engine.failing = {ids[count // 2]}

    async def run() -> None:
        await bench.value(session, "all")

    return run


async def many_sessions(bench: Bench) -> Callable[[], Awaitable[None]]:
    """Each is opened, gets a map-reduce of 10 calls, runs it, and ends, all at the same time."""

    async def one() -> None:
        session = bench.open()
        await bench.submit(session, map_reduce(9))
        await bench.value(session, "all")
        await bench.service.delete(TENANT, session)

    async def run() -> None:
        tasks = []
        for _ in range(bench.size.sessions):  # as requests arrive, not all in one turn
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    return run


async def end_idle(bench: Bench) -> Callable[[], Awaitable[None]]:
    session = bench.open()
    await bench.submit(session, flat(bench.size.calls))

    async def run() -> None:
        await bench.service.delete(TENANT, session)

    return run


async def end_running(bench: Bench) -> Callable[[], Awaitable[None]]:
    session, count = bench.open(), bench.size.calls
    bench.engine.holding = True
    await bench.submit(session, flat(count))
    await bench.want(session, *(f"v{n}" for n in range(count)))
    while len(bench.engine._open) < count:
        await asyncio.sleep(0.01)

    async def run() -> None:
        await bench.service.delete(TENANT, session)

    return run


def view(render: Callable[[SessionView], object]) -> Scenario:
    """What a route does: the view on the loop, then the rendering on a thread."""

    async def prepare(bench: Bench) -> Callable[[], Awaitable[None]]:
        session, count = bench.open(), bench.size.calls
        bench.engine.holding = True
        calls = [
            make_call("a", [f"v{n // 8 - 1}"] if n >= 8 else [], f"v{n}") for n in range(count)
        ]
        await bench.submit(session, calls)
        await bench.want(session, *(f"v{n}" for n in range(0, count, 100)))

        async def run() -> None:
            found = await bench.service.view(TENANT, session)
            await asyncio.to_thread(render, found)

        return run

    return prepare


Scenario = Callable[[Bench], Awaitable[Callable[[], Awaitable[None]]]]


def with_router(scenario: Scenario) -> Scenario:
    """The same where the members of a group are submitted together, as to a router."""

    async def prepare(bench: Bench) -> Callable[[], Awaitable[None]]:
        bench.router.places_groups = True
        return await scenario(bench)

    return prepare


SCENARIOS: Mapping[str, Scenario] = {
    "submit at once": submit_at_once,
    "submit in batches of 100": submit_in_batches,
    "all calls run": large_program_runs,
    "one value, read by all calls": one_value_for_all,
    "chain, requested at its end": chain_end,
    "chain, every value requested": chain_all,
    "chain, cancelled in the middle": chain_cancelled,
    "chain, failing in the middle": chain_failed,
    "group with one reduce": group,
    "group, every value requested": group_all,
    "group, with a router": with_router(group_all),
    "group, one member cancelled": group_cancelled,
    "group, one member failing": group_failed,
    "sessions of 10 calls": many_sessions,
    "end of a session, nothing runs": end_idle,
    "end of a session, all runs": end_running,
    "view as JSON": view(reply),
    "view as a page": view(render_page),
    "view as Mermaid": view(render_mermaid),
    "view as DOT": view(render_dot),
}


@dataclass(frozen=True, slots=True)
class Result:
    """longest_ms: CPU time of the longest turn. collection_ms: of the longest collection of
    garbage, which is not in longest_ms. total_s: of all turns. turns: their number."""

    scenario: str
    longest_ms: float
    collection_ms: float
    total_s: float
    turns: int


def measure(name: str, size: Size, profile: bool) -> Result:
    loop = MeasuredLoop()

    async def main() -> Result:
        bench = Bench(size)
        run = await SCENARIOS[name](bench)
        await asyncio.sleep(0.2)
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        loop.reset()
        gc.callbacks.append(loop.on_collection)
        begun_s = time.thread_time()
        await run()
        for _ in range(3):  # the turns that follow from it
            await asyncio.sleep(0)
        gc.callbacks.remove(loop.on_collection)
        result = Result(
            name,
            1000 * loop.longest_s,
            1000 * loop.collected_s,
            time.thread_time() - begun_s,
            loop.turns,
        )
        if profile:
            profiler.disable()
            pstats.Stats(profiler, stream=sys.stdout).sort_stats("cumtime").print_stats(25)
        await bench.close()
        return result

    # As in a server, and so that garbage of the scenario before does not count.
    with Collector(), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10_000, help="of a large session")
    parser.add_argument("--chain", type=int, default=1_000)
    parser.add_argument("--group", type=int, default=1_000)
    parser.add_argument("--sessions", type=int, default=1_000)
    parser.add_argument("--only", default="", help="beginnings of names of scenarios, with commas")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    add_quick(parser, calls=50, chain=20, group=20, sessions=5)
    options = parser.parse_args()
    size = Size(options.calls, options.chain, options.group, options.sessions)
    beginnings = chosen(parser, "--only", options.only, SCENARIOS, matches=str.startswith)
    results = []
    print(f"{'scenario':32} {'longest turn':>14} {'collection':>13} {'in all':>10} {'turns':>8}")
    for name in SCENARIOS:
        if name.startswith(tuple(beginnings)):
            result = measure(name, size, options.profile)
            results.append(result)
            parts = (f"{result.longest_ms:11.1f} ms", f"{result.collection_ms:10.1f} ms")
            print(f"{name:32}", *parts, f"{result.total_s:8.2f} s {result.turns:8}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
