"""Tensor-parallel execution: rank 0 leads with an executor, the other ranks follow its messages.

    rank 0    plan ─▶ inputs ─▶ message ─┬─▶ its shard ─▶ gathered logits ─▶ tokens ─▶ result
    others                               └─▶ its shard ─▶ wait for the next message

All ranks communicate in the same order: the sums and logits of the layers (sharding.py), whether a
step is suspended or aborted, and here:

    host      message of step 7        message of step 8
    device    [ step 7 ........ tokens ][ tokens to all ranks, step 8 ...

Rank 0 sends the tokens of a step only if the next step was planned before they were known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from bros.core.errors import RanksLostError
from bros.core.interfaces import Executor, StepHandle
from bros.core.plan import StepPlan, StepResult, SuspendedStep
from bros.executor.inputs import PendingTokens, build_inputs
from bros.executor.parallel.plan_codec import PlanDecoder, PlanEncoder
from bros.executor.parallel.ranks import Ranks
from bros.executor.runner import LaunchingRunner, ModelRunner

_ABORT_CHECKS = 8
"""About how often a step checks whether it yields. At each check all ranks wait for rank 0."""


def lead(runner: ModelRunner, ranks: Ranks) -> Executor:
    """The executor of rank 0; all other ranks must call `follow`. It can launch if `runner` can."""
    if ranks.size == 1:
        return runner
    if isinstance(runner, LaunchingRunner):
        return ParallelLaunchingRunner(runner, ranks)
    return ParallelRunner(runner, ranks)


@torch.inference_mode()
def follow(runner: ModelRunner, ranks: Ranks) -> None:
    """Compute the steps that rank 0 sends until its executor is closed, then close `runner`.

    Raises RanksLostError if another rank ended, and whatever a step raises. Rank 0 then gets a
    RanksLostError.
    """
    decode = PlanDecoder()
    num_sampled = 0
    while (step := decode(ranks.receive())) is not None:
        inputs = runner.prepare(step.inputs, step.copies)
        pending = None
        if step.sources is not None:
            tokens = torch.zeros(num_sampled, dtype=torch.int32, device=runner.device)
            pending = PendingTokens(ranks.all_reduce_(tokens), step.sources)
        should_abort = _AbortChecks(ranks, runner.num_layers) if step.may_abort else None
        runner.compute(inputs, should_abort, pending)
        num_sampled = len(inputs.sample_rows)
    runner.close()


class ParallelRunner:
    """Rank 0's executor. Implements core.interfaces.SuspendingExecutor.

    A step is suspended before the same layer on all ranks, and each keeps its rows.

    Its methods raise RanksLostError if another rank ended; the executor cannot be used afterwards.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks
        self._encoder = PlanEncoder()
        self._open = True

    @property
    def num_layers(self) -> int:
        return self._runner.num_layers

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | SuspendedStep | None:
        """Run one step on all ranks; see Executor.

        should_abort: called about _ABORT_CHECKS times between layers; the answer is for all ranks.
        """
        inputs = build_inputs(plan)
        may_abort = should_abort is not None
        self._ranks.send(self._encoder.step(plan, inputs, may_abort=may_abort))
        inputs = self._runner.prepare(inputs, plan.copies)
        checks = None
        if should_abort is not None:
            checks = _AbortChecks(self._ranks, self._runner.num_layers, should_abort)
        outputs = self._runner.compute(inputs, checks)
        if outputs is None or isinstance(outputs, SuspendedStep):
            return outputs
        return self._runner.result(plan.step, outputs, inputs)

    def close(self) -> None:
        """Stop the other ranks and release this rank's memory. May be called twice."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(RanksLostError):  # ranks that ended need no message
            self._ranks.send(self._encoder.stop())
        self._runner.close()


class ParallelLaunchingRunner(ParallelRunner):
    """Implements core.interfaces.LaunchingExecutor."""

    def __init__(self, runner: LaunchingRunner, ranks: Ranks) -> None:
        super().__init__(runner, ranks)
        self._launcher = runner

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Launch a step on all ranks; see LaunchingExecutor."""
        inputs = build_inputs(plan)
        pending = self._launcher.pending(plan, inputs)
        self._ranks.send(self._encoder.step(plan, inputs, pending=pending))
        if pending is not None:
            self._ranks.all_reduce_(pending.tokens)  # a broadcast: the others add zeros
        inputs = self._launcher.prepare(inputs, plan.copies)
        return self._launcher.begin(plan, inputs, pending)


class _AbortChecks:
    """The should_abort of every rank, called before each layer: rank 0 decides for all ranks.

    It synchronizes the ranks only at every n-th layer, and returns False at the others.
    """

    def __init__(
        self, ranks: Ranks, num_layers: int, should_abort: Callable[[], bool] | None = None
    ) -> None:
        """should_abort: on rank 0, decides; None on the others."""
        self._ranks = ranks
        self._every = -(-num_layers // _ABORT_CHECKS)
        self._should_abort = should_abort
        self._layer = 0

    def __call__(self) -> bool:
        layer = self._layer
        self._layer += 1
        if layer % self._every:
            return False
        return self._ranks.broadcast_flag(self._should_abort is not None and self._should_abort())
