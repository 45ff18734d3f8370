"""Measurements per request (times, objectives, waits) and per service class (counters)."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from bros.core.interfaces import Buckets, ClassStats
from bros.core.request import ServiceClass, Slo

_MAX_EVENTS = 64
"""Further events of a request replace the last one."""


class BlockedTime:
    """For each class and tenant, the seconds in which its queue has waited so far, by reason.

    A request records these sums when it is enqueued and takes the difference when it is dequeued,
    so that the cost of a step does not depend on the number of waiting requests.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[ServiceClass, str], dict[str, float]] = {}

    def note(self, service_class: ServiceClass, tenant: str, reason: str, seconds: float) -> None:
        sums = self._seconds.setdefault((service_class, tenant), {})
        sums[reason] = sums.get(reason, 0.0) + seconds

    def so_far(self, service_class: ServiceClass, tenant: str) -> Mapping[str, float]:
        return dict(self._seconds.get((service_class, tenant), ()))


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Times of one request in clock seconds, and its waits.

    arrival_s: when it arrived.
    slo: its objectives when it arrived.
    resumed: output tokens that another engine generated before it was lost. They are among
        num_tokens, and TTFT does not apply: the next token is due one TPOT after resumed_s. The
        mean time per token is taken as if the request had been on pace until resumed_s.
    resumed_s: when this engine was asked for the rest of a resumed request; None: at its arrival.
    objectives_from_s: when its objectives began to hold: at arrival, or when it was promoted.
    due_s: when the next token is due by the objectives; the policy's deadline may be later.
    pace_from_s: start of the mean time per token: the first token, or a time such that a request
        that got objectives later (promoted or resumed) was on pace then.
    first_token_s: when this engine committed its first token.
    last_token_s: when this engine committed its latest token.
    num_tokens: output tokens.
    late_tokens: output tokens that came after due_s.
    longest_gap_s: longest time between two tokens of this engine, since the objectives hold.
    slowdown: time from this engine's first token to its latest one, since the objectives hold, over
        what the steps would have taken without best-effort work; None while nothing is known.
    preemptions: how often it lost KV memory.
    left: it has ended.
    waits: reason -> seconds.
    events: (time, what).
    """

    arrival_s: float
    slo: InitVar[Slo]
    resumed: int = 0
    resumed_s: InitVar[float | None] = None
    objectives_from_s: float = field(init=False)
    due_s: float = field(init=False)
    pace_from_s: float | None = field(init=False, default=None)
    first_token_s: float | None = field(init=False, default=None)
    last_token_s: float | None = field(init=False, default=None)
    num_tokens: int = field(init=False)
    late_tokens: int = field(init=False, default=0)
    longest_gap_s: float | None = field(init=False, default=None)
    preemptions: int = field(init=False, default=0)
    left: bool = field(init=False, default=False)
    waits: dict[str, float] = field(init=False, default_factory=dict)
    events: list[tuple[float, str]] = field(init=False, default_factory=list)
    # When the time of steps was compared first, and `alone_s` then and at the latest token.
    _compared_from: tuple[float, float] | None = field(init=False, default=None)
    _alone_s: float = field(init=False, default=0.0)
    _blocked_before: Mapping[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self, slo: Slo, resumed_s: float | None) -> None:
        self.objectives_from_s, self.num_tokens = self.arrival_s, self.resumed
        since_s = resumed_s if self.resumed and resumed_s is not None else self.arrival_s
        self._expect(since_s, slo)

    def reset_objectives(self, now: float, slo: Slo) -> None:
        """Set objectives that hold from now on, for the first token or the next ones."""
        self.objectives_from_s = now
        self.longest_gap_s = self._compared_from = None
        self._expect(now, slo)

    def _expect(self, now: float, slo: Slo) -> None:
        """Set due_s and pace_from_s as if the request had been on pace until `now`."""
        if self.num_tokens == 0:
            self.due_s = now + (slo.ttft_s or math.inf)
            return
        self.due_s = now + (slo.tpot_s or math.inf)
        self.pace_from_s = now - (self.num_tokens - 1) * (slo.tpot_s or 0.0)

    def tighten_objectives(self, now: float, before: Slo, slo: Slo) -> None:
        """Set objectives that are as strict as those before, or stricter from now on. What it is
        late by, or ahead of its pace, stays."""
        if self.num_tokens == 0:
            if slo.ttft_s is not None:
                self.due_s = min(self.due_s, self.objectives_from_s + slo.ttft_s)
            return
        if slo.tpot_s is not None and slo.tpot_s != before.tpot_s:
            self.due_s = min(self.due_s, now + slo.tpot_s)
            steps = self.num_tokens - 1
            if self.pace_from_s is None or before.tpot_s is None:
                self.pace_from_s = now - steps * slo.tpot_s
            else:
                self.pace_from_s += steps * (before.tpot_s - slo.tpot_s)

    def event(self, now: float, what: str) -> None:
        if len(self.events) < _MAX_EVENTS:
            self.events.append((now, what))
        else:
            self.events[-1] = (now, what)

    def wait(self, reason: str, seconds: float) -> None:
        """The request could have run for these seconds, and did not."""
        self.waits[reason] = self.waits.get(reason, 0.0) + seconds

    def queued(self, blocked: Mapping[str, float]) -> None:
        """The request was enqueued; `blocked` is BlockedTime.so_far of its class and tenant."""
        self._blocked_before = blocked

    def dequeued(self, blocked: Mapping[str, float]) -> None:
        """The request was dequeued."""
        self.waits = self.waits_so_far(blocked)

    def token(self, now: float, slo: Slo, alone_s: float = 0.0) -> float:
        """A token was committed; returns its slack, deadline minus now, in seconds.

        alone_s: see StepLedger.
        """
        slack, last_s = self.due_s - now, self.last_token_s
        if slack < 0.0:
            self.late_tokens += 1
        if last_s is None:
            self.first_token_s = now
            self.event(now, "resumed" if self.resumed else "first token")
            if not self.resumed:
                self.pace_from_s = now
        else:
            from_s = self.objectives_from_s
            gap_s = now - (last_s if last_s > from_s else from_s)
            if self.longest_gap_s is None or gap_s > self.longest_gap_s:
                self.longest_gap_s = max(gap_s, 0.0)
        if self._compared_from is None:
            self._compared_from = now, alone_s
        self._alone_s = alone_s
        self.last_token_s = now
        self.num_tokens += 1
        self.due_s = now + (slo.tpot_s or math.inf)
        return slack

    def complete(self, now: float) -> None:
        """The request ends without a token: its objectives are those of a first and last one."""
        self.first_token_s = self.last_token_s = now
        self.event(now, "prompt computed")

    @property
    def slowdown(self) -> float | None:
        if self._compared_from is None or self.last_token_s is None:
            return None
        from_s, alone_s = self._compared_from
        if self._alone_s <= alone_s:
            return None
        return (self.last_token_s - from_s) / (self._alone_s - alone_s)

    @property
    def ttft_s(self) -> float | None:
        if self.first_token_s is None or self.resumed:
            return None
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between this engine's tokens; None before the second one."""
        gaps = self.num_tokens - self.resumed - 1
        if self.first_token_s is None or self.last_token_s is None or gaps < 1:
            return None
        return (self.last_token_s - self.first_token_s) / gaps

    def met(self, slo: Slo) -> tuple[bool, bool]:
        """Whether a finished request met its (TTFT, TPOT) objectives; without one it is met."""
        first_s, last_s, from_s = self.first_token_s, self.last_token_s, self.pace_from_s
        in_time = on_pace = True
        if slo.ttft_s is not None and not self.resumed:
            assert first_s is not None
            in_time = first_s - self.objectives_from_s <= slo.ttft_s
        if slo.tpot_s is not None and self.num_tokens > 1:
            assert from_s is not None and last_s is not None
            on_pace = (last_s - from_s) / (self.num_tokens - 1) <= slo.tpot_s
        return in_time, on_pace

    def met_gap(self, slo: Slo) -> bool:
        """Whether no time between two tokens was longer than the objective."""
        gap_s = self.longest_gap_s
        return slo.gap_s is None or gap_s is None or gap_s <= slo.gap_s

    def met_deadline(self, slo: Slo) -> bool:
        """Whether the last token of a finished request met its deadline; without one it is met."""
        if slo.deadline_s is None or self.last_token_s is None:
            return slo.deadline_s is None
        return self.last_token_s - self.objectives_from_s <= slo.deadline_s

    def waits_so_far(self, blocked: Mapping[str, float] | None) -> dict[str, float]:
        """reason -> seconds. blocked: BlockedTime.so_far of its class and tenant if it is waiting
        right now."""
        waits = dict(self.waits)
        for reason, seconds in (blocked or {}).items():
            waited = seconds - self._blocked_before.get(reason, 0.0)
            if waited > 0.0:
                waits[reason] = waits.get(reason, 0.0) + waited
        return waits


