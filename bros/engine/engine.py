"""One step: schedule, execute, apply; with asynchronous scheduling: schedule the next step, launch
it, apply the one before."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence

from bros.core.clock import Clock
from bros.core.errors import OverloadedError
from bros.core.interfaces import (
    EngineInfo,
    EngineReport,
    EngineStats,
    Executor,
    GrammarState,
    LaunchingExecutor,
    RequestTrace,
    StepHandle,
    StopRule,
    SuspendingExecutor,
    find_launcher,
)
from bros.core.plan import SuspendedStep
from bros.core.request import EngineRequest, Output, RequestOutput, ServiceClass, Slo, expanded
from bros.engine.grammars import Grammars
from bros.scheduler.scheduler import Scheduler
from bros.scheduler.steps import ExpectedTime

logger = logging.getLogger("bros.engine")


class Engine:
    """A scheduler and an executor on one thread. They meet only in `step`.

    async_scheduling: as in EngineConfig. Raises ConfigError for "on" if the executor cannot launch.
    grammars: None: requests with grammars are refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        info: EngineInfo,
        *,
        async_scheduling: str = "auto",
        grammars: Grammars | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self.info = info
        self._launcher = find_launcher(executor, async_scheduling)
        self._suspends = isinstance(executor, SuspendingExecutor)
        self._running: StepHandle | None = None
        self._grammars = grammars or Grammars(None, info, clock)
        self._preparing: dict[str, float] = {}  # request id -> since when
        self._refused: dict[str, OverloadedError] = {}  # request id -> why, until it is submitted

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._running is not None

    def load_ahead(self) -> None:
        """Load now what else the first request with a grammar would load, while others wait."""
        self._grammars.load_ahead()

    def prepare(self, request: EngineRequest, done: Callable[[], None]) -> bool:
        """Whether a request can be submitted without waiting for its grammar. If not, `done` is
        called on another thread as soon as it can; the time until then counts as its wait."""
        grammar = request.sampling.grammar
        if grammar is None or not request.samples:
            return True
        try:
            if self._grammars.prepare(grammar, done, request.tenant):
                return True
        except OverloadedError as error:
            self._refused[request.request_id] = error
            return True
        self._preparing[request.request_id] = self._clock.now()
        return False

    def submit(self, request: EngineRequest) -> ServiceClass:
        """Queue a request; returns the class it is served as: BE for a relegated one.

        Raises InvalidRequestError, PromptTooLongError, QueueFullError or OverloadedError.
        """
        now = self._clock.now()
        since_s = self._preparing.pop(request.request_id, now)
        refused = self._refused.pop(request.request_id, None)
        if refused is not None:
            raise refused
        if request.sampling.grammar is None or not request.samples:
            return self._scheduler.submit(request, now)
        return self._scheduler.submit(request, now, self._grammar_state, now - since_s)

    def _grammar_state(self, request: EngineRequest, stops: StopRule) -> GrammarState:
        assert request.sampling.grammar is not None
        return self._grammars.state(request.sampling.grammar, stops, request.tenant)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Abort a request and free its KV; returns its last output, or None if it is unknown."""
        self._preparing.pop(request_id, None)
        self._refused.pop(request_id, None)
        return self._scheduler.abort(request_id, self._clock.now())

    def promote(self, request_id: str, slo: Slo, awaited: bool = True) -> None:
        """See EngineClient."""
        self._scheduler.promote(request_id, slo, self._clock.now(), awaited)

    def release(self, request_id: str) -> None:
        """See EngineClient."""
        self._scheduler.release(request_id)

    def step(self, arrivals: Callable[[], Iterable[EngineRequest]] | None = None) -> list[Output]:
        """Run one step and return its outputs. Any exception leaves the engine unusable.

        arrivals: called while the step runs; returns the requests that have arrived since its last
            call, which the caller submits later. A step with best-effort work may yield to
            them: it is suspended or aborted, and has no outputs. None: no request can arrive.

        With asynchronous scheduling this launches a step and returns the outputs of the one before;
        no step yields. Raises RuntimeError if there are requests but none can run (a bug).
        """
        if self._launcher is not None:
            outputs = self._launch(self._launcher)
        else:
            outputs = self._execute(arrivals)
        self._log_ends(outputs)
        return outputs

    def _execute(self, arrivals: Callable[[], Iterable[EngineRequest]] | None) -> list[Output]:
        scheduler, clock = self._scheduler, self._clock
        plan = scheduler.schedule(clock.now())
        outputs: list[Output] = [*scheduler.take_ended()]
        if plan is None:
            self._check_idle()
            return outputs
        if arrivals is not None and scheduler.may_abort:

            def should_abort() -> bool:
                new = arrivals()  # nearly always empty: the executor asks before every layer
                return bool(new) and scheduler.yields(new, clock.now(), suspends=self._suspends)

            result = self._executor.execute(plan, should_abort)
        else:
            result = self._executor.execute(plan)
        if result is None:
            scheduler.abort_step(plan, clock.now())
        elif isinstance(result, SuspendedStep):
            scheduler.suspend_step(plan, result, clock.now())
        else:
            outputs += scheduler.apply(result, clock.now())
        return outputs

    def _launch(self, launcher: LaunchingExecutor) -> list[Output]:
        """Launch the next step before waiting for the running one."""
        scheduler = self._scheduler
        outputs = [] if scheduler.may_run_ahead else self._apply_running()
        plan = scheduler.schedule(self._clock.now())
        outputs += scheduler.take_ended()
        if plan is None and self._running is None:
            self._check_idle()
        launched = None if plan is None else launcher.launch(plan)
        outputs += self._apply_running()
        self._running = launched
        return outputs

    def _apply_running(self) -> list[Output]:
        """Wait for the running step, if any, and apply its result."""
        if self._running is None:
            return []
        result, self._running = self._running.result(), None
        return self._scheduler.apply(result, self._clock.now())

    def _check_idle(self) -> None:
        if self._scheduler.has_work:
            raise RuntimeError("there are requests, but none of them can run")

    def expected(self) -> ExpectedTime:
        """How long the steps in flight should take together. Any thread may call it."""
        return self._scheduler.expected()

    def stats(self) -> EngineStats:
        counters = self._grammars.counters
        return dataclasses.replace(
            self._scheduler.stats(),
            forced_tokens=counters.forced_tokens,
            grammars_compiled=counters.compiled,
            grammar_compile_s=counters.compile_s,
            mask_wait_s=counters.mask_wait_s,
        )

    def trace(self, request_id: str) -> RequestTrace | None:
        """See EngineClient."""
        return self._scheduler.trace(request_id)

    def subscribe(self) -> None:
        """Record from now on what `report` needs."""
        self._scheduler.reporter.subscribe()

    def report(self, *, full: bool = False) -> EngineReport | None:
        """The changes since the last report, or a digest if `full` or if it is the first report.
        None if nothing has changed, or if no client has subscribed."""
        return self._scheduler.reporter.take(self._clock.now(), full)

    def due_report(self) -> EngineReport | None:
        """The report after a step; None if none is due."""
        return self._scheduler.reporter.due(self._clock.now(), not self.has_work)

    def close(self) -> None:
        self._executor.close()
        self._grammars.close()

    def _log_ends(self, outputs: Sequence[Output]) -> None:
        """Log the trace of each request that ended, at level DEBUG."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        for output in map(expanded, outputs):
            trace = self.trace(output.request_id) if output.finish_reason else None
            if trace is not None:
                logger.debug("%s", describe_trace(trace))


def describe_trace(trace: RequestTrace) -> str:
    """The trace in one line; times in milliseconds."""
    waits = sorted(trace.waits.items(), key=lambda wait: -wait[1])
    waited = ", ".join(f"{reason} {seconds * 1e3:.0f}" for reason, seconds in waits)
    first = "none" if trace.ttft_s is None else f"{trace.ttft_s * 1e3:.0f}"
    pace = "none" if trace.tpot_s is None else f"{trace.tpot_s * 1e3:.1f}"
    gap = "none" if trace.longest_gap_s is None else f"{trace.longest_gap_s * 1e3:.0f}"
    slowdown = "" if trace.slowdown is None else f" {trace.slowdown:.2f} times as slow as alone,"
    return (
        f"{trace.request_id} {trace.service_class} {trace.finish_reason}: {trace.prompt_tokens} + "
        f"{trace.output_tokens} tokens, ttft {first}, tpot {pace}, longest gap {gap},{slowdown} "
        f"{trace.late_tokens} late, {trace.preemptions} preemptions, "
        f"waited for {waited or 'nothing'} (ms)"
    )
