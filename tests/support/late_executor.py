"""An executor that launches steps, and computes them as late as it may."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from bros.core.clock import ManualClock
from bros.core.interfaces import Executor
from bros.core.plan import PENDING, Chunk, StepPlan, StepResult


class LateExecutor:
    """A device of its own beside the host, whose steps are computed by `executor` one by one.

    A step takes `seconds(plan)`, and begins when it is launched or when the one before has
    ended. It is computed when its result is asked for, which is also when time passes. watch: told
    of every plan when it is launched. Checks what LaunchingExecutor and PENDING promise.

    finished: steps the results of which have been asked for. most_in_flight: of them at once.
    filled: PENDING tokens so far.
    """

    def __init__(
        self,
        executor: Executor,
        clock: ManualClock,
        seconds: Callable[[StepPlan], float] = lambda plan: 0.0,
        watch: Callable[[StepPlan], None] = lambda plan: None,
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._seconds = seconds
        self._watch = watch
        self._in_flight: deque[_Launched] = deque()
        self._free_s = 0.0  # when the device is done with all that has been computed
        self._sampled: dict[str, int] = {}  # by the plan before
        self._number = 0
        self.finished = self.most_in_flight = self.filled = 0

    def launch(self, plan: StepPlan) -> _Launched:
        assert len(self._in_flight) < 2
        launched = _Launched(self, plan, self._clock.now())
        self._in_flight.append(launched)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        self._watch(plan)
        return launched

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        """Never aborts a step."""
        self._watch(plan)
        self._clock.advance(self._seconds(plan))
        return self._executor.execute(plan)

    def finish(self, launched: _Launched) -> StepResult:
        """Wait for a step and compute it."""
        assert self._in_flight.popleft() is launched, "results are asked for in order"
        plan = launched.plan
        assert plan.step == self._number + 1, "a plan was left out"
        self._number = plan.step
        self._free_s = max(self._free_s, launched.at_s) + self._seconds(plan)
        self._clock.advance(max(0.0, self._free_s - self._clock.now()))
        known = dataclasses.replace(plan, chunks=tuple(map(self._filled, plan.chunks)))
        result = self._executor.execute(known)
        assert result is not None
        self._sampled = {s.request_id: s.token_id for s in result.samples}
        self.finished += 1
        return result

    def _filled(self, chunk: Chunk) -> Chunk:
        if chunk.sample is not None:
            assert PENDING not in chunk.sample.token_ids
        if PENDING not in chunk.token_ids:
            return chunk
        assert list(chunk.token_ids) == [PENDING]
        self.filled += 1
        # A token that could not be chosen is negative, too: then any will do.
        return dataclasses.replace(chunk, token_ids=[max(0, self._sampled[chunk.request_id])])

    def close(self) -> None:
        self._executor.close()


class _Launched:
    def __init__(self, executor: LateExecutor, plan: StepPlan, at_s: float) -> None:
        self._executor = executor
        self.plan = plan
        self.at_s = at_s

    def result(self) -> StepResult:
        return self._executor.finish(self)
