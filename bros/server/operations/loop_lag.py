"""Measures how late the server's event loop is, and says what kept it.

loop    |beat|        |beat| a turn that takes 0.4 s .............. |beat: 0.38 s late, logged
thread       look         look       look: the beat is 0.05 s late,
                                     so it notes what the loop runs

A turn that takes long enough has no beat after it for a while, or for ever: the thread then logs
by itself what runs.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from bros.core.clock import Clock, thread_cpu_s, thread_queued_s

logger = logging.getLogger(__name__)

_EVERY_S = 0.05
LAG_LIMIT_S = 0.05
"""A lag that is logged: users see a stream that pauses for longer than this."""
STUCK_S = 3.0
"""A lag that is logged while it lasts, and again whenever it has doubled."""
_LOG_EVERY_S = 10.0
_SHOWN_FRAMES = 3


class LagLog:
    """Decides which lags are logged: one per _LOG_EVERY_S, with the number of those before it."""

    def __init__(self) -> None:
        self._next_s = float("-inf")
        self._silent = 0
        self._longest_s = 0.0

    def line(
        self, lag_s: float, now: float, cpu_s: float, queued_s: float | None, what: str | None
    ) -> str | None:
        """The line to log about a lag; None if it is short or another one was logged recently.

        cpu_s: CPU time of the loop's thread meanwhile.
        queued_s: for how long it waited for a core meanwhile; None if that is not known. For the
            rest of the lag it waited for the interpreter, or in a call that blocked.
        what: what ran; None if that is not known.
        """
        if lag_s < LAG_LIMIT_S:
            return None
        if now < self._next_s:
            self._silent += 1
            self._longest_s = max(self._longest_s, lag_s)
            return None
        queued = "" if queued_s is None else f" and waited for a core for {queued_s:.2f} s"
        line = (
            f"the event loop was {lag_s:.2f} s late; it computed for {cpu_s:.2f} s{queued}; "
            f"it ran {what or 'what ended before it could be seen'}"
        )
        if self._silent:
            line += f" ({self._silent} more since the last line, up to {self._longest_s:.2f} s)"
        self._next_s = now + _LOG_EVERY_S
        self._silent, self._longest_s = 0, 0.0
        return line


class LagWatch:
    """Watches the event loop on which `run` runs.

    seen: what ran when the present beat was late; None if it is not.
    """

    def __init__(self, clock: Clock, observe: Callable[[float], None]) -> None:
        """observe: called with each lag in seconds, some twenty times a second."""
        self._clock = clock
        self._observe = observe
        self._log = LagLog()
        self._beat_s = clock.now()
        self.seen: str | None = None
        self._stopped = threading.Event()
        self._stuck = _StuckLog()

    async def run(self) -> None:
        """Watch until cancelled."""
        watched = threading.get_ident()
        looker = threading.Thread(target=self._look, args=(watched,), name="loop lag", daemon=True)
        self._beat_s = self._clock.now()
        looker.start()
        try:
            cpu_s, queued_s = thread_cpu_s(), thread_queued_s()
            while True:
                await asyncio.sleep(_EVERY_S)
                cpu_before_s, cpu_s = cpu_s, thread_cpu_s()
                before_s, queued_s = queued_s, thread_queued_s()
                known = None if before_s is None or queued_s is None else queued_s - before_s
                self._beat(cpu_s - cpu_before_s, known)
        finally:
            self._stopped.set()

    def _beat(self, cpu_s: float, queued_s: float | None) -> None:
        now = self._clock.now()
        lag_s = max(now - self._beat_s - _EVERY_S, 0.0)
        self._observe(lag_s)
        line = self._log.line(lag_s, now, cpu_s, queued_s, self.seen)
        if line is not None:
            logger.warning("%s", line)
        self._beat_s, self.seen = now, None

    def _look(self, watched: int) -> None:
        """The thread: note once per beat what runs when the beat is late, and log what runs when
        none comes."""
        wait_s = _EVERY_S
        while not self._stopped.wait(wait_s):
            beat_s = self._beat_s
            late_s = self._clock.now() - beat_s - _EVERY_S
            if late_s < LAG_LIMIT_S:
                # Not later: what has run for hardly longer than the limit would end unseen.
                wait_s = LAG_LIMIT_S - late_s
                continue
            wait_s = _EVERY_S
            if self.seen is None:
                what = what_runs(sys._current_frames(), watched)
                if self._beat_s == beat_s:  # else this lag has just ended, and its line is written
                    self.seen = what
            if self._stuck.is_due(beat_s, late_s):
                what = what_runs(sys._current_frames(), watched)
                logger.error(
                    "the event loop has not come back for %.1f s; it runs %s", late_s, what
                )


class _StuckLog:
    """Decides when to log that the loop has not come back: after STUCK_S, and each time that the
    lag has doubled since."""

    def __init__(self) -> None:
        self._beat_s = float("-inf")
        self._next_s = STUCK_S

    def is_due(self, beat_s: float, late_s: float) -> bool:
        """beat_s: when the last beat was, which tells one lag from the next."""
        if beat_s != self._beat_s:
            self._beat_s, self._next_s = beat_s, STUCK_S
        if late_s < self._next_s:
            return False
        self._next_s = 2 * late_s
        return True


def what_runs(frames: dict[int, FrameType], watched: int) -> str:
    """The innermost functions of bros that a thread runs, and those of the other busy threads.

    A thread that holds the interpreter in a library keeps the loop from running, too.
    """
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    loop = frames.get(watched)
    found = ["nothing itself" if loop is None or _waits(loop) else _describe(loop)]
    for ident, frame in frames.items():
        if ident not in (watched, threading.get_ident()) and not _waits(frame):
            found.append(f"{_describe(frame)} on thread {threads.get(ident, ident)}")
    return "; ".join(found)


def _describe(frame: FrameType) -> str:
    """The innermost function, and then those of bros, or without any the next ones."""
    inner, *others = _outwards(frame)
    own = [each for each in others if each.f_globals.get("__name__", "").startswith("bros.")]
    return " < ".join(map(_place, [inner, *(own or others)[:_SHOWN_FRAMES]]))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}:{frame.f_lineno}"


_WAITING = (
    "threading", "queue", "concurrent.futures.thread", "selectors", "socket", "subprocess",
    "multiprocessing.connection", "zmq", "asyncio.runners",
)  # fmt: skip
"""Modules whose functions block a thread without holding the interpreter; uvloop waits in that of
its runner. If nothing runs, other processes keep the machine busy."""


def _waits(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return any(name == module or name.startswith(f"{module}.") for module in _WAITING)
