"""Notices an iteration of the engine's loop that hangs, for instance in a native library.

    engine's thread      | iteration 7 | idle ... | iteration 8 (a step that never ends) ......
    heartbeats' thread   ^    ^    ^    ^    ^    ^    ^    ^    ^    ^  hung: no more heartbeats

Before its loop an engine loads, which may take any time. There `LoadWatch` looks from another
process whether it does anything.

A long step is not a hang, so the limit follows from the expected times of the steps that run. A
check counts only the time in which this process could have made progress: not while it is stopped,
suspended with its machine or held by a debugger, nor while its threads wait for a core.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bros.scheduler.steps import ExpectedTime

CHECKS_PER_TIMEOUT = 8
"""Checks within EngineConfig.hang_timeout."""

_STEP_SHARE = 5 / 8
"""A step may hang for this share of hang_timeout. Time in which it waits for a core does not count,
so beside other processes more time passes: with the default, less than 10 s pass if it gets half of
a core."""

_FACTOR = 20.0
"""A step hangs once it has taken this many times its expected time (and the least limit). Steps
that take 10 times as long as expected are only slow (tests/transport/test_hangs.py)."""

_START_S = 300.0
"""Least limit of the first steps of an engine: libraries initialize themselves, weights may still
be on the disk, and without a cost model nothing is known. 256 prompt tokens of a 7B model take 72 s
at 50 GFLOP/s."""

_COMPILING_S = 60.0
"""Least limit of the first steps of a size on a device whose kernels are compiled when they are
first launched: one kernel takes Triton seconds (executor/loader.py)."""


@dataclass(slots=True)
class Progress:
    """What the engine's thread tells of its loop.

    iterations: how many have begun; an iteration handles commands and runs a step.
    idle: it waits for a command.
    """

    iterations: int = 0
    idle: bool = True


class Watchdog:
    """Says whether the engine's thread hangs. Ask it every `every_s` seconds, from another thread.

    An iteration hangs if it has lasted for `least_s` and for _FACTOR times as long as its steps
    should.
    """

    def __init__(
        self,
        progress: Progress,
        expected: Callable[[], ExpectedTime],
        *,
        least_s: float,
        every_s: float,
        starved_s: Callable[[], float],
        compiles: bool = False,
    ) -> None:
        """expected: how long the steps in flight should take together.
        starved_s: for how long this process could not make progress since the last call.
        compiles: the device's kernels are compiled when they are first launched.
        """
        self._progress = progress
        self._expected = expected
        self._least_s = least_s
        self._every_s = every_s
        self._starved_s = starved_s
        self._compiles = compiles
        self._iterations = -1  # when it was last asked
        self._counted_s = 0.0  # of the present iteration
        self._limit_s = 0.0  # of the present iteration

    @classmethod
    def of_engine(
        cls,
        progress: Progress,
        expected: Callable[[], ExpectedTime],
        timeout_s: float,
        *,
        compiles: bool,
    ) -> Watchdog:
        """Of an engine in this process. Ask it CHECKS_PER_TIMEOUT times per `timeout_s`, which is
        the engine's hang_timeout. Other arguments: as above."""
        every_s = timeout_s / CHECKS_PER_TIMEOUT
        return cls(
            progress,
            expected,
            least_s=_STEP_SHARE * timeout_s,
            every_s=every_s,
            starved_s=StarvationClock(os.getpid(), every_s),
            compiles=compiles,
        )

    def check(self) -> str | None:
        """Why the engine counts as hung; None if it does not."""
        iterations, idle = self._progress.iterations, self._progress.idle
        starved_s = 0.0 if idle else self._starved_s()
        if idle or iterations != self._iterations:
            self._iterations, self._counted_s, self._limit_s = iterations, 0.0, 0.0
            return None
        # Checks and not a clock: a process that was stopped or suspended has missed the checks.
        self._counted_s += max(0.0, self._every_s - starved_s)
        # The iteration had lasted for half a check, on average, when the first check saw it.
        lasted_s = self._counted_s + self._every_s / 2
        expected = self._expected()
        # The highest limit so far: once its step has ended, nothing is expected to take long, and a
        # check may come before the next iteration begins.
        self._limit_s = max(self._limit_s, self._limit_of(expected))
        if lasted_s < self._limit_s:
            return None
        usual = f"; {expected.seconds:.2g} s were expected" if expected.seconds else ""
        return f"A step of the engine has not ended after {lasted_s:.3g} s{usual}."

    def _limit_of(self, expected: ExpectedTime) -> float:
        least_s = self._least_s
        if expected.is_start:
            least_s = max(least_s, _START_S)
        elif expected.has_new_size and self._compiles:
            least_s = max(least_s, _COMPILING_S)
        return max(least_s, _FACTOR * expected.seconds)


