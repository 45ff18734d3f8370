"""The cost of KV bookkeeping per block, and whether it grows with the memory.

    python benchmarks/kv_cache_speed.py [--quick] [--json FILE]

Two hundred requests of both classes hold 40 % of the blocks, cached prompts fill the rest, and no
block is free. For preemption, best-effort requests hold all blocks. Only bookkeeping runs, no KV is
copied. The last row is one whole step of the scheduler: 64 requests decode in a full cache.

Some rows combine several operations on a block: for a preemption, choosing the victim, taking its
block, allocating host slots for the copies, and giving the block to the other request. The second
column is their number; times are for all of them together.

The target is 10 microseconds per row (--target), however many operations it combines; the exit
status is 1 if one takes longer. --quick sets a target that any machine meets. Run nothing else on
the machine.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from typing import TypeVar

from harness import FAST, benchmark_parser, greedy_request, judged, model_free_info, save, table_of
from rich.console import Console
from scheduler_speed import run as run_steps

from bros.core.config import EngineConfig
from bros.core.request import ServiceClass
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
"""Blocks of a prompt that is computed and freed."""
ROWS, STEPS = 64, 50
TARGET_US = 10.0

OPERATIONS = {
    "append, evicting": 2,  # evict, append
    "preempt, with checkpoint": 3,  # preempt, host slots, append
    "preempt, copied before": 3,
    "preempt one token": 3,
    "restore": 2,  # find the copies, append
}
"""Operations per block, where they are more than one."""

Samples = dict[str, list[float]]
"""Microseconds per block, by operation."""


class Pool:
    """A KvCacheManager with requests ("holders"), and the times of its operations.

    held: share of the blocks that the holders have.
    full: all holders are best-effort, and two more requests take the rest: "the rest" and "spare",
        whose blocks let victims restore what they lost.
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
            self.take_spare_blocks()

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
        """Compute a request with a unique prompt; returns the keys of its full blocks."""
        keys = [self._random.randbytes(16) for _ in range(tokens // BLOCK)]
        match = self.kv.match(keys)
        assert self.kv.append(name, tokens, side, match=match)
        self.kv.computed(name, keys, side)
        return keys

    def take_spare_blocks(self) -> None:
        blocks = self.kv.num_blocks - self.kv.num_used_blocks
        assert self.kv.append("spare", blocks * BLOCK, Side.RIGHT)

    def cache_prompt(self, side: Side) -> None:
        """Compute and free a prompt, which stays in the cache."""
        self.prompts.append(self.compute("passing", PROMPT * BLOCK, side))
        self.kv.free("passing")

    def fill_cache(self) -> None:
        """Compute and free prompts of both classes until no block is free."""
        free = self.kv.num_blocks - self.kv.num_used_blocks
        for number in range(free // PROMPT + 1):
            self.cache_prompt(self.side(number))
        assert self.kv.num_cached_blocks == free, "a block is free"

    def random_cached_prompt(self) -> list[bytes]:
        """The keys of a random prompt that is completely cached."""
        while True:
            keys = self._random.choice(self.prompts)
            if len(self.kv.match(keys).nodes) == PROMPT:
                return keys


def compute_and_free(pool: Pool, number: int) -> None:
    """Compute and free a new prompt: it evicts others and stays in the cache."""
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


def share_prefix(pool: Pool, number: int) -> None:
    """Two requests share a cached prompt; then blocks are freed and reused uncached."""
    kv, keys, side = pool.kv, pool.random_cached_prompt(), pool.side(number)
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
    pool.cache_prompt(side)  # so that again no block is free


def decode(pool: Pool) -> None:
    """Append one token to each holder; a sixteenth of them needs a new block."""
    kv = pool.kv

    def step() -> None:
        for number, name in enumerate(pool.holders):
            kv.append(name, 1, pool.side(number))

    pool.timed("decode append (per token)", HOLDERS, step)


def preempt_and_restore(pool: Pool, number: int, operation: str) -> None:
    """A real-time prompt preempts victims, which then restore their missing tokens."""
    kv, first = pool.kv, number * PROMPT % HOLDERS
    order = [*pool.holders[first:], *pool.holders[:first]]

    def preempt() -> None:
        assert kv.append("prompt", PROMPT * BLOCK, Side.LEFT, lambda: order)
        kv.take_losses()
        kv.take_copies()

    pool.timed(operation, PROMPT, preempt)
    victims = [name for name in order if kv.num_missing(name)]
    assert sum(map(kv.num_missing, victims)) == PROMPT * BLOCK
    kv.free("prompt", keep=False)
    kv.free("spare", keep=False)
    pool.timed("restore", PROMPT, lambda: restore(pool, victims))
    for name in victims:
        kv.truncate(name, kv.num_tokens(name) - 1)
    pool.take_spare_blocks()


def preempt_tokens(pool: Pool, number: int) -> None:
    """A real-time request decodes and preempts one token of a victim at a time."""
    kv, first = (
        pool.kv,
        (number * PROMPT + PROMPT // 2) % HOLDERS,
    )  # victims without copies on the host
    order = [*pool.holders[first:], *pool.holders[:first]]

    def preempt() -> None:
        for _ in range(BLOCK):
            assert kv.append("chat", 1, Side.LEFT, lambda: order)
            kv.take_losses()
        kv.take_copies()

    pool.timed("preempt one token", BLOCK, preempt)
    victims = [name for name in order if kv.num_missing(name)]
    assert sum(map(kv.num_missing, victims)) == BLOCK
    kv.free("chat", keep=False)
    kv.free("spare", keep=False)
    restore(pool, victims)
    for name in victims:
        kv.truncate(name, kv.num_tokens(name) - 1)
    pool.take_spare_blocks()


def restore(pool: Pool, victims: list[str]) -> None:
    for name in victims:
        assert pool.kv.append(name, 1, Side.RIGHT)
    pool.kv.take_copies()
    assert not pool.kv.take_cuts(), "the host pool was full"


def decoding_step_us(num_blocks: int) -> list[float]:
    """Microseconds of schedule and apply for 64 rows, with a cache full of finished prompts."""
    info = model_free_info(num_blocks, vocab_size=2**31 - 1)
    config = EngineConfig(max_num_seqs=ROWS, max_batch_tokens=64 * 1024, slo_ttft=1e6)
    scheduler = build_scheduler(config, info, FAST)

    def submit(first: int, count: int, prompt_blocks: int, outputs: int) -> None:
        for number in range(first, first + count):
            tokens = range(number * 1024 + 1, number * 1024 + 1 + prompt_blocks * BLOCK)
            service_class = ServiceClass.RT if number % 2 else ServiceClass.BE
            request = greedy_request(str(number), tokens, outputs, service_class)
            scheduler.submit(request, now=0.0)

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
    """Operation -> median microseconds per block."""
    pool = Pool(num_blocks, held=0.4)
    pool.fill_cache()
    for number in range(rounds):
        compute_and_free(pool, number)
        share_prefix(pool, number)
    for number, name in enumerate(pool.holders):
        pool.kv.append(name, 1 + number % BLOCK, pool.side(number))
    for _ in range(BLOCK):
        decode(pool)
    pool.kv.check_integrity()
    full = Pool(num_blocks, held=0.8, full=True)
    for number in range(min(rounds, HOLDERS // PROMPT)):
        # The second time, copies of the same victims exist already.
        preempt_and_restore(full, number, "preempt, with checkpoint")
        preempt_and_restore(full, number, "preempt, copied before")
        preempt_tokens(full, number)
    full.kv.check_integrity()
    samples = pool.samples | full.samples
    return {operation: statistics.median(times) for operation, times in samples.items()}


def show(
    found: dict[int, dict[str, float]], steps: dict[int, float], target_us: float, console: Console
) -> None:
    """Print the sizes side by side, which shows what grows with the memory."""
    sizes = list(found)
    rows = []
    for operation in found[sizes[0]]:
        us = [found[size][operation] for size in sizes]
        cells = [judged(each, target_us) for each in us]
        rows.append((operation, OPERATIONS.get(operation, 1), *cells, f"{us[-1] / us[0]:.2f}"))
    us = [steps[size] for size in sizes]
    cells = [f"{each / 1e3:.3f}" for each in us]
    rows.append((f"scheduler step, {ROWS} rows (ms)", "", *cells, f"{us[-1] / us[0]:.2f}"))
    title = f"microseconds per block, by blocks in the cache (target: {target_us:g})"
    headings = ("", "operations", *(f"{size:,}" for size in sizes), "last / first")
    console.print(table_of(title, headings, rows))


def slow_ones(found: dict[int, dict[str, float]], target_us: float) -> Iterator[str]:
    for size, medians in found.items():
        for operation, us in medians.items():
            if us > target_us:
                yield f"{operation} at {size:,} blocks: {us:.1f} microseconds per block"


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=20, target=1e6)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--target", type=float, default=TARGET_US, help="microseconds per row")
    args = parser.parse_args()
    console = Console()
    found = {size: measure(size, args.rounds) for size in SIZES}
    steps = {size: statistics.median(decoding_step_us(size)) for size in SIZES}
    show(found, steps, args.target, console)
    slow = list(slow_ones(found, args.target))
    for line in slow:
        console.print(f"too slow: {line}", style="red")
    results = {
        "rounds": args.rounds,
        "asked_us": args.target,
        "operations_per_block": OPERATIONS,
        "us_per_block": found,
        "scheduler_step_us": steps,
    }
    save(args.json, results)
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
