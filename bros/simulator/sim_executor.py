"""An executor that computes nothing: it moves a virtual clock by what a step would take."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from bros.core.clock import ManualClock
from bros.core.errors import ConfigError
from bros.core.plan import SEGMENT_WIDTH, Chunk, SampledToken, StepPlan, StepResult
from bros.scheduler.cost_model import CostModel, StepLoad

SAFEPOINTS = 32
"""In each step; about as many as models have layers."""

TOKEN = 0
"""What every simulated request is answered with; never a stop token, see workload.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """How real steps differ from the model that the scheduler has.

    noise: standard deviation of the logarithm of a factor with mean 1, drawn for each step.
    slowdown: every step takes so many times as long as the model says.
    """

    noise: float = 0.0
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise < math.inf or not 0.0 < self.slowdown < math.inf:
            raise ValueError(f"noise must not be negative and slowdown positive: {self}")


class SimExecutor:
    """Takes the time that `model` predicts for each plan, from `clock`.

    rng is drawn from once per step if there is noise. observe is told every plan and the
    seconds that passed, of a step that was given up as well. choose: the token after a chunk, which
    is TOKEN if it is left out. grouped: decode rows read the blocks that they have in common once
    (StepLoad.unique_context), at the price that the model has for that.
    """

    def __init__(
        self,
        model: CostModel,
        clock: ManualClock,
        *,
        disturbance: Disturbance | None = None,
        rng: random.Random | None = None,
        observe: Callable[[StepPlan, float], None] | None = None,
        choose: Callable[[Chunk], int] = lambda chunk: TOKEN,
        grouped: bool = False,
    ) -> None:
        disturbance = disturbance or Disturbance()
        if disturbance.noise and rng is None:
            raise ValueError("noise needs a random generator")
        self._model = model
        self._clock = clock
        self._sigma = disturbance.noise
        self._slowdown = disturbance.slowdown
        self._rng = rng
        self._observe = observe
        self._choose = choose
        self._grouped = grouped
        self.steps = 0
        self.busy_s = 0.0

    def execute(
        self, plan: StepPlan, abandon: Callable[[], bool] | None = None
    ) -> StepResult | None:
        """Let the step's time pass and return a token for every chunk that asked for a sample.

        abandon: asked SAFEPOINTS times, in equal distances.
        """
        load = load_of(plan)
        if self._grouped:
            load.unique_context -= common_context(plan)
        seconds = self._model.seconds(load) * self._slowdown
        if seconds <= 0.0:
            raise ConfigError("--profile: by this one a step takes no time, so none would pass")
        if self._rng is not None and self._sigma:
            seconds *= math.exp(self._rng.gauss(-0.5 * self._sigma**2, self._sigma))
        points = SAFEPOINTS if abandon is not None else 1
        for point in range(points):
            if abandon is not None and abandon():
                self._tell(plan, seconds * point / points)
                return None
            self._clock.advance(seconds / points)
            self.busy_s += seconds / points
        self._tell(plan, seconds)
        self.steps += 1
        choose = self._choose
        samples = [SampledToken(c.request_id, choose(c)) for c in plan.chunks if c.sample]
        return StepResult(plan.step, tuple(samples))

    def _tell(self, plan: StepPlan, seconds: float) -> None:
        if self._observe is not None:
            self._observe(plan, seconds)

    def close(self) -> None:
        """There is nothing to release."""


def load_of(plan: StepPlan) -> StepLoad:
    """The same as StepLoad.add for every chunk; written out, because it is the hot path."""
    tokens = rows = context = samples = 0
    pairs = 0.0
    for chunk in plan.chunks:
        n = len(chunk.token_ids)
        tokens += n
        if n == 1:
            rows += 1
            context += chunk.start + 1
        else:
            pairs += n * chunk.start + n * (n + 1) / 2
            samples += chunk.sample is not None
    load = StepLoad()
    load.tokens = tokens
    load.decode_rows = rows
    load.context = load.unique_context = context
    load.pairs = pairs
    load.samples = samples
    if plan.copies is not None:
        load.swap_tokens = len(plan.copies)
        load.swap_out_tokens = len(plan.copies.out_device)
    return load


def common_context(plan: StepPlan) -> int:
    """Cached tokens of decode rows that a row before them has, too."""
    seen: set[tuple[int, int, int]] = set()
    common = 0
    for chunk in plan.chunks:
        if len(chunk.token_ids) > 1:
            continue
        numbers = iter(chunk.segments)
        for segment in zip(*[numbers] * SEGMENT_WIDTH, strict=True):
            block, lo, hi = segment
            common += (hi - lo) * (segment in seen)
            seen.add((block, lo, hi))
    return common
