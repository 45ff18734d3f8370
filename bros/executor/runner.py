"""ModelRunner: the executor of one process, from a plan to sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bros.core.plan import PENDING, KvCopies, StepPlan, StepResult
from bros.executor.cuda.graphs import StepGraphs
from bros.executor.feed import InputFeed, Pending
from bros.executor.inputs import StepInputs, build_inputs
from bros.executor.kv_storage import KvMemory
from bros.executor.models.decoder import Decoder
from bros.executor.sampler import DeviceStepSampler, PendingSamples, StepSampler


class ModelRunner:
    """Runs plans on one device. Implements core.interfaces.Executor.

    `prepare`, `compute` and `choose` are the parts of `execute` for runners of several ranks;
    they are called in inference mode.

    What a plan's segments name must have been written by earlier plans: nothing is checked
    here, the scheduler owns the blocks.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KvMemory,
        feed: InputFeed,
        step_sampler: StepSampler,
        *,
        graphs: StepGraphs | None = None,
    ) -> None:
        """graphs: replays the steps that it has a recording for."""
        self._decoder: Decoder | None = decoder
        self._kv = kv
        self._feed = feed
        self._step_sampler = step_sampler
        self._graphs = graphs

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        """Run one iteration; K and V of every token in the plan are cached afterwards.

        should_abort: asked before each layer, or once before a step that is replayed; None is
            returned as soon as it says yes.
        """
        inputs = self.prepare(build_inputs(plan), plan.copies)
        logits = self.compute(inputs, should_abort)
        return None if logits is None else self.choose(plan.step, logits, inputs)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Like execute, but returns the fp32 logits [chunks with a sample spec, vocab]."""
        logits = self.compute(self.prepare(build_inputs(plan)))
        assert logits is not None, "a step is aborted only if should_abort is given"
        return logits if self._graphs is None else logits.clone()

    @property
    def device(self) -> torch.device:
        return self._kv.layers[0][0].device

    @property
    def num_layers(self) -> int:
        return len(self._kv.layers)

    def prepare(self, inputs: StepInputs, copies: KvCopies | None = None) -> StepInputs:
        """Begin a plan's copies; returns the inputs for `compute`."""
        if copies is not None:
            self._kv.copy(copies)
        return inputs

    def compute(
        self,
        inputs: StepInputs,
        should_abort: Callable[[], bool] | None = None,
        pending: Pending | None = None,
    ) -> Tensor | None:
        """Logits, in a buffer that the next step overwrites if this one is replayed.

        inputs: of `prepare`.
        should_abort: see `execute`.
        pending: tokens that only the device knows.
        """
        decoder, graphs = self._decoder, self._graphs
        assert decoder is not None, "the executor is closed"
        recording = None if graphs is None else graphs.fitting(inputs)
        if graphs is None or recording is None:
            hook = self._before_layer(should_abort)
            return decoder(self._feed(inputs, pending), self._kv.layers, hook)
        if should_abort is not None and should_abort():
            return None
        self._kv.wait_for_layer(len(self._kv.layers) - 1)
        return graphs.run(recording, inputs, pending)

    def choose(self, step: int, logits: Tensor, inputs: StepInputs) -> StepResult:
        """The tokens of a step with these logits."""
        return StepResult(step, self._step_sampler(logits, inputs.samples))

    def close(self) -> None:
        """Release weights and KV memory. Calling it twice is fine; executing after it is not."""
        self._decoder = self._graphs = None
        self._kv.clear()

    def _before_layer(self, should_abort: Callable[[], bool] | None) -> Callable[[int], bool]:
        wait_for_layer = self._kv.wait_for_layer

        def before_layer(layer: int) -> bool:
            wait_for_layer(layer)
            return should_abort is not None and should_abort()

        return before_layer


# ---- A runner that begins a step while the one before still runs, for devices that run by
# themselves.
#
# host     launch 1 | launch 2 ..........| result 1 | launch 3 | result 2
# device            [ step 1 .......... ][ step 2 ........... ][ step 3
# tokens                                 1 -> 2                2 -> 3        stay on the device


class Launched:
    """A step on its way. Implements core.interfaces.StepHandle."""

    def __init__(self, plan: StepPlan, choice: PendingSamples) -> None:
        self._step = plan.step
        self._choice = choice
        self._result: StepResult | None = None
        self._rows = {name: row for row, (name, _) in enumerate(choice.asked)}
        self._on_host = frozenset(choice.others)

    def result(self) -> StepResult:
        """Wait for its end."""
        if self._result is None:
            self._result = StepResult(self._step, self._choice.finish())
        return self._result

    def row_of(self, request_id: str) -> int | None:
        """Of its token in `tokens`; None if only `result` knows it."""
        row = self._rows[request_id]
        return None if row in self._on_host else row

    def token_of(self, request_id: str) -> int:
        """Waits for the end. A valid one also where none could be chosen."""
        return max(0, self.result().samples[self._rows[request_id]].token_id)

    @property
    def tokens(self) -> Tensor | None:
        """int32, on the device; None if the host chooses all of them."""
        return self._choice.tokens

    def wait(self) -> None:
        """For the device, whatever comes of it."""
        self._choice.wait()


class LaunchingRunner(ModelRunner):
    """Implements core.interfaces.LaunchingExecutor."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KvMemory,
        feed: InputFeed,
        step_sampler: DeviceStepSampler,
        *,
        graphs: StepGraphs | None = None,
    ) -> None:
        super().__init__(decoder, kv, feed, step_sampler, graphs=graphs)
        self._choosing = step_sampler
        self._last: Launched | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step as soon as the one before is done; does not wait for that, unless the host
        chooses a token of it that this one needs."""
        inputs = self.prepare(build_inputs(plan), plan.copies)
        return self.begin(plan, inputs, self.pending(plan, inputs))

    def begin(self, plan: StepPlan, inputs: StepInputs, pending: Pending | None) -> Launched:
        """The second half of `launch`. inputs: of `prepare`; pending: of `pending`."""
        logits = self.compute(inputs, pending=pending)
        assert logits is not None, "a step is aborted only if should_abort is given"
        self._last = Launched(plan, self._choosing.begin(logits, inputs.samples))
        return self._last

    def pending(self, plan: StepPlan, inputs: StepInputs) -> Pending | None:
        """What has to be filled in on the device; what the host knows goes into inputs.token_ids.

        Waits for the step before if the host chooses a token of it that the plan needs.
        """
        ids = inputs.token_ids.numpy()
        places = np.flatnonzero(ids == PENDING)
        if not len(places):
            return None
        last = self._last
        assert last is not None, "the first step has nothing to wait for"
        names = [chunk.request_id for chunk in plan.chunks if chunk.token_ids[0] == PENDING]
        rows = [last.row_of(name) for name in names]
        ids[places] = [
            last.token_of(name) if row is None else PENDING
            for name, row in zip(names, rows, strict=True)
        ]
        if last.tokens is None or all(row is None for row in rows):
            return None
        sources = np.full(len(ids), -1, np.int32)
        sources[places] = [-1 if row is None else row for row in rows]
        return Pending(last.tokens, torch.from_numpy(sources))

    def close(self) -> None:
        """Like that of ModelRunner; what is in flight is waited for."""
        if self._last is not None:
            self._last.wait()
            self._last = None
        super().close()
