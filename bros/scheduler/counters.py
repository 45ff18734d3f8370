"""Counters of one service class, and the estimate behind Retry-After."""

from __future__ import annotations

import math
from collections import deque

from bros.core.interfaces import ClassStats

_RECENT = 32
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class ClassCounters:
    """What one class has had so far. Counts only grow, `waiting` goes both ways."""

    def __init__(self) -> None:
        self.waiting = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.finished = 0
        self.preemptions = 0
        self._departures: deque[float] = deque(maxlen=_RECENT)

    def note_departure(self, now: float) -> None:
        """A request left, for whatever reason, at `now` seconds."""
        self._departures.append(now)

    def retry_after_s(self, now: float) -> float:
        """Seconds until a place in the queue is likely to be free: recent time per departure."""
        if not self._departures:
            return _MIN_RETRY_S
        interval = (now - self._departures[0]) / len(self._departures)
        return float(min(max(math.ceil(interval), _MIN_RETRY_S), _MAX_RETRY_S))

    def snapshot(self, running: int, kv_blocks: int) -> ClassStats:
        return ClassStats(
            running=running,
            kv_blocks=kv_blocks,
            waiting=self.waiting,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            finished=self.finished,
            preemptions=self.preemptions,
        )
