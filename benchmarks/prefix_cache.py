"""The benefit of the prefix cache and the cost of KV copies, with the real model.

    python benchmarks/prefix_cache.py [--parts shared,pollution,copies] [--quick] [--json FILE]

The embedded model in fp32 on this machine, in process, under --policy bros with the machine's
profile. Every engine starts with an empty cache; the model is loaded once.

shared     16 requests with a shared prefix of 1,024 tokens and 16 tokens of their own arrive at
           once: time until all have their first token, relative to one such request alone.
pollution  A real-time request with a cached prefix of 1,500 tokens; then 32 long best-effort
           documents, several times the memory; then the request again: TTFT before and after.
copies     Copying KV to the host and back before a step, or in another thread during the step,
           compared with recomputing the same tokens.

Run nothing else on the machine. Variants alternate within each round; figures are medians.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import hybrid_load
import torch
from harness import (
    benchmark_parser,
    chosen,
    greedy_request,
    judged,
    random_tokens,
    save,
    table_of,
)
from rich.console import Console

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo
from bros.core.plan import Chunk, KvCopies, SampleSpec, StepPlan
from bros.core.request import EngineRequest, SamplingParams, ServiceClass, Slo, expanded
from bros.engine.engine import Engine
from bros.executor.kv_storage import DTYPES, KV_BLOCK_SIZE, KvStorage
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.executor.models.spec import ModelSpec
from bros.executor.runner import ModelRunner
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import CostModel

RT, BE = ServiceClass.RT, ServiceClass.BE
SIZE = KV_BLOCK_SIZE
SHARERS, PREFIX, PRIVATE = 16, 1024, 16
ANY_SLO, PATIENT = Slo(), Slo(ttft_s=30.0)
# (label, class, objectives, --prefix-cache)
SHARED_CASES = (
    ("best-effort", BE, ANY_SLO, "class-aware"),
    ("real-time, 30 s", RT, PATIENT, "class-aware"),
    ("real-time, 0.4 s", RT, ANY_SLO, "class-aware"),
    ("best-effort", BE, ANY_SLO, "off"),
)
TURN_PREFIX, QUESTION, WARM_TURNS = 1500, 40, 3
RULES = ("class-aware", "lru", "off")
ASKED = {"shared": 1.3, "pollution": 1.2}
COPIED_TOKENS = (16, 256, 2048)
DECODING_ROWS, CONTEXT = 8, 512

Result = dict[str, float]
Row = dict[str, Any]
"""Row of a table: a Result and its label."""
Report = Callable[[str], None]


@dataclass(frozen=True)
class Machine:
    """Shared by all engines. quick: skip the slow runs with --prefix-cache off."""

    quick: bool
    spec: ModelSpec
    config: EngineConfig
    executor: ModelRunner
    info: EngineInfo
    model: CostModel

    def engine(self, prefix_cache: str, num_blocks: int) -> Engine:
        """An engine with an empty cache and `num_blocks` blocks."""
        config = dataclasses.replace(self.config, prefix_cache=prefix_cache)
        info = dataclasses.replace(self.info, num_kv_blocks=num_blocks)
        scheduler = build_scheduler(config, info, self.model)
        return Engine(scheduler, self.executor, SystemClock(), info)


class Prompts:
    """Unique prompts and request ids."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(5)
        self._vocab_size = vocab_size
        self._count = 0

    def tokens(self, count: int) -> list[int]:
        return random_tokens(self._random, count, self._vocab_size)

    def request(
        self, tokens: list[int], service_class: ServiceClass, slo: Slo = ANY_SLO
    ) -> EngineRequest:
        """A request that ends with its first token, so that only prefill is measured."""
        self._count += 1
        return greedy_request(str(self._count), tokens, 1, service_class, slo=slo)


def serve(engine: Engine, requests: Iterable[EngineRequest]) -> tuple[float, int]:
    """Run requests that arrive at once: (seconds until all are done, maximum blocks in use)."""
    began = time.perf_counter()
    for request in requests:
        engine.submit(request)
    blocks = 0
    while engine.has_work:
        for output in map(expanded, engine.step()):
            assert output.error is None, output.error
        stats = engine.stats()
        blocks = max(blocks, stats.kv_blocks_used + stats.kv_blocks_cached)
    return time.perf_counter() - began, blocks


