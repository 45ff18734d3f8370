"""The executor of one process: ModelRunner turns a StepPlan into sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bros.core.plan import (
    PENDING,
    Chunk,
    KvCopies,
    ReadPositions,
    StepPlan,
    StepResult,
    SuspendedStep,
)
from bros.executor.cuda.graphs import StepGraphs
from bros.executor.inputs import InputUploader, PendingTokens, StepInputs, build_inputs
from bros.executor.kept_states import KeptStates
from bros.executor.kv_storage import KvMemory
from bros.executor.models.decoder import BeforeLayer, Decoder, Stopped
from bros.executor.readout import PendingPools, PendingScores, pool_hidden, score_hidden
from bros.executor.sampler import DeviceStepSampler, PendingSamples, StepSampler


class StepOutputs(NamedTuple):
    """What a step computes on the device.

    logits: fp32 [samples, vocab]; [0, vocab] on ranks other than 0.
    scores, pooled: of the step's readouts; None if it has none.
    best: see Replayed; None if the step was no replay.
    """

    logits: Tensor
    scores: PendingScores | None = None
    pooled: PendingPools | None = None
    best: Tensor | None = None

    def readouts(self) -> tuple[ReadPositions, ...]:
        """The results of the readouts; the device must have ended the step."""
        if self.scores is None or self.pooled is None:
            return ()
        return (*self.scores.finish(), *self.pooled.finish())


class ModelRunner:
    """Runs plans on one device. Implements core.interfaces.SuspendingExecutor.

    `execute` is `prepare`, `compute` and `result`; the runners of several ranks call these three
    themselves, in inference mode.

    The scheduler owns the blocks: the runner does not check that earlier plans have written the
    KV that a plan's segments name.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KvMemory,
        uploader: InputUploader,
        step_sampler: StepSampler,
        *,
        vocab_size: int,
        graphs: StepGraphs | None = None,
    ) -> None:
        """vocab_size: of all ranks together.
        graphs: replays the steps for which it has captured a graph.
        """
        self._vocab_size = vocab_size
        self._decoder: Decoder | None = decoder
        self._kv = kv
        self._uploader = uploader
        self._step_sampler = step_sampler
        self._graphs = graphs
        self._kept = KeptStates()

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | SuspendedStep | None:
        """Run one step; afterwards K and V of every token in the plan are cached.

        should_abort: called before each layer. If it returns True there, the step is suspended. It
            is also called before the replay of a graph, and while prompts are scored after the last
            layer; if it returns True there, the step is aborted.
        """
        inputs = self.prepare(build_inputs(plan), plan.copies)
        outputs = self.compute(inputs, should_abort)
        if outputs is None or isinstance(outputs, SuspendedStep):
            return outputs
        return self.result(plan.step, outputs, inputs)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Like execute, but returns the fp32 logits [chunks with a sample spec, vocab]."""
        outputs = self.compute(self.prepare(build_inputs(plan)))
        assert isinstance(outputs, StepOutputs), "a step yields only if should_abort is given"
        return outputs.logits if self._graphs is None else outputs.logits.clone()

    @property
    def device(self) -> torch.device:
        return self._kv.layers[0][0].device

    @property
    def num_layers(self) -> int:
        return len(self._kv.layers)

    def prepare(self, inputs: StepInputs, copies: KvCopies | None = None) -> StepInputs:
        """Start a plan's KV copies, and drop what it drops; returns the inputs for `compute`."""
        if copies is not None:
            self._kv.copy(copies)
        self._kept.drop(inputs.dropped)
        self._kv.note(inputs.slots, inputs.positions)
        return inputs

    def compute(
        self,
        inputs: StepInputs,
        should_abort: Callable[[], bool] | None = None,
        pending: PendingTokens | None = None,
    ) -> StepOutputs | SuspendedStep | None:
        """What the step has computed, None if it was aborted.

        The next step may overwrite it: the logits of a replayed graph lie in a static buffer.

        inputs: from `prepare`.
        should_abort: see `execute`.
        pending: input tokens that only the device knows.
        """
        decoder, graphs = self._decoder, self._graphs
        assert decoder is not None, "the executor is closed"
        graph = None if graphs is None else graphs.find(inputs, whole=should_abort is None)
        if graphs is None or graph is None:
            return self._run(decoder, inputs, pending, should_abort)
        if should_abort is not None and should_abort():
            return None
        self._kv.wait_for_layer(len(self._kv.layers) - 1)
        replayed = graphs.replay(graph, inputs, pending)
        return StepOutputs(replayed.logits, best=replayed.best)

    def _run(
        self,
        decoder: Decoder,
        inputs: StepInputs,
        pending: PendingTokens | None,
        should_abort: Callable[[], bool] | None,
    ) -> StepOutputs | SuspendedStep | None:
        """Run a step without a graph."""

        def upload(part: StepInputs) -> StepInputs:
            return self._uploader(part, pending, self._kv.positions)

        first, joining = self._kept.take(inputs, upload)
        before_layer = self._before_layer(should_abort)
        found = decoder.run(first, self._kv.layers, before_layer, joining)
        if isinstance(found, Stopped):
            return self._kept.suspend(inputs, found, joining, self.num_layers)
        hidden, logits = found
        num_samples = len(inputs.sample_rows)
        if len(hidden) == num_samples:
            return StepOutputs(logits)
        first_pooled = num_samples + inputs.num_scored
        reads = score_hidden(
            hidden[num_samples:first_pooled],
            decoder.lm_head,
            [request for request in inputs.readouts if request.readout.pooling is None],
            self._vocab_size,
            should_abort,
        )
        if reads is None:
            return None
        requests = [request for request in inputs.readouts if request.readout.pooling is not None]
        return StepOutputs(logits, reads, pool_hidden(hidden[first_pooled:], requests))

    def result(self, step: int, outputs: StepOutputs, inputs: StepInputs) -> StepResult:
        """Sample the tokens of a step from its logits, and finish its readouts."""
        samples = self._step_sampler(outputs.logits, inputs.samples)
        return StepResult(step, samples, outputs.readouts())

    def close(self) -> None:
        """Release weights and KV memory; `execute` fails afterwards. May be called twice."""
        self._decoder = self._graphs = None
        self._kept.clear()
        self._kv.clear()

    def _before_layer(self, should_abort: Callable[[], bool] | None) -> BeforeLayer:
        """None if there is nothing to wait or to ask for."""
        wait_for_layer = self._kv.wait_for_layer
        if should_abort is None and not self._kv.copies_in_background:
            return None

        def before_layer(layer: int) -> bool:
            wait_for_layer(layer)
            return should_abort is not None and should_abort()

        return before_layer


