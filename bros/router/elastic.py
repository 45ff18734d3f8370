"""How many replicas there should be. Pure: what they do goes in, a number comes out.

grow    at once, if real-time tokens are about to be late or would be by the time that another
        replica helps, and as far as deadlines of best-effort work ask for; by half at least
shrink  by one, after calm in which one less would have done all the time
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bros.core.clock import Clock
from bros.core.errors import BrosError, EngineDeadError, InvalidRequestError
from bros.core.interfaces import Buckets, ClassStats, EngineStats, Prices, ReportingClient
from bros.core.request import ServiceClass
from bros.router.client import RouterClient
from bros.router.fleet import Fleet
from bros.router.replica_set import ReplicaState, ReplicaStatus

_MOST_CALM = 8
"""Times calm_s, if shrinking has turned out to be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSettings:
    """least, most: replicas.
    start_s: how long a new one takes until it helps.

    calm_s: how long one less would have had to do, before there is one less.
    low_slack_s: less than this to spare is too little.
    full: how much of its time a replica may spend on what is urgent; the margin is a tenth wider
        before a replica is removed.
    idle: where less than this is spent on real-time work, more replicas make none of it earlier.
    window_s: best-effort work that has no deadline is to be done within this.
    growth: how many times as many at least, when tokens are late.
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
class FleetLoad:
    """Of all replicas together, over the last seconds.

    serving: replicas that take requests.
    coming: those that will.
    rt_slack_s: what real-time tokens had to spare, the worst twentieth of them; None if there were
        none.
    rt_busy: how many replicas' time real-time work took.
    rt_waiting_s: how much of it waits, and be_due: of best-effort work that is not done, as
        (seconds of one replica, seconds until it is due, None if it may take as long as it takes).
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

    def wanted(self, load: FleetLoad, now: float) -> int:
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

    def _note_slack(self, load: FleetLoad, now: float) -> None:
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

    def _for_slack(self, load: FleetLoad, now: float) -> int:
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

    def _for_deadlines(self, load: FleetLoad, full: float) -> int:
        """So many that all best-effort work is done when it is due, beside the real-time work: of
        all that is due until some time, the replicas have that long."""
        settings = self._settings
        due = [(work, settings.window_s if by is None else by) for work, by in load.be_due]
        work_s, by_s = tightest(due, settings.start_s)
        return math.ceil((load.rt_busy + work_s / by_s) / full) if work_s else 0

    def _one_less_would_do(self, load: FleetLoad) -> bool:
        settings = self._settings
        full, fewer = settings.full - 0.1, load.serving - 1
        late = self._predicted_slack_s() < settings.low_slack_s and load.rt_busy > settings.idle
        if late or load.rt_waiting_s > settings.start_s or load.rt_busy > full * fewer:
            return False
        return self._for_deadlines(load, full) <= fewer


