"""ModelRunner: the executor of one process, from a plan to sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bros.core.plan import KvCopies, StepPlan, StepResult
from bros.executor.choosing import Chooser
from bros.executor.cuda_graphs import StepGraphs
from bros.executor.feed import InputFeed, Pending
from bros.executor.inputs import StepInputs, build_inputs
from bros.executor.kv_storage import KvMemory
from bros.executor.models.decoder import Decoder


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
    ) -> None:
        """graphs: replays the steps that it has a recording for."""
        self._decoder: Decoder | None = decoder
        self._kv = kv
        self._feed = feed
        self._chooser = chooser
        self._graphs = graphs

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, abandon: Callable[[], bool] | None = None
    ) -> StepResult | None:
        """Run one iteration; K and V of every token in the plan are cached afterwards.

        abandon: asked before each layer, or once before a step that is replayed; None is returned
        as soon as it says yes.
        """
        inputs = self.prepare(build_inputs(plan), plan.copies)
        logits = self.compute(inputs, abandon)
        return None if logits is None else self.choose(plan.step, logits, inputs)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Like execute, but returns the fp32 logits [chunks with a sample spec, vocab]."""
        logits = self.compute(self.prepare(build_inputs(plan)))
        assert logits is not None, "nobody asked for the step to be given up"
        return logits if self._graphs is None else logits.clone()

    @property
    def device(self) -> torch.device:
        return self._kv.layers[0][0].device

    @property
    def num_layers(self) -> int:
        return len(self._kv.layers)

    @torch.inference_mode()
    def prepare(self, inputs: StepInputs, copies: KvCopies | None = None) -> StepInputs:
        """Begin a plan's copies, and find what its rows have in common: inputs for `compute`."""
        if copies is not None:
            self._kv.copy(copies)
        return self._feed.grouped(inputs)

    @torch.inference_mode()
    def compute(
        self,
        inputs: StepInputs,
        abandon: Callable[[], bool] | None = None,
        pending: Pending | None = None,
    ) -> Tensor | None:
        """Logits, in a buffer that the next step overwrites if this one is replayed.

        inputs: of `prepare`. abandon: see `execute`. pending: tokens that only the device knows.
        """
        decoder, graphs = self._decoder, self._graphs
        assert decoder is not None, "the executor is closed"
        recording = None if graphs is None else graphs.fitting(inputs)
        if graphs is None or recording is None:
            hook = self._before_layer(abandon)
            return decoder(self._feed(inputs, pending), self._kv.layers, hook)
        if abandon is not None and abandon():
            return None
        self._kv.wait_for_layer(len(self._kv.layers) - 1)
        return graphs.run(recording, inputs, pending)

    @torch.inference_mode()
    def choose(self, step: int, logits: Tensor, inputs: StepInputs) -> StepResult:
        """The tokens of a step with these logits."""
        return StepResult(step, self._chooser(logits, inputs.samples))

    def close(self) -> None:
        """Release weights and KV memory. Calling it twice is fine; executing after it is not."""
        self._decoder = self._graphs = None
        self._kv.clear()

    def _before_layer(self, abandon: Callable[[], bool] | None) -> Callable[[int], bool]:
        wait_for_layer = self._kv.wait_for_layer

        def before_layer(layer: int) -> bool:
            wait_for_layer(layer)
            return abandon is not None and abandon()

        return before_layer
