"""Autoscaling: how many replicas there should be (pure), and starting and draining them.

grow    at once, if real-time tokens are late or would be before another replica is up, or if
        best-effort work would miss its deadlines; late tokens add at least half as many again
shrink  by one, after a calm period in which one replica fewer would have sufficed all the time
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

_MAX_CALM_FACTOR = 8
"""Most times that calm_s grows to, after shrinking has turned out to be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSettings:
    """Bounds and thresholds of scaling.

    start_s: time until a new replica helps.
    calm_s: how long one replica fewer must have sufficed before one is removed.
    low_slack_s: real-time tokens need at least this much slack.
    full: share of a replica's time that urgent work may take; for removing one, 0.1 less.
    idle: with a smaller share of real-time work, more replicas would not make it earlier.
    window_s: deadline of best-effort work that has none.
    growth: least factor of growth when tokens are late.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    start_s: float = 15.0
    calm_s: float = 120.0
    low_slack_s: float = 0.04
    full: float = 0.8
    idle: float = 0.1
    window_s: float = 3600.0
    growth: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """The load of all replicas together, over the last seconds.

    serving: replicas that accept requests.
    starting: replicas that will.
    rt_slack_s: 5th percentile of the slack of real-time tokens; None if there were none.
    rt_busy: real-time work, in replicas that it kept busy.
    rt_waiting_s: real-time work that waits, in seconds of one replica.
    be_due: unfinished best-effort work, as (seconds of one replica, seconds until its deadline,
        None if it has none).
    """

    serving: int
    starting: int = 0
    rt_slack_s: float | None = None
    rt_busy: float = 0.0
    rt_waiting_s: float = 0.0
    be_due: Sequence[tuple[float, float | None]] = ()

    def __str__(self) -> str:
        """For log messages."""
        slack = "none" if self.rt_slack_s is None else f"{1000 * self.rt_slack_s:.0f} ms"
        be_s = sum(work for work, _ in self.be_due)
        work_s, by_s = tightest_deadline(
            [(work, by) for work, by in self.be_due if by is not None], 1.0
        )
        first = f", of which {work_s:.0f} s are due in {by_s:.0f} s" if by_s else ""
        return (
            f"{self.serving} serving, {self.starting} starting; real-time slack: {slack}, "
            f"{self.rt_busy:.1f} replicas busy, {self.rt_waiting_s:.1f} s waiting; "
            f"best-effort backlog: {be_s:.0f} s{first}"
        )


def tightest_deadline(due: Sequence[tuple[float, float]], least_s: float) -> tuple[float, float]:
    """The deadline by which work takes the largest share of the time that is left.

    due: (seconds of work, seconds until its deadline). Returns (all work due by that deadline,
    seconds until it, at least least_s), or (0, 0) without work.
    """
    found, work_s = (0.0, 0.0), 0.0
    for by_s, work in sorted((max(by, least_s), work) for work, by in due):
        work_s += work
        if work_s * found[1] > found[0] * by_s or not found[1]:
            found = work_s, by_s
    return found


class ScalingPolicy:
    """Decides how many replicas there should be. Times are seconds of one clock."""

    def __init__(self, settings: ElasticSettings) -> None:
        """Raises ValueError unless 1 <= min_replicas <= max_replicas."""
        if not 1 <= settings.min_replicas <= settings.max_replicas:
            raise ValueError(
                f"at least {settings.min_replicas} and at most {settings.max_replicas} replicas"
            )
        self._settings = settings
        self._slacks: deque[tuple[float, float]] = deque()
        self._settled_s = -math.inf
        self._shrunk_s = -math.inf
        self._calm_since_s: float | None = None
        self._calm_factor = 1

    def wanted(self, load: FleetLoad, now: float) -> int:
        """How many replicas there should be, serving and starting ones together."""
        settings = self._settings
        current = load.serving + load.starting
        self._note_slack(load, now)
        need = max(
            self._needed_for_deadlines(load, settings.full), self._needed_for_slack(load, now)
        )
        if current < settings.min_replicas or need > current:
            self._calm_since_s = None
            return self._grow(current, need, now)
        if load.starting:
            self._settled_s = now + settings.start_s / 2  # their effect cannot be seen yet
        if current > settings.max_replicas:
            return settings.max_replicas
        if load.starting or not self._one_less_suffices(load):
            self._calm_since_s = None
            return current
        if self._calm_since_s is None:
            self._calm_since_s = now
        if (
            current > settings.min_replicas
            and now - self._calm_since_s >= settings.calm_s * self._calm_factor
        ):
            self._calm_since_s, self._shrunk_s = now, now
            return current - 1
        return current

    def _grow(self, current: int, need: int, now: float) -> int:
        settings = self._settings
        wanted = min(max(need, settings.min_replicas), settings.max_replicas)
        if wanted > current:
            again = now - self._shrunk_s < 2 * settings.calm_s * self._calm_factor
            self._calm_factor = min(2 * self._calm_factor, _MAX_CALM_FACTOR) if again else 1
            self._settled_s = now + settings.start_s
        return max(wanted, min(current, settings.max_replicas))

    def _note_slack(self, load: FleetLoad, now: float) -> None:
        if load.rt_slack_s is None:
            self._slacks.clear()
            return
        self._slacks.append((now, load.rt_slack_s))
        while self._slacks[0][0] < now - self._settings.start_s:
            self._slacks.popleft()

    def _predicted_slack_s(self) -> float:
        """The slack when a new replica would be up, by the present trend if that falls."""
        if not self._slacks:
            return math.inf
        (first_s, first), (last_s, last) = self._slacks[0], self._slacks[-1]
        # A trend over a short time is mostly chance.
        if last_s - first_s < self._settings.start_s / 2:
            return last
        return last + min(0.0, (last - first) / (last_s - first_s)) * self._settings.start_s

    def _needed_for_slack(self, load: FleetLoad, now: float) -> int:
        """Replicas needed so that real-time tokens are on time again; 0 if they are."""
        settings = self._settings
        queued = load.rt_waiting_s > settings.start_s * load.serving * settings.full
        if self._predicted_slack_s() >= settings.low_slack_s and not queued:
            return 0
        if now < self._settled_s or load.rt_busy < settings.idle * load.serving and not queued:
            return 0
        work = load.rt_busy + load.rt_waiting_s / settings.start_s
        current = load.serving + load.starting
        return max(math.ceil(current * settings.growth), math.ceil(work / settings.full))

    def _needed_for_deadlines(self, load: FleetLoad, full: float) -> int:
        """Replicas needed so that best-effort work beside real-time work meets its deadlines."""
        settings = self._settings
        due = [(work, settings.window_s if by is None else by) for work, by in load.be_due]
        work_s, by_s = tightest_deadline(due, settings.start_s)
        return math.ceil((load.rt_busy + work_s / by_s) / full) if work_s else 0

    def _one_less_suffices(self, load: FleetLoad) -> bool:
        settings = self._settings
        full, fewer = settings.full - 0.1, load.serving - 1
        late = self._predicted_slack_s() < settings.low_slack_s and load.rt_busy > settings.idle
        if late or load.rt_waiting_s > settings.start_s or load.rt_busy > full * fewer:
            return False
        return self._needed_for_deadlines(load, full) <= fewer


# ---- The present load, from the counters of the replicas.


_SLACK_QUANTILE = 0.05
_MIN_FINISHED = 4
"""Finished requests that an estimate of a request's cost needs."""
_NOTHING = ClassStats()


