"""Drives an engine through a workload on a virtual clock.

    submit what has arrived -> engine.step() moves the clock -> note the tokens -> ...

Without work the clock jumps to the next arrival. A step that starts before the end is run to
its end, so the run may last up to one step longer than asked for: busy + idle = end. Requests
that are open then stay in the records, with the tokens they got.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bros.core.clock import ManualClock
from bros.core.errors import OverloadedError, QueueFullError
from bros.core.interfaces import EngineStats
from bros.core.request import (
    EngineRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    ServiceClass,
)
from bros.engine.engine import Engine
from bros.simulator.sim_executor import SimExecutor
from bros.simulator.workload import Arrival, BeLoad, Size, generator

MIN_RETRY_S = 0.1
"""A closed loop that is refused never asks again sooner, so that time goes on."""
_PROGRESS_STEPS = 200


@dataclass(slots=True)
class RequestRecord:
    """What became of one request.

    token_times_s: when the engine committed each token, in seconds after the start.
    finish: None if it was still open at the end, or was refused.
    refused: the engine did not take it.
    """

    request_id: str
    service_class: ServiceClass
    arrival_s: float
    size: Size
    token_times_s: array[float] = field(default_factory=lambda: array("d"))
    finish: FinishReason | None = None
    refused: bool = False

    @property
    def finished(self) -> bool:
        """It got all its tokens (and was not dropped on the way)."""
        return self.finish is not None and self.finish.complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """A run from its start to time_s = busy_s + idle_s.

    steps: completed ones. busy_s: of those that were given up as well.
    """

    time_s: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    steps: int = 0
    stats: EngineStats = EngineStats()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """records in order of arrival. end_s = busy_s + idle_s. steps: completed ones.

    skipped: too long to be served, and came after the warm-up. warm_up: up to warm_up_s, or to
    the end of the step that was running then.
    """

    records: Sequence[RequestRecord]
    end_s: float
    busy_s: float
    idle_s: float
    steps: int
    stats: EngineStats
    skipped: int = 0
    warm_up_s: float = 0.0
    warm_up: Totals = Totals()

    def digest(self) -> str:
        """A hash of every time and length: equal only if two runs were the same to the bit."""
        hashed = hashlib.sha256()
        for record in self.records:
            head = f"{record.request_id} {record.finish} {record.refused} {tuple(record.size)}"
            hashed.update(f"{head} {len(record.token_times_s)}\n".encode())
            hashed.update(struct.pack("<d", record.arrival_s))
            hashed.update(struct.pack(f"<{len(record.token_times_s)}d", *record.token_times_s))
        return hashed.hexdigest()


class Simulation:
    """One run. `engine` must use `executor` and `clock`, which starts at 0."""

    def __init__(
        self,
        engine: Engine,
        executor: SimExecutor,
        clock: ManualClock,
        *,
        rt: Sequence[Arrival],
        be: BeLoad,
        seed: int,
        duration_s: float,
        warm_up_s: float = 0.0,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """rt: sorted by time. progress is told the share that is done, now and then.

        warm_up_s: less than duration_s; changes nothing but what is noted in the result.
        """
        self._engine = engine
        self._executor = executor
        self._clock = clock
        self._be = be
        self._duration_s = duration_s
        self._warm_up_s = warm_up_s
        self._warm_up = Totals()
        self._progress = progress
        self._be_sizes = be.sizes.stream(generator(seed, "be sizes"))
        self._records: list[RequestRecord] = []
        self._open: dict[str, RequestRecord] = {}
        self._be_open = 0
        self._be_count = 0
        self._idle_s = 0.0
        self._arrived: list[tuple[RequestRecord, EngineRequest]] = []
        limit = engine.info.max_model_len
        servable = [a for a in rt if sum(a.size) <= limit]
        self._skipped = sum(sum(a.size) > limit and a.time_s >= warm_up_s for a in rt)
        # Sorted by time, then by the order in which they were thought of.
        self._coming: list[tuple[float, int, ServiceClass, Size]] = []
        self._thought_of = 0
        for arrival in servable:
            self._expect(arrival.time_s, ServiceClass.RT, arrival.size)

    def run(self) -> SimulationResult:
        """Run to the end of the duration. Call it once."""
        self._next_best_effort(0.0, self._be.in_flight)
        for _ in self._ticks():
            self._submit_due()
            if self._engine.has_work:
                outputs = self._engine.step(self._arrivals)
                self._take(outputs, self._clock.now())
                self._note_warm_up(self._clock.now())
            else:
                self._jump()
                self._note_warm_up(self._warm_up_s)
        self._submit_late()
        return SimulationResult(
            records=self._records,
            end_s=self._clock.now(),
            busy_s=self._executor.busy_s,
            idle_s=self._idle_s,
            steps=self._executor.steps,
            stats=self._engine.stats(),
            skipped=self._skipped,
            warm_up_s=self._warm_up_s,
            warm_up=self._warm_up,
        )

    def _note_warm_up(self, time_s: float) -> None:
        """Note the totals once it is over. Nothing has run since time_s."""
        now = self._clock.now()
        if self._warm_up.time_s < self._warm_up_s <= now:
            self._warm_up = Totals(
                time_s=time_s,
                busy_s=self._executor.busy_s,
                idle_s=self._idle_s - (now - time_s),
                steps=self._executor.steps,
                stats=self._engine.stats(),
            )

    def _ticks(self) -> Iterator[None]:
        mark = 0.0
        while self._clock.now() < self._duration_s:
            if self._progress is not None and self._clock.now() >= mark:
                self._progress(self._clock.now() / self._duration_s)
                mark = self._clock.now() + self._duration_s / _PROGRESS_STEPS
            yield

    def _jump(self) -> None:
        """Nothing runs: wait for the next arrival, or for the end."""
        until = self._duration_s
        if self._coming:
            until = min(until, self._coming[0][0])
        before = self._clock.now()
        self._clock.advance(max(0.0, until - before))
        self._idle_s += self._clock.now() - before

    def _expect(self, time_s: float, service_class: ServiceClass, size: Size) -> None:
        heapq.heappush(self._coming, (time_s, self._thought_of, service_class, size))
        self._thought_of += 1

    def _arrivals(self) -> list[EngineRequest]:
        """Those that have come while the step ran, and since this was asked last."""
        before = len(self._arrived)
        until = min(self._clock.now(), self._duration_s)
        while self._coming and self._coming[0][0] <= until:
            time_s, _, service_class, size = heapq.heappop(self._coming)
            record = self._record(time_s, service_class, size)
            self._arrived.append((record, self._request(record)))
        return [request for _, request in self._arrived[before:]]

    def _submit_due(self) -> None:
        self._arrivals()
        for record, request in self._arrived:
            self._submit(record, request, self._clock.now())
        self._arrived.clear()

    def _submit_late(self) -> None:
        """What came during the last step was never seen by the engine, and counts as open."""
        while self._coming and self._coming[0][0] < self._duration_s:
            time_s, _, service_class, size = heapq.heappop(self._coming)
            self._record(time_s, service_class, size)

    def _record(self, time_s: float, service_class: ServiceClass, size: Size) -> RequestRecord:
        request_id = f"{service_class}-{len(self._records)}"
        record = RequestRecord(request_id, service_class, time_s, size)
        self._records.append(record)
        return record

    def _request(self, record: RequestRecord) -> EngineRequest:
        params = SamplingParams(
            temperature=0.0, max_tokens=record.size.output_tokens, ignore_eos=True
        )
        return EngineRequest(
            request_id=record.request_id,
            prompt_token_ids=_prompt(
                len(self._records), record.size.prompt_tokens, self._engine.info.vocab_size
            ),
            sampling=params,
            service_class=record.service_class,
            arrival_s=record.arrival_s,
        )

    def _submit(self, record: RequestRecord, request: EngineRequest, now: float) -> None:
        try:
            self._engine.submit(request)
        except (QueueFullError, OverloadedError) as error:
            record.refused = True
            wait_s = max(error.retry_after_s, MIN_RETRY_S)
            self._gone(record, now + wait_s)
        else:
            self._open[record.request_id] = record

    def _take(self, outputs: Sequence[RequestOutput], now: float) -> None:
        for output in outputs:
            record = self._open[output.request_id]
            for _ in output.token_ids:
                record.token_times_s.append(now)
            if output.finish_reason is not None:
                record.finish = output.finish_reason
                del self._open[output.request_id]
                self._gone(record, now)

    def _gone(self, record: RequestRecord, now: float) -> None:
        """Close the loop: a best-effort client comes back once it has its answer."""
        if record.service_class is ServiceClass.RT:
            return
        self._be_open -= 1
        if not self._be.batches:
            self._next_best_effort(now, 1)
        elif self._be_open == 0:
            self._next_best_effort(now, self._be.in_flight)

    def _next_best_effort(self, time_s: float, count: int) -> None:
        self._be_open += count
        for _ in range(count):
            self._expect(time_s, ServiceClass.BE, next(self._be_sizes))


def _prompt(number: int, length: int, vocab_size: int) -> array[int]:
    """Token ids that share no prefix with other prompts of two tokens or more."""
    tokens = array("i", bytes(length * array("i").itemsize))
    tokens[0] = number % vocab_size
    if length > 1:
        tokens[1] = number // vocab_size % vocab_size
    return tokens