# ---- Counters of one service class, and the estimate behind Retry-After.


class Histogram:
    """Counts values between bounds, see Buckets."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0

    def add(self, values: ArrayLike) -> None:
        """By NumPy, which takes a tenth of the time of one by one if they are many."""
        places = np.searchsorted(self._bounds, values)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._total += float(np.sum(values))

    @property
    def buckets(self) -> Buckets:
        return Buckets(self._bounds, tuple(self._counts.tolist()), self._total)


_RECENT = 32
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_SLACK_BOUNDS_S = (
    *(-10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, 0.0),
    *(0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1.0, 2.0),
)
_MANY_SLACKS = 1024
"""So many slacks are counted at once, which takes less time than counting those of each step."""
_SLOWDOWN_BOUNDS = (1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
_LENGTH_ALPHA = 0.05


@dataclass(slots=True)
class _Counts:
    """The counters of ClassStats that have these names."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    kv_preempted: int = 0
    kv_copied: int = 0
    kv_restored: int = 0
    prefix_tokens: int = 0
    ttft_met: int = 0
    tpot_met: int = 0
    both_met: int = 0
    gap_met: int = 0
    deadlines: int = 0
    deadlines_met: int = 0
    relegated: int = 0
    promoted: int = 0
    rejected: int = 0


