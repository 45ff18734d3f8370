"""ModelRunner: the executor of one process, from a plan to sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bros.core.plan import SampledToken, SampleSpec, StepPlan, StepResult
from bros.executor.inputs import build_inputs
from bros.executor.kv_storage import KvStorage
from bros.executor.models.decoder import Decoder
from bros.executor.sampler import Sampler


class ModelRunner:
    """Runs plans on this machine's CPU. Implements core.interfaces.Executor.

    What a plan's segments name must have been written by earlier plans: nothing is checked
    here, the scheduler owns the blocks.
    """

    def __init__(self, decoder: Decoder, kv: KvStorage, sampler: Sampler) -> None:
        self._decoder: Decoder | None = decoder
        self._kv = kv
        self._sampler = sampler

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, abandon: Callable[[], bool] | None = None
    ) -> StepResult | None:
        """Run one iteration; K and V of every token in the plan are cached afterwards.

        abandon: asked before each layer; None is returned as soon as it says yes.
        """
        decoder = self._running_decoder()
        if plan.copies is not None:
            self._kv.copy(plan.copies)
        inputs = build_inputs(plan)
        logits = decoder(inputs, self._kv.layers, abandon)
        if logits is None:
            return None
        rows = zip(inputs.samples, logits, strict=True)
        return StepResult(
            plan.step, tuple(self._sample(name, spec, row) for (name, spec), row in rows)
        )

    def _sample(self, request_id: str, spec: SampleSpec, logits: Tensor) -> SampledToken:
        """Broken logits fail their own request only."""
        try:
            ((token_id, logprobs),) = self._sampler.sample(logits[None], [spec])
        except ValueError as error:
            return SampledToken(request_id, -1, error=str(error))
        return SampledToken(request_id, token_id, logprobs)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Like execute, but returns the fp32 logits [chunks with a sample spec, vocab]."""
        logits = self._running_decoder()(build_inputs(plan), self._kv.layers)
        assert logits is not None, "nobody asked for the step to be given up"
        return logits

    def close(self) -> None:
        """Release weights and KV memory. Calling it twice is fine; executing after it is not."""
        self._decoder = None
        self._kv.clear()

    def _running_decoder(self) -> Decoder:
        assert self._decoder is not None, "the executor is closed"
        return self._decoder
