"""Replicas that come and go: starts and drains them as Elastic says."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from bros.core.clock import Clock
from bros.core.errors import BrosError, EngineDeadError, InvalidRequestError
from bros.core.interfaces import Prices, WatchableClient
from bros.router.client import RouterClient
from bros.router.elastic import Elastic, ElasticSettings, Load
from bros.router.fleet import Fleet
from bros.router.load_meter import LoadMeter
from bros.router.member import ReplicaState, ReplicaStatus

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


class StartableClient(WatchableClient, Protocol):
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

    def _grow(self, count: int, load: Load) -> None:
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
        """What somebody else has said is to be used does not go."""
        for number in used & self._leaving.keys():
            self._leaving.pop(number).cancel()

    def _shrink(self, count: int, up: list[ReplicaStatus], load: Load) -> None:
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
