"""What bookkeeping of KV memory costs per block, and whether that grows with the memory.

    python benchmarks/kv_cache_speed.py [--quick] [--json FILE]

Two hundred requests of both classes hold 40 % of the blocks, finished prompts that others may find
are in the rest, and none is free. For robbing, best-effort requests hold all of it. Only integers
are moved here, no KV. The last row is one whole step of the scheduler: 64 requests decode in a
cache full of other prompts.

Some rows are several operations on a block, which are not told apart: whoever is robbed is chosen,
loses it, gets slots on the host for copies, and it is filled by the other one. The second column
says how many there are; times are for all of them together.

At most 10 microseconds per operation are asked for, and rows are held to that as a whole, however
many operations they are; the exit status is 1 if one takes longer. Run it with nothing else on the
machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from scheduler_speed import FAST
from scheduler_speed import run as run_steps

from bros.bench.results import environment
from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo
from bros.core.request import EngineRequest, SamplingParams, ServiceClass
from bros.kvcache.blocks import Side
from bros.kvcache.manager import KvCacheManager
from bros.kvcache.prefix_cache import PrefixCache, extend_keys
from bros.kvcache.sharing import Match
from bros.scheduler.build import build_scheduler

T = TypeVar("T")
SIZES = (1_000, 10_000, 100_000)
BLOCK = 16
HOLDERS = 200
PROMPT = 16
"""Blocks of a prompt that comes and goes."""
ROWS, STEPS = 64, 50
ASKED_US = 10.0

OPERATIONS = {
    "append, evicting": 2,  # evict, push
    "pop, with checkpoint": 3,  # pop, slots on the host, push
    "pop, copied before": 3,
    "pop of one token": 3,
    "restore": 2,  # find the copies, push
}
"""On each block, where it is not one."""

Samples = dict[str, list[float]]
"""Microseconds per block, by operation."""


class Pool:
    """A KvCacheManager, what is in it, and a watch.

    held: share of the blocks that the holders have. full: all of them best-effort, and two more
    requests have the rest; "spare" as much as the others need beside what they are robbed of.
    """

    def __init__(self, num_blocks: int, held: float, *, full: bool = False) -> None:
        self._random = random.Random(num_blocks)
        cache = PrefixCache("class-aware", protected=num_blocks // 4)
        self.kv = KvCacheManager(num_blocks, BLOCK, num_host_blocks=num_blocks, prefixes=cache)
        self.samples: Samples = {}
        self.holders = [f"holder {number}" for number in range(HOLDERS)]
        self.prompts: list[list[bytes]] = []
        for number, name in enumerate(self.holders):
            side = Side.RIGHT if full else self.side(number)
            self.compute(name, int(held * num_blocks / HOLDERS) * BLOCK, side)
        if full:
            free = self.kv.num_blocks - self.kv.num_used_blocks
            assert self.kv.append("the rest", (free - 2 * PROMPT) * BLOCK, Side.RIGHT)
            self.have_the_spare()

    @staticmethod
    def side(number: int) -> Side:
        return Side(number % 2)

    def timed(self, operation: str, blocks: int, call: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - began
        self.samples.setdefault(operation, []).append(seconds * 1e6 / blocks)
        return result

    def compute(self, name: str, tokens: int, side: Side) -> list[bytes]:
        """A request with a prompt that nobody else has; the keys of its full blocks."""
        keys = [self._random.randbytes(16) for _ in range(tokens // BLOCK)]
        match = self.kv.match(keys)
        assert self.kv.append(name, tokens, side, match=match)
        self.kv.computed(name, keys, side)
        return keys

    def have_the_spare(self) -> None:
        blocks = self.kv.num_blocks - self.kv.num_used_blocks
        assert self.kv.append("spare", blocks * BLOCK, Side.RIGHT)

    def pass_by(self, side: Side) -> None:
        """A prompt comes and goes, and stays in the cache."""
        self.prompts.append(self.compute("passing", PROMPT * BLOCK, side))
        self.kv.free("passing")

    def fill_cache(self) -> None:
        """Prompts of both classes come and go until no block is free."""
        free = self.kv.num_blocks - self.kv.num_used_blocks
        for number in range(free // PROMPT + 1):
            self.pass_by(self.side(number))
        assert self.kv.num_cached_blocks == free, "none is free"

    def any_cached_prompt(self) -> list[bytes]:
        """The keys of one that is there as a whole; not always the one used last."""
        while True:
            keys = self._random.choice(self.prompts)
            if len(self.kv.match(keys).nodes) == PROMPT:
                return keys


def come_and_go(pool: Pool, number: int) -> None:
    """A prompt that is new, for which others are evicted, and which stays in the cache."""
    kv, side, tokens = pool.kv, pool.side(number), PROMPT * BLOCK
    prompt = array("i", (pool_token(number, index) for index in range(tokens)))
    keys: list[bytes] = []
    pool.timed("key of a block", PROMPT, lambda: extend_keys(keys, prompt, BLOCK, PROMPT))
    match = kv.match(keys)
    assert not match.nodes
    evicted = kv.num_evicted_blocks(side)
    pool.timed("append, evicting", PROMPT, lambda: kv.append("new", tokens, side, match=match))
    assert kv.num_evicted_blocks(side) - evicted == PROMPT
    pool.timed("publish", PROMPT, lambda: kv.computed("new", keys, side))
    pool.timed("free, keeping", PROMPT, lambda: kv.free("new"))
    pool.prompts.append(keys)


def pool_token(number: int, index: int) -> int:
    return number * PROMPT * BLOCK + index


def share(pool: Pool, number: int) -> None:
    """A prompt that is cached, found by two requests; then the blocks of a third are free."""
    kv, keys, side = pool.kv, pool.any_cached_prompt(), pool.side(number)
    match = pool.timed("match", PROMPT, lambda: kv.match(keys))

    def join(name: str, found: Match) -> None:
        assert kv.append(name, BLOCK, side, match=found)

    pool.timed("join, idle prefix", PROMPT + 1, lambda: join("first", match))
    match = kv.match(keys)
    pool.timed("join, held prefix", PROMPT + 1, lambda: join("second", match))
    pool.timed("free, shared", PROMPT + 1, lambda: kv.free("second"))
    kv.free("first")
    match = kv.match(keys)
    pool.timed("match, as before", PROMPT, lambda: kv.match(keys, match))
    assert kv.append("passing", PROMPT * BLOCK, side)
    pool.timed("free, for good", PROMPT, lambda: kv.free("passing", keep=False))
    pool.timed("append, free", PROMPT, lambda: kv.append("passing", PROMPT * BLOCK, side))
    kv.free("passing", keep=False)
    pool.pass_by(side)  # so that no block is free again


def decode(pool: Pool) -> None:
    """One token for everybody, in turn; a sixteenth of them needs a block for it."""
    kv = pool.kv

    def step() -> None:
        for number, name in enumerate(pool.holders):
            kv.append(name, 1, pool.side(number))

    pool.timed("decode append (per token)", HOLDERS, step)


def rob_and_restore(pool: Pool, number: int, operation: str) -> None:
    """A real-time prompt takes blocks from others, who then bring back what they miss."""
    kv, first = pool.kv, number * PROMPT % HOLDERS
    order = [*pool.holders[first:], *pool.holders[:first]]

    def rob() -> None:
        assert kv.append("prompt", PROMPT * BLOCK, Side.LEFT, lambda: order)
        kv.take_losses()
        kv.take_copies()

    pool.timed(operation, PROMPT, rob)
    robbed = [name for name in order if kv.num_missing(name)]
    assert sum(map(kv.num_missing, robbed)) == PROMPT * BLOCK
    kv.free("prompt", keep=False)
    kv.free("spare", keep=False)
    pool.timed("restore", PROMPT, lambda: restore(pool, robbed))
    for name in robbed:
        kv.truncate(name, kv.num_tokens(name) - 1)
    pool.have_the_spare()


def rob_tokens(pool: Pool, number: int) -> None:
    """A real-time request decodes over the tokens of others, one by one."""
    kv, first = pool.kv, (number * PROMPT + PROMPT // 2) % HOLDERS  # of whom there are no copies
    order = [*pool.holders[first:], *pool.holders[:first]]

    def rob() -> None:
        for _ in range(BLOCK):
            assert kv.append("chat", 1, Side.LEFT, lambda: order)
            kv.take_losses()
        kv.take_copies()

    pool.timed("pop of one token", BLOCK, rob)
    robbed = [name for name in order if kv.num_missing(name)]
    assert sum(map(kv.num_missing, robbed)) == BLOCK
    kv.free("chat", keep=False)
    kv.free("spare", keep=False)
    restore(pool, robbed)
    for name in robbed:
        kv.truncate(name, kv.num_tokens(name) - 1)
    pool.have_the_spare()


def restore(pool: Pool, robbed: list[str]) -> None:
    for name in robbed:
        assert pool.kv.append(name, 1, Side.RIGHT)
    pool.kv.take_copies()
    assert not pool.kv.take_cuts(), "there was room on the host"


def decoding_step_us(num_blocks: int) -> list[float]:
    """Microseconds of schedule and apply for 64 rows, in a cache full of finished prompts."""
    info = EngineInfo(
        model="none", weights="", kernels="", kv_dtype="", device="", max_model_len=4096,
        vocab_size=2**31 - 1, block_size=BLOCK, num_kv_blocks=num_blocks, policy="bros",
    )  # fmt: skip
    config = EngineConfig(max_num_seqs=ROWS, max_batch_tokens=64 * 1024, slo_ttft=1e6)
    scheduler = build_scheduler(config, info, FAST)

    def submit(first: int, count: int, prompt_blocks: int, outputs: int) -> None:
        for number in range(first, first + count):
            tokens = range(number * 1024 + 1, number * 1024 + 1 + prompt_blocks * BLOCK)
            scheduler.submit(
                EngineRequest(
                    request_id=str(number),
                    prompt_token_ids=tokens,
                    sampling=SamplingParams(max_tokens=outputs, ignore_eos=True),
                    service_class=ServiceClass.RT if number % 2 else ServiceClass.BE,
                ),
                now=0.0,
            )

    prompts = num_blocks // 32 + 1
    for first in range(0, prompts, ROWS):
        submit(first, min(ROWS, prompts - first), 32, 1)
        while scheduler.has_work:
            run_steps(scheduler, 1)
    submit(prompts, ROWS, 4, 2 * STEPS)
    run_steps(scheduler, STEPS // 2)
    assert sum(counts.running for counts in scheduler.stats().by_class.values()) == ROWS
    return [milliseconds * 1e3 for milliseconds in run_steps(scheduler, STEPS)]


def measure(num_blocks: int, rounds: int) -> dict[str, float]:
    """Median microseconds per block of each operation."""
    pool = Pool(num_blocks, held=0.4)
    pool.fill_cache()
    for number in range(rounds):
        come_and_go(pool, number)
        share(pool, number)
    for number, name in enumerate(pool.holders):
        pool.kv.append(name, 1 + number % BLOCK, pool.side(number))
    for _ in range(BLOCK):
        decode(pool)
    pool.kv.check_integrity()
    full = Pool(num_blocks, held=0.8, full=True)
    for number in range(min(rounds, HOLDERS // PROMPT)):
        # The same ones again, of whom there are copies already.
        rob_and_restore(full, number, "pop, with checkpoint")
        rob_and_restore(full, number, "pop, copied before")
        rob_tokens(full, number)
    full.kv.check_integrity()
    samples = pool.samples | full.samples
    return {operation: statistics.median(times) for operation, times in samples.items()}


def show(found: dict[int, dict[str, float]], steps: dict[int, float], console: Console) -> None:
    """Sizes side by side, so that what grows with the memory is seen."""
    table = Table(title=f"microseconds per block, by blocks in the cache (asked: {ASKED_US:g})")
    table.add_column("")
    table.add_column("operations", justify="right")
    for size in found:
        table.add_column(f"{size:,}", justify="right")
    table.add_column("last / first", justify="right")
    sizes = list(found)
    for operation in found[sizes[0]]:
        row = [found[size][operation] for size in sizes]
        cells = [f"[{'green' if us <= ASKED_US else 'red'}]{us:.2f}[/]" for us in row]
        count = str(OPERATIONS.get(operation, 1))
        table.add_row(operation, count, *cells, f"{row[-1] / row[0]:.2f}")
    table.add_section()
    row = [steps[size] for size in sizes]
    label = f"scheduler step, {ROWS} rows (ms)"
    table.add_row(label, "", *(f"{us / 1e3:.3f}" for us in row), f"{row[-1] / row[0]:.2f}")
    console.print(table)


def slow_ones(found: dict[int, dict[str, float]]) -> Iterator[str]:
    for size, medians in found.items():
        for operation, us in medians.items():
            if us > ASKED_US:
                yield f"{operation} at {size:,} blocks: {us:.1f} microseconds per block"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="20 rounds")
    parser.add_argument("--json", type=Path, help="where to save the figures")
    args = parser.parse_args()
    rounds = 20 if args.quick else args.rounds
    console = Console()
    found = {size: measure(size, rounds) for size in SIZES}
    steps = {size: statistics.median(decoding_step_us(size)) for size in SIZES}
    show(found, steps, console)
    slow = list(slow_ones(found))
    for line in slow:
        console.print(f"too slow: {line}", style="red")
    if args.json:
        result = {
            "environment": asdict(environment(SystemClock())),
            "rounds": rounds,
            "asked_us": ASKED_US,
            "operations_per_block": OPERATIONS,
            "us_per_block": found,
            "scheduler_step_us": steps,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"saved {args.json}")
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