def shared_prefix(machine: Machine, rounds: int, report: Report) -> list[Row]:
    """One row per case: seconds of one request and of all, their ratio, blocks used by all."""
    prompts = Prompts(machine.info.vocab_size)
    cases = [case for case in SHARED_CASES if not (machine.quick and case[-1] == "off")]
    samples: list[list[Result]] = [[] for _ in cases]
    for number in range(rounds):
        report(f"shared prefix, round {number + 1} of {rounds}")
        for (_, service_class, slo, prefix_cache), taken in zip(cases, samples, strict=True):
            found = []
            for count in (1, SHARERS):
                prefix = prompts.tokens(PREFIX)
                requests = [
                    prompts.request(prefix + prompts.tokens(PRIVATE), service_class, slo)
                    for _ in range(count)
                ]
                engine = machine.engine(prefix_cache, machine.info.num_kv_blocks)
                found.append(serve(engine, requests))
            (one_s, _), (all_s, blocks) = found
            taken.append({"one_s": one_s, "all_s": all_s, "ratio": all_s / one_s, "blocks": blocks})
    return [
        {"case": label, "prefix_cache": prefix_cache, **medians(taken)}
        for (label, _, _, prefix_cache), taken in zip(cases, samples, strict=True)
    ]


@dataclass(frozen=True)
class Sweep:
    """The best-effort documents and the size of the KV memory."""

    documents: int
    tokens: int
    kv_blocks: int

    @property
    def share(self) -> float:
        """Size of the documents relative to the memory."""
        return self.documents * self.tokens / (self.kv_blocks * SIZE)


def pollution(machine: Machine, sweep: Sweep, rounds: int, report: Report) -> list[Row]:
    """One row per eviction rule: TTFT of the request, cold, before and after the sweep."""
    prompts = Prompts(machine.info.vocab_size)
    rules = [rule for rule in RULES if not (machine.quick and rule == "off")]
    samples: dict[str, list[Result]] = {rule: [] for rule in rules}
    for number in range(rounds):
        for rule in rules:
            report(f"pollution, {rule}, round {number + 1} of {rounds}")
            samples[rule].append(
                polluted_turn(machine.engine(rule, sweep.kv_blocks), prompts, sweep)
            )
    return [{"prefix_cache": rule, **medians(taken)} for rule, taken in samples.items()]


def polluted_turn(engine: Engine, prompts: Prompts, sweep: Sweep) -> Result:
    prefix = prompts.tokens(TURN_PREFIX)

    def turn() -> float:
        return serve(engine, [prompts.request(prefix + prompts.tokens(QUESTION), RT)])[0]

    cold = turn()
    before = statistics.median(turn() for _ in range(WARM_TURNS))
    documents = [prompts.request(prompts.tokens(sweep.tokens), BE) for _ in range(sweep.documents)]
    swept, _ = serve(engine, documents)
    found = engine.stats().by_class[RT].prefix_tokens
    after = turn()
    stats = engine.stats()
    return {
        "cold_s": cold,
        "before_s": before,
        "after_s": after,
        "ratio": after / before,
        "found_tokens": stats.by_class[RT].prefix_tokens - found,
        "evicted_blocks": stats.by_class[BE].prefix_evicted,
        "sweep_s": swept,
    }


def marked(ratio: float, part: str, counts: bool) -> str:
    """The ratio, green or red by the target of the part if that `counts`."""
    return judged(ratio, ASKED[part]) if counts else f"{ratio:.2f}"


