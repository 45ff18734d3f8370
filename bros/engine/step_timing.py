"""Measures how long steps take, on any executor, through plans made up for that."""

from __future__ import annotations

import random
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

_TOUCH_TOKENS = 64
"""In one step that touches memory: few enough to stop in time."""

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
    """The typical undisturbed time of each shape: the lower quartile of `repeats` rounds.

    Every round runs all shapes, in another order each time, so that a slow moment of the machine
    touches many shapes once rather than one shape always. Other processes only ever add time, so
    the lower quartile holds where a median would be a matter of luck, with the machine shared
    half of the time. A round before the others warms up, from small steps to large ones.

    No step begins that would probably end after `time_limit_s`. Shapes then count with what there
    is, the first round's time if need be, and those that have not run are left out; the smallest
    one runs in any case. Overwrites the executor's KV memory.
    """
    rng = random.Random(seed)
    maker = _PlanMaker(info, limits, shapes, rng)
    sizes = [sum(chunk.tokens for chunk in shape) for shape in shapes]
    times: list[list[float]] = [[] for _ in shapes]
    began = clock.now()
    for plan in maker.touch_memory():
        if clock.now() < began + time_limit_s / 4:
            executor.execute(plan)
    token_s = 0.0  # of the steps so far, the least time per token
    order = sorted(range(len(shapes)), key=lambda index: sizes[index])
    for count in range(len(shapes) * (repeats + 1)):
        index = order[count % len(order)]
        begins = clock.now()
        if begins + token_s * sizes[index] < began + time_limit_s or count == 0:
            plan = maker.plan(shapes[index])
            begins = clock.now()
            executor.execute(plan)
            times[index].append(clock.now() - begins)
            per_token = times[index][-1] / sizes[index]
            token_s = min(token_s, per_token) if count > 0 else per_token
        progress(count + 1, len(shapes) * (repeats + 1))
        if (count + 1) % len(order) == 0:
            rng.shuffle(order)
    return _typical(shapes, times)


def _typical(shapes: Sequence[StepShape], times: Sequence[Sequence[float]]) -> list[Sample]:
    return [
        Sample(shape, lower_quartile(taken[1:] or taken))
        for shape, taken in zip(shapes, times, strict=True)
        if taken
    ]


def lower_quartile(values: Sequence[float]) -> float:
    """The value that a quarter of the others are below: of five, the second smallest."""
    return sorted(values)[len(values) // 4]


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
        most = min(self._limits.tokens, self._limits.length, _TOUCH_TOKENS)
        return [
            self._plan([self._chunk(0, array("i"), array("i", slots[at : at + most]), False)])
            for at in range(0, len(slots), most)
        ]

    def plan(self, shape: StepShape) -> StepPlan:
        """One request per chunk, each in blocks of its own but for what it shares."""
        size = self._limits.block_size
        chunks, at = [], 0
        for tokens, context, sampled, shared in shape:
            common = self._blocks[: shared // size]  # the first blocks of the first request
            count = -(-(context + tokens) // size) - len(common)
            blocks = common + self._blocks[at : at + count]
            at += count
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
