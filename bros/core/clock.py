"""The only place where time is read. Everything else takes a Clock or a `now` in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds and the wall clock that goes with it."""

    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...

    def unix_time(self) -> float:
        """Seconds since the Unix epoch, for timestamps shown to users."""
        ...


class SystemClock:
    """The machine's clock. CLOCK_MONOTONIC is shared by all processes of a machine."""

    now = staticmethod(time.monotonic)
    unix_time = staticmethod(time.time)


class ManualClock:
    """A clock that only `advance` moves, for tests and simulation."""

    def __init__(self, start_s: float = 0.0, epoch_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._epoch_s = epoch_s - start_s

    def now(self) -> float:
        return self._now_s

    def unix_time(self) -> float:
        return self._epoch_s + self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward. Raises ValueError for a negative step: the clock is monotonic."""
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds} s: the clock is monotonic")
        self._now_s += seconds


def process_cpu_s() -> float:
    """Processor seconds that this process has used so far, on all cores."""
    return time.process_time()


thread_cpu_s: Callable[[], float] = time.thread_time
"""Processor seconds that the calling thread has used so far."""


def thread_queued_s() -> float | None:
    """Seconds for which the calling thread could have computed so far, but other threads or
    processes had the cores; None where the kernel does not count it."""
    try:
        # Path.read_text takes three times as long, and the server asks 20 times a second.
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            ran, queued = file.read().split()[:2]
    except (OSError, ValueError):  # not Linux, or built without it
        return None
    return int(queued) / 1e9 if int(ran) else None  # switched off: all are 0
