"""An engine over one rank or several, and requests that compete for its memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo, EngineStats, Executor
from bros.core.plan import StepPlan, StepResult, SuspendedStep
from bros.core.request import EngineRequest, SamplingParams, ServiceClass, expanded
from bros.engine.engine import Engine
from bros.executor.loader import load_executor, random_executor
from bros.executor.model_store import ModelFiles
from bros.executor.models.spec import ModelSpec
from bros.executor.parallel.ranks import Ranks
from bros.executor.parallel.runner import follow, lead
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import CostModel

STEPS = CostModel(constant_s=0.03, token_s=0.001, sample_s=2e-4, pair_s=4e-7, context_s=2e-6)
"""What the scheduler is told, so that it decides the same wherever the tests run."""
STEP_S = 0.05


@dataclass(frozen=True, slots=True)
class Workload:
    """Greedy requests, each of which gets `num_tokens` tokens. Every other one is best effort and
    comes first; the real-time ones come when half of that is done, and take memory from others.

    patience: a step with best-effort work is suspended once should_abort has been called as often
        as a number drawn below this; 0: none is.
    """

    model: ModelFiles | ModelSpec
    prompts: Sequence[Sequence[int]]
    num_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    patience: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """The outcome of a workload.

    tokens: of each request.
    margins: how far apart the best two logits were for each token, if the workload asks for two
        logprobs.
    suspended: calls of should_abort in each suspended step.
    """

    tokens: list[list[int]]
    margins: list[list[float]]
    stats: EngineStats
    suspended: list[int]


class Impatient:
    """Advances the clock by STEP_S a step, and suspends some of the steps that may be."""

    def __init__(self, executor: Executor, clock: ManualClock, patience: int) -> None:
        self._executor = executor
        self._clock = clock
        self._patience = patience
        self._rng = random.Random(1)
        self.work = 0
        self.suspended: list[int] = []

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | SuspendedStep | None:
        self._clock.advance(STEP_S)
        self.work += plan.num_tokens
        if should_abort is None or not self._patience:
            return self._executor.execute(plan, should_abort)
        last, asked = self._rng.randrange(self._patience), 0

        def counted() -> bool:
            nonlocal asked
            asked += 1
            return asked > last

        result = self._executor.execute(plan, counted)
        if isinstance(result, SuspendedStep):
            self.suspended.append(asked)
        return result

    def close(self) -> None:
        self._executor.close()


def run_workload(ranks: Ranks, workload: Workload) -> Answers | None:
    """On all ranks. None for those that follow."""
    config = EngineConfig(device="cpu", weights="fp32", **workload.options)
    if isinstance(workload.model, ModelSpec):
        runner, info = random_executor(workload.model, config, ranks=ranks)
    else:
        runner, info = load_executor(config, workload.model, ranks)
    if ranks.rank > 0:
        follow(runner, ranks)
        return None
    return _run(lead(runner, ranks), info, config, workload)


def _run(executor: Executor, info: EngineInfo, config: EngineConfig, workload: Workload) -> Answers:
    clock = ManualClock()
    impatient = Impatient(executor, clock, workload.patience)
    scheduler = build_scheduler(config, info, STEPS)
    engine = Engine(scheduler, impatient, clock, info)
    count = len(workload.prompts)
    answers = Answers([[] for _ in range(count)], [[] for _ in range(count)], engine.stats(), [])

    def step() -> None:
        # It may be suspended, though nothing arrives.
        for output in map(expanded, engine.step(arrivals=tuple)):
            number = int(output.request_id)
            answers.tokens[number].extend(output.token_ids)
            for logprobs in output.logprobs:
                best, second = (logprob for _, logprob in logprobs.top[:2])
                answers.margins[number].append(best - second)

    for number in range(0, count, 2):
        engine.submit(_request(number, workload, ServiceClass.BE))
    early = sum(len(prompt) + workload.num_tokens for prompt in workload.prompts[::2])
    while impatient.work < early / 2:
        step()
    for number in range(1, count, 2):
        engine.submit(_request(number, workload, ServiceClass.RT))
    while engine.has_work:
        step()
    stats = engine.stats()
    scheduler.check_integrity()
    engine.close()
    return Answers(answers.tokens, answers.margins, stats, impatient.suspended)


def _request(number: int, workload: Workload, service_class: ServiceClass) -> EngineRequest:
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=workload.prompts[number],
        sampling=SamplingParams(
            temperature=0,
            max_tokens=workload.num_tokens,
            ignore_eos=True,
            logprobs=workload.logprobs,
        ),
        service_class=service_class,
    )