def show_shared(rows: list[Row], console: Console) -> None:
    least = (PREFIX + SHARERS * PRIVATE) // SIZE
    title = (
        f"{SHARERS} requests over one prefix of {PREFIX} tokens\n"
        f"(target: at most {ASKED['shared']:g} times as long as one; stored once: {least} blocks)"
    )
    cells = [
        (
            row["case"],
            row["prefix_cache"],
            f"{row['one_s']:.2f}",
            f"{row['all_s']:.2f}",
            marked(row["ratio"], "shared", row["prefix_cache"] != "off"),
            f"{row['blocks']:.0f}",
        )
        for row in rows
    ]
    headings = ("requests", "--prefix-cache", "one, s", "all, s", "ratio", "blocks")
    console.print(table_of(title, headings, cells))


def show_pollution(rows: list[Row], sweep: Sweep, console: Console) -> None:
    title = (
        f"a request with {TURN_PREFIX} cached tokens before and after "
        f"{sweep.documents} documents ({sweep.share:.1f} x the memory)\n"
        f"(target: at most {ASKED['pollution']:g} times as long)"
    )
    cells = [
        (
            row["prefix_cache"],
            *(f"{1e3 * row[name]:.0f}" for name in ("cold_s", "before_s", "after_s")),
            marked(row["ratio"], "pollution", row["prefix_cache"] == "class-aware"),
            *(f"{row[name]:.0f}" for name in ("found_tokens", "evicted_blocks")),
            f"{row['sweep_s']:.1f}",
        )
        for row in rows
    ]
    headings = ("--prefix-cache", "cold, ms", "before, ms", "after, ms", "ratio")
    headings += ("tokens found", "evicted by BE", "sweep, s")
    console.print(table_of(title, headings, cells))


# ---- The cost of copying KV to the host and back.


def medians(samples: list[Result]) -> Result:
    return {name: statistics.median(found[name] for found in samples) for name in samples[0]}