class Activity(NamedTuple):
    """What a process and those that it has started have done so far.

    cpu_s: CPU time of those that run or that were waited for.
    io_bytes: bytes that those that run have read or written, in files or by page faults.
    """

    cpu_s: float
    io_bytes: int

    @classmethod
    def of(cls, pid: int) -> Activity | None:
        """Of a process of this machine; None where the kernel does not tell. Linux only."""
        found = [_own_activity(each) for each in _family(pid)]
        known = [each for each in found if each is not None]
        if not known:
            return None
        return cls(sum(each.cpu_s for each in known), sum(each.io_bytes for each in known))


_MOVES_BYTES = 4096
"""Bytes between two checks from which a process that loads counts as reading or writing. Its idle
threads read some, to wake each other."""

_COMPUTES_SHARE = 0.05
"""CPU time between two checks, as a share of the time, from which it counts as computing."""

_COMPUTING_COUNTS = 0.1
"""How much of the time counts in which it computes and neither reads nor writes: kernels are
compiled for minutes, and a loop that never ends computes as well."""


class LoadWatch:
    """Says whether a process that loads a model has stopped making progress. Ask it every `every_s`
    seconds, from another process.

        it reads or writes      the count begins anew
        it only computes        a tenth of the time counts
        neither                 the time counts, without that in which it waits for a core
    """

    def __init__(
        self,
        activity: Callable[[], Activity | None],
        timeout_s: float,
        starved_s: Callable[[], float],
    ) -> None:
        """activity: of the process, so far. starved_s: as for Watchdog."""
        self.every_s = timeout_s / CHECKS_PER_TIMEOUT
        self._activity = activity
        self._timeout_s = timeout_s
        self._starved_s = starved_s
        self._before = activity()
        self._counted_s = 0.0
        self._silent_s = 0.0  # since it has read or written

    @classmethod
    def of_process(cls, pid: int, timeout_s: float) -> LoadWatch:
        """Of a process on this machine, and those that it starts."""
        starved_s = StarvationClock(pid, timeout_s / CHECKS_PER_TIMEOUT, family=True)
        return cls(lambda: Activity.of(pid), timeout_s, starved_s)

    def check(self) -> str | None:
        """Why it counts as hung; None if it does not."""
        before, self._before = self._before, self._activity()
        starved_s = self._starved_s()
        now = self._before
        if before is None or now is None or abs(now.io_bytes - before.io_bytes) >= _MOVES_BYTES:
            self._counted_s = self._silent_s = 0.0
            return None
        self._silent_s += self.every_s
        computes = abs(now.cpu_s - before.cpu_s) >= _COMPUTES_SHARE * self.every_s
        if computes:
            self._counted_s += _COMPUTING_COUNTS * self.every_s
        else:
            self._counted_s += max(0.0, self.every_s - starved_s)
        if self._counted_s < self._timeout_s:
            return None
        what = "only computes" if computes else "does not compute either"
        return (
            f"The engine has not loaded its model: it has read and written nothing for "
            f"{self._silent_s:.4g} s, and {what}."
        )


