"""A batch with a window beside chats, in virtual time, with the pace of the real runner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bros.batch.pacing import JobPace
from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.errors import QueueFullError
from bros.core.request import EngineRequest, Output, ServiceClass, Slo, expanded
from bros.engine.engine import Engine
from bros.scheduler.build import build_scheduler
from bros.simulator.simulation import (
    SimExecutor,
    Simulation,
    SimulationResult,
    device_of,
    engine_info,
    read_profile,
    with_step_bounds,
)
from bros.workload.arrivals import Arrival, BeLoad, RequestSizes
from bros.workload.lengths import Uniform

PROFILE = "amd-epyc-2-threads/SmolLM2-135M-Instruct-fp32"
ROWS = RequestSizes(Uniform(256, 512), Uniform(16, 64))
_IN_FLIGHT = 16
_NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class BatchRun:
    """slo: of the chats. ended_s: when the last row ended; None: some have not."""

    result: SimulationResult
    slo: Slo
    ended_s: float | None

    @property
    def until_s(self) -> float:
        """The end of the batch, or of the run."""
        return self.result.end_s if self.ended_s is None else self.ended_s

    def paces(self, until_s: float | None = None) -> list[float]:
        """Mean time per token of each chat that began by then, or beside the batch."""
        until_s = self.until_s if until_s is None else until_s
        return [
            (times[-1] - times[0]) / (len(times) - 1)
            for record in self.result.records
            if record.service_class is ServiceClass.RT and record.finished
            for times in [record.token_times_s]
            if len(times) > 1 and record.arrival_s < until_s
        ]


class _BatchEngine(Engine):
    """Its best-effort requests are the rows of one batch, with the objectives of the real runner.

    ended_s: when the last row ended.
    """

    def begin(self, rows: int, window_s: float | None, rt_slowdown: float | None) -> None:
        """window_s: None: they are no batch and have no deadline."""
        self.pace = None if window_s is None else JobPace(rows, window_s)
        self._left, self._rt_slowdown = rows, rt_slowdown
        self._begun: dict[str, float] = {}
        self.ended_s: float | None = None

    def submit(self, request: EngineRequest) -> ServiceClass:
        if request.service_class is ServiceClass.RT:
            return super().submit(request)
        if self._left == 0:
            raise QueueFullError(0, _NEVER_S)  # so that the closed loop ends
        now, in_flight = self._clock.now(), len(self._begun) + 1
        slo = Slo(rt_slowdown=self._rt_slowdown)
        if self.pace is not None:
            slo = dataclasses.replace(
                slo,
                deadline_s=self.pace.due_in_s(now, in_flight),
                schedule_s=self.pace.schedule_s(now, in_flight),
            )
        self._left -= 1
        self._begun[request.request_id] = now
        return super().submit(dataclasses.replace(request, slo=slo))

    def step(self, arrivals: Callable[[], Sequence[EngineRequest]] | None = None) -> list[Output]:
        outputs = super().step(arrivals)
        for output in map(expanded, outputs):
            if output.finish_reason is not None and output.request_id in self._begun:
                now = self._clock.now()
                seconds = now - self._begun.pop(output.request_id)
                if self.pace is not None:
                    self.pace.note(1, seconds)
                if self._left == 0 and not self._begun:
                    self.ended_s = now
        return outputs


def run_batch(
    chats: Sequence[Arrival],
    *,
    rows: int,
    window_s: float | None,
    duration_s: float,
    rt_slowdown: float | None = None,
    sizes: RequestSizes = ROWS,
    seed: int = 1,
    **options: object,
) -> BatchRun:
    """A batch of so many rows that begins at 0, 16 at a time.

    window_s: None: they are no batch and have no deadline.
    rt_slowdown: of the batch.
    options: of the engine.
    """
    profiles = Path(__file__).parents[2] / "profiles"
    device = device_of(read_profile(PROFILE, [profiles]), 1500)
    known = {"max_num_seqs": 64, "max_batch_tokens": 256, "prefix_cache": "off"}
    config = with_step_bounds(EngineConfig(**(known | options)))  # type: ignore[arg-type]
    clock, info = ManualClock(), engine_info(config, device)
    executor = SimExecutor(device.steps, clock)
    engine = _BatchEngine(build_scheduler(config, info, device.steps), executor, clock, info)
    engine.begin(rows, window_s, rt_slowdown)
    be = BeLoad(min(rows, _IN_FLIGHT), sizes=sizes)
    result = Simulation(
        engine, executor, clock, rt={"": chats}, be={"": be}, seed=seed, duration_s=duration_s
    ).run()
    return BatchRun(result, info.default_slo, engine.ended_s)