class Copier:
    """Copies within its own KV memory, which steps do not touch."""

    def __init__(self, spec: ModelSpec, kv_dtype: str) -> None:
        blocks = max(COPIED_TOKENS) // SIZE
        self._blocks = 4 * blocks
        self._storage = KvStorage(spec, self._blocks, DTYPES[kv_dtype], blocks)
        for keys, values in self._storage.layers:
            keys.fill_(1.0)
            values.fill_(1.0)
        self._random = random.Random(1)

    def copies(self, tokens: int, *, out: bool) -> KvCopies:
        """Copies of scattered blocks, last token first, as preemption takes them from victims."""
        blocks = self._random.sample(range(self._blocks), tokens // SIZE)
        device = array("i")
        for block in blocks:
            device.extend(range((block + 1) * SIZE - 1, block * SIZE - 1, -1))
        host = array("i", range(tokens))
        if out:
            return KvCopies(out_device=device, out_host=host)
        return KvCopies(back_device=device, back_host=host)

    @torch.inference_mode()
    def copy(self, copies: KvCopies) -> None:
        self._storage.copy(copies)


def timed_ms(call: Callable[..., object], *args: object) -> float:
    began = time.perf_counter()
    call(*args)
    return (time.perf_counter() - began) * 1e3


def step_plan(rows: int, context: int, tokens: int) -> StepPlan:
    """A step of rows with `context` tokens each and `tokens` new ones, in contiguous blocks."""
    chunks = []
    blocks = -(-(context + tokens) // SIZE)
    for row in range(rows):
        first = row * blocks
        segments = array("i")
        for index in range(context // SIZE):
            segments.extend((first + index, 0, SIZE))
        start = first * SIZE + context
        sample = SampleSpec(SamplingParams(temperature=0), seed=0)
        slots = array("i", range(start, start + tokens))
        chunks.append(Chunk(str(row), context, [7] * tokens, segments, slots, sample))
    return StepPlan(step=0, chunks=tuple(chunks))


def copy_costs(
    executor: ModelRunner, spec: ModelSpec, kv_dtype: str, rounds: int, report: Report
) -> list[Row]:
    """One row per number of tokens: milliseconds of copies, steps with copies, and recomputing."""
    copier, execute = Copier(spec, kv_dtype), executor.execute
    decoding = step_plan(DECODING_ROWS, CONTEXT, 1)
    # The copying thread uses one torch thread: more would only contend with the model's.
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    pool.submit(copier.copy, copier.copies(SIZE, out=True)).result()
    torch.set_num_threads(threads)

    def inline(copies: KvCopies) -> None:
        copier.copy(copies)
        execute(decoding)

    def beside(copies: KvCopies) -> None:
        done = pool.submit(copier.copy, copies)
        execute(decoding)
        done.result()

    rows: list[Row] = []
    for tokens in COPIED_TOKENS:
        report(f"copies of {tokens} tokens")
        computing = step_plan(1, 0, tokens)
        samples: list[Result] = []
        for _ in range(rounds + 1):
            found = {"step_ms": timed_ms(execute, decoding)}
            for name, out in (("out", True), ("back", False)):
                copies = copier.copies(tokens, out=out)
                for way, call in (("", copier.copy), ("_inline", inline), ("_beside", beside)):
                    found[f"{name}{way}_ms"] = timed_ms(call, copies)
            found["compute_ms"] = timed_ms(execute, computing)
            samples.append(found)
        rows.append({"tokens": tokens, **medians(samples[1:])})  # the first one warms up
    pool.shutdown()
    return rows


def show_copies(rows: list[Row], console: Console) -> None:
    names = {
        "out_ms": "out",
        "back_ms": "back",
        "step_ms": "step",
        "out_inline_ms": "out, then step",
        "out_beside_ms": "out, concurrent",
        "back_inline_ms": "back, then step",
        "back_beside_ms": "back, concurrent",
        "compute_ms": "recompute",
    }
    title = f"milliseconds to copy KV; the step decodes {DECODING_ROWS} rows of {CONTEXT} tokens"
    cells = [(row["tokens"], *(f"{row[name]:.3g}" for name in names)) for row in rows]
    console.print(table_of(title, ("tokens", *names.values()), cells, left=0))


def load(threads: int | None, quick: bool, report: Report) -> Machine:
    config = EngineConfig(weights="fp32", max_model_len=2048, threads=threads)
    files = resolve_model(None, default_cache_dir(), report)
    executor, info, model = hybrid_load.load(config, files, report)
    spec = ModelSpec.from_config(json.loads((files.folder / "config.json").read_text("utf-8")))
    executor.execute(step_plan(1, 0, PREFIX))  # the first step is slow
    return Machine(quick, spec, config, executor, info, model)


def main() -> None:
    parser = benchmark_parser(__doc__)
    known = ("shared", "pollution", "copies")
    parser.add_argument("--parts", default=",".join(known), help="comma-separated")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of part shared; see also --sweeps"
    )
    parser.add_argument("--sweeps", type=int, default=3, help="rounds of part pollution")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one minute: one round, a short sweep, no runs without a cache",
    )
    parser.add_argument("--threads", type=int, help="threads of torch (default: all cores)")
    args = parser.parse_args()
    parts = chosen(parser, "--parts", args.parts, known)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    # 32 documents of 1,000 tokens are four times the memory, of which a quarter is protected.
    sweep = Sweep(documents=32, tokens=1000, kv_blocks=512)
    rounds, sweeps, copy_rounds = args.rounds, args.sweeps, 15
    if args.quick:
        sweep, rounds, sweeps, copy_rounds = Sweep(8, 1000, 448), 1, 1, 2

    def report(line: str) -> None:
        console.print(line, style="dim")

    machine = load(args.threads, args.quick, report)
    results: dict[str, list[Row]] = {}
    if "shared" in parts:
        results["shared"] = shared_prefix(machine, rounds, report)
        show_shared(results["shared"], console)
    if "pollution" in parts:
        results["pollution"] = pollution(machine, sweep, sweeps, report)
        show_pollution(results["pollution"], sweep, console)
    if "copies" in parts:
        results["copies"] = copy_costs(
            machine.executor, machine.spec, machine.info.kv_dtype, copy_rounds, report
        )
        show_copies(results["copies"], console)
    settings = {
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "sweeps": sweeps,
        "copy_rounds": copy_rounds,
        "sweep": dataclasses.asdict(sweep),
    }
    save(args.json, {"settings": settings, "asked": ASKED, "results": results})


if __name__ == "__main__":
    main()
