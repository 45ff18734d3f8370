"""What replicas have done lately, from their counters."""

from __future__ import annotations

from collections.abc import Sequence

from bros.core.interfaces import Buckets, ClassStats, EngineStats, Prices
from bros.core.request import ServiceClass
from bros.router.elastic import Load

_WORST = 0.05
_KNOWN = 4
"""Requests that have to have ended before it is known what others will take."""
_NOTHING = ClassStats()


class LoadMeter:
    """Tells the difference between two looks. ttft_s: what real-time requests are held to."""

    def __init__(self, prices: Prices, ttft_s: float) -> None:
        self._prices = prices
        self._ttft_s = ttft_s
        self._last = EngineStats()
        self._last_s: float | None = None
        self._stuck_since_s: float | None = None

    def read(
        self,
        stats: EngineStats,
        due: Sequence[tuple[float, float | None]],
        serving: int,
        coming: int,
        now: float,
        backlog: Sequence[tuple[int, float]] = (),
    ) -> Load | None:
        """stats: of all replicas together. due: of each best-effort request that is open, the share
        that is left and the seconds until it is due. backlog: how many are yet to come, and the
        same. None the first time."""
        before, self._last = self._last, stats
        last_s, self._last_s = self._last_s, now
        if last_s is None or now <= last_s:
            return None
        rt = stats.by_class.get(ServiceClass.RT, _NOTHING)
        rt_before = before.by_class.get(ServiceClass.RT, _NOTHING)
        be = stats.by_class.get(ServiceClass.BE, _NOTHING)
        rows = (rt.running + be.running) / max(1, serving)
        worked_s = self._work_s(rt, rows) - self._work_s(rt_before, rows)
        be_s = self._mean_s(be)
        return Load(
            serving=serving,
            coming=coming,
            rt_slack_s=self._slack_s(rt, rt_before, now),
            rt_busy=min(max(0.0, worked_s / (now - last_s)), float(serving)),
            rt_waiting_s=rt.waiting * self._mean_s(rt),
            be_due=[
                *((share * be_s, by) for share, by in due),
                # Of very many a guess would be far off.
                *((n * be_s, by) for n, by in backlog if be.finished >= _KNOWN),
            ],
        )

    def _slack_s(self, rt: ClassStats, before: ClassStats, now: float) -> float | None:
        slack = _worst(rt.slack, before.slack)
        if slack is not None or not rt.waiting:
            self._stuck_since_s = None
            return slack
        if self._stuck_since_s is None:
            self._stuck_since_s = now
        return self._ttft_s - (now - self._stuck_since_s)  # they wait, and nobody gets anything

    def _work_s(self, of: ClassStats, rows: float) -> float:
        """What a class has cost an engine, in steps of so many rows."""
        prices = self._prices
        asked = max(0, of.prompt_tokens - of.prefix_tokens)
        return asked * prices.token_s + prices.decode_s(of.output_tokens, 0, rows)

    def _mean_s(self, of: ClassStats) -> float:
        """Of a request of this class; before one has ended, that of one with few tokens.

        What has been done is of those that run, too, which have got half of theirs on average.
        """
        if not of.finished:
            return self._prices.prefill_s(256) + self._prices.decode_s(64, 256, 8)
        return self._work_s(of, 8) / (of.finished + of.running / 2)


def _worst(after: Buckets, before: Buckets) -> float | None:
    """Of the tokens in between, the slack that a twentieth had at most, as the lower bound of its
    bucket; None without tokens."""
    earlier = before.counts if len(before.counts) == len(after.counts) else (0,) * len(after.counts)
    counts = [max(0, now - then) for now, then in zip(after.counts, earlier, strict=True)]
    total, seen = sum(counts), 0
    for i, count in enumerate(counts):
        seen += count
        if total and seen >= _WORST * total:
            return after.bounds[max(0, i - 1)] if after.bounds else None
    return None