class LoadMeter:
    """Computes the load from the differences of two readings of the statistics."""

    def __init__(self, prices: Prices, ttft_s: float) -> None:
        """ttft_s: TTFT objective of real-time requests."""
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
        starting: int,
        now: float,
        backlog: Sequence[tuple[int, float]] = (),
    ) -> FleetLoad | None:
        """The load since the last call; None on the first one.

        stats: of all replicas together.
        due: (share that is left, seconds until its deadline) of each open best-effort request.
        backlog: (requests, seconds until their deadline) of those that are not submitted yet.
        """
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
            starting=starting,
            rt_slack_s=self._slack_s(rt, rt_before, now),
            rt_busy=min(max(0.0, worked_s / (now - last_s)), float(serving)),
            rt_waiting_s=rt.waiting * self._mean_s(rt),
            be_due=[
                *((share * be_s, by) for share, by in due),
                # The backlog may be large: an estimate from few requests would be far off.
                *((n * be_s, by) for n, by in backlog if be.finished >= _MIN_FINISHED),
            ],
        )

    def _slack_s(self, rt: ClassStats, before: ClassStats, now: float) -> float | None:
        slack = _worst_slack(rt.slack, before.slack)
        if slack is not None or not rt.waiting:
            self._stuck_since_s = None
            return slack
        if self._stuck_since_s is None:
            self._stuck_since_s = now
        return self._ttft_s - (now - self._stuck_since_s)  # requests wait, and no token comes

    def _work_s(self, of: ClassStats, rows: float) -> float:
        """Seconds of work of a class so far, decoding in steps of `rows` rows."""
        prices = self._prices
        asked = max(0, of.prompt_tokens - of.prefix_tokens)
        return asked * prices.token_s + prices.decode_s(of.output_tokens, 0, rows)

    def _mean_s(self, of: ClassStats) -> float:
        """Mean seconds of a request of a class; before one has finished, a small default.

        The work so far includes that of running requests, which are half done on average.
        """
        if not of.finished:
            return self._prices.prefill_s(256) + self._prices.decode_s(64, 256, 8)
        return self._work_s(of, 8) / (of.finished + of.running / 2)


