"""How one request fared: when its tokens came, whether they were on time, why it waited."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping

from bros.core.interfaces import Buckets, ClassStats, RequestTrace
from bros.core.request import FinishReason, ServiceClass, Slo

_MAX_EVENTS = 64
"""A request that is interrupted more often than this shows its first events and its end."""


class BlockedTime:
    """For each class, how long its queue has stood still so far, by reason.

    A waiting request notes the sums when it joins the queue and takes the difference when it
    leaves, so that a step costs the same however many requests are waiting.
    """

    def __init__(self) -> None:
        self._seconds: dict[ServiceClass, dict[str, float]] = {cls: {} for cls in ServiceClass}

    def note(self, service_class: ServiceClass, reason: str, seconds: float) -> None:
        sums = self._seconds[service_class]
        sums[reason] = sums.get(reason, 0.0) + seconds

    def so_far(self, service_class: ServiceClass) -> Mapping[str, float]:
        return dict(self._seconds[service_class])


class RequestRecord:
    """Times in clock seconds.

    resumed: tokens that another engine gave before it was lost. They are among num_tokens, and
    there is no first token any more: the next one is due an interval after taken_s, when this
    engine was asked for the rest, and the pace is that of the whole answer, as if it had been kept
    until then. So the gap counts, as its reader sees it. A deadline
    for the whole counts from the arrival, as for any other.
    due_s: when the next token is due, whatever the policy hopes. left: the request is gone.
    held_s: since when it is held to its objectives: its arrival, or later. pace_from_s: when its
    first token came; if it was held to none then, when it should have to be on pace at held_s; if
    another engine gave it, at taken_s.
    """

    __slots__ = (
        "_blocked_before",
        "arrival_s",
        "due_s",
        "events",
        "first_token_s",
        "held_s",
        "last_token_s",
        "late_tokens",
        "left",
        "num_tokens",
        "pace_from_s",
        "preemptions",
        "resumed",
        "taken_s",
        "waits",
    )

    def __init__(
        self, arrival_s: float, slo: Slo, resumed: int = 0, taken_s: float | None = None
    ) -> None:
        """taken_s: of one that is resumed; None if that is when it arrived."""
        self.arrival_s = self.held_s = arrival_s
        self.taken_s = taken_s if resumed and taken_s is not None else arrival_s
        self.first_token_s: float | None = None
        self.pace_from_s: float | None = None
        self.last_token_s: float | None = None
        self.num_tokens = self.resumed = resumed
        self.hold_to(slo)
        self.late_tokens = 0
        self.preemptions = 0
        self.left = False
        self.waits: dict[str, float] = {}
        self.events: list[tuple[float, str]] = []
        self._blocked_before: Mapping[str, float] = {}

    def hold_to(self, slo: Slo) -> None:
        """Objectives since its arrival, before the first token of its own."""
        self.held_s = self.arrival_s
        self._expect(self.taken_s, slo)

    def hold_from(self, now: float, slo: Slo) -> None:
        """Objectives from now on: for the first token, or for the ones after those it has."""
        self.held_s = now
        self._expect(now, slo)

    def _expect(self, now: float, slo: Slo) -> None:
        """Objectives for the next token and the pace, if no reader waited for it before `now`."""
        if self.num_tokens == 0:
            self.due_s = now + (slo.ttft_s or math.inf)
            return
        self.due_s = now + (slo.tpot_s or math.inf)
        self.pace_from_s = now - (self.num_tokens - 1) * (slo.tpot_s or 0.0)

    def event(self, now: float, what: str) -> None:
        if len(self.events) < _MAX_EVENTS:
            self.events.append((now, what))
        else:
            self.events[-1] = (now, what)

    def wait(self, reason: str, seconds: float) -> None:
        """It could have run for so long, and did not."""
        self.waits[reason] = self.waits.get(reason, 0.0) + seconds

    def queued(self, blocked: Mapping[str, float]) -> None:
        """It joins a queue; `blocked` is BlockedTime.so_far of its class."""
        self._blocked_before = blocked

    def dequeued(self, blocked: Mapping[str, float]) -> None:
        """It leaves the queue."""
        for reason, seconds in blocked.items():
            waited = seconds - self._blocked_before.get(reason, 0.0)
            if waited > 0.0:
                self.wait(reason, waited)

    def token(self, now: float, slo: Slo) -> float:
        """A token was committed; returns its slack, deadline minus now, in seconds."""
        slack = self.due_s - now
        if slack < 0.0:
            self.late_tokens += 1
        if self.first_token_s is None:
            self.first_token_s = now
            self.event(now, "goes on" if self.resumed else "first token")
            if not self.resumed:
                self.pace_from_s = now
        self.last_token_s = now
        self.num_tokens += 1
        self.due_s = now + (slo.tpot_s or math.inf)
        return slack

    @property
    def ttft_s(self) -> float | None:
        if self.first_token_s is None or self.resumed:
            return None
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens of its own; None before the second one."""
        gaps = self.num_tokens - self.resumed - 1
        if self.first_token_s is None or self.last_token_s is None or gaps < 1:
            return None
        return (self.last_token_s - self.first_token_s) / gaps

    def met(self, slo: Slo) -> tuple[bool, bool]:
        """(first token, pace) of a finished request against its objectives; None is met."""
        first_s, last_s, from_s = self.first_token_s, self.last_token_s, self.pace_from_s
        in_time = slo.ttft_s is None or self.resumed > 0
        if slo.ttft_s is not None and first_s is not None and not self.resumed:
            in_time = first_s - self.held_s <= slo.ttft_s
        on_pace = True
        if slo.tpot_s is not None and self.num_tokens > 1:
            assert from_s is not None and last_s is not None
            on_pace = (last_s - from_s) / (self.num_tokens - 1) <= slo.tpot_s
        return in_time, on_pace

    def met_deadline(self, slo: Slo) -> bool:
        """Whether the last token of a finished request came in time; None is met."""
        if slo.deadline_s is None or self.last_token_s is None:
            return slo.deadline_s is None
        return self.last_token_s - self.held_s <= slo.deadline_s

    def trace(
        self,
        request_id: str,
        *,
        service_class: ServiceClass,
        requested_class: ServiceClass,
        slo: Slo,
        prompt_tokens: int,
        blocked: Mapping[str, float] | None,
        finish_reason: FinishReason | None,
    ) -> RequestTrace:
        """What to tell about it. blocked: BlockedTime.so_far if it is waiting right now."""
        waits = dict(self.waits)
        for reason, seconds in (blocked or {}).items():
            waited = seconds - self._blocked_before.get(reason, 0.0)
            if waited > 0.0:
                waits[reason] = waits.get(reason, 0.0) + waited
        return RequestTrace(
            request_id=request_id,
            service_class=service_class,
            requested_class=requested_class,
            slo=slo,
            prompt_tokens=prompt_tokens,
            output_tokens=self.num_tokens,
            events=tuple((at - self.arrival_s, what) for at, what in self.events),
            waits=waits,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            late_tokens=self.late_tokens,
            preemptions=self.preemptions,
            finish_reason=finish_reason,
        )


# ---- Counters of one service class, and the estimate behind Retry-After.


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
