"""The overhead of tensor parallelism: plans, all-reduces, logits, and whole steps.

    python benchmarks/tp_speed.py [--ranks 3] [--json benchmarks/results/tp_speed_3.json]

It starts its ranks by torchrun; where torchrun has started it, `--ranks` is without effect.
Rank 0 first runs the model alone on all cores while the others sleep; then all ranks run it
together, with the cores divided among them. Both do the same work on the same machine, so the
difference of the step times is the overhead of the ranks. Three ranks run the embedded model; other
numbers run a random one of about its shape, whose heads they can divide.

The time of a plan is from before its encoding until the last rank has decoded it. Before each plan,
rank 0 is busy for about the time of scheduling, so that the other ranks sleep, as in serving.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from harness import benchmark_parser, save, table_of
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bros.core.config import EngineConfig
from bros.core.interfaces import Executor
from bros.core.plan import SEGMENT_WIDTH, Chunk, SampleSpec, StepPlan
from bros.core.request import SamplingParams
from bros.executor.inputs import build_inputs
from bros.executor.loader import load_executor, random_executor
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.executor.models.spec import ModelSpec
from bros.executor.parallel.plan_codec import PlanDecoder, PlanEncoder
from bros.executor.parallel.ranks import Ranks, SingleRank, TorchRanks
from bros.executor.parallel.runner import follow, lead
from bros.executor.runner import ModelRunner
from bros.executor.sampler import HostStepSampler, NumpySampler, SampleRequest

BLOCK = 16
PLAN_ROWS = (1, 8, 32, 64)
PLAN_CONTEXT = 4096
PLANS = 500
BUSY_S = 0.002
STEPS = (("decode 1", 1, 1), ("decode 8", 8, 1), ("decode 32", 32, 1), ("prefill 256", 1, 256))
STEP_CONTEXT = 256
GREEDY = SampleSpec(SamplingParams(temperature=0.0), seed=0)
DRAWN = SampleSpec(SamplingParams(temperature=1.0, top_p=0.9), seed=0)

Figures = dict[str, dict[str, float]]


class Rows:
    """Requests that decode for some steps; each needs a new block at a different step."""

    def __init__(self, count: int, context: int, steps: int) -> None:
        per_row = (context + steps) // BLOCK + 2
        self._segments = []
        self._blocks = []
        for row in range(count):
            blocks = iter(range(row * per_row, (row + 1) * per_row))
            full = [x for _ in range(context // BLOCK) for x in (next(blocks), 0, BLOCK)]
            self._segments.append(array("i", [*full[:-1], 1 + row % BLOCK]))
            self._blocks.append(blocks)

    def plan(self, step: int, sample: SampleSpec = GREEDY) -> StepPlan:
        chunks = []
        for row, segments in enumerate(self._segments):
            before = segments[:]
            block, _, used = before[-SEGMENT_WIDTH:]
            if used == BLOCK:
                block, used = next(self._blocks[row]), 0
                segments.extend((block, 0, 1))
            else:
                segments[-1] += 1
            start = len(before) // SEGMENT_WIDTH * BLOCK - BLOCK + before[-1]
            slots = array("i", [block * BLOCK + used])
            chunks.append(Chunk(f"request {row}", start, [7], before, slots, sample))
        return StepPlan(step, tuple(chunks))


def prompt(step: int, tokens: int) -> StepPlan:
    ids = [1 + i % 1000 for i in range(tokens)]
    chunk = Chunk("prompt", 0, ids, array("i"), array("i", range(tokens)), GREEDY)
    return StepPlan(step, (chunk,))


def summary(times_s: list[float]) -> dict[str, float]:
    """Median and p99 in microseconds."""
    ordered = sorted(times_s)
    return {
        "median_us": statistics.median(ordered) * 1e6,
        "p99_us": ordered[int(0.99 * len(ordered))] * 1e6,
    }


def plans(ranks: Ranks, rows: int) -> dict[str, float]:
    """Microseconds of a plan from encoding until all ranks have decoded it, and of its parts."""
    encoder, decoder, requests = PlanEncoder(), PlanDecoder(), Rows(rows, PLAN_CONTEXT, PLANS)
    stamps = torch.zeros(PLANS, 4, dtype=torch.float64)  # began, encoded, received, decoded
    size = 0
    dist.barrier()
    for step in range(PLANS):
        if ranks.rank > 0:
            message = ranks.receive()
            stamps[step, 2] = time.monotonic()
            decoder(message)
        else:
            plan = requests.plan(step)
            inputs = build_inputs(plan)
            busy(BUSY_S)
            stamps[step, 0] = time.monotonic()
            message = encoder.step(plan, inputs)
            stamps[step, 1] = time.monotonic()
            ranks.send(message)
            size = message.nbytes
        stamps[step, 3] = time.monotonic()
    every = [torch.empty_like(stamps) for _ in range(ranks.size)]
    dist.all_gather(every, stamps)
    began, encoded = every[0][:, 0], every[0][:, 1]
    received = torch.stack([each[:, 2] for each in every[1:]]).max(0).values
    decoded = torch.stack([each[:, 3] for each in every[1:]]).max(0).values
    warm = slice(PLANS // 10, None)
    return {
        **summary((decoded - began)[warm].tolist()),
        "encode_us": summary((encoded - began)[warm].tolist())["median_us"],
        "broadcast_us": summary((received - encoded)[warm].tolist())["median_us"],
        "decode_us": summary((decoded - received)[warm].tolist())["median_us"],
        "bytes": size,
    }


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def collective(call: Callable[[], object], repeats: int = 200) -> dict[str, float]:
    """The time of a call that all ranks make repeatedly."""
    times = []
    dist.barrier()
    for _ in range(repeats):
        began = time.monotonic()
        call()
        times.append(time.monotonic() - began)
    return summary(times[repeats // 10 + 1 :])


def sampling(ranks: Ranks, vocab: int) -> Figures:
    """The time from the shards' logits to tokens, sampled on rank 0 alone or on every rank."""
    step_sampler = HostStepSampler(NumpySampler())
    widths = [vocab // ranks.size + (rank < vocab % ranks.size) for rank in range(ranks.size)]
    found: Figures = {}
    for rows in (1, 8, 64):
        for name, spec in (("greedy", GREEDY), ("top-p", DRAWN)):
            shard = torch.randn(rows, widths[ranks.rank])
            asked = [(str(row), spec, 0) for row in range(rows)]

            def first(shard: Tensor = shard, asked: list[SampleRequest] = asked) -> None:
                logits = ranks.gather(shard, widths)
                if ranks.rank == 0:
                    step_sampler(logits, asked)

            def every(shard: Tensor = shard, asked: list[SampleRequest] = asked) -> None:
                padded = torch.nn.functional.pad(shard, (0, max(widths) - shard.shape[1]))
                parts = [torch.empty_like(padded) for _ in widths]
                dist.all_gather(parts, padded)
                cut = [part[:, :width] for part, width in zip(parts, widths, strict=True)]
                step_sampler(torch.cat(cut, 1), asked)

            for place, call in (("rank 0", first), ("all", every)):
                found[f"{name}, {rows} rows, {place}"] = collective(call, 400 // (rows + 8))
    return found


def steps(executor: Executor, repeats: int) -> dict[str, float]:
    """Median milliseconds of each kind of step."""
    found = {}
    for name, rows, tokens in STEPS:
        requests, times = Rows(rows, STEP_CONTEXT, repeats), []
        for step in range(repeats):
            plan = prompt(step, tokens) if tokens > 1 else requests.plan(step)
            began = time.monotonic()
            executor.execute(plan)
            times.append(time.monotonic() - began)
        found[name] = statistics.median(times[2:]) * 1e3
    return found


def load(ranks: Ranks) -> tuple[ModelRunner, int]:
    """(runner, size of the vocabulary)"""
    config = EngineConfig(device="cpu", weights="fp32", kv_blocks=1024, max_model_len=1024)
    if dist.get_world_size() == 3:
        files = resolve_model(None, default_cache_dir())
        runner, info = load_executor(config, files, ranks)
    else:
        runner, info = random_executor(spec(), config, ranks=ranks)
    return runner, info.vocab_size


def spec() -> ModelSpec:
    return ModelSpec.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 49152,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        }
    )


