"""Event loops of tests: one that measures its turns, and one whose timers do not wait."""

from __future__ import annotations

import asyncio
import functools
import gc
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

from support.machine_speed import slowdown

P = ParamSpec("P")

LONGEST_TURN_S = 0.05
"""What is promised of a server's event loop: the CPU time of its longest turn, without the garbage
collector, on a machine of nominal speed. See docs/architecture.md, Off the event loop."""


class MeasuredLoop(asyncio.SelectorEventLoop):
    """longest_s: CPU time of the longest turn that began while it was measured.

    The garbage collector does not count: it walks all that the test process has imported, which a
    server has frozen.
    """

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        super().__init__(selector)
        self.longest_s = self._collected_s = self._collecting_s = 0.0
        self._measures = False

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the turns within."""
        gc.callbacks.append(self._on_collection)
        self.longest_s, self._measures = 0.0, True
        try:
            yield
        finally:
            self._measures = False
            gc.callbacks.remove(self._on_collection)

    def check_turns(self) -> None:
        """Fails if a turn has broken the promise, at the speed of this machine."""
        limit_s = LONGEST_TURN_S * slowdown()
        assert self.longest_s < limit_s

    def _on_collection(self, phase: str, info: object) -> None:
        now_s = time.thread_time()
        if phase == "start":
            self._collecting_s = now_s
        else:
            self._collected_s += now_s - self._collecting_s

    def _run_once(self) -> None:
        counts, begun_s, self._collected_s = self._measures, time.thread_time(), 0.0
        super()._run_once()  # type: ignore[misc]
        took_s = time.thread_time() - begun_s - self._collected_s
        if counts:
            self.longest_s = max(self.longest_s, took_s)


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


class _HastySelector(selectors.DefaultSelector):
    def __init__(self, skip_s: float) -> None:
        super().__init__()
        self._skip_s = skip_s
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if not (ready := super().select(min(timeout, 0.01))):
            self.now_s += max(timeout, self._skip_s)
        return ready


def hasty(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on a HastyLoop: time passes only while nothing else happens."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=HastyLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