def _family(pid: int) -> list[int]:
    """A process and all that it has started, directly or not."""
    found = [pid]
    for each in found:  # the loop appends to it
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{each}/task"):
                children = Path(f"/proc/{each}/task/{thread}/children").read_text()
                found += map(int, children.split())
    return found


def _own_activity(pid: int) -> Activity | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        ticks = sum(map(int, stat[11:15]))  # its own, in user and kernel, and of waited-for ones
        moved = sum(int(io[name]) for name in ("rchar", "wchar", "read_bytes"))
        # Pages of mapped files that had to be read; of FUSE file systems read_bytes has none.
        moved += os.sysconf("SC_PAGE_SIZE") * int(stat[9])
        return Activity(ticks / os.sysconf("SC_CLK_TCK"), moved)
    except (OSError, ValueError, KeyError, IndexError):
        return None  # it has ended, or this kernel does not count


class StarvationClock:
    """For how long a process could not make progress, as far as the kernel tells. Linux only;
    elsewhere 0."""

    def __init__(self, pid: int, every_s: float, *, family: bool = False) -> None:
        """pid: of a process on this machine.
        every_s: interval of the calls.
        family: it may wait for processes that it has started, as a launcher does for its ranks, so
            that these count, too.
        """
        self._pid = pid
        self._every_s = every_s
        self._family = family
        self._threads: dict[str, _Thread] = {}

    def __call__(self) -> float:
        """Seconds since the last call in which some thread waited for a core, as on a machine that
        is busy with other processes; infinite while a debugger is attached.

        The longest of all threads: the others may wait for it.
        """
        pids = _family(self._pid) if self._family else [self._pid]
        if any(map(is_traced, pids)):
            return float("inf")
        before, self._threads = self._threads, {}
        for pid in pids:
            self._threads |= _threads(pid)
        both = ((before[thread], now) for thread, now in self._threads.items() if thread in before)
        return max((now.waited_s(then, self._every_s) for then, now in both), default=0.0)


@dataclass(frozen=True, slots=True)
class _Thread:
    """What the kernel has counted for a thread so far.

    ran_ns: it had a core.
    queued_ns: it waited for a core. A wait is added when it ends.
    runnable: it has a core or waits for one, and may do so longer.
    """

    ran_ns: int
    queued_ns: int
    runnable: bool

    def waited_s(self, then: _Thread, every_s: float) -> float:
        """Seconds since `then`, every_s ago, in which it waited for a core."""
        waited_s = (self.queued_ns - then.queued_ns) / 1e9
        if self.runnable and then.runnable:
            # A wait that still lasts. With 25 other processes per core and a low priority it was
            # longer than the default hang timeout of 8 s (tests/transport/test_hangs.py).
            waited_s = max(waited_s, every_s - (self.ran_ns - then.ran_ns) / 1e9)
        return waited_s


def _threads(pid: int) -> dict[str, _Thread]:
    found: dict[str, _Thread] = {}
    folder = Path(f"/proc/{pid}/task")
    try:
        threads = os.listdir(folder)
    except OSError:
        return found
    for thread in threads:
        try:
            ran_ns, queued_ns = (folder / thread / "schedstat").read_text().split()[:2]
            # After the name, which may contain anything, comes the state.
            state = (folder / thread / "stat").read_text(errors="replace").rpartition(")")[2]
            # The thread that asks has a core.
            waits = state.split()[0] == "R" and int(thread) != threading.get_native_id()
            found[thread] = _Thread(int(ran_ns), int(queued_ns), waits)
        except (OSError, ValueError, IndexError):
            continue  # it has ended, or this kernel does not count
    return found


def is_traced(pid: int) -> bool:
    """Whether a debugger is attached to a process of this machine, which it may hold. Linux only;
    elsewhere False."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    traced = (line.split()[1] for line in status.splitlines() if line.startswith("TracerPid:"))
    return next(traced, "0") != "0"