class ClassCounters(_Counts):
    """Counters of one service class, see ClassStats."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_output_tokens: float | None = None
        self._slacks_s: list[float] = []  # of the latest tokens, which are not counted below yet
        self._late_tokens = 0
        self._slack = Histogram(_SLACK_BOUNDS_S)
        self._slowdown = Histogram(_SLOWDOWN_BOUNDS)
        self._departures: deque[float] = deque(maxlen=_RECENT)

    def note_tokens(self, slacks_s: Sequence[float]) -> None:
        """Tokens were committed so many seconds before their deadlines; infinite without one."""
        self.output_tokens += len(slacks_s)
        self._slacks_s += slacks_s
        if len(self._slacks_s) >= _MANY_SLACKS:
            self._count_slacks()

    def _count_slacks(self) -> None:
        found = np.array(self._slacks_s)
        found = found[found < math.inf]
        self._slacks_s.clear()
        self._late_tokens += int(np.count_nonzero(found < 0.0))
        self._slack.add(found)

    def note_finish(self, record: RequestRecord, slo: Slo) -> None:
        """A request got its last token and is complete."""
        self.finished += 1
        ttft_met, tpot_met = record.met(slo)
        self.ttft_met += ttft_met
        self.tpot_met += tpot_met
        self.both_met += ttft_met and tpot_met
        self.gap_met += record.met_gap(slo)
        slowdown = record.slowdown
        if slowdown is not None and slo.tpot_s is not None:  # a real-time stream
            self._slowdown.add([slowdown])
        if slo.deadline_s is not None:
            self.deadlines += 1
            self.deadlines_met += record.met_deadline(slo)
        if not record.num_tokens:
            return  # it was to generate none, which says nothing about others
        if self.mean_output_tokens is None:
            self.mean_output_tokens = record.num_tokens
        self.mean_output_tokens += _LENGTH_ALPHA * (record.num_tokens - self.mean_output_tokens)

    def note_departure(self, now: float) -> None:
        """A request ended, for any reason."""
        self._departures.append(now)

    def retry_after_s(self, now: float) -> float:
        """Seconds after which a client should retry: the recent mean time between departures."""
        if not self._departures:
            return _MIN_RETRY_S
        interval = (now - self._departures[0]) / len(self._departures)
        return float(min(max(math.ceil(interval), _MIN_RETRY_S), _MAX_RETRY_S))

    def snapshot(
        self,
        running: int,
        waiting: int,
        kv_blocks: int,
        evicted: int,
        device_s: Mapping[str, float],
    ) -> ClassStats:
        self._count_slacks()
        return ClassStats(
            **dataclasses.asdict(self),
            running=running,
            waiting=waiting,
            kv_blocks=kv_blocks,
            prefix_evicted=evicted,
            tokens_on_time=self.output_tokens - self._late_tokens,
            device_s=dict(device_s),
            slack=self._slack.buckets,
            slowdown=self._slowdown.buckets,
        )
