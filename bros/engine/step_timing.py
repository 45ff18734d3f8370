"""Measures how long steps take, on any executor, through plans made up for that."""

from __future__ import annotations

import random
import statistics
from array import array
from collections.abc import Callable, Sequence

from bros.core.clock import Clock
from bros.core.interfaces import EngineInfo, Executor
from bros.core.plan import Chunk, SampleSpec, StepPlan
from bros.core.request import SamplingParams
from bros.engine.step_grid import StepLimits
from bros.scheduler.fitting import Sample, StepShape

Progress = Callable[[int, int], None]
"""Called with steps done and steps in all."""

_GREEDY = SamplingParams(temperature=0.0)


def measure_steps(
    executor: Executor,
    info: EngineInfo,
    limits: StepLimits,
    shapes: Sequence[StepShape],
    clock: Clock,
    *,
    repeats: int,
    time_limit_s: float = float("inf"),
    progress: Progress = lambda done, total: None,
    seed: int = 0,
) -> list[Sample]:
    """The median time of each shape over `repeats` rounds, after one that warms up.

    Every round runs all shapes, in another order each time, so that a slow moment of the machine
    touches many shapes once rather than one shape always. When `time_limit_s` is over, shapes
    count with what there is, the first round's times if need be, and those that have not run are
    left out; one step is run in any case. Overwrites the executor's KV memory.
    """
    rng = random.Random(seed)
    maker = _PlanMaker(info, limits, shapes, rng)
    times: list[list[float]] = [[] for _ in shapes]
    done, total = 0, len(shapes) * (repeats + 1)
    began = clock.now()
    for plan in maker.touch_memory():
        executor.execute(plan)
    order = list(range(len(shapes)))
    for _ in range(repeats + 1):
        for index in order:
            if done > 0 and clock.now() - began >= time_limit_s:
                return _medians(shapes, times)
            plan = maker.plan(shapes[index])
            start = clock.now()
            executor.execute(plan)
            times[index].append(clock.now() - start)
            done += 1
            progress(done, total)
        rng.shuffle(order)
    return _medians(shapes, times)


def _medians(shapes: Sequence[StepShape], times: Sequence[Sequence[float]]) -> list[Sample]:
    return [
        Sample(shape, statistics.median(taken[1:] or taken))
        for shape, taken in zip(shapes, times, strict=True)
        if taken
    ]


class _PlanMaker:
    """Plans of given shapes, for requests that lie scattered over the KV memory as real ones do."""

    def __init__(
        self,
        info: EngineInfo,
        limits: StepLimits,
        shapes: Sequence[StepShape],
        rng: random.Random,
    ) -> None:
        self._limits = limits
        self._vocab = info.vocab_size
        self._rng = rng
        used = max((limits.blocks_of(shape) for shape in shapes), default=0)
        self._blocks = rng.sample(range(limits.blocks), used)
        self._count = 0

    def touch_memory(self) -> list[StepPlan]:
        """Plans that write to every block that will be read.

        Memory that was never written is not there: reading it reads one page of zeros again and
        again, much faster than real context. Two tokens per block reach all of its pages.
        """
        size, half = self._limits.block_size, self._limits.block_size // 2
        slots = [block * size + offset for block in self._blocks for offset in {0, half}]
        most = min(self._limits.tokens, self._limits.length)
        return [
            self._plan([self._chunk(0, array("i"), array("i", slots[at : at + most]), False)])
            for at in range(0, len(slots), most)
        ]

    def plan(self, shape: StepShape) -> StepPlan:
        """One request per chunk, each in blocks of its own."""
        size = self._limits.block_size
        chunks, at = [], 0
        for tokens, context, sampled in shape:
            blocks = self._blocks[at : at + -(-(context + tokens) // size)]
            at += len(blocks)
            segments = array("i")
            for index in range(-(-context // size)):
                segments.extend((blocks[index], 0, min(size, context - index * size)))
            positions = range(context, context + tokens)
            slots = array("i", (blocks[i // size] * size + i % size for i in positions))
            chunks.append(self._chunk(context, segments, slots, sampled))
        return self._plan(chunks)

    def _chunk(self, start: int, segments: array[int], slots: array[int], sampled: bool) -> Chunk:
        self._count += 1
        return Chunk(
            request_id=str(self._count),
            start=start,
            token_ids=[self._rng.randrange(self._vocab) for _ in slots],
            segments=segments,
            slots=slots,
            sample=SampleSpec(_GREEDY, seed=0, output_index=0) if sampled else None,
        )

    def _plan(self, chunks: Sequence[Chunk]) -> StepPlan:
        return StepPlan(step=0, chunks=tuple(chunks))