def measure(ranks: Ranks, repeats: int, report: Callable[[str], None]) -> dict[str, object]:
    found: dict[str, object] = {"ranks": ranks.size}
    report("one rank")
    if ranks.rank == 0:
        alone, _ = load(SingleRank())
        found["threads_alone"] = torch.get_num_threads()
        found["step_ms_alone"] = steps(alone, repeats)
        alone.close()
        del alone
        gc.collect()
    ranks.minimum(0)  # the others sleep until here
    report("all ranks")
    runner, vocab = load(ranks)
    found["threads"] = torch.get_num_threads()
    if ranks.rank == 0:
        executor = lead(runner, ranks)
        found["step_ms"] = steps(executor, repeats)
        executor.close()
    else:
        follow(runner, ranks)
    report("messages")
    found["plan"] = {f"{rows} rows": plans(ranks, rows) for rows in PLAN_ROWS}
    found["all_reduce"] = {
        f"{len(x)} x 576": collective(partial(ranks.all_reduce_, x))
        for x in (torch.zeros(rows, 576) for rows in (1, 8, 64, 512))
    }
    found["any"] = collective(partial(ranks.broadcast_flag, False))
    found["sampling"] = sampling(ranks, vocab)
    return found


def tables(found: dict[str, object]) -> Iterator[Table]:
    for title in ("plan", "all_reduce", "sampling"):
        figures: Figures = found[title]  # type: ignore[assignment]
        columns = list(next(iter(figures.values())))
        rows = [(name, *(f"{row[each]:.0f}" for each in columns)) for name, row in figures.items()]
        yield table_of(f"{title}, {found['ranks']} ranks", ("", *columns), rows)
    alone: dict[str, float] = found["step_ms_alone"]  # type: ignore[assignment]
    together: dict[str, float] = found["step_ms"]  # type: ignore[assignment]
    threads = f"{found['threads_alone']} threads alone, {found['threads']} per rank"
    rows = [
        (name, *(f"{each:.1f}" for each in (alone[name], ms, ms - alone[name])))
        for name, ms in together.items()
    ]
    title = f"milliseconds per step, {found['ranks']} ranks ({threads})"
    yield table_of(title, ("", "alone", "together", "overhead"), rows)


def main() -> None:
    parser = benchmark_parser(__doc__, repeats=3)
    parser.add_argument("--ranks", type=int, default=2, help="2 or more")
    parser.add_argument("--repeats", type=int, default=30, help="steps of each kind")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("argument --ranks: 2 or more")
    if "RANK" not in os.environ:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        command = [sys.executable, "-m", *launcher, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command).returncode)
    ranks = TorchRanks.join(torch.device("cpu"), timeout_s=300.0)
    console = Console(quiet=ranks.rank > 0)
    found = measure(ranks, args.repeats, lambda line: console.print(line, style="dim"))
    for table in tables(found) if ranks.rank == 0 else ():
        console.print(table)
    if ranks.rank == 0:
        save(args.json, {"figures": found})
    ranks.close()


if __name__ == "__main__":
    main()