# ---- Asynchronous execution: a runner that launches a step while the previous one still runs.
#
# host     launch 1 | launch 2 ..........| result 1 | launch 3 | result 2
# device            [ step 1 .......... ][ step 2 ........... ][ step 3
# tokens                                 1 -> 2                2 -> 3        stay on the device


class LaunchedStep:
    """A step that was launched. Implements core.interfaces.StepHandle."""

    def __init__(self, plan: StepPlan, samples: PendingSamples, outputs: StepOutputs) -> None:
        self._step = plan.step
        self._samples = samples
        self._outputs = outputs
        self._result: StepResult | None = None
        self._names = [name for name, _, _ in samples.requests]

    def result(self) -> StepResult:
        """Wait for the end of the step."""
        if self._result is None:
            # The samples' event comes after the copies of the readouts.
            samples = self._samples.finish()
            self._result = StepResult(self._step, samples, self._outputs.readouts())
        return self._result

    def rows_of(self, request_ids: Sequence[str]) -> NDArray[np.int32]:
        """int32 [requests], the indexes of their tokens in `tokens`; -1 where the host samples."""
        rows = self._rows(request_ids)
        if self._samples.host_rows:
            rows[np.isin(rows, self._samples.host_rows)] = -1
        return rows

    def tokens_of(self, request_ids: Sequence[str]) -> list[int]:
        """Wait for the end of the step; returns the tokens of requests, 0 where sampling failed."""
        samples = self.result().samples
        return [max(0, samples[row].token_id) for row in self._rows(request_ids).tolist()]

    def _rows(self, request_ids: Sequence[str]) -> NDArray[np.int32]:
        if request_ids == self._names:  # as in most steps
            return np.arange(len(self._names), dtype=np.int32)
        rows = {name: row for row, name in enumerate(self._names)}
        return np.array([rows[name] for name in request_ids], np.int32)

    @property
    def tokens(self) -> Tensor | None:
        """int32 [samples], on the device; None if the host samples all of them."""
        return self._samples.tokens

    def wait(self) -> None:
        """Wait for the device, without sampling what the host has to sample."""
        self._samples.wait()


