"""ModelRunner: the executor of one process, from a plan to sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from bros.core.plan import KvCopies, StepPlan, StepResult
from bros.executor.choosing import Chooser
from bros.executor.cuda_graphs import StepGraphs
from bros.executor.feed import InputFeed
from bros.executor.inputs import StepInputs, build_inputs
from bros.executor.models.decoder import Decoder, LayerCache


class KvMemory(Protocol):
    """Where K and V lie."""

    @property
    def layers(self) -> Sequence[LayerCache]:
        """(K, V) per layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        ...

    def copy(self, copies: KvCopies) -> None:
        """Begin to move KV between device and host; what is asked first is done first."""
        ...

    def clear(self) -> None:
        """Give the memory back; it cannot be used afterwards."""
        ...


class ModelRunner:
    """Runs plans on one device. Implements core.interfaces.Executor.

    What a plan's segments name must have been written by earlier plans: nothing is checked
    here, the scheduler owns the blocks.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KvMemory,
        feed: InputFeed,
        chooser: Chooser,
        *,
        graphs: StepGraphs | None = None,
        wait_for_layer: Callable[[int], None] | None = None,
    ) -> None:
        """graphs: replays decode steps that it has a recording for.

        wait_for_layer: makes the device wait for what kv.copy still brings to a layer; None where
        copies are done when kv.copy returns.
        """
        self._decoder: Decoder | None = decoder
        self._kv = kv
        self._feed = feed
        self._chooser = chooser
        self._graphs = graphs
        self._wait_for_layer = wait_for_layer

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, abandon: Callable[[], bool] | None = None
    ) -> StepResult | None:
        """Run one iteration; K and V of every token in the plan are cached afterwards.

        abandon: asked before each layer, or once before a step that is replayed; None is returned
        as soon as it says yes.
        """
        if plan.copies is not None:
            self._kv.copy(plan.copies)
        inputs = self._feed.grouped(build_inputs(plan))
        logits = self._forward(inputs, abandon)
        if logits is None:
            return None
        return StepResult(plan.step, self._chooser(logits, inputs.samples))

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Like execute, but returns the fp32 logits [chunks with a sample spec, vocab]."""
        logits = self._forward(self._feed.grouped(build_inputs(plan)), None)
        assert logits is not None, "nobody asked for the step to be given up"
        return logits if self._graphs is None else logits.clone()

    def close(self) -> None:
        """Release weights and KV memory. Calling it twice is fine; executing after it is not."""
        self._decoder = self._graphs = None
        self._kv.clear()

    def _forward(self, inputs: StepInputs, abandon: Callable[[], bool] | None) -> Tensor | None:
        decoder, graphs = self._decoder, self._graphs
        assert decoder is not None, "the executor is closed"
        recording = None if graphs is None else graphs.fitting(inputs)
        if graphs is None or recording is None:
            hook = self._before_layer(abandon)
            return decoder(self._feed(inputs), self._kv.layers, hook)
        if abandon is not None and abandon():
            return None
        if self._wait_for_layer is not None:
            for layer in range(len(self._kv.layers)):
                self._wait_for_layer(layer)
        return graphs.run(recording, inputs)

    def _before_layer(self, abandon: Callable[[], bool] | None) -> Callable[[int], bool] | None:
        wait = self._wait_for_layer
        if wait is None:
            return None if abandon is None else lambda layer: abandon()

        def before_layer(layer: int) -> bool:
            wait(layer)
            return abandon is not None and abandon()

        return before_layer
