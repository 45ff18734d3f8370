"""Measures how long copies of KV to the host and back take, beside a step that does next to
nothing."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from bros.core.clock import Clock
from bros.core.interfaces import EngineInfo, Executor
from bros.core.plan import Chunk, KvCopies, SampleSpec, StepPlan
from bros.core.request import SamplingParams
from bros.engine.step_timing import lower_quartile
from bros.scheduler.fitting import CopySample

COPIED_TOKENS = (16, 512, 2048)
"""From a block to about as many as any step copies."""

OVERLAPPED_TOKENS = (4096, 16384, 65536)
"""So many that copies take longer than the step that they run beside."""

_OVERLAPPED_STEPS = 3
"""One after the other, as copies to the host go on while the next step runs."""

_LONGER = 1.2
"""A step that takes so many times as long with copies waits for them."""

_WITHOUT = (True, 0)
"""No copies in either direction."""


def measure_copies(
    executor: Executor,
    info: EngineInfo,
    clock: Clock,
    *,
    repeats: int,
    sizes: Sequence[int] = COPIED_TOKENS,
    overlap: bool = False,
    time_limit_s: float = float("inf"),
    seed: int = 0,
) -> list[CopySample]:
    """How long copies in each direction take beside a step of one row.

    The lower quartile of `repeats` rounds, since other processes only ever add time.

    sizes: tokens; as many as there is room for, rounded down to whole blocks. overlap: copies
    run beside the computation; sizes that it hides are left out. A round before the others
    writes to all of the memory, which is only handed out then. Empty if there is no memory for
    copies, or no time: no step begins that would probably end after `time_limit_s`. Overwrites
    the executor's KV memory.
    """
    maker = _PlanMaker(info, max(sizes), random.Random(seed))
    steps = _OVERLAPPED_STEPS if overlap else 1
    found = sorted({min(size, maker.most) // info.block_size * info.block_size for size in sizes})
    # What is brought back first writes to the cache, then what is copied out to the host.
    kinds = [(out, size) for size in reversed(found) for out in (False, True) if size]
    if not kinds:
        return []
    times: dict[tuple[bool, int], list[float]] = {kind: [] for kind in (*kinds, _WITHOUT)}
    began, longest = clock.now(), 0.0
    for number in range(repeats + 1):
        for kind in times:
            plan = maker.plan(*kind)
            begins = clock.now()
            if begins - began + longest >= time_limit_s:
                break
            for _ in range(steps):
                executor.execute(plan)
            longest = max(longest, clock.now() - begins)
            if number:
                times[kind].append((clock.now() - begins) / steps)
    if not times[_WITHOUT]:
        return []
    alone_s = lower_quartile(times[_WITHOUT])
    with_copies = [
        (out, size, lower_quartile(times[out, size])) for out, size in kinds if times[out, size]
    ]
    if overlap:
        return [CopySample(*found) for found in with_copies if found[-1] > _LONGER * alone_s]
    return [CopySample(out, size, max(both_s - alone_s, 0.0)) for out, size, both_s in with_copies]


class _PlanMaker:
    """Steps of one row, with copies of blocks from all over the cache. most: tokens of these."""

    def __init__(self, info: EngineInfo, most: int, rng: random.Random) -> None:
        self._size = info.block_size
        blocks = min(info.num_host_kv_blocks, info.num_kv_blocks - 1, most // info.block_size)
        self.most = blocks * self._size
        self._blocks = rng.sample(range(1, info.num_kv_blocks), blocks)

    def plan(self, out: bool, tokens: int) -> StepPlan:
        """Copies of so many tokens in one direction, and a row in a block of its own."""
        device = array("i")
        for block in self._blocks[: tokens // self._size]:
            device.extend(range(block * self._size, (block + 1) * self._size))
        host = array("i", range(tokens))
        if out:
            copies = KvCopies(out_device=device, out_host=host)
        else:
            copies = KvCopies(back_device=device, back_host=host)
        greedy = SampleSpec(SamplingParams(temperature=0.0), seed=0, output_index=0)
        row = Chunk("copies", 0, [0], array("i"), array("i", [0]), greedy)
        return StepPlan(step=0, chunks=(row,), copies=copies if tokens else None)
