"""Counters of one service class, and the estimate behind Retry-After."""

from __future__ import annotations

import bisect
import math
from collections import deque

from bros.core.interfaces import Buckets, ClassStats
from bros.core.request import Slo
from bros.scheduler.record import RequestRecord

_RECENT = 32
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_SLACK_BOUNDS_S = (
    *(-10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, 0.0),
    *(0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1.0, 2.0),
)
_LENGTH_ALPHA = 0.05


class ClassCounters:
    """What one class has had so far. Counts only grow."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.finished = 0
        self.preemptions = 0
        self.kv_taken = self.kv_copied = self.kv_restored = 0
        self.prefix_tokens = 0
        self.relegated = 0
        self.promoted = 0
        self.rejected = 0
        self.mean_output_tokens: float | None = None
        self._ttft_met = self._tpot_met = self._both_met = 0
        self._deadlines = self._deadlines_met = 0
        self._late_tokens = 0
        self._slack = [0] * (len(_SLACK_BOUNDS_S) + 1)
        self._slack_total = 0.0
        self._departures: deque[float] = deque(maxlen=_RECENT)

    def note_token(self, slack_s: float) -> None:
        """A token came with `slack_s` seconds to spare; infinite if it had no deadline."""
        self.output_tokens += 1
        self._late_tokens += slack_s < 0.0
        if slack_s < math.inf:
            self._slack[bisect.bisect_left(_SLACK_BOUNDS_S, slack_s)] += 1
            self._slack_total += slack_s

    def note_finish(self, record: RequestRecord, slo: Slo) -> None:
        """A request got its last token."""
        self.finished += 1
        ttft_met, tpot_met = record.met(slo)
        self._ttft_met += ttft_met
        self._tpot_met += tpot_met
        self._both_met += ttft_met and tpot_met
        if slo.deadline_s is not None:
            self._deadlines += 1
            self._deadlines_met += record.met_deadline(slo)
        if self.mean_output_tokens is None:
            self.mean_output_tokens = record.num_tokens
        self.mean_output_tokens += _LENGTH_ALPHA * (record.num_tokens - self.mean_output_tokens)

    def note_departure(self, now: float) -> None:
        """A request left, for whatever reason, at `now` seconds."""
        self._departures.append(now)

    def retry_after_s(self, now: float) -> float:
        """Seconds until a place in the queue is likely to be free: recent time per departure."""
        if not self._departures:
            return _MIN_RETRY_S
        interval = (now - self._departures[0]) / len(self._departures)
        return float(min(max(math.ceil(interval), _MIN_RETRY_S), _MAX_RETRY_S))

    def snapshot(self, running: int, waiting: int, kv_blocks: int, evicted: int) -> ClassStats:
        return ClassStats(
            running=running,
            kv_blocks=kv_blocks,
            waiting=waiting,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            finished=self.finished,
            preemptions=self.preemptions,
            kv_taken=self.kv_taken,
            kv_copied=self.kv_copied,
            kv_restored=self.kv_restored,
            prefix_tokens=self.prefix_tokens,
            prefix_evicted=evicted,
            ttft_met=self._ttft_met,
            tpot_met=self._tpot_met,
            both_met=self._both_met,
            deadlines=self._deadlines,
            deadlines_met=self._deadlines_met,
            tokens_on_time=self.output_tokens - self._late_tokens,
            relegated=self.relegated,
            promoted=self.promoted,
            rejected=self.rejected,
            slack=Buckets(_SLACK_BOUNDS_S, tuple(self._slack), self._slack_total),
        )