# ---- What replicas have done lately, from their counters.


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
    ) -> FleetLoad | None:
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
        return FleetLoad(
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
        return self._ttft_s - (now - self._stuck_since_s)  # requests wait, and none gets a token

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


# ---- Replicas that come and go: starts and drains them as Elastic says.


logger = logging.getLogger(__name__)

_EVERY_S = 1.0
_LEAST_START_S = 5.0
"""A new replica has to warm up, even if it comes up sooner."""
_DRAIN_S = 120.0
"""How long requests may take to end on a replica that is to go, before they go on elsewhere."""
_COMING = (ReplicaState.DOWN, ReplicaState.RESTARTING)
_RETRY_S = 30.0
"""After a replica could not be started, none is for so long."""


Backlog = Callable[[], Sequence[tuple[int, float]]]
"""Best-effort requests that are going to be made: how many, and seconds until they are due."""


class StartableClient(ReportingClient, Protocol):
    """An engine that is not running yet."""

    async def start(self) -> None:
        """Raises EngineDeadError with the reason if it does not come up."""
        ...

    async def restart(self) -> None: ...


MakeClient = Callable[[int, Callable[[str], None]], StartableClient]
"""Of a place, the smallest number that no other replica has, and what is done if it does not come
back."""


class ElasticReplicas(RouterClient):
    """As many engines as `first`, then as many as it takes, within the settings' bounds."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        rng: random.Random,
        make: MakeClient,
        settings: ElasticSettings,
        first: int,
        on_final_death: Callable[[str], None] = lambda reason: None,
        *,
        replaces: bool = True,
    ) -> None:
        """replaces: another one is started for each that does not come back."""
        super().__init__(fleet, clock, rng, on_final_death)
        self._make = make
        self._first = first
        self._settings = settings
        self._policy = Elastic(settings)
        self._clock = clock
        self._meter: LoadMeter | None = None
        self._places: dict[int, int] = {}  # of replicas, by number
        self._clients: dict[int, StartableClient] = {}
        self._starting: dict[asyncio.Task[None], int] = {}  # place
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._replaces = replaces
        self._lost: list[int] = []  # numbers of those that do not come back
        self._watch: asyncio.Task[None] | None = None
        self._not_before_s = 0.0
        self._backlog: Backlog = tuple

    def look_ahead(self, backlog: Backlog) -> None:
        """There is more best-effort work than has been submitted, and `backlog` knows it."""
        self._backlog = backlog

    async def start(self) -> None:
        """Start the first ones at once and wait until every model is loaded.

        Raises EngineDeadError with the reason if one does not come up.
        """
        began_s = self._clock.now()
        starts = [self._start_one() for _ in range(self._first)]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await _cancel(starts)
            raise
        if self._settings.least < self._settings.most:
            start_s = max(_LEAST_START_S, self._clock.now() - began_s)
            self._policy = Elastic(dataclasses.replace(self._settings, start_s=start_s))
        if self._replaces or self._settings.least < self._settings.most:
            self._watch = asyncio.create_task(self._run(), name="elastic-replicas")

    async def close(self) -> None:
        tasks = [*self._starting, *self._leaving.values()]
        await _cancel([*tasks, *([self._watch] if self._watch else [])])
        await asyncio.gather(*self._ending)  # not in the middle of it
        await super().close()

    async def look(self) -> None:
        """Ask how many there should be, and begin to do that."""
        try:
            stats = await self.stats()
        except EngineDeadError:
            return
        now = self._clock.now()
        states = self.replicas()
        up = [status for status in states if status.state is ReplicaState.UP]
        self._keep({status.number for status in up})
        coming = len(self._starting) + sum(status.state in _COMING for status in states)
        meter = self._meter = self._meter or self._new_meter()
        load = meter.read(stats, self.due(now), len(up), coming, now, self._backlog())
        if not up:
            self._stay(len(self._leaving))
        if load is None or not up:
            return
        wanted, there = self._policy.wanted(load, now), len(up) + coming
        if wanted > there:
            self._grow(wanted - there, load)
        elif wanted < there:
            self._shrink(there - wanted, up, load)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.look()
            except Exception:
                logger.exception("the number of replicas stays as it is")

    def _new_meter(self) -> LoadMeter:
        info = self.info
        return LoadMeter(info.prices or Prices(), info.default_slo.ttft_s or 0.4)

    def _start_one(self) -> asyncio.Task[None]:
        taken = {*self._places.values(), *self._starting.values()}
        place = next(number for number in range(len(taken) + 1) if number not in taken)
        task = asyncio.create_task(self._bring_up(place), name="replica-start")
        self._starting[task] = place
        task.add_done_callback(self._starting.pop)
        return task

    async def _bring_up(self, place: int) -> None:
        numbers: list[int] = []

        def on_final_death(reason: str) -> None:
            for number in numbers:
                self._lost.append(number)
                self.give_up(number, reason)
                if number in self._leaving:
                    self._leaving.pop(number).cancel()
                self._close_one(number)

        client = self._make(place, on_final_death)
        await client.start()
        numbers.append(self.add(client, restart=client.restart))
        self._places[numbers[0]], self._clients[numbers[0]] = place, client
        self.replicas()  # it takes requests from now on
        if self._lost and self._replaces:
            self.remove(self._lost.pop(0))  # which was shown until there is another one

    def _on_started(self, start: asyncio.Task[None]) -> None:
        if not start.cancelled() and start.exception() is not None:
            logger.warning("a replica could not be started: %s", start.exception())
            self._not_before_s = self._clock.now() + _RETRY_S

    def _grow(self, count: int, load: FleetLoad) -> None:
        """First what is about to go, then new ones, as many as there may be beside all that are
        there, whether or not they take requests."""
        new = count - self._stay(count) - (0 if self._replaces else len(self._lost))
        taken = {*self._places.values(), *self._starting.values()}
        new = min(new, self._settings.most - len(taken))
        if new <= 0 or self._clock.now() < self._not_before_s:
            return
        logger.info("replicas: %d more; %s", new, load)
        for _ in range(new):
            self._start_one().add_done_callback(self._on_started)

    def _stay(self, count: int) -> int:
        """Use replicas that were to go again; returns how many of so many."""
        draining = (ReplicaState.DRAINING, ReplicaState.DRAINED)
        could = [status for status in self.replicas() if status.state in draining]
        stay = [status for status in could if status.number in self._leaving][:count]
        for status in stay:
            logger.info("%s is needed again", status.name)
            self._leaving.pop(status.number).cancel()
            self.resume(status.number)
        return len(stay)

    def _keep(self, used: set[int]) -> None:
        """A replica that an operator wants to keep is not removed."""
        for number in used & self._leaving.keys():
            self._leaving.pop(number).cancel()

    def _shrink(self, count: int, up: list[ReplicaStatus], load: FleetLoad) -> None:
        """First what is not there yet, then what has the least to do, of those the latest. One
        that takes requests stays."""
        for start in list(self._starting)[:count]:
            start.cancel()
            count -= 1
        by_load = sorted(up, key=lambda status: (status.open, -status.number))
        for status in by_load[: max(0, min(count, len(up) - 1))]:
            logger.info("%s is not needed any more; %s", status.name, load)
            self.drain(status.number)
            task = asyncio.create_task(self._let_go(status.number), name="replica-end")
            self._leaving[status.number] = task

    async def _let_go(self, number: int) -> None:
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self.drained(number)
        except TimeoutError:
            try:
                self.drain(number, move=True)
            except InvalidRequestError as error:
                logger.warning("it is needed again: %s", error)
                del self._leaving[number]
                self.resume(number)
                return
            await self.drained(number)
        del self._leaving[number]
        self.remove(number)
        self._close_one(number)

    def _close_one(self, number: int) -> None:
        """Its place is free when it has ended."""

        async def close() -> None:
            try:
                await self._clients.pop(number).close()
            except Exception:
                logger.exception("a replica did not end well")
            finally:
                del self._places[number]

        task = asyncio.create_task(close(), name="replica-close")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception) and not isinstance(result, BrosError):
            logger.error("a replica did not end well: %s", result)
