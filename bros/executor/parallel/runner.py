"""The runners of several ranks that run one model: one that is told plans, others that follow.

    rank 0    plan ─▶ inputs ─▶ message ─┬─▶ its shard ─▶ logits of all ─▶ tokens ─▶ result
    others                               └─▶ its shard ─▶ nothing, and the next message

What ranks say to each other on the way is all in one order, the same on every rank: the sums and
logits of the layers (layers.py), whether the step goes on, and here:

    host      message of step 7        message of step 8
    device    [ step 7 ........ tokens ][ tokens to all ranks, step 8 ...

where the tokens of a step are only sent if the next one was planned before they were known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from bros.core.errors import RanksLostError
from bros.core.interfaces import Executor, StepHandle
from bros.core.plan import StepPlan, StepResult
from bros.executor.feed import Pending
from bros.executor.inputs import build_inputs
from bros.executor.parallel.plan_codec import PlanDecoder, PlanEncoder
from bros.executor.parallel.ranks import Ranks
from bros.executor.runner import LaunchingRunner, ModelRunner

_SAFEPOINTS = 8
"""How often a step asks whether to go on, about. Each time all ranks wait for rank 0."""


def lead(runner: ModelRunner, ranks: Ranks) -> Executor:
    """The executor of rank 0, which the others must `follow`. It can launch if `runner` can."""
    if ranks.size == 1:
        return runner
    if isinstance(runner, LaunchingRunner):
        return ParallelLaunchingRunner(runner, ranks)
    return ParallelRunner(runner, ranks)


@torch.inference_mode()
def follow(runner: ModelRunner, ranks: Ranks) -> None:
    """Compute what rank 0 says until its executor is closed; `runner` is closed then.

    Raises RanksLostError if rank 0 or another one is gone, and whatever a step raises; then the
    group is lost, as rank 0 finds out by itself.
    """
    decode = PlanDecoder()
    num_sampled = 0
    while (step := decode(ranks.receive())) is not None:
        inputs = runner.prepare(step.inputs, step.copies)
        pending = None
        if step.sources is not None:
            tokens = torch.zeros(num_sampled, dtype=torch.int32, device=runner.device)
            pending = Pending(ranks.all_reduce_(tokens), step.sources)
        goes_on = _Safepoints(ranks, runner.num_layers) if step.may_abort else None
        runner.compute(inputs, goes_on, pending)
        num_sampled = len(inputs.sample_rows)
    runner.close()


class ParallelRunner:
    """Rank 0's executor. Implements core.interfaces.Executor.

    Its methods raise RanksLostError if another rank is gone; nothing can be computed after that.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks
        self._encoder = PlanEncoder()
        self._open = True

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        """Run one iteration on all ranks; see Executor.

        should_abort: asked about _SAFEPOINTS times, between layers, for all ranks.
        """
        inputs = build_inputs(plan)
        may_abort = should_abort is not None
        self._ranks.send(self._encoder.step(plan, inputs, may_abort=may_abort))
        inputs = self._runner.prepare(inputs, plan.copies)
        asks = None
        if should_abort is not None:
            asks = _Safepoints(self._ranks, self._runner.num_layers, should_abort)
        logits = self._runner.compute(inputs, asks)
        return None if logits is None else self._runner.choose(plan.step, logits, inputs)

    def close(self) -> None:
        """Tell the others to stop, and release what this rank has. Twice is fine."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(RanksLostError):  # they need not be told any more
            self._ranks.send(self._encoder.stop())
        self._runner.close()


class ParallelLaunchingRunner(ParallelRunner):
    """Implements core.interfaces.LaunchingExecutor."""

    def __init__(self, runner: LaunchingRunner, ranks: Ranks) -> None:
        super().__init__(runner, ranks)
        self._launcher = runner

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Begin an iteration on all ranks; see LaunchingExecutor."""
        inputs = build_inputs(plan)
        pending = self._launcher.pending(plan, inputs)
        self._ranks.send(self._encoder.step(plan, inputs, pending=pending))
        if pending is not None:
            self._ranks.all_reduce_(pending.tokens)  # the others add zeros
        inputs = self._launcher.prepare(inputs, plan.copies)
        return self._launcher.begin(plan, inputs, pending)


class _Safepoints:
    """Asked before each layer whether the step is aborted; every rank says what rank 0 says.

    should_abort: on rank 0, what is asked.
    """

    def __init__(
        self, ranks: Ranks, num_layers: int, should_abort: Callable[[], bool] | None = None
    ) -> None:
        self._ranks = ranks
        self._every = -(-num_layers // _SAFEPOINTS)
        self._should_abort = should_abort
        self._asked = 0

    def __call__(self) -> bool:
        asked = self._asked
        self._asked += 1
        if asked % self._every:
            return False
        return self._ranks.any_(self._should_abort is not None and self._should_abort())