def _worst_slack(after: Buckets, before: Buckets) -> float | None:
    """The _SLACK_QUANTILE of the slack of the tokens between two histograms, as the lower bound of
    its bucket; None without tokens."""
    earlier = before.counts if len(before.counts) == len(after.counts) else (0,) * len(after.counts)
    counts = [max(0, now - then) for now, then in zip(after.counts, earlier, strict=True)]
    total, seen = sum(counts), 0
    for i, count in enumerate(counts):
        seen += count
        if total and seen >= _SLACK_QUANTILE * total:
            return after.bounds[max(0, i - 1)] if after.bounds else None
    return None


# ---- Starts and drains replicas as ScalingPolicy decides.


logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_MIN_START_S = 5.0
"""Least start_s: a replica has to warm up, even if it is up sooner."""
_DRAIN_S = 120.0
"""How long a replica that is removed may finish its requests, before they move to others."""
_STARTING_STATES = (ReplicaState.DOWN, ReplicaState.RESTARTING)
_RETRY_S = 30.0
"""After a failed start, no replica is started for so long."""


Backlog = Callable[[], Sequence[tuple[int, float]]]
"""(requests, seconds until their deadline) of best-effort requests that are not submitted yet."""


class StartableClient(ReportingClient, Protocol):
    """A client of an engine that it starts itself."""

    async def start(self) -> None:
        """Raises EngineDeadError with the reason if it does not come up."""
        ...

    async def restart(self) -> None: ...


MakeClient = Callable[[int, Callable[[str], None]], StartableClient]
"""(index, on_final_death) -> client. index: the smallest number that no other replica uses;
on_final_death: called with the reason if the engine does not come back."""


