"""Attainment of latency objectives and summaries of durations.

The simulator, `bros bench` and the benchmarks share these definitions, so that simulated and
measured figures are comparable. Percentiles are interpolated linearly, as in numpy and vLLM's
benchmarks.

Whether a request met an objective is *decided* once its tokens are there, or once they are certain
to be late. A request that is open at the end counts as missed if it is overdue by then, and
otherwise not at all. A slow start is not overdue yet, because the rest may come faster: its TPOT is
missed once even all of its tokens could not make up for the time. A request that was refused or
lost counts as missed.

    ttft    start to first token
    tpot    (last token - first token) / (tokens - 1), of requests with two tokens or more
    gap     longest time between two tokens, likewise
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bros.core.request import Slo

TOLERANCE_S = 1e-9
"""For rounding errors in differences of times: a token that comes when it is due is on time."""


def within(seconds: float, limit_s: float) -> bool:
    """Whether a duration meets an objective."""
    return seconds <= limit_s + TOLERANCE_S


@dataclass(frozen=True, slots=True)
class Attainment:
    """The share of requests, or of tokens, that met their objectives.

    met: number that met their objectives.
    decided: number that certainly met or missed them.
    """

    met: int
    decided: int

    @property
    def value(self) -> float | None:
        """met / decided; None if nothing was decided."""
        return self.met / self.decided if self.decided else None

    @classmethod
    def of(cls, verdicts: Sequence[bool | None]) -> Attainment:
        """verdicts: True: met; False: missed; None: undecided."""
        decided = [verdict for verdict in verdicts if verdict is not None]
        return cls(sum(decided), len(decided))

    @classmethod
    def total(cls, parts: Sequence[Attainment]) -> Attainment:
        return cls(sum(part.met for part in parts), sum(part.decided for part in parts))


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, population standard deviation and percentiles in seconds; None if count is 0."""

    count: int
    mean: float | None = None
    std: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values_s: ArrayLike) -> Summary:
        """values_s: durations, a sequence or a one-dimensional array."""
        found = np.asarray(values_s, dtype=np.float64)
        if not found.size:
            return cls(0)
        percentiles = np.percentile(found, (50, 90, 95, 99)).tolist()
        return cls(found.size, float(found.mean()), float(found.std()), *percentiles)


# ---- One request against its objectives.


class TimelineOutcome(enum.Enum):
    """Of a request when its client stops observing.

    LOST: refused, failed or cut short.
    """

    OPEN = enum.auto()
    COMPLETED = enum.auto()
    LOST = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One request as its client saw it.

    start_s: when it arrived or was due.
    times_s: when its tokens came, or chunks of tokens.
    tokens: output tokens; of an open one, the most that it can get.
    end_s: when it ended, for a completed one without times.
    """

    start_s: float
    times_s: Sequence[float]
    tokens: int
    outcome: TimelineOutcome
    end_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One request against its objectives; None without an objective or while undecided.

    both_met: TTFT and TPOT.
    overdue: the request is open, and ttft_s or tpot_s is its time so far, a lower bound.
    """

    ttft_s: float | None
    tpot_s: float | None
    ttft_met: bool | None
    tpot_met: bool | None
    both_met: bool | None
    gap_s: float | None
    gap_met: bool | None
    overdue: bool


def judge(request: Timeline, slo: Slo, until_s: float) -> Judged:
    """until_s: when the client stopped observing."""
    ttft_s, ttft_met = _ttft(request, slo.ttft_s, until_s)
    tpot_s, tpot_met = _tpot(request, slo.tpot_s, until_s)
    gap_s, gap_met = _gap(request, slo.longest_gap_s, until_s)
    both_met: bool | None = None
    if ttft_met is False or tpot_met is False:
        both_met = False
    elif request.outcome is TimelineOutcome.COMPLETED and slo != Slo():
        both_met = True
    late = (not request.times_s and ttft_met is False) or tpot_met is False
    return Judged(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        ttft_met=ttft_met,
        tpot_met=tpot_met,
        both_met=both_met,
        gap_s=gap_s,
        gap_met=gap_met,
        overdue=request.outcome is TimelineOutcome.OPEN and late,
    )


def tokens_on_time(
    request: Timeline, ttft_met: bool | None, tpot_s: float | None, until_s: float
) -> Attainment:
    """The tokens that came within tpot_s of the one before, and the first one if `ttft_met`.

    The next token of a lost or overdue request counts as missed.
    """
    met, decided = int(ttft_met is True), int(ttft_met is not None)
    times = request.times_s
    if tpot_s is None or not times:
        return Attainment(met, decided)
    gaps = gaps_s(times)
    met += sum(within(gap, tpot_s) for gap in gaps)
    is_open = request.outcome is TimelineOutcome.OPEN
    overdue = is_open and not within(until_s - times[-1], tpot_s)
    return Attainment(
        met, decided + len(gaps) + (overdue or request.outcome is TimelineOutcome.LOST)
    )


def tpot_of(first_s: float, last_s: float, tokens: int) -> float | None:
    """The TPOT in seconds of a request whose first and last token came then; None with fewer than
    two tokens."""
    return (last_s - first_s) / (tokens - 1) if tokens > 1 else None


def gaps_s(times_s: Sequence[float]) -> list[float]:
    """The times between consecutive tokens."""
    return list(map(operator.sub, times_s[1:], times_s))


def _ttft(
    request: Timeline, limit_s: float | None, until_s: float
) -> tuple[float | None, bool | None]:
    """(TTFT in seconds, whether it met `limit_s`)"""
    if request.times_s:
        seconds = request.times_s[0] - request.start_s
        return seconds, _met(seconds, limit_s)
    if request.outcome is TimelineOutcome.COMPLETED:  # without text, or not streamed
        assert request.end_s is not None, "it was completed, but at no time"
        return None, _met(request.end_s - request.start_s, limit_s)
    if request.outcome is TimelineOutcome.LOST:
        return None, None if limit_s is None else False
    waited_s = until_s - request.start_s
    return (waited_s, False) if _met(waited_s, limit_s) is False else (None, None)


def _tpot(
    request: Timeline, limit_s: float | None, until_s: float
) -> tuple[float | None, bool | None]:
    """(TPOT in seconds, whether it met `limit_s`)"""
    times = request.times_s
    if request.outcome is TimelineOutcome.LOST:
        return None, None if limit_s is None else False
    if not times:
        return None, None
    if request.outcome is TimelineOutcome.COMPLETED:
        seconds = tpot_of(times[0], times[-1], request.tokens)
        return seconds, None if seconds is None else _met(seconds, limit_s)
    # If the rest came right now. A chunk may have several tokens, so chunks say nothing about it.
    most = max(request.tokens, len(times) + 1)
    at_best = (until_s - times[0]) / (most - 1)
    return (at_best, False) if _met(at_best, limit_s) is False else (None, None)


def _gap(
    request: Timeline, limit_s: float | None, until_s: float
) -> tuple[float | None, bool | None]:
    """(longest time between two tokens in seconds, whether it met `limit_s`)"""
    times = request.times_s
    if request.outcome is TimelineOutcome.LOST:
        return None, None if limit_s is None else False
    is_open = request.outcome is TimelineOutcome.OPEN and len(times) > 0
    gaps = gaps_s([*times, until_s] if is_open else times)
    if not gaps:
        return None, None
    met = _met(max(gaps), limit_s)
    if is_open and met is not False:
        return None, None
    return max(gaps), met


def _met(seconds: float, limit_s: float | None) -> bool | None:
    return None if limit_s is None else within(seconds, limit_s)