class LaunchingRunner(ModelRunner):
    """Implements core.interfaces.LaunchingExecutor."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KvMemory,
        uploader: InputUploader,
        step_sampler: DeviceStepSampler,
        *,
        vocab_size: int,
        graphs: StepGraphs | None = None,
    ) -> None:
        super().__init__(decoder, kv, uploader, step_sampler, vocab_size=vocab_size, graphs=graphs)
        self._device_sampler = step_sampler
        self._last: LaunchedStep | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step on the device behind the previous one. Waits for the previous step only if
        the host samples a token of it that this step needs."""
        inputs = self.prepare(build_inputs(plan), plan.copies)
        return self.begin(plan, inputs, self.pending(plan, inputs))

    def begin(
        self, plan: StepPlan, inputs: StepInputs, pending: PendingTokens | None
    ) -> LaunchedStep:
        """The second half of `launch`. inputs: from `prepare`; pending: from `pending`."""
        outputs = self.compute(inputs, pending=pending)
        assert isinstance(outputs, StepOutputs), "a step yields only if should_abort is given"
        samples = self._device_sampler.begin(outputs.logits, inputs.samples, outputs.best)
        self._last = LaunchedStep(plan, samples, outputs)
        return self._last

    def result(self, step: int, outputs: StepOutputs, inputs: StepInputs) -> StepResult:
        """See ModelRunner; a replayed step has found its best tokens already."""
        samples = self._device_sampler.begin(outputs.logits, inputs.samples, outputs.best)
        return StepResult(step, samples.finish(), outputs.readouts())

    def pending(self, plan: StepPlan, inputs: StepInputs) -> PendingTokens | None:
        """The PENDING tokens of a plan that only the device knows; None if there are none.

        Writes those that the host knows into inputs.token_ids, for which it waits for the previous
        step.
        """
        ids = inputs.token_ids.numpy()
        at = np.flatnonzero(ids == PENDING)
        if not len(at):
            return None
        last = self._last
        assert last is not None, "the first step has no pending tokens"
        chunks: Sequence[Chunk] = plan.chunks
        if len(at) < len(chunks):
            chunks = [chunk for chunk in chunks if chunk.token_ids[0] == PENDING]
        names = [chunk.request_id for chunk in chunks]
        rows = last.rows_of(names)
        on_host = np.flatnonzero(rows < 0)
        if len(on_host):
            ids[at[on_host]] = last.tokens_of([names[index] for index in on_host.tolist()])
        if last.tokens is None or len(on_host) == len(rows):
            return None
        sources = np.full(len(ids), -1, np.int32)
        sources[at] = rows
        return PendingTokens(last.tokens, torch.from_numpy(sources))

    def close(self) -> None:
        """Wait for the launched step, then release weights and KV memory."""
        if self._last is not None:
            self._last.wait()
            self._last = None
        super().close()
