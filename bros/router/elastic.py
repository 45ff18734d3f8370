"""How many replicas there should be. Pure: what they do goes in, a number comes out.

grow    at once, if real-time tokens are about to be late or would be by the time that another
        replica helps, and as far as deadlines of best-effort work ask for; by half at least
shrink  by one, after calm in which one less would have done all the time
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_CALM = 8
"""Times calm_s, if shrinking has turned out to be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSettings:
    """least, most: replicas. start_s: how long a new one takes until it helps.

    calm_s: how long one less would have had to do, before there is one less. low_slack_s: less than
    this to spare is too little. full: how much of its time a replica may spend on what is
    urgent; it is kept a tenth further off before one is given up. idle: where less than this is
    spent on real-time work, more replicas make none of it earlier. window_s: best-effort work
    that has no deadline is to be done within this. growth: how many times as many at least, when
    tokens are late.
    """

    least: int = 1
    most: int = 1
    start_s: float = 15.0
    calm_s: float = 120.0
    low_slack_s: float = 0.04
    full: float = 0.8
    idle: float = 0.1
    window_s: float = 3600.0
    growth: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of all replicas together, over the last seconds.

    serving: replicas that take requests; coming: those that will. rt_slack_s: what real-time
    tokens had to spare, the worst twentieth of them; None if there were none. rt_busy: how many
    replicas' time real-time work took; rt_waiting_s: how much of it waits, and be_due: of
    best-effort work that is not done, as (seconds of one replica, seconds until it is due, None
    if it may take as long as it takes).
    """

    serving: int
    coming: int = 0
    rt_slack_s: float | None = None
    rt_busy: float = 0.0
    rt_waiting_s: float = 0.0
    be_due: Sequence[tuple[float, float | None]] = ()

    def __str__(self) -> str:
        """What an operator is told of it."""
        slack = "none" if self.rt_slack_s is None else f"{1000 * self.rt_slack_s:.0f} ms to spare"
        be_s = sum(work for work, _ in self.be_due)
        work_s, by_s = tightest([(work, by) for work, by in self.be_due if by is not None], 1.0)
        first = f", of which {work_s:.0f} s are due in {by_s:.0f} s" if by_s else ""
        return (
            f"{self.serving} serve and {self.coming} come; real-time tokens: {slack}, "
            f"{self.rt_busy:.1f} replicas busy, {self.rt_waiting_s:.1f} s waiting; "
            f"best effort: {be_s:.0f} s{first}"
        )


def tightest(due: Sequence[tuple[float, float]], least_s: float) -> tuple[float, float]:
    """Of (seconds of work, seconds until it is due): all that is due until the time by which most
    of its time is needed, and that time, which is taken to be at least least_s. (0, 0) without
    any work."""
    found, work_s = (0.0, 0.0), 0.0
    for by_s, work in sorted((max(by, least_s), work) for work, by in due):
        work_s += work
        if work_s * found[1] > found[0] * by_s or not found[1]:
            found = work_s, by_s
    return found


class Elastic:
    """Times are seconds of one clock."""

    def __init__(self, settings: ElasticSettings) -> None:
        """Raises ValueError if there can be no such number."""
        if not 1 <= settings.least <= settings.most:
            raise ValueError(f"at least {settings.least} and at most {settings.most} replicas")
        self._settings = settings
        self._slacks: deque[tuple[float, float]] = deque()
        self._settled_s = -math.inf
        self._shrunk_s = -math.inf
        self._calm_since_s: float | None = None
        self._calm = 1

    def wanted(self, load: Load, now: float) -> int:
        """How many there should be, of those that serve and those that come."""
        settings = self._settings
        there = load.serving + load.coming
        self._note_slack(load, now)
        need = max(self._for_deadlines(load, settings.full), self._for_slack(load, now))
        if there < settings.least or need > there:
            self._calm_since_s = None
            return self._grow(there, need, now)
        if load.coming:
            self._settled_s = now + settings.start_s / 2  # what they help is not seen yet
        if there > settings.most:
            return settings.most
        if load.coming or not self._one_less_would_do(load):
            self._calm_since_s = None
            return there
        if self._calm_since_s is None:
            self._calm_since_s = now
        if there > settings.least and now - self._calm_since_s >= settings.calm_s * self._calm:
            self._calm_since_s, self._shrunk_s = now, now
            return there - 1
        return there

    def _grow(self, there: int, need: int, now: float) -> int:
        settings = self._settings
        wanted = min(max(need, settings.least), settings.most)
        if wanted > there:
            again = now - self._shrunk_s < 2 * settings.calm_s * self._calm
            self._calm = min(2 * self._calm, _MOST_CALM) if again else 1
            self._settled_s = now + settings.start_s
        return max(wanted, min(there, settings.most))

    def _note_slack(self, load: Load, now: float) -> None:
        if load.rt_slack_s is None:
            self._slacks.clear()
            return
        self._slacks.append((now, load.rt_slack_s))
        while self._slacks[0][0] < now - self._settings.start_s:
            self._slacks.popleft()

    def _predicted_slack_s(self) -> float:
        """Once another replica could help, if it goes on falling as it does."""
        if not self._slacks:
            return math.inf
        (first_s, first), (last_s, last) = self._slacks[0], self._slacks[-1]
        # Of few figures, a trend is mostly chance.
        if last_s - first_s < self._settings.start_s / 2:
            return last
        return last + min(0.0, (last - first) / (last_s - first_s)) * self._settings.start_s

    def _for_slack(self, load: Load, now: float) -> int:
        """So many that real-time tokens are on time again; 0 if they are."""
        settings = self._settings
        queued = load.rt_waiting_s > settings.start_s * load.serving * settings.full
        if self._predicted_slack_s() >= settings.low_slack_s and not queued:
            return 0
        if now < self._settled_s or load.rt_busy < settings.idle * load.serving and not queued:
            return 0
        work = load.rt_busy + load.rt_waiting_s / settings.start_s
        there = load.serving + load.coming
        return max(math.ceil(there * settings.growth), math.ceil(work / settings.full))

    def _for_deadlines(self, load: Load, full: float) -> int:
        """So many that all best-effort work is done when it is due, beside the real-time work: of
        all that is due until some time, the replicas have that long."""
        settings = self._settings
        due = [(work, settings.window_s if by is None else by) for work, by in load.be_due]
        work_s, by_s = tightest(due, settings.start_s)
        return math.ceil((load.rt_busy + work_s / by_s) / full) if work_s else 0

    def _one_less_would_do(self, load: Load) -> bool:
        settings = self._settings
        full, fewer = settings.full - 0.1, load.serving - 1
        late = self._predicted_slack_s() < settings.low_slack_s and load.rt_busy > settings.idle
        if late or load.rt_waiting_s > settings.start_s or load.rt_busy > full * fewer:
            return False
        return self._for_deadlines(load, full) <= fewer
