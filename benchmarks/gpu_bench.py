"""The tools of the parts of gpu_speed.py: a model, a timer, and pipelined steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_model import Model
from gpu_timing import Ceilings, Run, Timer, Timing

from bros.core.plan import StepPlan

VARIANTS = 3
"""Plans of one shape that read different blocks; they alternate."""

PIPELINED = 12
"""Consecutive steps, each launched while the previous one runs."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The model and the timer of a part."""

    model: Model
    timer: Timer
    ceilings: Ceilings

    def step(self, plans: list[StepPlan]) -> Timing:
        """The time of one step, from the plan to the tokens on the host."""
        runner = self.model.runner
        return self.timer.by_the_clock(lambda i: runner.execute(plans[i % len(plans)]))

    def steps_in_a_row(self, plans: list[StepPlan]) -> Timing:
        """Time per step when the host launches the next step meanwhile, as the engine does."""
        return self.rows_of_steps([plans])[0]

    def rows_of_steps(self, series: Sequence[list[StepPlan]]) -> list[Timing]:
        """Likewise for several lists of plans that are compared; they alternate."""
        launch = getattr(self.model.runner, "launch", None)
        if launch is None:
            execute = self.model.runner.execute
            return self.timer.by_the_clock_in_turn(
                [lambda i, plans=plans: execute(plans[i % len(plans)]) for plans in series]
            )

        def run(plans: list[StepPlan]) -> None:
            running = None
            for number in range(PIPELINED):
                launched = launch(plans[number % len(plans)])
                if running is not None:
                    running.result()
                running = launched
            running.result()

        runs = [lambda _, plans=plans: run(plans) for plans in series]
        return [whole.over(PIPELINED) for whole in self.timer.by_the_clock_in_turn(runs)]

    def kernels(self, runs: Sequence[Run]) -> list[Timing]:
        """Times of kernels that launch work and never wait for it; they alternate."""
        return self.timer.alternating(runs, recorded=self.model.has_graphs)
