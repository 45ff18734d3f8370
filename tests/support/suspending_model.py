"""A model executor that suspends steps, and checks that plans and what it keeps agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bros.core.plan import Chunk, Kept, KvCopies, StepPlan, StepResult, SuspendedStep
from support.toy_model import ToyModel

LAYERS = 8


@dataclass(frozen=True)
class Partial:
    """What is kept of a chunk: its tokens and slots, each with K and V of the layers so far."""

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    slots: tuple[int, ...]
    layer: int


class SuspendingModel(ToyModel):
    """Implements core.interfaces.SuspendingExecutor.

    A slot whose token has been computed in some layers only can be read by no other chunk, copied
    nowhere, and must still be there when the chunk continues.

    kept: what it keeps. layers_run: chunk x layer pairs computed so far.
    continued: chunks that have continued.
    """

    num_layers = LAYERS

    def __init__(self, block_size: int = 4) -> None:
        super().__init__(block_size)
        self.kept: dict[Kept, Partial] = {}
        self.layers_run = 0
        self.continued = 0
        self._partial: dict[int, tuple[Kept, int]] = {}  # slot -> (of what chunk, token)

    @property
    def kept_tokens(self) -> int:
        return sum(len(partial.slots) for partial in self.kept.values())

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | SuspendedStep:
        """should_abort: asked before each layer."""
        for kept in plan.dropped:
            del self.kept[kept]
        starts = self._taken(plan.chunks)
        for layer in range(min(starts), LAYERS):
            if should_abort is not None and should_abort():
                self._suspend(plan, starts, layer)
                return SuspendedStep(plan.step, layer, LAYERS)
            self.layers_run += sum(start <= layer for start in starts)
        for chunk in plan.chunks:
            for slot in chunk.slots:
                self._partial.pop(slot, None)
        result = super().execute(plan)
        assert isinstance(result, StepResult)
        return result

    def _taken(self, chunks: Sequence[Chunk]) -> list[int]:
        """Take what the chunks continue; returns the first layer of each."""
        starts = [0 if chunk.kept is None else chunk.kept.layer for chunk in chunks]
        assert starts == sorted(starts), "rows that join later come last"
        for chunk in chunks:
            if chunk.kept is None:
                continue
            self.continued += 1
            partial, count = self.kept.pop(chunk.kept), len(chunk.slots)
            same = (chunk.request_id, chunk.start, tuple(chunk.token_ids), tuple(chunk.slots))
            tokens, slots = partial.token_ids, partial.slots
            taken = replace(partial, token_ids=tokens[:count], slots=slots[:count])
            assert taken == Partial(*same, chunk.kept.layer)
            if count < len(slots):
                rest = chunk.kept._replace(first=chunk.kept.first + count)
                self.kept[rest] = Partial(
                    chunk.request_id,
                    chunk.start + count,
                    tokens[count:],
                    slots[count:],
                    partial.layer,
                )
            of = chunk.kept._replace(first=0)
            for slot, token in zip(chunk.slots, chunk.token_ids, strict=True):
                assert self._partial[slot] == (of, token), "its KV was overwritten"
        fresh = {chunk.request_id for chunk in chunks if chunk.kept is None}
        left = {partial.request_id for partial in self.kept.values()}
        assert not fresh & left, "a request computes something else than what is kept of it"
        return starts

    def _suspend(self, plan: StepPlan, starts: Sequence[int], layer: int) -> None:
        if plan.copies is not None:
            self._copy(plan.copies)
        for row, (chunk, start) in enumerate(zip(plan.chunks, starts, strict=True)):
            kept = Kept(plan.step, row, layer)
            if start >= layer:
                if chunk.kept is None:
                    continue
                kept = chunk.kept
            slots, tokens = tuple(chunk.slots), tuple(chunk.token_ids)
            self.kept[kept] = Partial(chunk.request_id, chunk.start, tokens, slots, kept.layer)
            for slot, token in zip(slots, tokens, strict=True):
                self._memory.pop(slot, None)
                self._partial[slot] = kept._replace(first=0), token

    def _copy(self, copies: KvCopies) -> None:
        super()._copy(copies)
        for slot in copies.back_device:
            self._partial.pop(slot, None)
