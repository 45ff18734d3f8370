"""Runs many scenarios in several processes. The results do not depend on their number."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from bros.core.errors import ConfigError
from bros.simulator.metrics import Report, report_of
from bros.simulator.simulation import SimulatedScenario, build_simulation

Progress = Callable[[int, float], None]
"""Called with the index of a scenario and the share of it that is done."""

S = TypeVar("S")
R = TypeVar("R")

_Run = Callable[[S, Callable[[float], None]], R]
_Message = tuple[str, object]


class WorkerError(RuntimeError):
    """A worker failed because of a bug; the message is its traceback."""


def run_scenario(
    scenario: SimulatedScenario, progress: Callable[[float], None] | None = None
) -> Report:
    """Simulate one scenario. Raises ConfigError if it cannot be run."""
    result = build_simulation(scenario, progress=progress).run()
    return report_of(result, scenario.slo)


def run_all(
    run: _Run[S, R],
    scenarios: Sequence[S],
    jobs: int,
    progress: Progress | None = None,
    on_result: Callable[[int, R], None] | None = None,
) -> list[R]:
    """The result of `run` for each scenario, in their order.

    run: (scenario, progress) -> result, a function at module level, as it is pickled.
    jobs: most processes at a time; a single job runs in this process.
    on_result: called with the index and the result of a scenario as soon as there is one, so that
        Ctrl-C need not lose those.
    Raises ConfigError if a scenario cannot be run, WorkerError if a worker fails.
    """
    progress, on_result = progress or _ignore, on_result or _ignore
    if min(jobs, len(scenarios)) <= 1:
        return [
            _run_here(run, index, each, progress, on_result) for index, each in enumerate(scenarios)
        ]
    pool = _Pool(run, scenarios, min(jobs, len(scenarios)))
    try:
        return pool.run(progress, on_result)
    finally:
        pool.stop()


def _run_here(
    run: _Run[S, R],
    index: int,
    scenario: S,
    progress: Progress,
    on_result: Callable[[int, R], None],
) -> R:
    report = run(scenario, lambda share: progress(index, share))
    on_result(index, report)
    progress(index, 1.0)
    return report


class _Pool:
    """Worker processes; each receives one scenario after another through its pipe."""

    def __init__(self, run: _Run[Any, Any], scenarios: Sequence[Any], jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._scenarios = scenarios
        self._next = 0
        self._reports: dict[int, Any] = {}
        self._working: dict[Connection, int] = {}  # pipe -> index of its scenario
        self._processes = []
        self._pipes = []
        for _ in range(jobs):
            parent_end, worker_end = context.Pipe()
            process = context.Process(target=_work, args=(worker_end, run), daemon=True)
            process.start()
            worker_end.close()
            self._processes.append(process)
            self._pipes.append(parent_end)

    def run(self, progress: Progress, on_result: Callable[[int, Any], None]) -> list[Any]:
        for pipe in self._pipes:
            self._send_next(pipe)
        while self._working:
            ready = set(wait(list(self._working)))
            for pipe in [pipe for pipe in self._pipes if pipe in ready]:
                self._receive(pipe, progress, on_result)
        return [self._reports[index] for index in range(len(self._scenarios))]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def _send_next(self, pipe: Connection) -> None:
        self._working.pop(pipe, None)
        if self._next == len(self._scenarios):
            return
        try:
            pipe.send(self._scenarios[self._next])
        except OSError:
            raise WorkerError("a worker process died before it got a scenario") from None
        self._working[pipe] = self._next
        self._next += 1

    def _receive(
        self, pipe: Connection, progress: Progress, on_result: Callable[[int, Any], None]
    ) -> None:
        index = self._working[pipe]
        try:
            kind, content = pipe.recv()
        except (EOFError, OSError):
            raise WorkerError(f"the process that ran simulation {index + 1} died") from None
        if kind == "progress":
            progress(index, content)
        elif kind == "report":
            self._reports[index] = content
            on_result(index, content)
            progress(index, 1.0)
            self._send_next(pipe)
        else:
            raise (ConfigError if kind == "refused" else WorkerError)(content)


def _work(pipe: Connection, run: _Run[Any, Any]) -> None:
    """The loop of a worker process. It ignores Ctrl-C, because the parent ends it, and it ends by
    itself if the parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        while True:
            scenario = pipe.recv()
            pipe.send(_answer(run, scenario, lambda share: pipe.send(("progress", share))))


def _answer(run: _Run[Any, Any], scenario: object, progress: Callable[[float], None]) -> _Message:
    try:
        return "report", run(scenario, progress)
    except ConfigError as error:
        return "refused", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def _ignore(index: int, told: object) -> None:
    """The default for what is told of a scenario."""
