"""asyncio on a clock that jumps to the next timer whenever nothing is ready."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

START_S = 5000.0
"""Where time begins: not at 0, so that absolute times are noticed where relative ones belong."""


class _JumpingSelector(selectors.DefaultSelector):
    """Takes no time: instead of waiting, moves the clock on. Whole nanoseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = round(START_S * 1e9)

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("nothing is left to wait for, so no time would ever pass")
        self.now_ns += max(1, round(timeout * 1e9))
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers are the only way for time to pass; what runs takes none."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_ns / 1e9

    def run_in_executor(  # type: ignore[override]
        self, executor: object, work: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """At once: a thread takes time of another kind, which nobody here waits for."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(work(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def advance(self, seconds: float) -> None:
        """As if something had kept the processor busy for so long."""
        self._jumping.now_ns += round(seconds * 1e9)


class LoopClock:
    """The clock of the loop that runs."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def unix_time(self) -> float:
        return 1_700_000_000.0 + self.now() - START_S


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `main` returns, as quickly as it can be computed."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
