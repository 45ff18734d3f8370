"""An executor whose steps take the time a cost model says."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from bros.core.clock import ManualClock
from bros.core.interfaces import EngineInfo
from bros.core.plan import SEGMENT_WIDTH, Chunk, KvCopies, SampledToken, StepPlan, StepResult
from bros.profiling.fitting import ChunkShape, StepShape, load_of
from bros.scheduler.cost_model import CostModel


def shape_of(plan: StepPlan, block_size: int) -> StepShape:
    """Blocks that a chunk has in common with the first one, and begins with, are shared."""
    first = _blocks(plan.chunks[0])
    shapes = []
    for index, chunk in enumerate(plan.chunks):
        pairs = zip(_blocks(chunk), first, strict=False)
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        shared = sum(hi - lo for (_, lo, hi), _ in alike) if index else 0
        assert shared % block_size == 0, "only full blocks are shared"
        sampled = chunk.sample is not None
        shapes.append(ChunkShape(len(chunk.token_ids), chunk.start, sampled, shared))
    return tuple(shapes)


def _blocks(chunk: Chunk) -> list[tuple[int, ...]]:
    """Its segments: (block, lo, hi) each."""
    return [
        tuple(chunk.segments[at : at + SEGMENT_WIDTH])
        for at in range(0, len(chunk.segments), SEGMENT_WIDTH)
    ]


class PlantedExecutor:
    """Moves the clock on by model time x noise(), and checks every plan as an engine's would be.

    Slots and context have to lie in the KV memory and not be shared between requests, except for a
    prefix of full blocks that a row has in common with the first one. unwritten: whether blocks may
    be read that were never written to.
    """

    def __init__(
        self,
        model: CostModel,
        info: EngineInfo,
        clock: ManualClock,
        noise: Callable[[], float] = lambda: 1.0,
        unwritten: bool = False,
    ) -> None:
        self._unwritten = unwritten
        self._model, self._info, self._clock, self._noise = model, info, clock, noise
        self._written: set[int] = set()
        self.shapes: list[StepShape] = []

    def execute(self, plan: StepPlan, should_abort: Callable[[], bool] | None = None) -> StepResult:
        shape = shape_of(plan, self._info.block_size)
        self.shapes.append(shape)
        load = load_of(shape)
        if plan.copies is not None:
            self._check_copies(plan.copies, plan)
            load.swap_tokens = len(plan.copies)
            load.swap_out_tokens = len(plan.copies.out_device)
        self._check(plan, shape)
        self._clock.advance(self._model.seconds(load) * self._noise())
        return StepResult(
            plan.step,
            tuple(SampledToken(c.request_id, 0) for c in plan.chunks if c.sample is not None),
        )

    def close(self) -> None:
        pass

    def _check_copies(self, copies: KvCopies, plan: StepPlan) -> None:
        size = self._info.block_size
        self._written.update(slot // size for slot in copies.back_device)
        assert len(copies.out_device) == len(copies.out_host)
        assert len(copies.back_device) == len(copies.back_host)
        device = [*copies.out_device, *copies.back_device]
        host = [*copies.out_host, *copies.back_host]
        own = [slot for chunk in plan.chunks for slot in chunk.slots]
        for slots, blocks in (
            ([*device, *own], self._info.num_kv_blocks),
            (host, self._info.num_host_kv_blocks),
        ):
            assert len(slots) == len(set(slots))
            assert all(0 <= slot < blocks * size for slot in slots)

    def _check(self, plan: StepPlan, shape: StepShape) -> None:
        size = self._info.block_size
        slots: list[int] = []
        for chunk, (_, _, _, shared) in zip(plan.chunks, shape, strict=True):
            assert chunk.start + len(chunk.token_ids) <= self._info.max_model_len
            assert all(0 <= token < self._info.vocab_size for token in chunk.token_ids)
            assert len(chunk.slots) == len(chunk.token_ids)
            context = []
            for block, low, high in _blocks(chunk):
                assert self._unwritten or block in self._written
                context += range(block * size + low, block * size + high)
            assert len(context) == chunk.start
            slots += [*context[shared:], *chunk.slots]
        assert len(slots) == len(set(slots))
        assert all(0 <= slot < self._info.num_kv_blocks * size for slot in slots)
        self._written.update(slot // size for chunk in plan.chunks for slot in chunk.slots)