class ElasticReplicas(RouterClient):
    """Starts `first` engines, then as many as the load needs, within the settings' bounds."""

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
        """replaces: start a new replica for each one that does not come back."""
        super().__init__(fleet, clock, rng, on_final_death)
        self._make = make
        self._first = first
        self._settings = settings
        self._policy = ScalingPolicy(settings)
        self._meter: LoadMeter | None = None
        self._indices: dict[int, int] = {}  # replica number -> index
        self._clients: dict[int, StartableClient] = {}
        self._starting: dict[asyncio.Task[None], int] = {}  # start -> index
        self._removals: dict[int, asyncio.Task[None]] = {}
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._replaces = replaces
        self._lost: list[int] = []  # numbers of replicas that do not come back
        self._watch: asyncio.Task[None] | None = None
        self._not_before_s = 0.0
        self._backlog: Backlog = tuple

    def set_backlog(self, backlog: Backlog) -> None:
        """Include best-effort requests that are not submitted yet; `backlog` lists them."""
        self._backlog = backlog

    async def start(self) -> None:
        """Start the first replicas together and wait until every model is loaded.

        Raises EngineDeadError with the reason if one does not come up.
        """
        began_s = self._clock.now()
        starts = [self._start_one() for _ in range(self._first)]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await _cancel(starts)
            raise
        if self._settings.min_replicas < self._settings.max_replicas:
            start_s = max(_MIN_START_S, self._clock.now() - began_s)
            self._policy = ScalingPolicy(dataclasses.replace(self._settings, start_s=start_s))
        if self._replaces or self._settings.min_replicas < self._settings.max_replicas:
            self._watch = asyncio.create_task(self._run(), name="elastic-replicas")

    async def close(self) -> None:
        tasks = [*self._starting, *self._removals.values()]
        await _cancel([*tasks, *([self._watch] if self._watch else [])])
        await asyncio.gather(*self._closing_tasks)  # these are not cancelled
        await super().close()

    async def scale(self) -> None:
        """Read the load, and start or drain replicas as the policy decides."""
        try:
            stats = await self.stats()
        except EngineDeadError:
            return
        now = self._clock.now()
        states = self.replicas()
        up = [status for status in states if status.state is ReplicaState.UP]
        self._drop_removals({status.number for status in up})
        starting = len(self._starting) + sum(status.state in _STARTING_STATES for status in states)
        meter = self._meter = self._meter or self._new_meter()
        load = meter.read(stats, self.be_deadlines(now), len(up), starting, now, self._backlog())
        if not up:
            self._cancel_removals(len(self._removals))
        if load is None or not up:
            return
        wanted, current = self._policy.wanted(load, now), len(up) + starting
        if wanted > current:
            self._grow(wanted - current, load)
        elif wanted < current:
            self._shrink(current - wanted, up, load)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            try:
                await self.scale()
            except Exception:
                logger.exception("scaling failed: the number of replicas stays as it is")

    def _new_meter(self) -> LoadMeter:
        info = self.info
        return LoadMeter(info.prices or Prices(), info.default_slo.ttft_s or 0.4)

    def _start_one(self) -> asyncio.Task[None]:
        taken = {*self._indices.values(), *self._starting.values()}
        index = next(number for number in range(len(taken) + 1) if number not in taken)
        task = asyncio.create_task(self._bring_up(index), name="replica-start")
        self._starting[task] = index
        task.add_done_callback(self._starting.pop)
        return task

    async def _bring_up(self, index: int) -> None:
        numbers: list[int] = []

        def on_final_death(reason: str) -> None:
            for number in numbers:
                self._lost.append(number)
                self.mark_gone(number, reason)
                if number in self._removals:
                    self._removals.pop(number).cancel()
                self._close_client(number)

        client = self._make(index, on_final_death)
        await client.start()
        numbers.append(self.add(client, restart=client.restart))
        self._indices[numbers[0]], self._clients[numbers[0]] = index, client
        self.replicas()  # checks liveness: it accepts requests from now on
        if self._lost and self._replaces:
            self.remove(self._lost.pop(0))  # shown to operators until it is replaced

    def _on_started(self, start: asyncio.Task[None]) -> None:
        if not start.cancelled() and start.exception() is not None:
            logger.warning("a replica could not be started: %s", start.exception())
            self._not_before_s = self._clock.now() + _RETRY_S

    def _grow(self, count: int, load: FleetLoad) -> None:
        """Resume replicas that are being removed, then start new ones. All existing replicas count
        toward max_replicas, whether or not they accept requests."""
        new = count - self._cancel_removals(count) - (0 if self._replaces else len(self._lost))
        taken = {*self._indices.values(), *self._starting.values()}
        new = min(new, self._settings.max_replicas - len(taken))
        if new <= 0 or self._clock.now() < self._not_before_s:
            return
        logger.info("replicas: %d more; %s", new, load)
        for _ in range(new):
            self._start_one().add_done_callback(self._on_started)

    def _cancel_removals(self, count: int) -> int:
        """Resume up to `count` replicas that are being removed; return how many."""
        draining = (ReplicaState.DRAINING, ReplicaState.DRAINED)
        could = [status for status in self.replicas() if status.state in draining]
        stay = [status for status in could if status.number in self._removals][:count]
        for status in stay:
            logger.info("%s is needed again", status.name)
            self._removals.pop(status.number).cancel()
            self.resume(status.number)
        return len(stay)

    def _drop_removals(self, used: set[int]) -> None:
        """Do not remove replicas that are in use again, because an operator resumed them."""
        for number in used & self._removals.keys():
            self._removals.pop(number).cancel()

    def _shrink(self, count: int, up: list[ReplicaStatus], load: FleetLoad) -> None:
        """Cancel starts, then drain the replicas with the fewest open requests, of equal ones the
        latest. One replica that accepts requests stays."""
        for start in list(self._starting)[:count]:
            start.cancel()
            count -= 1
        by_load = sorted(up, key=lambda status: (status.open, -status.number))
        for status in by_load[: max(0, min(count, len(up) - 1))]:
            logger.info("%s is not needed any more; %s", status.name, load)
            self.drain(status.number)
            task = asyncio.create_task(self._drain_and_remove(status.number), name="replica-end")
            self._removals[status.number] = task

    async def _drain_and_remove(self, number: int) -> None:
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self.wait_drained(number)
        except TimeoutError:
            try:
                self.drain(number, move=True)
            except InvalidRequestError as error:
                logger.warning("a draining replica is needed again: %s", error)
                del self._removals[number]
                self.resume(number)
                return
            await self.wait_drained(number)
        del self._removals[number]
        if not self._replica_set.find(number).draining:
            return  # an operator has resumed it
        self.remove(number)
        self._close_client(number)

    def _close_client(self, number: int) -> None:
        """Close the client of a replica. Its index is free afterwards."""

        async def close() -> None:
            try:
                await self._clients.pop(number).close()
            except Exception:
                logger.exception("closing a replica failed")
            finally:
                del self._indices[number]

        task = asyncio.create_task(close(), name="replica-close")
        self._closing_tasks.add(task)
        task.add_done_callback(self._closing_tasks.discard)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception) and not isinstance(result, BrosError):
            logger.error("closing a replica failed: %s", result)
