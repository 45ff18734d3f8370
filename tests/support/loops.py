"""Event loops of tests: one that measures its turns, and one whose timers do not wait."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ParamSpec

from support.machine_speed import slowdown

P = ParamSpec("P")

LONGEST_TURN_S = 0.05
"""What is promised of a server's event loop: the CPU time of its longest turn, without the garbage
collector, on a machine of nominal speed. See docs/architecture.md, Off the event loop."""

LONGEST_LAG_S = 0.05
"""The same of its longest lag. Under the attacks of tests/server/test_input_attacks.py it is up to
0.026 s, on an idle Zen 4 and beside two busy processes."""


class MeasuredLoop(asyncio.SelectorEventLoop):
    """Measures its turns.

    longest_s: CPU time of the longest turn that began while it was measured.
    longest_lag_s: the longest time for which it could not go on, in a turn or when an event had
        come, without what other processes may have caused (see RunQueueWait). So it counts if
        another thread holds the interpreter, or if the loop waits for a lock.

    The garbage collector is off meanwhile: it walks all that the test process has imported, which a
    server has frozen. A callback of the collector would hide stalls, because other threads can run
    when a function of Python begins.
    """

    def __init__(self, selector: _SlicedSelector | None = None) -> None:
        selector = selector or _SlicedSelector()
        super().__init__(selector)
        selector.measured = self._measured
        self.longest_s = self.longest_lag_s = 0.0
        self._queued = RunQueueWait()
        self._measures = False

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the turns within."""
        gc.disable()
        self.longest_s, self.longest_lag_s, self._measures = 0.0, 0.0, True
        try:
            yield
        finally:
            self._measures = False
            if self.is_running():
                self.call_soon(gc.enable)  # in this turn, a collection would still count
            else:
                gc.enable()

    @property
    def is_quick(self) -> bool:
        """Whether no turn and no lag was longer than promised, at a machine's nominal speed."""
        return self.longest_s < LONGEST_TURN_S and self.longest_lag_s < LONGEST_LAG_S

    def check_turns(self) -> None:
        """Fails if a turn or a lag was longer than promised, at the speed of this machine."""
        slower = slowdown()
        assert self.longest_s < LONGEST_TURN_S * slower
        assert self.longest_lag_s < LONGEST_LAG_S * slower

    def _process_events(self, event_list: Any) -> None:
        """Called when the turn has waited for events."""
        self._turn = self._measured(0.0)
        self._turn.__enter__()
        self._counts, self._begun_s = self._measures, time.thread_time()
        super()._process_events(event_list)  # type: ignore[misc]

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        took_s = time.thread_time() - self._begun_s
        if self._counts:
            self.longest_s = max(self.longest_s, took_s)
        self._turn.__exit__(None, None, None)

    @contextmanager
    def _measured(self, expected_s: float) -> Iterator[None]:
        """What is done within should take so long, and longer is a lag."""
        if not self._measures:
            yield
            return
        self._queued.note()
        begun = time.monotonic()
        yield
        took_s = time.monotonic() - begun
        if took_s - expected_s > self.longest_lag_s:
            lag_s = took_s - expected_s - self._queued.seconds()
            self.longest_lag_s = max(self.longest_lag_s, lag_s)


class _SlicedSelector(selectors.DefaultSelector):
    """Waits for SLICE_S at a time, so that it is seen if it returns late, which is when another
    thread holds the interpreter.

    measured: measures a slice, of this length.
    """

    measured: Callable[[float], AbstractContextManager[None]]

    def select(self, timeout: float | None = None) -> Any:
        left_s = float("inf") if timeout is None else max(timeout, 0.0)
        while True:
            slice_s = min(left_s, SLICE_S)
            with self.measured(slice_s):
                ready = super().select(slice_s)
            left_s -= slice_s
            if ready or left_s <= 0:
                return ready


SLICE_S = 0.01


class RunQueueWait:
    """For how long the calling thread may have waited lately because others had the cores, by the
    kernel.

    That is the longest wait for a core of one thread of this process: the caller's own, or that of
    one that holds the interpreter meanwhile, which keeps the caller waiting as well. The sum would
    be too much, since these overlap: who waits for the interpreter looks every 5 ms whether it is
    free, and waits for a core to do so. Time in which the host ran another machine counts, too.
    """

    def __init__(self) -> None:
        self._noted_s = float("-inf")
        self._before: dict[str, float] = {}

    def note(self) -> None:
        """Count from now on, or from shortly before."""
        now_s = time.monotonic()
        if now_s - self._noted_s > _NOTED_EVERY_S:  # it reads a file per thread
            self._noted_s, self._before = now_s, _queued_s()

    def seconds(self) -> float:
        """The wait since the last `note`. Threads that have ended since do not count."""
        found = {who: now_s - self._before.get(who, 0.0) for who, now_s in _queued_s().items()}
        return found.pop(_MACHINE) + max(found.values(), default=0.0)


_NOTED_EVERY_S = 0.02
_MACHINE = "machine"


def _queued_s() -> dict[str, float]:
    """Thread -> seconds for which it has waited; and those for which the machine has."""
    waited = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            _, waited_ns, _ = Path(f"/proc/self/task/{task}/schedstat").read_text().split()
            waited[task] = int(waited_ns) / 1e9
    stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    return {**waited, _MACHINE: stolen / os.sysconf("SC_CLK_TCK")}


TRIES = 3
"""A stall that the server causes comes each time; one that its host causes does not."""


def check_turns(main: Callable[[MeasuredLoop], Coroutine[Any, Any, None]]) -> None:
    """Runs `main`, which measures a part of itself, on a loop of its own; fails if a turn or a lag
    was longer than promised each of TRIES times."""
    for _ in range(TRIES):
        loop = MeasuredLoop()
        with asyncio.Runner(loop_factory=lambda loop=loop: loop) as runner:
            runner.run(main(loop))
        if loop.is_quick:
            break
    loop.check_turns()


class HastyLoop(MeasuredLoop):
    """Its timers do not wait: when nothing happens for 10 ms, those of the next `skip_s` are due,
    or the next one alone if it is later than that.

    So the order in which timers are due does not depend on the speed of the machine.
    """

    def __init__(self, skip_s: float = 0.0) -> None:
        self._hasty = _HastySelector(skip_s)
        super().__init__(self._hasty)

    def time(self) -> float:
        return self._hasty.now_s


class _HastySelector(_SlicedSelector):
    def __init__(self, skip_s: float) -> None:
        super().__init__()
        self._skip_s = skip_s
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if not (ready := super().select(min(timeout, SLICE_S))):
            self.now_s += max(timeout, self._skip_s)
        return ready


def hasty(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on a HastyLoop: time passes only while nothing else happens."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=HastyLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
